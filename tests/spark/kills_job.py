"""The driver of a run of kills: one query archives two topics to Parquet, one copies them to other topics.

Usage: ``kills_job.py <settings as JSON>``, whose ``trigger`` is ``continuous`` or ``now``; the latter also writes what
Spark finds in the archive to ``found.parquet``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from flintmq.spark import session
from flintmq.spark.java import find_java_home
from flintmq.spark.session_settings import QUICK_JVM_FLAGS, with_archive

COLUMNS = "topic,partition,log_id,offset,body"


def main(given: dict[str, Any]) -> None:
    directory = Path(given["directory"])
    lost_after_s = given["lost_after_s"]
    conf = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "768m",
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": with_archive(QUICK_JVM_FLAGS, find_java_home(os.environ), os.environ),
        "spark.executor.heartbeatInterval": "2s",
        "spark.network.timeout": f"{lost_after_s}s",
        "spark.network.timeoutInterval": "2s",
        "spark.sql.shuffle.partitions": "2",
        # tasks that run twice at the same time are what a sink has to bear as well
        "spark.speculation": "true",
        "spark.speculation.multiplier": "2",
        "spark.speculation.minTaskRuntime": "2s",
        "spark.sql.streaming.checkpointFileManagerClass": given["checkpoint_manager"],
    }
    spark = session("kills", given["master"], **conf)
    source = {"nsqd": given["nsqd"], "topics": given["topics"], "columns": COLUMNS, "minPartitions": "2"}
    stream = spark.readStream.format("nsq").options(**source, maxMessagesPerTrigger=given["trigger_messages"])
    when: dict[str, Any] = {"availableNow": True} if given["trigger"] == "now" else {"processingTime": "0 seconds"}
    archived = stream.option("channel", "archive").load().writeStream.format("parquet")
    archived = archived.option("path", str(directory / "rows"))
    copied = stream.option("channel", "copy").load().selectExpr("body", "concat('copy-', topic) AS topic")
    published = copied.writeStream.format("nsq").options(nsqd=given["nsqd"], delivery="once")
    queries = [
        writer.option("checkpointLocation", str(directory / name)).trigger(**when).start()
        for name, writer in (("checkpoint-rows", archived), ("checkpoint-copy", published))
    ]
    print("started", flush=True)
    if given["trigger"] == "continuous":
        spark.streams.awaitAnyTermination()
        return
    for query in queries:
        query.awaitTermination()
    rows: Any = spark.read.parquet(str(directory / "rows")).select(*COLUMNS.split(","))
    pq.write_table(rows.toArrow(), directory / "found.parquet")
    spark.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
