"""lend: whether and at what price this machine's GPUs are lent, and taking them back."""

import time

import click

from node.cli import values
from node.cli.connection import call
from node.cli.daemon import print_devices
from node.cli.output import (
    ask,
    format_age,
    format_time,
    json_option,
    print_json,
    say,
    short_hash,
    short_peer,
    simulated_mark,
    table,
    tell,
)
from node.errors import EXIT_OWN
from node.rpc.api import Nothing
from node.rpc.api import lend as api
from protocol.units import format_amount, format_duration, format_price

DEVICES_HELP = "GPUs are named by index, UUID, or the beginning of a UUID."


@click.group(invoke_without_command=True)
@json_option
@click.pass_context
def lend(context: click.Context, /, as_json: bool) -> None:
    """Lend this machine's GPUs, and take them back. Without a command: what is lent, to whom, for how much."""
    if context.invoked_subcommand is None:
        _show(call(api.STATUS, Nothing()), as_json=as_json)
    elif as_json:
        raise click.UsageError(f"write --json after the command: gpunode lend {context.invoked_subcommand} --json")


def _show(found: api.LendStatus, *, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    say(f"lending is {found.state.value}" + (f": {found.detail}" if found.detail else ""))
    tiers = ", ".join(found.isolation) or "no isolation works here; see: gpunode doctor"
    say(f"isolation: {tiers}; earned {format_amount(found.earned)} in all")
    say()
    now = time.time_ns() // 1_000_000
    print_devices(found.devices, now)
    if found.leases:
        say()
        heads = ("lease", "renter", "GPUs>", "state", "price>", "since", "ends in>", "metered>", "paid>")
        table(heads, (_lease_row(lease, now) for lease in found.leases))


def _lease_row(lease: api.LeaseEntry, now: int) -> tuple[str, ...]:
    return (
        short_hash(lease.lease),
        short_peer(lease.renter),
        str(lease.quantity),
        lease.state,
        format_price(lease.price),
        format_time(lease.since),
        format_age(lease.until - now),
        format_duration(lease.metered_ms),
        format_amount(lease.paid),
    )


@lend.command(help=f"Lend these GPUs, or all; it stays so after a restart. {DEVICES_HELP}")
@click.argument("gpus", nargs=-1, metavar="[GPU]...")
@json_option
def on(gpus: tuple[str, ...], as_json: bool) -> None:
    """Start lending."""
    _show(call(api.ON, api.DevicesParams(devices=gpus)), as_json=as_json)


@lend.command(help=f"Lend these GPUs, or all, no more; running leases go on to their end. {DEVICES_HELP}")
@click.argument("gpus", nargs=-1, metavar="[GPU]...")
@json_option
def off(gpus: tuple[str, ...], as_json: bool) -> None:
    """Stop lending."""
    _show(call(api.OFF, api.DevicesParams(devices=gpus)), as_json=as_json)


@lend.command()
@click.option("--for", "duration_ms", type=values.duration, metavar="TIME", help="How long; else until `lend on`.")
@json_option
def pause(duration_ms: int | None, as_json: bool) -> None:
    """Sell nothing for a while; running leases go on."""
    _show(call(api.PAUSE, api.PauseParams(duration_ms=duration_ms)), as_json=as_json)


@lend.command(
    help=f"Take GPUs back from their renters, after the promised notice; not lent until `lend on`. {DEVICES_HELP}"
)
@click.argument("gpus", nargs=-1, metavar="[GPU]...")
@click.option("--all", "everything", is_flag=True, help="All GPUs of this machine.")
@click.option("--now", is_flag=True, help="Without notice: renters get the refund that the offer states.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
def reclaim(gpus: tuple[str, ...], everything: bool, now: bool, yes: bool, as_json: bool) -> int:
    """Interrupt leases."""
    if bool(gpus) == everything:
        raise click.UsageError("name the GPUs to take back, or say --all")
    which = "every GPU" if everything else f"GPU {', '.join(gpus)}"
    how = "now, without notice" if now else "after the promised notice"
    if not yes and not ask(
        f"interrupt whatever runs on {which}, {how}?", refusal="there is no terminal to ask on: add --yes"
    ):
        tell("nothing was interrupted")
        return EXIT_OWN
    found = call(api.RECLAIM, api.ReclaimParams(devices=gpus, now=now))
    if as_json:
        print_json(found)
    elif not found.leases:
        say("no lease was in the way; not lent any more, until: gpunode lend on")
    else:
        until = f"; free by {format_time(found.free_at)}" if found.free_at is not None else ""
        say(f"interrupting {', '.join(short_hash(lease) for lease in found.leases)}{until}")
        say("not lent any more, until: gpunode lend on")
    return 0


@lend.command()
@json_option
def devices(as_json: bool) -> None:
    """Show this machine's GPUs, measured now."""
    found = call(api.DEVICES, Nothing())
    if as_json:
        print_json(found)
        return
    if found.problem:
        say(f"! {found.problem}")
    print_devices(found.devices, time.time_ns() // 1_000_000)
    for device in found.devices:
        say(f"  {device.index}: {device.uuid}")


@lend.command()
@click.argument("model", default="")
@click.option("--start", type=values.price, metavar="$/GPU-H", help="Where the price starts to fall.")
@click.option("--reserve", type=values.price, metavar="$/GPU-H", help="Where it stops: never sold for less.")
@click.option("--auto", "automatic", is_flag=True, help="Back to the formula and the costs.")
@json_option
def price(model: str, start: int | None, reserve: int | None, automatic: bool, as_json: bool) -> None:
    """Show the prices of what is lent, or set them for MODEL.

    Prices set here hold until they are set again or --auto; running leases keep theirs.
    """
    if automatic and (start is not None or reserve is not None):
        raise click.UsageError("--auto excludes --start and --reserve")
    if start is not None and reserve is not None and reserve > start:
        raise click.UsageError("--reserve is above --start")
    params = api.PriceParams(model=model, start=start, reserve=reserve, automatic=automatic)
    found = call(api.PRICE, params)
    if as_json:
        print_json(found)
    elif not found.prices:
        say("nothing is lent, so nothing has a price; see: gpunode lend")
    else:
        heads = ("listing", "GPU", "free>", "start>", "reserve>", "price now>", "set by", "note")
        table(heads, (_price_row(entry) for entry in found.prices))


def _price_row(entry: api.PriceEntry) -> tuple[str, ...]:
    return (
        entry.listing,
        entry.model,
        f"{entry.free}/{entry.quantity}",
        format_price(entry.start),
        format_price(entry.reserve),
        format_price(entry.price_now),
        "formula" if entry.automatic else "owner",
        simulated_mark(entry.simulated),
    )
