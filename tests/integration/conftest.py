"""Fixtures of the tests with real processes; other directories of tests import them from here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration import forked
from tests.integration.daemons import Daemons, Nsqd, Nsqlookupd, wait_until
from tests.integration.flavours import FLAVOURS, Flavour, opened


@pytest.fixture
def started_anew() -> Iterator[None]:
    """For tests of a start itself, and files of what a process takes: nothing is forked, see forked.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forked, "is_forking", False)
        yield


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


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    """Starts daemons for all tests of a file."""
    daemons = Daemons(tmp_path_factory.mktemp("shared"))
    try:
        yield daemons
    finally:
        daemons.close()


@pytest.fixture(scope="module")
def single_nsqd(shared: Daemons) -> Nsqd:
    """An nsqd for all tests of a file, which no nsqlookupd knows: a new topic of its has to ask nobody for channels."""
    return shared.nsqd("--durability=os")


@pytest.fixture(scope="module")
def shared_nsqlookupd(shared: Daemons) -> Nsqlookupd:
    """A nsqlookupd for all tests of a file."""
    return shared.nsqlookupd()


@pytest.fixture(scope="module")
def shared_nsqd(shared: Daemons, shared_nsqlookupd: Nsqlookupd) -> Nsqd:
    """An nsqd for all tests of a file, which the nsqlookupd knows."""
    nsqd = shared.nsqd("--durability=os", f"--lookupd-tcp-address=127.0.0.1:{shared_nsqlookupd.tcp[1]}")
    wait_until(lambda: shared_nsqlookupd.get("/nodes")["producers"], "nsqd is registered")
    return nsqd


@pytest.fixture(params=FLAVOURS)
def flavour(request: pytest.FixtureRequest) -> Iterator[Flavour]:
    """Each of the two clients."""
    with opened(request.param) as flavour:
        yield flavour
