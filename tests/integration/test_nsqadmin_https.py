"""HTTPS of nsqadmin: beside HTTP or alone, with certificates of visitors, and what it does to who speaks no TLS."""

from __future__ import annotations

import socket
import ssl
from http.client import HTTPException
from pathlib import Path

import pytest
from tests.certificates import Certificates
from tests.integration.daemons import PATIENCE_S, Daemons, Nsqadmin, Nsqd
from tests.integration.test_http_auth import https
from tests.integration.test_upgrades import https_address

from flintmq.errors import OptionError
from flintmq.nsqadmin.options import NsqadminOptions


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    """Certificates of a directory of the test."""
    return Certificates(tmp_path / "certificates")


def flags(nsqd: Nsqd, certificates: Certificates, *more: str) -> list[str]:
    server = certificates.server
    return [
        f"--nsqd-http-address=127.0.0.1:{nsqd.http[1]}",
        "--https-address=127.0.0.1:0",
        f"--tls-cert={server.cert}",
        f"--tls-key={server.key}",
        *more,
    ]


def test_beside_http(daemons: Daemons, nsqd: Nsqd, certificates: Certificates):
    nsqadmin = daemons.nsqadmin(*flags(nsqd, certificates))
    context = certificates.client_context("none")
    assert https(nsqadmin, context, "/ping").body == b"OK"
    assert https(nsqadmin, context, "/api/topics").json == {"topics": None, "message": ""}
    assert nsqadmin.request("GET", "/ping").body == b"OK"
    secured = https_address(nsqadmin)
    with socket.create_connection(secured, PATIENCE_S) as plain:
        plain.sendall(b"GET /ping HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"200" not in plain.recv(1000)
    with socket.create_connection(secured, PATIENCE_S):  # one that never says anything
        assert https(nsqadmin, context, "/ping").body == b"OK"
        nsqadmin.stop()


def test_only_visitors_with_a_certificate(daemons: Daemons, nsqd: Nsqd, certificates: Certificates):
    policy = ("--tls-client-auth-policy=require-verify", f"--tls-root-ca-file={certificates.ca}")
    nsqadmin = daemons.nsqadmin(*flags(nsqd, certificates, *policy))
    assert https(nsqadmin, certificates.client_context("good"), "/ping").body == b"OK"
    for kind in ("none", "stranger", "expired"):
        with pytest.raises((ssl.SSLError, ConnectionError, HTTPException)):
            https(nsqadmin, certificates.client_context(kind), "/ping")


def test_files_that_do_not_fit_are_told_at_the_start(daemons: Daemons, nsqd: Nsqd, certificates: Certificates):
    wrong = f"--tls-key={certificates.client('good').key}"
    with pytest.raises(AssertionError, match=r"failed to instantiate nsqadmin - certificate .* with key "):
        daemons.nsqadmin(*flags(nsqd, certificates, wrong))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"https_address": "a:1"}, "it needs --tls-cert and --tls-key"),
        ({"tls_cert": "c", "tls_key": "k"}, "give --https-address as well"),
        ({"http_address": ""}, "only --https-address can be listened on"),
        ({"https_address": "a:1", "tls_cert": "c", "tls_key": "k", "tls_root_ca_file": "r"}, "require-verify"),
    ],
)
def test_flags_that_contradict_each_other(given: dict[str, str], text: str):
    with pytest.raises(OptionError, match=text):
        NsqadminOptions(nsqd_http_address=("127.0.0.1:4151",), **given)  # type: ignore[arg-type]


def test_https_alone(daemons: Daemons, nsqd: Nsqd, certificates: Certificates):
    nsqadmin = Nsqadmin(Path(certificates.ca).parent / "nsqadmin.log", [*flags(nsqd, certificates), "--http-address="])
    try:
        nsqadmin.launch()
        assert https(nsqadmin, certificates.client_context("none"), "/ping").body == b"OK"
        assert "HTTP: listening" not in nsqadmin.log
    finally:
        nsqadmin.discard()
