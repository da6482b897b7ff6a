"""The second half of `scripts/quickstart`: two daemons, one job, one receipt.

Run by the venv's Python. It speaks to gpunode only as a person would, through the command, and shows what it
types. It ends every process that it started, by pid, also when it fails or is interrupted; what the daemons said is
shown when something goes wrong.
"""

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import trio

from node.devices import DeviceLocks, NvmlSource
from node.ports import DeviceHealth

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
GPUNODE = Path(sys.executable).with_name("gpunode")
EXAMPLE = ROOT / "contrib" / "examples" / "classifier"
WAIT_S_MAX = 30.0
STOP_S_MAX = 20.0
PATH_SIZE_MAX = 60
"""Sockets lie below the temporary folder, and their paths end at 107 bytes."""


class Failed(Exception):
    """The show cannot go on."""


def tell(text: str = "") -> None:
    """Print what happens now."""
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    print(f"\n{bold}==> {text}{plain}", flush=True)


class Daemon:
    """One gpunode daemon in a folder of its own."""

    def __init__(self, name: str, folder: Path, config: str) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        runtime = folder / name / "run"
        runtime.mkdir(parents=True)
        self._config = folder / f"{name}.toml"
        self._config.write_text(f'state_dir = "{folder / name / "state"}"\nruntime_dir = "{runtime}"\n{config}')
        self._config.chmod(0o600)
        self._process: subprocess.Popen[bytes] | None = None
        kept = {key: value for key, value in os.environ.items() if not key.startswith("GPUNODE_")}
        for key in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID"):
            kept.pop(key, None)
        self._environment = {
            **kept,
            "GPUNODE_CONFIG": str(self._config),
            "GPUNODE_SOCKET": str(runtime / "rpc.sock"),
        }

    def start(self) -> None:
        """Start it in the background; its log goes to a file."""
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [GPUNODE, "start"],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.wait_for("answers", lambda: self.query("status"))

    def query(self, *arguments: str) -> dict[str, Any] | None:
        """Return what a command says with --json; None when it fails."""
        done = subprocess.run(
            [GPUNODE, *arguments, "--json"], env=self._environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            return None
        answer = json.loads(done.stdout)
        return answer if isinstance(answer, dict) else None

    def show(self, *arguments: str, cwd: Path | None = None) -> int:
        """Run a command as a person would, and return its exit status."""
        print(f"$ gpunode {' '.join(arguments)}", flush=True)
        return subprocess.run([GPUNODE, *arguments], env=self._environment, cwd=cwd, check=False).returncode

    def wait_for(self, what: str, ask: Callable[[], T | None]) -> T:
        """Ask until there is an answer. Raises Failed when the daemon has ended, or takes too long."""
        limit = time.monotonic() + WAIT_S_MAX
        while (answer := ask()) is None:
            if self._process is not None and self._process.poll() is not None:
                raise Failed(f"the {self.name}'s daemon ended with status {self._process.returncode}")
            if time.monotonic() > limit:
                raise Failed(f"waited {WAIT_S_MAX:g} s for this in vain: the {self.name} {what}")
            time.sleep(0.1)
        return answer

    def stop(self) -> None:
        """End its leases, then the daemon itself: asked first, then told, then made to."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            self.query("stop", "--now")
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                process.wait(STOP_S_MAX / 2)
                break
            except subprocess.TimeoutExpired:
                process.send_signal(number)
        process.wait()


def end_keepers(folder: Path) -> int:
    """Kill the keepers whose lease directory lies in `folder`; return how many there were."""
    ended = 0
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"node.keeper" in words and any(word.startswith(f"{folder}/".encode()) for word in words):
            os.kill(int(process.name), signal.SIGKILL)
            ended += 1
    return ended


async def find_gpus(folder: Path) -> tuple[list[str], str]:
    """Return the models of the usable GPUs, and why there are none."""
    source = NvmlSource(DeviceLocks(folder))
    devices = await source.poll()
    usable = [device.model for device in devices if device.health is DeviceHealth.OK]
    return usable, source.problem() or "; ".join(device.problem for device in devices)


def write_network(folder: Path, *, simulated: bool) -> str:
    """Return the settings that both daemons share: a private network of this machine alone."""
    key = folder / "network.key"
    key.write_text(secrets.token_hex(16) + "\n")
    key.chmod(0o600)
    return (
        f'[network]\nname = "{"demo" if simulated else "quickstart"}"\nkey_file = "{key}"\n'
        'listen = ["/ip4/127.0.0.1/tcp/0"]\n'
    )


def provider_settings(network: str, *, simulated: bool, unsafe: bool) -> str:
    """Return the provider's configuration."""
    settings = network + '[tunnel]\nbind = "127.0.0.1"\n[lend]\nenabled = true\nidle_after = "0s"\n'
    settings += "start_price = 1.20\nreserve_price = 0.38\n"
    if unsafe:
        settings += 'isolation = ["unsafe-process"]\nunsafe_process = true\n'
    if simulated:
        settings += '[[simulated_device]]\nmodel = "Simulated A100"\nmemory = "40G"\n'
    return settings


def check_sandbox(provider: Daemon) -> None:
    """Raise Failed, showing what the doctor says, where jobs cannot be held in a sandbox."""
    report = provider.query("doctor") or {"checks": []}
    checks = {check["name"]: check for check in report["checks"]}
    sandbox = checks.get("sandbox.bubblewrap")
    if sandbox is None or sandbox["status"] == "fail":
        provider.show("doctor")
        raise Failed(
            "this machine cannot run jobs in a sandbox (see above for why, and what mends it); "
            "scripts/quickstart --unsafe-process runs the example without one"
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
    renter.show("jobs")
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
    network = write_network(folder, simulated=simulated)
    provider = Daemon("provider", folder, provider_settings(network, simulated=simulated, unsafe=unsafe))
    daemons = [provider]
    try:
        if not unsafe:
            check_sandbox(provider)
        tell("Starting a provider on 127.0.0.1")
        provider.start()
        address = provider.wait_for("listens", lambda: first_address(provider.query("status")))
        print(address)
        tell("Starting a renter that knows only this address")
        renter = Daemon("renter", folder, network.replace("listen =", f'bootstrap = ["{address}"]\nlisten ='))
        daemons.append(renter)
        renter.start()
        renter.wait_for("hears the provider's offer", lambda: free_offer(renter.query("offers")))
        renter.show("offers")
        job = Path(shutil.copytree(EXAMPLE, folder / "job"))
        rent(renter, job, simulated=simulated, unsafe=unsafe)
    except Failed:
        for daemon in daemons:
            show_log(daemon)
        raise
    finally:
        tell("Stopping the daemons")
        for daemon in reversed(daemons):
            daemon.stop()
        if left := end_keepers(folder):
            print(f"{left} keepers had to be killed")


def first_address(status: Mapping[str, Any] | None) -> str | None:
    """Return the address at which a daemon listens, once it does."""
    addresses = status["swarm"]["addresses"] if status else []
    return str(addresses[0]) if addresses else None


def free_offer(listed: Mapping[str, Any] | None) -> bool | None:
    """Return True once there is an offer with something free."""
    return True if listed and any(offer["free"] > 0 for offer in listed["offers"]) else None


def show_log(daemon: Daemon) -> None:
    """Print the end of what a daemon has said."""
    if daemon.log.is_file() and (lines := daemon.log.read_text(errors="replace").splitlines()[-20:]):
        tell(f"The {daemon.name}'s last words")
        print("\n".join(lines), flush=True)


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
    base = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="gpunode-", dir=base if len(base) <= PATH_SIZE_MAX else "/tmp"))
    try:
        play(folder, unsafe=options.unsafe_process)
    except Failed as failure:
        print(f"\nerror: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; everything was stopped", file=sys.stderr)
        return 130
    finally:
        if options.keep:
            print(f"\nkept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    tell(f"Done in {time.monotonic() - started:.0f} s; nothing is left running")
    print("Next: README.md, from 'Lend a GPU' on.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
