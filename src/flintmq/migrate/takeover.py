"""Taking over the data directory of NSQ's nsqd: topics, channels, pauses and what waits in its queue files.

Steps, before anything else uses the database or a log::

    survey     read nsqd.dat, meta files and sizes; whatever cannot be read stops the start, and nothing was changed
    journal    write down where each log concerned ends now
    import     stream every queue into its topic's log and sync it                     (topic_import.py)
    commit     one transaction: topics, channels, pauses, cursors, and the list of files to move
    move       rename NSQ's files into a directory of their own, where they stay

A kill before the commit leaves NSQ's files as they were: the next start imports again and keeps what the logs have
already. A kill after it leaves files to be moved. A file that changed since it was surveyed, because NSQ's nsqd ran in
between, is not moved but taken over anew.

Rules of this file: everything here blocks and runs in a worker thread; memory does not grow with the backlog; NSQ's
files are read and renamed, never written; where one is a link, what it leads to is read, and the link is renamed;
nsqd.dat counts only when somebody else wrote it (metadata_file.py), queue files always, because this nsqd has none of
its own.

Source: NSQ's data files, NSQ's defects.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

import msgspec

from flintmq.broker.broker import TOPICS_DIRECTORY
from flintmq.clock import Clock
from flintmq.env import Env
from flintmq.errors import DiskFull, StorageError
from flintmq.errors import TakeoverStopped as TakeoverStopped
from flintmq.limits import DISK_RESERVE_BYTES
from flintmq.migrate import metadata_file
from flintmq.migrate.diskqueue import META_BYTES_MAX, Fault, Meta, Queue, find_queues, parse_meta, read_records, unread
from flintmq.migrate.topic_import import (
    EVERYBODY,
    KnownTopic,
    LogDiffers,
    TopicImport,
    TopicRows,
    WantedTopic,
    known_topics,
)
from flintmq.names import directory_name, is_ephemeral, is_valid_name
from flintmq.storage import ChannelStore, Corruption, Files, PartitionLog, ReadCache, channel_store

log = logging.getLogger(__name__)

ARCHIVE_NAME = "nsq-data-before-flintmq"
_PROGRESS_NS = 5_000_000_000
_LEFTOVER = re.compile(r"nsqd\.dat\.\d+\.tmp\Z")
_GROWTH = 8  # an eighth: how much more than in its queue files the messages may take up in the log, generously
_FAULTS_SHOWN_MAX = 1000
_CHANGES_SHOWN_MAX = 10


class TakeoverFailed(StorageError):
    """NSQ's data cannot be taken over; nothing of it was changed.

    Args:
        path: the file in question.
        reason: what is wrong with it.
        remedy: what the operator can do.
    """

    def __init__(self, path: str, reason: str, remedy: str) -> None:
        super().__init__(path, reason, remedy)
        self.path = path
        self.reason = reason
        self.remedy = remedy

    def __str__(self) -> str:
        return (
            f"cannot take over the data of NSQ's nsqd: {self.path}: {self.reason}; {self.remedy} and start again; "
            "its files are as they were, NSQ's nsqd can be started with them too"
        )


class Move(msgspec.Struct, array_like=True):
    """A file to be put aside: its name, its name there, and what it looked like when it was read."""

    source: str
    target: str
    look: str


class Journal(msgspec.Struct, array_like=True):
    """The progress of a takeover, which outlives a crash.

    Attributes:
        firsts: topic -> where the takeover appends to its log.
        archive: the directory for NSQ's files.
        moves: when not empty, everything is taken over and only these are left to do.
        summary: what to tell when they are done.
    """

    firsts: dict[str, int] = {}
    archive: str = ""
    moves: list[Move] = []
    summary: str = ""


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of nsqd that a takeover needs; sizes in bytes."""

    segment_bytes: int
    message_size_max: int


@dataclass(slots=True)
class Source:
    """A queue to be read.

    Attributes:
        files: (name, first byte to read), in order.
    """

    queue: Queue
    files: list[tuple[str, int]]


@dataclass(slots=True)
class Survey:
    """Everything of NSQ's in the data directory.

    Attributes:
        topics: what is to exist.
        sources: topic -> its queues that hold something, those of channels first.
        looks: file -> what it looks like; all of these are moved in the end.
        unread_bytes: how much there is to read.
        is_own_list_changed: nsqd.dat is one that this nsqd wrote, and somebody or a disk has written in it since.
    """

    topics: dict[str, WantedTopic] = field(default_factory=dict)
    sources: dict[str, list[Source]] = field(default_factory=dict)
    looks: dict[str, str] = field(default_factory=dict)
    unread_bytes: int = 0
    is_own_list_changed: bool = False


class Takeover:
    """One attempt; every method blocks.

    Args:
        data_path: for messages only.
        report: told of damage in our own logs.
        is_stopping: asked now and then; when true the takeover ends early.
    """

    def __init__(
        self,
        files: Files,
        store: ChannelStore,
        settings: Settings,
        clock: Clock,
        data_path: str,
        report: Callable[[Corruption], None],
        is_stopping: Callable[[], bool],
    ) -> None:
        self._files = files
        self._store = store
        self._settings = settings
        self._clock = clock
        self._data_path = data_path or "."
        self._report = report
        self._is_stopping = is_stopping
        self._cache = ReadCache()
        self._known: dict[str, KnownTopic] = {}
        self._next_cursor = 1
        self._log_ends: dict[tuple[str, int], int] = {}
        self._faults: list[Fault] = []
        self._ephemeral_count = 0  # queues left out
        self._read_bytes = 0
        self._message_count = 0
        self._total_bytes = 0
        self._told_ns = 0

    def is_due(self) -> bool:
        """Whether there is anything of NSQ's, or of a takeover that was interrupted."""
        names = self._files.list("")
        has_own_list = metadata_file.FILE_NAME in names and metadata_file.DIGESTS_NAME in names
        if has_own_list and self._foreign_list() is None:
            names.remove(metadata_file.FILE_NAME)
        return metadata_file.FILE_NAME in names or bool(find_queues(names)) or self._store.journal() is not None

    def run(self) -> None:
        """Take over what there is.

        Raises:
            TakeoverFailed: a file cannot be used; nothing of NSQ's was changed.
            TakeoverStopped: it was asked to end early.
            StorageError: our own data directory cannot be used.
        """
        journal = self._load_journal()
        if journal.moves:
            self._move(journal)
            journal = Journal()
        survey = self._survey()
        if not (survey.looks or journal.firsts):
            self._commit_journal(None)
            return
        if not journal.firsts:
            self._check_space(survey)
        log.info("found data of NSQ's nsqd in %s: %s to read", self._data_path, _mib(survey.unread_bytes))
        try:
            journal = self._import_all(survey, journal)
        except TakeoverFailed:
            raise
        except (OSError, StorageError) as error:
            raise TakeoverFailed(self._data_path, str(error), "put that right") from error
        self._move(journal)

    def _import_all(self, survey: Survey, journal: Journal) -> Journal:
        """Import everything, up to the commit; return what is left to do."""
        stored = self._store.load()
        self._known = known_topics(stored)
        self._next_cursor = stored.next_cursor
        if survey.is_own_list_changed and metadata_file.FILE_NAME in survey.looks and not self._faults:
            self._warn_of_changes(survey)
        self._total_bytes = survey.unread_bytes
        self._told_ns = self._clock.monotonic_ns()
        journal.firsts = {**self._firsts(survey), **journal.firsts}
        self._commit_journal(journal)
        imports = {topic: self._import(topic, survey, first) for topic, first in sorted(journal.firsts.items())}
        journal = Journal({}, self._free_directory(), self._moves(survey), self._summary(survey))
        self._commit(survey, {topic: done for topic, done in imports.items() if done is not None}, journal)
        return journal

    # -- survey ----------------------------------------------------------------------------------------------------

    def _foreign_list(self) -> bytes | None:
        """Return the content of an nsqd.dat that somebody else wrote; None when it is ours or there is none."""
        path = metadata_file.FILE_NAME
        try:
            data = metadata_file.read_small(self._files, path, metadata_file.FILE_BYTES_MAX)
            return None if metadata_file.own_digest(self._files, data) else data
        except FileNotFoundError as error:
            if path in self._files.list(""):
                raise _unreadable(path, error) from error  # a link that leads nowhere
            return None
        except (OSError, StorageError) as error:
            raise _unreadable(path, error) from error

    def _survey(self) -> Survey:
        survey = Survey()
        names = self._files.list("")
        data = self._foreign_list() if metadata_file.FILE_NAME in names else None
        # without queues beside it nobody's nsqd was here since: somebody, or a disk, has changed what this one wrote
        survey.is_own_list_changed = metadata_file.DIGESTS_NAME in names and not find_queues(names)
        if data is not None:
            self._survey_list(data, survey)
            survey.looks[metadata_file.FILE_NAME] = metadata_file.digest_of(data)
            for name in filter(_LEFTOVER.match, names):
                survey.looks[name] = ""
        for queue in find_queues(names):
            self._survey_queue(queue, survey)
        for sources in survey.sources.values():
            sources.sort(key=lambda source: (source.queue.channel is None, source.queue.channel or ""))
        return survey

    def _survey_list(self, data: bytes, survey: Survey) -> None:
        try:
            metadata = metadata_file.parse(data)
        except ValueError as error:
            path = metadata_file.FILE_NAME
            if survey.is_own_list_changed:
                what = "is damaged, and is written again from channels.db: nothing is missing; it is kept as .bad"
                log.warning("%s %s (%s)", path, what, error)
                self._keep(Fault(path, 0, f"not a list of topics: {error}"))
                return
            remedy = "repair it, or move it away (then the queue files tell which topics and channels there are)"
            raise TakeoverFailed(path, f"not a list of topics: {error}", remedy) from error
        for topic in metadata.topics or ():
            if not _is_durable_name(topic.name):
                log.warning("%s: topic %r %s, left out", metadata_file.FILE_NAME, topic.name, _why_not(topic.name))
                continue
            wanted = survey.topics.setdefault(topic.name, WantedTopic())
            wanted.paused = bool(wanted.paused) or topic.paused
            for channel in topic.channels or ():
                if not _is_durable_name(channel.name):
                    where = f"{metadata_file.FILE_NAME}: channel {channel.name!r} of topic {topic.name}"
                    log.warning("%s %s, left out", where, _why_not(channel.name))
                    continue
                wanted.channels[channel.name] = channel.paused

    def _warn_of_changes(self, survey: Survey) -> None:
        """Say what an nsqd.dat does that is not as this nsqd wrote it: a script, an editor or a disk wrote in it."""
        changes = []
        for name, wanted in survey.topics.items():
            known = self._known_topic(name)
            if not known.exists:
                changes.append(f"topic {name} is new")
            if wanted.paused is not None and wanted.paused != known.paused:
                changes.append(f"topic {name} is {'paused' if wanted.paused else 'unpaused'}")
            for channel, paused in wanted.channels.items():
                if channel not in known.channels:
                    changes.append(f"channel {name}/{channel} is new")
                elif paused is not None and paused != all(part.paused for part in known.channels[channel].values()):
                    changes.append(f"channel {name}/{channel} is {'paused' if paused else 'unpaused'}")
        shown = "; ".join(changes[:_CHANGES_SHOWN_MAX]) or "nothing by it"
        if len(changes) > _CHANGES_SHOWN_MAX:
            shown += f"; and {len(changes) - _CHANGES_SHOWN_MAX} more"
        log.warning("%s is not as this nsqd wrote it, which changes: %s", metadata_file.FILE_NAME, shown)

    def _survey_queue(self, queue: Queue, survey: Survey) -> None:
        sizes = {}
        for number, name in queue.numbers.items():
            try:
                sizes[number] = self._size(name)
            except OSError as error:
                raise _unreadable(name, error) from error
            survey.looks[name] = f"{sizes[number]} bytes"
        meta = self._meta(queue, survey)
        for name in queue.others:
            survey.looks[name] = ""
        owners = [queue.topic] if queue.channel is None else [queue.topic, queue.channel]
        if not all(map(is_valid_name, owners)):
            for name in queue.numbers.values():
                self._fault(Fault(name, 0, f"{queue.name!r} does not name a topic or channel; it is left out"))
            return
        wanted, doubt = unread(queue, sizes, meta)
        if any(map(is_ephemeral, owners)):
            self._leave_out(queue, sum(sizes[number] - position for number, position in wanted), meta)
            return
        if doubt:
            log.warning("queue %s: %s; everything there is counts as not read", queue.name, doubt)
        files = [(queue.numbers[number], position) for number, position in wanted if position < sizes[number]]
        if not files:
            return
        topic = survey.topics.setdefault(queue.topic, WantedTopic())
        if queue.channel is not None:
            topic.channels.setdefault(queue.channel, None)
        survey.sources.setdefault(queue.topic, []).append(Source(queue, files))
        survey.unread_bytes += sum(sizes[number] - position for number, position in wanted)

    def _leave_out(self, queue: Queue, unread_bytes: int, meta: Meta | None) -> None:
        """Say what stays behind: NSQ's nsqd keeps the ordinary channels of an #ephemeral topic, which we end."""
        if not unread_bytes:
            return
        self._ephemeral_count += 1
        if self._ephemeral_count > _FAULTS_SHOWN_MAX:
            return
        owner = "topic" if is_ephemeral(queue.topic) else "channel"
        count = f"{meta.depth} messages, " if meta is not None and meta.depth > 0 else ""
        log.warning(
            "queue %s belongs to an #ephemeral %s, which is not taken over (%s%d bytes); its files are kept",
            queue.name,
            owner,
            count,
            unread_bytes,
        )

    def _size(self, path: str) -> int:
        file = self._files.open_to_read(path)
        try:
            return file.size()
        finally:
            file.close()

    def _meta(self, queue: Queue, survey: Survey) -> Meta | None:
        if not queue.meta:
            return None
        try:
            data = metadata_file.read_small(self._files, queue.meta, META_BYTES_MAX)
        except StorageError:
            survey.looks[queue.meta] = ""
            return None  # too large to be one
        except OSError as error:
            raise _unreadable(queue.meta, error) from error
        survey.looks[queue.meta] = metadata_file.digest_of(data)
        return parse_meta(data)

    def _check_space(self, survey: Survey) -> None:
        free = self._files.free_bytes()
        needed = survey.unread_bytes + survey.unread_bytes // _GROWTH + DISK_RESERVE_BYTES
        if survey.unread_bytes and free < needed:
            reason = f"{_mib(free)} are free, and its messages need {_mib(needed)} beside the old files"
            raise TakeoverFailed(self._data_path, reason, "free space, or let consumers drain NSQ's nsqd first")

    # -- import ----------------------------------------------------------------------------------------------------

    def _directory(self, topic: str) -> str:
        return f"{TOPICS_DIRECTORY}/{directory_name(topic)}"

    def _partitions(self, topic: str) -> list[int]:
        names = self._files.list(self._directory(topic))
        return sorted(int(name[2:]) for name in names if name.startswith("p-")) or [0]

    def _known_topic(self, topic: str) -> KnownTopic:
        return self._known.get(topic) or KnownTopic()

    def _open_log(self, topic: str, number: int) -> PartitionLog:
        return PartitionLog.open(
            self._files,
            f"{self._directory(topic)}/p-{number:04d}",
            partition=number,
            segment_bytes=self._settings.segment_bytes,
            cache=self._cache,
            report=self._report,
            created_ns=self._clock.wall_ns(),
            next_sequence_min=self._known_topic(topic).next_sequence_min(number),
        )

    def _log_end(self, topic: str, number: int) -> int:
        """Return one past the last sequence of a log that nothing is imported into, or not yet."""
        end = self._log_ends.get((topic, number))
        if end is None:
            end = self._log_ends[topic, number] = self._read_log_end(topic, number)
        return end

    def _read_log_end(self, topic: str, number: int) -> int:
        if not self._files.list(f"{self._directory(topic)}/p-{number:04d}"):
            return self._known_topic(topic).next_sequence_min(number)
        opened = self._open_log(topic, number)
        try:
            return opened.next_sequence
        finally:
            opened.close()

    def _firsts(self, survey: Survey) -> dict[str, int]:
        return {topic: self._log_end(topic, self._partitions(topic)[0]) for topic in survey.sources}

    def _import(self, topic: str, survey: Survey, first: int) -> TopicImport | None:
        """Stream a topic's queues into its log; None when an interrupted takeover made the log and it is not needed."""
        sources = survey.sources.get(topic, [])
        number = self._partitions(topic)[0]
        directory = f"{self._directory(topic)}/p-{number:04d}"
        is_ours_alone = first == 1
        if not sources and is_ours_alone:
            self._files.remove_directory(directory)
            if topic not in self._known and topic not in survey.topics:
                self._files.remove_directory(self._directory(topic))
            return None
        before = self._read_bytes, self._message_count, len(self._faults)
        try:
            return self._stream(topic, number, sources, first)
        except LogDiffers:
            log.warning("topic %s: what an interrupted takeover left is not what is there now; starting again", topic)
            self._files.remove_directory(directory)
            self._read_bytes, self._message_count, faults = before
            del self._faults[faults:]
            return self._stream(topic, number, sources, first)

    def _stream(self, topic: str, number: int, sources: list[Source], first: int) -> TopicImport:
        opened = self._open_log(topic, number)
        try:
            done = TopicImport(opened, first)
            for source in sources:
                for name, position in source.files:
                    self._stream_file(done, source.queue.channel or EVERYBODY, name, position)
            done.finish()
        except DiskFull as error:
            raise TakeoverFailed(error.path, f"disk full, {error.free_bytes} bytes are free", "free space") from error
        finally:
            opened.close()
        return done

    def _stream_file(self, done: TopicImport, owner: str, name: str, position: int) -> None:
        chunks = read_records(self._files, name, position, self._settings.message_size_max, self._fault)
        while True:
            try:
                chunk = next(chunks, None)
            except OSError as error:
                raise _unreadable(name, error) from error
            if chunk is None:
                return
            done.add(owner, chunk)
            self._read_bytes += chunk.size_bytes
            self._message_count += len(chunk.bodies)
            self._tell_progress()
            if self._is_stopping():
                raise TakeoverStopped

    def _tell_progress(self) -> None:
        now_ns = self._clock.monotonic_ns()
        if now_ns - self._told_ns >= _PROGRESS_NS:
            self._told_ns = now_ns
            done, total = _mib(self._read_bytes), _mib(self._total_bytes)
            log.info("taking over the data of NSQ's nsqd: %s of %s, %d messages", done, total, self._message_count)

    def _fault(self, fault: Fault) -> None:
        if len(self._faults) < _FAULTS_SHOWN_MAX:
            log.error("taking over the data of NSQ's nsqd: %s; the file is kept as .bad", fault)
        self._keep(fault)

    def _keep(self, fault: Fault) -> None:
        """Have the file of a fault kept as .bad."""
        if not self._faults or self._faults[-1].path != fault.path:
            self._faults.append(fault)

    # -- commit ----------------------------------------------------------------------------------------------------

    def _commit(self, survey: Survey, imports: dict[str, TopicImport], journal: Journal) -> None:
        identities = count(self._next_cursor)
        statements = [*channel_store.put_journal(msgspec.msgpack.encode(journal))]
        for topic in sorted({**survey.topics, **imports}):
            statements += self._rows(topic, survey, imports.get(topic), identities)
        self._store.run_transaction(statements, True)

    def _rows(
        self, topic: str, survey: Survey, done: TopicImport | None, identities: Iterator[int]
    ) -> Iterator[channel_store.Statement]:
        wanted = survey.topics.get(topic) or WantedTopic()
        return TopicRows(
            topic,
            self._known_topic(topic),
            wanted,
            done,
            self._partitions(topic),
            lambda number: self._log_end(topic, number),
            lambda: next(identities),
        ).statements()

    def _load_journal(self) -> Journal:
        data = self._store.journal()
        return Journal() if data is None else msgspec.msgpack.decode(data, type=Journal)

    def _commit_journal(self, journal: Journal | None) -> None:
        data = None if journal is None else msgspec.msgpack.encode(journal)
        if data is not None or self._store.journal() is not None:
            self._store.run_transaction(channel_store.put_journal(data), True)

    # -- move ------------------------------------------------------------------------------------------------------

    def _free_directory(self) -> str:
        names = self._files.list("")
        candidates = (ARCHIVE_NAME if number == 1 else f"{ARCHIVE_NAME}-{number}" for number in count(1))
        return next(name for name in candidates if name not in names)

    def _moves(self, survey: Survey) -> list[Move]:
        bad = {fault.path for fault in self._faults}
        return [Move(name, f"{name}.bad" if name in bad else name, look) for name, look in survey.looks.items()]

    def _move(self, journal: Journal) -> None:
        if journal.moves:
            self._move_files(journal)
            log.info(
                "%s; the old files are in %s/%s, delete them when they are not needed any more",
                journal.summary,
                self._data_path,
                journal.archive,
            )
        self._commit_journal(None)

    def _move_files(self, journal: Journal) -> None:
        self._files.make_directory(journal.archive)
        present = dict.fromkeys(self._files.list(""))
        for move in journal.moves:
            if move.source not in present:
                continue  # moved before the last crash
            try:
                if move.look != self._look(move):
                    log.warning("%s changed since it was taken over; it is taken over again", move.source)
                    continue
                self._files.rename(move.source, f"{journal.archive}/{move.target}")
            except (OSError, StorageError) as error:
                raise StorageError(
                    f"the data of NSQ's nsqd is taken over, and {move.source} cannot be moved to {journal.archive}: "
                    f"{error}; put that right and start again"
                ) from error
        self._files.sync_directory(journal.archive)
        self._files.sync_directory("")

    def _look(self, move: Move) -> str:
        if not move.look:
            return ""  # of no importance
        if move.look.endswith(" bytes"):
            return f"{self._size(move.source)} bytes"
        return metadata_file.digest_of(metadata_file.read_small(self._files, move.source, metadata_file.FILE_BYTES_MAX))

    def _summary(self, survey: Survey) -> str:
        channel_count = sum(len(topic.channels) for topic in survey.topics.values())
        bad_count = len({fault.path for fault in self._faults})
        return (
            f"took over the data of NSQ's nsqd: {len(survey.topics)} topics, {channel_count} channels, "
            f"{self._message_count} messages, {self._read_bytes} bytes; "
            + (f"{bad_count} damaged files are kept as .bad" if bad_count else "no damage")
            + (f"; {self._ephemeral_count} queues that are #ephemeral are left out" if self._ephemeral_count else "")
        )


async def take_over(
    env: Env,
    files: Files,
    store: ChannelStore,
    settings: Settings,
    data_path: str,
    report: Callable[[Corruption], None],
    stop: asyncio.Event | None,
) -> None:
    """Take over what NSQ's nsqd left in the data directory, if anything; before the broker is opened.

    Args:
        data_path: for messages only.
        report: told of damage in our own logs.
        stop: when set, it ends early.

    Raises:
        TakeoverFailed: a file cannot be used; nothing of NSQ's was changed.
        TakeoverStopped: ``stop`` was set before all was done.
        StorageError: our own data directory cannot be used.
    """
    is_stopping = stop.is_set if stop is not None else lambda: False
    takeover = Takeover(files, store, settings, env.clock, data_path, report, is_stopping)
    if takeover.is_due():
        await env.run_blocking(takeover.run)


def _is_durable_name(name: str) -> bool:
    return is_valid_name(name) and not is_ephemeral(name)


def _why_not(name: str) -> str:
    return "is #ephemeral, which is not taken over" if is_valid_name(name) else "is not a valid name"


def _unreadable(path: str, error: Exception) -> TakeoverFailed:
    reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
    remedy = "make it readable for this user"
    if isinstance(error, OSError) and error.errno in (errno.ELOOP, errno.ENOENT):  # its name is there
        reason, remedy = "it is a symbolic link that leads to no file", "put the file itself there"
    return TakeoverFailed(path, f"cannot be read: {reason}", remedy)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.1f} MiB"
