"""A service: typed orders, retries, dead letters. ``python examples/service.py [host:port]``; Ctrl-C drains it."""

import logging
import sys

from msgspec import Struct

from flintmq import App, Message, Requeue


class Order(Struct):
    id: int


app = App(nsqd_tcp_addresses=sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:4150")


@app.consumer("orders", "invoicing", concurrency=10, max_attempts=3, dead_letter="orders.dead")
async def write_invoice(order: Order, message: Message[Order]) -> None:
    if order.id % 10 == 0 and message.attempts == 1:
        raise Requeue(delay=1)  # once more, in a second
    await app.producer.pub("invoices", {"order": order.id, "total": 10 * order.id})
    print(f"invoice for order {order.id}, attempt {message.attempts}", flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    app.run()
