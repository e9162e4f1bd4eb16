"""Answers in the envelope of NSQ before 1.0, which the redesigned NSQ has kept.

::

    {"status_code":200,"status_txt":"OK","data":{...}}                  HTTP status 200
    {"status_code":500,"status_txt":"Key not found","data":null}        500, whatever a bare answer's status is

NSQ before 1.0 answered so unless a request accepted ``application/vnd.nsq; version=1.0``; so does the redesigned one on
some of its paths. Since 1.0 the envelope is gone and a request that says nothing gets none. Ours goes by what a request
shows of who asks: ``application/vnd.nsq`` in any other version gets the envelope, and so does a parameter that only the
redesigned NSQ has, and everything where the daemon was told to answer in its style; but for requests with a parameter
that only ours has, whose answers nobody expects in one. Text such as ``OK`` is sent bare.

Source: NSQ's HTTP API, Youzan's nsqlookupd (which paths have it).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Coroutine
from typing import Any

import msgspec

from flintmq.net.http_messages import JSON_TYPE, HttpError, PendingResponse, Request, Response

log = logging.getLogger(__name__)

NSQ, YOUZAN = "nsq", "youzan"
STYLES = (NSQ, YOUZAN)

_JSON = JSON_TYPE[1].encode()
_NSQ_JSON = b"application/vnd.nsq"
_BARE = b"version=1.0"
Answer = Response | PendingResponse | Coroutine[Any, Any, Response]
Handler = Callable[[Request], Answer]


class Style:
    """Tells which requests a daemon takes for the redesigned NSQ's.

    Args:
        name: ``nsq``, or ``youzan`` for all of them.
        words: parameters that only the redesigned NSQ has.
        own_words: parameters that only ours has; a request with one of them is never the redesigned NSQ's.
    """

    def __init__(self, name: str, words: Collection[str], own_words: Collection[str] = ()) -> None:
        self._is_youzan = name == YOUZAN
        self._words = frozenset(words)
        self._own_words = frozenset(own_words)

    def is_youzans(self, request: Request) -> bool:
        """Whether a request is to be answered as the redesigned NSQ does, in an envelope or without."""
        if not self._own_words.isdisjoint(request.names):
            return False
        return self._is_youzan or not self._words.isdisjoint(request.names)

    def negotiated(self, handler: Handler) -> Handler:
        """Return ``handler`` with its answers in the envelope where a request shows that it knows nothing else."""

        def answer(request: Request) -> Answer:
            accept = request.headers.get(b"accept")
            if accept is not None and _NSQ_JSON in accept:
                is_wrapped = _BARE not in accept
            else:
                is_wrapped = self.is_youzans(request)
            return _wrapped(handler, request) if is_wrapped else handler(request)

        return answer


def enveloped(handler: Handler) -> Handler:
    """Return ``handler`` with its answers in the envelope unless a request accepts bare JSON.

    For paths that NSQ 1.0 does not have; who asks for them may know nothing else.
    """

    def answer(request: Request) -> Answer:
        accept = request.headers.get(b"accept", b"")
        return handler(request) if _NSQ_JSON in accept and _BARE in accept else _wrapped(handler, request)

    return answer


def _wrapped(handler: Handler, request: Request) -> Answer:
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
