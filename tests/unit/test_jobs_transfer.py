import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing
import zstandard

from node.errors import DiskFull, StagingError
from node.jobs import draft as draft_module
from node.jobs.draft import DraftTree, Placement
from node.jobs.reader import ExactReader, StreamCut
from node.jobs.transfer import TransferRefused, TreeReceiver, send_tree
from node.jobs.tree import ScannedTree, scan_tree
from protocol.errors import BadManifest
from protocol.manifest import Manifest

Stream = trio.StapledStream[trio.abc.SendStream, trio.abc.ReceiveStream]
SIZE_MAX = 2**30


def make_tree(path: Path) -> Path:
    (path / "sub" / "deep").mkdir(parents=True)
    (path / "text").write_text("the same line\n" * 100_000)
    (path / "random").write_bytes(os.urandom(1_500_000))
    (path / "sub" / "copy").write_bytes((path / "random").read_bytes())
    (path / "empty").touch()
    (path / "sub" / "run").write_text("#!/bin/sh\n")
    (path / "sub" / "run").chmod(0o755)
    (path / "sub" / "deep" / "link").symlink_to("../../text")
    (path / "sub" / "deep").chmod(0o750)
    return path


def contents(path: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for item in sorted(path.rglob("*")):
        name = str(item.relative_to(path))
        if item.is_symlink():
            found[name] = str(item.readlink())
        elif item.is_dir():
            found[name] = oct(item.stat().st_mode)
        else:
            found[name] = (oct(item.stat().st_mode), item.read_bytes())
    return found


def receiver_of(root: Path, beneath: str, **options: object) -> TreeReceiver:
    settings: dict[str, object] = {"size_max": SIZE_MAX, **options}
    return TreeReceiver(lambda manifest: DraftTree(root, beneath, manifest, "t"), **settings)  # type: ignore[arg-type]


async def move(tree: ScannedTree, receiver: TreeReceiver) -> Placement:
    ours, theirs = trio.testing.memory_stream_pair()
    places = []

    async def receive() -> None:
        _manifest, placement = await receiver.receive(theirs, ExactReader(theirs))
        places.append(placement)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        await send_tree(ours, ExactReader(ours), tree)
    return places[0]


async def both_errors(
    send: Callable[[Stream], object], receive: Callable[[Stream], object]
) -> tuple[BaseException | None, BaseException | None]:
    """Run both sides; return what each raised. A side that is done closes its stream."""
    streams = trio.testing.memory_stream_pair()
    errors: list[BaseException | None] = [None, None]

    async def run(number: int, side: Callable[[Stream], object]) -> None:
        try:
            await side(streams[number])  # type: ignore[misc]
        except Exception as error:
            errors[number] = error
        finally:
            await streams[number].aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run, 0, send)
        nursery.start_soon(run, 1, receive)
    return errors[0], errors[1]


async def test_tree_arrives_whole_with_modes_links_and_empty_files(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source")
    (tmp_path / "there").mkdir()
    placement = await move(scan_tree(source), receiver_of(tmp_path / "there", "a/b"))
    assert placement == Placement(tmp_path / "there/a/b")
    assert contents(tmp_path / "there/a/b") == contents(source)
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["a"]


async def test_single_file_and_empty_directory_arrive(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    await move(scan_tree(tmp_path / "file"), receiver_of(tmp_path, "new", is_durable=True))
    await move(scan_tree(tmp_path / "empty"), receiver_of(tmp_path, "nothing"))
    assert (tmp_path / "new").read_text() == "x"
    assert contents(tmp_path / "nothing") == {}


async def test_merging_replaces_files_and_keeps_the_others(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source")
    place = tmp_path / "place"
    (place / "sub").mkdir(parents=True)
    (place / "text").write_text("old")
    (place / "sub" / "mine").write_text("mine")
    placement = await move(scan_tree(source), receiver_of(tmp_path, "place", is_durable=True))
    assert not placement.in_the_way
    assert (place / "sub" / "mine").read_text() == "mine"
    (place / "sub" / "mine").unlink()
    place.joinpath("sub").chmod((source / "sub").stat().st_mode & 0o777)
    assert contents(place) == contents(source)


@pytest.mark.parametrize("obstacle", ["file", "link", "directory", "top"])
async def test_other_kinds_are_left_alone_and_the_tree_put_beside(tmp_path: Path, obstacle: str) -> None:
    source = make_tree(tmp_path / "source")
    (tmp_path / "elsewhere").mkdir()
    place = tmp_path / "place"
    if obstacle == "top":
        place.write_text("mine")
    else:
        place.mkdir()
    if obstacle == "file":
        (place / "sub").write_text("mine")
    elif obstacle == "link":
        (place / "sub").symlink_to(tmp_path / "elsewhere")
    elif obstacle == "directory":
        (place / "text").mkdir()
    before = contents(place) if place.is_dir() else place.read_text()
    placement = await move(scan_tree(source), receiver_of(tmp_path, "place"))
    assert placement.path == tmp_path / "place.gpunode-1"
    assert "there" in placement.in_the_way
    assert contents(placement.path) == contents(source)
    assert (contents(place) if place.is_dir() else place.read_text()) == before
    assert contents(tmp_path / "elsewhere") == {}


async def test_links_on_the_way_to_the_place_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root" / "a").symlink_to(tmp_path / "elsewhere")
    source = make_tree(tmp_path / "source")
    tree = scan_tree(source)
    sent, received = await both_errors(
        lambda stream: send_tree(stream, ExactReader(stream), tree),
        lambda stream: receiver_of(tmp_path / "root", "a/b").receive(stream, ExactReader(stream)),
    )
    assert isinstance(received, StagingError)
    assert isinstance(sent, TransferRefused)
    assert contents(tmp_path / "elsewhere") == {}


class CutStream(trio.abc.Stream):
    """Ends after `budget` bytes were sent through it."""

    def __init__(self, stream: trio.abc.Stream, budget: int) -> None:
        self._stream, self._budget = stream, budget

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        part = bytes(data)[: self._budget]
        self._budget -= len(part)
        await self._stream.send_all(part)
        if not self._budget:
            await self._stream.aclose()
            raise trio.BrokenResourceError

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return bytes(await self._stream.receive_some(max_bytes))

    async def aclose(self) -> None:
        await self._stream.aclose()


@pytest.mark.parametrize("is_same_process", [True, False])
async def test_cut_transfer_resumes_with_what_it_has(
    tmp_path: Path, is_same_process: bool, autojump_clock: trio.testing.MockClock
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "big").write_bytes(os.urandom(6_000_000))
    tree = scan_tree(tmp_path / "source")
    receiver = receiver_of(tmp_path, "place", expected=tree.manifest.id)
    sent, received = await both_errors(
        lambda stream: send_tree(CutStream(stream, 4_000_000), ExactReader(stream), tree),
        lambda stream: receiver.receive(stream, ExactReader(stream)),
    )
    assert isinstance(sent, StreamCut)
    assert isinstance(received, StreamCut)
    assert not (tmp_path / "place").exists()
    if not is_same_process:
        receiver = receiver_of(tmp_path, "place", expected=tree.manifest.id)
    amounts: list[tuple[int, int]] = []

    async def receive(stream: Stream) -> None:
        await receiver.receive(stream, ExactReader(stream), lambda done, total: amounts.append((done, total)))

    errors = await both_errors(lambda stream: send_tree(stream, ExactReader(stream), tree), receive)
    assert errors == (None, None)
    assert amounts[0][0] >= 2_000_000
    assert amounts[-1] == (6_000_000, 6_000_000)
    assert contents(tmp_path / "place") == contents(tmp_path / "source")


async def test_draft_of_another_tree_is_not_mixed_in(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("first")
    second.write_text("second")
    draft = DraftTree(tmp_path, "place", scan_tree(first).manifest, "t")
    draft.open()
    draft.store(0, b"first")
    draft.close()
    await move(scan_tree(second), receiver_of(tmp_path, "place"))
    assert (tmp_path / "place").read_text() == "second"


async def test_full_disk_is_said_to_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = scan_tree(make_tree(tmp_path / "source"))
    monkeypatch.setattr(draft_module, "DISK_RESERVE", 2**60)
    sent, received = await both_errors(
        lambda stream: send_tree(stream, ExactReader(stream), tree),
        lambda stream: receiver_of(tmp_path, "place").receive(stream, ExactReader(stream)),
    )
    assert isinstance(received, DiskFull)
    assert isinstance(sent, DiskFull)
    assert "MiB" in str(sent)


async def test_file_that_changed_after_the_scan_is_named_to_both_sides(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source")
    tree = scan_tree(source)
    (source / "random").write_bytes(os.urandom(1_500_000))
    sent, received = await both_errors(
        lambda stream: send_tree(stream, ExactReader(stream), tree),
        lambda stream: receiver_of(tmp_path, "place").receive(stream, ExactReader(stream)),
    )
    assert isinstance(sent, StagingError)
    assert "random" in str(sent)
    assert isinstance(received, TransferRefused)
    assert "changed" in str(received)
    assert not (tmp_path / "place").exists()


@pytest.mark.parametrize(
    ("limit", "expected"), [(10, None), (SIZE_MAX, b"x" * 32)], ids=["too large", "another tree"]
)
async def test_tree_that_was_not_agreed_on_is_refused(tmp_path: Path, limit: int, expected: bytes | None) -> None:
    tree = scan_tree(make_tree(tmp_path / "source"))
    receiver = receiver_of(tmp_path, "place", size_max=limit, expected=expected)
    sent, received = await both_errors(
        lambda stream: send_tree(stream, ExactReader(stream), tree),
        lambda stream: receiver.receive(stream, ExactReader(stream)),
    )
    assert isinstance(received, BadManifest)
    assert isinstance(sent, TransferRefused)


def offer(manifest: Manifest) -> bytes:
    return b"\x01" + struct.pack(">I", len(manifest.data)) + manifest.data


def record(index: int, payload: bytes, flags: int = 0) -> bytes:
    return b"\x03" + struct.pack(">IIB", index, len(payload), flags) + payload


BOMB = zstandard.ZstdCompressor().compress(bytes(50_000_000))


@pytest.mark.parametrize(
    "attack",
    [
        record(0, b"five!"),
        record(0, b"longer than the chunk"),
        record(0, b"y"),
        record(7, b"xxxxx"),
        record(0, b"xxxxx", flags=2),
        record(0, b"\x28\xb5", flags=1),
        record(0, BOMB[:5], flags=1),
        b"\x04" + bytes(32),
        b"\x09",
    ],
)
async def test_lying_senders_are_found_out(tmp_path: Path, attack: bytes) -> None:
    (tmp_path / "file").write_text("xxxxx")
    manifest = scan_tree(tmp_path / "file").manifest

    async def lie(stream: Stream) -> None:
        await stream.send_all(offer(manifest) + attack)
        while await stream.receive_some():
            pass

    _sent, received = await both_errors(
        lie, lambda stream: receiver_of(tmp_path, "place").receive(stream, ExactReader(stream))
    )
    assert isinstance(received, BadManifest)
    assert not (tmp_path / "place").exists()


async def test_compressed_bomb_makes_no_more_than_the_chunk(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(os.urandom(len(BOMB) + 1))
    manifest = scan_tree(tmp_path / "file").manifest

    async def lie(stream: Stream) -> None:
        await stream.send_all(offer(manifest) + record(0, BOMB, flags=1))
        while await stream.receive_some():
            pass

    _sent, received = await both_errors(
        lie, lambda stream: receiver_of(tmp_path, "place").receive(stream, ExactReader(stream))
    )
    assert isinstance(received, BadManifest)
    assert "another size" in str(received)


@pytest.mark.parametrize(
    "answer", [b"\x02\xff", b"\x04" + bytes(32), b"\x05\xff\xff", b"\x02\x80\x04" + bytes(32), b"\x63"]
)
async def test_lying_receivers_are_found_out(tmp_path: Path, answer: bytes) -> None:
    (tmp_path / "file").write_text("xxxxx")
    tree = scan_tree(tmp_path / "file")

    async def lie(stream: Stream) -> None:
        await stream.send_all(answer)
        while await stream.receive_some():
            pass

    sent, _received = await both_errors(lambda stream: send_tree(stream, ExactReader(stream), tree), lie)
    assert isinstance(sent, BadManifest)


async def test_refusals_are_printable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("xxxxx")
    tree = scan_tree(tmp_path / "file")

    async def refuse(stream: Stream) -> None:
        text = b"no: \x1b[2J\xff"
        await stream.send_all(b"\x05" + struct.pack(">H", len(text)) + text)

    sent, _received = await both_errors(lambda stream: send_tree(stream, ExactReader(stream), tree), refuse)
    assert isinstance(sent, TransferRefused)
    assert str(sent).isprintable()
