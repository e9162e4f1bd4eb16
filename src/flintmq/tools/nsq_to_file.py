"""``nsq_to_file``: write the messages of topics to files.

Rules of this file: a message is finished when it is on disk, never before; messages that were written and are not on
disk yet are in ``_pending``, and what fails gives back all of them; where there is no room, nothing is taken until
there is some. One consumer and one file for each topic; the files themselves: :mod:`flintmq.tools.output_file`.

Source: NSQ 1.3, apps/nsq_to_file; NSQ's options.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from flintmq.client.aio.consumer import Consumer
from flintmq.client.core.message import Message, finish_all
from flintmq.errors import FlintError, OptionError, UsageError
from flintmq.names import is_valid_name
from flintmq.net.log import LEVELS
from flintmq.net.regex import BadPattern, Pattern
from flintmq.options import (
    MINUTE,
    SECOND,
    Choice,
    Duration,
    Integer,
    Items,
    Switch,
    Text,
    option,
    read_command,
    version_line,
)
from flintmq.tools.asking import Asker, AskingOptions
from flintmq.tools.client_opts import ClientOpts
from flintmq.tools.consuming import (
    HOW,
    WHAT,
    ConsumingOptions,
    batch_size,
    check_topics,
    log_to_stderr,
    on_signals,
    run_to_end,
)
from flintmq.tools.output_file import (
    FileSettings,
    OutputFile,
    check_datetime_format,
    files_of_others,
    name_format,
    recover,
)
from flintmq.wire.identify import NSQ_VERSION

log = logging.getLogger(__name__)

GATHER_S = 0.01
"""Messages that come within this time are written together."""
FULL_WAIT_S = (1.0, 30.0)
"""Until writing is tried again where there was no room: at first, and at most."""
_FILES = "Files"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class OutputError(FlintError):
    """The messages that came cannot be written."""


@dataclass(frozen=True, kw_only=True)
class ToFileOptions(ConsumingOptions, AskingOptions):
    """The flags of nsq_to_file."""

    program: ClassVar[str] = "nsq_to_file"
    summary: ClassVar[str] = (
        "nsq_to_file writes messages to files, one a line, and finishes them when they are on disk."
    )

    topic: tuple[str, ...] = option(
        Items(Text("TOPIC")), (), "a topic to consume (may be given multiple times)", group=WHAT
    )
    topic_pattern: str = option(
        Text("REGEX"), "", "consume only topics in which this is found, all that there are without --topic", group=WHAT
    )
    topic_refresh_ns: int = option(
        Duration(1), MINUTE, "how often nsqlookupd are asked for new topics, without --topic", group=WHAT
    )
    channel: str = option(Text("CHANNEL"), "nsq_to_file", "their channel", group=WHAT)
    output_dir: str = option(Text("DIRECTORY"), "/tmp", "where files end up", group=_FILES)
    work_dir: str = option(
        Text("DIRECTORY"),
        "",
        "where files are until they are complete, on the same file system",
        group=_FILES,
        default_text="--output-dir",
    )
    filename_format: str = option(
        Text("FORMAT"),
        "<TOPIC>.<HOST><REV>.<DATETIME>.log",
        "name of a file; <TOPIC>, <HOST>, <PID>, <DATETIME> and <REV> are replaced, slashes make directories; "
        "<REV> counts up when there is such a file",
        group=_FILES,
    )
    datetime_format: str = option(
        Text("FORMAT"), "%Y-%m-%d_%H", "<DATETIME> as strftime has it; another one begins another file", group=_FILES
    )
    host_identifier: str = option(
        Text("TEXT"),
        "",
        "<HOST>; <SHORT_HOST> and <HOSTNAME> in it are replaced",
        group=_FILES,
        default_text="<SHORT_HOST>",
    )
    gzip: bool = option(Switch(), False, "compress files", group=_FILES)
    gzip_level: int = option(Integer(1, 9), 6, "how hard to try, 1 to 9", group=_FILES)
    skip_empty_files: bool = option(Switch(), False, "begin no file before there is a message for it", group=_FILES)
    rotate_size: int = option(
        Integer(0), 0, "begin another file after this many bytes (before gzip); 0: never", group=_FILES
    )
    rotate_interval_ns: int = option(Duration(), 0, "begin another file after this time; 0: never", group=_FILES)
    sync_interval_ns: int = option(
        Duration(1),
        30 * SECOND,
        "the most time until messages are on disk and finished; never more than half of their timeout",
        group=_FILES,
    )
    log_level: str = option(Choice(tuple(LEVELS)), "info", "how much to log", group=HOW)
    log_prefix: str = option(Text(), "[nsq_to_file] ", "what every log line starts with", group=HOW)

    @property
    def has_revisions(self) -> bool:
        """Whether a name may be taken already."""
        moves = os.path.normpath(self.work_dir or self.output_dir) != os.path.normpath(self.output_dir)
        return self.gzip or bool(self.rotate_size or self.rotate_interval_ns) or moves

    def file_settings(self, topic: str) -> FileSettings:
        """Return how the files of a topic are written.

        Raises:
            UsageError: their names are missing something.
        """
        if topic in (".", "..") and "/" in self.filename_format:
            raise UsageError(f"topic {topic} would be a directory that there is already")
        hostname = socket.gethostname()
        short = hostname.split(".")[0]
        host = (self.host_identifier or short).replace("<SHORT_HOST>", short).replace("<HOSTNAME>", hostname)
        return FileSettings(
            output_dir=os.path.normpath(self.output_dir),
            work_dir=os.path.normpath(self.work_dir or self.output_dir),
            name_format=name_format(self.filename_format, topic, host, self.has_revisions, self.gzip),
            datetime_format=self.datetime_format,
            gzip_level=self.gzip_level if self.gzip else 0,
            rotate_size=self.rotate_size,
            rotate_interval_s=self.rotate_interval_ns / SECOND,
            keeps_empty=not self.skip_empty_files,
        )


def run(arguments: Sequence[str]) -> int:
    """Run nsq_to_file; return its exit code.

    Raises:
        FlintError: the command line is wrong, every nsqd refuses, or something cannot be written.
    """
    options = read_command(ToFileOptions, arguments, "nsq_to_file", version_line("nsq_to_file", NSQ_VERSION))
    if options is None:
        return 0
    if not options.channel:
        raise UsageError("--channel is required")
    check_topics([options.channel], "--channel")
    options.check_whole()
    if not options.topic and not options.topic_pattern:
        raise UsageError("--topic or --topic-pattern required")
    if not options.topic and not options.lookupd_http_address:
        raise UsageError("--lookupd-http-address must be specified when no --topic specified")
    check_topics(options.topic)
    check_datetime_format(options.datetime_format)
    options.file_settings("t")
    try:
        pattern = Pattern(options.topic_pattern or ".*")
    except BadPattern as error:
        raise OptionError("--topic-pattern", options.topic_pattern, str(error), "flag") from error
    if options.topic and not any(map(pattern.search, options.topic)):
        raise OptionError("--topic-pattern", options.topic_pattern, "it must match one --topic at least", "flag")
    if options.work_dir and options.work_dir != options.output_dir:
        _check_one_file_system(options.work_dir, options.output_dir)
    log_to_stderr(LEVELS[options.log_level], options.log_prefix)
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # of leases that are taken for a moment
    return run_to_end(_Writing(options, pattern).run())


def _check_one_file_system(work_dir: str, output_dir: str) -> None:
    try:
        for each in (work_dir, output_dir):
            os.makedirs(each, 0o770, exist_ok=True)
        if os.stat(work_dir).st_dev == os.stat(output_dir).st_dev:
            return
    except OSError as error:
        raise OutputError(f"{error.filename}: {error.strerror}") from error
    raise OptionError("--work-dir", work_dir, "it must be on the file system of --output-dir: files are moved", "flag")


class _Writing:
    """All topics."""

    def __init__(self, options: ToFileOptions, pattern: Pattern) -> None:
        self._options = options
        self._pattern = pattern
        self._opts = options.client_opts()
        self._left: list[str] = []
        self._running: dict[str, _Topic] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._skipped: set[str] = set()
        self._stopped = asyncio.Event()
        self._failure: BaseException | None = None

    async def run(self) -> int:
        """Write until it is told to end.

        Raises:
            FlintError: it cannot go on.
        """
        on_signals(self._stop)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reopen)
        given = self._options.topic
        try:
            self._left = await asyncio.to_thread(files_of_others, self._options.file_settings("t"))
        except OSError as error:
            log.error("files of a killed run are not looked for: %s", error)
        if not self._stopped.is_set():
            self._begin(given)
        while not self._stopped.is_set():
            if not given:
                await self._look_for_topics()
            with contextlib.suppress(TimeoutError):
                every_s = None if given else self._options.topic_refresh_ns / SECOND
                await asyncio.wait_for(self._stopped.wait(), every_s)
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._failure is not None:
            raise self._failure
        return 0

    def _stop(self) -> None:
        self._stopped.set()
        for topic in self._running.values():
            topic.stop()

    def _reopen(self) -> None:
        for topic in self._running.values():
            topic.reopen()

    async def _look_for_topics(self) -> None:
        """Begin with the topics that are new; those that cannot be had are tried again the next time."""
        try:
            asker = Asker(self._options, self._opts.connection.tls_context(), self._opts.connection.lookup_token)
            answers = await asker.ask_all(self._options.lookupd_http_address, "/topics")
        except FlintError as error:
            log.error("could not retrieve topic list: %s", error)
            return
        found: dict[str, None] = {}
        for answer in answers.values():
            topics = answer.get("topics") if isinstance(answer, dict) else None
            found.update((str(each), None) for each in topics or ())
        if not self._stopped.is_set():
            self._begin(list(found))

    def _begin(self, topics: Sequence[str]) -> None:
        for topic in topics:
            if topic in self._running or topic in self._skipped:
                continue
            if not is_valid_name(topic):
                self._skipped.add(topic)
                log.error("skipping topic %s, which is no name of a topic", topic)
                continue
            if not self._pattern.search(topic):
                self._skipped.add(topic)  # said once, not every time
                log.warning("skipping topic %s (doesn't match pattern %s)", topic, self._options.topic_pattern)
                continue
            try:
                self._running[topic] = _Topic(self._options, self._opts, topic, self._left)
            except UsageError as error:
                self._skipped.add(topic)
                log.error("skipping topic %s: %s", topic, error)
                continue
            task = asyncio.get_running_loop().create_task(self._write(topic))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    async def _write(self, topic: str) -> None:
        try:
            await self._running[topic].run()
        except FlintError as error:
            if self._options.topic or isinstance(error, OutputError):
                raise
            log.error("couldn't create logger for new topic %s: %s", topic, error)
        finally:
            self._running.pop(topic, None)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._stop()


class _Topic:
    """The messages of one topic, on their way into its files."""

    def __init__(self, options: ToFileOptions, opts: ClientOpts, topic: str, left: Sequence[str]) -> None:
        self._left = left
        self._label = f"[{topic}/{options.channel}]"
        self._settings = options.file_settings(topic)
        self._file = OutputFile(self._settings, self._label)
        self._consumer = options.consumer(topic, options.channel, opts, **{"max_attempts": 0, **opts.consumer})
        self._batch_size = batch_size(self._consumer.max_in_flight)
        self._sync_every_s = options.sync_interval_ns / SECOND
        self._pending: list[Message[bytes]] = []
        self._lock = asyncio.Lock()
        self._due = asyncio.Event()
        self._soon: asyncio.TimerHandle | None = None
        self._wants_another_file = False
        self._full_s = 0.0
        self._is_stopped = False

    def stop(self) -> None:
        """End: what came is written and finished."""
        self._is_stopped = True
        self._consumer.stop()

    def reopen(self) -> None:
        """End the present file."""
        self._wants_another_file = True
        self._due.set()

    async def run(self) -> None:
        """Write until it is stopped.

        Raises:
            OutputError: something cannot be written.
            FlintError: every nsqd refuses.
        """
        try:
            await asyncio.to_thread(recover, self._settings, self._label, self._left)
        except OSError as error:
            log.error("%s files of a killed run stay where they are: %s", self._label, error)
        if self._is_stopped:
            return
        async with self._consumer:
            ticking = asyncio.get_running_loop().create_task(self._tick())
            ticking.add_done_callback(lambda _: self._consumer.stop())
            try:
                await self._consume(self._consumer)
            finally:
                self._is_stopped = True
                self._due.set()
                await ticking
            async with self._lock:
                await self._sync(self._file.close)

    async def _consume(self, consumer: Consumer[bytes]) -> None:
        async for batch in consumer.batches(self._batch_size, GATHER_S):
            async with self._lock:
                await self._write(batch)

    async def _write(self, batch: list[Message[bytes]]) -> None:
        """Write messages, and finish them if that is due; else it is when the time has come."""
        if self._consumer.is_paused:  # these were on their way when there was no more room
            _give_back(batch, self._full_s)
            return
        if not self._pending:
            self._sync_by(batch[0])
        self._pending += batch
        has_rotated = await self._do(self._file.write, [message.body for message in batch])
        if has_rotated is None:
            return
        is_much = len(self._pending) >= min(2 * self._batch_size, self._consumer.max_in_flight)
        if has_rotated or is_much or self._consumer.is_starved:
            await self._sync(self._file.sync)

    def _sync_by(self, first: Message[bytes]) -> None:
        """Have messages synced in time for the first of them to be finished."""
        if (half_s := first.time_left / 2) < self._sync_every_s:
            self._soon = asyncio.get_running_loop().call_later(half_s, self._due.set)

    async def _sync(self, function: Callable[[], Any]) -> None:
        """Call what syncs, and finish what is on disk then."""
        pending = self._pending
        if await self._do(function) is None:  # not done
            return
        if self._soon is not None:
            self._soon.cancel()
        self._pending = []
        finish_all(pending)
        if not pending:
            return
        log.debug("%s synced %d records to disk", self._label, len(pending))
        if self._full_s:
            log.info("%s there is room again", self._label)
            self._full_s = 0.0

    async def _tick(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._due.wait(), self._sync_every_s)
            self._due.clear()
            if self._is_stopped:
                return
            async with self._lock:
                if self._wants_another_file:
                    self._wants_another_file = False
                    await self._sync(self._file.close)
                else:
                    await self._do(self._file.tick)
                    await self._sync(self._file.sync)

    async def _do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call what needs the disk.

        Returns:
            Its result, True for None; None where there is no room: all messages are given back then.

        Raises:
            OutputError: there is more wrong than that.
        """
        try:
            result = await asyncio.to_thread(function, *arguments)
        except OSError as error:
            await self._failed(error)
            return None
        return True if result is None else result

    async def _failed(self, error: OSError) -> None:
        """Take back what is not on disk, and take no more for a while."""
        pending, self._pending = self._pending, []
        path = error.filename or self._file.path or self._settings.work_dir
        has_no_room = error.errno in _NO_ROOM
        try:
            await asyncio.to_thread(self._file.cut_back)
        except OSError as second:
            has_no_room, error = False, second
        if not has_no_room:
            _give_back(pending, 0.0)
            raise OutputError(f"{self._label} {path} cannot be written: {error.strerror}") from error
        if pending or not self._full_s:
            self._full_s = min(FULL_WAIT_S[1], 2 * self._full_s) or FULL_WAIT_S[0]
        text = "%s %s cannot be written: %s; %d messages are given back, tried again in %g s"
        log.error(text, self._label, path, error.strerror, len(pending), self._full_s)
        _give_back(pending, self._full_s)
        self._consumer.pause()
        asyncio.get_running_loop().call_later(self._full_s, self._consumer.unpause)


def _give_back(messages: Sequence[Message[bytes]], delay_s: float) -> None:
    for message in messages:
        message.requeue(delay_s)
