"""Start price and reserve price, on the design's own examples; and the table of models."""

import pytest

from protocol.device_models import MODELS, device_model
from protocol.pricing import CostModel, reserve_price, start_price
from protocol.records import DeviceSpec
from protocol.units import PRICE_MAX, Amount, amount_from_credits, format_price, price_from_hourly


def device(model: str, mig_profile: str = "") -> DeviceSpec:
    return DeviceSpec("nvidia", model, 40_960, 80, mig_profile=mig_profile)


def hourly(model: str, used: int = 0, capacity: int = 1, location_permille: int = 1000, mig: str = "") -> float:
    price = start_price(device(model, mig), used=used, capacity=capacity, location_permille=location_permille)
    assert price is not None
    return price * 3600 / 1e9


def test_an_a100_of_40_gb_starts_between_79_cents_and_1_58() -> None:
    assert round(hourly("NVIDIA A100-SXM4-40GB", 0, 8), 2) == 0.79
    assert round(hourly("NVIDIA A100-SXM4-40GB", 8, 8), 2) == 1.58
    assert round(hourly("NVIDIA A100-PCIE-40GB", 4, 8), 3) == 1.185


def test_the_reserve_of_an_a100_is_38_cents() -> None:
    costs = CostModel(
        power_w=400,
        pue_permille=1500,
        tariff_per_kwh=amount_from_credits("0.20"),
        depreciation=amount_from_credits("0.18"),
        bandwidth=amount_from_credits("0.05"),
        commission=amount_from_credits("0.03"),
    )
    assert reserve_price(costs) == price_from_hourly("0.38")
    assert format_price(reserve_price(costs)) == "$0.3800/h"


def test_nobody_takes_a_commission_by_default() -> None:
    assert reserve_price(CostModel(power_w=1000, tariff_per_kwh=Amount(3600))) == 1
    assert reserve_price(CostModel(power_w=300)) == 0


def test_costs_beyond_reason_are_refused() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        CostModel(power_w=-1)
    with pytest.raises(ValueError, match="larger than any price"):
        reserve_price(CostModel(power_w=1, depreciation=Amount((int(PRICE_MAX) + 1) * 3600)))


def test_location_scales_the_start_price() -> None:
    assert hourly("Tesla T4", location_permille=1500) == pytest.approx(1.5 * hourly("Tesla T4"), abs=1e-5)


def test_a_mig_instance_costs_its_share() -> None:
    whole, slice_ = hourly("NVIDIA A100-SXM4-40GB"), hourly("NVIDIA A100-SXM4-40GB", mig="3g.20gb")
    assert slice_ == pytest.approx(19.49 * 3 / 7 * 0.02 + 20 * 0.01, abs=1e-3)
    assert slice_ < whole
    assert hourly("NVIDIA A100-SXM4-40GB MIG 1g.5gb", mig="1g.5gb") < slice_
    assert start_price(device("NVIDIA A100-SXM4-40GB", "half"), used=0, capacity=1) is None


@pytest.mark.parametrize("model", ["", "NVIDIA", "A1000", "NVIDIA RTX 9999", "A100"])
def test_an_unknown_model_needs_its_owner_to_name_a_price(model: str) -> None:
    assert start_price(device(model), used=0, capacity=1) is None


@pytest.mark.parametrize(("used", "capacity"), [(-1, 1), (2, 1), (0, 0)])
def test_demand_is_a_share_of_a_capacity(used: int, capacity: int) -> None:
    with pytest.raises(ValueError, match="devices in use"):
        start_price(device("Tesla T4"), used=used, capacity=capacity)


@pytest.mark.parametrize("location", [0, -1, 100_001])
def test_a_location_factor_has_bounds(location: int) -> None:
    with pytest.raises(ValueError, match="location factor"):
        start_price(device("Tesla T4"), used=0, capacity=1, location_permille=location)


@pytest.mark.parametrize(
    ("nvml_name", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIE-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIE-80GB"),
        ("NVIDIA H200", "H200-SXM-141GB"),
        ("NVIDIA H200 NVL", "H200-NVL-141GB"),
        ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "A100-SXM4-40GB"),
    ],
)
def test_nvml_names_are_known(nvml_name: str, name: str) -> None:
    model = device_model(nvml_name)
    assert model is not None
    assert model.name == name


def test_the_table_is_sound() -> None:
    aliases = [alias for model in MODELS for alias in model.aliases]
    assert len(aliases) == len(set(aliases))
    assert all(alias == alias.casefold() and device_model(alias) for alias in aliases)
    for model in MODELS:
        assert 0.15 < hourly(model.aliases[0]) < 8, model.name
