"""What the sandbox's functional tests share: a bench that runs jobs and knows what they must not leave behind."""

import itertools
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from node.errors import TierUnavailable
from node.ports import JobEnd, SandboxLimits, SandboxSpec
from node.sandbox import control_group, hierarchy
from node.sandbox.running import Job

JOB_UID = 231_072
LIMITS = SandboxLimits(cpus_milli=1_000, memory_mib=96, pids=24, shm_mib=2, tmp_mib=4)
_numbers = itertools.count()


def why_not() -> str:
    """Return why bubblewrap jobs cannot be run as root here, or ""."""
    if os.geteuid() != 0:
        return "needs root: jobs get a uid of their own"
    if shutil.which("bwrap") is None:
        return "needs bubblewrap"
    try:
        hierarchy.find_hierarchy()
    except TierUnavailable as error:
        return f"needs control groups: {error}"
    return ""


needs_jobs = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


class Output:
    """A pipe that a job writes to."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        self.text = b""

    async def until(self, wanted: bytes) -> bytes:
        """Read until `wanted` has come; fail when the job ends without it."""
        while wanted not in self.text:
            await trio.lowlevel.wait_readable(self.read_end)
            chunk = os.read(self.read_end, 65_536)
            assert chunk, f"the job ended after {self.text!r}"
            self.text += chunk
        return self.text

    def close_write_end(self) -> None:
        os.close(self.write_end)
        self.write_end = -1

    async def rest(self) -> str:
        """Read to the end; call it when our own writing end is closed."""
        while True:
            await trio.lowlevel.wait_readable(self.read_end)
            chunk = os.read(self.read_end, 65_536)
            if not chunk:
                return self.text.decode()
            self.text += chunk

    def close(self) -> None:
        os.close(self.read_end)
        if self.write_end >= 0:
            os.close(self.write_end)


class Bench:
    """Runs jobs of one tier in a directory of their own."""

    def __init__(self, sandbox: object, directory: Path, uid: int = JOB_UID) -> None:
        self.sandbox = sandbox
        self.uid = uid
        # As in a lease: nobody but the keeper gets into the directory above the job's.
        directory.chmod(0o700)
        self.root = directory / "job"
        self.root.mkdir(mode=0o700)
        os.chown(self.root, uid, uid if os.geteuid() == 0 else -1)

    def spec(self, *argv: str, stdout: int, stderr: int | None = None, **changes: object) -> SandboxSpec:
        fields: dict[str, object] = {
            "name": f"test-{os.getpid()}-{next(_numbers)}",
            "argv": argv,
            "variables": {},
            "root": self.root,
            "workdir": "/job",
            "uid": self.uid,
            "limits": LIMITS,
            "stdout": stdout,
            "stderr": stdout if stderr is None else stderr,
        }
        return SandboxSpec(**(fields | changes))  # type: ignore[arg-type]

    async def start(self, *argv: str, **changes: object) -> tuple[Job, Output]:
        output = Output()
        try:
            job = await self.sandbox.start(self.spec(*argv, stdout=output.write_end, **changes))  # type: ignore[attr-defined]
        except BaseException:
            output.close()
            raise
        output.close_write_end()
        return job, output

    async def run(self, *argv: str, **changes: object) -> tuple[JobEnd, str]:
        """Run a job to its end; return the end and what it wrote."""
        job, output = await self.start(*argv, **changes)
        text = await output.rest()
        end = await job.wait()
        output.close()
        return end, text

    async def python(self, source: str, **changes: object) -> tuple[JobEnd, str]:
        return await self.run("python3", "-I", "-c", source, **changes)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the machine is in a state; the test's own time limit ends a wait for what never comes."""
    with trio.fail_after(20):
        while not condition():
            await trio.sleep(0.002)


def children() -> set[int]:
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return {int(pid) for pid in text.split()}


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def groups() -> list[str]:
    """Return the directories of all jobs of this process's tests."""
    here = hierarchy.find_hierarchy()
    prefix = f"{control_group.PREFIX}test-{os.getpid()}-"
    return [
        f"{where}/{folder}"
        for root in here.roots
        for where, folders, _ in os.walk(root)
        for folder in folders
        if folder.startswith(prefix)
    ]


def nothing() -> int:
    """Return a descriptor of /dev/null; the caller closes it."""
    return os.open(os.devnull, os.O_RDWR)


def loop_devices(image: Path) -> str:
    return subprocess.run(["losetup", "-j", str(image)], capture_output=True, text=True, check=True).stdout.strip()
