"""A priced plan as a table: what would run where, for how much, and why not elsewhere."""

from node.cli.output import format_mib, say, short_peer, simulated_mark, table, tell
from node.rpc.api import market
from protocol.units import Price, cost, format_amount, format_duration, format_price

CANDIDATES_SHOWN = 8
REJECTIONS_SHOWN = 6


def print_plan(quote: market.QuoteResult, *, stderr: bool = False) -> None:
    """Print the candidates, best first, and what keeps the others out."""
    line = tell if stderr else say
    if quote.candidates:
        heads = (
            "provider",
            "GPU",
            "memory>",
            "free>",
            "price now>",
            "per hour>",
            "expected>",
            "isolation",
            "note",
        )
        table(heads, (_row(found) for found in quote.candidates[:CANDIDATES_SHOWN]), stderr=stderr)
        more = len(quote.candidates) - CANDIDATES_SHOWN
        if more > 0:
            line(f"and {more} more")
    else:
        line(f"none of the {quote.offers_known} known offers matches")
    print_rejections(quote.rejections, stderr=stderr)


def print_rejections(rejections: tuple[market.Rejection, ...], *, stderr: bool = False) -> None:
    """Print why offers do not match, and what would change that."""
    line = tell if stderr else say
    for rejection in rejections[:REJECTIONS_SHOWN]:
        change = f"; try {rejection.change}" if rejection.change else ""
        line(f"  not: {rejection.detail}{change}")
    more = len(rejections) - REJECTIONS_SHOWN
    if more > 0:
        line(f"  and {more} more reasons")


def _row(candidate: market.Candidate) -> tuple[str, ...]:
    offer = candidate.offer
    late = "" if candidate.affordable else "above --max-price now"
    return (
        short_peer(offer.provider),
        offer.model,
        format_mib(offer.memory_mib),
        f"{offer.free}/{offer.quantity}",
        format_price(offer.price_now),
        format_amount(candidate.hourly),
        format_amount(candidate.total),
        ",".join(offer.isolation),
        ", ".join(note for note in (simulated_mark(offer.simulated), late) if note),
    )


def print_limits(requirement: market.Requirement, duration_ms: int, max_price: int, max_spend: int) -> None:
    """Print on stderr what a run binds itself to."""
    most = cost_line(max_price, requirement.quantity, duration_ms)
    tell(f"limits: {format_price(max_price)} a GPU, {most}; never more than {format_amount(max_spend)} in all")


def cost_line(price: int, quantity: int, duration_ms: int) -> str:
    """Return "2 GPUs for 1h 00m: at most $0.80"."""
    gpus = "1 GPU" if quantity == 1 else f"{quantity} GPUs"
    total = format_amount(cost(Price(price), quantity, duration_ms))
    return f"{gpus} for {format_duration(duration_ms)}: at most {total}"
