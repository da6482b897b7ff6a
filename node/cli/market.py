"""quote, offers: what can be bought, without buying."""

from typing import Any

import click

from node.cli.connection import call, connect
from node.cli.output import (
    format_cuda,
    format_mib,
    json_option,
    print_json,
    say,
    short_hash,
    short_peer,
    simulated_mark,
    table,
)
from node.cli.plan import print_plan
from node.cli.requirement import requirement_from, requirement_options, time_option, with_whole_provider
from node.errors import EXIT_OWN
from node.rpc.api import market
from protocol.units import format_price


@click.command()
@requirement_options
@time_option
@json_option
def quote(time_ms: int, as_json: bool, **given: Any) -> int:  # noqa: ANN401 - the flags of a requirement
    """Show what would match, and what it would cost.

    Binds nobody: prices fall by the second, and others buy. Exit status 125 when nothing matches.
    """
    with connect() as client:
        requirement = with_whole_provider(requirement_from(given), client)
        found = client.call(market.QUOTE, market.QuoteParams(requirement=requirement, duration_ms=time_ms))
    if as_json:
        print_json(found)
    else:
        print_plan(found)
    return 0 if found.candidates else EXIT_OWN


@click.command()
@click.argument("model", default="")
@json_option
def offers(model: str, as_json: bool) -> None:
    """List the live offers.

    Of MODEL, or of all; cheapest first.
    """
    found = call(market.OFFERS, market.OffersListParams(model=model))
    if as_json:
        print_json(found)
    elif not found.offers:
        say("no live offers; see who is connected with: gpunode peers ls")
    else:
        heads = ("offer", "provider", "GPU", "memory>", "CUDA>", "free>", "price now>", "reserve>", "where",
                 "isolation", "note")  # fmt: skip
        table(heads, (_row(offer) for offer in found.offers))


def _row(offer: market.OfferEntry) -> tuple[str, ...]:
    return (
        short_hash(offer.offer),
        short_peer(offer.provider),
        offer.model,
        format_mib(offer.memory_mib),
        format_cuda(offer.cuda),
        f"{offer.free}/{offer.quantity}",
        format_price(offer.price_now),
        format_price(offer.reserve),
        "/".join(part for part in (offer.region, offer.site) if part),
        ",".join(offer.isolation),
        ", ".join(note for note in (simulated_mark(offer.simulated), "own" if offer.own else "") if note),
    )
