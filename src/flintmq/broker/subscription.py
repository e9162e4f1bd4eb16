"""One consumer connection's subscription to a channel: how much it may be sent, and what it holds.

Rules of this file: a subscription is owned by one channel at a time; frames to send are appended to ``out``, which the
connection writes at the end of the loop turn.

Source: reference/nsq.md 1.4 (RDY is an absolute level) and 1.10.
"""

from __future__ import annotations

from collections import deque

from flintmq.limits import WRITE_BUFFER_HIGH_BYTES


class Run:
    """Consecutive messages delivered at one moment to one subscription.

    Attributes:
        deadline_ns: monotonic time when those still in flight time out.
        first, end: sequences, end exclusive.
    """

    __slots__ = ("deadline_ns", "end", "first")

    def __init__(self, deadline_ns: int, first: int, end: int) -> None:
        self.deadline_ns = deadline_ns
        self.first = first
        self.end = end


class Subscription:
    """What a channel knows of one consumer.

    Attributes:
        out: frames waiting to be written; shared with the connection.
        rdy_count: the level the client set; it may hold that many messages.
        room_bytes: how much more may be put into ``out`` before the connection has to drain.
        is_open: False until SUB was answered and after CLS: nothing is delivered.
        sample_rate: percent of messages delivered, 0 for all.
        slot: this subscription's value in the channel's window; the channel sets it.
    """

    __slots__ = (
        "finish_count",
        "in_flight_count",
        "is_open",
        "mark",
        "max_msg_timeout_ns",
        "message_count",
        "msg_timeout_ns",
        "out",
        "owner",
        "rdy_count",
        "requeue_count",
        "room_bytes",
        "runs",
        "sample_rate",
        "slot",
    )

    def __init__(
        self,
        out: list[bytes | memoryview],
        msg_timeout_ns: int,
        max_msg_timeout_ns: int,
        sample_rate: int = 0,
        owner: object = None,
    ) -> None:
        self.out = out
        self.msg_timeout_ns = msg_timeout_ns
        self.max_msg_timeout_ns = max_msg_timeout_ns
        self.sample_rate = sample_rate
        self.owner = owner
        self.rdy_count = 0
        self.in_flight_count = 0
        self.message_count = 0
        self.finish_count = 0
        self.requeue_count = 0
        self.room_bytes = WRITE_BUFFER_HIGH_BYTES
        self.is_open = False
        self.slot = 0
        self.mark = b""
        self.runs: deque[Run] = deque()

    @property
    def capacity(self) -> int:
        """How many more messages may be sent now."""
        return self.rdy_count - self.in_flight_count if self.is_open and self.room_bytes > 0 else 0

    def describe(self) -> str:
        """One line for humans."""
        return (
            f"subscription slot={self.slot} open={self.is_open} rdy={self.rdy_count} in_flight={self.in_flight_count} "
            f"room_bytes={self.room_bytes} runs={len(self.runs)}"
        )
