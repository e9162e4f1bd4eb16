"""Logs that move while Spark reads them.

Each message is archived exactly once, by its number and by its offset.
"""

from __future__ import annotations

import pytest
from tests.integration.daemons import SPARK_PATIENCE_S
from tests.spark.processes import NsqdProcess, assert_each_once, numbered
from tests.spark.test_spark import archived, run

pytestmark = [pytest.mark.spark, pytest.mark.timeout(2 * SPARK_PATIENCE_S)]


def test_a_data_directory_behind_another_port(spark, source, topic, archive, tmp_path):
    """The pod was moved: 500 of its 1,500 messages are new, and no more than these are read."""
    own = NsqdProcess(tmp_path / "own")
    try:
        own.publish(topic, numbered(0, 1000))
        run(archive(source(spark.readStream, nsqd=own.address, channel="c").load(), availableNow=True))
        own.stop()
        own.move()
        own.publish(topic, numbered(1000, 1500))
        moved = source(spark.readStream, nsqd=own.address, channel="c", columns="offset,body,nsqd,log_id")
        progress = run(archive(moved.load(), availableNow=True))
        assert [entry["numInputRows"] for entry in progress] == [500]
        assert_each_once(archived(spark, tmp_path), 1500)
        found = spark.read.parquet(str(tmp_path / "archive"))
        assert found.select("offset").distinct().count() == 1500
        ((label, _),) = progress[0]["sources"][0]["endOffset"][topic].items()
        assert found.where("log_id IS NOT NULL").selectExpr("concat('0/', log_id) AS l").distinct().first().l == label
    finally:
        own.stop()
