"""What people type on the command line, and what it means: lengths of time, sizes, money, GPUs, paths.

Refuses to guess: a value that could mean two things is an error that says how to write it.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import click

PEER_ID = re.compile(r"[1-9A-HJ-NP-Za-km-z]{2,64}")
JOB_DIRECTORY = "/job/"
"""Where a job sees its directory."""


def _parsed(parser: str) -> Callable[[str], int]:
    """Return an option's type: a reader of `node.config.text`, which is imported when a value is there to read."""

    def convert(value: str) -> int:
        from node.config import text

        parse: Callable[[object], int] = getattr(text, parser)
        try:
            return parse(value)
        except ValueError as error:
            raise click.BadParameter(f"{value!r} is not {error}") from None

    return convert


duration = _parsed("parse_duration")
"""Milliseconds of "8h", "1h30m", "90s"."""
size = _parsed("parse_size")
"""MiB of "40G", "512M"."""
price = _parsed("parse_price")
"""Nano-credits per device-second of dollars per GPU-hour."""
credits_amount = _parsed("parse_credits")
"""Nano-credits of dollars."""
cores = _parsed("parse_thousandths")
"""Thousandths of cores."""
cuda = _parsed("parse_cuda")
"""12040 of "12.4"."""


class Gpus(NamedTuple):
    """What --gpus says."""

    quantity: int
    model: str


def gpus(value: str) -> Gpus:
    """Read "2", "A100", "A100:2"."""
    model, colon, count = value.rpartition(":")
    if not colon and not value.isdecimal():
        model, count = value, "1"
    if not count.isdecimal() or not 1 <= int(count) <= 64 or (colon and not model):
        raise click.BadParameter(f"{value!r} is not a number of GPUs such as 2, A100 or A100:2 (1 to 64)")
    return Gpus(int(count), model.strip())


def peer(value: str) -> str:
    """Return a peer id, or the end of one as tables show it."""
    value = value.removeprefix("..")
    if not PEER_ID.fullmatch(value):
        raise click.BadParameter(f"{value!r} is not a peer id; see them with: gpunode peers ls")
    return value


class InputArgument(NamedTuple):
    """SRC[:DST] of --input."""

    source: Path
    destination: str


class OutputArgument(NamedTuple):
    """DIR[:LOCAL] of --output."""

    remote: str
    local: Path


def parse_input(text: str, base: Path) -> InputArgument:
    """Read SRC[:DST]; a relative SRC is below `base`. Raises ValueError with what is wrong."""
    source, colon, destination = text.rpartition(":")
    if not colon or (base / text).exists():
        source, destination = text, ""
    path = (base / Path(source).expanduser()).absolute()
    name = destination or path.resolve().name
    return InputArgument(path, inside_job(name, f"the destination of {text!r}"))


def parse_output(text: str, base: Path) -> OutputArgument:
    """Read DIR[:LOCAL]; a relative LOCAL is below `base`, and left out it is DIR's own path there."""
    remote, _, local = text.partition(":")
    remote = inside_job(remote, f"the output {text!r}")
    if remote == "." and not local:
        raise ValueError(f"{text!r} is the job's whole directory: say where it goes, such as .:results")
    return OutputArgument(remote, (base / Path(local or remote).expanduser()).absolute())


def inside_job(path: str, what: str) -> str:
    """Return `path` relative to the job's directory, normalised; raise ValueError when it is not in there."""
    relative = path.removeprefix(JOB_DIRECTORY)
    parts = [part for part in relative.split("/") if part not in ("", ".")]
    if relative.startswith("/") or ".." in parts or not path or "\0" in path:
        raise ValueError(f"{what} is not inside the job's directory ({JOB_DIRECTORY.rstrip('/')})")
    return "/".join(parts) or "."


def parse_variable(text: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Read K=V, or K for the value that it has here. Raises ValueError."""
    name, equals, value = text.partition("=")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,255}", name):
        raise ValueError(f"{name!r} is not the name of a variable")
    if not equals:
        if name not in environ:
            raise ValueError(f"{name} has no value here: write {name}=VALUE")
        value = environ[name]
    return name, value
