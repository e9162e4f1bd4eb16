"""Drives the broker on the event loop: the end of each turn, the syncs, the timeouts, the flush of progress.

A turn ends once, however many connections had something to say: then what was published is written, the answers and
deliveries that became possible are put out, and every connection is written to at most once.

What was published is answered and delivered when the policy of ``--durability`` says so
(:mod:`flintmq.nsqd.durability`).

Source: docs/decisions/0002.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

from flintmq.broker.broker import Broker
from flintmq.broker.deliveries import share_turn
from flintmq.broker.partition import PublishGroup
from flintmq.broker.retention import Removed
from flintmq.env import Env
from flintmq.errors import NO_MORE_MESSAGES, PartitionFailed, StorageError, WriteFailed
from flintmq.limits import CURSOR_FLUSH_S
from flintmq.net.problems import Problems
from flintmq.net.tasks import kept_up
from flintmq.net.turns import Turns
from flintmq.nsqd.durability import durability_of
from flintmq.nsqd.leadership import Replication
from flintmq.nsqd.memory import MemoryWatch
from flintmq.storage import PartitionLog, create_logs, run_tickets

log = logging.getLogger(__name__)

_RETRY_S = 1.0  # after a flush failed
_LOOK_AGAIN_S = 0.005  # for the end of a flush, before this nsqd ends
_RETAIN_S = 30.0  # retention by time, when nothing else happens
_CLOCK_TOLERANCE_NS = 50_000_000  # smaller steps of the wall clock are left alone
_LOOKS_MAX = 8
_DEADLINE_SLACK_S = 0.005  # timers are not set finer than this
_OUTPUTS_MAX = 128  # connections written to in one turn, and
_LATE_OUTPUTS_MAX = 64  # as many more of those that earlier turns left over
_DEFECT_AGAIN_S = 10.0  # before the same defect is logged again
_DEFECTS_MAX = 100  # that are remembered for it


class Output(Protocol):
    """A connection with something to write.

    Attributes:
        peer: who is at the other end, for the log.
    """

    peer: str

    def flush(self) -> None: ...

    def abort(self) -> None: ...


class Engine:
    """Owner of the broker's timing. All methods run on the event loop.

    Attributes:
        turns: of connections of clients that have more to do than fits into one.
        received_bytes: by connections in this turn, in large reads.
        replication: told what was written and synced, where a node belongs to a cluster; None where it does not.
        on_defect: told what was being done, and the exception that nobody expected there: what one connection, channel
            or partition fails with is not to keep the others from their turn. It is logged unless told otherwise.
    """

    def __init__(
        self,
        env: Env,
        broker: Broker,
        *,
        durability: str,
        sync_every: int,
        sync_timeout_ns: int,
    ) -> None:
        self.env = env
        self.broker = broker
        self._publishes = broker.publishes
        self._deliveries = broker.deliveries
        self.loop = asyncio.get_running_loop()
        self.durability = durability_of(durability, sync_every)
        self.turns = Turns(self.loop, env.clock.monotonic_ns)
        self._due_clock_offset_ns = env.clock.wall_ns() - env.clock.monotonic_ns()
        self.health: str | None = None
        self.on_metadata: Callable[[], None] = lambda: None  # topics, channels or pauses on disk have changed
        self.on_defect: Callable[[str, Exception], None] = self._log_defect
        self.replication: Replication | None = None
        self._defects: dict[str, float] = {}
        self._problems = Problems(env.clock)
        broker.on_defect = self._tell_defect
        broker.on_log_failed = _log_failed
        broker.retaining.on_removed = _log_removed
        broker.retaining.on_ahead = _log_ahead
        self.received_bytes = 0
        self._budget = broker.budget
        self._memory = MemoryWatch(broker.budget, broker, self.loop, self.schedule)
        self._clock_shift_ns = 0
        self._sync_timeout_s = sync_timeout_ns / 1e9
        self._scheduled = False
        self._outputs: dict[Output, None] = {}
        self._late_outputs: dict[Output, None] = {}  # of earlier turns that had too many
        self._unsynced: list[PublishGroup] = []
        self._logs_due: dict[Any, None] = {}  # to be synced although nobody waits for it
        self._sync_task: asyncio.Task[None] | None = None
        self.syncing: object | None = None  # another one for each sync that the disk is asked for
        self._sync_timer: asyncio.TimerHandle | None = None
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._deadline_ns = 0  # that the timer is set for
        self._may_retain_more = False  # what segments had to wait for has been written
        self._flush_wanted = asyncio.Event()
        self._flush_task: asyncio.Task[None] | None = None
        self._create_task: asyncio.Task[None] | None = None
        self._sealed: dict[PartitionLog, None] = {}  # by :meth:`make_room`, and not yet synced
        self._closing = False

    # -- turns ---------------------------------------------------------------------------------------------------

    def schedule(self) -> None:
        """End this turn when the loop has called everything that is ready now."""
        if not self._scheduled:
            self._scheduled = True
            self.loop.call_soon(self._end_turn)

    def wants_output(self, output: Output) -> None:
        """Write to this connection at the end of the turn."""
        self._outputs[output] = None
        self.schedule()

    def _end_turn(self) -> None:
        broker, publishes, deliveries = self.broker, self._publishes, self._deliveries
        try:
            if self.replication is not None:
                self.replication.look()
            # what this makes ready is written below, so that it needs no turn of its own
            if publishes.pending:
                self._sync_or_commit(publishes.write_pending(self._watch_wall_clock()))
            if deliveries.marked or deliveries.late:
                self._pump()
        finally:
            self._scheduled = False
            self.received_bytes = 0
            if publishes.pending or deliveries.marked or deliveries.late:
                self.schedule()
        if broker.has_creations and self._create_task is None:
            self._start_creating()
        if broker.has_metadata or broker.is_flush_urgent:
            self._flush_wanted.set()
        if self._budget.output_bytes > self._budget.output_short_bytes or self._budget.has_waiting:
            self._memory.begin()
        outputs, self._outputs = self._outputs, {}
        if self._late_outputs or len(outputs) > _OUTPUTS_MAX:
            outputs = share_turn(outputs, self._late_outputs, _OUTPUTS_MAX, _LATE_OUTPUTS_MAX)
            if self._late_outputs:
                self.schedule()
        for output in outputs:
            try:
                output.flush()
            except Exception as error:  # noqa: BLE001 - on_defect tells it, and the others are written to
                self.output_failed(output, error)

    def output_failed(self, output: Output, error: Exception) -> None:
        """Close the one connection that cannot be written to."""
        self.on_defect(f"client {output.peer}: writing failed, closing", error)
        try:
            output.abort()
        except Exception as also:  # noqa: BLE001 - as above
            self.on_defect(f"client {output.peer}: closing failed", also)

    def _tell_defect(self, what: str, error: Exception) -> None:
        self.on_defect(what, error)

    def _log_defect(self, what: str, error: Exception) -> None:
        """Log an exception that nobody expected, one of a kind now and then: it may come every turn."""
        now = self.loop.time()
        if self._defects.get(what, 0.0) > now:
            return
        if len(self._defects) >= _DEFECTS_MAX:
            self._defects.clear()
        self._defects[what] = now + _DEFECT_AGAIN_S
        log.error("%s: %r", what, error, exc_info=error)

    @property
    def is_crowded(self) -> bool:
        """Whether so much has been published that some of it has to be written before more is read."""
        is_crowded = self.received_bytes + self._publishes.left_bytes > self._budget.publishing_max_bytes
        if is_crowded:
            self.schedule()
        return is_crowded

    def _end_turns(self) -> None:
        """End this turn and those that it leaves work to."""
        self._end_turn()
        while self.broker.has_pending:
            self._end_turn()

    def due_clock_ns(self) -> int:
        """The clock of due times: wall time at the start of this process, then as steady as monotonic time.

        A wall clock that is set while nsqd runs neither hurries nor holds back a delay.
        """
        return self._due_clock_offset_ns + self.env.clock.monotonic_ns()

    def _pump(self) -> None:
        broker = self.broker
        now_ns = self.env.clock.monotonic_ns()
        for channel in broker.pump(now_ns, self._due_clock_offset_ns + now_ns):
            for subscription in channel.take_sent_to():
                self._outputs[subscription.owner] = None  # type: ignore[index]
        self._arm_deadline()

    def _arm_deadline(self) -> None:
        deadline_ns = self._deliveries.next_deadline_ns
        if deadline_ns is None:
            return
        if self._deadline_timer is not None:
            if self._deadline_ns <= deadline_ns:
                return
            self._deadline_timer.cancel()
        self._deadline_ns = deadline_ns
        delay_s = max(_DEADLINE_SLACK_S, (deadline_ns - self.env.clock.monotonic_ns()) / 1e9)
        self._deadline_timer = self.loop.call_later(delay_s, self._handle_deadlines)

    def look_at_clock(self) -> None:
        """Act on every deadline that has passed; for a clock that does not pass by itself."""
        self._handle_deadlines()

    def _handle_deadlines(self) -> None:
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
            self._deadline_timer = None
        self.broker.handle_deadlines(self.env.clock.monotonic_ns(), self.due_clock_ns())
        self._pump()
        self.schedule()

    # -- durability ------------------------------------------------------------------------------------------------

    def _sync_or_commit(self, groups: list[PublishGroup]) -> None:
        if not groups:
            return
        written = self.durability.written(groups)
        if self.replication is not None:
            self.replication.written(groups)
        self._unsynced += written.syncing
        self._logs_due |= written.due
        is_too_late = self._sync_task is not None  # a sync that runs has begun without these
        if written.is_sync_due:
            self._start_sync()
        if written.is_sync_timed and self._sync_timer is None and (is_too_late or not written.is_sync_due):
            self._sync_timer = self.loop.call_later(self._sync_timeout_s, self._start_sync)
        self.broker.commit_groups([group for group in groups if not group.conditions])

    def sync_soon(self, log: Any) -> None:
        """Sync a log although nobody here waits for it."""
        self._logs_due[log] = None
        self._start_sync()

    def make_room(self, wanted_bytes: int) -> None:
        """Let what is consumed go from a full disk even where it stands in a segment that is still written to.

        To be called again while there is no room: nothing more is sealed before what was sealed is durable.

        Args:
            wanted_bytes: that are to become free.
        """
        if self._closing or any(each.is_syncing or each in self._logs_due for each in self._sealed):
            return
        self._sealed = dict.fromkeys(self.broker.seal_consumed(wanted_bytes, self.due_clock_ns()))
        if self._sealed:
            self._logs_due |= self._sealed
            self._start_sync()

    def _start_sync(self) -> None:
        if self._sync_timer is not None:
            self._sync_timer.cancel()
            self._sync_timer = None
        if self._sync_task is None:
            self._sync_task = self.loop.create_task(self._sync())
            self._sync_task.add_done_callback(self._sync_done)

    def _sync_done(self, task: asyncio.Task[None]) -> None:
        self._sync_task = None
        if not task.cancelled() and task.exception() is not None:
            self.health = f"sync ended unexpectedly: {task.exception()!r}"
            log.error("%s", self.health, exc_info=task.exception())
        if self._unsynced or self._logs_due:
            self._start_sync()

    async def _sync(self) -> None:
        """Sync until nothing waits; each round covers everything written before it began."""
        while True:
            groups, self._unsynced = self._unsynced, []
            self.durability.sync_begins()
            due, self._logs_due = self._logs_due, {}
            logs = self.durability.logs_to_sync(groups, due, self.broker.logs())
            try:
                await self._sync_logs(logs)
                if not self.durability.waits_for_syncs:
                    self.broker.note_synced()
                if self.replication is not None:
                    self.replication.synced(logs)
                self._synced(groups)
            except Exception as error:
                for group in groups:
                    if not group.ended:  # whoever published is not to wait for ever
                        group.end(WriteFailed(group.partition.topic_name, f"internal error {error!r}"))
                raise
            self.schedule()
            if not self._unsynced and not self._logs_due:
                return

    def _synced(self, groups: list[PublishGroup]) -> None:
        stored = []
        for group in groups:
            failed = group.partition.log.failed
            if group.partition.is_handed_over:
                continue  # that it is synced here says nothing
            if group.partition.is_deleted:
                group.end(None)  # stored, and then deleted with its topic
            elif failed:
                group.end(PartitionFailed(group.partition.topic_name, failed))
            elif group.meet_condition():
                stored.append(group)
        self.broker.commit_groups(stored)

    async def _sync_logs(self, logs: list[Any]) -> None:
        pairs = [(each, ticket) for each in logs if (ticket := each.begin_sync()) is not None]
        if not pairs:
            return
        self.syncing = object()
        try:
            errors = await self.env.run_blocking(run_tickets, [ticket for _, ticket in pairs])
        except Exception as failure:  # there was no thread for it: nothing is known to be on the disk
            log.error("syncing ended unexpectedly: %r", failure, exc_info=failure)
            errors = [failure] * len(pairs)
        finally:
            self.syncing = None
        for (each, ticket), error in zip(pairs, errors, strict=True):
            each.finish_sync(ticket, error)
            if ticket.snapshot is not None:
                self._may_retain_more = True
            if self._sealed.pop(each, False) is None:
                self._may_retain_more = True
                self._flush_wanted.set()
            if ticket.snapshot_error is not None:
                log.error("%s: %s", each.directory, each.producers.snapshot_error)

    # -- new topics ------------------------------------------------------------------------------------------------

    def _start_creating(self) -> None:
        self._create_task = self.loop.create_task(self._create())
        self._create_task.add_done_callback(self._create_done)

    def _create_done(self, task: asyncio.Task[None]) -> None:
        self._create_task = None
        if not task.cancelled() and task.exception() is not None:
            log.error("creating topics ended unexpectedly: %r", task.exception(), exc_info=task.exception())

    async def _create(self) -> None:
        """Make the files of new topics; whoever published to them waits, and nobody else does."""
        broker = self.broker
        sync = self.durability.syncs_files
        while created := broker.take_creations():
            creations = [creation for new in created for creation in new.creations]
            try:
                await self.env.run_blocking(create_logs, creations, sync)
            except Exception as error:
                for creation in creations:
                    creation.error = error
                raise
            finally:
                broker.creations_ended(created)
                self.schedule()

    # -- progress --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin writing progress now and then."""
        work = kept_up(self._flush_forever, "writing progress", self._flush_failed, _RETRY_S)
        self._flush_task = self.loop.create_task(work)

    async def _flush_forever(self) -> None:
        retained_at = self.loop.time()
        while True:
            try:
                async with asyncio.timeout(CURSOR_FLUSH_S):
                    await self._flush_wanted.wait()
            except TimeoutError:
                pass
            self._flush_wanted.clear()
            if self._closing:
                return
            self._watch_wall_clock()
            if self._may_retain_more or self.loop.time() - retained_at > _RETAIN_S:
                retained_at = self.loop.time()
                self._may_retain_more = False
                self.broker.retain_all(self.due_clock_ns())
            if self.broker.sweep(self.due_clock_ns()):
                self.schedule()
            if self._publishes.snapshots_due:
                due, self._publishes.snapshots_due = self._publishes.snapshots_due, {}
                self._logs_due |= due
                self._start_sync()
            if self.broker.has_flush(self.due_clock_ns()) or self.broker.has_metadata:
                try:
                    await self.flush_progress(sync=self.durability.syncs_progress)
                except (OSError, StorageError) as error:
                    self._flush_failed(error)
                    self._problems.tell(f"{self.health}; trying again every {_RETRY_S:.0f} s")
                    await asyncio.sleep(_RETRY_S)
                else:
                    if self.broker.has_more_due:
                        self._flush_wanted.set()
                    if self.health and self.health.startswith("writing progress"):
                        log.info("progress is written again")
                        self.health = None

    def _flush_failed(self, error: Exception) -> None:
        """/ping says so until it succeeds."""
        self.health = f"writing progress failed: {error if isinstance(error, OSError | StorageError) else repr(error)}"

    def _watch_wall_clock(self) -> int:
        """Return wall time, when the broker has been told if that was set."""
        wall_ns, due_clock_ns = self.env.clock.wall_ns(), self.due_clock_ns()
        if abs(wall_ns - due_clock_ns - self._clock_shift_ns) > _CLOCK_TOLERANCE_NS:
            wall_ns, due_clock_ns = self._clocks()
            shift_ns = wall_ns - due_clock_ns
            if abs(shift_ns - self._clock_shift_ns) > _CLOCK_TOLERANCE_NS:
                log.warning("the wall clock moved by %.3f s", (shift_ns - self._clock_shift_ns) / 1e9)
                self._clock_shift_ns = shift_ns
                self.broker.clock_moved(shift_ns, due_clock_ns)
        return wall_ns

    def _clocks(self) -> tuple[int, int]:
        """Return wall time and the clock of due times, of one moment: a process may be held up between two looks."""
        for _ in range(_LOOKS_MAX):
            before_ns, wall_ns, after_ns = self.due_clock_ns(), self.env.clock.wall_ns(), self.due_clock_ns()
            if after_ns - before_ns <= _CLOCK_TOLERANCE_NS:
                break
        return wall_ns, after_ns

    async def flush_progress(self, sync: bool) -> None:
        """Write the progress of all channels as one transaction.

        Raises:
            OSError, StorageError: what the disk or the database said; the next flush has it all again.
        """
        broker = self.broker
        due_clock_ns = self.due_clock_ns()
        flush = broker.take_flush(due_clock_ns)
        error: BaseException | None = None
        answers: list[Any] = []
        try:
            answers = await self.env.run_blocking(broker.run_flush, flush, due_clock_ns, sync)
        except Exception as failure:  # noqa: BLE001 - raised below; what was taken goes back first, whatever it was
            error = failure
        broker.flush_ended(flush, answers, error, self.due_clock_ns())
        if flush.has_metadata and error is None:
            self.on_metadata()
        self.schedule()
        if error is not None:
            raise error

    async def settle(self) -> None:
        """Wait until everything that was published so far has been stored and answered."""
        self._end_turns()
        while True:
            if tasks := [task for task in (self._create_task, self._sync_task) if task is not None]:
                await asyncio.wait(tasks)
            elif self.broker.has_held:
                await self._flush_held()
            else:
                return
            self._end_turns()

    async def _flush_held(self) -> None:
        """Let progress be written that publishes wait for; when it cannot be, they are told."""
        if not self._closing:
            self._flush_wanted.set()
            await asyncio.sleep(_LOOK_AGAIN_S)
            return
        try:
            await self.flush_progress(sync=self.durability.syncs_progress)
        except (OSError, StorageError) as error:
            self._flush_failed(error)

    async def close(self) -> None:
        """Write and sync everything; connections are gone already.

        Raises:
            OSError, StorageError: what the disk said; the data directory is as after a kill.
        """
        self._closing = True
        if self._flush_task is not None:
            # not cancelled: a flush that runs in a worker thread cannot be, and its outcome has to be known
            self._flush_wanted.set()
            await asyncio.wait([self._flush_task])
        await self.settle()
        for timer in (self._sync_timer, self._deadline_timer):
            if timer is not None:
                timer.cancel()
        await self._sync_logs(list[Any](self.broker.logs()))
        self.broker.note_synced()
        await self.flush_progress(sync=True)
        self.broker.close()


def _log_failed(directory: str, reason: str) -> None:
    # /ping tells as long as the log is there
    log.error("writing to %s failed: %s; %s", directory, reason, NO_MORE_MESSAGES)


def _log_removed(topic: str, removed: Removed) -> None:
    what = f"{removed.messages} messages in {removed.segments} files, {removed.size_bytes} bytes"
    log.info("TOPIC(%s): retention by time removes %s; all channels have finished them", topic, what)


def _log_ahead(topics: list[str]) -> None:
    more = f" and {len(topics) - 1} more topics" if len(topics) > 1 else ""
    what = "messages have times that lie ahead; retention by time counts them as stored when those behind them were"
    log.warning("TOPIC(%s)%s: %s", topics[0], more, what)
