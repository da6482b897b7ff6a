"""What the documents tell people to type is what the command understands."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from node.cli import jobfile
from node.cli.root import cli
from node.cli.run import run

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "contrib/examples/classifier/README.md")


def typed_commands(text: str) -> Iterator[list[str]]:
    """Yield the words after `gpunode` of each command in a document's code, continued lines joined."""
    blocks = re.findall(r"^```\n(.*?)^```", text, re.M | re.S) + re.findall(r"`([^`\n]+)`", text)
    for block in blocks:
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["sudo"]:
                words = words[1:]
            if words[:1] == ["gpunode"] and len(words) > 1:
                yield words[1:]


def problem_of(words: list[str]) -> str:
    """Return why the command line cannot be, or ""."""
    command: click.Command = cli
    context = click.Context(cli, info_name="gpunode")
    rest = list(words)
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        found = command.get_command(context, rest[0])
        if found is None:
            return f"there is no command {rest[0]}"
        context = click.Context(found, info_name=rest.pop(0), parent=context)
        command = found
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    known |= {"--help", "-h"}
    flags = rest[: rest.index("--")] if "--" in rest else rest
    unknown = [word for word in flags if re.match(r"--?[a-z]", word) and word.split("=")[0] not in known]
    return f"there is no flag {unknown[0]}" if unknown else ""


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documented_commands_exist(document: str) -> None:
    commands = list(typed_commands((ROOT / document).read_text()))
    assert commands
    problems = {shlex.join(words): problem for words in commands if (problem := problem_of(words))}
    assert problems == {}


def test_a_wrong_command_would_be_noticed() -> None:
    assert problem_of(["jbos"]) == "there is no command jbos"
    assert problem_of(["run", "--gpu", "1", "--", "--x"]) == "there is no flag --gpu"


def test_documented_files_exist() -> None:
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / target).exists(), target


def test_job_file_is_what_run_takes() -> None:
    path = ROOT / "contrib" / "examples" / "classifier" / "job.toml"
    context = run.make_context("run", ["-f", str(path)])
    table = jobfile.read(path)
    merged = jobfile.merge(context, {}, table, path)
    assert set(merged) == {"name", "gpus", "time_ms", "max_price", "inputs", "outputs"}
    assert jobfile.command_of(table, path) == ("python3", "train.py")
    for source in merged["inputs"]:
        assert (path.parent / source).exists()
