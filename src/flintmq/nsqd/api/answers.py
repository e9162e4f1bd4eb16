"""Answers over HTTP that wait until something is stored, without a task per request.

Source: NSQ's HTTP API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from flintmq.broker.partition import Ended
from flintmq.net.descriptors import TooFewDescriptors
from flintmq.net.http_messages import EMPTY, HttpError, PendingResponse, Response


def exiting(error: BaseException) -> HttpError:
    """Refuse as nsqd does whatever cannot be stored: the reason is in /ping and the log."""
    return HttpError(503, "EXITING")


def too_few_files(error: TooFewDescriptors) -> HttpError:
    """Refuse to create a topic, and say why: whoever reads it may delete some."""
    return HttpError(503, f"TOO_FEW_FILES: {error}")


class PendingAnswer:
    """Answers one request when what it waits for has ended.

    Args:
        answer: when it ended well; a function is asked for it then.
        refusal: the answer when it failed.
    """

    __slots__ = ("_answer", "_refusal", "_source", "pending")

    def __init__(
        self,
        source: Ended,
        answer: Response | Callable[[], Response] = EMPTY,
        refusal: Callable[[BaseException], HttpError] = exiting,
    ) -> None:
        self.pending = PendingResponse()
        self._source = source
        self._answer = answer
        self._refusal = refusal
        source.waiters.append(self)
        if source.ended:
            self.publish_ended()

    def publish_ended(self) -> None:
        """Answer: what was waited for has ended."""
        error, answer = self._source.error, self._answer
        if error is None:
            self.pending.complete(answer if isinstance(answer, Response) else answer())
        else:
            self.pending.fail(self._refusal(error))


def when(source: Ended, answer: Response | Callable[[], Response] = EMPTY) -> PendingResponse:
    """Answer when something is stored."""
    return PendingAnswer(source, answer).pending


class _Waiting:
    """Wakes a handler that is a coroutine."""

    def __init__(self, future: asyncio.Future[None]) -> None:
        self._future = future

    def publish_ended(self) -> None:
        if not self._future.done():  # else who asked is gone
            self._future.set_result(None)


async def stored(source: Ended) -> None:
    """Wait until something is stored, in a handler that has other things to wait for, too.

    Raises:
        HttpError: 503, it cannot be.
    """
    if not source.ended:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        source.waiters.append(_Waiting(future))
        await future
    if source.error is not None:
        raise exiting(source.error)
