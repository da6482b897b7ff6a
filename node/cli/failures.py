"""How a failure is told: what happened and why, then what to do next; on stderr, or as JSON on stdout.

Refuses tracebacks.
"""

import json
import sys

import click

from node.errors import NodeError

EXIT_TIME_LIMIT = 124
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells have it: a loop around the command ends, too."""
EXIT_BROKEN_PIPE = 141
"""128 + SIGPIPE."""


def show_failure(error: Exception, *, as_json: bool) -> None:
    """Print `error` on stderr; with `as_json` also as one object on stdout."""
    message, hint, code = describe(error)
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"  hint: {hint}", file=sys.stderr)
    if as_json:
        print(json.dumps({"error": {"code": code, "message": message, "hint": hint}}))


def describe(error: Exception) -> tuple[str, str, int]:
    """Return (message, hint, code) of a failure; of a group of them, of the first."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, NodeError):
        number = getattr(error, "number", error.code)
        return printable(str(error)), printable(error.hint), number
    if isinstance(error, click.UsageError):
        usage = f"see: {error.ctx.command_path} --help" if error.ctx else "see: gpunode --help"
        return error.format_message(), usage, NodeError.code
    if isinstance(error, click.ClickException):
        return error.format_message(), "", NodeError.code
    return (
        f"a bug in gpunode: {type(error).__name__}: {printable(str(error))}",
        "please report it, with the command that you typed",
        NodeError.code,
    )


def printable(text: str) -> str:
    """Return `text` with line ends kept and everything else that a terminal would obey taken out."""
    return "".join(
        character if character.isprintable() or character == "\n" else "\N{REPLACEMENT CHARACTER}"
        for character in text
    )
