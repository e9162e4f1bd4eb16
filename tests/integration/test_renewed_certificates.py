"""Certificates, keys and authorities that are replaced while daemons run, which goes without a restart."""

from __future__ import annotations

import shutil
import ssl
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

import pytest
from tests.certificates import Certificates
from tests.integration.daemons import Daemon, Daemons, pub
from tests.integration.test_http_auth import https
from tests.integration.upgraded import Upgraded

REFUSED = (ssl.SSLError, ConnectionError, HTTPException)


@dataclass(frozen=True)
class Place:
    """The files that flags name, whosever they are at the time."""

    directory: Path

    @property
    def flags(self) -> list[str]:
        return [f"--tls-cert={self.directory / 'cert'}", f"--tls-key={self.directory / 'key'}"]

    @property
    def authorities(self) -> list[str]:
        return ["--tls-client-auth-policy=require-verify", f"--tls-root-ca-file={self.directory / 'ca'}"]

    def put(self, certificates: Certificates) -> None:
        for name, source in (
            ("cert", certificates.server.cert),
            ("key", certificates.server.key),
            ("ca", certificates.ca),
        ):
            new = self.directory / "new"
            shutil.copy(source, new)
            new.rename(self.directory / name)


@pytest.fixture
def old(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "old")


@pytest.fixture
def new(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "of another authority")


@pytest.fixture
def place(tmp_path: Path, old: Certificates) -> Place:
    (tmp_path / "used").mkdir()
    place = Place(tmp_path / "used")
    place.put(old)
    return place


def is_served(daemon: Daemon, certificates: Certificates) -> bool:
    """Whether a client of an authority, with a certificate of it, is served, and answers for that authority."""
    try:
        return https(daemon, certificates.client_context("good"), "/ping").status == 200
    except REFUSED:
        return False


@pytest.mark.parametrize("program", ["nsqd", "nsqlookupd", "nsqadmin"])
def test_over_https(daemons: Daemons, place: Place, old: Certificates, new: Certificates, program: str):
    flags = ["--https-address=127.0.0.1:0", *place.flags, *place.authorities]
    daemon: Daemon
    if program == "nsqd":
        daemon = daemons.nsqd("--durability=os", *flags)
    elif program == "nsqlookupd":
        daemon = daemons.nsqlookupd(*flags)
    else:
        daemon = daemons.nsqadmin("--nsqd-http-address=127.0.0.1:1", *flags)
    assert is_served(daemon, old) and not is_served(daemon, new)
    place.put(new)
    assert is_served(daemon, new) and not is_served(daemon, old)
    (place.directory / "cert").write_text("no certificate\n")
    assert is_served(daemon, new)
    assert is_served(daemon, new)
    said = "the changed files of --tls-cert, --tls-key and --tls-root-ca-file are not used, those before stay"
    assert daemon.log.count(said) == 1, daemon.log


@pytest.mark.parametrize("policy", ["", "require", "require-verify"])
def test_over_tcp_while_a_connection_stands(
    daemons: Daemons, place: Place, old: Certificates, new: Certificates, policy: str
):
    more = [f"--tls-client-auth-policy={policy}", f"--tls-root-ca-file={place.directory / 'ca'}"] if policy else []
    nsqd = daemons.nsqd("--durability=os", "--tls-required=tcp-https", *place.flags, *more)
    with Upgraded(nsqd.tcp) as standing:
        standing.upgrade(old.client_context("good"))
        standing.ok(pub("t", b"before"))
        place.put(new)
        with Upgraded(nsqd.tcp) as connection:
            connection.upgrade(new.client_context("good"))
            connection.ok(pub("t", b"with the new one"))
        with Upgraded(nsqd.tcp) as connection, pytest.raises(REFUSED):
            connection.upgrade(old.client_context("good"))
        standing.ok(pub("t", b"behind"))
    assert nsqd.stats("t")["message_count"] == 3
