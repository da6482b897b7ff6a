"""What every tier checks of a job before it starts anything, and the limits that need no control group.

Refuses by raising SandboxError: a mistake here is the local caller's, never a peer's.
"""

import os
import re
import stat

from node.errors import SandboxError
from node.ports import SandboxSpec
from node.sandbox import processes

NAME = re.compile(r"[a-z0-9-]{1,40}")
MIB = 1 << 20


def check(spec: SandboxSpec) -> None:
    """Check what every tier needs of a job. Raises SandboxError."""
    check_name(spec.name)
    if not spec.argv or not spec.argv[0]:
        raise SandboxError("a job has no command")
    for word in (*spec.argv, *spec.variables.values(), spec.workdir):
        if "\0" in word:
            raise SandboxError("a command, a variable or a directory holds a NUL character")
    for key in spec.variables:
        if not key or "=" in key or "\0" in key:
            raise SandboxError(f"{key!r} is no name for a variable")
    if spec.uid == 0:
        raise SandboxError("a job never runs as root")
    if os.geteuid() not in (0, spec.uid):
        raise SandboxError(
            f"only root can run a job as uid {spec.uid}", "run the daemon as root, or jobs under its own uid"
        )


def check_name(name: str) -> None:
    """Check the name that a job's group gets. Raises SandboxError."""
    if NAME.fullmatch(name) is None:
        raise SandboxError(f"{name!r} is no name for a job: [a-z0-9-], at most 40 characters")


def open_directory(spec: SandboxSpec) -> int:
    """Pin the job's directory, so that what is mounted is what was looked at."""
    try:
        fd = os.open(spec.root, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise SandboxError(f"the job's directory cannot be opened: {error}") from error
    if os.fstat(fd).st_uid != spec.uid:
        os.close(fd)
        raise SandboxError(f"the job's directory {spec.root} does not belong to uid {spec.uid}")
    return fd


def give_pipes(spec: SandboxSpec) -> None:
    """Let the job open its own output anew, as `echo >/dev/stderr` does; the pipe is its keeper's otherwise.

    Only pipes are given away: they are nothing but this job's output, while a file may be more.
    """
    for fd in (spec.stdout, spec.stderr):
        if os.geteuid() == 0 and stat.S_ISFIFO(os.fstat(fd).st_mode):
            os.fchown(fd, spec.uid, -1)


def resource_limits(spec: SandboxSpec) -> list[str]:
    """Return the limits, as options of `prlimit`, that replace a control group's; each holds for one process."""
    limits = spec.limits
    return [f"--data={limits.memory_mib * MIB}", f"--nproc={limits.pids + len(processes.snapshot())}"]
