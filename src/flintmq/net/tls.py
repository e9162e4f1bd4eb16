"""Settings of TLS: certificates, keys, versions and client-auth policies, of servers and clients.

Rules of this file:

- Versions before TLS 1.2 have to be asked for, renegotiation is off, a key that asks for a passphrase is refused rather
  than prompting on the terminal of a daemon.
- What is wrong with certificates and keys is said at start, with the file and what to do.
- Files are read again when they have changed (:class:`Renewed`): certificates run out while a daemon runs.

Client-auth policies (NSQ's TCP protocol): ``""`` asks clients for no certificate; ``require`` wants one and does not
look at who issued it, which the standard library cannot do (:mod:`flintmq.net.tls_unverified`); ``require-verify``
wants one issued by ``--tls-root-ca-file``, or by an authority of the system without that file.

Source: NSQ's TCP protocol; docs/decisions/0007.
"""

from __future__ import annotations

import logging
import os
import ssl
import stat
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Generic, TypeVar

from flintmq.errors import FlintError
from flintmq.file_stamp import FileStamp, file_stamp
from flintmq.net.tls_engine import OLD_CIPHERS, NewEngine, StandardTls, TlsEngine, TlsFailed, reason_of

log = logging.getLogger(__name__)

Made = TypeVar("Made")

VERSIONS = {
    "tls1.0": ssl.TLSVersion.TLSv1,
    "tls1.1": ssl.TLSVersion.TLSv1_1,
    "tls1.2": ssl.TLSVersion.TLSv1_2,
    "tls1.3": ssl.TLSVersion.TLSv1_3,
}
"""The spelling of ``--tls-min-version``."""

REQUIRE = "require"
REQUIRE_VERIFY = "require-verify"
VERIFY_IF_GIVEN = "verify-if-given"
"""No flag says this one: HTTPS clients that show no certificate may show a token."""


class TlsSetupError(FlintError):
    """Certificates, keys or versions that TLS cannot be configured with.

    Args:
        what: the files or the flag.
        reason: what is wrong.
    """

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(what, reason)
        self.what = what
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}"


class Renewed(Generic[Made]):
    """Something that is made of files, and made anew when they have changed.

    The files are looked at for each connection that begins; one that stands keeps what it began with.

    Args:
        names: the options that name the files, as the log has them.
        paths: of the files; empty ones are passed over.
        make: reads them.

    Raises:
        TlsSetupError: they cannot be used.
    """

    def __init__(self, names: str, paths: Iterable[str], make: Callable[[], Made]) -> None:
        self._names = names
        self._paths = tuple(filter(None, paths))
        self._make = make
        self._state = self._look()
        self._made = make()

    def now(self) -> Made:
        """Return it: as the files are now, or, if they cannot be used, as they were before, which is logged."""
        state = self._look()
        if state != self._state:
            self._state = state
            try:
                self._made = self._make()
            except TlsSetupError as error:
                log.error("TLS: the changed files of %s are not used, those before stay: %s", self._names, error)
            else:
                log.info("TLS: the changed files of %s are used from now on", self._names)
        return self._made

    def _look(self) -> tuple[FileStamp | None, ...]:
        """Return by what a change of the files is noticed."""
        return tuple(map(file_stamp, self._paths))


@dataclass(frozen=True, slots=True)
class ServerTls:
    """The settings of a server's side of TLS; the attributes are nsqd's flags.

    Attributes:
        cert, key: files in PEM; the certificate may be followed by its chain.
        policy: ``""``, ``require``, ``require-verify`` or ``VERIFY_IF_GIVEN``.
        root_ca_file: authorities of clients with ``require-verify``; the system's when empty.
        min_version: a key of ``VERSIONS``.
    """

    cert: str
    key: str
    policy: str = ""
    root_ca_file: str = ""
    min_version: str = "tls1.2"

    def engines(self) -> NewEngine:
        """Load the files; what is returned makes the engine of each connection, of the files as they are then.

        Raises:
            TlsSetupError: a file is missing, cannot be read, or does not fit.
        """
        renewed = self.renewed(self._engines)

        def new_engine() -> TlsEngine:
            return renewed.now()()

        return new_engine

    def renewed(self, make: Callable[[], Made]) -> Renewed[Made]:
        """Return what a function makes of the files, and makes anew when they have changed.

        Raises:
            TlsSetupError: as :meth:`engines`.
        """
        return Renewed("--tls-cert, --tls-key and --tls-root-ca-file", (self.cert, self.key, self.root_ca_file), make)

    def _engines(self) -> NewEngine:
        if self.policy == REQUIRE:
            from flintmq.net.tls_unverified import unverified_engines  # a second TLS library, for this policy only

            standard = server_context(self)  # tells what is wrong with the files
            try:
                return unverified_engines(self.cert, self.key, standard)
            except TlsFailed as failure:
                raise TlsSetupError(f"--tls-client-auth-policy={REQUIRE}", failure.reason) from failure
        context = server_context(self)
        return lambda: StandardTls(context, server_side=True)

    def concerns(self, now_ns: int) -> list[str]:
        """Return what an operator should be told although it stops nothing; after :meth:`engines` has read the files.

        Raises:
            TlsSetupError: a file has gone since.
        """
        from cryptography import x509  # 75 ms for those who use TLS

        found = []
        if self.policy == REQUIRE:
            found.append("--tls-client-auth-policy=require takes any certificate: the names in them prove nothing")
        try:
            certificate = x509.load_pem_x509_certificates(_bytes_of(self.cert))[0]
            key_mode = os.stat(self.key).st_mode
        except (OSError, ValueError) as error:
            raise TlsSetupError(f"certificate {self.cert} with key {self.key}", str(error)) from error
        now = datetime.fromtimestamp(now_ns // 1_000_000_000, UTC)
        if now > certificate.not_valid_after_utc:
            found.append(f"certificate {self.cert} has expired on {certificate.not_valid_after_utc:%Y-%m-%d}")
        if now < certificate.not_valid_before_utc:
            found.append(f"certificate {self.cert} is not valid before {certificate.not_valid_before_utc:%Y-%m-%d}")
        if key_mode & stat.S_IROTH:
            found.append(f"key {self.key} can be read by every user of this host: chmod o-r {self.key}")
        return found


def server_context(server: ServerTls) -> ssl.SSLContext:
    """Return a context for :class:`StandardTls`, which cannot do the policy ``require``.

    Raises:
        TlsSetupError: as :meth:`ServerTls.engines`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION | ssl.OP_CIPHER_SERVER_PREFERENCE
    set_min_version(context, server.min_version)
    load_certificate(context, server.cert, server.key)
    if server.policy in (REQUIRE_VERIFY, VERIFY_IF_GIVEN):
        context.verify_mode = ssl.CERT_REQUIRED if server.policy == REQUIRE_VERIFY else ssl.CERT_OPTIONAL
        load_authorities(context, server.root_ca_file, ssl.Purpose.CLIENT_AUTH)
    elif server.root_ca_file:
        load_authorities(context, server.root_ca_file, ssl.Purpose.CLIENT_AUTH)  # a bad file is told at start
    return context


def client_context(
    root_ca_file: str = "",
    *,
    cert: str = "",
    key: str = "",
    min_version: str = "tls1.2",
    is_verified: bool = True,
) -> ssl.SSLContext:
    """Return a context for the client's side; it verifies the server and its name.

    Args:
        root_ca_file: authorities of the server in PEM; the system's when empty.
        cert, key: this client's certificate, if it has one; the key may stand in the same file.
        is_verified: False trusts every server.

    Raises:
        TlsSetupError: a file is missing, cannot be read, or does not fit.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.options |= ssl.OP_NO_COMPRESSION
    set_min_version(context, min_version)
    if not is_verified:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if is_verified or root_ca_file:  # a bad file is told at start, also where nobody is verified
        load_authorities(context, root_ca_file, ssl.Purpose.SERVER_AUTH)
    if cert:
        load_certificate(context, cert, key)
    return context


def set_min_version(context: ssl.SSLContext, name: str) -> None:
    """Set the oldest version a context speaks, and what OpenSSL needs to speak it.

    Raises:
        TlsSetupError: the TLS library of this Python does not have it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # whoever asks for TLS 1.0 has been told
            context.minimum_version = VERSIONS[name]
            if VERSIONS[name] < ssl.TLSVersion.TLSv1_2:
                context.set_ciphers(OLD_CIPHERS)
    except (ValueError, ssl.SSLError) as error:
        raise TlsSetupError(f"--tls-min-version={name}", f"{ssl.OPENSSL_VERSION} does not offer it: {error}") from error


def load_certificate(context: ssl.SSLContext, cert: str, key: str) -> None:
    """Load a certificate and its key.

    Raises:
        TlsSetupError: they cannot be read or do not belong together.
    """
    files = f"certificate {cert} with key {key}" if key else f"certificate {cert}"
    if b"-----BEGIN CERTIFICATE-----" not in _read(f"certificate {cert}", cert):
        raise TlsSetupError(f"certificate {cert}", "there is no certificate in PEM form in it")
    key_pem = _read(f"key {key}" if key else files, key or cert)
    if b"PRIVATE KEY-----" not in key_pem:
        raise TlsSetupError(f"key {key}" if key else files, "there is no private key in PEM form in it")
    try:
        context.load_cert_chain(cert, key or None, password="")  # a prompt would stop a daemon for ever
    except (ssl.SSLError, ValueError) as error:
        reason = reason_of(error) if isinstance(error, ssl.SSLError) else str(error)
        if b"ENCRYPTED" in key_pem:
            reason = "a key with a passphrase cannot be used"
        raise TlsSetupError(files, reason) from error


def _bytes_of(path: str) -> bytes:
    from pathlib import Path  # for those who use TLS

    return Path(path).read_bytes()


def _read(what: str, path: str) -> bytes:
    try:
        return _bytes_of(path)
    except OSError as error:
        raise TlsSetupError(what, error.strerror or str(error)) from error


def load_authorities(context: ssl.SSLContext, path: str, purpose: ssl.Purpose) -> None:
    """Load whom to trust: a PEM file, or what the system trusts when ``path`` is empty.

    Raises:
        TlsSetupError: the file cannot be read or has no certificate.
    """
    if not path:
        context.load_default_certs(purpose)
        return
    try:
        context.load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        raise TlsSetupError(f"certificate authorities {path}", reason_of(error)) from error
    except OSError as error:
        raise TlsSetupError(f"certificate authorities {path}", error.strerror or str(error)) from error
