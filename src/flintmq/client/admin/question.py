"""One request to a daemon's HTTP API, and how its answer is read. Pure: whoever asks does the IO and the waiting.

Rules of this file: an answer with another status than 200 is a :class:`HttpRefused` with the daemon's own words; one
that cannot be read is an error too, never an empty result.

Source: NSQ's HTTP API (statuses, ``{"message": ...}``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast
from urllib.parse import urlencode

import msgspec

from flintmq.addresses import shown_url
from flintmq.client.options import SOURCE
from flintmq.errors import UNREADABLE_JSON, FlintError, OptionError, RemoteProtocolError

Value = TypeVar("Value")
Method = TypeVar("Method", bound=Callable[..., Any])

TIMEOUT_S = 10.0
TEXT_SIZE_MAX = 500
_DAEMON_PORTS = {"nsqd": 4151, "nsqlookupd": 4161}
_TO_BE_DONE = {
    401: "show a token that it knows (token=, --token) or a certificate (options=, --tls-cert)",
    404: "does this daemon know the request? NSQ's own has fewer",
}


class HttpRefused(FlintError):
    """A daemon answered a request with an error.

    Args:
        address: ``http://host:port`` of the daemon.
        request: method, path and query.
        status: of HTTP: 400 bad arguments, 401 and 403 not allowed, 404 not there, 409 not now, 5xx it cannot.
        text: what the daemon says, such as ``TOPIC_NOT_FOUND``.
    """

    def __init__(self, address: str, request: str, status: int, text: str) -> None:
        super().__init__(address, request, status, text)
        self.address = address
        self.request = request
        self.status = status
        self.text = text

    def __str__(self) -> str:
        advice = _TO_BE_DONE.get(self.status, "")
        if self.status == 404 and self.text != "NOT_FOUND":
            advice = ""
        elif self.text == "TLS_REQUIRED":
            advice = "it names no HTTPS port: start it with --https-address"
        text = f"{shown_url(self.address)} refused {self.request}: {self.status} {self.text}".rstrip()
        return f"{text} ({advice})" if advice else text


class NothingToChange(OptionError):
    """A call that changes something was given nothing to change."""

    def __str__(self) -> str:
        return f"{self.source}: nothing is to be changed; {self.allowed}"


def check_changes(changes: Iterable[object], names: str) -> None:
    """Raise NothingToChange if there is no change but None.

    Args:
        names: of all arguments that say a change.
    """
    if all(change is None for change in changes):
        raise NothingToChange(names, None, f"give at least one of {names}", SOURCE)


@dataclass(frozen=True, slots=True)
class Question(Generic[Value]):
    """One request, and how the answer is read.

    Attributes:
        target: path and query.
        read: takes the body of an answer with status 200; raises ValueError for what it cannot be.
    """

    method: str
    target: str
    read: Callable[[bytes], Value]
    body: bytes = b""

    def answer(self, address: str, status: int, body: bytes) -> Value:
        """Read an answer.

        Raises:
            HttpRefused: its status is not 200.
            RemoteProtocolError: it is nothing that this question can have as answer.
        """
        request = f"{self.method} {self.target}"
        if status != 200:
            raise HttpRefused(address, request, status, _message(body))
        try:
            return self.read(body)
        except UNREADABLE_JSON as error:
            raise RemoteProtocolError("E_BAD_BODY", f"the answer of {address} to {request}: {error}") from error


def get(path: str, read: Callable[[bytes], Value], **query: object) -> Question[Value]:
    """A GET; arguments that are None are left out."""
    return Question("GET", _target(path, query), read)


def post(path: str, read: Callable[[bytes], Value], body: bytes = b"", **query: object) -> Question[Value]:
    """A POST; likewise."""
    return Question("POST", _target(path, query), read, body)


def _target(path: str, query: Mapping[str, object]) -> str:
    words = {name: _word(value) for name, value in query.items() if value is not None}
    return f"{path}?{urlencode(words)}" if words else path


def _word(value: object) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


def nothing(body: bytes) -> None:
    """Read the answer to a change: it is done."""


def plan(body: bytes) -> dict[str, Any] | None:
    """Read the answer to a change that may be asked for its plan only: that, or nothing where it is done."""
    return None if body.strip() in (b"", b"null") else fields(body)


def text(body: bytes) -> str:
    """Read text."""
    return body.decode()


def fields(body: bytes) -> dict[str, Any]:
    """Read a JSON object as it is."""
    return msgspec.json.decode(body, type=dict[str, Any])


def struct(kind: type[Value]) -> Callable[[bytes], Value]:
    """A reader of JSON of one form; what is unknown in it is left out."""
    return msgspec.json.Decoder(kind).decode


def _message(body: bytes) -> str:
    """Return what a refusal says: ``message`` of a JSON object, or text."""
    try:
        found = msgspec.json.decode(body)
    except UNREADABLE_JSON:
        found = None
    if isinstance(found, dict) and isinstance(found.get("message"), str):
        return str(found["message"])[:TEXT_SIZE_MAX]
    return body[:TEXT_SIZE_MAX].decode(errors="replace").strip()


def base_url(address: str, daemon: str) -> str:
    """``http://host:port`` of a daemon, from that or from ``host``, ``host:port``, ``https://host:port``.

    Args:
        daemon: ``nsqd`` or ``nsqlookupd``: whose port is meant when none is named, and who is named in errors.

    Raises:
        OptionError: it is no address.
    """
    allowed = f"the HTTP address of one {daemon}, such as 127.0.0.1:{_DAEMON_PORTS[daemon]}"
    if not isinstance(cast(object, address), str):
        raise OptionError("address", address, allowed, SOURCE)
    scheme, separator, rest = address.partition("://")
    if not separator:
        scheme, rest = "http", address
    rest = rest.rstrip("/")
    has_port = rest.rpartition(":")[2].isdigit() and (rest.count(":") == 1 or "]:" in rest)
    is_bare_ipv6 = rest.count(":") > 1 and not rest.startswith("[")
    if scheme not in ("http", "https") or not rest or not rest.isascii() or set(rest) & set("/?#@ ") or is_bare_ipv6:
        raise OptionError("address", address, allowed, SOURCE)
    return f"{scheme}://{rest}" if has_port else f"{scheme}://{rest}:{_DAEMON_PORTS[daemon]}"


def as_method(method: Method, make: Callable[..., Question[Any]]) -> Method:
    """A method that ``help()`` and editors show with the arguments of what makes its question."""
    signature = inspect.signature(make)
    me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    method.__signature__ = signature.replace(parameters=[me, *signature.parameters.values()])  # type: ignore[attr-defined]
    return method
