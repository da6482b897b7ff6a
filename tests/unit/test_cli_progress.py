import io
import sys

import pytest

from node.cli import progress
from node.cli.progress import TransferBar
from node.rpc.api import jobs


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_cli_bar_shows_what_takes_long_and_vanishes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    bar = TransferBar()
    bar.update("sending [the] inputs", jobs.JobProgress(done=5_000_000, total=10_000_000))
    bar.stop()
    bar.stop()
    shown = terminal.getvalue()
    assert "sending [the] inputs" in shown
    assert "5.0/10.0 MB" in shown
    assert shown.rstrip().endswith("\x1b[2K"), "the bar is still there"


def test_cli_bar_is_silent_for_what_is_quick_and_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "QUIET_S", 1e9)
    TransferBar().update("x", jobs.JobProgress(done=1, total=2))
    assert terminal.getvalue() == ""
    plain = io.StringIO()
    monkeypatch.setattr(sys, "stderr", plain)
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    TransferBar().update("x", jobs.JobProgress(done=1, total=2))
    assert plain.getvalue() == ""
