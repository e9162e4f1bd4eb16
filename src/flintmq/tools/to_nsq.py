"""``to_nsq``: publish what comes on stdin.

Rules of this file: what is there is published at once, in its order, as one MPUB to each nsqd; the next is taken when
every nsqd has it, and read meanwhile. What could not be published ends it with an error that names its place in the
input, and every error names for each nsqd up to which item it has everything: no two can be made to stop at the same
one. An nsqd that cannot be connected for the first message ends it at once, one that goes away later is waited for.
A signal leaves ``END_S`` to what is under way, the second one nothing; what was read and is not published is an error.

Source: NSQ 1.3, apps/to_nsq; NSQ's options. Other than there the last item needs no delimiter to be whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from flintmq.client.aio.producer import Producer
from flintmq.errors import LocalProtocolError, OptionError, PublishError, PublishUnknown, UsageError
from flintmq.options import Address, Integer, Items, Options, Repeated, Text, option, read_command, version_line
from flintmq.tools.client_opts import client_opts
from flintmq.tools.consuming import HOW, WHERE, check_open, check_topics, log_to_stderr, on_signals, run_to_end
from flintmq.tools.feed import ITEM_BYTES_MAX, InputError, Pace, Source, Splitter
from flintmq.wire.identify import NSQ_VERSION

log = logging.getLogger(__name__)

PUBLISH_TIMEOUT_S = 30.0
END_S = 5.0
"""For what is under way when it is told to end, or when another nsqd has failed."""
BYTES_IN_FLIGHT_MAX = 2 * ITEM_BYTES_MAX
"""Of one nsqd: an item and what was there with it, whatever their size; nsqd says what it does not take."""
STDIN = 0


@dataclass(frozen=True, kw_only=True)
class ToNsqOptions(Options):
    """The flags of to_nsq."""

    program: ClassVar[str] = "to_nsq"
    summary: ClassVar[str] = "to_nsq publishes each line of its input as a message."

    topic: str = option(Text("TOPIC"), "", "the topic to publish to", group=WHERE)
    nsqd_tcp_address: tuple[str, ...] = option(
        Items(Address(to_connect=True)),
        (),
        "an nsqd to publish to; every one given gets everything (may be given multiple times)",
        group=WHERE,
    )
    delimiter: str = option(Text("BYTE"), "\n", "the byte that ends a message in the input", group=HOW,
                            default_text="newline")  # fmt: skip
    rate: int = option(Integer(0), 0, "the most messages a second; 0: as many as there are", group=HOW)
    producer_opt: tuple[str, ...] = option(
        Repeated(Text("NAME,VALUE")),
        (),
        "an option of go-nsq's producers, such as tls_v1 or snappy,true (may be given multiple times)",
        group=HOW,
    )


def run(arguments: Sequence[str]) -> int:
    """Run to_nsq; return its exit code.

    Raises:
        FlintError: the command line is wrong, or something could not be published.
    """
    options = read_command(ToNsqOptions, arguments, "to_nsq", version_line("to_nsq", NSQ_VERSION))
    if options is None:
        return 0
    if not options.topic:
        raise UsageError("--topic required")
    check_topics([options.topic])
    delimiter = options.delimiter.encode(errors="surrogateescape")
    if len(delimiter) != 1:
        raise OptionError("--delimiter", options.delimiter, "--delimiter must be a single byte", "flag")
    if not options.nsqd_tcp_address:
        raise UsageError("--nsqd-tcp-address required")
    check_open(STDIN, "stdin", os.O_WRONLY)
    log_to_stderr()
    return run_to_end(_publish(options, delimiter))


async def _publish(options: ToNsqOptions, delimiter: bytes) -> int:
    opts = client_opts("to_nsq", "--producer-opt", options.producer_opt, for_consumer=False)
    settings: dict[str, Any] = {
        "timeout": PUBLISH_TIMEOUT_S,
        "retry_unknown": False,
        "max_bytes_in_flight": BYTES_IN_FLIGHT_MAX,
    }
    targets = [
        _Target(each, Producer(each, options=opts.connection, **settings))
        for each in dict.fromkeys(options.nsqd_tcp_address)
    ]
    if options.rate:
        log.info("Throttling messages rate to max:%d/second", options.rate)
    copying = _Copying(options, delimiter, targets)
    on_signals(copying.stop)
    await copying.run()
    return 0


class _Target:
    """An nsqd, and how far it is in the input.

    Attributes:
        sure_count: it has so many items from the first on, empty ones counted.
        sent_count: it may have so many; none behind them.
    """

    def __init__(self, address: str, producer: Producer) -> None:
        self.sure_count = self.sent_count = 0
        self.address = address
        self.producer = producer

    @property
    def is_sure(self) -> bool:
        """Whether it is known what it has."""
        return self.sure_count == self.sent_count

    def __str__(self) -> str:
        has = f"everything up to item {self.sure_count}" if self.sure_count else "nothing"
        perhaps = "" if self.is_sure else f" for certain, and perhaps up to item {self.sent_count}"
        return f"{self.address} has {has}{perhaps}"

    async def send(self, topic: str, chunk: Sequence[bytes], number: int) -> None:
        """Publish the items of a chunk that are not empty, in their order; so many items come before it.

        Raises:
            InputError: one of them cannot be published; those before it are.
        """
        bodies = [body for body in chunk if body]
        self.sent_count = number + len(chunk)
        try:
            await self.producer.mpub(topic, bodies)
        except (PublishError, LocalProtocolError) as error:
            if not isinstance(error, PublishUnknown):
                self.sent_count = self.sure_count
            if error.code not in _ABOUT_A_BODY:
                raise InputError(f"not published from item {number + 1} on: {error}") from error
        else:
            self.sure_count = self.sent_count
            return
        for place, body in enumerate(chunk, number + 1):
            try:
                if body:
                    self.sent_count = place
                    await self.producer.pub(topic, body)
            except (PublishError, LocalProtocolError) as error:
                if not isinstance(error, PublishUnknown):
                    self.sent_count = self.sure_count
                raise InputError(f"item {place} of {len(body)} bytes is not published: {error}") from error
            self.sure_count = self.sent_count = place


class _Copying:
    """The input on its way to every nsqd."""

    def __init__(self, options: ToNsqOptions, delimiter: bytes, targets: Sequence[_Target]) -> None:
        self._topic = options.topic
        self._targets = targets
        self._pace = Pace(options.rate)
        self._source = Source(STDIN)
        self._splitter = Splitter(delimiter)
        self._items: Sequence[bytes] = ()
        self._place = 0  # among them; those from there on are not published
        self._number = 0  # of items before these, empty ones included
        self._is_started = False
        self._stopped = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._copy())

    def stop(self) -> None:
        """Read nothing more, and give up what is under way after ``END_S``; the second time at once."""
        if self._stopped.is_set():
            self._task.cancel()
            return
        log.info("told to end; what is under way has %g s, or until the next signal", END_S)
        self._stopped.set()
        self._source.stop()
        asyncio.get_running_loop().call_later(END_S, self._task.cancel)

    async def run(self) -> None:
        """Copy until the input ends, or until it is told to end.

        Raises:
            InputError: something that was read is not published.
        """
        try:
            await self._task
        except asyncio.CancelledError:
            pass  # it was told to end
        finally:
            await self._close()
        if not self._stopped.is_set():
            return
        try:
            left = self._count_left()
        except InputError as error:
            raise InputError(f"told to end: {error}; {self._how_far()}") from error
        if left:
            what = "items that were read are not published, or not known to be"
            raise InputError(f"told to end: {left} {what}; {self._how_far()}")

    async def _copy(self) -> None:
        is_at_end = False
        while not is_at_end and not self._stopped.is_set():
            try:
                data = await self._source.read()
                is_at_end = not data and not self._stopped.is_set()
                self._items = self._splitter.end() if is_at_end else self._splitter.feed(data)
            except InputError as error:
                raise InputError(f"{error}; {self._how_far()}") from error
            self._place = 0
            while self._place < len(self._items) and not self._stopped.is_set():
                chunk = self._items[self._place : self._place + self._pace.count_max]
                if count := sum(map(bool, chunk)):
                    await self._pace.wait(count)
                    if self._stopped.is_set():
                        return
                    await self._connect()
                    await self._send(chunk)
                self._place += len(chunk)
                self._number += len(chunk)
                for target in self._targets:
                    target.sure_count = target.sent_count = self._number

    async def _send(self, chunk: Sequence[bytes]) -> None:
        """Publish a chunk to every nsqd; when one has failed the others have ``END_S``.

        Raises:
            InputError: some of it cannot be published.
        """
        sending = [each.send(self._topic, chunk, self._number) for each in self._targets]
        try:
            if len(sending) == 1:
                await sending[0]
                return
            tasks = [asyncio.ensure_future(each) for each in sending]
            try:
                _, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
                if left:
                    await asyncio.wait(left, timeout=END_S)
            finally:
                for task in tasks:
                    task.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
            failures = [each for each in results if isinstance(each, Exception)]
            if unforeseen := [each for each in failures if not isinstance(each, InputError)]:
                raise unforeseen[0]
            if failures:
                raise InputError("; ".join(dict.fromkeys(map(str, failures))))
        except InputError as error:
            if len(sending) == 1 and self._targets[0].is_sure:
                raise
            raise InputError(f"{error}; {self._how_far()}") from error

    def _how_far(self) -> str:
        return ", ".join(map(str, self._targets))

    async def _connect(self) -> None:
        """Connect to all, the first time.

        Raises:
            InputError: one of them cannot be connected.
        """
        if self._is_started:
            return
        self._is_started = True
        await asyncio.gather(*(each.producer.start() for each in self._targets))
        for each in self._targets:
            if not each.producer.stats().connections:
                raise InputError(f"nothing is published: no connection to nsqd {each.address}, for the reason above")

    async def _close(self) -> None:
        """Close the connections; what was given up has a deadline of its own, which nobody waits for."""
        until = asyncio.get_running_loop().time() + (0 if self._task.cancelled() else END_S)
        for each in self._targets:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await each.producer.close()

    def _count_left(self) -> int:
        """Return how many items were read and not published; what has no end yet may be half of one."""
        left = [*self._items[self._place :], *self._splitter.feed(self._source.take_rest())]
        if self._source.is_at_end:
            left += self._splitter.end()
        return sum(map(bool, left))


_ABOUT_A_BODY = ("E_BAD_MESSAGE", "E_BAD_BODY")
