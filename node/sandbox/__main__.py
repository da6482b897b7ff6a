"""`python -P -m node.sandbox TIER...`: probe isolation tiers where this process runs, and print what was found.

One JSON list of `node.ports.Probe` on stdout. The daemon has it run where its keepers will run, since a service
that is itself hardened could not start a sandbox. Refuses to judge: a tier that does not work is a finding.
"""

import sys

import msgspec
import trio

from node.ports import Probe
from node.sandbox import construct


async def probe_tiers(names: tuple[str, ...]) -> tuple[Probe, ...]:
    """Run something in every tier of `names`, and return what was found."""
    tiers = [tier for tier in construct(allow_unsafe=True) if tier.tier in names]
    return tuple([await tier.probe() for tier in tiers])


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(trio.run(probe_tiers, tuple(sys.argv[1:]))))
