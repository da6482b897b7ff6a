"""The files of a job on the caller's side: reading inputs into manifests as the calling user.

Refuses to leave reading to the daemon, which may be root: what the caller can't read is not sent.
"""

import os
from pathlib import Path

from node.cli.progress import TransferBar
from node.cli.values import InputArgument, OutputArgument
from node.errors import StagingError
from node.rpc.api import jobs


def scan_inputs(arguments: list[InputArgument]) -> tuple[jobs.JobInput, ...]:
    """Read every input and return what is to be sent. Raises StagingError naming what can't be read."""
    _refuse_twice([argument.destination for argument in arguments], "inputs go to")
    bar = TransferBar()
    try:
        return tuple(_scan(argument, bar) for argument in arguments)
    finally:
        bar.stop()


def check_outputs(arguments: list[OutputArgument]) -> tuple[jobs.JobOutput, ...]:
    """Return where outputs go, after checking that they can go there. Raises StagingError."""
    _refuse_twice([argument.remote for argument in arguments], "outputs are")
    _refuse_twice([str(argument.local) for argument in arguments], "outputs go to")
    for argument in arguments:
        place = argument.local
        while not place.exists() and place != place.parent:
            place = place.parent
        if not os.access(place, os.W_OK | os.X_OK if place.is_dir() else os.W_OK):
            raise StagingError(
                f"the output {argument.remote} can't go to {argument.local}: {place} is not writable",
                "choose another place with --output DIR:LOCAL",
            )
    return tuple(jobs.JobOutput(remote=argument.remote, local=str(argument.local)) for argument in arguments)


def _scan(argument: InputArgument, bar: TransferBar) -> jobs.JobInput:
    from node.jobs.tree import scan_tree

    source = Path(argument.source)
    label = f"reading {source.name}"
    tree = scan_tree(source, progress=lambda done: bar.update(label, jobs.JobProgress(done=done, total=0)))
    return jobs.JobInput(
        source=str(source),
        destination=argument.destination,
        manifest=tree.manifest.id.hex(),
        size=tree.manifest.size,
    )


def _refuse_twice(places: list[str], what: str) -> None:
    for place in places:
        if places.count(place) > 1:
            raise StagingError(f"two {what} {place}", "give each a place of its own")
