"""From what the daemon knows to what the RPC shows: pure conversions, one for each entry type.

Refuses to look anything up.
"""

from collections.abc import Iterable

from node.daemon.state import KnownJob
from node.lease.files import LeaseStatus
from node.market.inventory import ListedDevice
from node.market.jobspec import JobSpec
from node.market.live_job import ENDED, LEASED
from node.market.selling import Seller
from node.market.settlements import KnownSettlement
from node.market.settling import cost_of
from node.rpc.methods.jobs import JobEntry, JobState
from node.rpc.methods.lend import DeviceEntry, DeviceUse, LeaseEntry
from node.rpc.methods.market import Candidate, OfferEntry, Rejection
from node.rpc.methods.market import Requirement as RpcRequirement
from node.rpc.methods.money import SettlementEntry
from node.rpc.methods.money import SettlementState as RpcSettlementState
from node.store import LeaseRow
from protocol import codec, matching
from protocol.envelope import Sealed
from protocol.identity import node_from_peer_id, peer_id
from protocol.machines.auction_types import free_units
from protocol.machines.lease import COMPLETED, LeasePhase
from protocol.machines.purchase import Phase
from protocol.pricing import clock_price
from protocol.records import Offer
from protocol.units import Millis, Price, cost, format_duration

SPEC_SIZE_MAX = 2**20

_STATES = {
    LeasePhase.SIGNED: JobState.SIGNED,
    LeasePhase.CONNECTED: JobState.CONNECTED,
    LeasePhase.STAGING: JobState.STAGING,
    LeasePhase.RUNNING: JobState.RUNNING,
    LeasePhase.FROZEN: JobState.RUNNING,
    LeasePhase.INTERRUPTING: JobState.INTERRUPTING,
}
_CHANGES = {
    matching.MissReason.MODEL: "--gpus",
    matching.MissReason.SIMULATED: "--allow-simulated",
    matching.MissReason.MEMORY: "--gpu-memory",
    matching.MissReason.CUDA: "--cuda",
    matching.MissReason.CPUS: "--cpus",
    matching.MissReason.HOST_MEMORY: "--memory",
    matching.MissReason.DISK: "--disk",
    matching.MissReason.SHM: "--shm",
    matching.MissReason.ISOLATION: "--isolation",
    matching.MissReason.DURATION: "--time",
    matching.MissReason.PRICE: "--max-price",
    matching.MissReason.QUANTITY: "--gpus",
    matching.MissReason.REGION: "--region",
    matching.MissReason.PROVIDER: "--provider",
}


def spec_of(job: KnownJob) -> JobSpec:
    """Return what the job's owner submitted."""
    return codec.decode_untrusted(job.row.spec, JobSpec, SPEC_SIZE_MAX)


def job_state(job: KnownJob) -> JobState:
    """Return where a job is, in the words of the RPC."""
    if job.row.state == ENDED:
        return JobState.SETTLED if job.row.outcome == COMPLETED else JobState.FAILED
    if job.row.state == LEASED:
        phase = job.status.phase if job.status is not None else LeasePhase.SIGNED
        return _STATES.get(phase, JobState.COLLECTING)
    if job.live is not None and job.live.purchase.phase is Phase.COUNTERSIGNED:
        return JobState.AWARDED
    return JobState.BUYING


def job_entry(job: KnownJob, model: str = "") -> JobEntry:
    """Return a job in one line."""
    spec, lease, status = spec_of(job), job.lease, job.status
    leased = lease if job.row.state != "buying" else None
    return JobEntry(
        job=job.row.id,
        name=job.row.name,
        uid=job.row.uid,
        state=job_state(job),
        detail=_detail(job),
        outcome=job.row.outcome,
        exit_status=None if status is None or status.exit_status < 0 else status.exit_status,
        command=spec.command,
        created_at=job.row.created_at,
        started_at=None if status is None or not status.started_at else status.started_at,
        ended_at=job.row.ended_at or None,
        quantity=spec.requirement.quantity,
        model=model or spec.requirement.model,
        provider=None if leased is None else peer_id(leased.peer),
        price=None if leased is None else leased.price,
        cost=0 if leased is None or status is None else lease_cost(leased, status),
        max_spend=spec.max_spend,
        simulated=leased is not None and leased.simulated,
    )


def lease_cost(lease: LeaseRow, status: LeaseStatus) -> int:
    """Return what a lease costs so far, in nano-credits: as metered, at most what was promised."""
    return min(cost_of(lease, status.metered_ms), lease.max_spend)


def _detail(job: KnownJob) -> str:
    if job.row.detail or job.live is None:
        return job.row.detail
    if job.live.lease is not None:
        return job.live.lease.problem or (job.status.detail if job.status is not None else "")
    return job.live.purchase.note


def lease_entry(lease: LeaseRow, status: LeaseStatus | None) -> LeaseEntry:
    """Return a lease of ours to somebody."""
    return LeaseEntry(
        lease=lease.lease.hex(),
        renter=peer_id(lease.peer),
        state=status.phase.value if status is not None else lease.state,
        price=lease.price,
        quantity=lease.quantity,
        since=lease.created_at,
        until=lease.until,
        metered_ms=status.metered_ms if status is not None else 0,
        paid=status.voucher_amount if status is not None else 0,
    )


def device_entry(listed: ListedDevice, seller: Seller, leases: Iterable[LeaseEntry], now: Millis) -> DeviceEntry:
    """Return a device of this machine."""
    device, desk = listed.device, seller.auctions.get(listed.listing)
    use, lease, problem = DeviceUse.NOT_OFFERED, None, listed.reason
    price = reserve = None
    if desk is not None:
        auction = desk.auction
        price, reserve = clock_price(auction.curve, now), auction.curve.reserve
        sold = next((sold for sold in auction.leases if listed.key in sold.keys), None)
        if sold is not None:
            lease = next((entry for entry in leases if entry.lease == sold.lease.hex()), None)
            over = lease is None or lease.state in ("collecting", "collected", "failed", "settled")
            use = DeviceUse.RELEASING if over else DeviceUse.LEASED
            problem = (seller.inventory.not_clear(sold.keys) if over else "") or problem
        elif any(listed.key in hold.keys for hold in auction.holds):
            use = DeviceUse.HELD
        elif not auction.paused and now < auction.sells_from:
            wait = format_duration(auction.sells_from - now)
            problem = problem or f"not sold for another {wait}: a lease that the database has forgotten may be out"
        elif not seller.is_paused and any(unit.key == listed.key for unit in free_units(auction)):
            use = DeviceUse.OFFERED
    return DeviceEntry(
        uuid=device.uuid,
        index=device.index,
        vendor=device.vendor,
        model=device.model,
        memory_mib=device.memory_mib,
        memory_used_mib=device.memory_used_mib,
        utilisation_percent=device.utilisation_percent,
        temperature_c=device.temperature_c,
        power_w=device.power_w,
        driver=device.driver,
        cuda=device.cuda,
        health=device.health.value,
        problem=problem,
        simulated=device.simulated,
        use=use,
        listing=listed.listing if desk is not None else "",
        price_now=price,
        reserve=reserve,
        lease=lease,
    )


def offer_entry(sealed: Sealed[Offer], now: Millis, *, own: bool = False) -> OfferEntry:
    """Return a live offer."""
    offer = sealed.record
    return OfferEntry(
        offer=sealed.id.hex(),
        provider=peer_id(sealed.signer),
        listing=offer.listing,
        vendor=offer.device.vendor,
        model=offer.device.model,
        memory_mib=offer.device.memory_mib,
        compute_capability=offer.device.compute_capability,
        cuda=offer.device.cuda,
        mig_profile=offer.device.mig_profile,
        quantity=offer.quantity,
        free=offer.free,
        start=offer.curve.start,
        reserve=offer.curve.reserve,
        price_now=clock_price(offer.curve, now),
        region=offer.region,
        site=offer.site,
        isolation=offer.terms.isolation,
        lease_max_ms=offer.terms.lease_max_ms,
        notice_ms=offer.terms.notice_ms,
        bandwidth_mbps=offer.host.bandwidth_mbps,
        expires_at=offer.expires_at,
        simulated=offer.simulated,
        own=own,
    )


def requirement_of(
    wanted: RpcRequirement, duration_ms: int, own: bytes, environment: str = ""
) -> matching.Requirement:
    """Return a requirement as the protocol has it; our own offers are excluded."""
    return matching.Requirement(
        quantity=wanted.quantity,
        model=wanted.model,
        memory_mib=wanted.gpu_memory_mib,
        cuda=wanted.cuda,
        compute_capability=wanted.compute_capability,
        cpus_milli=wanted.cpus_milli or 0,
        host_memory_mib=wanted.memory_mib or 0,
        disk_mib=wanted.disk_mib or 0,
        shm_mib=wanted.shm_mib,
        environment=environment,
        isolation=wanted.isolation or "bubblewrap",
        network_mode=wanted.network_mode,
        region=wanted.region,
        provider=None if wanted.provider is None else node_from_peer_id(wanted.provider),
        exclude=(own,),
        max_price=wanted.max_price,
        duration_ms=duration_ms,
        allow_simulated=wanted.allow_simulated,
    )


def rpc_requirement(wanted: matching.Requirement) -> RpcRequirement:
    """Return a stored requirement as the RPC shows it."""
    return RpcRequirement(
        quantity=wanted.quantity,
        model=wanted.model,
        gpu_memory_mib=wanted.memory_mib,
        cuda=wanted.cuda,
        compute_capability=wanted.compute_capability,
        cpus_milli=wanted.cpus_milli or None,
        memory_mib=wanted.host_memory_mib or None,
        disk_mib=wanted.disk_mib or None,
        shm_mib=wanted.shm_mib,
        isolation=wanted.isolation,
        network_mode=wanted.network_mode,
        provider=None if wanted.provider is None else peer_id(wanted.provider),
        region=wanted.region,
        max_price=wanted.max_price,
        allow_simulated=wanted.allow_simulated,
    )


def candidate_entry(found: matching.Candidate, wanted: matching.Requirement, now: Millis) -> Candidate:
    """Return an offer that matches, priced."""
    price = Price(found.price)
    affordable = wanted.max_price is None or price <= wanted.max_price
    expires_at = found.offer.record.expires_at
    return Candidate(
        offer=offer_entry(found.offer, now),
        hourly=cost(price, wanted.quantity, 3_600_000),
        total=cost(price, wanted.quantity, wanted.duration_ms),
        affordable=affordable,
        affordable_at=found.affordable_at if not affordable and found.affordable_at < expires_at else None,
    )


def rejections_of(matches: matching.Matches) -> tuple[Rejection, ...]:
    """Return why offers do not match, the nearest misses first, one line a reason."""
    grouped: dict[matching.MissReason, list[matching.Miss]] = {}
    for rejected in matches.rejections:
        grouped.setdefault(rejected.misses[0].reason, []).append(rejected.misses[0])
    return tuple(
        Rejection(
            reason=reason.value,
            offers=len(misses),
            detail=f"{len(misses)} offer{'s' if len(misses) > 1 else ''}: {misses[0].detail}",
            change=_CHANGES.get(reason, ""),
        )
        for reason, misses in grouped.items()
    )


def settlement_entry(known: KnownSettlement, own: bytes) -> SettlementEntry:
    """Return a settlement as the RPC shows it."""
    return SettlementEntry(
        settlement=known.id.hex(),
        peer=peer_id(known.peer),
        paid_by_us=known.record.payer == own,
        amount=known.record.amount,
        balance_after=known.record.balance_after,
        reference=known.record.reference,
        state=RpcSettlementState(known.state.value),
        settled_at=known.record.settled_at,
    )
