"""The Spark side of the demo, a process of its own: ``python -m flintmq.demo.archiver``.

It archives a topic to Parquet files by date while the topic is published, and computes the mean departure delay per
carrier and month from them, again and again while they grow.

The rules of this file: one request per line on stdin, one answer per line on stdout, both JSON; events may come
between. Everything else that anybody writes to stdout or stderr (Java does) goes to stderr, which is a log file. The
process ends when stdin does, so it cannot outlive the demo::

    {"do": "archive", "topic": "flights", ...}  ->  {"result": null}  or  {"error": "..."}
                                                    {"event": "archived", "rows": 50000}
                                                    {"event": "delays", "rows": 50000, "worst": ["OO", 8, 64.0, 120],
                                                     "compared": 150, "too_small": 20}
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from flintmq.demo.flights import SCHEMA
from flintmq.errors import FlintError
from flintmq.spark import session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

CHANNEL = "archive"
MESSAGES_PER_TRIGGER = 50_000
_POLL_S = 0.25
_DRAIN_POLLS_MAX = 240  # a minute; what is missing then is told by the comparison
FLIGHTS_MIN = 100  # a mean of fewer flights is no news


class Voice:
    """Says JSON lines, from any thread."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._lock = threading.Lock()

    def say(self, **message: Any) -> None:
        """Write one line."""
        with self._lock:
            self._out.write(json.dumps(message) + "\n")
            self._out.flush()


class Stream:
    """One streaming query that archives a topic; tells how far it is until it is stopped."""

    def __init__(
        self, spark: SparkSession, voice: Voice, topic: str, nsqd: str, directory: Path, delays_each: int
    ) -> None:
        self._spark = spark
        self._voice = voice
        self._delays_each = delays_each
        self._path = directory / topic
        self._is_stopped = threading.Event()
        self._query = self._start(topic, nsqd, directory / f"{topic}.checkpoint")
        targets = (self._tell_rows, self._tell_delays) if delays_each else (self._tell_rows,)
        self._threads = [threading.Thread(target=target) for target in targets]
        for thread in self._threads:
            thread.start()

    def drain(self, count: int) -> int:
        """Wait until everything that was published by now is archived; return how many messages that is.

        Args:
            count: of messages that are there. One question is not enough: Spark takes a moment in which nsqd was away,
                and had nothing new to tell, for the end.
        """
        for _ in range(_DRAIN_POLLS_MAX):
            self._query.processAllAvailable()
            if self._rows() >= count:
                break
            self._is_stopped.wait(_POLL_S)
        return self._rows()

    def stop(self) -> None:
        """End the query and its threads."""
        self._is_stopped.set()
        self._query.stop()
        for thread in self._threads:
            thread.join()

    def _start(self, topic: str, nsqd: str, checkpoint: Path) -> StreamingQuery:
        from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

        messages = (
            self._spark.readStream.format("nsq")
            .option("nsqd", nsqd)
            .option("topic", topic)
            .option("channel", CHANNEL)  # nsqd keeps what this channel has not passed
            .option("columns", "partition,offset,body")
            .option("maxMessagesPerTrigger", MESSAGES_PER_TRIGGER)
            .option("minPartitions", 2)
            .load()
        )
        flights = messages.select(
            "partition",
            "offset",
            F.crc32("body").alias("body_crc32"),
            F.from_json(F.col("body").cast("string"), SCHEMA).alias("flight"),
        ).select("partition", "offset", "body_crc32", "flight.*")
        return (
            flights.writeStream.format("parquet")
            .option("path", str(self._path))
            .option("checkpointLocation", str(checkpoint))
            .partitionBy("date")
            .start()
        )

    def _rows(self) -> int:
        return sum({progress.batchId: progress.numInputRows for progress in self._query.recentProgress}.values())

    def _tell_rows(self) -> None:
        told = 0
        while not self._is_stopped.wait(_POLL_S):
            if (rows := self._rows()) != told:
                self._voice.say(event="archived", rows=rows)
                told = rows

    def _tell_delays(self) -> None:
        told = 0
        while not self._is_stopped.wait(_POLL_S):
            rows = self._rows()
            if rows >= told + self._delays_each:
                found = delays(self._spark.read.parquet(str(self._path)))
                compared = [row for row in found if row[3] >= FLIGHTS_MIN] or found
                worst = max(compared, key=lambda row: row[2])
                too_small = len(found) - len(compared)
                self._voice.say(event="delays", rows=rows, worst=worst, compared=len(compared), too_small=too_small)
                told = rows


class Archiver:
    """Does what requests ask for; its public methods are their names."""

    def __init__(self, voice: Voice) -> None:
        self._voice = voice
        self._spark: SparkSession | None = None
        self._stream: Stream | None = None

    def start_spark(self, directory: str) -> str:
        """Start Spark; return its version.

        Args:
            directory: for what Spark writes aside.
        """
        settings: dict[str, Any] = {
            "spark.ui.enabled": "false",
            "spark.local.dir": directory,
            "spark.sql.warehouse.dir": f"{directory}/warehouse",
        }
        self._spark = session("flintmq demo", **settings)
        return str(self._spark.version)

    def archive(self, topic: str, nsqd: str, directory: str, delays_each: int) -> None:
        """Begin to archive a topic into ``directory/<topic>``.

        Args:
            delays_each: compute the delays whenever so many more flights are archived; 0: never.
        """
        assert self._spark is not None
        self._stream = Stream(self._spark, self._voice, topic, nsqd, Path(directory), delays_each)

    def drain(self, count: int) -> int:
        """Archive what is there, ``count`` messages, and end the query; return the number of messages archived."""
        assert self._stream is not None
        try:
            return self._stream.drain(count)
        finally:
            self._stream.stop()
            self._stream = None

    def delays(self, path: str) -> list[tuple[str, int, float, int]]:
        """Compute the mean departure delay: carrier, month, minutes, flights."""
        return delays(self._read(path))

    def contents(self, path: str, file: str) -> None:
        """Write partition, offset, id and checksum of every row of the archive into an Arrow file."""
        import pyarrow as pa

        table = self._read(path).select("partition", "offset", "id", "body_crc32").toArrow()
        with pa.OSFile(file, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)

    def stop(self) -> None:
        """Stop Spark."""
        if self._stream is not None:
            self._stream.stop()
        if self._spark is not None:
            self._spark.stop()

    def _read(self, path: str) -> DataFrame:
        assert self._spark is not None
        return self._spark.read.parquet(path)


def delays(flights: DataFrame) -> list[tuple[str, int, float, int]]:
    """Compute the mean departure delay of the flights that left: carrier, month, minutes, flights."""
    from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

    departed = flights.where("dep_delay IS NOT NULL").groupBy("carrier", F.month("date").alias("month"))
    rows = departed.agg(F.mean("dep_delay").alias("delay"), F.count("*").alias("flights")).collect()
    return sorted((row["carrier"], row["month"], row["delay"], row["flights"]) for row in rows)


def main() -> None:
    """Answer requests until stdin ends."""
    voice = Voice(os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8"))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    archiver = Archiver(voice)
    try:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                voice.say(result=getattr(archiver, request.pop("do"))(**request))
            except FlintError as error:
                voice.say(error=str(error))
            except Exception as error:  # noqa: BLE001 - whatever it is, the one who asked is told
                voice.say(error=f"{type(error).__name__}: {error}")
    finally:
        archiver.stop()


if __name__ == "__main__":
    main()
