"""kill -9 of the driver, its JVM and its workers amid a stream: each message is archived and copied exactly once."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from tests.integration.daemons import SPARK_PATIENCE_S
from tests.spark.processes import Driver, NsqdProcess, assert_each_once, finished, killed_between, numbered

from flintmq.spark.batch_reader import NsqReader
from flintmq.spark.options import SourceOptions

pytestmark = [pytest.mark.spark, pytest.mark.slow]

JOB = Path(__file__).with_name("archive_job.py")
MESSAGES = 10_000


@pytest.mark.timeout(4 * SPARK_PATIENCE_S)
def test_exactly_once_over_kill_9_of_the_driver(nsqd: NsqdProcess, topic: str, tmp_path: Path):
    nsqd.post(f"/topic/create?topic={topic}-copy&partition_num=3")
    published = threading.Thread(target=publish_slowly, args=(nsqd, topic))
    published.start()
    arguments = (nsqd.address, topic, str(tmp_path), "500")
    checkpoint, copying = tmp_path / "checkpoint", tmp_path / "copy-checkpoint"
    for committed, watched, other in ((2, checkpoint, copying), (4, copying, checkpoint)):
        killed_between(lambda: Driver(JOB, *arguments, "continuous"), committed, watched, other)
    published.join(SPARK_PATIENCE_S)
    finished(JOB, *arguments, "now")

    rows = [line.split() for line in (tmp_path / "found.txt").read_text().splitlines()]
    assert_each_once((body.encode() for _, body in rows), MESSAGES)
    assert sorted(int(offset) for offset, _ in rows) == list(range(1, MESSAGES + 1))
    copies = SourceOptions.parse({"nsqd": nsqd.address, "topic": f"{topic}-copy", "columns": "body"})
    reader = NsqReader(copies)
    found = [batch.column("body").to_pylist() for task in reader.partitions() for batch in reader.read(task)]
    assert_each_once((body for some in found for body in some), MESSAGES)


def publish_slowly(nsqd: NsqdProcess, topic: str) -> None:
    """Publish for about as long as the drivers live."""
    for first in range(0, MESSAGES, 250):
        nsqd.publish(topic, numbered(first, first + 250))
        time.sleep(0.3)
