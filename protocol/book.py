"""The order book: a node's bounded, local view of what is offered.

One slot per (provider, listing) holds the newest statement about it: an offer, or the withdrawal that stands
against older offers until it expires. Which of two statements is newer is the same for every node, whatever the
order of arrival: the higher (epoch, sequence), and of equals the smaller record id.

Bounded against floods, in bytes. Keys cost nothing, so a limit per key alone protects nobody: a provider at its
own limit is refused and touches nobody else; when the whole book is full, the provider that loses a statement is
of the lowest standing there is, of those one that takes more room than others (in coarse steps: many small
statements must not outrank one honest one), and of those the one with the worst rank under a secret salt. So a
flooder evicts itself first, a thousand keys of one flooder keep no more than a thousand strangers would, and
nobody can choose keys that rank well.

Mutable, and pure otherwise: the time, the salt and every record come in as arguments. Refuses to verify signatures
(only sealed records come in), to judge prices, and to know peers.
"""

import bisect
import enum
import heapq
from collections.abc import Iterator
from typing import Annotated, TypeGuard

import msgspec

from protocol.envelope import Sealed
from protocol.identity import KEY_SIZE, NodeId, hash_bytes
from protocol.records.fields import Key, Number, Token
from protocol.records.offer import Offer, Withdrawal
from protocol.units import MINUTE_MS, SECOND_MS, Millis

CLOCK_TOLERANCE_MS = 5 * SECOND_MS
"""By how much an offer's `issued_at` may lie ahead of our clock and still be bid on."""
CLOCK_SKEW_MAX_MS = 15 * MINUTE_MS
"""Statements dated further ahead, or expired for longer, are not kept: their clock or ours is wrong."""
STATEMENT_OVERHEAD = 1024
"""Bytes that a statement is charged beyond its envelope, for the objects made of it."""
ROOM_STEP = 32 * 1024
"""Providers whose statements take less than this, in bytes, lose them alike; a usual one takes 2 to 10 KiB."""
DIGEST_ITEMS_MAX = 400
"""Most slots in one digest, so that it fits a message of 64 KiB whatever the listings' names."""
ID_PREFIX_SIZE = 8

Statement = Sealed[Offer] | Sealed[Withdrawal]
Slot = tuple[NodeId, str]
"""(provider, listing)."""


class BookLimits(msgspec.Struct, frozen=True):
    """How large a book may grow."""

    bytes_max: int = 48 * 1024 * 1024
    """Envelopes and overhead of the whole book: room for about 20,000 usual offers."""
    listings_per_provider_max: int = 32
    statement_size_max: int = 24 * 1024
    """Bytes of one envelope. An offer of 64 devices with every list full takes about 18 KiB."""


class Inserted(msgspec.Struct, frozen=True):
    """The statement is in the book, the first about its listing; `evicted` had to go, since the book is full."""

    evicted: tuple[Statement, ...] = ()


class Superseded(msgspec.Struct, frozen=True):
    """The statement is in the book in the place of `old`; `evicted` had to go, since the book is full."""

    old: Statement
    evicted: tuple[Statement, ...] = ()


class Duplicate(msgspec.Struct, frozen=True):
    """The book holds this very record."""


class Stale(msgspec.Struct, frozen=True):
    """The book holds a newer statement about the listing."""

    newest: Statement


class RefusalReason(enum.StrEnum):
    """Why the book does not take a statement."""

    CLOCK_AHEAD = "clock_ahead"
    EXPIRED = "expired"
    TOO_LARGE = "too_large"
    PROVIDER_LIMIT = "provider_limit"
    FULL = "full"


class Refused(msgspec.Struct, frozen=True):
    """The statement is not in the book."""

    reason: RefusalReason
    detail: str


InsertResult = Inserted | Superseded | Duplicate | Stale | Refused


class Mark(enum.StrEnum):
    """What keeps a statement that is in the book from being bid on."""

    CLOCK = "clock"
    """Dated ahead of our clock, or expired by it."""
    WITHDRAWN = "withdrawn"


class DigestItem(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One slot, in few bytes."""

    provider: Key
    listing: Token
    epoch: Number
    sequence: Number
    id_prefix: Annotated[bytes, msgspec.Meta(min_length=ID_PREFIX_SIZE, max_length=ID_PREFIX_SIZE)]


Position = Annotated[bytes, msgspec.Meta(max_length=KEY_SIZE + 64)]
"""A slot's place in the order of all slots: provider, then listing."""


class Digest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every slot of a book from the position `first` to, exclusively, `end` (empty: to the end of the book)."""

    first: Position
    end: Position
    items: Annotated[tuple[DigestItem, ...], msgspec.Meta(max_length=DIGEST_ITEMS_MAX)]

    def __post_init__(self) -> None:
        last = b""
        for item in self.items:
            position = position_of(NodeId(item.provider), item.listing)
            if not max(self.first, last) <= position or position == last or (self.end and position >= self.end):
                raise ValueError("a digest lists its slots in order, each once, within its range")
            last = position


class Comparison(msgspec.Struct, frozen=True):
    """What two books can tell each other: slots that the other holds newer, and statements that we do."""

    wanted: tuple[Slot, ...]
    newer: tuple[Statement, ...]


def position_of(provider: NodeId, listing: str) -> bytes:
    """Return where the slot of `listing` stands in the order of all slots."""
    return provider + listing.encode()


def mark_of(statement: Statement, now: Millis) -> Mark | None:
    """Return why `statement` may not be bid on at the time `now`; None for a live offer."""
    if not statement.record.issued_at - CLOCK_TOLERANCE_MS <= now < statement.record.expires_at:
        return Mark.CLOCK
    return None if _is_offer(statement) else Mark.WITHDRAWN


def is_newer(one: Statement, other: Statement) -> bool:
    """Return whether `one` stands against `other`, another record about the same listing."""
    mine, theirs = one.record, other.record
    if (mine.epoch, mine.sequence) != (theirs.epoch, theirs.sequence):
        return (mine.epoch, mine.sequence) > (theirs.epoch, theirs.sequence)
    return one.id < other.id


class OrderBook:
    """The newest statement about every listing, within `limits`. `salt`: random bytes that no peer knows."""

    def __init__(self, salt: bytes, limits: BookLimits = BookLimits()) -> None:  # noqa: B008 - immutable
        self._salt = salt
        self._limits = limits
        self._slots: dict[bytes, Statement] = {}
        self._order: list[bytes] = []
        self._providers: dict[NodeId, _Provider] = {}
        self._size = 0
        # Both heaps hold stale entries, which are dropped when they surface and when they become many.
        self._worst: list[tuple[int, int, bytes, NodeId]] = []
        self._expiring: list[tuple[int, bytes]] = []

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def size(self) -> int:
        """Bytes that the book is charged for, at most `limits.bytes_max`."""
        return self._size

    def insert(self, statement: Statement, now: Millis, *, standing: int = 0) -> InsertResult:
        """Take `statement` when it is newer than what the book holds about its listing, and there is room.

        `standing` is its provider's, as our own experience has it: 0 for a stranger, more for peers that we named
        or settled with. A full book never evicts a provider for one of a lower standing.
        """
        position = position_of(statement.signer, statement.record.listing)
        held = self._slots.get(position)
        if held is not None and held.id == statement.id:
            return Duplicate()
        refused = self._refusal(statement, now)
        if refused is not None:
            return refused
        if held is not None and not is_newer(statement, held):
            return Stale(held)
        provider = self._providers.get(statement.signer) or _Provider(standing)
        if held is None and len(provider.positions) >= self._limits.listings_per_provider_max:
            return Refused(
                RefusalReason.PROVIDER_LIMIT,
                f"the provider has {len(provider.positions)} listings in the book; that is the most for one",
            )
        evicted = self._make_room(statement, standing, held)
        if evicted is None:
            return Refused(RefusalReason.FULL, "the book is full, and every other provider in it ranks higher")
        self._put(position, statement, standing, held)
        return Inserted(evicted) if held is None else Superseded(held, evicted)

    def expire(self, now: Millis) -> tuple[Statement, ...]:
        """Drop and return what has been expired for longer than clocks may differ. Call it every few seconds."""
        dropped = []
        while self._expiring and self._expiring[0][0] + CLOCK_SKEW_MAX_MS <= now:
            expires_at, position = heapq.heappop(self._expiring)
            statement = self._slots.get(position)
            if statement is not None and statement.record.expires_at == expires_at:
                self._remove(position)
                dropped.append(statement)
        return tuple(dropped)

    def newest_of(self, provider: NodeId, listing: str) -> Statement | None:
        """Return the statement that stands about `listing`, whatever its mark."""
        return self._slots.get(position_of(provider, listing))

    def offers_of(self, provider: NodeId) -> tuple[Sealed[Offer], ...]:
        """Return the offers of `provider`, whatever their mark, by listing."""
        known = self._providers.get(provider)
        statements = (self._slots[position] for position in sorted(known.positions)) if known else ()
        return tuple(statement for statement in statements if _is_offer(statement))

    def statements(self) -> Iterator[Statement]:
        """Iterate over everything in the book, by provider and listing."""
        return iter([self._slots[position] for position in self._order])

    def offers(self) -> Iterator[Sealed[Offer]]:
        """Iterate over every offer, whatever its mark, by provider and listing."""
        return (statement for statement in self.statements() if _is_offer(statement))

    def live(self, now: Millis) -> Iterator[Sealed[Offer]]:
        """Iterate over the offers that may be bid on at the time `now`, by provider and listing."""
        for statement in self.statements():
            if _is_offer(statement) and mark_of(statement, now) is None:
                yield statement

    def digest(self, first: bytes, limit: int = DIGEST_ITEMS_MAX) -> Digest:
        """Return a digest of at most `limit` slots, from the position `first` on.

        Start at b"" and go on at `end` until that is empty, or start anywhere.
        """
        index = bisect.bisect_left(self._order, first)
        page = self._order[index : index + limit]
        rest = self._order[index + limit : index + limit + 1]
        items = tuple(_digest_item(self._slots[position]) for position in page)
        return Digest(first=first, end=rest[0] if rest else b"", items=items)

    def compare(self, digest: Digest) -> Comparison:
        """Return how this book differs from the one that `digest` tells of, within its range.

        At most DIGEST_ITEMS_MAX slots are wanted and as many statements newer: the rest waits for another round.
        """
        theirs = {position_of(NodeId(item.provider), item.listing): item for item in digest.items}
        wanted = []
        for position, item in theirs.items():
            held = self._slots.get(position)
            if held is None or _age(item) > _age(_digest_item(held)):
                wanted.append((NodeId(item.provider), item.listing))
        newer: list[Statement] = []
        for index in range(bisect.bisect_left(self._order, digest.first), len(self._order)):
            position = self._order[index]
            if len(newer) == DIGEST_ITEMS_MAX or (digest.end and position >= digest.end):
                break
            statement, other = self._slots[position], theirs.get(position)
            if other is None or _age(_digest_item(statement)) > _age(other):
                newer.append(statement)
        return Comparison(tuple(wanted), tuple(newer))

    def _refusal(self, statement: Statement, now: Millis) -> Refused | None:
        record = statement.record
        if len(statement.data) > self._limits.statement_size_max:
            return Refused(
                RefusalReason.TOO_LARGE,
                f"{len(statement.data)} bytes is more than the {self._limits.statement_size_max} allowed",
            )
        if record.issued_at > now + CLOCK_SKEW_MAX_MS:
            return Refused(RefusalReason.CLOCK_AHEAD, f"issued {record.issued_at - now} ms ahead of our clock")
        if record.expires_at + CLOCK_SKEW_MAX_MS <= now:
            return Refused(RefusalReason.EXPIRED, f"expired {now - record.expires_at} ms ago")
        return None

    def _make_room(
        self, statement: Statement, standing: int, held: Statement | None
    ) -> tuple[Statement, ...] | None:
        """Evict until `statement` fits in the place of `held`; return what went, or None to refuse it instead."""
        growth = _charge(statement) - (_charge(held) if held else 0)
        known = self._providers.get(statement.signer)
        badness = self._badness(statement.signer, standing, (known.size if known else 0) + growth)
        evicted = []
        while growth > 0 and self._size + growth > self._limits.bytes_max:
            worst = self._worst_provider()
            if worst is None or worst == statement.signer or badness < self._badness_of(worst):
                return None
            victim = min(
                self._providers[worst].positions,
                key=lambda position: (self._slots[position].record.expires_at, position),
            )
            evicted.append(self._remove(victim))
        return tuple(evicted)

    def _put(self, position: bytes, statement: Statement, standing: int, held: Statement | None) -> None:
        provider = self._providers.setdefault(statement.signer, _Provider(standing))
        provider.standing = standing
        if held is None:
            bisect.insort(self._order, position)
            provider.positions.add(position)
        growth = _charge(statement) - (_charge(held) if held else 0)
        provider.size += growth
        self._size += growth
        self._slots[position] = statement
        heapq.heappush(self._worst, self._badness_of(statement.signer))
        heapq.heappush(self._expiring, (statement.record.expires_at, position))
        self._compact()

    def _remove(self, position: bytes) -> Statement:
        statement = self._slots.pop(position)
        del self._order[bisect.bisect_left(self._order, position)]
        provider = self._providers[statement.signer]
        provider.positions.remove(position)
        provider.size -= _charge(statement)
        self._size -= _charge(statement)
        if provider.positions:
            heapq.heappush(self._worst, self._badness_of(statement.signer))
        else:
            del self._providers[statement.signer]
        return statement

    def _badness(self, provider: NodeId, standing: int, size: int) -> tuple[int, int, bytes, NodeId]:
        """Return the key by which the provider to lose a statement is chosen; the smallest loses."""
        return standing, -(size // ROOM_STEP), hash_bytes(self._salt + provider), provider

    def _badness_of(self, provider: NodeId) -> tuple[int, int, bytes, NodeId]:
        known = self._providers[provider]
        return self._badness(provider, known.standing, known.size)

    def _worst_provider(self) -> NodeId | None:
        while self._worst:
            provider = self._worst[0][3]
            if provider in self._providers and self._badness_of(provider) == self._worst[0]:
                return provider
            heapq.heappop(self._worst)
        return None

    def _compact(self) -> None:
        """Rebuild a heap that is mostly stale, so that re-issued offers don't grow it without bound."""
        if len(self._worst) > 4 * len(self._providers) + 64:
            self._worst = [self._badness_of(provider) for provider in self._providers]
            heapq.heapify(self._worst)
        if len(self._expiring) > 4 * len(self._slots) + 64:
            self._expiring = [(held.record.expires_at, position) for position, held in self._slots.items()]
            heapq.heapify(self._expiring)


class _Provider:
    """What the book holds of one provider."""

    def __init__(self, standing: int) -> None:
        self.standing = standing
        self.size = 0
        self.positions: set[bytes] = set()


def _is_offer(statement: Statement) -> TypeGuard[Sealed[Offer]]:
    return isinstance(statement.record, Offer)


def _charge(statement: Statement) -> int:
    return len(statement.data) + STATEMENT_OVERHEAD


def _digest_item(statement: Statement) -> DigestItem:
    record = statement.record
    return DigestItem(
        statement.signer, record.listing, record.epoch, record.sequence, statement.id[:ID_PREFIX_SIZE]
    )


def _age(item: DigestItem) -> tuple[int, int, int]:
    """Return the order of `is_newer` as a key: of equal sequences, the smaller id is newer."""
    return item.epoch, item.sequence, -int.from_bytes(item.id_prefix, "big")
