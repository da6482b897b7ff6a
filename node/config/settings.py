"""Every setting, with its range and its default. Only settings that the product uses are here.

Attributes carry units and the program's integers (`idle_after_ms`); the configuration file's keys are for people
(`idle_after = "15m"`). How a value is read is named by `Reads` in its annotation. Refuses to read files: that is
`node.config.loading`.
"""

import enum
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from node.config.addresses import is_dial_address, is_host, is_ip, is_listen_address
from node.config.text import Secret
from protocol.identity import NetworkId, network_id
from protocol.pricing import LOCATION_PERMILLE_MAX, CostModel
from protocol.records.fields import DEVICES_MAX, DURATION_MAX_MS, LIST_MAX
from protocol.units import AMOUNT_MAX, DAY_MS, HOUR_MS, MINUTE_MS, NANO, PRICE_MAX, SECOND_MS, Amount, Price

DEMO_NETWORK = "demo"
"""The only network in which simulated devices may be offered."""


class Reads(enum.StrEnum):
    """How the text of a setting becomes its value; `node.config.strict` has the readers."""

    DURATION = "duration"
    SIZE = "size"
    PRICE = "price"
    CREDITS = "credits"
    THOUSANDTHS = "thousandths"
    COMPUTE_CAPABILITY = "compute_capability"
    CUDA = "cuda"
    PATH = "path"
    SECRET = "secret"  # noqa: S105 - the name of a kind of setting


_DURATION = {"reads": Reads.DURATION}
_THOUSANDTHS = {"reads": Reads.THOUSANDTHS}
_LABEL = {"allowed": "at most 128 characters without control characters"}

AnyDuration = Annotated[int, Meta(ge=0, le=DURATION_MAX_MS, extra=_DURATION)]
AnySize = Annotated[int, Meta(ge=1, le=2**30, extra={"reads": Reads.SIZE})]
AnyPrice = Annotated[int, Meta(ge=0, le=int(PRICE_MAX), extra={"reads": Reads.PRICE})]
Credits = Annotated[int, Meta(ge=0, le=int(AMOUNT_MAX), extra={"reads": Reads.CREDITS})]
Factor = Annotated[int, Meta(ge=1, le=LOCATION_PERMILLE_MAX, extra=_THOUSANDTHS)]
LabelText = Annotated[str, Meta(max_length=128, pattern=r"^[^\x00-\x1f\x7f]*$", extra=_LABEL)]
AbsolutePath = Annotated[Path, Meta(extra={"reads": Reads.PATH})]
Port = Annotated[int, Meta(ge=0, le=65535)]


def _check_prices(start: int | None, reserve: int | None, of: str = "") -> None:
    if start is not None and reserve is not None and reserve > start:
        raise ValueError(f"the reserve_price{of} is above the start_price{of}")


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of settings."""


class NetworkSettings(Settings, frozen=True, kw_only=True):
    """[network]: which market this machine is in, and how it is reached."""

    name: Annotated[
        str,
        Meta(
            pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$",
            extra={"allowed": "1 to 64 of a-z, 0-9, dot, dash and underscore, a letter or digit first"},
        ),
    ] = "gpunode"
    key: Annotated[Secret, Meta(extra={"reads": Reads.SECRET})] | None = None
    """The shared key of a private pool; also filled from `key_file`."""
    key_file: AbsolutePath | None = None
    listen: Annotated[tuple[str, ...], Meta(min_length=1, max_length=8)] = ("/ip4/0.0.0.0/tcp/7440",)
    bootstrap: Annotated[tuple[str, ...], Meta(max_length=LIST_MAX)] = ()
    max_peers: Annotated[int, Meta(ge=4, le=1000)] = 64

    def __post_init__(self) -> None:
        for address in self.listen:
            if not is_listen_address(address):
                raise ValueError(f"{address!r} in listen is not /ip4/ADDRESS/tcp/PORT or /ip6/ADDRESS/tcp/PORT")
        for address in self.bootstrap:
            if not is_dial_address(address):
                raise ValueError(f"{address!r} in bootstrap is not /ip4/ADDRESS/tcp/PORT/p2p/PEER (or ip6, dns)")

    @property
    def is_open(self) -> bool:
        """Whether strangers can join: no shared key."""
        return self.key is None

    @property
    def id(self) -> NetworkId:
        """The hash of name and key that every signature covers."""
        return network_id(self.name, b"" if self.key is None else self.key.reveal())


class LogSettings(Settings, frozen=True, kw_only=True):
    """[log]: what is written to stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "text"] = "auto"
    """auto: text on a terminal, JSON lines otherwise."""

    @property
    def json_lines(self) -> bool | None:
        """The format as `node.log.configure` takes it."""
        return {"auto": None, "json": True, "text": False}[self.format]


class TunnelSettings(Settings, frozen=True, kw_only=True):
    """[tunnel]: the UDP ports of leases."""

    port_min: Port = 0
    port_max: Port = 0
    """Both 0: any free port."""
    bind: str = "0.0.0.0"  # noqa: S104 - renters come from everywhere
    advertise: Annotated[tuple[str, ...], Meta(max_length=8)] = ()
    """Hosts that renters are told to dial; empty: the address at which the renter's daemon reached us."""

    def __post_init__(self) -> None:
        if (self.port_min == 0) != (self.port_max == 0) or self.port_min > self.port_max:
            raise ValueError(
                f"port_min {self.port_min} and port_max {self.port_max} are not a range: "
                "both 0 (any port), or port_min at most port_max"
            )
        if not is_ip(self.bind):
            raise ValueError(f"bind is {self.bind!r}, which is not an IP address (0.0.0.0 or :: for all)")
        for host in self.advertise:
            if not is_host(host):
                raise ValueError(f"{host!r} in advertise is not an IP address or host name (without a port)")


class ModelPrice(Settings, frozen=True, kw_only=True):
    """[lend.price."MODEL"]: prices of one GPU model, named as NVML names it."""

    start: AnyPrice | None = field(name="start_price", default=None)
    reserve: AnyPrice | None = field(name="reserve_price", default=None)

    def __post_init__(self) -> None:
        _check_prices(self.start, self.reserve)


class CostSettings(Settings, frozen=True, kw_only=True):
    """[lend.cost]: what an hour of a device costs; the reserve price where none is set."""

    power_w: Annotated[int, Meta(ge=0, le=10_000)] | None = None
    """None: the device's own power limit."""
    pue_permille: Annotated[int, Meta(ge=1000, le=10_000, extra=_THOUSANDTHS)] = field(name="pue", default=1200)
    tariff: Credits = 200_000_000
    """Per kWh."""
    depreciation: Credits = 0
    bandwidth: Credits = 0
    commission: Credits = 0
    """Per device-hour, as the two above."""

    def model(self, device_power_w: int) -> CostModel:
        """Return the cost model of a device whose own power limit is `device_power_w` watts."""
        return CostModel(
            power_w=device_power_w if self.power_w is None else self.power_w,
            pue_permille=self.pue_permille,
            tariff_per_kwh=Amount(self.tariff),
            depreciation=Amount(self.depreciation),
            bandwidth=Amount(self.bandwidth),
            commission=Amount(self.commission),
        )


class AuctionSettings(Settings, frozen=True, kw_only=True):
    """[lend.auction]: the shape of the falling price."""

    opening_ms: Annotated[int, Meta(ge=0, le=MINUTE_MS, extra=_DURATION)] = field(name="opening", default=2000)
    tick_ms: Annotated[int, Meta(ge=50, le=MINUTE_MS, extra=_DURATION)] = field(name="tick", default=300)
    halving_ms: Annotated[int, Meta(ge=SECOND_MS, le=30 * DAY_MS, extra=_DURATION)] = field(
        name="halving", default=30 * MINUTE_MS
    )
    lift_permille: Annotated[int, Meta(ge=0, le=1000, extra=_THOUSANDTHS)] = field(name="lift", default=100)


class TermsSettings(Settings, frozen=True, kw_only=True):
    """[lend.terms]: what a renter of ours can rely on."""

    lease_min_ms: AnyDuration = field(name="lease_min", default=MINUTE_MS)
    lease_max_ms: AnyDuration = field(name="lease_max", default=DAY_MS)
    notice_ms: AnyDuration = field(name="notice", default=2 * MINUTE_MS)
    checkpoint_ms: AnyDuration = field(name="checkpoint", default=MINUTE_MS)
    grace_ms: AnyDuration = field(name="grace", default=10 * MINUTE_MS)
    retention_ms: AnyDuration = field(name="retention", default=DAY_MS)
    voucher_interval_ms: Annotated[int, Meta(ge=100, le=HOUR_MS, extra=_DURATION)] = field(
        name="voucher_interval", default=10 * SECOND_MS
    )
    window_intervals: Annotated[int, Meta(ge=1, le=1000)] = 3

    def __post_init__(self) -> None:
        if self.lease_min_ms > self.lease_max_ms:
            raise ValueError("lease_min is longer than lease_max")


class HostShare(Settings, frozen=True, kw_only=True):
    """[lend.host]: what a lease may use of the machine for each device; None: an equal share of it."""

    cpus_milli: Annotated[int, Meta(ge=100, le=1_024_000, extra=_THOUSANDTHS)] | None = field(
        name="cpus", default=None
    )
    memory_mib: AnySize | None = field(name="memory", default=None)
    disk_mib: AnySize | None = field(name="disk", default=None)


class LendSettings(Settings, frozen=True, kw_only=True):
    """[lend]: whether, when, how and for what this machine's GPUs are lent."""

    enabled: bool = False
    idle_after_ms: Annotated[int, Meta(ge=0, le=30 * DAY_MS, extra=_DURATION)] = field(
        name="idle_after", default=15 * MINUTE_MS
    )
    start_price: AnyPrice | None = None
    """None: the formula's."""
    reserve_price: AnyPrice | None = None
    """None: from `cost`."""
    price: Annotated[dict[str, ModelPrice], Meta(max_length=DEVICES_MAX)] = {}
    reprice_every_ms: Annotated[int, Meta(ge=10 * SECOND_MS, le=DAY_MS, extra=_DURATION)] = field(
        name="reprice_every", default=5 * MINUTE_MS
    )
    location_permille: Factor = field(name="location_factor", default=1000)
    region: LabelText = ""
    site: LabelText = ""
    isolation: Annotated[tuple[Literal["bubblewrap", "unsafe-process"], ...], Meta(min_length=1, max_length=8)] = (
        "bubblewrap",
    )
    unsafe_process: bool = False
    """Says a second time that jobs may run without any isolation."""
    cost: CostSettings = CostSettings()
    auction: AuctionSettings = AuctionSettings()
    terms: TermsSettings = TermsSettings()
    host: HostShare = HostShare()

    def __post_init__(self) -> None:
        _check_prices(self.start_price, self.reserve_price)
        for model in self.price:
            _check_prices(*self.prices_of(model), f" of {model!r}")
        if len(set(self.isolation)) != len(self.isolation):
            raise ValueError("isolation names a tier twice")
        if ("unsafe-process" in self.isolation) != self.unsafe_process:
            raise ValueError(
                'isolation = ["unsafe-process"] and unsafe_process = true belong together: '
                "both, or neither; it gives jobs the run of the machine"
            )

    def prices_of(self, model: str) -> tuple[Price | None, Price | None]:
        """Return (start, reserve) as the owner set them for `model`: its own table first, then [lend]."""
        own = self.price.get(model, ModelPrice())
        start = self.start_price if own.start is None else own.start
        reserve = self.reserve_price if own.reserve is None else own.reserve
        return (None if start is None else Price(start), None if reserve is None else Price(reserve))


class LedgerSettings(Settings, frozen=True, kw_only=True):
    """[ledger]: how much others may owe us before they pay."""

    pool_credit: Credits = 100 * NANO
    """For each member of a network that has a key."""
    stranger_credit: Credits = NANO
    """For all strangers together."""


class MetricsSettings(Settings, frozen=True, kw_only=True):
    """[metrics]: Prometheus."""

    port: Port = 0
    """On 127.0.0.1; 0: off."""


class SimulatedDevice(Settings, frozen=True, kw_only=True):
    """[[simulated_device]]: GPUs that do not exist, for the `demo` network only."""

    model: Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]+$", extra=_LABEL)]
    memory_mib: AnySize = field(name="memory")
    count: Annotated[int, Meta(ge=1, le=DEVICES_MAX)] = 1
    compute_capability: Annotated[int, Meta(ge=10, le=999, extra={"reads": Reads.COMPUTE_CAPABILITY})] = 80
    cuda: Annotated[int, Meta(ge=1000, le=99_990, extra={"reads": Reads.CUDA})] = 12040
    power_limit_w: Annotated[int, Meta(ge=1, le=10_000)] = 300


class Config(Settings, frozen=True, kw_only=True):
    """All settings of one daemon."""

    state_dir: AbsolutePath
    runtime_dir: AbsolutePath
    network: NetworkSettings = NetworkSettings()
    log: LogSettings = LogSettings()
    tunnel: TunnelSettings = TunnelSettings()
    lend: LendSettings = LendSettings()
    ledger: LedgerSettings = LedgerSettings()
    metrics: MetricsSettings = MetricsSettings()
    simulated_devices: Annotated[tuple[SimulatedDevice, ...], Meta(max_length=DEVICES_MAX)] = field(
        name="simulated_device", default=()
    )

    def __post_init__(self) -> None:
        if self.simulated_devices and self.network.name != DEMO_NETWORK:
            raise ValueError(
                f"[[simulated_device]] is allowed only in the network {DEMO_NETWORK!r}, not in "
                f"{self.network.name!r}: nobody must be able to buy a GPU that does not exist"
            )
        if sum(table.count for table in self.simulated_devices) > DEVICES_MAX:
            raise ValueError(f"more than {DEVICES_MAX} simulated devices")
        if self.lend.unsafe_process and self.network.is_open:
            raise ValueError(
                "lend.unsafe_process is refused in an open network: anyone could run anything here; "
                "set network.key or network.key_file"
            )
