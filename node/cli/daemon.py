"""start, stop, status. `start` alone imports the daemon, when it is called."""

import os
import select
from pathlib import Path

import click

from node.cli.connection import call, connect
from node.cli.output import (
    fields,
    format_age,
    format_command,
    format_mib,
    json_option,
    print_json,
    say,
    short_peer,
    simulated_mark,
    table,
    tell,
)
from node.errors import ConfigError
from node.rpc.api import Nothing, daemon, lend
from node.rpc.client import Client, ConnectionLost
from protocol.units import format_amount, format_price


def config_options(command: click.decorators.FC) -> click.decorators.FC:
    """Add --config and --set to a command."""
    command = click.option(
        "--set", "settings", multiple=True, metavar="NAME=VALUE", help="Set any setting: --set network.name=lab."
    )(command)
    return click.option(
        "--config",
        "config_path",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Read this file instead of the default one.",
    )(command)


def split_settings(settings: tuple[str, ...]) -> dict[str, object]:
    """Return the NAME=VALUE pairs of --set. Raises ConfigError."""
    pairs: dict[str, object] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting} has no value", "write it as --set NAME=VALUE")
        pairs[name.strip()] = value
    return pairs


@click.command()
@config_options
def start(config_path: Path | None, settings: tuple[str, ...]) -> None:
    """Run the daemon, in the foreground.

    Logs go to stderr. Ctrl-C or SIGTERM stops the daemon; jobs go on, and the next daemon finds them again.
    As a service: systemctl enable --now gpunode.
    """
    from node.config import load_with_origins

    loaded = load_with_origins(split_settings(settings), os.environ, config_path)
    from node.daemon import run_daemon

    run_daemon(loaded)


@click.command()
@click.option("--drain", is_flag=True, help="Sell nothing more, wait for every lease to end, then stop.")
@click.option("--now", is_flag=True, help="End every lease now, then stop.")
@json_option
def stop(drain: bool, now: bool, as_json: bool) -> None:
    """Stop the daemon; jobs go on unless told otherwise."""
    if drain and now:
        raise click.UsageError("--drain and --now exclude each other")
    mode = daemon.StopMode.DRAIN if drain else daemon.StopMode.NOW if now else daemon.StopMode.KEEP
    with connect() as client:
        pid = client.daemon_pid
        try:
            result = client.call(daemon.STOP, daemon.StopParams(mode=mode))
        except ConnectionLost:
            result = daemon.StopResult(mode=mode, leases=0)  # it stopped before it had answered
        if not as_json:
            tell(_stopping_line(result))
        wait_until_gone(client, pid)
    if as_json:
        print_json(result)
    else:
        say("the daemon has stopped")


def _stopping_line(result: daemon.StopResult) -> str:
    leases = "1 lease" if result.leases == 1 else f"{result.leases} leases"
    if result.mode is daemon.StopMode.DRAIN and result.leases:
        return f"waiting for {leases} to end; Ctrl-C stops this waiting, not the draining"
    if result.mode is daemon.StopMode.NOW and result.leases:
        return f"ending {leases}"
    return f"stopping; {leases} go on without the daemon" if result.leases else "stopping"


def wait_until_gone(client: Client, pid: int) -> None:
    """Wait until the daemon's process has ended (by a pidfd), or has closed its socket where it can't be seen."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        process = -1
    try:
        client.wait_closed()
        if process >= 0:
            poll = select.poll()
            poll.register(process, select.POLLIN)
            poll.poll()
    finally:
        if process >= 0:
            os.close(process)


@click.command()
@json_option
def status(as_json: bool) -> None:
    """Show what the daemon, its GPUs and jobs are doing."""
    found = call(daemon.STATUS, Nothing())
    if as_json:
        print_json(found)
        return
    swarm = found.swarm
    draining = ", draining: it sells nothing and stops when its leases have ended" if found.draining else ""
    say(f"gpunode {found.version}, up {format_age(found.uptime_ms)}, pid {found.pid}{draining}")
    for note in found.notes:
        say(f"! {note}")
    say()
    fields(
        (
            ("node", found.node),
            (
                "network",
                f"{swarm.network} ({'private: it has a key' if swarm.keyed else 'open: anyone can join'})",
            ),
            ("peers", f"{swarm.peers_connected} connected, {swarm.peers_known} known"),
            ("offers", f"{swarm.offers_known} live offers of others"),
            ("listens", "\n".join(swarm.addresses) or "nowhere"),
            ("socket", found.socket),
            ("state", found.state_dir),
            ("config", found.config_path or "no file: defaults"),
            ("lending", found.lending.value + (f": {found.lending_detail}" if found.lending_detail else "")),
            ("money", f"earned {format_amount(found.earned)}, spent {format_amount(found.spent)}, in all"),
        )
    )
    say()
    print_devices(found.devices, found.now)
    print_jobs_of_status(found)


def print_devices(devices: tuple[lend.DeviceEntry, ...], now: int) -> None:
    """Print a table of this machine's devices: price, who rents, health."""
    if not devices:
        say("GPUs: none; see: gpunode doctor")
        return
    heads = (
        "GPU",
        "model",
        "memory>",
        "load>",
        "temp>",
        "use",
        "price now>",
        "reserve>",
        "renter",
        "ends in>",
        "note",
    )
    table(heads, (_device_row(device, now) for device in devices))


def _device_row(device: lend.DeviceEntry, now: int) -> tuple[str, ...]:
    lease = device.lease
    unwell = device.health if device.health != "ok" else ""
    notes = (simulated_mark(device.simulated), unwell, device.problem)
    return (
        f"{device.index}",
        device.model,
        format_mib(device.memory_mib),
        "" if device.utilisation_percent is None else f"{device.utilisation_percent}%",
        "" if device.temperature_c is None else f"{device.temperature_c} C",
        device.use.value.replace("_", " "),
        "" if device.price_now is None else format_price(device.price_now),
        "" if device.reserve is None else format_price(device.reserve),
        short_peer(lease.renter) if lease else "",
        format_age(lease.until - now) if lease else "",
        ", ".join(note for note in notes if note),
    )


def print_jobs_of_status(found: daemon.DaemonStatus) -> None:
    """Print the unfinished jobs in short."""
    hidden = f"{found.jobs_hidden} of other users" if found.jobs_hidden else ""
    if not found.jobs:
        say(f"\njobs: {hidden or 'none running'}")
        return
    say()
    table(
        ("job", "name", "state", "since>", "cost>", "command", "note"),
        (
            (
                job.job,
                job.name,
                job.state.value,
                format_age(found.now - job.created_at),
                format_amount(job.cost),
                format_command(job.command, 40),
                ", ".join(note for note in (simulated_mark(job.simulated), job.detail) if note),
            )
            for job in found.jobs
        ),
    )
    if hidden:
        say(f"and {hidden}")
