"""A usual offer, requirement of nothing, and their variations."""

from typing import Any

from support.signers import NETWORK, signer

from protocol.envelope import Sealed, seal
from protocol.records import Curve, DeviceSpec, HostSpec, Offer, Terms, Withdrawal
from protocol.units import MINUTE_MS, Millis

NOW = Millis(1_790_000_000_000)


def a_curve(start: int = 438_888, reserve: int = 105_555, **fields: Any) -> Curve:
    """Return a curve that opened a minute before `NOW`."""
    return Curve(**({"start": start, "reserve": reserve, "opened_at": NOW - MINUTE_MS} | fields))


def an_offer(**fields: Any) -> Offer:
    """Return an offer of four free A100, valid at `NOW`, with `fields` changed."""
    usual: dict[str, Any] = {
        "listing": "a100",
        "sequence": 1,
        "device": DeviceSpec("nvidia", "NVIDIA A100-SXM4-40GB", 40_960, 80, "550.54", 12_040),
        "quantity": 4,
        "free": 4,
        "host": HostSpec(cpus_milli=8000, memory_mib=65_536, disk_mib=200_000),
        "region": "eu-west",
        "curve": a_curve(),
        "terms": Terms(isolation=("bubblewrap", "gvisor"), network_modes=("none", "internet")),
        "lottery_commitment": bytes(32),
        "issued_at": NOW - MINUTE_MS,
        "expires_at": NOW + 5 * MINUTE_MS,
    }
    return Offer(**(usual | fields))


def sealed_offer(who: int = 1, **fields: Any) -> Sealed[Offer]:
    """Return `an_offer`, signed by person `who`."""
    return seal(an_offer(**fields), signer(who), NETWORK)


def sealed_withdrawal(who: int = 1, **fields: Any) -> Sealed[Withdrawal]:
    """Return a withdrawal of `an_offer`'s listing, valid at `NOW`."""
    usual: dict[str, Any] = {
        "listing": "a100",
        "sequence": 2,
        "issued_at": NOW - MINUTE_MS,
        "expires_at": NOW + 5 * MINUTE_MS,
    }
    return seal(Withdrawal(**(usual | fields)), signer(who), NETWORK)
