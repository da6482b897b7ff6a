"""A handle on the fake NVML (fake_nvml.c): GPUs that do not exist, but look real to pynvml.

In this process: `fake.load(monkeypatch)`. In a child process: pass it `fake.environment`. Both before the first
NVML call there. Changes are seen at the next NVML call.
"""

import atexit
import ctypes
import functools
import subprocess
import tempfile
import uuid
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fake_nvml.c")
LIBRARY = "libnvidia-ml.so.1"


@functools.cache
def library() -> Path:
    """Build the library, once in this process, and return its path; it is removed when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="fake-nvml-")
    atexit.register(folder.cleanup)
    path = Path(folder.name) / LIBRARY
    # The soname makes dlopen("libnvidia-ml.so.1") find this library in a process that has loaded it by its path.
    flags = [
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-shared",
        "-fPIC",
        "-fvisibility=hidden",
        f"-Wl,-soname,{LIBRARY}",
    ]
    subprocess.run(["gcc", *flags, "-o", str(path), str(SOURCE), "-lpthread"], check=True)
    return path


class FakeNvml:
    """An INI file that describes a machine's GPUs. Keys of GPUs and of the system: see fake_nvml.c."""

    def __init__(self, folder: Path, gpus: int = 1) -> None:
        self.path = folder / "fake_nvml.ini"
        self._system: dict[str, object] = {}
        self._gpus: list[dict[str, object]] = []
        for _ in range(gpus):
            self.add()

    @property
    def environment(self) -> dict[str, str]:
        """What a child process needs in its environment (replaces its LD_LIBRARY_PATH)."""
        return {"FAKE_NVML_CONF": str(self.path), "LD_LIBRARY_PATH": str(library().parent)}

    @property
    def uuids(self) -> tuple[str, ...]:
        """The UUIDs, in NVML's order."""
        return tuple(str(gpu["uuid"]) for gpu in self._gpus)

    def load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make this process's pynvml see these GPUs until the test's end."""
        ctypes.CDLL(str(library()))
        monkeypatch.setenv("FAKE_NVML_CONF", str(self.path))

    def add(self, **values: object) -> str:
        """Plug in a GPU and return its UUID, which no other fake GPU has."""
        gpu = {"uuid": f"GPU-{uuid.uuid4()}", **values}
        self._gpus.append(gpu)
        self._write()
        return str(gpu["uuid"])

    def remove(self, index: int) -> None:
        """Pull a GPU out."""
        del self._gpus[index]
        self._write()

    def set(self, index: int, **values: object) -> None:
        """Change a GPU, such as `set(0, temperature=90, compute="12,13")`."""
        self._gpus[index].update(values)
        self._write()

    def set_system(self, **values: object) -> None:
        """Change the driver, such as `set_system(init_error=9)`: not loaded."""
        self._system.update(values)
        self._write()

    def _write(self) -> None:
        sections = {"system": self._system} | {f"gpu{index}": gpu for index, gpu in enumerate(self._gpus)}
        lines = [
            line
            for name, values in sections.items()
            for line in (f"[{name}]", *(f"{key}={value}" for key, value in values.items()))
        ]
        unfinished = self.path.with_suffix(".new")
        unfinished.write_text("\n".join(lines) + "\n")
        unfinished.replace(self.path)
