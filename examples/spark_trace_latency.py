"""Where messages spend their time: ``python examples/spark_trace_latency.py [nsqd's host:port [its HTTP port]]``.

Switches a topic's trace on, publishes and consumes, and has Spark put the events together: latencies by stage, and the
slowest messages with all that happened to them. The same as a job: flintmq pipeline trace.
"""

import sys
import time
from typing import Any

from flintmq.pipeline.lives import lives, read_events, summarize
from flintmq.sync import Consumer, NsqdAdmin, Producer

SLOW_EVERY = 50


def traffic(nsqd: str, http_port: int, count: int) -> None:
    """Publish and finish messages; every 50th is slow, and its first attempt fails."""
    admin = NsqdAdmin(f"{nsqd.rpartition(':')[0]}:{http_port}")
    admin.create_topic("payments")
    admin.create_channel("payments", "billing")  # before the first message, so that all of them wait for it
    admin.enable_trace("payments")
    with Producer(nsqd) as producer:
        producer.mpub("payments", [b"%d" % number for number in range(count)])
    finished = 0
    with Consumer("payments", "billing", nsqd_tcp_addresses=nsqd) as consumer:
        for message in consumer:
            if int(message.body) % SLOW_EVERY == 0:
                time.sleep(0.005)
                if message.attempts == 1:
                    message.requeue(0)
                    continue
            message.finish()
            finished += 1
            if finished == count:
                break


def main(spark: Any, nsqd: str, http_port: int, count: int = 500) -> list[dict[str, Any]]:
    traffic(nsqd, http_port, count)
    # The trace is a topic like any other; an archive of it is read with path="/data/trace" instead.
    events = read_events(spark, nsqd=nsqd).where("topic = 'payments'")
    found = lives(events).cache()  # a row for each message on each channel
    summaries = [each.row() for each in summarize(found)]
    for each in summaries:
        print(f"{each['topic']}, channel {each['channel']}: {each['messages']} messages, {each['repeated']} repeated")
        for stage in ("wait", "repeats", "process", "total"):
            figures = ", ".join(
                f"{name} {value:.2f}" for name, value in each[f"{stage}_ms"].items() if value is not None
            )
            print(f"  {stage:<8} ms: {figures}")
    found.orderBy("total_ms", ascending=False).select("message_id", "state", "deliveries", "total_ms").show(
        3, truncate=False
    )
    found.unpersist()
    return summaries


if __name__ == "__main__":
    from flintmq.spark import session

    address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:4150"
    main(session("trace-latency"), address, int(sys.argv[2]) if len(sys.argv) > 2 else 4151)
