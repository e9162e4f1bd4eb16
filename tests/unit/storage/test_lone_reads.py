"""Messages read in no order, as those are that come due, cost a little read each and not a read ahead."""

import random

import pytest
from tests.unit.storage.log_kit import Kit

from flintmq.limits import READ_AHEAD_BYTES, TAIL_CACHE_BYTES
from flintmq.testing.files import MemoryFile

MESSAGE_BYTES = 400


def filled():
    log = Kit(segment_bytes=100_000_000).open()
    while log.size_bytes < 20 * TAIL_CACHE_BYTES:
        log.append([bytes(MESSAGE_BYTES)], 1, due_ns=1)  # deferred ones are never joined
    log.advance_committed(log.next_sequence)
    return log


def count_bytes(monkeypatch):
    sizes = []
    honest = MemoryFile.read_at

    def read_at(self, position, size):
        data = honest(self, position, size)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(MemoryFile, "read_at", read_at)
    return sizes


@pytest.mark.slow
def test_in_no_order(monkeypatch):
    log = filled()
    sizes = count_bytes(monkeypatch)
    chance = random.Random(7)
    wanted = chance.sample(range(1, log.next_sequence - 3000), 500)
    for sequence in wanted:
        batch = log.read(sequence)
        assert batch.first <= sequence < batch.end
    assert sum(sizes) / len(wanted) < READ_AHEAD_BYTES / 8


@pytest.mark.slow
def test_in_order(monkeypatch):
    log = filled()
    sizes = count_bytes(monkeypatch)
    sequence, count = 1, 0
    while sequence < log.next_sequence - 3000:
        batch = log.read(sequence)
        sequence, count = batch.end, count + 1
    assert sum(sizes) < 1.2 * log.size_bytes
    assert len(sizes) < 2 * log.size_bytes / READ_AHEAD_BYTES + 10
