"""Leases that are on this disk and not in the database: it is an older copy, or a new one.

Their keepers go on (no doubt about ourselves ends a job) and are told to clear up when they are done; no receipt
of them can be made. The devices of such a lease are not sold before its end, in a new epoch: what the lost
database had signed in their chains is not known here. Refuses to guess what was agreed.
"""

from pathlib import Path

import trio

from node.errors import NodeError
from node.lease.files import LeaseFile, Role, read_lease_file, read_status
from node.log import get_logger
from node.market.context import Context
from node.market.leases import LeaseState
from node.store import LeaseRow, Transaction
from protocol.identity import LEASE_ID_SIZE
from protocol.machines.lease import LeasePhase
from protocol.records.lease import chain_key
from protocol.units import Millis

log = get_logger(__name__)

LEASES_MAX = 1000
"""Most directories looked at."""


async def remember_forgotten(context: Context) -> tuple[LeaseFile, ...]:
    """Put every lease that only the disk knows on record as `forgotten`, and return those of now.

    To be called before leases are followed. Raises StoreError.
    """
    known = await context.store.transaction(lambda tx: {row.lease for row in tx.leases.all()})
    found = await trio.to_thread.run_sync(_scan, context.lease_root, known)

    def write(tx: Transaction) -> None:
        for directory, lease_file in found:
            tx.leases.put(_row(context, directory, lease_file))

    if found:
        await context.store.transaction(write)
        log.error("leases.forgotten", leases=[lease_file.lease.hex() for _, lease_file in found])
    return tuple(lease_file for _, lease_file in found)


def lent_until(forgotten: tuple[LeaseFile, ...]) -> Millis:
    """Return until when devices of ours may be lent by these leases; 0 when they are all ours as a renter."""
    return Millis(max((lease.until for lease in forgotten if lease.role is Role.PROVIDER), default=0))


def _scan(root: Path, known: set[bytes]) -> list[tuple[Path, LeaseFile]]:
    found = []
    for directory in sorted(root.iterdir())[:LEASES_MAX] if root.exists() else ():
        try:
            lease = bytes.fromhex(directory.name)
        except ValueError:
            continue  # a draft that a crash has left
        if len(lease) != LEASE_ID_SIZE or lease in known:
            continue
        try:
            lease_file, status = read_lease_file(directory), read_status(directory)
        except NodeError as error:
            log.error("leases.unreadable", directory=str(directory), problem=str(error))
            continue
        is_settled = status is not None and status.phase is LeasePhase.SETTLED
        if lease_file.lease == lease and not is_settled:
            found.append((directory, lease_file))
    return found


def _row(context: Context, directory: Path, lease_file: LeaseFile) -> LeaseRow:
    side, owner = lease_file.provider_side, directory.stat()
    devices = () if side is None else side.devices
    return LeaseRow(
        lease=lease_file.lease,
        role=lease_file.role.value,
        state=LeaseState.FORGOTTEN,
        peer=lease_file.renter if lease_file.role is Role.PROVIDER else lease_file.provider,
        listing="",
        job_id="",
        bid_id=b"",
        award_id=b"",
        devices=b"".join(chain_key(lease_file.provider, device.uuid) for device in devices),
        job_hash=lease_file.job_hash,
        price=lease_file.price,
        quantity=lease_file.quantity,
        max_spend=lease_file.max_spend,
        until=lease_file.until,
        simulated=lease_file.simulated,
        salt=b"",
        uid=owner.st_uid,
        gid=owner.st_gid,
        created_at=context.clock.now(),
    )
