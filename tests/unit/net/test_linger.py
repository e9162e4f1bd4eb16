"""A close that lets the peer read our last bytes, and one of a connection that is gone already."""

from __future__ import annotations

from typing import Any

import pytest

from flintmq.net.linger import LINGER_S, close_lingering


class FakeTransport:
    """Notes what is called; its socket is not connected any more if ``has_reset``."""

    def __init__(self, has_reset: bool = False, can_write_eof: bool = True, is_closing: bool = False) -> None:
        self.calls: list[str] = []
        self._has_reset = has_reset
        self.can_write_eof = lambda: can_write_eof
        self.is_closing = lambda: is_closing

    def write_eof(self) -> None:
        self.calls.append("write_eof")
        if self._has_reset:
            raise OSError(107, "Transport endpoint is not connected")

    def close(self) -> None:
        self.calls.append("close")

    def abort(self) -> None:
        self.calls.append("abort")


class FakeLoop:
    """Keeps what is to be called later."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Any]] = []

    def call_later(self, delay_s: float, function: Any) -> str:
        self.timers.append((delay_s, function))
        return "timer"


@pytest.mark.parametrize(
    ("transport", "has_peer_ended", "calls", "is_timed"),
    [
        (FakeTransport(), False, ["write_eof"], True),
        (FakeTransport(), True, ["close"], True),
        (FakeTransport(can_write_eof=False), False, ["close"], False),
        (FakeTransport(is_closing=True), False, [], False),
        (FakeTransport(has_reset=True), False, ["write_eof", "abort"], False),
    ],
    ids=["half-closed", "the peer has ended", "TLS", "closing already", "the peer has sent a reset"],
)
def test_closing(transport: Any, has_peer_ended: bool, calls: list[str], is_timed: bool):
    loop: Any = FakeLoop()
    timer = close_lingering(transport, loop, has_peer_ended)
    assert transport.calls == calls
    assert (timer is not None) == is_timed
    assert loop.timers == ([(LINGER_S, transport.abort)] if is_timed else [])
