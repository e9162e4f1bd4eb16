"""Connections between the nodes of a cluster: who leads dials who has copies.

One connection for each pair of nodes and direction, for all partitions. What goes over it is decided by the ends of
:mod:`flintmq.cluster.link`; here are sockets, the handshake, deadlines, and dialling again.

::

    LeaderLink   <- Outgoing --(TCP)-- Incoming -> FollowerLink
       ^ one for a node, for ever          ^ one for a connection

With TLS (:mod:`flintmq.nsqd.cluster.peer_tls`) the handshake of the nodes begins when that of TLS has ended.

Two nodes that have copies of the same partition are connected in one direction at least, also when neither leads
anything: that one of them is silent is known before it matters, and whoever begins to lead goes on from there.

Rules of this file: whoever breaks a rule, or is slow, loses its connection, and nobody else notices; nothing is written
to a peer that does not read beyond what a transport holds; a connection that never says who it is does not stay, nor
one over which nothing comes through; who is not let in is told why, and so are people, at both ends. What is led here
is sent to the process alone that the store has as the node: of a data directory that was copied two may run.

Source: docs/decisions/0017; reference: wire/peer.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from flintmq.addresses import format_address
from flintmq.cluster.leading import STALL_NS
from flintmq.cluster.link import FollowerLink, FollowerOwner, LeaderLink, Piece
from flintmq.cluster.state import LAG_NS_MAX, NodeRecord
from flintmq.env import Env
from flintmq.errors import FlintError
from flintmq.net.address import connect, format_peer
from flintmq.net.listen import Listener, listen
from flintmq.net.tasks import kept_up
from flintmq.net.tls import TlsSetupError
from flintmq.net.tls_engine import StandardTls, TlsFailed
from flintmq.nsqd.cluster.peer_tls import PeerTls
from flintmq.wire.peer import (
    HANDSHAKE_BYTES_MAX,
    NONCE_BYTES,
    Acceptor,
    Dialer,
    Farewell,
    Frame,
    Hello,
    Identity,
    PeerError,
    PeerReader,
    Purpose,
    encode_one,
    shorten,
)

log = logging.getLogger(__name__)

CONNECT_DEADLINE_S = 1.0
HANDSHAKE_DEADLINE_S = 2.0
AGAIN_S = 0.05, 0.5
"""The pause before a node is dialled again: at first, and at most; each is taken by chance from its upper half."""
INCOMING_MAX = 1024
"""Connections from other nodes; there are not so many nodes."""
TOLD_MAX = 256
"""Refusals that are remembered, so that each is told once and not at each attempt."""
OPENS_PER_TURN = 128
"""Copies that a leader has this node follow in one turn of the loop: who begins to lead thousands names all of them."""
UNACKNOWLEDGED_MS = LAG_NS_MAX // 1_000_000
"""So long a kernel sends the same again before it gives a connection up. When a cut ends, the next attempt of the same
connection comes as long after that as the cut took; a new connection is made at once."""
FORGET_NS = 10_000_000_000
"""Of silence, after which a connection that another node made is closed; it makes another one."""
_TLS_RECORDS = b"\x15\x03", b"\x16\x03"  # how an alert and a handshake of TLS begin
_BUFFER_BYTES = 1024 * 1024  # that a transport holds
_UNREAD_READS = 16  # of so many bytes: more than a kernel keeps for a connection
_SIZE_BYTES = 4
_UNWANTED = "whoever wanted it waits no longer"


class _Handshake:
    """The frames of a handshake, one by one; what follows them is left alone."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._reader = PeerReader()

    def receive(self, data: bytes) -> None:
        self._data += data

    def next_frame(self) -> Frame | None:
        """Return the next frame; None when more bytes are needed.

        Raises:
            PeerError: it is none of a handshake.
        """
        data = self._data
        if data.startswith(_TLS_RECORDS):
            raise PeerError("the peer speaks TLS, and this node does not: give it --cluster-tls-cert")
        if len(data) < _SIZE_BYTES:
            return None
        end = _SIZE_BYTES + int.from_bytes(data[:_SIZE_BYTES], "big")
        if end > HANDSHAKE_BYTES_MAX:
            raise PeerError(f"the peer sent a first frame of {end} bytes; it is not a node of FlintMQ")
        if len(data) < end:
            return None
        self._reader.receive(bytes(data[:end]))
        del data[:end]
        found = self._reader.next_frame()
        if found is None:
            raise PeerError("the peer sent a frame whose sizes contradict each other")
        return found[0]

    def rest(self) -> bytes:
        """Return what stands behind it."""
        data, self._data = bytes(self._data), bytearray()
        return data


class _Connection(asyncio.BaseProtocol):
    """One end of a connection.

    Attributes:
        peer: its address, for the log.
        closed: is done when it is gone.
        reason: why it is, as far as that is known.
        is_refused: whether this end ended it.

    Args:
        tls: its end of TLS; None: what goes over it is plain.
    """

    def __init__(self, env: Env, tls: StandardTls | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._env = env
        self._transport: asyncio.Transport | None = None
        self._handshake: _Handshake | None = _Handshake()
        self._tls = tls
        self._is_secured = tls is None
        self._is_lost = False
        self._is_paused = False
        self._is_scheduled = False
        self._deadline: asyncio.TimerHandle | None = None
        self.peer = "@"
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self.reason = ""
        self.is_refused = False

    @property
    def now_ns(self) -> int:
        return self._env.clock.monotonic_ns()

    # --- the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_BUFFER_BYTES)
        _bound_retries(transport.get_extra_info("socket"))
        self.peer = format_peer(transport.get_extra_info("peername"))
        self._deadline = self._loop.call_later(HANDSHAKE_DEADLINE_S, self._too_late)
        self.made()
        if self._tls is None:
            self.begin()
        else:
            self._secure(self._tls, b"")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        self.reason = self.reason or (str(exc) if exc is not None else "it was closed")
        self._transport = None
        self._end_deadline()
        if not self.closed.done():
            self.closed.set_result(None)
        self.lost()

    def data_received(self, data: bytes) -> None:
        if self._tls is None:
            self._received(data)
        else:
            self._secure(self._tls, data)

    def _secure(self, tls: StandardTls, data: bytes) -> None:
        """Take bytes of a connection with TLS."""
        try:
            tls.receive(data)
            if not self._is_secured:
                self._is_secured = tls.handshake()
                self._send(tls.take_output())
                if not self._is_secured:
                    return
                self.begin()
            while self._transport is not None and (plain := tls.read()):
                self._received(plain)
            self._send(tls.take_output())
        except TlsFailed as failure:
            self._send(tls.take_output())  # an alert
            self._is_secured = False  # nothing can be said any more
            self.fail(f"{failure}; both nodes need --cluster-tls-cert, of the same --cluster-tls-root-ca")
            return
        if tls.is_ended and self._transport is not None:
            self._transport.close()

    def _send(self, data: bytes) -> None:
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _received(self, data: bytes) -> None:
        try:
            handshake = self._handshake
            if handshake is None:
                self.received(data)
                return
            handshake.receive(data)
            while self._handshake is not None and (frame := handshake.next_frame()) is not None:
                self.greeted(frame)
            if self._handshake is None and self._transport is not None and (rest := handshake.rest()):
                self.received(rest)
        except PeerError as error:
            self.fail(str(error))
        except Exception as error:
            log.error("PEER(%s): ended unexpectedly: %r", self.peer, error, exc_info=error)
            self.fail(f"internal error {error!r}")

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self.schedule()

    def write(self, data: bytes) -> None:
        if self._tls is None:
            self._send(data)
        elif self._is_secured:
            self._encrypt(self._tls, (data,))

    def _encrypt(self, tls: StandardTls, pieces: Sequence[Piece]) -> None:
        try:
            for piece in pieces:
                tls.write(piece)
        except TlsFailed as failure:
            self.abort(str(failure))
        else:
            self._send(tls.take_output())

    def schedule(self) -> None:
        """Write what there is when the loop has called everything that is ready now."""
        if not self._is_scheduled and self._handshake is None:
            self._is_scheduled = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._is_scheduled = False
        try:
            while self._transport is not None and not self._is_paused:
                pieces = self.take_output()
                if not pieces:
                    return
                if self._tls is None:
                    self._transport.writelines(pieces)
                else:
                    self._encrypt(self._tls, pieces)
        except PeerError as error:
            self.fail(str(error))
        except Exception as error:
            log.error("PEER(%s): ended unexpectedly: %r", self.peer, error, exc_info=error)
            self.fail(f"internal error {error!r}")

    def fail(self, reason: str) -> None:
        """Say farewell and close."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self.is_refused = True
        self.reason = self.reason or reason
        try:
            self.write(encode_one(Farewell(shorten(reason))))
            transport.close()
        except RuntimeError as error:  # uvloop's: it has closed the socket, and tells nobody
            self.connection_lost(error)
            return
        self._loop.call_later(HANDSHAKE_DEADLINE_S, transport.abort)  # it need not read

    def hold_input(self, is_held: bool) -> None:
        """Read nothing more, or go on."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            (transport.pause_reading if is_held else transport.resume_reading)()

    def abort(self, reason: str) -> None:
        """Close at once."""
        if self._transport is not None:
            self.reason = self.reason or reason
            self._transport.abort()

    def give_up(self, reason: str) -> None:
        """Close what was not connected in time; it may have been, and greeted, in the very moment.

        uvloop then closes the socket of whoever waited for ``create_connection``, and tells this protocol nothing.
        """
        self.abort(reason)
        self.connection_lost(None)

    def _too_late(self) -> None:
        self.fail("the handshake took too long")

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def trusted(self) -> None:
        """The handshake is over."""
        self._handshake = None
        self._end_deadline()

    # --- what both ends do in their own way

    def made(self) -> None: ...

    def begin(self) -> None:
        """Nothing but plain bytes stands between the ends now."""

    def greeted(self, frame: Frame) -> None: ...

    def received(self, data: bytes) -> None: ...

    def take_output(self) -> Sequence[Piece]:
        return ()

    def lost(self) -> None: ...


class _Outgoing(_Connection, asyncio.Protocol):
    """The end that dialled: this node leads something."""

    def __init__(self, peers: Peers, link: LeaderLink, tls: StandardTls | None) -> None:
        super().__init__(peers.env, tls)
        self._peers = peers
        self._link = link
        self._is_connected = False
        self._dialer: Dialer

    def begin(self) -> None:
        peers = self._peers
        self._dialer = Dialer(peers.me(), peers.secret, peers.random_bytes(NONCE_BYTES), self._link.node)
        self.write(self._dialer.hello())

    def greeted(self, frame: Frame) -> None:
        identity, proof = self._dialer.welcomed(frame)
        self._peers.check_dialled(identity)
        self.write(proof)
        self.trusted()
        self._is_connected = True
        log.info("PEER(%s): connected to node %s", self.peer, identity.node)
        self._link.connected(identity, self.now_ns)
        self._link.tick(self.now_ns)
        self.schedule()

    def received(self, data: bytes) -> None:
        if self._is_connected:
            self._link.receive(data, self.now_ns)
            self.schedule()

    def take_output(self) -> Sequence[Piece]:
        return self._link.take_output(self.now_ns) if self._is_connected else ()

    def lost(self) -> None:
        if self._is_connected:
            self._link.disconnected(self.now_ns)
            self._tell_gone()

    def leave(self, reason: str) -> None:
        """Close at once: the link has nothing to do with this process any more."""
        self.abort(reason)
        if self._is_connected:
            self._tell_gone()

    def _tell_gone(self) -> None:
        self._is_connected = False
        log.info("PEER(%s): node %s is not connected any more: %s", self.peer, self._link.node, self.reason)


class _Incoming(_Connection):
    """The end that was dialled: this node has copies of what the other one leads."""

    def __init__(self, peers: Peers) -> None:
        super().__init__(peers.env, None if peers.tls is None else peers.tls.acceptor())
        self._peers = peers
        self._acceptor = Acceptor(peers.me(), peers.secret, peers.random_bytes(NONCE_BYTES))
        self._is_greeted = False
        self._session: asyncio.Protocol | None = None
        self.node = ""  # as it says, which may not be true
        self._is_behind = False  # what came opens more streams than fit into a turn
        self.link: FollowerLink | None = None
        self.heard_ns = self.now_ns

    def made(self) -> None:
        why = self._peers.admit(self)
        if why:
            self.fail(why)

    def greeted(self, frame: Frame) -> None:
        if not self._is_greeted:
            self._is_greeted = True
            if isinstance(frame, Hello):
                self.node = frame.identity.node
            answer = self._acceptor.greeted(frame)
            if isinstance(frame, Hello) and frame.purpose == Purpose.REPLICATION:
                self._peers.check_accepted(frame.identity)
            self.write(answer)
            return
        identity = self._acceptor.proved(frame)
        self.trusted()
        if self._acceptor.purpose != Purpose.REPLICATION:
            self._serve(self._acceptor.purpose)
            return
        self.link = FollowerLink(identity, self._peers.owner, self.schedule, self._peers.spare)
        self._peers.accepted(self, identity)

    def _serve(self, purpose: int) -> None:
        """Leave the connection to a session: the other node speaks for its clients."""
        assert self._transport is not None
        session = self._session = self._peers.new_session(purpose)
        self._peers.forget(self)
        if self._tls is None:
            self._transport.set_protocol(session)
            session.connection_made(self._transport)
        else:
            session.connection_made(cast(asyncio.Transport, _Encrypting(self, self._transport)))

    def received(self, data: bytes) -> None:
        if self._session is not None:  # it came with the proof, or was decrypted here
            self._session.data_received(data)
            return
        assert self.link is not None
        self.heard_ns = self.now_ns
        try:
            has_more = self.link.receive(data, 0 if self._is_behind else OPENS_PER_TURN)
        finally:
            self._peers.on_appended(self.link)
        if has_more and not self._is_behind:
            self._is_behind = True
            self.hold_input(True)
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """Open the next streams of what has come; read on when that is all."""
        self._is_behind = False
        if self._transport is not None:
            self._received(b"")
            if not self._is_behind:
                self.hold_input(False)

    def take_output(self) -> Sequence[Piece]:
        return () if self.link is None else self.link.take_output(self.now_ns)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._session is not None:
            self._session.connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._session is not None:
            self._session.pause_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._session is not None:
            self._session.resume_writing()

    def lost(self) -> None:
        if self.link is not None:
            self.link.closed()
        self._peers.forget(self)


class _SecuredIncoming(_Incoming, asyncio.Protocol):
    """With TLS, which has what comes first."""


class _PlainIncoming(_Incoming, asyncio.BufferedProtocol):
    """Without TLS: the kernel puts what comes where the frames are read."""

    def get_buffer(self, sizehint: int) -> memoryview:
        if self.link is None:
            self._greeting = memoryview(bytearray(HANDSHAKE_BYTES_MAX))
            return self._greeting
        return self.link.space()

    def buffer_updated(self, nbytes: int) -> None:
        if self.link is None:
            self.data_received(bytes(self._greeting[:nbytes]))
        else:
            self.link.filled(nbytes)
            self.data_received(b"")


class _Encrypting:
    """The transport that a session sees of a connection with TLS."""

    def __init__(self, connection: _Connection, transport: asyncio.Transport) -> None:
        self._connection = connection
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._connection.write(data)


class PassageFailed(FlintError):
    """No connection to a leader could be had: nothing was sent; the text says why not."""


class PassageOwner(Protocol):
    """Speaks for clients with a node that leads something."""

    def received(self, data: bytes) -> None:
        """Take what its session says."""
        ...

    def lost(self, reason: str) -> None:
        """The connection is gone; called once, when it had been opened."""
        ...


class Passage(_Connection, asyncio.Protocol):
    """The end that dialled for clients: behind the handshake it is a client of the other node.

    What the other node said before it went is taken first, also when a write finds out that it is gone: it may be the
    answer to what clients wait for, or that it ends.

    Attributes:
        opened: is done when the handshake is over.
    """

    def __init__(self, peers: Peers, node: str, owner: PassageOwner, purpose: Purpose, tls: StandardTls | None) -> None:
        super().__init__(peers.env, tls)
        self.opened: asyncio.Future[None] = self._loop.create_future()
        self._peers = peers
        self._node = node
        self._owner = owner
        self._purpose = purpose
        self._is_wanted = True
        self._dialer: Dialer
        self._unread: socket.socket | None = None  # the socket once more: a transport closes its own with all

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        with contextlib.suppress(OSError):  # no descriptor is left: what is unread at the end is lost
            self._unread = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
            self._unread.setblocking(False)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        unread, self._unread = self._unread, None
        if unread is not None:
            with unread, contextlib.suppress(OSError):  # nothing more came
                for _ in range(_UNREAD_READS if exc is not None else 0):
                    if not (data := unread.recv(_BUFFER_BYTES)):
                        break
                    self.data_received(data)
        super().connection_lost(exc)

    def begin(self) -> None:
        peers = self._peers
        nonce = peers.random_bytes(NONCE_BYTES)
        self._dialer = Dialer(peers.me(), peers.secret, nonce, self._node, self._purpose)
        self.write(self._dialer.hello())

    def greeted(self, frame: Frame) -> None:
        _, proof = self._dialer.welcomed(frame)
        if self.opened.cancelled():  # it was given up while this answer was on its way
            self.give_up(_UNWANTED)
            return
        self.write(proof)
        self.trusted()
        self.opened.set_result(None)

    def received(self, data: bytes) -> None:
        self._owner.received(data)

    def give_up(self, reason: str) -> None:
        self._is_wanted = False
        super().give_up(reason)

    def lost(self) -> None:
        if not self.opened.done():
            self.opened.set_exception(PassageFailed(self.reason))
            self.opened.exception()  # whoever waited for it may have given up
        elif self._is_wanted:
            self._owner.lost(self.reason)


@dataclass(slots=True)
class _Dialling:
    """A node that is dialled for as long as something is led here that it has copies of."""

    link: LeaderLink
    task: asyncio.Task[None] | None = None
    connection: _Outgoing | None = None


def _no_session(_purpose: int) -> asyncio.Protocol:
    raise PeerError("this node serves no clients of others yet")


class Peers:
    """All connections of this node to others.

    Args:
        me: this process; asked for each connection.
        secret: that all nodes share; empty: none.
        tls: of connections, both ways; None: they are plain.
        owner: of the copies here.
        find: the record of a node that lives; None: it does not, as far as is known.
        on_appended: is called with a link when something came that may have been appended to copies.
        on_refused: is called with the record of a node that nobody answers for: its process is dead.
        random_bytes: returns so many that were never used before.

    Attributes:
        new_session: makes what serves clients of another node, for a :class:`Purpose`.
        spare: memory that connections receive into, while none of them has it.
    """

    def __init__(
        self,
        env: Env,
        me: Callable[[], Identity],
        secret: bytes,
        owner: FollowerOwner,
        find: Callable[[str], NodeRecord | None],
        on_appended: Callable[[FollowerLink], None],
        on_refused: Callable[[NodeRecord], None],
        random_bytes: Callable[[int], bytes] = os.urandom,  # noqa: TID251 - the secret is proved by them
        tls: PeerTls | None = None,
    ) -> None:
        self.env = env
        self.me = me
        self.secret = secret
        self.tls = tls
        self.owner = owner
        self.on_appended = on_appended
        self.random_bytes = random_bytes
        self._find = find
        self._on_refused = on_refused
        self._dialled: dict[str, _Dialling] = {}
        self._incoming: dict[_Incoming, None] = {}
        self._by_node: dict[str, _Incoming] = {}
        self._known: Collection[str] = ()
        self._ticked_ns = env.clock.monotonic_ns()
        self._told: set[tuple[str, str, str]] = set()  # host, node and why it was refused, as the log says already
        self._listener: Listener | None = None
        self._why_over = ""
        self._wake = asyncio.Event()
        self.new_session: Callable[[int], asyncio.Protocol] = _no_session
        self.spare: list[bytearray] = []

    async def listen(self, address: str) -> tuple[str, int]:
        """Listen; return where.

        Raises:
            ListenFailed: it cannot be listened there.
        """
        incoming = _PlainIncoming if self.tls is None else _SecuredIncoming
        self._listener = await listen(lambda: incoming(self), address)
        assert self._listener.address is not None
        return self._listener.address

    async def close(self) -> None:
        """End all of them."""
        self.end("this node ends")

    def end(self, why: str) -> None:
        """End all of them, and have none from now on; nothing is acknowledged to a leader any more.

        Args:
            why: for the other ends.
        """
        self._why_over = self._why_over or why
        if self._listener is not None:
            self._listener.close()
        for node in list(self._dialled):
            self.leave(node)
        for incoming in list(self._incoming):
            if incoming.link is not None:
                incoming.link.closed()
            incoming.fail(self._why_over)

    # --- who is dialled

    def link(self, node: str) -> LeaderLink:
        """Return the link to a node; it is dialled from now on."""
        found = self._dialled.get(node)
        if found is None:
            incoming = self._by_node.get(node)
            heard_ns = None if incoming is None else incoming.heard_ns
            now_ns = self.env.clock.monotonic_ns()
            link = LeaderLink(node, now_ns, on_output=lambda: self._has_output(node), heard_ns=heard_ns)
            found = self._dialled[node] = _Dialling(link)
            if not self._why_over:
                work = kept_up(lambda: self._dial(node), f"dialling node {node}", pause_s=AGAIN_S[1])
                found.task = asyncio.get_running_loop().create_task(work)
        return found.link

    def leave(self, node: str) -> None:
        """Dial a node no more."""
        found = self._dialled.pop(node, None)
        if found is None:
            return
        if found.task is not None:
            found.task.cancel()
        if found.connection is not None:
            found.connection.fail(self._why_over or "nothing is led here that you have")

    def keep_in_touch(self, nodes: Collection[str]) -> None:
        """Be connected with these nodes, whoever leads.

        Args:
            nodes: that have copies of what this node has copies of, and live.
        """
        self._known = nodes

    def leave_idle(self) -> None:
        """Dial those no more for whom nothing is led here, unless nobody else would notice that they are silent."""
        for node in self._known:
            if node not in self._dialled and self._is_ours_to_dial(node):
                self.link(node)
        idle = [node for node, found in self._dialled.items() if not found.link.streams]
        for node in idle:
            if node not in self._known or not self._is_ours_to_dial(node):
                self.leave(node)

    def _is_ours_to_dial(self, node: str) -> bool:
        """Whether this node has to make the connection with another one if neither leads anything that the other has:
        that with the lower id, or whoever has one of the other's over which nothing comes.
        """
        incoming = self._by_node.get(node)
        return self.me().node < node if incoming is None else self._is_quiet(incoming)

    def _is_quiet(self, incoming: _Incoming) -> bool:
        return self.env.clock.monotonic_ns() - incoming.heard_ns >= LAG_NS_MAX

    def is_silent(self, node: str) -> bool:
        """Whether nothing was heard of a node for ``LAG_NS_MAX``, as far as there is a connection with it."""
        found, incoming = self._dialled.get(node), self._by_node.get(node)
        if found is not None:
            return found.link.is_silent
        return incoming is not None and self._is_quiet(incoming)

    def links(self) -> list[LeaderLink]:
        """Return all that are dialled."""
        return [found.link for found in self._dialled.values()]

    def is_registered(self, node: str) -> bool:
        """Whether the process that is dialled, and connected, is the one that the store has as the node."""
        found, record = self._dialled.get(node), self._find(node)
        return found is not None and record is not None and found.link.incarnation == record.incarnation

    def nodes_changed(self) -> None:
        """Look again for nodes that were not known, and leave processes in whose place others have registered."""
        self._wake.set()
        now_ns = self.env.clock.monotonic_ns()
        for node, found in self._dialled.items():
            record = self._find(node)
            if record is None or not found.link.registered(record.incarnation, now_ns):
                continue
            if found.connection is not None:
                found.connection.leave(f"another process, incarnation {record.incarnation}, has registered as the node")

    def check_dialled(self, identity: Identity) -> None:
        """See that the process that answered is the one that the store has as its node, as far as that is known here.

        One that has not registered yet, or of which this node has not heard yet, is dialled again as soon as it has.

        Raises:
            PeerError: it is not.
        """
        record = self._find(identity.node)
        if record is not None and record.incarnation != identity.incarnation:
            raise PeerError(
                f"incarnation {identity.incarnation} of the node answers there, and {record.incarnation} is "
                "registered; that is about to change, or the data directory was copied"
            )

    def tick(self, now_ns: int) -> None:
        """Have each link do what is due."""
        for found in self._dialled.values():
            found.link.tick(now_ns)
        stall_ns, self._ticked_ns = now_ns - self._ticked_ns, now_ns
        for incoming in list(self._by_node.values()):
            if stall_ns >= STALL_NS:  # this node stood still: that says nothing about the other one
                incoming.heard_ns += stall_ns
            elif now_ns - incoming.heard_ns >= FORGET_NS:
                incoming.abort(f"nothing was heard of the node for {FORGET_NS // 1_000_000_000} s")

    def _has_output(self, node: str) -> None:
        found = self._dialled.get(node)
        if found is not None and found.connection is not None:
            found.connection.schedule()

    async def _dial(self, node: str) -> None:
        pause_s = AGAIN_S[0]
        told = ""
        while True:
            record = self._find(node)
            if record is None:
                self._wake.clear()
                await self._wake.wait()
                pause_s = AGAIN_S[0]
                continue
            began_ns = self.env.clock.monotonic_ns()
            reason = await self._connected(node, record)
            found = self._dialled.get(node)
            if found is not None and self._find(node) is None:
                found.link.presume_dead()  # it left the cluster before its connection ended: nobody listens any more
            if self.env.clock.monotonic_ns() - began_ns > HANDSHAKE_DEADLINE_S * 1e9:
                pause_s, told = AGAIN_S[0], ""
            if reason != told:
                told = reason
                where = format_address(record.host, record.peer_port)
                log.warning("PEER(%s): node %s: %s; it is dialled again", where, node, reason)
            is_another = await self._until_replaced(record, self.env.random.uniform(pause_s / 2, pause_s))
            pause_s = AGAIN_S[0] if is_another else min(pause_s * 2, AGAIN_S[1])

    async def _until_replaced(self, record: NodeRecord, seconds: float) -> bool:
        """Wait, for so long at most, until another process is registered as a node; return whether one is."""
        try:
            async with asyncio.timeout(seconds):
                while (now := self._find(record.node)) is None or now.incarnation == record.incarnation:
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            return False
        return True

    async def open_passage(
        self, record: NodeRecord, owner: PassageOwner, purpose: Purpose = Purpose.CLIENTS
    ) -> Passage:
        """Connect to a node for clients of this one.

        Raises:
            PassageFailed: it cannot be had.
        """
        if self._why_over:
            raise PassageFailed(self._why_over)
        try:
            tls = None if self.tls is None else self.tls.dialer(record.host)
        except TlsSetupError as error:
            raise PassageFailed(str(error)) from None
        passage = Passage(self, record.node, owner, purpose, tls)
        try:
            async with asyncio.timeout(CONNECT_DEADLINE_S + HANDSHAKE_DEADLINE_S):
                await connect(lambda: passage, record.host, record.peer_port, CONNECT_DEADLINE_S)
                await passage.opened
        except TimeoutError:
            passage.give_up("it took too long")
            raise PassageFailed("it does not answer") from None
        except OSError as error:
            raise PassageFailed(error.strerror or str(error)) from None
        except BaseException:
            passage.give_up(_UNWANTED)
            raise
        return passage

    async def _connected(self, node: str, record: NodeRecord) -> str:
        """Dial a node and stay until the connection is gone; return why."""
        found = self._dialled[node]
        tls = None if self.tls is None else self.tls.dialer(record.host)
        connection = _Outgoing(self, found.link, tls)
        try:
            async with asyncio.timeout(CONNECT_DEADLINE_S):
                await connect(lambda: connection, record.host, record.peer_port, CONNECT_DEADLINE_S)
        except TimeoutError:
            connection.give_up("it took too long")
            return "it does not answer"
        except OSError as error:
            if error.errno == errno.ECONNREFUSED:
                self._on_refused(record)
            return error.strerror or str(error)
        except BaseException:
            connection.give_up(_UNWANTED)
            raise
        found.connection = connection
        try:
            await connection.closed
        finally:
            found.connection = None
            connection.abort(_UNWANTED)
        return connection.reason

    # --- who dialled

    def admit(self, incoming: _Incoming) -> str:
        """Count a connection in; return why it is not let in, empty: it is."""
        if self._why_over:
            return self._why_over
        if len(self._incoming) >= INCOMING_MAX:
            return "too many connections"
        self._incoming[incoming] = None
        return ""

    def check_accepted(self, identity: Identity) -> None:
        """See that who has dialled does not take the place of another living process of its node, unless it is the one
        that is registered: else two of them would take it from each other for ever.

        Raises:
            PeerError: it does.
        """
        earlier, record = self._by_node.get(identity.node), self._find(identity.node)
        if earlier is None or earlier.link is None or earlier.link.peer.incarnation == identity.incarnation:
            return
        is_registered = record is not None and record.incarnation == identity.incarnation
        if not is_registered and not self._is_quiet(earlier):
            raise PeerError(
                f"another process of node {identity.node} is connected, and incarnation {identity.incarnation} is not "
                "registered; it is about to, or its data directory was copied"
            )

    def accepted(self, incoming: _Incoming, identity: Identity) -> None:
        """Take note of who is at the other end; an earlier connection of that node is over."""
        earlier = self._by_node.get(identity.node)
        self._by_node[identity.node] = incoming
        host = _host_of(incoming.peer)
        self._told = {each for each in self._told if each[0] != host or each[1] not in ("", identity.node)}
        log.info("PEER(%s): node %s is connected", incoming.peer, identity.node)
        if earlier is not None:
            earlier.abort("the node has connected again")

    def forget(self, incoming: _Incoming) -> None:
        """A connection is gone."""
        self._incoming.pop(incoming, None)
        if incoming.link is None:
            self._tell_refused(incoming)
        else:
            node = incoming.link.peer.node
            log.info("PEER(%s): node %s is not connected any more: %s", incoming.peer, node, incoming.reason)
            if self._by_node.get(node) is incoming:
                del self._by_node[node]

    def _tell_refused(self, incoming: _Incoming) -> None:
        """Log why somebody was not let in: each reason once for a node, or a host that does not say which it is, until
        that is let in. Several nodes on one host have reasons of their own, which come in turn.
        """
        told = _host_of(incoming.peer), incoming.node, incoming.reason
        if told in self._told or not incoming.is_refused:
            return
        if len(self._told) >= TOLD_MAX:
            self._told.clear()
        self._told.add(told)
        log.warning("PEER(%s): refused: %s", incoming.peer, incoming.reason)


def _bound_retries(connection: socket.socket | None) -> None:
    """Have a kernel that can do so give a connection up when the other end does not acknowledge what it is sent."""
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None and connection is not None:
        with contextlib.suppress(OSError):  # it is closed already
            connection.setsockopt(socket.IPPROTO_TCP, option, UNACKNOWLEDGED_MS)


def _host_of(peer: str) -> str:
    return peer.rpartition(":")[0] or peer
