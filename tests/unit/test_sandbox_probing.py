"""What a probe makes of what a job reports, and which command it names as the cure."""

import os
from pathlib import Path

import pytest

from node.errors import SandboxError, TierUnavailable
from node.ports import EndReason, JobEnd, Probe, SandboxSpec
from node.sandbox import BubblewrapSandbox, UnsafeProcessSandbox, construct, probing
from node.sandbox.hierarchy import Hierarchy


class _Ended:
    def __init__(self, end: JobEnd) -> None:
        self._end = end

    async def wait(self) -> JobEnd:
        return self._end


class FakeTier:
    """A tier whose job says what it is told to say."""

    tier = "fake"

    def __init__(self, output: str, status: int = 0) -> None:
        self.output = output
        self.status = status
        self.specs: list[SandboxSpec] = []

    async def start(self, spec: SandboxSpec) -> _Ended:
        self.specs.append(spec)
        assert spec.root.stat().st_uid == spec.uid
        os.write(spec.stdout, self.output.encode())
        return _Ended(JobEnd(EndReason.EXITED, self.status))


async def probe(tier: FakeTier) -> Probe:
    return await probing.probe(tier, uid=os.geteuid(), terms="limits")  # type: ignore[arg-type]


async def test_a_job_without_complaints_proves_the_tier() -> None:
    tier = FakeTier("done\n")
    found = await probe(tier)
    assert (found.works, found.tier) == (True, "fake")
    assert "limits" in found.proves
    assert not tier.specs[0].root.parent.exists()


@pytest.mark.parametrize(
    ("output", "status", "expected"),
    [
        (
            "it can read /etc/shadow\nit sees /root\ndone\n",
            0,
            "not confined: it can read /etc/shadow; it sees /root",
        ),
        ("", 0, "ended with 0"),
        ("done\n", 3, "ended with 3"),
        ("done\nx", 0, "ended with 0"),
    ],
)
async def test_anything_else_does_not(output: str, status: int, expected: str) -> None:
    found = await probe(FakeTier(output, status))
    assert not found.works
    assert expected in found.proves


async def test_a_tier_that_cannot_start_is_told_with_its_hint() -> None:
    class Broken(FakeTier):
        async def start(self, spec: SandboxSpec) -> _Ended:
            raise TierUnavailable("no bubblewrap", "apt install bubblewrap")

    assert await probe(Broken("")) == Probe("fake", False, "no bubblewrap", "apt install bubblewrap")


@pytest.mark.parametrize(
    ("complaint", "settings", "expected"),
    [
        ("bwrap: Unknown option --size", {}, "0.8 or newer"),
        ("bwrap: Can't mount proc on /newroot/proc: Operation not permitted", {}, "systempaths=unconfined"),
        ("bwrap: No permissions", {"kernel/unprivileged_userns_clone": "0"}, "unprivileged_userns_clone=1"),
        ("bwrap: Creating new namespace failed", {"user/max_user_namespaces": "0"}, "max_user_namespaces"),
        (
            "bwrap: setting up uid map: Permission denied",
            {"kernel/apparmor_restrict_unprivileged_userns": "1", "user/max_user_namespaces": "9"},
            "bwrap-userns-restrict",
        ),
        ("bwrap: something else", {"kernel/unprivileged_userns_clone": "1"}, ""),
    ],
)
def test_hints(tmp_path: Path, complaint: str, settings: dict[str, str], expected: str) -> None:
    for name, value in settings.items():
        path = tmp_path / "proc/sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value + "\n")
    found = probing.hint(complaint, tmp_path)
    assert expected in found
    assert bool(found) == bool(expected)


async def test_without_control_groups_the_tier_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Hierarchy:
        raise TierUnavailable("no control groups", "delegate")

    monkeypatch.setattr("node.sandbox.bubblewrap.find_hierarchy", missing)
    assert await BubblewrapSandbox().probe() == Probe("bubblewrap", False, "no control groups", "delegate")
    with pytest.raises(SandboxError, match="no control groups"):
        await BubblewrapSandbox().sweep("a-job")


async def test_names_are_checked_before_anything_is_swept() -> None:
    for sandbox in (BubblewrapSandbox(), UnsafeProcessSandbox()):
        with pytest.raises(SandboxError, match="no name for a job"):
            await sandbox.sweep("../../system.slice")


def test_the_unsafe_tier_is_there_only_when_it_is_named() -> None:
    assert [sandbox.tier for sandbox in construct()] == ["bubblewrap"]
    assert [sandbox.tier for sandbox in construct(allow_unsafe=True)] == ["bubblewrap", "unsafe-process"]
