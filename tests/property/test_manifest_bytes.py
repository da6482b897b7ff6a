import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import manifest
from protocol.errors import BadManifest
from protocol.manifest import CHUNK_RECORD, EntryDraft, EntryKind, build, parse_untrusted

NAMES = st.text(alphabet="aB.-é \n", min_size=1, max_size=3).filter(lambda name: name not in (".", ".."))
CHUNKS = st.lists(
    st.tuples(st.binary(min_size=32, max_size=32), st.integers(1, manifest.CHUNK_SIZE_MAX)), max_size=3
)


@st.composite
def trees(draw: st.DrawFn) -> list[EntryDraft]:
    drafts = {"": EntryDraft("", EntryKind.DIRECTORY, 0o755)}
    for _number in range(draw(st.integers(0, 8))):
        above = draw(st.sampled_from([p for p, d in drafts.items() if d.kind is EntryKind.DIRECTORY]))
        path = f"{above}/{draw(NAMES)}".lstrip("/")
        if path in drafts:
            continue
        kind = draw(st.sampled_from(EntryKind))
        mode = 0 if kind is EntryKind.SYMLINK else draw(st.integers(0, 0o777))
        target = "../" * draw(st.integers(0, path.count("/"))) + draw(NAMES) if kind is EntryKind.SYMLINK else ""
        records = b"".join(CHUNK_RECORD.pack(*chunk) for chunk in draw(CHUNKS)) if kind is EntryKind.FILE else b""
        drafts[path] = EntryDraft(path, kind, mode, target, records)
    return list(drafts.values())


@settings(max_examples=100)
@given(trees(), st.randoms())
def test_round_trip_in_whatever_order_it_was_built(drafts: list[EntryDraft], random: object) -> None:
    first = build(drafts)
    random.shuffle(drafts)  # type: ignore[attr-defined]
    assert build(drafts).data == first.data
    again = parse_untrusted(first.data)
    assert again.id == first.id
    assert again.entries == first.entries
    assert {(e.path, e.kind, e.mode, e.target) for e in again.entries} == {
        (d.path, d.kind, d.mode, d.target) for d in drafts
    }
    by_path = {draft.path: draft.chunks for draft in drafts}
    for index, entry, offset, length in again.places():
        at = (index - entry.first_chunk) * CHUNK_RECORD.size
        assert again.chunk_record(index) == by_path[entry.path][at : at + CHUNK_RECORD.size]
        assert 0 <= offset <= entry.size - length


@settings(max_examples=200)
@given(trees(), st.data())
def test_mutations_are_refused_or_valid_and_canonical(drafts: list[EntryDraft], data: st.DataObject) -> None:
    good = bytearray(build(drafts).data)
    for _number in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(good)[: data.draw(st.integers(0, len(good)))] if data.draw(st.booleans()) else bytes(good)
    try:
        parsed = parse_untrusted(cut)
    except BadManifest:
        return
    rebuilt = build(
        EntryDraft(
            e.path,
            e.kind,
            e.mode,
            e.target,
            b"".join(parsed.chunk_record(i) for i in range(e.first_chunk, e.first_chunk + e.chunk_count)),
        )
        for e in parsed.entries
    )
    assert rebuilt.data == cut


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_garbage_raises_only_bad_manifest(data: bytes) -> None:
    with pytest.raises(BadManifest):
        parse_untrusted(data)


def raw(*entries: bytes, chunks: bytes = b"", chunk_count: int | None = None) -> bytes:
    count = len(chunks) // CHUNK_RECORD.size if chunk_count is None else chunk_count
    return struct.pack(">4sII", b"GPM1", len(entries), count) + b"".join(entries) + chunks


def directory(path: str, mode: int = 0o755) -> bytes:
    return struct.pack(">BHH", 0, mode, len(path.encode())) + path.encode()


def file(path: str, count: int = 0, mode: int = 0o644) -> bytes:
    return struct.pack(">BHH", 1, mode, len(path.encode())) + path.encode() + struct.pack(">I", count)


def link(path: str, target: str) -> bytes:
    return struct.pack(">BHH", 2, 0, len(path)) + path.encode() + struct.pack(">H", len(target)) + target.encode()


ROOT = directory("")
CHUNK = CHUNK_RECORD.pack(bytes(32), 5)


@pytest.mark.parametrize(
    "bad",
    [
        raw(),
        raw(directory("a")),
        raw(link("", "x")),
        raw(ROOT, file("/etc/passwd")),
        raw(ROOT, file("..")),
        raw(ROOT, directory("a"), file("a/..")),
        raw(ROOT, directory("a"), file("a//b")),
        raw(ROOT, file("./a")),
        raw(ROOT, file("a\0b")),
        raw(ROOT, file("a" * 256)),
        raw(ROOT, file("a"), file("a")),
        raw(ROOT, file("b"), file("a")),
        raw(ROOT, file("a/b")),
        raw(ROOT, file("a"), file("a/b")),
        raw(ROOT, link("a", "b"), file("a/b")),
        raw(file(""), file("a")),
        raw(ROOT, link("a", "/etc")),
        raw(ROOT, link("a", "..")),
        raw(ROOT, link("a", "")),
        raw(ROOT, directory("a"), link("a/b", "../../x")),
        raw(ROOT, directory("a"), link("a/b", "x/../../../y")),
        raw(ROOT, link("up", "sub/up/.."), directory("z")),
        raw(directory("", 0o4755)),
        raw(ROOT, file("a", 1)),
        raw(ROOT, file("a"), chunks=CHUNK),
        raw(ROOT, file("a", 2), chunks=CHUNK),
        raw(ROOT, file("a", 1), chunks=CHUNK_RECORD.pack(bytes(32), 0)),
        raw(ROOT, file("a", 1), chunks=CHUNK_RECORD.pack(bytes(32), manifest.CHUNK_SIZE_MAX + 1)),
        raw(ROOT, chunk_count=2**32 - 1),
        raw(ROOT) + b"x",
        struct.pack(">4sII", b"GPM1", 2**32 - 1, 0) + ROOT,
        raw(ROOT, struct.pack(">BHH", 3, 0, 1) + b"a"),
        raw(ROOT, struct.pack(">BHH", 1, 0, 2) + b"\xff\xfe" + bytes(4)),
    ],
)
def test_trees_that_lie_or_leave_are_refused(bad: bytes) -> None:
    with pytest.raises(BadManifest):
        parse_untrusted(bad)


def test_case_is_kept_and_links_may_point_inside() -> None:
    good = raw(
        ROOT, file("A"), file("a", 1), directory("b"), link("b/c", "../a"), link("b/d", "./c"), chunks=CHUNK
    )
    parsed = parse_untrusted(good)
    assert [entry.path for entry in parsed.entries] == ["", "A", "a", "b", "b/c", "b/d"]
    assert parsed.size == 5
