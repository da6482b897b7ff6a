"""The second half of `scripts/campaign`: jobs whose daemons and keepers are killed at random moments.

Each round buys and runs one job that counts, and kills its victims with SIGKILL at moments spread over the job's
life; a killed daemon is started again at once. The job must complete, its log must have no gap, its output must be
here, both sides must hold the same receipt, and nothing may be left of it. A provider's keeper that dies while the
job runs ends the job, by design: that round may fail for this reason only. After a round that did not hold the
daemons are made anew, so that each failure is counted once. Refuses to judge how long anything took: it prints it.
"""

import argparse
import json
import random
import secrets
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from support.daemons import Daemons, TestDaemon, daemons
from support.killing import (
    DaemonVictim,
    KeeperVictim,
    Round,
    Victim,
    left_behind,
    run_and_kill,
    same_receipts,
)

SIDES = ("provider", "renter", "both", "keepers")
ROUNDS, ROUNDS_QUICK = 50, 3
CLEAR_S_MAX = 30.0
SPAN_SLACK = 1.1
"""Kills are spread over the length of the quickest job so far, and a little beyond: its settlement counts too."""
SLOW_S = 8.0
"""The history of a job that lost more is printed."""
POLL_S = 0.05


class NotHeld(Exception):
    """Something that must hold did not."""


class Held(NamedTuple):
    """A round that held."""

    round: Round
    lost_s: float
    """How much longer than the undisturbed job it took."""


class Side:
    """The rounds of one side: its daemons, its counts."""

    def __init__(self, name: str, rounds: int, seed: int) -> None:
        self.name = name
        self.rounds = rounds
        # Each side's choices depend on its name and the seed only, not on the sides before it.
        self.choose = random.Random(f"{seed}/{name}")  # noqa: S311 - repeatable by design
        self.held: list[Held] = []
        self.problems: list[str] = []
        self.gaps = 0
        self.unequal = 0
        self.left: list[str] = []

    def run(self) -> None:
        """Run all rounds, with new daemons after each one that did not hold."""
        done = 0
        while done < self.rounds:
            with daemons() as running:
                done = self._run_some(running, done)

    def _run_some(self, running: Daemons, done: int) -> int:
        provider, renter = running.provider(), running.renter()
        renter.connect(provider)
        renter.wait_offers()
        victims = self._victims(running, provider, renter)
        normal = run_and_kill(renter, (), self.choose, str(running.folder / "out-0.txt"))
        receipts, quickest_s = 1, normal.took_s
        print(f"{self.name}: an undisturbed job takes {normal.took_s:.1f} s", flush=True)
        while done < self.rounds:
            done += 1
            try:
                result = run_and_kill(
                    renter,
                    victims,
                    self.choose,
                    str(running.folder / f"out-{done}.txt"),
                    span_s=quickest_s * SPAN_SLACK,
                )
                receipts += 1
                quickest_s = min(quickest_s, result.took_s)
                self._check_after(running, provider, renter, receipts)
            except (AssertionError, NotHeld, pytest.fail.Exception) as problem:
                self._take_problem(done, problem, (provider, renter))
                return done
            if not result.kills:
                done -= 1  # the job was over before its moment came
                continue
            held = Held(result, result.took_s - normal.took_s)
            self.held.append(held)
            print(line_of(self.name, done, held), flush=True)
            if held.lost_s > SLOW_S:
                for at_s, text in result.history:
                    print(f"{'':16}{at_s:6.2f} s  {text}", flush=True)
        return done

    def _victims(self, running: Daemons, provider: TestDaemon, renter: TestDaemon) -> Sequence[Victim]:
        match self.name:
            case "provider":
                return (DaemonVictim(provider),)
            case "renter":
                return (DaemonVictim(renter),)
            case "both":
                return (DaemonVictim(provider), DaemonVictim(renter))
            case _:
                return (KeeperVictim(running, self.choose),)

    def _check_after(self, running: Daemons, provider: TestDaemon, renter: TestDaemon, receipts: int) -> None:
        try:
            same_receipts(renter, provider, receipts)
        except pytest.fail.Exception:
            self.unequal += 1
            raise
        limit = time.monotonic() + CLEAR_S_MAX
        while left := left_behind(running):
            if time.monotonic() > limit:
                self.left += left
                raise NotHeld(f"left behind: {', '.join(left)}")
            time.sleep(POLL_S)
        provider.wait_for(lambda: provider.devices()[0].use.value == "offered", "the device to be offered again")

    def _take_problem(self, number: int, problem: BaseException, both: tuple[TestDaemon, ...]) -> None:
        text = str(problem)
        self.gaps += "the log has a gap" in text
        self.problems.append(f"{self.name} {number}: {text.partition(chr(10))[0][:200]}")
        print(f"{self.name:9} {number:4}  DID NOT HOLD: {text}", flush=True)
        for daemon in both:
            print(f"--- the last words of the {daemon.name}\n{daemon.last_words()}", flush=True)

    @property
    def lost_s(self) -> list[float]:
        """How much longer than the undisturbed job each round took that held."""
        return [held.lost_s for held in self.held]

    @property
    def met_s(self) -> list[float]:
        """Seconds from each restarted daemon's first answer until it had a peer again."""
        return [kill.met_s for held in self.held for kill in held.round.kills]

    @property
    def kills(self) -> int:
        """How many victims were killed in rounds that held."""
        return sum(len(held.round.kills) for held in self.held)


def line_of(side: str, number: int, held: Held) -> str:
    """Return one round as people read it."""
    moments = ", ".join(
        f"{kill.victim} at {kill.at_s:4.2f} s ({kill.phase}), back in {kill.back_s:.1f} s + {kill.met_s:.1f} s"
        for kill in held.round.kills
    )
    return (
        f"{side:9} {number:4}  {held.round.entry.outcome:12} {held.lost_s:+6.1f} s  {moments or 'nothing killed'}"
    )


def table_of(sides: Sequence[Side]) -> str:
    """Return the summary as people read it."""
    lines = [
        f"{'side':10}{'rounds':>7}{'kills':>7}{'completed':>11}{'median':>9}{'worst':>8}   killed while it was"
    ]
    for side in sides:
        lost = side.lost_s
        phases = Counter(kill.phase for held in side.held for kill in held.round.kills)
        lines.append(
            f"{side.name:10}{side.rounds:7}{side.kills:7}{completed(side):11}"
            f"{statistics.median(lost) if lost else 0:+8.1f}s{max(lost, default=0):+7.1f}s   "
            + ", ".join(f"{phase} {count}" for phase, count in phases.most_common())
        )
    return "\n".join(lines)


def completed(side: Side) -> int:
    """Return how many disturbed jobs of a side completed."""
    return sum(held.round.entry.outcome == "completed" for held in side.held)


def result_of(sides: Sequence[Side], seed: int) -> dict[str, Any]:
    """Return the result as programs read it: totals, and what each side's rounds came to."""
    held = {side.name: [each.round.entry.outcome for each in side.held] for side in sides}
    return {
        "seed": seed,
        "rounds": sum(side.rounds for side in sides),
        "kills": sum(side.kills for side in sides),
        "completed": sum(completed(side) for side in sides),
        "keeper_died": sum(outcomes.count("keeper_died") for outcomes in held.values()),
        "not_held": sum(len(side.problems) for side in sides),
        "gaps": sum(side.gaps for side in sides),
        "receipts_equal": not any(side.unequal for side in sides),
        "left_behind": [name for side in sides for name in side.left],
        "sides": {
            side.name: {
                "rounds": side.rounds,
                "kills": side.kills,
                "completed": completed(side),
                "lost_s_median": round(statistics.median(lost), 1) if (lost := side.lost_s) else None,
                "lost_s_max": round(max(side.lost_s, default=0.0), 1),
                "met_s_max": round(max(side.met_s, default=0.0), 1),
            }
            for side in sides
        },
    }


def run_kill(arguments: argparse.Namespace) -> int:
    """Run the campaign of kills; return the exit status."""
    rounds = ROUNDS_QUICK if arguments.quick else arguments.rounds
    print(f"seed {arguments.seed}", flush=True)
    sides = [Side(name, rounds, arguments.seed) for name in (arguments.side or SIDES)]
    for side in sides:
        side.run()
    print(table_of(sides))
    problems = [problem for side in sides for problem in side.problems]
    for problem in problems:
        print(f"did not hold: {problem}")
    print(json.dumps(result_of(sides, arguments.seed)))
    return 1 if problems else 0


def end(number: int, frame: object) -> None:
    """End the campaign as an exception does: its daemons and keepers end with it."""
    del frame
    raise SystemExit(128 + number)


def main() -> int:
    """Run the named campaign; return the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)  # also when a shell started us in the background: daemons must not be left
    parser = argparse.ArgumentParser(prog="scripts/campaign", description="long trials on real daemons")
    campaigns = parser.add_subparsers(required=True, metavar="NAME")
    kill = campaigns.add_parser("kill", help="kill -9 of daemons and keepers at random moments of jobs")
    kill.add_argument("--rounds", type=int, default=ROUNDS, help=f"on each side (default: {ROUNDS})")
    kill.add_argument("--seed", type=int, default=secrets.randbelow(10**9), help="default: another each time")
    kill.add_argument("--side", choices=SIDES, action="append", help="may be repeated (default: all of them)")
    kill.add_argument("--quick", action="store_true", help=f"{ROUNDS_QUICK} rounds on each side")
    kill.set_defaults(run=run_kill)
    arguments = parser.parse_args()
    status: int = arguments.run(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
