"""Peers of a market test without a daemon: the test writes their records by hand, honest ones and others."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import trio
import trio.testing
from support.market_parts import EPOCH, VirtualClock, until
from support.memory_network import MemoryHub, MemoryNetwork
from support.offers import a_curve, an_offer
from support.signers import NETWORK, SeededSigner, signer

from node.market.auctions import OFFERS_TOPIC
from node.market.context import TRADE_PROTOCOL, random_bytes
from protocol.envelope import Sealed, open_untrusted, seal
from protocol.identity import NodeId, lease_id
from protocol.pricing import clock_price
from protocol.records import (
    Ack,
    Award,
    Bid,
    BidAck,
    ChainEntry,
    ChainHead,
    Countersignature,
    Grant,
    GrantDelivery,
    Offer,
    Resources,
)
from protocol.records.lease import GENESIS, CommittedTerms, grant_commitment
from protocol.units import MINUTE_MS, Millis

if TYPE_CHECKING:
    from support.market_nodes import MarketNode

T = TypeVar("T")


class HandRenter:
    """A renter without a daemon: the test writes its records by hand. It acknowledges what `answers` does not."""

    def __init__(self, hub: MemoryHub, person: int) -> None:
        self.signer: SeededSigner = signer(person)
        self.network: MemoryNetwork = hub.join(self.signer.node)
        self.letters: list[Sealed[Any]] = []
        self.answers: dict[type[Any], Callable[[Sealed[Any]], Any]] = {}
        self.network.on_request(TRADE_PROTOCOL, self._on_letter)

    async def _on_letter(self, _: NodeId, data: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        letter = open_untrusted(data, NETWORK)
        self.letters.append(letter)
        answer = self.answers.get(type(letter.record), lambda it: Ack(of=it.id))(letter)
        return seal(answer, self.signer, NETWORK).data

    def of(self, kind: type[T]) -> list[Sealed[T]]:
        """Return the letters of a kind so far."""
        return [letter for letter in self.letters if isinstance(letter.record, kind)]

    async def ask(self, other: "MarketNode", record: Any, *, sealed_by: SeededSigner | None = None) -> Any:
        """Send one record over the trade protocol, and return the record that answers it."""
        return (await self.send(other, seal(record, sealed_by or self.signer, NETWORK))).record

    async def send(self, other: "MarketNode", sealed: Sealed[Any]) -> Sealed[Any]:
        """As `ask`, for a record that is sealed already."""
        return open_untrusted(await self.network.request(other.id, TRADE_PROTOCOL, sealed.data), NETWORK)

    def bid(
        self, provider: "MarketNode", *, listing: str | None = None, addressee: bytes | None = None, **fields: Any
    ) -> Sealed[Bid]:
        """Sign a bid on a provider's newest offer, at its clock price."""
        desk = provider.desk(listing)
        now = provider.clock.now()
        usual: dict[str, Any] = {
            "offer_id": desk.auction.recent_offers[0],
            "listing": desk.auction.listing.name,
            "provider": addressee or provider.id,
            "nonce": random_bytes(16),
            "price": clock_price(desk.auction.curve, now),
            "quantity": 1,
            "duration_ms": 10 * MINUTE_MS,
            "max_spend": 10**8,
            "job_hash": bytes(32),
            "resources": Resources(cpus_milli=1000, memory_mib=1024, disk_mib=1024),
            "isolation": "bubblewrap",
            "tunnel_key": bytes(32),
            "voucher_key": bytes(32),
            "signed_at": now,
            "expires_at": now + 10_000,
        }
        return seal(Bid(**(usual | fields)), self.signer, NETWORK)

    async def win(self, provider: "MarketNode", **fields: Any) -> Sealed[Award]:
        """Bid, and wait for the award."""
        answer = await self.send(provider, self.bid(provider, **fields))
        assert isinstance(answer.record, BidAck), answer.record
        return await until(
            lambda: next((award for award in self.of(Award) if award.record.bid_id == answer.record.bid_id), None),
            "an award",
        )

    def countersignature(self, award: Sealed[Award], **fields: Any) -> Sealed[Countersignature]:
        """Sign for an award."""
        usual = {"award_id": award.id, "lease": award.record.lease, "signed_at": EPOCH}
        return seal(Countersignature(**(usual | fields)), self.signer, NETWORK)

    async def buy(self, provider: "MarketNode", **fields: Any) -> Sealed[Award]:
        """Bid, win, countersign, and wait for the grant."""
        award = await self.win(provider, **fields)
        answer = await self.send(provider, self.countersignature(award))
        assert isinstance(answer.record, Ack), answer.record
        await until(lambda: award.record.lease in {grant.lease for grant in self.grants()}, "a grant")
        return award

    def grants(self) -> list[Grant]:
        """Return the grants delivered so far."""
        return [open_untrusted(delivery.record.grant, NETWORK).record for delivery in self.of(GrantDelivery)]


class HandProvider:
    """A provider without a daemon: the test writes its records by hand. It acknowledges every letter."""

    def __init__(self, hub: MemoryHub, person: int) -> None:
        self.signer: SeededSigner = signer(person)
        self.network: MemoryNetwork = hub.join(self.signer.node)
        self.letters: list[Sealed[Any]] = []
        self.answers: dict[type[Any], Callable[[Sealed[Any]], Any]] = {}
        """Kind of letter -> what answers it, instead of an acknowledgement."""
        self.network.on_request(TRADE_PROTOCOL, self._on_letter)
        self.clock = VirtualClock()
        self._sequence = 0

    async def _on_letter(self, _: NodeId, data: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        letter = open_untrusted(data, NETWORK)
        self.letters.append(letter)
        answer = self.answers.get(type(letter.record), _usual_answer)(letter)
        return seal(answer, self.signer, NETWORK).data

    def of(self, kind: type[T]) -> list[Sealed[T]]:
        """Return the letters of a kind so far."""
        return [letter for letter in self.letters if isinstance(letter.record, kind)]

    async def publish(self, **fields: Any) -> Sealed[Offer]:
        """Gossip an offer of four free A100s; `fields` change it."""
        now = self.clock.now()
        self._sequence += 1
        usual = {
            "sequence": now + self._sequence,
            "issued_at": now,
            "expires_at": now + 5 * MINUTE_MS,
            "curve": a_curve(opened_at=now - MINUTE_MS),
            "addresses": self.network.addresses,
        }
        offer = seal(an_offer(**(usual | fields)), self.signer, NETWORK)
        await self.network.publish(OFFERS_TOPIC, offer.data)
        return offer

    def award(self, bid: Sealed[Bid], offer: Sealed[Offer], **fields: Any) -> Sealed[Award]:
        """Sign the award that a bid deserves, with `fields` changed."""
        now, wanted = self.clock.now(), bid.record
        usual: dict[str, Any] = {
            "bid_id": bid.id,
            "lease": lease_id(self.signer.node, bid.signer, wanted.nonce),
            "price": wanted.price,
            "quantity": wanted.quantity,
            "devices": tuple(ChainHead(bytes([each]) * 32, 0, GENESIS) for each in range(wanted.quantity)),
            "terms": offer.record.terms,
            "tunnel_key": bytes(32),
            "simulated": offer.record.simulated,
            "holds_until": now + 2000,
            "until": now + wanted.duration_ms + offer.record.terms.notice_ms,
        }
        return seal(Award(**(usual | fields)), self.signer, NETWORK)

    def delivery(
        self, award: Sealed[Award], bid: Sealed[Bid], signed: Sealed[Countersignature], **fields: Any
    ) -> Sealed[GrantDelivery]:
        """Sign the grant of a countersigned award; `fields` change the grant, or the terms it commits to."""
        terms = {
            "salt": bytes(32),
            "renter": bid.signer,
            "price": award.record.price,
            "job_hash": bid.record.job_hash,
        }
        hidden = CommittedTerms(**{name: fields.pop(name, value) for name, value in terms.items()})
        usual: dict[str, Any] = {
            "lease": award.record.lease,
            "entries": tuple(ChainEntry(head.key, head.number, head.head) for head in award.record.devices),
            "epoch": 0,
            "countersignature_id": signed.id,
            "commitment": grant_commitment(hidden),
            "starts_at": self.clock.now(),
            "until": award.record.until,
            "simulated": award.record.simulated,
        }
        signer_of_grant = fields.pop("signed_by", self.signer)
        grant = seal(Grant(**(usual | fields)), signer_of_grant, NETWORK)
        return seal(
            GrantDelivery(grant=grant.data, salt=bytes(32), addresses=("192.0.2.1:4242",)), self.signer, NETWORK
        )

    async def tell(self, renter: "MarketNode", letter: Sealed[Any]) -> Any:
        """Send a record over the trade protocol, and return the record that answers it."""
        reply = await self.network.request(renter.id, TRADE_PROTOCOL, letter.data)
        return open_untrusted(reply, NETWORK).record


def _usual_answer(letter: Sealed[Any]) -> Any:
    if isinstance(letter.record, Bid):
        now = VirtualClock().now()
        return BidAck(bid_id=letter.id, batch=1, received_at=now, closes_at=Millis(now + 300))
    return Ack(of=letter.id)
