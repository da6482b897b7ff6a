"""The files of a job on the caller's side: reading inputs into manifests as the calling user.

Refuses to leave reading to the daemon, which may be root: what the caller can't read is not sent.
"""

import os
from pathlib import Path

from node.cli.progress import TransferBar
from node.cli.values import InputArgument, OutputArgument
from node.errors import StagingError
from node.rpc.api import jobs

IGNORE_FILE = ".gpunodeignore"
"""At the top of a folder that is an input: patterns of what is not sent."""
IGNORE_FILE_MAX = 64 * 1024


def scan_inputs(arguments: list[InputArgument], ignore: tuple[str, ...] = ()) -> tuple[jobs.JobInput, ...]:
    """Read every input and return what is to be sent. Raises StagingError naming what can't be read.

    `ignore`: patterns for all of them, after those of each folder's own `.gpunodeignore`: the last match decides.
    """
    _refuse_twice([argument.destination for argument in arguments], "inputs go to")
    bar = TransferBar()
    try:
        return tuple(_scan(argument, ignore, bar) for argument in arguments)
    finally:
        bar.stop()


def check_outputs(arguments: list[OutputArgument]) -> tuple[jobs.JobOutput, ...]:
    """Return where outputs go, after checking that they can go there. Raises StagingError."""
    _refuse_twice([argument.remote for argument in arguments], "outputs are")
    _refuse_twice([str(argument.local) for argument in arguments], "outputs go to")
    for argument in arguments:
        place = argument.local
        if place.exists() and not place.is_file() and not place.is_dir():
            raise StagingError(
                f"the output {argument.remote} can't go to {place}, which is neither a file nor a directory",
                "choose another place with --output DIR:LOCAL",
            )
        while not place.exists() and place != place.parent:
            place = place.parent
        if not os.access(place, os.W_OK | os.X_OK if place.is_dir() else os.W_OK):
            raise StagingError(
                f"the output {argument.remote} can't go to {argument.local}: {place} is not writable",
                "choose another place with --output DIR:LOCAL",
            )
    return tuple(jobs.JobOutput(remote=argument.remote, local=str(argument.local)) for argument in arguments)


def _scan(argument: InputArgument, ignore: tuple[str, ...], bar: TransferBar) -> jobs.JobInput:
    from node.jobs.tree import scan_tree

    source = Path(argument.source)
    label = f"reading {source.name}"
    patterns = (*_ignored_in(source), *ignore)
    _refuse_many(patterns, source)
    tree = scan_tree(
        source, ignore=patterns, progress=lambda done: bar.update(label, jobs.JobProgress(done=done, total=0))
    )
    return jobs.JobInput(
        source=str(source),
        destination=argument.destination,
        manifest=tree.manifest.id.hex(),
        size=tree.manifest.size,
        ignore=patterns,
    )


def _ignored_in(source: Path) -> tuple[str, ...]:
    """Return the patterns of a folder's own ignore file, if it has one. Raises StagingError."""
    from node.jobs.ignore import parse_ignore_file

    path = source / IGNORE_FILE
    if not path.is_file():
        return ()
    try:
        if path.stat().st_size > IGNORE_FILE_MAX:
            raise StagingError(f"{path} is larger than {IGNORE_FILE_MAX} bytes", "is it a list of patterns?")
        return parse_ignore_file(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StagingError(f"cannot read {path}: {error.strerror}", "mend its permissions, or remove it") from None
    except UnicodeDecodeError:
        raise StagingError(f"{path} is not text in UTF-8", "write one pattern a line") from None


def _refuse_many(patterns: tuple[str, ...], source: Path) -> None:
    from node.rpc.fields import IGNORE_PATTERN_SIZE_MAX, IGNORE_PATTERNS_MAX

    if len(patterns) > IGNORE_PATTERNS_MAX:
        raise StagingError(
            f"{len(patterns)} patterns say what of {source} to leave out: at most {IGNORE_PATTERNS_MAX}",
            f"shorten {IGNORE_FILE}: a pattern can have wildcards",
        )
    for pattern in patterns:
        if not 0 < len(pattern) <= IGNORE_PATTERN_SIZE_MAX:
            raise StagingError(
                f"the pattern {pattern[:40]!r} is not of 1 to {IGNORE_PATTERN_SIZE_MAX} characters",
                f"see --ignore and {source / IGNORE_FILE}",
            )


def _refuse_twice(places: list[str], what: str) -> None:
    for place in places:
        if places.count(place) > 1:
            raise StagingError(f"two {what} {place}", "give each a place of its own")
