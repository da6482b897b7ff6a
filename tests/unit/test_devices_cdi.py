"""Device nodes from CDI specifications, or the driver's usual ones."""

import json
from pathlib import Path

import pytest

from node.devices import DeviceNodes
from node.devices.cdi import FILE_SIZE_MAX

UUID = "GPU-4b7bde38-4ece-47c1-b53e-8f5240e93c00"


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    dev = tmp_path / "dev"
    dev.mkdir()
    for name in ("nvidia3", "nvidiactl", "nvidia-uvm-tools"):
        (dev / name).touch()
    return dev


def specification(dev: Path, name: str, *nodes: str, kind: str = "nvidia.com/gpu") -> str:
    return json.dumps(
        {
            "cdiVersion": "0.6.0",
            "kind": kind,
            "devices": [
                {"name": name, "containerEdits": {"deviceNodes": [{"path": str(dev / n)} for n in nodes]}}
            ],
            "containerEdits": {
                "deviceNodes": [{"path": str(dev / "nvidiactl"), "hostPath": str(dev / "host-ctl")}],
                "mounts": [{"hostPath": "/usr/lib/x", "containerPath": "/usr/lib/x", "options": ["ro"]}],
            },
        }
    )


def names(nodes: tuple[str, ...]) -> list[str]:
    return [Path(node).name for node in nodes]


def test_without_a_specification_the_nodes_that_exist_are_taken(dev: Path, tmp_path: Path) -> None:
    nodes = DeviceNodes(dev, (tmp_path / "none",))
    assert names(nodes.of(UUID, 0, 3)) == ["nvidia3", "nvidiactl", "nvidia-uvm-tools"]
    assert names(nodes.of(UUID, 0, 4)) == ["nvidiactl", "nvidia-uvm-tools"]
    assert names(nodes.of(UUID, 0, None)) == ["nvidiactl", "nvidia-uvm-tools"]


def test_a_specification_wins_by_uuid_or_index(dev: Path, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(specification(dev, "0", "nvidia0"))
    nodes = DeviceNodes(dev, (tmp_path,))
    assert names(nodes.of(UUID, 0, 3)) == ["nvidia0", "host-ctl"]
    assert names(nodes.of(UUID, 1, 3)) == ["nvidia3", "nvidiactl", "nvidia-uvm-tools"]
    (tmp_path / "b.json").write_text(specification(dev, UUID, "nvidia9"))
    assert names(nodes.of(UUID, 0, 3)) == ["nvidia9", "host-ctl"]
    (tmp_path / "b.json").unlink()
    assert names(nodes.of(UUID, 0, 3)) == ["nvidia0", "host-ctl"]


def test_the_later_directory_wins(dev: Path, tmp_path: Path) -> None:
    for folder, node in (("etc", "nvidia1"), ("run", "nvidia2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "nvidia.json").write_text(specification(dev, "0", node))
    assert names(DeviceNodes(dev, (tmp_path / "etc", tmp_path / "run")).of(UUID, 0, 3))[0] == "nvidia2"


@pytest.mark.parametrize(
    "content",
    [
        b"not json",
        b"[]",
        b'{"devices": []}',
        b'{"kind": "nvidia.com/gpu", "devices": [{"name": 0}]}',
        b"\xff\xfe",
        b" " * (FILE_SIZE_MAX + 1),
    ],
)
def test_a_broken_specification_is_ignored(dev: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "nvidia.json").write_bytes(content)
    assert "nvidia3" in names(DeviceNodes(dev, (tmp_path,)).of(UUID, 0, 3))


def test_other_vendors_yaml_and_nodes_outside_dev_are_ignored(dev: Path, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(specification(dev, "0", "nvidia0", kind="vendor.com/thing"))
    (tmp_path / "nvidia.yaml").write_text("kind: nvidia.com/gpu\n")
    (tmp_path / "outside.json").write_text(specification(Path("/etc"), "0", "shadow"))
    (tmp_path / "up.json").write_text(specification(dev, "0", "../../etc/shadow"))
    (tmp_path / "directory.json").mkdir()
    assert names(DeviceNodes(dev, (tmp_path,)).of(UUID, 0, 3)) == ["nvidia3", "nvidiactl", "nvidia-uvm-tools"]
