"""TLS, deflate and snappy on nsqd's TCP port, and HTTPS, over real sockets (NSQ's TCP protocol, NSQ's HTTP API)."""

from __future__ import annotations

import http.client
import json
import random
import re
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.certificates import KINDS, Certificates, old_client_context
from tests.integration.daemons import (
    HEARTBEAT,
    PATIENCE_S,
    RESPONSE,
    Connection,
    Daemon,
    Daemons,
    Nsqd,
    mpub,
    pub,
    sized,
    wait_until,
)
from tests.integration.upgraded import CODECS, Upgraded

ROOT = Path(__file__).resolve().parents[2]
POLICIES = ("", "require", "require-verify")
ADMITTED = {"": set(KINDS), "require": set(KINDS) - {"none"}, "require-verify": {"good"}}
LAYERS = [(False, ""), (False, "deflate"), (False, "snappy"), (True, ""), (True, "deflate"), (True, "snappy")]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # old versions of TLS are used on purpose


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def tls_flags(certificates: Certificates, *flags: str) -> list[str]:
    files = certificates.server
    return [
        f"--tls-cert={files.cert}",
        f"--tls-key={files.key}",
        f"--tls-root-ca-file={certificates.ca}",
        "--https-address=127.0.0.1:0",
        *flags,
    ]


@pytest.fixture(scope="module")
def secure(shared: Daemons, certificates: Certificates) -> Nsqd:
    """An nsqd that offers everything and requires nothing."""
    return shared.nsqd(*tls_flags(certificates), "--log-level=debug")


@pytest.fixture(scope="module")
def with_policy(shared: Daemons, certificates: Certificates) -> Callable[[str], Nsqd]:
    """An nsqd for each client-auth policy."""
    running: dict[str, Nsqd] = {}

    def get(policy: str) -> Nsqd:
        if policy not in running:
            running[policy] = shared.nsqd(*tls_flags(certificates, f"--tls-client-auth-policy={policy}"))
        return running[policy]

    return get


def https_address(nsqd: Daemon) -> tuple[str, int]:
    found = wait_until(lambda: re.search(r"HTTPS: listening on (\S+):(\d+)\n", nsqd.log), "the line of HTTPS")
    assert found is not None
    return found[1], int(found[2])


def https(nsqd: Nsqd, context: ssl.SSLContext, method: str, target: str, body: bytes = b"") -> tuple[int, bytes]:
    connection = http.client.HTTPSConnection(*https_address(nsqd), timeout=PATIENCE_S, context=context)
    try:
        connection.request(method, target, body)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def only_client(nsqd: Nsqd, topic: str, context: ssl.SSLContext | None = None) -> dict[str, object]:
    """The row of the only producer that published to a topic; asked over HTTPS with a ``context``."""
    target = "/stats?format=json&include_mem=false"
    stats = nsqd.get(target) if context is None else json.loads(https(nsqd, context, "GET", target)[1])
    rows = stats["producers"] or []
    found = [row for row in rows if any(each["topic"] == topic for each in row["pub_counts"])]
    assert len(found) == 1, rows
    row: dict[str, object] = found[0]
    return row


# -- TLS ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_who_is_let_in(with_policy: Callable[[str], Nsqd], certificates: Certificates, policy: str, kind: str):
    nsqd = with_policy(policy)
    topic = f"admitted_{kind}"
    with Upgraded(nsqd.tcp) as connection:
        assert connection.negotiate(tls_v1=True)["tls_v1"] is True
        if kind in ADMITTED[policy]:
            connection.secure(certificates.client_context(kind))
            connection.ok(pub(topic, b"x"))
            assert only_client(nsqd, topic, certificates.client_context("good"))["tls"] is True
        else:
            # TLS 1.3 clients are done before the server has looked at their certificate: the alert is the first read
            with pytest.raises((ssl.SSLError, ConnectionError), match=r"(?i)certificate|alert|closed|reset"):
                connection.secure(certificates.client_context(kind))
    if kind not in ADMITTED[policy]:
        wait_until(lambda: "E_IDENTIFY_FAILED IDENTIFY failed tls: " in nsqd.log, "the reason in the log")


def test_a_policy_makes_tls_required(with_policy: Callable[[str], Nsqd]):
    nsqd = with_policy("require")
    with nsqd.connect() as connection:
        assert connection.error(b"PUB t\n") == "E_INVALID cannot PUB in current state (TLS required)"
    answer = nsqd.request("GET", "/ping")
    assert answer.status == 403
    assert "WARNING: --tls-client-auth-policy=require takes any certificate" in nsqd.log


@pytest.mark.parametrize("policy", POLICIES)
def test_https_has_the_same_policy(with_policy: Callable[[str], Nsqd], certificates: Certificates, policy: str):
    nsqd = with_policy(policy)
    for kind in ("none", "good", "stranger"):
        if kind in ADMITTED[policy]:
            assert https(nsqd, certificates.client_context(kind), "GET", "/ping") == (200, b"OK")
        else:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                https(nsqd, certificates.client_context(kind), "GET", "/ping")


def test_a_failed_handshake_is_answered_in_clear(secure: Nsqd):
    with Upgraded(secure.tcp) as connection:
        connection.negotiate(tls_v1=True)
        connection.send(b"PUB t\n" + sized(b"x"))
        frames = b""
        while piece := connection.socket.recv(65536):
            frames += piece
        assert frames.endswith(b"E_IDENTIFY_FAILED IDENTIFY failed tls: wrong version number")


@pytest.mark.parametrize(
    ("flag", "version", "is_admitted"),
    [
        ("", ssl.TLSVersion.TLSv1_1, False),
        ("", ssl.TLSVersion.TLSv1_2, True),
        ("--tls-min-version=tls1.0", ssl.TLSVersion.TLSv1, True),
        ("--tls-min-version=tls1.3", ssl.TLSVersion.TLSv1_2, False),
        ("--tls-min-version=tls1.3", ssl.TLSVersion.TLSv1_3, True),
    ],
)
def test_versions(shared: Daemons, certificates: Certificates, flag: str, version: ssl.TLSVersion, is_admitted: bool):
    nsqd = shared.nsqd(*tls_flags(certificates), *([flag] if flag else []))
    with Upgraded(nsqd.tcp) as connection:
        connection.negotiate(tls_v1=True)
        if is_admitted:
            assert connection.secure(old_client_context(version)).version() == version.name.replace("_", ".")
            connection.ok(pub("t", b"x"))
            row = only_client(nsqd, "t")
            assert row["tls_version"] == {"TLSv1": "TLS1.0"}.get(
                version.name, version.name.replace("v", "").replace("_", ".")
            )
        else:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                connection.secure(old_client_context(version))
    nsqd.stop()


def test_what_stats_say(secure: Nsqd, certificates: Certificates):
    context = certificates.client_context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("ECDHE-ECDSA-AES128-GCM-SHA256")
    with Upgraded(secure.tcp) as connection:
        connection.upgrade(context, "snappy")
        connection.ok(pub("stats_1", b"x"))
        row = only_client(secure, "stats_1")
        assert (row["tls"], row["snappy"], row["deflate"]) == (True, True, False)
        assert row["tls_version"] == "TLS1.2"
        assert row["tls_cipher_suite"] == "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256"
        assert (row["tls_negotiated_protocol"], row["tls_negotiated_protocol_is_mutual"]) == ("", True)
    with Upgraded(secure.tcp) as connection:
        connection.upgrade(codec="deflate")
        connection.ok(pub("stats_2", b"x"))
        row = only_client(secure, "stats_2")
        assert (row["tls"], row["snappy"], row["deflate"]) == (False, False, True)
        assert (row["tls_version"], row["tls_cipher_suite"]) == ("", "")
        assert row["tls_negotiated_protocol_is_mutual"] is False
    with Upgraded(secure.tcp) as connection:
        connection.upgrade(certificates.client_context())
        connection.ok(pub("stats_3", b"x"))
        assert only_client(secure, "stats_3")["tls_version"] == "TLS1.3"
        assert only_client(secure, "stats_3")["tls_cipher_suite"] in ("Unknown 4865", "Unknown 4866", "Unknown 4867")


def test_a_handshake_that_does_not_come_is_ended(secure: Nsqd):
    with Upgraded(secure.tcp) as connection:
        connection.negotiate(tls_v1=True)
        begun = time.monotonic()
        error = connection.error(timeout_s=PATIENCE_S)
        assert error == "E_IDENTIFY_FAILED IDENTIFY failed tls: the handshake took too long"
        assert time.monotonic() - begun > 4


# -- required ----------------------------------------------------------------------------------------------------------

COMMANDS = {
    "AUTH": b"AUTH\n" + sized(b"secret"),
    "SUB": b"SUB t c\n",
    "PUB": pub("t", b"x"),
    "MPUB": mpub("t", [b"x"]),
    "DPUB": b"DPUB t 1\n" + sized(b"x"),
    "RDY": b"RDY 1\n",
    "FIN": b"FIN 0123456789abcdef\n",
    "REQ": b"REQ 0123456789abcdef 1\n",
    "TOUCH": b"TOUCH 0123456789abcdef\n",
    "CLS": b"CLS\n",
    "NOP": b"NOP\n",
    "OFFSETS": b"OFFSETS t\n",
    "FETCH": b"FETCH t 0\n" + bytes(28),
    "CURSOR": b"CURSOR t c 0 -1\n",
}


@pytest.fixture(scope="module", params=["true", "tcp-https"])
def required(request: pytest.FixtureRequest, shared: Daemons, certificates: Certificates) -> tuple[Nsqd, str]:
    nsqd = shared.nsqd(*tls_flags(certificates, f"--tls-required={request.param}"))
    return nsqd, request.param


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_comes_before_tls(required: tuple[Nsqd, str], command: str):
    with required[0].connect() as connection:
        error = connection.error(COMMANDS[command])
        assert error == f"E_INVALID cannot {command} in current state (TLS required)"
        assert connection.wait_closed() == []


@pytest.mark.parametrize("fields", [{}, {"deflate": True}, {"snappy": True}])
def test_identify_alone_does_not_help(required: tuple[Nsqd, str], fields: dict[str, bool]):
    with Upgraded(required[0].tcp) as connection:
        connection.upgrade(codec=next(iter(fields), ""))
        assert connection.error(pub("t", b"x")) == "E_INVALID cannot PUB in current state (TLS required)"


def test_with_tls_everything_is_as_usual(required: tuple[Nsqd, str], certificates: Certificates):
    with Upgraded(required[0].tcp) as connection:
        connection.upgrade(certificates.client_context())
        connection.ok(pub("t", b"x"))
        connection.subscribe("t", "c", 1)
        connection.finish(connection.message())


def test_plain_http(required: tuple[Nsqd, str], certificates: Certificates):
    nsqd, mode = required
    for method, target in (("GET", "/ping"), ("POST", "/pub?topic=t"), ("GET", "/no/such/path"), ("PUT", "/ping")):
        answer = nsqd.request(method, target, b"x" if method == "POST" else None)
        if mode == "true":
            assert answer.status == 403
            assert answer.body == b'{"message": "TLS_REQUIRED", "https_port": %d}' % https_address(nsqd)[1]
            assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
            assert answer.headers["X-NSQ-Content-Type"] == "nsq; version=1.0"
        else:
            assert answer.status == {"/ping": 200, "/pub?topic=t": 200}.get(target, 404) or method == "PUT"
    assert https(nsqd, certificates.client_context(), "GET", "/ping") == (200, b"OK")


# -- HTTPS -------------------------------------------------------------------------------------------------------------


def test_https(secure: Nsqd, certificates: Certificates):
    context = certificates.client_context()
    body = random.Random(1).randbytes(900_000)
    assert https(secure, context, "POST", "/pub?topic=over_https", body) == (200, b"OK")
    with secure.connect() as connection:
        connection.subscribe("over_https", "c", 1)
        message = connection.message()
        assert message.body == body
        connection.finish(message)
    browser = http.client.HTTPSConnection(*https_address(secure), timeout=PATIENCE_S, context=context)
    for _ in range(3):
        browser.request("GET", "/stats?format=json")
        assert json.loads(browser.getresponse().read())["health"] == "OK"
    browser.close()
    with pytest.raises(ssl.SSLCertVerificationError):
        https(secure, ssl.create_default_context(), "GET", "/ping")


def test_plain_http_on_the_https_port_ends_the_connection(secure: Nsqd):
    with socket.create_connection(https_address(secure), timeout=PATIENCE_S) as plain:
        plain.sendall(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n")
        received = b""
        try:
            while piece := plain.recv(4096):
                received += piece
        except ConnectionResetError:
            pass
        assert b"HTTP/1.1 200" not in received


def test_nothing_listens_for_https_without_a_certificate(shared: Daemons):
    nsqd = shared.nsqd("--https-address=127.0.0.1:0")
    assert "HTTPS" not in nsqd.log
    with Upgraded(nsqd.tcp) as connection:
        assert connection.negotiate(tls_v1=True)["tls_v1"] is False
        connection.ok(pub("t", b"x"))
    nsqd.stop()


# -- what is granted ---------------------------------------------------------------------------------------------------


def test_both_compressions_are_refused(secure: Nsqd):
    with secure.connect() as connection:
        body = json.dumps({"feature_negotiation": True, "deflate": True, "snappy": True}).encode()
        error = connection.error(b"IDENTIFY\n" + sized(body))
        assert error == "E_IDENTIFY_FAILED cannot enable both deflate and snappy compression"


def test_without_negotiation_nothing_is_upgraded(secure: Nsqd):
    with secure.connect() as connection:
        connection.ok(b"IDENTIFY\n" + sized(json.dumps({"tls_v1": True, "deflate": True, "snappy": True}).encode()))
        connection.ok(pub("t", b"x"))


def test_what_a_server_can_deny(shared: Daemons):
    nsqd = shared.nsqd("--deflate=false", "--snappy=false", "--max-deflate-level=3")
    with Upgraded(nsqd.tcp) as connection:
        answer = connection.negotiate(deflate=True, snappy=True, tls_v1=True, deflate_level=9)
        assert [answer[name] for name in ("tls_v1", "deflate", "snappy")] == [False, False, False]
        assert (answer["deflate_level"], answer["max_deflate_level"]) == (3, 3)
        connection.ok(pub("t", b"x"))
    nsqd.stop()


@pytest.mark.parametrize(("asked", "level"), [(0, 6), (1, 1), (6, 6), (9, 6)])
def test_deflate_levels(secure: Nsqd, asked: int, level: int):
    with Upgraded(secure.tcp) as connection:
        answer = connection.upgrade(codec="deflate", deflate_level=asked)
        assert (answer["deflate_level"], answer["max_deflate_level"]) == (level, 6)
        connection.ok(pub("t", b"x"))


def test_a_second_identify_grants_only_what_is_left(secure: Nsqd, certificates: Certificates):
    context = certificates.client_context()
    with Upgraded(secure.tcp) as connection:
        connection.upgrade(context)
        answer = connection.negotiate(tls_v1=True, snappy=True)
        assert (answer["tls_v1"], answer["snappy"]) == (False, True)
        connection.compress("snappy")
        answer = connection.identify(tls_v1=True, deflate=True)
        assert (answer["tls_v1"], answer["deflate"]) == (False, False)
        connection.ok(pub("t", b"x"))


# -- bytes -------------------------------------------------------------------------------------------------------------


def bodies(count: int) -> list[bytes]:
    chance = random.Random(7)
    return [chance.randbytes(chance.randrange(1, 400)) + b"a" * chance.randrange(400) for _ in range(count)]


@pytest.mark.parametrize(("is_secure", "codec"), LAYERS)
def test_messages_both_ways(secure: Nsqd, certificates: Certificates, is_secure: bool, codec: str):
    context = certificates.client_context() if is_secure else None
    topic = f"both_ways_{is_secure}_{codec}"
    sent = bodies(2000)
    with Upgraded(secure.tcp) as producer, Upgraded(secure.tcp) as consumer:
        producer.upgrade(context, codec)
        consumer.upgrade(context, codec)
        consumer.subscribe(topic, "c", 2500)
        for at in range(0, len(sent), 500):
            producer.ok(mpub(topic, sent[at : at + 500]))
        received = consumer.messages(len(sent))
        assert [message.body for message in received] == sent
        consumer.finish(*received)
        wait_until(lambda: secure.unfinished(topic, "c") == 0, "finished")


@pytest.mark.parametrize(("is_secure", "codec"), LAYERS[1:])
def test_one_byte_at_a_time(secure: Nsqd, certificates: Certificates, is_secure: bool, codec: str):
    with Upgraded(secure.tcp, magic=b"") as connection:
        for byte in b"  V2IDENTIFY\n":
            connection.send(bytes([byte]))
        wanted = {"feature_negotiation": True, "tls_v1": is_secure, **({codec: True} if codec else {})}
        for byte in sized(json.dumps(wanted).encode()):
            connection.send(bytes([byte]))
        connection.answer()
        if is_secure:
            connection.secure(certificates.client_context())
        if codec:
            connection.compress(codec)
            assert connection.codec is not None
            connection.codec.step = 1
        for byte in pub("bytewise", b"hello") * 2:
            connection.send(bytes([byte]))
        connection.ok(count=2)


def test_large_messages(secure: Nsqd, certificates: Certificates):
    for number, (is_secure, codec) in enumerate(LAYERS[1:]):
        body = random.Random(number).randbytes(500_000) + bytes(500_000)
        with Upgraded(secure.tcp) as connection:
            connection.upgrade(certificates.client_context() if is_secure else None, codec)
            connection.ok(mpub(f"large_{number}", [body] * 4))
            connection.subscribe(f"large_{number}", "c", 10)
            for _ in range(4):
                message = connection.message()
                assert message.body == body
                connection.finish(message)


@pytest.mark.parametrize("codec", CODECS)
def test_what_stands_behind_identify_belongs_to_the_new_layer(secure: Nsqd, codec: str):
    """All in one packet: a publish in clear, IDENTIFY, and compressed commands that did not wait for its answer."""
    own = CODECS[codec]()
    identify = b"IDENTIFY\n" + sized(json.dumps({"feature_negotiation": True, codec: True}).encode())
    with Upgraded(secure.tcp) as connection:
        topic = f"pipelined_{codec}"
        connection.send(pub(topic, b"1") + identify + own.compress(pub(topic, b"2") + pub(topic, b"3")))
        assert connection.read_frame() == (RESPONSE, b"OK")  # of the publish, before the answer in clear
        assert connection.answer()[codec] is True
        connection.compress(codec)
        connection.ok(count=2)
    with secure.connect() as consumer:
        consumer.subscribe(topic, "c", 10)
        assert [message.body for message in consumer.messages(3)] == [b"1", b"2", b"3"]


@pytest.mark.parametrize("wanted", ["tls_v1", "deflate", "snappy"])
def test_clear_commands_behind_an_upgrade_are_not_executed(secure: Nsqd, wanted: str):
    """STARTTLS injection: somebody on the way adds a command in clear behind the IDENTIFY of the client."""
    topic = f"injected_{wanted}"
    identify = b"IDENTIFY\n" + sized(json.dumps({"feature_negotiation": True, wanted: True}).encode())
    for at_once in (True, False):
        with Upgraded(secure.tcp) as connection:
            connection.send(identify + pub(topic, b"x") if at_once else identify)
            assert connection.answer()[wanted] is True
            try:
                if not at_once:
                    connection.send(pub(topic, b"x"))
                while connection.socket.recv(65536):
                    pass
            except ConnectionResetError:
                pass
    names = [row["topic_name"] for row in secure.get("/stats?format=json&include_mem=false")["topics"]]
    assert topic not in names


def test_heartbeats_go_through_the_layers(secure: Nsqd, certificates: Certificates):
    with Upgraded(secure.tcp) as connection:
        connection.upgrade(certificates.client_context(), "deflate", heartbeat_interval=1000)
        assert connection.any_frame() == (RESPONSE, HEARTBEAT)
        connection.send(b"NOP\n")
        assert connection.any_frame() == (RESPONSE, HEARTBEAT)


@pytest.mark.parametrize("codec", ["", *CODECS])
def test_an_error_is_read_before_the_end(secure: Nsqd, certificates: Certificates, codec: str):
    """Although the client goes on sending: no reset overtakes the frame."""
    with Upgraded(secure.tcp) as connection:
        connection.upgrade(certificates.client_context(), codec)
        connection.send(b"NONSENSE\n" + pub("t", bytes(100_000)))
        assert connection.error() == "E_INVALID invalid command NONSENSE"
        assert connection.wait_closed() == []


def test_sigterm_drains_upgraded_connections(daemons: Daemons, certificates: Certificates):
    nsqd = daemons.nsqd(*tls_flags(certificates))
    nsqd.publish("t", *[b"%d" % number for number in range(10)])
    with Upgraded(nsqd.tcp) as consumer, Upgraded(nsqd.tcp) as idle, Upgraded(nsqd.tcp) as upgrading:
        consumer.upgrade(certificates.client_context(), "snappy")
        consumer.subscribe("t", "c", 100)
        received = consumer.messages(10)
        idle.upgrade(codec="deflate")
        upgrading.negotiate(tls_v1=True)
        stopping = threading.Thread(target=nsqd.stop, kwargs={"timeout_s": 5.0})
        stopping.start()
        wait_until(lambda: "INFO: stopping: " in nsqd.log)
        consumer.finish(*received[:6])
        assert consumer.wait_closed() == []
        assert idle.wait_closed() == []
        stopping.join()
    nsqd.start()
    assert nsqd.unfinished("t", "c") == 4


# -- bounds ------------------------------------------------------------------------------------------------------------


def peak_bytes(nsqd: Nsqd) -> int:
    status = Path(f"/proc/{nsqd.pid}/status").read_text(encoding="ascii")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def deflated_zeros(compressed_size: int) -> bytes:
    compressor = zlib.compressobj(9, zlib.DEFLATED, -15)
    piece = bytes(1024 * 1024)
    first, other = (compressor.compress(piece) + compressor.flush(zlib.Z_SYNC_FLUSH) for _ in range(2))
    return first + other * (compressed_size // len(other) + 1)  # refers to nothing but the zeros before it


def send_until_closed(connection: Connection, data: bytes) -> None:
    try:
        for at in range(0, len(data), 65536):
            connection.send(data[at : at + 65536])
        connection.wait_closed()
    except (ConnectionResetError, BrokenPipeError):
        pass


def test_a_bomb_of_zeros(shared: Daemons):
    """1 MiB that stands for 1 GiB: the connection is closed, memory and other clients hardly notice."""
    nsqd = shared.nsqd()
    nsqd.publish("t", b"x")
    with Upgraded(nsqd.tcp) as first:
        first.upgrade(codec="deflate")
        first.ok(pub("t", b"x"))
    before_bytes = peak_bytes(nsqd)
    data = deflated_zeros(1024 * 1024)
    with Connection(nsqd.tcp) as bomb:
        bomb.identify(deflate=True)
        send_until_closed(bomb, data)
    assert peak_bytes(nsqd) - before_bytes < 4 * 1024 * 1024
    nsqd.stop()


def test_a_bomb_of_messages(shared: Daemons):
    """Legal messages of zeros, 40 MiB out of 60 KB, three times: memory stays, others are served meanwhile."""
    nsqd = shared.nsqd("--durability=os", "--mem-queue-size=1", "--max-bytes-per-file=10000000")
    with Upgraded(nsqd.tcp) as other, Upgraded(nsqd.tcp) as bomb:
        other.ok(pub("other", b"x"))
        bomb.upgrade(codec="deflate")
        before_bytes = nsqd.resident_bytes()
        slowest_s = 0.0  # of nsqd's own time: how much else it did before an answer
        for _ in range(3):
            bomb.send(pub("zeros", bytes(1024 * 1024)) * 40)
            for _ in range(20):
                begun = nsqd.cpu_s()
                other.ok(pub("other", b"x"))
                slowest_s = max(slowest_s, nsqd.cpu_s() - begun)
            bomb.ok(count=40)
        assert nsqd.stats("zeros")["message_count"] == 120
        assert nsqd.resident_bytes() - before_bytes < 48 * 1024 * 1024
        assert slowest_s < 0.5
    nsqd.stop()


@pytest.mark.parametrize(
    "stream",
    [
        b"\x00" * 64,
        b"\xff\x06\x00\x00sNaPpX",
        b"\xff\x06\x00\x00sNaPpY\x00\xff\xff\xff",
        b"\xff\x06\x00\x00sNaPpY\x00\x0a\x00\x00crc!\xff\xff\xff\xff\x0fx",
        b"\xff\x06\x00\x00sNaPpY\x01\x08\x00\x00crc!NOP\n",
        b"\xff\x06\x00\x00sNaPpY\x02\x00\x00\x00",
    ],
)
def test_bad_snappy_ends_only_its_connection(secure: Nsqd, stream: bytes):
    with Connection(secure.tcp) as bad, secure.connect() as good:
        body = json.dumps({"feature_negotiation": True, "snappy": True}).encode()
        bad.send(b"IDENTIFY\n" + sized(body) + stream)
        bad.wait_closed()
        good.ok(pub("t", b"x"))


def test_a_client_that_does_not_read_what_is_compressed_is_held_back(shared: Daemons):
    nsqd = shared.nsqd("--durability=os")
    chance = random.Random(3)
    sent = [chance.randbytes(100_000) for _ in range(200)]
    for at in range(0, len(sent), 40):
        nsqd.publish("t", *sent[at : at + 40])
    before_bytes = nsqd.resident_bytes()
    with Upgraded(nsqd.tcp, receive_buffer_bytes=4096) as slow:
        slow.upgrade(codec="deflate", deflate_level=1)
        slow.subscribe("t", "c", 2500)
        time.sleep(0.5)
        assert nsqd.resident_bytes() - before_bytes < 32 * 1024 * 1024
        received = slow.messages(len(sent))
        assert sorted(message.body for message in received) == sorted(sent)
    nsqd.stop()


# -- start -------------------------------------------------------------------------------------------------------------


def test_files_that_cannot_be_used_stop_the_start(daemons: Daemons, certificates: Certificates, tmp_path: Path):
    good = certificates.server
    for cert, key, reason in (
        (tmp_path / "missing", good.key, f"certificate {tmp_path / 'missing'}: No such file or directory"),
        (good.cert, certificates.client("good").key, "key values mismatch"),
    ):
        nsqd = daemons.new_nsqd(f"--tls-cert={cert}", f"--tls-key={key}")
        nsqd.launch()
        assert nsqd.wait() == 1
        assert "FATAL: failed to instantiate nsqd - " in nsqd.log
        assert reason in nsqd.log


def test_what_an_operator_is_warned_of(daemons: Daemons, certificates: Certificates, tmp_path: Path):
    expired = certificates.expired_server()
    open_key = tmp_path / "open.key"
    open_key.write_bytes(Path(expired.key).read_bytes())
    open_key.chmod(0o644)
    nsqd = daemons.nsqd(f"--tls-cert={expired.cert}", f"--tls-key={open_key}", "--https-address=127.0.0.1:0")
    assert f"WARNING: certificate {expired.cert} has expired on 2002-01-01" in nsqd.log
    assert f"WARNING: key {open_key} can be read by every user" in nsqd.log


def test_on_the_event_loop_of_the_standard_library(daemons: Daemons, certificates: Certificates, tmp_path: Path):
    """The other tests run on uvloop where it is installed."""
    (tmp_path / "uvloop.py").write_text("raise ImportError('hidden by the test')\n", encoding="utf-8")
    nsqd = daemons.nsqd(
        *tls_flags(certificates, "--tls-client-auth-policy=require"),
        limits=("env", f"PYTHONPATH={tmp_path}:{ROOT / 'src'}"),
    )
    for codec in ("", *CODECS):
        with Upgraded(nsqd.tcp) as connection:
            connection.upgrade(certificates.client_context("stranger"), codec)
            connection.ok(mpub("t", [bytes(200_000), b"x"]))
            connection.subscribe("t", "c", 10)
            connection.finish(*connection.messages(2))
            connection.settle()
    assert https(nsqd, certificates.client_context("stranger"), "GET", "/ping") == (200, b"OK")
