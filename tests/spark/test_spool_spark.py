"""``mode=spool`` and ``mode=direct`` under Spark itself: kill -9 of a driver, and another one goes on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tests.integration.daemons import SPARK_PATIENCE_S
from tests.spark.processes import Driver, PlainNsqd, assert_each_once, killed_between, numbered
from tests.spark.spool_job import start

pytestmark = [pytest.mark.spark, pytest.mark.slow]

JOB = Path(__file__).with_name("spool_job.py")
MODES = ("spool", "direct")


class Publisher(threading.Thread):
    """Publishes some messages at a time until a driver is killed, and some more then.

    Attributes:
        count: messages, which are their numbers.
    """

    def __init__(self, nsqd: PlainNsqd, topic: str) -> None:
        super().__init__()
        self.count = 0
        self._killed = threading.Event()
        self._nsqd = nsqd
        self._topic = topic

    def run(self) -> None:
        while not self._killed.wait(0.2):
            self._publish(10)
        self._publish(300)

    def _publish(self, count: int) -> None:
        self._nsqd.publish(self._topic, numbered(self.count, self.count + count))
        self.count += count

    def end(self) -> None:
        self._killed.set()
        self.join(SPARK_PATIENCE_S)


@pytest.mark.timeout(4 * SPARK_PATIENCE_S)
def test_nothing_is_lost_over_kill_9_of_the_driver(spark: Any, topic: str, tmp_path: Path):
    """Nothing comes twice either: a spool stores once what nsqd delivers again."""
    nsqd = PlainNsqd(tmp_path / "nsqd")
    for path in (f"topic/create?topic={topic}", *(f"channel/create?topic={topic}&channel={mode}" for mode in MODES)):
        nsqd.post(f"/{path}")
    publisher = Publisher(nsqd, topic)
    publisher.start()
    try:
        try:
            checkpoint = tmp_path / "spool" / "checkpoint"
            killed_between(lambda: Driver(JOB, nsqd.address, topic, str(tmp_path)), 2, checkpoint)
        finally:
            publisher.end()
        rows = {}
        for mode in MODES:  # one goes on with what the driver has left, the other begins
            start(spark, nsqd.address, topic, tmp_path, mode, availableNow=True).awaitTermination(SPARK_PATIENCE_S)
            found = spark.read.parquet(str(tmp_path / mode / "rows"))
            rows[mode] = [(row["offset"], bytes(row["body"])) for row in found.collect()]
        for mode in MODES:
            assert_each_once((body for _, body in rows[mode]), publisher.count)
            assert sorted(offset for offset, _ in rows[mode]) == list(range(1, publisher.count + 1))
            assert not nsqd.unfinished(topic, mode)
    finally:
        publisher.end()
        nsqd.stop()
