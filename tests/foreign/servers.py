"""The daemons that foreign clients talk to, each started when it is first asked for, for all files of a process.

nsqds       one per client-auth policy, with and without AUTH; one that waits 1.5 s for a message; three that
            nsqlookupds know; new ones for cases that kill theirs
nsqlookupds "a" and "b"; nsqd "a" registers with "a", "b" with "b", "ab" with both
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from tests.certificates import Certificates
from tests.integration.auth_server import AuthServer
from tests.integration.daemons import Connection, Daemons, Nsqd, Nsqlookupd, sized
from tests.integration.upgraded import Upgraded

MSG_TIMEOUT_MS = 3000
MSG_SIZE_MAX = 256 * 1024
DEAD_ADDRESS = "127.0.0.1:1"

Server = TypeVar("Server", Nsqd, Nsqlookupd)


def address(where: tuple[str, int]) -> str:
    return f"{where[0]}:{where[1]}"


class Servers:
    """Starts what is asked for, once; can be asked by several threads."""

    def __init__(self, directory: Path) -> None:
        self.certificates = Certificates(directory / "certificates")
        for kind in ("good", "stranger", "self-signed"):  # here, because it is no business of several threads
            self.certificates.client(kind)
        self._daemons = Daemons(directory)
        self._auth_server: AuthServer | None = None
        self._running: dict[str, Any] = {}
        self._lock = threading.RLock()

    def _get(self, name: str, start: Callable[[], Server]) -> Server:
        with self._lock:
            if name not in self._running:
                self._running[name] = start()
            return cast(Server, self._running[name])

    @property
    def auth_server(self) -> AuthServer:
        with self._lock:
            if self._auth_server is None:
                self._auth_server = AuthServer()
                self._auth_server.__enter__()
            return self._auth_server

    def nsqd(self, policy: str = "", with_auth: bool = False) -> Nsqd:
        """The nsqd with a client-auth policy; all offer TLS and compression."""
        files = self.certificates.server
        flags = [f"--tls-cert={files.cert}", f"--tls-key={files.key}", f"--tls-root-ca-file={self.certificates.ca}"]
        if policy:
            flags += [f"--tls-client-auth-policy={policy}", "--tls-required=tcp-https"]
        if with_auth:
            flags.append(f"--auth-http-address={self.auth_server.address}")
        return self._get(f"nsqd {policy} {with_auth}", lambda: self._start(*flags, f"--max-msg-size={MSG_SIZE_MAX}"))

    def impatient_nsqd(self) -> Nsqd:
        """The nsqd that waits ``MSG_TIMEOUT_MS`` for a message."""
        return self._get("impatient nsqd", lambda: self._start(f"--msg-timeout={MSG_TIMEOUT_MS}ms"))

    def nsqlookupd(self, name: str) -> Nsqlookupd:
        """nsqlookupd ``a`` or ``b``."""
        return self._get(f"nsqlookupd {name}", self._daemons.nsqlookupd)

    def registered_nsqd(self, names: str) -> Nsqd:
        """The nsqd that registers with the nsqlookupds ``a``, ``b`` or both (``ab``)."""
        return self._get(f"registered nsqd {names}", lambda: self._start(*self._registering(names)))

    def mortal_nsqd(self, names: str = "") -> Nsqd:
        """An nsqd for one case, which may kill it."""
        with self._lock:
            return self._start(*self._registering(names))

    def _registering(self, names: str) -> list[str]:
        return [f"--lookupd-tcp-address={address(self.nsqlookupd(name).tcp)}" for name in names]

    def _start(self, *flags: str) -> Nsqd:
        return self._daemons.nsqd("--durability=os", "--https-address=", *flags)

    def connect(self, nsqd: Nsqd, secret: str = "") -> Connection:
        """A raw connection to one of :meth:`nsqd`, with TLS and a certificate, and with AUTH when there is a secret."""
        connection = Upgraded(nsqd.tcp)
        connection.upgrade(self.certificates.client_context("good"))
        if secret:
            connection.send(b"AUTH\n" + sized(secret.encode()))
            assert b"permission_count" in connection.response()
        return connection

    def close(self) -> None:
        """End everything.

        Raises:
            AssertionError: a daemon logged a traceback.
        """
        if self._auth_server is not None:
            self._auth_server.__exit__()
        self._daemons.close()


def addresses(nsqds: Sequence[Nsqd]) -> list[str]:
    return [address(nsqd.tcp) for nsqd in nsqds]
