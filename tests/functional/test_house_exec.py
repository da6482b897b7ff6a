"""Other commands in a running job's sandbox, and coming back to a job: through the command, on real daemons."""

import json
import signal

import pytest
from support.daemons import Daemons, TestDaemon

from node.errors import BadArgument
from node.rpc.methods import jobs

BIG = 3_000_000
SLEEPING = "echo kept > file; echo up; sleep 600"


@pytest.fixture
def renter(daemons: Daemons) -> TestDaemon:
    provider, renter = daemons.provider(), daemons.renter()
    renter.connect(provider)
    renter.wait_offers()
    return renter


def sleeping_job(renter: TestDaemon) -> str:
    job = renter.run("/bin/sh", "-c", SLEEPING)
    renter.wait_running(job)
    renter.wait_for(lambda: renter.output(job) == b"up\n", "the job's first words")
    return job


def executed(renter: TestDaemon, job: str, *command: str) -> tuple[int | None, bytes, bytes]:
    """Run a command in the job over the RPC; return its exit status and what it wrote."""
    out = {jobs.LogStream.STDOUT: b"", jobs.LogStream.STDERR: b""}
    status = None
    with renter.client() as client:
        for piece in client.stream(jobs.EXEC, jobs.ExecParams(job=job, command=command)):
            assert status is None, "the exit status comes last"
            status = piece.exit_status
            if piece.stream is not None:
                out[piece.stream] += piece.data
    return status, out[jobs.LogStream.STDOUT], out[jobs.LogStream.STDERR]


def test_commands_run_in_a_running_jobs_sandbox(renter: TestDaemon) -> None:
    job = sleeping_job(renter)
    # The command sees the job's files, and its status and both outputs come through.
    status, out, err = renter.command("exec", job, "--", "sh", "-c", "cat file; echo no >&2; exit 7")
    assert (status, out, err) == (7, b"kept\n", b"no\n")
    # Its input is empty, whatever ours is.
    assert executed(renter, job, "cat") == (0, b"", b"")
    # Much more than fits into any buffer on the way.
    status, out, err = executed(renter, job, "head", "-c", str(BIG), "/dev/zero")
    assert (status, len(out), err) == (0, BIG, b"")
    status, out, err = renter.command("exec", "--json", job, "--", "sh", "-c", "echo said")
    assert (status, err, json.loads(out)) == (0, b"said\n", {"job": job, "exit_status": 0})
    # A program that is not there is the command's failure, not ours.
    status, _, _ = executed(renter, job, "/no/such/program")
    assert status not in (0, None)


def test_a_command_ends_with_whoever_asked_for_it(renter: TestDaemon) -> None:
    job = sleeping_job(renter)
    process = renter.start_command("exec", job, "--", "sh", "-c", "echo $$ > pid; exec sleep 600")
    renter.wait_for(lambda: executed(renter, job, "test", "-s", "pid")[0] == 0, "the command to run")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    renter.wait_for(lambda: executed(renter, job, "sh", "-c", "kill -0 $(cat pid)")[0] != 0, "the command to end")
    assert renter.job(job).state is jobs.JobState.RUNNING


def test_a_command_ends_with_its_job(renter: TestDaemon) -> None:
    job = sleeping_job(renter)
    process = renter.start_command("exec", job, "--", "sh", "-c", "echo begun > begun; exec sleep 600")
    renter.wait_for(lambda: executed(renter, job, "test", "-s", "begun")[0] == 0, "the command to run")
    renter.call(jobs.CANCEL, jobs.JobParams(job=job))
    out, err = process.communicate(timeout=30)
    assert process.returncode != 0, (out, err)
    renter.wait_final(job)
    with pytest.raises(BadArgument, match="does not run"):
        executed(renter, job, "true")
    status, _, err = renter.command("exec", job, "--", "true")
    assert status == 125
    assert f"gpunode logs {job}".encode() in err


# --- coming back --------------------------------------------------------------------------------------------

LINES = 80
COUNT = f"i=0; while [ $i -lt {LINES} ]; do echo line $i; i=$((i+1)); sleep 0.05; done; exit 5"
WHOLE = b"".join(b"line %d\n" % number for number in range(LINES))
RUN = ("run", "--yes", "--allow-simulated", "--gpus", "1", "--cpus", "1", "--memory", "256M", "--disk", "64M")


def test_who_detaches_can_attach_again_also_after_a_restart_of_the_daemon(renter: TestDaemon) -> None:
    detached = renter.start_command(*RUN, "--", "sh", "-c", COUNT)
    (job,) = renter.wait_for(lambda: renter.call(jobs.LIST, jobs.JobsListParams()).jobs, "the job")
    renter.wait_running(job.job)
    detached.send_signal(signal.SIGINT)
    _, err = detached.communicate(timeout=30)
    assert detached.returncode == 130
    assert f"gpunode attach {job.job}".encode() in err
    renter.kill()
    renter.start()
    status, out, _ = renter.command("attach", job.job)
    assert (status, out) == (5, WHOLE)
    # And again, when it is long over; "-" is the last one.
    status, out, _ = renter.command("attach", "-")
    assert (status, out) == (5, WHOLE)


def test_whoever_is_attached_goes_on_after_a_restart_of_the_daemon(renter: TestDaemon) -> None:
    attached = renter.start_command(*RUN, "--", "sh", "-c", COUNT)
    (job,) = renter.wait_for(lambda: renter.call(jobs.LIST, jobs.JobsListParams()).jobs, "the job")
    renter.wait_for(lambda: renter.output(job.job).count(b"\n") > 10, "some output")
    renter.kill()
    renter.start()
    out, err = attached.communicate(timeout=60)
    assert (attached.returncode, out) == (5, WHOLE), err
