"""One consumer's connection to one leader: what comes, in whatever pieces, is handed on as it came."""

from __future__ import annotations

from struct import pack
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.cluster.models import node

from flintmq.message import hex_id
from flintmq.nsqd.cluster.relaying import Upstream
from flintmq.wire.frames import ERROR, HEARTBEAT, MESSAGE, RESPONSE


class Leader:
    """What this end does with the connection to it."""

    def __init__(self) -> None:
        self.written = b""

    async def open_passage(self, record: object, owner: object) -> Leader:
        return self

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self, reason: str) -> None: ...


def _frame(kind: int, data: bytes) -> bytes:
    return pack(">II", 4 + len(data), kind) + data


def _message(number: int, size: int) -> bytes:
    return _frame(MESSAGE, pack(">QH", 1, 1) + hex_id(number) + b"x" * size)


_OTHERS = [_frame(RESPONSE, HEARTBEAT), _frame(ERROR, b"E_FIN_FAILED FIN 1 failed")]


@settings(deadline=None)
@given(st.lists(st.integers(0, 70_000) | st.sampled_from(_OTHERS), max_size=12), st.lists(st.integers(1, 90_000)))
async def test_messages_are_whole_however_they_come(parts: list[int | bytes], pieces: list[int]) -> None:
    leader: Any = Leader()
    got: list[tuple[bytes, list[int]]] = []
    errors: list[bytes] = []
    upstream = Upstream(
        leader, node("a"), b"greeting", 1, False,
        on_open=lambda _: None, on_messages=lambda _, frames, ids: got.append((frames, ids)),
        on_error=errors.append, on_lost=lambda _, reason: None,
    )  # fmt: skip
    await upstream._opening
    sent = [_message(number, part) if isinstance(part, int) else part for number, part in enumerate(parts, 1)]
    stream, at = _frame(RESPONSE, b"OK") + b"".join(sent), 0
    for size in [*pieces, len(stream)]:
        upstream.received(stream[at : at + size])
        at += size
    assert upstream.is_open
    assert b"".join(frames for frames, _ in got) == b"".join(each for each in sent if each not in _OTHERS)
    assert [each for _, ids in got for each in ids] == [n for n, part in enumerate(parts, 1) if isinstance(part, int)]
    assert errors == [each for each in sent if each == _OTHERS[1]]
    assert leader.written == b"greeting" + b"NOP\n" * sent.count(_OTHERS[0])
