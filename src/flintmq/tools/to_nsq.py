"""``to_nsq``: publish what comes on stdin.

Rules of this file: what is there is published at once, in its order, as one MPUB to each nsqd; the next is taken when
every nsqd has it, and read meanwhile. What could not be published ends it with an error that names its place in the
input.

Source: NSQ 1.3, apps/to_nsq; NSQ's options. Other than there the last item needs no delimiter to be whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from flintmq.client.aio.producer import Producer
from flintmq.errors import OptionError, PublishError, UsageError
from flintmq.options import Address, Integer, Items, Options, Repeated, Text, option, read_command, version_line
from flintmq.tools.client_opts import client_opts
from flintmq.tools.consuming import HOW, WHERE, check_open, check_topics, log_to_stderr, on_signals, run_to_end
from flintmq.tools.feed import InputError, Pace, Source, Splitter
from flintmq.wire.identify import NSQ_VERSION

log = logging.getLogger(__name__)

PUBLISH_TIMEOUT_S = 30.0
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
    stopped, source = asyncio.Event(), Source(STDIN)

    def stop() -> None:
        stopped.set()
        source.stop()

    on_signals(stop)
    async with contextlib.AsyncExitStack() as stack:
        producers = [
            await stack.enter_async_context(
                Producer(address, options=opts.connection, timeout=PUBLISH_TIMEOUT_S, retry_unknown=False)
            )
            for address in dict.fromkeys(options.nsqd_tcp_address)
        ]
        if options.rate:
            log.info("Throttling messages rate to max:%d/second", options.rate)
        await _copy(options, delimiter, producers, source, stopped)
    return 0


async def _copy(
    options: ToNsqOptions, delimiter: bytes, producers: Sequence[Producer], source: Source, stopped: asyncio.Event
) -> None:
    pace = Pace(options.rate)
    splitter = Splitter(delimiter)
    number = 0  # of items so far, empty ones included
    while not stopped.is_set():
        data = await source.read()
        if stopped.is_set():
            break  # what has no end yet may be half of something
        items = splitter.feed(data) if data else splitter.end()
        for start in range(0, len(items), pace.count_max):
            chunk = items[start : start + pace.count_max]
            if count := sum(map(bool, chunk)):
                await pace.wait(count)
                if stopped.is_set():
                    break
                await asyncio.gather(*(_send(each, options.topic, chunk, number) for each in producers))
            number += len(chunk)
        if not data:
            break


async def _send(producer: Producer, topic: str, chunk: Sequence[bytes], number: int) -> None:
    """Publish the items of a chunk that are not empty, in their order.

    Raises:
        InputError: one of them cannot be published; those before it are.
    """
    bodies = [body for body in chunk if body]
    try:
        await producer.mpub(topic, bodies)
        return
    except PublishError as error:
        if len(bodies) == 1 or error.code not in _ABOUT_A_BODY:
            raise InputError(f"not published from item {number + 1} on: {error}") from error
    for place, body in enumerate(chunk):
        try:
            if body:
                await producer.pub(topic, body)
        except PublishError as error:
            raise InputError(f"item {number + place + 1} of {len(body)} bytes is not published: {error}") from error


_ABOUT_A_BODY = ("E_BAD_MESSAGE", "E_BAD_BODY")
