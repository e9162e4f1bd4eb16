"""``nsq_tail``: print messages as they come.

Rules of this file: a message is finished when it has been written; writing is done in a thread, so that a reader who
stands still (a pager) does not make nsqd give up the connection; when nobody reads any more, it ends.

Source: NSQ 1.3, apps/nsq_tail; NSQ's options.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from flintmq.client.aio.consumer import Consumer
from flintmq.client.core.message import Message, finish_all
from flintmq.errors import FlintError, UsageError
from flintmq.options import Integer, Items, Switch, Text, option, read_command, version_line
from flintmq.tools.consuming import (
    HOW,
    WHAT,
    ConsumingOptions,
    batch_size,
    check_open,
    check_topics,
    log_to_stderr,
    on_signals,
    run_to_end,
)
from flintmq.wire.identify import NSQ_VERSION

log = logging.getLogger(__name__)

GATHER_S = 0.01
"""Messages that come within this time are written together."""
_NEWLINE = b"\n"
STDOUT = 1


class OutputError(FlintError):
    """The messages that came cannot be written."""


@dataclass(frozen=True, kw_only=True)
class TailOptions(ConsumingOptions):
    """The flags of nsq_tail."""

    program: ClassVar[str] = "nsq_tail"
    summary: ClassVar[str] = "nsq_tail prints the messages of topics as they come, one a line."

    topic: tuple[str, ...] = option(
        Items(Text("TOPIC")), (), "a topic to consume (may be given multiple times)", group=WHAT
    )
    channel: str = option(
        Text("CHANNEL"), "", "its channel", group=WHAT, default_text="tailNNNNNN#ephemeral, which takes from nobody"
    )
    n: int = option(Integer(0), 0, "end after this many messages; 0: never", group=HOW)
    print_topic: bool = option(Switch(), False, "print the topic before each message", group=HOW)


def run(arguments: Sequence[str]) -> int:
    """Run nsq_tail; return its exit code.

    Raises:
        FlintError: the command line is wrong, or every nsqd refuses.
        BrokenPipeError: nobody reads any more.
    """
    options = read_command(TailOptions, arguments, "nsq_tail", version_line("nsq_tail", NSQ_VERSION))
    if options is None:
        return 0
    options.check_whole()
    if not options.topic:
        raise UsageError("--topic required")
    check_topics(options.topic)
    check_open(STDOUT, "stdout", os.O_RDONLY)
    log_to_stderr()
    return run_to_end(_tail(options))


async def _tail(options: TailOptions) -> int:
    task = asyncio.current_task()
    assert task is not None
    on_signals(task.cancel)
    try:
        await _consume(options)
    except asyncio.CancelledError:
        pass  # it was told to end before it had begun
    except ExceptionGroup as several:
        raise several.exceptions[0] from None  # one of the topics has ended the others
    return 0


async def _consume(options: TailOptions) -> None:
    channel = options.channel or f"tail{random.SystemRandom().randrange(1_000_000):06d}#ephemeral"
    output = _Output(options.n)
    opts = options.client_opts()
    max_in_flight = int(opts.consumer.get("max_in_flight", options.max_in_flight))
    if options.n:
        max_in_flight = min(max_in_flight, options.n)  # more would be asked for than is wanted
    async with contextlib.AsyncExitStack() as stack:
        consumers = []
        for topic in dict.fromkeys(options.topic):
            log.info("Adding consumer for topic: %s", topic)
            more = {"max_attempts": 0, "max_in_flight": max_in_flight}
            consumers.append(await stack.enter_async_context(options.consumer(topic, channel, opts, **more)))

        def stop() -> None:
            for consumer in consumers:
                consumer.stop()

        on_signals(stop)
        async with asyncio.TaskGroup() as group:
            for topic, consumer in zip(dict.fromkeys(options.topic), consumers, strict=True):
                head = f"{topic} | ".encode() if options.print_topic else b""
                group.create_task(_print(consumer, batch_size(max_in_flight), head, output, stop))
    if output.broken is not None:
        raise output.broken


async def _print(consumer: Consumer[bytes], size: int, head: bytes, output: _Output, stop: Callable[[], None]) -> None:
    async for batch in consumer.batches(size, GATHER_S):
        written = await output.write([(head, message) for message in batch])
        finish_all(batch[:written])
        for message in batch[written:]:
            message.requeue(0)
        if output.is_over:
            stop()


class _Output:
    """Stdout, for as many messages as are wanted and as long as somebody reads."""

    def __init__(self, count_max: int) -> None:
        self.is_over = False
        self.broken: BrokenPipeError | None = None
        self._left = count_max or None
        self._lock = asyncio.Lock()

    async def write(self, messages: Sequence[tuple[bytes, Message[bytes]]]) -> int:
        """Write messages; return how many, from the first on, were to be written and are."""
        async with self._lock:
            count = 0 if self.is_over else len(messages)
            if self._left is not None:
                count = min(count, self._left)
            data = b"".join(head + message.body + _NEWLINE for head, message in messages[:count])
            try:
                await asyncio.to_thread(_write_all, data)
            except BrokenPipeError as error:
                self.is_over, self.broken = True, error
                return 0
            except OSError as error:
                raise OutputError(f"the output cannot be written: {error.strerror}") from error
            if self._left is not None:
                self._left -= count
                self.is_over = self.is_over or not self._left
            return count


def _write_all(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(STDOUT, view) :]
