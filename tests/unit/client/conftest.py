"""Whose producers a scenario runs with: those of both clients, in the same world and time."""

from __future__ import annotations

import pytest
from tests.unit.client.blocking_client import ASYNCIO, SYNC


@pytest.fixture(params=[ASYNCIO, SYNC])
def client(request: pytest.FixtureRequest) -> str:
    """The client that a scenario is played with."""
    name: str = request.param
    return name
