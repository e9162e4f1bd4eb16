"""Daemons that want everything: TLS with client certificates, AUTH, and tokens over HTTPS; and the options for that."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.certificates import Certificates
from tests.integration.auth_server import SECRET, AuthServer
from tests.integration.daemons import Daemons, wait_until

TOKEN = "token-of-spark-0815-4711"
SECRETS = (SECRET, TOKEN)


class Secured:
    """An nsqd with ``--tls-required``, client certificates and ``--auth-http-address``, and a nsqlookupd over HTTPS.

    Attributes:
        nsqd: its address.
        lookupd: address of nsqlookupd, with ``https://``.
        auth: what the auth server answers can be changed.
        secret, token: files with what is asked for.
        directory: room for files of tests.
    """

    def __init__(self, directory: Path, daemons: Daemons, auth: AuthServer) -> None:
        self.directory = directory
        self.auth = auth
        self.certificates = Certificates(directory / "certificates")
        self.secret, self.token = self._file("secret", SECRET + "\n"), self._file("token", TOKEN)
        clients = [{"name": "spark", "token": TOKEN, "permissions": ["read"]}]
        self.tokens = self._file("tokens.json", json.dumps({"client": clients}))
        files = self.certificates.server
        server = (f"--tls-cert={files.cert}", f"--tls-key={files.key}", "--https-address=127.0.0.1:0")
        nsqlookupd = daemons.nsqlookupd(*server, f"--http-auth-tokens-file={self.tokens}")
        found = wait_until(lambda: re.search(r"HTTPS: listening on (\S+)", nsqlookupd.log), "nsqlookupd over HTTPS")
        assert found is not None
        self.lookupd = f"https://{found[1]}"
        nsqd = daemons.nsqd(
            *server,
            "--durability=os",
            "--tls-required=true",
            "--tls-client-auth-policy=require-verify",
            f"--tls-root-ca-file={self.certificates.ca}",
            f"--auth-http-address={auth.address}",
            f"--lookupd-tcp-address=127.0.0.1:{nsqlookupd.tcp[1]}",
            f"--lookupd-http-token-file={self.token}",
        )
        self.nsqd = f"127.0.0.1:{nsqd.tcp[1]}"
        headers = {"Authorization": f"Bearer {TOKEN}"}
        wait_until(lambda: nsqlookupd.request("GET", "/nodes", headers=headers).json["producers"], "nsqd is registered")

    def _file(self, name: str, text: str) -> str:
        path = self.directory / name
        path.write_text(text)
        path.chmod(0o600)
        return str(path)

    @property
    def keys(self) -> dict[str, str]:
        """Options without which nobody is let in."""
        files = self.certificates.client("good")
        return {
            "tls": "true",
            "tlsCaFile": self.certificates.ca,
            "tlsCert": files.cert,
            "tlsKey": files.key,
            "authSecret": f"file:{self.secret}",
        }

    def options(self, **others: str | None) -> dict[str, str]:
        """Everything to read or write with ``nsqd``; ``others`` win, and None leaves an option out."""
        given: dict[str, str | None] = {"nsqd": self.nsqd, **self.keys, "retries": "1", **others}
        return {name: value for name, value in given.items() if value is not None}


@contextmanager
def secured(directory: Path) -> Iterator[Secured]:
    """Start everything, and end it."""
    daemons = Daemons(directory)
    with AuthServer() as auth:
        try:
            yield Secured(directory, daemons, auth)
        finally:
            daemons.close()
