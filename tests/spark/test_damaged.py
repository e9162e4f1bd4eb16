"""A real log that lost a bit: the executor sees it, nsqd is made to look, and people are told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.spark.processes import NsqdProcess, numbered

from flintmq.spark import retry
from flintmq.spark.batch_reader import NsqReader
from flintmq.spark.broker import POOL
from flintmq.spark.errors import DataLost
from flintmq.spark.options import SourceOptions

COUNT = 2_000
PER_BATCH = 100


@pytest.fixture
def damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NsqdProcess]:
    """An nsqd one of whose stored batches, the eleventh of twenty, has a bit that is not as it was written."""
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
    nsqd = NsqdProcess(tmp_path)
    nsqd.publish("t", numbered(0, COUNT), per_mpub=PER_BATCH)
    nsqd.stop()
    (path,) = tmp_path.rglob("*.log")
    data = bytearray(path.read_bytes())
    data[data.index(b"%024d" % (10 * PER_BATCH + 5))] ^= 1
    path.write_bytes(data)
    nsqd.start()
    yield nsqd
    nsqd.stop()
    for connections in POOL._idle.values():
        while connections:
            connections.pop().close()


def read(nsqd: NsqdProcess, **options: str) -> list[int]:
    given = {"nsqd": nsqd.address, "topic": "t", "columns": "body", "fetchMaxBytes": "64KiB", **options}
    reader = NsqReader(SourceOptions.parse(given))
    return [int(body) for task in reader.partitions() for b in reader.read(task) for body in b.column(0).to_pylist()]


def test_a_bit_that_flipped(damaged: NsqdProcess):
    assert json.loads(damaged.get("/damage"))["count"] == 0, "nobody has read it yet"
    with pytest.raises(DataLost, match=r"messages 1001 to 1101 \(exclusive\) are lost: nsqd has set damaged parts"):
        read(damaged)
    assert json.loads(damaged.get("/damage"))["lost"] == PER_BATCH
    left = [*range(10 * PER_BATCH), *range(11 * PER_BATCH, COUNT)]
    assert read(damaged, failOnDataLoss="false") == left
