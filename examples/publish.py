"""Publish a few messages: ``python examples/publish.py [host:port]``."""

import asyncio
import sys

from flintmq import Producer, PublishError


async def main(nsqd: str) -> None:
    async with Producer(nsqd) as producer:
        await producer.pub("orders", b'{"id": 1}')  # returns when nsqd answered OK
        await producer.mpub("orders", [b'{"id": 2}', b'{"id": 3}'])  # all or none
        await producer.dpub("orders", b'{"id": 4}', delay=0.5)  # delivered half a second from now

        # Calls made at the same time travel as one command; each has its own result.
        results = await asyncio.gather(
            *(producer.pub("orders", b'{"id": %d}' % number) for number in range(5, 105)), return_exceptions=True
        )
        failed = [result for result in results if isinstance(result, PublishError)]
        print(f"published {104 - len(failed)} messages, {len(failed)} failed")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:4150"))
