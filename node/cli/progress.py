"""A bar for what takes longer than a second: scanning, staging, collecting. Only on terminals."""

import sys
import time
from typing import TYPE_CHECKING

from node.rpc.api import jobs

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

QUIET_S = 1.0
"""A transfer that takes no longer shows no bar."""


class TransferBar:
    """A bar on stderr that appears after a second, and vanishes when stopped. Without a terminal it is nothing."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._since = 0.0
        self._label = ""
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def update(self, label: str, progress: jobs.JobProgress) -> None:
        """Show that `progress.done` of `progress.total` bytes are there; total 0 is not known."""
        if not self._is_terminal:
            return
        now = time.monotonic()
        if label != self._label:
            self.stop()
            self._label, self._since = label, now
        if self._progress is None and now - self._since >= QUIET_S:
            self._start()
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=progress.done, total=progress.total or None)

    def stop(self) -> None:
        """Remove the bar. Idempotent."""
        if self._progress is not None:
            self._progress.stop()
        self._progress, self._task, self._label = None, None, ""

    def _start(self) -> None:
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        from node.cli.output import console

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task(self._label)
        self._progress.start()
