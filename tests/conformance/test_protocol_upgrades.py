"""TLS, snappy and deflate: who gets them, in which order, what the bytes are (NSQ's TCP protocol)."""

from __future__ import annotations

import json
import ssl
import zlib
from collections.abc import Callable

import pytest
from tests.certificates import KINDS, Certificates, old_client_context
from tests.conformance.conftest import quick_flags
from tests.conformance.protocol_helpers import fatal, fatal_on, goes_on, identify, producer, tls_flags
from tests.integration.daemons import RESPONSE, Daemons, Nsqd, mpub, pub, sized
from tests.integration.upgraded import CODECS, Upgraded

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # old versions of TLS are used on purpose

LAYERS = {
    "deflate": (False, "deflate"),
    "snappy": (False, "snappy"),
    "tls": (True, ""),
    "tls-deflate": (True, "deflate"),
    "tls-snappy": (True, "snappy"),
}
OLDEST = {
    "tls1.0": ("--tls-min-version=tls1.0", "--deflate=false", "--snappy=false"),
    "tls1.1": ("--tls-min-version=tls1.1", "--max-deflate-level=9"),
    "tls1.2": ("--tls-min-version=tls1.2",),
    "tls1.3": ("--tls-min-version=tls1.3",),
}
"""Flags by the oldest version of TLS; two have others to test as well, which spares a daemon."""
OK = b"\x00\x00\x00\x06\x00\x00\x00\x00OK"
SNAPPY_STREAM = b"\xff\x06\x00\x00sNaPpY"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def with_flags(shared_daemons: Daemons, certificates: Certificates) -> Callable[..., Nsqd]:
    """An nsqd with a certificate for each set of further flags."""
    running: dict[tuple[str, ...], Nsqd] = {}

    def get(*flags: str) -> Nsqd:
        if flags not in running:
            running[flags] = shared_daemons.nsqd(*quick_flags(), *tls_flags(certificates, *flags))
        return running[flags]

    return get


@pytest.fixture(scope="module")
def secure(with_flags: Callable[..., Nsqd]) -> Nsqd:
    """An nsqd that grants everything."""
    return with_flags()


# -- what is granted ---------------------------------------------------------------------------------------------------


def test_tls_is_granted(secure: Nsqd):
    with Upgraded(secure.tcp) as connection:
        assert connection.negotiate(tls_v1=True)["tls_v1"] is True


def test_tls_is_not_granted_unasked(secure: Nsqd):
    with Upgraded(secure.tcp) as connection:
        assert connection.negotiate()["tls_v1"] is False
        goes_on(connection)


def test_nothing_is_granted_without_feature_negotiation(secure: Nsqd):
    with secure.connect() as connection:
        connection.ok(identify(tls_v1=True, snappy=True, deflate=True))
        goes_on(connection)


def test_both_compressions_are_refused_with_tls_too(secure: Nsqd):
    error = fatal(secure, identify(feature_negotiation=True, tls_v1=True, deflate=True, snappy=True))
    assert error == "E_IDENTIFY_FAILED cannot enable both deflate and snappy compression"


@pytest.mark.parametrize("codec", CODECS)
def test_a_compression_that_is_switched_off(with_flags: Callable[..., Nsqd], codec: str):
    with Upgraded(with_flags(*OLDEST["tls1.0"]).tcp) as connection:
        assert connection.negotiate(**{codec: True})[codec] is False
        goes_on(connection)


# -- the answers -------------------------------------------------------------------------------------------------------


def test_the_answer_comes_in_clear_and_then_OK_inside_tls(secure: Nsqd, certificates: Certificates):
    with Upgraded(secure.tcp) as connection:
        assert connection.negotiate(tls_v1=True)["tls_v1"] is True
        connection.secure(certificates.client_context())  # which sees the OK
        goes_on(connection)


@pytest.mark.parametrize("codec", CODECS)
def test_the_answer_comes_in_clear_and_then_OK_compressed(secure: Nsqd, codec: str):
    with Upgraded(secure.tcp) as connection:
        assert connection.negotiate(**{codec: True})[codec] is True
        connection.compress(codec)  # which sees the OK
        goes_on(connection)


@pytest.mark.parametrize("codec", CODECS)
def test_tls_and_compression_say_OK_twice(secure: Nsqd, certificates: Certificates, codec: str):
    """First inside TLS only, then compressed inside TLS."""
    with Upgraded(secure.tcp) as connection:
        answer = connection.negotiate(tls_v1=True, **{codec: True})
        assert (answer["tls_v1"], answer[codec]) == (True, True)
        connection.secure(certificates.client_context())
        connection.compress(codec)
        goes_on(connection)


@pytest.mark.parametrize("layers", LAYERS)
def test_everything_works_inside(secure: Nsqd, certificates: Certificates, topic: str, layers: str):
    is_tls, codec = LAYERS[layers]
    with Upgraded(secure.tcp) as connection:
        connection.upgrade(certificates.client_context() if is_tls else None, codec)
        bodies = [b"%d " % number + bytes(number * 50) for number in range(200)]
        connection.ok(mpub(topic, bodies))
        connection.subscribe(topic, "c", 200)
        received = connection.messages(200)
        assert [message.body for message in received] == bodies
        connection.finish(*received)
        connection.settle()
        row = secure.stats(topic, "c")["clients"][0]
        assert (row["tls"], row["deflate"], row["snappy"]) == (is_tls, codec == "deflate", codec == "snappy")


@pytest.mark.parametrize("layers", LAYERS)
def test_fatal_errors_come_inside(secure: Nsqd, certificates: Certificates, layers: str):
    is_tls, codec = LAYERS[layers]
    with Upgraded(secure.tcp) as connection:
        connection.upgrade(certificates.client_context() if is_tls else None, codec)
        assert connection.error(b"FOO\n") == "E_INVALID invalid command FOO"


@pytest.mark.parametrize("layers", LAYERS)
def test_the_largest_message_inside(secure: Nsqd, certificates: Certificates, topic: str, layers: str):
    is_tls, codec = LAYERS[layers]
    with Upgraded(secure.tcp) as connection:
        connection.upgrade(certificates.client_context() if is_tls else None, codec)
        connection.ok(pub(topic, bytes(1048576)))
        assert connection.subscribe(topic, "c", 1).message().body == bytes(1048576)


# -- snappy ------------------------------------------------------------------------------------------------------------


def snappy_chunks(data: bytes) -> list[tuple[int, bytes]]:
    """Kind and data of whole chunks of the framing format."""
    chunks = []
    while data:
        size = int.from_bytes(data[1:4], "little")
        chunks.append((data[0], data[4 : 4 + size]))
        assert len(chunks[-1][1]) == size
        data = data[4 + size :]
    return chunks


def test_snappy_begins_with_the_stream_identifier(secure: Nsqd):
    with Upgraded(secure.tcp) as connection:
        connection.negotiate(snappy=True)
        data = connection.socket.recv(1000)
        while len(data) < len(SNAPPY_STREAM) + 4 + 4 + len(OK):
            data += connection.socket.recv(1000)
    assert data.startswith(SNAPPY_STREAM)
    (kind, _chunk) = snappy_chunks(data[len(SNAPPY_STREAM) :])[0]
    assert kind in (0, 1)
    assert CODECS["snappy"]().decompress(data) == OK


def test_snappy_chunks_hold_at_most_64_KiB(secure: Nsqd, topic: str):
    body = bytes(range(256)) * 1500
    secure.publish(topic, body)
    with Upgraded(secure.tcp) as connection:
        connection.negotiate(snappy=True)
        own, decoder = CODECS["snappy"](), CODECS["snappy"]()
        connection.socket.sendall(own.compress(b"SUB %s c\nRDY 1\n" % topic.encode()))
        data, plain = b"", b""
        while len(plain) < 2 * len(OK) + 8 + 26 + len(body):
            piece = connection.socket.recv(1 << 20)
            data, plain = data + piece, plain + decoder.decompress(piece)
    for kind, chunk in snappy_chunks(data):
        assert kind in (0x00, 0x01, 0xFF)
        if kind == 0x01:
            assert len(chunk) - 4 <= 65_536
        elif kind == 0x00:
            assert snappy_length(chunk[4:]) <= 65_536


def snappy_length(block: bytes) -> int:
    """The uncompressed length that a block of raw snappy begins with."""
    value = shift = 0
    for byte in block:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return value


def test_snappy_takes_uncompressed_chunks(secure: Nsqd, topic: str):
    """Chunk 0x01; its checksum is the masked CRC-32C of b'NOP\\n'."""
    crc = masked_crc32c(b"NOP\n")
    chunk = b"\x01\x08\x00\x00" + crc.to_bytes(4, "little") + b"NOP\n"
    with Upgraded(secure.tcp) as connection:
        connection.upgrade(codec="snappy")
        assert connection.codec is not None
        connection.codec._below.sendall(SNAPPY_STREAM + chunk)
        connection.ok(pub(topic, b"x"))


def test_snappy_with_a_wrong_checksum_is_closed(secure: Nsqd):
    chunk = b"\x01\x08\x00\x00\x00\x00\x00\x00NOP\n"
    with Upgraded(secure.tcp) as connection:
        connection.upgrade(codec="snappy")
        assert connection.codec is not None
        connection.codec._below.sendall(SNAPPY_STREAM + chunk)
        assert connection.wait_closed() == []


def masked_crc32c(data: bytes) -> int:
    """The checksum of the framing format, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


# -- deflate -----------------------------------------------------------------------------------------------------------


def test_deflate_is_raw_and_every_flush_ends_with_a_sync_flush(secure: Nsqd):
    with Upgraded(secure.tcp) as connection:
        connection.negotiate(deflate=True)
        data = connection.socket.recv(1000)
    assert data.endswith(b"\x00\x00\xff\xff")
    assert zlib.decompressobj(-15).decompress(data) == OK


@pytest.mark.parametrize("level", [1, 6, 9])
def test_deflate_level_asked_for(with_flags: Callable[..., Nsqd], topic: str, level: int):
    with Upgraded(with_flags(*OLDEST["tls1.1"]).tcp) as connection:
        answer = connection.upgrade(codec="deflate", deflate_level=level)
        assert (answer["deflate_level"], answer["max_deflate_level"]) == (level, 9)
        connection.ok(pub(topic, bytes(10_000)))


def test_deflate_that_is_corrupt_is_closed(secure: Nsqd):
    with Upgraded(secure.tcp) as connection:
        connection.upgrade(codec="deflate")
        assert connection.codec is not None
        connection.codec._below.sendall(b"\xff" * 100)
        assert connection.wait_closed() == []


# -- TLS: clients ------------------------------------------------------------------------------------------------------

ADMITTED = {"": set(KINDS), "require": set(KINDS) - {"none"}, "require-verify": {"good"}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ADMITTED, ids=["no-policy", "require", "require-verify"])
def test_client_certificate(with_flags: Callable[..., Nsqd], certificates: Certificates, policy: str, kind: str):
    nsqd = with_flags(f"--tls-client-auth-policy={policy}") if policy else with_flags()
    with Upgraded(nsqd.tcp) as connection:
        assert connection.negotiate(tls_v1=True)["tls_v1"] is True
        if kind in ADMITTED[policy]:
            connection.secure(certificates.client_context(kind))
            goes_on(connection)
        else:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                connection.secure(certificates.client_context(kind))


@pytest.mark.parametrize("policy", ["require", "require-verify"])
def test_a_client_auth_policy_makes_tls_required(with_flags: Callable[..., Nsqd], policy: str):
    nsqd = with_flags(f"--tls-client-auth-policy={policy}")
    assert fatal(nsqd, b"NOP\n") == "E_INVALID cannot NOP in current state (TLS required)"


# -- TLS: versions -----------------------------------------------------------------------------------------------------

VERSIONS = {
    "TLS1.0": ssl.TLSVersion.TLSv1,
    "TLS1.1": ssl.TLSVersion.TLSv1_1,
    "TLS1.2": ssl.TLSVersion.TLSv1_2,
    "TLS1.3": ssl.TLSVersion.TLSv1_3,
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("oldest", OLDEST)
def test_tls_min_version(with_flags: Callable[..., Nsqd], topic: str, oldest: str, version: str):
    nsqd = with_flags(*OLDEST[oldest])
    with Upgraded(nsqd.tcp) as connection:
        connection.negotiate(tls_v1=True)
        if version >= oldest.upper():
            connection.secure(old_client_context(VERSIONS[version]))
            connection.ok(pub(topic, b"x"))
            assert producer(nsqd, topic)["tls_version"] == version
        else:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                connection.secure(old_client_context(VERSIONS[version]))


@pytest.mark.improvement
@pytest.mark.parametrize("version", ["TLS1.0", "TLS1.1"])
def test_tls_min_version_default_leaves_out_what_is_broken(secure: Nsqd, version: str):
    """Upstream's default is TLS 1.0."""
    with Upgraded(secure.tcp) as connection:
        connection.negotiate(tls_v1=True)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            connection.secure(old_client_context(VERSIONS[version]))


# -- a handshake that fails --------------------------------------------------------------------------------------------


def test_something_else_than_a_handshake_is_refused(secure: Nsqd, topic: str):
    """What is sent in clear behind an IDENTIFY that asks for TLS is never executed."""
    with Upgraded(secure.tcp) as connection:
        connection.negotiate(tls_v1=True)
        connection.send(pub(topic, b"x"))
        data = b""
        try:
            while piece := connection.socket.recv(65536):
                data += piece
        except ConnectionResetError:
            pass
        assert b"E_IDENTIFY_FAILED IDENTIFY failed " in data
        assert data.find(OK) < 0
    names = {row["topic_name"] for row in secure.get("/stats?format=json")["topics"]}
    assert topic not in names


# -- bytes across an upgrade -------------------------------------------------------------------------------------------


@pytest.mark.improvement
@pytest.mark.parametrize("codec", CODECS)
def test_commands_sent_before_the_answer_are_not_lost(secure: Nsqd, topic: str, codec: str):
    """Upstream loses what its old layer has read already."""
    own = CODECS[codec]()
    behind = own.compress(pub(topic, b"1") + pub(topic, b"2"))
    with Upgraded(secure.tcp) as connection:
        connection.send(b"IDENTIFY\n" + sized(json.dumps({"feature_negotiation": True, codec: True}).encode()) + behind)
        assert connection.answer()[codec] is True
        connection.compress(codec)
        connection.ok(count=2)


def test_commands_before_IDENTIFY_are_answered_in_clear(secure: Nsqd, topic: str):
    with Upgraded(secure.tcp) as connection:
        connection.send(pub(topic, b"1") + identify(feature_negotiation=True, snappy=True))
        assert connection.read_frame() == (RESPONSE, b"OK")
        assert connection.answer()["snappy"] is True
        connection.compress("snappy")
        goes_on(connection)


# -- again -------------------------------------------------------------------------------------------------------------


@pytest.mark.improvement
def test_an_upgrade_is_granted_once(secure: Nsqd, certificates: Certificates):
    """Upstream puts TLS into TLS and a compression into a compression."""
    with Upgraded(secure.tcp) as connection:
        connection.upgrade(certificates.client_context(), "snappy")
        answer = connection.identify(tls_v1=True, deflate=True)
        assert (answer["tls_v1"], answer["deflate"], answer["snappy"]) == (False, False, False)
        goes_on(connection)


def test_states_hold_inside_too(secure: Nsqd, certificates: Certificates, topic: str):
    with Upgraded(secure.tcp) as connection:
        connection.upgrade(certificates.client_context())
        connection.subscribe(topic, "c")
        assert fatal_on(connection, identify(tls_v1=True)) == "E_INVALID cannot IDENTIFY in current state"
