"""The auction under any order of bids, lapses, countersignatures, keepers, prices, devices and pauses.

After every step: nothing is sold twice, prices are within what both sides said, chains advance by single entries,
and the state on disk is the state in memory. In the end everybody who was let in has been told exactly one thing.
"""

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.auctions import Table, a_bid, a_listing, an_auction, key, renter
from support.offers import NOW, a_curve

from protocol import codec
from protocol.envelope import content_id_of
from protocol.identity import hash_bytes
from protocol.machines.auction import is_sound, next_time
from protocol.machines.auction_types import (
    WAITING_BIDS_MAX,
    Acknowledge,
    Auction,
    AuctionEvent,
    BidReceived,
    CountersignatureReceived,
    EpochOpened,
    ForgetLease,
    KeeperFailed,
    KeeperReady,
    LeaseEnded,
    LeasePhase,
    ListingChanged,
    OfferRefreshed,
    PauseChanged,
    PublishOffer,
    RefuseCountersignature,
    Reject,
    Repriced,
    Resumed,
    SendAward,
    SendGrant,
    SendRelease,
    StartKeeper,
    TimeReached,
    Unit,
    WithdrawOffer,
    offer_of,
)
from protocol.machines.clearing import lottery_commitment, lottery_rank
from protocol.pricing import clock_price
from protocol.records import Grant, Offer, RejectReason, Release, Transcript
from protocol.records.lease import GENESIS
from protocol.units import MINUTE_MS, SECOND_MS, Millis

DEVICES_MAX = 4
STATE_SIZE_MAX = 2**20
PREFIXES = ["", "", "198.51.100.0/24", "203.0.113.0/24"]


class AuctionMachine(RuleBasedStateMachine):
    """One listing, its market, and what the world has seen of it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table(an_auction(devices=0, recent_offers=()))
        self.told: dict[bytes, list[str]] = {}
        """What every admitted bid was told in the end: "award" or a rejection's reason."""
        self.bids: dict[bytes, BidReceived] = {}
        self.bounds: dict[bytes, tuple[int, int]] = {}
        """Bid id -> (reserve, clock) at its receipt."""
        self.batches: dict[int, dict[bytes, bytes]] = {}
        """Batch -> the hash of each bid id in it, and its renter."""
        self.commitments: list[bytes] = []
        self.revealed: set[bytes] = set()
        self.chains: dict[bytes, tuple[int, bytes]] = {}
        self.awarded: dict[bytes, tuple[bytes, ...]] = {}
        """Leases with an award that has neither lapsed nor ended, and their devices."""
        self.countersigned: set[bytes] = set()
        self.granted: dict[bytes, tuple[bytes, ...]] = {}
        self.serial = 0

    # --- the shell's part -----------------------------------------------------------------------------------

    def apply(self, event: AuctionEvent) -> tuple[Any, ...]:
        before, clock_before = self.table.auction, self.clock()
        effects = self.table.apply(event)
        if self.clock() > clock_before:
            assert isinstance(event, CountersignatureReceived | Repriced)
        for effect in effects:
            self.check(effect, before)
        if PublishOffer() in effects:
            self.publish()
        return effects

    def clock(self) -> int:
        return clock_price(self.table.auction.curve, self.table.now)

    def publish(self) -> None:
        auction = self.table.auction
        offer = offer_of(
            auction,
            sequence=auction.sequence + 1,
            lottery_commitment=lottery_commitment(auction.secret),
            addresses=(),
            now=self.table.now,
            lifetime_ms=5 * MINUTE_MS,
        )
        assert codec.decode_untrusted(codec.encode(offer), Offer) == offer
        self.commitments.append(offer.lottery_commitment)
        self.table.publish(content_id_of(offer))

    def check(self, effect: Any, before: Auction) -> None:
        match effect:
            case Acknowledge(ack):
                assert ack.bid_id not in self.told
                assert self.table.auction.batch is not None
                assert (ack.batch, ack.closes_at) == (
                    self.table.auction.batch.number,
                    self.table.auction.batch.closes_at,
                )
                self.told[ack.bid_id] = []
                bid = self.bids[ack.bid_id]
                self.batches.setdefault(ack.batch, {})[hash_bytes(ack.bid_id)] = bid.renter
            case SendAward():
                self.check_award(effect)
            case Reject(who, rejection):
                assert self.bids[rejection.bid_id].renter == who
                assert rejection.price_now == clock_price(self.table.auction.curve, self.table.now)
                assert rejection.retry_at is None or rejection.retry_at >= self.table.now
                self.check_transcript(rejection.transcript)
                if self.told.get(rejection.bid_id) == ["award"]:
                    assert rejection.reason in (RejectReason.PROVIDER_FAILED, RejectReason.HOLD_LAPSED)
                elif rejection.bid_id in self.told:
                    self.told[rejection.bid_id].append(rejection.reason)
            case StartKeeper(lease):
                assert lease in self.awarded
                self.countersigned.add(lease)
            case SendGrant(who, grant):
                (sold,) = [lease for lease in before.leases if lease.lease == grant.lease]
                assert (sold.phase, sold.renter) == (LeasePhase.GRANTING, who)
                assert grant.lease in self.countersigned
                assert grant.until == sold.until > self.table.now
                self.link(grant, sold.keys)
                taken = {name for keys in self.granted.values() for name in keys}
                assert taken.isdisjoint(sold.keys)
                self.granted[grant.lease] = sold.keys
            case SendRelease(_, release):
                keys = self.granted.pop(release.lease)
                self.link(release, keys)
                del self.awarded[release.lease]
            case ForgetLease(lease):
                assert lease not in self.granted
                del self.awarded[lease]
            case RefuseCountersignature():
                pass
            case PublishOffer() | WithdrawOffer():
                pass
            case _:
                raise AssertionError(effect)

    def check_award(self, effect: SendAward) -> None:
        hold = effect.hold
        received = self.bids[hold.bid_id]
        reserve, clock = self.bounds[hold.bid_id]
        assert reserve <= hold.price <= min(received.bid.price, clock)
        assert hold.price == min(received.bid.price, clock)
        assert (hold.renter, len(hold.keys)) == (received.renter, received.bid.quantity)
        assert hold.until >= self.table.now + received.bid.duration_ms
        assert received.bid.expires_at > self.table.now
        assert self.table.auction.is_selling(self.table.now)
        assert {name for keys in self.awarded.values() for name in keys}.isdisjoint(hold.keys)
        heads = [(head.key, head.number, head.head) for head in effect.devices]
        assert heads == [(name, *self.chains.get(name, (0, GENESIS))) for name in hold.keys]
        assert hold.lease not in self.awarded
        self.awarded[hold.lease] = hold.keys
        self.told[hold.bid_id].append("award")
        self.check_transcript(effect.transcript)

    def check_transcript(self, transcript: Transcript | None) -> None:
        if transcript is None:
            return
        assert lottery_commitment(transcript.secret) in self.commitments
        assert self.table.auction.secret != transcript.secret
        self.revealed.add(transcript.secret)
        people = self.batches[transcript.batch]
        assert set(transcript.bid_hashes) <= set(people)
        ranks = [lottery_rank(transcript.secret, transcript.batch, people[each]) for each in transcript.bid_hashes]
        assert ranks == sorted(ranks)
        assert transcript.served <= len(ranks)

    def link(self, record: Grant | Release, keys: tuple[bytes, ...]) -> None:
        assert tuple(entry.key for entry in record.entries) == keys
        for entry in record.entries:
            assert (entry.number, entry.previous) == self.chains.get(entry.key, (0, GENESIS))
            self.chains[entry.key] = (entry.number + 1, content_id_of(record))
        assert codec.decode_untrusted(codec.encode(record), type(record)) == record
        assert record.epoch == self.table.auction.epoch

    # --- what happens ---------------------------------------------------------------------------------------

    @initialize(devices=st.integers(2, DEVICES_MAX), age=st.sampled_from([0, 20 * MINUTE_MS, 10 * 60 * MINUTE_MS]))
    def open_shop(self, devices: int, age: int) -> None:
        self.table.auction = an_auction(
            devices=0, recent_offers=(), curve=a_curve(opened_at=NOW - age), listing=a_listing()
        )
        self.measure(set(range(devices)), set())

    @rule(
        people=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 3)), min_size=1, max_size=4),
        above=st.integers(-1500, 3000), prefix=st.sampled_from(PREFIXES),
    )  # fmt: skip
    def bid(self, people: list[tuple[int, int]], above: int, prefix: str) -> None:
        for number, quantity in people:
            self.place(number, quantity, above, prefix=prefix if number % 2 else "")

    @rule(
        number=st.integers(1, 7), above=st.integers(-20_000, 20_000),
        lifetime=st.sampled_from([400, 10 * SECOND_MS]),
        signed_ago=st.sampled_from([0, 1500, 11 * SECOND_MS, -4 * SECOND_MS, -6 * SECOND_MS]), known=st.booleans(),
    )  # fmt: skip
    def bid_oddly(self, number: int, above: int, lifetime: int, signed_ago: int, known: bool) -> None:
        self.place(number, 1, above, lifetime=lifetime, signed_ago=signed_ago, known=known)

    def place(
        self, number: int, quantity: int, above: int, *, lifetime: int = 10 * SECOND_MS, prefix: str = "",
        signed_ago: int = 0, known: bool = True,
    ) -> None:  # fmt: skip
        self.serial += 1
        auction, now = self.table.auction, self.table.now
        offer = auction.recent_offers[0] if auction.recent_offers and known else hash_bytes(b"unknown")
        bid = a_bid(
            number,
            at=now,
            nonce=self.serial.to_bytes(16, "big"),
            offer_id=offer,
            quantity=quantity,
            price=max(0, self.clock() + above),
            signed_at=now - signed_ago,
            expires_at=now - signed_ago + lifetime,
        )
        received = BidReceived(hash_bytes(bid.nonce), renter(number), bid, now, 10**12, prefix)
        self.bids[received.bid_id] = received
        self.bounds[received.bid_id] = (auction.curve.reserve, self.clock())
        effects = self.apply(received)
        assert sum(isinstance(effect, Acknowledge | Reject) for effect in effects) == 1

    @rule(ms=st.sampled_from([1, 100, 300, MINUTE_MS]))
    def wait(self, ms: int) -> None:
        self.table.wait(ms)

    @rule(seed=st.binary(min_size=1, max_size=4))
    def tick(self, seed: bytes) -> None:
        self.serial += 1
        at = next_time(self.table.auction)
        if at is not None:
            self.table.now = Millis(max(self.table.now, at))
        self.apply(TimeReached(hash_bytes(seed + self.serial.to_bytes(8, "big"))))

    @rule()
    def tick_early(self) -> None:
        self.serial += 1
        self.apply(TimeReached(hash_bytes(self.serial.to_bytes(9, "big"))))

    @precondition(lambda self: self.table.auction.batch is not None)
    @rule()
    def close_batch(self) -> None:
        self.tick(b"close")

    @precondition(lambda self: self.table.auction.batch is not None)
    @rule()
    def sell_all(self) -> None:
        self.tick(b"sell")
        self.countersign_all_in_time()

    @precondition(lambda self: self.table.auction.holds)
    @rule()
    def countersign_all_in_time(self) -> None:  # unless the clock has gone on
        for hold in self.table.auction.holds:
            self.apply(CountersignatureReceived(hold.lease, hold.renter, hash_bytes(hold.lease)))

    @precondition(lambda self: self.table.auction.holds)
    @rule(data=st.data(), by_another=st.integers(0, 9).map(lambda drawn: drawn == 0))
    def countersign(self, data: st.DataObject, by_another: bool) -> None:
        hold = data.draw(st.sampled_from(self.table.auction.holds))
        who = renter(99) if by_another else hold.renter
        effects = self.apply(CountersignatureReceived(hold.lease, who, hash_bytes(hold.lease)))
        if by_another or self.table.now >= hold.lapses_at or self.table.now < self.table.auction.sells_from:
            assert effects == (RefuseCountersignature(hold.lease, hash_bytes(hold.lease)),)
        else:
            assert effects[0] == StartKeeper(hold.lease)
            # It comes twice: the network does that.
            assert self.apply(CountersignatureReceived(hold.lease, who, hash_bytes(hold.lease))) == ()

    @precondition(lambda self: self.table.auction.leases)
    @rule()
    def keepers_are_ready(self) -> None:
        for sold in self.table.auction.leases:
            self.apply(KeeperReady(sold.lease, hash_bytes(b"commitment" + sold.lease)))

    @precondition(lambda self: self.table.auction.leases)
    @rule(data=st.data())
    def keeper_fails(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.table.auction.leases)).lease
        self.apply(KeeperFailed(lease, "it did not start"))

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def lease_ends(self, data: st.DataObject) -> None:
        self.apply(LeaseEnded(data.draw(st.sampled_from(sorted(self.granted))), "completed"))

    @rule(start=st.integers(0, 600_000), reserve=st.integers(0, 600_000))
    def reprice(self, start: int, reserve: int) -> None:
        self.apply(Repriced(max(start, reserve), min(start, reserve)))

    @rule(away=st.sets(st.integers(0, DEVICES_MAX), max_size=2), off=st.sets(st.integers(0, 1), max_size=1))
    def lose_devices(self, away: set[int], off: set[int]) -> None:
        self.measure(set(range(DEVICES_MAX)) - away, off)

    @rule()
    def all_devices_come_and_go(self) -> None:
        self.measure(set(), set())
        self.measure(set(range(DEVICES_MAX)), set())

    def measure(self, present: set[int], off: set[int]) -> None:
        units = {key(number): Unit(key(number), 0, GENESIS, True) for number in sorted(present)}
        sellable = frozenset(key(number) for number in present - off)
        self.apply(ListingChanged(self.table.auction.listing, units, sellable))
        assert {unit.key for unit in self.table.auction.units} >= set(units)

    @rule(away_ms=st.sampled_from([0, 0, 300]))
    def pause(self, away_ms: int) -> None:
        self.apply(PauseChanged(paused=True))
        self.place(1, 1, 0)
        self.table.wait(away_ms)
        self.apply(TimeReached(hash_bytes(b"paused" + self.serial.to_bytes(8, "big"))))
        self.apply(PauseChanged(paused=False))

    @rule(away_ms=st.sampled_from([100, 3 * SECOND_MS]))
    def restart(self, away_ms: int) -> None:
        self.table.wait(away_ms)
        blamed = self.table.auction.lapses
        self.apply(Resumed())
        assert self.table.auction.lapses == blamed
        at = next_time(self.table.auction)
        assert at is None or at > self.table.now

    @rule()
    def refresh(self) -> None:
        self.apply(OfferRefreshed())

    @rule(ahead=st.sampled_from([0, 100, 1000]))
    def open_epoch(self, ahead: int) -> None:
        self.apply(EpochOpened(self.table.auction.epoch + 1, Millis(self.table.now + ahead)))

    # --- what always holds ----------------------------------------------------------------------------------

    @invariant()
    def the_state_is_sound_and_survives_the_disk(self) -> None:
        auction = self.table.auction
        assert is_sound(auction) is None
        stored = codec.decode_untrusted(codec.encode(auction), Auction, STATE_SIZE_MAX)
        assert stored == auction
        self.table.auction = stored

    @invariant()
    def the_world_and_the_state_agree(self) -> None:
        auction = self.table.auction
        assert {hold.lease for hold in auction.holds} | {sold.lease for sold in auction.leases} == set(
            self.awarded
        )
        assert {sold.lease for sold in auction.leases if sold.phase is LeasePhase.LEASED} == set(self.granted)
        for unit in (*auction.units, *auction.retired):
            assert (unit.number, unit.head) == self.chains.get(unit.key, (0, GENESIS))
        prefixes = [hold.address_prefix for hold in auction.holds if hold.address_prefix]
        assert len(prefixes) == len(set(prefixes))
        waiting = auction.waiting()
        assert len(waiting) <= WAITING_BIDS_MAX
        assert {bid.bid_id for bid in waiting} == {name for name, told in self.told.items() if not told}
        assert not auction.runners_up or auction.holds
        assert (next_time(auction) is None) == (not auction.holds and auction.batch is None)
        assert auction.secret not in self.revealed
        assert auction.curve.reserve <= self.clock() <= auction.curve.start

    def teardown(self) -> None:
        for _ in range(100):
            if next_time(self.table.auction) is None:
                break
            self.tick(b"end")
        assert next_time(self.table.auction) is None
        for bid_id, told in self.told.items():
            assert len(told) == 1, (bid_id.hex(), told)


AuctionMachine.TestCase.settings = settings(
    max_examples=30, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
test_an_auction_in_any_order = AuctionMachine.TestCase
