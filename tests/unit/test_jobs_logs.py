import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.jobs import logs
from node.jobs.logs import LogError, LogReader, LogWriter


def writer(directory: Path, head_max: int = 10, tail_max: int = 20) -> LogWriter:
    return LogWriter(directory, "stdout", head_max=head_max, tail_max=tail_max)


def everything(reader: LogReader, size_max: int = 7) -> list[tuple[int, bytes]]:
    pieces: list[tuple[int, bytes]] = []
    offset = 0
    while (piece := reader.read(offset, size_max)).data:
        if pieces and pieces[-1][0] + len(pieces[-1][1]) == piece.offset:
            pieces[-1] = (pieces[-1][0], pieces[-1][1] + piece.data)
        else:
            pieces.append((piece.offset, piece.data))
        offset = piece.offset + len(piece.data)
    return pieces


def test_short_log_is_whole(tmp_path: Path) -> None:
    log = writer(tmp_path / "log")
    log.append(b"hello \xff\x00")
    assert everything(LogReader(tmp_path / "log", "stdout")) == [(0, b"hello \xff\x00")]
    log.close()


def test_absent_log_is_empty(tmp_path: Path) -> None:
    assert LogReader(tmp_path / "log", "stdout").read(5) == logs.LogPiece(0, b"", 0)


def test_head_and_tail_are_kept_and_the_gap_is_seen(tmp_path: Path) -> None:
    log = writer(tmp_path)
    data = bytes(range(100))
    for at in range(0, 100, 9):
        log.append(data[at : at + 9])
    assert everything(LogReader(tmp_path, "stdout")) == [(0, data[:10]), (80, data[80:])]
    assert LogReader(tmp_path, "stdout").size() == 100
    log.append(bytes(200))
    assert everything(LogReader(tmp_path, "stdout")) == [(0, data[:10]), (280, bytes(20))]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 100
    log.close()


@settings(max_examples=60)
@given(st.lists(st.binary(min_size=1, max_size=45), max_size=12), st.data())
def test_any_writes_and_reopenings_keep_head_and_tail(
    tmp_path_factory: pytest.TempPathFactory, writes: list[bytes], data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("log")
    log = writer(directory)
    for piece in writes:
        log.append(piece)
        if data.draw(st.booleans()):
            log.close()
            log = writer(directory)
    log.close()
    whole = b"".join(writes)
    found = everything(LogReader(directory, "stdout"))
    expected = [(0, whole)] if len(whole) <= 30 else [(0, whole[:10]), (len(whole) - 20, whole[-20:])]
    assert found == [piece for piece in expected if piece[1]]


def test_copy_of_a_log_skips_what_was_dropped_there(tmp_path: Path) -> None:
    copy = writer(tmp_path)
    copy.append(bytes(10))
    copy.skip_to(80)
    copy.skip_to(5)
    copy.append(b"tail")
    assert copy.size == 84
    assert everything(LogReader(tmp_path, "stdout")) == [(0, bytes(10)), (80, b"tail")]
    copy.close()


def test_skip_inside_the_head_keeps_both_sides_of_it(tmp_path: Path) -> None:
    copy = writer(tmp_path)
    copy.append(b"abc")
    copy.skip_to(6)
    copy.append(b"ghi")
    assert everything(LogReader(tmp_path, "stdout")) == [(0, b"abc"), (6, b"ghi")]
    copy.close()


def test_damaged_and_linked_logs_are_refused(tmp_path: Path) -> None:
    writer(tmp_path / "log").append(b"x")
    (tmp_path / "log" / "stdout.meta").write_bytes(b"GPL1" + bytes([255]) * 40)
    with pytest.raises(LogError, match="damaged"):
        LogReader(tmp_path / "log", "stdout").read(0)
    (tmp_path / "link").symlink_to("log")
    with pytest.raises(LogError, match="cannot read"):
        LogReader(tmp_path / "link", "stdout").read(0)


async def test_pump_takes_a_pipe_to_its_end(tmp_path: Path) -> None:
    read_end, write_end = logs.open_pipe()
    log = LogWriter(tmp_path, "stdout")
    os.write(write_end, b"x" * 100_000)
    os.close(write_end)
    calls = []
    await logs.pump(read_end, log, lambda: calls.append(log.size))
    assert calls[-1] == 100_000
    log.close()
