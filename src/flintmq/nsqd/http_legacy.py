"""Answers in the envelope of NSQ before 1.0, for requests that ask for it.

::

    Accept: application/vnd.nsq; version=0      {"status_code":200,"status_txt":"OK","data":{...}}

Such an nsqd answered so unless a request accepted ``application/vnd.nsq; version=1.0``; since 1.0 the envelope is gone
and a request that says nothing gets none. A request that names ``application/vnd.nsq`` in any other version gets it:
errors have the status 500 and no data, text such as ``OK`` is sent as it is.

Source: reference/nsq.md 2.0, reference/youzan.md 1 (which endpoints have it).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from flintmq.net.http_messages import JSON_TYPE, HttpError, PendingResponse, Request, Response

log = logging.getLogger(__name__)

_JSON = JSON_TYPE[1].encode()
Answer = Response | PendingResponse | Coroutine[Any, Any, Response]


def negotiated(handler: Callable[[Request], Answer]) -> Callable[[Request], Answer]:
    """Return ``handler`` with its answers in the old envelope where a request asks for it."""

    def answer(request: Request) -> Answer:
        accept = request.headers.get(b"accept")
        if accept is None or b"application/vnd.nsq" not in accept or b"version=1.0" in accept:
            return handler(request)
        return _wrapped(handler, request)

    return answer


def enveloped(handler: Callable[[Request], Answer]) -> Callable[[Request], Answer]:
    """Return ``handler`` with its answers in the old envelope unless a request accepts bare JSON.

    For paths that NSQ 1.0 does not have; who asks for them may know nothing else.
    """

    def answer(request: Request) -> Answer:
        accept = request.headers.get(b"accept", b"")
        if b"application/vnd.nsq" in accept and b"version=1.0" in accept:
            return handler(request)
        return _wrapped(handler, request)

    return answer


def _wrapped(handler: Callable[[Request], Answer], request: Request) -> Answer:
    try:
        result = handler(request)
    except HttpError as error:
        return _failure(error.message)
    if isinstance(result, Response):
        return _success(result)
    if isinstance(result, Coroutine):
        return _wrapped_later(result)
    if result.outcome is not None:
        return _outcome(result.outcome)
    pending = PendingResponse()
    result.attach(lambda outcome: pending.complete(_outcome(outcome)))
    return pending


async def _wrapped_later(answer: Coroutine[Any, Any, Response]) -> Response:
    try:
        return _success(await answer)
    except HttpError as error:
        return _failure(error.message)


def _outcome(outcome: Response | BaseException) -> Response:
    if isinstance(outcome, Response):
        return _success(outcome)
    if isinstance(outcome, HttpError):
        return _failure(outcome.message)
    log.error("HTTP handler failed", exc_info=outcome)
    return _failure("INTERNAL_ERROR")


def _success(response: Response) -> Response:
    if response.body and _JSON not in response.head:
        return response
    return _envelope(200, "OK", msgspec.Raw(response.body) if response.body else None)


def _failure(message: str) -> Response:
    return _envelope(500, message, None)


def _envelope(status: int, text: str, data: Any) -> Response:
    body = msgspec.json.encode({"status_code": status, "status_txt": text, "data": data})
    return Response(status, body, (JSON_TYPE,))
