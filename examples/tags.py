"""Headers and tags, without asyncio: ``python examples/tags.py [nsqd's host:port [its HTTP port]]``.

Orders of test customers go to the canary while there is one, all others to the ordinary consumers of the same channel.
"""

import sys
import threading
from collections.abc import Callable

from flintmq.sync import Consumer, Message, NsqdAdmin, Producer

TAG = "##client_dispatch_tag"


def main(nsqd: str, http_port: int) -> None:
    NsqdAdmin(f"{nsqd.rpartition(':')[0]}:{http_port}").create_topic("shop-orders", headers=True)
    left = threading.Semaphore(0)

    def handler(name: str) -> Callable[[Message], None]:
        def handle(message: Message) -> None:
            line = f"{name}: {message.body.decode()} of customer {message.headers.get('customer')}\n"
            print(line, end="", flush=True)  # in one piece, because there are two threads
            left.release()

        return handle

    consumers = [
        Consumer(
            "shop-orders", "billing", handler=handler(name), nsqd_tcp_addresses=nsqd, headers=True, desired_tag=tag
        )
        for name, tag in (("canary", "canary"), ("ordinary", ""))
    ]
    threads = [threading.Thread(target=consumer.run) for consumer in consumers]
    for consumer in consumers:
        consumer.start()
    for thread in threads:
        thread.start()

    with Producer(nsqd) as producer:
        for number in range(10):
            headers = {"customer": "test", TAG: "canary"} if number % 3 == 0 else {"customer": f"{number:04}"}
            producer.pub("shop-orders", b"order %d" % number, headers=headers)
    came = sum(left.acquire(timeout=10) for _ in range(10))
    for consumer in consumers:
        consumer.stop()
    for thread in threads:
        thread.join()
    if came < 10:
        sys.exit(f"{10 - came} of 10 messages did not come")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:4150", int(sys.argv[2]) if len(sys.argv) > 2 else 4151)
