"""A page put together: the template, its view, and what every page has besides; links that change a part of an address.

Rules of this file: what a visitor wrote into an address is checked here or by a type, and comes back escaped or as a
refusal that says what is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import urlencode

import msgspec
from jinja2 import Environment, pass_context
from jinja2.runtime import Context
from starlette.requests import Request
from starlette.responses import Response

from flintmq.nsqadmin.errors import Refused
from flintmq.nsqadmin.pages import charts, wording
from flintmq.nsqadmin.pages.assets import assets
from flintmq.nsqadmin.views import View

NAVIGATION = (
    ("/", "Overview", "o"), ("/topics", "Topics", "t"), ("/nodes", "Nodes", "n"), ("/cluster", "Cluster", "c"),
    ("/lookup", "Lookup", "l"), ("/counter", "Counter", "x"), ("/messages", "Messages", "m"),
    ("/dead-letters", "Dead letters", "d"), ("/audit", "Audit", "a"),
)  # fmt: skip
"""Pages that stand at the top of every page, with the letter that leads there behind ``g``."""

SPANS = ((15 * 60, "15 min"), (3_600, "hour"), (6 * 3_600, "6 h"), (24 * 3_600, "day"), (7 * 24 * 3_600, "week"))
SPAN_S = SPANS[0][0]


class Renders(Protocol):
    """The part of ``Admin`` that makes an answer of a template and a view."""

    def render(
        self, request: Request, template: str, view: View | None, status: int = 200, **extra: Any
    ) -> Response: ...


def prepare(environment: Environment) -> None:
    """Give the templates their filters, and ``static(name)``: the address of a static file below the base path."""
    environment.filters |= wording.FILTERS
    environment.filters |= {
        "known": charts.known,
        "has_values": charts.has_values,
        "in_unit": charts.in_unit,
        "points": charts.points,
        "json": _json,
    }

    @pass_context
    def static(context: Context, name: str) -> str:
        return str(context["url"](assets().path(name)))

    @pass_context
    def channel_url(context: Context, topic: str, channel: str) -> str:
        return str(context["url"]("/topics", topic, channel))

    @pass_context
    def confirm_url(context: Context, act: str, fields: Mapping[str, str]) -> str:
        return f"{context['url'](f'/confirm/{act}')}?{urlencode(fields)}"

    environment.globals |= {
        "static": static, "channel_url": channel_url, "confirm_url": confirm_url, "navigation": NAVIGATION,
        "spans": SPANS, "span_s": SPAN_S,
    }  # fmt: skip


def show(
    admin: Renders, request: Request, template: str, view: View | None, section: str, *,
    is_live: bool = False, status: int = 200, **extra: Any,
) -> Response:  # fmt: skip
    """Answer with a page.

    Args:
        section: of :data:`NAVIGATION`.
        is_live: it refreshes by itself.
    """

    def link(**changes: object) -> str:
        return _address(request, changes)

    return admin.render(
        request, template, view, status, section=section, is_live=is_live, link=link,
        address=_address(request, {"told": None}), **extra,
    )  # fmt: skip


def asked(request: Request, name: str, default: str = "", size_max: int = 256) -> str:
    """A parameter of the address as text.

    Raises:
        Refused: it is longer than ``size_max`` characters.
    """
    value = request.query_params.get(name, default)
    if len(value) > size_max:
        raise Refused(400, f"{name} is {len(value)} characters long; at most {size_max} are allowed")
    return value


def asked_choice(request: Request, name: str, choices: tuple[str, ...], default: str) -> str:
    """A parameter that is one of ``choices``.

    Raises:
        Refused: it is none of them.
    """
    value = request.query_params.get(name, default)
    if value not in choices:
        raise Refused(400, f"{name} is {value[:64]!r}; it must be one of {', '.join(choices)}")
    return value


def asked_number(request: Request, name: str, default: int, low: int, high: int) -> int:
    """A parameter that is a whole number.

    Raises:
        Refused: it is none, or beyond ``low`` to ``high``.
    """
    return number(name, request.query_params.get(name, ""), default, low, high)


def number(name: str, text: str, default: int, low: int, high: int) -> int:
    """Read a whole number; empty is ``default``.

    Raises:
        Refused: it is none, or beyond ``low`` to ``high``.
    """
    if not text:
        return default
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 19 else low - 1
    if not low <= value <= high:
        raise Refused(400, f"{name} is {text[:64]!r}; it must be a whole number from {low} to {high}")
    return value


def _address(request: Request, changes: Mapping[str, object]) -> str:
    """The address of this page with some parameters changed; None takes one away."""
    query = {key: value for key, value in request.query_params.items() if key not in changes and key != "told"}
    query |= {key: str(value) for key, value in changes.items() if value is not None}
    return f"{request.url.path}?{urlencode(query)}" if query else request.url.path


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
