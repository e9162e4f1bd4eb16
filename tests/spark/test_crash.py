"""kill -9 of the driver, its JVM and its workers amid a stream: each message is archived and copied exactly once."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from tests.integration.daemons import SPARK_PATIENCE_S
from tests.spark.processes import STARTS, Driver, NsqdProcess, assert_each_once, finished, numbered

from flintmq.pipeline.streams import forget_unfinished
from flintmq.spark.batch_reader import NsqReader
from flintmq.spark.options import SourceOptions

pytestmark = [pytest.mark.spark, pytest.mark.slow]

JOB = Path(__file__).with_name("archive_job.py")
MESSAGES = 10_000


def logged(checkpoint: Path, name: str) -> int:
    """Micro-batches in the log of planned (``offsets``) or finished (``commits``) ones."""
    directory = checkpoint / name
    return sum(path.name.isdecimal() for path in directory.iterdir()) if directory.is_dir() else 0


def is_between(checkpoint: Path) -> bool:
    """Whether a micro-batch is planned and not finished."""
    done = logged(checkpoint, "commits")
    return logged(checkpoint, "offsets") > done


def wait_until_between(driver: Driver, checkpoint: Path, committed: int) -> None:
    """Wait until a micro-batch is planned and not finished, after so many finished ones, or the driver has starved."""
    deadline = time.monotonic() + SPARK_PATIENCE_S
    while time.monotonic() < deadline and driver.is_running:
        if logged(checkpoint, "commits") >= committed and is_between(checkpoint):
            return
        time.sleep(0.005)
    done = logged(checkpoint, "commits")
    assert driver.is_starved, f"{done} micro-batches finished, waited for {committed}:\n{driver.story()}"


@pytest.mark.timeout(4 * SPARK_PATIENCE_S)
def test_exactly_once_over_kill_9_of_the_driver(nsqd: NsqdProcess, topic: str, tmp_path: Path):
    nsqd.post(f"/topic/create?topic={topic}-copy&partition_num=3")
    published = threading.Thread(target=publish_slowly, args=(nsqd, topic))
    published.start()
    arguments = (nsqd.address, topic, str(tmp_path), "500")
    checkpoint, copying = tmp_path / "checkpoint", tmp_path / "copy-checkpoint"
    for committed, watched in ((2, checkpoint), (4, copying)):
        for _ in range(STARTS):
            driver = Driver(JOB, *arguments, "continuous")
            try:
                wait_until_between(driver, watched, committed)
            finally:
                driver.kill()
            for each in (checkpoint, copying):
                forget_unfinished(each)  # else Spark 4.3 never starts that query again
            if is_between(watched):
                break
        assert is_between(watched), "no micro-batch was cut in two, the test proved nothing"
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
