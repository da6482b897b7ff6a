"""A database restored from an old copy: peers remember what it has forgotten, and nothing is sold twice."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
from support.market_nodes import MarketNode, Town, a_device, open_town, until
from support.signers import NETWORK
from trio.abc import Clock

from node.market.context import TRADE_PROTOCOL, random_bytes
from protocol.envelope import open_untrusted, seal
from protocol.machines.lease import COMPLETED, LeasePhase
from protocol.machines.purchase import Phase
from protocol.records import BidRejected, ChainEntry, CounterpartyGrants, Grant, OwnRecordsQuery, RejectReason
from protocol.records.fields import DEVICES_MAX
from protocol.records.peer import GRANTS_MAX
from protocol.units import DAY_MS, HOUR_MS


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[Town]:
    async with open_town(tmp_path) as town:
        yield town


def backup(node: MarketNode) -> Path:
    """Copy a node's database, as an administrator does."""
    copy = node.folder / f"backup-{random_bytes(4).hex()}.db"
    node.store._database.execute(f"VACUUM INTO '{copy}'")
    return copy


async def restore(town: Town, node: MarketNode, copy: Path | None) -> None:
    """Start a node again with an old copy of its database, or with none."""
    friends = sorted(node.network.connected)
    node.stop()
    for path in node.folder.glob("node.db*"):
        path.unlink()
    if copy is not None:
        shutil.copy(copy, node.folder / "node.db")
    await trio.sleep(0.1)
    node.load()
    await town.start(node)
    for friend in friends:
        town.hub.connect(node.id, friend)
    await trio.sleep(1)


async def sell_one(town: Town) -> tuple[MarketNode, MarketNode, Path]:
    """Return a provider that has sold to a renter, the renter, and a copy from before the sale."""
    provider, renter = await town.provider(), await town.renter()
    town.hub.connect_all()
    copy = backup(provider)
    job = await renter.submit(duration_ms=HOUR_MS)
    await until(lambda: job.purchase.phase is Phase.GRANTED, "the lease")
    return provider, renter, copy


@pytest.mark.parametrize("has_copy", [True, False])
async def test_a_restored_database_sells_nothing_while_forgotten_leases_may_be_out(
    town: Town, autojump_clock: Clock, has_copy: bool
) -> None:
    provider, renter, copy = await sell_one(town)
    sold_until = renter.lease_rows()[0].until
    await restore(town, provider, copy if has_copy else None)
    auction = provider.desk().auction
    assert auction.epoch == 1
    assert auction.sells_from >= sold_until
    assert provider.market.notes
    stranger = town.by_hand()
    await until(lambda: provider.desk().auction.recent_offers)
    answer = (await stranger.send(provider, stranger.bid(provider))).record
    assert isinstance(answer, BidRejected)
    assert (answer.reason, answer.retry_at) == (RejectReason.PAUSED, auction.sells_from)
    await until(
        lambda: renter.market.book.book.offers_of(provider.id)[0].record.epoch == 1, "the new epoch's offer"
    )
    assert renter.market.book.book.offers_of(provider.id)[0].record.free == 0


async def test_a_listing_that_is_opened_later_waits_as_well(town: Town, autojump_clock: Clock) -> None:
    provider, _, copy = await sell_one(town)
    await restore(town, provider, copy)
    first = provider.desk().auction
    provider.source.devices.append(a_device(1, model="NVIDIA H100 PCIe", memory_mib=81_920))
    await until(lambda: len(provider.market.seller.auctions) == 2)
    await town.restart(provider)
    provider.source.devices.append(a_device(2, model="NVIDIA L4", memory_mib=24_576))
    await until(lambda: len(provider.market.seller.auctions) == 3)
    for desk in provider.market.seller.auctions.values():
        assert desk.auction.sells_from >= first.sells_from
        assert desk.auction.epoch >= 1


async def test_it_sells_again_in_its_new_epoch_when_the_time_has_passed(town: Town, autojump_clock: Clock) -> None:
    provider, renter, copy = await sell_one(town)
    await restore(town, provider, copy)
    sells_from = provider.desk().auction.sells_from
    provider.clock.offset_ms = renter.clock.offset_ms = sells_from - provider.clock.now()
    stranger = town.by_hand()
    await stranger.buy(provider)
    assert stranger.grants()[0].epoch == provider.desk().auction.epoch == 1
    assert stranger.grants()[0].starts_at >= sells_from


async def test_a_usual_restart_is_no_alarm(town: Town, autojump_clock: Clock) -> None:
    provider, renter, _ = await sell_one(town)
    for _ in range(2):
        await town.restart(provider)
        await trio.sleep(1)
    assert provider.desk().auction.epoch == 0
    assert not provider.market.notes
    await town.restart(renter)
    await trio.sleep(1)
    assert provider.desk().auction.epoch == 0


async def test_a_forgotten_lease_that_is_over_costs_a_new_epoch_but_no_wait(
    town: Town, autojump_clock: Clock
) -> None:
    provider, renter, copy = await sell_one(town)
    provider.clock.offset_ms = renter.clock.offset_ms = 3 * DAY_MS
    await restore(town, provider, copy)
    assert provider.desk().auction.epoch == 1  # its number in the chain is taken
    assert provider.desk().auction.sells_from < provider.clock.now()
    assert not provider.market.notes


async def test_a_forgotten_release_costs_a_new_epoch(town: Town, autojump_clock: Clock) -> None:
    provider, renter, _ = await sell_one(town)
    copy = backup(provider)
    lease = provider.lease_rows()[0].lease
    await provider.leases.say(lease, phase=LeasePhase.COLLECTED, outcome=COMPLETED)
    await until(lambda: renter.read(lambda tx: tx.records.count("kind = 'release'")), "the release")
    provider.clock.offset_ms = renter.clock.offset_ms = 3 * DAY_MS  # offers are long forgotten by everybody
    await restore(town, provider, copy)
    assert provider.desk().auction.epoch == 1


async def test_an_alarm_is_remembered_and_not_weakened_by_a_restart(town: Town, autojump_clock: Clock) -> None:
    provider, _, copy = await sell_one(town)
    await restore(town, provider, copy)
    first = provider.desk().auction
    await town.restart(provider)
    await trio.sleep(1)
    again = provider.desk().auction
    assert (again.epoch, again.sells_from) == (first.epoch, first.sells_from)
    assert not provider.market.notes  # it is no news


async def test_a_peer_cannot_raise_an_alarm_with_what_is_not_ours(town: Town, autojump_clock: Clock) -> None:
    provider = await town.provider()
    liar = town.seller_by_hand(41)
    entry = ChainEntry(bytes(32), 0, bytes(32))
    forged = Grant(
        lease=bytes(16), entries=(entry,), epoch=9, countersignature_id=bytes(32), commitment=bytes(32),
        starts_at=provider.clock.now(), until=provider.clock.now() + HOUR_MS, simulated=False,
    )  # fmt: skip
    grants = (seal(forged, liar.signer, NETWORK).data, b"\xff" * 100)
    liar.answers[OwnRecordsQuery] = lambda query: CounterpartyGrants(query_id=query.id, grants=grants)
    liar.network.connected.clear()
    provider.network.connected.clear()
    town.hub.connect(liar.signer.node, provider.id)
    await until(lambda: liar.of(OwnRecordsQuery), "the question")
    await trio.sleep(1)
    assert provider.desk().auction.epoch == 0


async def test_a_full_disk_when_the_alarm_comes_ends_nothing(town: Town, autojump_clock: Clock) -> None:
    provider, renter, copy = await sell_one(town)
    town.hub.partition({renter.id})
    await restore(town, provider, copy)
    provider.store.is_full = True
    town.hub.heal()
    provider.network.connected.clear()
    renter.network.connected.clear()
    town.hub.connect(provider.id, renter.id)
    await trio.sleep(2)
    provider.store.is_full = False
    provider.network.connected.clear()
    renter.network.connected.clear()
    town.hub.connect(provider.id, renter.id)
    await until(lambda: provider.desk().auction.epoch == 1, "the alarm")


async def test_grants_of_many_devices_are_remembered_too_and_the_answer_fits_its_record(
    town: Town, autojump_clock: Clock
) -> None:
    renter, provider = await town.renter(), town.seller_by_hand()
    entries = tuple(ChainEntry(bytes([number]) * 32, 2**61, b"\xff" * 32) for number in range(DEVICES_MAX))
    for number in range(GRANTS_MAX + 1):
        grant = Grant(
            lease=number.to_bytes(16, "big"), entries=entries, epoch=2**61, countersignature_id=bytes(32),
            commitment=bytes(32), starts_at=0, until=2_000_000_000_000 + number, simulated=False,
        )  # fmt: skip
        sealed = seal(grant, provider.signer, NETWORK)
        row = renter.context.record_row(sealed, lease=grant.lease)
        renter.read(lambda tx, row=row: tx.records.put(row))
        await trio.sleep(0.01)
    query = seal(OwnRecordsQuery(nonce=random_bytes(16)), provider.signer, NETWORK)
    reply = await provider.network.request(renter.id, TRADE_PROTOCOL, query.data)
    answer = open_untrusted(reply, NETWORK).record
    assert isinstance(answer, CounterpartyGrants)
    remembered = [open_untrusted(data, NETWORK).record for data in answer.grants]
    assert remembered
    assert remembered[0].until == 2_000_000_000_000 + GRANTS_MAX
    assert len(remembered[0].entries) == DEVICES_MAX


async def test_nobody_is_told_of_what_is_not_its_own(town: Town, autojump_clock: Clock) -> None:
    _, renter, _ = await sell_one(town)
    stranger = town.seller_by_hand(42)
    query = seal(OwnRecordsQuery(nonce=random_bytes(16)), stranger.signer, NETWORK)
    reply = await stranger.network.request(renter.id, TRADE_PROTOCOL, query.data)
    answer = open_untrusted(reply, NETWORK).record
    assert isinstance(answer, CounterpartyGrants)
    assert (answer.grants, answer.offers) == ((), ())
