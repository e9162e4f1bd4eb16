"""A row of nsqd's HTTP API: a request, the permission it asks for, the parameters it obeys, and who answers it.

Source: NSQ's HTTP API, Youzan's nsqlookupd.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import iscoroutine
from typing import Any

from flintmq.net.http_auth import ADMIN, PUBLISH, READ, Needs, needs
from flintmq.net.http_envelope import Style
from flintmq.net.http_messages import HttpError, Request
from flintmq.net.http_router import BODY_LIMIT_BYTES, Handler, Router
from flintmq.nsqd.api.arguments import NotHere
from flintmq.nsqd.api.lines import Lines
from flintmq.wire.server import ServerLimits

TOPIC_PUBLISH = needs(PUBLISH, by_topic=True)
TOPIC_READ = needs(READ, by_topic=True)
TOPIC_ADMIN = needs(ADMIN, by_topic=True)
ALL_READ = needs(READ)
ALL_ADMIN = needs(ADMIN)

DRY = ("dry_run",)
"""Refused by changes that cannot be tried: who sends it wants nothing changed."""

WALKS = "walks"
"""The line of requests that may look at all topics."""

LARGE = "large"
"""The line of requests for messages, whose answers may be large and wait for memory."""


@dataclass(frozen=True, slots=True)
class Route:
    """One kind of request.

    Attributes:
        needs: what a client has to be permitted, where clients have to be known.
        handler: a method of the room that answers it, which gets the room and the request.
        takes: the parameters that it obeys; None for one that ignores all.
        refuses: the parameters that a request of NSQ or the redesigned NSQ neither obeys nor ignores; None for one that
            is ours alone, which refuses all that mean something elsewhere.
        body_limit: of how many bytes a body may be.
        too_big: the text of the 413 for a longer one.
        is_negotiated: a request says what form its answer has.
        form: that answers always have otherwise; None for NSQ's.
        is_plain: errors are bare text.
        is_logged: one line of the log for each.
        line: in which it waits for others that cost much, :data:`WALKS` or :data:`LARGE`, see
            :mod:`flintmq.nsqd.api.lines`; its answer depends on path and query alone.
    """

    method: str
    path: str
    needs: Needs
    handler: Callable[[Any, Any], Any]
    takes: tuple[str, ...] | None = ()
    refuses: tuple[str, ...] | None = None
    body_limit: Callable[[ServerLimits], int] = lambda _limits: BODY_LIMIT_BYTES
    too_big: str = "BODY_TOO_BIG"
    is_negotiated: bool = False
    form: Callable[[Handler], Handler] | None = None
    is_plain: bool = False
    is_logged: bool = True
    line: str = ""


def _at_its_leader(handler: Handler, led_elsewhere: Callable[[NotHere], HttpError]) -> Handler:
    """Have a request for what another node leads told who that is."""

    async def later(answer: Awaitable[Any]) -> Any:
        try:
            return await answer
        except NotHere as error:
            raise led_elsewhere(error) from None

    def answer(request: Request) -> Any:
        try:
            found = handler(request)
        except NotHere as error:
            raise led_elsewhere(error) from None
        return later(found) if iscoroutine(found) else found

    return answer


def add_routes(
    router: Router,
    room: object,
    rows: Iterable[Route],
    limits: ServerLimits,
    style: Style,
    led_elsewhere: Callable[[NotHere], HttpError],
    lines: Mapping[str, Lines],
) -> None:
    """Have a room answer the requests of its rows.

    Args:
        lines: by name.
        led_elsewhere: says what is answered about a topic or partition that is not here.
    """
    for row in rows:
        answer = partial(row.handler, room)
        handler: Handler = partial(lines[row.line].answer, answer) if row.line else answer
        router.add(
            row.method,
            row.path,
            _at_its_leader(handler, led_elsewhere),
            body_limit_bytes=row.body_limit(limits),
            too_big=row.too_big,
            plain=row.is_plain,
            is_logged=row.is_logged,
            takes=row.takes,
            refuses=row.refuses,
            form=style.negotiated if row.is_negotiated else row.form,
            ends_with_client=bool(row.line),
        )
