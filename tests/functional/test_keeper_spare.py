"""A spare keeper becomes a lease's keeper, as the lease's user; and the keepers' own command line."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.keeper_pair import ENVIRONMENT, pair

from node.lease.lock import holder_of
from node.lease.spare import connect_spare
from protocol.machines.lease import COMPLETED

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a spare to another user")

CALLER = 65_534
WRITE = ("sh", "-c", "cat given > out; echo hello")


@contextmanager
def keeper_process(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "node.keeper", *arguments],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd="/",
        env={**ENVIRONMENT, "NOTIFY_SOCKET": "/nowhere"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def said_by(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stderr is not None
    return process.stderr.read()


def prepare_home(room: Path) -> None:
    """Make a directory that the caller may pass, with what is the caller's alone."""
    room.chmod(0o755)
    (room / "places").mkdir()
    (room / "sockets").mkdir()
    (room / "given").write_text("given")
    for path in room.iterdir():
        os.chown(path, CALLER, CALLER)
        path.chmod(0o700)


def uids_of(pid: int) -> set[str]:
    text = Path(f"/proc/{pid}/status").read_text()
    return set(next(line for line in text.splitlines() if line.startswith("Uid:")).split()[1:])


async def test_spare_runs_a_lease_as_its_caller(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="gpk-") as home, keeper_process("--spare", f"{home}/spare") as process:
        room = Path(home)
        prepare_home(room)
        inputs, outputs = {"given": room / "given"}, {"out": room / "places" / "out"}
        with pair(WRITE, inputs=inputs, outputs=outputs) as keepers:
            keepers.provider.start()
            port = (await keepers.provider.wait_for(lambda status: status.port != 0)).port
            keepers.write_renter((f"127.0.0.1:{port}",), CALLER)
            keepers.renter.socket = room / "sockets" / "k"
            spare = await connect_spare(room / "spare")
            pid = await spare.assign(keepers.renter.directory, keepers.renter.socket, CALLER, CALLER)
            assert pid == process.pid
            _provider, renter = await keepers.finish()
            assert renter.outcome == COMPLETED
            assert keepers.renter.output() == b"hello\n"
            assert (room / "places" / "out").read_text() == "given"
            assert (room / "places" / "out").stat().st_uid == CALLER
            holder = holder_of(keepers.renter.directory)
            assert holder is not None
            assert holder.pid == pid
            assert uids_of(pid) == {str(CALLER)}
            async with keepers.renter.link() as link:
                await link.settle()
            assert process.wait() == 0


async def test_spare_ends_with_its_daemon() -> None:
    with tempfile.TemporaryDirectory(prefix="gpk-") as home, keeper_process("--spare", f"{home}/spare") as process:
        spare = await connect_spare(Path(home) / "spare")
        await spare.aclose()
        assert process.wait() == 0


def test_lease_directory_that_is_none_is_said(tmp_path: Path) -> None:
    with keeper_process(str(tmp_path), str(tmp_path / "s")) as process:
        err = said_by(process)
        assert process.wait() == 1
        assert b"lease.cbor is missing" in err
    with keeper_process() as process:
        err = said_by(process)
        assert process.wait() == 2
        assert b"a socket are needed" in err
