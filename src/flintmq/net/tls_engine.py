"""One side of one TLS connection as an engine without IO: bytes in, bytes out.

:mod:`flintmq.net.layers` moves the bytes, so the same engine runs on every event loop. Errors are :class:`TlsFailed`
with OpenSSL's reason; a failed handshake may leave an alert in the output. Source: NSQ's TCP protocol, NSQ's HTTP API.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from flintmq.errors import FlintError

READ_SIZE_MAX = 64 * 1024
RECORD_SIZE_MAX = 16 * 1024

OLD_CIPHERS = "DEFAULT:@SECLEVEL=0"
"""Ciphers with which OpenSSL speaks TLS 1.0 and 1.1, whose signatures it counts as broken."""

# The suites nsqd has names for, in its /stats; it shows every other one as a number.
_GO_NAMES = {
    0x0005: "TLS_RSA_WITH_RC4_128_SHA",
    0x000A: "TLS_RSA_WITH_3DES_EDE_CBC_SHA",
    0x002F: "TLS_RSA_WITH_AES_128_CBC_SHA",
    0x0035: "TLS_RSA_WITH_AES_256_CBC_SHA",
    0xC007: "TLS_ECDHE_ECDSA_WITH_RC4_128_SHA",
    0xC009: "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA",
    0xC00A: "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA",
    0xC011: "TLS_ECDHE_RSA_WITH_RC4_128_SHA",
    0xC012: "TLS_ECDHE_RSA_WITH_3DES_EDE_CBC_SHA",
    0xC013: "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA",
    0xC014: "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA",
    0xC02B: "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
    0xC02F: "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
}
_SOURCE_POSITION = re.compile(r" *\(_ssl\.c:\d+\)")
_GO_VERSIONS = {"TLSv1": "TLS1.0", "TLSv1.1": "TLS1.1", "TLSv1.2": "TLS1.2", "TLSv1.3": "TLS1.3"}


class TlsFailed(FlintError):
    """A handshake or a secured connection failed.

    Args:
        reason: in the words of the TLS library, without its source positions.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"tls: {self.reason}"


class TlsInterrupted(TlsFailed):
    """The connection ended, or time ran out, before a handshake was over: nobody refused anything."""


@dataclass(frozen=True, slots=True)
class TlsSession:
    """The outcome of a handshake.

    Attributes:
        version: such as ``TLS1.3``.
        cipher_suite: as nsqd names it: Go's constant for the suites of old, ``Unknown <number>`` for others.
        common_name: of the peer's certificate; empty without one.
    """

    version: str
    cipher_suite: str
    common_name: str


class TlsEngine(Protocol):
    """One side of one TLS connection, without IO."""

    @property
    def is_ended(self) -> bool:
        """Whether the peer has sent its end of the stream and everything before it has been read."""

    def receive(self, data: bytes) -> None:
        """Keep bytes of the peer for :meth:`handshake` and :meth:`read`."""

    def handshake(self) -> bool:
        """Go as far as what was received allows; True when the handshake is over.

        Raises:
            TlsFailed: :meth:`take_output` may have an alert for the peer.
        """

    def read(self) -> bytes:
        """Return plain bytes of the peer, up to about ``READ_SIZE_MAX``; empty when more has to be received first.

        Raises:
            TlsFailed: as above.
        """

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt; only after the handshake.

        Raises:
            TlsFailed: the connection is beyond use.
        """

    def close(self) -> None:
        """Say that this side writes no more.

        Raises:
            TlsFailed: the connection is beyond use.
        """

    def take_output(self) -> bytes:
        """Return the bytes that are to be sent to the peer now."""

    def session(self) -> TlsSession:
        """Return what was agreed on; only after the handshake."""


NewEngine = Callable[[], TlsEngine]


class StandardTls:
    """A :class:`TlsEngine` of the standard library.

    Args:
        context: from :mod:`flintmq.net.tls` or the user.
        server_side: which side this is.
        server_hostname: for clients: whose certificate is expected.
    """

    def __init__(self, context: ssl.SSLContext, server_side: bool, server_hostname: str | None = None) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side, server_hostname)
        self._is_ended = False
        self._unread = b""  # read out of the way of close()

    @property
    def is_ended(self) -> bool:
        return self._is_ended and not self._unread

    def receive(self, data: bytes) -> None:
        self._incoming.write(data)

    def handshake(self) -> bool:
        try:
            self._object.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            raise TlsFailed(reason_of(error)) from error
        return True

    def read(self) -> bytes:
        if self._unread:
            unread, self._unread = self._unread, b""
            return unread
        return self._read()

    def _read(self) -> bytes:
        pieces: list[bytes] = []
        size = 0
        try:
            # a read returns no more than one record, and peers that flush often send small ones
            while size < READ_SIZE_MAX and not self._is_ended:
                piece = self._object.read(RECORD_SIZE_MAX)
                self._is_ended = not piece
                pieces.append(piece)
                size += len(piece)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self._is_ended = True
        except ssl.SSLError as error:
            if not size:
                raise TlsFailed(reason_of(error)) from error
            # what was read before the damage is handed over first; the next read fails again
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[self._object.write(view) :]
        except ssl.SSLError as error:
            raise TlsFailed(reason_of(error)) from error

    def close(self) -> None:
        # Ending looks for the peer's end, and OpenSSL takes data that stands before it for a fault that ends reading as
        # well: the peer, in the middle of a request that was refused, would be cut off before it has read the answer.
        pieces = [self._unread]
        try:
            while piece := self._read():
                pieces.append(piece)
        except TlsFailed:
            pass  # the next read tells
        self._unread = b"".join(pieces)
        try:
            self._object.unwrap()
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass  # our end is in the output; the peer's is not waited for
        except ssl.SSLError as error:
            raise TlsFailed(reason_of(error)) from error

    def take_output(self) -> bytes:
        return self._outgoing.read() if self._outgoing.pending else b""

    def session(self) -> TlsSession:
        cipher = self._object.cipher()
        return TlsSession(
            version_name(self._object.version() or ""),
            cipher_name(cipher[0] if cipher else ""),
            _common_name(self._object),
        )


def _common_name(secured: ssl.SSLObject) -> str:
    """Return the common name of a verified certificate; of several the last, as in Go."""
    name = ""
    for part in (secured.getpeercert() or {}).get("subject", ()):
        for key, value in part:  # type: ignore[str-unpack]  # typeshed: each part holds pairs
            if key == "commonName":
                name = str(value)
    return name


def reason_of(error: ssl.SSLError) -> str:
    """Return OpenSSL's reason as words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {error.verify_message}"
    return error.reason.lower().replace("_", " ") if error.reason else _SOURCE_POSITION.sub("", str(error))


def version_name(openssl_name: str) -> str:
    """Return ``TLSv1.3``, say, as nsqd's /stats spells it."""
    return _GO_VERSIONS.get(openssl_name, f"Unknown {openssl_name}")


@cache
def _suite_numbers() -> dict[str, int]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("ALL:@SECLEVEL=0")
    return {suite["name"]: suite["id"] & 0xFFFF for suite in context.get_ciphers()}


def cipher_name(openssl_name: str) -> str:
    """Return a cipher suite as nsqd's /stats spells it, from OpenSSL's name."""
    number = _suite_numbers().get(openssl_name)
    if number is None:
        return f"Unknown {openssl_name}"
    return _GO_NAMES.get(number, f"Unknown {number}")
