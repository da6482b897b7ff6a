"""Which isolation tiers work here, found out where jobs will run: in the keepers' place, not the daemon's.

As a systemd service the daemon is hardened and its control group is not delegated, so a sandbox can start only in
a unit like the keepers'. Refuses to conclude anything when that unit can't be had: no tier works then.
"""

import os
import shutil
import sys
from pathlib import Path

import msgspec
import trio

from node.daemon.keepers import SLICE, keeper_environment, runs_as_service
from node.ports import Probe
from node.sandbox import construct

PROBE_TIMEOUT_S = 60
RESULT_SIZE_MAX = 1024 * 1024


async def probe_tiers(names: tuple[str, ...], runtime_dir: Path) -> tuple[Probe, ...]:
    """Run something in every tier of `names`. Never raises for a tier that does not work."""
    if not runs_as_service():
        tiers = [tier for tier in construct(allow_unsafe=True) if tier.tier in names]
        return tuple([await tier.probe() for tier in tiers])
    result = runtime_dir / f"probe-{os.getpid()}"
    try:
        problem = await _run_in_unit(probe_unit_command(names, result, is_user_manager=os.geteuid() != 0))
        if not problem:
            return msgspec.json.decode(await trio.Path(result).read_bytes(), type=tuple[Probe, ...])
    except (OSError, msgspec.DecodeError) as error:
        problem = str(error)
    finally:
        result.unlink(missing_ok=True)
    hint = "journalctl -u gpunode; is systemd-run allowed to start units?"
    return tuple(Probe(name, False, f"its probe could not be run in a unit: {problem}", hint) for name in names)


def probe_unit_command(names: tuple[str, ...], result: Path, *, is_user_manager: bool) -> list[str]:
    """Return the `systemd-run` command of the probe's unit; oneshot, so it waits for the unit to end."""
    where = "--user" if is_user_manager else f"--slice={SLICE}"
    options = ("--quiet", "--collect", "--working-directory=/", "--description=gpunode isolation probe")
    properties = (
        "Type=oneshot",
        "Delegate=yes",
        f"TimeoutStartSec={PROBE_TIMEOUT_S}",
        f"StandardOutput=file:{result}",
    )
    return [
        "systemd-run", *options, where, *(f"--property={text}" for text in properties),
        "--", sys.executable, "-P", "-m", "node.sandbox", *names,
    ]  # fmt: skip


async def _run_in_unit(command: list[str]) -> str:
    """Run the command and return what is wrong, or ""."""
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not installed"
    try:
        with trio.fail_after(PROBE_TIMEOUT_S):
            done = await trio.run_process(
                command, env=keeper_environment(), capture_stdout=True, capture_stderr=True, check=False
            )
    except trio.TooSlowError:
        return f"it did not end within {PROBE_TIMEOUT_S} s"
    return done.stderr.decode(errors="replace").strip()[:500] if done.returncode else ""
