"""Fixtures of the tests with other people's clients, and their marker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.foreign.harness import Ahead
from tests.foreign.servers import Servers


@pytest.fixture(scope="package")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("servers"))
    try:
        yield servers
    finally:
        servers.close()


@pytest.fixture(scope="module")
def ahead(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Ahead]:
    """Plays the selected cases of a file side by side, with the client that the file calls ``CLIENT``."""
    items = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    cases: list[Any] = [item.callspec.params["case"] for item in items if item.get_closest_marker("skip") is None]
    ahead = Ahead(request.module.CLIENT, servers, cases)
    try:
        yield ahead
    finally:
        ahead.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/foreign/" in item.path.as_posix():
            item.add_marker(pytest.mark.foreign)
