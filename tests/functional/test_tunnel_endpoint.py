"""Endpoints over loopback: streams, back-pressure, refusals, ends, strangers."""

import hashlib
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing
from support.udprelay import open_relay

from node.errors import TunnelClosed, TunnelError
from node.ports import TunnelConnection, TunnelEndpoint
from node.tunnel import Connection, Endpoint, TunnelIdentity, TunnelLimits, TunnelStream, open_endpoint
from node.tunnel.engine import QuicEngine

RENTER, PROVIDER, STRANGER = (bytes([number]) * 32 for number in (11, 12, 13))
RENTER_KEY, PROVIDER_KEY, STRANGER_KEY = (TunnelIdentity(seed).public_key for seed in (RENTER, PROVIDER, STRANGER))
SMALL = TunnelLimits(stream_window=16 << 10, send_buffer=16 << 10, send_buffer_floor=16 << 10)


class Pair:
    """A provider's endpoint and a renter's, with one tunnel between them."""

    def __init__(self, provider: Endpoint, renter: Endpoint, accepted: Connection, dialled: Connection) -> None:
        self.provider, self.renter = provider, renter
        self.accepted, self.dialled = accepted, dialled

    async def stream_pair(self) -> tuple[TunnelStream, TunnelStream]:
        """Return both ends of a new stream, dialled side first."""
        near = await self.dialled.open_stream()
        await near.send_all(b"!")
        far = await self.accepted.accept_stream()
        assert await far.receive_some(1) == b"!"
        return near, far


@asynccontextmanager
async def open_pair(limits: TunnelLimits | None = None) -> AsyncIterator[Pair]:
    options = {} if limits is None else {"limits": limits}
    with trio.fail_after(60):
        async with (
            open_endpoint(PROVIDER, bind="127.0.0.1", admit=frozenset({RENTER_KEY}), **options) as provider,
            open_endpoint(RENTER, bind="127.0.0.1", **options) as renter,
        ):
            dialled = await renter.connect("127.0.0.1", provider.port, PROVIDER_KEY)
            yield Pair(provider, renter, await provider.accept(), dialled)


async def until(state: Callable[[], Any]) -> None:
    """Wait for a state that no event announces."""
    while not state():
        await trio.sleep(0.001)


async def read_all(stream: trio.abc.ReceiveStream) -> bytes:
    data = bytearray()
    async for chunk in stream:
        data += chunk
    return bytes(data)


async def send_and_finish(stream: trio.abc.HalfCloseableStream, data: bytes) -> None:
    await stream.send_all(data)
    await stream.send_eof()


def noise(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


# --- what goes well --------------------------------------------------------------------------------------------


async def test_echo_both_ways_and_who_is_who() -> None:
    async with open_pair() as pair:
        assert pair.dialled.peer_key == PROVIDER_KEY
        assert pair.accepted.peer_key == RENTER_KEY
        assert pair.dialled.peer_address == f"127.0.0.1:{pair.provider.port}"
        assert pair.accepted.peer_address == f"127.0.0.1:{pair.renter.port}"
        for opener, accepter in ((pair.dialled, pair.accepted), (pair.accepted, pair.dialled)):
            async with await opener.open_stream() as near:
                await send_and_finish(near, b"ping")
                async with await accepter.accept_stream() as far:
                    assert await read_all(far) == b"ping"
                    await send_and_finish(far, b"pong")
                    assert await read_all(near) == b"pong"


async def test_the_ports_are_implemented() -> None:
    async with open_pair() as pair:
        endpoint: TunnelEndpoint = pair.provider
        connection: TunnelConnection = pair.dialled
        assert endpoint.port > 0
        assert isinstance(await connection.open_stream(), trio.abc.HalfCloseableStream)


async def test_eight_mebibytes_each_way_at_once() -> None:
    up, down = noise(8 << 20, 1), noise(8 << 20, 2)
    digests: dict[str, bytes] = {}

    async def receive(name: str, stream: TunnelStream) -> None:
        digest = hashlib.sha256()
        async for chunk in stream:
            digest.update(chunk)
        digests[name] = digest.digest()

    async with open_pair() as pair:
        near, far = await pair.stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_and_finish, near, up)
            nursery.start_soon(send_and_finish, far, down)
            nursery.start_soon(receive, "up", far)
            nursery.start_soon(receive, "down", near)
    assert digests == {"up": hashlib.sha256(up).digest(), "down": hashlib.sha256(down).digest()}


async def test_half_close() -> None:
    async with open_pair() as pair:
        near, far = await pair.stream_pair()
        await near.send_eof()
        assert await far.receive_some() == b""
        await far.send_all(b"still talking")
        assert await near.receive_some() == b"still talking"
        await far.send_eof()
        assert await near.receive_some() == b""
        with pytest.raises(trio.ClosedResourceError):
            await near.send_all(b"x")


async def test_a_hundred_streams_at_once() -> None:
    answers: dict[int, bytes] = {}

    async def serve(connection: Connection, count: int) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(reverse, await connection.accept_stream())

    async def reverse(stream: TunnelStream) -> None:
        async with stream:
            await send_and_finish(stream, (await read_all(stream))[::-1])

    async def ask(connection: Connection, number: int) -> None:
        async with await connection.open_stream() as stream:
            await send_and_finish(stream, noise(3000, number))
            answers[number] = await read_all(stream)

    async with open_pair() as pair:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, pair.accepted, 100)
            for number in range(100):
                nursery.start_soon(ask, pair.dialled, number)
        await until(lambda: not pair.dialled._streams and not pair.accepted._streams)  # nothing is kept of them
    assert answers == {number: noise(3000, number)[::-1] for number in range(100)}


async def test_streams_beyond_the_peers_limit_wait_for_their_turn() -> None:
    limits = TunnelLimits(streams_max=3)
    done: list[int] = []

    async def ask(connection: Connection, number: int) -> None:
        async with await connection.open_stream() as stream:
            await send_and_finish(stream, b"x")
            assert await read_all(stream) == b"x"
            done.append(number)

    async with open_pair(limits) as pair, trio.open_nursery() as nursery:
        for number in range(12):
            nursery.start_soon(ask, pair.dialled, number)
        for _ in range(12):
            async with await pair.accepted.accept_stream() as stream:
                await send_and_finish(stream, await read_all(stream))
    assert sorted(done) == list(range(12))


# --- trio's own rules for streams ------------------------------------------------------------------------------


async def test_streams_keep_trios_rules() -> None:
    async with open_pair(SMALL) as pair:

        async def clogged() -> tuple[TunnelStream, TunnelStream]:
            near, far = await pair.stream_pair()
            for stream in (near, far):
                await stream.send_all(bytes(SMALL.stream_window + SMALL.send_buffer - 1))
                await until(lambda stream=stream: pair_room(stream) < SMALL.send_chunk)
            return near, far

        def pair_room(stream: TunnelStream) -> int:
            return stream._owner.send_room(stream.number)

        await trio.testing.check_half_closeable_stream(pair.stream_pair, clogged)


# --- back-pressure ---------------------------------------------------------------------------------------------


async def test_a_receiver_that_stops_reading_bounds_the_senders_memory() -> None:
    async with open_pair(SMALL) as pair:
        near, far = await pair.stream_pair()
        accepted_bytes = 0

        async def send() -> None:
            nonlocal accepted_bytes
            while True:
                await near.send_all(bytes(1000))
                accepted_bytes += 1000

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            # The first byte of the window was read when the stream was opened.
            await until(lambda: far.unread == SMALL.stream_window - 1 and near in pair.dialled._waiting_for_room)
            assert pair.dialled._engine.buffered(near.number) <= SMALL.send_buffer
            assert accepted_bytes <= SMALL.stream_window + SMALL.send_buffer + 1000
            stuck_at = accepted_bytes
            while accepted_bytes == stuck_at:  # reading lets it go on
                await far.receive_some()
            nursery.cancel_scope.cancel()


async def test_a_stalled_stream_does_not_hold_up_another() -> None:
    limits = TunnelLimits(
        stream_window=16 << 10, send_buffer=64 << 10, send_buffer_total=64 << 10, send_buffer_floor=16 << 10
    )
    async with open_pair(limits) as pair:
        stalled = [await pair.stream_pair() for _ in range(3)]
        async with trio.open_nursery() as nursery:
            for near, _ in stalled:
                nursery.start_soon(near.send_all, bytes(1 << 20))
            await until(lambda: all(near in pair.dialled._waiting_for_room for near, _ in stalled))
            near, far = await pair.stream_pair()
            nursery.start_soon(send_and_finish, near, noise(100_000))
            assert await read_all(far) == noise(100_000)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("has_arrived", [True, False])
async def test_what_is_thrown_away_unread_gives_its_window_back(has_arrived: bool) -> None:
    limits = TunnelLimits(stream_window=16 << 10, streams_max=2)
    async with open_pair(limits) as pair:
        for _ in range(8):
            near, far = await pair.stream_pair()
            await near.send_all(bytes(10_000))
            await near.send_eof()
            if has_arrived:
                await until(lambda far=far: far.unread == 10_000)
            await far.aclose()
            await near.aclose()
        near, far = await pair.stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_and_finish, near, noise(200_000))
            assert await read_all(far) == noise(200_000)


# --- ends ------------------------------------------------------------------------------------------------------


async def test_reset_breaks_the_peers_reader_and_writer() -> None:
    async with open_pair() as pair:
        near, far = await pair.stream_pair()
        await near.send_all(b"half of somethi")
        near.reset()
        with pytest.raises(trio.BrokenResourceError, match="reset"):
            while True:
                await far.receive_some()
        with pytest.raises(trio.BrokenResourceError):
            while True:
                await far.send_all(bytes(1000))


async def test_leaving_a_stream_by_an_exception_is_a_reset_not_an_end_of_file() -> None:
    async with open_pair() as pair:
        near, far = await pair.stream_pair()
        with pytest.raises(ZeroDivisionError):
            async with near:
                await near.send_all(b"part one of two")
                raise ZeroDivisionError
        with pytest.raises(trio.BrokenResourceError):
            await read_all(far)


async def test_a_cancelled_receive_loses_nothing() -> None:
    async with open_pair() as pair:
        near, far = await pair.stream_pair()
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(far.receive_some)
                await trio.testing.wait_all_tasks_blocked(0.01)
                await near.send_all(b"precious")
                scope.cancel()
        assert await far.receive_some() == b"precious"


async def test_both_sides_are_told_why_a_connection_was_closed() -> None:
    async with open_pair() as pair:
        near, far = await pair.stream_pair()
        await near.send_all(b"last words")
        await until(lambda: far.unread == 10)
        await pair.dialled.aclose("the job is done")
        await pair.dialled.aclose("again")
        assert await pair.dialled.wait_closed() == "closed here: the job is done"
        assert await pair.accepted.wait_closed() == "closed by the peer: the job is done"
        # What has arrived can be read; then the end is an error, for it was not an end of file.
        assert await far.receive_some() == b"last words"
        with pytest.raises(trio.BrokenResourceError, match="the job is done") as caught:
            await far.receive_some()
        assert isinstance(caught.value.__cause__, TunnelClosed)
        for stream in (near, far):
            with pytest.raises(trio.BrokenResourceError):
                await stream.send_all(b"x")
        for connection in (pair.dialled, pair.accepted):
            with pytest.raises(TunnelClosed, match="the job is done"):
                await connection.open_stream()
            with pytest.raises(TunnelClosed, match="the job is done"):
                await connection.accept_stream()


async def test_last_words_arrive_before_the_close() -> None:
    async with open_pair() as pair:
        near, far = await pair.stream_pair()
        await near.send_all(b"goodbye")
        await near.aclose()
        await pair.dialled.aclose()
        assert await read_all(far) == b"goodbye"


async def test_those_who_wait_are_woken_when_the_connection_ends() -> None:
    ended: list[str] = []

    async def expect(error: type[Exception], wait: Callable[[], Awaitable[Any]], name: str) -> None:
        with pytest.raises(error):
            await wait()
        ended.append(name)

    async with open_pair(TunnelLimits(stream_window=1000, send_buffer=1000, streams_max=1)) as pair:
        near, _ = await pair.stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(expect, TunnelClosed, pair.accepted.accept_stream, "accept")
            nursery.start_soon(expect, TunnelClosed, pair.dialled.open_stream, "open")
            nursery.start_soon(expect, trio.BrokenResourceError, lambda: near.send_all(bytes(100_000)), "send")
            nursery.start_soon(expect, trio.BrokenResourceError, near.receive_some, "receive")
            await until(lambda: near in pair.dialled._waiting_for_room)
            await pair.accepted.aclose()
    assert sorted(ended) == ["accept", "open", "receive", "send"]


async def test_leaving_an_endpoint_tells_the_peer_and_lets_exceptions_out_as_they_are() -> None:
    async with open_endpoint(PROVIDER, bind="127.0.0.1", admit=frozenset({RENTER_KEY})) as provider:
        with pytest.raises(ZeroDivisionError):
            async with open_endpoint(RENTER, bind="127.0.0.1") as renter:
                await renter.connect("127.0.0.1", provider.port, PROVIDER_KEY)
                accepted = await provider.accept()
                raise ZeroDivisionError
        assert await accepted.wait_closed() == "closed by the peer: the endpoint was closed"
        with pytest.raises(TunnelClosed):
            await renter.accept()
        with pytest.raises(TunnelClosed):
            await renter.connect("127.0.0.1", provider.port, PROVIDER_KEY)


async def test_a_peer_that_vanishes_ends_the_connection_with_that_reason() -> None:
    limits = TunnelLimits(idle_ms=400, keepalive_ms=150)
    async with (
        open_endpoint(PROVIDER, bind="127.0.0.1", admit=frozenset({RENTER_KEY}), limits=limits) as provider,
        open_endpoint(RENTER, bind="127.0.0.1", limits=limits) as renter,
        open_relay(provider.port) as relay,
    ):
        dialled = await renter.connect("127.0.0.1", relay.port, PROVIDER_KEY)
        accepted = await provider.accept()
        relay.is_cut = True
        for connection in (dialled, accepted):
            assert await connection.wait_closed() == "nothing was heard from the peer for 0.4 s"


async def test_a_tunnel_survives_a_change_of_the_renters_address() -> None:
    async with (
        open_endpoint(PROVIDER, bind="127.0.0.1", admit=frozenset({RENTER_KEY})) as provider,
        open_endpoint(RENTER, bind="127.0.0.1") as renter,
        open_relay(provider.port) as relay,
    ):
        pair = Pair(
            provider,
            renter,
            dialled=await renter.connect("127.0.0.1", relay.port, PROVIDER_KEY),
            accepted=await provider.accept(),
        )
        near, far = await pair.stream_pair()
        assert pair.accepted.peer_address == f"127.0.0.1:{relay.outer_port}"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_and_finish, near, noise(400_000))
            await until(lambda: far.unread > 50_000)
            await relay.rebind()
            assert await read_all(far) == noise(400_000)
        await until(lambda: pair.accepted.peer_address == f"127.0.0.1:{relay.outer_port}")
        await send_and_finish(far, b"found you")
        assert await read_all(near) == b"found you"


# --- refusals --------------------------------------------------------------------------------------------------


async def test_a_renter_whose_key_is_not_admitted_is_told_so() -> None:
    async with open_pair() as pair, open_endpoint(STRANGER, bind="127.0.0.1") as stranger:
        with pytest.raises(TunnelError, match="refused our key") as caught:
            await stranger.connect("127.0.0.1", pair.provider.port, PROVIDER_KEY)
        assert caught.value.hint
        assert pair.provider.counts.opened == 1


async def test_a_provider_with_another_key_is_refused() -> None:
    async with open_pair() as pair:
        with pytest.raises(TunnelError, match="not the one that the lease names"):
            await pair.renter.connect("127.0.0.1", pair.provider.port, STRANGER_KEY)
        assert pair.provider.counts.opened == 1


async def test_who_is_admitted_may_change() -> None:
    admitted: set[bytes] = set()
    async with (
        open_endpoint(PROVIDER, bind="127.0.0.1", admit=lambda key: key in admitted) as provider,
        open_endpoint(RENTER, bind="127.0.0.1") as renter,
    ):
        with pytest.raises(TunnelError, match="refused our key"):
            await renter.connect("127.0.0.1", provider.port, PROVIDER_KEY)
        admitted.add(RENTER_KEY)
        dialled = await renter.connect("127.0.0.1", provider.port, PROVIDER_KEY)
        assert dialled.peer_key == PROVIDER_KEY


async def test_nobody_there_is_a_timeout_that_says_so() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        async with open_endpoint(RENTER, bind="127.0.0.1") as renter:
            with pytest.raises(
                TunnelError, match=rf"timeout: nobody answered at 127\.0\.0\.1:{port} within 0\.2 s"
            ):
                await renter.connect("127.0.0.1", port, PROVIDER_KEY, timeout_ms=200)


async def test_a_dialling_endpoint_answers_nobody() -> None:
    async with open_pair() as pair, open_endpoint(STRANGER, bind="127.0.0.1") as stranger:
        with pytest.raises(TunnelError, match="timeout"):
            await stranger.connect("127.0.0.1", pair.renter.port, RENTER_KEY, timeout_ms=200)
        assert pair.renter.counts.begun == 0


async def test_a_cancelled_connect_leaves_nothing_behind() -> None:
    async with open_pair() as pair, open_relay(pair.provider.port) as relay:
        relay.is_cut = True
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pair.renter.connect, "127.0.0.1", relay.port, PROVIDER_KEY)
                await until(lambda: len(pair.renter._connections) == 2)
                scope.cancel()
        await until(lambda: len(pair.renter._connections) == 1)


async def test_a_name_that_does_not_resolve() -> None:
    async with open_endpoint(RENTER, bind="127.0.0.1") as renter:
        with pytest.raises(TunnelError, match="cannot find the address"):
            await renter.connect("name with spaces", 1, PROVIDER_KEY)
        with pytest.raises(TunnelError, match="32 bytes"):
            await renter.connect("127.0.0.1", 1, b"short")


async def test_ports_come_from_the_range_and_run_out() -> None:
    async with open_endpoint(RENTER, bind="127.0.0.1") as probe:
        low = probe.port
    # The port was free a moment ago; the range of one is what is under test.
    async with open_endpoint(RENTER, bind="127.0.0.1", port_range=(low, low)) as first:
        assert first.port == low
        with pytest.raises(TunnelError, match="in use"):
            async with open_endpoint(RENTER, bind="127.0.0.1", port_range=(low, low)):
                pass
        with pytest.raises(TunnelError, match="cannot bind"):
            async with open_endpoint(RENTER, bind="127.0.0.1", port=low):
                pass


def has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sock:
        try:
            sock.bind(("::1", 0))
        except OSError:
            return False
    return True


async def test_ipv6_and_ipv4_meet_on_one_socket() -> None:
    if not has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    async with open_endpoint(PROVIDER, bind="::", admit=frozenset({RENTER_KEY})) as provider:
        for bind, host, shown in (
            ("127.0.0.1", "127.0.0.1", "127.0.0.1:"),
            ("::1", "::1", "[::1]:"),
            ("::", "127.0.0.1", "127.0.0.1:"),
        ):
            async with open_endpoint(RENTER, bind=bind) as renter:
                dialled = await renter.connect(host, provider.port, PROVIDER_KEY)
                accepted = await provider.accept()
                assert dialled.peer_address == f"{shown}{provider.port}"
                assert accepted.peer_address == f"{shown}{renter.port}"


# --- strangers -------------------------------------------------------------------------------------------------


def first_packet(seed: bytes = STRANGER) -> bytes:
    identity = TunnelIdentity(seed)
    return QuicEngine.dialling(identity, PROVIDER_KEY, ("192.0.2.1", 1), 0.0).datagrams_to_send(0.0)[0][0]


async def test_garbage_leaves_an_endpoint_working() -> None:
    chance = random.Random(99)
    genuine = first_packet()
    async with open_pair() as pair:
        near, far = await pair.stream_pair()
        cids = sorted(pair.provider._by_cid)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect(("127.0.0.1", pair.provider.port))
            for turn in range(20):
                for _ in range(20):
                    kind = chance.randrange(4)
                    data = bytearray(chance.randbytes(chance.randrange(1, 1400)) if kind == 0 else genuine)
                    if kind == 1:  # mutated first packet (what follows it is padding, which nothing protects)
                        for _ in range(chance.randrange(1, 8)):
                            data[chance.randrange(200)] ^= chance.randrange(1, 256)
                    elif kind == 2:  # addressed to the live connection, with either kind of header
                        data = bytearray(b"\x40" + chance.choice(cids) + chance.randbytes(100))
                    elif kind == 3:
                        cid = chance.choice(cids)
                        data[5:14] = bytes([len(cid)]) + cid
                        del data[chance.randrange(20, 1200) :]
                    sock.send(data)
                # The live connection answers in between, so the socket's buffer never overflows.
                await near.send_all(b"%d" % (turn % 10))
                assert await far.receive_some() == b"%d" % (turn % 10)
        await until(lambda: pair.provider.counts.received > 400)
        assert pair.provider.counts.ignored > 0
        assert pair.provider.half_open_count == 0
        assert len(pair.provider._connections) == 1
        async with open_endpoint(RENTER, bind="127.0.0.1") as another:
            dialled = await another.connect("127.0.0.1", pair.provider.port, PROVIDER_KEY)
            assert dialled.peer_key == PROVIDER_KEY


async def test_a_flood_of_handshakes_is_bounded_and_the_renter_still_gets_in() -> None:
    limits = TunnelLimits(unproven_max=4, half_open_per_address_max=2, half_open_max=8)
    async with (
        open_endpoint(PROVIDER, bind="127.0.0.1", admit=frozenset({RENTER_KEY}), limits=limits) as provider,
        open_endpoint(RENTER, bind="127.0.0.1") as renter,
    ):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect(("127.0.0.1", provider.port))
            for _ in range(20):
                sock.send(first_packet())
            await until(lambda: provider.counts.received == 20)
            assert provider.half_open_count == provider.counts.begun == 2
            assert provider.counts.retried == 18
            dialled = await renter.connect("127.0.0.1", provider.port, PROVIDER_KEY)
            assert provider.counts.retried == 19
            assert dialled.peer_key == PROVIDER_KEY
            assert (await provider.accept()).peer_key == RENTER_KEY


async def test_no_more_connections_than_the_bound() -> None:
    async with (
        open_endpoint(
            PROVIDER, bind="127.0.0.1", admit=frozenset({RENTER_KEY}), limits=TunnelLimits(connections_max=2)
        ) as provider,
        open_endpoint(RENTER, bind="127.0.0.1") as renter,
    ):
        first = await renter.connect("127.0.0.1", provider.port, PROVIDER_KEY)
        await renter.connect("127.0.0.1", provider.port, PROVIDER_KEY)
        with pytest.raises(TunnelError, match="timeout"):
            await renter.connect("127.0.0.1", provider.port, PROVIDER_KEY, timeout_ms=200)
        assert provider.counts.opened == 2
        await (await provider.accept()).aclose("make room")
        assert await first.wait_closed() == "closed by the peer: make room"


async def test_connections_that_ended_before_they_were_accepted_are_forgotten() -> None:
    async with (
        open_endpoint(PROVIDER, bind="127.0.0.1", admit=frozenset({RENTER_KEY})) as provider,
        open_endpoint(RENTER, bind="127.0.0.1") as renter,
    ):
        for _ in range(4):
            await (await renter.connect("127.0.0.1", provider.port, PROVIDER_KEY)).aclose()
            await until(lambda: all(known.ending is not None for known in provider._connections))
        live = await renter.connect("127.0.0.1", provider.port, PROVIDER_KEY)
        assert len(provider._arrived) == 1
        accepted = await provider.accept()
        await live.aclose("the live one")
        assert await accepted.wait_closed() == "closed by the peer: the live one"


async def test_an_exception_in_one_engine_ends_that_connection_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_pair() as pair, open_endpoint(RENTER, bind="127.0.0.1") as another:
        second = await another.connect("127.0.0.1", pair.provider.port, PROVIDER_KEY)
        second_accepted = await pair.provider.accept()
        near, far = await pair.stream_pair()

        def fail(*_: object) -> None:
            raise AssertionError("reached by a stranger's bytes")

        monkeypatch.setattr(pair.accepted._engine, "receive_datagram", fail)
        await near.send_all(b"boom")
        assert "the QUIC engine failed (AssertionError)" in await pair.accepted.wait_closed()
        with pytest.raises(trio.BrokenResourceError):
            await far.receive_some()
        await until(lambda: pair.accepted not in pair.provider._connections)
        assert pair.accepted not in pair.provider._by_cid.values()
        stream = await second.open_stream()
        await send_and_finish(stream, b"alive")
        assert await read_all(await second_accepted.accept_stream()) == b"alive"
