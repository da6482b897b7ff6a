import os
import subprocess
import sys

import click
import pytest

from node.cli.root import COMMANDS, cli

FORBIDDEN = {"trio", "libp2p", "aioquic", "pynvml", "sqlite_utils"}


def every_command(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], click.Command]]:
    found: list[tuple[tuple[str, ...], click.Command]] = []
    with click.Context(group) as context:
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            found.append(((*path, name), command))
            if isinstance(command, click.Group):
                found += every_command(command, (*path, name))
    return found


COMMAND_LIST = every_command(cli)


QUICK = (
    "status", "stop", "quote --gpus 2 --time 8h", "offers", "jobs", "why -", "logs -", "attach -", "fetch -",
    "exec - true", "cancel -", "run --yes -- true", "lend",
    "lend devices", "peers ls", "money ledger", "rpc jobs.list", "config show",
    "completion zsh", "uninstall",
)  # fmt: skip
"""Every command that asks the daemon or looks at files; none of them may load an async library."""


def loaded_by(*lines: str) -> list[set[str]]:
    """Return the top-level modules that are loaded after each of the command lines, run one after another."""
    program = (
        "import os, sys\n"
        "from node.cli.root import run\n"
        "for line in sys.argv[1:]:\n"
        "    run(line.split(), os.environ)\n"
        "    print('\\nLOADED', *{name.partition('.')[0] for name in sys.modules})\n"
    )
    environment = {**os.environ, "GPUNODE_SOCKET": "/nonexistent/rpc.sock"}
    done = subprocess.run(
        [sys.executable, "-c", program, *lines], capture_output=True, text=True, check=True, env=environment
    )
    return [set(line.split()) for line in done.stdout.splitlines() if line.startswith("LOADED")]


def test_cli_help_loads_no_async_library_and_no_tables() -> None:
    (loaded,) = loaded_by("--help")
    assert not loaded & {*FORBIDDEN, "rich"}


def test_cli_commands_load_no_async_library() -> None:
    offenders = {
        line: found for line, loaded in zip(QUICK, loaded_by(*QUICK), strict=True) if (found := loaded & FORBIDDEN)
    }
    assert offenders == {}


def test_cli_loading_is_seen_by_these_tests() -> None:
    assert "trio" in loaded_by("doctor --json")[0], "doctor probes with trio"


@pytest.mark.parametrize(("path", "command"), COMMAND_LIST, ids=[" ".join(path) for path, _ in COMMAND_LIST])
def test_cli_command_and_each_of_its_options_are_documented(path: tuple[str, ...], command: click.Command) -> None:
    with click.Context(command, info_name=" ".join(path)) as context:
        assert command.get_help(context)
        assert (command.help or "").strip()
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{path}: {parameter.opts} has no help"


@pytest.mark.parametrize(
    ("path", "command"),
    [
        (path, command)
        for path, command in COMMAND_LIST
        if not isinstance(command, click.Group) and path != ("start",)
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_cli_command_has_json(path: tuple[str, ...], command: click.Command) -> None:
    assert any("--json" in parameter.opts for parameter in command.params), path


def test_cli_list_of_commands_says_what_each_command_says() -> None:
    with click.Context(cli) as context:
        for name, entry in COMMANDS.items():
            command = cli.get_command(context, name)
            assert command is not None
            assert (command.help or "").startswith(entry.line), name
