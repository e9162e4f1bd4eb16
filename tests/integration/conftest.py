"""Fixtures of the tests with real processes; other directories of tests import them from here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.daemons import Daemons, Nsqd


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    """Starts daemons in the test's own directory, ends them after it, and fails it if one logged a traceback."""
    daemons = Daemons(tmp_path)
    try:
        yield daemons
    finally:
        daemons.close()


@pytest.fixture
def nsqd(daemons: Daemons) -> Nsqd:
    """A running nsqd that answers OK once the kernel has a message: quicker than the default, and survives kill -9."""
    return daemons.nsqd("--durability=os")
