"""Receipts: what is billed, what a renter objects to, and what both books say afterwards."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from support.market_nodes import EPOCH, NETWORK, MarketNode, Town, open_town, until
from support.signers import signer
from trio.abc import Clock

from node.lease.files import LeaseStatus, OutputStatus, Role
from node.market.leases import LeaseState
from node.market.settling import (
    balance_with,
    entry_of,
    objection_to,
    receipt_of,
    status_on_record,
    unpaid_entry_of,
)
from node.store import LeaseRow
from protocol import codec
from protocol.envelope import open_as_untrusted, seal
from protocol.machines.lease import COMPLETED, FailReason, LeasePhase
from protocol.records import Receipt, ReceiptAcceptance, Refusal

PROVIDER, RENTER = signer(1).node, signer(2).node
PRICE = 1_000_000
MINUTE = 60_000


def a_row(**fields: Any) -> LeaseRow:
    usual: dict[str, Any] = {
        "lease": bytes(16), "role": "renter", "state": LeaseState.OVER, "peer": PROVIDER, "listing": "a100",
        "job_id": "job", "bid_id": bytes(32), "award_id": bytes(32), "countersignature_id": b"\1" * 32,
        "devices": bytes(32), "job_hash": b"\2" * 32, "price": PRICE, "quantity": 2, "max_spend": 10**9,
        "until": EPOCH, "simulated": False, "salt": b"", "uid": 0, "gid": 0, "created_at": EPOCH,
    }  # fmt: skip
    return LeaseRow(**(usual | fields))


def a_status(**fields: Any) -> LeaseStatus:
    usual: dict[str, Any] = {
        "lease": bytes(16), "role": Role.RENTER, "generation": 1, "sequence": 9, "phase": LeasePhase.COLLECTED,
        "outcome": COMPLETED, "exit_status": 0, "started_at": EPOCH, "ended_at": EPOCH + MINUTE,
        "metered_ms": MINUTE, "amount": 120 * PRICE, "voucher_amount": 120 * PRICE, "voucher_number": 6,
    }  # fmt: skip
    return LeaseStatus(**(usual | fields))


def a_receipt(**fields: Any) -> Receipt:
    usual: dict[str, Any] = {
        "lease": bytes(16), "provider": PROVIDER, "renter": RENTER, "countersignature_id": b"\1" * 32,
        "job_hash": b"\2" * 32, "outcome": COMPLETED, "exit_status": 0, "started_at": EPOCH,
        "ended_at": EPOCH + MINUTE, "metered_ms": MINUTE, "price": PRICE, "quantity": 2, "amount": 120 * PRICE,
        "voucher_amount": 120 * PRICE, "voucher_number": 6, "simulated": False,
    }  # fmt: skip
    return Receipt(**(usual | fields))


SIGNED = "it claims {}, and vouchers for $0.120000 were signed"


@pytest.mark.parametrize(
    ("changes", "objection"),
    [
        ({}, ""),
        ({"amount": 0}, ""),
        ({"metered_ms": MINUTE - 10_000, "amount": 100 * PRICE}, ""),
        ({"metered_ms": MINUTE + 2000}, ""),
        ({"metered_ms": MINUTE + 2001}, "it claims 62001 ms of job time, and 60000 ms were metered here"),
        ({"provider": RENTER}, "it names other parties"),
        ({"renter": PROVIDER}, "it names other parties"),
        ({"price": PRICE + 1}, "price, number of devices or job differ from the award"),
        ({"quantity": 3}, "price, number of devices or job differ from the award"),
        ({"job_hash": bytes(32)}, "price, number of devices or job differ from the award"),
        ({"simulated": True}, "it calls real devices simulated"),
        ({"countersignature_id": bytes(32)}, "it names another countersignature"),
        ({"amount": 120 * PRICE + 1, "metered_ms": MINUTE + 1000}, SIGNED.format("$0.120000")),
        ({"voucher_amount": 121 * PRICE}, SIGNED.format("$0.120000")),
        ({"amount": 120 * PRICE, "metered_ms": MINUTE - 1}, "it claims more than its own metered time costs"),
    ],
)
def test_a_renter_objects_to_what_its_own_account_does_not_bear_out(
    changes: dict[str, Any], objection: str
) -> None:
    assert objection_to(a_receipt(**changes), a_row(), a_status(), RENTER) == objection


def test_a_receipt_that_hides_a_simulation_is_objected_to() -> None:
    found = objection_to(a_receipt(), a_row(simulated=True), a_status(), RENTER)
    assert found == "it hides that the devices are simulated"


def test_a_refund_that_is_kept_back_is_objected_to() -> None:
    status = a_status(outcome=FailReason.INTERRUPTED.value, amount=60 * PRICE)
    found = objection_to(a_receipt(), a_row(), status, RENTER)
    assert found == "it claims $0.120000, and $0.060000 are owed by our account"


def test_without_an_account_of_its_own_a_renter_accepts_only_what_costs_nothing() -> None:
    free = a_receipt(amount=0, voucher_amount=0, metered_ms=0)
    assert objection_to(free, a_row(), None, RENTER) == ""
    assert objection_to(a_receipt(), a_row(), None, RENTER) != ""


def test_one_percent_of_a_long_job_is_no_dispute() -> None:
    hour = 60 * MINUTE
    status = a_status(metered_ms=hour, voucher_amount=10**18, amount=10**18)
    assert objection_to(a_receipt(metered_ms=hour + hour // 100), a_row(), status, RENTER) == ""
    assert objection_to(a_receipt(metered_ms=hour + hour // 100 + 1), a_row(), status, RENTER) != ""


# --- the provider's side ------------------------------------------------------------------------------------


class Surroundings:
    """As much of a context as a receipt takes."""

    node = PROVIDER

    class clock:
        @staticmethod
        def now() -> int:
            return EPOCH + 5


def receipt(status: LeaseStatus | None, **row: Any) -> Receipt:
    return receipt_of(Surroundings(), a_row(role="provider", peer=RENTER, **row), status)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "amount", "unpaid"),
    [
        ({}, 120 * PRICE, 0),
        ({"voucher_amount": 60 * PRICE, "amount": 60 * PRICE}, 60 * PRICE, 60 * PRICE),
        ({"voucher_amount": 0, "amount": 0}, 0, 120 * PRICE),
        ({"amount": 60 * PRICE}, 60 * PRICE, 0),
        ({"voucher_amount": 500 * PRICE, "amount": 500 * PRICE}, 120 * PRICE, 0),
    ],
)
def test_a_provider_bills_what_was_used_and_promised(status: dict[str, Any], amount: int, unpaid: int) -> None:
    made = receipt(a_status(role=Role.PROVIDER, **status))
    assert made.amount == amount
    sealed = seal(made, signer(1), NETWORK)
    entry = entry_of(sealed, is_provider=True, confirmed=False)
    assert (entry.peer, entry.amount, entry.at) == (RENTER, amount, EPOCH + MINUTE)
    assert entry_of(sealed, is_provider=False, confirmed=True).amount == -amount
    assert unpaid_entry_of(sealed).amount == unpaid
    assert unpaid_entry_of(sealed).id != sealed.id


def test_outputs_that_were_not_made_are_not_listed() -> None:
    outputs = (OutputStatus("a", b"\3" * 32), OutputStatus("b", None))
    assert receipt(a_status(outputs=outputs)).outputs == (b"\3" * 32,)


def test_a_lost_lease_costs_nothing() -> None:
    made = receipt(None)
    assert (made.amount, made.outcome, made.exit_status, made.ended_at) == (0, "keeper_died", -1, EPOCH + 5)


def test_the_last_word_of_a_keeper_is_read_from_its_row() -> None:
    status = a_status()
    assert status_on_record(a_row(status=codec.encode(status))) == status
    assert status_on_record(a_row()) is None
    assert status_on_record(a_row(status=b"\xff")) is None


# --- over the wire ------------------------------------------------------------------------------------------


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[Town]:
    async with open_town(tmp_path) as town:
        yield town


async def leased(town: Town) -> tuple[MarketNode, MarketNode, bytes]:
    provider, renter = await town.provider(), await town.renter()
    town.hub.connect_all()
    job = await renter.submit()
    await until(lambda: job.lease is not None, "the lease")
    return provider, renter, provider.lease_rows()[0].lease


def used(node: MarketNode, **fields: Any) -> dict[str, Any]:
    price = node.lease_rows()[0].price
    usual = {
        "phase": LeasePhase.COLLECTED, "outcome": COMPLETED, "exit_status": 0, "metered_ms": MINUTE,
        "amount": 60 * price, "voucher_amount": 60 * price, "voucher_number": 6,
    }  # fmt: skip
    return usual | fields


async def test_a_receipt_is_sent_again_until_the_renters_keeper_has_its_say(
    town: Town, autojump_clock: Clock
) -> None:
    provider, renter, lease = await leased(town)
    await provider.leases.say(lease, **used(provider))
    await until(lambda: provider.lease_rows()[0].state == LeaseState.OVER)
    await trio.sleep(30)
    assert renter.lease_rows()[0].state == LeaseState.GRANTED
    await renter.leases.say(lease, **used(renter))
    await until(lambda: provider.lease_rows()[0].state == LeaseState.SETTLED)
    assert provider.read(lambda tx: tx.records.count("kind = 'receipt'")) == 1
    assert provider.leases.settled
    await until(lambda: renter.leases.settled == [lease])


async def test_a_disputed_receipt_stays_unconfirmed_and_counts_against_the_renter(
    town: Town, autojump_clock: Clock
) -> None:
    provider, renter, lease = await leased(town)
    await renter.leases.say(lease, **used(renter, metered_ms=10_000, voucher_amount=0, amount=0))
    await provider.leases.say(lease, **used(provider))
    await until(lambda: provider.read(lambda tx: tx.outbox.count("kind = 'receipt'")) == 0)
    await until(lambda: provider.lease_rows()[0].receipt_id is not None)
    await trio.sleep(10)
    assert provider.lease_rows()[0].state == LeaseState.OVER
    (entry,) = provider.read(lambda tx: list(tx.entries.all()))
    assert not entry.confirmed
    assert provider.read(lambda tx: balance_with(tx, renter.id)) == entry.amount > 0
    assert renter.read(lambda tx: tx.entries.count()) == 0


async def test_a_receipt_that_comes_after_the_lease_was_cleared_away_is_judged_by_what_was_heard(
    town: Town, autojump_clock: Clock
) -> None:
    provider, renter, lease = await leased(town)
    await renter.leases.say(lease, **used(renter))
    await town.restart(renter)  # whose lease directory is gone
    assert not renter.leases.live
    await provider.leases.say(lease, **used(provider))
    await until(lambda: provider.lease_rows()[0].state == LeaseState.SETTLED)
    assert renter.read(lambda tx: balance_with(tx, provider.id)) == -provider.read(
        lambda tx: balance_with(tx, renter.id)
    )


async def test_a_receipt_is_accepted_once_and_a_second_one_is_not(town: Town, autojump_clock: Clock) -> None:
    provider, renter, lease = await leased(town)
    for node in (renter, provider):
        await node.leases.say(lease, **used(node))
    await until(lambda: provider.lease_rows()[0].state == LeaseState.SETTLED)
    row = provider.read(lambda tx: next(tx.records.where("kind = 'receipt'")))
    again = await renter.market.renter.on_receipt(sealed_receipt(row.data))
    assert isinstance(again, ReceiptAcceptance)
    second = msgspec.structs.replace(sealed_receipt(row.data).record, ended_at=1)
    refusal = await renter.market.renter.on_receipt(provider.context.seal(second))
    assert isinstance(refusal, Refusal)
    assert refusal.detail == "there was another receipt of this lease"
    assert renter.read(lambda tx: tx.entries.count()) == 1


async def test_a_receipt_of_a_lease_that_is_not_ours_is_refused(town: Town, autojump_clock: Clock) -> None:
    _, renter, lease = await leased(town)
    thief = town.seller_by_hand(41)
    answer = await thief.tell(renter, seal(a_receipt(lease=lease), thief.signer, NETWORK))
    assert isinstance(answer, Refusal)
    assert answer.reason == "unknown_lease"


def sealed_receipt(data: bytes) -> Any:
    return open_as_untrusted(data, Receipt, NETWORK)
