"""Reaching the daemon from a command. Loads no async library."""

from typing import TypeVar

import msgspec

from node.rpc.client import Client
from node.rpc.method import Call, Params

P = TypeVar("P", bound=Params)
R = TypeVar("R", bound=msgspec.Struct)


def connect() -> Client:
    """Return a connection to the daemon. Raises DaemonUnreachable, which says how to start it."""
    return Client()


def call(method: Call[P, R], params: P) -> R:
    """Call one method on a connection of its own."""
    with connect() as client:
        return client.call(method, params)
