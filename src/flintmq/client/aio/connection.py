"""One TCP connection to nsqd on an event loop: :class:`flintmq.client.core.link.Link` with a transport around it.

Rules of this file: what is sent in one loop turn is one write; nothing is decided here. All is called in the loop's
thread, but :meth:`Connection.finish` and :meth:`Connection.finish_all`, and what those call, which is
:meth:`Connection.flush_soon`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import cast

from flintmq.client.aio.handshake import Opening
from flintmq.client.core.handshake import Handshake
from flintmq.client.core.link import Answered, Link, LinkOwner
from flintmq.client.options import ConnectionOptions, seconds, split_address, why_unreachable
from flintmq.client.security import obtain_secret
from flintmq.env import Env
from flintmq.errors import ConnectionFailed, FlintError
from flintmq.net.address import connect

ConnectionOwner = LinkOwner["Connection"]

READ_BYTES = 96 * 1024  # what malloc takes from its heap; asyncio reads 256 KiB into memory it maps anew each time


class Connection(Link, asyncio.BufferedProtocol):
    """A connection after its handshake. Make it with :meth:`open`; it belongs to the loop it was made in.

    Attributes:
        lost: done when the connection is lost; its result says why.
    """

    def __init__(
        self, address: str, owner: ConnectionOwner, options: ConnectionOptions, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(address, owner, options, loop.time)
        self.lost: asyncio.Future[FlintError] = loop.create_future()
        self._loop = loop
        self._thread_id = threading.get_ident()
        self._transport: asyncio.Transport | None = None
        self._read = memoryview(bytearray(READ_BYTES))

    # --- life ---

    @classmethod
    async def open(
        cls,
        address: str,
        owner: ConnectionOwner,
        options: ConnectionOptions,
        env: Env,
        *,
        extended: bool = False,
        desired_tag: str = "",
        once: bool = False,
    ) -> Connection:
        """Connect, identify, put in TLS and compression, authorise.

        Args:
            extended: tell nsqd that headers are understood; only for topics that have them.
            desired_tag: with ``extended``: the messages to be given first.
            once: take only an nsqd that knows producer sequences.

        Raises:
            ConnectionFailed: nsqd cannot be reached, does not answer in time, or cannot be secured (TlsRefused).
            NsqdError: nsqd refuses what was asked for.
            RemoteProtocolError: it is not an nsqd.
        """
        loop = asyncio.get_running_loop()
        host, port = split_address(address)
        timeout_s = seconds(options.connect_timeout, "connect_timeout")
        connection = cls(address, owner, options, loop)
        handshake = connection.new_handshake(env, extended, desired_tag, once)
        opening = Opening(handshake, partial(connection._take_over, handshake), loop, timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await connect(lambda: opening, host, port, timeout_s)
                if await opening.wants_secret():
                    assert options.auth_secret is not None
                    await opening.authorise(await obtain_secret(options.auth_secret, address, env))
        except BaseException as error:
            failure = _not_opened(error, address, handshake.waits_for, timeout_s)
            opening.abort()
            if connection._transport is not None:  # open, and nobody will have it
                connection._lose(failure if isinstance(failure, FlintError) else ConnectionFailed(address, "given up"))
            if failure is error:
                raise
            raise failure from error
        return connection

    def _take_over(self, handshake: Handshake, transport: asyncio.Transport, received: bytes) -> None:
        """Take over from the handshake, in the callback that read its last answer."""
        self._begin(handshake)
        transport.set_protocol(self)
        self.connection_made(transport)
        if received:
            self.data_received(received)

    async def request(self, command: str, send: Callable[[Answered], None]) -> None:
        """Send a command and wait for its answer, at most for the connect timeout.

        Args:
            send: calls a command of this connection.

        Raises:
            NsqdError: nsqd refuses.
            ConnectionFailed: the connection was lost, or nsqd does not answer in time.
        """
        timeout_s = seconds(self._options.connect_timeout, "connect_timeout")
        try:
            async with asyncio.timeout(timeout_s):
                await self._answer_to(send)
        except TimeoutError as error:
            failure = ConnectionFailed(self.address, f"{command} was not answered within {timeout_s:g} s")
            self._lose(failure)
            raise failure from error

    async def end_subscription(self) -> None:
        """Ask for no more messages and wait until nsqd has executed everything that was sent.

        Raises:
            ConnectionFailed: the connection was lost.
            NsqdError: nsqd refuses.
        """
        await self._answer_to(self.cls)

    async def _answer_to(self, send: Callable[[Answered], None]) -> bytes:
        """Send a command and wait for its answer."""
        if self.is_lost:
            raise ConnectionFailed(self.address, "the connection is closed")
        future: asyncio.Future[bytes] = self._loop.create_future()
        send(partial(_resolve, future))
        self.flush()
        return await future

    def close(self) -> None:
        """Send what is gathered and close."""
        self.flush()
        if self._transport is not None:
            self._lose(ConnectionFailed(self.address, "closed by this client"), is_polite=True)

    async def leave(self) -> FlintError:
        """Send a NOP as the last command and wait until nsqd closes too; not over TLS, which has no half-close.

        Returns:
            Why the connection was lost: nsqd's own error when it refuses even a NOP.
        """
        if self._transport is not None and not self.is_lost:
            self.nop()
            self.flush()
            self._transport.write_eof()
        return await self.lost

    @property
    def ends(self) -> tuple[str, str]:
        """IP addresses of this end and of nsqd's; empty when there are none, or none any more."""
        return self._ip("sockname"), self._ip("peername")

    def _ip(self, name: str) -> str:
        found = None if self._transport is None else self._transport.get_extra_info(name)
        return str(found[0]) if isinstance(found, tuple) and found else ""

    # --- Link ---

    def flush_soon(self) -> None:
        """Write at the end of the turn; another thread wakes the loop for it."""
        if self._is_flush_due:
            return
        self._is_flush_due = True  # first, as the loop may be quicker than this thread
        is_here = threading.get_ident() == self._thread_id
        try:
            (self._loop.call_soon if is_here else self._loop.call_soon_threadsafe)(self._flush_due)
        except RuntimeError as error:  # the loop is closed
            self._is_flush_due = False
            if not self.is_lost:  # else there is nobody to be told, as with every answer that comes too late
                what = "the event loop of this client has ended, and nothing can be sent any more: close() it first"
                raise RuntimeError(f"connection to {self.address}: {what}") from error

    def _flush_due(self) -> None:
        if self._is_flush_due:  # else it was written meanwhile
            self.flush()

    def flush(self) -> None:
        """Write what was gathered."""
        output = self.take_output()
        if output and self._transport is not None:
            self._transport.write(output)

    def _disconnect(self, is_polite: bool) -> None:
        if self._transport is not None and not self._transport.is_closing():
            if is_polite:
                self._transport.close()
            else:
                self._transport.abort()

    def _lose(self, error: FlintError, is_polite: bool = False) -> None:
        super()._lose(error, is_polite)
        if not self.lost.done():
            self.lost.set_result(error)

    # --- asyncio.BufferedProtocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._watch_silence(self._loop)

    def connection_lost(self, error: Exception | None) -> None:
        self._lose(ConnectionFailed(self.address, str(error) if error else "closed by nsqd"))

    def pause_writing(self) -> None:
        self.is_write_paused = True

    def resume_writing(self) -> None:
        self.is_write_paused = False

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._read

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(self._read[:nbytes].tobytes())

    def data_received(self, data: bytes) -> None:  # what comes through TLS or compression
        self.feed(data)
        if self._finished or self._out:
            self.flush()


def _resolve(future: asyncio.Future[bytes], outcome: bytes | FlintError) -> None:
    if future.done():  # whoever asked has gone
        return
    if isinstance(outcome, bytes):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)


def _not_opened(error: BaseException, address: str, waited_for: str, timeout_s: float) -> BaseException:
    """Return what to raise when a connection could not be opened."""
    if isinstance(error, TimeoutError):
        return ConnectionFailed(address, str(error) or f"no answer within {timeout_s:g} s: waiting for {waited_for}")
    return ConnectionFailed(address, why_unreachable(error)) if isinstance(error, OSError) else error
