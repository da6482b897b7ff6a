"""Daemons on loopback for the scripts that show or measure gpunode: started, asked, and ended.

It speaks to a daemon only through the command, as a person would. Every process that it starts is ended by pid,
and so are the keepers whose lease lies in its folder. Refuses to know about daemons that it did not start.
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
GPUNODE = str(Path(sys.executable).with_name("gpunode"))
WAIT_S_MAX = 30.0
STOP_S_MAX = 20.0
COMMAND_S_MAX = 180.0
BASE_SIZE_MAX = 60
"""Sockets lie below the temporary folder, and their paths end at 107 bytes."""
NOT_INHERITED = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")
DOCTOR_FINDINGS = 1
"""Exit status of `gpunode doctor` when something on the machine is wrong."""
DEMO_DEVICE = '[[simulated_device]]\nmodel = "Simulated A100"\nmemory = "40G"\n'


class Failed(Exception):
    """The daemons cannot do what is wanted of them."""


class Daemon:
    """One gpunode daemon with configuration, state and sockets in a folder of its own."""

    def __init__(self, name: str, folder: Path, settings: str) -> None:
        """Write its configuration: `settings` is TOML without state_dir and runtime_dir. Nothing runs yet."""
        self.name = name
        self.log = folder / f"{name}.log"
        runtime = folder / name / "run"
        runtime.mkdir(parents=True, mode=0o700)
        config = folder / f"{name}.toml"
        config.write_text(f'state_dir = "{folder / name / "state"}"\nruntime_dir = "{runtime}"\n{settings}')
        config.chmod(0o600)
        self._process: subprocess.Popen[bytes] | None = None
        inherited = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("GPUNODE_") and key not in NOT_INHERITED
        }
        self.environment = {
            **inherited,
            "GPUNODE_CONFIG": str(config),
            "GPUNODE_SOCKET": str(runtime / "rpc.sock"),
        }

    @property
    def pid(self) -> int:
        """The daemon's process, once started."""
        if self._process is None:
            raise Failed(f"the {self.name} was not started")
        return self._process.pid

    def start(self) -> None:
        """Start it in the background, and wait until it answers. Its log goes to a file. Raises Failed."""
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [GPUNODE, "start"],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.wait_for("answers", lambda: self.query("status"))

    def query(self, *arguments: str, accepted: tuple[int, ...] = (0,)) -> dict[str, Any] | None:
        """Return what a command says with --json; None when it ends with another status than `accepted`."""
        command = [GPUNODE, *arguments, "--json"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode not in accepted:
            return None
        answer = json.loads(done.stdout)
        return answer if isinstance(answer, dict) else None

    def show(self, *arguments: str, cwd: Path | None = None) -> int:
        """Run a command as a person would, and return its exit status. Raises Failed when it takes too long."""
        print(f"$ gpunode {' '.join(arguments)}", flush=True)
        try:
            done = subprocess.run(
                [GPUNODE, *arguments], env=self.environment, cwd=cwd, check=False, timeout=COMMAND_S_MAX
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"gpunode {arguments[0]} did not end within {COMMAND_S_MAX:g} s") from None
        return done.returncode

    def wait_for(self, what: str, ask: Callable[[], T | None]) -> T:
        """Ask until there is an answer. Raises Failed when the daemon has ended, or takes too long."""
        limit = time.monotonic() + WAIT_S_MAX
        while (answer := ask()) is None:
            if self._process is not None and self._process.poll() is not None:
                raise Failed(f"the {self.name}'s daemon ended with status {self._process.returncode}")
            if time.monotonic() > limit:
                raise Failed(f"waited {WAIT_S_MAX:g} s in vain until the {self.name} {what}")
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
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S_MAX / 2)
            if process.returncode is None:
                process.send_signal(number)
        process.wait()

    def last_words(self) -> str:
        """Return the end of what it has logged."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:]) if self.log.is_file() else ""


def end_keepers(folder: Path) -> int:
    """Kill the keepers whose lease directory lies in `folder`; return how many there were."""
    ended = 0
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            if b"node.keeper" in words and any(word.startswith(f"{folder}/".encode()) for word in words):
                os.kill(int(process.name), signal.SIGKILL)
                ended += 1
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return ended


@contextmanager
def temporary_folder(*, keep: bool = False) -> Iterator[Path]:
    """Make a folder for daemons, and remove it with every keeper that is left in it."""
    base = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="gpunode-", dir=base if len(base) <= BASE_SIZE_MAX else "/tmp"))
    try:
        yield folder
    finally:
        end_keepers(folder)
        if keep:
            print(f"\nkept: {folder}", flush=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def network_settings(folder: Path, *, name: str = "demo", bootstrap: str = "") -> str:
    """Return the settings of a network of this machine alone; all who use `folder` share its key."""
    key = folder / "network.key"
    if not key.exists():
        key.touch(mode=0o600)
        key.write_text(secrets.token_hex(16) + "\n")
    peers = f'bootstrap = ["{bootstrap}"]\n' if bootstrap else ""
    return f'[network]\nname = "{name}"\nkey_file = "{key}"\nlisten = ["/ip4/127.0.0.1/tcp/0"]\n{peers}'


def provider_settings(*, simulated: bool, unsafe: bool) -> str:
    """Return what a provider adds to its network's settings."""
    settings = '[tunnel]\nbind = "127.0.0.1"\n[lend]\nenabled = true\nidle_after = "0s"\n'
    settings += "start_price = 1.20\nreserve_price = 0.38\n"
    if unsafe:
        settings += 'isolation = ["unsafe-process"]\nunsafe_process = true\n'
    return settings + (DEMO_DEVICE if simulated else "")


def wait_for_address(daemon: Daemon) -> str:
    """Return the address at which a daemon listens."""

    def ask() -> str | None:
        status: Mapping[str, Any] = daemon.query("status") or {"swarm": {"addresses": []}}
        return next(iter(status["swarm"]["addresses"]), None)

    return daemon.wait_for("listens", ask)


def wait_for_offers(daemon: Daemon, count: int = 1) -> None:
    """Wait until a daemon knows `count` offers with something free."""

    def ask() -> bool | None:
        listed: Mapping[str, Any] = daemon.query("offers") or {"offers": []}
        return sum(offer["free"] > 0 for offer in listed["offers"]) >= count or None

    daemon.wait_for(f"knows {count} offers" if count > 1 else "knows an offer", ask)


def sandbox_problem(daemon: Daemon) -> str:
    """Return why the default sandbox does not work on this machine, or "", as the doctor finds it."""
    report: Mapping[str, Any] = daemon.query("doctor", accepted=(0, DOCTOR_FINDINGS)) or {"checks": []}
    for check in report["checks"]:
        if check["name"] == "sandbox.bubblewrap":
            return "" if check["status"] == "ok" else str(check["detail"])
    return "the doctor does not know"
