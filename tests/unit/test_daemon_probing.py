"""Where tiers are probed: here, or in a unit like the keepers'. `systemd-run` is a stand-in."""

import os
import sys
from pathlib import Path

import pytest

from node.daemon.probing import probe_tiers, probe_unit_command


def _play_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    stand_in = tmp_path / "bin" / "systemd-run"
    stand_in.parent.mkdir()
    stand_in.write_text(f"#!/bin/sh\n{script}\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SYSTEMD_EXEC_PID", str(os.getpid()))


def _left_in(folder: Path) -> list[Path]:
    return list(folder.glob("probe-*"))


def test_the_probe_runs_in_a_delegated_unit_of_the_keepers_slice() -> None:
    command = probe_unit_command(("bubblewrap",), Path("/run/x"), is_user_manager=False)
    assert {"--slice=gpunode.slice", "--property=Delegate=yes", "--property=StandardOutput=file:/run/x"} <= set(
        command
    )
    assert command[command.index("--") + 1 :] == [sys.executable, "-P", "-m", "node.sandbox", "bubblewrap"]


async def test_a_service_takes_the_units_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = '[{"tier":"bubblewrap","works":true,"proves":"it ran","hint":""}]'
    _play_systemd(
        tmp_path,
        monkeypatch,
        f"for word; do case $word in *StandardOutput=file:*) echo '{found}' > ${{word#*file:}};; esac; done",
    )
    [probe] = await probe_tiers(("bubblewrap",), tmp_path)
    assert (probe.works, probe.proves) == (True, "it ran")
    assert not _left_in(tmp_path)


async def test_a_unit_that_cannot_be_had_means_that_no_tier_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _play_systemd(tmp_path, monkeypatch, "echo no bus >&2; exit 1")
    [probe] = await probe_tiers(("bubblewrap",), tmp_path)
    assert not probe.works
    assert "no bus" in probe.proves


async def test_findings_that_are_none_mean_that_no_tier_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _play_systemd(
        tmp_path,
        monkeypatch,
        "for word; do case $word in *StandardOutput=file:*) echo '{' > ${word#*file:};; esac; done",
    )
    [probe] = await probe_tiers(("bubblewrap",), tmp_path)
    assert not probe.works
