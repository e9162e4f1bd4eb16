"""nsqlookupd's side of one nsqd connection: commands become calls of the registration database, answers go back.

Rules of this file: a session owns its node; the node and its registrations go when the connection goes, for whatever
reason. All answers of one turn are one write. Bounds: 5 s for the magic, 30 s for the first command, a silent
connection is cut, a peer that does not read is not read from, and one that sends much has its turns like everybody else
(net/turns.py). Two connections of one address are of two nsqd only when the older one goes on to ping: an nsqd that
comes back, or says anew who it is, is silent on the one before. Source: NSQ's nsqlookupd.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

import msgspec

from flintmq.addresses import format_address
from flintmq.clock import Clock
from flintmq.cluster.registration import NsqdNode, RegistrationDatabase, TooManyRegistrations
from flintmq.errors import RemoteProtocolError
from flintmq.limits import FIRST_COMMAND_DEADLINE_S, MAGIC_DEADLINE_S
from flintmq.net.address import format_peer
from flintmq.net.descriptors import descriptor_limit, is_scarce
from flintmq.net.isolation import for_each
from flintmq.net.linger import close_lingering
from flintmq.net.problems import Problems
from flintmq.net.turns import SLICE_NS, Turns
from flintmq.wire.lookup import (
    OK_RESPONSE,
    Describe,
    Event,
    Identify,
    LookupdInfo,
    LookupServerConnection,
    PeerInfo,
    Register,
    Unregister,
    encode_error,
    encode_lookupd_info,
)

CONNECTIONS_MAX = 10_000
IDLE_DEADLINE_MIN_S = 60.0  # four of nsqd's pings, however short the inactive timeout is
OUT_BUFFER_HIGH_BYTES = 64 * 1024
ADDRESS_MAX = 300  # of it a log shows so much
LINES_MAX = 20
LINES_S = 1.0
"""So many changes of a connection's registrations have a line of the log each in so many seconds."""

DOUBLE_NS = 10_000_000_000
"""Pings of an older connection that are so far apart were not sent before the younger one began and only came late."""

_log = logging.getLogger(__name__)


class Sessions:
    """The sessions of one nsqlookupd, and what they share.

    Args:
        info: gives the answer to IDENTIFY.
        idle_deadline_s: a connection without a complete command for so long is cut.
    """

    def __init__(
        self,
        database: RegistrationDatabase,
        clock: Clock,
        info: Callable[[], LookupdInfo],
        idle_deadline_s: float,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        self.database = database
        self.clock = clock
        self.info = info
        self.idle_deadline_s = max(idle_deadline_s, IDLE_DEADLINE_MIN_S)
        self.connections_max = connections_max
        self.on_change: Callable[[str], None] = lambda _topic: None  # told of a topic that was registered for
        self.on_left: Callable[[str], None] = lambda _topic: None  # told of a topic that a node has no longer
        self.on_identified: Callable[[NsqdNode], None] = lambda _node: None
        self.on_gone: Callable[[NsqdNode], None] = lambda _node: None
        self.cluster_id: Callable[[], str] = lambda: ""  # of which a node must be that is of any
        self.turns = Turns(asyncio.get_running_loop(), clock.monotonic_ns)
        self._open: dict[LookupSession, None] = {}
        self._problems = Problems(clock)
        self._node_ids: dict[str, None] = {}
        self._by_address: dict[str, dict[str, None]] = {}  # node ids, the youngest last
        self._collision_count = 0

    def __len__(self) -> int:
        return len(self._open)

    def new(self, loop: asyncio.AbstractEventLoop) -> LookupSession:
        """Return the protocol for a connection just accepted."""
        return LookupSession(self, loop)

    def add(self, session: LookupSession) -> bool:
        """Note an open session; False when there are too many."""
        if len(self._open) >= self.connections_max:
            return False
        self._open[session] = None
        return True

    def refused(self, peer: str, are_files_few: bool) -> None:
        """Say that a connection is refused, and why."""
        why = f"{self.connections_max} connections are the limit"
        if are_files_few:
            why = f"too few of {descriptor_limit()} files are left (see ulimit -n)"
        self._problems.tell(f"client refused: {why}", logging.WARNING, peer)

    def identified(self, node: NsqdNode) -> None:
        """Note at which address a new node is to be found."""
        self._by_address.setdefault(_address_of(node), {})[node.node_id] = None
        self.on_identified(node)

    def younger(self, node: NsqdNode) -> str:
        """Return the id of the youngest node of the same address; empty: it is this one."""
        youngest = next(reversed(self._by_address[_address_of(node)]))
        return "" if youngest == node.node_id else youngest

    def tell_double(self, node: NsqdNode, other: str) -> None:
        """Say that two connections of one address live."""
        line = (
            f"two connections that both live say that they are nsqd {_address_of(node)[:ADDRESS_MAX]}: two nsqd with "
            "one --broadcast-address and port, of which clients reach one, or one that names this nsqlookupd twice"
        )
        self._problems.tell(line, logging.WARNING, f"{node.node_id} and {other}")

    def discard(self, session: LookupSession, node: NsqdNode | None) -> None:
        """Forget a closed session and drop its node.

        Args:
            node: None when the peer never identified itself.
        """
        self._open.pop(session, None)
        if node is not None:
            removed = self.database.remove_node(node.node_id)
            self._node_ids.pop(node.node_id, None)
            others = self._by_address.get(_address_of(node), {})
            others.pop(node.node_id, None)
            if not others:
                self._by_address.pop(_address_of(node), None)
            _log.info("CLIENT(%s): closing, %d registrations removed", node.node_id, len(removed))
            for topic in dict.fromkeys(topic for topic, _ in removed):
                self.on_left(topic)
            self.on_gone(node)

    def new_node_id(self, remote_address: str) -> str:
        """Return the node's id: its remote address, as upstream.

        An address can come back before the loss of its last connection was noticed, and unix sockets have none.
        """
        node_id = remote_address
        while node_id in self._node_ids:
            self._collision_count += 1
            node_id = f"{remote_address}#{self._collision_count}"
        self._node_ids[node_id] = None
        return node_id

    def close_all(self) -> None:
        """Close every connection."""
        for_each(self._open, LookupSession.close, "closing")

    def describe(self) -> str:
        """Return one line per session, for failing tests."""
        return "\n".join([f"Sessions open={len(self._open)}", *(f"  {session.describe()}" for session in self._open)])


class LookupSession(asyncio.Protocol):
    """One connection of an nsqd."""

    def __init__(self, sessions: Sessions, loop: asyncio.AbstractEventLoop) -> None:
        self._sessions = sessions
        self._loop = loop
        self._wire = LookupServerConnection()
        self._transport: asyncio.Transport | None = None
        self._remote_address = "@"
        self._node_id = ""
        self._node: NsqdNode | None = None
        self._active_at = loop.time()
        self._deadline: asyncio.TimerHandle | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._has_commanded = False
        self._is_closing = False
        self._is_waiting = False  # for its next turn; nothing is read meanwhile
        self._is_write_paused = False
        self._slice_left_ns = SLICE_NS
        self._lines_since = 0.0
        self._line_count = 0  # since then
        self._untold_count = 0  # changes that had no line
        self._double_since_ns: int | None = None  # it pings, and a younger connection has its address
        self._has_told_double = False

    # --- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._remote_address = format_peer(transport.get_extra_info("peername"))
        self._transport.set_write_buffer_limits(high=OUT_BUFFER_HIGH_BYTES)
        is_few = is_scarce(transport)
        if is_few or not self._sessions.add(self):
            self._sessions.refused(self._remote_address, is_few)
            self._is_closing = True
            self._transport.abort()
            return
        _log.debug("CLIENT(%s): connected", self._remote_address)
        self._deadline = self._loop.call_later(MAGIC_DEADLINE_S, self._check_deadline)

    def data_received(self, data: bytes) -> None:
        if self._is_closing:
            return
        self._wire.receive_data(data)
        if not self._is_waiting:
            self._execute()

    def _execute(self) -> None:
        """Execute what was received until the slice is over; the rest in later turns."""
        now_ns = self._sessions.clock.monotonic_ns
        began_ns = now_ns()
        out: list[bytes] = []
        try:
            while now_ns() - began_ns < self._slice_left_ns:
                event = self._wire.next_event()
                if event is None:
                    break
                out.append(self._answer(event))
        except RemoteProtocolError as error:
            self._refuse(error, out)
            return
        self._slice_left_ns -= now_ns() - began_ns
        if self._slice_left_ns <= 0:
            self._is_waiting = True
            self._sessions.turns.later(self)
        if out:
            self._active_at = self._loop.time()
            self._has_commanded = True
            self._write(out)
        self._update_reading()

    def go_on(self) -> None:
        """Have the next turn."""
        self._is_waiting = False
        self._slice_left_ns = SLICE_NS
        if self._transport is not None and not self._is_closing:
            self._execute()

    def _update_reading(self) -> None:
        transport = self._transport
        if transport is None or self._is_closing or transport.is_closing():
            return
        if self._is_waiting or self._is_write_paused:
            transport.pause_reading()
        else:
            transport.resume_reading()

    def eof_received(self) -> bool:
        try:
            self._wire.receive_eof()
        except RemoteProtocolError as error:
            self._refuse(error, [])
        return False

    def pause_writing(self) -> None:
        self._is_write_paused = True
        self._update_reading()

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._update_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        self._transport = None
        self._sessions.turns.leave(self)
        for timer in (self._deadline, self._linger):
            if timer is not None:
                timer.cancel()
        self._sessions.discard(self, self._node)

    # --- commands

    def _answer(self, event: Event) -> bytes:
        if isinstance(event, Identify):
            self._identify(event.peer)
            info = self._sessions.info()
            if event.peer.distributed_id:
                info = msgspec.structs.replace(info, partitions=True)
            return encode_lookupd_info(info)
        if isinstance(event, Register | Describe):
            return self._register(event)
        if isinstance(event, Unregister):
            self._unregister(event)
        elif self._node_id:
            silent_ns = self._sessions.database.touch(self._node_id, self._sessions.clock.monotonic_ns())
            _log.debug("CLIENT(%s): pinged (last ping %.3fs)", self._node_id, silent_ns / 1e9)
            self._look_for_double()
        return OK_RESPONSE

    def _look_for_double(self) -> None:
        """Say once that a younger connection has the address of this one, which goes on to ping."""
        if self._node is None or self._has_told_double:
            return
        other, now_ns = self._sessions.younger(self._node), self._sessions.clock.monotonic_ns()
        if not other:
            self._double_since_ns = None
        elif self._double_since_ns is None:
            self._double_since_ns = now_ns
        elif now_ns - self._double_since_ns >= DOUBLE_NS:
            self._has_told_double = True
            self._sessions.tell_double(self._node, other)

    def _identify(self, peer: PeerInfo) -> None:
        ours = self._sessions.cluster_id()
        if peer.cluster_id and ours and peer.cluster_id != ours:
            raise RemoteProtocolError("E_INVALID", f"IDENTIFY of cluster {peer.cluster_id[:64]}, this is {ours}")
        self._node_id = self._sessions.new_node_id(self._remote_address)
        node = NsqdNode(
            node_id=self._node_id,
            remote_address=self._remote_address,
            hostname=peer.hostname,
            broadcast_address=peer.broadcast_address,
            tcp_port=peer.tcp_port,
            http_port=peer.http_port,
            version=peer.version,
            topology_zone=peer.topology_zone,
            topology_region=peer.topology_region,
            distributed_id=peer.distributed_id,
            last_update_ns=self._sessions.clock.monotonic_ns(),
            is_draining=peer.draining,
        )
        self._sessions.database.add_node(node)
        self._node = node
        self._sessions.identified(node)
        facts = (self._node_id, peer.broadcast_address, peer.tcp_port, peer.http_port, peer.version)
        _log.info("CLIENT(%s): IDENTIFY Address:%s TCP:%d HTTP:%d Version:%s", *facts)

    def _register(self, event: Register | Describe) -> bytes:
        database = self._sessions.database
        channel = event.channel if isinstance(event, Register) else ""
        try:
            if isinstance(event, Register):
                is_new = database.register(self._node_id, event.topic, channel, event.partition)
            else:
                is_new = database.describe_topic(self._node_id, event.topic, event.meta)
        except TooManyRegistrations as error:
            # Not fatal: nsqd would come back and register all again, for ever.
            _log.error("CLIENT(%s): REGISTER %s %s refused: %s", self._node_id, event.topic, channel, error)
            return encode_error(RemoteProtocolError("E_INVALID", f"REGISTER failed {error}", fatal=False))
        if is_new:
            self._tell("REGISTER", event.topic, channel)
            self._sessions.on_change(event.topic)
        return OK_RESPONSE

    def _tell(self, what: str, topic: str, channel: str) -> None:
        """Log a change; of an nsqd with thousands of topics the first few, and how many came behind them."""
        now = self._loop.time()
        if now - self._lines_since >= LINES_S:
            self._lines_since, self._line_count = now, 0
        self._line_count += 1
        level = logging.INFO if self._line_count <= LINES_MAX else logging.DEBUG
        _log.log(level, "DB: client(%s) %s topic:%s channel:%s", self._node_id, what, topic, channel)
        if level == logging.DEBUG:
            if not self._untold_count:
                self._loop.call_later(LINES_S, self._tell_sum)
            self._untold_count += 1

    def _tell_sum(self) -> None:
        count, self._untold_count = self._untold_count, 0
        _log.info("DB: client(%s) %d more registrations changed, which are logged one by one with --log-level=debug",
                  self._node_id, count)  # fmt: skip

    def _unregister(self, event: Unregister) -> None:
        gone = self._sessions.database.unregister(self._node_id, event.topic, event.channel, event.partition)
        for topic, channel in gone:
            self._tell("UNREGISTER", topic, channel)
        if gone:
            self._sessions.on_left(event.topic)

    # --- closing

    def _refuse(self, error: RemoteProtocolError, answers: list[bytes]) -> None:
        note = self._wire.note
        _log.error("[%s] - %s%s", self._remote_address, error, note and f" {note}")
        self._write([*answers, encode_error(error)])
        self._is_closing = True
        if self._transport is not None:
            self._linger = close_lingering(self._transport, self._loop)

    def _write(self, answers: list[bytes]) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(answers))

    def _check_deadline(self) -> None:
        if self._has_commanded:
            limit_s = self._sessions.idle_deadline_s
        else:
            limit_s = FIRST_COMMAND_DEADLINE_S if self._wire.has_magic else MAGIC_DEADLINE_S
        left_s = self._active_at + limit_s - self._loop.time()
        if left_s > 0:
            self._deadline = self._loop.call_later(left_s, self._check_deadline)
        elif self._transport is not None:
            _log.info("CLIENT(%s): no command for %gs, closing", self._remote_address, limit_s)
            self._transport.abort()

    def abort(self) -> None:
        """Close at once."""
        self._is_closing = True
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close the connection; what was answered is still sent."""
        self._is_closing = True
        if self._transport is not None:
            self._transport.close()

    def __repr__(self) -> str:
        return f"<CLIENT({self._remote_address})>"

    def describe(self) -> str:
        return f"{self._node_id or self._remote_address} {self._wire.describe()}"


def _address_of(node: NsqdNode) -> str:
    """Return where clients connect to it."""
    return format_address(node.broadcast_address, node.tcp_port)
