"""Answers that a connection owes and cannot give yet.

Rules of this file: one reply stands for the answers to one command, or to a run of them; it is asked for its frames
once what it waits for has ended. What an answer says beyond OK is its :class:`Receipt`.

Source: Youzan's TCP protocol (the answer to a traced publish), docs/decisions/0002.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, count, repeat
from struct import Struct
from typing import Any, Protocol

from flintmq.broker.partition import Ended, PublishGroup
from flintmq.broker.producers import SequenceGap
from flintmq.errors import RemoteProtocolError
from flintmq.message import FRAME_OVERHEAD_BYTES, SIZE_FIELD_BYTES, TRACE_ID_SIZE, internal_id
from flintmq.wire.commands import COMMANDS
from flintmq.wire.extended import Stored, stored_reply
from flintmq.wire.frames import OK_FRAME, RESPONSE, error_frame, response_frame

NO_TRACE = bytes(TRACE_ID_SIZE)
GAP_CODE = "E_SEQUENCE_GAP"
_STORED_FRAME = Struct(">II2sQ8sQI")
_STORED_SIZE = _STORED_FRAME.size - SIZE_FIELD_BYTES


class PendingReply:
    """An answer that waits for something to end.

    Attributes:
        source: what is waited for.
        command: what is to be answered.
        replies: how many answers it stands for.
        on_stored: called when it ended well.
        receipt: says where messages are stored; None where OK says all.
    """

    __slots__ = ("command", "on_stored", "receipt", "replies", "source")

    def __init__(
        self,
        source: Ended,
        command: str,
        replies: int = 1,
        on_stored: Callable[[], object] | None = None,
        receipt: Receipt | None = None,
    ) -> None:
        self.source = source
        self.command = command
        self.replies = replies
        self.on_stored = on_stored
        self.receipt = receipt

    @property
    def code(self) -> str:
        """The code of the error when it failed."""
        error = self.source.error
        if isinstance(error, RemoteProtocolError):
            return error.code
        return GAP_CODE if isinstance(error, SequenceGap) else COMMANDS[self.command].failure

    @property
    def is_fatal(self) -> bool:
        """Whether the connection is closed when it failed; not by publishes to a topic with partitions."""
        if isinstance(self.source.error, RemoteProtocolError):
            return self.source.error.fatal
        is_kept = isinstance(self.source, PublishGroup) and self.source.partition.meta.is_partitioned
        return not is_kept and COMMANDS[self.command].closes(self.code)

    def note_publisher(self, client: str) -> None:
        """Tell who traces messages where those come from that joined their group last."""
        group = self.source
        if isinstance(group, PublishGroup) and group.partition.events is not None and not group.ended:
            group.partition.events.publisher(group, client)

    def frames(self) -> bytes:
        """The answers when it ended well."""
        found = None if self.receipt is None else self.receipt.frames()
        return OK_FRAME * self.replies if found is None else found

    def error_frame(self) -> bytes:
        """The answer when it failed."""
        error = self.source.error
        if isinstance(error, RemoteProtocolError):
            return error_frame(error.code, error.detail)
        if isinstance(error, SequenceGap):
            return error_frame(GAP_CODE, f"{self.command} {error}")
        return error_frame(self.code, f"{COMMANDS[self.command].family} failed {error}")


class Remote(Protocol):
    """An :class:`Ended` with the answer of another node."""

    ended: bool
    error: BaseException | None

    def frames(self) -> bytes: ...

    def stored(self) -> Stored | None: ...


class RemoteReply(PendingReply):
    """An answer that another node gives.

    Args:
        is_located: it says where messages are stored.
    """

    __slots__ = ("_remote",)

    def __init__(self, source: Any, command: str, replies: int, is_located: bool) -> None:
        super().__init__(source, command, replies)
        self._remote: Remote = source
        if is_located:
            self.receipt = RemoteReceipt(source)

    def frames(self) -> bytes:
        return self._remote.frames()


class Receipt:
    """Says where messages are stored; to be made behind the publish.

    Args:
        group: that the messages are the last of.
        traces: the trace id of each message; None for one that is answered with OK alone.
        bodies: as they are stored.
        is_several: one answer stands for all.
    """

    __slots__ = ("_first_bytes", "_first_index", "_group", "_is_as_published", "_is_several", "_sizes", "_traces")

    def __init__(
        self, group: PublishGroup, traces: Sequence[bytes | None], bodies: Sequence[bytes], is_several: bool
    ) -> None:
        overhead = FRAME_OVERHEAD_BYTES - (TRACE_ID_SIZE if group.partition.meta.has_raw_ids else 0)
        self._group = group
        self._sizes = [len(body) + overhead for body in bodies]
        self._first_index = group.message_count - len(bodies)
        self._first_bytes = group.frame_bytes - sum(self._sizes)
        self._is_as_published = True
        self._traces = traces
        self._is_several = is_several

    @property
    def is_traced(self) -> bool:
        """Whether the first message has a trace id."""
        return self._traces[0] is not None

    def stored(self) -> Stored | None:
        """Return where the first message is; None when its topic was deleted before it was written."""
        group = self._group
        if group.first_sequence < 0:
            return None
        if self._is_as_published and group.longer_from < group.message_count:
            self._is_as_published = False  # its topic got headers before it was written
            end = self._first_index + len(self._sizes)
            longer_count = max(0, end - max(self._first_index, group.longer_from))
            first_longer = len(self._sizes) - longer_count
            self._sizes = [size + (index >= first_longer) for index, size in enumerate(self._sizes)]
            self._first_bytes += max(0, self._first_index - group.longer_from)
        trace_id = 0 if self._is_several else int.from_bytes(self._traces[0] or b"", "big")
        sizes = self._sizes if self._is_several else self._sizes[:1]
        return Stored(
            internal_id(group.partition.number, group.first_sequence + self._first_index),
            trace_id,
            group.first_offset + self._first_bytes,
            sum(sizes),
        )

    def frames(self) -> bytes | None:
        """The answers; None where they are all OK alone."""
        first = self.stored()
        if first is None:
            return None
        if self._is_several:
            return response_frame(stored_reply(first._replace(raw_size=min(first.raw_size, 2**32 - 1))))
        traces = self._traces
        found = map(
            _STORED_FRAME.pack,
            repeat(_STORED_SIZE),
            repeat(RESPONSE),
            repeat(b"OK"),
            count(first.internal_id),
            [trace or NO_TRACE for trace in traces],
            accumulate(self._sizes[:-1], initial=first.offset),
            self._sizes,
        )
        if None in traces:
            return b"".join(OK_FRAME if trace is None else frame for trace, frame in zip(traces, found, strict=False))
        return b"".join(found)


class RemoteReceipt(Receipt):
    """Says where another node has stored messages."""

    __slots__ = ("_remote",)

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    @property
    def is_traced(self) -> bool:
        return True

    def stored(self) -> Stored | None:
        return self._remote.stored()

    def frames(self) -> bytes | None:
        return self._remote.frames()
