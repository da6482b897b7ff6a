"""A purchase at a clock that the test sets, with providers to bid at."""

from support.offers import NOW

from protocol.identity import hash_bytes
from protocol.machines.purchase import (
    BidSigned,
    Candidate,
    CandidatesRanked,
    OpenBid,
    PlaceBid,
    Purchase,
    PurchaseEffect,
    PurchaseEvent,
    step,
)
from protocol.units import Millis

PROVIDERS = tuple(hash_bytes(f"provider {number}".encode()) for number in range(4))
LISTING = "a100"


def a_candidate(
    provider: int = 0, *, listing: str = LISTING, price: int = 100, affordable_at: int | None = NOW
) -> Candidate:
    """Return an offer that matches."""
    return Candidate(
        offer_id=hash_bytes(PROVIDERS[provider] + listing.encode()),
        provider=PROVIDERS[provider],
        listing=listing,
        price=price,
        affordable_at=None if affordable_at is None else Millis(affordable_at),
    )


class Basket:
    """A purchase, the time, and what it has asked for so far."""

    def __init__(self, max_price: int = 100) -> None:
        self.purchase = Purchase(max_price=max_price)
        self.now = Millis(NOW)
        self.effects: list[PurchaseEffect] = []
        self._bids = 0

    def apply(self, event: PurchaseEvent) -> tuple[PurchaseEffect, ...]:
        """Step, remember and return the effects."""
        self.purchase, effects = step(self.purchase, event, self.now)
        self.effects.extend(effects)
        return effects

    def wait(self, ms: int) -> None:
        """Let time pass."""
        self.now = Millis(self.now + ms)

    def rank(self, *candidates: Candidate) -> tuple[PurchaseEffect, ...]:
        """Match the book: these would do, best first."""
        return self.apply(CandidatesRanked(candidates))

    def signed(self, provider: int = 0, *, listing: str = LISTING, price: int = 100) -> OpenBid:
        """Return a freshly signed bid."""
        self._bids += 1
        name = self._bids.to_bytes(8, "big")
        return OpenBid(
            bid_id=hash_bytes(b"bid" + name),
            offer_id=hash_bytes(b"offer" + name),
            lease=hash_bytes(b"lease" + name)[:16],
            provider=PROVIDERS[provider],
            listing=listing,
            price=price,
        )

    def place(self, provider: int = 0, *, price: int = 100) -> OpenBid:
        """Rank one candidate, and sign the bid that the purchase asks for."""
        candidate = a_candidate(provider, price=price)
        assert self.rank(candidate) == (PlaceBid(candidate),)
        bid = self.signed(provider, price=price)
        self.apply(BidSigned(bid))
        return bid
