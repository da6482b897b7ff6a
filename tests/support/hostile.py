"""A node of the network whose records the test writes: it says the real hello, and then whatever it likes.

It answers what daemons ask of it as an honest node would, unless the test says otherwise, and keeps every letter.
"""

import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import trio
from support.daemons import TestDaemon
from support.offers import an_offer
from support.signers import SeededSigner

from node.market.auctions import OFFERS_TOPIC
from node.market.bookkeeping import BOOK_PROTOCOL, BookPage
from node.market.context import TRADE_PROTOCOL
from node.rpc.methods import money
from node.swarm import open_swarm
from node.swarm.network import SwarmNetwork
from protocol import codec
from protocol.envelope import Sealed, open_untrusted, seal
from protocol.identity import NetworkId, NodeId, lease_id, network_id, node_from_peer_id, peer_id
from protocol.pricing import clock_price
from protocol.records import (
    Ack,
    Award,
    Bid,
    BidAck,
    ChainHead,
    CounterpartyGrants,
    Countersignature,
    Curve,
    DeviceSpec,
    Grant,
    GrantDelivery,
    Offer,
    OwnRecordsQuery,
    Receipt,
    Resources,
)
from protocol.records.lease import GENESIS, ChainEntry, CommittedTerms, grant_commitment
from protocol.units import MINUTE_MS, Millis

T = TypeVar("T")

DEMO = network_id("demo")
WAIT_S_MAX = 30.0
POLL_S = 0.01


def now_ms() -> Millis:
    """Return this machine's wall clock."""
    return Millis(time.time_ns() // 1_000_000)


class Hostile:
    """A peer without a daemon. Made by `open_hostile`."""

    def __init__(self, seed: bytes, network: SwarmNetwork, network_id: NetworkId) -> None:
        self.signer = SeededSigner(seed)
        self.network = network
        self.network_id = network_id
        self.letters: list[Sealed[Any]] = []
        self.answers: dict[type[Any], Callable[[Sealed[Any]], Any]] = {}
        """Kind of letter -> what answers it, instead of an acknowledgement."""
        self.statements: list[Sealed[Any]] = []
        """What it tells whoever asks for its book."""
        network.on_request(TRADE_PROTOCOL, self._on_letter)
        network.on_request(BOOK_PROTOCOL, self._on_page_request)

    @property
    def node(self) -> NodeId:
        """Who it is."""
        return self.signer.node

    @property
    def peer_id(self) -> str:
        """Who it is, as people see it."""
        return peer_id(self.node)

    async def _on_letter(self, _: NodeId, data: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        letter = open_untrusted(data, self.network_id)
        answer = self.answers.get(type(letter.record), _usual_answer)(letter)
        self.letters.append(letter)
        return self.seal(answer).data

    async def _on_page_request(self, _: NodeId, __: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        return codec.encode(BookPage(tuple(statement.data for statement in self.statements)))

    # --- talking --------------------------------------------------------------------------------------------

    def seal(self, record: T) -> Sealed[T]:
        """Sign a record as this node."""
        return seal(record, self.signer, self.network_id)

    def of(self, kind: type[T]) -> list[Sealed[T]]:
        """Return the letters of a kind so far."""
        return [letter for letter in self.letters if isinstance(letter.record, kind)]

    async def wait_for(self, kind: type[T], holds: Callable[[T], bool] = lambda _: True) -> Sealed[T]:
        """Wait for the first letter of a kind (for which `holds`), and return it."""
        return await until(lambda: next((one for one in self.of(kind) if holds(one.record)), None), kind.__name__)

    async def send(self, target: TestDaemon, data: bytes, protocol: str = TRADE_PROTOCOL) -> bytes:
        """Send a request of these bytes; return the answer's. Raises SwarmError."""
        return await self.network.request(node_of(target), protocol, data, timeout_ms=20_000)

    async def tell(self, target: TestDaemon, record: Any) -> Any:
        """Send a record, signed here unless it is sealed, over the trade protocol; return its answer."""
        sealed = record if isinstance(record, Sealed) else self.seal(record)
        return open_untrusted(await self.send(target, sealed.data), self.network_id).record

    async def connect(self, target: TestDaemon) -> None:
        """Connect to a daemon."""
        await self.network.connect(target.address)

    def is_connected(self) -> bool:
        """Return whether anybody is still connected with it."""
        return any(peer.connected for peer in self.network.peers())

    async def gossip(self, sealed: Sealed[Any]) -> None:
        """Gossip a statement."""
        await self.network.publish(OFFERS_TOPIC, sealed.data)

    async def offers_of(self, provider: TestDaemon) -> list[Sealed[Offer]]:
        """Return the offers of a provider, as it tells newcomers of them."""
        page = codec.decode_untrusted(await self.send(provider, b"", BOOK_PROTOCOL), BookPage, 2**20)
        opened = [open_untrusted(data, self.network_id) for data in page.statements]
        return [one for one in opened if one.signer == node_of(provider) and isinstance(one.record, Offer)]

    # --- as a renter ----------------------------------------------------------------------------------------

    def bid(self, offer: Sealed[Offer], **fields: Any) -> Sealed[Bid]:
        """Sign a bid for one device of an offer at its clock price; `fields` change it."""
        now = now_ms()
        usual: dict[str, Any] = {
            "offer_id": offer.id,
            "listing": offer.record.listing,
            "provider": offer.signer,
            "nonce": secrets.token_bytes(16),
            "price": clock_price(offer.record.curve, now),
            "quantity": 1,
            "duration_ms": 10 * MINUTE_MS,
            "max_spend": 10**9,
            "job_hash": bytes(32),
            "resources": Resources(cpus_milli=100, memory_mib=64, disk_mib=64),
            "isolation": offer.record.terms.isolation[0],
            "tunnel_key": secrets.token_bytes(32),
            "voucher_key": secrets.token_bytes(32),
            "allow_simulated": True,
            "signed_at": now,
            "expires_at": now + 10_000,
        }
        return self.seal(Bid(**(usual | fields)))

    async def win(self, provider: TestDaemon, **fields: Any) -> tuple[Sealed[Bid], Sealed[Award]]:
        """Bid, and wait for the award."""
        bid = self.bid((await self.offers_of(provider))[0], **fields)
        answer = await self.tell(provider, bid)
        assert isinstance(answer, BidAck), answer
        return bid, await self.wait_for(Award, lambda award: award.bid_id == bid.id)

    def countersignature(self, award: Sealed[Award], **fields: Any) -> Sealed[Countersignature]:
        """Sign for an award; `fields` change it."""
        usual = {"award_id": award.id, "lease": award.record.lease, "signed_at": now_ms()}
        return self.seal(Countersignature(**(usual | fields)))

    def grants(self) -> list[Sealed[Grant]]:
        """Return every grant that was delivered so far."""
        return [open_untrusted(delivery.record.grant, self.network_id) for delivery in self.of(GrantDelivery)]

    async def wait_granted(self, lease: bytes) -> Sealed[Grant]:
        """Wait for a lease's grant."""
        return await until(
            lambda: next((grant for grant in self.grants() if grant.record.lease == lease), None), "the grant"
        )

    # --- as a provider --------------------------------------------------------------------------------------

    def offer(self, **fields: Any) -> Sealed[Offer]:
        """Sign an offer of one simulated device, cheaper than any; `fields` change it."""
        now = now_ms()
        usual: dict[str, Any] = {
            "listing": "hostile",
            "sequence": now,
            "device": DeviceSpec("simulated", "NVIDIA A100-SXM4-40GB", 40_960, 80, "550.54", 12_040),
            "quantity": 1,
            "free": 1,
            "curve": Curve(start=100_000, reserve=100_000, opened_at=now - MINUTE_MS),
            "simulated": True,
            "addresses": self.network.addresses,
            "issued_at": now,
            "expires_at": now + 5 * MINUTE_MS,
        }
        return self.seal(an_offer(**(usual | fields)))

    def award(self, bid: Sealed[Bid], offer: Sealed[Offer], **fields: Any) -> Sealed[Award]:
        """Sign the award that a bid on an offer deserves; `fields` change it."""
        now, wanted = now_ms(), bid.record
        usual: dict[str, Any] = {
            "bid_id": bid.id,
            "lease": lease_id(self.node, bid.signer, wanted.nonce),
            "price": wanted.price,
            "quantity": wanted.quantity,
            "devices": tuple(ChainHead(bytes([each]) * 32, 0, GENESIS) for each in range(wanted.quantity)),
            "terms": offer.record.terms,
            "tunnel_key": secrets.token_bytes(32),
            "simulated": offer.record.simulated,
            "holds_until": now + 2000,
            "until": now + wanted.duration_ms + offer.record.terms.notice_ms,
        }
        return self.seal(Award(**(usual | fields)))

    def delivery(
        self, award: Sealed[Award], bid: Sealed[Bid], signed: Sealed[Countersignature], **fields: Any
    ) -> Sealed[GrantDelivery]:
        """Sign the grant of a countersigned award; `fields` change the grant. Nobody listens at its address."""
        terms = CommittedTerms(
            salt=bytes(32), renter=bid.signer, price=award.record.price, job_hash=bid.record.job_hash
        )
        usual: dict[str, Any] = {
            "lease": award.record.lease,
            "entries": tuple(ChainEntry(head.key, head.number, head.head) for head in award.record.devices),
            "epoch": 0,
            "countersignature_id": signed.id,
            "commitment": grant_commitment(terms),
            "starts_at": now_ms(),
            "until": award.record.until,
            "simulated": award.record.simulated,
        }
        grant = self.seal(Grant(**(usual | fields)))
        return self.seal(GrantDelivery(grant=grant.data, salt=bytes(32), addresses=("127.0.0.1:9",)))

    def receipt(
        self, award: Sealed[Award], bid: Sealed[Bid], signed: Sealed[Countersignature], **fields: Any
    ) -> Sealed[Receipt]:
        """Sign a receipt of a lease that used nothing; `fields` change it."""
        usual: dict[str, Any] = {
            "lease": award.record.lease,
            "provider": self.node,
            "renter": bid.signer,
            "countersignature_id": signed.id,
            "job_hash": bid.record.job_hash,
            "outcome": "cancelled",
            "exit_status": -1,
            "started_at": 0,
            "ended_at": now_ms(),
            "metered_ms": 0,
            "price": award.record.price,
            "quantity": award.record.quantity,
            "amount": 0,
            "voucher_amount": 0,
            "voucher_number": 0,
            "simulated": award.record.simulated,
        }
        return self.seal(Receipt(**(usual | fields)))


def _usual_answer(letter: Sealed[Any]) -> Any:
    if isinstance(letter.record, OwnRecordsQuery):
        return CounterpartyGrants(query_id=letter.id)
    if isinstance(letter.record, Bid):
        now = now_ms()
        return BidAck(bid_id=letter.id, batch=1, received_at=now, closes_at=now + 100)
    return Ack(of=letter.id)


@asynccontextmanager
async def open_hostile(
    *targets: TestDaemon, network: NetworkId = DEMO, key: bytes = b""
) -> AsyncIterator[Hostile]:
    """Run a peer of a fresh key that is connected with the daemons `targets`."""
    seed = secrets.token_bytes(32)
    async with open_swarm(
        seed,
        listen=("/ip4/127.0.0.1/tcp/0",),
        network=network,
        network_key=key,
        bootstrap=(),
        max_peers=16,
        agent="hostile/1",
    ) as swarm:
        peer = Hostile(seed, swarm, network)
        for target in targets:
            await peer.connect(target)
        yield peer


def node_of(daemon: TestDaemon) -> NodeId:
    """Return a daemon's node id."""
    return node_from_peer_id(daemon.node)


async def until(ask: Callable[[], T], what: str = "") -> T:
    """Ask, in this loop, until the answer is true; `ask` must be quick."""
    with trio.move_on_after(WAIT_S_MAX):
        while True:
            answer = ask()
            if answer:
                return answer
            await trio.sleep(POLL_S)
    raise AssertionError(f"waited in vain for {what or ask}")


def books_of(daemon: TestDaemon) -> dict[str, Any]:
    """Return all of a daemon's state that a lying peer might want to change, as its RPC shows it."""
    status = daemon.status()
    ledger: money.LedgerResult = daemon.call(money.LEDGER)
    return {
        "devices": [
            (device.uuid, device.use.value, device.lease and device.lease.lease) for device in daemon.devices()
        ],
        "jobs": [(job.job, job.state, job.outcome, job.provider) for job in status.jobs],
        "receipts": [(receipt.receipt, receipt.accepted) for receipt in daemon.receipts()],
        "ledger": (ledger.accounts, ledger.pending),
        "notes": status.notes,
    }
