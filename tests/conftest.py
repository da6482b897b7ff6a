"""Fixtures that many tests share."""

from collections.abc import Iterator

import pytest
from support.daemons import Daemons
from support.daemons import daemons as run_daemons


@pytest.fixture
def daemons() -> Iterator[Daemons]:
    """Real daemons on loopback; all ended, with their keepers, after the test."""
    with run_daemons() as running:
        yield running
