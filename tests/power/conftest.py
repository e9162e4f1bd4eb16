"""Fixtures of the tests of power loss."""

from __future__ import annotations

from tests.integration.conftest import daemons

__all__ = ["daemons"]
