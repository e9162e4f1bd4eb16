"""Consume a channel until Ctrl-C: ``python examples/consume.py [host:port]``."""

import asyncio
import json
import logging
import sys

from flintmq import Consumer, Discard, Message, Requeue


async def bill(message: Message) -> None:
    try:
        order = json.loads(message.body)
    except ValueError:
        raise Discard("not JSON") from None  # finished: nobody can bill it
    if order["id"] % 10 == 0 and message.attempts == 1:
        raise Requeue(delay=1)  # once more, in a second
    print(f"billed order {order['id']}, attempt {message.attempts}, {message.time_left:.0f} s left", flush=True)


async def main(nsqd: str) -> None:
    # Leaving (also by Ctrl-C) stops the flow, lets handlers end, and gives back what was not handled.
    async with Consumer("orders", "billing", nsqd_tcp_addresses=nsqd, handler=bill, concurrency=10) as consumer:
        await consumer.run()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    try:
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:4150"))
    except KeyboardInterrupt:
        print("bye")
