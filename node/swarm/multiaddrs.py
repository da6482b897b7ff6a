"""Text multiaddrs of the one form that the swarm speaks: a host, a TCP port and, mostly, a peer id.

`/ip4|ip6|dns|dns4|dns6/HOST/tcp/PORT[/p2p/PEER]`. Refuses every other transport by name, and never loads libp2p:
the command line parses addresses too.
"""

import ipaddress
import re

import msgspec

from protocol.identity import NodeId, node_from_peer_id, peer_id

MULTIADDR_SIZE_MAX = 200
"""Longest accepted multiaddr, in characters."""
_HOST_NAME = re.compile(
    r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9_-]{1,63})*\.?\Z"
)
_KINDS = ("ip4", "ip6", "dns", "dns4", "dns6")


class Address(msgspec.Struct, frozen=True):
    """A parsed multiaddr."""

    kind: str
    """One of ip4, ip6, dns, dns4, dns6."""
    host: str
    port: int
    node: NodeId | None

    @property
    def transport(self) -> str:
        """The multiaddr without its peer id."""
        return f"/{self.kind}/{self.host}/tcp/{self.port}"

    def __str__(self) -> str:
        return self.transport + (f"/p2p/{peer_id(self.node)}" if self.node is not None else "")


def parse_multiaddr(text: str) -> Address:
    """Return the address in `text`; raise ValueError saying what is wrong with it."""
    if len(text) > MULTIADDR_SIZE_MAX:
        raise ValueError(f"a multiaddr has at most {MULTIADDR_SIZE_MAX} characters")
    parts = text.split("/")
    if parts[0] or len(parts) not in {5, 7}:
        raise ValueError(f"{text!r} is not like /ip4/192.0.2.7/tcp/4001/p2p/12D3Koo...")
    kind, host, transport, port = parts[1:5]
    if kind not in _KINDS:
        raise ValueError(f"{text!r}: {kind!r} is none of {', '.join(_KINDS)}")
    if transport != "tcp":
        raise ValueError(f"{text!r}: the swarm speaks tcp, not {transport!r}")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 65536):
        raise ValueError(f"{text!r}: {port!r} is not a TCP port")
    node = None
    if len(parts) == 7:
        if parts[5] != "p2p":
            raise ValueError(f"{text!r}: after the port comes /p2p/PEER, not /{parts[5]}")
        node = node_from_peer_id(parts[6])
    return Address(kind, _host(text, kind, host), int(port), node)


def is_reachable_from(address: Address, observed: str) -> bool:
    """Return whether a peer seen at the IP address `observed` may send us to `address`.

    Otherwise a stranger could make us dial services of our own machine or network: loopback addresses are
    believed of loopback peers, private ones of private peers. Names are not believed at all.
    """
    if not address.kind.startswith("ip"):
        return False
    host, seen = ipaddress.ip_address(address.host), ipaddress.ip_address(observed)
    if host.is_unspecified or host.is_multicast or host.is_link_local or address.port == 0:
        return False
    if host.is_loopback:
        return seen.is_loopback
    if not host.is_global:
        return not seen.is_global
    return True


def _host(text: str, kind: str, host: str) -> str:
    if kind.startswith("dns"):
        if not _HOST_NAME.match(host):
            raise ValueError(f"{text!r}: {host!r} is not a host name")
        return host
    try:
        parsed = ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(f"{text!r}: {host!r} is not an IP address") from None
    if parsed.version != (4 if kind == "ip4" else 6) or "%" in host:
        raise ValueError(f"{text!r}: {host!r} is not an {kind} address")
    return str(parsed)
