"""Following a job until it ends: its output byte for byte, its changes, its transfers, and its exit status.

Output goes to stdout and stderr as the job wrote it; what gpunode itself has to say goes to stderr. A daemon
that is restarted meanwhile is waited for: the job does not notice, and neither does the output.
"""

import sys
import time
from typing import BinaryIO

from node.cli.connection import connect
from node.cli.failures import EXIT_TIME_LIMIT
from node.cli.output import format_bytes, short_hash, short_peer, simulated_mark, tell
from node.cli.progress import TransferBar
from node.errors import EXIT_OWN, DaemonUnreachable, RpcError
from node.rpc.api import jobs
from node.rpc.client import ConnectionLost
from protocol.units import format_amount, format_duration, format_price

RECONNECT_S = 300.0
"""How long a daemon that went away is waited for."""
RECONNECT_PAUSE_S = 0.5

STATE_LINES = {
    jobs.JobState.BUYING: "buying",
    jobs.JobState.AWARDED: "a provider holds the GPUs",
    jobs.JobState.SIGNED: "leased",
    jobs.JobState.CONNECTED: "connected to the provider",
    jobs.JobState.STAGING: "sending the inputs",
    jobs.JobState.RUNNING: "running",
    jobs.JobState.INTERRUPTING: "the provider takes the GPUs back",
    jobs.JobState.COLLECTING: "collecting the outputs",
}


class Follower:
    """Follows one job. `logs_to_stderr` keeps stdout free, `outputs_only` leaves logs out."""

    def __init__(self, job: str, *, logs_to_stderr: bool = False, outputs_only: bool = False) -> None:
        self._job = job
        self._outputs_only = outputs_only
        self._sinks: dict[jobs.LogStream, BinaryIO] = {
            jobs.LogStream.STDOUT: (sys.stderr if logs_to_stderr else sys.stdout).buffer,
            jobs.LogStream.STDERR: sys.stderr.buffer,
        }
        self._offsets = {jobs.LogStream.STDOUT: 0, jobs.LogStream.STDERR: 0}
        self._bar = TransferBar()
        self._told: tuple[str, str] = ("", "")
        self._provider: str | None = None
        self._last: jobs.JobEvent | None = None

    def follow(self) -> jobs.JobEvent:
        """Return the final event. Raises NodeError; KeyboardInterrupt leaves the job alone."""
        deadline = 0.0
        while True:
            try:
                return self._follow_once()
            except ConnectionLost:
                tell(f"the daemon went away, and job {self._job} goes on without it: waiting for the daemon")
                deadline = time.monotonic() + RECONNECT_S
            except DaemonUnreachable:
                if time.monotonic() >= deadline:
                    raise
            finally:
                self._bar.stop()
            time.sleep(RECONNECT_PAUSE_S)

    def _follow_once(self) -> jobs.JobEvent:
        with connect() as client:
            client.subscribe(jobs.EVENTS, jobs.JobParams(job=self._job))
            if not self._outputs_only:
                client.subscribe(
                    jobs.LOGS,
                    jobs.LogsParams(
                        job=self._job,
                        stdout_offset=self._offsets[jobs.LogStream.STDOUT],
                        stderr_offset=self._offsets[jobs.LogStream.STDERR],
                        follow=True,
                    ),
                )
            for _, item in client.items():
                if isinstance(item, jobs.LogChunk):
                    self._write(item)
                else:
                    self._note(item)
        if self._last is None or not self._last.entry.state.is_final:
            raise RpcError(
                f"the daemon stopped telling about job {self._job}", f"go on with: gpunode attach {self._job}"
            )
        return self._last

    def _write(self, chunk: jobs.LogChunk) -> None:
        self._bar.stop()
        expected = self._offsets[chunk.stream]
        if chunk.offset > expected:
            tell(dropped_line(chunk, expected))
        data = chunk.data[max(0, expected - chunk.offset) :]
        self._offsets[chunk.stream] = max(expected, chunk.offset + len(chunk.data))
        sink = self._sinks[chunk.stream]
        sink.write(data)
        sink.flush()

    def _note(self, event: jobs.JobEvent) -> None:
        self._last = event
        entry = event.entry
        if event.progress is not None:
            self._bar.update(STATE_LINES.get(entry.state, entry.state.value), event.progress)
        told = (entry.state.value, entry.detail)
        if told == self._told or entry.state.is_final:
            return
        self._told = told
        self._bar.stop()
        if entry.provider != self._provider and entry.price is not None:
            self._provider = entry.provider
            tell(lease_line(entry))
        tell(state_line(entry))


def dropped_line(chunk: jobs.LogChunk, expected: int) -> str:
    """Return what stands for the output between `expected` and `chunk`, of which only head and tail are kept."""
    return f"[{format_bytes(chunk.offset - expected)} of {chunk.stream.value} were dropped: too much output]"


def state_line(entry: jobs.JobEntry) -> str:
    """Return where a job is, in one line."""
    line = f"{entry.name}: {STATE_LINES.get(entry.state, entry.state.value)}"
    return f"{line}: {entry.detail}" if entry.detail else line


def lease_line(entry: jobs.JobEntry) -> str:
    """Return what was bought, in one line."""
    gpus = f"{entry.quantity} x {entry.model}" if entry.quantity > 1 else entry.model
    price = "" if entry.price is None else f" at {format_price(entry.price)} a GPU"
    mark = f", {simulated_mark(True)}" if entry.simulated else ""
    return f"{entry.name}: {gpus} of {short_peer(entry.provider)}{price}{mark}"


def summary_line(event: jobs.JobEvent) -> str:
    """Return what a job came to, in one line: outcome, duration, cost, receipt."""
    entry = event.entry
    how = entry.outcome.replace("_", " ") or entry.state.value
    if entry.exit_status is not None and entry.exit_status != 0:
        how += f" with exit status {entry.exit_status}"
    parts = [f"{entry.name}: {how}"]
    if entry.started_at is not None and entry.ended_at is not None:
        parts.append(f"ran {format_duration(entry.ended_at - entry.started_at)}")
    parts.append(f"cost {format_amount(entry.cost)}")
    if event.receipt:
        parts.append(f"receipt {short_hash(event.receipt)}")
    if entry.simulated:
        parts.append(simulated_mark(True))
    return ", ".join(parts)


def exit_status_of(entry: jobs.JobEntry) -> int:
    """Return what `gpunode run` exits with: the job's own status, 124 for its time limit, else 125."""
    if entry.outcome == jobs.OUTCOME_TIME_LIMIT:
        return EXIT_TIME_LIMIT
    if entry.outcome == jobs.OUTCOME_COMPLETED and entry.exit_status is not None:
        return entry.exit_status
    return EXIT_OWN


def tell_end(event: jobs.JobEvent) -> None:
    """Print the summary on stderr, and what to do next when the job did not complete."""
    entry = event.entry
    tell(summary_line(event))
    if entry.outcome not in {jobs.OUTCOME_COMPLETED, jobs.OUTCOME_CANCELLED}:
        if entry.detail:
            tell(f"  {entry.detail}")
        tell(f"  hint: gpunode why {entry.job}")
