"""Every record survives the journey: sealed, sent, opened, it is the same record, and only in its own network."""

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.signers import NETWORK, OTHER_NETWORK, signer
from support.strategies import any_record, instances

from protocol import codec
from protocol.envelope import KINDS, content_id_of, kind_of, open_as_untrusted, open_untrusted, record_id, seal
from protocol.errors import BadSignature, MalformedRecord, WrongKind
from protocol.records import Job
from protocol.records.job import JOB_SIZE_MAX

GOSSIPED = {"offer", "withdrawal"}


@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_record_comes_out_as_it_went_in(kind: str, data: st.DataObject) -> None:
    record = data.draw(instances(KINDS[kind]))
    sealed = seal(record, signer(1), NETWORK)
    opened = open_untrusted(sealed.data, NETWORK)
    assert opened == sealed
    assert opened.record == record
    assert opened.signer == signer(1).node
    assert opened.id == record_id(sealed.data)
    assert opened.content_id == content_id_of(record)
    assert seal(opened.record, signer(1), NETWORK).data == sealed.data


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(record=any_record())
def test_a_record_is_not_replayed_into_another_network(record: msgspec.Struct) -> None:
    with pytest.raises(BadSignature):
        open_untrusted(seal(record, signer(1), OTHER_NETWORK).data, NETWORK)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(record=any_record(), other=st.sampled_from(sorted(KINDS)))
def test_a_record_is_not_taken_for_another_kind(record: msgspec.Struct, other: str) -> None:
    data = seal(record, signer(1), NETWORK).data
    if KINDS[other] is type(record):
        assert open_as_untrusted(data, KINDS[other], NETWORK).record == record
    else:
        with pytest.raises(WrongKind):
            open_as_untrusted(data, KINDS[other], NETWORK)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(record=any_record(), value=st.one_of(st.none(), st.integers(0, 9), st.text(max_size=3)))
def test_unknown_keys_pass_in_gossip_and_nowhere_else(record: msgspec.Struct, value: object) -> None:
    tree = codec.decode_tree_untrusted(codec.encode(record)) | {"of_a_newer_version": value}
    body = codec.encode(tree)
    if kind_of(type(record)) in GOSSIPED:
        assert codec.decode_untrusted(body, type(record)) == record
    else:
        with pytest.raises(MalformedRecord, match="unknown field"):
            codec.decode_untrusted(body, type(record))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(job=instances(Job))
def test_a_job_comes_out_as_it_went_in(job: Job) -> None:
    assert codec.decode_untrusted(codec.encode(job), Job, JOB_SIZE_MAX) == job
