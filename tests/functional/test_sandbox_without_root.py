"""The tiers as an ordinary user has them: a process without root, with and without groups delegated to it."""

import json
import os
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from sandbox_jobs import JOB_UID, needs_jobs, until

from node.sandbox import hierarchy

REPOSITORY = Path(__file__).parents[2]
PYTHON = "/usr/bin/python3"
"""Ours may lie below a directory that only its owner may pass."""
PATHS = f"{REPOSITORY}:{sysconfig.get_path('purelib')}:{Path(__file__).parent}"
AS_USER = ["setpriv", "--reuid", str(JOB_UID), "--regid", str(JOB_UID), "--clear-groups", PYTHON]


def why_not() -> str:
    if os.geteuid() != 0:
        return "needs root, to become somebody else"
    test = [*AS_USER, "-c", "import msgspec, pyseccomp, structlog, trio, node.sandbox"]
    ready = subprocess.run(test, env={"PYTHONPATH": PATHS}, capture_output=True, check=False, cwd="/")
    return (
        "" if ready.returncode == 0 else f"needs {PYTHON} to run gpunode as another user: {ready.stderr[-200:]!r}"
    )


pytestmark = [needs_jobs, pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")]

PROGRAM = """
import json, os, sys, tempfile, trio
from pathlib import Path
from sandbox_jobs import Bench, nothing
from node.sandbox import BubblewrapSandbox, available

async def main():
    found = {}
    allow_polled = sys.argv[1] == "polled"
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        sandbox = BubblewrapSandbox(allow_polled=allow_polled)
        probe = await sandbox.probe()
        found["probe"] = [probe.works, probe.proves, probe.hint]
        found["tiers"] = [tier.tier for tier in await available(allow_polled=allow_polled)]
        if probe.works:
            bench = Bench(sandbox, Path(directory), os.geteuid())
            end, text = await bench.run("sh", "-c", "id -u; ls /home; echo x > out; exit 3")
            found["hello"] = [end.reason, end.status, text, (bench.root / "out").stat().st_uid]
            hog = "import time; a = bytearray(300 << 20)\\nwhile True: time.sleep(1)"
            end, text = await bench.python(hog)
            found["hog"] = [end.reason, "MemoryError" in text]
            job, output = await bench.start("sh", "-c", "(setsid sleep 1000 &) ; echo ready; exec sleep 1000")
            await output.until(b"ready")
            null = nothing()
            found["execute"] = await job.execute(("sh", "-c", "kill -0 1 && exit 7"), null, null, null)
            job.freeze()
            while not job.frozen():
                await trio.sleep(0.001)
            await job.kill()
            await output.rest()
            found["killed"] = (await job.wait()).reason
        print(json.dumps(found))

trio.run(main)
"""


async def run(mode: str, *prefix: str) -> dict[str, object]:
    argv = [*prefix, *AS_USER, "-c", PROGRAM, mode]
    done = await trio.run_process(argv, capture_stdout=True, env={**os.environ, "PYTHONPATH": PATHS}, cwd="/")
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])  # logs come before it
    return found


EXPECTED = {
    "tiers": ["bubblewrap"],
    "hello": ["exited", 3, "1000\nls: cannot access '/home': No such file or directory\n", JOB_UID],
    "execute": 7,
    "killed": "killed",
}


async def test_without_groups_the_tier_is_not_offered() -> None:
    found = await run("strict")
    works, why, hint = found["probe"]  # type: ignore[misc]
    assert (works, found["tiers"]) == (False, [])
    assert "not writable" in why
    assert "Delegate=yes" in hint


async def test_polled_limits_are_there_for_those_who_choose_them() -> None:
    found = await run("polled")
    works, proves, _ = found.pop("probe")  # type: ignore[misc]
    assert works, proves
    assert "this user's own uid; polled limits only" in proves
    reason, refused = found.pop("hog")  # type: ignore[misc]
    assert reason == "out_of_memory" or refused
    assert found == EXPECTED


@pytest.fixture
def delegated() -> Iterator[list[Path]]:
    """Groups that belong to the user, as systemd delegates them (here on v1, which this test needs)."""
    here = hierarchy.find_hierarchy()
    if here.version != 1:
        pytest.skip("needs cgroup v1: on v2 systemd delegates, not a test")
    made = []
    for parent in dict.fromkeys(here.parents.values()):
        directory = parent / f"gpunode-test-{os.getpid()}"
        directory.mkdir()
        made.append(directory)
        for path in (directory, *directory.iterdir()):
            os.chown(path, JOB_UID, JOB_UID)
    yield made
    for directory in made:
        directory.rmdir()


async def test_delegated_groups_are_enough(delegated: list[Path]) -> None:
    join = 'while [ "$1" != -- ]; do echo 0 > "$1/cgroup.procs"; shift; done; shift; exec "$@"'
    found = await run("strict", "/bin/sh", "-c", join, "join", *map(str, delegated), "--")
    works, proves, _ = found.pop("probe")  # type: ignore[misc]
    assert works, proves
    assert "cgroup v1 limits them" in proves
    assert found.pop("hog") == ["out_of_memory", False]
    assert found == EXPECTED
    await until(lambda: all(not (directory / "cgroup.procs").read_text() for directory in delegated))
