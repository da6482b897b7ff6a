"""doctor: checks this machine and, when it runs, the daemon; says how to mend what is wrong."""

import os
from pathlib import Path

import click

from node.cli.checks import FAIL, OK, WARN, finding, local_checks
from node.cli.connection import connect
from node.cli.daemon import config_options, split_settings
from node.cli.output import json_option, print_json, say
from node.errors import ConfigError, DaemonUnreachable, NodeError
from node.rpc.api import Nothing, daemon

EXIT_FINDINGS = 1
"""Something is wrong with the machine; gpunode itself did what it was asked (125 would say that it did not)."""
_MARKS = {OK: ("ok  ", "green"), WARN: ("warn", "yellow"), FAIL: ("FAIL", "red")}


@click.command()
@config_options
@json_option
def doctor(config_path: Path | None, settings: tuple[str, ...], as_json: bool) -> int:
    """Check this machine, and say how to mend it.

    Looks at the driver, isolation, ports, clock, disk, swap and user; when the daemon runs, it reports what only
    it can see. Exit status 1 when a check fails; warnings do not count.
    """
    checks: list[daemon.Check] = []
    for check in _all_checks(config_path, settings):
        checks.append(check)
        if not as_json:
            _print(check)
    failed = [check for check in checks if check.status is FAIL]
    warned = sum(check.status is WARN for check in checks)
    if as_json:
        print_json({"ok": not failed, "checks": checks})
    else:
        say(f"{len(checks)} checks: {len(failed)} failed, {warned} warnings")
    return EXIT_FINDINGS if failed else 0


def _all_checks(config_path: Path | None, settings: tuple[str, ...]) -> list[daemon.Check]:
    from node.config import load_with_origins

    found, its_config = _daemon_checks()
    path = config_path or (Path(its_config) if its_config else None)
    try:
        loaded = load_with_origins(split_settings(settings), os.environ, path)
    except ConfigError as error:
        return [finding("config", FAIL, str(error), error.hint), *found]
    named = str(loaded.path) if loaded.path else "no file: defaults"
    return [finding("config", OK, named), *local_checks(loaded.config, daemon_runs=its_config is not None), *found]


def _daemon_checks() -> tuple[list[daemon.Check], str | None]:
    """Return what the daemon reports of itself, and its configuration file or ""; None when no daemon runs."""
    try:
        with connect() as client:
            found = client.call(daemon.DOCTOR, Nothing()).checks
            its_config = client.call(daemon.STATUS, Nothing()).config_path
            return [finding("daemon", OK, f"answers at {client.path}"), *found], its_config
    except DaemonUnreachable as error:
        return [finding("daemon", WARN, str(error), error.hint)], None
    except NodeError as error:
        return [finding("daemon", FAIL, str(error), error.hint)], ""


def _print(check: daemon.Check) -> None:
    mark, colour = _MARKS[check.status]
    click.echo(f"{click.style(mark, fg=colour) if _has_colour() else mark}  ", nl=False)
    say(f"{check.name}: {check.detail}")
    if check.hint and check.status is not OK:
        say(f"      mend: {check.hint}")


def _has_colour() -> bool:
    return "NO_COLOR" not in os.environ
