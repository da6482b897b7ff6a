"""A lease on its renter's side, from the keeper's start to settlement.

    SIGNED ──TunnelOpened──▶ CONNECTED ──▶ then as the provider tells: STAGING, RUNNING ⇄ FROZEN, INTERRUPTING
                                                                                     │
    COLLECTING ◀── told: the job is over ────────────────────────────────────────────┘
        │ every output and both logs are here ──▶ SendCollected ──told: COLLECTED──▶ COLLECTED
        │ told: FAILED, retention passed, the provider is done before everything is here
        ▼
     FAILED ◀── the provider is away past the lease's end, or the cancelled lease was never connected
    COLLECTED, FAILED ──SettleAsked──▶ SETTLED

Rules:
- The phase follows the provider's, forwards only: a provider that tells an earlier phase breaks the protocol.
- Vouchers are cumulative, signed when the job time reaches what the last one covers, for one interval ahead and
  the prepayment; never above the cap, never lower than before, durable before they are sent.
- Our own meter bounds the provider's: job time and standstills together can't exceed the time since the job was
  last known not to run, by over 1% and over 2 s. Beyond it nothing more is signed, and the lease is cancelled.
- After the job's end one voucher for exactly its cost is signed, if the last one is below it.
- A cancellation after the job's end gives up outputs that can't be stored here; others are still collected.
- Nothing is said to be collected before every output is verified and in its place.
- A tunnel that is lost ends nothing: the job goes on, and is found again until the lease's end and its results
  until their retention's.

Refuses to know files, tunnels and private keys: effects are carried out by the keeper, after it has made the new
state durable. Transfers have no effects of their own: `wanted_input` and `wanted_output` say what is next.
"""

from collections.abc import Iterator
from typing import Any, assert_never

import msgspec

from protocol.errors import IllegalTransition
from protocol.frames import StatusTold
from protocol.machines.lease import (
    AFTER_JOB_PHASES,
    COMPLETED,
    CONNECT_MAX_MS,
    FAULTS_MAX,
    OVER_PHASES,
    FailReason,
    LeasePhase,
)
from protocol.machines.renter_lease_types import (
    CancelAsked,
    DeleteKeys,
    Effect,
    Event,
    FetchFailed,
    InputFailed,
    KeeperRestarted,
    Leave,
    LogsFetched,
    OutputFetched,
    PeerBroke,
    ProviderDone,
    RenterLease,
    SendCancel,
    SendCollected,
    SendJob,
    SendVoucher,
    SettleAsked,
    SignVoucher,
    Step,
    Ticked,
    ToldStatus,
    TunnelLost,
    TunnelOpened,
    VoucherSigned,
)

DETAIL_MAX = 1000
METER_SLACK_MS = 2_000
METER_SLACK_PERMILLE = 10
LINGER_MS = 7 * 24 * 3600 * 1000
"""How long a keeper waits for its daemon to settle a lease that is over."""

_ORDER = {
    LeasePhase.SIGNED: 0,
    LeasePhase.CONNECTED: 1,
    LeasePhase.STAGING: 2,
    LeasePhase.RUNNING: 3,
    LeasePhase.FROZEN: 3,
    LeasePhase.INTERRUPTING: 4,
    LeasePhase.COLLECTING: 5,
    LeasePhase.COLLECTED: 6,
    LeasePhase.FAILED: 6,
    LeasePhase.SETTLED: 7,
}


def step(lease: RenterLease, event: Event, now: int) -> Step:
    """Return the lease after `event` at `now`, and the effects to carry out, in order.

    Raises IllegalTransition for what only the provider (or, SettleAsked, the daemon) can have done wrong; the
    lease is then unchanged.
    """
    first = _apply(lease, event, now)
    lease, effects = _pass_time(first.lease, now)
    return Step(lease, first.effects + effects + _due_effects(lease, event, now))


def next_deadline(lease: RenterLease) -> int | None:
    """Return when `Ticked` must come at the latest, on the lease's clock; None: never."""
    times = [at for at, _change in _deadlines(lease)]
    is_due_later = lease.is_metering and _next_voucher(lease, 0, of_any_time=True) is not None
    if lease.told is not None and is_due_later:
        remaining_ms = lease.covers_ms - lease.prepay_ms - lease.told.metered_ms
        times.append(lease.told_at + max(0, remaining_ms))
    return min(times, default=None)


def wanted_input(lease: RenterLease) -> int | None:
    """Return the next input to send, or None."""
    if lease.phase is not LeasePhase.STAGING or lease.cancel or lease.told is None:
        return None
    return next((index for index in range(lease.inputs) if index not in lease.told.staged), None)


def wanted_output(lease: RenterLease) -> int | None:
    """Return the next output to fetch, or None."""
    if lease.phase is not LeasePhase.COLLECTING or lease.told is None or lease.told.outputs is None:
        return None
    waiting = (
        index
        for index, output in enumerate(lease.told.outputs)
        if output.manifest is not None and index not in lease.fetched
    )
    return next(waiting, None)


def _apply(lease: RenterLease, event: Event, now: int) -> Step:
    match event:
        case TunnelOpened(generation):
            return _tunnel_opened(lease, generation)
        case TunnelLost():
            return Step(_with(lease, is_connected=False, is_told=False, lost_at=now))
        case ToldStatus(status):
            return _told(lease, status, now)
        case VoucherSigned(data, number, amount, covers_ms):
            if number <= lease.voucher_number or amount < lease.voucher_amount or amount > lease.facts.max_spend:
                raise ValueError(f"voucher {number} for {amount} must not be signed")
            lease = _with(lease, voucher=data, voucher_number=number, voucher_amount=amount, covers_ms=covers_ms)
            return Step(lease, (SendVoucher(data),))
        case InputFailed(reason, detail):
            return _cancel(lease, reason, detail, now)
        case OutputFetched(index, manifest, detail):
            return _fetched(lease, index, manifest, detail)
        case LogsFetched():
            return Step(_with(lease, has_logs=True))
        case FetchFailed(detail):
            return Step(_with(lease, waits=detail) if lease.phase is LeasePhase.COLLECTING else lease)
        case CancelAsked(reason, detail):
            return _cancel(lease, reason, detail, now)
        case PeerBroke(detail):
            return _peer_broke(lease, detail, now)
        case ProviderDone(reason, detail):
            return _provider_done(lease, reason, detail, now)
        case KeeperRestarted():
            lease = _with(lease, is_connected=False, is_told=False, lost_at=now)
            return Step(lease, (DeleteKeys(), Leave()) if lease.phase is LeasePhase.SETTLED else ())
        case SettleAsked():
            if lease.phase not in OVER_PHASES:
                raise IllegalTransition(f"the lease is {lease.phase}: it can't be settled yet")
            return Step(_with(lease, phase=LeasePhase.SETTLED), (DeleteKeys(), Leave()))
        case Ticked():
            return Step(lease)
        case _:
            assert_never(event)


def _tunnel_opened(lease: RenterLease, generation: int) -> Step:
    if generation < lease.peer_generation:
        raise IllegalTransition(f"a keeper of generation {generation}, after {lease.peer_generation}")
    phase = LeasePhase.CONNECTED if lease.phase is LeasePhase.SIGNED else lease.phase
    lease = _with(lease, phase=phase, is_connected=True, is_told=False, peer_generation=generation)
    # What it sent before may not have arrived; every frame may be said again.
    effects: tuple[Effect, ...] = ()
    if lease.phase is LeasePhase.CONNECTED and not lease.cancel:
        effects += (SendJob(),)
    if lease.voucher:
        effects += (SendVoucher(lease.voucher),)
    if lease.cancel:
        effects += (SendCancel(lease.cancel, lease.detail),)
    return Step(lease, effects)


def _told(lease: RenterLease, status: StatusTold, now: int) -> Step:
    if lease.phase in OVER_PHASES:
        return Step(lease)
    before = lease.told
    if before is not None and _ORDER[status.phase] < _ORDER[before.phase]:
        raise IllegalTransition(f"the provider says {status.phase}, after {before.phase}")
    if before is not None and status.metered_ms < before.metered_ms and status.outcome != FailReason.KEEPER_DIED:
        raise IllegalTransition("the provider's meter runs backwards")
    if before is not None and before.outputs is not None and status.outputs != before.outputs:
        raise IllegalTransition("the provider's outputs have changed")
    if len(status.outputs or ()) > 0 and status.phase not in AFTER_JOB_PHASES:
        raise IllegalTransition("the provider lists outputs of a job that still runs")
    lease = _with(lease, told=status, told_at=now, is_told=True)
    if not status.started_at and status.phase not in AFTER_JOB_PHASES:
        lease = _with(lease, idle_at=now)
    if _is_diverged(lease, status, now):
        detail = f"the provider meters {status.metered_ms} ms, in {now - lease.idle_at} ms at most"
        return _cancel(lease, FailReason.METERS_DIVERGED, detail, now)
    return _follow(lease, status, now)


def _is_diverged(lease: RenterLease, status: StatusTold, now: int) -> bool:
    if lease.cancel == FailReason.METERS_DIVERGED or not status.metered_ms:
        return False
    bound_ms = now - lease.idle_at
    excess_ms = status.metered_ms + status.frozen_ms - bound_ms
    return excess_ms > METER_SLACK_MS and excess_ms * 1000 > bound_ms * METER_SLACK_PERMILLE


def _follow(lease: RenterLease, status: StatusTold, now: int) -> Step:
    """Take over the phase that the provider has told."""
    match status.phase:
        case LeasePhase.SIGNED | LeasePhase.CONNECTED:
            return Step(lease)
        case LeasePhase.STAGING | LeasePhase.RUNNING | LeasePhase.FROZEN | LeasePhase.INTERRUPTING:
            if lease.phase is LeasePhase.COLLECTING:
                raise IllegalTransition("the provider says that the job runs, after its end")
            detail = status.detail if status.phase is LeasePhase.INTERRUPTING else lease.detail
            return Step(_with(lease, phase=status.phase, detail=lease.detail or detail))
        case LeasePhase.COLLECTING:
            outcome = status.outcome or lease.cancel or COMPLETED
            detail = lease.detail or status.detail
            return Step(_with(lease, phase=LeasePhase.COLLECTING, outcome=outcome, detail=detail))
        case LeasePhase.COLLECTED | LeasePhase.SETTLED:
            if not _has_everything(lease):
                raise IllegalTransition("the provider says that we have collected what we have not")
            outcome = lease.outcome or status.outcome or COMPLETED
            return Step(_with(lease, phase=LeasePhase.COLLECTED, outcome=outcome, over_at=now))
        case LeasePhase.FAILED:
            return Step(_failed(lease, status.outcome or str(FailReason.PEER_FAULT), status.detail, now))
        case _:
            assert_never(status.phase)


def _failed(lease: RenterLease, outcome: str, detail: str, now: int) -> RenterLease:
    kept = lease.outcome if lease.outcome not in ("", COMPLETED) else lease.cancel
    detail = f"{detail}: {lease.waits}" if lease.waits else lease.detail or detail
    return _with(lease, phase=LeasePhase.FAILED, outcome=kept or outcome, detail=detail, waits="", over_at=now)


def _cancel(lease: RenterLease, reason: FailReason, detail: str, now: int) -> Step:
    """Want the lease to end, and ask the provider for it now or when it is there again."""
    if reason is FailReason.PROVIDER_AWAY and not lease.is_connected and lease.phase not in OVER_PHASES:
        return Step(_failed(lease, str(reason), detail, now))
    if lease.phase is LeasePhase.COLLECTING and lease.waits and reason is FailReason.CANCELLED:
        return Step(_failed(lease, str(reason), "cancelled, and the outputs given up", now))
    if lease.cancel or lease.phase in AFTER_JOB_PHASES:
        return Step(lease)
    lease = _with(lease, cancel=str(reason), detail=detail)
    return Step(lease, (SendCancel(lease.cancel, detail),) if lease.is_connected else ())


def _fetched(lease: RenterLease, index: int, manifest: bytes, detail: str) -> Step:
    outputs = () if lease.told is None else lease.told.outputs or ()
    if index >= len(outputs) or outputs[index].manifest != manifest:
        raise ValueError(f"output {index} is not what the provider has listed")
    fetched = tuple(sorted({*lease.fetched, index}))
    notes = [note for note in (detail, lease.detail) if note]
    return Step(_with(lease, fetched=fetched, waits="", detail="; ".join(notes)[:DETAIL_MAX]))


def _peer_broke(lease: RenterLease, detail: str, now: int) -> Step:
    lease = _with(lease, faults=lease.faults + 1)
    if lease.faults < FAULTS_MAX or lease.phase in OVER_PHASES:
        return Step(lease)
    return Step(_failed(lease, str(FailReason.PEER_FAULT), detail, now))


def _provider_done(lease: RenterLease, reason: FailReason, detail: str, now: int) -> Step:
    if lease.phase in OVER_PHASES:
        return Step(lease)
    if lease.phase is LeasePhase.COLLECTING and _has_everything(lease):
        # It has heard that we have collected everything; only its answer was lost.
        return Step(_with(lease, phase=LeasePhase.COLLECTED, over_at=now))
    return Step(_failed(lease, str(reason), detail, now))


def _has_everything(lease: RenterLease) -> bool:
    if lease.told is None or lease.told.outputs is None or not lease.has_logs:
        return False
    return all(
        output.manifest is None or index in lease.fetched for index, output in enumerate(lease.told.outputs)
    )


# --- vouchers -----------------------------------------------------------------------------------------------


def _next_voucher(lease: RenterLease, now: int, *, of_any_time: bool = False) -> SignVoucher | None:
    """Return the voucher to sign now, or None; with `of_any_time`, the one to sign when its time comes."""
    told = lease.told
    if told is None or not lease.is_told or lease.cancel == FailReason.METERS_DIVERGED:
        return None
    facts = lease.facts
    metered_ms = lease.metered_ms(now)
    if told.phase in AFTER_JOB_PHASES:
        covers_ms = told.metered_ms
    elif told.phase in (LeasePhase.RUNNING, LeasePhase.FROZEN, LeasePhase.INTERRUPTING):
        if not of_any_time and metered_ms < lease.covers_ms - lease.prepay_ms:
            return None
        metered_ms = max(metered_ms, lease.covers_ms - lease.prepay_ms)
        covers_ms = metered_ms + facts.terms.voucher_interval_ms + lease.prepay_ms
        if lease.time_limit_ms:  # never promise time that the job can't use
            end_ms = lease.time_limit_ms + facts.terms.checkpoint_ms
            covers_ms = min(covers_ms, max(end_ms, metered_ms))
    else:
        return None
    amount = min(facts.cost(covers_ms), facts.max_spend)
    if amount <= lease.voucher_amount:
        return None
    return SignVoucher(lease.voucher_number + 1, amount, covers_ms)


def _due_effects(lease: RenterLease, event: Event, now: int) -> tuple[Effect, ...]:
    """Return what follows from the state itself: vouchers, and saying that all is collected."""
    effects: tuple[Effect, ...] = ()
    voucher = _next_voucher(lease, now)
    if voucher is not None and not isinstance(event, VoucherSigned):
        effects += (voucher,)
    is_news = isinstance(event, (ToldStatus, OutputFetched, LogsFetched, TunnelOpened))
    is_ready = lease.phase is LeasePhase.COLLECTING and lease.is_connected and _has_everything(lease)
    if is_news and is_ready and lease.told is not None and lease.told.outputs is not None:
        effects += (SendCollected(tuple(output.manifest for output in lease.told.outputs)),)
    return effects


# --- time ---------------------------------------------------------------------------------------------------


def _pass_time(lease: RenterLease, now: int) -> tuple[RenterLease, tuple[Effect, ...]]:
    effects: tuple[Effect, ...] = ()
    while True:
        due = [(at, reason) for at, reason in _deadlines(lease) if at <= now]
        if not due:
            return lease, effects
        _at, (reason, detail) = min(due, key=lambda item: item[0])
        if reason is None:
            return _with(lease, has_left=True), (*effects, Leave())
        lease = _failed(lease, str(reason), detail, now)


def _deadlines(lease: RenterLease) -> Iterator[tuple[int, tuple[FailReason | None, str]]]:
    """Yield (when, (why the lease fails then, in words)); without a reason the keeper leaves."""
    facts = lease.facts
    match lease.phase:
        case LeasePhase.SIGNED:
            nobody = "the provider never answered"
            if lease.cancel:
                yield lease.began_at + CONNECT_MAX_MS, (FailReason(lease.cancel), nobody)
            # Past its own patience the provider has given the devices to others.
            yield lease.began_at + 2 * CONNECT_MAX_MS, (FailReason.PROVIDER_AWAY, nobody)
        case LeasePhase.COLLECTING:
            kept_until = facts.until if lease.told is None else lease.told.kept_until or facts.until
            yield (
                kept_until + facts.grace_ms,
                (
                    FailReason.COLLECTING_FAILED,
                    "the outputs could not be fetched as long as the provider kept them",
                ),
            )
        case LeasePhase.COLLECTED | LeasePhase.FAILED:
            if lease.over_at is not None and not lease.has_left:
                yield lease.over_at + LINGER_MS, (None, "")
        case LeasePhase.SETTLED:
            pass
        case _:
            away = "the provider was not heard of any more"
            if not lease.is_connected and lease.cancel:
                yield lease.lost_at + facts.grace_ms, (FailReason(lease.cancel), away)
            if not lease.is_connected and lease.phase in (LeasePhase.CONNECTED, LeasePhase.STAGING):
                # By then the provider has given up waiting for us, too.
                yield lease.lost_at + 2 * facts.grace_ms, (FailReason.PROVIDER_AWAY, away)
            # The job can have ended while the provider could not be reached, and its results be kept.
            lost = facts.until + (facts.grace_ms if lease.is_connected else facts.terms.retention_ms)
            yield lost, (FailReason.PROVIDER_AWAY, away)


def _with(lease: RenterLease, **changes: Any) -> RenterLease:  # noqa: ANN401 - any field's type
    return msgspec.structs.replace(lease, **changes)
