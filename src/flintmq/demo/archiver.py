"""The Spark side of the demo, a process of its own: ``python -m flintmq.demo.archiver``.

It archives a topic to Parquet files by date while the topic is published, and computes the mean departure delay per
carrier and month from them, again and again while they grow.

The rules of this file: one request per line on stdin, one answer per line on stdout, both JSON; news may come between.
Everything else that is written to stdout or stderr (Java does) goes to stderr, which is a log file. The process ends
when stdin does, so it cannot outlive the demo::

    {"do": "begin", "topic": "flights", ...}  ->  {"result": null}  or  {"error": "..."}
                                                  {"archived": 50000}
                                                  {"say": "delays, from 50,000 flights archived so far: ..."}
"""

from __future__ import annotations

import calendar
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from flintmq.demo.flights import SCHEMA, carrier_names
from flintmq.errors import FlintError
from flintmq.spark import session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CHANNEL = "archive"
MESSAGES_PER_TRIGGER = 50_000
FLIGHTS_MIN = 100  # a mean of fewer flights is no news
_POLL_S = 0.25
_DRAIN_POLLS_MAX = 240  # a minute; what is missing then is told by the comparison

Say = Callable[..., None]


class Archiver:
    """Does what requests ask for; its public methods are their names.

    Args:
        say: writes a line; any thread may call it.
    """

    def __init__(self, say: Say) -> None:
        self._say = say
        self._spark: SparkSession | None = None
        self._is_stopped = threading.Event()

    def start_spark(self, scratch: str) -> str:
        """Start Spark; return its version.

        Args:
            scratch: the directory for what Spark writes aside.
        """
        settings = {
            "spark.ui.enabled": "false",
            "spark.local.dir": scratch,
            "spark.sql.warehouse.dir": f"{scratch}/warehouse",
        }
        self._spark = session("flintmq demo", **settings)
        return str(self._spark.version)

    def begin(self, topic: str, nsqd: str, directory: str, delays_each: int) -> None:
        """Begin to archive a topic into ``directory/<topic>``.

        Args:
            delays_each: compute the delays whenever so many more flights are archived; 0: never.
        """
        from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

        assert self._spark is not None
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
        path = f"{directory}/{topic}"
        self._query = (
            flights.writeStream.format("parquet")
            .option("path", path)
            .option("checkpointLocation", f"{path}.checkpoint")
            .partitionBy("date")
            .start()
        )
        self._is_stopped.clear()
        self._teller = threading.Thread(target=self._tell, args=(path, delays_each), daemon=True)
        self._teller.start()

    def drain(self, count: int) -> int:
        """Archive everything that was published by now, end the query, return the number of messages archived.

        Args:
            count: of messages that are there. To ask Spark once is not enough: it takes a moment in which nsqd was
                away, and had nothing new to tell, for the end.
        """
        for _ in range(_DRAIN_POLLS_MAX):
            self._query.processAllAvailable()
            if self._rows() >= count:
                break
            self._is_stopped.wait(_POLL_S)
        rows = self._rows()
        self._is_stopped.set()
        self._teller.join()
        self._query.stop()
        return rows

    def delays(self, path: str) -> list[tuple[str, int, float, int]]:
        """Compute the mean departure delay of the flights that left: carrier, month, minutes, flights."""
        from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

        departed = self._read(path).where("dep_delay IS NOT NULL").groupBy("carrier", F.month("date").alias("month"))
        rows = departed.agg(F.mean("dep_delay").alias("delay"), F.count("*").alias("flights")).collect()
        return sorted((row["carrier"], row["month"], row["delay"], row["flights"]) for row in rows)

    def contents(self, path: str, file: str) -> None:
        """Write partition, offset, id and checksum of every row of the archive into an Arrow file."""
        import pyarrow as pa

        table = self._read(path).select("partition", "offset", "id", "body_crc32").toArrow()
        with pa.OSFile(file, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)

    def stop(self) -> None:
        """Stop Spark, if it runs."""
        if self._spark is not None:
            self._spark.stop()

    def _read(self, path: str) -> DataFrame:
        assert self._spark is not None
        return self._spark.read.parquet(path)

    def _rows(self) -> int:
        return sum({progress.batchId: progress.numInputRows for progress in self._query.recentProgress}.values())

    def _tell(self, path: str, delays_each: int) -> None:
        told = computed = 0
        while not self._is_stopped.wait(_POLL_S):
            rows = self._rows()
            if rows != told:
                self._say(archived=rows)
                told = rows
            if delays_each and rows >= computed + delays_each:
                self._say(say=worst_delay(rows, self.delays(path)))
                computed = rows


def worst_delay(rows: int, delays: Sequence[tuple[str, int, float, int]]) -> str:
    """Say what is known of the delays so far, and from how much.

    Args:
        rows: flights in the archive.
    """
    compared = [delay for delay in delays if delay[3] >= FLIGHTS_MIN]
    known = f"delays, from {rows:,} flights archived so far"
    if not compared:
        return f"{known}: no carrier has {FLIGHTS_MIN} in a month yet"
    code, month, minutes, flights = max(compared, key=lambda delay: delay[2])
    return (
        f"{known}: of {len(compared)} carriers' months with {FLIGHTS_MIN} or more, the worst is "
        f"{carrier_names().get(code, code)}'s {calendar.month_name[month]}, {minutes:.0f} minutes on average of "
        f"{flights:,} flights"
    )


def main() -> None:
    """Answer requests until stdin ends."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    lock = threading.Lock()

    def say(**message: Any) -> None:
        with lock:
            out.write(json.dumps(message) + "\n")
            out.flush()

    archiver = Archiver(say)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            say(result=getattr(archiver, request.pop("do"))(**request))
        except FlintError as error:
            say(error=str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, the demo is told
            say(error=f"{type(error).__name__}: {error}")
    archiver.stop()


if __name__ == "__main__":
    main()
