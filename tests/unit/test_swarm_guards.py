"""The contract with py-libp2p: every private attribute that the guards rely on exists, and means what they think.

When a new version of libp2p fails here, read contrib/adr/0003 before changing a name.
"""

import importlib
import inspect
from importlib.metadata import version

import pytest
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub
from libp2p.pubsub.rpc_queue import RpcQueue
from libp2p.stream_muxer.yamux import yamux
from multiaddr import Multiaddr

from node.swarm import guards
from node.swarm.gossip import (
    SEEN_TTL_S,
    GuardedPubsub,
    GuardedRouter,
    SeenMessages,
    clean_rpc,
    id_bytes,
    node_from_bytes,
    node_of,
    topic_name,
)
from node.swarm.guards import (
    INSTANCE_PRIVATES,
    PRIVATES,
    GuardedHost,
    GuardedMuxer,
    GuardedSwarm,
    GuardedTcp,
    GuardedYamux,
    is_our_bug,
)
from node.swarm.limits import SwarmLimits
from protocol.identity import NodeId, network_id, peer_id

ORIGINAL_RELEASE = inspect.getattr_static(yamux.YamuxStream, "_auto_tune_and_send_window_update")


def test_the_pinned_version_is_installed():
    assert version("libp2p") == "0.8.1"


@pytest.mark.parametrize(
    ("owner", "name"), [(owner, name) for owner, names in PRIVATES.items() for name in names], ids=lambda x: x
)
def test_private_names_exist(owner: str, name: str):
    module_name, _, class_name = owner.partition(":")
    module = importlib.import_module(module_name)
    holder = getattr(module, class_name) if class_name else module
    assert hasattr(holder, name)


GUARDED = [
    guards.BoundedTcpStream,
    GuardedHost,
    GuardedMuxer,
    GuardedSwarm,
    GuardedTcp,
    GuardedYamux,
    GuardedPubsub,
    GuardedRouter,
]


@pytest.mark.parametrize("guarded", GUARDED, ids=lambda guarded: guarded.__name__)
def test_overridden_methods_keep_their_shape(guarded: type):
    """Each method that a guard overrides exists in libp2p, is async where that is, and takes what that takes."""
    original = guarded.__mro__[1]
    assert original.__module__.startswith("libp2p")
    own = {"cut", "admit", "__init__"}
    for name, method in vars(guarded).items():
        if not inspect.isfunction(method) or name in own:
            continue
        overridden = getattr(original, name)
        assert inspect.iscoroutinefunction(method) == inspect.iscoroutinefunction(overridden), name
        ours, theirs = (list(inspect.signature(one).parameters) for one in (method, overridden))
        assert ours == theirs, name
        if name.startswith("_"):
            assert any(name in names for names in PRIVATES.values()), f"{name} is missing from PRIVATES"


class Session:
    """Enough of a secured connection for a yamux that is never started."""

    is_initiator = True


def _instances() -> dict[str, object]:
    class Network:
        def register_notifee(self, _: object) -> None:
            pass

    class Host:
        def get_network(self) -> Network:
            return Network()

        def set_stream_handler(self, *_: object) -> None:
            pass

        def get_private_key(self):
            return create_new_key_pair(b"k" * 32).private_key

    router = GossipSub([], 6, 4, 10)
    pubsub = Pubsub(Host(), router)
    pubsub.seen_messages.stop()
    return {"GossipSub": router, "Pubsub": pubsub, "RpcQueue": RpcQueue()}


async def test_private_attributes_of_instances_exist():
    muxed = yamux.Yamux(Session(), ID(b"x"), is_initiator=True)
    swarm = GuardedSwarm(ID(b"x"), PeerStore(), None, keeper=None)
    instances = {**_instances(), "Yamux": muxed, "YamuxStream": yamux.YamuxStream(1, muxed, True), "Swarm": swarm}
    for entry in INSTANCE_PRIVATES.split():
        owner, _, name = entry.partition(".")
        # `manager` is a property that raises until the service runs.
        assert hasattr(type(instances[owner]), name) or hasattr(instances[owner], name), entry


async def test_the_tcp_stream_below_a_connection_is_found():
    class Holder:
        def __init__(self, **fields: object) -> None:
            vars(self).update(fields)

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    raw = await GuardedTcp().dial(Multiaddr(f"/ip4/127.0.0.1/tcp/{port}"))
    try:
        assert isinstance(raw, RawConnection)
        session = Holder(conn=Holder(read_writer=Holder(read_write_closer=raw)))
        muxed = GuardedYamux(session, ID(b"x"), is_initiator=True, limits=SwarmLimits())
        assert guards.tcp_stream(muxed) is raw.stream
        assert raw.stream.get_remote_address() == ("127.0.0.1", port)
        muxed.cut()
        muxed.cut()
        assert await raw.stream.read(10) == b""
        assert raw.stream.get_remote_address() is None
    finally:
        for listener in listeners:
            await listener.aclose()


async def test_windows_are_bounded_and_released_in_large_steps():
    assert list(inspect.signature(ORIGINAL_RELEASE).parameters) == ["self", "bytes_read"]
    guards.tame_library()
    assert yamux.MAX_WINDOW_SIZE == guards.WINDOW_MAX == yamux.DEFAULT_WINDOW_SIZE
    stream = yamux.YamuxStream(1, yamux.Yamux(Session(), ID(b"x"), is_initiator=True), True)
    released = []

    async def send_window_update(increment: int) -> None:
        released.append(increment)

    stream.send_window_update = send_window_update
    for _ in range(3):
        await stream._auto_tune_and_send_window_update(bytes_read=50_000)
    assert released == [150_000]
    await stream._auto_tune_and_send_window_update(bytes_read=1)
    assert released == [150_000]
    assert stream.recv_window == guards.WINDOW_MAX + 150_000


def test_an_assertion_of_libp2p_is_not_our_bug():
    def assert_in(module: str) -> BaseException:
        scope = {"__name__": module}
        exec("def fail():\n    raise AssertionError('x')", scope)  # noqa: S102 - to raise from a module of that name
        try:
            scope["fail"]()
        except AssertionError as error:
            return error
        raise RuntimeError

    assert is_our_bug(assert_in("node.market.selling"))
    assert not is_our_bug(assert_in("libp2p.network.swarm"))
    assert not is_our_bug(ValueError("x"))
    group = ExceptionGroup("", [ValueError("x"), ExceptionGroup("", [assert_in("node.market")])])
    assert is_our_bug(group)
    assert not is_our_bug(ExceptionGroup("", [ValueError("x"), assert_in("libp2p.x")]))


async def test_seen_messages_are_forgotten_after_a_while_and_bounded(autojump_clock, monkeypatch):
    seen = SeenMessages()
    assert seen.add(b"one")
    assert not seen.add(b"one")
    await trio.sleep(SEEN_TTL_S - 1)
    assert seen.has(b"one")
    seen.add(b"two")
    await trio.sleep(2)
    assert not seen.has(b"one")
    assert seen.has(b"two")
    monkeypatch.setattr("node.swarm.gossip.SEEN_MAX", 10)
    for index in range(100):
        seen.add(b"%d" % index)
    assert len(seen._until) == 10
    assert seen.has(b"99")


def test_what_libp2p_would_believe_is_removed_from_frames():
    rpc = rpc_pb2.RPC(senderRecord=b"x")
    for topic in ("ours", "theirs"):
        rpc.control.ihave.add(topicID=topic, messageIDs=[b"m"])
        rpc.control.graft.add(topicID=topic)
        rpc.control.prune.add(topicID=topic, backoff=10**9).peers.add(peerID=b"p")
    rpc.control.iwant.add(messageIDs=[b"m"])
    clean_rpc(rpc, {"ours"})
    assert not rpc.HasField("senderRecord")
    control = rpc.control
    assert [entry.topicID for entry in (*control.ihave, *control.graft, *control.prune)] == ["ours"] * 3
    assert control.prune[0].backoff == 600
    assert not control.prune[0].peers
    assert control.iwant[0].messageIDs == [b"m"]


def test_router_tables_that_only_grow_are_emptied():
    router = GuardedRouter(protocols=[], degree=6, degree_low=4, degree_high=10)
    router.recent_message_deliveries["t"].append(1.0)
    router.equivocation_detection[b"x"] = rpc_pb2.Message()
    router._pending_messages[ID(b"x")].append((1.0, rpc_pb2.RPC()))
    router._add_back_off(ID(b"kept"), "t", False, 1000)
    router.back_off["t"][ID(b"old")] = 1
    router.back_off["gone"] = {ID(b"old"): 1}
    router._periodic_security_cleanup()
    assert not router.recent_message_deliveries
    assert not router.equivocation_detection
    assert not router._pending_messages
    assert router.back_off.keys() == {"t"}
    assert router.back_off["t"].keys() == {ID(b"kept")}
    assert router.scorer is None


def test_node_ids_and_libp2p_ids_are_the_same_thing():
    keys = create_new_key_pair(b"k" * 32)
    node = NodeId(keys.public_key.to_bytes())
    libp2p_id = ID.from_pubkey(keys.public_key)
    assert libp2p_id.to_bytes() == id_bytes(node)
    assert str(libp2p_id) == peer_id(node)
    assert node_of(libp2p_id) == node
    for data in (b"", b"\x12\x20" + bytes(32), id_bytes(node)[:-1], id_bytes(node) + b"x"):
        assert node_from_bytes(data) is None
    with pytest.raises(ValueError, match="not the id of an Ed25519 key"):
        node_of(ID(b"\x12\x20" + bytes(32)))


def test_topics_of_two_networks_never_mix():
    names = {topic_name(network_id(name, key), "offers") for name in "ab" for key in (b"", b"k")}
    assert len(names) == 4
    for bad in ("", "x" * 65):
        with pytest.raises(ValueError, match="1 to 64 characters"):
            topic_name(network_id("a"), bad)
