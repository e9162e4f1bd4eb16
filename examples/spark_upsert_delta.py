"""Changes of a database into a table that is like it: ``python examples/spark_upsert_delta.py [nsqd's host:port]``.

Messages say what was inserted, updated and deleted, in order. Each micro-batch is merged into a Delta table in one
transaction; one that is repeated after a kill changes nothing. Needs ``pip install 'flintmq[delta]' 'pandas<3'``.
"""

import json
import sys
from pathlib import Path
from typing import Any

from deltalake import DeltaTable
from pyspark.sql import functions as f

from flintmq.sync import Producer

CHANGE = "op string, id bigint, name string, balance bigint"


def publish(nsqd: str, count: int) -> None:
    changes = [{"op": "c", "id": number, "name": f"customer {number}", "balance": 0} for number in range(count)]
    changes += [{"op": "u", "id": n, "name": f"customer {n}", "balance": n * n} for n in range(count) if n % 2]
    changes += [{"op": "d", "id": number} for number in range(0, count, 10)]
    with Producer(nsqd) as producer:
        producer.mpub("customers", [json.dumps(change).encode() for change in changes])


def merge(path: str, batch: Any) -> None:
    """Merge a micro-batch: of each customer the last change counts."""
    last = (
        batch.select("offset", f.from_json(f.col("body").cast("string"), CHANGE).alias("change"))
        .select("offset", "change.*")
        .groupBy("id")
        .agg(f.max_by(f.struct("op", "name", "balance", f.col("offset").alias("version")), "offset").alias("last"))
        .select("id", "last.*")
        .toArrow()
    )
    if not last.num_rows:
        return
    if not Path(path).exists():
        DeltaTable.create(path, last.schema.remove(last.schema.get_field_index("op")))
    columns = {name: f"source.{name}" for name in ("id", "name", "balance", "version")}
    # The version is the offset of the change, which rises with each one: an older one never replaces a newer one.
    (
        DeltaTable(path)
        .merge(last, "target.id = source.id", source_alias="source", target_alias="target")
        .when_matched_delete("source.op = 'd' AND source.version > target.version")
        .when_matched_update(columns, "source.version > target.version")
        .when_not_matched_insert(columns, "source.op <> 'd'")
        .execute()
    )


def main(spark: Any, nsqd: str, directory: str, count: int = 1000) -> int:
    publish(nsqd, count)
    path = f"{directory}/customers"
    query = (
        spark.readStream.format("nsq")
        .option("nsqd", nsqd)
        .option("topic", "customers")  # one partition: changes of a customer have one order
        .option("columns", "offset,body")
        .load()
        .writeStream.foreachBatch(lambda batch, _: merge(path, batch))
        .option("checkpointLocation", f"{directory}/customers.checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    table = DeltaTable(path)
    rows = table.to_pyarrow_table(columns=["id", "balance"])
    print(f"{rows.num_rows} customers in version {table.version()} of {path}")
    return int(rows.num_rows)


if __name__ == "__main__":
    from flintmq.spark import session

    main(session("upsert"), sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:4150", "crm")
