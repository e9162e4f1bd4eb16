"""Orders to trades to candles, and a second opinion: ``python examples/spark_candles.py [nsqd's host:port]``.

A generated order book matches orders and publishes its trades. Spark makes candles of them from the topic; DuckDB makes
the same candles from an archive of the topic, with which Spark has nothing to do. Needs ``pip install duckdb``.
"""

import heapq
import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import duckdb
from pyspark.sql import functions as f

from flintmq.pipeline.archive import archive
from flintmq.sync import Producer

BEGIN_MS = 1_795_435_200_000


def trades(symbol: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Match limit orders by price, then time, and yield the trades; prices are whole cents."""
    chance, price, now_ms, order = random.Random(seed), 10_000, BEGIN_MS, 0
    bids: list[tuple[int, int, int]] = []  # (price, number of the order, size), the best one first: prices are negative
    asks: list[tuple[int, int, int]] = []
    while count:
        order += 1
        now_ms += int(chance.expovariate(1 / 40))
        is_bid = chance.random() < 0.5
        limit, size = price + round(chance.gauss(0, 8)), chance.randint(1, 100)
        own, other = (bids, asks) if is_bid else (asks, bids)
        while size and count and other and (limit >= other[0][0] if is_bid else limit <= -other[0][0]):
            best, of, left = heapq.heappop(other)
            filled, price = min(size, left), abs(best)
            size, count = size - filled, count - 1
            yield {"symbol": symbol, "at_ms": now_ms, "price": price, "size": filled}
            if left > filled:
                heapq.heappush(other, (best, of, left - filled))
        if size:
            heapq.heappush(own, (-limit if is_bid else limit, order, size))


def main(spark: Any, nsqd: str, directory: str, count: int = 3000) -> list[tuple[Any, ...]]:
    with Producer(nsqd) as producer:
        for number, symbol in enumerate(("FLNT", "NSQX")):
            bodies = [json.dumps(trade).encode() for trade in trades(symbol, count, number)]
            for first in range(0, count, 500):
                producer.mpub("trades", bodies[first : first + 500])

    messages = spark.read.format("nsq").option("nsqd", nsqd).option("topic", "trades").load()
    trade = f.from_json(f.col("body").cast("string"), "symbol string, at_ms bigint, price bigint, size bigint")
    # Several trades have the same time: what comes first is what nsqd stored first, which the offset says.
    when = f.struct("at_ms", "offset")
    candles = (
        messages.select("offset", trade.alias("trade"))
        .select("offset", "trade.*")
        .groupBy("symbol", f.expr("at_ms DIV 60000").alias("minute"))
        .agg(
            f.min_by("price", when).alias("open"),
            f.max("price").alias("high"),
            f.min("price").alias("low"),
            f.max_by("price", when).alias("close"),
            f.sum("size").alias("volume"),
            f.sum(f.col("price") * f.col("size")).alias("turnover"),
        )
    )
    ours = sorted(tuple(row) for row in candles.collect())

    archive(f"{directory}/trades", nsqd=nsqd, topic="trades")  # without Spark; Parquet files that anybody reads
    theirs = duckdb.sql(f"""
        WITH trades AS (
            SELECT "offset", CAST(body->>'symbol' AS VARCHAR) AS symbol, CAST(body->>'at_ms' AS BIGINT) AS at_ms,
                CAST(body->>'price' AS BIGINT) AS price, CAST(body->>'size' AS BIGINT) AS size
            FROM (SELECT "offset", CAST(decode(body) AS JSON) AS body FROM '{directory}/trades/*/*/*.parquet')
        )
        SELECT symbol, at_ms // 60000 AS minute, arg_min(price, (at_ms, "offset")), max(price), min(price),
            arg_max(price, (at_ms, "offset")), sum(size), sum(price * size)
        FROM trades GROUP BY ALL ORDER BY ALL
    """).fetchall()
    if ours != theirs:
        raise SystemExit(
            f"Spark and DuckDB differ: {next(pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1])}"
        )
    print(f"{len(ours)} candles, the same from Spark and from DuckDB; the first ones:")
    for symbol, minute, opened, high, low, close, volume, _ in ours[:3]:
        print(f"  {symbol} minute {minute}: {opened / 100} {high / 100} {low / 100} {close / 100}, {volume} shares")
    return ours


if __name__ == "__main__":
    from flintmq.spark import session

    main(session("candles"), sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:4150", "market")
