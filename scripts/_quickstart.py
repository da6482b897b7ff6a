"""The second half of `scripts/quickstart`: two daemons, one job, one receipt.

Run by the venv's Python. It shows what it types, and what the daemons said when something goes wrong. Refuses to
leave anything behind: what it started ends with it, also when it fails or is interrupted.
"""

import argparse
import shutil
import signal
import sys
import time
from pathlib import Path

import trio
from _loopback import (
    Daemon,
    Failed,
    network_settings,
    provider_settings,
    sandbox_problem,
    temporary_folder,
    wait_for_address,
    wait_for_offers,
)

from node.devices import DeviceLocks, NvmlSource
from node.ports import DeviceHealth

EXAMPLE = Path(__file__).resolve().parents[1] / "contrib" / "examples" / "classifier"


def tell(text: str) -> None:
    """Print what happens now."""
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    print(f"\n{bold}==> {text}{plain}", flush=True)


async def find_gpus(folder: Path) -> tuple[list[str], str]:
    """Return the models of the usable GPUs, and why there are none."""
    source = NvmlSource(DeviceLocks(folder))
    devices = await source.poll()
    usable = [device.model for device in devices if device.health is DeviceHealth.OK]
    return usable, source.problem() or "; ".join(device.problem for device in devices)


def check_sandbox(provider: Daemon) -> None:
    """Raise Failed, showing what the doctor says, where jobs cannot be held in a sandbox."""
    if problem := sandbox_problem(provider):
        provider.show("doctor")
        raise Failed(
            f"this machine cannot hold jobs in a sandbox: {problem}\n"
            "  hint: see above for what mends it, or run the example without one:  "
            "scripts/quickstart --unsafe-process"
        )


def rent(renter: Daemon, job: Path, *, simulated: bool, unsafe: bool) -> None:
    """Run the example job and show what came of it."""
    tell("The renter runs the example job: quote, bid, stage, run, logs, collect, settle")
    flags = ["--yes"]
    if simulated:
        flags.append("--allow-simulated")
    if unsafe:
        flags += ["--isolation", "unsafe-process"]
    status = renter.show("run", "-f", "job.toml", *flags, cwd=job)
    if status != 0:
        renter.show("why", "-")
        raise Failed(f"the job ended with status {status}")
    report = job / "results" / "report.txt"
    if not report.is_file():
        raise Failed("the job ended well, but its results did not arrive")
    tell("Its results are here")
    for path in sorted(report.parent.iterdir()):
        print(f"{path.relative_to(job)}  ({path.stat().st_size} bytes)")
    print(report.read_text(), end="", flush=True)
    tell("What it cost, and the receipt that the provider signed")
    renter.show("jobs", "-")
    renter.show("money", "receipts")


def play(folder: Path, *, unsafe: bool) -> None:
    """Do it all, in `folder`. Raises Failed."""
    gpus, problem = trio.run(find_gpus, folder)
    simulated = not gpus
    if simulated:
        tell("NO GPU HERE: the GPU lent below is SIMULATED")
        print(
            f"Why: {problem}\nMarket, tunnel, sandbox and books are real; the GPU is not, and the job uses none."
        )
    else:
        tell(f"This machine lends: {', '.join(gpus)}")
    name = "demo" if simulated else "quickstart"
    own = provider_settings(simulated=simulated, unsafe=unsafe)
    provider = Daemon("provider", folder, network_settings(folder, name=name) + own)
    daemons = [provider]
    try:
        if unsafe:
            tell("NO SANDBOX: the example job runs as an ordinary process, as you asked")
        else:
            check_sandbox(provider)
        tell("Starting a provider on 127.0.0.1")
        provider.start()
        address = wait_for_address(provider)
        provider.show("lend", "devices")
        tell(f"Starting a renter that knows only {address}")
        renter = Daemon("renter", folder, network_settings(folder, name=name, bootstrap=address))
        daemons.append(renter)
        renter.start()
        wait_for_offers(renter)
        renter.show("offers")
        rent(renter, Path(shutil.copytree(EXAMPLE, folder / "job")), simulated=simulated, unsafe=unsafe)
    except Failed:
        for daemon in daemons:
            if words := daemon.last_words():
                tell(f"The {daemon.name}'s last words")
                print(words, flush=True)
        raise
    finally:
        tell("Stopping the daemons")
        for daemon in reversed(daemons):
            daemon.stop()


def interrupt(*_: object) -> None:
    """Turn a signal into an exception, so that everything is stopped on the way out."""
    raise KeyboardInterrupt


def main() -> int:
    """Run the show and return its exit status."""
    parser = argparse.ArgumentParser(prog="scripts/quickstart")
    parser.add_argument("--unsafe-process", action="store_true")
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGHUP, interrupt)
    started = time.monotonic()
    try:
        with temporary_folder(keep=options.keep) as folder:
            play(folder, unsafe=options.unsafe_process)
    except Failed as failure:
        print(f"\nerror: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; everything was stopped", file=sys.stderr)
        return 130
    tell(f"Done in {time.monotonic() - started:.0f} s; nothing is left running")
    print("Next: README.md, from 'Lend a GPU' on.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
