"""The configuration: flags over environment (GPUNODE_*) over TOML over defaults, converted once, strictly.

`load` returns a frozen `Config`, or raises ConfigError saying which setting, what was found and what is allowed.
Refuses unknown names everywhere, and to show secrets. See contrib/gpunode.toml for every setting.
"""

from node.config.loading import Loaded, default_directories, default_path, load, load_with_origins
from node.config.settings import (
    DEMO_NETWORK,
    AuctionSettings,
    Config,
    CostSettings,
    HostShare,
    LedgerSettings,
    LendSettings,
    LogSettings,
    MetricsSettings,
    ModelPrice,
    NetworkSettings,
    SimulatedDevice,
    TermsSettings,
    TunnelSettings,
)
from node.config.showing import as_toml, explain
from node.config.text import Secret, parse_duration, parse_size

__all__ = [
    "DEMO_NETWORK", "AuctionSettings", "Config", "CostSettings", "HostShare", "LedgerSettings", "LendSettings",
    "Loaded", "LogSettings", "MetricsSettings", "ModelPrice", "NetworkSettings", "Secret", "SimulatedDevice",
    "TermsSettings", "TunnelSettings", "as_toml", "default_directories", "default_path", "explain", "load",
    "load_with_origins", "parse_duration", "parse_size",
]  # fmt: skip
