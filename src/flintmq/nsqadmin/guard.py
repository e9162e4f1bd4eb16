"""The door of nsqadmin: each request goes through it before anything else sees it.

In this order: below the base path? from a page of ours? whose? is the body within its bound, and there in time? may
this visitor be here at all? does a change carry what only our page for this visitor has? Then the answer gets headers
that keep browsers from running, framing or guessing anything.

Rules of this file: a change cannot be forgotten, because every method but GET, HEAD and OPTIONS is one. Scripts that
use the JSON API without a session need no ``csrf``: no browser sends a token or a proxy's header of its own accord for
another page, and Origin is checked all the same. A change that is refused here is in the audit log as those are that
are refused later; nobody who only looks is. An error that nobody thought of is logged once and answered with 500.

Source: the Fetch standard, W3C Fetch Metadata, Content Security Policy 3; NSQ's HTTP API (statuses).
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl, quote

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flintmq.addresses import format_address
from flintmq.errors import OptionError
from flintmq.net.origin import Origins, is_loopback_address
from flintmq.nsqadmin.admin import Admin
from flintmq.nsqadmin.errors import Refused

FORM_BYTES_MAX = 64 * 1024
CONFIG_BYTES_MAX = 1024 * 1024
FIELD_COUNT_MAX = 200
BODY_S_MAX = 10.0
TEXT_MAX = 500
CSRF_HEADER = "x-csrf-token"
_METHOD_SIZE_MAX = 16
_LOOKING = ("GET", "HEAD", "OPTIONS")
_PATH_SAFE = "/:@!$&'()*+,;=~"
_FOR_ALL = ("/ping", "/login")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}

_log = logging.getLogger(__name__)


class Guard:
    """Wraps the application.

    Args:
        routes: those of the application, for what is answered where none of them takes a request.
    """

    def __init__(self, app: ASGIApp, admin: Admin, origins: Origins, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._routes = routes
        self._admin = admin
        self._origins = origins
        self._base = admin.options.base

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        scope["root_path"] = self._base
        scope["state"] = {}
        scope["app"] = self  # has the router raise what it does not know
        request = Request(scope, receive)
        request.state.cors = {}
        has_begun = False

        async def guarded_send(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-store")
                headers.update(request.state.cors)
            await send(message)

        try:
            response = await self._stopped(request)
            if response is None:
                await self._app(scope, receive, guarded_send)
                return
        except Refused as refused:
            response = self.refusal(request, refused)
        except HTTPException as error:
            response = self._not_routed(request, error)
        except OptionError as error:
            response = self.refusal(request, Refused(400, str(error)))
        except ClientDisconnect:
            return
        except Exception as error:
            _log.error("%s %s failed: %r", scope["method"], _shown_path(scope), error, exc_info=error)
            if has_begun:
                raise
            response = self.refusal(request, Refused(500, "INTERNAL_ERROR"))
        await response(scope, receive, guarded_send)

    def _not_routed(self, request: Request, error: HTTPException) -> Response:
        """Return the answer to a request that no route takes: where it would, or by which methods."""
        scope = request.scope
        if error.status_code == 405:
            allowed = ", ".join(sorted({"OPTIONS", *self._methods_of(scope)}))
            if scope["method"] == "OPTIONS":
                return Response(headers={"Allow": allowed})
            response = self.refusal(request, Refused(405, "METHOD_NOT_ALLOWED"))
            response.headers["Allow"] = allowed
            return response
        if error.status_code != 404:
            return self.refusal(request, Refused(error.status_code, error.detail))
        path = scope["path"]
        other = path.rstrip("/") if path.endswith("/") else f"{path}/"
        if not other.startswith("//") and self._methods_of({**scope, "path": other}):
            query = f"?{request.url.query}" if request.url.query else ""
            is_look = scope["method"] in _LOOKING
            return RedirectResponse(quote(other, safe=_PATH_SAFE) + query, 301 if is_look else 307)
        return self.refusal(request, Refused(404, "NOT_FOUND"))

    def _methods_of(self, scope: Scope) -> set[str]:
        """Return the methods that a path takes; empty: there is no such path."""
        fit = [each for each in self._routes if isinstance(each, Route) and each.matches(scope)[0] != Match.NONE]
        return {method for each in fit for method in each.methods or ()}

    async def _stopped(self, request: Request) -> Response | None:
        """Return the answer to a request that goes no further."""
        scope = request.scope
        path = scope["path"]
        if self._base and path != self._base and not path.startswith(f"{self._base}/"):
            raise Refused(404, "NOT_FOUND")
        client = scope.get("client") or ("", 0)
        address = format_address(client[0], client[1])
        said = request.headers.getlist("x-forwarded-for")  # where a proxy adds one of its own, it is the last
        forwarded_for = self._admin.access.forwarded_for(said[-1] if said else "", address)
        try:
            return await self._judge(request, path[len(self._base) :] or "/", address, forwarded_for)
        except Refused as refused:
            if scope["method"] not in _LOOKING:
                is_judged = hasattr(request.state, "visitor")
                visitor = request.state.visitor if is_judged else self._admin.access.stranger(address, forwarded_for)
                subject = f"{scope['method'][:_METHOD_SIZE_MAX]} {_shown_path(scope)}"
                self._admin.audit.note(visitor, "change", subject, "refused", [refused.text], who=visitor.basic_user)
            raise

    async def _judge(self, request: Request, route: str, address: str, forwarded_for: str) -> Response | None:
        """Return the answer to a request below the base path that goes no further; find out whose it is.

        Raises:
            Refused: it may not be made.
        """
        scope = request.scope
        headers = {name: value for name, value in reversed(scope["headers"])}  # noqa: C416 - the first of a name wins
        verdict = self._origins.judge(
            scope["method"].encode(), route.encode(), headers, is_loopback_address(scope.get("server"))
        )
        if verdict.is_preflight or (verdict.headers and not verdict.refusal):
            request.state.cors = dict(
                line.split(": ", 1) for line in verdict.headers.decode("latin-1").split("\r\n") if line
            )
        if verdict.refusal:
            raise Refused(403, verdict.refusal)
        if verdict.is_preflight:
            return Response(status_code=204)
        named = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
        visitor = await self._admin.access.visitor_of(named, request.cookies, address, forwarded_for)
        request.state.visitor = visitor = replace(
            visitor,
            basic_user=basic_user(named.get("authorization", "")),
            user_agent=request.headers.get("user-agent", "")[:TEXT_MAX],
            url=_url(request),
        )
        request.state.body = b""
        request.state.form = {}
        is_change = scope["method"] not in _LOOKING
        if is_change:
            await self._read(request, route)
        if visitor.role == "none" and route not in _FOR_ALL and not route.startswith("/static/"):
            return self._to_log_in(request, route)
        if is_change:
            self._check(request, route, named)
        return None

    def _to_log_in(self, request: Request, route: str) -> Response:
        if is_for_scripts(route) or request.method not in ("GET", "HEAD"):
            raise Refused(401, "UNAUTHORIZED: log in at /login, or send Authorization: Bearer with a token")
        wanted = route + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse(f"{self._base}/login?next={quote(wanted, safe='')}", 303)

    async def _read(self, request: Request, route: str) -> None:
        limit = CONFIG_BYTES_MAX if route.startswith(("/config/", "/api/v2/queries")) else FORM_BYTES_MAX
        too_large = Refused(
            413, "INVALID_VALUE" if route.startswith("/config/") else f"BODY_TOO_BIG: at most {limit} bytes"
        )
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_S_MAX):
                async for piece in request.stream():
                    size += len(piece)
                    if size > limit:
                        raise too_large
                    pieces.append(piece)
        except TimeoutError:
            raise Refused(408, f"the body of the request was not there within {BODY_S_MAX:g} s") from None
        request.state.body = b"".join(pieces)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "application/x-www-form-urlencoded" and not is_for_scripts(route):
            request.state.form = read_form(request.state.body)

    def _check(self, request: Request, route: str, headers: Mapping[str, str]) -> None:
        visitor = request.state.visitor
        if is_for_scripts(route) and visitor.how != "password":
            return
        given = headers.get(CSRF_HEADER) or request.state.form.get("csrf", "")
        if not self._admin.access.checks_out(given, visitor, request.cookies):
            raise Refused(403, "this page is too old, or was not made for you: load it again, and repeat the change")

    def refusal(self, request: Request, refused: Refused) -> Response:
        """Return the answer to a request that is refused."""
        path = request.scope["path"]
        route = path.removeprefix(self._base) if self._base else path
        is_for_people = "text/html" in request.headers.get("accept", "")
        if is_for_scripts(route) or not (is_for_people or route.startswith("/static/")):
            return api_response({"message": refused.text}, refused.status)
        if not (is_for_people and hasattr(request.state, "visitor")):
            return PlainTextResponse(refused.text + "\n", refused.status)
        return self._admin.render(request, "error.html", None, refused.status, text=refused.text)


def basic_user(authorization: str) -> str:
    """Return the user of ``Authorization: Basic``; empty: there is none."""
    scheme, _, text = authorization.partition(" ")
    if scheme != "Basic":
        return ""
    try:
        user, colon, _ = base64.b64decode(text, validate=True).decode().partition(":")
    except ValueError:
        return ""
    return user[:TEXT_MAX] if colon else ""


def _url(request: Request) -> str:
    is_secured = request.url.scheme == "https" or request.headers.get("x-scheme") == "https"
    query = f"?{request.url.query}" if request.url.query else ""
    host = request.headers.get("host", "")[:TEXT_MAX]
    return f"{'https' if is_secured else 'http'}://{host}{request.scope['path']}{query}"[: 4 * TEXT_MAX]


def is_for_scripts(route: str) -> bool:
    """Whether a path is of the JSON API, whose errors are JSON."""
    return route.startswith(("/api/", "/config/")) or route in ("/api", "/config", "/render")


def read_form(body: bytes) -> dict[str, str]:
    """Return the fields of a form; the first of a name wins.

    Raises:
        Refused: it is none.
    """
    try:
        pairs = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=FIELD_COUNT_MAX)
    except ValueError:
        raise Refused(400, f"the form cannot be read: UTF-8, at most {FIELD_COUNT_MAX} fields") from None
    return dict(reversed(pairs))


def api_response(content: Any, status: int = 200) -> Response:
    """Return JSON as NSQ answers it."""
    headers = {"X-NSQ-Content-Type": "nsq; version=1.0", "Content-Type": "application/json; charset=utf-8"}
    return Response(msgspec.json.encode(content), status, headers)


def _shown_path(scope: Scope) -> str:
    return ascii(scope["path"][:200])[1:-1]


__all__ = ["Guard", "api_response", "is_for_scripts", "read_form"]
