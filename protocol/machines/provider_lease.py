"""A lease on its provider's side, from the keeper's start to settlement.

    SIGNED ──TunnelOpened──▶ CONNECTED ──JobArrived──▶ STAGING ──all inputs placed──▶ RUNNING ⇄ FROZEN
                                                                                        │  │      │
           CancelAsked, a limit, the lease's end, grace in FROZEN passed ───────────────┼──▼──────▼
                                                                                        │ INTERRUPTING
                                                                          JobEnded ─────▼──────▼
                                                                                     COLLECTING
                                                OutputsCollected ──▶ COLLECTED   │  retention passed ──▶ FAILED
    CONNECTED, STAGING ──CancelAsked, an input fails, the renter is away──▶ FAILED
    COLLECTED, FAILED ──SettleAsked──▶ SETTLED

Rules:
- Job time runs from the job's start to its end, without the time that it was frozen or the machine suspended.
- What is owed is its cost, at most the highest voucher. A voucher is stored (the shell persists the state) before
  it is acknowledged; one that decreases, passes the cap, or is of another lease or key is BadVoucher.
- The job is frozen when unpaid job time exceeds the window, thawed by a voucher that covers it, and ended when
  it was frozen for the grace. What no voucher may ever pay for (the cap) does not run at all.
- The first reason to end a lease is its outcome (a keeper's death, which refunds all, comes before any). A job
  that has ended never runs again: no transition leads back, and a keeper that finds RUNNING fails the lease.
- Results are erased after the renter has said that it verified them, or after retention, never before.

Refuses to know processes, files and tunnels: effects are carried out by the keeper, after it has made the new
state durable.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, assert_never

import msgspec

from protocol.envelope import open_as_untrusted
from protocol.errors import BadVoucher, IllegalTransition
from protocol.identity import NetworkId
from protocol.machines.lease import (
    COMPLETED,
    CONNECT_MAX_MS,
    FAULTS_MAX,
    OVER_PHASES,
    FailReason,
    LeasePhase,
)
from protocol.machines.provider_lease_types import (
    AcknowledgeVoucher,
    CancelAsked,
    DeleteKeys,
    Effect,
    EraseScratch,
    Event,
    FreezeJob,
    InputFailed,
    InputPlaced,
    JobArrived,
    JobEnded,
    JobStarted,
    KeeperRestarted,
    KillJob,
    Leave,
    ListOutputs,
    OutputsCollected,
    OutputsListed,
    PeerBroke,
    ProviderLease,
    SandboxFailed,
    SettleAsked,
    StagingMoved,
    StartJob,
    Step,
    SuspendSeen,
    TerminateJob,
    ThawJob,
    Ticked,
    TunnelLost,
    TunnelOpened,
    VoucherReceived,
)
from protocol.records.money import Voucher

LINGER_MS = 7 * 24 * 3600 * 1000
"""How long a keeper waits for its daemon to settle a lease that is over."""

# --- transitions --------------------------------------------------------------------------------------------

_BEFORE_JOB = (LeasePhase.SIGNED, LeasePhase.CONNECTED, LeasePhase.STAGING)


def step(lease: ProviderLease, event: Event, now: int) -> Step:
    """Return the lease after `event` at `now`, and the effects to carry out, in order.

    Raises BadVoucher and IllegalTransition for what only a peer (or, SettleAsked, the daemon) can have done
    wrong; the lease is then unchanged.
    """
    first = _apply(lease, event, now)
    due = _pass_time(first.lease, now)
    return Step(due.lease, first.effects + due.effects)


def next_deadline(lease: ProviderLease) -> int | None:
    """Return when `Ticked` must come at the latest, on the lease's clock; None: never."""
    return min((at for at, _step in _deadlines(lease)), default=None)


def _apply(lease: ProviderLease, event: Event, now: int) -> Step:
    match event:
        case TunnelOpened(generation):
            return _tunnel_opened(lease, generation, now)
        case TunnelLost():
            return Step(_with(lease, is_connected=False, heard_at=now))
        case JobArrived(inputs, time_limit_ms):
            return _job_arrived(lease, inputs, time_limit_ms, now)
        case StagingMoved():
            return Step(_with(lease, heard_at=now))
        case InputPlaced(index):
            return _input_placed(lease, index, now)
        case InputFailed(reason, detail):
            return _fail(lease, reason, detail, now) if lease.phase is LeasePhase.STAGING else Step(lease)
        case JobStarted():
            return _job_started(lease, now)
        case SandboxFailed(detail):
            return _fail(lease, FailReason.SANDBOX_FAILED, detail, now)
        case JobEnded(status, how):
            return _job_ended(lease, status, how, now)
        case SuspendSeen(length_ms):
            is_metered = lease.phase in (LeasePhase.RUNNING, LeasePhase.INTERRUPTING) and lease.started_at
            return Step(_with(lease, frozen_ms=lease.frozen_ms + length_ms) if is_metered else lease)
        case VoucherReceived(data):
            return _voucher_received(lease, data, now)
        case CancelAsked(reason, detail, notice_ms):
            return _interrupt(lease, reason, detail, now, notice_ms)
        case OutputsListed(outputs, detail):
            if lease.phase is not LeasePhase.COLLECTING:
                return Step(lease)
            return Step(_with(lease, outputs=outputs, detail=lease.detail or detail))
        case OutputsCollected(manifests):
            return _collected(lease, manifests, now)
        case PeerBroke(detail):
            lease = _with(lease, faults=lease.faults + 1)
            if lease.faults < FAULTS_MAX:
                return Step(lease)
            return _interrupt(lease, FailReason.PEER_FAULT, detail, now, None)
        case KeeperRestarted():
            return _restarted(lease, now)
        case SettleAsked():
            return _settle(lease)
        case Ticked():
            return Step(lease)
        case _:
            assert_never(event)


def _tunnel_opened(lease: ProviderLease, generation: int, now: int) -> Step:
    if generation < lease.peer_generation:
        raise IllegalTransition(f"a keeper of generation {generation}, after {lease.peer_generation}")
    phase = LeasePhase.CONNECTED if lease.phase is LeasePhase.SIGNED else lease.phase
    return Step(_with(lease, phase=phase, is_connected=True, peer_generation=generation, heard_at=now))


def _job_arrived(lease: ProviderLease, inputs: int, time_limit_ms: int, now: int) -> Step:
    if lease.phase is not LeasePhase.CONNECTED:
        return Step(lease)  # said again after a reconnection
    lease = _with(lease, phase=LeasePhase.STAGING, inputs=inputs, time_limit_ms=time_limit_ms, heard_at=now)
    return _start_if_staged(lease)


def _input_placed(lease: ProviderLease, index: int, now: int) -> Step:
    if lease.phase is not LeasePhase.STAGING or index in lease.staged:
        return Step(lease)
    return _start_if_staged(_with(lease, staged=tuple(sorted((*lease.staged, index))), heard_at=now))


def _start_if_staged(lease: ProviderLease) -> Step:
    if lease.inputs is None or len(lease.staged) < lease.inputs:
        return Step(lease)
    # RUNNING before it runs: a keeper that dies in between must not start the job a second time.
    return Step(_with(lease, phase=LeasePhase.RUNNING), (StartJob(),))


def _job_started(lease: ProviderLease, now: int) -> Step:
    if lease.phase is LeasePhase.RUNNING:
        return Step(_with(lease, started_at=now))
    if lease.phase is LeasePhase.INTERRUPTING:  # cancelled while it was being started
        return Step(_with(lease, started_at=now, was_killed=True), (KillJob(),))
    return Step(lease, (KillJob(),))


def _job_ended(lease: ProviderLease, status: int, how: str, now: int) -> Step:
    if lease.phase not in (LeasePhase.RUNNING, LeasePhase.FROZEN, LeasePhase.INTERRUPTING):
        return Step(lease)
    lease = _with(
        lease,
        phase=LeasePhase.COLLECTING,
        outcome=lease.outcome or COMPLETED,
        ended_at=now,
        frozen_ms=lease.frozen_total_ms(now),
        frozen_at=None,
        kill_at=None,
        exit_status=status,
        job_end=how,
    )
    return Step(lease, (ListOutputs(),))


def _voucher_received(lease: ProviderLease, data: bytes, now: int) -> Step:
    facts = lease.facts
    sealed = open_as_untrusted(data, Voucher, NetworkId(facts.network))
    voucher = sealed.record
    if sealed.signer != facts.voucher_key:
        raise BadVoucher("it is signed by another key than the lease's")
    if voucher.lease != facts.lease:
        raise BadVoucher("it belongs to another lease")
    if voucher.amount > facts.max_spend:
        raise BadVoucher(f"it promises {voucher.amount}, above the cap of {facts.max_spend}")
    acknowledgement = AcknowledgeVoucher(voucher.number, voucher.amount)
    if data == lease.voucher:
        return Step(lease, (acknowledgement,))
    if voucher.number <= lease.voucher_number or voucher.amount < lease.voucher_amount:
        raise BadVoucher(
            f"number {voucher.number} for {voucher.amount} comes after {lease.voucher_number} for "
            f"{lease.voucher_amount}"
        )
    if lease.phase is LeasePhase.SETTLED:
        raise IllegalTransition("the lease is settled")
    lease = _with(lease, voucher=data, voucher_number=voucher.number, voucher_amount=voucher.amount)
    if lease.phase is LeasePhase.FROZEN and not _is_unpaid(lease, now):
        thawed = _thawed(lease, now)
        return Step(_with(thawed, phase=LeasePhase.RUNNING), (ThawJob(), acknowledgement))
    return Step(lease, (acknowledgement,))


def _is_unpaid(lease: ProviderLease, now: int) -> bool:
    bound = _unpaid_bound_ms(lease)
    return bound is not None and lease.metered_ms(now) >= bound


def _unpaid_bound_ms(lease: ProviderLease) -> int | None:
    """Return the job time at which the vouchers lag by the window; None: never."""
    paid_ms = lease.facts.paid_ms(lease.voucher_amount)
    terms = lease.facts.terms
    return None if paid_ms is None else paid_ms + terms.window_intervals * terms.voucher_interval_ms


def _thawed(lease: ProviderLease, now: int) -> ProviderLease:
    return _with(lease, frozen_ms=lease.frozen_total_ms(now), frozen_at=None)


def _interrupt(lease: ProviderLease, reason: FailReason, detail: str, now: int, notice_ms: int | None) -> Step:
    """End the lease's job for `reason`, which is the outcome unless there is one already."""
    if lease.phase in _BEFORE_JOB:
        return _fail(lease, reason, detail, now)
    notice = _notice_ms(lease, reason) if notice_ms is None else notice_ms
    if lease.phase is LeasePhase.INTERRUPTING and lease.kill_at is not None:
        return Step(_with(lease, kill_at=min(lease.kill_at, now + notice)))
    if lease.phase not in (LeasePhase.RUNNING, LeasePhase.FROZEN):
        return Step(lease)
    effects: tuple[Effect, ...] = (TerminateJob(),)
    if lease.frozen_at is not None:
        lease = _thawed(lease, now)
        # The signal first: it is there when the job goes on.
        effects = (TerminateJob(), ThawJob())
    return Step(
        _with(lease, phase=LeasePhase.INTERRUPTING, outcome=str(reason), detail=detail, kill_at=now + notice),
        effects,
    )


def _notice_ms(lease: ProviderLease, reason: FailReason) -> int:
    terms = lease.facts.terms
    return terms.notice_ms if reason is FailReason.INTERRUPTED else terms.checkpoint_ms


def _fail(lease: ProviderLease, reason: FailReason, detail: str, now: int) -> Step:
    """End a lease of which nothing runs, and whose files nobody waits for."""
    if lease.phase in OVER_PHASES:
        return Step(lease)
    outcome = lease.outcome if lease.outcome not in ("", COMPLETED) else str(reason)
    lease = _with(
        lease, phase=LeasePhase.FAILED, outcome=outcome, detail=lease.detail or detail, over_at=now, kill_at=None
    )
    return Step(lease, (EraseScratch(),))


def _collected(lease: ProviderLease, manifests: tuple[bytes | None, ...], now: int) -> Step:
    listed = None if lease.outputs is None else tuple(output.manifest for output in lease.outputs)
    if lease.phase is LeasePhase.COLLECTED and manifests == listed:
        return Step(lease)
    if lease.phase is not LeasePhase.COLLECTING or manifests != listed:
        raise IllegalTransition("the renter says it collected what this lease does not have")
    return Step(_with(lease, phase=LeasePhase.COLLECTED, over_at=now), (EraseScratch(),))


def _restarted(lease: ProviderLease, now: int) -> Step:
    lease = _with(lease, is_connected=False, heard_at=now)
    if lease.phase in (LeasePhase.RUNNING, LeasePhase.FROZEN, LeasePhase.INTERRUPTING):
        # The provider's own fault: nothing is billed. The job's files may still be worth having.
        detail = "the keeper died while the job ran, and the job was killed"
        all_of_it = 0 if lease.started_at is None else now - lease.started_at
        lease = _with(lease, outcome=str(FailReason.KEEPER_DIED), detail=detail, frozen_at=None)
        return _job_ended(_with(lease, frozen_ms=all_of_it), -1, "killed", now)
    if lease.phase is LeasePhase.COLLECTING:
        return Step(lease, (ListOutputs(),))
    if lease.phase in (LeasePhase.COLLECTED, LeasePhase.FAILED):
        return Step(lease, (EraseScratch(),))
    if lease.phase is LeasePhase.SETTLED:
        return Step(lease, (EraseScratch(), DeleteKeys(), Leave()))
    return Step(lease)


def _settle(lease: ProviderLease) -> Step:
    if lease.phase not in OVER_PHASES:
        raise IllegalTransition(f"the lease is {lease.phase}: it can't be settled yet")
    return Step(_with(lease, phase=LeasePhase.SETTLED), (EraseScratch(), DeleteKeys(), Leave()))


# --- time ---------------------------------------------------------------------------------------------------


def _pass_time(lease: ProviderLease, now: int) -> Step:
    """Carry out every deadline that has come, the earliest first."""
    effects: tuple[Effect, ...] = ()
    while True:
        due = [(at, step) for at, step in _deadlines(lease) if at <= now]
        if not due:
            return Step(lease, effects)
        after = min(due, key=lambda item: item[0])[1](lease, now)
        lease, effects = after.lease, effects + after.effects


_DeadlineStep: TypeAlias = Callable[[ProviderLease, int], Step]


def _deadlines(lease: ProviderLease) -> Iterator[tuple[int, _DeadlineStep]]:
    """Yield (when, what happens then) for all that waits; of two at the same time the first counts."""
    facts = lease.facts
    match lease.phase:
        case LeasePhase.SIGNED:
            yield lease.began_at + CONNECT_MAX_MS, _ended_by(FailReason.RENTER_AWAY, "the renter never connected")
            yield facts.until, _ended_by(FailReason.LEASE_OVER)
        case LeasePhase.CONNECTED | LeasePhase.STAGING:
            away = "nothing came from the renter any more"
            yield lease.heard_at + facts.grace_ms, _ended_by(FailReason.RENTER_AWAY, away)
            yield facts.until, _ended_by(FailReason.LEASE_OVER)
        case LeasePhase.RUNNING:
            yield facts.until - facts.terms.checkpoint_ms, _ended_by(FailReason.LEASE_OVER)
            yield from _running_deadlines(lease)
        case LeasePhase.FROZEN:
            yield facts.until - facts.terms.checkpoint_ms, _ended_by(FailReason.LEASE_OVER)
            if lease.frozen_at is not None:
                unpaid = "no voucher came for longer than the grace"
                yield lease.frozen_at + facts.terms.grace_ms, _ended_by(FailReason.RENTER_AWAY, unpaid)
        case LeasePhase.INTERRUPTING:
            if lease.kill_at is not None and not lease.was_killed:
                yield lease.kill_at, lambda lease, _now: Step(_with(lease, was_killed=True), (KillJob(),))
        case LeasePhase.COLLECTING:
            if lease.kept_until is not None:
                yield lease.kept_until, _retention_passed
        case LeasePhase.COLLECTED | LeasePhase.FAILED:
            if lease.over_at is not None and not lease.has_left:
                yield lease.over_at + LINGER_MS, lambda lease, _now: Step(_with(lease, has_left=True), (Leave(),))
        case LeasePhase.SETTLED:
            pass
        case _:
            assert_never(lease.phase)


def _running_deadlines(lease: ProviderLease) -> Iterator[tuple[int, _DeadlineStep]]:
    if lease.started_at is None:
        return
    meter_zero = lease.started_at + lease.frozen_ms
    if lease.time_limit_ms:
        yield meter_zero + lease.time_limit_ms, _ended_by(FailReason.TIME_LIMIT, "the job passed its time limit")
    cap_ms = lease.facts.paid_ms(lease.facts.max_spend)
    if cap_ms is not None:
        spent = "what the renter wanted to spend at most is spent"
        yield meter_zero + cap_ms, _ended_by(FailReason.UNPAID, spent)
    unpaid_ms = _unpaid_bound_ms(lease)
    if unpaid_ms is not None:
        yield meter_zero + unpaid_ms, _freeze


def _ended_by(reason: FailReason, detail: str = "") -> _DeadlineStep:
    return lambda lease, now: _interrupt(lease, reason, detail, now, None)


def _freeze(lease: ProviderLease, now: int) -> Step:
    return Step(_with(lease, phase=LeasePhase.FROZEN, frozen_at=now), (FreezeJob(),))


def _retention_passed(lease: ProviderLease, now: int) -> Step:
    has_results = any(output.manifest is not None for output in lease.outputs or ())
    if lease.outcome == COMPLETED and not has_results:
        return Step(_with(lease, phase=LeasePhase.FAILED, over_at=now), (EraseScratch(),))
    return _fail(lease, FailReason.RETENTION_PASSED, "the outputs were not fetched in time, and are erased", now)


def _with(lease: ProviderLease, **changes: Any) -> ProviderLease:  # noqa: ANN401 - any field's type
    return msgspec.structs.replace(lease, **changes)
