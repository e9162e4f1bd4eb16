"""JSON messages to Parquet by the time in them: ``python examples/spark_event_time.py [nsqd's host:port]``.

A stream counts flights by minute of departure. Messages come late and in any order; a window is written, once, when the
watermark has passed it. Run it again: it goes on where it was.
"""

import json
import random
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql import functions as f

from flintmq.sync import Producer


def publish(nsqd: str, count: int) -> None:
    """Publish as a real producer would: a minute of departures for each 100 messages, up to 30 s late, some broken."""
    begin, chance = datetime.now(UTC), random.Random(1)
    with Producer(nsqd) as producer:
        for first in range(0, count, 100):
            bodies = []
            for number in range(first, first + 100):
                at = begin + timedelta(seconds=number * 0.6 - chance.uniform(0, 30))
                bodies.append(
                    {"at": at.isoformat(), "carrier": chance.choice(("UA", "AA", "DL")), "delay": number % 40}
                )
            producer.mpub("departures", [*(json.dumps(body).encode() for body in bodies), b"no JSON"])


def main(spark: Any, nsqd: str, directory: str, count: int = 1000) -> dict[str, int]:
    publish(nsqd, count)
    messages = (
        spark.readStream.format("nsq")
        .option("nsqd", nsqd)
        .option("topic", "departures")
        .option("channel", "per-minute")  # nsqd shows the lag of this query, and keeps what it has not read
        .option("columns", "body")  # others are not even fetched
        .load()
    )
    said = f.from_json(f.col("body").cast("string"), "at timestamp, carrier string, delay int").alias("said")
    per_minute = (
        messages.select(said)
        .select("said.*")
        .where("at IS NOT NULL")  # what is no JSON, or lacks the time, has nulls
        .withWatermark("at", "1 minute")  # how late a message may be; later ones are left out of their window
        .groupBy(f.window("at", "1 minute").alias("minute"), "carrier")
        .agg(f.count("*").alias("flights"), f.avg("delay").alias("delay"))
        .select("minute.start", "carrier", "flights", "delay", f.to_date("minute.start").alias("dt"))
    )
    query = (
        per_minute.writeStream.format("parquet")
        .option("path", f"{directory}/per-minute")
        .option("checkpointLocation", f"{directory}/per-minute.checkpoint")
        .partitionBy("dt")
        .trigger(availableNow=True)  # all there is, then stop; processingTime="10 seconds" goes on
        .start()
    )
    query.awaitTermination()
    # Spark leaves out files of a micro-batch that was not completed; other readers do not know how. For those:
    # flintmq pipeline rollup, or archive
    (row,) = spark.read.parquet(f"{directory}/per-minute").selectExpr("count(*)", "sum(flights)").collect()
    print(f"{row[0]} windows are closed, with {row[1]} flights of {count} that were published now")
    return {"windows": row[0], "flights": row[1]}


if __name__ == "__main__":
    from flintmq.spark import session

    main(session("event-time"), sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:4150", "flights")
