"""Providers and renters of a simulated market: shells as thin as can be around `protocol.machines`.

They persist by encoding, answer a repeated message as they did before, and send until they are answered.
"""

from collections.abc import Callable
from typing import Any

from support.market_world import Sale, Weather, World
from support.signers import NETWORK, SeededSigner, signer

from protocol import codec
from protocol.book import OrderBook
from protocol.envelope import Sealed, seal
from protocol.identity import NodeId, hash_bytes, lease_id
from protocol.machines import auction as auctions
from protocol.machines import purchase as purchases
from protocol.machines.auction_types import (
    Acknowledge,
    Auction,
    AuctionEvent,
    BidReceived,
    CountersignatureReceived,
    KeeperFailed,
    KeeperReady,
    LeaseEnded,
    Listing,
    ListingChanged,
    OfferRefreshed,
    OfferSigned,
    PublishOffer,
    RefuseCountersignature,
    Reject,
    SendAward,
    SendGrant,
    SendRelease,
    StartKeeper,
    TimeReached,
    Unit,
    offer_of,
)
from protocol.machines.clearing import lottery_commitment
from protocol.machines.purchase import OpenBid, Phase, Purchase
from protocol.matching import Candidate, Requirement, match
from protocol.records import (
    Ack,
    Award,
    Bid,
    BidAck,
    BidRejected,
    Countersignature,
    Curve,
    DeviceSpec,
    Grant,
    HostSpec,
    Offer,
    Refusal,
    RejectReason,
    Release,
    Resources,
    Terms,
)
from protocol.records.lease import GENESIS, chain_key
from protocol.units import MINUTE_MS, SECOND_MS, Price, cost

STATE_SIZE_MAX = 2**20
OFFER_LIFETIME_MS = 5 * MINUTE_MS


class Provider:
    """A machine that lends."""

    def __init__(self, world: World, person: int, devices: int, reserve: int) -> None:
        self.world = world
        self.signer: SeededSigner = signer(person)
        self.id = NodeId(self.signer.public_key)
        self.is_up = True
        self.answers: dict[bytes, Any] = {}
        self.bids: dict[bytes, Bid] = {}
        self.awards: dict[bytes, bytes] = {}
        """Lease -> award id."""
        world.nodes[self.id] = self
        keys = [chain_key(self.id, f"GPU-{number}") for number in range(devices)]
        listing = Listing(
            name="a100",
            device=DeviceSpec("nvidia", "NVIDIA A100-SXM4-40GB", 40_960, 80),
            host=HostSpec(cpus_milli=8000, memory_mib=65_536, disk_mib=200_000),
            terms=Terms(lease_min_ms=SECOND_MS, notice_ms=0),
        )
        curve = Curve(start=4 * reserve, reserve=reserve, opened_at=world.now)
        self.disk = codec.encode(
            Auction(provider=self.id, listing=listing, curve=curve, units=(), secret=self.draw(32))
        )
        self.apply(ListingChanged(listing, {name: Unit(name, 0, GENESIS, True) for name in keys}, frozenset(keys)))
        self.refresh()

    def draw(self, size: int) -> bytes:
        return self.world.random.randbytes(size)

    def seal(self, record: Any) -> Sealed[Any]:
        return seal(record, self.signer, NETWORK)

    @property
    def auction(self) -> Auction:
        return codec.decode_untrusted(self.disk, Auction, STATE_SIZE_MAX)

    def crash(self, down_ms: int) -> None:
        self.world.note("crash", self.id.hex()[:8], down_ms)
        self.is_up = False
        self.world.after(down_ms, self.restart)

    def restart(self) -> None:
        self.is_up = True
        for sold in self.auction.leases:
            if sold.phase is auctions.LeasePhase.GRANTING:
                self.start_keeper(sold.lease)
        self.wake()

    def refresh(self) -> None:
        if self.is_up:
            self.apply(OfferRefreshed())
        self.world.after(2 * MINUTE_MS, self.refresh)

    def wake(self) -> None:
        at = auctions.next_time(self.auction)
        if at is not None:
            self.world.after(at - self.world.now, self.tick)

    def tick(self) -> None:
        if self.is_up:
            at = auctions.next_time(self.auction)
            if at is not None and at <= self.world.now:
                self.apply(TimeReached(self.draw(32)))

    def apply(self, event: AuctionEvent) -> Any:
        """Step, persist, carry out; return the answer to what caused it."""
        world = self.world
        auction, effects = auctions.step(self.auction, event, world.now)
        world.note("auction", self.id.hex()[:8], type(event).__name__, *(type(each).__name__ for each in effects))
        answer: Any = None
        gossip: list[Sealed[Offer]] = []
        if PublishOffer() in effects:
            offer = self.seal(
                offer_of(
                    auction,
                    sequence=max(auction.sequence + 1, world.now),
                    lottery_commitment=lottery_commitment(auction.secret),
                    addresses=(),
                    now=world.now,
                    lifetime_ms=OFFER_LIFETIME_MS,
                )
            )
            auction, _ = auctions.step(auction, OfferSigned(offer.id, offer.record.sequence), world.now)
            gossip.append(offer)
        broken = auctions.is_sound(auction)
        assert broken is None, broken
        self.disk = codec.encode(auction)
        for effect in effects:
            answer = self.carry_out(effect, auction) or answer
        for offer in gossip:
            for node in world.nodes.values():
                if isinstance(node, Renter):
                    world.carry(self.id, node.id, lambda renter, offer=offer: renter.hear_offer(offer))
        self.wake()
        return answer

    def carry_out(self, effect: Any, auction: Auction) -> Any:
        world = self.world
        match effect:
            case Acknowledge(ack):
                return ack
            case Reject(renter, rejection):
                if rejection.bid_id not in self.answers:
                    return rejection
                world.post(self, renter, self.seal(rejection), 10_000)
            case RefuseCountersignature(_, countersignature_id):
                return Refusal(of=countersignature_id, reason="hold_lapsed")
            case SendAward(hold, devices, transcript):
                award = self.seal(
                    Award(
                        bid_id=hold.bid_id, lease=hold.lease, price=hold.price, quantity=len(hold.keys),
                        devices=devices, terms=auction.listing.terms, tunnel_key=bytes(32), simulated=False,
                        holds_until=hold.lapses_at, until=hold.until, transcript=transcript,
                    )
                )  # fmt: skip
                self.awards[hold.lease] = award.id
                world.post(self, hold.renter, award, hold.lapses_at - world.now)
            case StartKeeper(lease):
                self.start_keeper(lease)
            case SendGrant(renter, grant):
                sold = next(each for each in auction.leases if each.lease == grant.lease)
                cap = self.bids[sold.bid_id].max_spend
                world.granted(grant.lease, Sale(self.id, renter, sold.keys, sold.price, cap))
                world.post(self, renter, self.seal(grant), MINUTE_MS)
                self.end_later(grant)
            case SendRelease(renter, release):
                world.post(self, renter, self.seal(release), 10 * MINUTE_MS)
        return None

    def start_keeper(self, lease: bytes) -> None:
        fails = self.world.random.random() < self.world.weather.keeper_failure
        event = KeeperFailed(lease, "it did not start") if fails else KeeperReady(lease, bytes(32))
        self.world.after(self.world.random.randint(50, 3000), lambda: self.is_up and self.apply(event))

    def end_later(self, grant: Grant) -> None:
        longest_ms = grant.until - self.world.now
        metered_ms = self.world.random.randint(SECOND_MS, max(SECOND_MS, longest_ms))

        def end() -> None:
            if not self.is_up:
                self.world.after(SECOND_MS, end)
                return
            self.world.released(grant.lease, metered_ms)
            self.apply(LeaseEnded(grant.lease, "completed"))

        self.world.after(metered_ms, end)

    def answer(self, letter: Sealed[Any]) -> Any:
        if letter.id in self.answers:
            return self.answers[letter.id]
        match letter.record:
            case Bid() as bid:
                self.bids[letter.id] = bid
                event = BidReceived(letter.id, letter.signer, bid, self.world.now, 10**15)
                answer = self.apply(event)
            case Countersignature(award_id=award_id, lease=lease):
                if self.awards.get(lease) != award_id:
                    answer = Refusal(of=letter.id, reason="unknown_award")
                else:
                    event = CountersignatureReceived(lease, letter.signer, letter.id)
                    answer = self.apply(event) or Ack(of=letter.id)
            case _:
                raise AssertionError(letter.record)
        self.answers[letter.id] = answer
        return answer


class Renter:
    """A machine that needs one lease after another."""

    def __init__(self, world: World, person: int, jobs: int, max_price: int, quantity: int) -> None:
        self.world = world
        self.signer: SeededSigner = signer(person)
        self.id = NodeId(self.signer.public_key)
        self.is_up = True
        self.book = OrderBook(hash_bytes(self.id))
        self.jobs_left = jobs
        self.max_price = max_price
        self.requirement = Requirement(quantity=quantity, model="A100", max_price=max_price, duration_ms=MINUTE_MS)
        self.max_spend = cost(Price(max_price), quantity, MINUTE_MS)
        self.leases: list[bytes] = []
        """Granted, in order."""
        self.releases: set[bytes] = set()
        self.bids: dict[bytes, Sealed[Bid]] = {}
        self.disk = codec.encode(Purchase(max_price=max_price))
        world.nodes[self.id] = self
        world.after(world.random.randint(0, 10_000), self.seek)

    @property
    def purchase(self) -> Purchase:
        return codec.decode_untrusted(self.disk, Purchase)

    def crash(self, down_ms: int) -> None:
        self.world.note("crash", self.id.hex()[:8], down_ms)
        self.is_up = False
        self.book = OrderBook(hash_bytes(self.id))
        self.world.after(down_ms, self.restart)

    def restart(self) -> None:
        self.is_up = True
        self.seek()
        self.wake()

    def hear_offer(self, offer: Sealed[Offer]) -> None:
        self.book.expire(self.world.now)
        self.book.insert(offer, self.world.now)
        self.seek()

    def seek(self) -> None:
        if not self.is_up or self.purchase.phase is not Phase.SEEKING or not self.jobs_left:
            return
        matches = match(self.requirement, self.book.live(self.world.now), self.world.now)
        found = {each.offer.id: each for each in matches.candidates}
        candidates = tuple(
            purchases.Candidate(
                offer_id=each.offer.id, provider=each.offer.signer, listing=each.offer.record.listing,
                price=each.price, affordable_at=each.affordable_at,
            )
            for each in matches.candidates
        )  # fmt: skip
        self.apply(purchases.CandidatesRanked(candidates), found)

    def wake(self) -> None:
        deadline = self.purchase.deadline
        if deadline is not None:
            self.world.after(deadline - self.world.now, self.tick)

    def tick(self) -> None:
        if self.is_up:
            self.apply(purchases.TimePassed())

    def apply(self, event: purchases.PurchaseEvent, found: dict[bytes, Candidate] | None = None) -> Any:
        world = self.world
        before = self.purchase
        purchase, effects = purchases.step(before, event, world.now)
        if purchase == before and not effects:
            return ()
        world.note("purchase", self.id.hex()[:8], type(event).__name__, purchase.phase)
        letters: list[tuple[bytes, Sealed[Any], int]] = []
        is_seek_due = False
        for effect in effects:
            match effect:
                case purchases.PlaceBid(candidate):
                    bid, opened = self.make_bid((found or {})[candidate.offer_id])
                    purchase, _ = purchases.step(purchase, purchases.BidSigned(opened), world.now)
                    letters.append((opened.provider, bid, 10_000))
                case purchases.Countersign(award_id, opened):
                    signed = Countersignature(award_id=award_id, lease=opened.lease, signed_at=world.now)
                    letters.append((opened.provider, seal(signed, self.signer, NETWORK), 3000))
                case purchases.StartLease(opened):
                    self.leases.append(opened.lease)
                    self.jobs_left -= 1
                    purchase = Purchase(max_price=self.max_price)  # the next job
                    is_seek_due = True
                case purchases.Seek():
                    is_seek_due = True
        self.disk = codec.encode(purchase)
        for provider, letter, lifetime_ms in letters:
            world.post(self, provider, letter, lifetime_ms, self.hears_about(letter))
        if is_seek_due:
            self.seek()
        self.wake()
        return effects

    def make_bid(self, found: Candidate) -> tuple[Sealed[Bid], OpenBid]:
        now, offer = self.world.now, found.offer
        nonce = self.world.random.randbytes(16)
        cap = min(self.max_spend, cost(found.price, self.requirement.quantity, MINUTE_MS))
        bid = seal(
            Bid(
                offer_id=offer.id, listing=offer.record.listing, provider=offer.signer, nonce=nonce,
                price=found.price, quantity=self.requirement.quantity, duration_ms=MINUTE_MS, max_spend=cap,
                job_hash=bytes(32), resources=Resources(cpus_milli=1, memory_mib=1, disk_mib=1),
                isolation=found.isolation, tunnel_key=bytes(32), voucher_key=bytes(32), signed_at=now,
                expires_at=now + 10_000,
            ),
            self.signer,
            NETWORK,
        )  # fmt: skip
        self.bids[bid.id] = bid
        lease = lease_id(offer.signer, self.id, nonce)
        opened = OpenBid(
            bid_id=bid.id, offer_id=offer.id, lease=lease, provider=offer.signer, listing="a100", price=found.price
        )
        return bid, opened

    def hears_about(self, letter: Sealed[Any]) -> Callable[[Any], None]:
        def hear(answer: Any) -> None:
            match letter.record, answer:
                case Bid(), None:
                    self.apply(purchases.BidFailed(letter.id, None, "no answer", None))
                case Bid(), BidAck(received_at=received_at, closes_at=closes_at):
                    self.apply(purchases.BidAcknowledged(letter.id, closes_at - received_at))
                case Bid(), BidRejected():
                    self.rejected(answer)
                case Countersignature(lease=lease), Refusal(reason=reason):
                    self.apply(purchases.CountersignatureRefused(lease, reason))

        return hear

    def rejected(self, rejection: BidRejected) -> None:
        retry_in_ms = None if rejection.retry_at is None else rejection.retry_at - self.world.now
        reason = RejectReason(rejection.reason)
        self.apply(purchases.BidFailed(rejection.bid_id, reason, rejection.detail, retry_in_ms))

    def answer(self, letter: Sealed[Any]) -> Any:
        match letter.record:
            case Award() as award:
                effects = self.apply(purchases.AwardReceived(letter.id, award.bid_id, award.price, ""))
                refused = next((each for each in effects if isinstance(each, purchases.RefuseAward)), None)
                return Refusal(of=letter.id, reason=refused.reason) if refused else Ack(of=letter.id)
            case Grant(lease=lease):
                self.apply(purchases.GrantReceived(lease))
            case Release(lease=lease):
                self.releases.add(lease)
            case BidRejected() as rejection:
                self.rejected(rejection)
            case _:
                raise AssertionError(letter.record)
        return Ack(of=letter.id)


def open_world(
    seed: int, weather: Weather, *, providers: int = 3, devices: int = 2, renters: int = 6, jobs: int = 3
) -> World:
    """Return a world in which everybody has just begun."""
    world = World(seed, weather)
    for number in range(renters):
        Renter(world, 100 + number, jobs, max_price=1000 + 100 * number, quantity=1 + number % 2)
    for number in range(providers):
        Provider(world, 1 + number, devices, reserve=300 + 50 * number)
    world.after(MINUTE_MS, world.storms)
    return world
