"""The devices of this machine: what they are, how they are, who uses them, and who may sell them.

`NvmlSource` and `SimulatedSource` are `node.ports.DeviceSource`s, `combined` makes one of several, `IdleTracker`
says which devices their owner does not use. pynvml is imported here only. Refuses to change a device's settings.
"""

from node.devices.cdi import DeviceNodes
from node.devices.combined import combined
from node.devices.idle import Idleness, IdleTracker
from node.devices.locks import DeviceLocks
from node.devices.nvml import NvmlSource
from node.devices.processes import own_pids
from node.devices.simulated import SimulatedSource

__all__ = [
    "DeviceLocks",
    "DeviceNodes",
    "IdleTracker",
    "Idleness",
    "NvmlSource",
    "SimulatedSource",
    "combined",
    "own_pids",
]
