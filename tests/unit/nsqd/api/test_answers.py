"""Answers that wait: at once when there is nothing to wait for, and an error when it cannot be stored."""

from __future__ import annotations

import asyncio

import pytest

from flintmq.broker.partition import Ended
from flintmq.net.http_messages import EMPTY, HttpError, Response, text_response
from flintmq.nsqd.api.answers import PendingAnswer, stored, when


def outcome(pending: object) -> tuple[int, str]:
    found = pending.outcome  # type: ignore[attr-defined]
    assert isinstance(found, HttpError)
    return found.status, found.message


def test_when_it_is_stored():
    source = Ended()
    pending = when(source)
    assert pending.outcome is None
    source.end(None)
    assert pending.outcome is EMPTY


def test_at_once_when_it_was_stored_before():
    source = Ended()
    source.end(None)
    answer = text_response("OK")
    assert when(source, answer).outcome is answer


def test_an_answer_that_says_where_is_asked_for_when_that_is_known():
    source, known = Ended(), ["before"]

    def answer() -> Response:
        return text_response(known[0])

    pending = when(source, answer)
    known[0] = "stored"
    source.end(None)
    assert isinstance(pending.outcome, Response) and pending.outcome.body == b"stored"


def test_what_cannot_be_stored():
    source = Ended()
    usual, own = when(source), PendingAnswer(source, EMPTY, lambda error: HttpError(409, f"OWN: {error}")).pending
    source.end(OSError("full"))
    assert outcome(usual) == (503, "EXITING")
    assert outcome(own) == (409, "OWN: full")


async def test_a_handler_that_waits():
    source = Ended()
    task = asyncio.create_task(stored(source))
    await asyncio.sleep(0)
    assert not task.done()
    source.end(None)
    await task
    await stored(source)


async def test_a_handler_that_waits_for_what_cannot_be_stored():
    source = Ended()
    task = asyncio.create_task(stored(source))
    await asyncio.sleep(0)
    source.end(OSError("full"))
    with pytest.raises(HttpError, match="EXITING"):
        await task
    with pytest.raises(HttpError, match="EXITING"):
        await stored(source)


async def test_nobody_is_there_any_more():
    source = Ended()
    task = asyncio.create_task(stored(source))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    source.end(None)  # wakes nobody, and fails with nothing
    assert task.cancelled()
