"""Have messages delivered again: ``python examples/replay.py [nsqd's host:port [its HTTP port]]``.

Publishes, consumes, looks into the channel, cancels one message, and goes back to have the others once more.
"""

import asyncio
import sys
from datetime import timedelta

from flintmq import Consumer, NsqdAdmin, Producer


async def consume(nsqd: str, count: int) -> None:
    async with asyncio.timeout(30), Consumer("readings", "archive", nsqd_tcp_addresses=nsqd) as consumer:
        async for message in consumer:  # a second run at the same time would take some of them
            async with message:
                print(f"  {message.body.decode()}", flush=True)
                count -= 1
            if not count:
                return


async def main(nsqd: str, http_port: int) -> None:
    async with NsqdAdmin(f"{nsqd.rpartition(':')[0]}:{http_port}") as admin, Producer(nsqd) as producer:
        await admin.create_topic("readings")
        await admin.create_channel("readings", "archive")
        await admin.set_offset("readings", "archive", "end")  # whatever an earlier run has left

        await producer.mpub("readings", [b"21.0", b"21.5", b"-273.2", b"22.0"])
        await producer.mpub("readings", [b"tomorrow 1", b"tomorrow 2"], delay=timedelta(minutes=50))
        print("first time:")
        await consume(nsqd, 4)

        # The archive was lost: what came in the last hour is to be delivered again, without what cannot be true.
        await admin.set_offset("readings", "archive", timedelta(hours=1))
        waiting = await admin.peek("readings", "archive", count=100)
        wrong = [message for message in waiting if message.body == b"-273.2"]
        for message in wrong:
            await admin.cancel_message("readings", message.id)
        print(f"again, without {len(wrong)} of {len(waiting)}:")
        await consume(nsqd, len(waiting) - len(wrong))

        # What comes later can be looked at, and called off, too.
        for message in await admin.peek("readings", "archive", "deferred", count=100):
            print(f"cancelling {message.text!r}, due in {(message.due_in_ms or 0) / 1000:.0f} s")
            await admin.cancel_message("readings", message.id)


if __name__ == "__main__":
    address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:4150"
    asyncio.run(main(address, int(sys.argv[2]) if len(sys.argv) > 2 else 4151))
