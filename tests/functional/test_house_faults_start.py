"""Daemons that cannot start: status 125, a line that says why and one that says what to do, and nothing left."""

import os
import socket
import sqlite3
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.daemons import SIMULATED_A100, Daemons, TestDaemon

from node.keys import load_or_create, state_root
from node.store import Store

START_S_MAX = 60


def refused(daemon: TestDaemon, error: str, hint: str) -> None:
    """Start a daemon that must end, and check what it says: both texts are parts of their lines."""
    daemon.start(wait=False)
    assert daemon.process is not None
    status = daemon.process.wait(START_S_MAX)
    said = [line for line in daemon.log.read_text().splitlines() if not line.startswith("{")]
    assert status == 125, said
    assert len(said) == 2, said
    assert said[0].startswith("error: ")
    assert error in said[0]
    assert said[1].startswith("  hint: ")
    assert hint in said[1]


def with_root(daemon: TestDaemon) -> Path:
    """Make this machine's part of the daemon's state, with a key, and return it."""
    root = state_root(daemon.folder / "state")
    load_or_create(root / "node.key")
    return root


def change(daemon: TestDaemon, before: str, after: str) -> None:
    """Change a part of a daemon's configuration."""
    text = daemon.config.read_text()
    assert before in text
    daemon.config.write_text(text.replace(before, after))


# --- the configuration --------------------------------------------------------------------------------------

BAD_SETTINGS = {
    '[network]\nnam = "demo"\n': ("no setting network.nam", "did you mean network.name?"),
    '[lend]\nidle_after = "15"\n': ("lend.idle_after", 'such as "15m"'),
    "[network]\nmax_peers = 2\n": ("network.max_peers", "allowed"),
    '[network]\nlisten = ["127.0.0.1:7440"]\n': ("listen", "gpunode.toml"),
    '[network]\nbootstrap = ["/ip4/127.0.0.1/tcp/1"]\n': ("bootstrap", "gpunode.toml"),
    '[network]\nname = "lab"\n' + SIMULATED_A100: ("nobody must be able to buy a GPU that does not exist", ""),
    "[[[\n": ("is not TOML", "mend that line"),
}


@pytest.mark.parametrize("settings", BAD_SETTINGS)
def test_a_wrong_setting_is_named(daemons: Daemons, settings: str) -> None:
    daemon = daemons.make("node")
    daemon.config.write_text(f'state_dir = "{daemon.folder / "state"}"\n{settings}')
    refused(daemon, *BAD_SETTINGS[settings])
    assert not (daemon.folder / "state").exists()


def test_a_configuration_that_cannot_be_read_is_named(daemons: Daemons) -> None:
    daemon = daemons.make("node")
    daemon.config.unlink()
    refused(daemon, f"there is no configuration file {daemon.config}", "check the path")
    daemon.log.unlink()
    daemon.config.mkdir()
    refused(daemon, f"{daemon.config} can't be read: Is a directory", "type and permissions")
    daemon.log.unlink()
    daemon.environment["GPUNODE_NETWORK_NAM"] = "demo"
    daemon.config.rmdir()
    daemon.config.touch()
    refused(daemon, "GPUNODE_NETWORK_NAM", "did you mean GPUNODE_NETWORK_NAME?")


# --- places that are taken ----------------------------------------------------------------------------------


def listen_of(daemon: TestDaemon) -> str:
    """Return where a daemon is configured to listen."""
    listen: str = tomllib.loads(daemon.config.read_text())["network"]["listen"][0]
    return listen


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield int(other.getsockname()[1])


def test_a_port_that_is_taken_is_named(daemons: Daemons) -> None:
    with taken_port() as port:
        daemon = daemons.make("swarm")
        change(daemon, listen_of(daemon), f"/ip4/127.0.0.1/tcp/{port}")
        refused(daemon, f"cannot listen on /ip4/127.0.0.1/tcp/{port}: Address already in use", "another port")
        daemon = daemons.make("metrics", devices=SIMULATED_A100, extra=f"[metrics]\nport = {port}\n")
        refused(daemon, f"metrics.port {port} cannot be listened on: Address already in use", "another port, or 0")
        assert not daemon.socket.exists()
        daemon.wait_for(lambda: not daemons.keeper_processes(), "the spare keeper to end")


def test_a_living_daemon_is_not_replaced_and_a_dead_one_is(daemons: Daemons) -> None:
    first = daemons.make("first").start()
    pid = first.status().pid
    same_state = daemons.make("second")
    change(same_state, "/second/state", "/first/state")
    refused(same_state, f"another daemon (pid {pid}) uses {state_root(first.folder / 'state')}", "gpunode stop")
    same_socket = daemons.make("third")
    change(same_socket, "/third/run", "/first/run")
    refused(same_socket, f"another daemon answers at {first.socket}", "gpunode status")
    assert first.status().pid == pid
    first.kill()
    assert first.socket.is_socket()
    assert first.start().status().pid != pid
    first.stop()
    first.log.unlink()
    first.socket.write_text("not a socket")
    refused(first, f"{first.socket} exists and is no socket", "move it away")
    assert first.socket.read_text() == "not a socket"


def test_a_runtime_directory_whose_sockets_would_have_too_long_paths_is_refused(daemons: Daemons) -> None:
    for length in (90, 120):
        daemon = daemons.make(f"node-{length}")
        run = daemon.folder / ("x" * (length - len(str(daemon.folder))))
        change(daemon, f"{daemon.folder}/run", str(run))
        refused(daemon, f"{run}/k/", "set runtime_dir to a shorter path")
        assert not run.exists()
        assert not (daemon.folder / "state").exists()


# --- keys and databases -------------------------------------------------------------------------------------

Spoil = Callable[[Path], object]

BAD_KEYS: dict[str, tuple[Spoil, str, str]] = {
    "readable by others": (lambda key: key.chmod(0o644), "can be read by others (mode 0644)", "chmod 600"),
    "cut short": (lambda key: key.write_bytes(b"short"), "holds no key: not 32 bytes", "restore it"),
    "a link": (lambda key: key.symlink_to(key.rename(key.with_suffix(".old"))), "symbolic link", "itself"),
    "replaceable": (lambda key: key.parent.chmod(0o777), "can be replaced by others", "chmod go-w"),
}


@pytest.mark.parametrize("how", BAD_KEYS)
def test_a_key_that_cannot_be_trusted_is_not_used(daemons: Daemons, how: str) -> None:
    daemon = daemons.make("node")
    spoil, error, hint = BAD_KEYS[how]
    key = with_root(daemon) / "node.key"
    spoil(key)
    refused(daemon, error, hint)


def _overwrite(database: Path) -> None:
    with database.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(5 * 4096))


def _alter(statement: str) -> Spoil:
    def alter(database: Path) -> None:
        with sqlite3.connect(database) as connection:
            connection.execute(statement)
        connection.close()

    return alter


A_LISTING = "insert into listings (name, auction, offer) values ('a100', x'00ff', null)"
BAD_DATABASES: dict[str, tuple[Spoil, str, str]] = {
    "no database": (lambda file: file.write_bytes(os.urandom(8192)), "file is not a database", "move"),
    "cut short": (lambda file: os.truncate(file, 9000), "malformed", "move"),
    "overwritten": (_overwrite, "cannot open the database", "move"),
    "of the future": (_alter("pragma user_version = 99"), "by a newer gpunode (schema 99", "install that version"),
    "damaged listing": (_alter(A_LISTING), "the database holds a damaged auction", "move it away"),
}


@pytest.mark.parametrize("how", BAD_DATABASES)
def test_a_damaged_database_is_not_used(daemons: Daemons, how: str) -> None:
    daemon = daemons.make("node", lend="", devices=SIMULATED_A100)
    spoil, error, hint = BAD_DATABASES[how]
    database = with_root(daemon) / "node.db"
    Store(database).close()
    spoil(database)
    before = database.read_bytes()
    refused(daemon, error, hint)
    assert database.read_bytes() == before


# --- disks --------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(place: Path, options: str) -> Iterator[None]:
    """Mount a file system in memory at `place`; skip the test where that is not allowed."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "gpunode-test", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("size", ["16k", "100k"])
def test_a_full_disk_is_named(daemons: Daemons, size: str) -> None:
    daemon = daemons.make("node")
    with small_disk(daemon.folder / "state", f"size={size}"):
        refused(daemon, f"{daemon.folder}/state", "free some disk space")


def test_a_disk_that_is_read_only_is_named(daemons: Daemons) -> None:
    fresh, used = daemons.make("fresh"), daemons.make("used")
    with small_disk(fresh.folder / "state", "ro,size=1m"):
        refused(fresh, "Read-only file system", "state_dir")
    with small_disk(used.folder / "state", "size=1m"):
        Store(with_root(used) / "node.db").close()
        (with_root(used) / "leases").mkdir()
        subprocess.run(["mount", "-o", "remount,ro", str(used.folder / "state")], check=True)
        refused(used, "Read-only file system", "state_dir")


def test_a_state_directory_that_is_a_file_is_named(daemons: Daemons) -> None:
    daemon = daemons.make("node")
    (daemon.folder / "state").touch()
    refused(daemon, f"cannot make {daemon.folder}/state", "state_dir")
