"""Whatever bytes a stranger sends, only the errors come out that are meant for a stranger's bytes."""

import contextlib
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from libp2p.pubsub.pb import rpc_pb2

from node.errors import ConfigError
from node.ports import GossipVerdict
from node.swarm.gossip import Gossip, id_bytes, topic_name
from node.swarm.hello import HelloConfirm, HelloFailed, HelloOpen, decode_hello_untrusted, encode_hello
from node.swarm.invite import PREFIX, Invite, decode_invite, encode_invite
from node.swarm.limits import DEFAULT_LIMITS
from node.swarm.multiaddrs import parse_multiaddr
from node.swarm.peers import PeerState
from protocol.errors import MalformedRecord
from protocol.identity import NodeId, network_id

NETWORK = network_id("test")
OURS, THEIRS = NodeId(b"o" * 32), NodeId(b"t" * 32)
FEW = settings(max_examples=60, deadline=None)


@FEW
@given(st.text(max_size=300) | st.text(alphabet="123ABCabcz", max_size=120).map(lambda text: PREFIX + "1" + text))
def test_no_text_breaks_the_reading_of_invites(text: str):
    with pytest.raises(ConfigError):
        decode_invite(text)


@FEW
@given(st.binary(max_size=64), st.text(min_size=1, max_size=64))
def test_every_network_has_an_invite(key: bytes, name: str):
    with contextlib.suppress(UnicodeEncodeError):  # lone surrogates are no text
        invite = Invite(network_name=name, network_key=key)
        name.encode()
        assert decode_invite(encode_invite(invite)) == invite


@FEW
@given(st.text(max_size=250) | st.lists(st.text(max_size=20), max_size=8).map("/".join))
def test_no_text_breaks_the_reading_of_addresses(text: str):
    with contextlib.suppress(ValueError):
        assert parse_multiaddr(str(parse_multiaddr(text))) == parse_multiaddr(text)


def _mutated(original: bytes) -> st.SearchStrategy[bytes]:
    def change(edits: list[tuple[int, int]], cut: int) -> bytes:
        data = bytearray(original)
        for position, value in edits:
            data[position % len(data)] = value
        return bytes(data[: len(data) - cut])

    edit = st.tuples(st.integers(0, len(original)), st.integers(0, 255))
    return st.builds(change, st.lists(edit, max_size=6), st.integers(0, len(original) // 2))


CONFIRM = encode_hello(HelloConfirm(proof=bytes(32), agent="x", addresses=("/ip4/192.0.2.7/tcp/1",)))


@FEW
@given(st.binary(max_size=300) | _mutated(CONFIRM))
def test_no_bytes_break_the_hello(data: bytes):
    for expected in (HelloOpen, HelloConfirm):
        with contextlib.suppress(MalformedRecord, HelloFailed):
            assert isinstance(decode_hello_untrusted(data, expected), expected)


def _frame() -> bytes:
    topic = topic_name(NETWORK, "offers")
    message = rpc_pb2.Message(
        data=b"x" * 40, topicIDs=[topic], from_id=id_bytes(THEIRS), seqno=b"1" * 8, signature=b"s" * 64, key=b"k"
    )
    rpc = rpc_pb2.RPC(publish=[message], senderRecord=b"r" * 20)
    rpc.subscriptions.add(subscribe=True, topicid=topic)
    rpc.control.ihave.add(topicID=topic, messageIDs=[b"zz"])
    rpc.control.iwant.add(messageIDs=[b"zz"])
    rpc.control.graft.add(topicID=topic)
    rpc.control.prune.add(topicID=topic, backoff=5).peers.add(peerID=b"p")
    encoded: bytes = rpc.SerializeToString()
    return encoded


class Pubsub:
    """Takes what the reader hands on, and judges messages as the real one does."""

    def __init__(self, gossip: Gossip) -> None:
        self.router = self
        self._gossip = gossip

    def handle_subscription(self, _: object, subscription: object) -> None:
        assert len(subscription.topicid) < 200  # type: ignore[attr-defined]

    async def push_msg(self, _: object, message: object) -> None:
        assert not self._gossip.judge(THEIRS, message, lambda _: None)

    async def handle_rpc(self, rpc: object, _: object) -> None:
        assert not rpc.HasField("senderRecord")  # type: ignore[attr-defined]


async def test_no_bytes_break_the_gossip_reader():
    faults: list[str] = []
    counters: Counter[str] = Counter()
    gossip = Gossip(OURS, NETWORK, DEFAULT_LIMITS, lambda _, __, reason: faults.append(reason), counters)
    gossip.add_topic("offers", lambda _, __: GossipVerdict.ACCEPT)
    frames: list[bytes] = []

    @FEW
    @given(st.binary(max_size=200) | _mutated(_frame()))
    def collect(data: bytes) -> None:
        frames.append(data)

    collect()
    no_text = _frame().replace(
        topic_name(NETWORK, "offers").encode(), b"\xff" * len(topic_name(NETWORK, "offers"))
    )
    for data in [*frames, _frame(), no_text]:
        state = PeerState(THEIRS, "192.0.2.1", inbound=True, limits=DEFAULT_LIMITS, now=0.0)
        with contextlib.suppress(MalformedRecord):
            await gossip._handle_frame(data, state, None, Pubsub(gossip))
    # No change of the bytes makes a signature good: nothing was accepted, and what parsed was held against them.
    assert not counters["gossip_accept"]
    assert counters["gossip_malformed"] == len(faults) > 0
    state = PeerState(THEIRS, "192.0.2.1", inbound=True, limits=DEFAULT_LIMITS, now=0.0)
    with pytest.raises(MalformedRecord, match="no text"):
        await gossip._handle_frame(no_text, state, None, Pubsub(gossip))
