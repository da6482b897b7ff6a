"""What is left on the machine of leases below a folder: mounts, loop devices, control groups, zombies, ports."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")
GROUP_PREFIX = "gpunode-job-gpunode-"
LEASE_PART = 24
"""So many letters of the lease's id are in the name of its job's control group."""
EMPTY_S_MAX = 5.0
"""How long the processes of a control group may take to go after they were killed."""


def left_behind(folder: Path, leases: Iterable[str]) -> list[str]:
    """Return the mounts and loop devices of `leases` below `folder`."""
    devices = subprocess.run(["losetup", "-a"], capture_output=True, text=True, check=True).stdout
    lines = [f"mount {line}" for line in _mounts()] + [f"loop device {line}" for line in devices.splitlines()]
    leases = set(leases)
    return [line for line in lines if f"{folder}/" in line and any(lease in line for lease in leases)]


def control_groups_of(leases: Iterable[str]) -> list[str]:
    """Return the control groups of the jobs of `leases`."""
    return [f"control group {path}" for path in _groups(leases)]


def take_down(folder: Path) -> None:
    """Unmount all below `folder`, and remove the control groups of the leases there, whose processes are dying."""
    for line in _mounts():
        place = line.split()[4]
        if place.startswith(f"{folder}/"):
            subprocess.run(["umount", "-l", place], capture_output=True, check=False)
    for path in _groups(path.name for path in folder.glob("*/state/*/leases/[0-9a-f]*")):
        _remove_group(path)


def zombies_of(parents: Iterable[int]) -> list[int]:
    """Return the zombies among the children of `parents`."""
    found, wanted = [], set(parents)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            text = (process / "stat").read_text(errors="replace")
            state, parent = text[text.rindex(")") + 2 :].split()[:2]
            if state == "Z" and int(parent) in wanted:
                found.append(int(process.name))
    return found


def udp_ports_of(pids: Iterable[int]) -> set[int]:
    """Return the UDP ports that these processes have bound."""
    sockets = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    sockets.add(str(descriptor.readlink()))
    ports = set()
    for table in (Path("/proc/net/udp"), Path("/proc/net/udp6")):
        if table.exists():
            for words in (line.split() for line in table.read_text().splitlines()[1:]):
                if f"socket:[{words[9]}]" in sockets:
                    ports.add(int(words[1].rpartition(":")[2], 16))
    return ports


def _mounts() -> list[str]:
    return Path("/proc/self/mountinfo").read_text().splitlines()


def _groups(leases: Iterable[str]) -> list[Path]:
    names = {f"{GROUP_PREFIX}{lease[:LEASE_PART]}" for lease in leases}
    if not names:
        return []
    return [
        Path(where, name)
        for where, folders, _files in os.walk(CONTROL_GROUPS)
        for name in folders
        if name in names
    ]


def _remove_group(path: Path) -> None:
    limit = time.monotonic() + EMPTY_S_MAX
    while time.monotonic() < limit:
        try:
            path.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.02)
