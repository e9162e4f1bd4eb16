"""Answers of the redesigned NSQ's questions: in an envelope, unless the request accepts NSQ 1.0's bare JSON.

::

    {"status_code":200,"status_txt":"OK","data":{...}}           HTTP status 200
    {"status_code":404,"status_txt":"Key not found","data":null}     500, whatever the true status is

Only requests that NSQ does not know are answered so: those with parameters or paths of the redesigned NSQ.

Source: reference/youzan.md 1.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from flintmq.net.http_messages import JSON_TYPE, HttpError, Request, Response


def enveloped(handler: Callable[[Request], Response]) -> Callable[[Request], Response]:
    """Return ``handler`` with its answers in the envelope for requests that do not say otherwise."""

    def answer(request: Request) -> Response:
        accept = request.headers.get(b"accept", b"")
        if b"application/vnd.nsq" in accept and b"version=1.0" in accept:
            return handler(request)
        try:
            return _envelope(200, 200, "OK", msgspec.Raw(handler(request).body))
        except HttpError as error:
            return _envelope(500, error.status, error.message, None)

    return answer


def _envelope(status: int, true_status: int, text: str, data: Any) -> Response:
    body = msgspec.json.encode({"status_code": true_status, "status_txt": text, "data": data})
    return Response(status, body, (JSON_TYPE,))
