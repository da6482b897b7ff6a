"""Peers that lie to a live provider and a live renter: refused, held against them, and nothing changes.

All tests of this file share one provider and one renter.
"""

import secrets
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import msgspec
import pytest
import trio
from support.daemons import Daemons, TestDaemon
from support.daemons import daemons as run_daemons
from support.hostile import Hostile, books_of, node_of, now_ms, open_hostile, until

from node.errors import PeerRefused, SwarmError
from node.rpc.methods import jobs, lend, peers
from protocol.envelope import Sealed, seal
from protocol.identity import network_id
from protocol.records import (
    Ack,
    Bid,
    BidRejected,
    Countersignature,
    Offer,
    Receipt,
    ReceiptAcceptance,
    Refusal,
    RejectReason,
    Release,
    Settlement,
    SettlementAcceptance,
)
from protocol.records.lease import ChainEntry
from protocol.units import MINUTE_MS

TWO_A100 = '[[simulated_device]]\nmodel = "NVIDIA A100-SXM4-40GB"\nmemory = "40G"\ncount = 2\n'
STEADY = 'start_price = 1.00\nreserve_price = 1.00\n[lend.auction]\nopening = "100ms"\ntick = "100ms"\nlift = 0\n'


class House(NamedTuple):
    """Who lives here."""

    daemons: Daemons
    provider: TestDaemon
    renter: TestDaemon
    silent: list[socket.socket]
    """Connections to the provider over which nobody says anything, from the file's first moment on."""


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with run_daemons() as running:
        provider = running.make("provider", lend=STEADY, devices=TWO_A100).start(wait=False)
        renter = running.make("renter").start(wait=False)
        for daemon in (provider, renter):
            daemon.wait_for(daemon.answers)
        renter.connect(provider)
        renter.wait_offers()
        port = int(provider.address.split("/")[4])
        with ExitStack() as stack:
            silent = [
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30)) for _ in range(3)
            ]
            yield House(running, provider, renter, silent)


async def is_cut_for(peer: Hostile, target: TestDaemon, data: bytes, *, at_most: int) -> bool:
    """Send the same bytes until the daemon cuts the peer; return whether it did so in time."""
    for _ in range(at_most):
        with suppress(SwarmError):
            await peer.send(target, data)
        if not peer.is_connected():
            return True
    return False


async def test_bytes_that_are_no_record_of_the_sender_end_with_its_ban(house: House) -> None:
    before = books_of(house.provider)
    async with open_hostile(house.provider) as peer, open_hostile(house.provider) as victim:
        offer = (await peer.offers_of(house.provider))[0]
        good = peer.bid(offer)
        other_network = seal(good.record, peer.signer, network_id("other"))
        lies = {
            "empty": b"",
            "no CBOR": b"\xff" * 40,
            "truncated": good.data[:-1],
            "trailing byte": good.data + b"\0",
            "a flipped bit of the signature": good.data[:-1] + bytes([good.data[-1] ^ 1]),
            "larger than a record": good.data + bytes(70_000),
            "as large as a message may be": bytes(2**20),
            "another network's": other_network.data,
            "somebody else's": victim.bid(offer).data,
        }
        for name, lie in lies.items():
            with pytest.raises(PeerRefused):
                await peer.send(house.provider, lie)
                pytest.fail(f"{name} was answered")
        assert await is_cut_for(peer, house.provider, b"no record", at_most=12)
        with pytest.raises(SwarmError):
            await peer.network.connect(house.provider.address)
        known: peers.PeerDetail = house.provider.call(peers.SHOW, peers.PeerParams(peer=peer.peer_id))
        assert known.misdeeds[0] == "cut, and banned for a while"
        assert "trade/1 that could not be answered" in known.misdeeds[1]
        assert not known.entry.connected
        # Whose record was shown around is not to blame.
        assert isinstance(await victim.tell(house.provider, victim.bid(offer, quantity=64)), BidRejected)
    assert books_of(house.provider) == before


def _changed(offer: Any, price: int) -> dict[RejectReason, list[dict[str, Any]]]:
    now = now_ms()
    return {
        RejectReason.STALE_OFFER: [{"offer_id": secrets.token_bytes(32)}, {"listing": "nothing"}],
        RejectReason.WRONG_PROVIDER: [{"provider": secrets.token_bytes(32)}],
        RejectReason.CLOCK_SKEW: [{"signed_at": now + 60_000, "expires_at": now + 70_000}],
        RejectReason.EXPIRED: [{"signed_at": now - 20_000, "expires_at": now - 10_000}],
        RejectReason.SIMULATED: [{"allow_simulated": False}],
        RejectReason.PRICE_TOO_LOW: [{"price": price - price // 10}],
        RejectReason.TERMS: [
            {"quantity": 3},
            {"duration_ms": 1},
            {"duration_ms": offer.record.terms.lease_max_ms + 1},
            {"isolation": "kata"},
            {"network_mode": "internet"},
            {"max_spend": 0},
            {"resources": {"cpus_milli": 2**31, "memory_mib": 1, "disk_mib": 1}},
        ],
    }


async def test_bids_that_will_not_do_are_refused_with_their_reason(house: House) -> None:
    before = books_of(house.provider)
    async with open_hostile(house.provider) as peer:
        offer = (await peer.offers_of(house.provider))[0]
        good = peer.bid(offer).record
        for reason, changes in _changed(offer, good.price).items():
            for change in changes:
                bid = msgspec.convert(msgspec.to_builtins(good, builtin_types=(bytes,)) | change, type(good))
                answer = await peer.tell(house.provider, bid)
                assert isinstance(answer, BidRejected), change
                assert answer.reason is reason, (change, answer)
                assert reason is RejectReason.STALE_OFFER or answer.price_now == good.price
    assert books_of(house.provider) == before


def leases_of(provider: TestDaemon) -> set[str]:
    """Return the leases on a provider's devices, after checking that none has two of its devices."""
    found = [device.lease.lease for device in provider.devices() if device.lease is not None]
    assert len(found) == len(set(found))
    return set(found)


async def give_back(provider: TestDaemon) -> None:
    """End all leases of a provider now, and lend its devices again."""
    await trio.to_thread.run_sync(lambda: provider.call(lend.RECLAIM, lend.ReclaimParams(now=True)))
    provider.call(lend.ON, lend.DevicesParams())
    await trio.to_thread.run_sync(
        lambda: provider.wait_for(lambda: all(device.use.value == "offered" for device in provider.devices()))
    )


def reason_of(answer: Any) -> str:
    """Return why something was refused."""
    assert isinstance(answer, Refusal | BidRejected), answer
    return str(answer.reason)


async def test_one_gpu_is_leased_once_whatever_is_said_again(house: House) -> None:
    provider = house.provider
    async with open_hostile(provider) as peer, open_hostile(provider) as other:
        bid, award = await peer.win(provider)
        signed = peer.countersignature(award)
        stolen = Countersignature(award_id=award.id, lease=award.record.lease, signed_at=now_ms())
        assert reason_of(await other.tell(provider, stolen)) == "unknown_award"
        assert isinstance(await peer.tell(provider, signed), Ack)
        grant = await peer.wait_granted(award.record.lease)
        acknowledged = await peer.send(provider, bid.data)

        async def say_it_all_again() -> None:
            assert await peer.send(provider, bid.data) == acknowledged
            assert isinstance(await peer.tell(provider, signed), Ack)
            assert isinstance(await peer.tell(provider, peer.countersignature(award)), Ack)
            assert reason_of(await other.tell(provider, stolen)) == "unknown_award"
            unknown = peer.countersignature(award, award_id=secrets.token_bytes(32))
            assert reason_of(await peer.tell(provider, unknown)) == "unknown_award"
            offer = (await peer.offers_of(provider))[0]
            assert offer.record.free == 1
            # The lease's id is made of the nonce: with the same one, a second bid would be the first lease.
            double = peer.bid(offer, nonce=bid.record.nonce, max_spend=10**8)
            assert reason_of(await peer.tell(provider, double)) == "duplicate"
            assert leases_of(provider) == {award.record.lease.hex()}
            assert {found.id for found in peer.grants()} == {grant.id}

        await say_it_all_again()
        provider.kill()
        await trio.to_thread.run_sync(provider.start)
        for one in (peer, other):
            await one.connect(provider)
        await say_it_all_again()
        await give_back(provider)
        assert await peer.send(provider, bid.data) == acknowledged
        assert reason_of(await peer.tell(provider, signed)) == "hold_lapsed"
        assert not leases_of(provider)


async def leased(renter: Hostile, provider: TestDaemon) -> bytes:
    """Buy a lease of one device, and return its id."""
    _, award = await renter.win(provider)
    assert isinstance(await renter.tell(provider, renter.countersignature(award)), Ack)
    await renter.wait_granted(award.record.lease)
    return award.record.lease


async def test_no_answer_settles_the_lease_of_somebody_else(house: House) -> None:
    provider = house.provider
    async with open_hostile(provider) as peer, open_hostile(provider) as other:
        theirs = await leased(other, provider)
        for named in (theirs, secrets.token_bytes(16)):
            mine = await leased(peer, provider)
            peer.answers[Receipt] = lambda letter, named=named: ReceiptAcceptance(
                receipt_id=letter.id, lease=named, accepted_at=now_ms()
            )
            device = next(one for one in provider.devices() if one.lease and one.lease.lease == mine.hex())
            ended = await trio.to_thread.run_sync(
                lambda uuid=device.uuid: provider.call(lend.RECLAIM, lend.ReclaimParams(devices=(uuid,), now=True))
            )
            assert ended.leases == (mine.hex(),)
            receipt = await peer.wait_for(Receipt, lambda receipt, mine=mine: receipt.lease == mine)
            await trio.to_thread.run_sync(
                lambda: provider.wait_for(lambda: leases_of(provider) == {theirs.hex()}, "the lease to end")
            )
            found = next(one for one in provider.receipts() if one.receipt == receipt.id.hex())
            assert not found.accepted
            provider.call(lend.ON, lend.DevicesParams())
        release = Release(
            lease=theirs,
            entries=(ChainEntry(bytes(32), 0, bytes(32)),),
            epoch=0,
            released_at=now_ms(),
            reason="because I say so",
        )
        assert reason_of(await peer.tell(provider, release)) == "unknown_lease"
        # Its own renter cannot release it either: only the provider's word counts.
        assert reason_of(await other.tell(provider, release)) == "unknown_lease"
        assert leases_of(provider) == {theirs.hex()}
        await give_back(provider)


class Deal(NamedTuple):
    """A job whose bid has just reached a provider that lies."""

    job: str
    bid: Sealed[Bid]


async def bid_of_a_job(peer: Hostile, renter: TestDaemon, **wanted: Any) -> Deal:
    """Submit a job that only `peer` will do for, and return it with its bid."""
    known = {bid.id for bid in peer.of(Bid)}
    job = renter.run("/bin/true", provider=peer.peer_id, max_price=10**6, **wanted)
    bid = await until(lambda: next((bid for bid in peer.of(Bid) if bid.id not in known), None), "the bid")
    return Deal(job, bid)


def cancel(renter: TestDaemon, job: str) -> None:
    """Cancel a job that has no lease."""
    renter.call(jobs.CANCEL, jobs.JobParams(job=job))
    assert renter.job(job).outcome == "cancelled"


async def sell(peer: Hostile, renter: TestDaemon, **fields: Any) -> Sealed[Offer]:
    """Show a renter an offer."""
    offer = peer.offer(**fields)
    peer.statements = [offer]
    await peer.connect(renter)
    await until(lambda: offer.id.hex() in {known.offer for known in renter.offers()}, "the offer")
    return offer


async def test_an_award_that_was_not_bid_for_binds_nobody(house: House) -> None:
    renter = house.renter
    before = books_of(renter)
    async with open_hostile() as peer, open_hostile(renter) as other:
        offer = await sell(peer, renter, quantity=2, free=2)
        terms = msgspec.structs.replace(offer.record.terms, notice_ms=1)
        lies: dict[str, list[dict[str, Any]]] = {
            "price": [{"price": offer.record.curve.start + 1}],
            "terms": [
                {"terms": terms},
                {"lease": secrets.token_bytes(16)},
                {"quantity": 1},
                {"until": now_ms() + MINUTE_MS},
                {"simulated": False},
            ],
        }
        for reason, changes in lies.items():
            for change in changes:
                job, bid = await bid_of_a_job(peer, renter, quantity=2)
                assert reason_of(await peer.tell(renter, peer.award(bid, offer, **change))) == reason, change
                assert renter.job(job).state is jobs.JobState.BUYING
                # The bid is closed by that: its award is not wanted any more, however right.
                assert reason_of(await peer.tell(renter, peer.award(bid, offer))) == "not_wanted"
                cancel(renter, job)
        job, bid = await bid_of_a_job(peer, renter, quantity=2)
        unasked = peer.award(bid, offer, bid_id=secrets.token_bytes(32))
        assert reason_of(await peer.tell(renter, unasked)) == "not_wanted"
        assert reason_of(await other.tell(renter, other.award(bid, offer))) == "not_wanted"
        spoofed = BidRejected(bid_id=bid.id, reason=RejectReason.TERMS, price_now=1)
        assert isinstance(await other.tell(renter, spoofed), Ack)
        assert not peer.of(Countersignature)
        # None of that has ended the bid: the right award is countersigned, once.
        award = peer.award(bid, offer)
        for _ in range(2):
            assert isinstance(await peer.tell(renter, award), Ack)
        signed = await peer.wait_for(Countersignature)
        assert signed.record.award_id == award.id
        assert reason_of(await peer.tell(renter, peer.award(bid, offer))) == "not_wanted"
        assert [one.record.award_id for one in peer.of(Countersignature)] == [award.id]
        cancel(renter, job)
    assert books_of(renter) == before


async def test_simulated_devices_are_not_awarded_as_real_ones(house: House) -> None:
    async with open_hostile() as peer:
        offer = await sell(peer, house.renter, simulated=False)
        job, bid = await bid_of_a_job(peer, house.renter, allow_simulated=False)
        answer = await peer.tell(house.renter, peer.award(bid, offer, simulated=True))
        assert reason_of(answer) == "terms"
        assert "simulated" in answer.detail
        assert "simulated" in house.renter.job(job).detail
        cancel(house.renter, job)


async def test_grants_and_receipts_that_lie_are_refused(house: House) -> None:
    renter = house.renter
    async with open_hostile() as peer, open_hostile(renter) as other:
        offer = await sell(peer, renter)
        job, bid = await bid_of_a_job(peer, renter)
        award = peer.award(bid, offer)
        assert isinstance(await peer.tell(renter, award), Ack)
        signed = await peer.wait_for(Countersignature)
        for change in (
            {"commitment": bytes(32)},
            {"countersignature_id": bytes(32)},
            {"entries": (ChainEntry(b"\1" * 32, 0, bytes(32)),)},
            {"until": now_ms()},
            {"simulated": False},
        ):
            assert (
                reason_of(await peer.tell(renter, peer.delivery(award, bid, signed, **change))) == "not_as_agreed"
            )
        grant = peer.delivery(award, bid, signed)
        assert reason_of(await other.tell(renter, other.seal(grant.record))) == "unknown_lease"
        assert (
            reason_of(await peer.tell(renter, peer.delivery(award, bid, signed, lease=bytes(16))))
            == "unknown_lease"
        )
        assert renter.job(job).state is jobs.JobState.AWARDED
        for _ in range(2):
            assert isinstance(await peer.tell(renter, grant), Ack)
        await trio.to_thread.run_sync(
            lambda: renter.wait_for(lambda: renter.job(job).state is jobs.JobState.SIGNED, "the lease to begin")
        )
        receipt = peer.receipt(award, bid, signed)
        # Nobody listens where the grant sends the keeper: a receipt tells it that the lease is over.
        with trio.fail_after(30):
            while reason_of(await peer.tell(renter, peer.receipt(award, bid, signed, amount=1))) == "not_yet":
                await trio.sleep(0.1)
        for change in (
            {"amount": 1, "voucher_amount": 1},
            {"price": award.record.price + 1},
            {"quantity": 2},
            {"job_hash": bytes(32)},
            {"countersignature_id": bytes(32)},
            {"renter": other.node},
            {"provider": other.node},
            {"simulated": False},
        ):
            assert reason_of(await peer.tell(renter, peer.receipt(award, bid, signed, **change))) == "disputed", (
                change
            )
        assert reason_of(await other.tell(renter, other.receipt(award, bid, signed))) == "unknown_lease"
        assert (
            reason_of(await peer.tell(renter, peer.receipt(award, bid, signed, lease=bytes(16))))
            == "unknown_lease"
        )
        for _ in range(2):
            accepted = await peer.tell(renter, receipt)
            assert isinstance(accepted, ReceiptAcceptance)
            assert accepted.receipt_id == receipt.id
        second = peer.receipt(award, bid, signed, outcome="completed")
        assert reason_of(await peer.tell(renter, second)) == "disputed"
        mine = [one for one in renter.receipts() if one.peer == peer.peer_id]
        assert [(one.receipt, one.amount, one.accepted) for one in mine] == [(receipt.id.hex(), 0, True)]
        assert (await trio.to_thread.run_sync(renter.wait_final, job)).outcome == "cancelled"


async def test_gossip_that_lies_stays_out_of_the_book(house: House) -> None:
    renter = house.renter
    async with open_hostile() as liar, open_hostile() as breaker:
        now = now_ms()
        right = liar.offer(listing="right")
        old = liar.offer(listing="right", sequence=now - 1)
        late = liar.offer(listing="late", issued_at=now - 20 * MINUTE_MS, expires_at=now - 16 * MINUTE_MS)
        early = liar.offer(listing="early", issued_at=now + 16 * MINUTE_MS, expires_at=now + 17 * MINUTE_MS)
        broken = {
            "bad signature": msgspec.structs.replace(right, data=right.data[:-1] + bytes([right.data[-1] ^ 1])),
            "another network's": seal(breaker.offer().record, breaker.signer, network_id("other")),
            "no statement": breaker.bid(right),
            "truncated": msgspec.structs.replace(right, data=right.data[:-1]),
            "trailing byte": msgspec.structs.replace(right, data=right.data + bytes(1)),
            "nothing": msgspec.structs.replace(right, data=b""),
        }
        breaker.statements = [*broken.values(), breaker.offer(listing="shown")]
        liar.statements = [late, early, right, old]
        for peer in (liar, breaker):
            await peer.connect(renter)

        def known(peer: Hostile) -> set[tuple[str, str]]:
            return {(one.listing, one.offer) for one in renter.offers() if one.provider == peer.peer_id}

        # Both by what newcomers are told, and by gossip: what is right is taken, whatever comes along with it.
        await until(lambda: known(breaker) == {("shown", breaker.statements[-1].id.hex())}, "the page to be read")
        await until(lambda: known(liar) == {("right", right.id.hex())}, "the page to be read")
        news = liar.offer(listing="right", sequence=now + 1)
        for statement in (late, early, old, right, news, right, old):
            await liar.gossip(statement)
        await until(lambda: known(liar) == {("right", news.id.hex())}, "the newest offer")
        for statement in broken.values():
            await breaker.gossip(statement)
        await until(lambda: not breaker.is_connected(), "the ban")
        assert liar.is_connected()
        assert known(liar) == {("right", news.id.hex())}
        assert known(breaker) == {("shown", breaker.statements[-1].id.hex())}


async def test_payments_that_nobody_made_stay_out_of_the_books(house: House) -> None:
    provider = house.provider
    before = books_of(provider)
    async with open_hostile(provider) as peer:

        def payment(payer: bytes, payee: bytes) -> Settlement:
            return Settlement(
                payer=payer,
                payee=payee,
                amount=10**12,
                balance_after=0,
                reference="a cheque",
                nonce=secrets.token_bytes(16),
                settled_at=now_ms(),
            )

        renter, us = node_of(house.renter), node_of(provider)
        for payer, payee in ((renter, us), (us, renter), (peer.node, renter)):
            assert reason_of(await peer.tell(provider, payment(payer, payee))) == "not_ours"
        for _ in range(20):
            assert reason_of(await peer.tell(provider, payment(peer.node, us))) == "unknown_peer"
        acceptance = SettlementAcceptance(settlement_id=secrets.token_bytes(32), accepted_at=now_ms())
        assert reason_of(await peer.tell(provider, acceptance)) == "unknown_settlement"
    assert books_of(provider) == before


async def test_a_flood_of_requests_keeps_no_honest_peer_from_its_job(house: House) -> None:
    provider, renter = house.provider, house.renter
    async with open_hostile(provider, renter) as peer:
        offer = (await peer.offers_of(provider))[0]
        too_many = 0

        async def flood(protocol: str, data: bytes) -> None:
            nonlocal too_many
            for target in (provider, renter):
                try:
                    await peer.send(target, data, protocol)
                except SwarmError:
                    too_many += 1

        job = renter.run("/bin/echo", "served", provider=provider.node)
        with trio.move_on_after(60):
            while not renter.job(job).state.is_final:
                async with trio.open_nursery() as nursery:
                    for _ in range(12):
                        nursery.start_soon(flood, "trade/1", peer.bid(offer, quantity=64).data)
                        nursery.start_soon(flood, "book/1", b"")
        entry = await trio.to_thread.run_sync(renter.wait_final, job)
        assert (entry.outcome, entry.exit_status) == ("completed", 0)
        assert too_many > 10


def test_who_says_nothing_is_cut_off(house: House) -> None:
    for connection in house.silent:
        while connection.recv(4096):
            pass  # what it says to whom it does not know; recv raises when it says nothing for too long
    house.renter.wait_offers()
