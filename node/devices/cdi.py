"""Which device nodes a job needs for a GPU: from a CDI specification, or the driver's usual ones.

CDI (Container Device Interface, github.com/cncf-tags/container-device-interface, SPEC.md) describes devices in
/etc/cdi and /var/run/cdi. Only JSON is read; there is no YAML reader here, so write the file with
`nvidia-ctk cdi generate --format=json --output=/etc/cdi/nvidia.json`. Refuses to trust a node outside /dev.
"""

import os
from pathlib import Path

import msgspec

from node.log import get_logger

log = get_logger(__name__)

DIRECTORIES = (Path("/etc/cdi"), Path("/var/run/cdi"))
"""In rising priority, as the specification has it."""
KIND = "nvidia.com/gpu"
FILE_SIZE_MAX = 4 * 1024 * 1024
FILES_MAX = 64
SHARED_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")


class _Node(msgspec.Struct, frozen=True):
    path: str
    host_path: str = msgspec.field(name="hostPath", default="")


class _Edits(msgspec.Struct, frozen=True):
    nodes: tuple[_Node, ...] = msgspec.field(name="deviceNodes", default=())


class _Device(msgspec.Struct, frozen=True):
    name: str
    edits: _Edits = msgspec.field(name="containerEdits", default=_Edits())


class _Specification(msgspec.Struct, frozen=True):
    kind: str
    devices: tuple[_Device, ...] = ()
    edits: _Edits = msgspec.field(name="containerEdits", default=_Edits())


_Signature = tuple[tuple[str, int, int], ...]


class DeviceNodes:
    """Device nodes by GPU, read again when a specification changes."""

    def __init__(self, dev: Path = Path("/dev"), directories: tuple[Path, ...] = DIRECTORIES) -> None:
        self._dev = dev
        self._directories = directories
        self._signature: _Signature | None = None
        self._by_name: dict[str, tuple[str, ...]] = {}

    def of(self, uuid: str, index: int, minor: int | None) -> tuple[str, ...]:
        """Return the nodes for the GPU with this UUID, NVML index and minor number.

        A CDI device named by UUID wins over one named by index; without either /dev/nvidia<minor> and the
        driver's shared nodes, as far as they exist. Reads the disk.
        """
        self._refresh()
        for name in (uuid, str(index)):
            if name in self._by_name:
                return self._by_name[name]
        names = (*([] if minor is None else [f"nvidia{minor}"]), *SHARED_NODES)
        return tuple(str(self._dev / name) for name in names if (self._dev / name).exists())

    def _refresh(self) -> None:
        files = [file for directory in self._directories for file in _files(directory)]
        signature: _Signature = tuple(
            (str(file), status.st_mtime_ns, status.st_size)
            for file in files
            if (status := _status(file)) is not None
        )
        if signature == self._signature:
            return
        self._signature = signature
        self._by_name = {}
        for file in files:
            if file.suffix == ".json":
                self._by_name |= self._read(file)
            else:
                log.warning(
                    "devices.cdi_yaml_ignored", file=str(file), hint="nvidia-ctk cdi generate --format=json"
                )

    def _read(self, file: Path) -> dict[str, tuple[str, ...]]:
        """Return the nodes by device name that a specification states; nothing for a broken or foreign one."""
        try:
            with file.open("rb") as opened:
                data = opened.read(FILE_SIZE_MAX + 1)
            if len(data) > FILE_SIZE_MAX:
                log.warning("devices.cdi_ignored", file=str(file), reason=f"larger than {FILE_SIZE_MAX} bytes")
                return {}
            specification = msgspec.json.decode(data, type=_Specification)
        except (OSError, msgspec.DecodeError) as error:
            log.warning("devices.cdi_ignored", file=str(file), reason=str(error))
            return {}
        if specification.kind != KIND:
            return {}
        found: dict[str, tuple[str, ...]] = {}
        for device in specification.devices:
            nodes = (*device.edits.nodes, *specification.edits.nodes)
            paths = tuple(dict.fromkeys(node.host_path or node.path for node in nodes))
            outside = [path for path in paths if ".." in path or not path.startswith(f"{self._dev}/")]
            if outside:
                log.warning("devices.cdi_ignored", file=str(file), reason=f"{outside[0]} is outside {self._dev}")
            else:
                found[device.name] = paths
        return found


def _files(directory: Path) -> list[Path]:
    try:
        names = sorted(path for path in directory.iterdir() if path.suffix in (".json", ".yaml", ".yml"))
    except OSError:
        return []
    return names[:FILES_MAX]


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
