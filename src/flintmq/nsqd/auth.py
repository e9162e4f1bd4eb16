"""Permissions of clients: the question to an auth server over HTTP, its answer, and the decisions that follow from it.

Rules of this file:

- It fails closed: an answer that is late, too large, malformed, or names something unknown is no answer.
- A secret leaves this process only in the request. No error shows a URL, because there is a secret in it
  (:mod:`flintmq.net.http_exchange`); redirects are not followed, because they would carry the secret elsewhere.
- Answers are bounded in size, in patterns and in the cost of matching (:mod:`flintmq.net.regex`), and large ones are
  read in a worker thread.

Source: NSQ's TCP protocol, NSQ's defects; docs/auth.md.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlencode, urlsplit, urlunsplit

import msgspec

from flintmq.addresses import format_address
from flintmq.env import Env
from flintmq.errors import UNREADABLE_JSON, FlintError, without_credentials
from flintmq.net.http_client import HttpClient
from flintmq.net.http_exchange import NoAnswer, Request
from flintmq.net.regex import BadPattern, compiled
from flintmq.net.tls import Renewed, client_context
from flintmq.nsqd.options import NsqdOptions, auth_url
from flintmq.wire.server import go_quote

ANSWER_SIZE_MAX = 1024 * 1024
ANSWER_SIZE_IN_LOOP = 16 * 1024  # larger ones are read in a worker thread
AUTHORIZATION_COUNT_MAX = 1000
PATTERN_COUNT_MAX = 10_000
DECISION_COUNT_MAX = 1024  # remembered per connection
CONCURRENT_MAX = 64
SUBSCRIBE, PUBLISH = "subscribe", "publish"
_ANY = ".*"


class AuthFailed(FlintError):
    """No auth server gave a usable answer.

    Args:
        reason: for the log of this nsqd; clients are only told that it failed.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True)
class Question:
    """A client that asks to be let in.

    Attributes:
        remote_ip: empty for a unix socket.
        common_name: of the client's certificate; empty without one.
    """

    remote_ip: str
    is_tls: bool
    common_name: str
    secret: bytes = field(repr=False)

    def parameters(self) -> dict[str, str | bytes]:
        """Return the parameters of the request to an auth server, in nsqd's order."""
        return {
            "common_name": self.common_name,
            "remote_ip": self.remote_ip,
            "secret": self.secret,
            "tls": "true" if self.is_tls else "false",
        }


class _Authorization(msgspec.Struct):
    topic: str | None = None
    channels: list[str] | None = None
    permissions: list[str] | None = None


class _Answer(msgspec.Struct):
    ttl: int | None = None
    identity: str | None = None
    identity_url: str | None = None
    authorizations: list[_Authorization] | None = None


class Grants:
    """The answer of an auth server: what it lets one client do.

    Attributes:
        ttl_s: how long it holds.
        identity, identity_url: who the client is, for people.
    """

    def __init__(self, answer: _Answer) -> None:
        self.ttl_s = answer.ttl or 0
        self.identity = answer.identity or ""
        self.identity_url = answer.identity_url or ""
        self._authorizations = answer.authorizations or []
        self._decisions: dict[tuple[str, str, str | None], bool] = {}

    @property
    def count(self) -> int:
        """The number of authorizations; a client with none is not let in."""
        return len(self._authorizations)

    def may_publish(self, topic: str) -> bool:
        """Whether PUB, MPUB and DPUB are allowed."""
        # nsqd matches channels against "" here, so that an authorization without channels allows no publishing;
        # nobody means that, so it counts as one for any channel
        return self._decide(PUBLISH, topic, "")

    def may_subscribe(self, topic: str, channel: str) -> bool:
        """Whether SUB is allowed."""
        return self._decide(SUBSCRIBE, topic, channel)

    def may_read(self, topic: str) -> bool:
        """Whether a topic may be read without a channel: whoever may subscribe to any channel of it sees it all."""
        return self._decide(SUBSCRIBE, topic, None)

    def _decide(self, permission: str, topic: str, channel: str | None) -> bool:
        key = (permission, topic, channel)
        decision = self._decisions.get(key)
        if decision is None:
            if len(self._decisions) >= DECISION_COUNT_MAX:
                self._decisions.clear()
            decision = any(_allows(each, permission, topic, channel) for each in self._authorizations)
            self._decisions[key] = decision
        return decision


def _allows(authorization: _Authorization, permission: str, topic: str, channel: str | None) -> bool:
    if permission not in (authorization.permissions or ()):
        return False
    if not compiled(authorization.topic or "").search(topic):
        return False
    channels = authorization.channels or ([_ANY] if permission == PUBLISH else [])
    if channel is None:
        return bool(channels)
    return any(compiled(each).search(channel) for each in channels)


class ClientAuth:
    """The grants of one connection, which expire.

    Attributes:
        secret: what it sent with AUTH; asked about again when the grants have expired.
        grants: None before AUTH.
    """

    def __init__(self) -> None:
        self.secret = b""
        self.grants: Grants | None = None
        self._expires_at_s = 0.0

    def set(self, grants: Grants, now_s: float) -> None:
        """Keep what the auth server answered."""
        self.grants = grants
        self._expires_at_s = now_s + grants.ttl_s

    def has_expired(self, now_s: float) -> bool:
        """Whether the auth server has to be asked again before the next decision."""
        return self.grants is not None and now_s >= self._expires_at_s

    def left_s(self, now_s: float) -> float:
        """Return for how long the grants still hold; 0 when they do no longer."""
        return max(0.0, self._expires_at_s - now_s)

    def refusal(self, command: str, topic: str, channel: str | None = "") -> tuple[str, str] | None:
        """Code and detail of the error that a command is answered with; None when it may go on.

        Args:
            channel: empty to publish, None to read without a channel.
        """
        grants = self.grants
        if grants is None:
            return "E_AUTH_FIRST", f"AUTH required before {command}"
        if channel == "":
            is_allowed = grants.may_publish(topic)
        elif channel is None:
            is_allowed = grants.may_read(topic)
        else:
            is_allowed = grants.may_subscribe(topic, channel)
        if is_allowed:
            return None
        names = f"{go_quote(topic.encode())} {go_quote((channel or '').encode())}"
        return "E_UNAUTHORIZED", f"AUTH failed for {command} on {names}"


def parse_answer(body: bytes) -> Grants:
    """Read and check the answer of an auth server.

    Raises:
        AuthFailed: it is malformed, beyond a bound, or names an unknown permission.
    """
    try:
        answer = msgspec.json.decode(body, type=_Answer)
    except UNREADABLE_JSON as error:
        raise AuthFailed(f"the answer cannot be read: {error}") from error
    authorizations = answer.authorizations or []
    if len(authorizations) > AUTHORIZATION_COUNT_MAX:
        raise AuthFailed(f"more than {AUTHORIZATION_COUNT_MAX} authorizations")
    patterns: dict[str, None] = {}
    for authorization in authorizations:
        for permission in authorization.permissions or ():
            if permission not in (SUBSCRIBE, PUBLISH):
                raise AuthFailed(f"unknown permission {permission[:100]!r}; there are subscribe and publish")
        patterns[authorization.topic or ""] = None
        patterns |= dict.fromkeys(authorization.channels or ())
    if len(patterns) > PATTERN_COUNT_MAX:
        raise AuthFailed(f"more than {PATTERN_COUNT_MAX} regular expressions")
    try:
        for pattern in patterns:
            compiled(pattern)
    except BadPattern as error:
        raise AuthFailed(str(error)) from error
    if answer.ttl is None or answer.ttl <= 0:
        raise AuthFailed(f"invalid ttl {answer.ttl}; it must be more than 0 seconds")
    return Grants(answer)


def https_endpoint(endpoint: str, body: bytes) -> str:
    """Return the URL to ask again after a 403 that names an ``https_port``.

    Raises:
        AuthFailed: it names none.
    """
    try:
        port = msgspec.json.decode(body, type=dict[str, Any]).get("https_port")
    except UNREADABLE_JSON:
        port = None
    if not isinstance(port, int) or not 0 < port < 65536:
        raise AuthFailed("status 403")
    parts = urlsplit(endpoint)
    return urlunsplit(("https", format_address(parts.hostname or "", port), parts.path, parts.query, ""))


class AuthClient:
    """Asks auth servers.

    Args:
        addresses: ``host:port`` or a whole URL each.
        method: ``get`` or ``post``.
        env: for the choice of the first server and a worker thread.
        context: returns what is used for the next connection to a server with https.
        connect_timeout_s, request_timeout_s: for a connection, for the whole of one request.
    """

    def __init__(
        self,
        addresses: Iterable[str],
        *,
        method: str,
        env: Env,
        context: Callable[[], ssl.SSLContext],
        connect_timeout_s: float,
        request_timeout_s: float,
    ) -> None:
        self._endpoints = [auth_url(each) for each in addresses]
        self._method = method
        self._env = env
        self._context = context
        self._connect_timeout_s = connect_timeout_s
        self._request_timeout_s = request_timeout_s
        # a connection each, as nsqd has it: an idle one may be closed just when it is used again
        self._http = HttpClient()
        self._turns = asyncio.Semaphore(CONCURRENT_MAX)
        self._tasks: dict[asyncio.Task[Grants], None] = {}

    def ask(self, question: Question, done: Callable[[Grants | AuthFailed], None]) -> asyncio.Task[Grants]:
        """Begin to ask; ``done`` is called once with the outcome, or never when what is returned is cancelled."""

        def ended(task: asyncio.Task[Grants]) -> None:
            self._tasks.pop(task, None)
            if task.cancelled():
                return
            error = task.exception()
            if error is None:
                done(task.result())
            elif isinstance(error, AuthFailed):
                done(error)
            else:
                done(AuthFailed(f"internal error {type(error).__name__}"))
                raise error  # the loop's exception handler shows where it comes from

        task = asyncio.get_running_loop().create_task(self._ask_in_turn(question))
        self._tasks[task] = None
        task.add_done_callback(ended)
        return task

    async def close(self) -> None:
        """Give up what is being asked."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask_in_turn(self, question: Question) -> Grants:
        deadline_s = self._request_timeout_s * (2 * len(self._endpoints) + 1)
        try:
            async with asyncio.timeout(deadline_s), self._turns:
                return await self._ask_any(question)
        except TimeoutError as error:
            raise AuthFailed(f"no answer within {deadline_s:g} s") from error

    async def _ask_any(self, question: Question) -> Grants:
        """Ask the servers one after the other, from a random one on, until one answers."""
        endpoints = self._endpoints
        first = self._env.random.randrange(len(endpoints))
        reasons = []
        for endpoint in endpoints[first:] + endpoints[:first]:
            try:
                body = await self._request(endpoint, question)
                if len(body) <= ANSWER_SIZE_IN_LOOP:
                    return parse_answer(body)
                return cast(Grants, await self._env.run_blocking(parse_answer, body))
            except AuthFailed as failure:
                reasons.append(f"failed to auth against {without_credentials(endpoint)} - {failure}")
        raise AuthFailed("; ".join(reasons))

    async def _request(self, endpoint: str, question: Question) -> bytes:
        status, body = await self._request_once(endpoint, question)
        if status == 403 and not endpoint.startswith("https"):
            status, body = await self._request_once(https_endpoint(endpoint, body), question)
        if status != 200:
            raise AuthFailed(f"status {status}")
        return body

    async def _request_once(self, endpoint: str, question: Question) -> tuple[int, bytes]:
        parameters = question.parameters()
        headers = {"Accept": "application/vnd.nsq; version=1.0", "User-Agent": "nsqd"}
        try:
            if self._method == "post":
                values = {name: [_text(value)] for name, value in parameters.items()}
                headers["Content-Type"] = "application/json"
                request = Request.to("POST", endpoint, headers, msgspec.json.encode(values))
            else:
                url = f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(parameters)}"
                request = Request.to("GET", url, headers)
            answer = await self._http.ask(
                request,
                timeout_s=self._request_timeout_s,
                connect_timeout_s=self._connect_timeout_s,
                context=self._context(),
                body_bytes_max=ANSWER_SIZE_MAX,
            )
        except NoAnswer as failure:
            raise AuthFailed(failure.reason) from failure
        return answer.status, answer.body


def auth_client(options: NsqdOptions, env: Env) -> AuthClient | None:
    """Return what asks the auth servers that the flags name; None without any."""
    if not options.auth_http_address:
        return None
    authorities, min_version = options.tls_root_ca_file, options.tls_min_version
    context = Renewed("--tls-root-ca-file", [authorities], lambda: client_context(authorities, min_version=min_version))
    return AuthClient(
        options.auth_http_address,
        method=options.auth_http_request_method,
        env=env,
        context=context.now,
        connect_timeout_s=options.http_client_connect_timeout_ns / 1e9,
        request_timeout_s=options.http_client_request_timeout_ns / 1e9,
    )


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


__all__ = ["AuthClient", "AuthFailed", "ClientAuth", "Grants", "Question", "auth_client", "parse_answer"]
