"""``flintmq sub``: consume a channel, print each message or run a command for it.

Rules of this file: a message is finished when it has been written, or when its command has ended with 0; whatever ends
it (a count, a time, Ctrl-C, a reader who goes away), the rest is given back at once. Writing is done in a thread, so
that a reader who stands still does not make nsqd give up the connection. Exit code 1 where commands have failed and
less was finished than was wanted: nothing, or less than ``--count``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import random
import signal
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from flintmq.client.aio.consumer import Consumer
from flintmq.client.core.message import Message, Requeue
from flintmq.client.core.start import Start, StartAt
from flintmq.errors import ConnectionFailed, FlintError, OptionError, UsageError
from flintmq.names import is_valid_name
from flintmq.net.loop import loop_factory
from flintmq.tools.shell.arguments import NS_PER_S, Place
from flintmq.tools.shell.lines import Line, id_text, writer
from flintmq.tools.shell.link import Link, Unreachable
from flintmq.tools.shell.output import count_of, is_read, is_terminal, note, write_all

GATHER_S = 0.01
"""Messages that come within this time are written together."""
BATCH_MAX = 2500
_TICK_S = 0.05
_READER_S = 0.5
_DRAIN_S = 5.0
_TOUCH_SHARE = 0.4
_FLINTMQ = "FLINTMQ_"
_NOT_RUN = (126, 127)
"""Exit codes of a shell that cannot run a command, or finds none."""


class NoCommand(FlintError):
    """The command of ``--exec`` cannot be run."""


def run(given: argparse.Namespace) -> int:
    """Consume; return the exit code.

    Raises:
        FlintError: the command line is wrong, or every nsqd refuses.
    """
    given.channel = given.channel or ephemeral("sub")
    _check(given)
    link = Link(given)
    write = writer(given, is_terminal())
    if given.headers:
        link.check_redesigned("send headers: leave --headers out", given.topic)
    if given.start is not None:
        link.check_redesigned("begin at a place: leave --from out", given.topic)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_Sub(given, link, write).run())


def ephemeral(word: str) -> str:
    """Return a channel that nobody else has, and that goes with its consumer."""
    return f"flintmq-{word}-{random.SystemRandom().randrange(10**9):09d}#ephemeral"


def _check(given: argparse.Namespace) -> None:
    for name, text in (("topic", given.topic), ("channel", given.channel)):
        if not is_valid_name(text):
            raise OptionError(name, text, "1 to 64 of . a-z A-Z 0-9 _ -, and perhaps #ephemeral", "argument")
    if given.command_line is not None and (given.json or given.raw or given.format is not None):
        raise UsageError("--exec goes with neither --json, --raw nor --format: the command does the printing")
    if given.command_line is not None and not given.command_line.strip():
        raise UsageError("--exec needs a command")
    if given.command_line is None and given.jobs != 1:
        raise UsageError("--jobs is for --exec")
    if given.ordered and not given.lookupd:
        raise UsageError("--ordered needs --lookupd, which knows the partitions")
    if given.start is not None and given.start.kind == "count" and given.lookupd:
        raise UsageError("count:N is a place in one partition; it needs --nsqd")


def start_at(place: Place) -> StartAt:
    """Return a place as the client takes it."""
    if place.kind == "beginning":
        return "beginning"
    if place.kind == "end":
        return "end"
    if place.kind == "ago":
        return timedelta(seconds=place.number / NS_PER_S)
    if place.kind == "time":
        return datetime.fromtimestamp(place.number / NS_PER_S, UTC)
    return Start.offset(place.number) if place.kind == "offset" else Start.count(place.number)


def line_of(message: Message[bytes], topic: str, channel: str, with_headers: bool) -> Line:
    """Return a message that came as one that is to be printed."""
    return Line(
        topic, message.body, message.timestamp_ns, id_text(message.id), message.attempts, channel, message.partition,
        message.offset, message.trace_id, message.headers if with_headers else None, message.nsqd,
    )  # fmt: skip


class _Sub:
    """One run."""

    def __init__(self, given: argparse.Namespace, link: Link, write: Callable[[Line], bytes]) -> None:
        self._given, self._link, self._write = given, link, write
        self._left: int | None = given.count  # of those that are wanted
        self._done = 0
        self._failed = 0
        self._error: FlintError | None = None
        self._ended: NoCommand | None = None
        self._is_unread = False
        in_flight = 2 * given.jobs if given.command_line else given.max_in_flight
        if given.count:
            in_flight = min(in_flight, given.count)  # more would be asked for than is wanted
        settings: dict[str, Any] = {"max_in_flight": in_flight, "max_attempts": 0, "drain_timeout": _DRAIN_S}
        if given.start is not None:
            settings["start"] = start_at(given.start)
        if given.headers:
            settings["headers"] = True
        if given.ordered:
            settings["ordered"] = True
        if given.command_line:
            settings |= {"handler": self._run_command, "concurrency": given.jobs, "max_backoff": 0}
        self._consumer: Consumer[bytes] = Consumer(
            given.topic, given.channel, **link.addresses, options=link.options, on_error=self._note_error, **settings
        )

    def _note_error(self, error: FlintError) -> None:
        self._error = error

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._consumer.stop)
        self._at = loop.time()
        if not self._link.lookupd:
            logging.disable(logging.CRITICAL)  # an error of the start is said once, and in other words
        async with self._consumer as consumer:
            self._check_there()
            logging.disable(logging.NOTSET)
            ends = [loop.create_task(self._end_in_time()), loop.create_task(self._end_unread())]
            if self._given.span is not None:
                loop.call_later(self._given.span, consumer.stop)
            try:
                if self._given.command_line:
                    await self._consumer.run()
                else:
                    await self._print()
            finally:
                for task in ends:
                    task.cancel()
        if self._given.command_line:
            note(f"{count_of(self._done, 'message')} finished, {self._failed:,} requeued")
        if self._ended is not None:
            raise self._ended
        if self._is_unread and self._left != 0:
            raise BrokenPipeError
        return 1 if self._failed and self._done < (self._given.count or 1) else 0

    def _check_there(self) -> None:
        """Refuse to wait for ever where nobody answers at the addresses that were named.

        Raises:
            FlintError: says why.
        """
        if self._link.lookupd or self._consumer.stats().connections:
            return
        error = self._error
        if isinstance(error, ConnectionFailed):
            raise Unreachable(error.address, error.reason)
        if error is not None:
            raise error

    async def _end_in_time(self) -> None:
        """Stop when nothing has come for long enough."""
        idle = self._given.idle
        if idle is None:
            return
        loop = asyncio.get_running_loop()
        while (left := self._at + idle - loop.time()) > 0 or self._consumer.stats().in_flight:  # noqa: ASYNC110
            await asyncio.sleep(max(left, _TICK_S))
        self._consumer.stop()

    async def _end_unread(self) -> None:
        """Stop when nobody reads what is printed any more; without a message to write nothing else would tell."""
        if self._given.command_line:
            return
        while is_read():  # noqa: ASYNC110
            await asyncio.sleep(_READER_S)
        self._is_unread = True
        self._consumer.stop()

    async def _print(self) -> None:
        given, consumer = self._given, self._consumer
        with_headers = given.headers or given.json or "{headers}" in (given.format or "")
        is_plain = not (given.json or given.raw or given.headers or given.format is not None or is_terminal())
        async for batch in consumer.batches(BATCH_MAX, GATHER_S):
            count = len(batch) if self._left is None else min(len(batch), self._left)
            if is_plain:  # a line for each would cost more than all the rest
                data = b"".join([message.body + b"\n" for message in batch[:count]])
            else:
                lines = [line_of(message, given.topic, given.channel, with_headers) for message in batch[:count]]
                data = b"".join(map(self._write, lines))
            try:
                await asyncio.to_thread(write_all, data)
            except BaseException:
                for message in batch:
                    message.requeue(0)
                consumer.stop()
                raise
            for message in batch[:count]:
                message.finish()
            for message in batch[count:]:
                message.requeue(0)
            self._count(count)

    def _count(self, count: int) -> None:
        self._at = asyncio.get_running_loop().time()
        self._done += count
        if self._left is not None:
            self._left -= count
            if self._left <= 0:
                self._left = 0
                self._consumer.stop()

    async def _run_command(self, message: Message[bytes]) -> None:
        """Run the command for one message.

        Raises:
            Requeue: it has failed, or there have been enough.
        """
        if self._ended is not None or (self._left is not None and self._left <= 0):
            raise Requeue(0)
        try:
            process = await asyncio.create_subprocess_shell(
                self._given.command_line, stdin=asyncio.subprocess.PIPE, env=self._environment(message)
            )
        except OSError as error:
            note(f"flintmq sub: the command cannot be run: {error.strerror}; message {id_text(message.id)} is requeued")
            self._failed += 1
            raise Requeue(self._given.requeue) from error
        touching = asyncio.get_running_loop().create_task(_keep(message))
        try:
            code = await end_of(process, message.body)
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise
        finally:
            touching.cancel()
        if code in _NOT_RUN:  # no other message would fare better
            self._failed += 1
            self._ended = NoCommand(f"the command cannot be run, a shell says {code}: {self._given.command_line}")
            self._consumer.stop()
            raise Requeue(0)
        if code:
            self._failed += 1
            ended = f"ended with {code}" if code > 0 else f"was ended by signal {-code}"
            name = f"message {id_text(message.id)}, attempt {message.attempts}"
            note(f"flintmq sub: the command {ended} for {name}; it is requeued")
            self._at = asyncio.get_running_loop().time()
            raise Requeue(self._given.requeue)
        self._count(1)

    def _environment(self, message: Message[bytes]) -> dict[str, str]:
        line = line_of(message, self._given.topic, self._given.channel, with_headers=True)
        found = {
            "ID": line.id, "TOPIC": line.topic, "CHANNEL": str(line.channel), "ATTEMPTS": str(line.attempts),
            "TIMESTAMP_NS": str(line.timestamp_ns), "MESSAGE_NSQD": str(line.nsqd),
        }  # fmt: skip
        if line.partition is not None:
            found["PARTITION"] = str(line.partition)
        if line.trace_id:
            found["TRACE_ID"] = str(line.trace_id)
        return {**os.environ, **{_FLINTMQ + name: value for name, value in found.items()}}


async def end_of(process: asyncio.subprocess.Process, body: bytes) -> int:
    """Write a body to a command and return its exit code.

    It may read as little as it likes, and may have ended already: uvloop has a RuntimeError for that.
    """
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, RuntimeError):
        await process.communicate(body)
    return await process.wait()


async def _keep(message: Message[bytes]) -> None:
    """Ask for more time for a message, again and again."""
    while True:
        await asyncio.sleep(max(0.1, message.time_left * _TOUCH_SHARE))
        message.touch()
