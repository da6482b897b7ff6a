"""uninstall: undoes scripts/install, by the list that it wrote.

Keeps the key, the books and the configuration unless --purge. Refuses while leases are live, unless --purge.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import click

from node.cli.connection import connect
from node.cli.daemon import wait_until_gone
from node.cli.output import ask, json_option, print_json, say, tell
from node.errors import EXIT_OWN, BadArgument, DaemonUnreachable, JobError, NodeError
from node.rpc.api import Nothing, daemon, lend

LIST_NAME = "installed-files"
KINDS = ("file", "link", "tree", "folder", "config", "group")
UNIT = "gpunode.service"
LEASES_SHOWN = 5


class Line(NamedTuple):
    """A line of the list: what was installed."""

    kind: str
    path: str


@click.command()
@click.option("--purge", is_flag=True, help="Also the key, the books, results not fetched and the configuration.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
def uninstall(purge: bool, yes: bool, as_json: bool) -> int:
    """Remove what scripts/install installed.

    Lists what will go, and asks. The key and the receipts stay, unless --purge: then they are gone for good, and
    with them what others owe. Live leases are in the way, unless --purge: then they are ended.
    """
    manifest = Path(sys.prefix).resolve().parent / LIST_NAME
    lines = read_list(manifest)
    _refuse_foreign(manifest, lines)
    live = live_leases(manifest.parent)
    if live and not purge:
        shown = ", ".join(live[:LEASES_SHOWN])
        raise JobError(
            f"{len(live)} leases are live ({shown})",
            "wait for them: gpunode stop --drain; or end them: gpunode uninstall --purge",
        )
    state = [Path(place) for place in _state_places(manifest)] if purge else []
    going = [line for line in lines if purge or line.kind not in {"config", "group"}]
    for line in going:
        tell(f"  {line.kind:<7} {line.path}")
    for place in state:
        tell(f"  state   {place}: the key, the books, results")
    if not yes and not ask("remove all of this?", refusal="there is no terminal to ask on: add --yes"):
        tell("nothing was removed")
        return EXIT_OWN
    _stop_daemon(purge=purge)
    left = keepers_of(manifest.parent)
    if left:
        raise JobError(
            f"keepers still look after leases (pids {', '.join(map(str, left))}), and nothing was removed",
            "start the daemon, then end them: gpunode stop --now",
        )
    problems = [problem for line in reversed(going) if (problem := remove(line))]
    for place in state:
        shutil.rmtree(place, ignore_errors=True)
    finish(manifest, [] if purge else [line for line in lines if line not in going])
    if as_json:
        print_json({"removed": [line.path for line in going], "problems": problems})
    else:
        for problem in problems:
            say(f"! {problem}")
        say("gpunode is gone" if purge else "gpunode is removed; its key, books and configuration are still there")
    return EXIT_OWN if problems else 0


def read_list(manifest: Path) -> list[Line]:
    """Return what was installed. Raises BadArgument for a gpunode that scripts/install did not install."""
    try:
        text = manifest.read_text()
    except OSError:
        raise BadArgument(
            f"this gpunode was not installed by scripts/install: there is no {manifest}",
            f"it lives in a virtual environment of its own: stop the daemon, then remove {sys.prefix}",
        ) from None
    lines = [Line(*line.split(" ", 1)) for line in text.splitlines() if " " in line]
    for line in lines:
        absolute = line.kind == "group" or (line.path.startswith("/") and ".." not in line.path.split("/"))
        if line.kind not in KINDS or not absolute:
            raise BadArgument(f"{manifest} has a line that is not known here: {line.kind} {line.path}",
                              "remove what it lists by hand")  # fmt: skip
    return lines


def _refuse_foreign(manifest: Path, lines: list[Line]) -> None:
    if not os.access(manifest.parent, os.W_OK):
        raise BadArgument(f"{manifest.parent} may not be changed by you", "run it as root: sudo gpunode uninstall")
    if not lines:
        raise BadArgument(f"{manifest} lists nothing", "there is nothing to remove")


def live_leases(folder: Path) -> list[str]:
    """Return what is live: leases and jobs that the daemon knows, and keepers that run from `folder`."""
    live: list[str] = []
    with contextlib.suppress(DaemonUnreachable), connect() as client:
        live = [f"lease {lease.lease[:12]}" for lease in client.call(lend.STATUS, Nothing()).leases]
        status = client.call(daemon.STATUS, Nothing())
        live += [f"job {job.job}" for job in status.jobs]
    return live or [f"keeper {pid}" for pid in keepers_of(folder)]


def keepers_of(folder: Path) -> list[int]:
    """Return the pids of keepers whose Python is below `folder`."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                if b"node.keeper" in words and words[0].startswith(os.fsencode(folder) + b"/"):
                    found.append(int(process.name))
    return found


def _state_places(manifest: Path) -> list[str]:
    """Return the system service's state directory, from its configuration."""
    prefix = str(manifest.parent).removesuffix("/opt/gpunode")
    if prefix:
        return []
    from node.config import load

    with contextlib.suppress(NodeError):
        return [str(load({}, {}).state_dir)]
    return []


def _stop_daemon(*, purge: bool) -> None:
    mode = daemon.StopMode.NOW if purge else daemon.StopMode.KEEP
    with contextlib.suppress(DaemonUnreachable), connect() as client:
        pid = client.daemon_pid
        client.call(daemon.STOP, daemon.StopParams(mode=mode))
        tell("waiting for the daemon to stop")
        wait_until_gone(client, pid)
    if Path("/run/systemd/system").exists() and shutil.which("systemctl"):
        subprocess.run(["systemctl", "disable", "--now", UNIT], check=False, capture_output=True)


def remove(line: Line) -> str:
    """Remove one thing; return why it could not be, or ""."""
    path = Path(line.path)
    try:
        if line.kind == "group":
            done = subprocess.run(["groupdel", line.path], check=False, capture_output=True, text=True)
            return done.stderr.strip()
        if line.kind == "tree":
            shutil.rmtree(path)
        elif line.kind == "folder":
            with contextlib.suppress(OSError):  # something else is in it
                path.rmdir()
        else:
            path.unlink()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{path} is still there: {error.strerror}"
    return ""


def finish(manifest: Path, kept: list[Line]) -> None:
    """Leave a list of what was kept, or remove list and folder."""
    if kept:
        manifest.write_text("".join(f"{line.kind} {line.path}\n" for line in kept))
        return
    manifest.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        manifest.parent.rmdir()
