"""OFFSETS, FETCH and PRODUCERS: what clients are answered about partition logs, and what stands in them.

Rules of this file: one function per command, from an event to a frame; nothing is kept and nobody else is asked.

Source: docs/reference/protocol.md, docs/decisions/0006.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from flintmq.broker.broker import Broker
from flintmq.broker.partition import Partition
from flintmq.broker.topic import Topic
from flintmq.errors import RemoteProtocolError, StorageError
from flintmq.limits import FETCH_BYTES_MAX
from flintmq.nsqd.leadership import LedElsewhere, not_leader
from flintmq.wire import server as wire
from flintmq.wire.commands import FETCH_UNVERIFIED
from flintmq.wire.frames import keep_room_for_fetched, response_frame

log = logging.getLogger(__name__)


def offsets(broker: Broker, event: wire.Offsets, elsewhere: Sequence[LedElsewhere] | None = None) -> bytes:
    """Answer OFFSETS: where each partition of a topic begins and ends, and where the others are.

    Args:
        elsewhere: partitions of a topic of the cluster that cannot be read here; None: it is no business of a cluster.

    Raises:
        RemoteProtocolError: the topic is not here.
    """
    topic = _topic("OFFSETS", broker, event.topic, elsewhere)
    rows = []
    for partition in _partitions(topic, elsewhere):
        start_ns, end_ns = _timestamps(partition.log)
        row = {
            "partition": partition.number,
            "log_id": f"{partition.log.log_id:016x}",
            "epoch": partition.log.epoch,
            "start": partition.log.start_sequence,
            "end": partition.log.committed_sequence,
            "start_timestamp": start_ns,
            "end_timestamp": end_ns,
            "max_timestamp": partition.log.timestamp_max,
            "size_bytes": partition.log.size_bytes,
        }
        if event.timestamp_ns is not None:
            row["at"] = min(partition.log.sequence_at(event.timestamp_ns), partition.log.committed_sequence)
        rows.append(row)
    return response_frame(msgspec.json.encode({"topic": event.topic, "partitions": rows, **_elsewhere(elsewhere)}))


def producers(broker: Broker, event: wire.AskProducers, elsewhere: Sequence[LedElsewhere] | None = None) -> bytes:
    """Answer PRODUCERS: the last sequences taken of some producers, by partition, and where the other partitions are.

    Args:
        elsewhere: as for :func:`offsets`.

    Raises:
        RemoteProtocolError: the topic is not here.
    """
    topic = _topic("PRODUCERS", broker, event.topic, elsewhere)
    rows = [
        {
            "partition": partition.number,
            "log_id": f"{partition.log.log_id:016x}",
            "epoch": partition.log.epoch,
            "producers": {each.decode(): last for each, last in partition.published_by(event.prefix).items()},
        }
        for partition in _partitions(topic, elsewhere)
    ]
    meta = None if topic is None else topic.meta
    form = {
        "partition_num": 0 if meta is None or not meta.is_partitioned else meta.partition_num,
        "has_headers": meta is not None and meta.extend_support,
    }
    answer = {"topic": event.topic, **form, "partitions": rows, **_elsewhere(elsewhere)}
    return response_frame(msgspec.json.encode(answer))


def _topic(command: str, broker: Broker, name: str, elsewhere: Sequence[LedElsewhere] | None) -> Topic | None:
    topic = broker.topics.get(name)
    if topic is None and elsewhere is None:
        raise _refused("E_TOPIC_NOT_EXIST", f"{command} topic {name} is not on this nsqd")
    if topic is None and not elsewhere:
        raise not_leader(command, name, None, "is being created", fatal=False)
    return topic


def _partitions(topic: Topic | None, elsewhere: Sequence[LedElsewhere] | None) -> list[Partition]:
    """Return the partitions that are served here."""
    others = {each.number for each in elsewhere or ()}
    return [] if topic is None else [each for each in topic.partitions.values() if each.number not in others]


def _elsewhere(elsewhere: Sequence[LedElsewhere] | None) -> dict[str, Any]:
    if elsewhere is None:
        return {}
    rows = [
        {"partition": each.number, "log_id": f"{each.log_id:016x}", "epoch": each.epoch, "nsqd": each.address}
        for each in elsewhere
    ]
    return {"elsewhere": rows}


def fetch(broker: Broker, event: wire.Fetch) -> tuple[bytes | memoryview, int]:
    """Read what FETCH asks for: the stored batches that overlap a range, and the sequence to ask for next.

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
    keep_room_for_fetched()
    read = partition.log.fetch_unverified if event.bytes_max & FETCH_UNVERIFIED else partition.log.fetch
    bytes_max = min(event.bytes_max & ~FETCH_UNVERIFIED, FETCH_BYTES_MAX)
    try:
        return read(event.start, min(event.end, end), bytes_max)
    except StorageError as error:
        log.error("FETCH %s: %s", event.topic, error)
        raise _refused("E_FETCH_FAILED", f"FETCH failed {error}") from error


def _refused(code: str, detail: str) -> RemoteProtocolError:
    return RemoteProtocolError(code, detail, fatal=False)


def _timestamps(log: Any) -> tuple[int, int]:
    """Timestamps of a log's first and last message in ns, zeros when it is empty."""
    first = log.read(log.start_sequence)
    last = log.read(log.committed_sequence - 1)
    if first is None or last is None or first.first >= log.committed_sequence:
        return 0, 0
    return first.header.timestamp_min, last.timestamp_ns
