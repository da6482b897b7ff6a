"""Trees that can not be sent, and places where nothing can be put: the command line says so and buys nothing."""

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.daemons import TestDaemon, daemons
from support.fault_jobs import GPUNODE, environment_of, gpunode, gpus, start_all, terms, wait_clean

from node.rpc.methods import jobs

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="jobs run under uids of their own, devices are made")

House = tuple[TestDaemon, TestDaemon, Path]
FLAGS = ("--allow-simulated", "--max-price", "5", "--memory", "128M", "--disk", "32M", "--yes")
AS_ANYBODY = (
    "setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override,-dac_read_search",
)  # fmt: skip
"""Root without the right to read and write everything, as other users are."""


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    """A provider, a renter, and a folder."""
    with daemons() as running:
        provider = running.make("provider", lend=terms(notice="30s"), devices=gpus(1))
        renter = running.make("renter")
        start_all(provider, renter)
        renter.connect(provider)
        renter.wait_offers()
        yield provider, renter, running.folder


def link_out(tree: Path) -> None:
    (tree / "odd").symlink_to("/etc/passwd")


def link_up(tree: Path) -> None:
    (tree / "odd").symlink_to("../../etc/passwd")


def fifo(tree: Path) -> None:
    os.mkfifo(tree / "odd")


def unix_socket(tree: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tree / "odd"))


def device(tree: Path) -> None:
    os.mknod(tree / "odd", 0o600 | 0o020000, os.makedev(1, 3))


def no_text(tree: Path) -> None:
    Path(os.fsdecode(os.fsencode(tree) + b"/odd\xff")).touch()


def unreadable(tree: Path) -> None:
    (tree / "odd").write_text("private")
    (tree / "odd").chmod(0)


def closed_directory(tree: Path) -> None:
    (tree / "odd").mkdir(mode=0)


def too_deep(tree: Path) -> None:
    deep = tree / "odd"
    for _level in range(70):
        deep.mkdir()
        deep /= "d"


TREES: dict[Callable[[Path], None], str] = {
    link_out: "odd is a symlink that points to an absolute path, '/etc/passwd'",
    link_up: "odd is a symlink that",
    fifo: "odd is a fifo",
    unix_socket: "odd is a socket",
    device: "odd is a device",
    no_text: r"odd\xff has a name that is not UTF-8",
    unreadable: "odd cannot be read: Permission denied",
    closed_directory: "odd cannot be read: Permission denied",
    too_deep: "lies deeper than 64 directories",
}


def start_run(renter: TestDaemon, folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [*AS_ANYBODY, *GPUNODE, "run", *FLAGS, *arguments, "--", "/bin/true"]
    return subprocess.Popen(
        command, cwd=folder, env=environment_of(renter), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_what_can_not_be_sent_or_stored_is_named_and_nothing_is_bought(house: House) -> None:
    _provider, renter, folder = house
    for place in ("closed", "below"):
        (folder / place).mkdir()
    (folder / "closed").chmod(0o555)
    (folder / "file").write_text("mine")
    (folder / "file").chmod(0o444)
    os.mkfifo(folder / "pipe")
    runs = {
        "missing: No such file": ["--input", "missing"],
        "closed is not writable": ["--output", "out:closed/out"],
        "file is not writable": ["--output", "out:file"],
        "neither a file nor a directory": ["--output", "out:pipe"],
        "is not inside the job's directory": ["--input", "below:../../etc"],
    }
    started = []
    for make, says in TREES.items():
        (tree := folder / make.__name__).mkdir()
        make(tree)
        started.append((f"{tree}/", says, start_run(renter, folder, "--input", make.__name__)))
    for says, arguments in runs.items():
        named = arguments[1].rpartition(":")[2].split("/")[0]
        started.append((named, says, start_run(renter, folder, *arguments)))
    for named, says, process in started:
        _out, err = process.communicate(timeout=60)
        told = err.decode().partition("error: ")[2]
        assert process.returncode == 125, (says, err)
        assert says in told
        assert named in told
        assert "a bug" not in told
    listed: jobs.JobsListResult = renter.call(jobs.LIST, jobs.JobsListParams())
    assert not listed.jobs


def test_a_file_that_changes_after_it_was_read_ends_its_job_and_is_named(house: House) -> None:
    provider, renter, folder = house
    (folder / "data").write_text("as it was read")
    submitted = gpunode(renter, "run", *FLAGS, "--detach", "--input", "data", "--", "/bin/true", cwd=folder)
    job = submitted.stdout.decode().strip()
    (folder / "data").write_text("as it is now")
    attached = gpunode(renter, "attach", job)
    assert attached.returncode == 125
    assert f"{folder / 'data'} is no longer what it was when the job was submitted" in attached.stderr.decode()
    entry = renter.wait_final(job)
    assert (entry.outcome, entry.cost, entry.started_at) == ("staging_failed", 0, None)
    wait_clean(provider, renter, [job])


def test_what_a_job_made_goes_beside_what_is_in_its_way_and_what_can_not_be_sent_is_named(house: House) -> None:
    provider, renter, folder = house
    (folder / "results").write_text("mine")
    script = (
        "mkdir out; echo good > out/good; ln -s /etc/passwd out/link; ln -s good out/inner; mkfifo out/fifo; "
        "printf x > \"out/$(printf '\\377')\"; ln -s /job/out/good out/absolute"
    )
    arguments = ("--output", "out:results", "--output", "never", "--", "/bin/sh", "-c", script)
    ran = gpunode(renter, "run", *FLAGS, *arguments, cwd=folder)
    assert ran.returncode == 0, ran.stderr
    assert (folder / "results").read_text() == "mine"
    beside = folder / "results.gpunode-1"
    assert sorted(path.name for path in beside.iterdir()) == ["absolute", "good", "inner"]
    assert (beside / "absolute").read_text() == (beside / "inner").read_text() == "good\n"
    entry = renter.job("-")
    for note in (
        f"out is in {beside}",
        "in out: link is a symlink that points to an absolute path",
        "in out: fifo is a fifo",
        r"in out: \xff has a name that is not UTF-8",
        "the job made no never",
    ):
        assert note in entry.detail
    fetched = gpunode(renter, "fetch", entry.job)
    assert b"never: the job made none" in fetched.stdout
    wait_clean(provider, renter, [entry.job])
