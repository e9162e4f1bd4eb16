"""The coordination store over etcd's v3 JSON gateway: of etcd itself, or of the nsqlookupd that keeps one.

Rules of this file:

- Everything has a deadline. A question goes on to the next endpoint when one fails; a change does as long as it was not
  sent, and is :class:`OutcomeUnknown` from then on.
- An endpoint that fails goes to the end of the line.
- All endpoints are of one store: an answer of another is no answer.
- Nothing tells a watch that its endpoint has stopped: a stopped process keeps its connections. So an endpoint that says
  nothing for a second, in no watch and in no answer, is asked something, once for all watches there; when that is not
  answered they go on elsewhere, from the last revision that was seen. What was seen is never told again, and nothing
  between is left out. The store of nsqlookupd says something on every watch twice a second, and is not asked at all.
- Why an endpoint is left is said once in an outage, and once that it is watched again.
- A user logs in once for all who need a token, and never twice at a time: etcd takes as long for it as its
  ``--bcrypt-cost`` says. Who waits does so for as long as its own call may take; the login goes on for the next one.
- A password in a file is that of the moment of the login. Where it is refused, the one that was taken last is tried: so
  the file may be changed before etcd is.

Source: docs/decisions/0017 (both traps were measured there), https://etcd.io/docs/v3.5/learning/api/.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from flintmq.cluster.store import (
    Compacted,
    Events,
    KeyValue,
    Lease,
    LeaseExists,
    LeaseNotFound,
    OutcomeUnknown,
    Snapshot,
    Span,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    Txn,
    TxnResult,
)
from flintmq.env import Env
from flintmq.errors import without_frames
from flintmq.net import etcd_wire as wire
from flintmq.net.etcd_wire import BadAnswer, Header, ServerError
from flintmq.net.http_auth import TokenFile
from flintmq.net.http_client import HttpClient
from flintmq.net.http_exchange import Endpoint, NoAnswer, Request
from flintmq.net.tasks import tell

TRY_TIMEOUT_S = 1.0
"""For one request to one endpoint; a third of the shortest useful lease."""
TIMEOUT_S = 4.0
"""For a call, which may ask several endpoints."""
LOGIN_TIMEOUT_S = 10.0
"""For a login at one endpoint: etcd computes a bcrypt, which may take it far longer than any other request."""
PAUSE_S = 0.1
"""After every endpoint has failed, before the first is asked again; a watch begins with it."""
WATCH_PAUSE_S = 0.5
"""The longest pause of a watch, which doubles with every round in which all endpoints failed."""
STEADY_S = 1.0
"""An endpoint that is watched for so long has come back: what fails then is another outage."""
REASON_COUNT_MAX = 8
"""Reasons that are said in one outage."""
PROBE_S = 1.0
"""An endpoint with watches may be silent for so long; then it is asked, and has ``TRY_TIMEOUT_S`` to answer."""
REOPEN_S = 10.0
"""A watch that is silent for so long while the store changes is made anew: its connection alone may be dead."""
FULL_TRIES = 4
FULL_PAUSE_S = 1.0
"""Between tries while the store has no space: whoever is refused asks again, and there may be many."""
PAGE_COUNT = 2000
"""Keys that are asked for at once."""
RANGE_TRIES = 4
IDLE_MAX = 8
"""Connections that are kept for the next request; TLS and a handshake cost more than most of them."""
ANSWER_BYTES_MAX = 64 * 1024 * 1024
LINE_BYTES_MAX = 64 * 1024 * 1024
WATCH_COUNT_MAX = 64
"""Answers of a watch that wait for its reader; then nothing more is read from the endpoint."""

_AUTH_IS_OFF = "authentication is not enabled"
_NO_SPACE = "database space exceeded"
_NAMED_CERTIFICATE = "CommonName of client sending a request against gateway"
_NAMELESS = "user name is empty"
_TOKEN_IS_OLD = (_NAMELESS, "revision of auth store is old", "invalid auth token")
_LATE = "no answer within"
_SLOW_LOGIN = "; it takes etcd longer with a higher --bcrypt-cost, and on a busy machine"
_NOT_HTTP = ("closed before the answer", "the answer is not HTTP")
_NOT_OF_AUTHORITIES = ("mismatch", "expired", "not yet valid")
_PASSED_ON = (wire.UNAVAILABLE, wire.DEADLINE, 1, 2, 10, 13)  # cancelled, unknown, aborted, internal

_log = logging.getLogger(__name__)

Found = TypeVar("Found")
Read = Callable[[bytes], tuple[Header, Found]]


class PasswordSource(Protocol):
    """A password that may become another one."""

    async def current(self) -> str:
        """Return it, as it is now."""
        ...


@dataclass(frozen=True, slots=True)
class EtcdOptions:
    """The way to the store.

    Attributes:
        endpoints: ``http(s)://host:port``, all of one store.
        context: for ``https``: returns whom to trust and what to show (:func:`flintmq.net.tls.client_context`); asked
            for each request, so that another one can take its place.
        user, password: of etcd; empty: none.
        password_source: is asked for the password before each login; None: it is always ``password``.
        token: shown to a nsqlookupd that asks for one.
        prefix: of all keys that are asked for; empty: it is not known.
        try_timeout_s: for one request to one endpoint.
        timeout_s: for one call.
        login_timeout_s: for one login at one endpoint, which no call waits for beyond its own time.
        probe_s: how long an endpoint with watches may be silent before it is asked whether it lives.
    """

    endpoints: Sequence[str]
    context: Callable[[], ssl.SSLContext] | None = None
    user: str = ""
    password: str = ""
    password_source: PasswordSource | None = None
    token: TokenFile | None = None
    prefix: str = ""
    try_timeout_s: float = TRY_TIMEOUT_S
    timeout_s: float = TIMEOUT_S
    login_timeout_s: float = LOGIN_TIMEOUT_S
    probe_s: float = PROBE_S

    def tls(self) -> ssl.SSLContext | None:
        """Return the context of the next connection."""
        return None if self.context is None else self.context()

    def __repr__(self) -> str:
        return f"EtcdOptions({', '.join(self.endpoints)})"


class EtcdStore:
    """A :class:`flintmq.cluster.store.Store` behind one or more endpoints.

    Args:
        env: for the ids of leases.

    Raises:
        StoreRefused: the endpoints cannot be used.
    """

    def __init__(self, env: Env, options: EtcdOptions) -> None:
        self._env = env
        self._options = options
        self._http = HttpClient(IDLE_MAX)
        self._line = list(dict.fromkeys(map(_endpoint, options.endpoints)))
        if not self._line:
            raise StoreRefused("no endpoint of a store is named: give at least one http://host:port")
        self._cluster_id = 0
        self._token = ""
        self._known_password = ""  # with which the last login succeeded
        self._login: asyncio.Task[StoreUnavailable | StoreRefused | None] | None = None
        self._watches: set[_Watch] = set()
        self._pulses: dict[Endpoint, _Pulse] = {}
        self._outages: dict[Endpoint, _Outage] = {}
        self._answered: set[Endpoint] = set()  # those that have spoken HTTP with us

    @property
    def endpoints(self) -> list[str]:
        """Addresses, the one that is asked next first."""
        return [endpoint.address for endpoint in self._line]

    def apart(self) -> AbstractAsyncContextManager[EtcdStore] | None:
        """Return another way to the same store, for the event loop of another thread; None: there are none here."""
        if not self._env.has_threads:
            return None
        return _opened(EtcdStore(self._env, self._options))

    async def close(self) -> None:
        """End the watches; the store can be used again."""
        for watch in list(self._watches):
            await watch.close()
        if self._login is not None:
            self._login.cancel()
            await asyncio.wait({self._login})
            self._login = None
        await self._http.close()

    # --- the store

    async def get(self, key: str) -> KeyValue | None:
        snapshot = await self._ask(wire.RANGE, wire.range_request(Span.of_key(key)), wire.read_range)
        return snapshot.found[0] if snapshot.found else None

    async def range(self, span: Span) -> Snapshot:
        for _ in range(RANGE_TRIES):
            try:
                return await self._all_pages(span)
            except Compacted:  # between two pages
                continue
        raise StoreUnavailable(f"the store forgets faster than {PAGE_COUNT} keys at once can be read of it; try again")

    async def _all_pages(self, span: Span) -> Snapshot:
        found: list[KeyValue] = []
        revision, rest = 0, span
        while True:
            page = await self._ask(wire.RANGE, wire.range_request(rest, PAGE_COUNT, revision), wire.read_range)
            revision = revision or page.revision
            found.extend(page.found)
            if not page.has_more or not page.found:
                return Snapshot(revision, tuple(found))
            rest = Span(found[-1].key + "\0", span.end)

    async def txn(self, txn: Txn) -> TxnResult:
        try:
            return await self._ask(wire.TXN, wire.txn_request(txn), wire.read_txn, is_change=True)
        except LeaseNotFound:
            leases = [lease for each in (*txn.then, *txn.otherwise) if (lease := getattr(each, "lease_id", 0))]
            raise LeaseNotFound(leases[0] if leases else 0) from None

    async def grant(self, ttl_s: int) -> Lease:
        lease_id = self._env.random.getrandbits(62) + 1
        body = wire.lease_request(lease_id, ttl_s)
        try:
            answer = await self._ask(wire.LEASE_GRANT, body, wire.read_lease)
        except LeaseExists:  # of a request without an answer; an id is not drawn twice
            return Lease(lease_id, ttl_s)
        return Lease(answer.ID, answer.TTL)

    async def keepalive(self, lease_id: int) -> int:
        answer = await self._ask(wire.LEASE_KEEPALIVE, wire.lease_request(lease_id), wire.read_keepalive)
        if answer.TTL <= 0:
            raise LeaseNotFound(lease_id)
        return answer.TTL

    async def revoke(self, lease_id: int) -> None:
        try:
            await self._ask(wire.LEASE_REVOKE, wire.lease_request(lease_id), wire.read_lease, is_change=True)
        except LeaseNotFound:
            raise LeaseNotFound(lease_id) from None

    @asynccontextmanager
    async def watch(self, span: Span, after: int) -> AsyncIterator[AsyncIterator[Events]]:
        watch = _Watch(self, span, after)
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)
            await watch.close()

    # --- one call

    async def _ask(self, target: str, body: bytes, read: Read[Found], is_change: bool = False) -> Found:
        """Ask one endpoint after the other.

        Args:
            is_change: it is not sent again after it may have arrived.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._options.timeout_s
        failures: dict[str, str] = {}
        has_new_token = False
        full_count = 0
        while True:
            endpoint = self._line[0]
            left_s = deadline - loop.time()
            if left_s <= 0 or (failures and left_s < self._options.try_timeout_s / 4):
                break  # what is sent without time for an answer is only more that is not known
            token = self._token
            try:
                return await self._ask_at(endpoint, target, body, read, min(left_s, self._options.try_timeout_s))
            except NoAnswer as error:
                reason = self._reason_of(endpoint, error)
                may_be_done = error.error is None and error.tls_name is None
            except BadAnswer as error:
                reason, may_be_done = error.reason, True
            except ServerError as error:
                if not has_new_token and self._wants_token(error):
                    has_new_token = True
                    rest_s = self._options.try_timeout_s / 4  # for the request itself
                    await self._renew_token(token, deadline - loop.time() - rest_s)
                    continue
                if _NO_SPACE in error.reason and deadline - loop.time() > FULL_PAUSE_S:
                    full_count += 1
                    if full_count < FULL_TRIES:
                        await asyncio.sleep(FULL_PAUSE_S)
                        continue
                self._raise(endpoint, error)
                reason, may_be_done = error.reason, error.code != wire.EXHAUSTED
            self._failed(endpoint)
            if left_s >= self._options.try_timeout_s or endpoint.address not in failures:
                failures[endpoint.address] = reason  # that there was little time left is no reason
            if is_change and may_be_done:
                raise OutcomeUnknown(
                    f"a change was sent to {endpoint.address}, which did not say that it is done: {reason}"
                )
            if len(failures) == len(self._line) and deadline - loop.time() > PAUSE_S:
                await asyncio.sleep(PAUSE_S)
        told = "; ".join(f"{address}: {reason}" for address, reason in failures.items())
        raise StoreUnavailable(f"no coordination store answers within {self._options.timeout_s:g} s: {told}")

    async def _ask_at(self, endpoint: Endpoint, target: str, body: bytes, read: Read[Found], timeout_s: float) -> Found:
        """Ask one endpoint once.

        Raises:
            NoAnswer, BadAnswer, ServerError: as they say.
        """
        is_login = target == wire.AUTHENTICATE
        request = Request("POST", endpoint, target, await self._headers(is_login), body)
        context, size = self._options.tls(), ANSWER_BYTES_MAX
        status, _, data = await self._http.ask(
            request,
            timeout_s=timeout_s,
            connect_timeout_s=min(timeout_s, self._options.try_timeout_s) if is_login else None,
            context=context,
            body_bytes_max=size,
            may_keep=True,
        )
        self._answered.add(endpoint)
        if status != 200:
            raise wire.read_error(data) if status != 404 or b"code" in data else _no_store()
        header, found = read(data)
        self._check_cluster(header)
        self._heard(endpoint, header)
        return found

    async def _headers(self, is_login: bool = False) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self._options.token is not None:
            headers["Authorization"] = f"Bearer {await self._options.token.current()}"
        elif self._token and not is_login:
            headers["Authorization"] = self._token
        return headers

    def _heard(self, endpoint: Endpoint, header: Header) -> None:
        """Take note that an endpoint lives, when the state of the store was seen there."""
        pulse = self._pulses.get(endpoint)
        if pulse is not None and header.revision:
            pulse.heard(header.revision)

    def _check_cluster(self, header: Header) -> None:
        if not header.cluster_id:
            return
        if not self._cluster_id:
            self._cluster_id = header.cluster_id
        elif header.cluster_id != self._cluster_id:
            raise BadAnswer(f"it belongs to store {header.cluster_id:x}, not to {self._cluster_id:x} as the others")

    def _failed(self, endpoint: Endpoint) -> None:
        """Ask another one first from now on."""
        if self._line[0] == endpoint:
            self._line.append(self._line.pop(0))

    def _tell_failure(self, endpoint: Endpoint, reason: str) -> None:
        """Say that an endpoint cannot be watched, unless this outage has that reason already."""
        now_s = asyncio.get_running_loop().time()
        outage = self._outages.get(endpoint)
        if outage is None or (outage.over_at and now_s - outage.over_at > STEADY_S):
            outage = self._outages[endpoint] = _Outage()
        outage.over_at = 0.0
        if reason in outage.reasons or len(outage.reasons) >= REASON_COUNT_MAX:
            return
        outage.reasons.add(reason)
        goes_on = "watching goes on elsewhere than" if len(self._line) > 1 else "the watch is tried again"
        _log.info("STORE: %s at %s: %s", goes_on, endpoint.address, reason)

    def _tell_success(self, endpoint: Endpoint) -> None:
        """Take note that an endpoint is watched; say so at the first time in an outage."""
        outage = self._outages.get(endpoint)
        if outage is None or outage.over_at:
            return
        outage.over_at = asyncio.get_running_loop().time()
        if not outage.was_over:
            outage.was_over = True
            _log.info("STORE: %s is watched again", endpoint.address)

    def _raise(self, endpoint: Endpoint, error: ServerError) -> None:
        """Raise what an answered error means to the caller; return when somebody else should be asked."""
        if _NO_SPACE in error.reason:  # all members of an etcd have the alarm
            raise StoreFull(f"{error.reason}; make room: etcdctl compact, defrag, alarm disarm") from None
        text = f"{endpoint.address}: {error.reason}"
        if error.reason == wire.LEASE_NOT_FOUND:
            raise LeaseNotFound(0) from None
        if error.reason == wire.LEASE_EXISTS:
            raise LeaseExists(0) from None
        if error.reason == wire.COMPACTED:
            raise Compacted(0) from None
        if _NAMED_CERTIFICATE in error.reason:
            text += "; with users, etcd takes only a client certificate without a common name over HTTP"
            raise StoreRefused(text) from None
        if error.code not in (wire.OK, wire.EXHAUSTED, *_PASSED_ON):
            if not self._options.user and _NAMELESS in error.reason:
                text += "; this store asks who we are: give its address as http(s)://user:password@host:port"
            if error.code == wire.PERMISSION_DENIED:
                text += self._permission_advice()
            raise StoreRefused(text) from None
        if error.code == wire.OK and error.reason in ("UNAUTHORIZED", "FORBIDDEN", "TOO_MANY_FAILURES"):
            raise StoreRefused(f"{text}: its --http-auth-tokens-file must have our token, with the permission admin")

    def _permission_advice(self) -> str:
        user, prefix = self._options.user, self._options.prefix or "/flintmq/<cluster>/"
        if not user:
            return ""
        return (
            f"; user {user!r} of the store needs a role with the permission readwrite on the prefix {prefix}: etcdctl "
            f"role grant-permission ROLE readwrite {prefix} --prefix, and etcdctl user grant-role {user} ROLE"
        )

    def _reason_of(self, endpoint: Endpoint, error: NoAnswer) -> str:
        """Return why there is no answer; of TLS also which files decide, or that it may be the reason."""
        if error.tls_name is None:
            is_silent = any(each in error.reason for each in _NOT_HTTP)
            if is_silent and not endpoint.is_secured and endpoint not in self._answered:
                return f"{error.reason}; if this port speaks TLS, its address is https://{endpoint.address}"
            return error.reason
        if "verify failed" in error.reason and not any(each in error.reason for each in _NOT_OF_AUTHORITIES):
            return (
                f"{error.reason}; whom to trust stands in --cluster-store-root-ca-file, which is read again when it "
                "changes"
            )
        if "alert" in error.reason and ("certificate" in error.reason or "unknown ca" in error.reason):
            return f"{error.reason}; it is shown --cluster-store-cert, which is read again when it changes"
        return error.reason

    # --- users of etcd

    def _wants_token(self, error: ServerError) -> bool:
        return bool(self._options.user) and any(text in error.reason for text in _TOKEN_IS_OLD)

    async def _renew_token(self, refused: str, timeout_s: float) -> None:
        """Get a token in place of one that was refused, once for all who wait for it.

        Args:
            timeout_s: for the wait; a login that takes longer goes on, for who comes next.

        Raises:
            StoreRefused: the store does not let the user in.
            StoreUnavailable: no endpoint has answered whether it does.
        """
        if self._token != refused:
            return
        if self._login is None or self._login.done():
            self._login = asyncio.get_running_loop().create_task(self._log_in())
            self._login.add_done_callback(tell("logging in at the store"))
        login, timeout_s = self._login, max(0.0, timeout_s)
        await asyncio.wait({login}, timeout=timeout_s)
        if not login.done() or login.cancelled():
            raise StoreUnavailable(
                f"user {self._options.user!r} has not logged in within {timeout_s:.1f} s{_SLOW_LOGIN}"
            )
        if (failure := login.result()) is not None:
            without_frames(failure)
            raise failure

    async def _log_in(self) -> StoreUnavailable | StoreRefused | None:
        """Get a token; return why there is none."""
        source = self._options.password_source
        password = self._options.password if source is None else await source.current()
        failure = await self._log_in_with(password)
        if isinstance(failure, StoreRefused) and self._known_password not in ("", password):
            if await self._log_in_with(self._known_password) is None:
                return None  # the file was changed, and etcd was not yet
        return failure

    async def _log_in_with(self, password: str) -> StoreUnavailable | StoreRefused | None:
        """Get a token from the first endpoint that gives one; return why none does."""
        options = self._options
        body = wire.authenticate_request(options.user, password)
        read: Read[str] = lambda data: (Header(), wire.read_token(data))  # noqa: E731
        failures: list[str] = []
        for endpoint in list(self._line):
            try:
                self._token = await self._ask_at(endpoint, wire.AUTHENTICATE, body, read, options.login_timeout_s)
                self._known_password = password
                return None
            except NoAnswer as error:
                reason = self._reason_of(endpoint, error)
            except BadAnswer as error:
                reason = error.reason
            except ServerError as error:
                if _AUTH_IS_OFF in error.reason:
                    self._token = ""
                    return None
                if error.code not in (wire.OK, *_PASSED_ON):
                    return StoreRefused(
                        f"{endpoint.address} does not let user {options.user!r} in: {error.reason}; correct user and "
                        "password of the store"
                    )
                reason = error.reason
            self._failed(endpoint)
            failures.append(f"{endpoint.address}: {reason}")
        told = "; ".join(failures)
        hint = _SLOW_LOGIN if _LATE in told else ""
        return StoreUnavailable(f"user {options.user!r} could not log in at the store: {told}{hint}")


@asynccontextmanager
async def _opened(store: EtcdStore) -> AsyncIterator[EtcdStore]:
    try:
        yield store
    finally:
        await store.close()


@dataclass(slots=True)
class _Outage:
    """A time in which an endpoint cannot be watched, by any watch or by some of them.

    Attributes:
        reasons: that were said.
        over_at: when it was watched again; 0: it was not since it failed last.
        was_over: that was said.
    """

    reasons: set[str] = field(default_factory=set)
    over_at: float = 0.0
    was_over: bool = False


class _Watch:
    """One watch: a task keeps it up, and what comes waits here, with a bound, to be read."""

    def __init__(self, store: EtcdStore, span: Span, after: int) -> None:
        self._store = store
        self._span = span
        self._after = after
        self._found: deque[Events | StoreError] = deque()
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._keep_up())
        self._task.add_done_callback(tell("watching the store"))
        self._task.add_done_callback(lambda _: self._news.set())
        self._heard_count = 0
        self._heard_at = 0.0
        self._known_revision = after  # a stream that was opened after the store had it

    def __aiter__(self) -> _Watch:
        return self

    async def __anext__(self) -> Events:
        """Return what comes next, or raise what ends the watch; an iteration that is given up misses nothing."""
        while not self._found:
            if self._task.done():
                if not self._task.cancelled():
                    self._task.result()  # an error of ours
                raise StoreUnavailable("the watch has ended")
            self._news.clear()
            await self._news.wait()
        found = self._found.popleft()
        self._room.set()
        if isinstance(found, StoreError):
            raise found
        return found

    async def _put(self, found: Events | StoreError) -> None:
        while len(self._found) >= WATCH_COUNT_MAX:
            self._room.clear()
            await self._room.wait()
        self._found.append(found)
        self._news.set()

    async def close(self) -> None:
        """End it."""
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _keep_up(self) -> None:
        """Watch at one endpoint after the other."""
        store, loop = self._store, asyncio.get_running_loop()
        refused_count = failure_count = 0
        pause_s = PAUSE_S
        while True:
            endpoint, token, began = store._line[0], store._token, self._heard_count
            began_at = loop.time()
            try:
                await self._watch_at(endpoint)
                continue
            except Compacted as error:
                await self._put(error)
                return
            except NoAnswer as error:
                reason = store._reason_of(endpoint, error)
            except StoreRefused as refusal:
                await self._put(refusal)
                return
            except ServerError as error:
                reason = error.reason
                if error.code == wire.PERMISSION_DENIED or store._wants_token(error):
                    refused_count += 1
                    if refused_count > 1 or not store._options.user:
                        more = store._permission_advice() if error.code == wire.PERMISSION_DENIED else ""
                        await self._put(StoreRefused(f"{endpoint.address}: {reason}{more}"))
                        return
                    try:
                        await store._renew_token(token, store._options.timeout_s)
                        continue
                    except StoreRefused as refusal:
                        await self._put(refusal)
                        return
                    except StoreUnavailable as unanswered:
                        refused_count, reason = 0, unanswered.reason  # the token is the one that was refused
                else:
                    try:
                        store._raise(endpoint, error)
                    except (StoreFull, StoreRefused) as refusal:
                        await self._put(refusal)
                        return
            except BadAnswer as error:
                reason = error.reason
            if self._heard_count > began:
                refused_count = 0
                if loop.time() - began_at > STEADY_S:
                    failure_count, pause_s = 0, PAUSE_S
            store._tell_failure(endpoint, reason)
            store._failed(endpoint)
            await asyncio.sleep(pause_s * store._env.random.uniform(0.5, 1.0))  # all others wait as well
            failure_count += 1
            if failure_count % len(store._line) == 0:
                pause_s = min(2 * pause_s, WATCH_PAUSE_S)

    async def _watch_at(self, endpoint: Endpoint) -> None:
        """Watch at one endpoint until it fails; return when the stream should be made anew there."""
        store, options = self._store, self._store._options
        body = wire.watch_request(self._span, self._after)
        request = Request("POST", endpoint, wire.WATCH, await store._headers(), body)
        async with store._http.stream(request, timeout_s=options.try_timeout_s, context=options.tls()) as stream:
            if stream.status != 200:
                data = b"".join([piece async for piece in stream])
                raise wire.read_error(data) if stream.status != 404 or b"code" in data else _no_store()
            store._answered.add(endpoint)
            reading = asyncio.ensure_future(self._read(endpoint, stream.__aiter__()))
            attending = asyncio.ensure_future(self._attend(endpoint))
            both = {reading, attending}
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in both:
                    task.cancel()
                await asyncio.wait(both)
            failures = [task.exception() for task in (reading, attending) if not task.cancelled()]
            for failure in failures:
                if failure is not None:
                    raise failure

    async def _read(self, endpoint: Endpoint, pieces: AsyncIterator[bytes]) -> None:
        """Hand on what comes.

        Raises:
            NoAnswer, ServerError, BadAnswer, Compacted: it has ended.
        """
        loop = asyncio.get_running_loop()
        rest = b""
        async for piece in pieces:
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > LINE_BYTES_MAX:
                raise BadAnswer(f"one line of the watch is larger than {LINE_BYTES_MAX} bytes")
            for line in lines:
                header, events = wire.read_watch(line, self._after)
                self._store._check_cluster(header)
                self._store._heard(endpoint, header)
                self._heard_count += 1
                self._heard_at = loop.time()
                self._store._tell_success(endpoint)
                if events.events:
                    await self._put(events)
                    self._after = events.revision
        raise NoAnswer("", "the watch was ended")

    async def _attend(self, endpoint: Endpoint) -> None:
        """Wait until the endpoint gives no sign of life any more, or this watch none although others do.

        Returns when the watch should be made anew: the store has changed and it has been silent for long.

        Raises:
            NoAnswer, ServerError, BadAnswer: it does not live, or is cut off from the store.
            StoreRefused: the store does not let us in.
            Compacted: the store is an older one than it was.
        """
        store = self._store
        loop = asyncio.get_running_loop()
        self._heard_at = silent_since = loop.time()
        changed_revision = 0
        async with aclosing(_beats(store, endpoint, self._span)) as beats:
            async for revision in beats:
                if revision < self._after:
                    raise Compacted(revision)
                if self._heard_at > silent_since:
                    silent_since, changed_revision = self._heard_at, 0
                if not changed_revision and revision > self._known_revision:
                    changed_revision = revision
                if changed_revision and loop.time() - silent_since > REOPEN_S:
                    self._known_revision = changed_revision
                    return


class _Pulse:
    """The signs of life of an endpoint, for all watches there.

    Args:
        span: which its user may read.

    Attributes:
        user_count: watches that want to know.
        revision: of the store, as the endpoint said it last.
        failure: why it is taken for dead, or why nobody there lets us in.
    """

    def __init__(self, store: EtcdStore, endpoint: Endpoint, span: Span) -> None:
        self.user_count = 0
        self.revision = 0
        self.failure: NoAnswer | BadAnswer | ServerError | StoreRefused | None = None
        self._store = store
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._body = wire.range_request(Span.of_key(span.start or "\0"), is_counted=True)
        self._heard_at = self._loop.time()
        self._beaten = self._loop.create_future()
        self._task = self._loop.create_task(self._beat())
        self._task.add_done_callback(tell("asking the store for a sign of life"))

    def heard(self, revision: int) -> None:
        """Take note of a sign of life, in which the store was at a revision."""
        self._heard_at = self._loop.time()
        self.revision = revision

    async def beat(self) -> None:
        """Wait for the next sign of life, or until it is known that there is none."""
        await asyncio.shield(self._beaten)

    def close(self) -> None:
        """Ask no longer."""
        self._task.cancel()
        self._beaten.cancel()

    async def _beat(self) -> None:
        options = self._store._options
        while self.failure is None:
            heard_at = self._heard_at
            await asyncio.sleep(max(0.0, heard_at + options.probe_s - self._loop.time()))
            if self._heard_at == heard_at:
                await self._ask()
            beaten, self._beaten = self._beaten, self._loop.create_future()
            beaten.set_result(None)

    async def _ask(self) -> None:
        store, timeout_s = self._store, self._store._options.try_timeout_s
        token = store._token
        try:
            await store._ask_at(self._endpoint, wire.RANGE, self._body, wire.read_range, timeout_s)
        except ServerError as error:
            if not store._wants_token(error):
                self.failure = error
                return
            try:
                await store._renew_token(token, store._options.timeout_s)
            except StoreRefused as refused:
                self.failure = refused
            except StoreUnavailable as unanswered:
                self.failure = BadAnswer(unanswered.reason)
        except (NoAnswer, BadAnswer) as error:
            self.failure = error


async def _beats(store: EtcdStore, endpoint: Endpoint, span: Span) -> AsyncGenerator[int, None]:
    """Yield the revision of the store with every sign of life of an endpoint.

    Raises:
        NoAnswer, ServerError, BadAnswer: there is none.
        StoreRefused: the store does not let us in.
    """
    pulse = store._pulses.get(endpoint)
    if pulse is None or pulse.failure is not None:
        pulse = store._pulses[endpoint] = _Pulse(store, endpoint, span)
    pulse.user_count += 1
    try:
        while True:
            if pulse.failure is None:
                await pulse.beat()
            if pulse.failure is not None:
                raise pulse.failure
            if pulse.revision:
                yield pulse.revision
    finally:
        pulse.user_count -= 1
        if not pulse.user_count:
            pulse.close()
            if store._pulses.get(endpoint) is pulse:
                del store._pulses[endpoint]


def _endpoint(url: str) -> Endpoint:
    try:
        request = Request.to("POST", url)
        if request.target != "/" or any(name.lower() == "authorization" for name in request.headers):
            raise StoreRefused("an endpoint of the store is http(s)://host:port; user and password are options")
        return request.endpoint
    except NoAnswer as error:
        raise StoreRefused(f"an endpoint of the store cannot be used: {error.reason}") from None


def _no_store() -> ServerError:
    return ServerError(wire.EXHAUSTED, "it has no coordination store; if it is a nsqlookupd, give it --store-path")
