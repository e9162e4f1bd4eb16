"""TLS and secrets of a client: contexts from options, what a failed handshake means, when a refusal is final.

Rules of this file:

- The server's chain and name are verified unless the user says otherwise; the name is that of the address that is
  dialled, or ``tls_server_name``.
- Files are read again when they have changed, so a renewed certificate holds for the next connection.
- What goes wrong is said in the user's words: which side does not trust which, and which option or flag to set.
- A secret is in no text: not in a representation, a log line or an exception.

Source: NSQ's TCP protocol; docs/compatibility.md (TLS, AUTH).
"""

from __future__ import annotations

import inspect
import ssl
from collections.abc import Awaitable, Callable, Collection
from functools import lru_cache
from typing import TypeAlias

from flintmq.env import Env
from flintmq.errors import ConnectionFailed, FlintError, NsqdError, OptionError
from flintmq.file_stamp import file_stamp
from flintmq.net.tls import TlsSetupError, load_authorities, load_certificate, set_min_version
from flintmq.net.tls_engine import StandardTls, TlsFailed, TlsInterrupted

SECRET_BYTES_MAX = 64 * 1024
OUTAGES = ("E_AUTH_FAILED", "E_AUTH_ERROR")
"""Answers that an auth server's outage causes as well as a wrong secret."""

Secret: TypeAlias = str | bytes | Callable[[], str | bytes | Awaitable[str | bytes]]
"""A secret, or a function that is called for it before each connection."""


class TlsRefused(ConnectionFailed):
    """One side does not accept the other's TLS: certificate, name, version, or none at all."""


# -- contexts ----------------------------------------------------------------------------------------------------------


def client_context(
    ca_file: str | None, cert: str | None, key: str | None, min_version: str, is_verified: bool
) -> ssl.SSLContext:
    """Return the context for these options; the same one until a file changes.

    Args:
        min_version: a key of :data:`flintmq.net.tls.VERSIONS`.

    Raises:
        OptionError: a file or the version cannot be used.
    """
    stamps = tuple(path and file_stamp(path) for path in (ca_file, cert, key))
    return _context(ca_file, cert, key, min_version, is_verified, stamps)


@lru_cache(maxsize=64)
def _context(
    ca_file: str | None, cert: str | None, key: str | None, min_version: str, is_verified: bool, stamps: object
) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.options |= ssl.OP_NO_COMPRESSION
    option: tuple[str, str | None] = "tls_min_version", min_version
    try:
        set_min_version(context, min_version)
        if not is_verified:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if is_verified or ca_file:  # a bad file is told, also where nobody is verified
            option = "tls_ca_file", ca_file
            load_authorities(context, ca_file or "", ssl.Purpose.SERVER_AUTH)
        if cert:
            option = "tls_cert", cert
            load_certificate(context, cert, key or "")
    except TlsSetupError as error:
        raise OptionError(*option, str(error), "argument") from error
    return context


class ClientTls:
    """The TLS of the connection to one address.

    Args:
        address: ``host:port``, for messages.
        context: whom to trust, what to show.
        name: whose certificate is expected.
        shows_certificate: whether this client has one; None: only the user's context knows.
    """

    def __init__(self, address: str, context: ssl.SSLContext, name: str, shows_certificate: bool | None) -> None:
        self.address = address
        self.name = name
        self._context = context
        self._shows_certificate = shows_certificate

    def new_engine(self) -> StandardTls:
        """The engine of one connection.

        Raises:
            TlsRefused: no certificate can have that name.
        """
        try:
            return StandardTls(self._context, server_side=False, server_hostname=self.name)
        except ValueError as error:
            raise TlsRefused(
                self.address, f"{self.name!r} cannot be verified as a name: set tls_server_name"
            ) from error

    def refused(self, failure: TlsFailed) -> ConnectionFailed:
        """Return what a failed handshake means."""
        if isinstance(failure, TlsInterrupted):
            return ConnectionFailed(self.address, f"TLS handshake: {failure.reason}")
        return TlsRefused(self.address, explain(failure.reason, self.name, self._shows_certificate))


_TO_BE_DONE = (  # what OpenSSL says, what it means and what to do; the first that matches
    (("hostname mismatch", "ip address mismatch"),
     "its certificate is not for {name!r}: connect to a name that is in it, or set tls_server_name to one (nsqd)"),
    (("certificate has expired",), "its certificate has expired: renew it on the server"),
    (("not yet valid",), "its certificate is not valid yet: look at the clocks of both machines"),
    (("self-signed", "self signed", "local issuer", "unable to verify", "issuer certificate"),
     "its certificate is not from an authority that is trusted here: set tls_ca_file to that authority's certificate"),
    (("alert certificate expired",),
     "this client's certificate has expired, says the server: renew {cert}, or look at the server's clock"),
    (("alert certificate revoked",),
     "this client's certificate is revoked, says the server: get another one for {cert}"),
    (("alert certificate required", "alert bad certificate", "alert unknown ca", "alert certificate unknown",
      "alert unsupported certificate", "alert access denied"),
     "{own}"),
    (("protocol version", "unsupported protocol", "no protocols available", "unsupported version"),
     "there is no version of TLS that both sides allow: see tls_min_version here and --tls-min-version there"),
    (("wrong version number", "record layer failure", "packet length too long", "http request"),
     "it does not speak TLS here: is this the right port?"),
)  # fmt: skip


def explain(reason: str, name: str, shows_certificate: bool | None) -> str:
    """OpenSSL's reason for a failed handshake, what it means, and what to do.

    Args:
        reason: from :class:`TlsFailed`.
        name: whose certificate was expected.
        shows_certificate: as for :class:`ClientTls`.
    """
    own = {
        True: "it does not accept this client's certificate: tls_cert must be from an authority that the server trusts",
        False: "it wants a certificate of this client: set tls_cert and tls_key",
        None: "it does not accept this client's certificate, or wants one: load it into the SSLContext",
    }[shows_certificate]
    cert = "the one in the SSLContext" if shows_certificate is None else "tls_cert"
    lower = reason.lower()
    for parts, meaning in _TO_BE_DONE:
        if any(part in lower for part in parts):
            return f"TLS: {meaning.format(name=name, own=own, cert=cert)} ({reason})"
    if "handshake failure" in lower and not shows_certificate:
        return f"TLS: the server refuses this client; it may want a certificate of it, see tls_cert ({reason})"
    return f"TLS: {reason}"


# -- secrets -----------------------------------------------------------------------------------------------------------


def checked_secret(secret: object) -> bytes:
    """A secret as bytes.

    Raises:
        OptionError: empty, too long, or neither text nor bytes; does not show it.
    """
    data = secret.encode() if isinstance(secret, str) else secret
    if not isinstance(data, bytes) or not 0 < len(data) <= SECRET_BYTES_MAX:
        found = f"<{len(data)} bytes>" if isinstance(data, bytes) else f"<{type(secret).__name__}>"
        raise OptionError("auth_secret", found, f"text or bytes, 1 to {SECRET_BYTES_MAX} of them", "argument")
    return data


async def obtain_secret(secret: Secret, address: str, env: Env) -> bytes:
    """The secret for a new connection; a plain function is called in a thread, because it may wait for a vault.

    Raises:
        ConnectionFailed: the function raised, or returned what cannot be a secret.
    """
    if not callable(secret):
        return checked_secret(secret)
    try:
        given = secret() if inspect.iscoroutinefunction(secret) else await env.run_blocking(secret)
        if inspect.isawaitable(given):
            given = await given
        return checked_secret(given)
    except OptionError as error:
        raise secret_failed(error, address) from None
    except Exception as error:
        raise secret_failed(error, address) from error


def secret_failed(error: Exception, address: str) -> ConnectionFailed:
    """Return what to raise when the user's function gave no secret; its text may hold one, so only the cause has it."""
    if isinstance(error, OptionError):
        return ConnectionFailed(address, f"auth_secret() must return {error.allowed}, not {error.value}")
    return ConnectionFailed(address, f"auth_secret() raised {type(error).__name__}")


Token: TypeAlias = str | Callable[[], str]
"""A token for nsqlookupd, or a function that is called for it before each question."""


def checked_token(token: object) -> str:
    """A token as it stands in a header.

    Raises:
        OptionError: it cannot stand there; does not show it.
    """
    if not isinstance(token, str) or not token or not token.isascii() or not token.isprintable():
        found = "<hidden>" if isinstance(token, str) else f"<{type(token).__name__}>"
        raise OptionError("lookup_token", found, "printable ASCII text", "argument")
    return token


def obtain_token(token: Token) -> str:
    """The token for a question.

    Raises:
        OSError: the function raised, or returned what cannot be a token; its text is with the cause alone.
    """
    if not callable(token):
        return token
    try:
        return checked_token(token())
    except OptionError as error:
        raise OSError(f"lookup_token() must return {error.allowed}, not {error.value}") from None
    except Exception as error:
        raise OSError(f"lookup_token() raised {type(error).__name__}") from error


# -- refusals ----------------------------------------------------------------------------------------------------------


def is_final(error: FlintError, was_accepted: bool) -> bool:
    """Whether trying this nsqd again is of no use until somebody changes something.

    Args:
        was_accepted: this client has been let in before: what is refused now is rather an outage, or being renewed.
    """
    if isinstance(error, TlsRefused):
        return not was_accepted
    if isinstance(error, NsqdError):
        return not error.retryable and not (was_accepted and error.code in OUTAGES)
    return False


class Refusals:
    """The nsqd that refuse this client for good, and why."""

    __slots__ = ("_errors", "_was_accepted")

    def __init__(self) -> None:
        self._errors: dict[str, FlintError] = {}
        self._was_accepted = False

    def note(self, address: str, error: FlintError | None, listed: Collection[str]) -> None:
        """Note how an attempt ended (None: well), and forget nsqd that are not listed."""
        self._errors.pop(address, None)
        if error is None:
            self._was_accepted = True
        elif is_final(error, self._was_accepted):
            self._errors[address] = error
        for other in [other for other in self._errors if other not in listed]:
            del self._errors[other]

    def of_all(self, addresses: Collection[str]) -> FlintError | None:
        """Return why all of these refuse; None when one of them may be of use, or there is none."""
        if not addresses or not all(address in self._errors for address in addresses):
            return None
        return next(self._errors[address] for address in addresses)
