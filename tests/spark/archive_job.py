"""A driver to be killed: archives a topic to Parquet with nothing but PySpark's own session.

That ``format("nsq")`` is known without registration is part of what is tested.

Usage: ``archive_job.py <nsqd> <topic> <directory> <messages per trigger> <seconds between triggers, or now>``
"""

from __future__ import annotations

import sys
from typing import Any

from pyspark.sql import SparkSession


def main(nsqd: str, topic: str, directory: str, messages: str, trigger: str) -> None:
    builder: Any = SparkSession.builder
    spark = (
        builder.master("local[2]")
        .appName("archive")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        .getOrCreate()
    )
    stream = spark.readStream.format("nsq").option("nsqd", nsqd).option("topic", topic)
    writer = (
        stream.option("channel", "archive")
        .option("maxMessagesPerTrigger", messages)
        .option("minPartitions", "2")
        .load()
        .writeStream.format("parquet")
        .option("path", f"{directory}/archive")
        .option("checkpointLocation", f"{directory}/checkpoint")
    )
    when: dict[str, Any] = {"availableNow": True} if trigger == "now" else {"processingTime": f"{trigger} seconds"}
    writer.trigger(**when).start().awaitTermination()
    print("finished", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
