"""The client-auth policy ``require``: any certificate, whoever issued it, and its common name.

The standard library verifies a client's certificate or asks for none; it has no way to take one unverified and tell
what is in it. pyOpenSSL has: its verify callback decides, and here it agrees to everything. The handshake still proves
that the client holds the key of the certificate it sent, so a client cannot take another's certificate; it can make one
with any name in it. Whoever uses this policy lets the auth server decide what a name is worth.

Only this policy loads pyOpenSSL. It is an engine like the standard one and shares its transport. Decision 7. Beneath is
another OpenSSL than the standard library's, with ciphers and a security level of its own: it is told those of a context
of the standard library, so that a policy offers neither weaker nor fewer ciphers than another.
Source: NSQ's TCP protocol; Go's ``tls.RequireAnyClientCert``.
"""

from __future__ import annotations

import ssl

from OpenSSL import SSL

from flintmq.net.tls_engine import (
    READ_SIZE_MAX,
    RECORD_SIZE_MAX,
    NewEngine,
    TlsFailed,
    TlsSession,
    cipher_name,
    version_name,
)

_SESSION_ID_CONTEXT = b"flintmq"  # OpenSSL refuses to resume sessions with client certificates without one


class UnverifiedTls:
    """The server's side of a connection that takes any client certificate.

    Args:
        context: from :func:`unverified_engines`.
    """

    def __init__(self, context: SSL.Context) -> None:
        self._connection = SSL.Connection(context, None)
        self._connection.set_accept_state()
        self._received = b""
        self._is_ended = False

    @property
    def is_ended(self) -> bool:
        return self._is_ended

    def receive(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._connection.bio_write(bytes(view)) :]

    def handshake(self) -> bool:
        try:
            self._connection.do_handshake()
        except SSL.WantReadError:
            return False
        except SSL.Error as error:
            raise TlsFailed(reason_of(error)) from error
        return True

    def read(self) -> bytes:
        pieces: list[bytes] = []
        size = 0
        try:
            while size < READ_SIZE_MAX and not self._is_ended:
                piece = self._connection.recv(RECORD_SIZE_MAX)
                pieces.append(piece)
                size += len(piece)
        except SSL.WantReadError:
            pass
        except SSL.ZeroReturnError:
            self._is_ended = True
        except SSL.Error as error:
            if not size:
                raise TlsFailed(reason_of(error)) from error
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[self._connection.send(bytes(view)) :]
        except SSL.Error as error:
            raise TlsFailed(reason_of(error)) from error

    def close(self) -> None:
        try:
            self._connection.shutdown()
        except (SSL.WantReadError, SSL.ZeroReturnError):
            pass
        except SSL.Error as error:
            raise TlsFailed(reason_of(error)) from error

    def take_output(self) -> bytes:
        pieces = []
        try:
            while True:
                pieces.append(self._connection.bio_read(READ_SIZE_MAX))
        except SSL.WantReadError:
            return b"".join(pieces)

    def session(self) -> TlsSession:
        connection = self._connection
        return TlsSession(
            version_name(connection.get_protocol_version_name()),
            cipher_name(connection.get_cipher_name() or ""),
            _common_name(connection),
        )


def _common_name(connection: SSL.Connection) -> str:
    """Return the common name the client's certificate claims; of several the last, as in Go."""
    from cryptography.x509.oid import NameOID

    certificate = connection.get_peer_certificate(as_cryptography=True)
    if certificate is None:
        return ""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[-1].value) if names else ""


def reason_of(error: SSL.Error) -> str:
    """Return OpenSSL's reasons as words; the lowest level's is the first."""
    if isinstance(error, SSL.SysCallError):
        return str(error.args[1]) if len(error.args) > 1 else "connection closed"
    reasons = error.args[0] if error.args and isinstance(error.args[0], list) else []
    return "; ".join(str(reason[-1]) for reason in reasons) or type(error).__name__


def unverified_engines(cert: str, key: str, like: ssl.SSLContext) -> NewEngine:
    """Load the files; what is returned makes the engine of each connection.

    Args:
        like: whose minimum version, ciphers and security level it has.

    Raises:
        TlsFailed: a file cannot be used or the version is not offered.
    """
    context = SSL.Context(SSL.TLS_SERVER_METHOD)
    context.set_options(SSL.OP_NO_RENEGOTIATION | SSL.OP_NO_COMPRESSION | SSL.OP_CIPHER_SERVER_PREFERENCE)
    context.set_session_id(_SESSION_ID_CONTEXT)
    context.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT, _accept_any)
    try:
        context.set_cipher_list(_ciphers_of(like).encode())
        context.set_min_proto_version(int(like.minimum_version))
        context.set_passwd_cb(lambda *_: b"")  # a prompt would stop a daemon for ever
        context.use_certificate_chain_file(cert)
        context.use_privatekey_file(key)
        context.check_privatekey()
    except SSL.Error as error:
        raise TlsFailed(reason_of(error)) from error
    return lambda: UnverifiedTls(context)


def _ciphers_of(context: ssl.SSLContext) -> str:
    """Return the ciphers of a context, without those of TLS 1.3, which are all strong and not chosen by a list."""
    names = [cipher["name"] for cipher in context.get_ciphers() if cipher["protocol"] != "TLSv1.3"]
    return ":".join((*names, f"@SECLEVEL={context.security_level}"))


def _accept_any(*_: object) -> bool:
    return True
