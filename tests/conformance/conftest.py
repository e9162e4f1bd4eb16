"""Fixtures of the conformance suite: one live nsqd and nsqlookupd per file, a topic of its own for every case.

The same cases run against another implementation: ``CONFORMANCE_NSQD=/path/to/nsqd CONFORMANCE_NSQLOOKUPD=... pytest
tests/conformance``. Cases marked ``improvement`` (FlintMQ differs from NSQ on purpose) are skipped then.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest
from tests.integration.conftest import daemons, started_anew
from tests.integration.daemons import Connection, Daemons, Nsqd, Nsqlookupd

__all__ = ["daemons", "started_anew"]

_numbers = itertools.count(1)


def is_ours(program: str) -> bool:
    """Whether ``program`` (nsqd, nsqlookupd) is FlintMQ's."""
    return not os.environ.get(f"CONFORMANCE_{program.upper()}")


def quick_flags() -> tuple[str, ...]:
    """Flags that spare our nsqd the disk syncs, which no rule of the protocol depends on."""
    return ("--durability=os",) if is_ours("nsqd") else ()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if is_ours("nsqd") and is_ours("nsqlookupd"):
        return
    for item in items:
        if item.get_closest_marker("improvement") is not None:
            item.add_marker(pytest.mark.skip(reason="FlintMQ differs from NSQ here on purpose"))


@pytest.fixture(scope="module")
def shared_daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    """Daemons that all cases of a file use; a file starts further ones with other flags from it."""
    daemons = Daemons(tmp_path_factory.mktemp("conformance"))
    try:
        yield daemons
    finally:
        daemons.close()


@pytest.fixture(scope="package")
def protocol_nsqd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nsqd]:
    """The nsqd of all cases of the TCP protocol, which each have a topic of their own."""
    daemons = Daemons(tmp_path_factory.mktemp("protocol"))
    try:
        yield daemons.nsqd(*quick_flags())
    finally:
        daemons.close()


@pytest.fixture(scope="module")
def nsqd(request: pytest.FixtureRequest, shared_daemons: Daemons) -> Nsqd:
    """A running nsqd with every flag at its default; leave it as it is (topics come and go freely)."""
    if request.path.name.startswith("test_protocol_"):
        nsqd: Nsqd = request.getfixturevalue("protocol_nsqd")
        return nsqd
    return shared_daemons.nsqd(*quick_flags())


@pytest.fixture(scope="module")
def nsqlookupd(shared_daemons: Daemons) -> Nsqlookupd:
    """A running nsqlookupd with every flag at its default."""
    return shared_daemons.nsqlookupd()


@pytest.fixture
def topic() -> str:
    """The name of a topic that no other case uses."""
    return f"case-{next(_numbers)}"


@pytest.fixture
def connection(nsqd: Nsqd) -> Iterator[Connection]:
    """A connection to the shared nsqd, its magic sent."""
    with nsqd.connect() as connection:
        yield connection
