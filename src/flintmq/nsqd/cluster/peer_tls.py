"""TLS between the nodes of a cluster: each end shows a certificate, and both are of the cluster's authority.

Rules of this file: the system's authorities are never enough, or whoever has a certificate of a public one were a node.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from flintmq.net.tls import REQUIRE_VERIFY, Renewed, ServerTls, client_context, server_context
from flintmq.net.tls_engine import StandardTls


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
        paths = (files.cert, files.key, files.root_ca)
        self._ends = Renewed("--cluster-tls-cert, --cluster-tls-key and --cluster-tls-root-ca", paths, self._load)

    def acceptor(self) -> StandardTls:
        """Return the end of a connection that another node made."""
        server, _ = self._ends.now()
        return StandardTls(server, server_side=True)

    def dialer(self, host: str) -> StandardTls:
        """Return the end of a connection that is made to a node.

        Args:
            host: that its certificate has to name.
        """
        _, client = self._ends.now()
        return StandardTls(client, server_side=False, server_hostname=host)

    def _load(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        files = self._files
        server = server_context(ServerTls(files.cert, files.key, REQUIRE_VERIFY, files.root_ca))
        return server, client_context(files.root_ca, cert=files.cert, key=files.key)
