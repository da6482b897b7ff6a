"""Both machines against each other and against nonsense: what must hold whatever happens, in whatever order."""

import contextlib

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lease_machines import START, Provider, Renter, voucher

from protocol import codec
from protocol.errors import ProtocolError
from protocol.frames import OutputTold, StatusTold
from protocol.machines import provider_lease_types as p
from protocol.machines import renter_lease_types as r
from protocol.machines.lease import AFTER_JOB_PHASES, JOB_PHASES, OVER_PHASES, FailReason, LeasePhase

MANIFEST = b"m" * 32
TIMES = st.integers(0, 30_000)
VOUCHERS = [voucher(number, number * 2_500) for number in range(6)]

PROVIDER_EVENTS = st.sampled_from(
    [
        p.TunnelOpened(1),
        p.TunnelLost(),
        p.JobArrived(0, 20_000),
        p.JobArrived(1, 20_000),
        p.InputPlaced(0),
        p.InputFailed(FailReason.DISK_FULL, ""),
        p.JobStarted(),
        p.SandboxFailed(""),
        p.JobEnded(0, "exited"),
        p.SuspendSeen(3_000),
        p.CancelAsked(FailReason.CANCELLED),
        p.CancelAsked(FailReason.INTERRUPTED, "", 0),
        p.OutputsListed((OutputTold("o", MANIFEST, 1),)),
        p.OutputsCollected((MANIFEST,)),
        p.PeerBroke(""),
        p.KeeperRestarted(),
        p.SettleAsked(),
        p.Ticked(),
        *[p.VoucherReceived(data) for data in VOUCHERS],
    ]
)


@settings(max_examples=150)
@given(st.lists(st.tuples(PROVIDER_EVENTS, TIMES), max_size=25), st.integers(0, 12_000))
def test_provider_holds_its_rules_whatever_comes(events: list[tuple[p.Event, int]], max_spend: int) -> None:
    lease = Provider(max_spend=max_spend)
    for event, after_ms in events:
        before = lease.lease
        with contextlib.suppress(ProtocolError):
            lease.feed(event, after_ms)
        check_provider(before, lease.lease, lease.now)
        # What is durable is all that there is.
        assert codec.decode_untrusted(codec.encode(lease.lease), p.ProviderLease) == lease.lease
    starts = lease.effects.count(p.StartJob())
    assert starts <= 1


def check_provider(before: p.ProviderLease, after: p.ProviderLease, now: int) -> None:
    assert after.voucher_amount >= before.voucher_amount
    assert after.voucher_number >= before.voucher_number
    assert after.voucher_amount <= after.facts.max_spend
    assert 0 <= after.owed(now) <= after.voucher_amount
    if before.phase in AFTER_JOB_PHASES:
        assert after.phase in AFTER_JOB_PHASES
        assert after.metered_ms(now) == after.metered_ms(now + 10_000)
    if before.phase in OVER_PHASES:
        assert after.phase in (before.phase, LeasePhase.SETTLED)
        assert after.outcome == before.outcome
    if after.phase in AFTER_JOB_PHASES:
        assert after.outcome
    assert (after.frozen_at is not None) == (after.phase is LeasePhase.FROZEN)
    if after.phase is LeasePhase.COLLECTED:
        assert after.outputs is not None
    if after.started_at is not None:
        end = now if after.ended_at is None else after.ended_at
        assert after.metered_ms(now) <= max(0, end - after.started_at)


PHASES = st.sampled_from(LeasePhase)
STATUSES = st.builds(
    StatusTold,
    phase=PHASES,
    started_at=st.sampled_from([0, START]),
    metered_ms=st.integers(0, 100_000),
    frozen_ms=st.integers(0, 1_000),
    staged=st.sampled_from([(), (0,)]),
    outputs=st.sampled_from([None, (), (OutputTold("o", MANIFEST, 1),)]),
    outcome=st.sampled_from(["", "completed", "cancelled", "keeper_died"]),
)
RENTER_EVENTS = st.one_of(
    st.builds(r.ToldStatus, STATUSES),
    st.sampled_from(
        [
            r.TunnelOpened(1),
            r.TunnelLost(),
            r.InputFailed(FailReason.DISK_FULL, ""),
            r.LogsFetched(),
            r.FetchFailed(""),
            r.CancelAsked(FailReason.CANCELLED),
            r.CancelAsked(FailReason.PROVIDER_AWAY),
            r.PeerBroke(""),
            r.ProviderDone(FailReason.RENTER_AWAY),
            r.KeeperRestarted(),
            r.SettleAsked(),
            r.Ticked(),
        ]
    ),
)


@settings(max_examples=150)
@given(
    st.lists(st.tuples(RENTER_EVENTS, TIMES), max_size=25), st.integers(0, 100_000), st.sampled_from([0, 40_000])
)
def test_renter_holds_its_rules_whatever_it_is_told(
    events: list[tuple[r.Event, int]], max_spend: int, prepay_ms: int
) -> None:
    lease = Renter(max_spend=max_spend, prepay_ms=prepay_ms, inputs=1)
    for event, after_ms in events:
        before = lease.lease
        with contextlib.suppress(ProtocolError):
            lease.feed(event, after_ms)
        after = lease.lease
        assert before.voucher_amount <= after.voucher_amount <= max_spend
        assert before.voucher_number <= after.voucher_number
        assert 0 <= after.owed() <= after.voucher_amount
        # A voucher promises no more than what our own clock allows, its slack, an interval and the prepayment.
        elapsed_ms = lease.now - START
        allowed_ms = elapsed_ms + max(2_000, elapsed_ms // 100) + 1_000 + prepay_ms + 1
        assert after.voucher_amount <= after.facts.cost(allowed_ms)
        if before.phase in OVER_PHASES:
            assert after.phase in (before.phase, LeasePhase.SETTLED)
        if before.phase in AFTER_JOB_PHASES:
            assert after.phase in AFTER_JOB_PHASES
        assert codec.decode_untrusted(codec.encode(after), r.RenterLease) == after
        for effect in lease.effects:
            if isinstance(effect, r.SendCollected):
                assert after.has_logs


class Network:
    """Both machines, joined: what the keepers do, without processes."""

    def __init__(self, **changes: int) -> None:
        self.provider = Provider(**changes)
        self.renter = Renter(**changes)
        self.is_up = False
        self.is_running = False
        self.has_log = False

    def pass_time(self, ms: int) -> None:
        """Let time pass in small steps, each side hearing of its deadlines."""
        for _step in range(max(1, ms // 100)):
            self.provider.now += min(ms, 100)
            self.renter.now = self.provider.now
            self.to_provider(p.Ticked())
            self.to_renter(r.Ticked())
            self.tell()

    def to_provider(self, event: p.Event) -> None:
        for effect in self.provider.feed(event):
            match effect:
                case p.StartJob():
                    self.is_running = True
                    self.to_provider(p.JobStarted())
                case p.KillJob():
                    self.end_job()
                case p.ListOutputs():
                    self.to_provider(p.OutputsListed((OutputTold("o", MANIFEST, 1),)))
                case _:
                    pass

    def to_renter(self, event: r.Event) -> None:
        for effect in self.renter.feed(event):
            if not self.is_up:
                continue
            match effect:
                case r.SendJob():
                    self.to_provider(p.JobArrived(0, 20_000))
                case r.SendVoucher(data):
                    self.to_provider(p.VoucherReceived(data))
                case r.SendCancel():
                    self.to_provider(p.CancelAsked(FailReason.CANCELLED))
                case r.SendCollected(manifests):
                    self.to_provider(p.OutputsCollected(manifests))
                case _:
                    pass

    def end_job(self) -> None:
        if self.is_running:
            self.is_running = False
            self.to_provider(p.JobEnded(0, "exited"))

    def connect(self) -> None:
        if not self.is_up:
            self.is_up = True
            self.to_provider(p.TunnelOpened(1))
            self.to_renter(r.TunnelOpened(1))
            self.tell()

    def cut(self) -> None:
        if self.is_up:
            self.is_up = False
            self.to_provider(p.TunnelLost())
            self.to_renter(r.TunnelLost())

    def tell(self) -> None:
        if not self.is_up:
            return
        state, now = self.provider.lease, self.provider.now
        self.to_renter(
            r.ToldStatus(
                StatusTold(
                    phase=state.phase,
                    outcome=state.outcome,
                    started_at=state.started_at or 0,
                    metered_ms=state.metered_ms(now),
                    frozen_ms=state.frozen_total_ms(state.ended_at or now),
                    staged=state.staged,
                    outputs=state.outputs,
                    kept_until=state.kept_until or 0,
                )
            )
        )
        if self.renter.lease.phase is LeasePhase.COLLECTING:
            self.to_renter(r.LogsFetched())
            if state.outputs is not None:
                self.to_renter(r.OutputFetched(0, MANIFEST))


ACTIONS = st.sampled_from(["connect", "cut", "wait", "end", "cancel", "wait long"])


@settings(max_examples=60, deadline=None)
@given(st.lists(ACTIONS, max_size=12), st.sampled_from([10**9, 6_000]))
def test_two_honest_sides_agree_in_the_end(actions: list[str], max_spend: int) -> None:
    network = Network(max_spend=max_spend)
    for action in actions:
        match action:
            case "connect":
                network.connect()
            case "cut":
                network.cut()
            case "wait":
                network.pass_time(700)
            case "wait long":
                network.pass_time(15_000)
            case "end":
                network.end_job()
            case _:
                network.to_renter(r.CancelAsked(FailReason.CANCELLED))
        network.tell()
    network.connect()
    network.end_job()
    network.pass_time(1_000)
    provider, renter = network.provider.lease, network.renter.lease
    assert not renter.faults
    assert renter.cancel != FailReason.METERS_DIVERGED
    assert renter.voucher_amount == provider.voucher_amount
    if provider.phase is LeasePhase.COLLECTED and renter.phase is LeasePhase.COLLECTED:
        assert provider.owed(network.provider.now) == renter.owed()
        assert provider.owed(network.provider.now) == min(
            max_spend, provider.facts.cost(provider.metered_ms(network.provider.now))
        )
    assert provider.phase not in JOB_PHASES
    assert msgspec.structs.asdict(provider)["is_connected"]
