"""A connection's rules, without a transport."""

from __future__ import annotations

from typing import Any

import pytest

from flintmq.client.core.link import Link
from flintmq.client.options import ConnectionOptions
from flintmq.errors import FlintError
from flintmq.wire.commands import PUBLISHING
from flintmq.wire.frames import error_frame, response_frame


class Owner:
    """Takes everything and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class BareLink(Link):
    def flush_soon(self) -> None:
        pass

    @property
    def ends(self) -> tuple[str, str]:
        return "", ""

    def _disconnect(self, is_polite: bool) -> None:
        pass


_ONCE = {"producer_id": "p", "sequence": 1}
FIELDS: dict[str, dict[str, Any]] = {
    "PUB": {},
    "DPUB": {"defer_ms": 5},
    "PUB_ONCE": _ONCE,
    "DPUB_ONCE": {"defer_ms": 5, **_ONCE},
    "PUB_TRACE": {"trace_ids": [1, 1]},
    "PUB_TRACE_ONCE": {"trace_ids": [1, 1], **_ONCE},
    "PUB_EXT": {"headers": [b"{}", b"{}"]},
    "PUB_EXT_ONCE": {"headers": [b"{}", b"{}"], **_ONCE},
}


@pytest.mark.parametrize("name", PUBLISHING)
def test_an_nsqd_that_closes_because_of_a_publish_is_well(name: str):
    link = BareLink("127.0.0.1:4150", Owner(), ConnectionOptions(), lambda: 0.0)
    answers: list[Any] = []
    bodies = [b"one", b"two"][: 2 if name.startswith("M") else 1]
    link.publish("t", bodies, answers.append, 0, **FIELDS[name.removeprefix("M")])
    assert link.take_output().startswith(name.encode() + b" t")
    link.feed(error_frame("E_BAD_BODY", "x"))
    assert isinstance(answers[0], FlintError)
    assert link.is_lost
    assert link.is_publish_refused


@pytest.mark.parametrize("said", [b"TOUCH 0000000000000000 failed ID not in flight", b"TOUCH [48 48 48] failed x"])
def test_a_probe_is_answered_by_any_nsqd_and_nobody_is_told_of_a_failure(said: bytes):
    told: list[Any] = []
    owner: Any = Owner()
    owner.on_message_failed = lambda *failure: told.append(failure)
    link = BareLink("127.0.0.1:4150", owner, ConnectionOptions(), lambda: 0.0)
    answers: list[int] = []
    link.sub("t", "c", lambda _: None)
    link.feed(response_frame(b"OK"))
    link.take_output()
    link.probe(lambda: answers.append(1))
    link.probe(lambda: answers.append(2))
    assert link.take_output() == b"TOUCH 0000000000000000\n" * 2
    for _ in range(3):
        link.feed(error_frame("E_TOUCH_FAILED", said.decode()))
    assert answers == [1, 2] and len(told) == 1, "the third was not asked for"
