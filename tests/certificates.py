"""Certificates for tests: an authority that is trusted, one that is not, and leaves with what can be wrong in them."""

from __future__ import annotations

import datetime
import ssl
from dataclasses import dataclass
from pathlib import Path

import trustme

CLIENT_NAME = "client.example"
KINDS = ("none", "good", "stranger", "self-signed", "expired")
"""Client certificates: absent, of the trusted authority, of another, of nobody, and out of date."""


@dataclass(frozen=True)
class Files:
    """PEM files; ``cert`` and ``key`` are empty for no certificate."""

    cert: str
    key: str


class Certificates:
    """Writes what is asked for into a directory; each kind once.

    Attributes:
        ca: file with the trusted authority.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(exist_ok=True)
        self._ca = trustme.CA(key_type=trustme.KeyType.ECDSA)
        self._other_ca = trustme.CA(key_type=trustme.KeyType.ECDSA)
        self._made: dict[str, Files] = {}
        self.ca = str(directory / "ca.pem")
        self._ca.cert_pem.write_to_path(self.ca)
        self.server = self._leaf("server", self._ca, "127.0.0.1", "localhost", common_name="server.example")

    def _leaf(self, name: str, ca: trustme.CA, *identities: str, **about: object) -> Files:
        leaf = ca.issue_cert(*identities, **about)  # type: ignore[arg-type]
        files = Files(str(self._directory / f"{name}.pem"), str(self._directory / f"{name}.key"))
        leaf.private_key_pem.write_to_path(files.key)
        Path(files.key).chmod(0o600)
        Path(files.cert).write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        return files

    def client(self, kind: str) -> Files:
        """One of ``KINDS``."""
        if kind not in self._made:
            self._made[kind] = self._make(kind)
        return self._made[kind]

    def _make(self, kind: str) -> Files:
        past = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)
        match kind:
            case "none":
                return Files("", "")
            case "good":
                return self._leaf(kind, self._ca, CLIENT_NAME, common_name=CLIENT_NAME)
            case "stranger":
                return self._leaf(kind, self._other_ca, CLIENT_NAME, common_name=CLIENT_NAME)
            case "self-signed":
                return self._self_signed(kind)
            case "expired":
                return self._leaf(
                    kind, self._ca, CLIENT_NAME, common_name=CLIENT_NAME, not_before=past, not_after=past.replace(2002)
                )
        raise ValueError(kind)

    def _self_signed(self, name: str) -> Files:
        """The certificate of an authority used as if it were a client's."""
        nobody = trustme.CA(organization_name="nobody")
        files = Files(str(self._directory / f"{name}.pem"), str(self._directory / f"{name}.key"))
        nobody.cert_pem.write_to_path(files.cert)
        nobody.private_key_pem.write_to_path(files.key)
        return files

    def rsa_server(self) -> Files:
        """A server certificate with a key of RSA, which more ciphers can use."""
        kind = "rsa-server"
        if kind not in self._made:
            self._made[kind] = self._leaf(kind, self._ca, "127.0.0.1", "localhost", key_type=trustme.KeyType.RSA)
        return self._made[kind]

    def expired_server(self) -> Files:
        """A server certificate out of date."""
        past = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)
        return self._leaf("expired-server", self._ca, "127.0.0.1", not_before=past, not_after=past.replace(2002))

    def client_context(self, kind: str = "none") -> ssl.SSLContext:
        """What a client of the standard library uses: it trusts the authority and shows a certificate of ``kind``."""
        context = ssl.create_default_context(cafile=self.ca)
        files = self.client(kind)
        if files.cert:
            context.load_cert_chain(files.cert, files.key)
        return context


def old_client_context(version: ssl.TLSVersion) -> ssl.SSLContext:
    """A client that speaks only ``version`` and trusts everybody."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = version
    return context
