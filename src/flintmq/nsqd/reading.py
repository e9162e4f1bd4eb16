"""OFFSETS and FETCH: what a client that reads stored batches is answered.

Rules of this file: one function per command, from an event to a frame; nothing is kept and nobody else is asked.

Source: docs/reference/protocol.md, docs/decisions/0006.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from flintmq.broker.broker import Broker
from flintmq.errors import RemoteProtocolError, StorageError
from flintmq.limits import FETCH_BYTES_MAX
from flintmq.nsqd.leadership import LedElsewhere, not_leader
from flintmq.wire import server as wire
from flintmq.wire.frames import UINT32, response_frame

log = logging.getLogger(__name__)


def offsets(broker: Broker, event: wire.Offsets, elsewhere: Sequence[LedElsewhere] | None = None) -> bytes:
    """Answer OFFSETS: where each partition of a topic begins and ends, and where the others are.

    Args:
        elsewhere: partitions of a topic of the cluster that cannot be read here; None: it is no business of a cluster.

    Raises:
        RemoteProtocolError: the topic is not here.
    """
    topic = broker.topics.get(event.topic)
    if topic is None and elsewhere is None:
        raise _refused("E_TOPIC_NOT_EXIST", f"OFFSETS topic {event.topic} is not on this nsqd")
    if topic is None and not elsewhere:
        raise not_leader("OFFSETS", event.topic, None, "is being created", fatal=False)
    unread = {each.number for each in elsewhere or ()}
    rows = []
    for partition in [] if topic is None else topic.partitions.values():
        if partition.number in unread:
            continue
        start_ns, end_ns = _timestamps(partition.log)
        row = {
            "partition": partition.number,
            "log_id": f"{partition.log.log_id:016x}",
            "epoch": partition.log.epoch,
            "start": partition.log.start_sequence,
            "end": partition.log.committed_sequence,
            "start_timestamp": start_ns,
            "end_timestamp": end_ns,
            "size_bytes": partition.log.size_bytes,
        }
        if event.timestamp_ns is not None:
            row["at"] = min(partition.log.sequence_at(event.timestamp_ns), partition.log.committed_sequence)
        rows.append(row)
    answer: dict[str, Any] = {"topic": event.topic, "partitions": rows}
    if elsewhere is not None:
        answer["elsewhere"] = [
            {"partition": each.number, "log_id": f"{each.log_id:016x}", "epoch": each.epoch, "nsqd": each.address}
            for each in elsewhere
        ]
    return response_frame(msgspec.json.encode(answer))


def fetch(broker: Broker, event: wire.Fetch) -> bytes:
    """Answer FETCH: the stored batches that overlap a range.

    Raises:
        RemoteProtocolError: they are not here, or cannot be read now.
    """
    topic = broker.topics.get(event.topic)
    partition = topic.partitions.get(event.partition) if topic is not None else None
    if partition is None:
        what = f"FETCH {event.topic} partition {event.partition} is not on this nsqd"
        raise _refused("E_TOPIC_NOT_EXIST", what)
    if event.epoch != partition.log.epoch:
        raise _refused("E_STALE_EPOCH", f"FETCH epoch {event.epoch}, the log is at {partition.log.epoch}")
    start, end = partition.log.start_sequence, partition.log.committed_sequence
    if not start <= event.start <= end or event.end < event.start:
        raise _refused("E_OFFSET_OUT_OF_RANGE", f"start={start} end={end}")
    try:
        data, following = partition.log.fetch(event.start, min(event.end, end), min(event.bytes_max, FETCH_BYTES_MAX))
    except StorageError as error:
        log.error("FETCH %s: %s", event.topic, error)
        raise _refused("E_FETCH_FAILED", f"FETCH failed {error}") from error
    return b"".join((UINT32.pack(len(data) + 12), b"\0\0\0\0", following.to_bytes(8, "big"), data))


def _refused(code: str, detail: str) -> RemoteProtocolError:
    return RemoteProtocolError(code, detail, fatal=False)


def _timestamps(log: Any) -> tuple[int, int]:
    """Timestamps of a log's first and last message in ns, zeros when it is empty."""
    first = log.read(log.start_sequence)
    last = log.read(log.committed_sequence - 1)
    if first is None or last is None or first.first >= log.committed_sequence:
        return 0, 0
    return first.header.timestamp_min, last.timestamp_ns
