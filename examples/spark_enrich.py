"""What a table knows added to messages, each once: ``python examples/spark_enrich.py [nsqd's host:port]``.

Kill it at any moment and run it again: nsqd does not store a row twice, whatever was done before the kill.
"""

import json
import sys
from typing import Any

from pyspark.sql import functions as f

from flintmq.sync import Producer

COUNTRIES = [("no", "Norway", "NOK"), ("se", "Sweden", "SEK"), ("dk", "Denmark", "DKK")]


def main(spark: Any, nsqd: str, directory: str, count: int = 1000) -> int:
    with Producer(nsqd) as producer:
        sales = [{"id": n, "country": ("no", "se", "dk", "xx")[n % 4], "price": n / 4} for n in range(count)]
        producer.mpub("sales", [json.dumps(sale).encode() for sale in sales])

    # As a rule a file or a table: spark.read.parquet(...). It is read anew in each micro-batch.
    countries = spark.createDataFrame(COUNTRIES, "country string, name string, currency string")
    sale = f.from_json(f.col("body").cast("string"), "id bigint, country string, price double").alias("sale")
    messages = spark.readStream.format("nsq").option("nsqd", nsqd).option("topic", "sales").load()
    enriched = (
        messages.select("partition", "offset", sale)
        .select("partition", "offset", "sale.*")
        # Broadcast: rows stay in the tasks that have read them, in their order. After a shuffle they would come in
        # another order when a task is repeated, and the sink could not tell them from new ones (it says so; its option
        # orderBy helps).
        .join(f.broadcast(countries), "country", "left")
        # In a topic with partitions also: f.col("country").alias("key"), so that rows of a country stay in order.
        .select(f.to_json(f.struct("id", "country", "price", "name", "currency")).alias("body"))
    )
    query = (
        enriched.writeStream.format("nsq")
        .option("nsqd", nsqd)
        .option("topic", "sales-enriched")
        .option("delivery", "once")  # or fail; the default goes on at least once where nsqd cannot, and logs that
        .option("checkpointLocation", f"{directory}/enriched.checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    rows = spark.read.format("nsq").option("nsqd", nsqd).option("topic", "sales-enriched").load()
    stored = int(rows.count())
    print(f"{count} sales were published now, {stored} are in sales-enriched; the last one:")
    print("  " + rows.orderBy(f.desc("offset")).selectExpr("cast(body as string)").first()[0])
    return stored


if __name__ == "__main__":
    from flintmq.spark import session

    main(session("enrich"), sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:4150", "sales")
