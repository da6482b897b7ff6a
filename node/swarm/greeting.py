"""Carries the hello of `node.swarm.hello` over a stream, for both sides. The caller bounds the time."""

import secrets

from node.swarm.hello import (
    HELLO_SIZE_MAX,
    NONCE_SIZE,
    REASON_FULL,
    REASON_NETWORK,
    REASON_PROOF,
    HelloConfirm,
    HelloDone,
    HelloFailed,
    HelloOpen,
    HelloProof,
    HelloRefusal,
    decode_hello_untrusted,
    dialler_proof,
    encode_hello,
    hello_key,
    is_proof_valid,
    listener_proof,
)
from node.swarm.streams import Stream, read_frame_untrusted, write_frame
from protocol.identity import NetworkId, NodeId


class Greeter:
    """Says hello for one node in one network. Holds a secret, so it shows nothing of itself."""

    __slots__ = ("_agent", "_key", "_network", "_node")

    def __init__(self, node: NodeId, network: NetworkId, network_key: bytes, agent: str) -> None:
        self._node = node
        self._network = network
        self._key = hello_key(network, network_key)
        self._agent = agent

    async def greet(self, stream: Stream, listener: NodeId, addresses: tuple[str, ...]) -> HelloDone:
        """Say hello as the dialler. Raises HelloFailed, MalformedRecord, EOFError or libp2p's errors."""
        nonce = secrets.token_bytes(NONCE_SIZE)
        await write_frame(stream, encode_hello(HelloOpen(network=self._network, nonce=nonce)))
        proof = decode_hello_untrusted(await read_frame_untrusted(stream, HELLO_SIZE_MAX), HelloProof)
        nonces = (nonce, proof.nonce)
        if not is_proof_valid(listener_proof(self._key, self._node, listener, nonces), proof.proof):
            raise HelloFailed("it does not know our network's key")
        ours = dialler_proof(self._key, self._node, listener, nonces)
        await write_frame(stream, encode_hello(HelloConfirm(proof=ours, agent=self._agent, addresses=addresses)))
        return decode_hello_untrusted(await read_frame_untrusted(stream, HELLO_SIZE_MAX), HelloDone)

    async def receive(self, stream: Stream, dialler: NodeId) -> HelloConfirm:
        """Hear the dialler's hello up to its proof. Raises as `greet` does; a stranger is told so first."""
        opening = decode_hello_untrusted(await read_frame_untrusted(stream, HELLO_SIZE_MAX), HelloOpen)
        if opening.network != self._network:
            await write_frame(stream, encode_hello(HelloRefusal(reason=REASON_NETWORK)))
            raise HelloFailed("it belongs to another network")
        nonces = (opening.nonce, secrets.token_bytes(NONCE_SIZE))
        ours = listener_proof(self._key, dialler, self._node, nonces)
        await write_frame(stream, encode_hello(HelloProof(nonce=nonces[1], proof=ours)))
        confirm = decode_hello_untrusted(await read_frame_untrusted(stream, HELLO_SIZE_MAX), HelloConfirm)
        if not is_proof_valid(dialler_proof(self._key, dialler, self._node, nonces), confirm.proof):
            await write_frame(stream, encode_hello(HelloRefusal(reason=REASON_PROOF)))
            raise HelloFailed("it does not know our network's key")
        return confirm

    async def turn_away(self, stream: Stream) -> None:
        """Tell a dialler of our network that there is no room for it."""
        await write_frame(stream, encode_hello(HelloRefusal(reason=REASON_FULL)))

    async def finish(self, stream: Stream, addresses: tuple[str, ...]) -> None:
        """Tell the dialler that it is admitted."""
        await write_frame(stream, encode_hello(HelloDone(agent=self._agent, addresses=addresses)))
