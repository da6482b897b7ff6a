"""The gpunode daemon: everything that does IO. The rooms and who may import whom: README, "A map of the house"."""

__version__ = "0.1.0"
