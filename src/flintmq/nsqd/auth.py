"""Permissions of clients: the question to an auth server over HTTP, its answer, and the decisions that follow from it.

Rules of this file:

- It fails closed: an answer that is late, too large, malformed, or names something unknown is no answer.
- A secret leaves this process only in the request. No error shows a URL, because there is a secret in it
  (:mod:`flintmq.net.http_exchange`); redirects are not followed, because they would carry the secret elsewhere.
- Answers are bounded in size, in patterns and in the cost of matching (:mod:`flintmq.net.regex`), and large ones are
  read in a worker thread. What they grant is kept once for all connections that are granted the same.
- Keys are matched whatever their case, as nsqd does: a server in Go that names no keys sends ``TTL``.

Source: NSQ's TCP protocol, NSQ's defects; docs/auth.md.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlencode, urlsplit, urlunsplit
from weakref import WeakValueDictionary

import msgspec

from flintmq.addresses import format_address
from flintmq.env import Env
from flintmq.errors import UNREADABLE_JSON, FlintError, without_credentials
from flintmq.net.http_client import HttpClient
from flintmq.net.http_exchange import NoAnswer, Request
from flintmq.net.regex import BadPattern, Pattern, compiled
from flintmq.net.tls import Renewed, client_context
from flintmq.nsqd.options import NsqdOptions, auth_url
from flintmq.wire.server import go_quote

ANSWER_SIZE_MAX = 1024 * 1024
ANSWER_SIZE_IN_LOOP = 16 * 1024  # larger ones are read in a worker thread
AUTHORIZATION_COUNT_MAX = 10_000
PATTERN_COUNT_MAX = 10_000
DECISION_COUNT_MAX = 10_000  # remembered per list of authorizations
CONCURRENT_MAX = 64
SUBSCRIBE, PUBLISH = "subscribe", "publish"
_ANY = ".*"
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_REFUSALS = frozenset((401, 403))


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


class AuthRefused(AuthFailed):
    """Every auth server said no: with status 401, or 403 without a way to ask again."""


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


class _AuthorizationSent(msgspec.Struct):
    topic: str = ""
    channels: list[str] | None = None
    permissions: list[str] | None = None


class _AnswerSent(msgspec.Struct):
    ttl: int | None = None
    identity: str = ""
    identity_url: str = ""


@dataclass(frozen=True, slots=True)
class _Authorization:
    """One of an answer, compiled: thousands of patterns are more than :func:`compiled` remembers."""

    permissions: frozenset[str]
    topic: Pattern
    channels: tuple[Pattern, ...]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _Rules:
    """A list of authorizations, and what has been decided by it."""

    authorizations: tuple[_Authorization, ...]
    decisions: dict[tuple[str, str, str | None], bool] = field(default_factory=dict)


# By the digest of what the auth server sent, for as long as a connection has them: a thousand clients of one service
# are granted the same, and 10,000 regular expressions take up to 25 MB and most of a second.
_rules_in_use: WeakValueDictionary[bytes, _Rules] = WeakValueDictionary()


class Grants:
    """The answer of an auth server: what it lets one client do.

    Attributes:
        ttl_s: how long it holds.
        identity, identity_url: who the client is, for people.
    """

    def __init__(self, ttl_s: int, identity: str, identity_url: str, rules: _Rules) -> None:
        self.ttl_s = ttl_s
        self.identity = identity
        self.identity_url = identity_url
        self._rules = rules

    @property
    def count(self) -> int:
        """The number of authorizations; a client with none is not let in."""
        return len(self._rules.authorizations)

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
        decisions = self._rules.decisions
        decision = decisions.get(key)
        if decision is None:
            if len(decisions) >= DECISION_COUNT_MAX:
                decisions.clear()
            decision = any(_allows(each, permission, topic, channel) for each in self._rules.authorizations)
            decisions[key] = decision
        return decision


def _allows(authorization: _Authorization, permission: str, topic: str, channel: str | None) -> bool:
    if permission not in authorization.permissions or not authorization.topic.search(topic):
        return False
    channels = authorization.channels or ((compiled(_ANY),) if permission == PUBLISH else ())
    if channel is None:
        return bool(channels)
    return any(each.search(channel) for each in channels)


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
        sent = _folded(_decode_object(body), _ANSWER_KEYS)
        listed = sent.pop("authorizations", msgspec.Raw(b"null"))
        answer = msgspec.convert(_values(sent), _AnswerSent)
    except UNREADABLE_JSON as error:
        raise AuthFailed(f"the answer cannot be read: {error}") from error
    rules = _rules_of(bytes(listed))
    if answer.ttl is None:
        raise AuthFailed("the answer has no ttl, the seconds for which it holds")
    if answer.ttl <= 0:
        raise AuthFailed(f"invalid ttl {answer.ttl}; it must be more than 0 seconds")
    return Grants(answer.ttl, answer.identity, answer.identity_url, rules)


_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_objects = msgspec.json.Decoder(list[dict[str, msgspec.Raw]] | None).decode
_AUTHORIZATION_KEYS = frozenset(_AuthorizationSent.__struct_fields__)
_ANSWER_KEYS = frozenset((*_AnswerSent.__struct_fields__, "authorizations"))
_LISTS = frozenset(("authorizations", "channels", "permissions"))


def _folded(fields: Mapping[str, msgspec.Raw], names: frozenset[str]) -> dict[str, msgspec.Raw]:
    """Return the fields of an object by their names in small letters; of several the last counts, as in Go.

    null is no value there, but makes a list empty.
    """
    found = {}
    for key, value in fields.items():
        name = key if key in names else key.lower()
        if name in names and (name in _LISTS or bytes(value) != b"null"):
            found[name] = value
    return found


def _values(fields: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    return {name: msgspec.json.decode(value) for name, value in fields.items()}


def _rules_of(listed: bytes) -> _Rules:
    """Return the authorizations of an answer: those of a connection that has the same, or new ones.

    Raises:
        AuthFailed: they are malformed, too many, or name an unknown permission.
    """
    digest = hashlib.sha256(listed).digest()
    rules = _rules_in_use.get(digest)
    if rules is None:
        rules = _rules_in_use[digest] = _Rules(tuple(_authorizations(listed)))
    return rules


def _authorizations(listed: bytes) -> list[_Authorization]:
    try:
        objects = _decode_objects(listed) or []
        if len(objects) > AUTHORIZATION_COUNT_MAX:
            raise _too_many(len(objects), AUTHORIZATION_COUNT_MAX, "authorizations")
        sent = [msgspec.convert(_values(_folded(each, _AUTHORIZATION_KEYS)), _AuthorizationSent) for each in objects]
    except UNREADABLE_JSON as error:
        raise AuthFailed(f"the answer cannot be read: authorizations: {error}") from error
    texts: dict[str, None] = {}
    for each in sent:
        for permission in each.permissions or ():
            if permission not in (SUBSCRIBE, PUBLISH):
                raise AuthFailed(f"unknown permission {permission[:100]!r}; there are subscribe and publish")
        texts[each.topic] = None
        texts |= dict.fromkeys(each.channels or ())
    if len(texts) > PATTERN_COUNT_MAX:
        raise _too_many(len(texts), PATTERN_COUNT_MAX, "regular expressions")
    try:
        patterns = {text: compiled(text) for text in texts}
    except BadPattern as error:
        raise AuthFailed(str(error)) from error
    return [
        _Authorization(
            frozenset(each.permissions or ()),
            patterns[each.topic],
            tuple(patterns[text] for text in each.channels or ()),
        )
        for each in sent
    ]


def _too_many(count: int, count_max: int, what: str) -> AuthFailed:
    return AuthFailed(
        f"the answer has {count} {what}, at most {count_max} are taken; let an expression such as ^orders_.*$ stand "
        "for many names"
    )


def https_endpoint(endpoint: str, body: bytes) -> str:
    """Return the URL to ask again after a 403 that names an ``https_port``.

    Raises:
        AuthRefused: it names none.
    """
    try:
        port = msgspec.json.decode(body, type=dict[str, Any]).get("https_port")
    except UNREADABLE_JSON:
        port = None
    if not isinstance(port, int) or not 0 < port < 65536:
        raise AuthRefused("status 403")
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
        is_refused = True
        for endpoint in endpoints[first:] + endpoints[:first]:
            try:
                body = await self._request(endpoint, question)
                if len(body) <= ANSWER_SIZE_IN_LOOP:
                    return parse_answer(body)
                return cast(Grants, await self._env.run_blocking(parse_answer, body))
            except AuthFailed as failure:
                reasons.append(f"failed to auth against {without_credentials(endpoint)} - {failure}")
                is_refused = is_refused and isinstance(failure, AuthRefused)
        raise (AuthRefused if is_refused else AuthFailed)("; ".join(reasons))

    async def _request(self, endpoint: str, question: Question) -> bytes:
        status, body = await self._request_once(endpoint, question)
        if status == 403 and not endpoint.startswith("https"):
            status, body = await self._request_once(https_endpoint(endpoint, body), question)
        if status in _REDIRECTS:
            raise AuthFailed(f"status {status}: it redirects, which is not followed; give the address it leads to")
        if status in _REFUSALS:
            raise AuthRefused(f"status {status}")
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


__all__ = [
    "AuthClient", "AuthFailed", "AuthRefused", "ClientAuth", "Grants", "Question", "auth_client", "parse_answer",
]  # fmt: skip
