"""contrib/spec.md says what the code does: its tables and its examples are computed again here."""

import enum
import re
from pathlib import Path
from typing import get_args

import pytest
from support.signers import signer
from support.spec_tables import rows

from node.market.auctions import OFFERS_TOPIC
from node.market.bookkeeping import BOOK_PROTOCOL
from node.market.context import TRADE_PROTOCOL
from node.swarm.gossip import topic_name
from node.swarm.hello import HELLO_PROTOCOL
from node.swarm.requests import protocol_name
from protocol import codec, frames, manifest, records
from protocol.book import CLOCK_SKEW_MAX_MS, CLOCK_TOLERANCE_MS
from protocol.envelope import ENVELOPE_SIZE_MAX, KINDS, Envelope, open_untrusted, seal
from protocol.identity import lease_id, network_id, peer_id
from protocol.machines.admission import SKEW_MAX_MS
from protocol.machines.auction_types import HOLD_MS
from protocol.machines.lease import FailReason, LeasePhase
from protocol.pricing import clock_price, lifted, time_of_price
from protocol.records import Curve, RejectReason, Voucher
from protocol.records.fields import DURATION_MAX_MS, MILLIS_MAX
from protocol.records.job import JOB_SIZE_MAX
from protocol.records.lease import CommittedTerms
from protocol.units import DAY_MS, MINUTE_MS, Millis

SPEC = (Path(__file__).parents[2] / "contrib" / "spec.md").read_text()
STRUCTS = {Envelope, CommittedTerms, frames.OutputTold} | {
    value for name in records.__all__ if hasattr(value := getattr(records, name), "__struct_fields__")
}
KIND_OF = {record_type: kind for kind, record_type in KINDS.items()}
FRAMES = {str(frame.__struct_config__.tag): frame for frame in get_args(frames.Frame)}
NONCE = bytes(range(16))


def section(title: str) -> str:
    """Return the text below the one heading `title`, up to the next heading."""
    found = re.findall(rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", SPEC, re.MULTILINE | re.DOTALL)
    assert len(found) == 1, f"{len(found)} headings {title!r}"
    return str(found[0])


def cells(text: str) -> list[list[str]]:
    """Return the body of the first table in `text`."""
    table = re.search(r"(?:^\|.*\n?)+", text, re.MULTILINE)
    assert table is not None
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]


@pytest.mark.parametrize("record_type", sorted(STRUCTS, key=lambda each: each.__name__))
def test_every_field_table_is_that_of_the_code(record_type: type) -> None:
    kind = KIND_OF.get(record_type)
    written = cells(section(f"`{kind}`" if kind else record_type.__name__))
    assert [tuple(row[:3]) for row in written] == rows(record_type)
    assert all(row[3] for row in written)


@pytest.mark.parametrize("tag", sorted(FRAMES))
def test_every_table_of_a_frame_is_that_of_the_code(tag: str) -> None:
    fields, text = rows(FRAMES[tag]), section(f"frame `{tag}`")
    written = cells(text) if fields else []
    assert [tuple(row[:3]) for row in written] == fields
    assert fields or text.strip() == "Nothing more."


def test_every_frame_has_its_stream() -> None:
    streams = {row[0]: row[1:] for row in cells(section("The tunnel"))}
    for opener, sides in {
        "control": (frames.ToProvider, frames.ToRenter),
        "bulk": (),
        "log": ((), frames.FromLog),
        "shell": (frames.ShellInput, frames.FromShell),
    }.items():
        for text, side in zip(streams.pop(opener), sides, strict=False):
            tags = {str(frame.__struct_config__.tag) for frame in get_args(side) or ([side] if side else [])}
            assert set(re.findall(r"`?(\w+)`?(?:, |$)", text)) == tags
    assert streams == {}


@pytest.mark.parametrize("words", [RejectReason, LeasePhase, FailReason])
def test_every_word_is_described(words: type[enum.StrEnum]) -> None:
    assert [row[0] for row in cells(section(words.__name__))] == [word.value for word in words]


def test_every_kind_is_described() -> None:
    assert set(re.findall(r"^### `(\w+)`$", SPEC, re.MULTILINE)) == set(KINDS)


def example(name: str) -> str:
    found = re.search(rf"<!-- example: {name} -->\n(.*?)\n\n", SPEC, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_example_of_an_envelope() -> None:
    network = network_id("demo")
    voucher = Voucher(lease=NONCE, number=7, amount=1_234_567_890, covers_ms=30_000)
    sealed = seal(voucher, signer(1), network)
    written = dict(line.rsplit(maxsplit=1) for line in example("envelope").strip("`\n").splitlines())
    assert {name.strip(): value for name, value in written.items()} == {
        "body": codec.encode(voucher).hex(),
        "envelope": sealed.data.hex(),
        "record id": sealed.id.hex(),
        "content id": sealed.content_id.hex(),
    }
    assert open_untrusted(bytes.fromhex(written["envelope"]), network).record == voucher


def test_the_examples_of_identities() -> None:
    provider, renter = signer(1).node, signer(2).node
    for value in (
        network_id("demo").hex(),
        network_id("demo", b"secret").hex(),
        provider.hex(),
        peer_id(provider),
        lease_id(provider, renter, NONCE).hex(),
    ):
        assert f"`{value}`" in SPEC


def test_the_example_of_a_curve() -> None:
    curve = Curve(start=438_888, reserve=105_555, opened_at=1_790_000_000_000)
    assert f"start {curve.start} ($1.58 an hour), reserve {curve.reserve} ($0.38 an hour)" in SPEC
    assert f"opened_at {curve.opened_at}" in SPEC
    written = cells(example("curve"))
    assert len(written) >= 8
    for after, price in written:
        assert clock_price(curve, Millis(curve.opened_at + int(after))) == int(price)
    reached = time_of_price(curve, 300_000)
    assert reached is not None
    text = " ".join(SPEC.split())
    assert f"at or below 300000 is {reached - curve.opened_at} ms after `opened_at`" in text
    at = Millis(curve.opened_at + 1_802_000)
    after_sale = lifted(curve, at, 2)
    assert "A sale of 2 devices 1802000 ms after `opened_at`" in text
    assert f"gives `opened_at` {after_sale.opened_at} and a clock of {clock_price(after_sale, at)}" in text


def test_the_constants_in_the_text() -> None:
    text = " ".join(SPEC.split())
    assert f"{codec.RECORD_SIZE_MAX} bytes where nothing else is said, depth {codec.DEPTH_MAX}" in text
    assert f"{codec.NODES_MAX} values" in text
    assert f"An envelope has at most {ENVELOPE_SIZE_MAX} bytes" in text
    assert f"which may have {JOB_SIZE_MAX} bytes" in text
    assert f"int 0..{MILLIS_MAX}: Unix milliseconds" in text
    assert f"int 0..{DURATION_MAX_MS}: milliseconds, up to {DURATION_MAX_MS // DAY_MS} days" in text
    assert f"up to {CLOCK_SKEW_MAX_MS // MINUTE_MS} minutes ahead of your clock" in text
    assert f"ahead by up to {CLOCK_TOLERANCE_MS // 1000} seconds is no difference" in text
    assert f"no more than {SKEW_MAX_MS // 1000} s ahead of the provider's clock" in text
    assert f"length, at most {frames.FRAME_SIZE_MAX}, and canonical CBOR" in text
    assert f"At most {manifest.MANIFEST_SIZE_MAX} bytes, {manifest.ENTRIES_MAX} entries" in text
    assert f"{manifest.CHUNKS_MAX} chunks of at most {manifest.CHUNK_SIZE_MAX} bytes" in text
    assert f"devices are held for {HOLD_MS // 1000} s" in text


def test_the_names_in_the_swarm() -> None:
    text = section("The swarm")
    network = network_id("demo")
    assert topic_name(network, "x") == f"gpunode/1/{network[:16].hex()}/x"
    assert "`gpunode/1/<first 16 bytes of the network id, hex>/<topic>`" in text
    assert protocol_name("x") == "/gpunode/x"
    for name in (HELLO_PROTOCOL, OFFERS_TOPIC, TRADE_PROTOCOL, BOOK_PROTOCOL):
        assert f"`{name}`" in text
