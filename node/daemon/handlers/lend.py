"""lend.*: the provider's side."""

from node.daemon.handlers.market import is_model
from node.daemon.state import Daemon
from node.daemon.views import device_entry, lease_entry
from node.errors import BadArgument, NodeError, NotFound
from node.market.leases import LeaseState
from node.rpc.method import Caller, Handlers, Nothing
from node.rpc.methods import lend as api
from protocol.machines.lease import FailReason
from protocol.pricing import clock_price
from protocol.units import Millis, format_duration


def lease_entries(state: Daemon) -> tuple[api.LeaseEntry, ...]:
    """Return our live leases to others."""
    return tuple(
        lease_entry(live.row, live.status)
        for live in state.market.leases.live.values()
        if live.row.role == "provider" and live.row.state in (LeaseState.COUNTERSIGNED, LeaseState.GRANTED)
    )


def device_entries(state: Daemon) -> tuple[api.DeviceEntry, ...]:
    """Return this machine's devices as last measured."""
    now, leases = state.context.clock.now(), lease_entries(state)
    return tuple(
        device_entry(listed, state.market.seller, leases, now) for listed in state.inventory.devices.values()
    )


def lend_state(state: Daemon) -> tuple[api.LendState, str]:
    """Return whether we sell, and why not."""
    seller = state.market.seller
    if not seller.is_paused:
        return api.LendState.ON, ""
    if seller.paused_until is not None:
        left_ms = max(0, seller.paused_until - state.context.clock.now())
        return api.LendState.PAUSED, f"for another {format_duration(left_ms)}"
    if seller.is_off:
        return api.LendState.OFF, "switch it on with `gpunode lend on`"
    return api.LendState.PAUSED, "until `gpunode lend on`"


async def earned(state: Daemon) -> tuple[int, int]:
    """Return (earned, spent) by accepted receipts, in nano-credits; simulated leases count for nothing."""
    rows = await state.context.store.transaction(
        lambda tx: list(tx.entries.where("kind = 'receipt' and simulated = 0 and confirmed = 1"))
    )
    return (
        sum(row.amount for row in rows if row.amount > 0),
        -sum(row.amount for row in rows if row.amount < 0),
    )


async def _status(state: Daemon) -> api.LendStatus:
    word, detail = lend_state(state)
    return api.LendStatus(
        state=word,
        detail=detail,
        devices=device_entries(state),
        leases=lease_entries(state),
        isolation=tuple(probe.tier for probe in state.probes if probe.works),
        earned=(await earned(state))[0],
    )


async def _remember(state: Daemon) -> None:
    await state.context.store.transaction(state.market.seller.remember)


def _find_devices(state: Daemon, references: tuple[str, ...]) -> list[str]:
    devices = [listed.device for listed in state.inventory.devices.values()]
    if not references:
        return [device.uuid for device in devices]
    found = []
    for reference in references:
        matching = [
            device.uuid
            for device in devices
            if reference in (device.uuid, str(device.index)) or device.uuid.startswith(reference)
        ]
        if not matching:
            raise NotFound(f"there is no device {reference!r}", hint="see `gpunode lend devices`")
        if len(matching) > 1:
            raise BadArgument(f"{reference!r} names {len(matching)} devices", hint="give more of the UUID")
        found += matching
    return found


def handlers(state: Daemon) -> Handlers:
    """Return the group's handlers."""
    seller, inventory = state.market.seller, state.inventory

    async def status(params: Nothing, caller: Caller) -> api.LendStatus:
        del params, caller
        return await _status(state)

    async def on(params: api.DevicesParams, caller: Caller) -> api.LendStatus:
        del caller
        inventory.switched_off -= set(_find_devices(state, params.devices))
        seller.switch(on=True)
        await _remember(state)
        await seller.refresh()
        return await _status(state)

    async def off(params: api.DevicesParams, caller: Caller) -> api.LendStatus:
        del caller
        if params.devices:
            inventory.switched_off |= set(_find_devices(state, params.devices))
        else:
            seller.switch(on=False)
        await _remember(state)
        await seller.refresh()
        return await _status(state)

    async def pause(params: api.PauseParams, caller: Caller) -> api.LendStatus:
        del caller
        now = state.context.clock.now()
        seller.pause(None if params.duration_ms is None else Millis(now + params.duration_ms))
        await seller.refresh()
        return await _status(state)

    async def reclaim(params: api.ReclaimParams, caller: Caller) -> api.ReclaimResult:
        del caller
        return await _reclaim(state, params)

    async def devices(params: Nothing, caller: Caller) -> api.DevicesResult:
        del params, caller
        await seller.refresh()
        return api.DevicesResult(devices=device_entries(state), problem=inventory.problem)

    async def price(params: api.PriceParams, caller: Caller) -> api.PriceResult:
        del caller
        return await _price(state, params)

    return {
        api.STATUS.name: status,
        api.ON.name: on,
        api.OFF.name: off,
        api.PAUSE.name: pause,
        api.RECLAIM.name: reclaim,
        api.DEVICES.name: devices,
        api.PRICE.name: price,
    }


async def _reclaim(state: Daemon, params: api.ReclaimParams) -> api.ReclaimResult:
    wanted = set(_find_devices(state, params.devices))
    keys = {key for key, listed in state.inventory.devices.items() if listed.device.uuid in wanted}
    state.inventory.switched_off |= wanted
    ended, free_at, problems = [], 0, []
    for desk in state.market.seller.auctions.values():
        for sold in desk.auction.leases:
            if not keys & set(sold.keys):
                continue
            terms = desk.auction.listing.terms
            notice_ms = 0 if params.now else terms.notice_ms
            try:
                await state.market.leases.cancel(
                    sold.lease, FailReason.INTERRUPTED, "the owner took the device back", notice_ms=notice_ms
                )
            except NodeError as error:
                problems.append(str(error))
                continue
            ended.append(sold.lease.hex())
            free_at = max(free_at, state.context.clock.now() + notice_ms)
    await _remember(state)
    await state.market.seller.refresh()
    if problems:
        raise NodeError(
            f"{len(problems)} leases could not be told: {problems[0]}", hint="try again in a few seconds"
        )
    return api.ReclaimResult(leases=tuple(ended), free_at=free_at or None)


async def _price(state: Daemon, params: api.PriceParams) -> api.PriceResult:
    seller, now = state.market.seller, state.context.clock.now()
    sets = params.start is not None or params.reserve is not None
    if sets and params.automatic:
        raise BadArgument("either a price or the formula, not both")
    desks = [desk for desk in seller.auctions.values() if is_model(params.model, desk.auction.listing.device)]
    if sets or params.automatic:
        if sets and len(desks) != 1:
            raise BadArgument(
                f"{params.model or 'every model'!r} names {len(desks)} listings",
                hint="name one; see `gpunode lend price`",
            )
        if params.start is not None and params.reserve is not None and params.reserve > params.start:
            raise BadArgument("the reserve price is above the start price")
        for desk in desks:
            seller.override_price(desk.auction.listing.name, params.start, params.reserve)
        await seller.reprice()
    return api.PriceResult(
        prices=tuple(
            api.PriceEntry(
                listing=desk.auction.listing.name,
                model=desk.auction.listing.device.model,
                quantity=len(desk.auction.units),
                free=seller.free_of(desk),
                start=desk.auction.curve.start,
                reserve=desk.auction.curve.reserve,
                price_now=clock_price(desk.auction.curve, now),
                automatic=not seller.has_override(desk.auction.listing.name),
                simulated=desk.auction.listing.simulated,
            )
            for desk in desks
        )
    )
