"""A connection has a handler for every event of the parser: one that is forgotten would break the connection."""

from __future__ import annotations

from typing import get_args

from flintmq.nsqd import session
from flintmq.wire.server import Event


def test_every_event_has_a_handler():
    assert set(session._HANDLERS) == set(get_args(Event))
