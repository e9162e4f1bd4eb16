"""``flintmq pipeline replay``: Parquet files to a topic, once, as quickly as wanted.

A *piece* is a file, or with ``order_by`` the files of one hour. Its name is made of the write id, of everything that
decides which rows it has in which order, and of the files' places below the path and their content; nsqd knows each
row of a piece by its number, so a replay that is run again goes on where it was, whatever ended it
(docs/idempotent.md).

The rules of this file: pieces and their rows come in an order that follows from the files; nothing is published before
every file was looked at; a file or a row that cannot be published is named; no Spark is started.

Source: docs/decisions/0033.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from flintmq.clock import Clock, SystemClock
from flintmq.errors import NsqdError, OptionError, UsageError
from flintmq.message import HEADERS_SIZE_MAX
from flintmq.names import listed
from flintmq.options import SECOND, Choice, Integer, Items, Switch, Text, option
from flintmq.pipeline.files import FileName
from flintmq.pipeline.options import JobOptions, LinkFlags, TopicFlags, Work
from flintmq.pipeline.parquet import (
    ARGUMENT,
    FilesError,
    Rows,
    Wanted,
    as_signed,
    check_wanted,
    find_files,
    read_footer,
    read_rows,
    value_type,
)
from flintmq.pipeline.runner import Runner, run_command
from flintmq.spark.broker import POOL, TOPIC_NOT_EXIST
from flintmq.spark.identity import NAME_SIZE_MAX, TaskIdentity
from flintmq.spark.lake.table import local_path, table_around
from flintmq.spark.offsets import LISTED_MAX
from flintmq.spark.options import AT_LEAST_ONCE, ONCE, TIME_FORM, SinkOptions, in_ms, parse_timestamp_ns
from flintmq.wire import commands

if TYPE_CHECKING:
    from flintmq.spark.placing import Layout

_WHOLE = ("int", "bigint")
_KINDS = {
    "body": ("string", "binary"),
    "key": ("string", "binary", *_WHOLE),
    "partition": _WHOLE,
    "trace_id": _WHOLE,
    "headers": ("map<string,string>", "string"),
}
"""The parts of a message, and Spark's names of the types of each."""
_HEADERS_JSON = "headers_json"
PIECES_MAX = 3_900  # nsqd remembers 4,000 producers of sinks for each partition
SORTED_BYTES_MAX = 1 << 30
KEPT = ("partition", "trace_id", "headers")
_TASKS = 1 << 40
_WHAT, _HOW = "What to replay", "How"


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(LinkFlags, TopicFlags, JobOptions):
    """The flags of flintmq pipeline replay."""

    program: ClassVar[str] = "flintmq pipeline replay"
    summary: ClassVar[str] = (
        "flintmq pipeline replay publishes the rows of Parquet files, such as those of an archive. It may be run again "
        "whenever it was ended: no row is stored twice."
    )

    path: str = option(Text("PATH"), "", "a Parquet file, or a directory with some", group=_WHAT)
    since: str = option(Text("TIME"), "", "rows stored at or after it: ISO 8601 (UTC), or ms since 1970", group=_WHAT)
    until: str = option(Text("TIME"), "", "rows stored before it", group=_WHAT)
    start_offset: int | None = option(Integer(0), None, "rows from this offset on", group=_WHAT, default_text="none")
    end_offset: int | None = option(Integer(0), None, "rows below this offset", group=_WHAT, default_text="none")
    from_topic: str = option(Text("TOPIC"), "", "rows of this topic", group=_WHAT)
    from_partition: tuple[str, ...] = option(Items(Text("N")), (), "rows of this partition", group=_WHAT)
    trace_id: tuple[str, ...] = option(Items(Text("ID")), (), "rows with this trace id", group=_WHAT)
    body: str = option(Text("COLUMN"), "body", "the column that is published", group=_WHAT)
    key: str = option(
        Text("COLUMN"), "", "rows with the same value go to the same partition, in their order", group=_HOW
    )
    keep: tuple[str, ...] = option(
        Items(Choice(KEPT)), (), "what messages keep: their partition, trace_id, headers", group=_HOW
    )
    order_by: tuple[str, ...] = option(
        Items(Text("COLUMN")), (), "sort each hour (of other files: all) by these; at most 1 GiB", group=_HOW
    )
    rate: int = option(Integer(0), 0, "most messages a second", group=_HOW, default_text="0: as quickly as it goes")
    bad_rows: str = option(
        Choice(("fail", "skip")), "fail", "what to do with a body that is null, empty or too long", group=_HOW
    )
    write_id: str = option(
        Text("NAME"), "", "with another name everything is published anew; 1 to 24 of [A-Za-z0-9._-]", group=_HOW
    )
    dry_run: bool = option(Switch(), False, "say how many rows would go where, and publish nothing", group=_HOW)
    json: bool = option(Switch(), False, "print the result as a line of JSON", group=_HOW)


@dataclass(slots=True)
class Replayed(Work):
    """The work so far.

    Attributes:
        rows: published, or found stored.
        found: of them, those that nsqd knew when this run came to their file; what another run publishes at the same
            time counts for both, and is stored once.
        skipped: rows whose body cannot be published.
        files: read, or to be read.
        is_whole: whether all rows were published; not after a stop.
        sources: rows by topic and partition, or by file.
        targets: rows by partition of the topic; of a dry run.
        topic: with how many partitions, and where; of a dry run.
    """

    found: int = 0
    skipped: int = 0
    files: int = 0
    is_whole: bool = False
    is_once: bool = True
    sources: Counter[str] = field(default_factory=Counter)
    targets: Counter[int] = field(default_factory=Counter)
    topic: str = ""

    def figures(self) -> dict[str, int]:
        return {"found": self.found, "skipped": self.skipped, "files": self.files}


@dataclass(frozen=True, slots=True)
class _Piece:
    files: tuple[Path, ...]


def replay(
    path: str | Path,
    *,
    wanted: Wanted | None = None,
    body: str = "body",
    key: str = "",
    keep: Sequence[str] = (),
    order_by: Sequence[str] = (),
    rate: int = 0,
    skip_bad_rows: bool = False,
    write_id: str = "",
    dry_run: bool = False,
    runner: Runner | None = None,
    **options: str,
) -> Replayed:
    """Publish the rows of Parquet files, each once, also when this is run again.

    Args:
        path: a file, or a directory; of an archive the hours come one after the other, and in them the logs.
        wanted: which rows; None for all.
        key: the column by which rows are sharded over the partitions of the topic.
        keep: of ``partition``, ``trace_id``, ``headers``: what messages keep.
        order_by: columns by which an hour of an archive, or all of other files, is sorted; in memory, at most 1 GiB.
        rate: most messages a second; 0 for as quickly as it goes.
        skip_bad_rows: leave out, and count, bodies that cannot be published.
        write_id: under another one everything is published anew.
        dry_run: publish nothing.
        options: of format nsq for writing: ``nsqd`` or ``lookupd``, ``topic``, and what secures connections.

    Raises:
        FilesError: a file is damaged, a row cannot be published, or no file has the topic of ``wanted``; it is named.
        OptionError: a column is not there, an option is wrong, or the wanted rows end before they begin.
        UsageError: the path is a URL.
        FlintError: nsqd did not take the messages.
    """
    sink = SinkOptions.parse({**({"writeId": write_id} if write_id else {}), **options})
    if not sink.topic:
        raise OptionError("topic", "", "give the topic that is published to", ARGUMENT)
    if sink.order_by:
        raise OptionError("orderBy", ",".join(sink.order_by), "say order_by (--order-by)", ARGUMENT)
    wanted = wanted or Wanted()
    _check_order(wanted)
    job = _Job(
        local_path(path, "--path"), wanted, body, key, tuple(keep), tuple(order_by), rate, skip_bad_rows, sink,
        runner or Runner(), SystemClock(),
    )  # fmt: skip
    return job.plan() if dry_run else job.run()


class _Job:
    """One run."""

    def __init__(
        self,
        path: Path,
        wanted: Wanted,
        body: str,
        key: str,
        keep: tuple[str, ...],
        order_by: tuple[str, ...],
        rate: int,
        skip_bad_rows: bool,
        sink: SinkOptions,
        runner: Runner,
        clock: Clock,
    ) -> None:
        for name in keep:
            if name not in KEPT:
                raise OptionError("keep", name, f"choose from {', '.join(KEPT)}", ARGUMENT)
        if key and "partition" in keep:
            raise OptionError("keep", "partition", "give it or key, each says where a row goes", ARGUMENT)
        self._wanted, self._body, self._key, self._keep = wanted, body, key, keep
        self._order_by, self._rate, self._skips, self._sink = order_by, rate, skip_bad_rows, sink
        self._runner, self._clock = runner, clock
        self._path = path
        self._done = Replayed()
        self._paced_from_ns = clock.monotonic_ns()
        self._paced = 0
        self._is_the_only = bool(sink.write_id) or table_around(path.resolve()) is not None  # with such files
        files = find_files(path, wanted)
        self._done.files = len(files)
        self._row_count = 0  # that there may be, for whoever waits
        self._types = {"body": "binary"}
        self._look_at(files)
        self._pieces = self._cut(files)
        if len(self._pieces) > PIECES_MAX and sink.delivery != AT_LEAST_ONCE:
            raise FilesError(
                path,
                f"{len(self._pieces)} files at once; nsqd remembers {PIECES_MAX}, so that it could not be run again: "
                "replay a part of them at a time (since, until, a directory), or set delivery=atLeastOnce",
            )

    def _columns(self, schema: pa.Schema) -> list[str]:
        kept = (_kept_in(schema, name) for name in self._keep)
        names = [self._body, *([self._key] if self._key else []), *kept, *self._order_by]
        return list(dict.fromkeys(names))

    def _cut(self, files: list[Path]) -> list[_Piece]:
        groups: dict[Path, list[Path]] = {}
        for file in files:
            is_ours = FileName.parse(file.name) is not None
            groups.setdefault(file if not self._order_by else file.parent if is_ours else self._path, []).append(file)
        return [_Piece(tuple(group)) for group in groups.values()]

    def _look_at(self, files: Sequence[Path]) -> None:
        """See that messages can be made of each file, and with ``order_by`` that all can be sorted together.

        Raises:
            FilesError: one is no Parquet, or differs too much from the first; it is named.
            OptionError: one has not the columns that are needed.
        """
        from flintmq.spark.sink import check_columns as check_message

        first: tuple[Path, dict[str, pa.DataType]] | None = None
        seen: list[dict[str, str]] = []
        for file in files:
            schema, count = read_footer(file)
            self._row_count += count
            columns = self._columns(schema)
            for name in columns:
                if name not in schema.names:
                    raise OptionError("column", name, f"{file} has {', '.join(schema.names)}", ARGUMENT)
                if schema.names.count(name) > 1:
                    raise FilesError(file, f"{schema.names.count(name)} of its columns are named {name}: rename one")
            check_wanted(file, schema, self._wanted)
            kinds = {name: value_type(schema.field(name).type) for name in columns}
            for name in self._order_by:
                if not _is_sorted(kinds[name]):
                    raise FilesError(file, f"its {name} is {kinds[name]}, which has no order: name another column")
            first = first or (file, kinds)
            for name, kind in kinds.items():
                other = first[1].get(name)
                if self._order_by and (other is None or _sorted_type(kind) != _sorted_type(other)):
                    its = "not read" if other is None else other
                    raise FilesError(file, f"its {name} is {kind}, that of {first[0]} is {its}: sort them apart")
            types = self._message_types(file, schema)
            if types not in seen:
                try:
                    check_message(self._sink, _struct(types))
                except OptionError as error:
                    if not seen:
                        raise
                    raise FilesError(file, str(error)) from error
                seen.append(types)
        if seen:
            self._types = seen[0]

    def _name(self, files: Sequence[Path]) -> str:
        """Name everything that decides which rows there are in which order.

        A file is named by its place below the path, and by its content: others may have its name, its size or both.

        Raises:
            FilesError: one cannot be read.
        """
        told = []
        for file in files:
            try:
                with file.open("rb") as content:
                    digest = hashlib.file_digest(content, "sha256").hexdigest()
            except OSError as error:
                raise FilesError(file, f"it cannot be read: {error}") from error
            below = file.name if file == self._path else file.relative_to(self._path).as_posix()
            # no other log, or table, has the names of an archive, so it may be moved; two exports of somebody may well
            # have files of the same name with the same rows
            is_the_only = self._is_the_only or FileName.parse(file.name) is not None
            told.append(("" if is_the_only else str(self._path.resolve()), below, digest))
        limits = (self._skips, self._sink.max_message_size, self._sink.oversize)
        said = (told, self._wanted, self._body, self._key, self._keep, self._order_by, limits)
        return hashlib.sha256(repr(said).encode()).hexdigest()

    def _identity(self, piece: _Piece) -> TaskIdentity:
        digest = self._name(piece.files)
        name = self._sink.write_id or f"replay-{digest}"[:NAME_SIZE_MAX]
        return TaskIdentity(name, 0, int(digest, 16) % _TASKS)

    def run(self) -> Replayed:
        from flintmq.spark.sink import Published, RowWriter

        writer = RowWriter(replace(self._sink, write_id=""), _struct(self._types), is_numbered=True)
        done = self._done
        done.lag = self._row_count
        for number, piece in enumerate(self._pieces):
            done.batch = number
            published = Published()
            before = done.rows
            writer.write(self._paced_batches(piece, published, before), self._identity(piece), published)
            done.rows = before + sum(published.messages.values())
            done.found += published.found
            done.is_once = done.is_once and published.is_once
            self._runner.tell(done)
            if self._runner.stop.is_set():
                return done
        self._check_topic()
        done.lag, done.is_whole = 0, True
        return done

    def plan(self) -> Replayed:
        from flintmq.spark.placing import Placing
        from flintmq.spark.sink import partitions_of

        done = self._done
        for piece in self._pieces:
            identity = self._identity(piece)
            layout = Placing(self._sink, identity).of(self._sink.topic)
            if layout is not None and layout.is_new:
                done.topic = f"it is not there: nsqd {layout.address} has it made, without partitions"
            elif layout is not None and layout.partition_count:
                done.topic = f"{layout.partition_count} {'logs in a cluster' if layout.is_plain else 'partitions'}"
            elif layout is not None:
                done.topic = f"no partitions, at nsqd {layout.address}"
            else:
                done.topic, done.is_once = "of an nsqd that is not FlintMQ's", False
            for batch in self._batches(piece):
                if not done.rows:
                    self._check_room(layout, identity)
                self._check_rows(batch, layout)
                done.rows += batch.num_rows
                if layout is not None and layout.partition_count:
                    chosen = partitions_of(batch, layout.partition_count, identity, self._sink.sharding)
                    done.targets.update(chosen.tolist())
                self._runner.tell(done)
                if self._runner.stop.is_set():
                    return done
        self._check_topic()
        beyond = [each for each in done.targets if not 0 <= each < int(done.topic.split()[0])]
        if beyond:
            what = f"the files have partition {max(beyond)}, topic {self._sink.topic} has {done.topic}"
            raise FilesError(self._path, f"{what}: leave out partition in keep, or create the topic with more")
        done.is_whole = True
        return done

    def _check_room(self, layout: Layout | None, identity: TaskIdentity) -> None:
        """See that the topic takes messages with what these have besides a body.

        Raises:
            OptionError: it does not.
            FlintError: its nsqd does not answer.
        """
        topic, kept = self._sink.topic, ", ".join(self._keep) or self._key
        if layout is None:
            if kept:
                allowed = "only FlintMQ's nsqd takes what is kept, and a key, and one of these is another: leave it out"
                raise OptionError("keep" if self._keep else "key", kept, allowed, ARGUMENT)
            if self._sink.delivery == ONCE:
                raise OptionError(
                    "delivery", ONCE, "an nsqd is not FlintMQ's, and stores again what comes again", ARGUMENT
                )
        elif "headers" in self._keep:
            if not _has_headers(layout, self._sink, identity):
                allowed = f"topic {topic} has no headers: leave it out, or create the topic with extend=true"
                raise OptionError("keep", "headers", allowed, ARGUMENT)
        elif "trace_id" in self._keep and layout.is_plain:
            allowed = (
                f"topic {topic} has no partitions, and no room for it: leave it out, or create the topic with some"
            )
            raise OptionError("keep", "trace_id", allowed, ARGUMENT)

    def _check_rows(self, batch: pa.RecordBatch, layout: Layout | None) -> None:
        """See that a topic without partitions is not to put rows into them, and that headers are some.

        Raises:
            OptionError: ``keep`` or ``key`` does not do for a row.
        """
        from flintmq.spark.encode import HeadersRefused, header_fronts

        given = {name: batch.column(name) for name in batch.schema.names}
        if layout is not None and layout.is_plain:
            name = "key" if "key" in given and given["key"].null_count < batch.num_rows else ""
            if "partition" in given and any(given["partition"].to_pylist()):
                name = "partition"
            if name:
                option, value = ("key", self._key) if name == "key" else ("keep", name)
                allowed = f"topic {self._sink.topic} has no partitions: leave it out, or create the topic with some"
                raise OptionError(option, value, allowed, ARGUMENT)
        if "headers" in given:
            try:
                header_fronts(given["headers"], given.get("trace_id"))
            except HeadersRefused as error:
                raise OptionError("keep", "headers", f"{error}, row {error.index} of its batch", ARGUMENT) from error

    def _check_topic(self) -> None:
        """See that the topic that is wanted is in some file, where no row was wanted.

        Raises:
            FilesError: it is not; it lists those that are.
        """
        if not self._wanted.topic or self._done.sources.total():
            return
        there: set[str] = set()
        for file in find_files(self._path, Wanted()):
            if (name := FileName.parse(file.name)) is not None:
                there.add(name.key.topic)
            else:
                for rows in read_rows(file, ["topic"], Wanted()):
                    there.update(each for each in pc.unique(rows.batch.column("topic")).to_pylist() if each)
        if self._wanted.topic not in there:
            names = listed(sorted(there), LISTED_MAX) or "none"
            raise FilesError(self._path, f"no row is of topic {self._wanted.topic!r}; there is {names}")

    def _message_types(self, file: Path, schema: pa.Schema) -> dict[str, str]:
        """Return the columns of the messages with Spark's names of their types.

        Raises:
            OptionError: a column has a type that messages cannot have.
        """
        found = {}
        kept = {name: _kept_in(schema, name) for name in self._keep}
        for name, column in {"body": self._body, "key": self._key, **kept}.items():
            if column:
                kind = value_type(schema.field(column).type)
                spark = _spark_type(kind)
                if spark not in _KINDS[name]:
                    raise OptionError("column", f"{column} {kind}", f"{file}: it cannot be the {name}", ARGUMENT)
                found[name] = spark
        return found

    def _paced_batches(self, piece: _Piece, published: Any, before: int) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a piece, no quicker than wanted; what was stored before costs no time."""
        size = max(1, min(1000, self._rate // 10)) if self._rate else 0
        for batch in self._batches(piece):
            first = 0
            while first < batch.num_rows and not self._runner.stop.is_set():
                part = batch.slice(first, size or batch.num_rows)
                first += part.num_rows
                yield part
                self._done.rows = before + sum(published.messages.values())
                self._done.lag = max(0, self._done.lag - part.num_rows)
                self._runner.tell(self._done)
                if self._rate:
                    self._pace(self._done.rows - self._done.found - published.found)
            if self._runner.stop.is_set():
                return

    def _pace(self, count: int) -> None:
        due_ns = self._paced_from_ns + count * SECOND // self._rate
        now_ns = self._clock.monotonic_ns()
        if now_ns < due_ns:
            self._runner.stop.wait((due_ns - now_ns) / SECOND)
        elif now_ns > due_ns + SECOND:  # it was slower: what was missed is not made up for in a burst
            self._paced_from_ns = now_ns - count * SECOND // self._rate

    def _batches(self, piece: _Piece) -> Iterator[pa.RecordBatch]:
        rows = (self._usable(each) for file in piece.files for each in self._read(file))
        if not self._order_by:
            for each in rows:
                if each.num_rows:
                    yield self._messages(each)
            return
        gathered, size = [], 0
        for each in rows:
            # what else was read may differ between files
            gathered.append(_cast(each.select(self._columns(each.schema)), _sorted_type))
            size += each.nbytes
            if size > SORTED_BYTES_MAX:
                reason = f"more than {SORTED_BYTES_MAX >> 20} MiB to sort: replay less at a time (since, until)"
                raise FilesError(piece.files[0].parent, reason)
        if gathered:
            names = dict.fromkeys((*self._order_by, self._body))  # those that are equal by their bodies
            table = pa.Table.from_batches(gathered).sort_by([(name, "ascending") for name in names])
            for batch in table.combine_chunks().to_batches(max_chunksize=10_000):
                yield self._messages(batch)

    def _read(self, file: Path) -> Iterator[Rows]:
        schema, _ = read_footer(file)
        named = [name for name in ("topic", "partition", "offset") if name in schema.names]
        name = FileName.parse(file.name)
        for rows in read_rows(file, [*self._columns(schema), *named], self._wanted):
            if name is not None:
                self._done.sources[f"{name.key.topic} {name.key.label}"] += rows.batch.num_rows
            else:
                self._done.sources[str(file)] += rows.batch.num_rows
            yield replace(rows, batch=_cast(rows.batch, value_type))

    def _usable(self, rows: Rows) -> pa.RecordBatch:
        """Return the rows whose body can be published.

        Raises:
            FilesError: one cannot, and they are not to be skipped.
        """
        bodies = rows.batch.column(self._body)
        sizes = pc.fill_null(pc.binary_length(bodies), 0).cast(pa.int64())
        limit = self._sink.max_message_size
        is_good = pc.and_(pc.greater(sizes, 0), pc.less_equal(sizes, limit))
        if pc.all(is_good).as_py():
            return rows.batch
        is_allowed = is_good if self._sink.oversize == "fail" else pc.greater(sizes, 0)  # to be there; else it ends all
        bad = -1 if self._skips else pc.index(is_allowed, pa.scalar(False)).as_py()
        if bad >= 0:
            size = sizes[bad].as_py()
            what = "is null" if bodies[bad].as_py() is None else f"has {size} bytes, a message has 1 to {limit}"
            raise FilesError(Path(rows.place(bad)), f"its {self._body} {what}; leave such rows out (--bad-rows=skip)")
        good = rows.batch.filter(is_good)
        self._done.skipped += rows.batch.num_rows - good.num_rows
        return good

    def _messages(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        columns = {"body": rows.column(self._body)}
        if self._key:
            columns["key"] = rows.column(self._key)
        for name in self._keep:
            column = rows.column(_kept_in(rows.schema, name))
            if name == "headers" and not pa.types.is_map(column.type):
                longest = pc.max(pc.binary_length(column)).as_py() or 0
                if longest > HEADERS_SIZE_MAX:
                    raise OptionError("headers", longest, f"at most {HEADERS_SIZE_MAX} bytes", ARGUMENT)
            columns[name] = as_signed(column) if name == "trace_id" else column
        return pa.RecordBatch.from_pydict(columns)


def _has_headers(layout: Layout, sink: SinkOptions, identity: TaskIdentity) -> bool:
    """Ask an nsqd whether its topic has headers; one that does not say so is taken to have some.

    Raises:
        FlintError: it does not answer.
    """
    address = layout.address or layout.leaders[0]
    try:
        with POOL.lend(address, sink.connect_timeout, sink.pub_timeout, sink.link) as connection:
            connection.send(commands.producers(sink.topic, identity.prefix))
            told = json.loads(connection.receive())
    except NsqdError as error:
        if error.code == TOPIC_NOT_EXIST:
            return False
        raise
    # of a topic that others of the cluster serve it knows no more than where it is
    is_here = bool(told.get("partitions")) or "elsewhere" not in told
    return bool(told.get("has_headers", True)) or not is_here


def _cast(rows: pa.RecordBatch, type_of: Callable[[pa.DataType], pa.DataType]) -> pa.RecordBatch:
    """Return rows whose columns have the types that theirs are mapped to."""
    wanted = [type_of(field.type) for field in rows.schema]
    if wanted == rows.schema.types:
        return rows
    columns = {
        field.name: rows.column(at) if field.type == kind else rows.column(at).cast(kind)
        for at, (field, kind) in enumerate(zip(rows.schema, wanted, strict=True))
    }
    return pa.RecordBatch.from_pydict(columns)


def _sorted_type(kind: pa.DataType) -> pa.DataType:
    """Return the type that a column is sorted with those of other files as: text, and bytes, come in several forms."""
    kind = value_type(kind)
    if pa.types.is_string(kind):
        return pa.large_string()
    return pa.large_binary() if pa.types.is_binary(kind) else kind


def _is_sorted(kind: pa.DataType) -> bool:
    """Whether Arrow can sort by a column of this type."""
    try:
        pa.table({"column": pa.nulls(2, kind), "other": pa.nulls(2)}).sort_by(
            [(name, "ascending") for name in ("column", "other")]
        )
    except (pa.ArrowTypeError, pa.ArrowNotImplementedError):
        return False
    return True


def _kept_in(schema: pa.Schema, name: str) -> str:
    """Return the column of a file that has what messages keep: of headers the JSON they are, where there is some."""
    return _HEADERS_JSON if name == "headers" and _HEADERS_JSON in schema.names else name


def _check_order(wanted: Wanted) -> None:
    """Refuse an end before the start, which would publish nothing and say nothing.

    Raises:
        OptionError: which.
    """
    nothing = "there is nothing between the two"
    since_ns, until_ns, start, end = wanted.since_ns, wanted.until_ns, wanted.start_offset, wanted.end_offset
    if since_ns is not None and until_ns is not None and until_ns < since_ns:
        raise OptionError("until", in_ms(until_ns), f"since is later, {in_ms(since_ns)}: {nothing}", ARGUMENT)
    if start is not None and end is not None and end <= start:
        raise OptionError("end_offset", end, f"it has to be above start_offset, {start}: {nothing}", ARGUMENT)


def _spark_type(kind: pa.DataType) -> str:
    """Return Spark's name of an Arrow type that a message can be made of; empty for others."""
    if pa.types.is_map(kind):
        return "map<string,string>"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "string"
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return "binary"
    if pa.types.is_integer(kind):
        return "int" if pa.types.is_int32(kind) else "bigint"
    return ""


def _struct(types: dict[str, str]) -> Any:
    from pyspark.sql import types as spark

    known = {
        "string": spark.StringType(),
        "binary": spark.BinaryType(),
        "int": spark.IntegerType(),
        "bigint": spark.LongType(),
        "map<string,string>": spark.MapType(spark.StringType(), spark.StringType()),
    }
    return spark.StructType([spark.StructField(name, known[kind]) for name, kind in types.items()])


def run(arguments: Sequence[str]) -> int:
    """Run ``flintmq pipeline replay``; after a signal it can be gone on with."""
    return run_command(ReplayOptions, arguments, _run)


def _run(options: ReplayOptions, runner: Runner) -> None:
    if not options.path:
        raise UsageError("give --path, a Parquet file or a directory with some")
    if not options.to_topic:
        raise UsageError("give --to-topic")
    wanted = Wanted(
        since_ns=_time("--since", options.since),
        until_ns=_time("--until", options.until),
        start_offset=options.start_offset,
        end_offset=options.end_offset,
        topic=options.from_topic,
        partitions=tuple(_number("--from-partition", each, 1 << 31) for each in options.from_partition),
        trace_ids=tuple(_number("--trace-id", each, 1 << 64) for each in options.trace_id),
    )
    done = replay(
        options.path,
        wanted=wanted,
        body=options.body,
        key=options.key,
        keep=options.keep,
        order_by=options.order_by,
        rate=options.rate,
        skip_bad_rows=options.bad_rows == "skip",
        write_id=options.write_id,
        dry_run=options.dry_run,
        runner=runner,
        **options.where(),
        **options.link(),
        **options.publishing(),
    )
    if options.json:
        row: dict[str, Any] = {"rows": done.rows, **done.figures(), "whole": done.is_whole, "once": done.is_once}
        if options.dry_run:
            row |= {"sources": done.sources, "targets": {str(each): count for each, count in done.targets.items()}}
        runner.say(json.dumps({**row, "topic": options.to_topic}))
        return
    if options.dry_run:
        for source, count in sorted(done.sources.items()):
            runner.say(f"{count:>12}  from {source}")
        for partition, count in sorted(done.targets.items()):
            runner.say(f"{count:>12}  to {options.to_topic}, partition {partition}")
        skipped = f", {done.skipped} would be skipped" if done.skipped else ""
        runner.say(f"{done.rows} rows would go to {options.to_topic} ({done.topic or 'nothing to do'}){skipped}")
        return
    said = f"{done.rows} rows of {done.files} files are in {options.to_topic}, {done.found} of them were there already"
    if done.skipped:
        said += f", {done.skipped} skipped"
    if not done.is_once:
        said += "; stored at least once, as its nsqd is not FlintMQ's, or delivery=atLeastOnce"
    runner.say(said if done.is_whole else f"{said}; stopped, run it again to go on")


def _time(flag: str, text: str) -> int | None:
    try:
        return parse_timestamp_ns(text) if text else None
    except ValueError:
        raise UsageError(f"{flag} {text} is no time: give {TIME_FORM}") from None


def _number(flag: str, text: str, end: int) -> int:
    try:
        number = int(text, 0)
    except ValueError:
        number = -1
    if not 0 <= number < end:
        raise UsageError(f"{flag} {text} is not a whole number from 0 to {end - 1}")
    return number


__all__ = ["ReplayOptions", "Replayed", "Wanted", "replay", "run"]
