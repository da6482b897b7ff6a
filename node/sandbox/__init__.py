"""Running a stranger's job so that it harms neither the machine nor other jobs.

Isolation tiers (`BubblewrapSandbox`, `UnsafeProcessSandbox`) and the lease's scratch directory. Refuses to
claim more isolation than a probe has just shown, and knows nothing of leases, money or peers.
"""

from node.sandbox.bubblewrap import BubblewrapSandbox
from node.sandbox.scratch import LoopScratch, PolledScratch, open_scratch, sweep_scratch
from node.sandbox.tiers import available, construct
from node.sandbox.unsafe_process import UnsafeProcessSandbox

__all__ = [
    "BubblewrapSandbox",
    "LoopScratch",
    "PolledScratch",
    "UnsafeProcessSandbox",
    "available",
    "construct",
    "open_scratch",
    "sweep_scratch",
]
