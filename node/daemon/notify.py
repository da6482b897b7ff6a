"""Telling systemd how we are: READY, STOPPING, STATUS, and the watchdog's heartbeat from the event loop.

The protocol of sd_notify(3): datagrams to the socket in NOTIFY_SOCKET. Does nothing where there is none.
"""

import os
import socket

import trio


def notify(*lines: str) -> None:
    """Send `lines` ("READY=1") to systemd, if it listens. Never raises: systemd being away is not our fault."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.sendto("\n".join(lines).encode(), address)
    except OSError:
        return


def watchdog_interval_s() -> float | None:
    """Return how often systemd wants to hear from us (half of what it allows), or None."""
    microseconds, process = os.environ.get("WATCHDOG_USEC"), os.environ.get("WATCHDOG_PID")
    if not microseconds or not microseconds.isdigit() or (process and process != str(os.getpid())):
        return None
    return int(microseconds) / 2_000_000


async def beat() -> None:
    """Send the watchdog's heartbeat from the event loop, for ever: a loop that hangs is restarted by systemd."""
    interval_s = watchdog_interval_s()
    if interval_s is None:
        return
    while True:
        notify("WATCHDOG=1")
        await trio.sleep(interval_s)
