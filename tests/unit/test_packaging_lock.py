"""The lock files: complete, exact, and silent about where packages come from."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = ("build", "runtime", "dev")
PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==(\S+)")


def read_lock(name: str) -> str:
    return (ROOT / "scripts" / "requirements" / f"{name}.txt").read_text()


def read_pins(name: str) -> dict[str, str]:
    pins: dict[str, str] = {}
    for line in read_lock(name).splitlines():
        if found := PIN.match(line):
            pins[canonicalize_name(found[1])] = found[2]
    return pins


def read_project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def missing_from(pins: dict[str, str], requirements: list[str]) -> list[str]:
    """Return the requirements that the pins do not meet."""
    wrong = []
    for text in requirements:
        requirement = Requirement(text)
        pin = pins.get(canonicalize_name(requirement.name))
        if pin is None or not requirement.specifier.contains(pin, prereleases=True):
            wrong.append(f"{text} (locked: {pin})")
    return wrong


def test_runtime_lock_meets_every_dependency() -> None:
    dependencies = read_project()["project"]["dependencies"]
    assert missing_from(read_pins("runtime"), dependencies) == []


def test_dev_lock_meets_every_extra() -> None:
    extra = read_project()["project"]["optional-dependencies"]["dev"]
    assert missing_from(read_pins("dev"), extra) == []


def test_build_lock_meets_the_build_system() -> None:
    assert missing_from(read_pins("build"), read_project()["build-system"]["requires"]) == []


def test_missing_and_stale_pins_are_noticed() -> None:
    pins = {"trio": "0.26.0", "libp2p": "0.8.1"}
    assert missing_from(pins, ["trio>=0.27", "libp2p==0.8.1", "rich>=13"]) == [
        "trio>=0.27 (locked: 0.26.0)",
        "rich>=13 (locked: None)",
    ]


@pytest.mark.parametrize("name", ["aioquic", "libp2p"])
def test_libraries_used_below_their_surface_are_pinned_exactly(name: str) -> None:
    dependencies = read_project()["project"]["dependencies"]
    [requirement] = [Requirement(text) for text in dependencies if Requirement(text).name == name]
    assert [specifier.operator for specifier in requirement.specifier] == ["=="]


def test_locks_agree_with_each_other() -> None:
    pins = {name: read_pins(name) for name in LOCKS}
    for one, other in (("build", "runtime"), ("build", "dev"), ("runtime", "dev")):
        for package in pins[one].keys() & pins[other].keys():
            assert pins[one][package] == pins[other][package], f"{package} differs in {one} and {other}"


@pytest.mark.parametrize("name", LOCKS)
def test_every_pin_has_hashes(name: str) -> None:
    entries = re.split(r"\n(?=[A-Za-z0-9])", read_lock(name).strip())
    assert entries
    for entry in entries:
        assert PIN.match(entry), f"not an exact pin: {entry.splitlines()[0]}"
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry), f"no hash: {entry.splitlines()[0]}"


@pytest.mark.parametrize("name", LOCKS)
def test_no_lock_names_a_host_or_a_path(name: str) -> None:
    text = read_lock(name)
    assert "://" not in text
    assert not re.search(r"^\s*-(?:i|f|-index-url|-extra-index-url|-find-links|-trusted-host)\b", text, re.M)
    assert not re.search(r"[\w-]\.(?:org|com|net|io|dev|local)\b", text)
    assert not re.search(r"(?:^|\s)/\w", text)
