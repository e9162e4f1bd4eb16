"""Figures over time, for charts without Graphite: a ring of blocks by time, in one SQLite file that does not grow.

::

    tier   step    kept      block: five float32 for each of --history-series slots
    0      10 s    30 min      depth, in per s, out per s, in flight, latency in ms; NaN: not known
    1      1 min   4 h       one row for each block; block (at / step) % count takes the place of the one before
    2      5 min   24 h      series: which slot is whose, and since when: what was there before is somebody else's
    3      1 h     7 days

    election: the latest ELECTIONS_MAX changes of leaders, nodes by id; member: what nodes were called by then

Rules of this file:

- One block is written each step, by one transaction, whatever the number of topics; a block of a coarser tier is made
  of those of the finer one when its time is over: averages, and the highest latency.
- All together, nodes and topics have a slot before channels, the busiest first. Who has one keeps it while it is there.
- A part is not stored as the whole: while a node does not answer, what it has a part of is not known.
- The file is this process's alone. One that is damaged is put aside and said, one that is somebody else's is not
  touched.
- Nobody waits for the disk: it is asked in a thread, one thing after the other.

Source: docs/decisions/0023.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sqlite3
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

from flintmq.client.admin.results import Election
from flintmq.env import Env
from flintmq.errors import FlintError
from flintmq.net.tasks import kept_up
from flintmq.nsqadmin.options import NsqadminOptions
from flintmq.nsqadmin.snapshots import FRESH_S, Snapshot, Snapshots
from flintmq.nsqadmin.views import HistoryView, Percentile

SeriesKind = Literal["total", "node", "topic", "channel"]

STEP_S = 10
_INTO_STEP_S = 0.5
"""So far into it: a timer that is a little early must not find the step before, and leave this one out."""
TIERS = ((STEP_S, 180), (60, 240), (300, 288), (3600, 168))
"""Seconds between blocks, and how many there are."""

FIGURES = 5
ELECTIONS_MAX = 1000
MEMBERS_MAX = 1000
_ANOTHER_S = 60.0
"""Seconds between two reports of one election at most; later it is one of another topic of that name."""

_LATENCY = 4
_BYTES = 4 * FIGURES
_APPLICATION_ID = 0x464C484D
_NAN = math.nan
_NS_PER_S = 1_000_000_000
_TABLES = """
CREATE TABLE IF NOT EXISTS series (slot INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, since INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS block (
  tier INTEGER NOT NULL, place INTEGER NOT NULL, at INTEGER NOT NULL, figures BLOB NOT NULL, PRIMARY KEY (tier, place)
);
CREATE TABLE IF NOT EXISTS election (
  at REAL NOT NULL, topic TEXT NOT NULL, partition INTEGER NOT NULL, epoch INTEGER NOT NULL, before TEXT NOT NULL,
  now TEXT NOT NULL, reason TEXT NOT NULL, PRIMARY KEY (topic, partition, epoch, now)
);
CREATE TABLE IF NOT EXISTS member (id TEXT PRIMARY KEY, address TEXT NOT NULL);
"""
_log = logging.getLogger(__name__)


class HistoryFailed(FlintError):
    """The file of the history cannot be used.

    Args:
        path: of it.
        reason: why not, and what to do.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"--history-path={self.path}: {self.reason}"


class HistoryFile:
    """The file, as blocking calls.

    Args:
        path: empty: a temporary file.
        size: slots.

    Raises:
        HistoryFailed: it cannot be used.
    """

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self._size = size
        try:
            self._database = _opened(path)
            self._slots: dict[str, tuple[int, int]] = {
                name: (slot, since)
                for slot, name, since in self._database.execute(
                    "SELECT slot, name, since FROM series WHERE slot < ?", (size,)
                )
            }
        except sqlite3.Error as error:
            raise HistoryFailed(path, f"it cannot be read: {error}") from error
        taken = {slot for slot, _ in self._slots.values()}
        self._free = [slot for slot in range(size - 1, -1, -1) if slot not in taken]

    def close(self) -> None:
        """Close it."""
        self._database.close()

    def write(self, at_s: int, figures: dict[str, tuple[float, ...]]) -> int:
        """Write the figures of a moment; return how many series had no slot.

        Args:
            figures: by name, those first that need a slot most.

        Raises:
            sqlite3.Error: they are not written.
        """
        at_s -= at_s % STEP_S
        block = array("f", [_NAN]) * (self._size * FIGURES)
        left_out = 0
        new: list[tuple[int, str, int]] = []
        slots = dict(self._slots)
        free = list(self._free)
        unseen: Iterator[str] = iter([name for name in slots if name not in figures])
        for name, values in figures.items():
            known = slots.get(name)
            if known is None:
                if not free and (gone := next(unseen, None)) is not None:
                    free.append(slots.pop(gone)[0])
                if not free:
                    left_out += 1
                    continue
                known = slots[name] = (free.pop(), at_s)
                new.append((known[0], name, at_s))
            place = known[0] * FIGURES
            block[place : place + FIGURES] = array("f", values)
        with self._database:
            self._database.executemany("DELETE FROM series WHERE slot = ?", [(slot,) for slot, _, _ in new])
            self._database.executemany("INSERT INTO series (slot, name, since) VALUES (?, ?, ?)", new)
            self._put(0, at_s, block)
            for tier in range(1, len(TIERS)):
                self._sum_up(tier, at_s)
        self._slots, self._free = slots, free
        return left_out

    def _put(self, tier: int, at_s: int, block: array[float]) -> None:
        step_s, count = TIERS[tier]
        self._database.execute(
            "INSERT OR REPLACE INTO block (tier, place, at, figures) VALUES (?, ?, ?, ?)",
            (tier, at_s // step_s % count, at_s, block.tobytes()),
        )

    def _sum_up(self, tier: int, at_s: int) -> None:
        """Make the block of a coarser tier whose time is over, once."""
        step_s = TIERS[tier][0]
        end_s = at_s - at_s % step_s
        start_s = end_s - step_s
        place = start_s // step_s % TIERS[tier][1]
        made = self._database.execute("SELECT at FROM block WHERE tier = ? AND place = ?", (tier, place)).fetchone()
        if made is not None and made[0] == start_s:
            return
        rows = self._database.execute(
            "SELECT figures FROM block WHERE tier = ? AND at >= ? AND at < ?", (tier - 1, start_s, end_s)
        ).fetchall()
        blocks = [_floats(row[0]) for row in rows]
        blocks = [block for block in blocks if len(block) == self._size * FIGURES]
        if blocks:
            self._put(tier, start_s, averaged(blocks))

    def read(self, name: str, tier: int, from_s: int, until_s: int) -> dict[int, tuple[float, ...]] | None:
        """Return the figures of a series by time; None: it has no slot.

        Raises:
            sqlite3.Error: they cannot be read.
        """
        known = self._slots.get(name)
        if known is None:
            return None
        slot, since_s = known
        since_s -= since_s % TIERS[tier][0]
        rows = self._database.execute(
            "SELECT at, substr(figures, ?, ?) FROM block WHERE tier = ? AND at >= ? AND at <= ? ORDER BY at",
            (slot * _BYTES + 1, _BYTES, tier, max(from_s, since_s), until_s),
        )
        return {at_s: tuple(_floats(figures)) for at_s, figures in rows if len(figures) == _BYTES}

    def keep_elections(self, elections: Iterable[Election], members: Mapping[str, str]) -> None:
        """Keep changes of leaders, each once, and what nodes are called; the oldest ones go.

        Raises:
            sqlite3.Error: they are not kept.
        """
        rows = [
            (each.at_s, each.topic, each.partition, each.epoch, each.before[:64], each.now[:64], each.reason[:500])
            for each in elections
        ]
        with self._database:
            self._database.executemany(
                "INSERT INTO election (at, topic, partition, epoch, before, now, reason) VALUES (?, ?, ?, ?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET at = excluded.at, before = excluded.before, reason = excluded.reason "
                f"WHERE excluded.at > at + {_ANOTHER_S} OR (reason = '' AND excluded.reason != '')",
                rows,
            )
            self._database.execute(
                "DELETE FROM election WHERE rowid NOT IN (SELECT rowid FROM election ORDER BY at DESC LIMIT ?)",
                (ELECTIONS_MAX,),
            )
            self._database.executemany("INSERT OR REPLACE INTO member (id, address) VALUES (?, ?)", members.items())
            self._database.execute(
                "DELETE FROM member WHERE rowid NOT IN (SELECT rowid FROM member ORDER BY rowid DESC LIMIT ?)",
                (MEMBERS_MAX,),
            )

    def kept_elections(self) -> tuple[list[Election], dict[str, str]]:
        """Return what was kept: the latest first, and addresses by id.

        Raises:
            sqlite3.Error: it cannot be read.
        """
        columns = "at, topic, partition, epoch, before, now, reason"
        rows = self._database.execute(f"SELECT {columns} FROM election ORDER BY at DESC")
        return [Election(*row) for row in rows], dict(self._database.execute("SELECT id, address FROM member"))


def _floats(data: bytes) -> array[float]:
    found = array("f")
    found.frombytes(data[: len(data) // 4 * 4])
    return found


def averaged(blocks: list[array[float]]) -> array[float]:
    """Return the averages of several blocks, of latencies the highest; what is not known counts for nothing."""
    found = array("f", [_NAN]) * len(blocks[0])
    for place, values in enumerate(zip(*blocks, strict=True)):
        known = [value for value in values if value == value]  # NaN is not
        if known:
            found[place] = max(known) if place % FIGURES == _LATENCY else sum(known) / len(known)
    return found


def _opened(path: str) -> sqlite3.Connection:
    """Open the file; put one aside that is damaged.

    Raises:
        HistoryFailed: it is not to be used.
    """
    try:
        return _prepared(path)
    except sqlite3.OperationalError as error:
        reason = "another process has it open" if "locked" in str(error) else str(error)
        raise HistoryFailed(
            path, f"{reason}; each nsqadmin needs a file of its own, in a directory that is there"
        ) from error
    except sqlite3.DatabaseError as error:
        aside = f"{path}.bad"
        _log.error(
            "--history-path=%s is damaged (%s): it is put aside as %s, and the history begins anew", path, error, aside
        )
        try:
            for suffix in ("-wal", "-shm"):
                if os.path.exists(path + suffix):
                    os.replace(path + suffix, aside + suffix)
            os.replace(path, aside)
        except OSError as failed:
            raise HistoryFailed(path, f"it is damaged, and cannot be put aside: {failed.strerror}") from failed
        return _prepared(path)


def _prepared(path: str) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=0.2, check_same_thread=False)
    try:
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        (tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        (owner,) = database.execute("PRAGMA application_id").fetchone()
        if tables and owner != _APPLICATION_ID:
            raise HistoryFailed(path, "it is a database of something else; name a file that is not there yet")
        if path:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA journal_size_limit = 4194304")
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        database.executescript(_TABLES)
        if (damage := database.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(damage)
    except BaseException:
        database.close()
        raise
    return database


class History:
    """Records, and reads back.

    Raises:
        HistoryFailed: the file cannot be used.
    """

    def __init__(self, options: NsqadminOptions, env: Env, snapshots: Snapshots) -> None:
        self._env = env
        self._snapshots = snapshots
        self._size = options.history_series
        self._file = HistoryFile(options.history_path, self._size) if self._size else None
        self._turn = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._left_out = 0
        self.failure = ""

    def start(self) -> None:
        """Record from now on."""
        if self._file is not None:
            self._task = asyncio.ensure_future(kept_up(self._record, "recording the history"))

    async def close(self) -> None:
        """Record nothing more, and close the file."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._file is not None:
            async with self._turn:
                self._file.close()

    async def _record(self) -> None:
        while True:
            await asyncio.sleep(until_next_s(self._env.clock.wall_ns()))
            step_ns = self._env.clock.wall_ns()  # not that of the snapshot, which may be of just before this step
            await self.record(await self._snapshots.get(FRESH_S), int(step_ns / _NS_PER_S))

    async def record(self, snapshot: Snapshot, at_s: int) -> None:
        """Write the figures of a snapshot as those of a time."""
        if self._file is None:
            return
        file = self._file

        def write() -> int:
            return file.write(at_s, figures_of(snapshot))

        try:
            async with self._turn:
                left_out = await self._in_thread(write)
        except sqlite3.Error as error:
            if not self.failure:
                _log.error("the history in %s cannot be written: %s", file.path or "its temporary file", error)
            self.failure = f"the history cannot be written: {error}"
            return
        if left_out and not self._left_out:
            _log.warning("%d series have no history: --history-series is %d", left_out, self._size)
        self._left_out = left_out
        self.failure = ""

    async def keep_elections(self, elections: Iterable[Election], members: Mapping[str, str]) -> None:
        """Keep changes of leaders, as far as there is a history."""
        if self._file is None:
            return
        try:
            async with self._turn:
                await self._in_thread(self._file.keep_elections, list(elections), dict(members))
        except sqlite3.Error as error:
            _log.error("elections cannot be kept in %s: %s", self._file.path or "the temporary file", error)

    async def kept_elections(self) -> tuple[list[Election], dict[str, str]]:
        """Return those that were kept, and what nodes were called by id; none without a history."""
        if self._file is None:
            return [], {}
        try:
            async with self._turn:
                found: tuple[list[Election], dict[str, str]] = await self._in_thread(self._file.kept_elections)
        except sqlite3.Error as error:
            _log.error("elections cannot be read of %s: %s", self._file.path or "the temporary file", error)
            return [], {}
        return found

    def _why_not(self) -> str:
        if self._left_out:
            return f"it is not recorded: {self._left_out} series are left out, --history-series is {self._size}"
        return "nothing is recorded of it yet"

    async def _in_thread(self, function: Callable[..., Any], *args: object) -> Any:
        """Run to the end even if the caller is gone, so that nothing is closed under it."""
        task = asyncio.ensure_future(self._env.run_blocking(function, *args))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait({task})
            raise

    async def read(self, series: SeriesKind, name: str, span_s: int) -> HistoryView:
        """Return the last ``span_s`` seconds of a series, in steps that fit."""
        tier = next((tier for tier, (step_s, count) in enumerate(TIERS) if step_s * count >= span_s), len(TIERS) - 1)
        step_s, count = TIERS[tier]
        now_s = self._env.clock.wall_ns() // _NS_PER_S
        until_s = now_s - now_s % step_s
        from_s = until_s - min(max(span_s, step_s), step_s * count) + step_s
        found: dict[int, tuple[float, ...]] | None = None
        notes = []
        if self._file is None:
            notes.append("there is no history: --history-series is 0")
        else:
            try:
                async with self._turn:
                    found = await self._in_thread(self._file.read, key_of(series, name), tier, from_s, until_s)
            except sqlite3.Error as error:
                notes.append(f"the history cannot be read: {error}")
            else:
                if found is None:
                    notes.append(self._why_not())
        times = list(range(from_s, until_s + 1, step_s))
        columns = [[_shown((found or {}).get(at_s), number) for at_s in times] for number in range(FIGURES)]
        return HistoryView(
            at_s=float(now_s),
            notes=notes,
            series=series,
            name=name,
            step_s=step_s,
            is_recorded=found is not None,
            times_s=times,
            depth=columns[0],
            in_per_s=columns[1],
            out_per_s=columns[2],
            in_flight=columns[3],
            latency_ms=columns[_LATENCY],
        )


def until_next_s(wall_ns: int) -> float:
    """Return in how many seconds the next step is to be recorded."""
    return STEP_S - wall_ns / _NS_PER_S % STEP_S + _INTO_STEP_S


def _shown(figures: tuple[float, ...] | None, number: int) -> float | None:
    value = _NAN if figures is None else figures[number]
    return round(value, 3) if math.isfinite(value) else None


def key_of(series: SeriesKind, name: str) -> str:
    """Return the name of a series in the file."""
    return f"{series}/{name}"


def figures_of(snapshot: Snapshot) -> dict[str, tuple[float, ...]]:
    """Return the figures of a snapshot by series, in the order in which they get slots."""
    partly = {
        *snapshot.away,
        *(each.topic for node in snapshot.nodes.values() if node.problem is not None for each in node.topics),
    }  # what has a part that did not answer
    unknown = (_NAN,) * FIGURES
    topics = {name: row for name, row in snapshot.topics.items() if not row.is_inactive}
    found: dict[str, tuple[float, ...]] = {key_of("total", ""): unknown}
    for address, node in snapshot.nodes.items():
        values = (float(node.depth), _known(node.in_per_s), _NAN, float(node.in_flight), _NAN)
        found[key_of("node", address)] = unknown if node.problem is not None else values
    channels = [row for name in topics for row in snapshot.channels[name].values()]
    outs: dict[str, float] = {}
    slowest: dict[str, float] = {}
    for row in channels:
        outs[row.topic] = outs.get(row.topic, 0.0) + _known(row.out_per_s)
        slowest[row.topic] = max(slowest.get(row.topic, -1.0), _latency(row.latency))
    total = [0.0, 0.0, 0.0, 0.0, _NAN]
    for name, topic in sorted(topics.items(), key=lambda item: -(item[1].message_count + item[1].waiting)):
        latency = max(slowest.get(name, -1.0), _latency(topic.latency))
        values = (
            float(topic.waiting), _known(topic.in_per_s), outs.get(name, _NAN), float(topic.in_flight),
            latency if latency >= 0 else _NAN,
        )  # fmt: skip
        found[key_of("topic", name)] = unknown if name in partly else values
        for number in range(_LATENCY):
            total[number] += 0.0 if number == 2 and name not in outs else values[number]
        if latency >= 0 and not latency <= total[_LATENCY]:
            total[_LATENCY] = latency
    if not any(node.problem is not None for node in snapshot.nodes.values()) and snapshot.nodes:
        found[key_of("total", "")] = tuple(total)
    for row in sorted(channels, key=lambda row: -(row.message_count + row.depth)):
        latency = _latency(row.latency)
        values = (
            float(row.depth), _known(row.in_per_s), _known(row.out_per_s), float(row.in_flight),
            latency if latency >= 0 else _NAN,
        )  # fmt: skip
        found[key_of("channel", f"{row.topic}/{row.name}")] = unknown if row.topic in partly else values
    return found


def _known(value: float | None) -> float:
    return _NAN if value is None else float(value)


def _latency(percentiles: list[Percentile]) -> float:
    """Return the highest percentile in ms; -1: there is none."""
    return max((each.max_ms for each in percentiles), default=-1.0)


__all__ = ["FIGURES", "STEP_S", "TIERS", "History", "HistoryFailed", "HistoryFile", "averaged", "figures_of"]
