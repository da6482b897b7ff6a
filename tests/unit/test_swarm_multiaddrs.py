"""Multiaddrs of the swarm's one form parse; everything else is refused with what is wrong."""

import pytest

from node.swarm.multiaddrs import is_reachable_from, parse_multiaddr
from protocol.identity import NodeId, peer_id

NODE = NodeId(bytes(range(32)))
PEER = peer_id(NODE)


@pytest.mark.parametrize(
    "text",
    [
        "/ip4/0.0.0.0/tcp/0",
        f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER}",
        f"/ip6/2001:db8::1/tcp/65535/p2p/{PEER}",
        f"/dns/gpu-1.example.org/tcp/4001/p2p/{PEER}",
        "/dns4/localhost/tcp/1",
        "/dns6/a.b/tcp/1",
    ],
)
def test_good_addresses_round_trip(text: str):
    address = parse_multiaddr(text)
    assert str(address) == text
    assert address.node in {None, NODE}
    assert text.startswith(address.transport)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not like"),
        ("192.0.2.7:4001", "is not like"),
        ("/ip4/192.0.2.7", "is not like"),
        ("/ip4/192.0.2.7/tcp/4001/", "is not like"),
        ("/ip4/192.0.2.7/udp/4001/quic-v1", "is not like"),
        ("/ip4/192.0.2.7/udp/4001", "not 'udp'"),
        ("/ip4/192.0.2.7/tcp/4001/ws/x", "not /ws"),
        ("/ip4/192.0.2.7/tcp/65536", "not a TCP port"),
        ("/ip4/192.0.2.7/tcp/-1", "not a TCP port"),
        ("/ip4/192.0.2.7/tcp/\u0664", "not a TCP port"),
        ("/ip4/192.0.2.300/tcp/1", "not an IP address"),
        ("/ip4/2001:db8::1/tcp/1", "not an ip4 address"),
        ("/ip6/192.0.2.1/tcp/1", "not an ip6 address"),
        ("/ip6/fe80::1%eth0/tcp/1", "not an ip6 address"),
        ("/ip6zone/eth0/tcp/1", "is none of"),
        ("/dns4/a b/tcp/1", "not a host name"),
        ("/dns4/-x/tcp/1", "not a host name"),
        ("/dns4//tcp/1", "not a host name"),
        ("/ip4/192.0.2.7/tcp/1/p2p/Qm123", "not the peer id|not a peer id"),
        ("/ip4/192.0.2.7/tcp/1/p2p/", "not a peer id"),
        ("/dns4/" + "x" * 300 + "/tcp/1", "at most 200"),
    ],
)
def test_bad_addresses_say_why(text: str, reason: str):
    with pytest.raises(ValueError, match=reason):
        parse_multiaddr(text)


@pytest.mark.parametrize(
    ("claimed", "observed", "believed"),
    [
        ("/ip4/1.1.1.1/tcp/1", "9.9.9.9", True),
        ("/ip4/1.1.1.1/tcp/1", "10.0.0.1", True),
        ("/ip4/10.0.0.2/tcp/1", "10.0.0.1", True),
        ("/ip4/10.0.0.2/tcp/1", "127.0.0.1", True),
        ("/ip4/10.0.0.2/tcp/1", "9.9.9.9", False),
        ("/ip4/127.0.0.1/tcp/1", "127.0.0.1", True),
        ("/ip4/127.0.0.1/tcp/1", "10.0.0.1", False),
        ("/ip4/127.0.0.1/tcp/1", "9.9.9.9", False),
        ("/ip6/::1/tcp/1", "127.0.0.1", True),
        ("/ip6/::1/tcp/1", "2606:4700::1", False),
        ("/ip4/169.254.169.254/tcp/80", "10.0.0.1", False),
        ("/ip4/224.0.0.1/tcp/80", "10.0.0.1", False),
        ("/ip4/0.0.0.0/tcp/80", "127.0.0.1", False),
        ("/ip4/1.1.1.1/tcp/0", "9.9.9.9", False),
        ("/dns4/metadata.internal/tcp/80", "9.9.9.9", False),
    ],
)
def test_peers_cannot_send_us_to_our_own_machines(claimed: str, observed: str, believed: bool):
    assert is_reachable_from(parse_multiaddr(claimed), observed) is believed
