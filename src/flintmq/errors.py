"""Every exception FlintMQ raises on purpose.

The rules of this file: an exception carries fields, and its text is built from them (what, where, the limit, what to
do). Assertions are for our own mistakes, exceptions for the world's. Nothing here imports anything of the package.

::

    FlintError
    ├── ProtocolError(code, detail, fatal)
    │   ├── LocalProtocolError        we asked for something illegal; nothing was sent
    │   └── RemoteProtocolError       the peer did; a server answers the code and closes if it is fatal
    ├── NsqdError(code, detail, nsqd, retryable)      nsqd answered an error frame
    │   ├── FinFailed  ReqFailed  TouchFailed         not fatal: the message is no longer ours
    │   └── PublishError
    │       └── PublishRefused  PublishUnknown        definitely not stored / may be stored
    ├── ConnectionFailed(address, reason)
    │   └── TlsRefused                                (flintmq.client.security) no TLS with this peer, now or later
    ├── DiscoveryError(detail)
    │   └── NoNsqd(topic)
    ├── StorageError
    │   ├── CorruptRecord(path, position, reason)
    │   ├── DiskFull(path, free_bytes, needed_bytes, size_bytes)
    │   ├── FileSizeLimit(path)
    │   ├── WriteFailed(path, reason)
    │   │   └── PartitionFailed                       the partition is read-only from here on
    │   ├── PermissionMissing(path, user, owner)
    │   └── DataPathLocked(path, reason)
    ├── BodyError(kind, reason)                       a body is not what the application says it is
    ├── OptionError(option, value, allowed, source)
    ├── UsageError                                    a command line cannot be understood
    └── Exiting                                       the daemon drains and takes no new work

Source: the split into local and remote is h11's.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Final

from flintmq.addresses import shown_url

UNREADABLE_JSON = (ValueError, RecursionError)
"""Errors of reading somebody else's JSON: not JSON, not of that form, not UTF-8, or nested too deeply."""

_USER_OF_URL = re.compile(r"(://)[^\s,'\"]*@")
_USER_OF_PLACE = re.compile(r"(?<![^\s,='\"])(?!\*\*\*@)[^\s,=:'\"/@]+:(?!//)[^\s,'\"]*@(?=[\w.\[])")
_QUERY_OF_URL = re.compile(r"\?[^\s,'\"]+")


def without_credentials(text: str) -> str:
    """Return a text to show, in which addresses have neither user and password nor a query: either may be secret.

    An address is a URL, or ``user:password@host``.
    """
    if "@" in text:
        text = _USER_OF_PLACE.sub("***@", _USER_OF_URL.sub(r"\1***@", text))
    return _QUERY_OF_URL.sub("?***", text) if "?" in text else text


def shown_value(value: object) -> object:
    """Return the value of an option as it may be shown: none of its addresses has user, password or query.

    In a text all is hidden up to its last ``@``, because a password may hold anything that would end an address.
    """
    if isinstance(value, tuple):
        return tuple(map(shown_value, value))
    if isinstance(value, list):
        return [*map(shown_value, value)]
    if not isinstance(value, str):
        return value
    if "://" in value or ":" in value.rpartition("@")[0]:
        value = shown_url(value)
    return _QUERY_OF_URL.sub("?***", value) if "?" in value else value


class FlintError(Exception):
    """Parent of everything this package raises on purpose."""


def without_frames(error: BaseException) -> None:
    """Have an error that is kept, and what caused it, refer to no frame: frames keep the objects that they work on."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__


class ProtocolError(FlintError):
    """The NSQ protocol was broken by one side.

    Args:
        code: the first token on the wire, such as ``E_INVALID``.
        detail: the rest of the error frame; may be empty.
        fatal: whether a server closes the connection after it answered (NSQ's TCP protocol).
    """

    def __init__(self, code: str, detail: str = "", fatal: bool = True) -> None:
        super().__init__(code, detail)
        self.code = code
        self.detail = detail
        self.fatal = fatal

    def __str__(self) -> str:
        return f"{self.code} {self.detail}" if self.detail else self.code


class LocalProtocolError(ProtocolError):
    """This side asked for something the protocol forbids; nothing was sent."""


class RemoteProtocolError(ProtocolError):
    """The peer's command is refused with a code: the protocol forbids it, or this node cannot do it now."""


class NsqdError(FlintError):
    """nsqd answered with an error frame.

    Args:
        code: first token of the frame, such as ``E_BAD_TOPIC``.
        detail: the rest of the frame.
        nsqd: ``host:port`` of the nsqd that answered.
        retryable: whether the same request can succeed later or elsewhere (Youzan's smart client, retry table).
    """

    def __init__(self, code: str, detail: str = "", nsqd: str = "", retryable: bool = False) -> None:
        super().__init__(code, detail, nsqd)
        self.code = code
        self.detail = detail
        self.nsqd = nsqd
        self.retryable = retryable

    def __str__(self) -> str:
        text = f"{self.code} {self.detail}".strip()
        return f"{text} (nsqd {self.nsqd})" if self.nsqd else text


class FinFailed(NsqdError):
    """FIN came too late: the message timed out or belongs to another consumer now."""


class ReqFailed(NsqdError):
    """REQ came too late: the message timed out or belongs to another consumer now."""


class TouchFailed(NsqdError):
    """TOUCH came too late: the message timed out or belongs to another consumer now."""


class PublishError(NsqdError):
    """A publish did not end with ``OK``."""


class PublishRefused(PublishError):
    """The message is definitely not stored."""


class PublishUnknown(PublishError):
    """The message was sent and may be stored: the connection broke, the deadline passed, or nsqd failed to store it."""


class ConnectionFailed(FlintError):
    """A connection could not be made, or broke.

    Args:
        address: ``host:port`` or the path of a unix socket.
        reason: what the operating system or the peer said.
    """

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(address, reason)
        self.address = address
        self.reason = reason

    def __str__(self) -> str:
        return f"connection to {self.address} failed: {self.reason}"


class DiscoveryError(FlintError):
    """No nsqlookupd gave a usable answer."""


class NoNsqd(DiscoveryError):
    """There is no nsqd to publish to or to consume from."""

    def __init__(self, topic: str, detail: str) -> None:
        super().__init__(topic, detail)
        self.topic = topic
        self.detail = detail

    def __str__(self) -> str:
        return f"no nsqd for topic {self.topic!r}: {self.detail}"


class StorageError(FlintError):
    """The data directory cannot be used as asked."""


class DamagedDatabase(StorageError):
    """A database file is not what SQLite wrote, at least where it was read."""


class CorruptRecord(StorageError):
    """Bytes of a data file are not what was written.

    Args:
        path: the file.
        position: byte position of the bad batch in that file.
        reason: which check failed.
    """

    def __init__(self, path: str, position: int, reason: str) -> None:
        super().__init__(path, position, reason)
        self.path = path
        self.position = position
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path} at byte {self.position}: {self.reason}"


class DiskFull(StorageError):
    """There is no room to accept a publish; consuming goes on.

    Args:
        path: the file that it was to go to.
        free_bytes: that the disk has.
        needed_bytes: that are always kept free.
        size_bytes: of what was to be stored, beyond these; 0 where that is not known.
    """

    def __init__(self, path: str, free_bytes: int, needed_bytes: int, size_bytes: int = 0) -> None:
        super().__init__(path, free_bytes, needed_bytes, size_bytes)
        self.path = path
        self.free_bytes = free_bytes
        self.needed_bytes = needed_bytes
        self.size_bytes = size_bytes

    def __str__(self) -> str:
        more = f", {self.size_bytes} more were to be stored" if self.size_bytes else ""
        return (
            f"disk full: {self.path} has {self.free_bytes} bytes free and {self.needed_bytes} are kept in reserve"
            f"{more}; free space and publishing goes on by itself"
        )


class FileSizeLimit(StorageError):
    """More is to be stored at once than a file may have: nothing of it was stored, and smaller things go on."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        return (
            f"{self.path} would be larger than files may be here; raise the limit (LimitFSIZE of systemd, ulimit -f) "
            "and start nsqd again, or publish less at once"
        )


class WriteFailed(StorageError):
    """A write or sync of a data file failed."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"write to {self.path} failed: {self.reason}"


NO_MORE_MESSAGES: Final = "the partition takes no more messages until nsqd is restarted"
"""The end of texts that name a partition, and why a write or sync of it failed."""


class PartitionFailed(WriteFailed):
    """A write or sync of a partition failed, and it takes no more messages until nsqd is restarted."""

    def __str__(self) -> str:
        return f"{super().__str__()}; {NO_MORE_MESSAGES}"


class PermissionMissing(StorageError):
    """A file or directory of the data directory is there and may not be used by this user; it is not damaged.

    Args:
        path: which, absolute.
        user: numeric id of the user this process runs as.
        owner: numeric id of the user it belongs to; None when that cannot be seen either.
    """

    def __init__(self, path: str, user: int, owner: int | None) -> None:
        super().__init__(path, user, owner)
        self.path = path
        self.user = user
        self.owner = owner

    def __str__(self) -> str:
        owner = "" if self.owner is None else f", it belongs to uid {self.owner}"
        return (
            f"permission denied: {self.path} cannot be read and written by uid {self.user}{owner}; start as its owner, "
            "or change owner or mode (chown, chmod); nothing is damaged and nothing was changed"
        )


class DataPathLocked(StorageError):
    """Another process uses the data directory."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"failed to lock data-path: cannot flock directory {self.path} - {self.reason} "
            "(possibly in use by another instance of nsqd)"
        )


class _Unknown(Enum):  # one of these stays the same when an exception is pickled, as a bare object would not
    OPTION = "unknown"


UNKNOWN: Final = _Unknown.OPTION
"""Instead of the value of an option that there is not; None is a value that somebody may give."""


class OptionError(FlintError):
    """A flag, configuration key, environment variable or argument cannot be used.

    Args:
        option: its name as the user wrote it.
        value: the value given, or ``UNKNOWN`` when the name itself is unknown.
        allowed: what would have been accepted, in words.
        source: where it was given: ``flag``, ``environment``, ``argument`` of a call, or the path of the file.
    """

    def __init__(self, option: str, value: object, allowed: str, source: str = "flag") -> None:
        super().__init__(option, value, allowed, source)
        self.option = option
        self.value = value
        self.allowed = allowed
        self.source = source

    def __str__(self) -> str:
        if self.value is UNKNOWN:
            return f"{self.source}: unknown option {without_credentials(self.option)}; {self.allowed}"
        return f"{self.source}: {self.given} is not allowed; {self.allowed}"

    def __repr__(self) -> str:
        option = without_credentials(self.option)
        return f"{type(self).__name__}({option!r}, {shown_value(self.value)!r}, {self.allowed!r}, {self.source!r})"

    @property
    def given(self) -> str:
        """Option and value as they may be shown: no address has user, password or query."""
        return f"{without_credentials(self.option)}={shown_value(self.value)!r}"  # an address may stand in its place


class UsageError(FlintError):
    """A command line cannot be understood."""


class BodyError(FlintError):
    """The body of a message cannot be read as what the application says it is; reading it again would not help.

    Args:
        kind: what it should be.
        reason: where it is not.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(kind, reason)
        self.kind = kind
        self.reason = reason

    def __str__(self) -> str:
        return f"the body is not {self.kind}: {self.reason}"


class TakeoverStopped(FlintError):
    """This nsqd was told to stop before the takeover was complete."""

    def __str__(self) -> str:
        return (
            "the data of NSQ's nsqd is not taken over yet; the next start goes on with it, its files are as they were"
        )


class Exiting(FlintError):
    """The daemon is shutting down and takes no new work."""

    def __str__(self) -> str:
        return "exiting"
