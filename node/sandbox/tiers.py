"""Which tiers this machine has. Refuses to list one whose probe did not work."""

from collections.abc import Mapping
from pathlib import Path

from node.log import get_logger
from node.ports import Sandbox
from node.sandbox.bubblewrap import BubblewrapSandbox
from node.sandbox.unsafe_process import UnsafeProcessSandbox

log = get_logger(__name__)


def construct(
    *,
    environments: Mapping[str, tuple[Path, ...]] | None = None,
    allow_polled: bool = False,
    allow_unsafe: bool = False,
    probe_uid: int = 65_534,
) -> list[Sandbox]:
    """Return the tiers that the configuration names, strongest first, whether or not they work here.

    `environments`, `allow_polled`: see BubblewrapSandbox. `allow_unsafe` adds `unsafe-process`. `probe_uid`
    is the uid of the probes' jobs when we are root: best one of the range that jobs get.
    """
    found: list[Sandbox] = [
        BubblewrapSandbox(environments=environments, allow_polled=allow_polled, probe_uid=probe_uid)
    ]
    if allow_unsafe:
        found.append(UnsafeProcessSandbox(probe_uid=probe_uid))
    return found


async def available(
    *,
    environments: Mapping[str, tuple[Path, ...]] | None = None,
    allow_polled: bool = False,
    allow_unsafe: bool = False,
    probe_uid: int = 65_534,
) -> list[Sandbox]:
    """Probe the tiers of `construct` and return those that work; why others don't is logged."""
    working = []
    for sandbox in construct(
        environments=environments, allow_polled=allow_polled, allow_unsafe=allow_unsafe, probe_uid=probe_uid
    ):
        probe = await sandbox.probe()
        if probe.works:
            working.append(sandbox)
        else:
            log.warning("sandbox.tier_missing", tier=probe.tier, reason=probe.proves, hint=probe.hint)
    return working
