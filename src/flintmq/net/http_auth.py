"""Permissions for a daemon's HTTP API, by topic: bearer tokens and client certificates. Off without a file.

::

    [[client]]                            # TOML; the same as JSON: {"client": [{"name": "billing", ...}]}
    name = "billing"                      # for the log
    token = "9mX2..."                     # or sha256 = "<64 hex digits>" of it, or common_name of a certificate
    permissions = ["publish", "read"]     # and admin; none includes another
    topics = ["orders", "invoices_.*"]    # whole names match; all topics when left out

Rules of this file:

- A request that names no topic concerns all of them: a client with ``topics`` is refused it. A route that is in no
  table of :class:`Needs` asks for ``admin`` of all topics.
- Before the body is read; who is unknown learns nothing of topics, not even that a parameter is missing.
- Tokens are hashed at once and only the hashes are kept; no text that leaves this file contains one. Hashes are
  compared in constant time, with every client's.
- A file that cannot be used stops a start; later it is reported and what was in force stays.
- Everything has a bound: file, clients, patterns, what is remembered of addresses.

Source: nsqio/nsq#1426 and #1183; docs/auth.md; RFC 6750 for the header and the characters of tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import stat
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Protocol

import msgspec

from flintmq.env import Env
from flintmq.errors import UNREADABLE_JSON, FlintError, OptionError
from flintmq.file_stamp import FileStamp, file_stamp
from flintmq.names import is_valid_name
from flintmq.net.address import split_address
from flintmq.net.http_messages import JSON_TYPE, NSQ_TYPE, Request, Response
from flintmq.net.http_router import Router
from flintmq.net.regex import BadPattern, Pattern, compiled
from flintmq.net.secret_file import SecretFile
from flintmq.net.tasks import kept_up
from flintmq.net.tls import REQUIRE

PUBLISH, READ, ADMIN = "publish", "read", "admin"
PERMISSIONS = {
    PUBLISH: "send messages",
    READ: "see what there is: topics, channels, nodes, figures, messages",
    ADMIN: "change topics, channels, and the daemon itself",
}

FILE_SIZE_MAX = 1024 * 1024
CLIENT_COUNT_MAX = 1000
TOPIC_COUNT_MAX = 100
NAME_SIZE_MAX = 64
TOKEN_SIZE_MIN, TOKEN_SIZE_MAX = 16, 512
WATCH_INTERVAL_S = 1.0
DECISION_COUNT_MAX = 1024  # remembered per client

FAILURE_COUNT_MAX = 20  # of an address at once, then
FAILURE_INTERVAL_S = 3.0  # one in this time
ADDRESS_COUNT_MAX = 4096

_TOKEN = re.compile(rb"[A-Za-z0-9._~+/-]+=*")
_SHA256 = re.compile("[0-9a-fA-F]{64}")
_NAME = re.compile("[^\x00-\x1f\x7f]+")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Needs:
    """The permission that a route asks for.

    Attributes:
        permissions: any of them will do; none of them: whoever is known may.
        by_topic: the parameter ``topic`` says what it is about; otherwise, and without it, that is all topics.
        is_open: everybody may.
    """

    permissions: tuple[str, ...] = ()
    by_topic: bool = False
    is_open: bool = False


OPEN = Needs(is_open=True)
KNOWN = Needs()
ADMIN_OF_ALL = Needs((ADMIN,))

Table = Mapping[tuple[str, str], Needs]
"""The permission that each method and path of a daemon asks for."""


def needs(*permissions: str, by_topic: bool = False) -> Needs:
    """Return a row of a :data:`Table`."""
    assert permissions and set(permissions) <= set(PERMISSIONS)
    return Needs(permissions, by_topic)


def permissions_table(program: str, table: Table) -> list[str]:
    """Return the table as lines of Markdown."""
    lines = [f"## {program}", "", "| request | permission | for which topics |", "|---|---|---|"]
    for (method, path), row in table.items():
        what = "open to all" if row.is_open else " or ".join(row.permissions) or "any client of the file"
        about = "that of `topic`, all without it" if row.by_topic else "all" if row.permissions else "-"
        lines.append(f"| `{method} {path}` | {what} | {about} |")
    return lines


# -- the file ----------------------------------------------------------------------------------------------------------


class HttpAuthFileError(FlintError):
    """A file of tokens that cannot be used.

    Args:
        path: the file.
        reason: where in it something is wrong, and what to do; without tokens.
        flag: that names the file, as in ``--http-auth-tokens-file``; empty: it is not known.
    """

    def __init__(self, path: str, reason: str, flag: str = "") -> None:
        super().__init__(path, reason, flag)
        self.path = path
        self.reason = reason
        self.flag = flag

    def __str__(self) -> str:
        return f"{self.flag}={self.path}: {self.reason}" if self.flag else f"{self.path}: {self.reason}"


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    permissions: list[str]
    token: str = ""
    sha256: str = ""
    common_name: str = ""
    topics: list[str] | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    client: list[_Entry]


class KnownClient:
    """A client that is known, and what it may do.

    Args:
        topics: patterns of whole names; None for all topics.
    """

    def __init__(self, name: str, permissions: Iterable[str], topics: Sequence[Pattern] | None = None) -> None:
        self.name = name
        self.permissions = frozenset(permissions)
        self._topics = topics
        self._decisions: dict[str, bool] = {}

    def may(self, required: Needs, topic: str) -> bool:
        """Whether a request is allowed.

        Args:
            topic: what it is about, empty for all topics.
        """
        if not required.permissions:
            return True
        if self.permissions.isdisjoint(required.permissions):
            return False
        return self._topics is None or self._has(topic)

    def _has(self, topic: str) -> bool:
        decision = self._decisions.get(topic)
        if decision is None:
            if len(self._decisions) >= DECISION_COUNT_MAX:
                self._decisions.clear()
            decision = is_valid_name(topic) and any(pattern.search(topic) for pattern in self._topics or ())
            self._decisions[topic] = decision
        return decision


class KnownClients:
    """Everybody in one file.

    Attributes:
        plain_tokens: how many tokens stand in it as they are.
        by_common_name: clients by the name in their certificate.
    """

    def __init__(self, entries: Iterable[_Entry]) -> None:
        self.plain_tokens = 0
        self.by_common_name: dict[str, KnownClient] = {}
        self._by_digest: dict[bytes, KnownClient] = {}
        for number, entry in enumerate(entries, 1):
            try:
                self._add(entry)
            except ValueError as error:
                raise ValueError(f"client {number} ({entry.name[:NAME_SIZE_MAX]!r}): {error}") from None

    def _add(self, entry: _Entry) -> None:
        if len(entry.name) > NAME_SIZE_MAX or not _NAME.fullmatch(entry.name):
            raise ValueError(f"name must be 1 to {NAME_SIZE_MAX} printable characters")
        for permission in entry.permissions:
            if permission not in PERMISSIONS:
                raise ValueError(f"there is no permission {permission[:20]!r}, only {', '.join(PERMISSIONS)}")
        if not (entry.token or entry.sha256 or entry.common_name):
            raise ValueError("give it a token, the sha256 of one, or the common_name of its certificate")
        client = KnownClient(entry.name, entry.permissions, _patterns(entry.topics))
        digests = []
        if entry.token:
            self.plain_tokens += 1
            digests.append(_digest_of(entry.token))
        if entry.sha256:
            if not _SHA256.fullmatch(entry.sha256):
                raise ValueError("sha256 must be 64 hex digits: printf %s TOKEN | sha256sum")
            digests.append(bytes.fromhex(entry.sha256))
        for digest in dict.fromkeys(digests):
            if digest in self._by_digest:
                raise ValueError(f"its token is also that of {self._by_digest[digest].name!r}")
            self._by_digest[digest] = client
        if entry.common_name:
            if entry.common_name in self.by_common_name:
                raise ValueError(f"its common_name is also that of {self.by_common_name[entry.common_name].name!r}")
            self.by_common_name[entry.common_name] = client

    @property
    def count(self) -> int:
        """The number of tokens and names that are known."""
        return len(self._by_digest) + len(self.by_common_name)

    def of_digest(self, digest: bytes) -> KnownClient | None:
        """Return the client whose token has this hash; takes as long for every one of them."""
        found = None
        for known, client in self._by_digest.items():
            if hmac.compare_digest(known, digest):
                found = client
        return found


def _digest_of(token: str) -> bytes:
    data = token.encode()
    if not TOKEN_SIZE_MIN <= len(data) <= TOKEN_SIZE_MAX or not _TOKEN.fullmatch(data):
        sizes = f"{TOKEN_SIZE_MIN} to {TOKEN_SIZE_MAX}"
        raise ValueError(
            f"token must be {sizes} characters of A-Z a-z 0-9 . _ ~ + / -, such as from openssl rand -hex 32"
        )
    return hashlib.sha256(data).digest()


def _patterns(topics: list[str] | None) -> list[Pattern] | None:
    if topics is None:
        return None
    if len(topics) > TOPIC_COUNT_MAX:
        raise ValueError(f"more than {TOPIC_COUNT_MAX} topics; one pattern may stand for many")
    found = []
    for text in topics:
        try:
            found.append(compiled(text, is_whole=True))
        except BadPattern as error:
            raise ValueError(str(error)) from None
    return found


def parse_clients(path: str, data: bytes) -> KnownClients:
    """Read a file of tokens; JSON when its name says so, else TOML.

    Raises:
        HttpAuthFileError: something in it is wrong.
    """
    if len(data) > FILE_SIZE_MAX:
        raise HttpAuthFileError(path, f"more than {FILE_SIZE_MAX} bytes")
    try:
        if path.endswith(".json"):
            content = msgspec.json.decode(data, type=_File)
        else:
            import tomllib  # for those who write theirs in it

            content = msgspec.convert(tomllib.loads(data.decode("utf-8-sig")), _File)
        if len(content.client) > CLIENT_COUNT_MAX:
            raise ValueError(f"more than {CLIENT_COUNT_MAX} clients")
        return KnownClients(content.client)
    except UnicodeDecodeError:
        raise HttpAuthFileError(path, "not UTF-8") from None
    except UNREADABLE_JSON as error:
        raise HttpAuthFileError(path, str(error)) from None


def _read(path: str, size_max: int) -> bytes:
    from pathlib import Path  # for those who have such a file

    try:
        with Path(path).open("rb") as file:
            return file.read(size_max + 1)
    except OSError as error:
        raise HttpAuthFileError(path, error.strerror or str(error)) from None


def _read_clients(path: str) -> tuple[FileStamp | None, KnownClients]:
    stamp = file_stamp(path)  # first: what is written after it is read again
    return stamp, parse_clients(path, _read(path, FILE_SIZE_MAX))


class TokenFile(SecretFile):
    """The token that a daemon shows to others: the only line of a file, which is read again when it changes.

    Args:
        flag: that names the file.

    Raises:
        HttpAuthFileError: there is none in it.
    """

    def __init__(self, path: str, env: Env, flag: str = "") -> None:
        super().__init__(path, env, lambda path: _read_token(path, flag), "token")


def _read_token(path: str, flag: str) -> str:
    try:
        data = _read(path, 2 * TOKEN_SIZE_MAX).strip()
        _digest_of(data.decode("ascii"))
    except HttpAuthFileError as error:
        raise HttpAuthFileError(path, error.reason, flag) from None
    except UnicodeDecodeError:
        raise HttpAuthFileError(path, "not a token: only one line of ASCII", flag) from None
    except ValueError as error:
        raise HttpAuthFileError(path, str(error), flag) from None
    return data.decode("ascii")


# -- who fails too often -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Bucket:
    """Failures that an address may still have, as of a time."""

    left: float
    at_ns: int


class Failures:
    """Counts unknown tokens by the address they come from, and slows down who guesses.

    An address that has failed ``FAILURE_COUNT_MAX`` times has one more try in ``FAILURE_INTERVAL_S``; its other tokens
    are not looked at. Tokens that were good from there before are, so that one bad client of a host, or behind a proxy,
    does not lock out the others. An IPv6 address counts by its first 64 bits.
    """

    def __init__(self, address_count_max: int = ADDRESS_COUNT_MAX) -> None:
        self._count_max = address_count_max
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._proven: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    def __len__(self) -> int:
        return max(len(self._buckets), len(self._proven))

    def may_try(self, address: str, digest: bytes, now_ns: int) -> bool:
        """Whether a token is looked at."""
        bucket = self._buckets.get(address)
        if bucket is None or (address, digest) in self._proven:
            return True
        regained = (now_ns - bucket.at_ns) / 1e9 / FAILURE_INTERVAL_S
        if bucket.left + regained >= FAILURE_COUNT_MAX:
            del self._buckets[address]
            return True
        return bucket.left + regained >= 1

    def failed(self, address: str, digest: bytes, now_ns: int) -> None:
        """Note an unknown token."""
        self._proven.pop((address, digest), None)
        bucket = self._buckets.pop(address, None) or _Bucket(FAILURE_COUNT_MAX, now_ns)
        regained = (now_ns - bucket.at_ns) / 1e9 / FAILURE_INTERVAL_S
        left = max(0.0, min(FAILURE_COUNT_MAX, bucket.left + regained) - 1)
        while len(self._buckets) >= self._count_max:
            self._buckets.popitem(last=False)  # who has failed least lately
        self._buckets[address] = _Bucket(left, now_ns)

    def succeeded(self, address: str, digest: bytes) -> None:
        """Note a good token."""
        if (address, digest) not in self._proven:
            while len(self._proven) >= self._count_max:
                self._proven.popitem(last=False)
            self._proven[address, digest] = None


def failure_address(remote_address: str) -> str:
    """Return the address under which failures of a peer are counted; of IPv6 its network of 64 bits."""
    host = (split_address(remote_address) or (remote_address, 0))[0].partition("%")[0]
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if isinstance(address, IPv6Address) and address.ipv4_mapped is None:
        return str(IPv6Address(int(address) >> 64 << 64))
    return str(getattr(address, "ipv4_mapped", None) or address)


# -- options -----------------------------------------------------------------------------------------------------------


class AuthOptions(Protocol):
    """The options of a daemon that concern its HTTP clients."""

    @property
    def http_auth_tokens_file(self) -> str: ...
    @property
    def http_auth_client_cert(self) -> bool: ...
    @property
    def tls_cert(self) -> str: ...
    @property
    def tls_key(self) -> str: ...
    @property
    def tls_client_auth_policy(self) -> str: ...
    @property
    def tls_root_ca_file(self) -> str: ...


def check_options(options: AuthOptions) -> None:
    """Check what has to go together.

    Raises:
        OptionError: it does not.
    """
    if not options.http_auth_client_cert:
        return
    reason = ""
    if not options.http_auth_tokens_file:
        reason = "it needs --http-auth-tokens-file, which says what each common name may do"
    elif not (options.tls_cert and options.tls_key):
        reason = "it needs --tls-cert and --tls-key: certificates are shown over HTTPS"
    elif not options.tls_root_ca_file:
        reason = "it needs --tls-root-ca-file: whoever gets a certificate of a public authority chooses its name"
    elif options.tls_client_auth_policy == REQUIRE:
        reason = "not with --tls-client-auth-policy=require, which takes any certificate: its name proves nothing"
    if reason:
        raise OptionError("http_auth_client_cert", True, reason, "argument")


# -- requests ----------------------------------------------------------------------------------------------------------


def _refusal(status: int, message: str, *headers: tuple[str, str]) -> Response:
    return Response(status, b'{"message":"%b"}' % message.encode(), (JSON_TYPE, NSQ_TYPE, *headers))


_FORBIDDEN = _refusal(403, "FORBIDDEN")
_TOO_MANY_FAILURES = _refusal(429, "TOO_MANY_FAILURES", ("Retry-After", f"{FAILURE_INTERVAL_S:.0f}"))


class HttpAuth:
    """Decides about every request of one daemon; the ``before`` of its HTTP servers.

    Args:
        path: the file of tokens.
        trusts_certificates: names in client certificates are good: their issuers were verified.
        realm: what clients are told that they need a token for.

    Raises:
        HttpAuthFileError: the file cannot be used.
    """

    def __init__(
        self, path: str, router: Router, table: Table, env: Env, trusts_certificates: bool, realm: str
    ) -> None:
        self._path = path
        self._env = env
        self._trusts_certificates = trusts_certificates
        self._needs = {id(route): table.get((method, at), ADMIN_OF_ALL) for method, at, route in router.routes()}
        self._router = router  # keeps the routes, whose ids are the keys above
        self._failures = Failures()
        challenge = f'Bearer realm="{realm}"'
        self._unauthorized = _refusal(401, "UNAUTHORIZED", ("WWW-Authenticate", challenge))
        self._unknown = _refusal(401, "UNAUTHORIZED", ("WWW-Authenticate", f'{challenge}, error="invalid_token"'))
        try:
            self._stamp, self._clients = _read_clients(path)
        except HttpAuthFileError as error:
            raise HttpAuthFileError(path, error.reason, "--http-auth-tokens-file") from None
        self._watcher: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look after the file."""
        self._log_state()
        work = kept_up(self._watch, "watching the file of HTTP tokens", pause_s=WATCH_INTERVAL_S)
        self._watcher = asyncio.get_running_loop().create_task(work)

    async def close(self) -> None:
        """Leave the file alone; requests are decided as before."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher])

    def _log_state(self) -> None:
        clients = self._clients
        _log.info("HTTP clients need a token or a certificate; %s has %d", self._path, clients.count)
        if clients.plain_tokens and self._stamp is not None and self._stamp.mode & stat.S_IROTH:
            _log.warning("%s has tokens in it and can be read by every user: chmod o-r %s", self._path, self._path)
        if clients.by_common_name and not self._trusts_certificates:
            names = len(clients.by_common_name)
            _log.warning("%s: %d common_name have no effect without --http-auth-client-cert", self._path, names)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            await self.look_at_file()

    async def look_at_file(self) -> None:
        """Read the file again if it has changed."""
        stamp = await self._env.run_blocking(file_stamp, self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._stamp, self._clients = await self._env.run_blocking(_read_clients, self._path)
        except HttpAuthFileError as error:
            _log.error("%s; nothing changes until it is put right", error)
        else:
            self._log_state()

    def check(self, request: Request) -> Response | None:
        """Return the answer to a request that is refused; None when it may go on.

        Raises:
            HttpError: its query cannot be read.
        """
        required = self._needs.get(id(request.route))
        if required is None or required.is_open:
            return None  # without a row: an answer that is the same for all, such as NOT_FOUND
        client = self._client_of(request)
        if isinstance(client, Response):
            return client
        topic = request.query.get("topic", "") if required.by_topic else ""
        if client.may(required, topic):
            return None
        path = request.path
        _log.info("HTTP %s: %s may not %s %s", request.remote_address, client.name, request.method, path)
        return _FORBIDDEN

    def _client_of(self, request: Request) -> KnownClient | Response:
        """Return the client that asks, or the answer that refuses it."""
        token = _token_of(request)
        if token is None:
            name = request.common_name if self._trusts_certificates else ""
            return self._clients.by_common_name.get(name) or self._unauthorized
        digest = hashlib.sha256(token).digest()
        address = failure_address(request.remote_address)
        now_ns = self._env.clock.monotonic_ns()
        if not self._failures.may_try(address, digest, now_ns):
            return _TOO_MANY_FAILURES
        client = self._clients.of_digest(digest)
        if client is None:
            self._failures.failed(address, digest, now_ns)
            _log.warning("HTTP %s: unknown token for %s %s", request.remote_address, request.method, request.path)
            return self._unknown
        self._failures.succeeded(address, digest)
        return client


def _token_of(request: Request) -> bytes | None:
    """Return the bearer token of a request; None when it has none, or other credentials."""
    value = request.headers.get(b"authorization")
    if value is None:
        return None
    scheme, _, token = value.strip().partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None
