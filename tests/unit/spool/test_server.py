"""What a spool answers to FETCH: as much as was asked for, verified by who asks or here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.sim.disk import CrashingDisk

from flintmq.batch import HEADER_BYTES, decode_header
from flintmq.spool.server import Service
from flintmq.storage import PartitionLog, ReadCache
from flintmq.storage.segment import SEGMENT_HEADER_BYTES
from flintmq.wire import commands
from flintmq.wire import server as wire

FETCHED_HEAD_BYTES = 16  # size, type, the sequence to ask for next


def opened(disk: CrashingDisk, damaged: list[Any]) -> PartitionLog:
    log = PartitionLog.open(
        disk.attach(), "t-x", partition=0, segment_bytes=1 << 20, cache=ReadCache(), report=damaged.append, created_ns=5
    )
    log.advance_committed(log.next_sequence)
    return log


def filled(disk: CrashingDisk) -> PartitionLog:
    """A log of ten batches of a message of 1,000 bytes, on the disk alone."""
    log = opened(disk, [])
    for _ in range(10):
        log.append([b"b" * 1000], 1)
    ticket = log.begin_sync()
    assert ticket is not None
    ticket.run()
    log.finish_sync(ticket, None)
    log.close()
    disk.release()
    return opened(disk, [])


def fetched(log: PartitionLog, *, bytes_max: int, is_verified: bool) -> bytes:
    """The batches that a spool answers with when all are asked for."""
    feeds: Any = {"x": SimpleNamespace(log=log)}
    parser = wire.ServerConnection(wire.ServerLimits())
    asked = commands.fetch("x", 0, 1, log.committed_sequence, bytes_max, is_verified=is_verified)
    (event,) = parser.receive_data(commands.MAGIC_V2 + asked)
    return Service(feeds, "spark", b"token", lambda: None).answer(event)[FETCHED_HEAD_BYTES:]


@pytest.mark.parametrize("is_verified", [True, False])
def test_an_answer_is_as_long_as_was_asked_for(is_verified: bool):
    log = filled(CrashingDisk())
    assert len(fetched(log, bytes_max=3500, is_verified=is_verified)) in range(1000, 4000)
    assert len(fetched(log, bytes_max=1 << 20, is_verified=is_verified)) > 10_000


def test_who_verifies_by_himself_gets_what_is_there_and_else_damage_is_found():
    disk = CrashingDisk()
    filled(disk).close()
    disk.release()
    (path,) = [each for each in disk.paths() if each.endswith(".log")]
    disk.flip_bit(path, SEGMENT_HEADER_BYTES + HEADER_BYTES + 100)
    damaged: list[Any] = []
    log = opened(disk, damaged)
    damaged.clear()
    assert decode_header(fetched(log, bytes_max=1 << 20, is_verified=False)).first_sequence == 1
    assert not damaged, "nobody has looked"
    assert decode_header(fetched(log, bytes_max=1 << 20, is_verified=True)).first_sequence == 2
    assert len(damaged) == 1
