"""The provider's leases: from a countersignature to a started keeper, and from the job's end to the receipt.

      countersigned ─▶ keeper starts ─▶ (auction) grant ─▶ job runs ─▶ devices clear: release
                                                                   └▶ results collected or expired: receipt

Refuses to run jobs and to talk to renters' tunnels: keepers do.
"""

import os
from functools import partial
from typing import Any

import msgspec
import trio

from node.config import LendSettings, TunnelSettings
from node.errors import NodeError, StoreError
from node.lease.files import LeasedDevice, LeaseFile, LeaseKeys, ProviderSide, Role
from node.lease.link import LinkError
from node.log import get_logger
from node.market.auctions import ListingAuction
from node.market.context import Context
from node.market.inventory import Inventory
from node.market.leases import LIVE_STATES, Leases, LeaseState, LiveLease
from node.market.outbox import Answer, Outbox, Undelivered
from node.market.settling import NOT_YET, entry_of, receipt_of, status_on_record, unpaid_entry_of
from node.ports import TaskStatus
from node.store import LeaseRow, LeaseSecretRow, OutboxRow, RecordRow, Transaction
from protocol.envelope import open_as_untrusted
from protocol.errors import WrongKind
from protocol.machines.auction_types import KeeperFailed, KeeperReady, LeaseEnded
from protocol.machines.lease import AFTER_JOB_PHASES, OVER_PHASES, FailReason
from protocol.records import Award, Bid, Grant, GrantDelivery, Receipt, ReceiptAcceptance, Refusal
from protocol.records.lease import CommittedTerms, grant_commitment
from protocol.units import DAY_MS

log = get_logger(__name__)

CLEAR_POLL_S = 0.5
AGAIN_S = 1.0
RECEIPT_LIFETIME_MS = 30 * DAY_MS
JOB_UID_BASE = 200_000
JOB_UID_SPAN = 60_000
KEEPER_READY_S = 15
"""Shorter than a renter waits for its grant."""
KEY_SIZE = 32


class Lender:
    """Every lease that this node provides."""

    def __init__(
        self,
        context: Context,
        outbox: Outbox,
        leases: Leases,
        inventory: Inventory,
        lend: LendSettings,
        tunnel: TunnelSettings,
        auctions: dict[str, ListingAuction],
    ) -> None:
        self._context = context
        self._outbox = outbox
        self._leases = leases
        self._inventory = inventory
        self._lend = lend
        self._tunnel = tunnel
        self._auctions = auctions
        self._nursery: trio.Nursery | None = None
        self._pending: dict[bytes, LiveLease] = {}
        self._releasing: set[bytes] = set()

    async def run(self, *, task_status: TaskStatus = trio.TASK_STATUS_IGNORED) -> None:
        """Follow leases, until cancelled; finds those of earlier runs again."""
        rows = await self._context.store.transaction(lambda tx: list(tx.leases.where("role = 'provider'")))
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for row in rows:
                if row.state == LeaseState.COUNTERSIGNED:
                    self.spawn_start(row.lease)
                elif await self._is_to_follow(row):
                    self._leases.adopt(row)
            task_status.started()
            await trio.sleep_forever()

    async def _is_to_follow(self, row: LeaseRow) -> bool:
        if row.state in LIVE_STATES or (row.state == LeaseState.SETTLED and not row.released_at):
            return True
        # A keeper that was started for nothing has to be told so; any other that is left, to clear up.
        return await trio.Path(self._context.lease_directory(row.lease)).exists()

    def spawn_start(self, lease: bytes) -> None:
        """Start a countersigned lease's keeper in a task, and report to its auction."""
        if self._nursery is not None:
            self._nursery.start_soon(self._start, lease)

    async def _start(self, lease: bytes) -> None:
        while True:
            try:
                await self._prepare(lease)
            except StoreError as error:
                # Our disk is full, say: nothing has happened, and the renter waits a while.
                log.error("selling.not_written", lease=lease.hex(), problem=str(error))
                await trio.sleep(AGAIN_S)
            else:
                self._pending.pop(lease, None)
                return

    async def _prepare(self, lease: bytes) -> None:
        row, secret, bid_row, award_row = await self._context.store.transaction(partial(_lease_papers, lease))
        if row is None:
            return
        desk = self._auctions[row.listing]
        live: LiveLease | None = None
        try:
            if secret is None or bid_row is None or award_row is None:
                raise NodeError("its records are incomplete")
            bid = open_as_untrusted(bid_row.data, Bid, self._context.network_id).record
            award = open_as_untrusted(award_row.data, Award, self._context.network_id).record
            lease_file = self._lease_file(row, bid, award)
            live = await self._leases.begin(row, lease_file, LeaseKeys(tunnel=secret.tunnel))
            self._pending[lease] = live
            with trio.fail_after(KEEPER_READY_S):
                await live.wait_for(lambda status: status.port != 0 or status.phase in OVER_PHASES)
            if live.status is None or live.status.port == 0:
                raise NodeError(live.status.detail if live.status else "the keeper ended")
        except (NodeError, trio.TooSlowError) as error:
            detail = str(error) or (live.problem if live is not None else "") or "its keeper did not start in time"
            log.warning("selling.keeper_failed", lease=lease.hex(), problem=detail)
            await desk.apply(KeeperFailed(lease, f"the provider could not prepare the lease: {detail}"[:1000]))
            if live is not None:
                await self._abandon(live)
            return
        terms = CommittedTerms(salt=row.salt, renter=row.peer, price=row.price, job_hash=row.job_hash)
        await desk.apply(KeeperReady(lease, grant_commitment(terms)))
        await self._context.store.transaction(lambda tx: tx.lease_secrets.delete("lease = ?", lease))

    async def _abandon(self, live: LiveLease) -> None:
        """End a keeper whose lease never began, however late it came up: its devices may be sold to others."""
        try:
            if live.status is not None and live.status.phase in OVER_PHASES:
                await self._leases.settle(live)
            else:
                await self._leases.cancel(live.row.lease, FailReason.SANDBOX_FAILED)
        except NodeError as error:
            log.info("selling.keeper_gone", lease=live.row.lease.hex(), problem=str(error))

    def _lease_file(self, row: LeaseRow, bid: Bid, award: Award) -> LeaseFile:
        keys = _keys_of(row)
        devices = tuple(
            LeasedDevice(self._inventory.devices[key].device.uuid, self._inventory.devices[key].device.nodes)
            for key in keys
            if key in self._inventory.devices
        )
        if len(devices) != len(keys):
            raise NodeError("a device of the lease is gone")
        return LeaseFile(
            role=Role.PROVIDER,
            lease=row.lease,
            network=self._context.network_id,
            provider=self._context.node,
            renter=row.peer,
            peer_tunnel_key=bid.tunnel_key,
            voucher_key=bid.voucher_key,
            price=row.price,
            quantity=row.quantity,
            max_spend=row.max_spend,
            until=row.until,
            terms=award.terms,
            job_hash=row.job_hash,
            resources=bid.resources,
            isolation=bid.isolation,
            network_mode=bid.network_mode,
            simulated=row.simulated,
            provider_side=ProviderSide(
                bind_host=self._tunnel.bind,
                port_min=self._tunnel.port_min,
                port_max=self._tunnel.port_max,
                job_uid=self._job_uid(row.lease),
                allow_unsafe=self._lend.unsafe_process,
                devices=devices,
            ),
        )

    def _job_uid(self, lease: bytes) -> int:
        if os.geteuid() != 0:
            return os.geteuid()
        taken = {int.from_bytes(other[:4], "big") % JOB_UID_SPAN for other in self._leases.live if other != lease}
        offset = int.from_bytes(lease[:4], "big") % JOB_UID_SPAN
        while offset in taken:
            offset = (offset + 1) % JOB_UID_SPAN
        return JOB_UID_BASE + offset

    def grant_delivery(self, lease: bytes) -> tuple[bytes, tuple[str, ...]]:
        """Return the salt of the lease's commitment, and where its keeper is reached by UDP."""
        live = self._pending[lease]
        if live.status is None:
            raise AssertionError("a grant is made after its keeper's first status")
        hosts = self._tunnel.advertise or _hosts_of(self._context.network.addresses)
        port = live.status.port
        return live.row.salt, tuple(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts)[:8]

    async def on_grant_answer(self, row: OutboxRow, answer: Answer) -> None:
        """Take the renter's answer to a grant: who does not want it any more need not hold our devices."""
        if isinstance(answer, Undelivered) or not isinstance(answer.record, Refusal):
            return
        network = self._context.network_id
        delivery = open_as_untrusted(row.data, GrantDelivery, network).record
        lease = open_as_untrusted(delivery.grant, Grant, network).record.lease
        reason, detail = answer.record.reason, answer.record.detail
        log.info("lending.grant_refused", lease=lease.hex(), reason=reason, detail=detail)
        live = self._leases.live.get(lease)
        if live is None or live.row.peer != row.peer:
            return
        try:
            await self._leases.cancel(lease, FailReason.CANCELLED, f"the renter refused the grant: {reason}")
        except LinkError as error:
            # It ends by itself when nobody connects.
            log.info("lending.refused_not_ended", lease=lease.hex(), problem=str(error))

    # --- the lease's end ------------------------------------------------------------------------------------

    async def observe(self, live: LiveLease) -> None:
        """Take note of a keeper's status: free the devices, sign the receipt, settle. Idempotent."""
        row, status = live.row, live.status
        if row.state == LeaseState.LAPSED:
            await self._abandon(live)
            return
        is_over = live.is_lost or (status is not None and status.phase in OVER_PHASES)
        if row.state == LeaseState.FORGOTTEN and is_over:
            await self._leases.settle(live)
        if row.state not in (LeaseState.GRANTED, LeaseState.OVER, LeaseState.SETTLED):
            return
        if not row.released_at and (is_over or (status is not None and status.phase in AFTER_JOB_PHASES)):
            self._spawn_release(live)
        if is_over and row.receipt_id is None:
            await self._sign_receipt(live)
        if is_over and live.row.receipt_id is not None:
            await self._leases.settle(live)

    def _spawn_release(self, live: LiveLease) -> None:
        if self._nursery is not None and live.row.lease not in self._releasing:
            self._releasing.add(live.row.lease)
            self._nursery.start_soon(self._release, live)

    async def _release(self, live: LiveLease) -> None:
        """Wait until the lease's devices are clear, then end it in the chain and sell them again."""
        row = live.row
        keys = _keys_of(row)
        reason = live.status.outcome if live.status is not None and live.status.outcome else "ended"
        desk = self._auctions[row.listing]
        while True:
            auctions = [other.auction for other in self._auctions.values()]
            leased = {key for auction in auctions for sold in auction.leases for key in sold.keys}
            await self._inventory.refresh(frozenset(leased))
            live.problem = self._inventory.not_clear(keys)
            if not live.problem:
                try:
                    await desk.apply(LeaseEnded(row.lease, reason))
                    break
                except StoreError as error:
                    log.error("selling.not_released", lease=row.lease.hex(), problem=str(error))
            await trio.sleep(CLEAR_POLL_S)
        self._releasing.discard(row.lease)

    async def _sign_receipt(self, live: LiveLease) -> None:
        row, context = live.row, self._context
        receipt = context.seal(receipt_of(context, row, live.status or status_on_record(row)))
        changes: dict[str, Any] = {
            "receipt_id": receipt.id,
            "state": LeaseState.OVER,
            "outcome": receipt.record.outcome,
            "ended_at": receipt.record.ended_at,
        }

        def write(tx: Transaction) -> OutboxRow:
            tx.records.put(context.record_row(receipt, lease=row.lease))
            tx.entries.put(entry_of(receipt, is_provider=True, confirmed=False))
            unpaid = unpaid_entry_of(receipt)
            if unpaid.amount > 0:
                tx.entries.put(unpaid)
            tx.leases.change(row.lease, **changes)
            return self._outbox.enqueue(tx, row.peer, receipt, RECEIPT_LIFETIME_MS)

        mail = await context.store.transaction(write)
        self._leases.noted(row.lease, **changes)
        live.row = msgspec.structs.replace(live.row, **changes)
        self._outbox.kick(mail)

    async def on_receipt_answer(self, row: OutboxRow, answer: Answer) -> None:
        """Take the renter's answer to a receipt of ours."""
        if isinstance(answer, Undelivered):
            log.warning("lending.receipt_not_delivered", peer=row.peer.hex(), problem=answer.problem)
            return
        record = answer.record
        if isinstance(record, Refusal):
            if record.reason == NOT_YET:
                await self._send_again(row)
            else:
                log.warning(
                    "lending.receipt_refused", peer=row.peer.hex(), reason=record.reason, detail=record.detail
                )
            return
        receipt = open_as_untrusted(row.data, Receipt, self._context.network_id).record
        # The lease that it names is the peer's word, and would else settle any lease of ours.
        if not isinstance(record, ReceiptAcceptance) or (record.receipt_id, record.lease) != (
            row.record_id,
            receipt.lease,
        ):
            raise WrongKind("a receipt is answered by its acceptance")
        acceptance = self._context.record_row(answer, lease=receipt.lease, reply_to=row.record_id)

        def write(tx: Transaction) -> None:
            tx.records.put(acceptance)
            tx.entries.change(row.record_id, confirmed=1)
            tx.leases.change(receipt.lease, state=LeaseState.SETTLED)

        await self._context.store.transaction(write)
        self._leases.noted(receipt.lease, state=LeaseState.SETTLED)

    async def _send_again(self, row: OutboxRow) -> None:
        await trio.sleep(AGAIN_S)
        sealed = open_as_untrusted(row.data, Receipt, self._context.network_id)
        left_ms = row.expires_at - self._context.clock.now()
        if left_ms > 0:
            mail = await self._context.store.transaction(
                lambda tx: self._outbox.enqueue(tx, row.peer, sealed, left_ms)
            )
            self._outbox.kick(mail)


def _lease_papers(
    lease: bytes, tx: Transaction
) -> tuple[LeaseRow | None, LeaseSecretRow | None, RecordRow | None, RecordRow | None]:
    row = tx.leases.get(lease)
    bid = tx.records.get(row.bid_id) if row else None
    award = tx.records.get(row.award_id) if row else None
    return row, tx.lease_secrets.get(lease), bid, award


def _hosts_of(addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Return the hosts of our multiaddrs, loopback last: renters elsewhere cannot use it."""
    hosts = [parts[2] for parts in (address.split("/") for address in addresses) if len(parts) > 2]
    unique = list(dict.fromkeys(hosts))
    return tuple(sorted(unique, key=lambda host: host.startswith("127.") or host == "::1"))


def _keys_of(row: LeaseRow) -> list[bytes]:
    return [row.devices[start : start + KEY_SIZE] for start in range(0, len(row.devices), KEY_SIZE)]
