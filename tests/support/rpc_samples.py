"""One plausible reply for every method of the RPC, shared by the tests of server, client and command line."""

from typing import Any

from node.rpc import api, discover
from node.rpc.api import daemon, jobs, lend, market, money, peers

NODE = "12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xo"
PROVIDER = "12D3KooWLRPJAA5o6uPN3cYQe1BwPgF4N3nC5iVkfFvGyoNq7E7h"
HASH = "ab" * 32
LEASE = "cd" * 16
T0 = 1_750_000_000_000
PRICE = 111_111
"""About $0.40 an hour."""

LEASE_ENTRY = lend.LeaseEntry(
    lease=LEASE,
    renter=PROVIDER,
    state="running",
    price=PRICE,
    quantity=1,
    since=T0,
    until=T0 + 3_600_000,
    metered_ms=60_000,
    paid=7_000_000,
)
DEVICE = lend.DeviceEntry(
    uuid="GPU-8d1f0a2b-0000-0000-0000-000000000001",
    index=0,
    vendor="nvidia",
    model="NVIDIA A100-SXM4-40GB",
    memory_mib=40_960,
    memory_used_mib=1_024,
    utilisation_percent=87,
    temperature_c=61,
    power_w=250,
    driver="550.54.15",
    cuda=12_040,
    health="ok",
    problem="",
    simulated=False,
    use=lend.DeviceUse.LEASED,
    listing="a100",
    price_now=PRICE,
    reserve=PRICE // 2,
    lease=LEASE_ENTRY,
)
SIMULATED_DEVICE = lend.DeviceEntry(
    uuid="SIM-0001",
    index=1,
    vendor="simulated",
    model="A100",
    memory_mib=40_960,
    memory_used_mib=0,
    utilisation_percent=None,
    temperature_c=None,
    power_w=None,
    driver="",
    cuda=12_040,
    health="ok",
    problem="",
    simulated=True,
    use=lend.DeviceUse.OFFERED,
    listing="sim",
    price_now=PRICE,
    reserve=PRICE,
    lease=None,
)
ENTRY = jobs.JobEntry(
    job="j7f3k2",
    name="train",
    uid=1000,
    state=jobs.JobState.RUNNING,
    detail="",
    outcome="",
    exit_status=None,
    command=("python", "train.py", "--epochs", "3"),
    created_at=T0,
    started_at=T0 + 5_000,
    ended_at=None,
    quantity=1,
    model="NVIDIA A100-SXM4-40GB",
    provider=PROVIDER,
    price=PRICE,
    cost=6_666_660,
    max_spend=400_000_000,
    simulated=False,
)
OFFER = market.OfferEntry(
    offer=HASH,
    provider=PROVIDER,
    listing="a100",
    vendor="nvidia",
    model="NVIDIA A100-SXM4-40GB",
    memory_mib=40_960,
    compute_capability=80,
    cuda=12_040,
    mig_profile="",
    quantity=4,
    free=2,
    start=2 * PRICE,
    reserve=PRICE // 2,
    price_now=PRICE,
    region="eu",
    site="lab-3",
    isolation=("bubblewrap",),
    lease_max_ms=86_400_000,
    notice_ms=120_000,
    bandwidth_mbps=1_000,
    expires_at=T0 + 300_000,
    simulated=False,
    own=False,
)
REJECTION = market.Rejection(
    reason="gpu_memory", offers=3, detail="3 offers have 24 GiB or less", change="--gpu-memory 24G"
)
CANDIDATE = market.Candidate(offer=OFFER, hourly=PRICE * 3600, total=PRICE * 3600, affordable=True)
INPUT = jobs.JobInput(source="/home/ada/data", destination="data", manifest=HASH, size=12_345, ignore=("*.log",))
OUTPUT = jobs.OutputEntry(
    remote="results", local="/home/ada/results", collected=True, missing=False, manifest=HASH, size=99
)
ATTEMPT = jobs.JobAttempt(
    lease=LEASE,
    provider=PROVIDER,
    model="NVIDIA A100-SXM4-40GB",
    price=PRICE,
    quantity=1,
    isolation="bubblewrap",
    simulated=False,
    signed_at=T0 + 1_000,
    until=T0 + 3_600_000,
    started_at=T0 + 5_000,
    ended_at=None,
    metered_ms=60_000,
    paid=7_000_000,
    cost=6_666_660,
    outcome="",
    receipt=None,
)
PEER = peers.PeerEntry(
    node=PROVIDER,
    address="/ip4/10.0.0.7/tcp/4100",
    connected=True,
    inbound=False,
    latency_ms=12,
    agent="gpunode/0.1.0",
    credit_limit=100_000_000_000,
    balance=-1_500_000_000,
)
SETTLEMENT = money.SettlementEntry(
    settlement=HASH,
    peer=PROVIDER,
    paid_by_us=True,
    amount=1_500_000_000,
    balance_after=0,
    reference="bank transfer",
    state=money.SettlementState.AWAITING_US,
    settled_at=T0,
)
RECEIPT = money.ReceiptEntry(
    receipt=HASH,
    lease=LEASE,
    job="j7f3k2",
    peer=PROVIDER,
    earned=False,
    outcome="completed",
    exit_status=0,
    started_at=T0,
    ended_at=T0 + 60_000,
    metered_ms=60_000,
    price=PRICE,
    quantity=1,
    amount=6_666_660,
    simulated=False,
    accepted=True,
)
LEND_STATUS = lend.LendStatus(
    state=lend.LendState.ON,
    detail="",
    devices=(DEVICE, SIMULATED_DEVICE),
    leases=(LEASE_ENTRY,),
    isolation=("bubblewrap",),
    earned=5_000_000_000,
)
STATUS = daemon.DaemonStatus(
    version="0.1.0",
    node=NODE,
    pid=4242,
    started_at=T0 - 90_000_000,
    now=T0,
    uptime_ms=90_000_000,
    socket="/run/gpunode/rpc.sock",
    state_dir="/var/lib/gpunode",
    config_path="/etc/gpunode/gpunode.toml",
    draining=False,
    swarm=daemon.SwarmStatus(
        network="lab",
        keyed=True,
        addresses=(f"/ip4/10.0.0.5/tcp/4100/p2p/{NODE}",),
        peers_connected=3,
        peers_known=7,
        offers_known=5,
    ),
    lending=lend.LendState.ON,
    lending_detail="",
    devices=(DEVICE, SIMULATED_DEVICE),
    jobs=(ENTRY,),
    jobs_hidden=2,
    earned=5_000_000_000,
    spent=1_000_000_000,
    notes=("the clock is 7 s ahead of most peers",),
)
LOG_CHUNKS = (
    jobs.LogChunk(stream=jobs.LogStream.STDOUT, offset=0, data=b"epoch 1\n\xff\x00raw\n"),
    jobs.LogChunk(stream=jobs.LogStream.STDERR, offset=0, data=b"warming up\n"),
)
EXEC_PIECES = (
    jobs.ExecPiece(stream=jobs.LogStream.STDOUT, data=b"Tue Mar  3\n"),
    jobs.ExecPiece(stream=jobs.LogStream.STDERR, data=b"no such GPU\n"),
    jobs.ExecPiece(exit_status=0),
)
SETTLED = jobs.JobEvent(
    at=T0 + 65_000,
    entry=jobs.JobEntry(
        job="j7f3k2",
        name="train",
        uid=1000,
        state=jobs.JobState.SETTLED,
        detail="",
        outcome="completed",
        exit_status=0,
        command=("python", "train.py"),
        created_at=T0,
        started_at=T0 + 5_000,
        ended_at=T0 + 65_000,
        quantity=1,
        model="NVIDIA A100-SXM4-40GB",
        provider=PROVIDER,
        price=PRICE,
        cost=6_666_660,
        max_spend=400_000_000,
        simulated=False,
    ),
    receipt=HASH,
)

RESULTS: dict[str, Any] = {
    "daemon.status": STATUS,
    "daemon.stop": daemon.StopResult(mode=daemon.StopMode.KEEP, leases=1),
    "daemon.config": daemon.ConfigResult(path="/etc/gpunode/gpunode.toml", config={"network": {"name": "lab"}}),
    "doctor.run": daemon.DoctorResult(
        checks=(daemon.Check(name="database", status=daemon.CheckStatus.OK, detail="opens, 12 MiB"),)
    ),
    "quote": market.QuoteResult(
        quoted_at=T0,
        candidates=(CANDIDATE,),
        max_price=PRICE,
        max_spend=PRICE * 3600,
        rejections=(REJECTION,),
        offers_known=4,
    ),
    "offers.list": market.OffersListResult(listed_at=T0, offers=(OFFER,)),
    "jobs.run": jobs.RunResult(job="j7f3k2", name="train"),
    "jobs.list": jobs.JobsListResult(jobs=(ENTRY,)),
    "jobs.show": jobs.JobDetail(
        entry=ENTRY,
        requirement=market.Requirement(model="A100"),
        environment="host",
        variables=("TOKEN",),
        workdir="",
        inputs=(INPUT,),
        outputs=(OUTPUT,),
        time_limit_ms=3_600_000,
        prepay_ms=0,
        attempts=(ATTEMPT,),
        results_until=None,
    ),
    "jobs.cancel": jobs.CancelResult(job="j7f3k2", state=jobs.JobState.COLLECTING, changed=True),
    "jobs.why": jobs.WhyResult(
        summary="No offer has 80 GiB.",
        advice="Ask for less: --gpu-memory 40G",
        matching=0,
        rejections=(REJECTION,),
        history=(jobs.WhyStep(at=T0, detail="bid $0.3900/h: price too low"),),
    ),
    "jobs.fetch": jobs.FetchResult(job="j7f3k2", outputs=(OUTPUT,), collecting=False),
    "jobs.logs": LOG_CHUNKS,
    "jobs.exec": EXEC_PIECES,
    "jobs.events": (jobs.JobEvent(at=T0, entry=ENTRY), SETTLED),
    "lend.status": LEND_STATUS,
    "lend.on": LEND_STATUS,
    "lend.off": LEND_STATUS,
    "lend.pause": LEND_STATUS,
    "lend.reclaim": lend.ReclaimResult(leases=(LEASE,), free_at=T0 + 120_000),
    "lend.devices": lend.DevicesResult(devices=(DEVICE, SIMULATED_DEVICE), problem=""),
    "lend.price": lend.PriceResult(
        prices=(
            lend.PriceEntry(
                listing="a100",
                model="NVIDIA A100-SXM4-40GB",
                quantity=4,
                free=2,
                start=2 * PRICE,
                reserve=PRICE // 2,
                price_now=PRICE,
                automatic=True,
                simulated=False,
            ),
        )
    ),
    "peers.list": peers.PeersListResult(peers=(PEER,)),
    "peers.connect": peers.ConnectResult(node=PROVIDER, address="/ip4/10.0.0.7/tcp/4100"),
    "peers.invite": peers.InviteResult(
        token="gpn1abcdef", network="lab", addresses=("/ip4/10.0.0.5/tcp/4100",), secret=True
    ),
    "peers.show": peers.PeerDetail(
        entry=PEER,
        addresses=("/ip4/10.0.0.7/tcp/4100",),
        offers=(peers.PeerOffer(listing="a100", model="A100", free=2, simulated=False),),
        receipts=4,
        earned=0,
        spent=1_500_000_000,
        exposure=0,
        misdeeds=(),
        last_seen_at=T0,
    ),
    "peers.limit": peers.LimitResult(entry=PEER),
    "money.ledger": money.LedgerResult(
        accounts=(
            money.Account(
                peer=PROVIDER,
                balance=-1_500_000_000,
                earned=0,
                spent=1_500_000_000,
                settled_to_us=0,
                settled_by_us=0,
                exposure=0,
                credit_limit=None,
            ),
        ),
        owed_to_us=0,
        owed_by_us=1_500_000_000,
        strangers_exposure=0,
        strangers_limit=1_000_000_000,
        pending=(SETTLEMENT,),
    ),
    "money.receipts": money.ReceiptsResult(receipts=(RECEIPT,)),
    "money.settle": money.SettleResult(entry=SETTLEMENT),
    "money.accept": money.SettleResult(entry=SETTLEMENT),
    "rpc.discover": discover.document(),
}

PARAMS: dict[str, Any] = {
    "quote": market.QuoteParams(requirement=market.Requirement(model="A100"), duration_ms=3_600_000),
    "jobs.run": jobs.RunParams(
        requirement=market.Requirement(), command=("true",), time_limit_ms=60_000, inputs=(INPUT,)
    ),
    "jobs.show": jobs.JobParams(job="-"),
    "jobs.cancel": jobs.JobParams(job="-"),
    "jobs.why": jobs.WhyParams(job="-"),
    "jobs.fetch": jobs.JobParams(job="train"),
    "jobs.logs": jobs.LogsParams(job="train", follow=True),
    "jobs.exec": jobs.ExecParams(job="train", command=("nvidia-smi",)),
    "jobs.events": jobs.JobParams(job="train"),
    "peers.connect": peers.ConnectParams(address="/ip4/10.0.0.7/tcp/4100"),
    "peers.show": peers.PeerParams(peer="7E7h"),
    "peers.limit": peers.LimitParams(peer="7E7h", credit_limit=None),
    "money.settle": money.SettleParams(peer="7E7h", amount=5, paid_by_us=True),
    "money.accept": money.AcceptParams(settlement="abab"),
}
"""For the methods whose params have no defaults for everything."""


def params_of(name: str) -> api.Params:
    """Return params with which `name` may be called."""
    sample: api.Params = PARAMS.get(name) or api.METHODS[name].params()
    return sample
