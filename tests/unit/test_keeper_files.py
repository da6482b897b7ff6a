"""A keeper's files where the disk, or the other side, does not do what it should."""

import errno
from pathlib import Path

import msgspec
import pytest
from trio.abc import Clock

from node.jobs.logs import LogReader, LogWriter
from node.keeper.provider_files import OUTPUT_SIZE_FACTOR, ProviderFiles
from node.keeper.renter_files import RenterFiles
from node.lease.files import LeaseFile, ProviderSide, RenterSide, Role
from protocol.errors import IllegalTransition
from protocol.frames import LogData, LogEnded, LogSource
from protocol.records.job import Job, Resources
from protocol.records.offer import Terms

JOB = Job(command=("true",), outputs=("out", "whole"), resources=Resources(1000, 256, disk_mib=1), time_limit_ms=1)


def lease_file() -> LeaseFile:
    return LeaseFile(
        role=Role.PROVIDER, lease=bytes(16), network=bytes(32), provider=bytes(32), renter=bytes(32),
        peer_tunnel_key=bytes(32), voucher_key=bytes(32), price=1, quantity=1, max_spend=1, until=1,
        terms=Terms(), job_hash=bytes(32), resources=JOB.resources, isolation="bubblewrap", simulated=True,
        provider_side=ProviderSide(job_uid=0),
    )  # fmt: skip


class PlainScratch:
    def __init__(self, path: Path) -> None:
        self.path = path


async def test_log_waits_for_room_and_has_no_gap(
    tmp_path: Path, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = RenterFiles(tmp_path, bytes(16), RenterSide(addresses=("127.0.0.1:1",), job=JOB))
    files.logs[LogSource.STDOUT] = LogWriter(tmp_path / "log", "stdout", head_max=4, tail_max=16)
    append = LogWriter.append
    tries: list[bytes] = []

    def append_when_there_is_room(writer: LogWriter, data: bytes) -> None:
        tries.append(data)
        if len(tries) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        if len(tries) == 2:
            append(writer, data[:3])
            raise OSError(errno.ENOSPC, "No space left on device")
        append(writer, data)

    monkeypatch.setattr(LogWriter, "append", append_when_there_is_room)
    await files.append_log(LogData(LogSource.STDOUT, 0, b"abcdefgh"))
    assert tries == [b"abcdefgh", b"abcdefgh", b"defgh"]
    assert files.is_log_complete(LogEnded(8, 0))
    assert LogReader(tmp_path / "log", "stdout").read(0).data == b"abcd"
    assert LogReader(tmp_path / "log", "stdout").read(4).data == b"efgh"
    with pytest.raises(IllegalTransition):
        await files.append_log(LogData(LogSource.STDOUT, 7, b"x"))
    files.close()


async def test_outputs_as_large_as_the_disk_are_kept_and_what_is_not_is_named_without_our_paths(
    tmp_path: Path,
) -> None:
    scratch = tmp_path / "scratch" / "job"
    (scratch / "whole").mkdir(parents=True)
    # What fits on the disk fits twice when it has two names, and a file system has a little more than was lent.
    (scratch / "whole" / "file").write_bytes(b"x" * (2**20 - 10))
    (scratch / "whole" / "again").hardlink_to(scratch / "whole" / "file")
    with (scratch / "out").open("wb") as sparse:
        sparse.truncate(OUTPUT_SIZE_FACTOR * 2**20 + 1)
    side = lease_file().provider_side
    assert side is not None
    files = ProviderFiles(tmp_path, lease_file(), side)
    files.job = JOB
    files._scratch = PlainScratch(scratch)  # type: ignore[assignment]
    told, detail = await files.list_outputs()
    assert [output.manifest is None for output in told] == [True, False]
    assert detail == f"out was not kept: /job/out holds more than {OUTPUT_SIZE_FACTOR * 2**20} bytes"
    assert (
        files.without_paths(f"cannot read {scratch}/x in {tmp_path}/scratch") == "cannot read /job/x in /scratch"
    )
    assert msgspec.structs.asdict(told[1])["size"] == 2 * (2**20 - 10)
