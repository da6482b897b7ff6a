"""Which addresses a setting may hold. Refuses to resolve names: this is about their form."""

import ipaddress
import re

from protocol.identity import node_from_peer_id

_LISTEN = re.compile(r"/ip(?P<version>[46])/(?P<address>[0-9A-Fa-f:.]{2,45})/tcp/(?P<port>[0-9]{1,5})")
_DIAL = re.compile(
    r"/(?:ip4|ip6|dns|dns4|dns6)/(?P<host>[0-9A-Za-z:._-]{1,253})/tcp/(?P<port>[0-9]{1,5})"
    r"/p2p/(?P<peer>[0-9A-Za-z]{40,64})"
)
_HOST_LABEL = re.compile(r"[0-9A-Za-z_](?:[0-9A-Za-z_-]{0,61}[0-9A-Za-z_])?")
PORT_MAX = 65535


def is_ip(text: str) -> bool:
    """Return whether `text` is an IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_host(text: str) -> bool:
    """Return whether `text` is an IP address or a host name, without a port."""
    if is_ip(text):
        return True
    labels = text.removesuffix(".").split(".")
    named = len(text) <= 253 and all(_HOST_LABEL.fullmatch(label) for label in labels)
    # A name's last label is no number: "10.0.0.256" is a mistyped address.
    return named and not labels[-1].isdigit()


def is_listen_address(text: str) -> bool:
    """Return whether `text` is a multiaddr to listen on: /ip4/0.0.0.0/tcp/7440 (port 0: any)."""
    match = _LISTEN.fullmatch(text)
    if match is None or not is_ip(match["address"]):
        return False
    version = ipaddress.ip_address(match["address"]).version
    return version == int(match["version"]) and int(match["port"]) <= PORT_MAX


def is_dial_address(text: str) -> bool:
    """Return whether `text` is a peer's multiaddr: /ip4/192.0.2.1/tcp/7440/p2p/12D3Koo..."""
    match = _DIAL.fullmatch(text)
    if match is None or not 0 < int(match["port"]) <= PORT_MAX:
        return False
    try:
        node_from_peer_id(match["peer"])
    except ValueError:
        return False
    return True
