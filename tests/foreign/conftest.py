"""Fixtures of the tests with other people's clients, and their marker."""

from __future__ import annotations

import pytest
from tests.integration.conftest import daemons, nsqd

__all__ = ["daemons", "nsqd"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/foreign/" in item.path.as_posix():
            item.add_marker(pytest.mark.foreign)
