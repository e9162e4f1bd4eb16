"""Other people's clients with TLS, compression and AUTH, each run in a process of its own.

``python -m tests.integration.upgrade_clients <client> <host:port> <topic> <options as JSON>``: publishes ``COUNT``
messages as far as the client can, consumes them, and prints their number. Options are the client's own words.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COUNT = 60
CONSUMED_WITHIN_S = 20
BODIES = [b"%d " % number + b"x" * (number * 100) for number in range(COUNT)]


async def pynsq(address: str, topic: str, options: dict[str, Any]) -> int:
    """Publishes and consumes; the options are tls_v1, tls_options, snappy, deflate, auth_secret."""
    import nsq

    writer = nsq.Writer([address], **options)
    while not any(connection.connected() for connection in writer.conns.values()):
        await asyncio.sleep(0.01)
    for body in BODIES:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        writer.pub(topic, body, callback=lambda _, data, answer=answer: answer.set_result(data))
        if await answer != b"OK":
            raise RuntimeError(repr(answer.result()))
    received: list[bytes] = []
    done = asyncio.Event()

    def handle(message: Any) -> bool:
        received.append(message.body)
        if len(received) == COUNT:
            done.set()
        return True

    nsq.Reader(
        message_handler=handle, topic=topic, channel="c", nsqd_tcp_addresses=[address], max_in_flight=10, **options
    )
    async with asyncio.timeout(CONSUMED_WITHIN_S):
        await done.wait()
    return len(set(received) & set(BODIES))


def gnsq(address: str, topic: str, options: dict[str, Any]) -> int:
    """Consumes; its producer takes the OK of an upgrade for an answer and fails, so it publishes in clear."""
    from gevent import monkey

    monkey.patch_all()
    import gevent
    import gnsq as client

    secret = options.pop("auth_secret", "").encode() or None
    options["auth_secret"] = secret
    producer = client.Producer(address, auth_secret=secret)
    producer.start()
    for body in BODIES:
        producer.publish(topic, body)
    producer.close()
    producer.join()
    received: list[bytes] = []
    consumer = client.Consumer(topic, "c", [address], max_in_flight=10, **options)

    def handle(_: Any, message: Any) -> None:
        received.append(message.body)
        if len(received) == COUNT:
            gevent.spawn(consumer.close)

    consumer.on_message.connect(handle)
    with gevent.Timeout(CONSUMED_WITHIN_S):
        consumer.start()
    return len(set(received) & set(BODIES))


async def asyncnsq(address: str, topic: str, options: dict[str, Any]) -> int:
    """Publishes; its TLS needs an argument that asyncio has not had since Python 3.10."""
    from asyncnsq import create_writer

    host, port = address.split(":")
    writer = await create_writer(host=host, port=int(port), feature_negotiation=True, **options)
    return sum([await writer.pub(topic, body) == b"OK" for body in BODIES])


def run_client(name: str, address: tuple[str, int], topic: str, options: dict[str, Any]) -> int:
    """Run a client in a process of its own; return how many messages it got to where they belong.

    Raises:
        AssertionError: it failed; with what it said.
    """
    command = [sys.executable, "-m", __name__, name, "{}:{}".format(*address), topic, json.dumps(options)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * CONSUMED_WITHIN_S)
    found = re.search(r"^count (\d+)$", process.stdout, re.MULTILINE)
    assert found, f"{process.stdout}\n{process.stderr}"
    return int(found[1])


def main() -> None:
    name, address, topic, text = sys.argv[1:]
    options: dict[str, Any] = json.loads(text)
    ca = options.pop("ca", "")
    if ca:
        options |= {"tls_v1": True, "tls_options": {"ca_certs": ca, "cert_reqs": ssl.CERT_REQUIRED}}
    if name == "gnsq":
        count = gnsq(address, topic, options)
    else:
        count = asyncio.run({"pynsq": pynsq, "asyncnsq": asyncnsq}[name](address, topic, options))
    print(f"count {count}", flush=True)


if __name__ == "__main__":
    main()
