"""Starting keepers: as plain processes, or as transient systemd units where systemd runs the daemon.

A keeper outlives its daemon: a session of its own, no pipe to us, its log in the lease's directory. It starts as
`python -P -m node.keeper LEASE_DIR SOCKET` with cwd `/`, so that nothing in the caller's directory is imported.
Refuses to follow keepers: `node.market.leases` does.
"""

import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import trio

from node.errors import ConfigError, JobError, NodeError
from node.lease.spare import Spare, connect_spare
from node.log import get_logger
from node.market.context import HasEnded

log = get_logger(__name__)

SOCKET_NAME_SIZE = 12
SOCKET_PATH_MAX = 100
LOG_NAME = "keeper.log"
SLICE = "gpunode.slice"
SYSTEMD_RUN_TIMEOUT_S = 15
SPARE_RETRY_S = 5.0
UNIT_OPTIONS = (
    "--quiet",
    "--collect",
    "--no-block",
    "--description=gpunode lease keeper",
    "--working-directory=/",
    "--property=OOMPolicy=continue",
    "--property=KillMode=control-group",
    "--property=Delegate=yes",
    "--property=UMask=0077",
)
"""What every keeper's unit has."""
DROPPED_VARIABLES = (
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_FDNAMES",
)
"""What systemd tells its service is not for the service's children."""


class KeeperProcesses:
    """Starts keepers as plain processes, from a spare that has imported everything where there is one."""

    def __init__(self, runtime_dir: Path) -> None:
        self._sockets = runtime_dir / "k"
        self._children: list[subprocess.Popen[bytes]] = []
        self._spare: Spare | None = None
        self._spare_wanted = trio.Event()
        self._keep_spare_until = 0.0
        self._spares_made = 0

    def prepare(self) -> None:
        """Make the directory of the keepers' sockets; others may pass, not look."""
        self._sockets.mkdir(mode=0o711, parents=True, exist_ok=True)
        self._sockets.chmod(0o711)

    def socket_path(self, lease: bytes) -> Path:
        """Return where the lease's keeper listens. Raises ConfigError when the path would be too long."""
        return _checked(self._sockets / lease.hex()[:SOCKET_NAME_SIZE] / "s")

    async def start(self, directory: Path, socket: Path, uid: int, gid: int) -> HasEnded:
        """Start a keeper, and return what tells whether it has ended. Raises JobError when it can't be started."""
        try:
            _prepare_socket_directory(socket.parent, uid, gid)
            spare, self._spare = self._spare, None
            if spare is not None:
                self._spare_wanted.set()
                try:
                    pid = await spare.assign(directory, socket, uid, gid)
                except NodeError as error:
                    log.warning("keepers.spare_failed", problem=str(error))
                else:
                    return self._ended_check(pid)
            return await self._launch(directory, socket, uid, gid)
        except (OSError, subprocess.SubprocessError) as error:
            raise JobError(f"cannot start a keeper: {error}") from None

    def expect(self, linger_s: float) -> None:
        """Have a spare ready as soon as possible, and for `linger_s` seconds: a lease is likely."""
        self._keep_spare_until = max(self._keep_spare_until, trio.current_time() + linger_s)
        self._spare_wanted.set()

    async def run(self) -> None:
        """Keep a spare while one may be of use, and collect keepers that have ended, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_reaping)
            await self._keep_spares()

    async def _keep_spares(self) -> None:
        try:
            while True:
                self._spare_wanted = trio.Event()
                left_s = self._keep_spare_until - trio.current_time()
                if left_s <= 0:
                    await self._drop_spare()
                    await self._spare_wanted.wait()
                elif self._spare is None:
                    await self._make_spare()
                else:
                    with trio.move_on_after(left_s):
                        await self._spare_wanted.wait()
        finally:
            await self._drop_spare()

    async def _make_spare(self) -> None:
        self._spares_made += 1
        directory = self._sockets / f"spare-{os.getpid()}-{self._spares_made}"
        try:
            directory.mkdir(mode=0o700)
            await self._launch_spare(directory / "s")
            self._spare = await connect_spare(directory / "s")
        except (NodeError, OSError, subprocess.SubprocessError) as error:
            # Without one a lease waits for Python to start: slower, nothing worse.
            log.warning("keepers.no_spare", problem=str(error))
            await trio.sleep(SPARE_RETRY_S)
        finally:
            # Also when we are told to stop meanwhile: without its directory the spare knows that nobody comes.
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(partial(shutil.rmtree, directory, ignore_errors=True))

    async def _drop_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            await spare.aclose()

    def _ended_check(self, pid: int) -> HasEnded:
        child = next((child for child in self._children if child.pid == pid), None)
        if child is not None:
            return lambda: child.poll() is not None
        return lambda: not Path(f"/proc/{pid}").exists()  # systemd's child

    async def _launch(self, directory: Path, socket: Path, uid: int, gid: int) -> HasEnded:
        # From the main thread: what a keeper starts must not hang on a worker thread of ours.
        child = self._spawn(directory, socket, uid, gid)
        self._children.append(child)
        await trio.lowlevel.checkpoint()
        return lambda: child.poll() is not None

    async def _launch_spare(self, socket: Path) -> None:
        self._children.append(_spawn_spare(socket))
        await trio.lowlevel.checkpoint()

    def _spawn(self, directory: Path, socket: Path, uid: int, gid: int) -> subprocess.Popen[bytes]:
        changes_user = os.geteuid() == 0 and uid != 0
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            log_file = os.open(
                LOG_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600, dir_fd=descriptor
            )
        finally:
            os.close(descriptor)
        try:
            if changes_user:
                os.fchown(log_file, uid, gid)
            return subprocess.Popen(
                keeper_command(directory, socket),
                cwd="/",
                env=keeper_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                start_new_session=True,
                user=uid if changes_user else None,
                group=gid if changes_user else None,
                extra_groups=[] if changes_user else None,
            )
        finally:
            os.close(log_file)

    async def _keep_reaping(self) -> None:
        """Collect keepers that have ended: they are our children while we are the daemon that started them."""
        with trio.open_signal_receiver(signal.SIGCHLD) as signals:
            while True:
                self._children = [child for child in self._children if child.poll() is None]
                await anext(signals)


class KeeperUnits(KeeperProcesses):
    """Starts keepers as transient systemd units: they are not in the daemon's unit, and a restart spares them."""

    async def _launch(self, directory: Path, socket: Path, uid: int, gid: int) -> HasEnded:
        await _systemd_run(unit_command(directory, socket, uid, gid, is_user_manager=os.geteuid() != 0))
        return lambda: False

    async def _launch_spare(self, socket: Path) -> None:
        await _systemd_run(spare_unit_command(socket, is_user_manager=os.geteuid() != 0))


def _spawn_spare(socket: Path) -> subprocess.Popen[bytes]:
    """Start a spare; once it has a lease, it writes into the lease's log."""
    return subprocess.Popen(
        spare_command(socket),
        cwd="/",
        env=keeper_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


async def _systemd_run(command: list[str]) -> None:
    try:
        with trio.fail_after(SYSTEMD_RUN_TIMEOUT_S):
            result = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
    except (OSError, trio.TooSlowError) as error:
        raise JobError(f"cannot start a keeper's unit: {error or 'systemd-run does not answer'}") from None
    if result.returncode:
        problem = result.stderr.decode(errors="replace").strip()[:500]
        raise JobError(f"cannot start a keeper's unit: {problem}")


def refuse_long_paths(runtime_dir: Path) -> None:
    """Raise ConfigError when keepers could not listen below `runtime_dir`. Creates nothing."""
    _checked(runtime_dir / "k" / ("0" * SOCKET_NAME_SIZE) / "s")


def _checked(path: Path) -> Path:
    if len(os.fsencode(path)) > SOCKET_PATH_MAX:
        raise ConfigError(
            f"the keepers' sockets would have paths of more than {SOCKET_PATH_MAX} bytes: {path}",
            hint="set runtime_dir to a shorter path",
        )
    return path


def runs_as_service() -> bool:
    """Return whether systemd runs this very process as a service, and starts units for us.

    SYSTEMD_EXEC_PID (systemd.exec(5)) names the service's own process: a daemon started from a shell of some
    service inherits the variable with another pid.
    """
    is_service = os.environ.get("SYSTEMD_EXEC_PID") == str(os.getpid())
    return is_service and shutil.which("systemd-run") is not None


def keeper_host(runtime_dir: Path) -> KeeperProcesses:
    """Return the way to start keepers here: units where systemd runs us as a service, else processes."""
    host = KeeperUnits(runtime_dir) if runs_as_service() else KeeperProcesses(runtime_dir)
    host.prepare()
    return host


def keeper_command(directory: Path, socket: Path) -> list[str]:
    """Return the argv of a keeper."""
    return [sys.executable, "-P", "-m", "node.keeper", str(directory), str(socket)]


def keeper_environment() -> dict[str, str]:
    """Return our environment without what systemd meant for us alone."""
    return {name: value for name, value in os.environ.items() if name not in DROPPED_VARIABLES}


def spare_command(socket: Path) -> list[str]:
    """Return the argv of a spare keeper."""
    return [sys.executable, "-P", "-m", "node.keeper", "--spare", str(socket)]


def unit_command(directory: Path, socket: Path, uid: int, gid: int, *, is_user_manager: bool) -> list[str]:
    """Return the `systemd-run` command of a keeper's unit."""
    options = [
        f"--unit=gpunode-keeper-{directory.name}",
        f"--property=StandardOutput=append:{directory / LOG_NAME}",
        f"--property=StandardError=append:{directory / LOG_NAME}",
    ]
    if not is_user_manager and uid != 0:
        options += [f"--uid={uid}", f"--gid={gid}"]
    return _in_a_unit(options, keeper_command(directory, socket), is_user_manager=is_user_manager)


def spare_unit_command(socket: Path, *, is_user_manager: bool) -> list[str]:
    """Return the `systemd-run` command of a spare's unit: it becomes a keeper's when it gets a lease."""
    options = [f"--unit=gpunode-{socket.parent.name}"]
    return _in_a_unit(options, spare_command(socket), is_user_manager=is_user_manager)


def _in_a_unit(options: list[str], command: list[str], *, is_user_manager: bool) -> list[str]:
    where = "--user" if is_user_manager else f"--slice={SLICE}"
    return ["systemd-run", *UNIT_OPTIONS, where, *options, "--", *command]


def _prepare_socket_directory(directory: Path, uid: int, gid: int) -> None:
    directory.mkdir(mode=0o700, exist_ok=True)
    if os.geteuid() == 0 and uid != 0:
        os.chown(directory, uid, gid)
