import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest import mock

import msgspec
import pytest
import trio

from node.errors import NodeError
from node.lease import link, service
from node.lease.files import LeaseStatus, Role
from node.lease.link import LinkHello
from protocol.machines.lease import FailReason, LeasePhase

HELLO = LinkHello(version=1, version_min=1, lease=bytes(16), generation=3, pid=1)


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


class OneLease:
    def __init__(self) -> None:
        self.now = LeaseStatus(
            lease=bytes(16), role=Role.PROVIDER, generation=3, sequence=1, phase=LeasePhase.SIGNED
        )
        self.cancels: list[tuple[FailReason, str, int | None]] = []
        self.collections = 0
        self.concluded: list[tuple[FailReason, str]] = []
        self._news = trio.Event()

    def become(self, phase: LeasePhase) -> None:
        self.now = msgspec.structs.replace(self.now, phase=phase, sequence=self.now.sequence + 1)
        self._news.set()
        self._news = trio.Event()

    def status(self) -> LeaseStatus:
        return self.now

    async def changed(self, sequence: int) -> LeaseStatus:
        while self.now.sequence <= sequence:
            await self._news.wait()
        return self.now

    async def cancel(self, reason: FailReason, detail: str, notice_ms: int | None) -> None:
        self.cancels.append((reason, detail, notice_ms))

    async def collect(self) -> None:
        self.collections += 1

    async def conclude(self, reason: FailReason, detail: str) -> None:
        self.concluded.append((reason, detail))

    async def settle(self) -> None:
        if self.now.phase is not LeasePhase.COLLECTED:
            raise NodeError("the lease is not over")
        self.become(LeasePhase.SETTLED)


@asynccontextmanager
async def serving(path: Path, lease: OneLease, hello: LinkHello = HELLO) -> AsyncIterator[trio.Nursery]:
    with service.bound_socket(path) as listener:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(service.serve, listener, hello, lease)
            yield nursery
            nursery.cancel_scope.cancel()


async def test_daemon_reads_cancels_and_settles(tmp_path: Path) -> None:
    lease = OneLease()
    async with serving(tmp_path / "k", lease), link.connect(tmp_path / "k") as keeper:
        assert keeper.hello == HELLO
        assert await keeper.status() == lease.now
        await keeper.cancel(FailReason.INTERRUPTED, detail="owner", notice_ms=5)
        assert lease.cancels == [(FailReason.INTERRUPTED, "owner", 5)]
        await keeper.collect()
        assert lease.collections == 1
        await keeper.conclude(FailReason.RENTER_AWAY, detail="it is done")
        assert lease.concluded == [(FailReason.RENTER_AWAY, "it is done")]
        with pytest.raises(link.LinkError, match="not over"):
            await keeper.settle()
        lease.become(LeasePhase.COLLECTED)
        await keeper.settle()
        assert (await keeper.status()).phase is LeasePhase.SETTLED


async def test_subscription_gives_the_present_each_change_and_an_end(tmp_path: Path) -> None:
    lease = OneLease()
    seen = []
    async with serving(tmp_path / "k", lease), link.connect(tmp_path / "k") as keeper:
        async for status in keeper.subscribe():
            seen.append(status.phase)
            if status.phase is LeasePhase.SIGNED:
                lease.become(LeasePhase.RUNNING)
            elif status.phase is LeasePhase.RUNNING:
                lease.become(LeasePhase.SETTLED)
    assert seen == [LeasePhase.SIGNED, LeasePhase.RUNNING, LeasePhase.SETTLED]


async def test_two_subscriptions_and_requests_share_a_link(tmp_path: Path) -> None:
    lease = OneLease()
    ends = []

    async def follow(keeper: link.KeeperLink) -> None:
        async for status in keeper.subscribe():
            ends.append(status.phase)

    async with (
        serving(tmp_path / "k", lease),
        link.connect(tmp_path / "k") as keeper,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(follow, keeper)
        nursery.start_soon(follow, keeper)
        while len(ends) < 2:
            await keeper.status()
        lease.become(LeasePhase.SETTLED)
    assert ends.count(LeasePhase.SETTLED) == 2


async def test_keeper_that_dies_ends_subscriptions_and_fails_requests(tmp_path: Path) -> None:
    lease = OneLease()
    async with serving(tmp_path / "k", lease) as nursery, link.connect(tmp_path / "k") as keeper:
        async for _status in keeper.subscribe():
            nursery.cancel_scope.cancel()
        with pytest.raises(link.LinkError, match="gone"):
            await keeper.status()


async def test_no_keeper_and_a_newer_keeper_are_errors(tmp_path: Path) -> None:
    with pytest.raises(link.LinkError, match="no keeper answers"):
        async with link.connect(tmp_path / "none"):
            pass
    newer = msgspec.structs.replace(HELLO, version=9, version_min=8)
    async with serving(tmp_path / "k", OneLease(), newer):
        with pytest.raises(link.LinkError, match="speaks versions 8 to 9"):
            async with link.connect(tmp_path / "k"):
                pass


async def test_garbage_ends_only_its_own_link(tmp_path: Path) -> None:
    lease = OneLease()
    async with serving(tmp_path / "k", lease):
        async with await trio.open_unix_socket(str(tmp_path / "k")) as stream:
            await stream.send_all(b"\xff" * 64)
            while await stream.receive_some():
                pass
        async with link.connect(tmp_path / "k") as keeper:
            assert await keeper.status() == lease.now


def test_socket_is_private_and_removed_and_leaves_a_successors_alone(tmp_path: Path) -> None:
    path = tmp_path / "k"
    with service.bound_socket(path):
        assert path.stat().st_mode & 0o777 == 0o600
        assert names(tmp_path) == ["k"]
    assert names(tmp_path) == []
    with service.bound_socket(path), service.bound_socket(path):
        pass
    assert names(tmp_path) == []
    with pytest.raises(NodeError, match="longer"), service.bound_socket(tmp_path / ("k" * 100)):
        pass


async def test_a_keeper_that_is_being_started_is_waited_for_though_its_predecessor_left_a_socket(
    tmp_path: Path,
) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(tmp_path / "k"))
    with pytest.raises(link.LinkError, match="refused"):
        async with link.connect(tmp_path / "k"):
            pass
    refused = trio.Event()
    lease = OneLease()

    async def start() -> None:
        await refused.wait()
        async with serving(tmp_path / "k", lease):
            await trio.sleep_forever()

    async def sleep(seconds: float) -> None:
        del seconds
        refused.set()
        await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(start)
        with mock.patch.object(link.trio, "sleep", sleep):
            async with link.connect(tmp_path / "k", starting_s=60) as keeper:
                assert await keeper.status() == lease.now
        nursery.cancel_scope.cancel()
