"""What goes to the terminal: tables and lines for people, one JSON object for programs.

rich is loaded when a table is printed, and not before. Colour only on terminals and never with NO_COLOR; what
peers and jobs say is printed without control characters. Refuses to print simulated devices without saying so.
"""

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

import click
import msgspec

from node.cli.failures import printable
from protocol.units import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS

if TYPE_CHECKING:
    from rich.console import Console

F = TypeVar("F", bound=Callable[..., object])
CELL_KEPT = 44
"""Columns of a cell that are never cut, in characters."""
PLAIN_WIDTH = 200
"""Columns where there is no terminal: wide enough that no cell of a pipe's line is cut."""
SIMULATED = "SIMULATED"
ID_SHOWN = 12
"""Characters of a peer id or hash that a table shows: the end of a peer id, the beginning of a hash."""


def json_option(command: F) -> F:
    """Add --json to a command, as the parameter `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")(command)


def print_json(value: object) -> None:
    """Print a struct or tree as one JSON object on stdout."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def console(*, stderr: bool = False) -> "Console":
    """Return a console of stdout or stderr that takes no markup from what it prints."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PLAIN_WIDTH
    return Console(file=stream, stderr=stderr, width=width, markup=False, highlight=False, emoji=False)


def say(text: str = "") -> None:
    """Print a line for people on stdout."""
    print(printable(text))


def tell(text: str) -> None:
    """Print a line for people on stderr: progress and remarks, never the answer."""
    print(printable(text), file=sys.stderr, flush=True)


def table(heads: Iterable[str], rows: Iterable[Iterable[str]], *, stderr: bool = False, indent: int = 0) -> None:
    """Print rows under heads. A head that ends in ">" is aligned to the right; SIMULATED cells stand out."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    columns, lines = list(heads), [list(row) for row in rows]
    for index, head in enumerate(columns):
        right, last = head.endswith(">"), index == len(columns) - 1
        # A long last cell (a note) wraps; the others keep their width, so that ids can be copied.
        longest = max((len(printable(line[index])) for line in lines), default=0)
        grid.add_column(
            head.rstrip(">"),
            justify="right" if right else "left",
            overflow="fold",
            no_wrap=not right and not last,
            min_width=None if last else min(longest, CELL_KEPT),
        )
    for line in lines:
        grid.add_row(*(Text(printable(cell), style="bold yellow" if SIMULATED in cell else "") for cell in line))
    target = console(stderr=stderr)
    if indent:
        from rich.padding import Padding

        target.print(Padding(grid, (0, 0, 0, indent), expand=False))
    else:
        target.print(grid)


def fields(pairs: Iterable[tuple[str, str]]) -> None:
    """Print (name, value) pairs, one a line, values aligned; pairs without a value are left out."""
    shown = [(name, value) for name, value in pairs if value]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        first, *rest = value.split("\n")
        say(f"{name:<{width}}  {first}")
        for line in rest:
            say(f"{'':<{width}}  {line}")


def ask(question: str, *, refusal: str) -> bool:
    """Ask for a yes on the terminal; without one raise a usage error that says `refusal`."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError(refusal)
    return click.confirm(question, err=True)


def short_peer(peer: str | None) -> str:
    """Return the end of a peer id: their beginnings are all alike."""
    return "" if peer is None else f"..{peer[-ID_SHOWN:]}"


def short_hash(text: str | None) -> str:
    """Return the beginning of a hash, which commands take as a prefix."""
    return "" if text is None else text[:ID_SHOWN]


def simulated_mark(simulated: bool) -> str:
    """Return the label of simulated things."""
    return SIMULATED if simulated else ""


def format_mib(size_mib: int) -> str:
    """Return MiB for people: "40 GiB"."""
    if size_mib >= 1024:
        return f"{size_mib / 1024:.0f} GiB" if size_mib % 1024 == 0 else f"{size_mib / 1024:.1f} GiB"
    return f"{size_mib} MiB"


def format_bytes(size: int) -> str:
    """Return bytes for people: "12.3 MB"."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def format_time(at_ms: int | None) -> str:
    """Return a moment in local time, to the second; "" for None."""
    if at_ms is None:
        return ""
    from datetime import datetime

    return datetime.fromtimestamp(at_ms / 1000).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def format_age(length_ms: int) -> str:
    """Return a length of time in its largest unit: "3d", "5h", "12m", "40s"."""
    for unit, size_ms in (("d", DAY_MS), ("h", HOUR_MS), ("m", MINUTE_MS)):
        if length_ms >= size_ms:
            return f"{length_ms // size_ms}{unit}"
    return f"{max(length_ms, 0) // SECOND_MS}s"


def format_command(command: Iterable[str], width: int = 60) -> str:
    """Return a command as one could type it, cut to `width` characters."""
    import shlex

    text = shlex.join(command)
    return text if len(text) <= width else text[: width - 3] + "..."


def format_cuda(cuda: int) -> str:
    """Return 12040 as "12.4"; "" for 0."""
    return f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else ""
