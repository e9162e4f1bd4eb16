"""Routes: which handler answers which method and path.

Rules of this file: the hot path is one dictionary look-up by the bytes of method and path; everything else (patterns,
escapes in the path, redirects, 404, 405, OPTIONS) is decided in :meth:`Router.resolve_slowly` and is a route as well,
so that the connection knows no special cases. A request that NSQ or the redesigned NSQ has takes what it takes there:
parameters that it does not obey are ignored, but for those that it names, because without them it would do more or
something else than was asked. On all other routes a parameter that some route knows and this one does not obey is
refused, because who sends it expects it to do something; names that nobody knows are ignored.
Source: NSQ's HTTP API (httprouter's behaviour).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import quote, unquote

from flintmq.net.http_messages import (
    BAD_ESCAPE,
    JSON_TYPE,
    NO_PARAMETERS,
    NSQ_TYPE,
    HttpError,
    PendingResponse,
    Request,
    Response,
    StreamingResponse,
    error_response,
    plain_response,
    redirect_response,
)

BODY_LIMIT_BYTES = 64 * 1024
"""The longest body that routes without a use for one read and drop."""

_HARMLESS = ("format",)
"""Known, and ignored where it is not obeyed: NSQ's tools ask everywhere for the form that an answer has anyway."""

Answer = Response | PendingResponse | Coroutine[Any, Any, Response]
Handler = Callable[[Request], Answer]
Streamer = Callable[[Request], Response | StreamingResponse | Coroutine[Any, Any, Response | StreamingResponse]]
"""A handler whose answer may be one that comes piece by piece."""


@dataclass(frozen=True, slots=True)
class Route:
    """A handler for one method and path, and what holds for its requests.

    Attributes:
        handler: a plain function, or a coroutine function where it has to wait.
        body_limit_bytes: a longer body is answered with ``too_big`` before it is read, and the connection closed.
        plain: errors are sent as bare text, not as JSON.
        is_logged: one INFO line per request; off for routes that carry the load.
        takes: the parameters it obeys; None for those that ignore what they do not know.
        ends_with_client: a coroutine is cancelled when the client's connection is lost.
    """

    handler: Handler
    body_limit_bytes: int
    too_big: Response
    plain: bool
    is_logged: bool
    takes: tuple[str, ...] | None = None
    ends_with_client: bool = False


_BODY_TOO_BIG = error_response(413, "BODY_TOO_BIG")


def always(response: Response, *, too_big: Response = _BODY_TOO_BIG, is_logged: bool = True) -> Route:
    """Return a route with one constant answer."""
    return Route(lambda _request: response, BODY_LIMIT_BYTES, too_big, False, is_logged)


NOT_FOUND_RESPONSE = error_response(404, "NOT_FOUND")
NOT_FOUND = always(NOT_FOUND_RESPONSE)
BAD_PATH = always(plain_response("400 Bad Request", 400))


class Router:
    """The routes of one daemon. Build it completely before the server starts.

    Args:
        known: parameters that mean something to those who send them, beside those that the routes take.
    """

    def __init__(self, known: Iterable[str] = ()) -> None:
        self.exact: dict[tuple[bytes, bytes], Route] = {}
        self._known = set(known)
        self._routes: dict[tuple[str, ...], dict[str, Route]] = {}

    def add(
        self,
        method: str,
        path: str,
        handler: Handler | Streamer,
        *,
        body_limit_bytes: int = BODY_LIMIT_BYTES,
        too_big: str = "BODY_TOO_BIG",
        plain: bool = False,
        is_logged: bool = True,
        takes: Collection[str] | None = None,
        refuses: Collection[str] | None = None,
        form: Callable[[Handler], Handler] | None = None,
        ends_with_client: bool = False,
    ) -> None:
        """Answer ``method path`` with ``handler``.

        Args:
            path: lower case; a segment ``{name}`` takes any non-empty text without a slash.
            too_big: the text of the 413 for a body of more than ``body_limit_bytes``.
            plain: errors of this route are bare text.
            is_logged: write one INFO line per request.
            takes: the parameters it obeys. None: it obeys and refuses none.
            refuses: those that it does not obey and does not ignore either; None: every other one that is known.
            form: gives all answers another form, refusals of parameters as well.
            ends_with_client: cancel a coroutine when the client's connection is lost: nothing is changed by it.
        """
        handler = cast(Handler, handler)
        if takes is not None:
            self._known.update(name for name in takes if name not in _HARMLESS)
            refused = self._known if refuses is None else frozenset(refuses)
            if refused or refuses is None:
                handler = _strict(handler, tuple(takes), refused, f"{method} {path}")
        if form is not None:
            handler = form(handler)
        too_big_answer = error_response(413, too_big, plain)
        taken = None if takes is None else tuple(takes)
        route = Route(handler, body_limit_bytes, too_big_answer, plain, is_logged, taken, ends_with_client)
        methods = self._routes.setdefault(_segments(path), {})
        assert method not in methods, f"{method} {path} is routed twice"
        methods[method] = route
        if "{" not in path:
            self.exact[method.encode(), path.encode()] = route

    def routes(self) -> Iterator[tuple[str, str, Route]]:
        """Yield every method and path, and how it is answered."""
        for segments, methods in self._routes.items():
            for method, route in methods.items():
                yield method, "/" + "/".join(segments), route

    def resolve_slowly(self, method: str, path: bytes, query: bytes) -> tuple[Route, Mapping[str, str]]:
        """Find what answers a request that is not in :attr:`exact`."""
        text = path.decode("latin-1")
        if method == "OPTIONS" and text == "*":
            return _allow(200, self._methods_of(self._routes)), NO_PARAMETERS
        if BAD_ESCAPE.search(text):
            return BAD_PATH, NO_PARAMETERS
        text = unquote(text, errors="replace")
        segments = _segments(text)
        found = self._match(method, segments)
        if found is not None:
            return found
        return self._redirect(method, text, query) or self._refuse(method, segments), NO_PARAMETERS

    def _match(self, method: str, segments: tuple[str, ...]) -> tuple[Route, Mapping[str, str]] | None:
        for pattern, methods in self._routes.items():
            if method in methods:
                parameters = _match_pattern(pattern, segments)
                if parameters is not None:
                    return methods[method], parameters
        return None

    def _redirect(self, method: str, path: str, query: bytes) -> Route | None:
        """Lead a superfluous slash or a wrong case to the registered path."""
        cleaned = _clean(path)
        for pattern, methods in self._routes.items():
            if method in methods and path != "/":
                parameters = _match_pattern(_without_slash(pattern), cleaned, fold_case=True)
                if parameters is not None:
                    location = "/" + "/".join(_fill(pattern, parameters))
                    if query:
                        location += "?" + query.decode("latin-1")
                    return always(redirect_response(location, method))
        return None

    def _refuse(self, method: str, segments: tuple[str, ...]) -> Route:
        allowed = self._methods_of(
            {pattern: m for pattern, m in self._routes.items() if _match_pattern(pattern, segments) is not None}
        )
        if not allowed:
            return NOT_FOUND
        return _allow(200 if method == "OPTIONS" else 405, allowed)

    @staticmethod
    def _methods_of(routes: Mapping[tuple[str, ...], Mapping[str, Route]]) -> list[str]:
        methods = {method for found in routes.values() for method in found}
        return sorted(methods | {"OPTIONS"}) if methods else []


def _strict(handler: Handler, takes: tuple[str, ...], refused: Set[str], what: str) -> Handler:
    """Return a handler that refuses some of the parameters which it does not obey."""
    obeyed_query = b""  # the last one, because publishers repeat theirs

    def answer(request: Request) -> Answer:
        nonlocal obeyed_query
        if request.query_bytes != obeyed_query:
            for name in request.names:
                if name in refused and name not in takes:
                    obeyed = f"it takes {', '.join(takes)}" if takes else "it takes no parameters"
                    raise HttpError(400, f"INVALID_ARG_{name.upper()}: {what} does not take {name}; {obeyed}")
            obeyed_query = request.query_bytes
        return handler(request)

    return answer


def _allow(status: int, methods: list[str]) -> Route:
    allow = ("Allow", ", ".join(methods))
    if status == 200:
        return always(Response(200, b"", (allow,)))
    error = error_response(405, "METHOD_NOT_ALLOWED")
    return always(Response(405, error.body, (JSON_TYPE, NSQ_TYPE, allow)))


def _segments(path: str) -> tuple[str, ...]:
    return tuple(path.split("/")[1:]) if path.startswith("/") else (path,)


def _clean(path: str) -> tuple[str, ...]:
    """Return the segments of a path without empty ones, ``.`` and ``..``."""
    kept: list[str] = []
    for segment in path.split("/"):
        if segment == "..":
            del kept[-1:]
        elif segment not in ("", "."):
            kept.append(segment)
    return tuple(kept)


def _without_slash(pattern: tuple[str, ...]) -> tuple[str, ...]:
    return pattern[:-1] if pattern[-1] == "" else pattern


def _match_pattern(
    pattern: tuple[str, ...], segments: tuple[str, ...], fold_case: bool = False
) -> Mapping[str, str] | None:
    if len(pattern) != len(segments):
        return None
    parameters: dict[str, str] = {}
    for wanted, given in zip(pattern, segments, strict=True):
        if wanted.startswith("{"):
            if not given:
                return None
            parameters[wanted[1:-1]] = given
        elif wanted != (given.lower() if fold_case else given):
            return None
    return parameters or NO_PARAMETERS


def _fill(pattern: tuple[str, ...], parameters: Mapping[str, str]) -> list[str]:
    return [quote(parameters[part[1:-1]], safe="") if part.startswith("{") else part for part in pattern]
