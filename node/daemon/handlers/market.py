"""quote and offers.list: what can be bought, and what it would cost."""

from node.daemon.state import Daemon
from node.daemon.views import candidate_entry, offer_entry, rejections_of, requirement_of
from node.errors import BadArgument
from node.rpc.method import Caller, Handlers
from node.rpc.methods import market as api
from protocol.envelope import open_as_untrusted
from protocol.errors import ProtocolError
from protocol.matching import Matches, Requirement, is_model_match, match
from protocol.records import DeviceSpec, Offer
from protocol.units import Price, cost


def priced(state: Daemon, wanted: Requirement) -> Matches:
    """Match a requirement against the book now. Raises BadArgument for one that makes no sense."""
    now = state.context.clock.now()
    try:
        return match(wanted, state.market.book.known_offers(), now)
    except ValueError as error:
        raise BadArgument(str(error)) from None


def is_model(pattern: str, device: DeviceSpec) -> bool:
    """Return whether a device is of the model that people wrote; "" is every model. Raises BadArgument."""
    try:
        return not pattern or is_model_match(pattern, device)
    except ValueError as error:
        raise BadArgument(str(error)) from None


def handlers(state: Daemon) -> Handlers:
    """Return the group's handlers."""

    async def quote(params: api.QuoteParams, caller: Caller) -> api.QuoteResult:
        del caller
        now = state.context.clock.now()
        wanted = requirement_of(params.requirement, params.duration_ms, state.context.node)
        matches = priced(state, wanted)
        price = wanted.max_price
        if price is None and matches.candidates:
            price = matches.candidates[0].price
        return api.QuoteResult(
            quoted_at=now,
            candidates=tuple(candidate_entry(found, wanted, now) for found in matches.candidates),
            max_price=price,
            max_spend=None if price is None else cost(Price(price), wanted.quantity, params.duration_ms),
            rejections=rejections_of(matches),
            offers_known=len(matches.candidates) + len(matches.rejections),
        )

    async def offers(params: api.OffersListParams, caller: Caller) -> api.OffersListResult:
        del caller
        now = state.context.clock.now()
        entries = [
            offer_entry(offer, now)
            for offer in state.market.book.live_offers(now)
            if is_model(params.model, offer.record.device)
        ]
        for desk in state.market.seller.auctions.values():
            try:
                own = open_as_untrusted(desk.offer or b"", Offer, state.context.network_id)
            except ProtocolError:
                continue  # withdrawn, or not published yet
            if is_model(params.model, own.record.device):
                entries.append(offer_entry(own, now, own=True))
        shown = [entry for entry in entries if params.simulated or not entry.simulated]
        shown.sort(key=lambda entry: (entry.price_now, entry.provider, entry.listing))
        return api.OffersListResult(listed_at=now, offers=tuple(shown))

    return {api.QUOTE.name: quote, api.OFFERS.name: offers}
