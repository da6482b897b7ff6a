"""daemon.* and doctor.run: the daemon about itself."""

import os
import shutil
import tomllib

import trio

from node import __version__
from node.config import as_toml
from node.daemon.handlers.jobs import entry_of
from node.daemon.handlers.lend import device_entries, earned, lend_state
from node.daemon.state import Daemon
from node.errors import NodeError
from node.market.leases import LeaseState
from node.ports import DeviceHealth
from node.rpc.method import Caller, Handlers, Nothing
from node.rpc.methods import daemon as api
from protocol.machines.lease import AFTER_JOB_PHASES, FailReason
from protocol.units import format_duration

DISK_LOW_MIB = 1024
MIB = 1024 * 1024
DRAIN_POLL_S = 1.0


def handlers(state: Daemon) -> Handlers:
    """Return the group's handlers."""

    async def status(params: Nothing, caller: Caller) -> api.DaemonStatus:
        del params
        return await _status(state, caller)

    async def stop(params: api.StopParams, caller: Caller) -> api.StopResult:
        del caller
        live = _live_leases(state)
        state.stop_mode = params.mode
        if params.mode is api.StopMode.KEEP:
            trio.lowlevel.spawn_system_task(_stop_soon, state)
        else:
            state.is_draining = True
            state.market.seller.pause(None)
            await state.market.seller.refresh()
            trio.lowlevel.spawn_system_task(_drain, state, params.mode is api.StopMode.NOW)
        return api.StopResult(mode=params.mode, leases=len(live))

    async def config(params: Nothing, caller: Caller) -> api.ConfigResult:
        del params, caller
        loaded = state.loaded
        return api.ConfigResult(
            path=str(loaded.path) if loaded.path is not None else "", config=tomllib.loads(as_toml(loaded))
        )

    async def doctor(params: Nothing, caller: Caller) -> api.DoctorResult:
        del params, caller
        return api.DoctorResult(checks=tuple(_checks(state)))

    return {
        api.STATUS.name: status,
        api.STOP.name: stop,
        api.CONFIG.name: config,
        api.DOCTOR.name: doctor,
    }


async def _status(state: Daemon, caller: Caller) -> api.DaemonStatus:
    context, network = state.context, state.context.network
    now, peers = context.clock.now(), context.network.peers()
    word, detail = lend_state(state)
    got, spent = await earned(state)
    unfinished = list(state.market.jobs.by_id.values())
    visible = [job for job in unfinished if caller.owns(job.row.uid)]
    config = state.loaded.config
    return api.DaemonStatus(
        version=__version__,
        node=state.peer_id,
        pid=os.getpid(),
        started_at=state.started_at,
        now=now,
        uptime_ms=max(0, context.clock.boot_ms() - state.started_boot_ms),
        socket=str(state.socket),
        state_dir=str(state.root),
        config_path=str(state.loaded.path) if state.loaded.path is not None else "",
        draining=state.is_draining,
        swarm=api.SwarmStatus(
            network=config.network.name,
            keyed=not config.network.is_open,
            addresses=network.addresses,
            peers_connected=sum(1 for peer in peers if peer.connected),
            peers_known=len(peers),
            offers_known=sum(1 for _ in state.market.book.live_offers(now)),
        ),
        lending=word,
        lending_detail=detail,
        devices=device_entries(state),
        jobs=tuple([await entry_of(state, await state.known_job(job.row)) for job in visible]),
        jobs_hidden=len(unfinished) - len(visible),
        earned=got,
        spent=spent,
        notes=tuple(_notes(state)),
    )


def _notes(state: Daemon) -> list[str]:
    skew = state.market.skew.problem()
    notes = [skew] if skew else []
    notes += state.market.notes
    wait_ms = state.market.seller.sells_from - state.context.clock.now()
    if wait_ms > 0 and state.market.seller.auctions:
        forgotten = "leases that the database has forgotten may be out"
        notes.append(f"no device is sold for another {format_duration(wait_ms)}: {forgotten}")
    free_mib = shutil.disk_usage(state.root).free // MIB
    if free_mib < DISK_LOW_MIB:
        notes.append(f"the disk of {state.root} is nearly full: {free_mib} MiB left")
    return notes


def _checks(state: Daemon) -> list[api.Check]:
    ok, warn, fail = api.CheckStatus.OK, api.CheckStatus.WARN, api.CheckStatus.FAIL
    checks = [
        api.Check(
            name=f"sandbox.{probe.tier}",
            status=ok if probe.works else fail,
            detail=probe.proves,
            hint="" if probe.works else probe.hint,
        )
        for probe in state.probes
    ]
    devices = [listed.device for listed in state.inventory.devices.values()]
    if not devices:
        checks.append(
            api.Check(name="devices", status=warn, detail=state.inventory.problem, hint="only needed to lend")
        )
    for device in devices:
        name = f"device.{device.index}"
        label = f"{device.model} {device.uuid}" + (" (SIMULATED)" if device.simulated else "")
        healthy = device.health in (DeviceHealth.OK, DeviceHealth.BUSY)
        status = ok if healthy else fail
        checks.append(
            api.Check(name=name, status=status, detail=f"{label}: {device.problem or device.health.value}")
        )
    connected = sum(1 for peer in state.context.network.peers() if peer.connected)
    checks.append(
        api.Check(
            name="peers",
            status=ok if connected else warn,
            detail=f"{connected} peers connected",
            hint="" if connected else "gpunode peers connect ADDRESS_OR_INVITATION",
        )
    )
    checks.append(_clock_check(state))
    for note in _notes(state):
        checks.append(api.Check(name="note", status=warn, detail=note))
    return checks


def _clock_check(state: Daemon) -> api.Check:
    skew, problem = state.market.skew.estimate(), state.market.skew.problem()
    if problem:
        detail = f"{problem}: no offer looks live from here, or bids are refused"
        hint = "timedatectl set-ntp true   (or: apt-get install chrony)"
        return api.Check(name="clock.peers", status=api.CheckStatus.FAIL, detail=detail, hint=hint)
    detail = "no peer has told its time yet" if skew is None else f"within 5 s of the clocks of {skew.peers} peers"
    return api.Check(name="clock.peers", status=api.CheckStatus.OK, detail=detail)


def _live_leases(state: Daemon) -> list[bytes]:
    """Return the leases whose jobs may still run. Results that wait to be collected keep nobody: keepers do."""
    states = (LeaseState.COUNTERSIGNED, LeaseState.GRANTED)
    return [
        lease
        for lease, live in state.market.leases.live.items()
        if live.row.state in states and (live.status is None or live.status.phase not in AFTER_JOB_PHASES)
    ]


async def _stop_soon(state: Daemon) -> None:
    await trio.sleep(0.05)  # the reply goes first
    state.stop_wanted.set()


async def _drain(state: Daemon, now: bool) -> None:
    """Wait for every lease to end (told to, with `now`), then stop."""
    if now:
        for lease in _live_leases(state):
            try:
                await state.market.leases.cancel(lease, FailReason.SHUTDOWN, "the daemon was told to stop now")
            except NodeError as error:
                state.market.note(f"a lease could not be told to end: {error}")
    while _live_leases(state):
        await trio.sleep(DRAIN_POLL_S)
    state.stop_wanted.set()
