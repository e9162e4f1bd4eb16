"""The handshake without IO: every combination of layers, wherever the network cuts the bytes, and what ends it.

The nsqd here shares no code with ours but the frames: its TLS is the standard library's, its codecs are python-snappy's
and zlib's. The shell is the loop that a blocking client is.
"""

from __future__ import annotations

import json
import logging
import random
import re
import ssl
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
from tests.certificates import Certificates
from tests.integration.upgraded import CODECS

from flintmq.client.core.handshake import ANSWER_BYTES_MAX, Handshake, Next, Step, refusal
from flintmq.client.options import ConnectionOptions
from flintmq.client.security import ClientTls, TlsRefused, explain, is_final
from flintmq.errors import ConnectionFailed, FlintError, NsqdError, RemoteProtocolError
from flintmq.net.tls_engine import TlsEngine, TlsFailed, TlsInterrupted
from flintmq.wire.client import ClientConnection
from flintmq.wire.codec import Codec
from flintmq.wire.frames import HEARTBEAT_FRAME, OK_FRAME, error_frame, response_frame

ADDRESS = "nsqd.example:4150"
SECRET = b"sesame-4711"
IDENTITY = response_frame(b'{"identity":"me","identity_url":"","permission_count":1}')


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


class Script:
    """An nsqd as far as the handshake goes: bytes in, bytes out.

    Attributes:
        log: the commands it was sent, without NOP.
        behind: sent right behind the last answer.
        disturbance: sent before every answer.
    """

    def __init__(self, context: ssl.SSLContext | None, codec: str | None, has_auth: bool) -> None:
        self.log: list[bytes] = []
        self.behind = b""
        self.disturbance = b""
        self.nop_count = 0
        self.has_auth = has_auth
        self._context = context
        self._codec_name = codec
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls: ssl.SSLObject | None = None
        self._is_secured = False
        self._codec: Any = None
        self._buffer = b""
        self._sent = b""

    def receive(self, data: bytes) -> bytes:
        """What nsqd answers."""
        if self._tls is not None:
            self._in.write(data)
            data = self._through_tls(self._tls)
        if self._codec is not None and data:
            data = self._codec.decompress(data)
        self._buffer += data
        while self._command():
            pass
        sent, self._sent = self._sent, b""
        return sent

    def _through_tls(self, tls: ssl.SSLObject) -> bytes:
        data = b""
        try:
            if not self._is_secured:
                tls.do_handshake()
                self._is_secured = True
                self._send(self.disturbance + OK_FRAME + (b"" if self._codec_name or self.has_auth else self.behind))
                self._compress()
            while piece := tls.read(65536):
                data += piece
        except ssl.SSLWantReadError:
            pass
        self._sent += self._out.read()
        return data

    def _send(self, data: bytes) -> None:
        if self._codec is not None:
            data = self._codec.compress(data)
        if self._tls is not None:
            self._tls.write(data)
            data = self._out.read()
        self._sent += data

    def _compress(self) -> None:
        if self._codec_name is not None:
            self._codec = CODECS[self._codec_name]()
            self._send(self.disturbance + OK_FRAME + (b"" if self.has_auth else self.behind))

    def _command(self) -> bool:
        name, newline, rest = self._buffer.partition(b"\n")
        if name == b"NOP" and newline:
            self._buffer = rest
            self.nop_count += 1
            return True
        size = int.from_bytes(rest[:4], "big")
        if not newline or len(rest) < 4 + size:
            return False
        body, self._buffer = rest[4 : 4 + size], rest[4 + size :]
        self.log.append(name)
        if name == b"  V2IDENTIFY":
            request = json.loads(body)
            features = {
                "max_rdy_count": 77,
                "tls_v1": request["tls_v1"] and self._context is not None,
                "snappy": request["snappy"] and self._codec_name == "snappy",
                "deflate": request["deflate"] and self._codec_name == "deflate",
                "deflate_level": 3,
                "auth_required": self.has_auth,
            }
            is_over = self._context is None and self._codec_name is None and not self.has_auth
            self._send(response_frame(json.dumps(features).encode()) + (self.behind if is_over else b""))
            if self._context is not None:
                self._tls = self._context.wrap_bio(self._in, self._out, server_side=True)
            else:
                self._compress()
        else:
            assert (name, body) == (b"AUTH", SECRET)
            self._send(self.disturbance + IDENTITY + self.behind)
        return True


Cut = Callable[[bytes], Iterator[bytes]]


def whole(data: bytes) -> Iterator[bytes]:
    yield data


def bytewise(data: bytes) -> Iterator[bytes]:
    for number in data:
        yield bytes([number])


def at_random(data: bytes) -> Iterator[bytes]:
    chance = random.Random(len(data))
    while data:
        size = chance.choice((1, 2, 7, 30, 200, 5000))
        yield data[:size]
        data = data[size:]


class Shell:
    """A blocking client's way through the handshake, with a :class:`Script` for the socket."""

    def __init__(self, script: Script, cut: Cut = whole) -> None:
        self._script = script
        self._cut = cut
        self._arriving: list[bytes] = []
        self._tls: TlsEngine | None = None
        self._codec: Codec | None = None
        self.steps: list[Next] = []

    def run(self, handshake: Handshake, secret: bytes = SECRET) -> bytes:
        """Go on until the connection is ready; return what was received behind it."""
        step = handshake.start()
        while True:
            self.steps.append(step.next)
            if step.send:
                self._write(step.send)
            if step.next is Next.READ:
                step = handshake.receive(self.read())
            elif step.next is Next.TLS:
                self._secure(step)
                step = handshake.secured()
            elif step.next is Next.CODEC:
                assert step.codec is not None
                self._codec = step.codec
                self._codec.receive(step.received)
                step = handshake.compressed()
            elif step.next is Next.SECRET:
                step = handshake.authorise(secret)
            else:
                return step.received

    def _secure(self, step: Step) -> None:
        assert step.tls is not None
        step.tls.receive(step.received)
        while not step.tls.handshake():
            self._to_script(step.tls.take_output())
            step.tls.receive(self._arriving.pop(0))
        self._to_script(step.tls.take_output())
        self._tls = step.tls

    def _to_script(self, data: bytes) -> None:
        if data:
            self._arriving += [piece for piece in self._cut(self._script.receive(data)) if piece]

    def _write(self, data: bytes) -> None:
        if self._codec is not None:
            data = self._codec.write(data)
        if self._tls is not None:
            self._tls.write(data)
            data = self._tls.take_output()
        self._to_script(data)

    def read(self) -> bytes:
        """Something that was received, through the layers; blocks until there is."""
        while True:
            for layer, below in ((self._codec, self._tls), (self._tls, None)):
                if layer is not None and (data := layer.read()):
                    if below is not None or layer is self._codec or self._codec is None:
                        return data
                    self._codec.receive(data)
                    break
            else:
                data = self._arriving.pop(0)
                lowest = self._tls or self._codec
                if lowest is None:
                    return data
                lowest.receive(data)

    def read_all(self) -> bytes:
        """Everything that is still to be read."""
        data = b""
        try:
            while True:
                data += self.read()
        except IndexError:
            return data


def handshake_of(certificates: Certificates | None = None, codec: str | None = None, **about: Any) -> Handshake:
    tls = None
    options = ConnectionOptions(compression=codec, deflate_level=9)
    if certificates is not None:
        options = ConnectionOptions(compression=codec, tls=True, tls_ca_file=certificates.ca)
        tls = ClientTls(ADDRESS, options.tls_context(), "localhost", shows_certificate=False)
    return Handshake(ADDRESS, ClientConnection(), options.identify_request("host.example", "1"), tls, **about)


def server_context(certificates: Certificates) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.server.cert, certificates.server.key)
    return context


# --- every combination ---


@pytest.mark.parametrize("cut", [whole, bytewise, at_random])
@pytest.mark.parametrize("disturbance", [b"", HEARTBEAT_FRAME], ids=["quiet", "heartbeats"])
@pytest.mark.parametrize(
    ("has_tls", "codec", "has_auth"), [*product((False, True), (None, "deflate", "snappy"), (False, True))], ids=str
)
def test_every_order_and_every_cut(
    certificates: Certificates, has_tls: bool, codec: str | None, has_auth: bool, disturbance: bytes, cut: Cut
):
    script = Script(server_context(certificates) if has_tls else None, codec, has_auth)
    script.behind = HEARTBEAT_FRAME * 3
    script.disturbance = disturbance
    handshake = handshake_of(certificates if has_tls else None, codec, has_secret=True)
    shell = Shell(script, cut)
    received = shell.run(handshake)
    assert received + shell.read_all() == script.behind, "not a byte is lost, none is read by the wrong layer"
    assert handshake.layers == (*(["tls"] if has_tls else []), *([codec] if codec else []))
    assert handshake.features.max_rdy_count == 77
    assert bool(script.nop_count) is bool(disturbance and (has_tls or codec or has_auth))
    assert script.log == [b"  V2IDENTIFY", *([b"AUTH"] if has_auth else [])]
    assert handshake.identity == ("me" if has_auth else "")
    wanted = [*([Next.TLS] if has_tls else []), *([Next.CODEC] if codec else []), *([Next.SECRET] if has_auth else [])]
    assert [step for step in shell.steps if step is not Next.READ] == [*wanted, Next.READY]


def test_compression_that_is_not_granted(caplog: pytest.LogCaptureFixture):
    handshake = handshake_of(codec="snappy")
    with caplog.at_level(logging.WARNING, "flintmq.client"):
        Shell(Script(None, None, has_auth=False)).run(handshake)
    assert handshake.layers == ()
    assert "nsqd.example:4150 offers no snappy: it goes on without compression" in caplog.text


def test_tls_that_is_not_granted(certificates: Certificates):
    with pytest.raises(TlsRefused, match=r"and --tls-key, or connect without \(tls=False\)"):
        Shell(Script(None, "snappy", has_auth=True)).run(handshake_of(certificates, "snappy", has_secret=True))


def test_an_nsqd_that_does_not_negotiate(certificates: Certificates):
    with pytest.raises(TlsRefused):
        fed(handshake_of(certificates), response_frame(b"OK"))
    assert fed(handshake_of(), response_frame(b"OK")).next is Next.READY


# --- what ends it ---


def fed(handshake: Handshake, data: bytes) -> Step:
    handshake.start()
    return handshake.receive(data)


def features_frame(**features: object) -> bytes:
    return response_frame(json.dumps(features).encode())


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "not an nsqd"),
        (b"\xff\xff\xff\xff\x00\x00\x00\x00", "frame of 4294967295 bytes, at most"),
        ((ANSWER_BYTES_MAX + 5).to_bytes(4, "big") + bytes(4), "an answer of 65537 bytes, at most 65536"),
        (b"\x00\x00\x00\x00\x00\x00\x00\x00", "size 0"),
        (response_frame(b"[1]"), "answer to IDENTIFY cannot be read"),
        (response_frame(b"CLOSE_WAIT"), "answer to IDENTIFY cannot be read"),
        (b"\x00\x00\x00\x1f\x00\x00\x00\x02" + bytes(27), "Messages before anything was subscribed"),
    ],
)
def test_what_no_nsqd_sends(data: bytes, expected: str):
    with pytest.raises(RemoteProtocolError, match=expected):
        fed(handshake_of(), data)


def test_an_answer_that_is_not_ok_inside_a_layer(certificates: Certificates):
    handshake = handshake_of(certificates)
    assert fed(handshake, features_frame(tls_v1=True)).next is Next.TLS
    handshake.secured()
    with pytest.raises(RemoteProtocolError, match="instead of OK inside TLS"):
        handshake.receive(response_frame(b"KO"))


def test_what_nsqd_refuses():
    with pytest.raises(NsqdError, match="msg timeout") as caught:
        fed(handshake_of(), error_frame("E_BAD_BODY", "IDENTIFY msg timeout (5) is invalid"))
    assert not caught.value.retryable


@pytest.mark.parametrize(
    ("answer", "can_renew", "expected"),
    [
        (error_frame("E_AUTH_FAILED", "AUTH failed"), False, "auth server refuses auth_secret, or does not answer"),
        (error_frame("E_AUTH_FAILED", "AUTH failed"), True, "auth server refuses auth_secret, or does not answer"),
        (
            error_frame("E_UNAUTHORIZED", "AUTH no authorizations found"),
            False,
            "knows auth_secret and allows it nothing",
        ),
        (
            error_frame("E_UNAUTHORIZED", "AUTH no authorizations found"),
            True,
            "knows auth_secret and allows it nothing",
        ),
    ],
)
def test_a_secret_that_is_refused(answer: bytes, can_renew: bool, expected: str):
    handshake = handshake_of(has_secret=True, can_renew_secret=can_renew)
    assert fed(handshake, features_frame(auth_required=True)).next is Next.SECRET
    step = handshake.authorise(SECRET)
    assert SECRET in step.send
    assert SECRET.decode() not in repr(step)
    with pytest.raises(NsqdError, match=expected) as caught:
        handshake.receive(answer)
    assert caught.value.retryable is can_renew, "the next connection may have a better secret"


def test_a_secret_is_wanted_and_there_is_none():
    with pytest.raises(NsqdError, match="set auth_secret") as caught:
        fed(handshake_of(), features_frame(auth_required=True))
    assert not caught.value.retryable


def test_a_secret_that_nobody_wants_is_not_sent():
    assert fed(handshake_of(has_secret=True), features_frame()).next is Next.READY


def test_an_answer_to_auth_that_is_none():
    handshake = handshake_of(has_secret=True)
    fed(handshake, features_frame(auth_required=True))
    handshake.authorise(SECRET)
    with pytest.raises(RemoteProtocolError, match="answer to AUTH cannot be read"):
        handshake.receive(OK_FRAME)


def test_what_it_waits_for_is_said(certificates: Certificates):
    handshake = handshake_of(certificates, has_secret=True)
    handshake.start()
    assert "closed by nsqd while waiting for the answer to IDENTIFY" in str(handshake.ended(None))
    for error in (ConnectionResetError(104, "Connection reset by peer"), BrokenPipeError(32, "Broken pipe")):
        assert str(handshake.ended(error)) == str(handshake.ended(None)), "one failure, told once"
    handshake.receive(features_frame(tls_v1=True, auth_required=True))
    assert handshake.waits_for == "the TLS handshake"
    assert isinstance(handshake.ended(TlsFailed("certificate verify failed: certificate has expired")), TlsRefused)
    interrupted = handshake.ended(TlsInterrupted("the peer closed the connection"))
    assert isinstance(interrupted, ConnectionFailed)
    assert not isinstance(interrupted, TlsRefused), "a restart is no refusal"
    handshake.secured()
    assert handshake.waits_for == "the OK inside TLS"
    assert handshake.receive(OK_FRAME).next is Next.SECRET
    assert handshake.waits_for == "auth_secret()"
    handshake.authorise(SECRET)
    assert "reset by peer while waiting for the answer to AUTH" in str(handshake.ended(OSError("reset by peer")))


# --- what a failure means ---


@pytest.mark.parametrize(
    ("reason", "shows", "expected"),
    [
        ("certificate verify failed: Hostname mismatch, certificate is not valid for 'n'.", False, "not for 'n'"),
        ("certificate verify failed: IP address mismatch, certificate is not valid for '::1'.", False, "not for 'n'"),
        ("certificate verify failed: certificate has expired", False, "has expired: renew it"),
        ("certificate verify failed: certificate is not yet valid", False, "clocks"),
        ("certificate verify failed: self-signed certificate in certificate chain", False, "set tls_ca_file"),
        ("certificate verify failed: unable to get local issuer certificate", False, "set tls_ca_file"),
        ("tlsv13 alert certificate required", False, "set tls_cert and tls_key"),
        ("tlsv1 alert unknown ca", True, "tls_cert must be from an authority that the server trusts"),
        ("tlsv1 alert unknown ca", None, "load it into the SSLContext"),
        ("sslv3 alert certificate expired", True, "this client's certificate has expired.* renew tls_cert.* clock"),
        ("ssl/tls alert certificate expired", None, "renew the one in the SSLContext"),
        ("sslv3 alert certificate revoked", True, "this client's certificate is revoked.* another one for tls_cert"),
        ("sslv3 alert handshake failure", False, "see tls_cert"),
        ("tlsv1 alert protocol version", True, "tls_min_version"),
        ("wrong version number", False, "does not speak TLS"),
        ("something new", True, "^TLS: something new$"),
    ],
)
def test_every_failure_says_what_to_do(reason: str, shows: bool | None, expected: str):
    text = explain(reason, "n", shows)
    assert re.search(expected, text), text
    assert reason in text


@pytest.mark.parametrize(
    ("error", "at_first", "later"),
    [
        (TlsRefused(ADDRESS, "certificate"), True, False),
        (ConnectionFailed(ADDRESS, "refused"), False, False),
        (refusal("E_AUTH_FAILED", "AUTH failed", ADDRESS), True, False),
        (refusal("E_AUTH_FAILED", "AUTH failed", ADDRESS, can_renew_secret=True), False, False),
        (refusal("E_AUTH_FAILED", "AUTH failed", ADDRESS, was_let_in=True), False, False),
        (refusal("E_UNAUTHORIZED", 'AUTH failed for PUB on "t" ""', ADDRESS, was_let_in=True), True, True),
        (refusal("E_AUTH_FIRST", "AUTH required before SUB", ADDRESS), True, True),
        (refusal("E_UNAUTHORIZED", 'AUTH failed for SUB on "t" "c"', ADDRESS, can_renew_secret=True), True, True),
        (refusal("E_INVALID", "cannot SUB in current state (TLS required)", ADDRESS), True, True),
        (refusal("E_INVALID", "invalid command MDPUB", ADDRESS), True, True),
        (refusal("E_INVALID", "invalid command SUB_ORDER", ADDRESS), False, False),
        (refusal("E_SUB_FAILED", "too many", ADDRESS), False, False),
        (RemoteProtocolError("E_INVALID", "x"), False, False),
    ],
)
def test_which_refusals_are_final(error: FlintError, at_first: bool, later: bool):
    assert is_final(error, was_accepted=False) is at_first
    assert is_final(error, was_accepted=True) is later


def test_no_name_to_verify(certificates: Certificates):
    context = ConnectionOptions(tls=True, tls_ca_file=certificates.ca).tls_context()
    with pytest.raises(TlsRefused, match="set tls_server_name"):
        ClientTls(ADDRESS, context, ".example", shows_certificate=False).new_engine()
