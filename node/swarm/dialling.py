"""Dialling: the IP address behind a name, listening without surprises, why a dial failed, when to try again."""

import os
import secrets
import socket

import trio
from multiaddr.utils import get_network_addrs

from node.errors import SwarmError
from node.swarm.multiaddrs import Address

RESOLVED_MAX = 4
"""Addresses that are tried of one name."""
_FAMILIES = {"dns": socket.AF_UNSPEC, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}


async def resolve(address: Address) -> tuple[Address, ...]:
    """Return `address` with its name replaced by IP addresses, as this machine's resolver has them.

    Raises SwarmError when the name is not known.
    """
    family = _FAMILIES.get(address.kind)
    if family is None:
        return (address,)
    try:
        found = await trio.socket.getaddrinfo(address.host, address.port, family, socket.SOCK_STREAM)
    except OSError as error:
        raise SwarmError(
            f"{address.host} cannot be resolved: {error.strerror or error}",
            hint="check the name, and this machine's DNS",
        ) from None
    resolved: dict[Address, None] = {}
    for kind, _, _, _, name in found:
        resolved[
            Address("ip6" if kind == socket.AF_INET6 else "ip4", str(name[0]), address.port, address.node)
        ] = None
    return tuple(resolved)[:RESOLVED_MAX]


def check_free(address: Address) -> None:
    """Raise SwarmError when another program listens on `address`.

    libp2p sets SO_REUSEPORT, with which two daemons would share a port and each get half of the connections.
    """
    family = socket.AF_INET6 if address.kind == "ip6" else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind((address.host, address.port))
    except OSError as error:
        raise SwarmError(
            f"cannot listen on {address.transport}: {error.strerror or error}",
            hint="choose another port in [network] listen, or stop the program that uses this one",
        ) from None


def expand(address: Address) -> tuple[Address, ...]:
    """Return the addresses of this machine that a wildcard listening address stands for; loopback last."""
    if address.host not in {"0.0.0.0", "::"}:  # noqa: S104 - compared, not bound
        return (address,)
    family, loopback = (4, "127.0.0.1") if address.kind == "ip4" else (6, "::1")
    hosts = dict.fromkeys([*get_network_addrs(family), loopback])
    return tuple(Address(address.kind, host, address.port, address.node) for host in hosts)


def explain(error: BaseException) -> str:
    """Return in a few words why a dial failed: the operating system's reason, else the first cause's text."""
    if "Peer ID mismatch" in str(error):
        return "another node answers there"
    words = ""
    deepest = error
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, OSError) and current.errno is not None:
            return os.strerror(current.errno).lower()
        words = _WORDS.get(type(current).__name__, words)
        deepest = current
        pending += [current.__context__, current.__cause__]
        if isinstance(current, BaseExceptionGroup):
            pending += current.exceptions
    return words or str(deepest).partition("\n")[0] or type(deepest).__name__


_WORDS = {
    "SecurityUpgradeFailure": "it does not complete the Noise handshake",
    "PeerIDMismatchesPubkey": "another node answers there",
    "InvalidSignature": "another node answers there",
    "MuxerUpgradeFailure": "it does not speak yamux",
    "IncompleteReadError": "it closed the connection in the handshake",
}


RECONNECT_GROWTH_PERMILLE = 1_300
"""Each wait for a lost peer is so much longer than the last: about a third of the time that it has been away, so
that a daemon that is restarted is found again almost at once, and one that stays away costs little."""


class Backoff:
    """Waits longer each time, with jitter, so that many nodes do not come back in step."""

    def __init__(self, initial_ms: int, max_ms: int, *, growth_permille: int = 2_000) -> None:
        self._initial_ms = initial_ms
        self._max_ms = max_ms
        self._growth_permille = growth_permille
        self._next_ms = initial_ms

    def reset(self) -> None:
        """Begin with the shortest wait again."""
        self._next_ms = self._initial_ms

    async def wait(self) -> None:
        """Wait between half of the present length and all of it."""
        length_ms = self._next_ms
        self._next_ms = min(self._max_ms, length_ms * self._growth_permille // 1000)
        await trio.sleep((length_ms // 2 + secrets.randbelow(length_ms // 2 + 1)) / 1000)
