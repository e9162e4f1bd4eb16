"""``flintmq bench``: load on a topic, and how long it takes: publishing, consuming, or both with the way in between.

Rules of this file: a message says when it was published, so that its way is measured by one clock; nobody else's topic
is used unless it is named; what was made for the measurement is deleted at its end (it is not ephemeral, as those drop
what does not fit into memory); Ctrl-C ends it with what was measured so far.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import signal
import time
from array import array
from collections.abc import Sequence
from struct import Struct
from typing import Any

from flintmq.client.admin.question import HttpRefused
from flintmq.client.aio.consumer import Consumer
from flintmq.client.aio.producer import Producer
from flintmq.errors import FlintError, OptionError, PublishError, UsageError
from flintmq.names import is_valid_name
from flintmq.net.loop import loop_factory
from flintmq.tools.shell.link import Link, NothingThere
from flintmq.tools.shell.output import Progress, say, say_json

_STAMP = Struct(">4sQ")
_MARK = b"fmqb"
_AHEAD = 16
_BATCH = 100
"""Messages of one MPUB, unless the rate asks for fewer."""
_TURNS_S = 10
"""MPUBs a second, at least, at a given rate."""
_SAMPLES_MAX = 1_000_000
_PERCENTILES = (50.0, 90.0, 99.0, 99.9)
_TICK_S = 0.005
_GATHER_S = 0.001
"""The least that a consumer takes; it is part of the way that is measured."""
_DRAIN_S = 10.0
_OF_THE_CLUSTER = "OF_THE_CLUSTER"
_NS_PER_MS = 1e6


class _Figures:
    """Counts and latencies of one side."""

    def __init__(self) -> None:
        self.count = 0
        self.size = 0
        self.latencies: array[int] = array("q")
        self.first_ns = self.last_ns = 0

    def add(self, count: int, size: int, now_ns: int) -> None:
        """Count messages."""
        self.first_ns = self.first_ns or now_ns
        self.last_ns = now_ns
        self.count += count
        self.size += size

    def took(self, latency_ns: int) -> None:
        """Note a latency; of very many, a random share."""
        if len(self.latencies) < _SAMPLES_MAX:
            self.latencies.append(latency_ns)
        elif (place := random.randrange(self.count + 1)) < _SAMPLES_MAX:
            self.latencies[place] = latency_ns

    def summary(self, span_s: float) -> dict[str, Any]:
        """Return what is told of it."""
        found: dict[str, Any] = {
            "messages": self.count,
            "per_s": round(self.count / span_s, 1) if span_s > 0 else None,
            "mb_per_s": round(self.size / span_s / 1e6, 3) if span_s > 0 else None,
        }
        if self.latencies:
            found["latency_ms"] = percentiles(self.latencies)
        return found


def percentiles(latencies_ns: Sequence[int]) -> dict[str, float]:
    """Return percentiles and the maximum, in milliseconds."""
    values = sorted(latencies_ns)
    found = {
        f"p{share:g}": round(values[min(len(values) - 1, int(len(values) * share / 100))] / _NS_PER_MS, 3)
        for share in _PERCENTILES
    }
    return found | {"max": round(values[-1] / _NS_PER_MS, 3)}


def run(given: argparse.Namespace) -> int:
    """Measure; return the exit code.

    Raises:
        FlintError: the command line is wrong, or nsqd refuses.
    """
    if given.what == "sub" and given.topic is None:
        raise UsageError("name the topic to consume: flintmq bench sub TOPIC")
    own = f"flintmq-bench-{random.SystemRandom().randrange(10**9):09d}"
    is_own_topic, is_own_channel = given.topic is None, given.channel is None and given.what != "pub"
    given.topic, given.channel = given.topic or own, given.channel or own
    if not is_valid_name(given.topic):
        raise OptionError("topic", given.topic, "1 to 64 of . a-z A-Z 0-9 _ -, and perhaps #ephemeral", "argument")
    if given.batch is None:
        given.batch = min(_BATCH, max(1, given.rate // _TURNS_S)) if given.rate else _BATCH
    elif given.rate and given.batch > given.rate * given.duration:
        allowed = f"at most {int(given.rate * given.duration)}, which is what --rate allows in {given.duration:g} s"
        raise OptionError("batch", given.batch, allowed, "argument")
    link = Link(given)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(_Bench(given, link).run())
    finally:
        _delete(link, given.topic, None if is_own_topic else given.channel if is_own_channel else "")


def _delete(link: Link, topic: str, channel: str | None) -> None:
    """Delete the topic or the channel that was made for the measurement; an empty channel: nothing was."""
    if channel == "":
        return

    def ask(admin: Any) -> None:
        if channel is None:
            admin.delete_topic(topic)
        else:
            admin.delete_channel(topic, channel)

    try:
        try:
            link.each(link.nsqds(topic), ask)
        except HttpRefused as error:
            if not (link.lookupd and channel is None and error.text.startswith(_OF_THE_CLUSTER)):
                raise
            link.lookups()[0].delete_topic(topic, everywhere=True)
    except NothingThere:
        pass  # it never came to be
    except FlintError as error:
        what = f"topic {topic}" if channel is None else f"channel {channel} of topic {topic}"
        link.tell(f"{what} could not be deleted: {error}")


class _Bench:
    """One measurement."""

    def __init__(self, given: argparse.Namespace, link: Link) -> None:
        self._given, self._link = given, link
        self._sent, self._got = _Figures(), _Figures()
        self._over = asyncio.Event()
        self._error: FlintError | None = None
        self._begun = 0
        self._turns = 0

    async def run(self) -> int:
        given, loop = self._given, asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._over.set)
        publishes, consumes = given.what != "sub", given.what != "pub"
        async with contextlib.AsyncExitStack() as stack:
            how: dict[str, Any] = {**self._link.addresses, "options": self._link.options}
            producers = []
            if publishes:
                for _ in range(given.connections):
                    producer = await stack.enter_async_context(Producer(**how, timeout=given.timeout))
                    producers.append(producer)
                await self._first(producers[0])
            tasks: list[asyncio.Task[None]] = []
            if consumes:
                for _ in range(given.connections):
                    consumer: Consumer[bytes] = Consumer(
                        given.topic, given.channel, **how, max_in_flight=2500, max_attempts=0
                    )
                    await stack.enter_async_context(consumer)
                    tasks.append(loop.create_task(self._consume(consumer)))
            self._begun = time.monotonic_ns()
            loop.call_later(given.duration, self._over.set)
            showing = loop.create_task(self._show())
            senders = [loop.create_task(self._publish(producer)) for producer in producers for _ in range(_AHEAD)]
            await self._over.wait()
            await asyncio.gather(*senders)
            span_s = (time.monotonic_ns() - self._begun) / 1e9
            if publishes and consumes:
                await self._drain()
            showing.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._error is not None and not self._sent.count:
            raise self._error
        self._report(span_s, publishes, consumes)
        return 1 if self._error is not None else 0

    async def _first(self, producer: Producer) -> None:
        """Publish one message, so that the topic is there, and fail at once if that cannot be.

        Raises:
            FlintError: it cannot.
        """
        await producer.pub(self._given.topic, self._body())

    def _body(self) -> bytes:
        stamp: bytes = _STAMP.pack(_MARK, time.monotonic_ns())
        size = self._given.size
        body: bytes = stamp + b"." * (size - len(stamp)) if size >= len(stamp) else b"." * size
        return body

    async def _publish(self, producer: Producer) -> None:
        """Publish until it is over; at a rate, this sender takes the next turn, whoever had the last one."""
        given = self._given
        while not self._over.is_set():
            if given.rate:
                due_s = self._turns * given.batch / given.rate
                if due_s >= given.duration:
                    return
                self._turns += 1
                left = due_s - (time.monotonic_ns() - self._begun) / 1e9
                if left > 0 and await self._is_over_within(left):
                    return
            bodies = [self._body()] * given.batch
            began = time.monotonic_ns()
            try:
                await producer.mpub(given.topic, bodies)
            except PublishError as error:
                self._error = error
                self._over.set()
                return
            now = time.monotonic_ns()
            self._sent.add(len(bodies), len(bodies) * given.size, now)
            self._sent.took(now - began)

    async def _is_over_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)
        return self._over.is_set()

    async def _consume(self, consumer: Consumer[bytes]) -> None:
        async for batch in consumer.batches(2500, _GATHER_S):
            now = time.monotonic_ns()
            count = size = 0
            for message in batch:
                body = message.body
                if len(body) >= _STAMP.size and body.startswith(_MARK):
                    sent_ns: int = _STAMP.unpack_from(body)[1]
                    if sent_ns < self._begun or not self._begun:
                        message.finish()  # of before the measurement
                        continue
                    self._got.took(now - sent_ns)
                message.finish()
                count += 1
                size += len(body)
            self._got.add(count, size, now)

    async def _drain(self) -> None:
        """Wait until what was published has come, for a while."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                while self._got.count < self._sent.count:  # noqa: ASYNC110 - counted by others
                    await asyncio.sleep(_TICK_S)

    async def _show(self) -> None:
        progress = Progress("messages")
        try:
            while True:
                await asyncio.sleep(0.2)
                progress.at(max(self._sent.count, self._got.count))
        finally:
            progress.end()

    def _report(self, span_s: float, publishes: bool, consumes: bool) -> None:
        given = self._given
        found: dict[str, Any] = {
            "topic": given.topic, "seconds": round(span_s, 3), "size": given.size, "batch": given.batch,
            "connections": given.connections,
        }  # fmt: skip
        if publishes:
            found["published"] = self._sent.summary(span_s)
        if consumes:
            got_s = max(span_s, (self._got.last_ns - self._begun) / 1e9) if publishes else span_s
            found["consumed"] = self._got.summary(got_s)
        if self._error is not None:
            found["error"] = str(self._error)
        if given.json:
            say_json([found])
            return
        messages = f"{given.size:,} bytes, {given.batch:,} at a time, {given.connections:,} connections"
        say(f"topic {given.topic}, {span_s:.1f} s, {messages}")
        for word, about in (("published", "until its OK"), ("consumed", "from publisher to consumer")):
            if word not in found:
                continue
            figures = found[word]
            rate = f"{figures['per_s']:>12,.0f}/s {figures['mb_per_s']:>9,.2f} MB/s"
            say(f"{word:<9} {figures['messages']:>12,} messages {rate}")
            if "latency_ms" in figures:
                shares = ", ".join(f"{name} {value:g}" for name, value in figures["latency_ms"].items())
                say(f"{'':<9} {about}, in ms: {shares}")
        if publishes and consumes and self._got.count < self._sent.count:
            say(f"{self._sent.count - self._got.count:,} messages had not come {_DRAIN_S:g} s later")
        if self._error is not None:
            say(f"stopped: {self._error}")
