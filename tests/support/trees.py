"""A daemon's whole process tree, and what is left on the machine of leases below a folder.

Processes are found by their leases' locks and by the folder that their command line names; none is ended that
does not belong to the test.
"""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from support.daemons import POLL_S, WAIT_S_MAX, TestDaemon

from node.lease.files import LeaseStatus, read_status
from node.lease.lock import holder_of

CONTROL_GROUPS = Path("/sys/fs/cgroup")
GROUP_PREFIX = "gpunode-job-gpunode-"
LEASE_PART = 24
"""So many letters of the lease's id are in the name of its job's control group."""


def lease_directories(daemon: TestDaemon) -> list[Path]:
    """Return the lease directories below the daemon's state, the oldest first."""
    return sorted(
        (path for path in daemon.folder.glob("state/*/leases/[0-9a-f]*") if path.is_dir()),
        key=lambda path: path.stat().st_ctime_ns,
    )


def lease_directory(daemon: TestDaemon, lease: str) -> Path:
    """Return one lease's directory."""
    return next(path for path in lease_directories(daemon) if path.name == lease)


def status_of(directory: Path) -> LeaseStatus | None:
    """Return what the lease's keeper has written last."""
    with contextlib.suppress(OSError):
        return read_status(directory)
    return None


def keeper_of(directory: Path) -> int:
    """Return the pid of the keeper that holds the lease."""
    holder = holder_of(directory)
    assert holder is not None, f"nobody holds {directory}"
    return holder.pid


def tree_of(daemon: TestDaemon) -> list[int]:
    """Return the pids of the daemon's keepers and of all else that names its folder, but not the daemon's."""
    found = {holder.pid for path in lease_directories(daemon) if (holder := holder_of(path)) is not None}
    own = daemon.process.pid if daemon.process is not None else 0
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) not in (own, os.getpid()):
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                if any(word.startswith(f"{daemon.folder}/".encode()) for word in words):
                    found.add(int(process.name))
    return sorted(found)


def kill_tree(daemon: TestDaemon) -> None:
    """End the daemon, its keepers and their jobs as a power cut would."""
    daemon.kill()
    for pid in tree_of(daemon):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not tree_of(daemon), f"the processes of {daemon.name} to be gone")


def kill_keeper(directory: Path) -> int:
    """End the lease's keeper as a crash would; return its pid."""
    pid = keeper_of(directory)
    os.kill(pid, signal.SIGKILL)
    return pid


def until(condition: object, what: str) -> None:
    """Wait until `condition()` is true."""
    assert callable(condition)
    limit = time.monotonic() + WAIT_S_MAX
    while not condition():
        assert time.monotonic() < limit, f"waited in vain for {what}"
        time.sleep(POLL_S)


def left_behind(folder: Path, leases: tuple[str, ...] = ()) -> list[str]:
    """Return what is on the machine of leases below `folder`: mounts, loop devices, control groups, processes."""
    found = [f"mount {line}" for line in _mounts() if f"{folder}/" in line]
    devices = subprocess.run(["losetup", "-a"], capture_output=True, text=True, check=True).stdout
    found += [f"loop device {line}" for line in devices.splitlines() if f"{folder}/" in line]
    names = {f"{GROUP_PREFIX}{lease[:LEASE_PART]}" for lease in leases}
    for where, folders, _files in os.walk(CONTROL_GROUPS):
        found += [f"control group {where}/{name}" for name in folders if name in names]
    return found


def take_down(folder: Path) -> None:
    """Unmount everything below `folder` and remove the control groups of the leases there; for a test's end."""
    for line in _mounts():
        place = line.split()[4]
        if place.startswith(f"{folder}/"):
            subprocess.run(["umount", "-l", place], capture_output=True, check=False)
    leases = {path.name[:LEASE_PART] for path in folder.glob("*/state/*/leases/[0-9a-f]*")}
    names = {f"{GROUP_PREFIX}{lease}" for lease in leases}
    for where, folders, _files in os.walk(CONTROL_GROUPS):
        for name in names & set(folders):
            with contextlib.suppress(OSError):
                Path(where, name).rmdir()


def zombies_of(parents: set[int]) -> list[int]:
    """Return the zombies among the children of `parents`."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                text = (process / "stat").read_text(errors="replace")
                state, parent = text[text.rindex(")") + 2 :].split()[:2]
                if state == "Z" and int(parent) in parents:
                    found.append(int(process.name))
    return found


def udp_ports_of(pids: set[int]) -> set[int]:
    """Return the UDP ports that are bound by these processes."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    target = str(descriptor.readlink())
                    if target.startswith("socket:["):
                        inodes.add(target[8:-1])
    ports = set()
    for table in ("/proc/net/udp", "/proc/net/udp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                words = line.split()
                if words[9] in inodes:
                    ports.add(int(words[1].rpartition(":")[2], 16))
    return ports


def _mounts() -> list[str]:
    return Path("/proc/self/mountinfo").read_text().splitlines()
