"""Prometheus metrics on 127.0.0.1, with DCGM's names for GPU fields (NVIDIA dcgm-exporter's).

Refuses to listen elsewhere and to label with anything a stranger chose.
"""

from collections.abc import Iterator
from typing import Any

import trio
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric

from node.daemon.state import Daemon
from node.errors import ConfigError

LABELS = ("gpu", "UUID", "modelName", "simulated")


class _Collector:
    """Reads the daemon's memory when it is scraped."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def collect(self) -> Iterator[Metric]:
        daemon = self._daemon
        peers = [peer for peer in daemon.context.network.peers() if peer.connected]
        yield GaugeMetricFamily("gpunode_peers_connected", "Connected peers", value=len(peers))
        yield GaugeMetricFamily(
            "gpunode_book_statements", "Statements in the order book", value=len(daemon.market.book.book)
        )
        yield GaugeMetricFamily(
            "gpunode_leases_live", "Leases with a keeper", value=len(daemon.market.leases.live)
        )
        yield GaugeMetricFamily("gpunode_jobs_unfinished", "Unfinished jobs", value=len(daemon.market.jobs.by_id))
        fields = {
            "DCGM_FI_DEV_GPU_UTIL": ("GPU utilisation (%)", "utilisation_percent"),
            "DCGM_FI_DEV_FB_USED": ("Framebuffer memory used (MiB)", "memory_used_mib"),
            "DCGM_FI_DEV_GPU_TEMP": ("GPU temperature (C)", "temperature_c"),
            "DCGM_FI_DEV_POWER_USAGE": ("Power draw (W)", "power_w"),
        }
        for name, (documentation, attribute) in fields.items():
            family = GaugeMetricFamily(name, documentation, labels=LABELS)
            for listed in list(daemon.inventory.devices.values()):
                device = listed.device
                value = getattr(device, attribute)
                if value is not None:
                    family.add_metric(
                        [str(device.index), device.uuid, device.model, str(device.simulated).lower()], value
                    )
            yield family


async def serve_metrics(port: int, daemon: Daemon) -> None:
    """Answer scrapes on 127.0.0.1:`port` until cancelled; 0: not at all. Raises ConfigError for a port in use."""
    if not port:
        return
    registry: Any = CollectorRegistry()
    registry.register(_Collector(daemon))
    try:
        server, thread = start_http_server(port, addr="127.0.0.1", registry=registry)
    except OSError as error:
        raise ConfigError(
            f"metrics.port {port} cannot be listened on: {error.strerror}", hint="choose another port, or 0"
        ) from None
    try:
        await trio.sleep_forever()
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)
