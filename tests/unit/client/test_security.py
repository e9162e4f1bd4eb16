"""Options of TLS, compression and AUTH: what is accepted, what is said about the rest, what is kept secret."""

from __future__ import annotations

import os
import ssl
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import Certificates

from flintmq.client.options import ConnectionOptions
from flintmq.errors import OptionError

SECRET = "sesame-4711"


async def _later() -> str:
    return SECRET


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"compression": "gzip"}, "compression='gzip' is not allowed; 'snappy', 'deflate' or None"),
        ({"compression": True}, "compression=True"),
        ({"deflate_level": 0}, "deflate_level=0 is not allowed; a whole number from 1 to 9"),
        ({"deflate_level": 10}, "deflate_level=10"),
        ({"tls": "yes"}, "tls='yes' is not allowed; True, False or an ssl.SSLContext"),
        ({"tls": ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)}, "an ssl.SSLContext for clients"),
        ({"tls": True, "tls_key": "k.pem"}, "tls_key='k.pem' is not allowed; .*set tls_cert"),
        ({"tls": True, "tls_cert": "no-such.pem"}, "tls_cert='no-such.pem' .*No such file"),
        ({"tls": True, "tls_ca_file": "no-such.pem"}, "tls_ca_file='no-such.pem' .*No such file"),
        ({"tls": True, "tls_verify": False, "tls_ca_file": "no-such.pem"}, "tls_ca_file='no-such.pem' .*No such file"),
        ({"tls_ca_file": "no-such.pem"}, "tls_ca_file='no-such.pem' .*No such file"),
        ({"tls": True, "tls_ca_file": __file__}, "tls_ca_file=.*certificate authorities"),
        ({"tls": True, "tls_cert": __file__}, "tls_cert=.*no certificate in PEM form"),
        ({"tls": True, "tls_min_version": "1.2"}, "tls_min_version='1.2' .*one of tls1.0, tls1.1, tls1.2, tls1.3"),
        ({"tls": True, "tls_server_name": ""}, "tls_server_name=''"),
        ({"tls": True, "tls_ca_file": 1}, "tls_ca_file=1 is not allowed; the path of a file"),
        ({"tls_min_version": "tls2"}, "tls_min_version='tls2' .*one of tls1.0"),
        ({"tls": True, "tls_verify": 0}, "tls_verify=0"),
        ({"tls": ssl.create_default_context(), "tls_ca_file": "x.pem"}, "tls_ca_file='x.pem' .*set it in there"),
        ({"tls": ssl.create_default_context(), "tls_verify": False}, "tls_verify=False .*set it in there"),
        ({"tls": ssl.create_default_context(), "tls_min_version": "tls1.3"}, "tls_min_version='tls1.3' .*in there"),
        ({"auth_secret": ""}, "auth_secret='<0 bytes>' is not allowed; text or bytes"),
        ({"auth_secret": 4711}, "auth_secret='<int>' is not allowed; text or bytes"),
        ({"auth_secret": "x" * 70_000}, "auth_secret='<70000 bytes>'"),
        ({"lookup_token": ""}, "lookup_token='<hidden>' is not allowed; printable ASCII text"),
        ({"lookup_token": "sesame\n"}, "lookup_token='<hidden>'"),
        ({"lookup_token": b"sesame"}, "lookup_token='<bytes>'"),
        ({"lookup_token": _later}, "lookup_token='an async function' is not allowed; .*a plain function"),
    ],
)
def test_nonsense_is_named(options: dict[str, Any], expected: str):
    with pytest.raises(OptionError, match=expected):
        ConnectionOptions(**options)


def test_a_certificate_and_the_key_of_another(certificates: Certificates):
    with pytest.raises(OptionError, match=r"tls_cert=.*mismatch"):
        ConnectionOptions(tls=True, tls_cert=certificates.server.cert, tls_key=certificates.client("good").key)


def test_what_is_asked_for():
    def asked(**options: Any) -> tuple[bool, bool, bool, int]:
        request = ConnectionOptions(**options).identify_request("host", "1")
        return request.tls_v1, request.snappy, request.deflate, request.deflate_level

    assert asked() == (False, False, False, 0)
    assert asked(tls=True, compression="snappy", deflate_level=3) == (True, True, False, 0)
    assert asked(tls=ssl.create_default_context(), compression="deflate", deflate_level=3) == (True, False, True, 3)
    assert asked(tls_verify=False, auth_secret="x") == (False, False, False, 0)


def test_a_secret_is_not_shown():
    for secret in (SECRET, SECRET.encode()):
        options = ConnectionOptions(auth_secret=secret, tls=True)
        assert "sesame" not in repr(options) + str(options)
        assert options.with_overrides(client_id="me").auth_secret == secret


def test_a_token_may_be_a_function():
    tokens = iter(["first", "second"])
    options = ConnectionOptions(lookup_token=lambda: next(tokens))
    assert options.lookup_headers()["Authorization"] == "Bearer first"
    assert options.with_overrides(client_id="me").lookup_headers()["Authorization"] == "Bearer second"
    with pytest.raises(OSError, match=r"lookup_token\(\) raised StopIteration$"):
        options.lookup_headers()


@pytest.mark.parametrize(("token", "shown"), [("sesame\n", "<hidden>"), ("", "<hidden>"), (b"sesame", "<bytes>")])
def test_what_a_function_gives_is_looked_at_and_not_shown(token: Any, shown: str):
    with pytest.raises(OSError, match=rf"lookup_token\(\) must return printable ASCII text, not {shown}$"):
        ConnectionOptions(lookup_token=lambda: token).lookup_headers()


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cramjam", None)
    with pytest.raises(OptionError, match="the package cramjam is missing, which pip install flintmq brings") as caught:
        ConnectionOptions(compression="snappy")
    assert caught.value.option == "compression"


@pytest.mark.parametrize("options", [{"compression": "deflate"}, {"tls": True}], ids=str)
def test_a_library_that_is_not_needed_is_not_asked_for(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]):
    monkeypatch.setitem(sys.modules, "cramjam", None)
    ConnectionOptions(**options)


# --- contexts ---


def test_the_default_verifies_chain_and_name():
    context = ConnectionOptions(tls=True).tls_context()
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert context.cert_store_stats() == ssl.create_default_context().cert_store_stats(), "the system's authorities"


def test_what_can_be_changed(certificates: Certificates):
    blind = ConnectionOptions(tls=True, tls_verify=False, tls_min_version="tls1.3").tls_context()
    assert blind.verify_mode is ssl.CERT_NONE
    assert not blind.check_hostname
    assert blind.minimum_version is ssl.TLSVersion.TLSv1_3
    own = ConnectionOptions(tls=True, tls_ca_file=Path(certificates.ca)).tls_context()
    assert own.cert_store_stats()["x509_ca"] == 1, "that authority and no other"
    given = ssl.create_default_context()
    assert ConnectionOptions(tls=given).tls_context() is given


def test_a_context_is_made_once_until_a_file_changes(certificates: Certificates, tmp_path: Path):
    authority = tmp_path / "ca.pem"
    authority.write_bytes(Path(certificates.ca).read_bytes())
    options = ConnectionOptions(tls=True, tls_ca_file=str(authority))
    context = options.tls_context()
    assert options.tls_context() is context
    assert options.with_overrides(client_id="me").tls_context() is context
    os.utime(authority, ns=(1, 1))
    renewed = options.tls_context()
    assert renewed is not context
    authority.unlink()
    with pytest.raises(OptionError, match="tls_ca_file"):
        options.tls_context()


def test_whose_certificate_is_expected():
    options = ConnectionOptions(tls=True)
    assert options.client_tls("nsqd.example:4150", "nsqd.example").name == "nsqd.example"
    assert options.with_overrides(tls_server_name="n").client_tls("10.0.0.1:4150", "10.0.0.1").name == "n"
