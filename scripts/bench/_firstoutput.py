"""The time from `gpunode run` to the first line of a job's output; `scripts/bench/firstoutput` runs it.

Each run is what a person does: the command is started, and the clock stops when the job's first line arrives on
its standard output. The parts are taken from what the renter's daemon wrote down about the job, on this
machine's one clock. Refuses to leave out slow runs; a run that fails ends the measurement.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _loopback import (
    GPUNODE,
    Daemon,
    Failed,
    network_settings,
    provider_settings,
    sandbox_problem,
    temporary_folder,
    wait_for_address,
    wait_for_offers,
)

RUNS, RUNS_QUICK = 20, 3
PAUSE_S_MAX = 0.3
"""Runs begin at any point of an auction's tick."""
WORD = "first"
PARTS = (
    ("command, plan, job to the daemon", "asked", "created"),
    ("auction, until the lease is signed", "created", "signed"),
    ("keepers, tunnel, staging, sandbox", "signed", "started"),
    ("the job's line back to the terminal", "started", "heard"),
)
"""(part, from, to)."""


def run_once(renter: Daemon, folder: Path, *, unsafe: bool) -> dict[str, float]:
    """Run a job that says one word, and return when what happened, in Unix seconds. Raises Failed."""
    command = [GPUNODE, "run", "--yes", "--allow-simulated", "--time", "1m"]
    if unsafe:
        command += ["--isolation", "unsafe-process"]
    asked = time.time()
    with (
        (folder / "run.log").open("wb") as errors,
        subprocess.Popen(
            [*command, "--", "echo", WORD],
            env=renter.environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        line = process.stdout.readline()
        heard = time.time()
        status = process.wait()
    if line.strip() != WORD or status != 0:
        said = (folder / "run.log").read_text(errors="replace")
        raise Failed(f"a run ended with status {status} and said {line!r}: {said}")
    detail: dict[str, Any] = renter.query("jobs", "-") or {}
    [attempt] = detail["attempts"]
    return {
        "asked": asked,
        "created": detail["entry"]["created_at"] / 1000,
        "signed": attempt["signed_at"] / 1000,
        "started": attempt["started_at"] / 1000,
        "heard": heard,
    }


def percentile(values: list[float], percent: int) -> float:
    """Return the smallest value that `percent` % of all do not exceed (nearest rank)."""
    ranked = sorted(values)
    return ranked[max(0, -(-percent * len(ranked) // 100) - 1)]


def measure(folder: Path, runs: int, seed: int) -> tuple[list[dict[str, float]], str]:
    """Return what happened when in each run, and the isolation tier that was used. Raises Failed."""
    probe = Daemon("doctor", folder, network_settings(folder))
    unsafe = bool(sandbox_problem(probe))
    source = random.Random(seed)  # noqa: S311 - pauses want a seed, not secrecy
    settings = network_settings(folder) + provider_settings(simulated=True, unsafe=unsafe)
    provider = Daemon("provider", folder, settings)
    daemons = [provider]
    try:
        provider.start()
        renter = Daemon("renter", folder, network_settings(folder, bootstrap=wait_for_address(provider)))
        daemons.append(renter)
        renter.start()
        observed = []
        for number in range(runs):
            wait_for_offers(renter)
            time.sleep(source.uniform(0, PAUSE_S_MAX))
            observed.append(run_once(renter, folder, unsafe=unsafe))
            print(
                f"run {number + 1}/{runs}: {observed[-1]['heard'] - observed[-1]['asked']:.3f} s", file=sys.stderr
            )
    except Failed:
        for daemon in daemons:
            print(f"--- the {daemon.name}'s last words\n{daemon.last_words()}", file=sys.stderr)
        raise
    finally:
        for daemon in reversed(daemons):
            daemon.stop()
    return observed, "unsafe-process" if unsafe else "bubblewrap"


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="scripts/bench/firstoutput")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        with temporary_folder() as folder:
            observed, tier = measure(folder, RUNS_QUICK if options.quick else RUNS, options.seed)
    except Failed as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    rows = [(name, [run[end] - run[begin] for run in observed]) for name, begin, end in PARTS]
    total = [run["heard"] - run["asked"] for run in observed]
    print(f"{'seconds, ' + str(len(observed)) + ' runs, ' + tier:<40}{'min':>8}{'p50':>8}{'p99':>8}{'max':>8}")
    for name, values in [*rows, ("from Enter to the first line", total)]:
        p50, p99 = percentile(values, 50), percentile(values, 99)
        print(f"{name:<40}{min(values):>8.3f}{p50:>8.3f}{p99:>8.3f}{max(values):>8.3f}")
    result = {
        "first_output_p50_s": round(percentile(total, 50), 4),
        "first_output_p99_s": round(percentile(total, 99), 4),
        "parts_p50_s": {name: round(percentile(values, 50), 4) for name, values in rows},
        "runs": len(observed),
        "isolation": tier,
        "seed": options.seed,
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
