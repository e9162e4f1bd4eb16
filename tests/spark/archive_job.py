"""A driver to be killed: archives a topic to Parquet and copies it to another topic, and tells what is archived.

Usage: ``archive_job.py <nsqd> <topic> <directory> <messages per trigger> <trigger: continuous or now>``
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from flintmq.spark.session import session


def main(nsqd: str, topic: str, directory: str, messages: str, trigger: str) -> None:
    spark = session("archive", "local[2]", **{"spark.ui.enabled": "false"})
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
    when: dict[str, Any] = {"availableNow": True} if trigger == "now" else {"processingTime": "0 seconds"}
    copied = (
        stream.option("maxMessagesPerTrigger", messages)
        .load()
        .selectExpr("body", "cast(offset % 100 AS string) AS key")
        .writeStream.format("nsq")
        .option("nsqd", nsqd)
        .option("topic", f"{topic}-copy")
        .option("delivery", "once")
        .option("checkpointLocation", f"{directory}/copy-checkpoint")
    )
    queries = [each.trigger(**when).start() for each in (writer, copied)]
    if trigger != "now":
        spark.streams.awaitAnyTermination()  # one that fails ends the driver, though the other would go on
    for query in queries:
        query.awaitTermination()
    rows = spark.read.parquet(f"{directory}/archive").select("offset", "body").collect()
    Path(directory, "found.txt").write_text("\n".join(f"{row.offset} {row.body.decode()}" for row in rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
