"""One topic of a spool: what its consumer is delivered goes into a log, and is finished when it is safe.

With ``is_kept`` the log is on disk and safe is what was synced; else it is in memory and safe is what the cursor has
passed, which Spark moves when a micro-batch is committed.

The rules of this file: what cannot be stored is given back, and no more is asked for until it can be; a log whose disk
failed, or whose files are not where they were, ends the spool, and nothing of it is finished any more. Everything but
syncs happens on the event loop. Frames are stored as they came, and no step of Python is made for each.

Source: docs/decisions/0032.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, compress
from typing import Any, NamedTuple

from flintmq.batch import EXTENDED, RAW_IDS, BatchError, decode_batch, encode_received
from flintmq.client.aio.consumer import BulkConsumer
from flintmq.client.core.link import Link
from flintmq.client.core.message import Delivery, is_hex
from flintmq.env import Env
from flintmq.errors import DiskFull, FlintError, StorageError, WriteFailed
from flintmq.limits import MESSAGE_ID_SIZE
from flintmq.message import ID_POSITION, frame_sizes, internal_id
from flintmq.spool.held import Held, Same
from flintmq.storage import File, MemoryLog, PartitionLog, SyncTicket

RETRY_S = 2.0
"""A full disk is looked at again after so long."""
BACK_S = 2 * RETRY_S
"""After so long comes again what was given back."""
TICK_S = 0.1
PROBES = 4
PROBE_S = 0.25
"""An nsqd that has nothing more to deliver has to answer so many times in a row, asked so long after the answer before:
one that stood still is silent as well, and begins to deliver when it goes on."""
REFUSED_TOLD_S = 10.0
"""Answers that came too late are told of together, at most once in so long."""
ROOM_AGAIN = 0.9  # of the most bytes that are kept: below that more is asked for again
MESSAGES_MAX = 16_384  # of one batch
TIMESTAMP_POSITION = 8  # in a frame

log = logging.getLogger("flintmq.spool")


class _Run(NamedTuple):
    """Messages that become one batch: ``frames`` has them as they came, of ``sizes`` in bytes."""

    timestamps: Sequence[int]
    attempts: Sequence[int]
    ids: Sequence[bytes]
    frames: bytes
    sizes: Sequence[int]

    def without(self, known: Sequence[bool]) -> _Run:
        """Return the others."""
        wanted = [not is_known for is_known in known]
        frames = [self.frames[end - size : end] for end, size in zip(accumulate(self.sizes), self.sizes, strict=True)]
        return _Run(
            list(compress(self.timestamps, wanted)),
            list(compress(self.attempts, wanted)),
            list(compress(self.ids, wanted)),
            b"".join(compress(frames, wanted)),
            list(compress(self.sizes, wanted)),
        )


class _Probe:
    """Whether one nsqd answers.

    Attributes:
        count: of its answers since something old has come.
        is_open: it has not answered yet.
        at: it was asked, or has answered.
    """

    __slots__ = ("at", "count", "is_open")

    def __init__(self, at: float) -> None:
        self.at = at
        self.count = 0
        self.is_open = False


class Feed:
    """Takes one topic.

    Args:
        partition_log: where messages go.
        is_kept: it is on disk.
        bytes_max: it is to hold no more; what cannot be dropped waits in nsqd then.
        quiet_s: so long nothing old has to come before everything has.
        is_ending: find out when everything has come.
        fail: called with what ends the spool.
        gone: says, of the path of a file that was synced and the file, if it is open, why the next start would not find
            it; empty when it would. Blocks; called in a worker thread.

    Attributes:
        floor: everything below it was read and committed.
        is_full: ``bytes_max`` is reached, and nothing more is asked for.
    """

    def __init__(
        self,
        topic: str,
        partition_log: PartitionLog | MemoryLog,
        consumer: BulkConsumer,
        env: Env,
        *,
        is_kept: bool,
        bytes_max: int,
        in_flight_max: int,
        floor: int,
        quiet_s: float,
        is_ending: bool,
        fail: Callable[[FlintError], object],
        gone: Callable[[str, File | None], str] = lambda _path, _file: "",
    ) -> None:
        self.topic = topic
        self.log = partition_log
        self.consumer = consumer
        self.floor = max(floor, partition_log.start_sequence)
        self.is_full = False
        self._env = env
        self._is_kept = is_kept
        self._bytes_max = bytes_max
        self._quiet_s = quiet_s
        self._is_ending = is_ending
        self._fail = fail
        self._gone = gone
        self._held = Held(in_flight_max)
        self._loop = asyncio.get_running_loop()
        self._sync_task: asyncio.Task[None] | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._refused_bytes = 0  # what there was no room for
        self._began_ns = env.clock.wall_ns()
        self._old_at = self._loop.time()
        self._back_at = self._old_at  # what was given back has come again, if nothing keeps it
        self._probes: dict[Link, _Probe] = {}
        self._waits_for = ""
        self._waits_since = 0.0
        self._disk_error = ""
        self._disk_since = self._disk_at = 0.0
        self._old_end = 0
        self._late_told = 0
        self._refused_told = 0
        self._refused_told_at = -REFUSED_TOLD_S
        self.use(consumer)
        if is_kept:
            self._held.expect_again(_last_messages(partition_log, in_flight_max))

    @property
    def held_count(self) -> int:
        """Messages that are not finished."""
        return self._held.count

    @property
    def is_caught_up(self) -> bool:
        """Whether what waited in nsqd when the spool was started has been taken; known only where ``is_ending``.

        No nsqd says that it has nothing more. So each that has the topic has to be there, and to answer while nothing
        old comes.
        """
        if self.is_full or self._retry is not None or self.consumer.lacking:
            return False
        if self.log.committed_sequence < self._old_end:  # the disk is at it
            return False
        if not self._is_kept and self.consumer.is_starved:  # nsqd waits for what Spark has not committed
            return False
        if self._silent_s < self._quiet_s:
            return False
        return all(link in self._probes and self._probes[link].count >= PROBES for link in self.consumer.links)

    @property
    def waits(self) -> tuple[str, float]:
        """Say what keeps everything from being taken (empty: nothing), and for how many seconds it has."""
        now = self._loop.time()
        if self._disk_error:
            return self._disk_error, now - self._disk_since
        return self._waits_for, now - self._waits_since if self._waits_for else 0.0

    @property
    def _silent_s(self) -> float:
        """Seconds in which nothing old has come that might have; below 0 where it is still to come again."""
        return self._loop.time() - max(self._old_at, self._back_at)

    def _heard_old(self) -> None:
        self._old_at = self._loop.time()
        for probe in self._probes.values():
            probe.count = 0

    def _probe(self) -> None:
        """Ask each nsqd that is silent whether it is there."""
        now, consumer = self._loop.time(), self.consumer
        self._probes = {link: self._probes.get(link) or _Probe(now) for link in consumer.links}
        if self._silent_s < max(PROBE_S, self._quiet_s - PROBES * PROBE_S):
            return
        for link, probe in self._probes.items():
            if probe.is_open or probe.count >= PROBES or now - probe.at < PROBE_S:
                continue
            if consumer.may_deliver(link):  # else it is silent because it has to be
                probe.is_open, probe.at = True, now
                link.probe(partial(self._probed, probe))

    def _probed(self, probe: _Probe) -> None:
        probe.is_open, probe.at = False, self._loop.time()
        probe.count += 1

    def _look_at_what_is_waited_for(self) -> None:
        now, before = self._loop.time(), self._waits_for
        if self._disk_error and self._retry is None and now - self._disk_at > 2 * RETRY_S:
            self._disk_error = ""
        self._waits_for = self.consumer.lacking
        if not self._waits_for:
            silent = [
                link.address for link, probe in self._probes.items() if probe.is_open and now - probe.at > PROBE_S
            ]
            self._waits_for = f"nsqd {', '.join(sorted(set(silent)))} does not answer" if silent else ""
        if not before:
            self._waits_since = now

    def use(self, consumer: BulkConsumer) -> None:
        """Take from another consumer from now on, one that is not started; the former one delivers no more."""
        self.consumer = consumer
        self._heard_old()
        self._refused_told = 0
        consumer.take_deliveries(self.take, self._held.refuse, with_frames=True)
        if self.is_full or self._retry is not None:
            consumer.pause()

    # -- messages in ---------------------------------------------------------------------------------------------------

    def take(self, delivery: Delivery) -> None:
        """Store what nsqd has delivered."""
        timestamps, attempts, ids, _bodies = zip(*delivery.records, strict=True)
        frames, sizes = delivery.frames, frame_sizes(delivery.frames)
        position = 0
        for first in range(0, len(ids), MESSAGES_MAX):
            part = slice(first, first + MESSAGES_MAX)
            begin, position = position, position + sum(sizes[part])
            run = _Run(timestamps[part], attempts[part], ids[part], frames[begin:position], sizes[part])
            try:
                self._store(delivery, run)
            except StorageError as error:
                self._give_back(delivery, run.ids, error)

    def _store(self, delivery: Delivery, run: _Run) -> None:
        held, partition_log, link, now = self._held, self.log, delivery.link, self._loop.time()
        if self._retry is not None:
            raise DiskFull(self.topic, 0, 0)
        held.see(link)
        is_old = min(run.timestamps) < self._began_ns
        if is_old:
            self._heard_old()
        known = held.are_known(run.timestamps, run.attempts, run.ids)
        new = run if known is None else run.without(known)
        if new.ids:
            layout = 0 if is_hex(new.ids[0]) else RAW_IDS
            if delivery.extensions is not None:
                layout |= EXTENDED
            data = encode_received(
                internal_id(partition_log.partition, partition_log.next_sequence),
                partition_log.end_offset_bytes,
                new.frames,
                new.sizes,
                new.timestamps,
                synced_before=partition_log.synced_sequence,
                layout=layout,
            )
            partition_log.append_batch(data, is_verified=True)
        if is_old:
            self._old_end = partition_log.next_sequence
        # what is known already may be stored and not be safe yet: it is when everything before it is
        held.add(partition_log.next_sequence, link, run.timestamps, run.ids, now, is_again=known is not None)
        if not self._is_kept:
            partition_log.advance_committed(partition_log.next_sequence)
        else:
            self._start_sync()
        self._look_at_room()

    def _give_back(self, delivery: Delivery, ids: Sequence[bytes], error: StorageError) -> None:
        """Have nsqd keep what cannot be stored, and deliver it again later."""
        for message_id in ids:
            delivery.link.requeue(message_id, round(1000 * BACK_S))
        self._back_at = self._loop.time() + BACK_S
        if self.log.failed is not None:
            self._fail(WriteFailed(self.topic, self.log.failed))
        elif self._retry is None:
            log.error("topic %s: %s; messages stay in nsqd until there is room", self.topic, error)
            self.consumer.pause()
            self._refused_bytes = error.size_bytes if isinstance(error, DiskFull) else 0
            self._retry = self._loop.call_later(RETRY_S, self._try_again)
            self._disk_at = self._loop.time()
            if not self._disk_error:
                self._disk_since = self._disk_at
            self._disk_error = f"the disk of the spool has no room ({error})"
            self._drop()

    def _try_again(self) -> None:
        if not self._has_room():
            self._retry = self._loop.call_later(RETRY_S, self._try_again)
            self._drop()
            return
        self._disk_at = self._loop.time()
        self._retry = None
        log.warning("topic %s: there is room again", self.topic)
        self._ask_for_more()

    def _has_room(self) -> bool:
        """Return whether it is worth asking for more: there is much room, or all that this log can make."""
        if not isinstance(self.log, PartitionLog) or self.log.has_room:
            return True
        is_empty = self.log.start_sequence == self.log.next_sequence
        return is_empty and self.log.has_room_for(self._refused_bytes)

    def _ask_for_more(self) -> None:
        if self._retry is None and not self.is_full:
            self.consumer.unpause()

    def _look_at_room(self) -> None:
        size = self.log.size_bytes
        if not self.is_full and size > self._bytes_max:
            self.is_full = True
            log.warning("topic %s: %d bytes wait to be read, the rest waits in nsqd", self.topic, size)
            self.consumer.pause()
        elif self.is_full and (size <= ROOM_AGAIN * self._bytes_max or self.floor >= self.log.next_sequence):
            self.is_full = False
            self._ask_for_more()

    # -- what is safe --------------------------------------------------------------------------------------------------

    def _start_sync(self) -> None:
        if self._sync_task is None:
            self._sync_task = self._loop.create_task(self._sync())

    def _sync_files(self, ticket: SyncTicket) -> None:
        ticket.run()
        segment = ticket.segments[-1][0] if ticket.segments else None
        path, file = (ticket.directory, None) if segment is None else (segment.path, segment.live_file)
        if gone := self._gone(path, file):
            raise OSError(gone)

    async def _sync(self) -> None:
        partition_log = self.log
        assert isinstance(partition_log, PartitionLog), "what is in memory is not synced"
        try:
            while (ticket := partition_log.begin_sync()) is not None:
                error: OSError | None = None
                try:
                    await self._env.run_blocking(self._sync_files, ticket)
                except OSError as failed:
                    error = failed
                partition_log.finish_sync(ticket, error)
                if error is not None:
                    break
                partition_log.advance_committed(ticket.end_sequence)
                self._held.finish_below(ticket.end_sequence)
            self._held.finish_below(partition_log.synced_sequence)  # all of it was known, and there was nothing to sync
        finally:
            self._sync_task = None
        if partition_log.failed is not None:
            self._fail(WriteFailed(self.topic, partition_log.failed))
        self._drop()

    def move(self, sequence: int) -> None:
        """Everything below ``sequence`` has been read for good."""
        before, was_starved = self.floor, self.consumer.is_starved
        self.floor = max(self.floor, min(sequence, self.log.committed_sequence))
        if self.floor > before:
            self._disk_since = self._loop.time()  # there is room again
        if not self._is_kept and self._held.finish_below(self.floor) and (was_starved or before < self._old_end):
            self._heard_old()  # what nsqd held back for these comes now
        self._drop()

    def _drop(self) -> None:
        try:
            self.log.drop_before(self.floor)
            self._seal_what_was_read()
        except DiskFull:
            pass  # that was told of
        except StorageError as error:
            log.error("topic %s: what has been read stays on the disk: %s", self.topic, error)
        self._look_at_room()

    def _seal_what_was_read(self) -> None:
        """On a full disk let the active segment go as well once all of it was read: nothing else may make room."""
        partition_log = self.log
        if self._retry is None or not isinstance(partition_log, PartitionLog) or partition_log.failed is not None:
            return
        *_, active = partition_log.segments()
        if active.first_sequence < active.end_sequence <= self.floor and not partition_log.is_syncing:
            partition_log.roll()
            self._start_sync()  # which drops it in the end

    def tick(self) -> None:
        """Touch what waits, and ask nsqd if it is to be known; to be called every ``TICK_S``."""
        self._held.touch_due(self._loop.time())
        if self._is_ending:
            self._probe()
            self._look_at_what_is_waited_for()
        if self._held.late_count > self._late_told:
            log.warning(
                "topic %s: %d messages waited for longer than nsqd's --max-msg-timeout and come again: "
                "micro-batches are too long", self.topic, self._held.late_count - self._late_told,
            )  # fmt: skip
            self._late_told = self._held.late_count
        if self._loop.time() - self._refused_told_at >= REFUSED_TOLD_S:
            self._tell_refused()

    def _tell_refused(self) -> None:
        refused = self.consumer.stats().late
        if refused > self._refused_told:
            forgotten = self._held.take_forgotten()
            but = f", but for up to {forgotten}: so many are more than are remembered" if forgotten else ""
            log.warning(
                "topic %s: %d FIN, REQ or TOUCH came too late, nsqd delivers those messages again; those that are "
                "stored are not stored twice%s", self.topic, refused - self._refused_told, but,
            )  # fmt: skip
            self._refused_told, self._refused_told_at = refused, self._loop.time()

    async def close(self) -> None:
        """Ask for no more, finish what is safe, and leave; the log is complete."""
        if self._retry is not None:
            self._retry.cancel()
        self.consumer.stop()
        await asyncio.sleep(0)  # the consumer has stopped then: nsqd hears of it before it can deliver these again
        while self._sync_task is not None:
            await asyncio.wait([self._sync_task])
        self._held.give_back()  # NSQ's nsqd would wait for the message timeout
        await self.consumer.close()
        self._tell_refused()
        if isinstance(self.log, PartitionLog) and self.log.has_checkpoint_due:
            self.log.write_checkpoint()
        self.log.close()


def _last_messages(partition_log: Any, count: int) -> Iterator[Same]:
    """Yield the last messages of a log: their FINs may have been lost with the process that stored them."""
    sequence, end = max(partition_log.start_sequence, partition_log.next_sequence - count), partition_log.next_sequence
    while sequence < end:
        try:
            data, following = partition_log.fetch(sequence, end, 1 << 20)
        except StorageError as error:
            log.warning("the end of the log cannot be read, some messages may come twice: %s", error)
            return
        position = 0
        while position < len(data):
            try:
                batch = decode_batch(data, position)
            except BatchError as error:
                log.warning("the end of the log is damaged, some messages may come twice: %s", error)
                return
            frames = bytes(batch.frames(batch.first, batch.end))
            for at in batch.positions()[:-1]:
                stamp = int.from_bytes(frames[at + TIMESTAMP_POSITION : at + TIMESTAMP_POSITION + 8], "big")
                yield stamp, frames[at + ID_POSITION : at + ID_POSITION + MESSAGE_ID_SIZE]
            position += batch.header.size
        if following <= sequence:
            return
        sequence = following
