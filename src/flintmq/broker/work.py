"""Work that the broker hands to a worker thread and takes back: files of new topics, and progress for the database.

Rules of this file: data and what follows from it alone; what is done with it is in :mod:`flintmq.broker.broker`.

Source: design/reliability.md R3 and R4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flintmq.broker.channel import Channel
from flintmq.broker.partition import Partition
from flintmq.broker.spilled import LOOKAHEAD_NS, Changes
from flintmq.broker.topic import Topic
from flintmq.budget import NO_LIMIT_BYTES
from flintmq.errors import StorageError
from flintmq.names import directory_name, topic_of_directory
from flintmq.settings import NOTHING, Settings
from flintmq.storage import ChannelStore, Creation, Files, channel_store, packs

TOPICS_DIRECTORY = "topics"
_REMOVED = "deleted-"


@dataclass(frozen=True, slots=True)
class BrokerOptions:
    """What the broker needs of nsqd's options; sizes in bytes, times in ns; without retention channels decide alone.

    Attributes:
        latency_window_ns: how far back the latencies of a channel are kept; 0 when they are not.
        settings: what topics inherit.
        memory_budget_bytes: see :mod:`flintmq.budget`.
    """

    segment_bytes: int = 100 * 1024 * 1024
    ephemeral_depth_max: int = 10_000
    retention_time_ns: int = 0
    retention_bytes: int = 0
    latency_window_ns: int = 0
    settings: Settings = NOTHING
    memory_budget_bytes: int = NO_LIMIT_BYTES


@dataclass(slots=True)
class DueQuery:
    """Spilled messages that come due, to be read after the flush.

    Attributes:
        wall_ns: when it was asked.
        bytes_max: how much there is room for.
    """

    channel: Channel
    cursor: int
    after: tuple[int, int]
    generation: int
    wall_ns: int
    bytes_max: int

    def run(self, store: ChannelStore, wall_ns: int, shift_ns: int) -> packs.DuePacks:
        """Read them; blocks.

        Args:
            shift_ns: what due times on disk have more.
        """
        after = (self.after[0] + shift_ns, self.after[1])
        found = store.due(self.cursor, after, wall_ns + LOOKAHEAD_NS + shift_ns, self.bytes_max)
        if shift_ns:
            found.shift(-shift_ns)
        return found


@dataclass(slots=True)
class Question:
    """Something that only the database knows, with everything in it that was so when it was asked.

    Attributes:
        read: asks it, off the loop.
        then: told the answer, or why there is none.
    """

    Then = Callable[[Any, BaseException | None], None]

    read: Callable[[ChannelStore], Any]
    then: Then
    answer: Any = None
    error: BaseException | None = None

    def ask(self, store: ChannelStore) -> None:
        """Have it read; what goes wrong is kept."""
        try:
            self.answer = self.read(store)
        except StorageError as error:
            self.error = error


@dataclass(slots=True)
class Flush:
    """One transaction of progress, and what to do when it fails.

    Attributes:
        statements: to run in order.
        due: queries to run after it.
        metadata_count: how many of the broker's metadata statements it holds.
        must_sync: whether it has to survive a power loss, whatever the policy is.
        clock_shift_ns: what is added to due times on their way to the disk.
        changes: of spilled messages, taken, to be given back on failure.
        floors: the floor of each partition as written.
        marks: how far logs are, as written.
        has_progress: whether it has anything but that.
    """

    statements: list[channel_store.Statement] = field(default_factory=list)
    due: list[DueQuery] = field(default_factory=list)
    metadata_count: int = 0
    must_sync: bool = False
    clock_shift_ns: int = 0
    waiters: list[Callable[[BaseException | None], None]] = field(default_factory=list)
    changes: list[tuple[Channel, Changes]] = field(default_factory=list)
    floors: list[tuple[Partition, int]] = field(default_factory=list)
    removals: list[str] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    marks: list[tuple[Partition, channel_store.StoredLog]] = field(default_factory=list)
    has_progress: bool = True

    def run(self, store: ChannelStore, files: Files, wall_ns: int, sync: bool) -> list[packs.DuePacks]:
        """Write it and read what is due; blocks."""
        if self.statements:
            # how far logs are is worth no sync of its own
            store.commit(self.statements, (sync and self.has_progress) or self.must_sync)
        for path in self.removals:
            files.remove_directory(path)
        answers = [query.run(store, wall_ns, self.clock_shift_ns) for query in self.due]
        for question in self.questions:
            question.ask(store)
        return answers


@dataclass(slots=True, eq=False)
class NewTopic:
    """A topic whose logs have no files yet.

    Attributes:
        creations: of its logs.
        is_recorded: whether the files may be made; those of a topic with partitions when the database has its meta,
            without which they would be found as a plain topic's.
        is_under_way: whether the files are being made.
        waiters: who is told when they are, and the topic is as durable as its channels, or why not.
    """

    topic: Topic
    creations: list[Creation]
    is_recorded: bool = True
    is_under_way: bool = False
    waiters: list[Callable[[BaseException | None], None]] = field(default_factory=list)

    @property
    def error(self) -> Exception | None:
        """Why its files could not be made; None when they were."""
        return next((creation.error for creation in self.creations if creation.error is not None), None)

    def finish(self) -> None:
        """Let those of its logs take appends that have files."""
        for creation in self.creations:
            if creation.error is None:
                creation.finish()


def advance(cursor: channel_store.StoredCursor, floor: int) -> None:
    """Let a cursor begin at ``floor``, when the database is behind it."""
    ahead = floor - cursor.row.floor
    if ahead > 0:
        cursor.row.floor = floor
        cursor.window = cursor.window[ahead:]


def spill_statements(identity: int, changes: Changes, shift_ns: int) -> list[channel_store.Statement]:
    """What the database has to do about the spilled messages of one channel."""
    statements: list[channel_store.Statement] = []
    new = dict.fromkeys(each.number for each in changes.packs)
    old_done = {number: sequences for number, sequences in changes.done.items() if number not in new}
    new_done = {number: sequences for number, sequences in changes.done.items() if number in new}
    if old_done:
        statements.append(packs.put_done(old_done))  # first: it goes with a pack that is cleared
    if changes.cleared_from is not None:
        statements += packs.clear_packs(identity, changes.cleared_from)
    if changes.packs:
        statements += packs.put_packs(identity, changes.packs, shift_ns)
    if new_done:
        statements.append(packs.put_done(new_done))
    if changes.gone:
        statements.append(packs.delete_packs(changes.gone))
    return statements


def cursor_statement(
    identity: int, channel: Channel, partition: Partition, shift_ns: int, spilled_count: int
) -> channel_store.Statement:
    """Write down how far a channel is.

    Args:
        spilled_count: how many of its messages are spilled; ``UNKNOWN_COUNT`` when only the database knows.
    """
    state = channel.state()
    deferred = [(sequence, due_ns + shift_ns) for sequence, due_ns in state.deferred]
    row = channel_store.CursorRow(state.floor, deferred=deferred, attempts=state.attempts, holes=state.holes)
    name, number = partition.topic_name, partition.number
    return channel_store.put_cursor(identity, name, number, channel.name, row, state.window, spilled_count)


def count_spilled(channel: Channel, identity: int) -> Question:
    """Have the messages counted that are still spilled, behind a flush that forgets some of them."""
    spilled = channel.spilled
    believed, generation = spilled.count, spilled.generation

    def then(count: Any, error: BaseException | None) -> None:
        if error is None and spilled.generation == generation:
            spilled.count += count - believed  # it went on counting meanwhile

    return Question(lambda store: store.aside_count(identity), then)


def keep_nothing(_floor: int) -> None:
    """Of a channel that does not outlive the process."""


def log_directory(topic: str, partition: int) -> str:
    """Where a partition's log is."""
    return f"{TOPICS_DIRECTORY}/{directory_name(topic)}/p-{partition:04d}"


@dataclass(slots=True)
class OnDisk:
    """What there is in the directory of topics.

    Attributes:
        partitions: of every topic those that have a directory.
        removed: paths of topics that were being deleted, each with the topic's name.
        removal_number: the highest number of one of them.
    """

    partitions: dict[str, list[int]] = field(default_factory=dict)
    removed: dict[str, str] = field(default_factory=dict)
    removal_number: int = 0


def removal_path(number: int, topic: str) -> str:
    """Where a topic's directory is while it is being deleted."""
    return f"{TOPICS_DIRECTORY}/{_REMOVED}{number}-{directory_name(topic)}"


def topics_on_disk(files: Files) -> OnDisk:
    """Look which directories there are."""
    found = OnDisk()
    for directory in files.list(TOPICS_DIRECTORY):
        path = f"{TOPICS_DIRECTORY}/{directory}"
        number, _, rest = directory.removeprefix(_REMOVED).partition("-")
        is_removed = directory.startswith(_REMOVED) and number.isascii() and number.isdigit()
        try:
            name = topic_of_directory(rest if is_removed else directory)
        except ValueError:
            continue
        if is_removed:
            found.removed[path] = name
            found.removal_number = max(found.removal_number, int(number))
            continue
        numbers = [int(part[2:]) for part in files.list(path) if part[:2] == "p-"]
        found.partitions[name] = sorted(numbers) or [0]
    return found
