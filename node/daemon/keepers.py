"""Starting keepers: as plain processes, or as transient systemd units where systemd runs the daemon.

A keeper outlives its daemon: a session of its own, no pipe to us, its log in the lease's directory. It starts as
`python -P -m node.keeper LEASE_DIR SOCKET` with cwd `/`, so that nothing in the caller's directory is imported.
Refuses to follow keepers: `node.market.leases` does.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import trio

from node.errors import JobError
from node.log import get_logger

log = get_logger(__name__)

SOCKET_NAME_SIZE = 12
SOCKET_PATH_MAX = 100
LOG_NAME = "keeper.log"
SLICE = "gpunode.slice"
SYSTEMD_RUN_TIMEOUT_S = 15
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
    """Starts keepers as plain processes."""

    def __init__(self, runtime_dir: Path) -> None:
        self._sockets = runtime_dir / "k"
        self._children: list[subprocess.Popen[bytes]] = []

    def prepare(self) -> None:
        """Make the directory of the keepers' sockets; others may pass, not look."""
        self._sockets.mkdir(mode=0o711, parents=True, exist_ok=True)
        self._sockets.chmod(0o711)

    def socket_path(self, lease: bytes) -> Path:
        """Return where the lease's keeper listens. Raises JobError when the path would be too long."""
        path = self._sockets / lease.hex()[:SOCKET_NAME_SIZE] / "s"
        if len(os.fsencode(path)) > SOCKET_PATH_MAX:
            raise JobError(
                f"the keepers' sockets would have paths of more than {SOCKET_PATH_MAX} bytes: {path}",
                hint="set runtime_dir to a shorter path",
            )
        return path

    async def start(self, directory: Path, socket: Path, uid: int, gid: int) -> None:
        """Start a keeper. Raises JobError when it cannot be started."""
        self._reap()
        try:
            _prepare_socket_directory(socket.parent, uid, gid)
            # From the main thread: what a keeper starts must not hang on a worker thread of ours.
            self._children.append(self._spawn(directory, socket, uid, gid))
        except (OSError, subprocess.SubprocessError) as error:
            raise JobError(f"cannot start a keeper: {error}") from None
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

    def _reap(self) -> None:
        """Collect keepers that have ended: they are our children while we are the daemon that started them."""
        self._children = [child for child in self._children if child.poll() is None]


class KeeperUnits(KeeperProcesses):
    """Starts keepers as transient systemd units: they are not in the daemon's unit, and a restart spares them."""

    async def start(self, directory: Path, socket: Path, uid: int, gid: int) -> None:
        """Start a keeper's unit. Raises JobError with systemd's own words."""
        _prepare_socket_directory(socket.parent, uid, gid)
        command = unit_command(directory, socket, uid, gid, is_user_manager=os.geteuid() != 0)
        try:
            with trio.fail_after(SYSTEMD_RUN_TIMEOUT_S):
                result = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
        except (OSError, trio.TooSlowError) as error:
            raise JobError(f"cannot start a keeper's unit: {error or 'systemd-run does not answer'}") from None
        if result.returncode:
            problem = result.stderr.decode(errors="replace").strip()[:500]
            raise JobError(f"cannot start a keeper's unit: {problem}")


def keeper_host(runtime_dir: Path) -> KeeperProcesses:
    """Return the way to start keepers here: units where systemd runs us as a service, else processes."""
    runs_as_service = "INVOCATION_ID" in os.environ and shutil.which("systemd-run") is not None
    host = KeeperUnits(runtime_dir) if runs_as_service else KeeperProcesses(runtime_dir)
    host.prepare()
    return host


def keeper_command(directory: Path, socket: Path) -> list[str]:
    """Return the argv of a keeper."""
    return [sys.executable, "-P", "-m", "node.keeper", str(directory), str(socket)]


def keeper_environment() -> dict[str, str]:
    """Return our environment without what systemd meant for us alone."""
    return {name: value for name, value in os.environ.items() if name not in DROPPED_VARIABLES}


def unit_command(directory: Path, socket: Path, uid: int, gid: int, *, is_user_manager: bool) -> list[str]:
    """Return the `systemd-run` command of a keeper's unit."""
    options = [
        "--quiet",
        "--collect",
        "--no-block",
        f"--unit=gpunode-keeper-{directory.name}",
        "--description=gpunode lease keeper",
        "--working-directory=/",
        f"--property=StandardOutput=append:{directory / LOG_NAME}",
        f"--property=StandardError=append:{directory / LOG_NAME}",
        "--property=OOMPolicy=continue",
        "--property=KillMode=control-group",
        "--property=Delegate=yes",
        "--property=UMask=0077",
    ]
    if is_user_manager:
        options.append("--user")
    else:
        options.append(f"--slice={SLICE}")
        if uid != 0:
            options += [f"--uid={uid}", f"--gid={gid}"]
    return ["systemd-run", *options, "--", *keeper_command(directory, socket)]


def _prepare_socket_directory(directory: Path, uid: int, gid: int) -> None:
    directory.mkdir(mode=0o700, exist_ok=True)
    if os.geteuid() == 0 and uid != 0:
        os.chown(directory, uid, gid)
