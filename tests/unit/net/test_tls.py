"""TLS engines in memory: who is let in under which policy, versions, what bad files are answered with, half-closes."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from tests.certificates import CLIENT_NAME, KINDS, Certificates, Files, old_client_context

from flintmq.net.tls import ServerTls, TlsSetupError, client_context
from flintmq.net.tls_engine import StandardTls, TlsEngine, TlsFailed, cipher_name, version_name

POLICIES = ("", "require", "require-verify")
DAY_NS = 24 * 3600 * 1_000_000_000

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # old versions of TLS are used on purpose


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def server(certificates: Certificates, policy: str = "", min_version: str = "tls1.2") -> TlsEngine:
    files = certificates.server
    return ServerTls(files.cert, files.key, policy, certificates.ca, min_version).engines()()


def client(context: ssl.SSLContext, name: str | None = "localhost") -> TlsEngine:
    return StandardTls(context, server_side=False, server_hostname=name)


def own_context(certificates: Certificates, kind: str = "none") -> ssl.SSLContext:
    files = certificates.client(kind)
    return client_context(certificates.ca, cert=files.cert, key=files.key)


def move(source: TlsEngine, target: TlsEngine, step: int = 1 << 20) -> int:
    data = source.take_output()
    for at in range(0, len(data), step):
        target.receive(data[at : at + step])
    return len(data)


def shake_hands(one: TlsEngine, other: TlsEngine, step: int = 1 << 20) -> None:
    """Both sides until both are done.

    Raises:
        TlsFailed: of the side that refuses; of the other if only that hears about it.
    """
    for _ in range(20):
        is_done = one.handshake()
        move(one, other, step)
        is_done = other.handshake() and is_done
        move(other, one, step)
        if is_done:
            return
    raise AssertionError("no end of the handshake")


def exchange(source: TlsEngine, target: TlsEngine, data: bytes, step: int = 1 << 20) -> bytes:
    source.write(data)
    move(source, target, step)
    received = b""
    while piece := target.read():
        received += piece
    return received


# -- policies ----------------------------------------------------------------------------------------------------------

ADMITTED = {
    "": set(KINDS),
    "require": {"good", "stranger", "self-signed", "expired"},
    "require-verify": {"good"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_who_is_let_in(certificates: Certificates, policy: str, kind: str):
    here, there = server(certificates, policy), client(certificates.client_context(kind))
    if kind in ADMITTED[policy]:
        shake_hands(there, here)
        assert exchange(there, here, b"PUB t\n") == b"PUB t\n"
        assert exchange(here, there, b"OK") == b"OK"
        expected = CLIENT_NAME if policy and kind != "self-signed" else ""
        assert here.session().common_name == expected
        return
    with pytest.raises(TlsFailed) as caught:
        shake_hands(there, here)
        move(here, there)
        there.read()
    assert "certificate" in caught.value.reason, caught.value


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_names_are_known_in_both_versions(certificates: Certificates, policy: str, version: ssl.TLSVersion):
    context = certificates.client_context("good")
    context.minimum_version = context.maximum_version = version
    here, there = server(certificates, policy), client(context)
    shake_hands(there, here)
    session = here.session()
    assert session.common_name == (CLIENT_NAME if policy else "")
    if version == ssl.TLSVersion.TLSv1_3:
        assert session.version == "TLS1.3"
        assert session.cipher_suite == "Unknown 4866"  # TLS_AES_256_GCM_SHA384
    else:
        assert session.version == "TLS1.2"
        assert session.cipher_suite == "Unknown 49196"  # TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384


def test_a_client_cannot_show_a_certificate_whose_key_it_does_not_have(certificates: Certificates):
    """The policy takes any certificate, but not one that is only copied: the handshake is signed with its key."""
    with pytest.raises(ssl.SSLError, match=r"(?i)mismatch"):
        own_context(certificates).load_cert_chain(certificates.client("good").cert, certificates.client("stranger").key)


# -- versions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["", "require-verify"])
@pytest.mark.parametrize(
    ("min_version", "version", "is_admitted"),
    [
        ("tls1.0", ssl.TLSVersion.TLSv1, True),
        ("tls1.0", ssl.TLSVersion.TLSv1_3, True),
        ("tls1.1", ssl.TLSVersion.TLSv1, False),
        ("tls1.1", ssl.TLSVersion.TLSv1_1, True),
        ("tls1.2", ssl.TLSVersion.TLSv1, False),
        ("tls1.2", ssl.TLSVersion.TLSv1_1, False),
        ("tls1.2", ssl.TLSVersion.TLSv1_2, True),
        ("tls1.3", ssl.TLSVersion.TLSv1_2, False),
        ("tls1.3", ssl.TLSVersion.TLSv1_3, True),
    ],
)
def test_versions(
    certificates: Certificates, policy: str, min_version: str, version: ssl.TLSVersion, is_admitted: bool
):
    context = old_client_context(version)
    if policy:
        context.load_cert_chain(certificates.client("good").cert, certificates.client("good").key)
    here, there = server(certificates, policy, min_version), client(context, None)
    if is_admitted:
        shake_hands(there, here)
        assert exchange(there, here, b"x") == b"x"
    else:
        with pytest.raises(TlsFailed, match=r"unsupported protocol|protocol version"):
            shake_hands(there, here)


def test_versions_with_any_certificate(certificates: Certificates):
    context = certificates.client_context("stranger")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(TlsFailed):
        shake_hands(client(context), server(certificates, "require", "tls1.3"))


def ciphers_taken(
    certificates: Certificates, policy: str, min_version: str, version: ssl.TLSVersion
) -> dict[str, set[str]]:
    """The ciphers of a version that a server takes which offers nothing else, by the kind of its key."""
    taken: dict[str, set[str]] = {}
    for kind, files in (("RSA", certificates.rsa_server()), ("ECDSA", certificates.server)):
        new_engine = ServerTls(files.cert, files.key, policy, certificates.ca, min_version).engines()
        found = taken[kind] = set()
        for name in (cipher["name"] for cipher in old_client_context(version).get_ciphers()):
            if name.startswith("TLS_"):
                continue  # TLS 1.3 has no say here
            context = old_client_context(version)
            context.set_ciphers(f"{name}:@SECLEVEL=0")
            context.load_cert_chain(certificates.client("good").cert, certificates.client("good").key)
            try:
                shake_hands(client(context, None), new_engine())
            except TlsFailed:
                continue
            found.add(name)
    return taken


@pytest.mark.parametrize(
    ("min_version", "version"),
    [
        ("tls1.0", ssl.TLSVersion.TLSv1),
        ("tls1.0", ssl.TLSVersion.TLSv1_2),
        ("tls1.2", ssl.TLSVersion.TLSv1_2),
    ],
)
def test_every_policy_takes_the_same_ciphers(certificates: Certificates, min_version: str, version: ssl.TLSVersion):
    """Any certificate is not any cipher, although the two engines have an OpenSSL each."""
    expected = ciphers_taken(certificates, "require-verify", min_version, version)
    assert expected["RSA"] and expected["ECDSA"]
    assert ciphers_taken(certificates, "require", min_version, version) == expected


def test_names_of_versions_and_suites():
    assert version_name("TLSv1.1") == "TLS1.1"
    assert version_name("SSLv3") == "Unknown SSLv3"
    assert cipher_name("ECDHE-RSA-AES128-GCM-SHA256") == "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"
    assert cipher_name("AES128-SHA") == "TLS_RSA_WITH_AES_128_CBC_SHA"
    assert cipher_name("TLS_AES_128_GCM_SHA256") == "Unknown 4865"
    assert cipher_name("no such suite") == "Unknown no such suite"


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=POLICIES)
def pair(request: pytest.FixtureRequest, certificates: Certificates) -> tuple[TlsEngine, TlsEngine]:
    """A server and a client with their handshake behind them."""
    here, there = server(certificates, request.param), client(certificates.client_context("good"))
    shake_hands(there, here)
    move(here, there)
    return here, there


def test_one_byte_at_a_time(certificates: Certificates):
    for policy in POLICIES:
        here, there = server(certificates, policy), client(certificates.client_context("good"))
        shake_hands(there, here, step=1)
        assert exchange(there, here, b"hello", step=1) == b"hello"


def test_much_at_once(pair: tuple[TlsEngine, TlsEngine]):
    here, there = pair
    data = bytes(range(256)) * 12_000
    assert exchange(there, here, data) == data
    assert exchange(here, there, data) == data
    assert exchange(here, there, memoryview(bytearray(data))[5:999]) == data[5:999]  # type: ignore[arg-type]


def test_many_small_records_are_read_together(pair: tuple[TlsEngine, TlsEngine]):
    here, there = pair
    for _ in range(100):
        there.write(b"0123456789")
    move(there, here)
    assert here.read() == b"0123456789" * 100
    assert here.read() == b""


def test_the_end_of_the_stream(pair: tuple[TlsEngine, TlsEngine]):
    here, there = pair
    there.write(b"last")
    there.close()
    move(there, here)
    assert here.read() == b"last"
    assert here.read() == b""
    assert here.is_ended
    assert exchange(here, there, b"answer") == b"answer"


def test_who_has_said_its_end_still_reads(pair: tuple[TlsEngine, TlsEngine]):
    here, there = pair
    here.close()
    move(here, there)
    assert there.read() == b""
    assert there.is_ended
    assert exchange(there, here, b"FIN 0123456789abcdef\n") == b"FIN 0123456789abcdef\n"
    assert not here.is_ended


def test_who_says_its_end_in_the_middle_of_a_request_still_reads_it(pair: tuple[TlsEngine, TlsEngine]):
    """A request refused after its head: OpenSSL takes what came already for a fault, unless it is read before."""
    server, client = pair
    for body in (b"x" * 50_000, b"y" * 70_000, b"z"):
        client.write(body)
    move(client, server)
    server.write(b"refused")
    server.close()
    assert not server.is_ended
    move(server, client)
    assert client.read() == b"refused"
    client.write(b"and the rest")
    client.close()
    move(client, server)
    received = b""
    while piece := server.read():
        received += piece
    assert received == b"x" * 50_000 + b"y" * 70_000 + b"z" + b"and the rest"
    assert server.is_ended


def test_damage_is_found(pair: tuple[TlsEngine, TlsEngine]):
    here, there = pair
    there.write(b"good")
    move(there, here)
    there.write(b"bad")
    data = bytearray(there.take_output())
    data[-1] ^= 1
    here.receive(bytes(data))
    assert here.read() == b"good"
    with pytest.raises(TlsFailed):
        here.read()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("first", [b"PUB t\n\x00\x00\x00\x01x", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" * 9])
def test_what_is_no_handshake_is_refused(certificates: Certificates, policy: str, first: bytes):
    engine = server(certificates, policy)
    engine.receive(first)
    with pytest.raises(TlsFailed) as caught:
        engine.handshake()
    assert caught.value.reason
    assert "_ssl" not in str(caught.value)


# -- clients -----------------------------------------------------------------------------------------------------------


def test_our_client_verifies_the_server(certificates: Certificates, tmp_path: Path):
    shake_hands(client(own_context(certificates)), server(certificates))
    with pytest.raises(TlsFailed, match="Hostname mismatch"):
        shake_hands(client(own_context(certificates), "elsewhere.example"), server(certificates))
    with pytest.raises(TlsFailed, match="certificate verify failed"):
        shake_hands(client(client_context(Certificates(tmp_path / "other").ca)), server(certificates))
    with pytest.raises(TlsFailed, match="certificate verify failed"):
        shake_hands(client(client_context()), server(certificates))


def test_our_client_can_be_told_not_to(certificates: Certificates):
    shake_hands(client(client_context(is_verified=False), "elsewhere.example"), server(certificates))
    shake_hands(client(client_context(certificates.ca, is_verified=False), "elsewhere.example"), server(certificates))
    with pytest.raises(TlsSetupError, match="certificate authorities no/such/file: No such file"):
        client_context("no/such/file", is_verified=False)


def test_our_client_shows_a_certificate(certificates: Certificates):
    here = server(certificates, "require-verify")
    shake_hands(client(own_context(certificates, "good")), here)
    assert here.session().common_name == CLIENT_NAME


def test_our_client_has_a_minimum(certificates: Certificates):
    engine = StandardTls(client_context(certificates.ca, min_version="tls1.3"), False, "localhost")
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    old.load_cert_chain(certificates.server.cert, certificates.server.key)
    with pytest.raises(TlsFailed):
        shake_hands(engine, StandardTls(old, True))


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_files_that_cannot_be_used(certificates: Certificates, tmp_path: Path, policy: str):
    good = certificates.server
    text = tmp_path / "text.pem"
    text.write_text("not a certificate", encoding="utf-8")
    missing = str(tmp_path / "missing")
    other_key = certificates.client("good").key
    for files, ca, reason in (
        (Files(missing, good.key), certificates.ca, "No such file"),
        (Files(good.cert, missing), certificates.ca, "No such file"),
        (Files(str(text), good.key), certificates.ca, "there is no certificate in PEM form"),
        (Files(good.cert, str(text)), certificates.ca, "there is no private key in PEM form"),
        (Files(good.cert, other_key), certificates.ca, "key values mismatch"),
        (good, missing, "No such file"),
        (good, str(text), "no certificate or crl found"),
    ):
        with pytest.raises(TlsSetupError) as caught:
            ServerTls(files.cert, files.key, policy, ca).engines()
        assert reason in str(caught.value), caught.value
        assert any(path in str(caught.value) for path in (files.cert, files.key, ca))
        assert "_ssl.c" not in str(caught.value)


def test_a_key_with_a_passphrase_is_refused_without_a_prompt(certificates: Certificates, tmp_path: Path):
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(Path(certificates.server.key).read_bytes(), None)
    locked = tmp_path / "locked.key"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    for policy in POLICIES:
        with pytest.raises(TlsSetupError, match="passphrase"):
            ServerTls(certificates.server.cert, str(locked), policy).engines()


def test_what_an_operator_is_told(certificates: Certificates, tmp_path: Path):
    now_ns = 1_900_000_000 * 1_000_000_000
    files = certificates.server
    assert ServerTls(files.cert, files.key).concerns(now_ns) == []
    assert "prove nothing" in ServerTls(files.cert, files.key, "require").concerns(now_ns)[0]
    old = certificates.expired_server()
    assert ServerTls(old.cert, old.key).concerns(now_ns) == [f"certificate {old.cert} has expired on 2002-01-01"]
    before = ServerTls(old.cert, old.key).concerns(900_000_000 * 1_000_000_000)
    assert before == [f"certificate {old.cert} is not valid before 2001-01-01"]
    open_key = tmp_path / "open.key"
    open_key.write_bytes(Path(files.key).read_bytes())
    open_key.chmod(0o644)
    assert "can be read by every user" in ServerTls(files.cert, str(open_key)).concerns(now_ns)[0]
    open_key.unlink()
    with pytest.raises(TlsSetupError):
        ServerTls(files.cert, str(open_key)).concerns(now_ns)
