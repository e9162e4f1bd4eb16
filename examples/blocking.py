"""Publish and consume without asyncio: ``python examples/blocking.py [host:port]``."""

import sys

from flintmq.sync import Consumer, Producer


def main(nsqd: str) -> None:
    with Producer(nsqd) as producer:
        for number in range(10):
            producer.pub("jobs", b"%d" % number)  # returns when nsqd answered OK

    with Consumer("jobs", "workers", nsqd_tcp_addresses=nsqd, max_in_flight=5) as consumer:
        done = 0
        for message in consumer:
            with message:  # finished at the end of the block, given back on an exception
                print(f"job {message.body.decode()}", flush=True)
                done += 1
            if done == 10:
                break


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:4150")
