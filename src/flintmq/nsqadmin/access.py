"""Visitors and their roles: by password and session, by token, by the header of a proxy, or as everybody.

::

    [[user]]                         # TOML; the same as JSON: {"user": [{"name": "ann", ...}]}
    name = "ann"
    role = "operate"                 # read, operate, admin
    password = "scrypt$..."          # python -m flintmq.nsqadmin.passwords makes it
    token = "9mX2..."                # or sha256 = "<64 hex digits>" of it, for scripts
    header = true                    # the proxy may name this user

Rules of this file:

- Passwords are compared by scrypt in a thread, two at a time; tokens by their hashes, in constant time, with every
  user's. Whoever guesses is slowed down by address, with passwords as with tokens. An unknown name costs as much as a
  wrong password. Of a visitor behind a proxy that ``--acl-from-cidr`` names the address is what that proxy has put last
  into ``X-Forwarded-For``; nobody else is believed about theirs, because a guesser would be a new one each time.
- A session is a random cookie, of which only the hash is kept; it ends with its lifetime, with the user, and with
  nsqadmin. There is a bound on them, the oldest goes.
- What a page has to send back with a change (``csrf``) belongs to the visitor and looks different on each page, so that
  it cannot be guessed from compressed answers.
- A file that cannot be used stops a start; later it is reported and what was in force stays. It is said of which user,
  what is wrong and what is allowed, and no secret is shown.

Source: NSQ's options (``--acl-http-header``, ``--admin-user``); RFC 6750; RFC 7914 (scrypt).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import os
import re
import tomllib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import Any, Literal

import msgspec

from flintmq.env import Env
from flintmq.errors import FlintError
from flintmq.file_stamp import file_stamp
from flintmq.net.address import split_address
from flintmq.net.http_auth import FAILURE_INTERVAL_S, Failures, failure_address
from flintmq.net.networks import Networks
from flintmq.nsqadmin.errors import Refused
from flintmq.nsqadmin.options import ROLES, NsqadminOptions

How = Literal["open", "password", "token", "header"]

SESSION_COUNT_MAX = 4096
USER_COUNT_MAX = 1000
FILE_SIZE_MAX = 1024 * 1024
NAME_SIZE_MAX = 64
PASSWORD_SIZE_MAX = 1024
TOKEN_SIZE_MIN, TOKEN_SIZE_MAX = 16, 512
COOKIE = "flintmq_session"
_WATCH_S = 1.0
_ADDRESS_SIZE_MAX = 64
_NS_PER_S = 1e9
_MASK_SIZE = 16
_SCRYPT = re.compile(r"scrypt\$(\d{1,7})\$(\d{1,3})\$(\d{1,3})\$([A-Za-z0-9+/=]{16,88})\$([A-Za-z0-9+/=]{24,172})")
_SCRYPT_BYTES_MAX = 64 * 1024 * 1024
_HASHES_AT_ONCE = 2
_WAITING_MAX = 32
_USER_ROLES = ROLES[ROLES.index("read") :]
_FORM = 'users are tables called [[user]], in JSON objects of a list called "user"'
_NOBODY = "scrypt$16384$8$1$" + "A" * 22 + "==$" + "A" * 43 + "="

_log = logging.getLogger(__name__)


class UsersFileError(FlintError):
    """The file of users cannot be used.

    Args:
        path: of it.
        reason: why not.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"--users-file={self.path}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Visitor:
    """The sender of a request.

    Attributes:
        name: for the page and the audit log; empty: not known.
        role: one of ``options.ROLES``.
        how: they are known by.
        csrf: what forms have to send back.
        address: ``ip:port`` of the connection.
        sees_bodies: whether bodies of messages are shown.
        is_known: whether it is certain who it is: by session, token, or a header that counts; False: a name, if there
            is one, is what somebody says.
        forwarded_for: address of the visitor, where the connection is that of a proxy that is believed; empty: it is
            not, or does not say.
        is_believed: False: the name is what a header says, and no option says whom to believe that of.
        basic_user: user of ``Authorization: Basic``, which nobody has checked; for notifications, as NSQ has it.
        user_agent, url: of the request, for notifications.
    """

    name: str
    role: str
    how: How
    csrf: str
    address: str
    sees_bodies: bool
    is_known: bool = True
    forwarded_for: str = ""
    is_believed: bool = True
    basic_user: str = ""
    user_agent: str = ""
    url: str = ""

    @property
    def source(self) -> str:
        """Address by which refusals are counted: that of the visitor as far as we know, else of the connection."""
        return self.forwarded_for or self.address

    def may(self, role: str) -> bool:
        """Whether the role includes another one."""
        return ROLES.index(self.role) >= ROLES.index(role)

    def require(self, role: str) -> None:
        """Refuse a visitor whose role does not include this one.

        Raises:
            Refused: with 403.
        """
        if not self.may(role):
            who = self.name or "a visitor who is not logged in"
            raise Refused(403, f"{who} has the role {self.role}; this needs {role}")


class _Entry(msgspec.Struct):
    name: str
    role: str
    password: str = ""
    token: str = ""
    sha256: str = ""
    header: bool = False


class Users:
    """The users of a file."""

    def __init__(self, entries: list[_Entry]) -> None:
        if len(entries) > USER_COUNT_MAX:
            raise ValueError(f"it has {len(entries)} users, at most {USER_COUNT_MAX} are allowed")
        self.by_name: dict[str, _Entry] = {}
        self._digests: list[tuple[bytes, _Entry]] = []
        for entry in entries:
            self._add(entry)

    def _add(self, entry: _Entry) -> None:
        name = entry.name
        if not 0 < len(name) <= NAME_SIZE_MAX or not name.isprintable():
            raise ValueError(
                f"the name {name[:NAME_SIZE_MAX]!r} must be 1 to {NAME_SIZE_MAX} characters that can be shown"
            )
        if name in self.by_name:
            raise ValueError(f"the user {name!r} is there twice")
        if not (entry.password or entry.token or entry.sha256 or entry.header):
            raise ValueError(f"the user {name!r} needs a password, a token, its sha256, or header = true")
        if entry.password and not _is_hash(entry.password):
            advice = "python -m flintmq.nsqadmin.passwords makes one from what you type"
            raise ValueError(f"the password of {name!r} must be a hash of it: {advice}")
        if entry.token:
            token = entry.token
            if not TOKEN_SIZE_MIN <= len(token) <= TOKEN_SIZE_MAX or not token.isascii() or not token.isprintable():
                raise ValueError(f"the token of {name!r} must be {TOKEN_SIZE_MIN} to {TOKEN_SIZE_MAX} ASCII characters")
            self._digests.append((hashlib.sha256(token.encode()).digest(), entry))
        if entry.sha256:
            if not re.fullmatch("[0-9a-fA-F]{64}", entry.sha256):
                raise ValueError(f"the sha256 of {name!r} must be 64 hex digits")
            self._digests.append((bytes.fromhex(entry.sha256), entry))
        self.by_name[name] = entry

    def of_digest(self, digest: bytes) -> _Entry | None:
        """Return the user of a token."""
        found = None
        for known, entry in self._digests:
            if hmac.compare_digest(known, digest):
                found = entry
        return found


@dataclass(slots=True)
class _Session:
    name: str
    ends_ns: int


class Access:
    """Knows visitors.

    Args:
        make_secret: returns so many random bytes.

    Raises:
        UsersFileError: the file of users cannot be used.
    """

    def __init__(self, options: NsqadminOptions, env: Env, make_secret: Callable[[int], bytes]) -> None:
        self._options = options
        self._env = env
        self._make_secret = make_secret
        self._key = make_secret(32)
        self._proxies = Networks(options.acl_from_cidr)
        self._stamp = file_stamp(options.users_file)
        self._users = _read_users(options.users_file)
        self._looked_ns = env.clock.monotonic_ns()
        self._sessions: OrderedDict[bytes, _Session] = OrderedDict()
        self._failures = Failures()
        self._turns = asyncio.Semaphore(_HASHES_AT_ONCE)
        self._waiting = 0

    @property
    def is_open(self) -> bool:
        """Whether everybody may change everything."""
        return self._options.role_of_others == "admin"

    @property
    def has_passwords(self) -> bool:
        """Whether there is somebody who can log in."""
        return any(entry.password for entry in self._users.by_name.values())

    def forwarded_for(self, said: str, address: str) -> str:
        """Return the address of a visitor as the proxy has it that ``--acl-from-cidr`` names.

        Args:
            said: the last header ``X-Forwarded-For`` of a request; only its last entry is the proxy's own.
            address: ``ip:port`` of the connection.

        Returns:
            An IP address; empty: no such proxy is connected, or what it says is none.
        """
        if not self._options.acl_from_cidr or not self._proxies.allows(address):
            return ""
        last = said.rpartition(",")[2].strip()
        if len(last) > _ADDRESS_SIZE_MAX:
            return ""
        host = (split_address(last) or (last.removeprefix("[").removesuffix("]"), 0))[0]
        try:
            return "" if "%" in host else str(ip_address(host))
        except ValueError:
            return ""

    def stranger(self, address: str, forwarded_for: str = "") -> Visitor:
        """Return the sender of a request that was refused before it was clear whose it is."""
        return Visitor("", "none", "open", "", address, sees_bodies=False, is_known=False, forwarded_for=forwarded_for)

    async def visitor_of(
        self, headers: Mapping[str, str], cookies: Mapping[str, str], address: str, forwarded_for: str = ""
    ) -> Visitor:
        """Return who sends a request.

        Args:
            headers: by names in lower case.
            address: ``ip:port`` of the connection.
            forwarded_for: see :meth:`forwarded_for`.

        Raises:
            Refused: 401 for a token that nobody has, 429 for too many of them.
        """
        await self._look_at_file()
        scheme, _, token = headers.get("authorization", "").strip().partition(" ")
        if scheme.lower() == "bearer" and self._options.users_file:
            return replace(
                self._by_token(token.strip(), address, forwarded_for or address), forwarded_for=forwarded_for
            )
        visitor = self._without_token(headers, cookies, address)
        return replace(visitor, forwarded_for=forwarded_for)

    def _without_token(self, headers: Mapping[str, str], cookies: Mapping[str, str], address: str) -> Visitor:
        session = self._session_of(cookies.get(COOKIE, ""))
        if session is not None:
            entry = self._users.by_name.get(session.name)
            if entry is not None and entry.password:
                return self._visitor(entry.name, entry.role, "password", address, cookies[COOKIE])
        name = headers.get(self._options.acl_http_header.lower(), "")
        if name and self._proxies.allows(address):
            entry = self._users.by_name.get(name)
            if entry is not None and entry.header:
                return self._visitor(name, entry.role, "header", address)
            if name in self._options.admin_user:
                return self._visitor(name, "admin", "header", address)
            shown = name[:NAME_SIZE_MAX] if name.isprintable() else ""
            visitor = self._visitor(shown, self._options.role_of_others, "header", address, is_known=False)
            options = self._options
            return replace(visitor, is_believed=bool(options.users_file or options.admin_user or options.acl_from_cidr))
        return self._visitor("", self._options.role_of_others, "open", address, is_known=False)

    def _visitor(
        self, name: str, role: str, how: How, address: str, session: str = "", *, is_known: bool = True
    ) -> Visitor:
        sees = ROLES.index(role) >= ROLES.index(self._options.bodies_role)
        return Visitor(name, role, how, self._masked(self._csrf(name, how, session)), address, sees, is_known)

    def _by_token(self, token: str, address: str, source: str) -> Visitor:
        digest = hashlib.sha256(token.encode("latin-1", "replace")).digest()
        host, now_ns = failure_address(source), self._env.clock.monotonic_ns()
        if not self._failures.may_try(host, digest, now_ns):
            raise Refused(429, f"too many unknown tokens from here; one more try in {FAILURE_INTERVAL_S:g} s")
        entry = self._users.of_digest(digest)
        if entry is None:
            self._failures.failed(host, digest, now_ns)
            raise Refused(401, "nobody has this token; --users-file names who has which")
        self._failures.succeeded(host, digest)
        return self._visitor(entry.name, entry.role, "token", address)

    # -- sessions -----------------------------------------------------------------------------------------------------

    async def log_in(self, name: str, password: str, address: str) -> str:
        """Return the cookie of a new session.

        Args:
            address: by which failures are counted, see :attr:`Visitor.source`.

        Raises:
            Refused: 401 for a wrong name or password, 429 for too many of them.
        """
        await self._look_at_file()
        host = failure_address(address)
        digest = hashlib.sha256(f"{name}\n{password}".encode()).digest()
        if not self._failures.may_try(host, digest, self._env.clock.monotonic_ns()) or self._waiting >= _WAITING_MAX:
            raise Refused(429, f"too many log-ins; one more try in {FAILURE_INTERVAL_S:g} s")
        entry = self._users.by_name.get(name)
        stored = entry.password if entry is not None and entry.password else _NOBODY
        self._waiting += 1
        try:
            async with self._turns:
                is_right = await self._env.run_blocking(fits, password[:PASSWORD_SIZE_MAX], stored)
        finally:
            self._waiting -= 1
        if entry is None or not entry.password or not is_right:
            self._failures.failed(host, digest, self._env.clock.monotonic_ns())
            raise Refused(401, "the name or the password is wrong")
        self._failures.succeeded(host, digest)
        cookie = self._make_secret(32).hex()
        while len(self._sessions) >= SESSION_COUNT_MAX:
            self._sessions.popitem(last=False)
        ends_ns = self._env.clock.monotonic_ns() + self._options.session_lifetime_ns
        self._sessions[hashlib.sha256(cookie.encode()).digest()] = _Session(name, ends_ns)
        return cookie

    def log_out(self, cookie: str) -> None:
        """End a session."""
        self._sessions.pop(hashlib.sha256(cookie.encode()).digest(), None)

    def _session_of(self, cookie: str) -> _Session | None:
        if not cookie:
            return None
        key = hashlib.sha256(cookie.encode("latin-1", "replace")).digest()
        session = self._sessions.get(key)
        if session is not None and session.ends_ns <= self._env.clock.monotonic_ns():
            del self._sessions[key]
            return None
        return session

    # -- csrf ---------------------------------------------------------------------------------------------------------

    def checks_out(self, given: str, visitor: Visitor, cookies: Mapping[str, str]) -> bool:
        """Whether a form was made by a page for this visitor."""
        session = cookies.get(COOKIE, "") if visitor.how == "password" else ""
        expected = self._csrf(visitor.name, visitor.how, session)
        try:
            data = bytes.fromhex(given)
        except ValueError:
            return False
        if len(data) != 2 * _MASK_SIZE:
            return False
        found = bytes(a ^ b for a, b in zip(data[:_MASK_SIZE], data[_MASK_SIZE:], strict=True))
        return hmac.compare_digest(found, expected)

    def _csrf(self, name: str, how: str, session: str) -> bytes:
        text = f"{how}\n{session}\n{name}".encode()
        return hmac.new(self._key, text, hashlib.sha256).digest()[:_MASK_SIZE]

    def _masked(self, token: bytes) -> str:
        mask = self._make_secret(_MASK_SIZE)
        return (mask + bytes(a ^ b for a, b in zip(mask, token, strict=True))).hex()

    # -- the file -----------------------------------------------------------------------------------------------------

    async def _look_at_file(self) -> None:
        path = self._options.users_file
        now_ns = self._env.clock.monotonic_ns()
        if not path or now_ns - self._looked_ns < _WATCH_S * _NS_PER_S:
            return
        self._looked_ns = now_ns
        stamp = await self._env.run_blocking(file_stamp, path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._users = await self._env.run_blocking(_read_users, path)
        except UsersFileError as error:
            _log.error("%s; nothing changes until it is put right", error)
        else:
            _log.info("%s: %d users", path, len(self._users.by_name))


def hash_password(password: str, salt: bytes) -> str:
    """Return what stands in the file for a password."""
    count, block, parallel = 16384, 8, 1
    found = hashlib.scrypt(password.encode(), salt=salt, n=count, r=block, p=parallel, dklen=32)
    shown = (base64.b64encode(each).decode() for each in (salt, found))
    return f"scrypt${count}${block}${parallel}$" + "$".join(shown)


def fits(password: str, stored: str) -> bool:
    """Whether a password has this hash; takes about 50 ms."""
    parts = _SCRYPT.fullmatch(stored)
    if parts is None:
        return False
    count, block, parallel = (int(parts[number]) for number in (1, 2, 3))
    salt, expected = base64.b64decode(parts[4]), base64.b64decode(parts[5])
    found = hashlib.scrypt(
        password.encode("utf-8", "surrogatepass"), salt=salt, n=count, r=block, p=parallel, dklen=len(expected),
        maxmem=2 * _SCRYPT_BYTES_MAX,
    )  # fmt: skip
    return hmac.compare_digest(found, expected)


def _is_hash(stored: str) -> bool:
    parts = _SCRYPT.fullmatch(stored)
    if parts is None:
        return False
    count, block, parallel = (int(parts[number]) for number in (1, 2, 3))
    is_bounded = 128 * count * block <= _SCRYPT_BYTES_MAX and 1 <= parallel <= 16 and block > 0
    return is_bounded and count >= 1024 and count & (count - 1) == 0


def _entries_of(raw: Any) -> list[_Entry]:
    """Return the users of a file that was read as TOML or JSON.

    Raises:
        ValueError: it is something else; the text says of which user, and what is allowed. No secret is in it.
    """
    if not isinstance(raw, dict):
        raise ValueError(_FORM)
    for key, value in raw.items():
        if key != "user":
            raise ValueError(f"{_shown(key)} is not known; {_FORM}")
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            raise ValueError(_FORM)
    return [_entry_of(each, number) for number, each in enumerate(raw.get("user", ()), 1)]


def _entry_of(raw: dict[str, Any], number: int) -> _Entry:
    name, role = raw.get("name"), raw.get("role")
    who = _shown(name) if isinstance(name, str) else f"user {number}"
    kinds = {field.name: field.type for field in msgspec.structs.fields(_Entry)}
    for key, value in raw.items():
        if key not in kinds:
            raise ValueError(f"{who} has {_shown(key)}, which is not known; it may have {', '.join(kinds)}")
        if not isinstance(value, kinds[key]):
            form = "text in quotes" if kinds[key] is str else "true or false"
            raise ValueError(f"the {key} of {who} must be {form}")
    if name is None:
        raise ValueError(f"{who} needs a name")
    if role not in _USER_ROLES:
        found = "" if role is None else f", and not {_shown(role)}"
        raise ValueError(f"the role of {who} must be one of {', '.join(_USER_ROLES)}{found}")
    return _Entry(**raw)


def _shown(text: str) -> str:
    return repr(text[:NAME_SIZE_MAX])


def _read_users(path: str) -> Users:
    if not path:
        return Users([])
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = b""
            while piece := os.read(descriptor, FILE_SIZE_MAX + 1 - len(data)):
                data += piece
        finally:
            os.close(descriptor)
    except OSError as error:
        raise UsersFileError(path, f"it cannot be read: {error.strerror}") from error
    if len(data) > FILE_SIZE_MAX:
        raise UsersFileError(path, f"it is larger than {FILE_SIZE_MAX} bytes")
    try:
        is_json = path.endswith(".json")
        return Users(_entries_of(msgspec.json.decode(data) if is_json else tomllib.loads(data.decode("utf-8-sig"))))
    except (ValueError, RecursionError) as error:  # of TOML, JSON, their form, and what Users refuses
        raise UsersFileError(path, str(error)) from None


__all__ = ["COOKIE", "Access", "UsersFileError", "Visitor", "fits", "hash_password"]
