"""A renter that lies to a provider's keeper, and a provider that lies to a renter's; cut cables; full disks."""

import contextlib
import os
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from support.keeper_pair import Pair, pair
from support.udprelay import open_relay

from node.errors import TunnelClosed
from node.keeper.wire import FrameLink
from node.ports import TunnelConnection
from node.tunnel import open_endpoint
from protocol import codec, frames
from protocol.frames import (
    BulkOpened,
    ControlOpened,
    Direction,
    Hello,
    JobSubmitted,
    LogData,
    LogOpened,
    LogSource,
    OutputsCollected,
    ShellOpened,
    StatusTold,
    VoucherSent,
)
from protocol.machines.lease import COMPLETED, FAULTS_MAX, FailReason, LeasePhase
from protocol.records.job import Resources
from protocol.records.offer import Terms

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="keepers of a provider run jobs under other uids")

SLEEPING = ("sh", "-c", "echo up; sleep 600")


@asynccontextmanager
async def dialled(keepers: Pair, port: int) -> AsyncIterator[TunnelConnection]:
    """Open a tunnel as the lease's renter, without its keeper."""
    async with open_endpoint(keepers.renter_seed, bind="127.0.0.1") as endpoint:
        yield await endpoint.connect("127.0.0.1", port, keepers.provider_key)


async def controlled(keepers: Pair, connection: TunnelConnection) -> FrameLink:
    link = FrameLink(await connection.open_stream())
    await link.send(ControlOpened())
    await link.send(Hello(frames.VERSION, keepers.lease, 1))
    await link.receive_as(Hello)
    return link


async def started(keepers: Pair, connection: TunnelConnection) -> FrameLink:
    """Bring the lease to a running job."""
    link = await controlled(keepers, connection)
    await link.send(JobSubmitted(codec.encode(keepers.job)))
    while (await link.receive_as(StatusTold)).started_at == 0:
        pass
    return link


Attack = Callable[[Pair, TunnelConnection, FrameLink], Awaitable[None]]


async def send_raw(connection: TunnelConnection, data: bytes) -> None:
    stream = await connection.open_stream()
    await stream.send_all(data)


async def garbage_stream(_keepers: Pair, connection: TunnelConnection, _link: FrameLink) -> None:
    await send_raw(connection, b"\xff" * 100)


async def huge_frame(_keepers: Pair, connection: TunnelConnection, _link: FrameLink) -> None:
    await send_raw(connection, struct.pack(">I", 2**32 - 1))


async def wrong_opener(_keepers: Pair, connection: TunnelConnection, _link: FrameLink) -> None:
    await send_raw(connection, frames.encode(VoucherSent(b"")))


async def bad_voucher(_keepers: Pair, _connection: TunnelConnection, link: FrameLink) -> None:
    await link.send(VoucherSent(b"not signed"))


async def another_job(keepers: Pair, _connection: TunnelConnection, link: FrameLink) -> None:
    await link.send(JobSubmitted(codec.encode(keepers.job)[:-1] + b"x"))


async def early_collected(_keepers: Pair, _connection: TunnelConnection, link: FrameLink) -> None:
    await link.send(OutputsCollected(()))


async def input_too_late(_keepers: Pair, connection: TunnelConnection, _link: FrameLink) -> None:
    await send_raw(connection, frames.encode(BulkOpened(Direction.INPUT, 0)))


async def output_too_early(_keepers: Pair, connection: TunnelConnection, _link: FrameLink) -> None:
    await send_raw(connection, frames.encode(BulkOpened(Direction.OUTPUT, 63)))


async def frame_of_the_other_side(_keepers: Pair, _connection: TunnelConnection, link: FrameLink) -> None:
    await link.send(StatusTold(phase=LeasePhase.SETTLED))


async def many_streams(_keepers: Pair, connection: TunnelConnection, _link: FrameLink) -> None:
    with contextlib.suppress(TunnelClosed, trio.BrokenResourceError):  # it is cut off in the middle
        for _number in range(40):
            await send_raw(connection, frames.encode(LogOpened(0, 0))[:1])


@pytest.mark.parametrize(
    "attack",
    [
        garbage_stream,
        huge_frame,
        wrong_opener,
        bad_voucher,
        another_job,
        early_collected,
        input_too_late,
        output_too_early,
        frame_of_the_other_side,
        many_streams,
    ],
)
async def test_renter_that_breaks_the_protocol_loses_its_tunnel_and_not_the_job(attack: Attack) -> None:
    with pair(SLEEPING) as keepers:
        keepers.provider.start()
        port = (await keepers.provider.wait_for(lambda status: status.port != 0)).port
        async with dialled(keepers, port) as connection:
            link = await started(keepers, connection)
            await attack(keepers, connection, link)
            await connection.wait_closed()
        async with dialled(keepers, port) as connection:
            link = await controlled(keepers, connection)
            assert (await link.receive_as(StatusTold)).phase is LeasePhase.RUNNING


async def test_renter_that_never_stops_breaking_it_is_given_up() -> None:
    with pair(SLEEPING) as keepers:
        keepers.provider.start()
        port = (await keepers.provider.wait_for(lambda status: status.port != 0)).port
        for number in range(FAULTS_MAX):
            async with dialled(keepers, port) as connection:
                if number == 0:
                    await started(keepers, connection)
                await garbage_stream(keepers, connection, FrameLink(await connection.open_stream()))
                await connection.wait_closed()
        status = await keepers.provider.wait_phase(LeasePhase.COLLECTING)
        assert status.outcome == FailReason.PEER_FAULT


async def test_shells_of_a_job_are_counted() -> None:
    with pair(SLEEPING, terms=Terms(voucher_interval_ms=60_000)) as keepers:  # nobody pays here
        keepers.provider.start()
        port = (await keepers.provider.wait_for(lambda status: status.port != 0)).port
        async with dialled(keepers, port) as connection:
            await started(keepers, connection)
            links = []
            for _number in range(5):
                links.append(FrameLink(await connection.open_stream()))
                await links[-1].send(ShellOpened(("cat",)))
                if len(links) < 5:
                    await links[-1].send(frames.ShellInput(b"x"))
                    assert isinstance(await links[-1].receive_any(), frames.ShellOutput)
            refusal = await links[-1].receive_as(frames.ShellEnded)
            assert refusal.status == -1
            assert "run in this job already" in refusal.detail


async def serve_lies(keepers: Pair, phase: LeasePhase, lie: Callable[[FrameLink], Awaitable[None]]) -> None:
    """Be the provider for the real renter's keeper: tell `phase`, then `lie` on the stream of the log."""
    async with open_endpoint(
        keepers.provider_seed, bind="127.0.0.1", admit=frozenset({keepers.renter_key})
    ) as endpoint:
        keepers.write_renter((f"127.0.0.1:{endpoint.port}",))
        keepers.renter.start()
        for _try in range(FAULTS_MAX):
            connection = await endpoint.accept()
            link = FrameLink(await connection.accept_stream())
            await link.receive_as(ControlOpened)
            await link.receive_as(Hello)
            await link.send(Hello(frames.VERSION, keepers.lease, 1))
            await link.send(StatusTold(phase=phase, started_at=1))
            while True:
                stream = FrameLink(await connection.accept_stream())
                if isinstance(await stream.receive_any(), LogOpened):
                    await lie(stream)
                    break
            await connection.wait_closed()


async def test_provider_that_lies_is_given_up_and_paid_no_more_than_was_signed() -> None:
    async def backwards(link: FrameLink) -> None:
        await link.send(LogData(LogSource.STDOUT, 5, b"abc"))
        await link.send(LogData(LogSource.STDOUT, 3, b"abc"))

    with pair(SLEEPING) as keepers:
        await serve_lies(keepers, LeasePhase.RUNNING, backwards)
        status = await keepers.renter.wait_phase(LeasePhase.FAILED)
        assert status.outcome == FailReason.PEER_FAULT
        assert status.voucher_amount <= 60_000 * 1000


async def test_cut_cable_ends_nothing(tmp_path: Path) -> None:
    code = (
        "import pathlib, time\nfor number in range(10**6):\n    print('line', number, flush=True)\n"
        "    time.sleep(0.02)\n    if pathlib.Path('go').exists(): break"
    )
    with pair(("python3", "-c", code)) as keepers:
        keepers.provider.start()
        port = (await keepers.provider.wait_for(lambda status: status.port != 0)).port
        async with open_relay(port) as relay:
            keepers.write_renter((f"127.0.0.1:{relay.port}",))
            keepers.renter.start()
            before = await keepers.renter.wait_for(lambda status: status.stdout_size > 0)
            relay.is_cut = True
            await keepers.renter.wait_for(lambda status: not status.connected)
            relay.is_cut = False
            await keepers.renter.wait_for(lambda status: status.stdout_size > before.stdout_size)
            (keepers.provider.directory / "scratch" / "job" / "go").touch()
            provider, renter = await keepers.finish()
        assert (provider.outcome, renter.outcome) == (COMPLETED, COMPLETED)
        output = keepers.renter.output()
        assert output == b"".join(b"line %d\n" % number for number in range(output.count(b"\n")))


async def test_inputs_beyond_the_leases_disk_are_refused_on_both_sides(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(os.urandom(24 * 2**20))
    small = Resources(cpus_milli=1000, memory_mib=256, disk_mib=16, pids=64)
    with pair(("true",), inputs={"data": tmp_path / "in"}, resources=small) as keepers:
        await keepers.start()
        with trio.fail_after(60):
            provider, renter = await keepers.finish()
        assert (provider.outcome, renter.outcome) == (FailReason.DISK_FULL, FailReason.DISK_FULL)
        assert "MiB" in renter.detail
        assert provider.started_at == 0
