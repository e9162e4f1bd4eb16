"""The log of an ephemeral topic is bounded in messages and, by the memory budget, in bytes."""

from flintmq.budget import Budget
from flintmq.storage import MemoryLog

LIMIT_BYTES = 16 * 100_000  # the share of ephemeral topics is 200,000


def test_beyond_its_bytes_messages_are_dropped_and_counted():
    budget = Budget(LIMIT_BYTES)
    log = MemoryLog(0, 1000, budget)
    for _ in range(10):
        log.append([b"x" * 9000, b"y" * 9000], 0)
    assert log.next_sequence - 1 + log.dropped_count == 20
    assert log.size_bytes == budget.ephemeral_bytes
    assert 50_000 < log.size_bytes <= 100_000, "half of the share"
    small = MemoryLog(0, 1000, budget)
    small.append([b"z"], 0)
    assert small.dropped_count == 0
    large = MemoryLog(0, 1000, budget)
    large.append([b"z" * 90_000], 0)
    assert (large.dropped_count, large.next_sequence) == (1, 1)


def test_of_one_publish_what_has_room_is_kept():
    log = MemoryLog(0, 1000, Budget(LIMIT_BYTES))
    log.append([b"x" * 10_000] * 20, 0)
    assert (log.next_sequence - 1, log.dropped_count) == (9, 11)
    log.append([], 0)


def test_what_is_dropped_or_closed_gives_its_room_back():
    budget = Budget(LIMIT_BYTES)
    log = MemoryLog(0, 1000, budget)
    for _ in range(4):
        log.append([b"x" * 10_000], 0)
    log.drop_before(3)
    assert budget.ephemeral_bytes == log.size_bytes < 21_000
    log.close()
    log.close()
    assert budget.ephemeral_bytes == 0
    assert log.read(1) is None
