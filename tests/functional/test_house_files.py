"""A job's files through the whole house: what is left out stays at home, and what the job writes comes back."""

from pathlib import Path

from support.daemons import Daemons

from node.cli.staging import IGNORE_FILE, scan_inputs
from node.cli.values import InputArgument
from node.rpc.methods import jobs


def test_what_is_ignored_is_not_sent(daemons: Daemons, tmp_path: Path) -> None:
    provider, renter = daemons.provider(), daemons.renter()
    renter.connect(provider)
    renter.wait_offers()
    work = tmp_path / "work"
    (work / "cache").mkdir(parents=True)
    (work / "cache" / "big").write_text("not to be sent")
    (work / "train.py").write_text("to be sent")
    (work / "notes.txt").write_text("not to be sent either")
    (work / IGNORE_FILE).write_text("cache/\n")
    inputs = scan_inputs([InputArgument(work, ".")], ("*.txt",))
    job = renter.run("/bin/sh", "-c", "find . -type f | sort", inputs=inputs)
    entry = renter.wait_final(job)
    assert (entry.outcome, entry.exit_status) == ("completed", 0)
    assert renter.output(job) == f"./{IGNORE_FILE}\n./train.py\n".encode()
    detail: jobs.JobDetail = renter.call(jobs.SHOW, jobs.JobParams(job=job))
    assert detail.inputs[0].ignore == ("cache/", "*.txt")
