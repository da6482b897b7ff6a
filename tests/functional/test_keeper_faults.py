"""Keepers that are killed, cut off, told to stop and not paid."""

import os
import signal
from pathlib import Path

import pytest
import trio
from support.keeper_pair import DEADLINE_S, Keeper, Pair, pair, shared_forker

from node.jobs import logs
from node.lease.files import LeaseStatus
from node.lease.link import LinkError
from protocol.machines.lease import COMPLETED, FailReason, LeasePhase
from protocol.records.offer import Terms

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="keepers of a provider run jobs under other uids")

WAITING = """
import pathlib, signal, sys, time
out = pathlib.Path("out"); out.mkdir()
def save(*_):
    (out / "checkpoint").write_text("saved"); sys.exit(3)
signal.signal(signal.SIGTERM, save)
for number in range(100_000):
    print("line", number, flush=True)
    if pathlib.Path("go").exists():
        break
    time.sleep(0.02)
(out / "result").write_text("whole")
"""
"""Writes lines until the test lets it go on."""


def waiting(marker: str = "") -> tuple[str, ...]:
    return ("python3", "-c", WAITING, marker)


def let_go(keepers: Pair) -> None:
    (keepers.provider.directory / "scratch" / "job" / "go").touch()


async def has_output(keeper: Keeper) -> LeaseStatus:
    return await keeper.wait_for(lambda status: status.stdout_size > 0 and status.voucher_number > 0)


def is_running(marker: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes():
                return True
        except OSError:
            continue
    return False


def assert_lines_without_gap(output: bytes) -> None:
    assert output == b"".join(b"line %d\n" % number for number in range(output.count(b"\n")))


async def test_renters_keeper_killed_in_running_is_taken_up_by_the_next(tmp_path: Path) -> None:
    with pair(waiting(), outputs={"out": tmp_path / "out"}) as keepers:
        await keepers.start()
        before = await has_output(keepers.renter)
        keepers.renter.kill()
        await keepers.provider.wait_for(lambda status: not status.connected)
        keepers.renter.start()
        after = await keepers.renter.wait_for(lambda status: status.stdout_size > before.stdout_size)
        assert after.generation == 2
        assert after.voucher_number >= before.voucher_number
        let_go(keepers)
        provider, renter = await keepers.finish()
        assert (provider.outcome, renter.outcome) == (COMPLETED, COMPLETED)
        assert (tmp_path / "out" / "result").read_text() == "whole"
        assert_lines_without_gap(keepers.renter.output())
        assert keepers.renter.output() == keepers.provider.output()
        assert renter.amount == provider.amount > 0


async def test_providers_keeper_killed_in_running_fails_the_lease_and_kills_the_job(tmp_path: Path) -> None:
    marker = f"marker-{os.getpid()}-{tmp_path.name}"
    with pair(waiting(marker), outputs={"out": tmp_path / "out"}) as keepers:
        await keepers.start()
        await has_output(keepers.renter)
        assert is_running(marker)
        keepers.provider.kill()
        keepers.provider.start()
        provider, renter = await keepers.finish()
        assert not is_running(marker)
        assert (provider.outcome, renter.outcome) == (FailReason.KEEPER_DIED, FailReason.KEEPER_DIED)
        assert (provider.phase, renter.phase) == (LeasePhase.COLLECTED, LeasePhase.COLLECTED)
        assert (provider.amount, renter.amount, provider.exit_status) == (0, 0, -1)
        assert provider.generation == 2


async def test_both_keepers_killed_while_results_wait_lose_nothing(tmp_path: Path) -> None:
    with pair(waiting(), outputs={"out": tmp_path / "out"}, prepay_ms=60_000) as keepers:
        await keepers.start()
        await has_output(keepers.renter)
        keepers.renter.kill()
        let_go(keepers)
        await keepers.provider.wait_for(
            lambda status: status.phase is LeasePhase.COLLECTING and bool(status.outputs)
        )
        keepers.provider.kill()
        keepers.provider.start()
        keepers.renter.start()
        provider, renter = await keepers.finish()
        assert (provider.outcome, renter.outcome) == (COMPLETED, COMPLETED)
        assert (tmp_path / "out" / "result").read_text() == "whole"
        assert keepers.renter.output() == keepers.provider.output()
        assert provider.exit_status == renter.exit_status == 0


async def test_cancelled_job_is_told_and_its_outputs_are_collected(tmp_path: Path) -> None:
    with pair(waiting(), outputs={"out": tmp_path / "out"}) as keepers:
        await keepers.start()
        await has_output(keepers.renter)
        async with keepers.renter.link() as link:
            await link.cancel(FailReason.CANCELLED, detail="no longer needed")
            with pytest.raises(LinkError, match="can't be settled yet"):
                await link.settle()
        provider, renter = await keepers.finish()
        assert (provider.outcome, renter.outcome) == (FailReason.CANCELLED, FailReason.CANCELLED)
        assert renter.exit_status == 3
        assert "no longer needed" in provider.detail
        assert (tmp_path / "out" / "checkpoint").read_text() == "saved"


async def test_job_that_ignores_its_time_limit_is_killed(tmp_path: Path) -> None:
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    )
    terms = Terms(voucher_interval_ms=200, checkpoint_ms=300)
    with pair(("python3", "-c", deaf), terms=terms, time_limit_ms=500) as keepers:
        await keepers.start()
        provider, renter = await keepers.finish()
        assert (provider.outcome, renter.outcome) == (FailReason.TIME_LIMIT, FailReason.TIME_LIMIT)
        assert (provider.job_end, renter.exit_status) == ("killed", 137)
        assert renter.metered_ms >= 800


async def test_a_gibibyte_of_log_is_bounded_on_both_sides() -> None:
    with pair(("sh", "-c", "echo first; head -c 1G /dev/zero; echo; echo last")) as keepers:
        await keepers.start()
        provider, renter = await keepers.finish()
        size = 2**30 + len("first\n\nlast\n")
        assert (provider.stdout_size, renter.stdout_size) == (size, size)
        for keeper in (keepers.provider, keepers.renter):
            output = keeper.output()
            assert output.startswith(b"first\n")
            assert output.endswith(b"\nlast\n")
            used = sum(path.stat().st_blocks * 512 for path in (keeper.directory / "log").iterdir())
            assert used <= logs.HEAD_MAX + logs.TAIL_MAX + 64 * 1024


async def test_bytes_that_are_no_text_pass_through_logs_and_are_skipped_as_names(tmp_path: Path) -> None:
    code = "import os; os.mkdir('out'); open(b'out/\\xff', 'w'); open('out/good', 'w'); os.write(1, b'\\xff\\x00')"
    with pair(("python3", "-c", code), outputs={"out": tmp_path / "out"}) as keepers:
        await keepers.start()
        provider, renter = await keepers.finish()
        assert keepers.renter.output() == b"\xff\x00"
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["good"]
        assert "\\xff has a name that is not UTF-8" in provider.detail
        assert renter.phase is LeasePhase.COLLECTED


async def test_job_that_nobody_pays_for_is_frozen_then_ended_and_its_results_kept(tmp_path: Path) -> None:
    terms = Terms(
        voucher_interval_ms=100, window_intervals=2, grace_ms=500, checkpoint_ms=5_000, retention_ms=60_000
    )
    with pair(waiting(), outputs={"out": tmp_path / "out"}, terms=terms) as keepers:
        await keepers.start()
        await has_output(keepers.renter)
        keepers.renter.kill()
        frozen = await keepers.provider.wait_phase(LeasePhase.FROZEN)
        assert frozen.amount == frozen.voucher_amount
        kept = await keepers.provider.wait_phase(LeasePhase.COLLECTING)
        assert kept.outcome == FailReason.RENTER_AWAY
        assert kept.amount == kept.voucher_amount
        assert kept.exit_status == 3
        keepers.renter.start()
        _provider, renter = await keepers.finish()
        assert renter.outcome == FailReason.RENTER_AWAY
        assert (tmp_path / "out" / "checkpoint").read_text() == "saved"


async def test_results_that_nobody_fetches_are_erased_after_their_retention(tmp_path: Path) -> None:
    terms = Terms(voucher_interval_ms=100, window_intervals=2, retention_ms=300)
    with pair(waiting(), outputs={"out": tmp_path / "out"}, terms=terms, prepay_ms=60_000) as keepers:
        await keepers.start()
        await has_output(keepers.renter)
        keepers.renter.kill()
        let_go(keepers)
        status = await keepers.provider.wait_phase(LeasePhase.FAILED)
        assert (status.outcome, status.collected) == (FailReason.RETENTION_PASSED, False)
        assert await keepers.provider.settle() == 0
        assert not (keepers.provider.directory / "scratch").exists()


async def test_shutdown_of_the_providers_machine_ends_the_job_gently(tmp_path: Path) -> None:
    with pair(waiting(), outputs={"out": tmp_path / "out"}) as keepers:
        await keepers.start()
        await has_output(keepers.renter)
        keepers.provider.signal(signal.SIGTERM)
        provider, renter = await keepers.finish()
        assert (provider.outcome, renter.outcome) == (FailReason.SHUTDOWN, FailReason.SHUTDOWN)
        assert (tmp_path / "out" / "checkpoint").read_text() == "saved"


async def test_a_second_keeper_does_not_touch_a_held_lease() -> None:
    with pair(waiting()) as keepers:
        await keepers.start()
        await has_output(keepers.renter)
        second = Keeper(keepers.provider.directory, keepers.provider.socket.with_name("x"), shared_forker())
        second.start()
        assert await second.wait_exit() == 3
        let_go(keepers)
        provider, _renter = await keepers.finish()
        assert (provider.outcome, provider.generation) == (COMPLETED, 1)


async def test_input_that_changed_ends_the_lease_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("agreed on")
    with pair(waiting(), inputs={"data": tmp_path / "in"}) as keepers:
        (tmp_path / "in").write_text("changed")
        await keepers.start()
        provider, renter = await keepers.finish()
        assert (provider.outcome, renter.outcome) == (FailReason.STAGING_FAILED, FailReason.STAGING_FAILED)
        assert "no longer what it was" in renter.detail
        assert provider.started_at == 0


async def test_output_beyond_the_disk_is_not_lost_to_a_full_renter_but_refused_by_the_provider(
    tmp_path: Path,
) -> None:
    code = "import os; os.mkdir('out'); f = open('out/sparse', 'wb'); f.truncate(2**40); f.close()"
    with pair(("python3", "-c", code), outputs={"out": tmp_path / "out"}) as keepers:
        await keepers.start()
        provider, renter = await keepers.finish()
        assert renter.outputs[0].manifest is None
        assert "more than" in provider.detail
        assert not (tmp_path / "out").exists()


async def test_command_that_is_not_there_is_the_jobs_own_failure() -> None:
    with pair(("/no/such/program",)) as keepers:
        await keepers.start()
        with trio.fail_after(DEADLINE_S):
            provider, renter = await keepers.finish()
        assert provider.exit_status == renter.exit_status
        assert renter.exit_status in (126, 127)
