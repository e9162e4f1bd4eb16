"""From a fresh TCP connection to one that can be used: what is sent and expected, in which order. Without IO.

::

    client                                                   nsqd
    "  V2" IDENTIFY                  ---->
                                     <----                   features            in clear
    [TLS handshake                   <--->]                  if asked for and granted
                                     <----                   [OK                 inside TLS]
    [compression, both directions]
                                     <----                   [OK                 compressed]
    [AUTH secret                     ---->                   if nsqd requires it]
                                     <----                   [identity]

Rules of this file:

- The shell owns the socket. It writes :attr:`Step.send`, does what :attr:`Step.next` says, and calls the method that
  the step names; each call returns the next step. A blocking shell is a loop over that, see :class:`Next`.
- Bytes are taken from the wire frame by frame, and never beyond the answer that ends a layer: what was read behind it
  is handed over with the new layer (:attr:`Step.received`), wherever the network cut it.
- Whoever asks for TLS gets TLS or an error. Compression that nsqd does not offer is done without, and said.
- Every answer is bounded in size here; in time by the shell.
- The compression library is imported by connections that compress.

Source: NSQ's TCP protocol.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from flintmq.client.security import OUTAGES, ClientTls, TlsRefused
from flintmq.errors import ConnectionFailed, FlintError, NsqdError, RemoteProtocolError
from flintmq.message import FRAME_HEADER, SIZE_FIELD_BYTES
from flintmq.net.tls_engine import StandardTls, TlsFailed
from flintmq.wire.client import (
    Broken,
    ClientConnection,
    Features,
    Heartbeat,
    Refused,
    Reply,
    parse_authorised,
    parse_features,
)
from flintmq.wire.codes import CODES
from flintmq.wire.commands import COMMANDS
from flintmq.wire.extended import SUB_ORDER, SUB_ORDERED
from flintmq.wire.identify import IdentifyRequest, OnceIdentifyRequest

if TYPE_CHECKING:
    from flintmq.wire.codec import Codec

log = logging.getLogger("flintmq.client")

ANSWER_BYTES_MAX = 64 * 1024

_UNKNOWN_COMMAND = "invalid command "

_MEANING = {
    "E_AUTH_FAILED": "nsqd's auth server refuses auth_secret, or does not answer",
    "E_AUTH_FIRST": "this nsqd wants a secret and the client has none: set auth_secret",
    "E_AUTH_DISABLED": "this nsqd has no auth server; start it with --auth-http-address, or set no auth_secret",
}


class Next(Enum):
    """Steps of the shell, and the method that it calls after each."""

    READ = "read from the topmost layer, then receive()"
    TLS = "put Step.tls in and do its handshake, then secured()"
    CODEC = "put Step.codec in, above TLS, then compressed()"
    SECRET = "get the secret, then authorise(); read on meanwhile or not"
    READY = "use the connection"


@dataclass(frozen=True, slots=True)
class Step:
    """The next step.

    Attributes:
        send: to be written first, through the layers that stand.
        received: with TLS, CODEC and READY: what was read already and belongs to what comes now.
    """

    next: Next
    send: bytes = field(default=b"", repr=False)  # the secret may be in it
    received: bytes = b""
    tls: StandardTls | None = None
    codec: Codec | None = None


def is_closing(error: BaseException) -> bool:
    """Whether a socket says that nsqd has closed it: it is reset when nsqd had not read all of it, which is chance."""
    return isinstance(error, ConnectionResetError | BrokenPipeError)


class Handshake:
    """The handshake of one connection.

    Args:
        address: of nsqd, for messages.
        wire: the connection's protocol core, fresh.
        request: what is asked for.
        tls: how to secure it; needed when ``request.tls_v1``.
        has_secret: there is a secret, should nsqd ask for one.
        can_renew_secret: the next connection may have another secret, so a refused one is not the last word.

    Attributes:
        features: what nsqd granted.
        layers: what stands, lowest first: ``tls``, ``snappy``, ``deflate``.
        identity: who the auth server says this client is.
        waits_for: what is to come from nsqd now, in words.
    """

    def __init__(
        self,
        address: str,
        wire: ClientConnection,
        request: IdentifyRequest,
        tls: ClientTls | None = None,
        *,
        has_secret: bool = False,
        can_renew_secret: bool = False,
    ) -> None:
        assert tls is not None or not request.tls_v1
        self.address = address
        self.features = Features()
        self.layers: tuple[str, ...] = ()
        self.identity = ""
        self.waits_for = "a connection"
        self._wire = wire
        self._request = request
        self._tls = tls
        self._has_secret = has_secret
        self._can_renew_secret = can_renew_secret
        self._held = b""
        self._frame_bytes = 0  # of the frame whose header the wire has seen, without that header
        self._out: list[bytes] = []
        self._owes_nop = False
        self._is_layered = False  # every layer stands

    # --- what the shell calls ---

    def start(self) -> Step:
        """Begin."""
        self._out += [self._wire.open(), self._wire.identify(self._request)]
        self.waits_for = "the answer to IDENTIFY"
        return self._step(Next.READ)

    def receive(self, data: bytes) -> Step:
        """Take what was read.

        Raises:
            NsqdError: nsqd refuses.
            TlsRefused: TLS was asked for and nsqd has none.
            RemoteProtocolError: it is not an nsqd.
        """
        self._held += data
        while (reply := self._next_reply()) is not None:
            if (step := self._answered(reply)) is not None:
                return step
        return self._step(Next.READ)

    def secured(self) -> Step:
        """TLS stands."""
        self.layers += ("tls",)
        self._wire.expect_layer("TLS")
        self.waits_for = "the OK inside TLS"
        return self._step(Next.READ)

    def compressed(self) -> Step:
        """The compression stands."""
        name = "snappy" if self._wants_snappy else "deflate"
        self.layers += (name,)
        self._wire.expect_layer(name)
        self.waits_for = f"the OK inside {name}"
        return self._step(Next.READ)

    def authorise(self, secret: bytes) -> Step:
        """Send the secret."""
        self._out.append(self._wire.auth(secret))
        self.waits_for = "the answer to AUTH"
        return self._step(Next.READ)

    def ended(self, error: Exception | None) -> FlintError:
        """The exception to raise when the connection ends before it is ready.

        Args:
            error: of a layer or of the socket, if there is one.
        """
        if isinstance(error, TlsFailed) and self._tls is not None:
            return self._tls.refused(error)
        reason = "closed by nsqd" if error is None or is_closing(error) else str(error)
        return ConnectionFailed(self.address, f"{reason} while waiting for {self.waits_for}")

    # --- answers ---

    def _step(self, what: Next, tls: StandardTls | None = None, codec: Codec | None = None) -> Step:
        if self._owes_nop and self._is_layered:  # nsqd may have put in the next layer already: not in the old one
            self._owes_nop = False
            self._out.append(self._wire.nop())
        send, self._out = b"".join(self._out), []
        if what is Next.READ or what is Next.SECRET:
            return Step(what, send)
        received, self._held = self._held, b""
        return Step(what, send, received, tls, codec)

    def _next_reply(self) -> Reply | None:
        """The next answer that is complete; what stands behind it stays held."""
        while (frame := self._take_piece()) is not None:
            for event in self._wire.receive(frame):
                if isinstance(event, Reply):
                    return event
                if isinstance(event, Heartbeat):
                    self._owes_nop = True
                elif isinstance(event, Broken):
                    raise event.error
                elif isinstance(event, Refused):
                    raise refusal(event.code, event.detail, self.address, self._can_renew_secret)
                else:
                    raise RemoteProtocolError("E_INVALID", f"{type(event).__name__} before anything was subscribed")
            if self._frame_bytes > ANSWER_BYTES_MAX:
                raise RemoteProtocolError(
                    "E_INVALID", f"an answer of {self._frame_bytes} bytes, at most {ANSWER_BYTES_MAX}: not an nsqd?"
                )
        return None

    def _take_piece(self) -> bytes | None:
        """A frame's header, so that the wire judges it before the rest is waited for; then that rest."""
        size = self._frame_bytes or FRAME_HEADER.size
        if len(self._held) < size:
            return None
        piece, self._held = self._held[:size], self._held[size:]
        if self._frame_bytes:
            self._frame_bytes = 0
        else:
            frame_size, _ = FRAME_HEADER.unpack(piece)
            self._frame_bytes = frame_size + SIZE_FIELD_BYTES - FRAME_HEADER.size
        return piece

    def _answered(self, reply: Reply) -> Step | None:
        """Return what follows an answer; None when that is to be read."""
        if reply.command == "IDENTIFY":
            return self._identified(reply.data)
        if reply.command == "AUTH":
            answer = parse_authorised(reply.data)
            self.identity = answer.identity
            log.debug("nsqd %s: authorised as %r, %d permissions", self.address, self.identity, answer.permission_count)
            return self._step(Next.READY)
        if reply.data != b"OK":
            raise RemoteProtocolError("E_INVALID", f"{reply.data[:32]!r} instead of OK inside {reply.command}")
        return self._compress() if reply.command == "TLS" else self._authorise()

    def _identified(self, data: bytes) -> Step | None:
        features = self.features = parse_features(data)
        if isinstance(self._request, OnceIdentifyRequest) and not features.producer_sequences:
            detail = "this nsqd knows no producer sequences, only FlintMQ's does: publish with idempotent=False"
            raise NsqdError("E_INVALID", detail, self.address, retryable=False)
        if self._request.tls_v1:
            if not features.tls_v1:
                raise TlsRefused(
                    self.address,
                    "this nsqd offers no TLS: start it with --tls-cert and --tls-key, or connect without (tls=False)",
                )
            assert self._tls is not None
            self.waits_for = "the TLS handshake"
            return self._step(Next.TLS, tls=self._tls.new_engine())
        return self._compress()

    @property
    def _wants_snappy(self) -> bool:
        return self._request.snappy and self.features.snappy

    def _compress(self) -> Step | None:
        request, features = self._request, self.features
        if not (request.snappy or request.deflate):
            return self._authorise()
        from flintmq.wire.codec import Deflate, Snappy

        if self._wants_snappy:
            return self._step(Next.CODEC, codec=Snappy())
        if request.deflate and features.deflate:
            return self._step(Next.CODEC, codec=Deflate(max(1, min(9, features.deflate_level))))
        name = "snappy" if request.snappy else "deflate"
        log.warning("nsqd %s offers no %s: it goes on without compression", self.address, name)
        return self._authorise()

    def _authorise(self) -> Step | None:
        self._is_layered = True
        if not self.features.auth_required:
            return self._step(Next.READY)
        if not self._has_secret:
            raise refusal("E_AUTH_FIRST", "AUTH required", self.address)
        self.waits_for = "auth_secret()"
        return self._step(Next.SECRET)


def refusal(
    code: str, detail: str, address: str, can_renew_secret: bool = False, was_let_in: bool = False
) -> NsqdError:
    """The exception for an error frame, with what to do where nsqd does not say it.

    Args:
        can_renew_secret: the next connection may have another secret.
        was_let_in: this connection's handshake was over: its secret was a good one, so an answer that an outage causes
            as well is rather that, and passes.
    """
    row = CODES.get(code)
    is_retryable = row is not None and row.action != "give_up"
    meaning = _MEANING.get(code, "")
    allows_nothing = code == "E_UNAUTHORIZED" and detail.startswith("AUTH no ")
    if "TLS required" in detail:
        meaning, is_retryable = "this nsqd wants TLS: connect with tls=True", False
    elif code == "E_INVALID" and detail.startswith(_UNKNOWN_COMMAND):
        meaning, is_hopeless = _who_knows(detail.removeprefix(_UNKNOWN_COMMAND))
        is_retryable &= not is_hopeless
    elif allows_nothing:
        meaning = "its auth server knows auth_secret and allows it nothing"
    if (code in OUTAGES and (was_let_in or can_renew_secret)) or (allows_nothing and can_renew_secret):
        is_retryable = True
    return NsqdError(code, f"{detail}: {meaning}" if meaning else detail, address, retryable=is_retryable)


def _who_knows(command: str) -> tuple[str, bool]:
    """Return which nsqd know a command that this one does not, and whether it is of no use to try again."""
    row = COMMANDS.get(command)
    if row is None or row.origin == "nsq":
        return "", False
    if row.origin == "flintmq":
        return "only FlintMQ's nsqd knows this command", True
    return "only FlintMQ's nsqd and Youzan's know this command", command not in (SUB_ORDER, SUB_ORDERED)
