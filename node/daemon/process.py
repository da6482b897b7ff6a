"""One daemon from start to stop: builds every room, wires them, and takes them down in order.

      configuration ─▶ key, database ─▶ devices, tiers ─▶ swarm ─▶ market ─▶ RPC ─▶ READY
                                                                          stop ─▶ RPC, market, swarm, database

Refuses to hold jobs: keepers do, and go on when this process ends.
"""

import os
import shutil
import signal
import stat
from pathlib import Path

import trio

from node import __version__
from node.clock import SystemClock
from node.config import Config, Loaded
from node.daemon.handlers import handlers_of
from node.daemon.keepers import KeeperProcesses, keeper_host, refuse_long_paths
from node.daemon.metrics import serve_metrics
from node.daemon.notify import beat, notify
from node.daemon.probing import probe_tiers
from node.daemon.state import Daemon
from node.devices import DeviceLocks, DeviceNodes, NvmlSource, SimulatedSource, combined
from node.errors import NodeError, StoreError
from node.keys import load_or_create, state_root
from node.log import configure, get_logger
from node.market.context import Context
from node.market.inventory import Inventory, host_share
from node.market.market import Market
from node.ports import DeviceSource, Probe, TaskStatus
from node.rpc.paths import SOCKET_NAME
from node.rpc.server import serve
from node.store import Store
from node.swarm import open_swarm

log = get_logger(__name__)

MIB = 1024 * 1024
GROUP = "gpunode"


def run(loaded: Loaded) -> None:
    """Run the daemon until SIGTERM, SIGINT or `daemon.stop`. Raises NodeError when it cannot start."""
    config = loaded.config
    configure(config.log.level, json_lines=config.log.json_lines)
    os.umask(0o077)
    problem: NodeError | None = None
    try:
        trio.run(_main, loaded, strict_exception_groups=True)
    except* NodeError as group:
        problem = _first(group)
    except* Exception as group:
        log.critical("daemon.crashed", exc_info=group)  # a bug: nobody else will see where
        raise
    if problem is not None:
        raise problem


def _first(group: BaseExceptionGroup[NodeError]) -> NodeError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, NodeError):
        raise TypeError("a group of NodeErrors holds NodeErrors") from error
    return error


async def _main(loaded: Loaded) -> None:
    config = loaded.config
    root = _prepare_directories(config)
    key = load_or_create(root / "node.key")
    store = Store(root / "node.db")
    try:
        clock = SystemClock()
        keepers = keeper_host(config.runtime_dir)
        source = device_source(config)
        probes = await probe_tiers(config.lend.isolation, config.runtime_dir)
        inventory = await _inventory(config, source, clock, key.public_key, probes)
        secret = config.network.key
        async with open_swarm(
            key.reveal_seed(),
            listen=config.network.listen,
            network=config.network.id,
            network_key=b"" if secret is None else secret.reveal(),
            bootstrap=(*config.network.bootstrap, *await _remembered_addresses(store)),
            max_peers=config.network.max_peers,
            agent=f"gpunode/{__version__}",
        ) as network:
            context = Context(
                store=store,
                network=network,
                signer=key,
                network_id=config.network.id,
                network_name=config.network.name,
                clock=clock,
                keepers=keepers,
                lease_root=root / "leases",
            )
            market = Market(context, config, inventory)
            daemon = Daemon(
                context=context,
                market=market,
                inventory=inventory,
                loaded=loaded,
                probes=probes,
                started_at=clock.now(),
                started_boot_ms=clock.boot_ms(),
                socket=config.runtime_dir / SOCKET_NAME,
                root=root,
            )
            await _serve(config, daemon, keepers)
    finally:
        store.close()


async def _serve(config: Config, daemon: Daemon, keepers: KeeperProcesses) -> None:
    group = _admin_group()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keepers.run)
        await nursery.start(daemon.market.run)
        nursery.start_soon(serve_metrics, config.metrics.port, daemon)
        async with trio.open_nursery() as serving:
            await serving.start(_serve_rpc, daemon, group)
            serving.start_soon(beat)
            notify("READY=1", f"STATUS=node {daemon.peer_id}")
            log.info("daemon.ready", node=daemon.peer_id, network=config.network.name, socket=str(daemon.socket))
            await _wait_for_stop(daemon)
            notify("STOPPING=1")
            log.info("daemon.stopping", mode=daemon.stop_mode)
            serving.cancel_scope.cancel()
        nursery.cancel_scope.cancel()


async def _serve_rpc(
    daemon: Daemon, group: int | None, *, task_status: TaskStatus = trio.TASK_STATUS_IGNORED
) -> None:
    await serve(
        handlers_of(daemon),
        daemon.socket,
        group=group,
        admin_gids=frozenset() if group is None else frozenset({group}),
        task_status=task_status,
    )


async def _wait_for_stop(daemon: Daemon) -> None:
    async with trio.open_nursery() as nursery:

        async def on_signal() -> None:
            with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async for number in signals:
                    log.info("daemon.signal", signal=signal.Signals(number).name)
                    nursery.cancel_scope.cancel()

        async def on_request() -> None:
            await daemon.stop_wanted.wait()
            nursery.cancel_scope.cancel()

        nursery.start_soon(on_signal)
        nursery.start_soon(on_request)


def _prepare_directories(config: Config) -> Path:
    """Make the state and runtime directories; return this machine's part of the state."""
    refuse_long_paths(config.runtime_dir)
    try:
        config.state_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
        root = state_root(config.state_dir)
        root.mkdir(mode=0o711, parents=True, exist_ok=True)
        (root / "leases").mkdir(mode=0o711, exist_ok=True)
        if os.geteuid() == 0:
            # Keepers of other users' jobs run as those users and pass through here; the umask has taken that away.
            for directory in (config.state_dir, root, root / "leases"):
                # Nothing is taken away here: that others may write is for `load_or_create` to see.
                directory.chmod(stat.S_IMODE(directory.stat().st_mode) | 0o011)
        config.runtime_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"cannot make {error.filename}: {error.strerror}",
            hint="set state_dir and runtime_dir, or mend the permissions",
        ) from None
    return root


def device_source(config: Config) -> DeviceSource:
    """Return where devices come from: the configuration's simulated ones, and NVML."""
    nvml = NvmlSource(DeviceLocks(config.state_dir), DeviceNodes())
    if not config.simulated_devices:
        return nvml
    return combined(SimulatedSource(config.simulated_devices), nvml)


async def _inventory(
    config: Config, source: DeviceSource, clock: SystemClock, provider: bytes, probes: tuple[Probe, ...]
) -> Inventory:
    devices = await source.poll()
    disk_free_mib = shutil.disk_usage(config.state_dir).free // MIB
    share = host_share(config.lend, len(devices), disk_free_mib)
    tiers = tuple(probe.tier for probe in probes if probe.works)
    for probe in probes:
        if not probe.works and config.lend.enabled:
            log.warning("daemon.tier_unavailable", tier=probe.tier, problem=probe.proves, hint=probe.hint)
    return Inventory(source, config.lend, clock, provider, tiers, share)


async def _remembered_addresses(store: Store) -> tuple[str, ...]:
    rows = await store.transaction(lambda tx: list(tx.peers.where("addresses != ''")))
    return tuple(address for row in rows for address in row.addresses.split())


def _admin_group() -> int | None:
    """Return the gid of the administrators' group when we are the system's service and it exists."""
    if os.geteuid() != 0:
        return None
    import grp  # noqa: PLC0415

    try:
        return grp.getgrnam(GROUP).gr_gid
    except KeyError:
        return None
