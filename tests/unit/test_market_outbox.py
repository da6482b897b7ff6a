"""Delivery: at least once, in order, through lost answers, full disks and restarts; and never after expiry."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from unittest import mock

import pytest
import trio
from support.market_nodes import NETWORK, LoopStore, VirtualClock, until
from support.memory_network import MemoryHub, MemoryNetwork, open_hub
from support.signers import signer
from trio.abc import Clock

from node.errors import LedgerError, StoreError
from node.market import outbox as outbox_module
from node.market.context import TRADE_PROTOCOL, Context
from node.market.outbox import REQUEST_TIMEOUT_MS, Answer, Outbox, Undelivered
from node.store import OutboxRow
from protocol.envelope import Sealed, open_untrusted, seal
from protocol.errors import WrongKind
from protocol.identity import NodeId
from protocol.records import Ack, Award, Countersignature, ReceiptAcceptance, Refusal
from protocol.units import MINUTE_MS

ME, PEER, OTHER = signer(1), signer(2), signer(3)


class Correspondent:
    """A peer that takes letters, and answers as the test says."""

    def __init__(self, hub: MemoryHub, who: NodeId) -> None:
        self.network: MemoryNetwork = hub.join(who)
        self.letters: list[Sealed[object]] = []
        self.answer: Callable[[Sealed[object]], Awaitable[bytes]] = self.acknowledge
        self.network.on_request(TRADE_PROTOCOL, self._on_letter)

    async def acknowledge(self, letter: Sealed[object]) -> bytes:
        return seal(Ack(of=letter.id), signer_of(self.network.node), NETWORK).data

    async def _on_letter(self, _: NodeId, data: bytes) -> bytes:
        letter = open_untrusted(data, NETWORK)
        self.letters.append(letter)
        return await self.answer(letter)


def signer_of(node: NodeId) -> object:
    return next(person for person in (ME, PEER, OTHER) if person.node == node)


class Desk:
    """Our end: an outbox, and what its handler was given."""

    def __init__(self, hub: MemoryHub, folder: Path) -> None:
        self.hub = hub
        self.folder = folder
        self.network = hub.join(ME.node)
        self.store = LoopStore(folder / "node.db")
        self.answers: list[tuple[OutboxRow, Answer]] = []
        self.trouble: Exception | None = None
        self.clock = VirtualClock()
        self.outbox = self._make()
        self.scope = trio.CancelScope()

    def _make(self) -> Outbox:
        context = Context(
            self.store, self.network, ME, NETWORK, "test", self.clock, mock.sentinel.keepers, self.folder
        )
        return Outbox(context, self._on_answer)

    async def _on_answer(self, row: OutboxRow, answer: Answer) -> None:
        await trio.lowlevel.checkpoint()
        if self.trouble is not None:
            raise self.trouble
        self.answers.append((row, answer))

    async def run(self, *, task_status: object = trio.TASK_STATUS_IGNORED) -> None:
        with trio.CancelScope() as self.scope:
            await self.outbox.run(task_status=task_status)

    def restart(self) -> None:
        """End the daemon, and make the next one from what is on the disk."""
        self.scope.cancel()
        self.store.close()
        self.store = LoopStore(self.folder / "node.db")
        self.outbox = self._make()

    async def write(self, number: int, *, peer: NodeId = PEER.node, lifetime_ms: int = MINUTE_MS) -> OutboxRow:
        """Put letter `number` into a transaction, without kicking it."""
        letter = seal(a_letter(number), ME, NETWORK)
        return await self.store.transaction(lambda tx: self.outbox.enqueue(tx, peer, letter, lifetime_ms))

    async def send(self, number: int, *, peer: NodeId = PEER.node, lifetime_ms: int = MINUTE_MS) -> None:
        self.outbox.kick(await self.write(number, peer=peer, lifetime_ms=lifetime_ms))

    def left(self) -> int:
        return self.store.transaction_sync(lambda tx: tx.outbox.count())


def a_letter(number: int) -> ReceiptAcceptance:
    return ReceiptAcceptance(receipt_id=bytes(32), lease=bytes(16), accepted_at=number)


async def refuse(_: Sealed[object]) -> bytes:
    await trio.lowlevel.checkpoint()
    raise RuntimeError("not now")


async def say_nothing(_: Sealed[object]) -> bytes:
    await trio.sleep_forever()
    raise AssertionError


def numbers(letters: list[Sealed[object]]) -> list[int]:
    return [letter.record.accepted_at for letter in letters]  # type: ignore[attr-defined]


@pytest.fixture
async def hub() -> AsyncIterator[MemoryHub]:
    async with open_hub(seed=1) as hub:
        yield hub


@pytest.fixture
async def peer(hub: MemoryHub) -> Correspondent:
    return Correspondent(hub, PEER.node)


@pytest.fixture
async def desk(hub: MemoryHub, peer: Correspondent, tmp_path: Path, nursery: trio.Nursery) -> AsyncIterator[Desk]:
    desk = Desk(hub, tmp_path)
    hub.connect(ME.node, PEER.node)
    await nursery.start(desk.run)
    yield desk
    desk.scope.cancel()
    desk.store.close()


async def test_letters_arrive_in_order_and_each_answer_is_handled_once(
    desk: Desk, peer: Correspondent, autojump_clock: Clock
) -> None:
    for number in range(5):
        await desk.send(number)
    await until(lambda: desk.left() == 0)
    assert numbers(peer.letters) == [0, 1, 2, 3, 4]
    assert [row.data for row, _ in desk.answers] == [letter.data for letter in peer.letters]
    assert all(isinstance(answer, Sealed) and isinstance(answer.record, Ack) for _, answer in desk.answers)


async def test_a_lost_answer_means_the_same_letter_again(
    desk: Desk, peer: Correspondent, autojump_clock: Clock
) -> None:
    async def answer_the_third(letter: Sealed[object]) -> bytes:
        if len(peer.letters) < 3:
            await trio.sleep_forever()
        return await peer.acknowledge(letter)

    peer.answer = answer_the_third
    await desk.send(7)
    await until(lambda: desk.left() == 0)
    assert numbers(peer.letters) == [7, 7, 7]
    assert len({letter.id for letter in peer.letters}) == 1
    assert len(desk.answers) == 1


async def test_an_answer_signed_by_somebody_else_or_malformed_is_none(
    desk: Desk, peer: Correspondent, autojump_clock: Clock
) -> None:
    async def forge(letter: Sealed[object]) -> bytes:
        if len(peer.letters) == 1:
            return b"\xff" * 40
        if len(peer.letters) == 2:
            return seal(Ack(of=letter.id), OTHER, NETWORK).data
        return await peer.acknowledge(letter)

    peer.answer = forge
    await desk.send(7)
    await until(lambda: desk.left() == 0)
    assert len(peer.letters) == 3
    ((_, answer),) = desk.answers
    assert isinstance(answer, Sealed)
    assert answer.signer == PEER.node


async def test_an_unwanted_answer_ends_the_matter(desk: Desk, peer: Correspondent, autojump_clock: Clock) -> None:
    desk.trouble = WrongKind("an award is no answer to that")
    await desk.send(7)
    await until(lambda: desk.left() == 0)
    assert numbers(peer.letters) == [7]


async def test_an_answer_that_our_disk_cannot_take_is_asked_for_again(
    desk: Desk, peer: Correspondent, autojump_clock: Clock
) -> None:
    desk.trouble = StoreError("full")
    await desk.send(7)
    await until(lambda: len(peer.letters) > 3)
    assert desk.left() == 1
    desk.trouble = None
    await until(lambda: desk.left() == 0)
    assert len(desk.answers) == 1


@pytest.mark.parametrize("trouble", [None, WrongKind("no"), LedgerError("no")])
async def test_a_full_disk_ends_nothing(
    desk: Desk, peer: Correspondent, autojump_clock: Clock, trouble: Exception | None
) -> None:
    row = await desk.write(7)
    desk.trouble = trouble
    desk.store.is_full = True
    desk.outbox.kick(row)
    await until(lambda: len(peer.letters) > 3)
    desk.store.is_full, desk.trouble = False, None
    await until(lambda: desk.left() == 0)


async def test_a_letter_to_nobody_waits_and_goes_when_the_peer_connects(
    desk: Desk, hub: MemoryHub, autojump_clock: Clock
) -> None:
    await desk.send(7, peer=OTHER.node, lifetime_ms=60 * MINUTE_MS)
    await trio.sleep(120)
    assert desk.left() == 1
    other = Correspondent(hub, OTHER.node)
    started = trio.current_time()
    hub.connect(ME.node, OTHER.node)
    desk.outbox.wake(OTHER.node)
    await until(lambda: desk.left() == 0)
    assert trio.current_time() - started < 1.0  # virtual: not the 15 s that it had come to wait
    assert numbers(other.letters) == [7]


async def test_a_peer_that_connects_before_it_answers_gets_its_letters_soon_after(
    desk: Desk, peer: Correspondent, autojump_clock: Clock
) -> None:
    """A daemon that starts is connected a little before it takes letters."""
    peer.answer = refuse
    await desk.send(1, lifetime_ms=60 * MINUTE_MS)
    await trio.sleep(120)  # attempts are 15 s apart by now
    desk.outbox.wake(PEER.node)
    await trio.sleep(0.3)
    peer.answer = peer.acknowledge
    with trio.move_on_after(1):
        await until(lambda: desk.left() == 0)
    assert desk.left() == 0


async def test_a_peer_that_connects_during_an_attempt_is_tried_again_at_once(
    desk: Desk, peer: Correspondent, autojump_clock: Clock
) -> None:
    peer.answer = refuse
    await desk.send(1, lifetime_ms=60 * MINUTE_MS)
    await trio.sleep(120)
    peer.answer = say_nothing
    before = len(peer.letters)
    await until(lambda: len(peer.letters) > before)
    peer.answer = peer.acknowledge
    desk.outbox.wake(PEER.node)  # the attempt on the connection before that is hopeless, and takes its time
    with trio.move_on_after(REQUEST_TIMEOUT_MS / 1000 + 1):
        await until(lambda: desk.left() == 0)
    assert desk.left() == 0


async def test_a_peer_that_only_comes_and_goes_is_not_tried_all_the_time(
    desk: Desk, hub: MemoryHub, peer: Correspondent, autojump_clock: Clock
) -> None:
    async def hang_up(letter: Sealed[object]) -> bytes:
        hub.disconnect(ME.node, PEER.node)
        return await refuse(letter)

    peer.answer = hang_up
    desk.network.on_connect(lambda node: wake(desk, node))  # each attempt dials, and so wakes itself
    await desk.send(1, lifetime_ms=60 * MINUTE_MS)
    await trio.sleep(300)
    assert len(peer.letters) < 300


async def wake(desk: Desk, node: NodeId) -> None:
    await trio.lowlevel.checkpoint()
    desk.outbox.wake(node)


async def test_a_letter_expires_and_its_handler_is_told(
    desk: Desk, peer: Correspondent, autojump_clock: Clock
) -> None:
    peer.answer = say_nothing
    await desk.send(7, lifetime_ms=12_000)
    await until(lambda: desk.left() == 0)
    ((row, answer),) = desk.answers
    assert row.record_id == peer.letters[0].id
    assert isinstance(answer, Undelivered)
    seen = len(peer.letters)
    await trio.sleep(60)
    assert len(peer.letters) == seen


async def test_a_peer_that_is_away_holds_up_nobody_else(
    desk: Desk, peer: Correspondent, autojump_clock: Clock
) -> None:
    await desk.send(1, peer=OTHER.node)
    await desk.send(2)
    await until(lambda: desk.left() == 1)
    assert numbers(peer.letters) == [2]


async def test_what_a_transaction_wrote_is_sent_after_a_restart(
    desk: Desk, peer: Correspondent, nursery: trio.Nursery, autojump_clock: Clock
) -> None:
    await desk.write(1)
    await desk.write(2)  # the daemon is killed before it kicks them
    desk.restart()
    await nursery.start(desk.run)
    await until(lambda: desk.left() == 0)
    assert numbers(peer.letters) == [1, 2]
    await desk.send(3)
    await until(lambda: desk.left() == 0)
    assert numbers(peer.letters) == [1, 2, 3]
    assert [row.number for row, _ in desk.answers] == [1, 2, 3]


async def test_more_letters_than_fit_into_memory_are_all_sent_in_order(
    desk: Desk, peer: Correspondent, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "LANE_QUEUE_MAX", 2)
    rows = [await desk.write(number) for number in range(7)]
    desk.outbox.kick(*rows)
    await until(lambda: desk.left() == 0)
    assert numbers(peer.letters) == [0, 1, 2, 3, 4, 5, 6]


async def test_a_bill_that_is_not_answered_does_not_hold_up_the_trade(
    desk: Desk, peer: Correspondent, autojump_clock: Clock
) -> None:
    async def answer_the_trade(letter: Sealed[object]) -> bytes:
        if isinstance(letter.record, ReceiptAcceptance):
            await trio.sleep(4)
            return seal(Refusal(of=letter.id, reason="not_yet"), PEER, NETWORK).data
        return await peer.acknowledge(letter)

    peer.answer = answer_the_trade
    await desk.send(1)
    await until(lambda: peer.letters)
    countersignature = Countersignature(award_id=bytes(32), lease=bytes(16), signed_at=0)
    letter = seal(countersignature, ME, NETWORK)
    desk.outbox.kick(await desk.store.transaction(lambda tx: desk.outbox.enqueue(tx, PEER.node, letter, 2000)))
    await until(lambda: any(row.kind == "countersignature" for row, _ in desk.answers))
    (answer,) = [answer for row, answer in desk.answers if row.kind == "countersignature"]
    assert isinstance(answer, Sealed)
    assert isinstance(answer.record, Ack)
    assert Award not in {type(letter.record) for letter in peer.letters}
