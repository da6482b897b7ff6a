"""Structured logs: JSON lines under systemd or with `--log-format json`, readable lines on a terminal.

Refuses to log secrets: callers pass ids, never keys. Tests and the product never read logs as an interface.
"""

import logging
import os
import sys
from typing import Any

import structlog

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
LEVELS = tuple(_LEVELS)


def get_logger(name: str) -> Any:  # noqa: ANN401 - structlog's loggers are typed by configuration
    """Return the logger of module `name`; its events look like "swarm.peer_cut"."""
    return structlog.get_logger(name)


def configure(level: str = "info", *, json_lines: bool | None = None) -> None:
    """Send logs to stderr. `json_lines` None: JSON unless stderr is a terminal."""
    as_json = not sys.stderr.isatty() if json_lines is None else json_lines
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty() and "NO_COLOR" not in os.environ)
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(name)s %(levelname)s %(message)s")
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)
    # aioquic's logger repeats a stranger's words, as often as the stranger likes.
    logging.getLogger("quic").setLevel(logging.CRITICAL)
