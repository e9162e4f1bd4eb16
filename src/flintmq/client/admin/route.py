"""The way one daemon is asked: over plain HTTP or TLS, with the token or without; its answers decide. Pure.

Rules of this file:

- An nsqd that wants TLS (403 ``TLS_REQUIRED``) has done nothing. It is asked again on the same host, at the HTTPS port
  that it names, and from then on at once: so of several requests one at most is carried out.
- Where the token is for TLS only, no request over plain HTTP carries it: who listens there may be anybody who has
  registered with nsqlookupd. Without it the first request tells all that is needed; to 401 there is no second one.
- Where it may be shown in clear, and there are options of TLS, it is not shown before it is asked for (401): an nsqd
  that wants TLS would have had it in clear.

Source: NSQ's HTTP API (TLS_REQUIRED); docs/http-auth.md.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

from flintmq.addresses import format_address, shown_url
from flintmq.client.admin.question import HttpRefused, Question
from flintmq.client.options import ConnectionOptions
from flintmq.net.http_exchange import tls_port

Value = TypeVar("Value")
ROUTES_MAX = 1024


class TokenWithheld(HttpRefused):
    """A daemon asks for a token over plain HTTP, where it is not shown; nothing was done."""

    def __str__(self) -> str:
        return f"{shown_url(self.address)} asks for a token over plain HTTP, and it is shown over TLS only"


class Step(NamedTuple):
    """One of at most three requests by which a question is asked.

    Attributes:
        base: ``http(s)://host:port``.
        shows_token: it carries the token.
    """

    base: str
    shows_token: bool


class Route:
    """The way one daemon is asked; any number of threads may share it.

    Args:
        base: ``http(s)://host:port``.
        has_token: there is a token that it may ask for.
        waits_for_401: over plain HTTP the token is not shown before it is asked for.
        token_in_clear: False: it is never shown over plain HTTP.
    """

    def __init__(self, base: str, *, has_token: bool, waits_for_401: bool = False, token_in_clear: bool = True) -> None:
        self._base = base
        self._has_token = has_token
        self._shows_token = has_token and (base.startswith("https://") or (token_in_clear and not waits_for_401))
        self._token_in_clear = token_in_clear
        self._secured = ""  # where it is asked over TLS, as it wanted

    def first(self) -> Step:
        """Return the first request to a question."""
        return Step(self._secured, self._has_token) if self._secured else Step(self._base, self._shows_token)

    def after(self, step: Step, status: int, body: bytes) -> Step | None:
        """Return the next request; None if the question is answered."""
        if step.base.startswith("https://"):
            return None
        if status == 403 and (port := tls_port(body)):
            self._secured = f"https://{format_address(urlsplit(self._base).hostname or '', port)}"
            return Step(self._secured, self._has_token)
        if status == 401 and self._has_token and not step.shows_token and self._token_in_clear:
            self._shows_token = True
            return step._replace(shows_token=True)
        return None

    def failed(self, step: Step) -> None:
        """Take note that there is no answer: an nsqd that listens elsewhere now is asked from the beginning."""
        if step.base == self._secured:
            self._secured = ""

    def check(self, step: Step, status: int, request: str) -> None:
        """Raise TokenWithheld if that is why a request was refused.

        Args:
            request: method, path and query.
        """
        if status == 401 and self._has_token and not step.shows_token:
            raise TokenWithheld(step.base, request, status, "UNAUTHORIZED")

    def read(self, question: Question[Value], step: Step, status: int, body: bytes) -> Value:
        """Read the last answer.

        Raises:
            TokenWithheld: the token was not shown, and it is asked for.
            HttpRefused, RemoteProtocolError: as of :meth:`Question.answer`.
        """
        self.check(step, status, f"{question.method} {question.target}")
        return question.answer(step.base, status, body)


class Routes:
    """The ways several daemons are asked, each from its first question on; of more than ``ROUTES_MAX`` none is kept.

    Args:
        has_token, waits_for_401, token_in_clear: as of :class:`Route`.
    """

    def __init__(self, *, has_token: bool, waits_for_401: bool = False, token_in_clear: bool = True) -> None:
        self._new = partial(Route, has_token=has_token, waits_for_401=waits_for_401, token_in_clear=token_in_clear)
        self._routes: dict[str, Route] = {}

    def to(self, base: str) -> Route:
        """Return the way to ``http(s)://host:port``."""
        route = self._routes.get(base)
        if route is None:
            if len(self._routes) >= ROUTES_MAX:
                self._routes.clear()
            route = self._routes[base] = self._new(base)
        return route


def route_to(address: str, base: str, options: ConnectionOptions, token_in_clear: bool) -> Route:
    """Return the route to a daemon.

    Args:
        address: as it was given; with ``http://`` plain HTTP is meant.
        base: the same as ``http(s)://host:port``.
    """
    waits = wants_tls(options) and "://" not in address
    has_token = options.lookup_token is not None
    return Route(base, has_token=has_token, waits_for_401=waits, token_in_clear=token_in_clear)


def wants_tls(options: ConnectionOptions) -> bool:
    """Whether any option says how TLS is to be spoken, and so that it is."""
    named = options.tls or options.tls_ca_file or options.tls_cert or options.tls_server_name
    return bool(named) or not options.tls_verify


def left_s(seconds: float) -> float:
    """Return the time that is left for the next request, in a number that can be read in an error; never 0."""
    return max(round(seconds, 1), 0.1)
