"""The RPC's handlers, one file a group of methods. Each asks the market and shows what it says.

Refuses to trade: a handler that decides something is in the wrong place.
"""

from node.daemon.handlers import daemon, jobs, lend, market, money, peers
from node.daemon.state import Daemon
from node.rpc.method import Handlers

__all__ = ["handlers_of"]


def handlers_of(state: Daemon) -> Handlers:
    """Return every method's handler."""
    handlers: Handlers = {}
    for group in (daemon, jobs, lend, market, money, peers):
        handlers = {**handlers, **group.handlers(state)}
    return handlers
