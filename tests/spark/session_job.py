"""What has to be the same in every kind of session: a batch, a stream to files, a write; and what it was warned of.

Usage: ``session_job.py <nsqd> <topic> <directory> [<words>]``, for spark-submit and for a Python of one's own. Words:
``own`` builds the session as anybody does, ``session`` with flintmq.spark, ``both`` one after the other.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any


def same(spark: Any, nsqd: str, topic: str, directory: str) -> dict[str, Any]:
    """Use a topic of 1000 messages in each way; what came."""
    given = {"nsqd": nsqd, "topic": topic}
    rows = spark.read.format("nsq").options(**given).load()
    stream = spark.readStream.format("nsq").options(**given, channel="session").load()
    writer = stream.writeStream.format("parquet").option("checkpointLocation", f"{directory}/checkpoint")
    query = writer.trigger(availableNow=True).start(f"{directory}/archive")
    query.awaitTermination()
    progress = query.lastProgress
    latest = json.loads(progress if isinstance(progress, str) else progress.json)["sources"][0]["latestOffset"]
    latest = json.loads(latest) if isinstance(latest, str) else latest
    out = {"nsqd": nsqd, "topic": f"{topic}-out"}
    once = rows.select("body").write.format("nsq").options(**out, writeId="same").mode("append")
    once.save()
    once.save()
    try:
        _ = spark.read.format("nsq").options(**given, topc="x").load().schema  # Spark Connect asks no sooner
        failure = "none"
    except Exception as error:  # noqa: BLE001 - of a class of each kind of session
        failure = str(error)
    return {
        "count": rows.count(),
        "columns": len(rows.columns),
        "archived": spark.read.parquet(f"{directory}/archive").count(),
        "lag": [each["messages"] for each in latest["_lag"][topic].values()],
        "written": spark.read.format("nsq").options(**out).load().count(),
        "says": "did you mean topic?" in failure,
    }


SAME = {"count": 1000, "columns": 10, "archived": 1000, "lag": [0], "written": 1000, "says": True}


def main(nsqd: str, topic: str, directory: str, words: str = "session") -> None:
    from flintmq.spark import session

    logging.basicConfig(format="%(name)s %(message)s", stream=sys.stdout)
    if words == "own" or words == "both":
        from pyspark.sql import SparkSession

        spark = SparkSession.builder.appName("own").getOrCreate()
    if words == "both":
        assert session("ours") is spark and session("ours") is spark
    if words == "session":
        spark = session("ours")
    conf = spark.sparkContext.getConf()
    print("said", json.dumps(same(spark, nsqd, topic, directory)))
    print("master", spark.sparkContext.master, conf.get("spark.sql.session.timeZone"), conf.get("spark.app.name"))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
