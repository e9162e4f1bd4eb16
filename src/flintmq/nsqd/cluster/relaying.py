"""Messages of other nodes for consumers here: of a topic of which nothing is led here, or that nobody consumes there.

::

    client <--frames as they came-- Upstreams <--Upstream-- the session of a leader, one for each leader
    client --RDY FIN REQ TOUCH----> Upstreams ---by the partition in the id--> Upstream

So a client that knows this address alone goes on when leaders change: only its upstreams do. A :class:`Relay` is all
that its client has; a :class:`Supplement` is beside what is led here.

Rules of this file:

- A leader's session is the consumer's own: it keeps time, counts attempts, and queues again what its upstream held when
  that breaks. Here is kept only who has sent what.
- All leaders together, this node included, send no more than the client's RDY (:mod:`flintmq.nsqd.cluster.shares`),
  but for what was on its way when RDY was taken back.
- A client that does not read holds its own upstreams.

Source: docs/decisions/0017; docs/decisions/0018.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from struct import Struct

import msgspec

from flintmq.broker.partition import Ended
from flintmq.broker.shared_subscription import ChannelParts, SharedSubscription
from flintmq.broker.subscription import Locality
from flintmq.broker.topic import Topic
from flintmq.cluster.state import NodeRecord
from flintmq.errors import RemoteProtocolError
from flintmq.message import MESSAGE_HEADER, TRACE_ID_SIZE, hex_id, partition_of, with_hex_ids
from flintmq.names import is_ephemeral
from flintmq.net.isolation import for_each
from flintmq.net.tasks import tell
from flintmq.nsqd.client import Client
from flintmq.nsqd.cluster.peers import Passage, PassageFailed, Peers
from flintmq.nsqd.cluster.shares import shares
from flintmq.nsqd.leadership import NOT_LEADER
from flintmq.topic_meta import TopicMeta
from flintmq.wire import commands
from flintmq.wire.client import MESSAGE_CODES
from flintmq.wire.commands import MAGIC_V2, NOP
from flintmq.wire.frames import ERROR, HEARTBEAT, MESSAGE
from flintmq.wire.server import Subscribe

log = logging.getLogger(__name__)

SUBSCRIBED_WITHIN_S = 10.0
"""Until a client is told that it cannot subscribe now."""
AGAIN_S = 0.1, 2.0
"""Before a leader is asked again: at first, and at most."""
IDLE_NS = 3_000_000_000
"""Without a message, until a consumer is given no more of a node."""
_FRAME = Struct(">II")
_SIZE_BYTES = 4
_INTERNAL = Struct(">Q")


class Upstream:
    """One consumer's connection to one leader.

    Args:
        greeting: the first bytes, up to SUB.
        answers: that come to them before OK stands for the subscription.
        on_open: called when the leader has answered that the client is subscribed.
        on_messages: given whole frames of messages, and their ids.
        on_error: given a frame that says something of one message.
        on_lost: given why it is over; an error of the leader, or the words of the connection.
    """

    def __init__(
        self,
        peers: Peers,
        record: NodeRecord,
        greeting: bytes,
        answers: int,
        is_raw: bool,
        on_open: Callable[[Upstream], None],
        on_messages: Callable[[Upstream, bytes, list[int]], None],
        on_error: Callable[[bytes], None],
        on_lost: Callable[[Upstream, RemoteProtocolError | str], None],
    ) -> None:
        self.record = record
        self.is_open = False
        self.in_flight: dict[int, int] = {}  # ids, and until when the leader waits for them
        self.granted = 0
        self._greeting = greeting
        self._answers_left = answers
        self._is_raw = is_raw
        self._on_open = on_open
        self._on_messages = on_messages
        self._on_error = on_error
        self._on_lost = on_lost
        self._passage: Passage | None = None
        self._received = bytearray()
        self._needed = 0  # bytes of it, before there can be a whole frame
        self._is_over = False
        self._opening = asyncio.get_running_loop().create_task(self._open(peers))
        self._opening.add_done_callback(tell("connecting for a consumer"))

    async def _open(self, peers: Peers) -> None:
        try:
            passage = await peers.open_passage(self.record, self)
        except PassageFailed as error:
            self._end(str(error))
            return
        self._passage = passage
        passage.write(self._greeting)

    def write(self, data: bytes) -> None:
        """Send commands."""
        if self._passage is not None and self.is_open:
            self._passage.write(data)

    def grant(self, count: int) -> None:
        """Let the leader have so many messages in flight here."""
        if self.is_open and count != self.granted:
            self.granted = count
            self.write(commands.rdy(count))

    def hold(self, is_held: bool) -> None:
        """Take nothing more from the leader, or go on."""
        if self._passage is not None:
            self._passage.hold_input(is_held)

    def received(self, data: bytes) -> None:
        """Take what the leader says."""
        self._received += data
        if len(self._received) < self._needed:
            return  # or a large message would be copied with every piece of it that comes
        data, at, begin = bytes(self._received), 0, 0
        ids: list[int] = []
        self._needed = _FRAME.size
        while len(data) - at >= _FRAME.size and not self._is_over:
            size, kind = _FRAME.unpack_from(data, at)
            end = at + _SIZE_BYTES + size
            if len(data) < end:
                self._needed = end - at
                break
            if kind == MESSAGE:
                *_, wire_id = MESSAGE_HEADER.unpack_from(data, at)
                ids.append(_INTERNAL.unpack_from(wire_id)[0] if self._is_raw else int(wire_id, 16))
            else:
                if ids:
                    self._on_messages(self, data[begin:at], ids)
                    ids = []
                begin = end
                self._control(kind, data[at:end])
            at = end
        if ids and not self._is_over:
            self._on_messages(self, data[begin:at], ids)
        del self._received[:at]

    def _control(self, kind: int, frame: bytes) -> None:
        data = frame[_FRAME.size :]
        if kind == ERROR:
            code, _, detail = data.decode("utf-8", "surrogateescape").partition(" ")
            if code in MESSAGE_CODES:
                self._on_error(frame)
            else:
                self.close(RemoteProtocolError(code, detail, fatal=True))
        elif data == HEARTBEAT:
            if self._passage is not None:
                self._passage.write(NOP)
        elif self._answers_left:
            self._answers_left -= 1
            if not self._answers_left:
                self.is_open = True
                self._on_open(self)

    def lost(self, reason: str) -> None:
        """The connection is gone."""
        self._end(reason)

    def close(self, reason: RemoteProtocolError | str) -> None:
        """End it; what is in flight is queued again by the leader."""
        self._opening.cancel()
        if self._passage is not None:
            self._passage.abort(str(reason))
        self._end(reason)

    def _end(self, reason: RemoteProtocolError | str) -> None:
        if not self._is_over:
            self._is_over = True
            self.is_open = False
            self._on_lost(self, reason)


@dataclass(frozen=True, slots=True)
class Means:
    """Means of a node for its consumers' upstreams.

    Attributes:
        wants_output: has a client's output written.
        msg_timeout_ns: of who has not said another one.
    """

    peers: Peers
    now_ns: Callable[[], int]
    wants_output: Callable[[Client], None]
    msg_timeout_ns: int


class Upstreams(ABC):
    """Messages that other nodes send to one consumer, and its words about them.

    Attributes:
        delivered, finished, requeued: messages.
    """

    def __init__(self, means: Means, client: Client, event: Subscribe, meta: TopicMeta) -> None:
        self.topic = event.topic
        self.channel = event.channel
        self.delivered = self.finished = self.requeued = 0
        self._means = means
        self._client = client
        self._is_raw = meta.has_raw_ids
        self._greeting = greeting_of(client, event)
        negotiated = client.negotiated
        self._msg_timeout_ns = means.msg_timeout_ns if negotiated is None else negotiated.msg_timeout_ms * 1_000_000
        self._upstreams: dict[tuple[str, str], Upstream] = {}  # by the leader's node and incarnation
        self._by_partition: dict[int, Upstream] = {}
        self._is_held = False
        self._is_over = False

    def _open(self, record: NodeRecord) -> Upstream:
        """Subscribe for the client at a leader."""
        upstream = self._upstreams[record.node, record.incarnation] = Upstream(
            self._means.peers,
            record,
            self._greeting,
            2,
            self._is_raw,
            self._opened,
            self._messages,
            self._put,
            self._lost,
        )
        return upstream

    def _opened(self, upstream: Upstream) -> None:
        upstream.hold(self._is_held)
        self.share()

    @abstractmethod
    def _lost(self, upstream: Upstream, reason: RemoteProtocolError | str) -> None:
        """An upstream is over."""

    @abstractmethod
    def share(self) -> None:
        """Let each leader send what it may."""

    def _to_share(self, subscription: SharedSubscription) -> tuple[int, list[Upstream]]:
        """Return what the client has granted, and the upstreams that may send; they are held while it does not read."""
        open_ones = [upstream for upstream in self._upstreams.values() if upstream.is_open]
        is_held = subscription.room_bytes <= 0
        if is_held != self._is_held:
            self._is_held = is_held
            for upstream in open_ones:
                upstream.hold(is_held)
        return subscription.rdy_count if subscription.is_open else 0, open_ones

    @property
    def in_flight_count(self) -> int:
        """Messages that the client has not finished, as far as is known here."""
        return sum(len(upstream.in_flight) for upstream in self._upstreams.values())

    def _messages(self, upstream: Upstream, frames: bytes, ids: Iterable[int]) -> None:
        until_ns = self._means.now_ns() + self._msg_timeout_ns
        in_flight = upstream.in_flight
        for internal in ids:
            in_flight.pop(internal, None)  # those that are waited for the longest stay in front
            in_flight[internal] = until_ns
            self._by_partition[partition_of(internal)] = upstream
            self.delivered += 1
        self._put(with_hex_ids(frames) if self._is_raw and self._client.has_hex_ids else frames)

    def _put(self, frames: bytes) -> None:
        self._client.out.append(frames)
        self._means.wants_output(self._client)

    def _wire_id(self, internal: int) -> bytes:
        return _INTERNAL.pack(internal) + bytes(TRACE_ID_SIZE) if self._is_raw else hex_id(internal)

    def finish(self, ids: Sequence[int]) -> list[int]:
        """Finish messages where they came from; return those of which nobody is known."""
        by_upstream: dict[Upstream, list[bytes]] = {}
        failed: list[int] = []
        for internal in ids:
            upstream = self._by_partition.get(partition_of(internal))
            if upstream is None or not upstream.is_open:
                failed.append(internal)
            else:
                upstream.in_flight.pop(internal, None)
                by_upstream.setdefault(upstream, []).append(self._wire_id(internal))
                self.finished += 1
        for upstream, mine in by_upstream.items():
            upstream.write(commands.fins(mine))
        self.share()
        return failed

    def requeue(self, internal: int, delay_ns: int) -> bool:
        """Give a message back to where it came from; False when that is not known any more."""
        upstream = self._by_partition.get(partition_of(internal))
        if upstream is None or not upstream.is_open:
            return False
        upstream.in_flight.pop(internal, None)
        self.requeued += 1
        upstream.write(commands.req(self._wire_id(internal), delay_ns // 1_000_000))
        self.share()
        return True

    def touch(self, internal: int) -> bool:
        """Restart a message's timeout; False when it is not known any more where it came from."""
        upstream = self._by_partition.get(partition_of(internal))
        if upstream is None or not upstream.is_open:
            return False
        if upstream.in_flight.pop(internal, None) is not None:
            upstream.in_flight[internal] = self._means.now_ns() + self._msg_timeout_ns
        upstream.write(commands.touch(self._wire_id(internal)))
        return True


class RelayedSubscription(SharedSubscription):
    """A subscription that leaders elsewhere serve, as its connection sees it."""

    def __init__(self, relay: Relay) -> None:
        super().__init__(())
        self.upstreams = self._relay = relay
        self._answered = True

    @property
    def has_finished(self) -> bool:
        return bool(self._relay.finished or self._relay.requeued)

    @property
    def has_answered(self) -> bool:
        return self._answered

    @has_answered.setter
    def has_answered(self, has_answered: bool) -> None:
        self._answered = has_answered

    @property
    def locality(self) -> Locality:
        return Locality.GLOBAL

    @property
    def in_flight_count(self) -> int:
        return self._relay.in_flight_count

    @property
    def message_count(self) -> int:
        return self._relay.delivered

    @property
    def finish_count(self) -> int:
        return self._relay.finished

    @property
    def requeue_count(self) -> int:
        return self._relay.requeued


class RelayedChannel(ChannelParts):
    """A channel of which all parts are elsewhere, as a connection sees it."""

    def __init__(self, name: str, relay: Relay) -> None:
        self.name = name
        self.ephemeral = is_ephemeral(name)
        self.latency = None
        self.upstreams = relay
        self._channels, self._subscriptions, self._turns = {}, {}, deque()


class Relay(Upstreams):
    """A consumer of a topic of which nothing is led here: all of it comes from upstreams.

    Args:
        leaders: the processes that lead something of its topic now, whose partitions it is to be given.
        on_end: called when the client is gone.

    Attributes:
        subscribed: ends when every leader has answered that the channel is there.
    """

    def __init__(
        self,
        means: Means,
        client: Client,
        event: Subscribe,
        meta: TopicMeta,
        leaders: Callable[[str], dict[str, tuple[NodeRecord, tuple[int, ...]]]],
        on_end: Callable[[Relay], None],
    ) -> None:
        super().__init__(means, client, event, meta)
        self.subscribed = Ended()
        self._leaders = leaders
        self._on_end = on_end
        self._partitions: dict[tuple[str, str], tuple[int, ...]] = {}  # of each upstream, as it was subscribed
        self._turn = 0
        self._again_s: dict[str, float] = {}
        self._waits: dict[str, asyncio.TimerHandle] = {}
        client.topic = Topic(event.topic, {}, meta=meta)
        client.channel = RelayedChannel(event.channel, self)
        client.subscription = self._subscription = RelayedSubscription(self)
        client.relay = self
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(SUBSCRIBED_WITHIN_S, self._too_late)
        self.look()

    def look(self) -> None:
        """Have an upstream to every leader, and to nobody else."""
        if self._is_over:
            return
        wanted = {
            (record.node, record.incarnation): (record, numbers)
            for record, numbers in self._leaders(self.topic).values()
        }
        for key, upstream in list(self._upstreams.items()):
            # who leads more of the topic by now serves only what it led when it was asked
            if key not in wanted or not set(wanted[key][1]) <= set(self._partitions[key]):
                upstream.close("another node leads")
        for key, (record, numbers) in wanted.items():
            if key not in self._upstreams and record.node not in self._waits:
                self._partitions[key] = numbers
                self._open(record)
        self._look_whether_subscribed()

    def _look_whether_subscribed(self) -> None:
        if self.subscribed.ended:
            return
        wanted = {(record.node, record.incarnation) for record, _ in self._leaders(self.topic).values()}
        if wanted and all(key in self._upstreams and self._upstreams[key].is_open for key in wanted):
            self.subscribed.end(None)

    def _too_late(self) -> None:
        if not self.subscribed.ended:
            late = f"within {SUBSCRIBED_WITHIN_S:g} s, try again"
            what = f"SUB failed not every leader of topic {self.topic} answered {late}"
            self.subscribed.end(RemoteProtocolError("E_SUB_FAILED", what, fatal=True))

    def _opened(self, upstream: Upstream) -> None:
        self._again_s.pop(upstream.record.node, None)
        super()._opened(upstream)
        self._look_whether_subscribed()

    def _lost(self, upstream: Upstream, reason: RemoteProtocolError | str) -> None:
        key = upstream.record.node, upstream.record.incarnation
        if self._upstreams.get(key) is upstream:
            del self._upstreams[key]
            del self._partitions[key]
        if self._is_over:
            return
        if isinstance(reason, RemoteProtocolError) and not reason.code.startswith("E_FAILED_ON_"):
            if self.subscribed.ended:
                self._client.dismiss(reason.code, reason.detail)
            else:
                self.subscribed.end(reason)
            return
        log.info("CLUSTER: %s: %s:%s of node %s: %s", self._client.peer, self.topic, self.channel, key[0], reason)
        self.share()
        pause_s = self._again_s.get(key[0], AGAIN_S[0])
        self._again_s[key[0]] = min(pause_s * 2, AGAIN_S[1])
        self._waits[key[0]] = asyncio.get_running_loop().call_later(pause_s, self._again, key[0])

    def _again(self, node: str) -> None:
        self._waits.pop(node, None)
        self.look()

    def dismiss(self, why: str) -> None:
        """Have the client go on elsewhere, at the leaders."""
        self._client.dismiss(NOT_LEADER, why)

    def close(self) -> None:
        """The client is gone; what it held is queued again by the leaders."""
        if self._is_over:
            return
        self._is_over = True
        for timer in (self._deadline, *self._waits.values()):
            timer.cancel()
        for_each(list(self._upstreams.values()), lambda upstream: upstream.close("the client is gone"), "closing")
        self._on_end(self)

    def share(self) -> None:
        if self._is_over:
            return
        rdy_count, open_ones = self._to_share(self._subscription)
        granted = shares(rdy_count, [len(upstream.in_flight) for upstream in open_ones], self._turn)
        for upstream, count in sorted(zip(open_ones, granted, strict=True), key=lambda each: each[1]):
            upstream.grant(count)

    def tick(self, now_ns: int) -> None:
        """Let another leader come first; forget what a leader has given up to wait for."""
        for upstream in self._upstreams.values():
            in_flight = upstream.in_flight
            while in_flight and in_flight[internal := next(iter(in_flight))] <= now_ns:
                del in_flight[internal]
        self._turn += 1
        self.share()


class Outcome(Enum):
    """The fate of an upstream of a :class:`Supplement`."""

    USEFUL = auto()
    """Messages had come over it."""
    USELESS = auto()
    """None came, though it was granted some."""
    LOST = auto()
    """It failed, or was never granted anything."""
    UNFINISHED = auto()
    """A message that came over it timed out: this consumer may be stuck."""


class Supplement(Upstreams):
    """A consumer that is served here: beside that it gets what nobody consumes at leaders elsewhere.

    An upstream that has been granted messages for ``IDLE_NS`` and had none is closed: its share of RDY goes back to
    what is led here. So is one of which a message timed out, or that was granted nothing for as long as a message may
    take, as another consumer may be the better one. Where RDY is less than there are leaders, what becomes free of it
    goes to who has been without for the longest.

    Args:
        deliver: has what is led here of a channel delivered, as there is room for it again.
        on_outcome: called with the node of an upstream that has ended.
        on_end: called when there is no upstream any more.
    """

    def __init__(
        self,
        means: Means,
        client: Client,
        event: Subscribe,
        meta: TopicMeta,
        deliver: Callable[[ChannelParts], None],
        on_outcome: Callable[[Supplement, str, Outcome], None],
        on_end: Callable[[Supplement], None],
    ) -> None:
        super().__init__(means, client, event, meta)
        self._deliver = deliver
        self._on_outcome = on_outcome
        self._on_end = on_end
        self._outcomes: dict[Upstream, Outcome] = {}
        self._idle_ns: dict[Upstream, int] = {}  # for how long something was granted, and nothing came
        self._without_ns: dict[Upstream, int] = {}  # for how long nothing was granted, or in flight
        self._served_ns: dict[Upstream | None, int] = {}  # when something was granted or in flight last; None: here
        self._mine = 0  # what is granted to this node
        self._ticked_ns = means.now_ns()
        assert isinstance(client.channel, ChannelParts) and isinstance(client.subscription, SharedSubscription)
        self._parts, self._shared = client.channel, client.subscription
        self._parts.upstreams = self._shared.upstreams = self
        client.relay = self

    @property
    def client(self) -> Client:
        """The consumer."""
        return self._client

    @property
    def nodes(self) -> set[str]:
        """Ids of the nodes that it has upstreams to."""
        return {node for node, _ in self._upstreams}

    def add(self, record: NodeRecord) -> None:
        """Give the consumer what a node has, too."""
        if not self._is_over and (record.node, record.incarnation) not in self._upstreams:
            self._idle_ns[self._open(record)] = 0

    def _messages(self, upstream: Upstream, frames: bytes, ids: Iterable[int]) -> None:
        self._idle_ns[upstream] = 0
        self._outcomes[upstream] = Outcome.USEFUL
        super()._messages(upstream, frames, ids)

    def tick(self, now_ns: int) -> None:
        """Close what brings nothing, or is of no use to this consumer, and share out anew."""
        passed_ns, self._ticked_ns = now_ns - self._ticked_ns, now_ns
        if self._mine or self._shared.in_flight_count:
            self._served_ns[None] = now_ns
        for upstream in list(self._upstreams.values()):
            in_flight = upstream.in_flight
            if in_flight and in_flight[next(iter(in_flight))] <= now_ns:
                self._outcomes[upstream] = Outcome.UNFINISHED
                upstream.close("a message timed out")
                continue
            if upstream.granted or in_flight:
                self._served_ns[upstream], self._without_ns[upstream] = now_ns, 0
            else:
                self._without_ns[upstream] = self._without_ns.get(upstream, 0) + passed_ns
            if not upstream.is_open or (upstream.granted and not in_flight):
                self._idle_ns[upstream] += passed_ns
            if upstream.is_open and self._idle_ns[upstream] >= IDLE_NS:
                self._outcomes.setdefault(upstream, Outcome.USELESS)
                upstream.close("nothing comes")
            elif self._without_ns[upstream] >= max(self._msg_timeout_ns, SUBSCRIBED_WITHIN_S * 1_000_000_000):
                upstream.close("the consumer takes nothing")
            elif self._idle_ns[upstream] >= SUBSCRIBED_WITHIN_S * 1_000_000_000:
                upstream.close("it does not answer")
        self.share()

    def _opened(self, upstream: Upstream) -> None:
        self._idle_ns[upstream] = 0
        super()._opened(upstream)

    def _lost(self, upstream: Upstream, reason: RemoteProtocolError | str) -> None:
        record = upstream.record
        if self._upstreams.get((record.node, record.incarnation)) is upstream:
            del self._upstreams[record.node, record.incarnation]
        for known in (self._idle_ns, self._without_ns, self._served_ns):
            known.pop(upstream, None)
        outcome = self._outcomes.pop(upstream, Outcome.LOST)
        if self._is_over:
            return
        self._on_outcome(self, record.node, outcome)
        if self._upstreams:
            self.share()
        else:
            self.close()

    def close(self) -> None:
        """Have the consumer served here alone: it is gone, or nothing more comes from elsewhere."""
        if self._is_over:
            return
        self._is_over = True
        for_each(list(self._upstreams.values()), lambda upstream: upstream.close("the client is gone"), "closing")
        self._parts.upstreams = self._shared.upstreams = None
        self._client.relay = None
        self._lend(0)
        self._on_end(self)

    def _lend(self, count: int) -> None:
        if self._shared.lend(count):
            self._deliver(self._parts)

    def share(self) -> None:
        """Share RDY out between this node and the others; what is in flight here counts before anything is lent."""
        if self._is_over:
            return
        rdy_count, open_ones = self._to_share(self._shared)
        here = self._shared.in_flight_count
        flying = [len(upstream.in_flight) for upstream in open_ones]
        waited = [self._served_ns.get(each, 0) for each in (None, *open_ones)]
        self._mine, *granted = shares(rdy_count, [here, *flying], waited.index(min(waited)))
        free = max(rdy_count - here - sum(flying), 0)
        lent = 0
        for upstream, share, count in zip(open_ones, granted, flying, strict=True):
            more = min(max(share - count, 0), free)
            free -= more
            upstream.grant(min(share, count) + more)
            lent += max(upstream.granted, count)
        self._lend(lent)


async def subscribed_once(peers: Peers, record: NodeRecord, greeting: bytes) -> RemoteProtocolError | str | None:
    """Subscribe at a leader and go again, so that the channel is there; return why that failed."""
    ended: asyncio.Future[RemoteProtocolError | str | None] = asyncio.get_running_loop().create_future()

    def settle(error: RemoteProtocolError | str | None) -> None:
        if not ended.done():
            ended.set_result(error)

    upstream = Upstream(
        peers, record, greeting, 2, False,
        on_open=lambda _upstream: settle(None),
        on_messages=lambda _upstream, _frames, _ids: None,  # without RDY none comes
        on_error=lambda _frame: None,
        on_lost=lambda _upstream, reason: settle(reason),
    )  # fmt: skip
    try:
        return await ended
    finally:
        upstream.close("the channel is there")


def greeting_of(client: Client, event: Subscribe) -> bytes:
    """Return the first bytes of a connection that speaks for a client; OK comes to them twice."""
    negotiated = client.negotiated
    request = msgspec.structs.replace(
        client.request,
        feature_negotiation=False,
        heartbeat_interval=0,
        output_buffer_size=0,
        output_buffer_timeout=0,
        tls_v1=False,
        snappy=False,
        deflate=False,
        sample_rate=0 if negotiated is None else negotiated.sample_rate,
        msg_timeout=0 if negotiated is None else negotiated.msg_timeout_ms,
    )
    body = msgspec.json.encode(request)
    return MAGIC_V2 + commands.identify(body) + commands.sub(event.topic, event.channel)
