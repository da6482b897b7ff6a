"""What `gpunode doctor` looks at on this machine itself, without a daemon. Each finding says how to mend it.

Reads files below `root` and asks the kernel; changes nothing. The checks of GPUs and isolation really ask the
driver and really start something. Refuses to fail as a whole: a check that can't be made says so.
"""

import ctypes
import getpass
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from node.errors import NodeError
from node.rpc.api import daemon

if TYPE_CHECKING:
    from node.config import Config

GIB = 1024**3
DISK_FREE_MIN = 1 * GIB
DISK_FREE_ENOUGH = 10 * GIB
_ENCRYPTED_SWAP = ("/dev/mapper/", "/dev/dm-")
_TIME_ERROR = 5
"""adjtimex(2): the clock is not synchronised."""
_TIMEX_SIZE = 512
"""More than struct timex has on any architecture; all zero, it only asks."""

OK, WARN, FAIL = daemon.CheckStatus.OK, daemon.CheckStatus.WARN, daemon.CheckStatus.FAIL


def finding(name: str, status: daemon.CheckStatus, detail: str, hint: str = "") -> daemon.Check:
    """Return one finding."""
    return daemon.Check(name=name, status=status, detail=detail, hint=hint)


def local_checks(config: "Config", *, daemon_runs: bool, root: Path = Path("/")) -> Iterator[daemon.Check]:
    """Yield the findings about this machine, one check at a time."""
    checks: tuple[Callable[[], Iterator[daemon.Check]], ...] = (
        lambda: check_state(config.state_dir),
        check_clock,
        lambda: check_swap(root),
        lambda: check_ports(config, daemon_runs=daemon_runs),
        lambda: check_firewall(config, root),
        lambda: check_user(root, os.geteuid()),
    )
    for check in checks:
        try:
            yield from check()
        except OSError as error:
            yield finding("check", WARN, f"a check could not be made: {error}")
    if not daemon_runs:
        yield from measured_checks(config)


def check_state(state_dir: Path) -> Iterator[daemon.Check]:
    """Check that the state directory is on a local disk with room."""
    from node.keys import refuse_network_file_system

    place = state_dir
    while not place.exists():
        place = place.parent
    try:
        refuse_network_file_system(place)
    except NodeError as error:
        yield finding("state", FAIL, str(error), error.hint)
    else:
        yield finding("state", OK, f"{state_dir} is on a local disk")
    free = shutil.disk_usage(place).free
    detail = f"{free / GIB:.1f} GiB free for {state_dir}"
    if free < DISK_FREE_MIN:
        yield finding("disk", FAIL, detail, "make room, or set state_dir to another disk")
    elif free < DISK_FREE_ENOUGH:
        yield finding("disk", WARN, detail, "make room: jobs' files need it")
    else:
        yield finding("disk", OK, detail)


def check_clock() -> Iterator[daemon.Check]:
    """Check that something keeps the clock right: offers and bids are dated."""
    if clock_is_synchronised():
        yield finding("clock", OK, "the clock is synchronised")
    else:
        yield finding(
            "clock", WARN, "nothing keeps the clock right, and offers and bids are dated",
            "apt-get install chrony   (or: timedatectl set-ntp true)",
        )  # fmt: skip


def clock_is_synchronised() -> bool:
    """Return whether the kernel's clock is kept by NTP or the like (adjtimex(2))."""
    buffer = ctypes.create_string_buffer(_TIMEX_SIZE)
    return int(ctypes.CDLL(None).adjtimex(buffer)) != _TIME_ERROR


def check_swap(root: Path) -> Iterator[daemon.Check]:
    """Check that what jobs hold in memory can't end on a disk in clear."""
    lines = (root / "proc/swaps").read_text().splitlines()[1:]
    plain = [
        device
        for device in (line.split()[0] for line in lines if line)
        if not device.startswith(_ENCRYPTED_SWAP) and "/zram" not in device
    ]
    if plain:
        yield finding(
            "swap", WARN, f"{', '.join(plain)} may hold what jobs had in memory, in clear",
            "swapoff -a, or encrypt it: cryptsetup with a random key in /etc/crypttab",
        )  # fmt: skip
    else:
        yield finding("swap", OK, "no swap on a disk in clear")


def check_ports(config: "Config", *, daemon_runs: bool) -> Iterator[daemon.Check]:
    """Check that the TCP ports to listen on are free, unless the daemon has them."""
    for address in config.network.listen:
        _, family, host, _, port = address.split("/")[:5]
        if daemon_runs or port == "0":
            yield finding("port", OK, f"TCP port {port} at {host}" + (" (any free one)" if port == "0" else ""))
            continue
        kind = socket.AF_INET6 if family == "ip6" else socket.AF_INET
        with socket.socket(kind, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, int(port)))
            except OSError as error:
                yield finding(
                    "port", FAIL, f"TCP port {port} at {host} can't be listened on: {error.strerror}",
                    f"see who has it: ss -ltnp 'sport = :{port}'; or set network.listen",
                )  # fmt: skip
            else:
                yield finding("port", OK, f"TCP port {port} at {host} is free")


def check_firewall(config: "Config", root: Path) -> Iterator[daemon.Check]:
    """Print the lines that open a firewall which is there."""
    tcp = [address.split("/")[4] for address in config.network.listen]
    low, high = config.tunnel.port_min, config.tunnel.port_max
    name, lines = _firewall(root, [port for port in tcp if port != "0"], low, high)
    if not name:
        yield finding("firewall", OK, "neither ufw nor firewalld is active here; a router's is not seen")
    elif not low and config.lend.enabled:
        yield finding(
            "firewall", WARN, f"{name} is active, and leases use any UDP port",
            "set port_min and port_max in [tunnel], and run gpunode doctor again for the lines that open them",
        )  # fmt: skip
    else:
        yield finding("firewall", WARN, f"{name} is active: these ports must be open in it", lines)


def _firewall(root: Path, tcp: list[str], low: int, high: int) -> tuple[str, str]:
    """Return the active firewall's name and the commands that open the ports."""
    ufw = root / "etc/ufw/ufw.conf"
    if ufw.exists() and "ENABLED=yes" in ufw.read_text():
        lines = [f"ufw allow {port}/tcp" for port in tcp] + ([f"ufw allow {low}:{high}/udp"] if low else [])
        return "ufw", "; ".join(lines)
    if (root / "run/firewalld").exists():
        ports = [f"--add-port={port}/tcp" for port in tcp] + ([f"--add-port={low}-{high}/udp"] if low else [])
        return "firewalld", f"firewall-cmd --permanent {' '.join(ports)} && firewall-cmd --reload"
    return "", ""


def check_user(root: Path, uid: int) -> Iterator[daemon.Check]:
    """Check what a daemon without root needs: subordinate uids, user namespaces, lingering."""
    if uid == 0:
        return
    user = getpass.getuser()
    subuid = root / "etc/subuid"
    owners = {line.split(":")[0] for line in subuid.read_text().splitlines()} if subuid.exists() else set()
    if owners & {user, str(uid)}:
        yield finding("subuid", OK, f"{user} has subordinate uids")
    else:
        yield finding(
            "subuid", WARN, f"{user} has no subordinate uids: without root, no job can be isolated",
            f"sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {user}",
        )  # fmt: skip
    restricted = root / "proc/sys/kernel/apparmor_restrict_unprivileged_userns"
    if restricted.exists() and restricted.read_text().strip() == "1":
        yield finding(
            "userns", WARN, "AppArmor keeps ordinary users from making user namespaces",
            "sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0, or run the daemon as a system service",
        )  # fmt: skip
    if (root / "run/systemd/system").exists():
        if (root / "var/lib/systemd/linger" / user).exists():
            yield finding("linger", OK, f"{user}'s services run on after logout")
        else:
            yield finding(
                "linger", WARN, f"{user}'s services, and with them the daemon, end at logout",
                f"sudo loginctl enable-linger {user}",
            )  # fmt: skip


def measured_checks(config: "Config") -> Iterator[daemon.Check]:
    """Ask the driver for GPUs, and start something in each isolation tier. Loads trio."""
    import trio

    from node.devices import DeviceLocks, NvmlSource
    from node.ports import Device, DeviceHealth, Probe
    from node.sandbox import construct

    source = NvmlSource(DeviceLocks(config.state_dir))
    tiers = construct(allow_unsafe=config.lend.unsafe_process)

    async def measure() -> tuple[tuple[Device, ...], list[Probe]]:
        return await source.poll(), [await tier.probe() for tier in tiers]

    devices, probes = trio.run(measure)
    missing = FAIL if config.lend.enabled and not config.simulated_devices else WARN
    if not devices:
        yield finding(
            "driver", missing, source.problem() or "there is no GPU here", "nvidia-smi must show the GPUs"
        )
    for device in devices:
        status = OK if device.health in {DeviceHealth.OK, DeviceHealth.BUSY} else missing
        detail = f"GPU {device.index}: {device.model}, {device.health.value}"
        yield finding("driver", status, detail, device.problem)
    for simulated in config.simulated_devices:
        yield finding("driver", OK, f"{simulated.count} x {simulated.model}: SIMULATED, by the configuration")
    wanted = FAIL if config.lend.enabled else WARN
    for probe in probes:
        status = OK if probe.works else wanted
        yield finding(f"sandbox.{probe.tier}", status, probe.proves or "works", probe.hint)
