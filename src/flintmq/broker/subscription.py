"""One consumer connection's subscription to a channel: how much it may be sent, and what it holds.

Rules of this file:

- A subscription is owned by one channel at a time; frames to send are appended to ``out``, which the connection writes
  at the end of the loop turn.
- It stands in its channel's line exactly while it can take a message (:mod:`flintmq.broker.ready`): whatever changes
  :attr:`Subscription.capacity` ends with :meth:`Subscription.find_place` or :meth:`Subscription.served`.

Source: NSQ's TCP protocol (RDY is an absolute level), NSQ's topology-aware consumption.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from enum import IntEnum

from flintmq.batch import Batch
from flintmq.broker.ext_filter import ExtFilter
from flintmq.limits import WRITE_BUFFER_HIGH_BYTES
from flintmq.message import with_hex_ids

Layout = Callable[[bytes | memoryview, int], bytes]


class Locality(IntEnum):
    """Nearness of a consumer to this node, nearest first."""

    ZONE = 0
    REGION = 1
    GLOBAL = 2


class Run:
    """Consecutive messages delivered at one moment to one subscription.

    Attributes:
        deadline_ns: monotonic time when those still in flight time out.
        first, end: sequences, end exclusive.
        number: how many messages the subscription had been delivered before.
    """

    __slots__ = ("deadline_ns", "end", "first", "number")

    def __init__(self, deadline_ns: int, first: int, end: int, number: int) -> None:
        self.deadline_ns = deadline_ns
        self.first = first
        self.end = end
        self.number = number


class Subscription:
    """One consumer, as a channel knows it.

    Args:
        locality: consumers with a lower one are served first.

    Attributes:
        out: frames waiting to be written; shared with the connection.
        sample_rate: percent of messages delivered, 0 for all.
        slot: this subscription's value in the channel's window; the channel sets it, 0 without a channel.
        line: of the channel's consumers with this locality, those that can take a message; None without a channel.
        is_watched: whether the channel has noted when its oldest run times out.
        tag: of an extended topic: it gets the messages with this dispatch tag, and no others; empty: see tagged.py.
        ext_filter: of an extended topic: which messages it takes; what it is to get and does not take is finished.
        filtered_count: how many those were.
        has_answered: see :class:`flintmq.budget.Reader`.
        put_bytes: put into ``out`` since :meth:`take_put_bytes`.
        wants_order: it asked for messages in order, one at a time.
        layout: makes what is sent of a stored frame and its virtual offset in the partition; None: frames go as they
            are stored, whole runs at once.
        older_layout: as that, of messages below ``headers_from``, which were stored before their topic had headers.
        headers_from: see :class:`flintmq.broker.partition.Partition`.
        has_hex_ids: of a topic with partitions: it is sent ids as of a plain topic; :attr:`layout` sees to it.
        is_located: it is told where each message is; likewise.
    """

    __slots__ = (
        "_is_open",
        "_rdy_count",
        "_room_bytes",
        "ext_filter",
        "filtered_count",
        "finish_count",
        "has_answered",
        "has_hex_ids",
        "headers_from",
        "in_flight_count",
        "is_located",
        "is_watched",
        "layout",
        "line",
        "locality",
        "mark",
        "max_msg_timeout_ns",
        "message_count",
        "msg_timeout_ns",
        "older_layout",
        "out",
        "owner",
        "put_bytes",
        "requeue_count",
        "runs",
        "sample_rate",
        "slot",
        "tag",
        "wants_order",
    )

    def __init__(
        self,
        out: list[bytes | memoryview],
        msg_timeout_ns: int,
        max_msg_timeout_ns: int,
        sample_rate: int = 0,
        owner: object = None,
        locality: Locality = Locality.GLOBAL,
    ) -> None:
        self.out = out
        self.msg_timeout_ns = msg_timeout_ns
        self.max_msg_timeout_ns = max_msg_timeout_ns
        self.sample_rate = sample_rate
        self.owner = owner
        self.locality = locality
        self.in_flight_count = 0
        self.message_count = 0
        self.put_bytes = 0
        self.finish_count = 0
        self.has_answered = False
        self.requeue_count = 0
        self.slot = 0
        self.mark = b""
        self.line: OrderedDict[Subscription, None] | None = None
        self.is_watched = False
        self.tag = ""
        self.ext_filter: ExtFilter | None = None
        self.filtered_count = 0
        self.wants_order = False
        self.layout: Layout | None = None
        self.older_layout: Layout | None = None
        self.headers_from = 0
        self.has_hex_ids = False
        self.is_located = False
        self.runs: deque[Run] = deque()
        self._rdy_count = 0
        self._room_bytes = WRITE_BUFFER_HIGH_BYTES
        self._is_open = False

    @property
    def rdy_count(self) -> int:
        """The level the client set; it may hold that many messages."""
        return self._rdy_count

    @rdy_count.setter
    def rdy_count(self, count: int) -> None:
        self._rdy_count = count
        self.find_place()

    @property
    def room_bytes(self) -> int:
        """Bytes that may be put into ``out`` before the connection has to drain."""
        return self._room_bytes

    @room_bytes.setter
    def room_bytes(self, room_bytes: int) -> None:
        had_room = self._room_bytes > 0
        self._room_bytes = room_bytes
        if had_room != (room_bytes > 0):
            self.find_place()

    @property
    def is_open(self) -> bool:
        """False until SUB was answered and after CLS: nothing is delivered."""
        return self._is_open

    @is_open.setter
    def is_open(self, is_open: bool) -> None:
        self._is_open = is_open
        self.find_place()

    @property
    def capacity(self) -> int:
        """Messages that may be sent now."""
        return self._rdy_count - self.in_flight_count if self._is_open and self._room_bytes > 0 else 0

    def layout_at(self, sequence: int) -> Layout | None:
        """:attr:`layout` or :attr:`older_layout`, whichever is for a message."""
        return self.layout if sequence >= self.headers_from else self.older_layout

    def laid_out(self, batch: Batch, first: int, end: int) -> bytes | memoryview:
        """Build what is sent of the messages from ``first`` to ``end`` of a batch; only with a layout."""
        if self.layout_at(first) is with_hex_ids:
            return with_hex_ids(batch.frames(first, end))
        return b"".join(self.one(batch.frames(s, s + 1), batch, s) for s in range(first, end))

    def one(self, frame: bytes | memoryview, batch: Batch | None, sequence: int) -> bytes | memoryview:
        """Build what is sent of one frame.

        Args:
            batch: that holds the message; when the log has it no more, its offset is given as 0.
        """
        layout = self.layout_at(sequence)
        if layout is None:
            return frame
        is_there = batch is not None and batch.first <= sequence < batch.end
        return layout(frame, batch.offset_of(sequence) if batch is not None and is_there else 0)

    def find_place(self) -> None:
        """Join the end of the line, keep the place there, or leave it, as capacity says."""
        line = self.line
        if line is None:
            return
        if self.capacity > 0:
            line[self] = None
        else:
            line.pop(self, None)

    def put(self, frames: bytes | memoryview, count: int) -> None:
        """Hand over ``count`` messages; :meth:`served` follows."""
        size = len(frames)
        self.out.append(frames)
        self._room_bytes -= size
        self.put_bytes += size
        self.in_flight_count += count
        self.message_count += count

    @property
    def has_finished(self) -> bool:
        """Whether the consumer has finished a message or given one back, so that it certainly reads."""
        return self.finish_count > 0 or self.requeue_count > 0

    def hold_back(self) -> None:
        """Take nothing more before the connection gives room again; :meth:`served` follows, as for :meth:`put`."""
        self._room_bytes = 0

    def had_one(self) -> None:
        """Take nothing more, as :meth:`hold_back`, behind a delivery that an answer was worth."""
        self._room_bytes = 0
        self.has_answered = False

    def take_put_bytes(self) -> int:
        """Return how many bytes have been put into ``out`` since the last call."""
        put_bytes, self.put_bytes = self.put_bytes, 0
        return put_bytes

    def served(self) -> None:
        """Go to the end of the line, or leave it, after a turn at its front."""
        assert self.line is not None, "only who stands in line is served"
        if self.capacity > 0:
            self.line.move_to_end(self)
        else:
            del self.line[self]

    def describe(self) -> str:
        """One line for humans."""
        return (
            f"subscription slot={self.slot} open={self.is_open} rdy={self.rdy_count} in_flight={self.in_flight_count} "
            f"room_bytes={self.room_bytes} runs={len(self.runs)} locality={self.locality.name.lower()} tag={self.tag!r}"
        )
