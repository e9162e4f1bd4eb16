"""Streams a topic of an nsqd without offsets into Parquet, through a spool, until it is killed.

Usage: ``spool_job.py <nsqd> <topic> <directory>``
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from flintmq.spark import session


def start(spark: Any, nsqd: str, topic: str, directory: Path, mode: str, **trigger: Any) -> Any:
    """Start the query of one mode; everything of it is below ``directory/<mode>``."""
    home = directory / mode
    options = {"nsqd": nsqd, "topic": topic, "channel": mode, "mode": mode, "columns": "offset,body,id"}
    options |= {"msgTimeout": "1s", "maxMessagesPerTrigger": "2000" if "availableNow" in trigger else "100"}
    if mode == "spool":
        options["spoolLocation"] = str(home / "spool")
    stream = spark.readStream.format("nsq").options(**options).load()
    writer = stream.writeStream.format("parquet").option("checkpointLocation", str(home / "checkpoint"))
    return writer.trigger(**trigger).start(str(home / "rows"))


def main(nsqd: str, topic: str, directory: str) -> None:
    spark = session("spool", "local[2]", **{"spark.ui.enabled": "false"})
    start(spark, nsqd, topic, Path(directory), "spool", processingTime="0 seconds").awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
