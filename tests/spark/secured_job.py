"""A driver that reads and writes where TLS, AUTH and tokens are wanted, and shows everything that Spark shows.

Usage: ``secured_job.py <options, as JSON> <topic> <directory>``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pyspark.errors import AnalysisException

from flintmq.spark import session
from flintmq.spark.session_settings import QUICK_JVM_FLAGS

LOG_AT_INFO = """
rootLogger.level = info
rootLogger.appenderRef.stderr.ref = console
logger.spark.name = org.apache.spark
logger.spark.level = info
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d %p %c: %m%n%ex
"""


def main(given: str, topic: str, directory: str) -> None:
    options = json.loads(given)
    settings = {
        "spark.ui.enabled": "false",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",  # what is looked through must be readable
        "spark.eventLog.dir": f"file://{directory}/events",
        "spark.sql.warehouse.dir": f"{directory}/warehouse",
        "spark.redaction.regex": "nothing is hidden by Spark",
        "spark.sql.redaction.options.regex": "nothing is hidden by Spark",
    }
    Path(directory, "log4j2.properties").write_text(LOG_AT_INFO)
    settings["spark.driver.extraJavaOptions"] = (
        f"{QUICK_JVM_FLAGS} -Dlog4j2.configurationFile=file://{directory}/log4j2.properties"
    )
    spark = session("secured", "local[2]", **settings)
    rows = spark.range(2000).selectExpr("cast(id as string) AS body")
    rows.write.format("nsq").options(**options, topic=topic).mode("append").save()
    stream = spark.readStream.format("nsq").options(**options, topic=topic, channel="copy").load()
    writer = stream.select("body").writeStream.format("nsq").options(**options, topic=f"{topic}-copy")
    query = (
        writer.option("checkpointLocation", f"{directory}/checkpoint").trigger(availableNow=True).queryName("q").start()
    )
    assert query.awaitTermination(240)
    query.explain(True)
    for progress in query.recentProgress:
        print(progress.json)
    frame = spark.read.format("nsq").options(**options, topic=f"{topic}-copy").load()
    frame.explain(True)
    frame.explain("formatted")
    print("counted", frame.select("body").distinct().count(), flush=True)
    print(spark.sparkContext.getConf().toDebugString())
    try:
        spark.read.format("nsq").options(**{**options, "authSecret": "env:NOT_THERE"}, topic=topic).load().collect()
    except AnalysisException as error:
        print("failed as it should:", error, flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
