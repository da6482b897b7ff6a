import pytest
from support.lease_machines import INTERVAL_MS, START, TERMS, Renter

from protocol.errors import IllegalTransition
from protocol.frames import OutputTold
from protocol.machines import renter_lease
from protocol.machines import renter_lease_types as r
from protocol.machines.lease import COMPLETED, CONNECT_MAX_MS, FAULTS_MAX, FailReason, LeasePhase

OUTPUTS = (OutputTold("a", b"a" * 32, 5), OutputTold("none", None, 0), OutputTold("b", b"b" * 32, 5))
RATE = 2
"""Nano-credits each ms of job time."""


def connected(**options: object) -> Renter:
    lease = Renter(**options)  # type: ignore[arg-type]
    lease.feed(r.TunnelOpened(1))
    return lease


def running(**options: object) -> Renter:
    lease = connected(**options)
    lease.told(phase=LeasePhase.RUNNING)
    lease.told(phase=LeasePhase.RUNNING, started_at=START)
    return lease


def signed(effects: tuple[r.Effect, ...]) -> list[tuple[int, int]]:
    return [(effect.number, effect.covers_ms) for effect in effects if isinstance(effect, r.SignVoucher)]


def test_whole_lease_to_settlement() -> None:
    lease = Renter(inputs=2)
    assert lease.feed(r.TunnelOpened(1)) == (r.SendJob(),)
    lease.told(phase=LeasePhase.STAGING, has_job=True)
    assert renter_lease.wanted_input(lease.lease) == 0
    lease.told(phase=LeasePhase.STAGING, has_job=True, staged=(0,))
    assert renter_lease.wanted_input(lease.lease) == 1
    lease.told(phase=LeasePhase.RUNNING, started_at=START)
    assert renter_lease.wanted_input(lease.lease) is None
    lease.told(phase=LeasePhase.COLLECTING, metered_ms=10, exit_status=3, after_ms=10, outputs=OUTPUTS)
    assert (lease.lease.phase, lease.lease.outcome) == (LeasePhase.COLLECTING, COMPLETED)
    assert renter_lease.wanted_output(lease.lease) == 0
    assert lease.feed(r.OutputFetched(0, b"a" * 32)) == ()
    assert renter_lease.wanted_output(lease.lease) == 2
    assert lease.feed(r.LogsFetched()) == ()
    collected = r.SendCollected((b"a" * 32, None, b"b" * 32))
    assert lease.feed(r.OutputFetched(2, b"b" * 32)) == (collected,)
    lease.told(phase=LeasePhase.COLLECTED, metered_ms=10, outputs=OUTPUTS)
    assert lease.lease.phase is LeasePhase.COLLECTED
    assert lease.feed(r.SettleAsked()) == (r.DeleteKeys(), r.Leave())


def test_vouchers_run_one_interval_ahead() -> None:
    lease = connected()
    assert signed(lease.told(phase=LeasePhase.RUNNING)) == [(1, INTERVAL_MS)]
    assert signed(lease.told(phase=LeasePhase.RUNNING, started_at=START)) == []
    assert signed(lease.wait()) == [(2, 2 * INTERVAL_MS)]
    assert lease.now == START + INTERVAL_MS
    assert lease.lease.voucher_amount == 2 * INTERVAL_MS * RATE
    assert signed(lease.wait()) == [(3, 3 * INTERVAL_MS)]


def test_prepayment_runs_further_ahead_but_not_beyond_the_job() -> None:
    lease = connected(prepay_ms=60_000, time_limit_ms=3_600_000)
    assert signed(lease.told(phase=LeasePhase.RUNNING)) == [(1, INTERVAL_MS + 60_000)]
    short = connected(prepay_ms=60_000, time_limit_ms=10_000)
    assert signed(short.told(phase=LeasePhase.RUNNING)) == [(1, 10_000 + TERMS.checkpoint_ms)]


def test_cap_is_never_passed_and_asked_for_only_once() -> None:
    lease = running(max_spend=3_000)
    assert lease.lease.voucher_amount == 2_000
    lease.wait()
    assert lease.lease.voucher_amount == 3_000
    lease.feed(r.Ticked(), after_ms=500_000)
    assert (lease.lease.voucher_amount, lease.lease.voucher_number) == (3_000, 2)


def test_final_voucher_pays_exactly_what_is_owed() -> None:
    lease = running()
    lease.feed(r.TunnelLost())
    lease.feed(r.TunnelOpened(1), after_ms=7_777)
    assert signed(lease.told(phase=LeasePhase.COLLECTING, metered_ms=7_777, outputs=())) == [(2, 7_777)]
    assert lease.lease.owed() == lease.lease.voucher_amount == 7_777 * RATE


def test_nothing_more_is_signed_when_the_last_voucher_covers_it() -> None:
    lease = running()
    assert signed(lease.told(phase=LeasePhase.COLLECTING, metered_ms=300, outputs=(), after_ms=300)) == []
    assert lease.lease.owed() == 600


def test_meter_that_runs_ahead_stops_the_lease() -> None:
    lease = running()
    effects = lease.told(phase=LeasePhase.RUNNING, started_at=START, metered_ms=53_000, after_ms=50_000)
    assert [type(effect) for effect in effects] == [r.SendCancel]
    assert lease.lease.cancel == FailReason.METERS_DIVERGED
    amount = lease.lease.voucher_amount
    lease.told(phase=LeasePhase.RUNNING, started_at=START, metered_ms=90_000, after_ms=50_000)
    lease.told(phase=LeasePhase.COLLECTING, metered_ms=90_000, outputs=(), outcome="meters_diverged")
    assert lease.lease.voucher_amount == amount
    assert lease.lease.outcome == FailReason.METERS_DIVERGED


@pytest.mark.parametrize(("length_ms", "claimed_ms"), [(10_000, 11_900), (1_000_000, 1_009_000)])
def test_small_differences_of_meters_are_allowed(length_ms: int, claimed_ms: int) -> None:
    lease = running()
    lease.told(phase=LeasePhase.RUNNING, started_at=START, metered_ms=claimed_ms, after_ms=length_ms)
    assert not lease.lease.cancel


def test_standstills_count_against_the_providers_meter() -> None:
    lease = running()
    lease.told(phase=LeasePhase.RUNNING, started_at=START, metered_ms=10_000, frozen_ms=5_000, after_ms=10_000)
    assert lease.lease.cancel == FailReason.METERS_DIVERGED


def test_nothing_is_signed_without_a_tunnel_and_caught_up_on_the_next() -> None:
    lease = running()
    lease.feed(r.TunnelLost())
    assert lease.feed(r.Ticked(), after_ms=10_000) == ()
    newest = lease.lease.voucher
    assert lease.feed(r.TunnelOpened(1)) == (r.SendVoucher(newest),)
    effects = lease.told(phase=LeasePhase.RUNNING, started_at=START, metered_ms=10_000)
    assert signed(effects) == [(2, 11_000)]


def test_frozen_job_does_not_make_the_clock_spin() -> None:
    lease = running()
    lease.told(phase=LeasePhase.FROZEN, started_at=START, metered_ms=500, after_ms=500)
    deadline = renter_lease.next_deadline(lease.lease)
    assert deadline is not None
    assert deadline > lease.now + 1_000_000


def test_cancel_is_sent_now_or_on_the_next_tunnel() -> None:
    lease = running()
    assert lease.feed(r.CancelAsked(FailReason.CANCELLED, "why")) == (r.SendCancel("cancelled", "why"),)
    assert lease.feed(r.CancelAsked(FailReason.CANCELLED, "again")) == ()
    lease.feed(r.TunnelLost())
    assert r.SendCancel("cancelled", "why") in lease.feed(r.TunnelOpened(1))
    assert lease.lease.phase is LeasePhase.RUNNING


def test_cancelled_without_a_tunnel_it_is_given_up_after_the_grace() -> None:
    lease = running()
    lease.feed(r.TunnelLost())
    assert lease.feed(r.CancelAsked(FailReason.CANCELLED)) == ()
    lease.wait()
    assert (lease.lease.phase, lease.lease.outcome) == (LeasePhase.FAILED, FailReason.CANCELLED)
    assert lease.now == START + TERMS.grace_ms


def test_daemon_that_knows_the_provider_gone_ends_it_at_once() -> None:
    lease = running()
    lease.feed(r.TunnelLost())
    lease.feed(r.CancelAsked(FailReason.PROVIDER_AWAY))
    assert (lease.lease.phase, lease.lease.outcome) == (LeasePhase.FAILED, FailReason.PROVIDER_AWAY)


def test_lost_tunnel_ends_nothing_while_the_job_may_run() -> None:
    lease = running()
    lease.feed(r.TunnelLost())
    lease.wait()
    assert lease.now == START + 3_600_000 + TERMS.retention_ms
    assert (lease.lease.phase, lease.lease.outcome) == (LeasePhase.FAILED, FailReason.PROVIDER_AWAY)


def test_provider_that_never_answers_is_given_up() -> None:
    lease = Renter()
    lease.wait()
    assert (lease.now, lease.lease.outcome) == (START + 2 * CONNECT_MAX_MS, FailReason.PROVIDER_AWAY)


@pytest.mark.parametrize(
    "fields",
    [
        {"phase": LeasePhase.STAGING},
        {"phase": LeasePhase.RUNNING, "metered_ms": 99},
        {"phase": LeasePhase.COLLECTED, "metered_ms": 100},
        {"phase": LeasePhase.RUNNING, "metered_ms": 100, "outputs": OUTPUTS},
    ],
)
def test_provider_that_contradicts_itself_is_found_out(fields: dict[str, object]) -> None:
    lease = running()
    lease.told(phase=LeasePhase.RUNNING, started_at=START, metered_ms=100, after_ms=100)
    before = lease.lease
    with pytest.raises(IllegalTransition):
        lease.told(**fields)
    assert lease.lease == before


def test_job_that_is_over_never_runs_again_and_its_outputs_stay() -> None:
    lease = running()
    lease.told(phase=LeasePhase.COLLECTING, outputs=OUTPUTS)
    for fields in ({"phase": LeasePhase.RUNNING}, {"phase": LeasePhase.COLLECTING, "outputs": OUTPUTS[:1]}):
        with pytest.raises(IllegalTransition):
            lease.told(**fields)


def test_failed_fetch_is_tried_again_until_retention_has_passed() -> None:
    lease = running()
    lease.told(phase=LeasePhase.COLLECTING, outputs=OUTPUTS, kept_until=START + 50_000)
    lease.feed(r.FetchFailed("a waits: the disk is full"))
    assert renter_lease.wanted_output(lease.lease) == 0
    assert "disk is full" in lease.lease.waits
    lease.wait()
    assert lease.lease.outcome == FailReason.COLLECTING_FAILED
    assert lease.now == START + 50_000 + TERMS.grace_ms, "not the lease's end, which may be long after"


def test_failed_lease_is_taken_over_with_its_reason() -> None:
    lease = connected(inputs=1)
    lease.told(phase=LeasePhase.FAILED, outcome="sandbox_failed", detail="no bwrap")
    assert (lease.lease.phase, lease.lease.outcome, lease.lease.detail) == (
        LeasePhase.FAILED,
        FailReason.SANDBOX_FAILED,
        "no bwrap",
    )


def test_provider_that_breaks_the_protocol_again_and_again_is_given_up() -> None:
    lease = running()
    for _number in range(FAULTS_MAX):
        lease.feed(r.PeerBroke("garbage"))
    assert (lease.lease.phase, lease.lease.outcome) == (LeasePhase.FAILED, FailReason.PEER_FAULT)


def test_next_keeper_says_again_what_may_not_have_arrived() -> None:
    lease = running()
    lease.told(phase=LeasePhase.COLLECTING, outputs=())
    lease.feed(r.LogsFetched())
    lease.feed(r.KeeperRestarted())
    assert not lease.lease.is_connected
    assert r.SendCollected(()) in lease.feed(r.TunnelOpened(1))


def test_keepers_death_on_the_other_side_takes_the_meter_back() -> None:
    lease = running()
    lease.told(phase=LeasePhase.RUNNING, started_at=START, metered_ms=900, after_ms=900)
    lease.told(phase=LeasePhase.COLLECTING, outcome="keeper_died", metered_ms=0, outputs=())
    assert (lease.lease.outcome, lease.lease.owed()) == (FailReason.KEEPER_DIED, 0)


def test_older_keeper_of_the_provider_is_refused_and_settling_early_too() -> None:
    lease = connected()
    lease.feed(r.TunnelOpened(2))
    with pytest.raises(IllegalTransition):
        lease.feed(r.TunnelOpened(1))
    with pytest.raises(IllegalTransition):
        lease.feed(r.SettleAsked())


def test_a_provider_that_is_done_ends_what_it_can_not_be_asked_about() -> None:
    lease = running()
    lease.feed(r.TunnelLost())
    lease.feed(r.ProviderDone(FailReason.RENTER_AWAY, "it has closed the lease"))
    assert (lease.lease.phase, lease.lease.outcome) == (LeasePhase.FAILED, FailReason.RENTER_AWAY)
    assert lease.lease.detail == "it has closed the lease"
    lease.feed(r.ProviderDone(FailReason.PROVIDER_AWAY, "said again"))
    assert lease.lease.outcome == FailReason.RENTER_AWAY


def test_everything_that_is_here_is_collected_though_the_providers_answer_was_lost() -> None:
    lease = running()
    lease.told(phase=LeasePhase.COLLECTING, metered_ms=10, exit_status=0, after_ms=10, outputs=OUTPUTS[:1])
    lease.feed(r.FetchFailed("a waits: the disk is full"))
    assert lease.lease.waits == "a waits: the disk is full"
    lease.feed(r.OutputFetched(0, b"a" * 32))
    assert lease.lease.waits == ""
    lease.feed(r.LogsFetched())
    lease.feed(r.TunnelLost())
    lease.feed(r.ProviderDone(FailReason.RETENTION_PASSED, "it has closed the lease"))
    assert (lease.lease.phase, lease.lease.outcome) == (LeasePhase.COLLECTED, COMPLETED)
    assert lease.lease.detail == ""


def test_what_could_not_be_stored_is_why_a_lease_fails_in_the_end() -> None:
    lease = running()
    lease.told(phase=LeasePhase.COLLECTING, metered_ms=10, exit_status=0, after_ms=10, outputs=OUTPUTS[:1])
    lease.feed(r.FetchFailed("a waits: the disk is full"))
    lease.feed(r.ProviderDone(FailReason.RETENTION_PASSED, "the results are erased"))
    assert (lease.lease.phase, lease.lease.outcome) == (LeasePhase.FAILED, FailReason.RETENTION_PASSED)
    assert lease.lease.detail == "the results are erased: a waits: the disk is full"


def test_cancelling_after_the_jobs_end_gives_up_only_what_can_not_be_stored() -> None:
    lease = running()
    lease.told(phase=LeasePhase.COLLECTING, metered_ms=10, exit_status=0, after_ms=10, outputs=OUTPUTS[:1])
    lease.feed(r.CancelAsked(FailReason.CANCELLED))
    assert lease.lease.phase is LeasePhase.COLLECTING
    lease.feed(r.FetchFailed("a waits: the disk is full"))
    lease.feed(r.CancelAsked(FailReason.METERS_DIVERGED))
    assert lease.lease.phase is LeasePhase.COLLECTING
    lease.feed(r.CancelAsked(FailReason.CANCELLED))
    assert (lease.lease.phase, lease.lease.outcome) == (LeasePhase.FAILED, FailReason.CANCELLED)
    assert lease.lease.detail == "cancelled, and the outputs given up: a waits: the disk is full"


def test_notes_of_both_sides_about_outputs_are_kept() -> None:
    lease = running()
    note = "in a: x is a fifo"
    lease.told(phase=LeasePhase.COLLECTING, outputs=OUTPUTS[:1], detail=note)
    lease.feed(r.OutputFetched(0, b"a" * 32, "a is a file there: a is in a.gpunode-1"))
    assert lease.lease.detail == f"a is a file there: a is in a.gpunode-1; {note}"
