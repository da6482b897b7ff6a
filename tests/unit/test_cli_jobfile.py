from pathlib import Path
from typing import Any

import click
import pytest

from node.cli import jobfile
from node.cli.run import run
from node.errors import ConfigError


def merged(text: str, flags: tuple[str, ...] = (), path: Path = Path("job.toml")) -> dict[str, Any]:
    import tomllib

    with run.make_context("run", [*flags, "--", "true"]) as context:
        return jobfile.merge(context, dict(context.params), tomllib.loads(text), path)


def test_cli_job_file_has_the_long_flags() -> None:
    found = merged(
        """
        name = "train"
        gpus = "A100:2"
        gpu-memory = "40G"
        cpus = 4
        max-price = 0.36
        time = "8h"
        allow-simulated = true
        detach = true
        input = ["data", "code:src"]
        output = "results"
        command = ["python", "train.py"]
        [env]
        A = "b"
        """
    )
    assert found["gpus"] == (2, "A100")
    assert found["gpu_memory"] == 40 * 1024
    assert found["cpus"] == 4000
    assert found["max_price"] == 100_000
    assert found["time_ms"] == 8 * 3600 * 1000
    assert found["allow_simulated"] is True
    assert found["detach"] is True
    assert found["inputs"] == ("data", "code:src")
    assert found["outputs"] == ("results",)


def test_cli_flags_win_over_the_job_file() -> None:
    found = merged('gpus = 2\ntime = "8h"\nname = "file"', ("--gpus", "4", "--name", "flag"))
    assert found["gpus"] == (4, "")
    assert found["name"] == "flag"
    assert found["time_ms"] == 8 * 3600 * 1000, "a flag's default is no flag"


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("gpsu = 2", "gpsu", "did you mean gpus?"),
        ('max_price = "1"', "max_price", "did you mean max-price?"),
        ("zzzzzz = 1", "zzzzzz", "known here"),
        ("yes = true", "yes", "as --yes"),
        ('gpus = "A100:0"', "gpus in job.toml", "--gpus"),
        ("time = 8", "time in job.toml", "--time"),
        ("detach = 1", "detach", "true or false"),
        ("name = [1]", "name", "text or a number"),
    ],
)
def test_cli_wrong_job_file_says_what_is_wrong(text: str, says: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        merged(text)
    assert hint in caught.value.hint


def test_cli_job_file_has_a_command() -> None:
    path = Path("job.toml")
    assert jobfile.command_of({"command": "a | b"}, path) == ("sh", "-c", "a | b")
    assert jobfile.command_of({"command": ["a", "b"]}, path) == ("a", "b")
    assert jobfile.command_of({}, path) == ()
    with pytest.raises(ConfigError, match="command"):
        jobfile.command_of({"command": [1]}, path)
    with pytest.raises(ConfigError, match="env"):
        jobfile.variables_of({"env": {"A": 1}}, path)


def test_cli_job_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        jobfile.read(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = ")
    with pytest.raises(ConfigError, match="not TOML"):
        jobfile.read(tmp_path / "bad.toml")
    (tmp_path / "large.toml").write_bytes(b" " * (jobfile.FILE_SIZE_MAX + 1))
    with pytest.raises(ConfigError, match="larger"):
        jobfile.read(tmp_path / "large.toml")


def test_cli_option_names_of_flags_only_exist() -> None:
    with click.Context(run) as context:
        names = {name for option in run.get_params(context) for name in option.opts}
    assert {f"--{name}" for name in jobfile.FLAGS_ONLY} <= names
