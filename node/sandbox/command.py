"""Starts `enter`, which becomes a command inside a running job or outside any sandbox.

Refuses to run anything in this process: the program of `enter` gets a bare interpreter of its own.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import trio

from node.errors import SandboxError
from node.sandbox import launch

ENTER_SOURCE = Path(__file__).with_name("enter.py").read_text()
"""Read once, so that an upgrade does not change the code under a running keeper."""
OUTSIDE = -1


async def start(
    argv: Sequence[str],
    *,
    prefix: Sequence[str] = (),
    uid: int,
    variables: Mapping[str, str],
    directory: str,
    entries: Sequence[Path],
    stdin: int,
    stdout: int,
    stderr: int,
    inside: int = OUTSIDE,
    bpf: bytes = b"",
    cwd: str = "/",
) -> subprocess.Popen[bytes]:
    """Start `argv` as `uid`, in the control group of `entries`, and return once it is being executed.

    `inside` is a pidfd of a process of the job to join (then with the filter `bpf`), or OUTSIDE. `prefix` is a
    program put in between, to set limits. `directory` is looked up inside, from `cwd`. Raises SandboxError.
    """
    pairs = [f"{key}={value}" for key, value in variables.items()]
    words = [directory, str(len(pairs)), *pairs, *argv]
    text = "".join(word + "\0" for word in words).encode(errors="surrogateescape")
    kept: list[int] = []
    passed: list[int] = []
    process = None
    try:
        report_read, report_write = os.pipe()
        kept.append(report_read)
        passed.append(report_write)
        request = launch.memory_file("request", text)
        passed.append(request)
        fds = [request, report_write]
        filter_fd = OUTSIDE
        if inside != OUTSIDE:
            filter_fd = launch.memory_file("seccomp", bpf)
            passed.append(filter_fd)
            fds += [inside, filter_fd]
        interpreter = [sys.executable, "-I", "-S", "-B", "-c", ENTER_SOURCE]
        numbers = [str(number) for number in (uid, inside, filter_fd, request, report_write)]
        process = launch.start(
            [
                *("/bin/sh", "-c", launch.JOIN_AND_EXEC, "enter", *map(str, entries), "--"),
                *(*prefix, *interpreter, *numbers),
            ],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=fds,
            cwd=cwd,
        )
        launch.close_all(passed)
        if complaint := await launch.wait_until_started(report_read):
            raise SandboxError(f"the command could not be started: {complaint}")
    except BaseException:
        if process is not None:
            process.kill()
            with trio.CancelScope(shield=True):
                await launch.wait_for_exit(process)
        raise
    finally:
        launch.close_all(passed)
        launch.close_all(kept)
    return process
