"""The protocol of one client: commands in, broker calls, frames out.

Rules of this file:

- Responses leave in the order of their commands. A publish is answered when it is stored, so answers that have to wait
  stand in ``_slots``, and whatever is answered later stands behind them; message frames do not wait.
- Nothing is written before the end of the turn; then everything is one write.
- A fatal error is the last frame: what was parsed after it is dropped and the connection closes once it is sent.
- Reading stops while the peer does not read its answers, except for consumers, whose FINs have to come through; their
  buffer is bounded by closing the connection.
- Parsing and executing are timed: a connection that has used its slice reads nothing more, keeps what is left in
  ``_waiting`` and in its parser, and stands in line for its next turn (net/turns.py).

Source: NSQ's TCP protocol, docs/limits.md.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec

from flintmq.broker.bounds import TopicFull
from flintmq.broker.channel import Channel
from flintmq.broker.partition import Ended, Partition, PublishGroup
from flintmq.broker.producers import SequenceGap
from flintmq.broker.shared_subscription import ChannelParts, SharedSubscription
from flintmq.broker.subscription import Subscription
from flintmq.budget import COUNTED_BYTES, InputMeter, OutputMeter
from flintmq.errors import FlintError, RemoteProtocolError
from flintmq.limits import (
    FETCH_BYTES_MAX,
    FIRST_COMMAND_DEADLINE_S,
    FIRST_HEARTBEAT_S,
    MAGIC_DEADLINE_S,
    WRITE_BUFFER_HIGH_BYTES,
    WRITE_BUFFER_MAX_BYTES,
)
from flintmq.message import hex_id, raw_id
from flintmq.net.address import format_peer
from flintmq.net.layers import LayeredTransport
from flintmq.net.linger import close_lingering
from flintmq.net.tls_engine import TlsFailed
from flintmq.net.turns import SLICE_NS
from flintmq.nsqd.auth import AuthFailed, ClientAuth, Grants, Question
from flintmq.nsqd.client import Client, Clients
from flintmq.nsqd.extended import filter_of
from flintmq.nsqd.leadership import NOT_WRITABLE, NotOfOneNode
from flintmq.nsqd.node import Node
from flintmq.nsqd.pending_reply import GAP_CODE, PendingReply
from flintmq.nsqd.publishing import Publishing
from flintmq.nsqd.reading import fetch, offsets, producers
from flintmq.nsqd.renewal import Consumer, Renewal
from flintmq.nsqd.terms import Terms
from flintmq.topic_meta import PARTITION_NUM_MAX
from flintmq.wire import server as wire
from flintmq.wire.codec import Codec, Deflate, Snappy
from flintmq.wire.codes import is_fatal
from flintmq.wire.commands import COMMANDS
from flintmq.wire.frames import (
    CLOSE_WAIT_FRAME,
    ENDS_FRAME,
    HEARTBEAT_FRAME,
    OK_FRAME,
    error_frame,
    fetched_frame,
    response_frame,
)
from flintmq.wire.identify import Negotiated, ServerFeatures, negotiate, parse_request
from flintmq.wire.server import FINISH_RUN_MAX

log = logging.getLogger(__name__)

_STATE_NUMBERS = {wire.INIT: 0, wire.SUBSCRIBED: 3, wire.CLOSING: 4, wire.BROKEN: 4}
_SMALL_READ_BYTES = 2048  # what is read at once and holds one command is not timed
_HEARD_MAX = 64  # commands kept of a client that waits for memory before it is read no more
_FAILING_RUN_MAX = 128  # FINs looked at at once behind some that failed, because each of these has an answer of its own
_LARGE_BYTES = 64 * 1024  # an answer that is not copied to be written with its head
_NEW_TOPIC_BYTES = 1024  # memory of a publish and a topic beside its bodies, about
_NOT_IN_FLIGHT = "failed ID not in flight"
_NOT_OWNED = "failed client does not own message"
_HEX = frozenset(b"0123456789abcdef")


class Session(Client, asyncio.Protocol):
    """One client of nsqd, and what it says.

    Args:
        of_node: takes what is published, where another node speaks for clients of its own: nothing is handed on again,
            and a publish that fails ends no connection, because others wait on it. None: it is a client.
    """

    def __init__(self, node: Node, clients: Clients, terms: Terms, of_node: Publishing | None = None) -> None:
        env = node.engine.env
        super().__init__(env.clock.wall_ns(), None if terms.auth is None else ClientAuth())
        self.engine = node.engine
        self.loop = node.engine.loop
        self.parser = wire.ServerConnection(terms.limits)
        self.budget = node.engine.broker.budget
        self.meter = OutputMeter(self.budget, self)
        self.input_meter = InputMeter(self.budget, self)
        self._env = env
        self._clients = clients
        self._terms = terms
        self._is_of_node = of_node is not None
        self._publishing = node.publishing if of_node is None else of_node
        self._subscribing = node.subscribing if of_node is None else node.subscribing_here
        self._topics = node.topics
        self._leadership = node.leadership
        self._preparing: Ended | None = None  # what has to end before the client is subscribed
        self._ready_count = 0  # that RDY said last
        self._ready_limit: int | None = None  # that an operator has set
        self._pub_partition: Partition | None = None
        self._transport: asyncio.Transport | None = None
        self._layers: LayeredTransport | None = None
        self._is_upgrading = False  # from the answer to IDENTIFY until its layers stand
        self._asking: asyncio.Task[Grants] | None = None
        self._renewal: Renewal | None = None
        self._slots: deque[PendingReply | PublishGroup | bytes] = deque()  # a group stands for one PUB
        self._waiting: deque[wire.Event] = deque()
        self._slice_left_ns = SLICE_NS
        self._slot_bytes = 0
        self._new_topic_group: Ended | None = None  # the last one that waits for its topic, or for another node
        self._new_topic_bytes = 0  # that wait with it
        self._has_commanded = False
        self._is_asked = False  # whether it reads
        self._has_answered = False  # that it does, since it was answered a FETCH
        self._fetched_to = -1  # where the last answer to FETCH told it to go on
        self._waits_for_memory = False  # to be answered a FETCH
        self._is_finished = False
        self._is_draining = False  # our end of the stream has been sent, or is about to be
        self._is_at_end = False  # the client has sent its last byte
        self._is_write_paused = False
        self._write_paused_at = 0.0
        self._received_at = self.loop.time()
        self._now_ns = env.clock.monotonic_ns
        self._heartbeat_s = terms.features.heartbeat_interval_ms / 1000
        self._heartbeat_timer: asyncio.TimerHandle | None = None
        self._start_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self.parser.tls_missing = terms.tls_required != "false"
        self.parser.refusal_of = None if self.auth is None else self._early_refusal

    # -- transport -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_HIGH_BYTES)
        self.peer = format_peer(transport.get_extra_info("peername"))
        if not self._clients.admit(self, transport):
            self._is_finished = True
            if self._is_of_node:  # it may have sent publishes already: they are certainly not stored
                self._transport.write(ENDS_FRAME)
                self._transport.close()
            else:
                self._transport.abort()
            return
        self._start_timer = self.loop.call_later(MAGIC_DEADLINE_S, self._check_magic)
        self._arm_heartbeat()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._heartbeat_timer, self._start_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        self._end_input()
        self.engine.turns.leave(self)
        self._clients.forget(self)
        if self._asking is not None:
            self._asking.cancel()
        if self._renewal is not None:
            self._renewal.close()
        self._transport = self._layers = None
        self.meter.close()
        self.input_meter.close()
        self._slots.clear()
        self._waiting.clear()
        self.out.clear()

    def data_received(self, data: bytes) -> None:
        if self._is_finished:
            return
        self._received_at = self.loop.time()
        body = self.parser.repeated_pub(data)
        if body is not None and self._publish_again(body):
            return
        began_ns = 0
        if len(data) > _SMALL_READ_BYTES:
            began_ns = self._now_ns()
            self.engine.received_bytes += len(data)
        events = self.parser.receive_data(data)
        if self._waits_for_memory:
            self._hear(events, len(data))
        elif self._waiting:
            self._waiting.extend(events)
        elif events or began_ns:
            self._execute(events, began_ns)
        if self.parser.held_bytes or self.input_meter.held_bytes:
            self._count_input()

    def _count_input(self) -> None:
        """Count what has come of a body that is not complete."""
        held_bytes, meter = self.parser.held_bytes, self.input_meter
        if held_bytes >= COUNTED_BYTES or meter.held_bytes:
            meter.hold(held_bytes)

    def _hear(self, events: list[wire.Event], size_bytes: int) -> None:
        """Take what comes while the client waits for memory: whether it reads, and little else."""
        commands = [event for event in events if not isinstance(event, wire.Nop)]
        self._waiting.extend(commands)
        if self._is_asked and len(commands) < len(events):
            self._has_read()
        if (size_bytes > _SMALL_READ_BYTES or not self._is_heard) and self._transport is not None:
            self._transport.pause_reading()

    @property
    def _is_heard(self) -> bool:
        """Whether a client that waits for memory is read, so that it can show that it reads."""
        return self._waits_for_memory and len(self._waiting) <= _HEARD_MAX and not self._is_write_paused

    @property
    def has_published(self) -> bool:
        """Whether something was published on this connection."""
        return bool(self.pub_counts)

    @property
    def is_awaited(self) -> bool:
        """Whether nothing but bytes of the client is missing for it to go on."""
        return not (self._has_backlog or self._is_upgrading or self._must_wait())

    def pause_input(self) -> None:
        """Read no more until there is memory for what is coming."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_input(self) -> None:
        """There is memory for what is coming."""
        self._received_at = self.loop.time()
        if self._transport is not None and not self._is_finished and not self._must_wait():
            self.engine.turns.later(self)

    def refuse_input(self, reason: str) -> None:
        """Forget what is not complete, say why, and close."""
        self.parser.forget()
        self.input_meter.close()
        self.dismiss("E_PUB_TOO_MUCH_WAITING", reason)

    def eof_received(self) -> bool:
        """Answer what came before the end of the client's stream, then close; True while that takes a while."""
        if self._transport is None or self._is_draining:
            return False
        if self._is_finished:  # by an error, which waits for the answers before it
            self._is_at_end = True
            return bool(self._slots or self.out)
        if self._has_backlog:
            return False
        self._is_at_end = True
        events = self.parser.receive_eof()
        if self.subscription is not None:
            self.subscription.is_open = False
        if events:
            self._execute(events)
        elif self._slots:
            self._is_finished = True
            self.loop.call_soon(self._finish_when_answered)
        else:
            self.flush()
        return self._is_finished

    def pause_writing(self) -> None:
        self._is_write_paused = True
        self._write_paused_at = self.loop.time()
        if self.subscription is not None:
            self.subscription.room_bytes = 0
        elif self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._is_write_paused = False
        transport = self._transport
        if transport is None or self._is_finished:
            return
        if self.subscription is not None:
            self._update_room(transport.get_write_buffer_size())
        if self._is_heard:
            transport.resume_reading()
        elif not self._must_wait():
            self.engine.turns.later(self)

    def flush(self) -> None:
        """Write what has gathered; called by the engine at the end of a turn."""
        if self._slots:
            self._flush_slots()
        out = self.out
        transport = self._transport
        if not out or transport is None:
            return
        subscription = self.subscription
        put_bytes = 0 if subscription is None else subscription.take_put_bytes()
        if self._is_draining:
            out.clear()  # our end of the stream has been sent
            self.budget.output_bytes -= put_bytes
            return
        if len(out) == 2 and len(out[1]) >= _LARGE_BYTES:
            size = len(out[0]) + len(out[1])
            self._write(transport, *out)
        else:
            data = out[0] if len(out) == 1 else b"".join(out)
            size = len(data)
            self._write(transport, data)
        out.clear()
        if subscription is not None:
            unwritten_bytes = transport.get_write_buffer_size()
            self.budget.output_bytes -= put_bytes
            self.meter.wrote(size, unwritten_bytes)
            if unwritten_bytes > WRITE_BUFFER_MAX_BYTES:
                log.warning("client %s does not read: closing", self.peer)
                self.abort()
            else:
                self._update_room(unwritten_bytes)
        elif size >= COUNTED_BYTES or self.meter.held_bytes:
            self.meter.wrote(size, transport.get_write_buffer_size())

    def _write(self, transport: asyncio.Transport, *pieces: bytes | memoryview) -> None:
        try:
            if len(pieces) == 1:
                transport.write(pieces[0])
            else:
                transport.writelines(pieces)
        except Exception as error:  # noqa: BLE001 - the engine tells it; it is this connection's alone
            self.engine.output_failed(self, error)

    def look_at_output(self, now_s: float) -> None:
        """Count again what the client has not read; it may have more when it has read everything."""
        transport = self._transport
        if transport is None:
            return
        unwritten_bytes = transport.get_write_buffer_size()
        self.meter.look(unwritten_bytes, now_s)
        if self.subscription is not None:
            self._update_room(unwritten_bytes)
        self._look_at_memory()

    def _look_at_memory(self) -> None:
        """Answer a FETCH that has waited for memory, if there is enough for this client."""
        if self._waits_for_memory and self._may_be_answered(self._waiting[0]):
            self._waits_for_memory = False
            self.engine.turns.later(self)

    def _may_be_answered(self, fetch: wire.Event) -> bool:
        assert isinstance(fetch, wire.Fetch)
        return self.budget.may_answer(self, fetch.start == self._fetched_to, self._has_answered)

    def _update_room(self, unwritten_bytes: int) -> None:
        subscription = self.subscription
        if subscription is None:
            return
        had_room = subscription.room_bytes > 0
        must_wait, budget = self._is_write_paused, self.budget
        if budget.output_bytes > budget.output_short_bytes and not must_wait:
            must_wait = unwritten_bytes > 0 or not budget.gives(subscription, self)
        subscription.room_bytes = 0 if must_wait else WRITE_BUFFER_HIGH_BYTES - unwritten_bytes
        if not had_room and subscription.room_bytes > 0 and self.channel is not None:
            self._mark(self.channel)

    def ask_whether_it_reads(self) -> None:
        """Send a heartbeat: who reads answers it."""
        if self._transport is not None and not self._is_finished:
            self._is_asked = True
            self.out.append(HEARTBEAT_FRAME)
            self.engine.wants_output(self)

    def _has_read(self) -> None:
        """The client was asked whether it reads, and has sent what shows it."""
        self._is_asked = False
        self._has_answered = True
        self.budget.forget(self)
        if self.subscription is not None and self._transport is not None:
            self.subscription.has_answered = True
            self._update_room(self._transport.get_write_buffer_size())
        self._look_at_memory()

    # -- deadlines -------------------------------------------------------------------------------------------------

    def _check_magic(self) -> None:
        self._start_timer = None
        if not self.parser.magic_received:
            log.info("client %s sent no protocol magic in %.0f s: closing", self.peer, MAGIC_DEADLINE_S)
            self.abort()
        else:
            rest = FIRST_HEARTBEAT_S - MAGIC_DEADLINE_S
            self._start_timer = self.loop.call_later(rest, self._ask_for_first_command)

    def _ask_for_first_command(self) -> None:
        """A client that sends nothing but the magic can still show that it lives."""
        self._start_timer = None
        if not self._has_commanded:
            self.out.append(HEARTBEAT_FRAME)
            self.engine.wants_output(self)
            rest = FIRST_COMMAND_DEADLINE_S - FIRST_HEARTBEAT_S
            self._start_timer = self.loop.call_later(rest, self._check_first_command)

    def _check_first_command(self) -> None:
        self._start_timer = None
        if self.input_meter.is_paused:  # it is we who do not read
            self._start_timer = self.loop.call_later(FIRST_COMMAND_DEADLINE_S, self._check_first_command)
        elif not self._has_commanded:
            what = "has not finished its first command" if self.parser.held_bytes else "has sent no command"
            log.info("client %s %s in %.0f s: closing", self.peer, what, FIRST_COMMAND_DEADLINE_S)
            self.abort()

    def _arm_heartbeat(self) -> None:
        if self._heartbeat_timer is not None:
            self._heartbeat_timer.cancel()
            self._heartbeat_timer = None
        if self._heartbeat_s > 0:
            self._heartbeat_timer = self.loop.call_later(self._heartbeat_s, self._heartbeat)

    def _heartbeat(self) -> None:
        self._heartbeat_timer = None
        if self._is_finished or self._transport is None:
            return
        if self._is_upgrading:
            self._arm_heartbeat()  # a handshake has its own deadline, and nothing may stand before its OK
            return
        now = self.loop.time()
        if self._asking is not None or self.input_meter.is_paused or self._waits_for_memory:
            self._received_at = now  # it is we who do not read
        if now - self._received_at >= 2 * self._heartbeat_s:
            log.info("client %s was silent for two heartbeats: closing", self.peer)
            self.abort()
            return
        if self._is_write_paused and now - self._write_paused_at >= self._heartbeat_s:
            log.info("client %s has not read for a heartbeat: closing", self.peer)
            self.abort()
            return
        if self.parser.magic_received:
            self.out.append(HEARTBEAT_FRAME)
            self.engine.wants_output(self)
        self._arm_heartbeat()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()
        self._end_input()

    def _end_input(self) -> None:
        """Take no more commands and deliver nothing more; what the client holds is queued again at once."""
        self._is_finished = True
        self._waits_for_memory = False
        if self.subscription is not None and self.channel is not None:
            self.budget.output_bytes -= self.subscription.take_put_bytes()
            self._subscribing.unsubscribe(self)
        self.budget.forget(self)

    def look_up_again(self) -> None:
        """Look at the next publish closely: where the last one went may take none now."""
        self._pub_partition = None

    def dismiss(self, code: str, detail: str) -> None:
        """Send an error that nothing was sent for, the last frame, and close; what the client holds is queued again."""
        if self._transport is not None and not self._is_finished:
            self._resume_reading(self._transport)  # to see the peer close
            self._fail(code, detail)
            self.loop.call_soon(self._finish_when_answered)

    def drain(self) -> None:
        """Send our last frames and the end of stream; what the client has finished until it closes still counts."""
        if self.subscription is not None:
            self.subscription.is_open = False
        self.flush()
        if self._is_of_node and self.subscription is None and not self._slots and not self._waiting:
            self.out.append(ENDS_FRAME)  # what it sends from now on is refused, which it cannot be told any more
            self.flush()
        self._is_draining = True
        if self._transport is not None and self._linger_timer is None:
            self._linger_timer = close_lingering(self._transport, self.loop)

    def _finish(self) -> None:
        """No more input; close when the peer has read the last frame."""
        self._end_input()
        self._is_draining = True
        if self._transport is not None and self._linger_timer is None:
            self._linger_timer = close_lingering(self._transport, self.loop, self._is_at_end)

    # -- answers ---------------------------------------------------------------------------------------------------

    def _reply(self, frame: bytes) -> None:
        if self._slots:
            self._slots.append(frame)
            self._slot_bytes += len(frame)
        else:
            self.out.append(frame)
        self.engine.wants_output(self)

    def _fail(self, code: str, detail: str, fatal: bool | None = None, note: str = "") -> None:
        """Answer with an error; a fatal one ends the connection behind all answers that still wait.

        Args:
            fatal: whether it is one; None: as the table of codes says.
            note: for the log, which has it in the place of the detail.
        """
        if is_fatal(code) if fatal is None else fatal:
            log.info("client %s: %s %s", self.peer, code, note or detail)
            self._end_input()
        self._reply(error_frame(code, detail))

    def publish_ended(self) -> None:
        """Something this connection waits for has ended."""
        if self._transport is None:
            return
        slots = self._slots
        if len(slots) == 1 and self.subscription is None and not self.out and not self._waiting:
            slot = slots[0]
            is_simple = isinstance(slot, PublishGroup) and not self._is_draining and not self.parser.has_more
            if is_simple and slot.ended and slot.error is None:  # type: ignore[union-attr]
                # a producer that publishes one by one: nothing else can be written to it in this turn
                slots.clear()
                self._write(self._transport, OK_FRAME)
                return
        self.engine.wants_output(self)

    def _flush_slots(self) -> None:
        slots = self._slots
        while slots:
            slot = slots[0]
            if isinstance(slot, PublishGroup):
                if slot.ended and slot.error is None:
                    self.out.append(OK_FRAME)
                    slots.popleft()
                    continue
                slot = PendingReply(slot, "PUB")
            if isinstance(slot, bytes):
                self.out.append(slot)
                self._slot_bytes -= len(slot)
            elif not slot.source.ended:
                break
            elif slot.source.error is None:
                self.out.append(slot.frames())
                if slot.on_stored is not None:
                    slot.on_stored()
            elif not slot.is_fatal or self._is_of_node:
                self.out.append(slot.error_frame() * slot.replies)
            else:
                self.out.append(slot.error_frame())
                slots.clear()
                self._end_input()
                self.loop.call_soon(self._finish_when_answered)
                break
            slots.popleft()
        has_more = self._waiting or self.parser.has_more or self._new_topic_group is not None
        if has_more and not self._must_wait():
            self.engine.turns.later(self)

    # -- commands --------------------------------------------------------------------------------------------------

    @property
    def _has_backlog(self) -> bool:
        """Whether something was received that has not been executed, and does not wait for more bytes."""
        return bool(self._waiting) or self.parser.has_more

    def _execute(self, events: list[wire.Event], began_ns: int = 0) -> None:
        """Execute commands until the slice is over; the rest in later turns.

        Args:
            began_ns: when parsing them began; 0 for a moment ago.
        """
        self._has_commanded = True
        parser, buggify = self.parser, self._env.buggify
        is_over = False
        while True:
            for index, event in enumerate(events, 1):
                _HANDLERS[type(event)](self, event)
                if self._is_finished or (index == len(events) and not parser.has_more):
                    break
                began_ns = began_ns or self._now_ns()
                is_over = self._now_ns() - began_ns >= self._slice_left_ns or buggify("the turn is over")
                if is_over or self._must_wait():
                    self._waiting.extend(events[index:])
                    break
            if self._is_finished or is_over or self._waiting or not parser.has_more or self._must_wait():
                break
            events = parser.more()
        if self._is_finished:
            self.engine.wants_output(self)
            self.loop.call_soon(self._finish_when_answered)
            return
        if began_ns:
            self._slice_left_ns -= self._now_ns() - began_ns
            is_over = is_over or self._slice_left_ns <= 0 or self.engine.is_crowded
        if (is_over or self._waiting or parser.has_more) and self._transport is not None and not self._is_heard:
            self._transport.pause_reading()
            if not self._must_wait():
                self.engine.turns.later(self)

    def _must_wait(self) -> bool:
        """Whether answers have to leave before more commands are executed."""
        if self._waits_for_memory or self._asking is not None:
            return True
        if self._preparing is not None and not self._preparing.ended:
            return True
        if self._new_topic_group is not None:
            if self._new_topic_group.ended:
                self._new_topic_group, self._new_topic_bytes = None, 0
            elif self._new_topic_bytes > WRITE_BUFFER_HIGH_BYTES:
                return True
        return self._slot_bytes > FETCH_BYTES_MAX or (self._is_write_paused and self.subscription is None)

    def go_on(self) -> None:
        """Execute the commands that had to wait, for one slice at most."""
        transport = self._transport
        if transport is None or self._is_finished or self._is_upgrading or self._must_wait():
            return
        if self.engine.is_crowded:
            self.engine.turns.later(self)
            return
        if not self.input_meter.is_paused:
            transport.resume_reading()
        self._slice_left_ns = SLICE_NS
        if self._waiting:
            events, self._waiting = list(self._waiting), deque()
            self._execute(events, self._now_ns())
        elif self.parser.has_more:
            began_ns = self._now_ns()
            self._execute(self.parser.more(), began_ns)
            self._count_input()

    def _finish_when_answered(self) -> None:
        """Close after the last frame; again later while answers before it still wait for the disk."""
        if self._transport is None:
            return
        self.flush()
        if self._slots:
            self.loop.call_later(0.01, self._finish_when_answered)
        else:
            self._finish()

    def _violation(self, event: wire.Violation) -> None:
        if not event.code:
            log.info("client %s: %s", self.peer, event.detail)
            self.abort()
            return
        self._fail(event.code, event.detail, note=event.note)

    def _identify(self, event: wire.Identify) -> None:
        try:
            negotiated = negotiate(parse_request(event.body), self._features())
            rule = negotiated.ext_filter
            self.ext_filter = None if rule is None else filter_of(rule)
        except RemoteProtocolError as error:
            self._fail(error.code, error.detail)
            return
        self.negotiated = negotiated
        self._heartbeat_s = negotiated.heartbeat_interval_ms / 1000
        self.parser.heartbeats_disabled = self._heartbeat_s <= 0
        self._arm_heartbeat()
        self._reply(OK_FRAME if negotiated.response is None else response_frame(negotiated.response))
        if negotiated.upgrades and self._transport is not None:
            self._is_upgrading = True
            self._transport.pause_reading()
            self._when_answered(self._upgrade)
        else:
            self._resume_parser()

    def _resume_parser(self) -> None:
        events = self.parser.resume()
        if events or self.parser.has_more:
            self._execute(events)

    # -- layers ----------------------------------------------------------------------------------------------------

    def _features(self) -> ServerFeatures:
        """Return what can still be granted: a layer goes on top of those there are, and TLS is the lowest."""
        features = self._terms.features
        if self._layers is None:
            return features
        is_compressed = self._layers.codec is not None
        return replace(
            features,
            tls=False,
            deflate=features.deflate and not is_compressed,
            snappy=features.snappy and not is_compressed,
        )

    def _when_answered(self, do: Callable[[], None]) -> None:
        """Call ``do`` when every answer so far has been written, in a later turn."""
        if self._slots:
            ended = Ended()
            ended.end(None)
            self._slots.append(PendingReply(ended, "IDENTIFY", replies=0, on_stored=lambda: self.loop.call_soon(do)))
        else:
            self.loop.call_soon(do)

    def _upgrade(self) -> None:
        """Put in the layers that were agreed on."""
        transport, negotiated = self._transport, self.negotiated
        if transport is None or negotiated is None or self._is_finished or self._is_draining:
            return
        self.flush()
        layers = self._layers
        if layers is None:
            layers = LayeredTransport(self, self.loop)
            layers.take_over(transport)
            self._transport = self._layers = layers
        received = self.parser.take_held()  # the first bytes of the new layer, whatever the client took them for
        self._resume_reading(transport)
        if negotiated.tls and self._terms.new_tls is not None:
            layers.start_tls(self._terms.new_tls(), received, self._secured)
        else:
            self._compress(layers, negotiated, received)

    def _secured(self, failure: TlsFailed | None) -> None:
        layers, negotiated = self._layers, self.negotiated
        if layers is None or negotiated is None or self._is_finished or self._is_draining:
            return
        if failure is not None or layers.tls is None:
            self._fail("E_IDENTIFY_FAILED", f"IDENTIFY failed {failure}")
            self.loop.call_soon(self._finish_when_answered)
            return
        self.tls = layers.tls.session()
        self.parser.tls_missing = False
        self.out.append(OK_FRAME)
        self.flush()
        self._compress(layers, negotiated, b"")

    def _compress(self, layers: LayeredTransport, negotiated: Negotiated, received: bytes) -> None:
        codec: Codec | None = None
        if negotiated.snappy:
            codec = Snappy()
        elif negotiated.deflate_level:
            codec = Deflate(negotiated.deflate_level)
        if codec is not None:
            layers.start_codec(codec, received)
            self.out.append(OK_FRAME)
            self.flush()
        self._is_upgrading = False
        self._resume_parser()

    # -- permission ------------------------------------------------------------------------------------------------

    def _auth(self, event: wire.Auth) -> None:
        if self.auth is None:
            self._fail("E_AUTH_DISABLED", "AUTH disabled")
        elif self.auth.grants is not None:
            self._fail("E_INVALID", "AUTH already set")
        else:
            self.auth.secret = event.secret
            self._ask(self.auth, self._authorized)

    def _ask(self, auth: ClientAuth, done: Callable[[Grants | AuthFailed], None]) -> None:
        """Ask an auth server; no command is executed before it has answered."""
        assert self._transport is not None
        self._transport.pause_reading()
        self._asking = self._ask_server(auth, done)

    def _ask_server(self, auth: ClientAuth, done: Callable[[Grants | AuthFailed], None]) -> asyncio.Task[Grants]:
        assert self._terms.auth is not None
        host = self.peer.rpartition(":")[0].strip("[]")
        common_name = self.tls.common_name if self.tls is not None else ""
        return self._terms.auth.ask(Question(host, self.tls is not None, common_name, auth.secret), done)

    def _has_answer(self, answer: Grants | AuthFailed) -> Grants | None:
        """Keep what an auth server answered; None when the connection is over, or is now because it did not."""
        self._asking = None
        if self._transport is None or self._is_finished or self.auth is None:
            return None
        if isinstance(answer, AuthFailed):
            log.warning("client %s: AUTH failed: %s", self.peer, answer)
            self._resume_reading(self._transport)  # to see the peer close
            self._fail("E_AUTH_FAILED", "AUTH failed")
            self.loop.call_soon(self._finish_when_answered)
            return None
        self.auth.set(answer, self.loop.time())
        if self._renewal is not None:
            self._renewal.renewed()
        return answer

    def _authorized(self, answer: Grants | AuthFailed) -> None:
        """AUTH is answered."""
        grants = self._has_answer(answer)
        if grants is None or self._transport is None:
            return
        if not grants.count:
            self._resume_reading(self._transport)
            self._fail("E_UNAUTHORIZED", "AUTH no authorizations found")
            self.loop.call_soon(self._finish_when_answered)
            return
        about = {"identity": grants.identity, "identity_url": grants.identity_url, "permission_count": grants.count}
        self._reply(response_frame(msgspec.json.encode(about)))
        self._resume_reading(self._transport)
        self._resume_parser()

    def _renewed(self, answer: Grants | AuthFailed) -> None:
        """Go on: the grants that had expired are there again."""
        if self._has_answer(answer) is not None:
            self.go_on()

    def _resume_reading(self, transport: asyncio.Transport) -> None:
        self._received_at = self.loop.time()
        if not transport.is_closing():
            transport.resume_reading()

    def _early_refusal(self, command: str, topic: str) -> tuple[str, str] | None:
        """Return the refusal of a command that the parser may know before it is executed."""
        auth = self.auth
        return None if auth is None or auth.has_expired(self.loop.time()) else auth.refusal(command, topic)

    def _may(self, event: wire.Event, command: str, topic: str, channel: str | None = "") -> bool:
        """Whether the client may; False as well when the auth server has to be asked first, and the command waits."""
        auth = self.auth
        if auth is None:
            return True
        if auth.has_expired(self.loop.time()):
            self._waiting.appendleft(event)
            self._ask(auth, self._renewed)
            return False
        refusal = auth.refusal(command, topic, channel)
        if refusal is not None:
            self._fail(*refusal)
        return refusal is None

    # -- commands of clients ---------------------------------------------------------------------------------------

    def _subscribe(self, event: wire.Subscribe) -> None:
        if not self._may(event, "SUB", event.topic, event.channel) or not self._is_prepared(event):
            return
        try:
            source = self._subscribing.subscribe(self, event)
        except RemoteProtocolError as error:
            self._fail(error.code, error.detail, error.fatal)
            return
        except FlintError as error:
            self._fail("E_SUB_FAILED", f"{event.command} failed {error}")
            return
        assert self.topic is not None
        self.parser.raw_ids = self.topic.meta.has_raw_ids and not self.has_hex_ids
        self._slots.append(PendingReply(source, "SUB", on_stored=self._open_subscription))
        self.engine.wants_output(self)

    def _is_prepared(self, event: wire.Subscribe) -> bool:
        """Whether a client can be subscribed now; else the command waits, or has been answered with an error."""
        preparing, self._preparing = self._preparing, None
        if preparing is None:
            preparing = self._subscribing.prepare(self, event)
            if preparing is not None and not preparing.ended:
                self._preparing = preparing
                self._waiting.appendleft(event)
                preparing.waiters.append(_Resumed(self))
                return False
        error = None if preparing is None else preparing.error
        if isinstance(error, RemoteProtocolError):
            self._fail(error.code, error.detail, error.fatal)
        elif error is not None:
            self._fail("E_SUB_FAILED", f"{event.command} failed {error}")
        return error is None

    def _open_subscription(self) -> None:
        if self.subscription is not None and self.channel is not None and self.parser.state == wire.SUBSCRIBED:
            self.subscription.is_open = True
            self._mark(self.channel)
            if self.auth is not None and self._renewal is None:
                self._renewal = self._new_renewal(self.auth, self.subscription, self.channel.name)

    def _new_renewal(self, auth: ClientAuth, source: Subscription | SharedSubscription, channel: str) -> Renewal:
        """Let deliveries end with the grant they were begun with, unless it is renewed."""
        assert self.topic is not None
        topic = self.topic.name

        def hold() -> None:
            source.is_open = False

        def refuse(code: str, detail: str) -> None:
            self.dismiss(code, detail)

        consumer = Consumer(
            ask=lambda done: self._ask_server(auth, done),
            refusal=lambda: auth.refusal("SUB", topic, channel),
            hold=hold,
            go_on=self._open_subscription,
            refuse=refuse,
        )
        return Renewal(auth, consumer, self.loop, self._env.random, self.peer)

    def _mark(self, channel: Channel | ChannelParts) -> None:
        """Look at what is consumed at the end of the turn."""
        if isinstance(channel, Channel):
            self.engine.broker.mark(channel)
        else:
            self.engine.broker.mark_in_turn(channel.in_turn())
        self.engine.schedule()

    def _publish(self, event: wire.Publish) -> None:
        if not self._may(event, event.command, event.topic):
            return
        try:
            reply = self._publishing.publish(event)
        except FlintError as error:
            self._refuse_publish(event, error)
            return
        self.count_published(event.topic, event.bodies)
        group = reply.source
        if group.ended:  # of a producer that counts: a duplicate, or its log takes nothing
            self._slots.append(reply)
            self.engine.wants_output(self)
            return
        if not isinstance(group, PublishGroup):  # another node answers
            self._await_topic(group, event.bodies)
            self._slots.append(reply)
            group.waiters.append(self)
            return
        self._note_group(group, event)
        reply.note_publisher(self.peer)
        last = self._slots[-1] if self._slots else None
        if (
            type(last) is PendingReply and last.source is group and last.command == event.command
            and last.receipt is reply.receipt is None
        ):  # fmt: skip
            last.replies += event.replies
        else:
            self._slots.append(reply)
            group.waiters.append(self)
        self.engine.schedule()

    def _refuse_publish(self, event: wire.Publish, error: FlintError) -> None:
        """Answer a publish that nsqd does not take; of a run each message, as long as the connection goes on."""
        row = COMMANDS[event.command]
        if isinstance(error, RemoteProtocolError):
            is_its_own = isinstance(error, TopicFull) or (bool(event.front) and not error.fatal)
            if event.replies > 1 and event.producer_id is None and is_its_own:
                self._one_by_one(event)
                return
            code, detail, is_closing = error.code, error.detail, error.fatal
        else:
            code, detail = row.failure, f"{event.command} failed {error}"
            is_closing = row.closes(code)
        if self._is_of_node:
            is_closing = False
            if not isinstance(
                error, RemoteProtocolError
            ):  # this node takes nothing any more: it is certainly not stored
                code = NOT_WRITABLE
        for index in range(1 if is_closing else event.replies):
            if isinstance(error, SequenceGap):
                gap = SequenceGap(error.producer_id, error.sequence + index, error.expected)
                self._fail(GAP_CODE, f"{event.command} {gap}")
            else:
                self._fail(code, detail, is_closing)

    def _one_by_one(self, event: wire.Publish) -> None:
        """Publish each message of a run on its own, because what is wrong with one is not with the others."""
        for body in event.bodies:
            self._publish(replace(event, bodies=[body], replies=1))
            if self._is_finished:
                break

    def count_published(self, topic: str, bodies: Sequence[bytes]) -> None:
        """Count what this client has published, for /stats."""
        self.pub_counts[topic] = self.pub_counts.get(topic, 0) + len(bodies)

    def _note_group(self, group: PublishGroup, event: wire.Publish) -> None:
        """Note where this PUB went, and bound what waits for a topic that cannot be written yet."""
        partition = group.partition
        if not partition.is_writable:
            self._await_topic(group, event.bodies)
        elif event.command == "PUB":
            is_turned = event.partition is None and partition.meta.is_partitioned
            self._pub_partition = None if is_turned or partition.events is not None else partition

    def _await_topic(self, group: Ended, bodies: Sequence[bytes]) -> None:
        """Bound what waits for new topics, the database or another node: nothing of it is on disk here before."""
        self._new_topic_group = group
        self._new_topic_bytes += sum(map(len, bodies)) + _NEW_TOPIC_BYTES
        if self._new_topic_bytes > WRITE_BUFFER_HIGH_BYTES and self._transport is not None:
            self._transport.pause_reading()

    def _publish_again(self, body: bytes) -> bool:
        """Publish one more message to where the last PUB went; False when that needs a closer look."""
        partition, topic_name = self._pub_partition, self.parser.pub_topic
        if partition is None or partition.topic_name != topic_name or not partition.is_open:
            return False
        if partition.bounds is not None:
            return False
        if self._waiting or self._is_draining or self.auth is not None:
            return False
        if self.parser.pub_partition is not None and self.parser.pub_partition != partition.number:
            return False
        group = partition.join(body)
        if group is None:
            group = self.engine.broker.publish_to(partition, (body,))
            self.engine.schedule()
        group.waiters.append(self)
        self._slots.append(group)
        self.pub_counts[topic_name] += 1
        return True

    def _ready(self, event: wire.Ready) -> None:
        assert self.subscription is not None and self.channel is not None
        self._ready_count = event.count
        limit = self._ready_limit
        self.subscription.rdy_count = event.count if limit is None else min(limit, event.count)
        self._mark(self.channel)

    def limit_ready(self, limit: int) -> None:
        """Let this client hold at most so many messages from now on, whatever its RDY says."""
        self._ready_limit = limit
        if self.subscription is not None and self.channel is not None and self.parser.state == wire.SUBSCRIBED:
            self.subscription.rdy_count = min(limit, self._ready_count)
            self._mark(self.channel)

    def _finish_run(self, event: wire.FinishRun) -> None:
        assert self.subscription is not None and self.channel is not None
        wall_ns = self._env.clock.wall_ns() if self.channel.latency is not None else 0
        failed = self.channel.finish(self.subscription, event.ids, wall_ns)  # type: ignore[arg-type]
        if failed or self.parser.finish_run_max != FINISH_RUN_MAX:
            self.parser.finish_run_max = _FAILING_RUN_MAX if failed else FINISH_RUN_MAX
        if failed:
            as_sent = raw_id if self.parser.raw_ids else hex_id
            self._reply(b"".join([self._not_in_flight_frame("FIN", as_sent(each), each) for each in failed]))
        if self._is_asked and not failed:
            self._has_read()
        self._mark(self.channel)

    def _finish_odd(self, event: wire.Finish) -> None:
        self._not_in_flight("FIN", event.message_id)

    def _internal(self, message_id: bytes) -> int | None:
        """The internal id in 16 bytes; None on a plain topic when they are not hex digits."""
        if self.parser.raw_ids:
            return int.from_bytes(message_id[:8], "big")
        return int(message_id, 16) if _HEX.issuperset(message_id) else None

    def _not_in_flight(self, command: str, message_id: bytes) -> None:
        self._reply(self._not_in_flight_frame(command, message_id, self._internal(message_id)))

    def _not_in_flight_frame(self, command: str, message_id: bytes, internal: int | None) -> bytes:
        shown = message_id.hex() if self.parser.raw_ids else message_id.decode("utf-8", "surrogateescape")
        is_another_s = internal is not None and self.channel is not None and self.channel.is_in_flight(internal)
        detail = f"{command} {shown} {_NOT_OWNED if is_another_s else _NOT_IN_FLIGHT}"
        return error_frame(f"E_{command}_FAILED", detail)

    def _requeue(self, event: wire.Requeue) -> None:
        assert self.subscription is not None and self.channel is not None
        internal = self._internal(event.message_id)
        delay_ns = min(event.timeout_ms, self._terms.limits.max_req_timeout_ms) * 1_000_000
        due_clock_ns = self.engine.due_clock_ns()
        if internal is None or not self.channel.requeue(self.subscription, internal, delay_ns, due_clock_ns):  # type: ignore[arg-type]
            self._not_in_flight("REQ", event.message_id)
            return
        if self._is_asked:
            self._has_read()
        self._mark(self.channel)

    def _touch(self, event: wire.Touch) -> None:
        assert self.subscription is not None and self.channel is not None
        internal = self._internal(event.message_id)
        now_ns = self._env.clock.monotonic_ns()
        if internal is None or not self.channel.touch(self.subscription, internal, now_ns):  # type: ignore[arg-type]
            self._not_in_flight("TOUCH", event.message_id)
            return
        self._mark(self.channel)

    def _close(self, event: wire.Close) -> None:
        assert self.subscription is not None
        self.subscription.is_open = False
        self.subscription.rdy_count = 0
        self._reply(CLOSE_WAIT_FRAME)

    def _nop(self, event: wire.Nop) -> None:
        """A NOP shows that the client lives, which data_received has noted, and answers a heartbeat, which was read."""
        if self._is_asked:
            self._has_read()

    def _offsets(self, event: wire.Offsets) -> None:
        if not self._may(event, "OFFSETS", event.topic, None):
            return
        elsewhere = None if self._leadership is None else self._leadership.led_elsewhere(event.topic)
        try:
            self._reply(offsets(self.engine.broker, event, elsewhere))
        except RemoteProtocolError as error:
            self._fail(error.code, error.detail)

    def _producers(self, event: wire.AskProducers) -> None:
        if not self._may(event, "PRODUCERS", event.topic):  # it is for who publishes
            return
        elsewhere = None if self._leadership is None else self._leadership.led_elsewhere(event.topic)
        try:
            self._reply(producers(self.engine.broker, event, elsewhere))
        except RemoteProtocolError as error:
            self._fail(error.code, error.detail)

    def _fetch(self, event: wire.Fetch) -> None:
        if not self._may(event, "FETCH", event.topic, None):
            return
        try:
            if self._leadership is not None:
                self._leadership.check_read("FETCH", event.topic, event.partition)
            if not self._may_be_answered(event):
                self._waits_for_memory = True
                self._waiting.appendleft(event)
                self.engine.schedule()
                return
            self._has_answered = False
            data, self._fetched_to = fetch(self.engine.broker, event)
            frame = fetched_frame(data, self._fetched_to)
            if self._slots:
                self._reply(b"".join(frame))
            else:
                self.out += frame
        except RemoteProtocolError as error:
            self._fail(error.code, error.detail)
        self.flush()  # written at once, so that the transport says when enough has gathered

    def _cursor(self, event: wire.Cursor) -> None:
        if not self._may(event, "CURSOR", event.topic, event.channel):
            return
        if self._leadership is not None:
            try:
                self._leadership.check_read("CURSOR", event.topic, event.partition)
            except RemoteProtocolError as error:
                self._fail(error.code, error.detail)
                return
        topic = self.engine.broker.topics.get(event.topic)
        if topic is None or event.partition not in topic.partitions:
            self._fail("E_TOPIC_NOT_EXIST", f"CURSOR {event.topic} partition {event.partition} is not on this nsqd")
            return
        source, channel = self._subscribing.place_cursor(self, topic, event)
        self._slots.append(PendingReply(source, "CURSOR", replies=0))
        self._reply(response_frame(msgspec.json.encode({"sequence": channel.floor})))

    def _create_topic(self, event: wire.CreateTopic) -> None:
        if not self._may(event, "INTERNAL_CREATE_TOPIC", event.topic):
            return
        number = event.partition
        if number is None or not 0 <= number < PARTITION_NUM_MAX:
            what = f"INTERNAL_CREATE_TOPIC partition is not a number from 0 to {PARTITION_NUM_MAX - 1}"
            self._fail("E_BAD_PARTITION", what)
            return
        try:
            if self._leadership is not None:
                raise NotOfOneNode(event.topic)
            topic = self._topics.create_partition(event.topic, number, event.is_extended)
        except FlintError as error:
            self._fail("E_CREATE_TOPIC_FAILED", f"INTERNAL_CREATE_TOPIC {event.topic} {number} failed: {error}")
            return
        source = self._topics.when_durable(topic)
        source.waiters.append(self)
        self._slots.append(PendingReply(source, "INTERNAL_CREATE_TOPIC"))
        self.engine.wants_output(self)

    # -- statistics ------------------------------------------------------------------------------------------------

    @property
    def state_number(self) -> int:
        """The state as /stats has it."""
        return _STATE_NUMBERS[self.parser.state]

    @property
    def codec_name(self) -> str:
        """The compression in force; empty for none."""
        return self._layers.codec.name if self._layers is not None and self._layers.codec is not None else ""

    def describe(self) -> str:
        """One line for humans."""
        return (
            f"session {self.peer} state={self.parser.state} slots={len(self._slots)} waiting={len(self._waiting)} "
            f"held_bytes={self.parser.held_bytes} layers={self._layers} "
            f"{self.subscription.describe() if self.subscription else ''}"
        )


class _Resumed:
    """Lets a session go on that has waited for something else than its client."""

    __slots__ = ("_session",)

    def __init__(self, session: Session) -> None:
        self._session = session

    def publish_ended(self) -> None:
        self._session.engine.turns.later(self._session)


_HANDLERS: dict[type, Callable[[Session, Any], None]] = {
    wire.Violation: Session._violation,
    wire.Identify: Session._identify,
    wire.Auth: Session._auth,
    wire.Subscribe: Session._subscribe,
    wire.Publish: Session._publish,
    wire.Ready: Session._ready,
    wire.FinishRun: Session._finish_run,
    wire.Finish: Session._finish_odd,
    wire.Requeue: Session._requeue,
    wire.Touch: Session._touch,
    wire.Close: Session._close,
    wire.Nop: Session._nop,
    wire.Offsets: Session._offsets,
    wire.AskProducers: Session._producers,
    wire.Fetch: Session._fetch,
    wire.Cursor: Session._cursor,
    wire.CreateTopic: Session._create_topic,
}
