"""Leases that only the disk knows: seen off by a daemon whose database is an older copy, or new."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.market_nodes import MarketNode, Town, a_device, open_town
from support.signers import NETWORK, signer
from trio.abc import Clock

from node.lease.files import (
    LeasedDevice,
    LeaseFile,
    LeaseKeys,
    LeaseStatus,
    ProviderSide,
    Role,
    create_lease_directory,
    write_status,
)
from node.market.leases import LeaseState
from protocol.machines.lease import LeasePhase
from protocol.records import Resources, Terms
from protocol.records.lease import chain_key
from protocol.units import MINUTE_MS


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[Town]:
    async with open_town(tmp_path) as town:
        yield town


def a_lease(node: MarketNode, number: int, *, phase: LeasePhase = LeasePhase.RUNNING, **fields: Any) -> LeaseFile:
    """Leave a lease to somebody on a node's disk, without its database's knowledge."""
    usual: dict[str, Any] = {
        "role": Role.PROVIDER,
        "lease": bytes([number]) * 16,
        "network": NETWORK,
        "provider": node.id,
        "renter": signer(99).node,
        "peer_tunnel_key": bytes(32),
        "voucher_key": bytes(32),
        "price": 1,
        "quantity": 1,
        "max_spend": 1,
        "until": node.clock.now() + 30 * MINUTE_MS,
        "terms": Terms(),
        "job_hash": bytes(32),
        "resources": Resources(cpus_milli=1, memory_mib=1, disk_mib=1),
        "isolation": "bubblewrap",
        "simulated": False,
        "provider_side": ProviderSide(job_uid=1, devices=(LeasedDevice(a_device().uuid),)),
    }
    lease = LeaseFile(**(usual | fields))
    directory = node.context.lease_directory(lease.lease)
    create_lease_directory(directory, lease, LeaseKeys(tunnel=bytes(32)))
    status = LeaseStatus(lease=lease.lease, role=lease.role, generation=1, sequence=1, phase=phase)
    write_status(directory, status)
    return lease


async def test_a_lease_that_only_the_disk_knows_keeps_its_device_until_its_end(
    town: Town, autojump_clock: Clock
) -> None:
    node = town.build(1, a_device())
    lease = a_lease(node, 1)
    await town.start(node)
    (row,) = node.lease_rows()
    assert (row.lease, row.state, row.peer) == (lease.lease, LeaseState.FORGOTTEN, lease.renter)
    assert row.devices == chain_key(node.id, a_device().uuid)
    auction = node.desk().auction
    assert (auction.epoch, auction.sells_from) == (1, lease.until)
    assert node.market.seller.free_of(node.desk()) == 0
    assert any("a lease that is on this disk" in note for note in node.market.notes)
    # Its keeper is let go when it is done, and nothing is signed for it.
    await node.leases.say(lease.lease, phase=LeasePhase.COLLECTED)
    assert node.leases.settled == [lease.lease]
    assert not node.read(lambda tx: list(tx.entries.all()))


async def test_the_same_disk_is_no_news_at_the_next_start(town: Town, autojump_clock: Clock) -> None:
    node = town.build(1, a_device())
    lease = a_lease(node, 1)
    await town.start(node)
    await town.restart(node)
    auction = node.desk().auction
    assert (auction.epoch, auction.sells_from) == (1, lease.until)
    assert not node.market.notes
    assert node.market.seller.sells_from == lease.until


async def test_what_is_over_or_no_lease_raises_no_alarm(town: Town, autojump_clock: Clock) -> None:
    node = town.build(1, a_device())
    a_lease(node, 1, phase=LeasePhase.SETTLED)
    for name in (".00.draft", "00" * 16, "no-lease"):
        node.context.lease_directory(bytes(16)).with_name(name).mkdir()
    await town.start(node)
    assert not node.lease_rows()
    assert not node.market.notes
    assert node.desk().auction.epoch == 0
    assert node.market.seller.free_of(node.desk()) == 1


async def test_one_whose_time_has_passed_stops_no_selling_but_its_numbers_are_taken(
    town: Town, autojump_clock: Clock
) -> None:
    node = town.build(1, a_device())
    a_lease(node, 1, until=node.clock.now())
    await town.start(node)
    assert [row.state for row in node.lease_rows()] == [LeaseState.FORGOTTEN]
    assert node.desk().auction.epoch == 1
    assert node.market.seller.free_of(node.desk()) == 1
