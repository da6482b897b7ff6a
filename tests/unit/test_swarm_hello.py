"""The hello proves the key to the right peer, once, and to nobody else."""

import math

import msgspec
import pytest
import trio
import trio.testing

from node.swarm.greeting import Greeter
from node.swarm.hello import (
    HelloConfirm,
    HelloDone,
    HelloFailed,
    HelloOpen,
    HelloProof,
    HelloRefusal,
    addresses_untrusted,
    agent_untrusted,
    decode_hello_untrusted,
    dialler_proof,
    encode_hello,
    hello_key,
    listener_proof,
)
from protocol.errors import MalformedRecord
from protocol.identity import NodeId, network_id, peer_id

A, B, C = (NodeId(bytes([index]) * 32) for index in (1, 2, 3))
NETWORK = network_id("lab", b"key")
KEY = hello_key(NETWORK, b"key")
NONCES = (b"n" * 32, b"m" * 32)


def test_a_proof_holds_for_one_role_pair_and_exchange_only():
    proof = dialler_proof(KEY, A, B, NONCES)
    assert proof == dialler_proof(KEY, A, B, NONCES)
    others = {
        "reflected": listener_proof(KEY, A, B, NONCES),
        "turned round": dialler_proof(KEY, B, A, NONCES),
        "relayed": dialler_proof(KEY, A, C, NONCES),
        "replayed": dialler_proof(KEY, A, B, (NONCES[0], b"x" * 32)),
        "nonces swapped": dialler_proof(KEY, A, B, (NONCES[1], NONCES[0])),
        "other key": dialler_proof(hello_key(NETWORK, b"other"), A, B, NONCES),
        "other network": dialler_proof(hello_key(network_id("pool", b"key"), b"key"), A, B, NONCES),
    }
    assert proof not in others.values()
    assert len(set(others.values())) == len(others)


def test_proofs_of_the_wrong_size_are_our_own_bug():
    with pytest.raises(ValueError, match="32 bytes"):
        dialler_proof(KEY, NodeId(b"short"), B, NONCES)


MESSAGES = [
    HelloOpen(network=bytes(32), nonce=bytes(32)),
    HelloProof(nonce=bytes(32), proof=bytes(32)),
    HelloConfirm(proof=bytes(32), agent="x", addresses=("/ip4/192.0.2.7/tcp/1",)),
    HelloDone(agent="x"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_round_trip_and_only_in_their_turn(message):
    data = encode_hello(message)
    assert decode_hello_untrusted(data, type(message)) == message
    for other in MESSAGES:
        if type(other) is not type(message):
            with pytest.raises(MalformedRecord):
                decode_hello_untrusted(data, type(other))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"\xa0",
        encode_hello(MESSAGES[0])[:-1],
        encode_hello(MESSAGES[0]) + b"\0",
        encode_hello(msgspec.structs.replace(MESSAGES[0], nonce=bytes(31))),
        encode_hello(msgspec.structs.replace(MESSAGES[2], agent="x" * 65)),
        encode_hello(msgspec.structs.replace(MESSAGES[2], addresses=("x",) * 9)),
        encode_hello(msgspec.structs.replace(MESSAGES[2], addresses=("x" * 4000,))),
    ],
)
def test_malformed_messages_are_refused(data: bytes):
    for expected in (HelloOpen, HelloConfirm):
        with pytest.raises(MalformedRecord):
            decode_hello_untrusted(data, expected)


def test_a_refusal_is_told_in_words():
    for reason, words in (("network", "another network"), ("full", "no room"), ("new in version 9", "refused us")):
        with pytest.raises(HelloFailed, match=words):
            decode_hello_untrusted(encode_hello(HelloRefusal(reason=reason)), HelloProof)


def test_what_a_peer_says_of_itself_is_cleaned():
    assert agent_untrusted("gpunode/1\x1b[31m\n\u202e") == "gpunode/1[31m"
    ours = f"/ip4/192.0.2.7/tcp/1/p2p/{peer_id(A)}"
    foreign = f"/ip4/192.0.2.7/tcp/1/p2p/{peer_id(B)}"
    assert [str(address) for address in addresses_untrusted((ours, foreign, "junk", ours[:20]), A)] == [ours]


class Pipe:
    """One end of an in-memory stream, as `node.swarm.streams` wants it."""

    def __init__(self, stream: trio.StapledStream) -> None:
        self._stream = stream

    async def read(self, n: int | None = None) -> bytes:
        return bytes(await self._stream.receive_some(n))

    async def write(self, data: bytes) -> None:
        await self._stream.send_all(data)

    async def close(self) -> None:
        await self._stream.send_eof()

    async def reset(self) -> None:
        await self._stream.aclose()


def pipes() -> tuple[Pipe, Pipe]:
    one, other = trio.testing.memory_stream_pair()
    return Pipe(one), Pipe(other)


def greeter(node: NodeId, name: str = "lab", key: bytes = b"key") -> Greeter:
    return Greeter(node, network_id(name, key), key, f"agent of {node[0]}")


async def meet(dialler: Greeter, listener: Greeter, as_dialler: NodeId = A, as_listener: NodeId = B):
    """Run both sides; return what each got: a message, or the error."""
    near, far = pipes()
    results: dict[str, object] = {}

    async def dial() -> None:
        try:
            results["dialler"] = await dialler.greet(near, as_listener, ("/ip4/192.0.2.7/tcp/1",))
        except (HelloFailed, EOFError) as error:
            results["dialler"] = error
        await near.reset()

    async def listen() -> None:
        try:
            results["listener"] = await listener.receive(far, as_dialler)
            await listener.finish(far, ())
        except (HelloFailed, EOFError, trio.BrokenResourceError) as error:
            results["listener"] = error
        await far.close()

    with trio.fail_after(math.inf):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(dial)
            nursery.start_soon(listen)
    return results["dialler"], results["listener"]


async def test_members_admit_each_other():
    done, confirm = await meet(greeter(A), greeter(B))
    assert isinstance(done, HelloDone)
    assert isinstance(confirm, HelloConfirm)
    assert (done.agent, confirm.agent) == ("agent of 2", "agent of 1")
    assert confirm.addresses == ("/ip4/192.0.2.7/tcp/1",)


@pytest.mark.parametrize("other", [("lab", b"other"), ("lab", b""), ("pool", b"key")])
async def test_members_of_other_networks_admit_nobody(other: tuple[str, bytes]):
    done, confirm = await meet(greeter(A), greeter(B, *other))
    assert isinstance(done, HelloFailed)
    assert isinstance(confirm, HelloFailed)


async def test_a_proof_for_one_peer_is_worthless_to_another():
    """A stranger between two members relays their messages: each proof names whom it was made for."""
    done, confirm = await meet(greeter(A), greeter(B), as_dialler=C, as_listener=C)
    assert isinstance(done, HelloFailed)
    assert not isinstance(confirm, HelloConfirm)
