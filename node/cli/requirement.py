"""The flags that say what is needed, shared by run, quote and why; and the requirement that they make."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from node.cli import values
from node.errors import BadArgument, NotFound
from node.rpc.api import market
from node.rpc.client import Client

PEER_ID_SIZE_MIN = 46
"""Characters of a whole peer id; a shorter text is the end of one, as tables show it."""

F = TypeVar("F", bound=Callable[..., object])
TIME_DEFAULT = "1h"

_OPTIONS = (
    click.option(
        "--gpus", type=values.gpus, metavar="[MODEL:]N", help="How many, of which model: 2, A100, A100:2."
    ),
    click.option("--gpu-memory", type=values.size, metavar="SIZE", help="At least, of each GPU: 40G."),
    click.option("--cuda", type=values.cuda, metavar="VERSION", help="At least, of the provider's driver: 12.4."),
    click.option(
        "--cpus", type=values.cores, metavar="CORES", help="In all; else the share that comes with the GPUs."
    ),
    click.option(
        "--memory", type=values.size, metavar="SIZE", help="In all; else the share that comes with the GPUs."
    ),
    click.option(
        "--disk", type=values.size, metavar="SIZE", help="In all; else the share that comes with the GPUs."
    ),
    click.option("--shm", type=values.size, metavar="SIZE", help="/dev/shm; else half of the memory."),
    click.option("--isolation", metavar="TIER", help="The least isolation from the provider: bubblewrap."),
    click.option("--net", type=click.Choice(["none"]), help="The job's network: none."),
    click.option(
        "--provider", type=values.peer, metavar="ID", help="Only this provider: its peer id, or the end of it."
    ),
    click.option("--region", metavar="REGION", help="Only there, or in its parts: eu."),
    click.option(
        "--max-price", type=values.price, metavar="$/GPU-H", help="Most for a GPU and hour; never passed."
    ),
    click.option("--allow-simulated", is_flag=True, help="Also GPUs that do not exist, for trying things out."),
)
NAMES = (
    "gpus", "gpu_memory", "cuda", "cpus", "memory", "disk", "shm", "isolation", "net", "provider", "region",
    "max_price", "allow_simulated",
)  # fmt: skip
"""The parameters that the options fill."""


def requirement_options(command: F) -> F:
    """Add the flags to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def time_option(command: F) -> F:
    """Add --time."""
    return click.option(
        "--time", "time_ms", type=values.duration, metavar="TIME", default=TIME_DEFAULT, show_default=True,
        help="Longest the command may run: 8h.",
    )(command)  # fmt: skip


def requirement_from(given: dict[str, Any]) -> market.Requirement:
    """Return the requirement of the parameters named in NAMES; what is None was not given."""
    gpus = given["gpus"] or values.Gpus(1, "")
    return market.Requirement(
        quantity=gpus.quantity,
        model=gpus.model,
        gpu_memory_mib=given["gpu_memory"] or 0,
        cuda=given["cuda"] or 0,
        cpus_milli=given["cpus"],
        memory_mib=given["memory"],
        disk_mib=given["disk"],
        shm_mib=given["shm"] or 0,
        isolation=given["isolation"] or "",
        network_mode=given["net"] or "none",
        provider=given["provider"],
        region=given["region"] or "",
        max_price=given["max_price"],
        allow_simulated=bool(given["allow_simulated"]),
    )


def with_whole_provider(requirement: market.Requirement, client: Client) -> market.Requirement:
    """Return the requirement with a shortened provider's whole id. Raises NotFound, BadArgument."""
    short = requirement.provider
    if short is None or len(short) >= PEER_ID_SIZE_MIN:
        return requirement
    offers = client.call(market.OFFERS, market.OffersListParams()).offers
    found = {offer.provider for offer in offers if offer.provider.endswith(short)}
    if not found:
        raise NotFound(f"no provider of a live offer ends in {short}", "see them with: gpunode offers")
    if len(found) > 1:
        raise BadArgument(f"{len(found)} providers end in {short}", "give more of the id")
    from msgspec.structs import replace

    return replace(requirement, provider=found.pop())
