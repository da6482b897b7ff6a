"""The records of one purchase: making them, and checking the provider's against them.

Each function is about one paper and has no state. Refuses to send or to store: its callers do.
"""

from typing import NamedTuple

from node.errors import StoreError
from node.lease.files import InputSource, LeaseFile, RenterSide, Role
from node.market.context import Context, new_lease_key, random_bytes
from node.market.jobspec import JobSpec, job_for, lease_ms, spend_cap
from node.market.leases import LeaseState
from node.store import JobRow, LeaseRow, LeaseSecretRow, Transaction
from protocol.envelope import Sealed, open_as_untrusted
from protocol.identity import lease_id
from protocol.machines.admission import SKEW_MAX_MS
from protocol.machines.purchase import OpenBid
from protocol.matching import Candidate
from protocol.records import Award, Bid, Grant, GrantDelivery, Offer
from protocol.records.job import job_hash
from protocol.records.lease import CommittedTerms, grant_commitment
from protocol.units import DAY_MS, Millis, Price

BID_LIFETIME_MS = 10_000


class BidPapers(NamedTuple):
    """A signed bid, the keys it delegates, and how the purchase knows it."""

    bid: Sealed[Bid]
    secret: LeaseSecretRow
    opened: OpenBid


def make_bid(context: Context, spec: JobSpec, found: Candidate) -> BidPapers:
    """Sign a bid for `spec` on the offer `found`, at its clock price, with fresh keys for the lease."""
    offer, now = found.offer, context.clock.now()
    tunnel_seed, tunnel_key = new_lease_key()
    voucher_seed, voucher_key = new_lease_key()
    concrete = job_for(spec, found)
    bid = Bid(
        offer_id=offer.id,
        listing=offer.record.listing,
        provider=offer.signer,
        nonce=random_bytes(16),
        price=found.price,
        quantity=spec.requirement.quantity,
        duration_ms=lease_ms(spec, offer.record.terms),
        max_spend=spend_cap(spec, found.price),
        job_hash=job_hash(concrete),
        resources=concrete.resources,
        isolation=found.isolation,
        network_mode=spec.requirement.network_mode,
        tunnel_key=tunnel_key,
        voucher_key=voucher_key,
        allow_simulated=spec.requirement.allow_simulated,
        signed_at=now,
        expires_at=now + BID_LIFETIME_MS,
    )
    sealed = context.seal(bid)
    lease = lease_id(offer.signer, context.node, bid.nonce)
    secret = LeaseSecretRow(lease=lease, tunnel=tunnel_seed, voucher=voucher_seed, expires_at=now + DAY_MS)
    opened = OpenBid(
        bid_id=sealed.id,
        offer_id=offer.id,
        lease=lease,
        provider=offer.signer,
        listing=bid.listing,
        price=bid.price,
    )
    return BidPapers(sealed, secret, opened)


def objection_to_award(
    context: Context, award: Award, bid: Bid, offer: Offer | None, *, allow_simulated: bool
) -> str:
    """Return why an award is not what was bid for, or ""."""
    if offer is None or award.terms != offer.terms:
        return "the award's terms are not the offer's"
    if award.quantity != bid.quantity or len(award.devices) != bid.quantity:
        return "the award is for another number of devices"
    if award.lease != lease_id(bid.provider, context.node, bid.nonce):
        return "the award is for another lease"
    if award.until < bid.signed_at + bid.duration_ms - SKEW_MAX_MS:
        return "the lease would end before its time"
    if award.simulated and not allow_simulated:
        return "the devices are simulated"
    if award.simulated != offer.simulated:
        return "the award and the offer differ on whether the devices are simulated"
    return ""


def renter_lease_row(award: Sealed[Award], bid: Sealed[Bid], job: JobRow, now: Millis) -> LeaseRow:
    """Return the row of a lease that a renter is about to countersign."""
    terms = award.record
    return LeaseRow(
        lease=terms.lease,
        role="renter",
        state=LeaseState.AWARDED,
        peer=award.signer,
        listing=bid.record.listing,
        job_id=job.id,
        bid_id=bid.id,
        award_id=award.id,
        devices=b"".join(device.key for device in terms.devices),
        job_hash=bid.record.job_hash,
        price=terms.price,
        quantity=terms.quantity,
        max_spend=bid.record.max_spend,
        until=terms.until,
        simulated=terms.simulated,
        salt=b"",
        uid=job.uid,
        gid=job.gid,
        created_at=now,
    )


def objection_to_grant(
    context: Context, delivery: Sealed[GrantDelivery], grant: Sealed[Grant], row: LeaseRow
) -> str:
    """Return why a grant is not what the award promised, or ""."""
    terms = CommittedTerms(salt=delivery.record.salt, renter=context.node, price=row.price, job_hash=row.job_hash)
    if grant.signer != row.peer or delivery.signer != row.peer:
        return "it is signed by somebody else"
    if grant.record.commitment != grant_commitment(terms):
        return "it does not commit to the price, renter and job of the award"
    if grant.record.countersignature_id != row.countersignature_id:
        return "it names another countersignature"
    if b"".join(entry.key for entry in grant.record.entries) != row.devices:
        return "it is for other devices"
    if grant.record.until != row.until:
        return "it ends at another time than the award"
    if grant.record.simulated != row.simulated:
        return "it differs from the award on whether the devices are simulated"
    return ""


def renter_keeper_papers(
    context: Context, spec: JobSpec, lease: bytes, tx: Transaction
) -> tuple[LeaseRow, LeaseSecretRow, LeaseFile]:
    """Return what a renter's keeper needs, from the records of its lease. Raises StoreError."""
    network = context.network_id
    row, secret = tx.leases.get(lease), tx.lease_secrets.get(lease)
    kinds = {record.kind: record for record in tx.records.where("lease = ?", lease)}
    if row is None or secret is None or not {"bid", "award", "grant_delivery"} <= kinds.keys():
        raise StoreError(f"the records of lease {lease.hex()} are incomplete")
    bid = open_as_untrusted(kinds["bid"].data, Bid, network).record
    offer_row = tx.records.get(bid.offer_id)
    if offer_row is None:
        raise StoreError(f"the offer of lease {lease.hex()} is not on record")
    award = open_as_untrusted(kinds["award"].data, Award, network).record
    offer = open_as_untrusted(offer_row.data, Offer, network)
    delivery = open_as_untrusted(kinds["grant_delivery"].data, GrantDelivery, network).record
    candidate = Candidate(offer=offer, price=Price(bid.price), affordable_at=Millis(0), isolation=bid.isolation)
    lease_file = LeaseFile(
        role=Role.RENTER,
        lease=row.lease,
        network=network,
        provider=row.peer,
        renter=context.node,
        peer_tunnel_key=award.tunnel_key,
        voucher_key=bid.voucher_key,
        price=award.price,
        quantity=award.quantity,
        max_spend=bid.max_spend,
        until=award.until,
        terms=award.terms,
        job_hash=bid.job_hash,
        resources=bid.resources,
        isolation=bid.isolation,
        network_mode=bid.network_mode,
        simulated=award.simulated,
        renter_side=RenterSide(
            addresses=delivery.addresses,
            job=job_for(spec, candidate),
            inputs=tuple(InputSource(item.source, item.ignore) for item in spec.inputs),
            outputs=tuple(item.local for item in spec.outputs),
            prepay_ms=spec.prepay_ms,
        ),
    )
    return row, secret, lease_file
