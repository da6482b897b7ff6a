"""Leases to step through in tests of the two lease machines."""

from typing import Any

import msgspec
from nacl.signing import SigningKey

from protocol.envelope import seal
from protocol.frames import StatusTold
from protocol.identity import NetworkId, network_id
from protocol.machines import provider_lease, renter_lease
from protocol.machines import provider_lease_types as p
from protocol.machines import renter_lease_types as r
from protocol.machines.lease import LeaseFacts
from protocol.records.money import Voucher
from protocol.records.offer import Terms

START = 1_000_000
NETWORK = network_id("test")
INTERVAL_MS = 1_000
TERMS = Terms(
    voucher_interval_ms=INTERVAL_MS,
    window_intervals=3,
    grace_ms=20_000,
    checkpoint_ms=5_000,
    notice_ms=7_000,
    retention_ms=100_000,
)


class Key:
    """An Ed25519 key that signs."""

    def __init__(self, seed: int) -> None:
        self._key = SigningKey(bytes([seed]) * 32)
        self.public_key = bytes(self._key.verify_key)

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message).signature


VOUCHER_KEY = Key(1)
LEASE = b"l" * 16


def facts(**changes: Any) -> LeaseFacts:
    return msgspec.structs.replace(
        LeaseFacts(
            lease=LEASE,
            network=NETWORK,
            voucher_key=VOUCHER_KEY.public_key,
            price=1000,
            quantity=2,
            max_spend=10**9,
            until=START + 3_600_000,
            terms=TERMS,
        ),
        **changes,
    )


def voucher(
    number: int, amount: int, *, key: Key = VOUCHER_KEY, lease: bytes = LEASE, network: NetworkId = NETWORK
) -> bytes:
    return seal(Voucher(lease=lease, number=number, amount=amount, covers_ms=0), key, network).data


class Provider:
    """A provider's lease and a clock."""

    def __init__(self, **changes: Any) -> None:
        self.now = START
        self.lease = p.ProviderLease(facts=facts(**changes), began_at=START, heard_at=START)
        self.effects: list[p.Effect] = []

    def feed(self, event: p.Event, after_ms: int = 0) -> tuple[p.Effect, ...]:
        self.now += after_ms
        result = provider_lease.step(self.lease, event, self.now)
        self.lease = result.lease
        self.effects += result.effects
        return result.effects

    def wait(self) -> tuple[p.Effect, ...]:
        """Let time pass to the next deadline."""
        deadline = provider_lease.next_deadline(self.lease)
        assert deadline is not None
        self.now = max(self.now, deadline)
        return self.feed(p.Ticked())

    def run(self, time_limit_ms: int = 1_000_000) -> "Provider":
        """Bring it to a running job."""
        self.feed(p.TunnelOpened(1))
        self.feed(p.JobArrived(0, time_limit_ms))
        self.feed(p.JobStarted())
        return self


class Renter:
    """A renter's lease, a clock, and the signing that a keeper does."""

    def __init__(
        self, *, inputs: int = 0, prepay_ms: int = 0, time_limit_ms: int = 1_000_000, **changes: Any
    ) -> None:
        self.now = START
        self.lease = r.RenterLease(
            facts=facts(**changes),
            inputs=inputs,
            prepay_ms=prepay_ms,
            time_limit_ms=time_limit_ms,
            began_at=START,
            lost_at=START,
            idle_at=START,
        )
        self.effects: list[r.Effect] = []

    def feed(self, event: r.Event, after_ms: int = 0) -> tuple[r.Effect, ...]:
        self.now += after_ms
        events, effects = [event], []
        while events:
            result = renter_lease.step(self.lease, events.pop(0), self.now)
            self.lease = result.lease
            for effect in result.effects:
                effects.append(effect)
                if isinstance(effect, r.SignVoucher):
                    data = voucher(effect.number, effect.amount)
                    events.append(r.VoucherSigned(data, effect.number, effect.amount, effect.covers_ms))
        self.effects += effects
        return tuple(effects)

    def told(self, after_ms: int = 0, **fields: Any) -> tuple[r.Effect, ...]:
        return self.feed(r.ToldStatus(StatusTold(**fields)), after_ms)

    def wait(self) -> tuple[r.Effect, ...]:
        deadline = renter_lease.next_deadline(self.lease)
        assert deadline is not None
        self.now = max(self.now, deadline)
        return self.feed(r.Ticked())
