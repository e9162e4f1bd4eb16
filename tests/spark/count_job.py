"""A driver on a machine without Java: prints which Java runs it, and counts a topic in a batch and in a stream.

Usage: ``count_job.py <nsqd> <topic> <directory>``
"""

from __future__ import annotations

import sys
from typing import Any

from flintmq.spark import session


def main(nsqd: str, topic: str, directory: str) -> None:
    spark = session("count", "local[2]", **{"spark.ui.enabled": "false"})
    jvm: Any = spark.sparkContext._jvm
    print("java.home", jvm.System.getProperty("java.home"))
    options = {"nsqd": nsqd, "topic": topic}
    print("batch", spark.read.format("nsq").options(**options).load().count())
    stream = spark.readStream.format("nsq").options(**options).load()
    writer = stream.writeStream.format("parquet").option("checkpointLocation", f"{directory}/checkpoint")
    writer.trigger(availableNow=True).start(f"{directory}/archive").awaitTermination()
    print("stream", spark.read.parquet(f"{directory}/archive").count(), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
