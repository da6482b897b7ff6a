"""Model patterns: words, in any case and order, never pieces of words."""

import pytest
from support.offers import NOW, sealed_offer

from protocol.matching import MissReason, Requirement, is_model_match, match
from protocol.records import DeviceSpec


def named(model: str, mig_profile: str = "") -> DeviceSpec:
    return DeviceSpec("nvidia", model, 40_960, 80, mig_profile=mig_profile)


@pytest.mark.parametrize(
    ("pattern", "model"),
    [
        ("A100", "NVIDIA A100-SXM4-80GB"),
        ("a100", "NVIDIA A100-SXM4-80GB"),
        ("nvidia a100", "NVIDIA A100-SXM4-80GB"),
        ("A100-80GB", "NVIDIA A100-SXM4-80GB"),
        ("A100-80GB", "NVIDIA A100 80GB PCIe"),
        ("80gb a100", "NVIDIA A100 80GB PCIe"),
        ("A100 SXM4", "NVIDIA A100-SXM4-40GB"),
        ("RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("rtx4090", "NVIDIA GeForce RTX 4090"),
        ("geforcertx4090", "NVIDIA GeForce RTX 4090"),
        ("4090", "NVIDIA GeForce RTX 4090"),
        ("rtx-3090-ti", "NVIDIA GeForce RTX 3090 Ti"),
        ("T4", "Tesla T4"),
        ("V100", "Tesla V100-SXM2-16GB"),
        ("H100 SXM5", "NVIDIA H100 80GB HBM3"),
        ("L40S", "NVIDIA L40S"),
        ("", "anything"),
    ],
)
def test_patterns_that_match(pattern: str, model: str) -> None:
    assert is_model_match(pattern, named(model))


@pytest.mark.parametrize(
    ("pattern", "model"),
    [
        ("A10", "NVIDIA A100-SXM4-80GB"),
        ("A100", "NVIDIA A10"),
        ("100", "NVIDIA A100-SXM4-80GB"),
        ("A1", "NVIDIA A100-SXM4-80GB"),
        ("L4", "NVIDIA L40S"),
        ("L40", "NVIDIA L40S"),
        ("L40S", "NVIDIA L40"),
        ("A100-40GB", "NVIDIA A100-SXM4-80GB"),
        ("rtx40", "NVIDIA GeForce RTX 4090"),
        ("tx4090", "NVIDIA GeForce RTX 4090"),
        ("4090 ti", "NVIDIA GeForce RTX 4090"),
        ("H100", "NVIDIA H200"),
        ("a100", ""),
    ],
)
def test_patterns_that_do_not_match(pattern: str, model: str) -> None:
    assert not is_model_match(pattern, named(model))


def reasons(pattern: str, model: str, mig_profile: str) -> set[MissReason]:
    matches = match(Requirement(model=pattern), [sealed_offer(device=named(model, mig_profile))], NOW)
    return {miss.reason for each in matches.rejections for miss in each.misses}


@pytest.mark.parametrize("model", ["NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"])
def test_who_names_a_gpu_means_a_whole_one(model: str) -> None:
    assert reasons("A100", model, "1g.5gb") == {MissReason.MIG}
    assert reasons("A100 MIG", model, "1g.5gb") == set()
    assert reasons("1g.5gb", model, "1g.5gb") == set()
    assert reasons("A100 2g.10gb", model, "1g.5gb") == {MissReason.MODEL}
    assert reasons("", model, "1g.5gb") == set()


def test_hostile_names_are_only_text() -> None:
    for model in ("((((", "\\", "[a-", ".*", "\u00df" * 128, "a" * 128):
        assert not is_model_match("A100", named(model))
