"""``flintmq pub``: publish arguments, files, or lines of stdin.

Rules of this file: what was read at once travels at once, as one MPUB, several of them ahead of their answers; every
message has a place (``line 7``, ``body 2``), and what is not stored is named by it. A message that nsqd refuses for
what it is (too big, say) does not keep the others from being published; everything else ends the work, and the rest is
named.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from flintmq.client.aio.producer import Producer
from flintmq.client.core.publish import Published
from flintmq.errors import (
    ConnectionFailed,
    FlintError,
    NsqdError,
    OptionError,
    PublishError,
    PublishUnknown,
    UsageError,
)
from flintmq.names import is_valid_name
from flintmq.tools.feed import InputError, Pace, Source, Splitter
from flintmq.tools.shell.link import Link, NotOurs, Unreachable
from flintmq.tools.shell.output import Progress, count_of, note, say, say_json

STDIN = 0
COUNT_MAX = 5000
"""Messages of one MPUB."""
BYTES_MAX = 512 * 1024
"""Bytes of the bodies of one MPUB, unless one message has more."""
AHEAD_MAX = 8
"""MPUBs that wait for their answers."""
NAMED_MAX = 20
"""Messages that are not published and are named one by one."""
_ABOUT_A_MESSAGE = ("E_BAD_MESSAGE", "E_BAD_BODY")
_EXIT_INTERRUPTED = 130
_FEATURES = {
    "header": ("-H", "only FlintMQ's and Youzan's nsqd have headers, on a topic that was created with them"),
    "trace_id": ("--trace-id", "only FlintMQ's and Youzan's nsqd have trace ids, on a topic with partitions"),
    "partition": ("--partition", "only FlintMQ's and Youzan's nsqd have partitions"),
    "once": ("--once", "only FlintMQ's nsqd can tell a message that it has"),
}


@dataclass(frozen=True, slots=True)
class Chunk:
    """Messages that travel together.

    Attributes:
        bodies: none is empty.
        place: of the first, counted from 1.
        places: of each, where they do not follow each other.
    """

    bodies: list[bytes]
    place: int
    places: Sequence[int] | None = None

    def place_of(self, index: int) -> int:
        """Return the place of one of them."""
        return self.place + index if self.places is None else self.places[index]


@dataclass(slots=True)
class Outcome:
    """The result of it all.

    Attributes:
        published: messages that are stored.
        refused: first and last place of what is not, and why.
        empty: items without a byte, which no nsqd takes.
        is_over: something happened after which nothing goes on.
    """

    published: int = 0
    size: int = 0
    empty: int = 0
    refused: list[tuple[int, int, str]] = field(default_factory=list)
    is_over: bool = False
    stored: list[Published] = field(default_factory=list)


def run(given: argparse.Namespace) -> int:
    """Publish; return the exit code.

    Raises:
        FlintError: the command line is wrong, or there is no nsqd.
    """
    _check(given)
    link = Link(given)
    feed = _Feed(given)
    if given.partition is not None:
        link.check_redesigned("store to a partition: leave --partition out", given.topic)
    try:
        return asyncio.run(_publish(given, link, feed))
    except NsqdError as error:
        if given.once and "producer sequences" in error.detail:
            raise NotOurs(", ".join(link.nsqd), "tell a message that it has: leave --once out") from None
        raise


def _check(given: argparse.Namespace) -> None:
    if not is_valid_name(given.topic):
        raise OptionError("topic", given.topic, "1 to 64 of . a-z A-Z 0-9 _ -, and perhaps #ephemeral", "argument")
    if given.whole and (given.body or given.file or given.lines or given.delimiter):
        raise UsageError("--whole is for stdin, without bodies, --file, --lines or --delimiter")
    if given.lines and not given.file:
        raise UsageError("--lines is for --file; stdin is read by lines anyway")
    if given.delay is not None and (given.header or given.trace_id is not None):
        raise UsageError("--delay goes with neither --header nor --trace-id")
    if given.key is not None and not given.lookupd:
        raise UsageError("--key needs --lookupd, which knows how many partitions there are; or name one: --partition")
    if given.trace_id is not None and not given.lookupd and given.partition is None:
        raise UsageError("--trace-id needs --lookupd, or --partition: only topics with partitions have trace ids")
    if given.key is not None and given.partition is not None:
        raise UsageError("--key or --partition, not both: a key has its partition")
    if given.count > 1 and not given.body and not given.file and not given.whole:
        raise UsageError("--count is for bodies, --file and --whole; lines of stdin are published once")
    if any(not body for body in given.body):
        raise UsageError("an empty body cannot be published: no nsqd takes one")
    names = [name for name, _ in given.header]
    if len(names) != len({*names}):
        raise UsageError("a header is given twice; a message has one of each name")


class _Feed:
    """The messages of a command line, in their order.

    Attributes:
        word: the kind of place that a message has: ``line``, ``body``, ``file``.
        empty: items without a byte so far.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._delimiter = (
            (given.delimiter or "\n").encode(errors="surrogateescape").decode("unicode_escape").encode("latin-1")
        )
        if len(self._delimiter) != 1:
            raise OptionError("--delimiter", given.delimiter, "a single byte, such as , or \\0", "flag")
        self.empty = 0
        self.total = len(given.body) * given.count
        self._source: Source | None = None
        self._is_stopped = False
        self.word = "body" if given.body else "file" if given.file and not given.lines else "line"
        if given.whole:
            self.word = "message"

    def stop(self) -> None:
        """Read no more; half an item is none."""
        self._is_stopped = True
        if self._source is not None:
            self._source.stop()

    async def chunks(self, count_max: int) -> AsyncIterator[Chunk]:
        """Yield all messages.

        Raises:
            InputError: a file cannot be read, or an item is too long.
        """
        given = self._given
        if given.body or given.file:
            parts = [chain((body.encode(errors="surrogateescape") for body in given.body), self._files())]
            if given.count > 1:
                parts = [iter(list(parts[0]) * given.count)]
            for chunk in self._cut(parts[0], count_max):
                yield chunk
        elif given.whole:
            if body := await self._all():
                for chunk in self._cut(iter([body] * given.count), count_max):
                    yield chunk
            elif not self._is_stopped:
                self.empty += 1
        else:
            async for chunk in self._lines(count_max):
                yield chunk

    def _files(self) -> Iterator[bytes]:
        for path in self._given.file:
            try:
                data = Path(path).read_bytes()
            except OSError as error:
                raise InputError(f"file {path} cannot be read: {error.strerror}") from error
            if not self._given.lines:
                yield data
            else:
                splitter = Splitter(self._delimiter)
                yield from splitter.feed(data)
                yield from splitter.end()

    def _cut(self, items: Iterator[bytes], count_max: int) -> Iterator[Chunk]:
        number = 1
        while some := list(islice(items, count_max)):
            yield from self._sized(some, number)
            number += len(some)

    def _sized(self, items: list[bytes], number: int) -> Iterator[Chunk]:
        """Yield items as chunks that fit into an MPUB, without the empty ones."""
        if all(items) and sum(map(len, items)) <= BYTES_MAX:
            yield Chunk(items, number)
            return
        bodies: list[bytes] = []
        places: list[int] = []
        size = 0
        for place, body in enumerate(items, number):
            if not body:
                self.empty += 1
                continue
            if bodies and size + len(body) > BYTES_MAX:
                yield Chunk(bodies, places[0], places)
                bodies, places, size = [], [], 0
            bodies.append(body)
            places.append(place)
            size += len(body)
        if bodies:
            yield Chunk(bodies, places[0], places)

    async def _all(self) -> bytes:
        source = self._source = Source(STDIN)
        parts: list[bytes] = []
        while data := await source.read():
            parts.append(data)
        return b"" if self._is_stopped else b"".join(parts)

    async def _lines(self, count_max: int) -> AsyncIterator[Chunk]:
        if sys.stdin is not None and sys.stdin.isatty():
            note("flintmq pub: reads a message a line from this terminal; Ctrl-D ends it")
        source = self._source = Source(STDIN)
        splitter = Splitter(self._delimiter)
        number = 1
        while True:
            data = await source.read()
            if self._is_stopped:
                return
            items = splitter.feed(data) if data else splitter.end()
            for start in range(0, len(items), count_max):
                some = items[start : start + count_max] if len(items) > count_max else items
                for chunk in self._sized(some, number):
                    yield chunk
                number += len(some)
            if not data:
                return


async def _publish(given: argparse.Namespace, link: Link, feed: _Feed) -> int:
    loop, interrupted = asyncio.get_running_loop(), False

    def stop() -> None:
        nonlocal interrupted
        interrupted = True
        feed.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        os.fstat(STDIN)
    except OSError as error:
        if not given.body and not given.file:
            raise UsageError("stdin is closed; give bodies or --file") from error
    outcome = Outcome()
    producer = Producer(**link.addresses, options=link.options, timeout=link.timeout_s, idempotent=given.once)
    async with producer:
        if not link.lookupd and not producer.stats().connections:
            await _say_why(producer, link, given)
        sender = _Sender(given, producer, outcome)
        pace = Pace(given.rate)
        progress = Progress("messages published")
        try:
            async for chunk in feed.chunks(min(COUNT_MAX, pace.count_max) if given.rate else COUNT_MAX):
                if given.rate:
                    await pace.wait(len(chunk.bodies))
                await sender.send(chunk)
                progress.at(outcome.published)
                if outcome.is_over or interrupted:
                    break
        except InputError as error:
            await sender.end()
            progress.end()
            _report(given, outcome, feed.word)
            raise InputError(
                f"{error}; {count_of(outcome.published, 'message')} before it {_is(outcome)} published"
            ) from None
        await sender.end()
        progress.end()
    outcome.empty = feed.empty
    last = sender.last_place if outcome.is_over or interrupted else 0
    return _report(given, outcome, feed.word, 0 if last == feed.total else last, interrupted)


def _is(outcome: Outcome) -> str:
    return "is" if outcome.published == 1 else "are"


async def _say_why(producer: Producer, link: Link, given: argparse.Namespace) -> None:
    """Fail at once where the nsqd that was named does not answer.

    Raises:
        FlintError: says why it does not.
    """
    try:
        await producer.mpub(given.topic, [b"-"], timeout=0.001)
    except PublishError as error:
        cause = error.__cause__
        raise (
            Unreachable(cause.address, cause.reason) if isinstance(cause, ConnectionFailed) else cause or error
        ) from None


class _Sender:
    """Publishes chunks, several ahead of their answers."""

    def __init__(self, given: argparse.Namespace, producer: Producer, outcome: Outcome) -> None:
        self._given, self._producer, self._outcome = given, producer, outcome
        self._tasks: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(AHEAD_MAX)
        self.last_place = 0
        self._how: dict[str, Any] = {}
        if given.key is not None:
            self._how["sharding_id"] = given.key
        if given.partition is not None:
            self._how["partition"] = given.partition
        if given.trace_id is not None:
            self._how["trace_id"] = given.trace_id
        if given.header:
            self._how["headers"] = dict(given.header)
        self._send: Callable[[list[bytes]], Any] = self._mpub if given.delay is None else self._dpubs

    async def send(self, chunk: Chunk) -> None:
        """Have a chunk published; returns when there is room for the next one."""
        self.last_place = chunk.place_of(len(chunk.bodies) - 1)
        await self._room.acquire()
        task = asyncio.get_running_loop().create_task(self._publish(chunk))
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._room.release()

    async def end(self) -> None:
        """Wait until everything is answered."""
        while self._tasks:
            await asyncio.wait([*self._tasks])

    async def _mpub(self, bodies: list[bytes]) -> None:
        found = await self._producer.mpub(self._given.topic, bodies, **self._how)
        if found is not None and len(self._outcome.stored) < NAMED_MAX:
            self._outcome.stored.append(found)

    async def _dpubs(self, bodies: list[bytes]) -> None:
        """Publish one by one: NSQ has no command for several with a delay."""
        topic, delay = self._given.topic, self._given.delay
        await asyncio.gather(*(self._producer.mpub(topic, [body], delay=delay, **self._how) for body in bodies))

    async def _publish(self, chunk: Chunk) -> None:
        bodies, outcome = chunk.bodies, self._outcome
        try:
            if self._given.delay is None:
                await self._mpub(bodies)
                outcome.published += len(bodies)
                outcome.size += sum(map(len, bodies))
                return
        except PublishError as error:
            if error.code not in _ABOUT_A_MESSAGE or len(bodies) == 1:
                self._refuse(chunk, 0, len(bodies) - 1, error)
                return
        except FlintError as error:
            self._refuse(chunk, 0, len(bodies) - 1, error)
            return
        answers = await asyncio.gather(*(self._send([body]) for body in bodies), return_exceptions=True)
        for index, answer in enumerate(answers):
            if isinstance(answer, FlintError):
                self._refuse(chunk, index, index, answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                outcome.published += 1
                outcome.size += len(bodies[index])

    def _refuse(self, chunk: Chunk, first: int, last: int, error: FlintError) -> None:
        outcome = self._outcome
        is_about_it = isinstance(error, PublishError) and error.code in _ABOUT_A_MESSAGE
        if not is_about_it:
            outcome.is_over = True
        outcome.refused.append((chunk.place_of(first), chunk.place_of(last), self._why(error)))

    def _why(self, error: FlintError) -> str:
        text = str(error)
        if isinstance(error, PublishError) and error.code == "E_INVALID" and "only FlintMQ" not in text:
            for name, (flag, advice) in _FEATURES.items():
                if getattr(self._given, name) not in (None, [], False):
                    text += f" ({flag}: {advice})"
        if isinstance(error, PublishError) and error.code == "E_TOPIC_NOT_EXIST":
            wanted = " --headers" if self._given.header else ""
            text += f" (this makes no topic; to make it: flintmq topic create {self._given.topic}{wanted})"
        return f"it may be stored all the same: {text}" if isinstance(error, PublishUnknown) else text


def _report(
    given: argparse.Namespace, outcome: Outcome, word: str, stopped_at: int = 0, interrupted: bool = False
) -> int:
    """Say what was published and what was not; return the exit code."""
    refused = sorted(outcome.refused)
    missing = sum(last - first + 1 for first, last, _ in refused)

    def named(first: int, last: int) -> str:
        return f"{word} {first}" if first == last else f"{word} {first} to {last}"

    for first, last, why in refused[:NAMED_MAX]:
        note(f"flintmq pub: {named(first, last)} is not published: {why}")
    if len(refused) > NAMED_MAX:
        last = refused[-1][1]
        note(f"flintmq pub: and {len(refused) - NAMED_MAX} more places, the last of them {named(last, last)}")
    if stopped_at:
        why = "interrupted" if interrupted else "stopped"
        note(f"flintmq pub: {why}: nothing behind {named(stopped_at, stopped_at)} was tried")
    if outcome.empty:
        note(f"flintmq pub: {count_of(outcome.empty, f'empty {word}')} left out: no nsqd takes empty messages")
    if given.json:
        summary: dict[str, Any] = {
            "topic": given.topic,
            "published": outcome.published,
            "bytes": outcome.size,
            "empty": outcome.empty,
            "refused": [{"place": named(first, last), "reason": why} for first, last, why in refused[:NAMED_MAX]],
        }
        if given.trace_id is not None:
            summary["stored"] = outcome.stored
        say_json([summary])
    else:
        for each in outcome.stored:
            where = "" if each.offset is None else f" id {each.internal_id} offset {each.offset}"
            say(f"partition {each.partition}{where} trace id {each.trace_id} nsqd {each.nsqd}")
        if refused or stopped_at or sys.stderr.isatty():
            lost = f", {count_of(missing, 'message')} not" if missing else ""
            note(f"{count_of(outcome.published, 'message')} published to {given.topic}{lost}")
    if interrupted:
        return _EXIT_INTERRUPTED
    return 1 if refused or outcome.is_over else 0
