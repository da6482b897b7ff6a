import pytest
from support.lease_machines import INTERVAL_MS, START, TERMS, Key, Provider, voucher

from protocol.errors import BadSignature, BadVoucher, IllegalTransition, MalformedRecord
from protocol.frames import OutputTold
from protocol.identity import network_id
from protocol.machines import provider_lease
from protocol.machines import provider_lease_types as p
from protocol.machines.lease import COMPLETED, CONNECT_MAX_MS, FAULTS_MAX, FailReason, LeasePhase

OUTPUTS = (OutputTold("out", b"m" * 32, 5), OutputTold("none", None, 0))
MANIFESTS = (b"m" * 32, None)


def ended(lease: Provider, status: int = 0) -> Provider:
    lease.feed(p.JobEnded(status, "exited"))
    lease.feed(p.OutputsListed(OUTPUTS))
    return lease


def test_whole_lease_from_grant_to_settlement() -> None:
    lease = Provider()
    lease.feed(p.TunnelOpened(1))
    assert lease.lease.phase is LeasePhase.CONNECTED
    assert lease.feed(p.JobArrived(2, 1000)) == ()
    assert lease.feed(p.InputPlaced(1)) == ()
    assert lease.feed(p.InputPlaced(1)) == ()
    assert lease.lease.phase is LeasePhase.STAGING
    assert lease.feed(p.InputPlaced(0)) == (p.StartJob(),)
    lease.feed(p.JobStarted(), after_ms=50)
    lease.feed(p.VoucherReceived(voucher(1, 5000)))
    assert lease.feed(p.JobEnded(7, "exited"), after_ms=400) == (p.ListOutputs(),)
    lease.feed(p.OutputsListed(OUTPUTS), after_ms=100)
    assert (lease.lease.metered_ms(lease.now), lease.lease.owed(lease.now)) == (400, 800)
    assert lease.feed(p.OutputsCollected(MANIFESTS)) == (p.EraseScratch(),)
    assert (lease.lease.phase, lease.lease.outcome, lease.lease.exit_status) == (
        LeasePhase.COLLECTED,
        COMPLETED,
        7,
    )
    assert lease.feed(p.SettleAsked()) == (p.EraseScratch(), p.DeleteKeys(), p.Leave())
    assert lease.lease.phase is LeasePhase.SETTLED


def test_voucher_is_acknowledged_and_said_twice_changes_nothing() -> None:
    lease = Provider().run()
    data = voucher(1, 5000)
    assert lease.feed(p.VoucherReceived(data)) == (p.AcknowledgeVoucher(1, 5000),)
    before = lease.lease
    assert lease.feed(p.VoucherReceived(data)) == (p.AcknowledgeVoucher(1, 5000),)
    assert lease.lease == before


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (voucher(1, 6000), BadVoucher),
        (voucher(2, 4999), BadVoucher),
        (voucher(0, 6000), BadVoucher),
        (voucher(2, 10**9 + 1), BadVoucher),
        (voucher(2, 6000, key=Key(2)), BadVoucher),
        (voucher(2, 6000, lease=b"x" * 16), BadVoucher),
        (voucher(2, 6000, network=network_id("other")), BadSignature),
        (b"garbage", MalformedRecord),
    ],
)
def test_voucher_that_is_not_the_leases_next_is_refused(data: bytes, error: type[Exception]) -> None:
    lease = Provider().run()
    lease.feed(p.VoucherReceived(voucher(1, 5000)))
    before = lease.lease
    with pytest.raises(error):
        lease.feed(p.VoucherReceived(data))
    assert lease.lease == before


def test_unpaid_job_freezes_at_the_window_and_thaws_when_paid() -> None:
    lease = Provider().run()
    assert lease.wait() == (p.FreezeJob(),)
    assert lease.now == START + 3 * INTERVAL_MS
    lease.feed(p.Ticked(), after_ms=5_000)
    assert lease.lease.metered_ms(lease.now) == 3 * INTERVAL_MS
    assert lease.feed(p.VoucherReceived(voucher(1, 2 * INTERVAL_MS))) == (
        p.ThawJob(),
        p.AcknowledgeVoucher(1, 2 * INTERVAL_MS),
    )
    assert lease.lease.phase is LeasePhase.RUNNING
    lease.feed(p.Ticked(), after_ms=500)
    assert lease.lease.metered_ms(lease.now) == 3 * INTERVAL_MS + 500
    assert lease.lease.frozen_total_ms(lease.now) == 5_000


def test_voucher_that_does_not_cover_the_window_does_not_thaw() -> None:
    lease = Provider().run()
    lease.wait()
    assert lease.feed(p.VoucherReceived(voucher(1, 0))) == (p.AcknowledgeVoucher(1, 0),)
    assert lease.lease.phase is LeasePhase.FROZEN


def test_frozen_for_the_grace_it_ends_but_keeps_results() -> None:
    lease = Provider().run()
    lease.wait()
    assert lease.wait() == (p.TerminateJob(), p.ThawJob())
    assert lease.now == START + 3 * INTERVAL_MS + TERMS.grace_ms
    assert (lease.lease.phase, lease.lease.outcome) == (LeasePhase.INTERRUPTING, FailReason.RENTER_AWAY)
    ended(lease)
    assert lease.lease.phase is LeasePhase.COLLECTING
    assert lease.wait() == (p.EraseScratch(),)
    assert (lease.lease.phase, lease.lease.outcome) == (LeasePhase.FAILED, FailReason.RENTER_AWAY)


def test_free_job_is_never_frozen() -> None:
    lease = Provider(price=0).run(time_limit_ms=500_000)
    assert lease.wait() == (p.TerminateJob(),)
    assert lease.lease.outcome == FailReason.TIME_LIMIT


def test_job_does_not_run_beyond_what_may_ever_be_paid() -> None:
    lease = Provider(max_spend=10_000).run()
    lease.feed(p.VoucherReceived(voucher(1, 10_000)))
    assert lease.wait() == (p.TerminateJob(),)
    assert lease.now == START + 5_000
    assert lease.lease.outcome == FailReason.UNPAID
    ended(lease)
    assert lease.lease.owed(lease.now) == 10_000


def test_time_limit_terminates_then_kills() -> None:
    lease = Provider().run(time_limit_ms=700)
    assert lease.wait() == (p.TerminateJob(),)
    assert lease.wait() == (p.KillJob(),)
    assert lease.now == START + 700 + TERMS.checkpoint_ms
    assert provider_lease.next_deadline(lease.lease) is None
    ended(lease, 137)
    assert (lease.lease.outcome, lease.lease.metered_ms(lease.now)) == (
        FailReason.TIME_LIMIT,
        700 + TERMS.checkpoint_ms,
    )


def test_lease_end_leaves_time_for_a_checkpoint() -> None:
    lease = Provider(price=0, until=START + 60_000).run()
    assert lease.wait() == (p.TerminateJob(),)
    assert (lease.now, lease.lease.outcome) == (START + 60_000 - TERMS.checkpoint_ms, FailReason.LEASE_OVER)


@pytest.mark.parametrize(
    ("reason", "asked", "notice_ms"),
    [
        (FailReason.CANCELLED, None, TERMS.checkpoint_ms),
        (FailReason.INTERRUPTED, None, TERMS.notice_ms),
        (FailReason.INTERRUPTED, 10, 10),
    ],
)
def test_cancelled_job_gets_its_notice(reason: FailReason, asked: int | None, notice_ms: int) -> None:
    lease = Provider().run()
    assert lease.feed(p.CancelAsked(reason, "why", asked)) == (p.TerminateJob(),)
    assert lease.wait() == (p.KillJob(),)
    assert lease.now == START + notice_ms
    ended(lease)
    assert (lease.lease.outcome, lease.lease.detail) == (reason, "why")


def test_first_reason_stands_and_the_shorter_notice() -> None:
    lease = Provider().run()
    lease.feed(p.CancelAsked(FailReason.CANCELLED))
    lease.feed(p.CancelAsked(FailReason.SHUTDOWN, "", 100))
    lease.feed(p.CancelAsked(FailReason.INTERRUPTED, "", 90_000))
    assert lease.wait() == (p.KillJob(),)
    assert (lease.now, lease.lease.outcome) == (START + 100, FailReason.CANCELLED)


def test_interruption_is_refunded_as_agreed() -> None:
    terms = type(TERMS)(voucher_interval_ms=INTERVAL_MS, refund_permille=250)
    lease = Provider(terms=terms).run()
    lease.feed(p.VoucherReceived(voucher(1, 10_000)))
    lease.feed(p.CancelAsked(FailReason.INTERRUPTED), after_ms=1_000)
    ended(lease)
    assert lease.lease.owed(lease.now) == 1_500


@pytest.mark.parametrize("events", [(), (p.TunnelOpened(1),), (p.TunnelOpened(1), p.JobArrived(1, 0))])
def test_cancelled_before_it_ran_it_fails_at_once(events: tuple[p.Event, ...]) -> None:
    lease = Provider()
    for event in events:
        lease.feed(event)
    assert lease.feed(p.CancelAsked(FailReason.CANCELLED)) == (p.EraseScratch(),)
    assert (lease.lease.phase, lease.lease.outcome) == (LeasePhase.FAILED, FailReason.CANCELLED)
    assert lease.feed(p.JobArrived(0, 0)) == ()


def test_cancelled_while_it_starts_it_is_killed_when_it_has() -> None:
    lease = Provider()
    lease.feed(p.TunnelOpened(1))
    assert lease.feed(p.JobArrived(0, 0)) == (p.StartJob(),)
    lease.feed(p.CancelAsked(FailReason.CANCELLED))
    assert lease.feed(p.JobStarted()) == (p.KillJob(),)
    ended(lease, 137)
    assert lease.lease.phase is LeasePhase.COLLECTING


def test_renter_that_never_connects_or_stops_staging_loses_the_devices() -> None:
    lease = Provider()
    assert lease.wait() == (p.EraseScratch(),)
    assert (lease.now, lease.lease.outcome) == (START + CONNECT_MAX_MS, FailReason.RENTER_AWAY)
    lease = Provider()
    lease.feed(p.TunnelOpened(1))
    lease.feed(p.JobArrived(1, 0))
    lease.feed(p.StagingMoved(), after_ms=15_000)
    assert lease.wait() == (p.EraseScratch(),)
    assert (lease.now, lease.lease.outcome) == (START + 15_000 + TERMS.grace_ms, FailReason.RENTER_AWAY)


def test_results_are_kept_for_retention_then_erased() -> None:
    lease = ended(Provider().run())
    assert lease.lease.kept_until == START + TERMS.retention_ms
    assert lease.feed(p.Ticked(), after_ms=TERMS.retention_ms - 1) == ()
    assert lease.wait() == (p.EraseScratch(),)
    assert (lease.lease.phase, lease.lease.outcome) == (LeasePhase.FAILED, FailReason.RETENTION_PASSED)


def test_retention_without_results_leaves_the_outcome() -> None:
    lease = Provider().run()
    lease.feed(p.JobEnded(0, "exited"))
    lease.feed(p.OutputsListed(()))
    lease.wait()
    assert (lease.lease.phase, lease.lease.outcome) == (LeasePhase.FAILED, COMPLETED)


@pytest.mark.parametrize("manifests", [(), (b"x" * 32, None), (b"m" * 32,), (None, None)])
def test_collecting_something_else_is_refused(manifests: tuple[bytes | None, ...]) -> None:
    lease = ended(Provider().run())
    with pytest.raises(IllegalTransition):
        lease.feed(p.OutputsCollected(manifests))
    assert lease.lease.phase is LeasePhase.COLLECTING


def test_collected_before_outputs_are_listed_or_while_running_is_refused() -> None:
    lease = Provider().run()
    with pytest.raises(IllegalTransition):
        lease.feed(p.OutputsCollected(()))
    lease.feed(p.JobEnded(0, "exited"))
    with pytest.raises(IllegalTransition):
        lease.feed(p.OutputsCollected(()))


def test_keepers_death_while_running_refunds_and_keeps_results() -> None:
    lease = Provider().run()
    lease.feed(p.VoucherReceived(voucher(1, 5000)), after_ms=900)
    assert lease.feed(p.KeeperRestarted(), after_ms=5_000) == (p.ListOutputs(),)
    assert (lease.lease.phase, lease.lease.outcome) == (LeasePhase.COLLECTING, FailReason.KEEPER_DIED)
    assert lease.lease.owed(lease.now) == 0


def test_keepers_death_otherwise_resumes() -> None:
    lease = Provider()
    lease.feed(p.TunnelOpened(1))
    lease.feed(p.JobArrived(1, 0))
    assert lease.feed(p.KeeperRestarted()) == ()
    assert lease.lease.phase is LeasePhase.STAGING
    collecting = ended(Provider().run())
    assert collecting.feed(p.KeeperRestarted()) == (p.ListOutputs(),)
    collecting.feed(p.OutputsCollected(MANIFESTS))
    assert collecting.feed(p.KeeperRestarted()) == (p.EraseScratch(),)


def test_older_keeper_of_the_renter_is_refused() -> None:
    lease = Provider()
    lease.feed(p.TunnelOpened(3))
    lease.feed(p.TunnelLost())
    with pytest.raises(IllegalTransition):
        lease.feed(p.TunnelOpened(2))
    lease.feed(p.TunnelOpened(3))


def test_renter_that_breaks_the_protocol_again_and_again_is_given_up() -> None:
    lease = Provider().run()
    for _number in range(FAULTS_MAX - 1):
        assert lease.feed(p.PeerBroke("garbage")) == ()
    assert lease.feed(p.PeerBroke("garbage")) == (p.TerminateJob(),)
    assert lease.lease.outcome == FailReason.PEER_FAULT


def test_suspended_machine_does_not_bill() -> None:
    lease = Provider(price=0).run()
    lease.feed(p.SuspendSeen(9_000), after_ms=10_000)
    assert lease.lease.metered_ms(lease.now) == 1_000


def test_sandbox_that_does_not_start_fails_the_lease() -> None:
    lease = Provider()
    lease.feed(p.TunnelOpened(1))
    lease.feed(p.JobArrived(0, 0))
    assert lease.feed(p.SandboxFailed("no bwrap")) == (p.EraseScratch(),)
    assert (lease.lease.outcome, lease.lease.detail) == (FailReason.SANDBOX_FAILED, "no bwrap")


def test_settling_early_is_refused_and_late_daemons_are_not_waited_for_for_ever() -> None:
    lease = ended(Provider().run())
    with pytest.raises(IllegalTransition):
        lease.feed(p.SettleAsked())
    lease.feed(p.OutputsCollected(MANIFESTS))
    assert lease.wait() == (p.Leave(),)
    assert provider_lease.next_deadline(lease.lease) is None
