"""Killing daemons and keepers at random moments of a job, and what must hold all the same."""

import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from support.daemons import POLL_S, WAIT_S_MAX, Daemons, TestDaemon

from node.errors import DaemonUnreachable
from node.rpc.methods import jobs

LINES = 60
LINE_INTERVAL_S = 0.03
COUNT = f"i=0; while [ $i -lt {LINES} ]; do echo line $i; i=$((i+1)); sleep {LINE_INTERVAL_S}; done"
SCRIPT = f"{COUNT}; echo end > out.txt"
EXPECTED = b"".join(b"line %d\n" % number for number in range(LINES))
JOB_S = 4.0
"""About how long a job takes from submission to its end: kills are spread over it."""
KEEPER_POLL_S = 0.01
CONTROL_GROUP_DIGITS = 24
"""How much of a lease's id the name of its control group holds."""


class Kill(NamedTuple):
    """One victim's end."""

    victim: str
    at_s: float
    """Seconds after the job was submitted."""
    phase: str
    """The job's state just before, as its renter said."""
    back_s: float
    """Seconds until the victim answered again; about 0 for keepers, which nobody waits for."""
    met_s: float
    """Seconds from then until it had a peer again."""


class Round(NamedTuple):
    """One job, and what happened during it."""

    entry: jobs.JobEntry
    kills: tuple[Kill, ...]
    took_s: float
    """From submission to the job's end."""
    history: tuple[tuple[float, str], ...]
    """(seconds after the submission, the job's state and what it waits for), each change."""


class Victim(Protocol):
    """Something that can be killed."""

    @property
    def name(self) -> str:
        """What the table calls it."""

    def strike(self, is_over: "IsOver") -> bool:
        """Kill it with SIGKILL, and let it start again; return whether there was anything to kill."""

    def is_back(self) -> bool:
        """Return whether it serves again."""

    def has_peer(self) -> bool:
        """Return whether it is connected with the other side."""


class IsOver(Protocol):
    """Whether the job has ended already."""

    def __call__(self) -> bool:
        """Return whether nothing is left to be killed."""


class DaemonVictim:
    """A daemon, killed and started again at once."""

    def __init__(self, daemon: TestDaemon) -> None:
        self.daemon = daemon
        self.name = daemon.name

    def strike(self, is_over: IsOver) -> bool:
        """Kill and restart the process, not waiting until it answers."""
        del is_over
        self.daemon.kill()
        self.daemon.start(wait=False)
        return True

    def is_back(self) -> bool:
        """Return whether the daemon answers."""
        return self.daemon.answers()

    def has_peer(self) -> bool:
        """Return whether it has a peer."""
        return self.daemon.status().swarm.peers_connected > 0


class KeeperVictim:
    """One keeper of the job, of either side; its daemon starts the next one."""

    def __init__(self, daemons: Daemons, choose: random.Random) -> None:
        self._daemons = daemons
        self._choose = choose
        self.name = "keeper"

    def strike(self, is_over: IsOver) -> bool:
        """Kill a random keeper; before there is one wait for the first."""
        self.name = "keeper"
        limit = time.monotonic() + WAIT_S_MAX
        while not is_over():
            assert time.monotonic() < limit, "the job neither got a keeper nor ended"
            pids = self._daemons.keepers()
            if pids:
                pid = self._choose.choice(sorted(pids))
                with suppress(OSError):
                    words = Path(f"/proc/{pid}/cmdline").read_bytes()
                    is_provider = f"{self._daemons.folder}/provider/".encode() in words
                    os.kill(pid, signal.SIGKILL)
                    self.name = "provider's keeper" if is_provider else "renter's keeper"
                    return True
            time.sleep(KEEPER_POLL_S)
        return False

    def is_back(self) -> bool:
        """Keepers are the daemon's to start again: the job's end shows it."""
        return True

    def has_peer(self) -> bool:
        """Keepers have tunnels."""
        return True


class Watch:
    """Looks at a job again and again, and remembers what changed."""

    def __init__(self, renter: TestDaemon, job: str) -> None:
        self._renter = renter
        self._job = job
        self._begun = time.monotonic()
        self.phase = ""
        self.history: list[tuple[float, str]] = []

    @property
    def now_s(self) -> float:
        """Seconds since the watch began."""
        return time.monotonic() - self._begun

    def note(self, text: str) -> None:
        """Remember what happened, unless it is what happened last."""
        if not self.history or self.history[-1][1] != text:
            self.history.append((self.now_s, text))

    def look(self) -> jobs.JobEntry | None:
        """Ask the renter; return the job once it is final."""
        try:
            entry = self._renter.job(self._job)
        except (DaemonUnreachable, ConnectionError):
            self.phase = "renter away"
            self.note(self.phase)
            return None
        self.phase = entry.state.value
        self.note(f"{entry.state.value} {entry.detail}".strip())
        return entry if entry.state.is_final else None

    def until(self, moment_s: float) -> None:
        """Look until so many seconds after the beginning: the moment is the test's input, not a wait."""
        self.look()
        while self.now_s < moment_s:
            time.sleep(min(POLL_S, max(0.0, moment_s - self.now_s)))
            self.look()


def run_and_kill(
    renter: TestDaemon,
    victims: Sequence[TestDaemon | Victim],
    choose: random.Random,
    local: str,
    *,
    span_s: float = JOB_S,
) -> Round:
    """Run one job, and kill -9 each of `victims` at a random moment of its first `span_s` seconds.

    Asserts that the job completed, that its log has no gap and that its output is here; a job whose provider's
    keeper was killed may have failed for that instead.
    """
    job = renter.run("/bin/sh", "-c", SCRIPT, outputs=(jobs.JobOutput(remote="out.txt", local=local),))
    watch = Watch(renter, job)
    moments = [choose.uniform(0, span_s) for _ in victims]
    kills: list[tuple[Victim, float, str, float]] = []
    for moment, one in sorted(zip(moments, victims, strict=True), key=lambda pair: pair[0]):
        victim = DaemonVictim(one) if isinstance(one, TestDaemon) else one
        watch.until(moment)
        phase = watch.phase
        if victim.strike(lambda: watch.look() is not None):
            kills.append((victim, moment, phase, watch.now_s))
            watch.note(f"{victim.name} killed")
    told = []
    for victim, moment, phase, at_s in kills:
        renter.wait_for(victim.is_back, f"the {victim.name} to answer after its restart")
        back_s = watch.now_s
        watch.note(f"{victim.name} back")
        renter.wait_for(victim.has_peer, f"the {victim.name} to have a peer after its restart")
        told.append(Kill(victim.name, moment, phase, back_s - at_s, watch.now_s - back_s))
        watch.note(f"{victim.name} has a peer")
    entry = renter.wait_for(watch.look, f"job {job} to end", job)
    result = Round(entry, tuple(told), watch.now_s, tuple(watch.history))
    if entry.outcome == "keeper_died" and any(kill.victim == "provider's keeper" for kill in told):
        return result
    assert (entry.outcome, entry.exit_status) == ("completed", 0), entry
    assert renter.output(job) == EXPECTED, "the log has a gap"
    with open(local, "rb") as file:  # noqa: PTH123
        assert file.read() == b"end\n"
    os.unlink(local)  # noqa: PTH108
    return result


def same_receipts(renter: TestDaemon, provider: TestDaemon, count: int) -> None:
    """Wait until both sides hold the same `count` accepted receipts."""

    def ask() -> bool:
        mine = {receipt.receipt: receipt for receipt in renter.receipts()}
        theirs = {receipt.receipt: receipt for receipt in provider.receipts() if receipt.accepted}
        with suppress(KeyError):
            return len(mine) == count == len(theirs) and all(
                mine[name].amount == theirs[name].amount for name in theirs
            )
        return False

    renter.wait_for(ask, f"{count} equal receipts on both sides")


def left_behind(daemons: Daemons) -> list[str]:
    """Return what a finished job must not leave: keepers, a provider's directories, mounts, control groups."""
    found = [f"keeper {pid}" for pid in daemons.keepers()]
    leases = [path for path in daemons.folder.glob("provider/state/*/leases/*") if path.is_dir()]
    found += [f"directory {path}" for path in leases]
    found += [f"mount {place}" for place in daemons.mounts()]
    names = {path.name for path in daemons.folder.glob("*/state/*/leases/*")}
    for directory, children, _ in os.walk("/sys/fs/cgroup"):
        for child in children:
            if any(name[:CONTROL_GROUP_DIGITS] in child for name in names):
                found.append(f"control group {directory}/{child}")
    return found
