"""TLS between the nodes of a cluster: each end shows a certificate, and both are of the cluster's authority.

The files are looked at whenever a connection begins, and read again when they changed, so that a certificate can be
renewed while the node runs. A connection that stands keeps what it began with.

Rules of this file: the system's authorities are never enough, or whoever has a certificate of a public one were a node.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import logging
import os
import ssl
from dataclasses import dataclass

from flintmq.net.tls import REQUIRE_VERIFY, ServerTls, TlsSetupError, client_context, server_context
from flintmq.net.tls_engine import StandardTls

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PeerFiles:
    """Files in PEM; the attributes are the options ``--cluster-tls-...``.

    Attributes:
        cert: of this node, with its chain; it names the host that other nodes reach it by.
        root_ca: the authorities of the nodes.
    """

    cert: str
    key: str
    root_ca: str


class PeerTls:
    """Makes the TLS end of each connection between nodes.

    Raises:
        TlsSetupError: a file is missing, cannot be read, or does not fit.
    """

    def __init__(self, files: PeerFiles) -> None:
        self._files = files
        self._state = self._look()
        self._server, self._client = self._load()

    def acceptor(self) -> StandardTls:
        """Return the end of a connection that another node made."""
        self._refresh()
        return StandardTls(self._server, server_side=True)

    def dialer(self, host: str) -> StandardTls:
        """Return the end of a connection that is made to a node.

        Args:
            host: that its certificate has to name.
        """
        self._refresh()
        return StandardTls(self._client, server_side=False, server_hostname=host)

    def _load(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        files = self._files
        server = server_context(ServerTls(files.cert, files.key, REQUIRE_VERIFY, files.root_ca))
        return server, client_context(files.root_ca, cert=files.cert, key=files.key)

    def _look(self) -> tuple[tuple[int, int, int] | None, ...]:
        """Return by what a change of the files is noticed."""
        found: list[tuple[int, int, int] | None] = []
        for path in (self._files.cert, self._files.key, self._files.root_ca):
            try:
                status = os.stat(path)
            except OSError:
                found.append(None)
            else:
                found.append((status.st_mtime_ns, status.st_size, status.st_ino))
        return tuple(found)

    def _refresh(self) -> None:
        state = self._look()
        if state == self._state:
            return
        self._state = state
        try:
            self._server, self._client = self._load()
        except TlsSetupError as error:
            log.error("PEER: the changed files of --cluster-tls-cert are not used, those before stay: %s", error)
        else:
            log.info("PEER: the files of --cluster-tls-cert have changed and are used from now on")
