"""The ranges of fields, and the rules of records that span fields."""

from typing import Any

import msgspec
import pytest
from support.offers import NOW, a_curve, an_offer

from protocol import codec
from protocol.errors import MalformedRecord
from protocol.records import Curve, Job, JobInput, Offer, Resources, Withdrawal
from protocol.records.fields import MILLIS_MAX, Address, Label, Note, Token
from protocol.records.job import VariableName, job_hash
from protocol.records.offer import OFFER_LIFETIME_MAX_MS


def takes(field: Any, value: object) -> bool:
    try:
        codec.convert_untrusted([value], tuple[field])
    except MalformedRecord:
        return False
    return True


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("a100", {Token, Label, Note, Address}),
        ("host:8443", {Token, Label, Note, Address}),
        ("/ip4/1.2.3.4/tcp/1", {Label, Note, Address}),
        ("-a", {Label, Note, Address}),
        ("", {Label, Note}),
        ("two words", {Label, Note}),
        ("K\u00f6ln \u6f22", {Label, Note}),
        ("a\n", {Note}),
        ("a\nb\tc", {Note}),
        ("\n", {Note}),
        ("a\r", set()),
        ("\x00", set()),
        ("\x1b[2J", set()),
        ("\x7f", set()),
        ("\x9b31m", set()),
        ("\u202etxt", set()),
        ("\u2066x", set()),
        ("\u2028", set()),
        ("\u200f", set()),
        ("x" * 64, {Token, Label, Note, Address}),
        ("x" * 65, {Label, Note, Address}),
        ("x" * 129, {Note, Address}),
        ("x" * 257, {Note}),
        ("x" * 1025, set()),
    ],
)
def test_texts_hold_nothing_that_a_terminal_obeys(text: str, fields: set[object]) -> None:
    assert {field for field in (Token, Label, Note, Address) if takes(field, text)} == fields


@pytest.mark.parametrize("name", ["A\n", "", "1A", "A B", "A=B", "\u00c4", "A" * 257])
def test_names_of_variables(name: str) -> None:
    assert takes(VariableName, "PATH_2")
    assert not takes(VariableName, name)


def reopened(record: msgspec.Struct, **fields: object) -> Any:
    tree = codec.decode_tree_untrusted(codec.encode(record)) | fields
    return codec.decode_untrusted(codec.encode(tree), type(record))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"free": 5}, "more devices free than there are"),
        ({"free": -1}, "int"),
        ({"quantity": 0}, "int"),
        ({"quantity": 65}, "int"),
        ({"listing": ""}, "str"),
        ({"expires_at": NOW - 60_000}, "between 1 ms and an hour"),
        ({"expires_at": NOW - 60_000 + OFFER_LIFETIME_MAX_MS + 1}, "between 1 ms and an hour"),
        ({"issued_at": MILLIS_MAX + 1}, "int"),
        ({"lottery_commitment": bytes(31)}, "bytes"),
        ({"recovery_commitment": b""}, "bytes"),
        ({"addresses": ["a"] * 9}, "array"),
        ({"simulated": 1}, "bool"),
    ],
)
def test_an_offer_out_of_its_ranges(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(MalformedRecord, match=problem):
        reopened(an_offer(), **fields)


def test_an_offer_at_its_bounds() -> None:
    issued = NOW - 60_000
    assert reopened(an_offer(), free=0, expires_at=issued + 1).free == 0
    assert reopened(an_offer(), expires_at=issued + OFFER_LIFETIME_MAX_MS).issued_at == issued


def test_gossip_of_a_newer_version_is_understood_as_far_as_it_goes() -> None:
    offer = reopened(an_offer(), colour="blue")
    assert offer == an_offer()
    assert type(offer) is Offer


@pytest.mark.parametrize("record", [an_offer().curve, an_offer().terms])
def test_curves_and_terms_bind_and_have_no_unknown_keys(record: msgspec.Struct) -> None:
    with pytest.raises(MalformedRecord, match="unknown field"):
        reopened(record, colour="blue")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"reserve": 438_889}, "above the start price"),
        ({"tick_ms": 49}, "int"),
        ({"halving_ms": 999}, "int"),
        ({"lift_permille": 1001}, "int"),
        ({"opening_ms": 60_001}, "int"),
        ({"opened_at": -1}, "int"),
    ],
)
def test_a_curve_out_of_its_ranges(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(MalformedRecord, match=problem):
        reopened(a_curve(), **fields)


def test_a_curve_may_be_flat() -> None:
    assert reopened(a_curve(), reserve=438_888) == Curve(438_888, 438_888, NOW - 60_000)


def test_a_withdrawal_lives_as_long_as_an_offer() -> None:
    withdrawal = Withdrawal(listing="a", sequence=1, issued_at=NOW, expires_at=NOW + OFFER_LIFETIME_MAX_MS)
    assert reopened(withdrawal) == withdrawal
    for expires_at in (NOW, NOW + OFFER_LIFETIME_MAX_MS + 1):
        with pytest.raises(MalformedRecord, match="between 1 ms and an hour"):
            reopened(withdrawal, expires_at=expires_at)


JOB = Job(command=("true",), resources=Resources(1000, 1024, 1024), time_limit_ms=60_000)


@pytest.mark.parametrize("path", ["/etc", "..", "a/../../b", "../a", "a/.."])
def test_a_path_of_a_job_stays_in_its_directory(path: str) -> None:
    for fields in (
        {"outputs": [path]},
        {"workdir": path},
        {"inputs": [{"destination": path, "manifest": bytes(32), "size": 0}]},
    ):
        with pytest.raises(MalformedRecord):
            reopened(JOB, **fields)


@pytest.mark.parametrize("path", ["a", "a/b", "..a", "a..b/c.", "data set"])
def test_paths_within_a_jobs_directory(path: str) -> None:
    job = reopened(JOB, outputs=[path], workdir=path)
    assert (job.outputs, job.workdir) == ((path,), path)


@pytest.mark.parametrize(
    "fields", [{"command": []}, {"command": ["a\0b"]}, {"workdir": "a\0b"}, {"variables": {"A=": ""}}]
)
def test_what_no_kernel_would_take_is_no_job(fields: dict[str, object]) -> None:
    with pytest.raises(MalformedRecord):
        reopened(JOB, **fields)


def test_every_field_of_a_job_is_in_its_hash() -> None:
    jobs = [
        JOB,
        msgspec.structs.replace(JOB, command=("false",)),
        msgspec.structs.replace(JOB, environment="torch"),
        msgspec.structs.replace(JOB, variables={"A": "b"}),
        msgspec.structs.replace(JOB, workdir="w"),
        msgspec.structs.replace(JOB, inputs=(JobInput("d", bytes(32), 0),)),
        msgspec.structs.replace(JOB, outputs=("o",)),
        msgspec.structs.replace(JOB, resources=Resources(1001, 1024, 1024)),
        msgspec.structs.replace(JOB, time_limit_ms=60_001),
    ]
    assert len({job_hash(job) for job in jobs}) == len(jobs)
    assert set(Job.__struct_fields__) == {
        "command", "environment", "variables", "workdir", "inputs", "outputs", "resources", "time_limit_ms",
    }  # fmt: skip
