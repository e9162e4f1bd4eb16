"""``/drain``: what is left, begin, call off; see :mod:`flintmq.nsqd.drain`."""

from __future__ import annotations

from flintmq.net.http_messages import HttpError, Request, Response, json_response
from flintmq.nsqd.api.route import ALL_ADMIN, ALL_READ, WALKS, Route
from flintmq.nsqd.drain import Drain
from flintmq.options import parse_duration_ns


class DrainApi:
    """These routes of one nsqd."""

    def __init__(self, drain: Drain) -> None:
        self._drain = drain

    async def show(self, _request: Request) -> Response:
        """``GET /drain``."""
        return json_response(await self._drain.state())

    async def begin(self, request: Request) -> Response:
        """``POST /drain``."""
        text = request.query.get("timeout")
        try:
            timeout_ns = None if text is None else parse_duration_ns(text)
        except ValueError:
            timeout_ns = -1
        if timeout_ns is not None and timeout_ns < 0:
            raise HttpError(400, "INVALID_TIMEOUT")
        self._drain.begin(timeout_ns)
        return await self.show(request)

    async def end(self, request: Request) -> Response:
        """``DELETE /drain``."""
        self._drain.end()
        return await self.show(request)


ROUTES = (
    Route("GET", "/drain", ALL_READ, DrainApi.show, line=WALKS),
    Route("POST", "/drain", ALL_ADMIN, DrainApi.begin, ("timeout",)),
    Route("DELETE", "/drain", ALL_ADMIN, DrainApi.end),
)
