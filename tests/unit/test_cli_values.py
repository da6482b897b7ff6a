from pathlib import Path

import click
import pytest

from node.cli import values
from node.cli.output import format_bytes, format_command, format_cuda, format_mib, printable
from node.cli.requirement import requirement_from
from node.rpc.api import market
from protocol.units import HOUR_MS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2", (2, "")),
        ("A100", (1, "A100")),
        ("A100:2", (2, "A100")),
        ("rtx 4090:8", (8, "rtx 4090")),
        ("1", (1, "")),
    ],
)
def test_cli_gpus_are_read(text: str, expected: tuple[int, str]) -> None:
    assert values.gpus(text) == expected


@pytest.mark.parametrize("text", ["0", "65", "A100:0", ":2", "A100:", "A100:x", "-1:2:"])
def test_cli_wrong_gpus_are_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="number of GPUs"):
        values.gpus(text)


def test_cli_amounts_have_the_program_s_units() -> None:
    assert values.duration("8h") == 8 * HOUR_MS
    assert values.size("40G") == 40 * 1024
    assert values.price("0.36") == 100_000
    assert values.credits_amount("1.5") == 1_500_000_000
    assert values.cores("0.5") == 500
    assert values.cuda("12.4") == 12_040


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (values.duration, "8"),
        (values.size, "40"),
        (values.price, "cheap"),
        (values.cuda, "12"),
        (values.cores, "-1"),
    ],
)
def test_cli_wrong_amounts_say_what_is_allowed(read: object, text: str) -> None:
    with pytest.raises(click.BadParameter, match="such as"):
        read(text)  # type: ignore[operator]


def test_cli_inputs_are_read(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "a:b").mkdir()
    assert values.parse_input("data", tmp_path) == (tmp_path / "data", "data")
    assert values.parse_input("data/", tmp_path).destination == "data"
    assert values.parse_input(".", tmp_path / "data").destination == "data"
    assert values.parse_input("data:in/x/", tmp_path) == (tmp_path / "data", "in/x")
    assert values.parse_input("data:/job/in", tmp_path).destination == "in"
    assert values.parse_input("data:.", tmp_path).destination == "."
    assert values.parse_input("a:b", tmp_path) == (tmp_path / "a:b", "a:b"), "a file that is there has a colon"


def test_cli_outputs_are_read(tmp_path: Path) -> None:
    assert values.parse_output("results", tmp_path) == ("results", tmp_path / "results")
    assert values.parse_output("out/a:b", tmp_path) == ("out/a", tmp_path / "b")
    assert values.parse_output("/job/out:/x/y", tmp_path) == ("out", Path("/x/y"))
    with pytest.raises(ValueError, match="whole directory"):
        values.parse_output(".", tmp_path)


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "", "/job"])
def test_cli_paths_outside_the_job_are_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not inside the job's directory"):
        values.parse_output(path, tmp_path)


def test_cli_variables_are_read() -> None:
    assert values.parse_variable("A=b=c", {}) == ("A", "b=c")
    assert values.parse_variable("A=", {"A": "here"}) == ("A", "")
    assert values.parse_variable("A", {"A": "here"}) == ("A", "here")
    with pytest.raises(ValueError, match="write A=VALUE"):
        values.parse_variable("A", {})
    with pytest.raises(ValueError, match="name of a variable"):
        values.parse_variable("1A=x", {})


def test_cli_requirement_without_flags_asks_for_one_gpu_of_any_kind() -> None:
    given = dict.fromkeys(
        ("gpus", "gpu_memory", "cuda", "cpus", "memory", "disk", "shm", "isolation", "net", "provider", "region",
         "max_price", "allow_simulated")
    )  # fmt: skip
    assert requirement_from(given) == market.Requirement()


def test_cli_what_others_say_cannot_drive_the_terminal() -> None:
    assert printable("a\x1b[31mb\x07c\u202ed\ne") == "a\ufffd[31mb\ufffdc\ufffdd\ne"


def test_cli_sizes_for_people() -> None:
    assert [format_mib(512), format_mib(40_960), format_mib(1_536)] == ["512 MiB", "40 GiB", "1.5 GiB"]
    assert [format_bytes(999), format_bytes(12_345), format_bytes(10**13)] == ["999 B", "12.3 kB", "10.0 TB"]
    assert format_command(["echo", "a b", "x" * 100], 20) == "echo 'a b' xxxxxx..."
    assert [format_cuda(12_040), format_cuda(0)] == ["12.4", ""]
