"""The root command: which commands there are, how they are loaded, and what becomes of errors.

Refuses to import a command before it is called.
"""

import importlib
import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from typing import NamedTuple

import click

from node import __version__
from node.cli.failures import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, show_failure
from node.errors import EXIT_OWN, NodeError
from node.rpc.paths import SOCKET_VARIABLE


class Entry(NamedTuple):
    """Where a command lives, and its line in the list."""

    section: str
    place: str
    """module:attribute, below node.cli."""
    line: str


COMMANDS: Mapping[str, Entry] = {
    "run": Entry("Renting", "run:run", "Run a command on somebody's GPU."),
    "quote": Entry("Renting", "market:quote", "Show what would match, and what it would cost."),
    "offers": Entry("Renting", "market:offers", "List the live offers."),
    "jobs": Entry("Renting", "jobs:jobs", "List jobs, or show one."),
    "why": Entry("Renting", "jobs:why", "Say why a job waits or failed, or why nothing matches."),
    "logs": Entry("Renting", "jobs:logs", "Print a job's output."),
    "attach": Entry("Renting", "jobs:attach", "Follow a job as `run` does, until it ends."),
    "exec": Entry("Renting", "execution:execute", "Run another command in a running job's sandbox."),
    "fetch": Entry("Renting", "jobs:fetch", "Collect outputs that are not here yet."),
    "cancel": Entry("Renting", "jobs:cancel", "End jobs; what they used is owed."),
    "lend": Entry("Lending", "lend:lend", "Lend this machine's GPUs, and take them back."),
    "peers": Entry("Peers and money", "peers:peers", "Who is out there, and who has credit."),
    "money": Entry("Peers and money", "money:money", "Who owes whom, and why."),
    "start": Entry("This machine", "daemon:start", "Run the daemon, in the foreground."),
    "stop": Entry("This machine", "daemon:stop", "Stop the daemon; jobs go on unless told otherwise."),
    "status": Entry("This machine", "daemon:status", "Show what the daemon, its GPUs and jobs are doing."),
    "doctor": Entry("This machine", "doctor:doctor", "Check this machine, and say how to mend it."),
    "config": Entry("This machine", "config:config", "Show and check the configuration."),
    "uninstall": Entry("This machine", "uninstall:uninstall", "Remove what scripts/install installed."),
    "rpc": Entry("This machine", "rpc:rpc", "Call METHOD of the daemon's interface."),
    "completion": Entry("This machine", "completion:completion", "Print the completion script of a shell."),
}


class _PipeClosed(Exception):
    """Whoever read our output has gone."""


class LazyGroup(click.Group):
    """A group that imports a command when it is asked for."""

    def invoke(self, ctx: click.Context) -> object:
        """Carry out the command; click itself would end the process when a pipe is closed."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise _PipeClosed from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command."""
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        module, _, attribute = entry.place.partition(":")
        command = getattr(importlib.import_module(f"node.cli.{module}"), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{entry.place} is no command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by section, from the table alone."""
        for section in dict.fromkeys(entry.section for entry in COMMANDS.values()):
            with formatter.section(section):
                formatter.write_dl(
                    [(name, entry.line) for name, entry in COMMANDS.items() if entry.section == section]
                )


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Exit status: the job's own; 124 its time limit; 125 a failure or wrong use of gpunode; 130 Ctrl-C.",
)
@click.version_option(__version__, message="gpunode %(version)s")
@click.option(
    "--socket", metavar="PATH", help=f"The daemon's socket (else {SOCKET_VARIABLE}, else where it is by default)."
)
def cli(socket: str | None) -> None:
    """Rent and lend GPUs directly between machines: no server, no chain, no account."""
    if socket is not None:
        os.environ[SOCKET_VARIABLE] = socket


def run(arguments: Sequence[str], environ: MutableMapping[str, str]) -> int:
    """Carry out a command line, and return its exit status."""
    as_json = "--json" in arguments[: arguments.index("--") if "--" in arguments else None]
    try:
        _refuse_other_encodings(arguments)
        status = cli.main(list(arguments), prog_name="gpunode", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Exit as exited:
        return exited.exit_code
    except SystemExit as exited:  # a shell asked for completions
        return exited.code if isinstance(exited.code, int) else 0
    except (KeyboardInterrupt, click.Abort):
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (_PipeClosed, BrokenPipeError):
        # Nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except click.ClickException as error:
        show_failure(error, as_json=as_json)
        return EXIT_OWN
    except NodeError as error:
        show_failure(error, as_json=as_json)
        return error.exit_status
    except Exception as error:  # a bug of ours: said in one line, never as a traceback
        show_failure(error, as_json=as_json)
        return EXIT_OWN
    return status if isinstance(status, int) else 0


def _refuse_other_encodings(arguments: Sequence[str]) -> None:
    """Raise UsageError for words that are not UTF-8: neither job nor daemon could be told of them."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            shown = os.fsencode(argument).decode(errors="backslashreplace")
            raise click.UsageError(f"{shown} is not UTF-8: rename what it names") from None
