"""The asyncio shell of a handshake: it owns the transport until the connection can be used, then hands it over.

Rules of this file:

- A layer goes in inside the callback that read the answer before it, so no byte reaches the wrong layer.
- The connection's own protocol is put in place in the callback that read the last answer; a plain connection has the
  loop's transport then, with nothing in between.
- Layers, and the libraries they need, are imported by connections that have some.

Source: NSQ's TCP protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from flintmq.client.core.handshake import Handshake, Next, Step
from flintmq.errors import FlintError
from flintmq.net.tls_engine import StandardTls, TlsFailed

if TYPE_CHECKING:
    from flintmq.net.layers import LayeredTransport

Opened = Callable[[asyncio.Transport, bytes], None]


class Opening(asyncio.Protocol):
    """Carries a handshake out.

    Args:
        handshake: decides.
        opened: takes over the transport, with what was received behind the last answer.
        loop: the transport's.
        tls_timeout_s: for the handshake of TLS; the whole is bounded by who waits.
    """

    def __init__(
        self, handshake: Handshake, opened: Opened, loop: asyncio.AbstractEventLoop, tls_timeout_s: float
    ) -> None:
        self._handshake = handshake
        self._opened = opened
        self._loop = loop
        self._tls_timeout_s = tls_timeout_s
        self._transport: asyncio.Transport | None = None
        self._layers: LayeredTransport | None = None
        self._turn: asyncio.Future[bool] = loop.create_future()
        self._error: FlintError | None = None
        self._is_over = False

    async def wants_secret(self) -> bool:
        """Wait until the connection is open (False), or a secret is needed to go on (True).

        Raises:
            ConnectionFailed, NsqdError, RemoteProtocolError: it cannot be opened.
        """
        is_wanted = await self._turn
        if self._error is not None:
            raise self._error
        return is_wanted

    async def authorise(self, secret: bytes) -> None:
        """Go on with a secret, until the connection is open.

        Raises:
            ConnectionFailed, NsqdError, RemoteProtocolError: it cannot be opened.
        """
        self._turn = self._loop.create_future()
        if self._error is None:
            self._go(self._handshake.authorise(secret))
        if self._error is not None:
            raise self._error
        await self.wants_secret()

    def abort(self) -> None:
        """Give up."""
        self._is_over = True
        if self._transport is not None:
            self._transport.abort()

    # --- steps ---

    def _go(self, step: Step) -> None:
        """Do what a step says, and the steps that follow from it at once."""
        while True:
            assert self._transport is not None
            if step.send:
                self._transport.write(step.send)
            if step.next is Next.CODEC:
                assert step.codec is not None
                self._layered().start_codec(step.codec, step.received)
                step = self._handshake.compressed()
                continue
            if step.next is Next.TLS:
                assert step.tls is not None
                self._start_tls(step.tls, step.received)
            elif step.next is Next.SECRET:
                self._end_turn(is_secret_wanted=True)
            elif step.next is Next.READY:
                self._is_over = True
                self._opened(self._transport, step.received)
                self._end_turn(is_secret_wanted=False)
            return

    def _layered(self) -> LayeredTransport:
        """The transport that takes layers; put between the loop's and us with the first one."""
        if self._layers is None:
            from flintmq.net.layers import LayeredTransport  # brings the compression library

            assert self._transport is not None
            below = self._transport
            self._transport = self._layers = LayeredTransport(self, self._loop, peer_kind="nsqd")
            self._layers.take_over(below)
        return self._layers

    def _start_tls(self, engine: StandardTls, received: bytes) -> None:
        self._layered().start_tls(engine, received, self._secured, self._tls_timeout_s)

    def _secured(self, failure: TlsFailed | None) -> None:
        if self._is_over:
            return
        if failure is not None:
            self._fail(self._handshake.ended(failure))
        else:
            self._go(self._handshake.secured())

    def _end_turn(self, is_secret_wanted: bool) -> None:
        if not self._turn.done():
            self._turn.set_result(is_secret_wanted)

    def _fail(self, error: FlintError) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._error = error
        if self._transport is not None:
            self._transport.close()  # not abort: an alert to nsqd may be in its buffer
        self._end_turn(is_secret_wanted=False)

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._is_over:  # given up while it was being made
            self._transport.abort()
            return
        self._go(self._handshake.start())

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(self._handshake.ended(error))

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        try:
            step = self._handshake.receive(data)
        except FlintError as error:
            self._fail(error)
        else:
            self._go(step)
