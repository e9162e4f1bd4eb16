"""From the moment a publish is taken to its end: where it is sent, when again, how it ends.

Rules of this file:

- A publish is always in exactly one place: parked (nothing is up that could take it), in a line, waiting for the number
  of partitions, sent, or waiting for its next try; its timer runs in all of them, so it ends by its deadline.
- The retry table of reference/youzan.md 1.8: an error in the message is final; "not here, not now" is tried again, up
  to ``tries_max`` (until the deadline where the leader of a partition has moved); without an answer it is sent to
  another nsqd, which may store it twice (``retries_unknown``): at least once, as everything in NSQ.
- A publish that must keep its order stands in the line of its partition (:mod:`flintmq.client.lanes`) and goes there
  or nowhere; while the number of partitions is not known, it waits in the order of the calls.
- Nothing is sent again from inside a callback of a connection: that connection is about to be lost.
- A publish with a writer (:mod:`flintmq.client.core.once`) is sent again to the same nsqd alone until its fate is
  known; one that finds all writers in use waits for one, with those behind it gathered.
- What was sent counts against the back-pressure until it is answered or its connection is lost, also when its call has
  ended: its bytes are still in the way. A connection is given up for what it does not answer, not for being slow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from math import inf

from flintmq.client import trace
from flintmq.client.admission import Admission
from flintmq.client.aio.connection import Connection
from flintmq.client.core import sharding
from flintmq.client.core.link import AnswerLost
from flintmq.client.core.once import GAP_CODE, Spot, Writer, Writers
from flintmq.client.core.stats import ProducerStats
from flintmq.client.lanes import Lane, fits
from flintmq.client.publish import (
    CONGESTED_CODE,
    CONGESTED_FACTOR,
    MOVED_CODES,
    STALLED_SHARE,
    TOPIC_COUNT_MAX,
    Publish,
    is_bad_message,
    is_draining,
    leaves_open,
    refreshes_lookup,
    retry_delay_s,
)
from flintmq.client.routing import Place, Routes, Turns
from flintmq.client.security import Refusals
from flintmq.env import Env
from flintmq.errors import ConnectionFailed, FlintError, NoNsqd, NsqdError, RemoteProtocolError

_cached_partition = lru_cache(maxsize=8192, typed=True)(sharding.partition_of)


def partition_of(sharding_id: sharding.ShardingId, count: int, function: str) -> int:
    """As :func:`flintmq.client.core.sharding.partition_of`, and quick: the same ids come again and again.

    Raises:
        OptionError: likewise.
    """
    try:
        return _cached_partition(sharding_id, count, function)
    except TypeError:  # it cannot be hashed, so it is no sharding id
        return sharding.partition_of(sharding_id, count, function)


@dataclass(frozen=True, slots=True)
class Policy:
    """What the user of a producer decides.

    Attributes:
        timeout_s: of a call, where the call says nothing else.
        retries_unknown: send again what was not answered.
        tries_max: how often a publish may be refused.
        count_max, bytes_max: of what is gathered in a line.
        sharding: from a sharding id to a partition.
        has_lookup: nsqlookupd know where topics are.
    """

    timeout_s: float
    retries_unknown: bool
    tries_max: int
    count_max: int
    bytes_max: int
    sharding: str
    has_lookup: bool


class _OnTheWay:
    """What one connection has not answered.

    Attributes:
        count: of commands.
        since: when the last answer came or, behind a pause, the first of them was sent.
    """

    __slots__ = ("count", "since")

    def __init__(self) -> None:
        self.count = 0
        self.since = 0.0


class Sender:
    """Sends publishes over the connections that are up.

    Args:
        look_up: refreshes what is known of a topic.
        is_traced: whether a topic is traced now.
        writers: to publish idempotently with; None: not so.

    Attributes:
        unfinished: what has not ended.
        last_error: why something could not be done, for who asks why it takes so long.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        env: Env,
        policy: Policy,
        routes: Routes,
        refusals: Refusals,
        admission: Admission,
        stats: ProducerStats,
        look_up: Callable[[str], None],
        is_traced: Callable[[str], bool],
        writers: Writers | None = None,
    ) -> None:
        self.unfinished: dict[Publish, None] = {}
        self.last_error: FlintError | None = None
        self._loop = loop
        self._env = env
        self._policy = policy
        self._routes = routes
        self._refusals = refusals
        self._admission = admission
        self._stats = stats
        self._look_up = look_up
        self._is_traced = is_traced
        self._writers = writers
        self._short: dict[str, dict[Publish, None]] = {}  # what waits for a writer, by topic
        self._up: dict[str, Connection] = {}
        self._turns: dict[str, Turns] = {}
        self._parked: dict[Publish, None] = {}
        self._lanes: dict[tuple[str, int], Lane] = {}
        self._unresolved: dict[str, dict[Publish, None]] = {}
        self._unflushed: dict[Connection, None] = {}
        self._on_the_way: dict[Connection, _OnTheWay] = {}
        self._idle: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf

    # --- what the producer tells ---

    @property
    def connections(self) -> tuple[Connection, ...]:
        """All that are up."""
        return tuple(self._up.values())

    @property
    def waiting_topics(self) -> Iterable[str]:
        """Topics for which something waits until more is known."""
        yield from dict.fromkeys(publish.topic for publish in self._parked)
        yield from self._unresolved
        yield from dict.fromkeys(lane.topic for lane in self._lanes.values() if lane.is_stuck)

    def join(self, connection: Connection) -> None:
        """Use a new connection."""
        self._up[connection.address] = connection
        self._turns.clear()
        self._dispatch_waiting()

    def leave(self, connection: Connection, error: FlintError) -> None:
        """Use a connection no more; what waited for its answers was told already."""
        self._unflushed.pop(connection, None)
        self._on_the_way.pop(connection, None)
        if self._up.get(connection.address) is connection:
            del self._up[connection.address]
            self._turns.clear()
            self.last_error = error

    def note_failure(self, error: FlintError) -> None:
        """Note that an nsqd cannot be connected."""
        self.last_error = error
        for publish in [*self._parked]:
            if not publish.is_done:
                self._fail_refused(publish)
        for lane in self._lanes.values():
            self._schedule(lane)

    def routes_changed(self, topic: str) -> None:
        """Go by what was found out about a topic."""
        self._turns.clear()
        self._resolve(topic)
        self._dispatch_waiting()

    def take(self, publish: Publish, will_flush: bool = False) -> None:
        """Take over a publish: from here on it ends by its deadline at the latest.

        Args:
            will_flush: the caller calls :meth:`flush` behind it.
        """
        if publish.keys is None:
            self.unfinished[publish] = None
            self._arm(publish)
            self._dispatch(publish, will_flush)
        else:
            self._dispatch_in_order(publish)

    def _register(self, publish: Publish) -> None:
        self.unfinished[publish] = None
        self._arm(publish)

    async def wait_idle(self) -> None:
        """Wait until everything has ended."""
        if self.unfinished:
            self._idle = self._loop.create_future()
            await self._idle

    def close(self) -> None:
        """End whatever has not ended, and all connections."""
        if self._timer is not None:
            self._timer.cancel()
        for connection in [*self._up.values()]:
            connection.close()
        for publish in [*self.unfinished]:
            if not publish.is_done:
                self._fail(publish, "CLOSED", "the producer was closed before nsqd answered", retryable=False)

    # --- sending ---

    def _arm(self, publish: Publish) -> None:
        """Look again at the deadline, and once before: a stuck nsqd should not use up all the time there is."""
        now = self._loop.time()
        self._look_at(publish, now + (publish.deadline - now) / 2)

    def _look_at(self, publish: Publish, when: float) -> None:
        """One timer serves all: most publishes have ended long before anybody looks, and a timer each would cost."""
        publish.look_at = when
        if when < self._timer_at:
            self._set_timer(when)

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        self._timer = self._loop.call_at(when, self._look)

    def _look(self) -> None:
        """Look at those whose time has come."""
        self._timer, self._timer_at = None, inf
        now = self._loop.time()
        for publish in [each for each in self.unfinished if each.look_at <= now]:
            if publish.is_done:
                continue
            if publish.deadline <= now:
                self._expire(publish)
            else:
                self._look_early(publish)
        if self.unfinished:
            self._set_timer(min(each.look_at for each in self.unfinished))

    def _look_early(self, publish: Publish) -> None:
        connection = publish.connection
        publish.look_at = publish.deadline
        if connection is None:
            return
        if publish.writer is not None:
            self._abort_stalled(connection, "; it is tried again")
        elif self._policy.retries_unknown and self._has_choice(publish, connection):
            self._abort_stalled(connection, "; another nsqd is tried")

    def _abort_stalled(self, connection: Connection, then: str = "") -> None:
        """Give up a connection that answers nothing for long."""
        way = self._on_the_way.get(connection)
        if way is None or not way.count:
            return
        silent_s = self._loop.time() - way.since
        if silent_s >= self._policy.timeout_s / 2 * STALLED_SHARE:
            connection.abort(f"a publish was not answered for {silent_s:.3g} s{then}")

    def _has_choice(self, publish: Publish, connection: Connection) -> bool:
        """Whether a publish could be sent somewhere else than where it waits for an answer."""
        lane = self._lane_of(publish)
        if lane is None:
            return len(self._turns_of(publish.topic).places) > 1
        return self._routes.leader(lane.topic, lane.partition) not in (None, connection.address)

    def _dispatch(self, publish: Publish, will_flush: bool = False) -> None:
        """Send a publish, or park it until an nsqd is up."""
        if publish.is_done:
            return
        if not publish.drop_cancelled():
            self._end(publish)
            return
        if publish.needs_partition and self._fail_impossible(publish):
            return
        if publish.writer is not None:
            place = self._pinned(publish.writer)
        else:
            place = (self._turns.get(publish.topic) or self._turns_of(publish.topic)).next()
        if place is not None and place.partition is None and publish.needs_partition:
            place = None  # these are all nsqd there are: no nsqlookupd knows the topic yet
        if place is not None and self._writers is not None and publish.writer is None:
            place = self._with_writer(publish, place, self._writers)
            if place is None:
                self._wait_for_writer(publish)
                return
        if place is None:
            self._parked[publish] = None
            if self._fail_refused(publish):
                return
            if not self._routes.knows(publish.topic):
                self._look_up(publish.topic)
            return
        self._send(publish, place)
        if will_flush:
            self._unflushed[place.connection] = None
        else:
            place.connection.flush_soon()

    def _send(self, publish: Publish, place: Place) -> None:
        publish.sent_at = self._loop.time()
        way = self._on_the_way.get(place.connection)
        if way is None:
            way = self._on_the_way[place.connection] = _OnTheWay()
        if not way.count:
            way.since = publish.sent_at
        way.count += 1
        self._stats.commands += 1
        publish.send(place.connection, place.partition, partial(self._answered, publish))

    def flush(self) -> None:
        """Write at the end of the turn in which it was gathered, not one turn later."""
        for connection in self._unflushed:
            connection.flush()
        self._unflushed.clear()

    def _redispatch(self, publish: Publish, delay_s: float = 0.0) -> None:
        self._stats.retries += 1
        if (lane := self._lane_of(publish)) is not None:
            lane.put_back(publish)
            self._pause_lane(lane, delay_s)
        elif delay_s:
            self._loop.call_later(delay_s, self._dispatch, publish)
        else:
            self._loop.call_soon(self._dispatch, publish)

    def _dispatch_waiting(self) -> None:
        parked, self._parked = self._parked, {}
        for publish in parked:
            self._dispatch(publish)
        for topic in [*self._short]:
            self._serve(topic)
        for lane in self._lanes.values():
            self._schedule(lane)

    def _turns_of(self, topic: str) -> Turns:
        """The places a topic can be published at.

        Each topic takes its own turns: with a common one, two topics published alternately would each meet the same
        nsqd again and again.
        """
        turns = self._turns.get(topic)
        if turns is None:
            if len(self._turns) >= TOPIC_COUNT_MAX:
                self._turns.clear()
            places = [
                Place(self._up[address], number)
                for address, number in self._routes.targets(topic)
                if address in self._up
            ]
            first = self._env.random.randrange(len(places)) if places else 0
            turns = self._turns[topic] = Turns(places, first)
        return turns

    # --- writers ---

    def _pinned(self, writer: Writer) -> Place | None:
        """The only place for a publish that may be stored there."""
        connection = self._up.get(writer.spot.address)
        return None if connection is None else Place(connection, writer.spot.partition)

    def _with_writer(self, publish: Publish, place: Place, writers: Writers) -> Place | None:
        """Take a writer of this place, or of the next that has one; None when all are in use."""
        turns = self._turns_of(publish.topic)
        for _ in turns.places:
            publish.writer = writers.take(Spot(place.connection.address, publish.topic, place.partition))
            if publish.writer is not None:
                return place
            place = turns.next() or place
        return None

    def _wait_for_writer(self, publish: Publish) -> None:
        queue = self._short.setdefault(publish.topic, {})
        last = next(reversed(queue), None)
        if last is not None and fits(last, publish, self._policy.count_max, self._policy.bytes_max):
            last.absorb(publish)
            self._forget(publish)  # the other one carries its message, and its cost
        else:
            queue[publish] = None

    def _free_writer(self, publish: Publish, stored_count: int = 0) -> None:
        """Let others have the writer of a publish, unless nobody knows what became of its messages."""
        writer, publish.writer = publish.writer, None
        if writer is None or self._writers is None:
            return
        is_open = not stored_count and (publish.is_unknown or publish.connection is not None)
        self._writers.let_go(writer, stored_count, is_open or publish.is_out_of_sequence)
        publish.is_out_of_sequence = False
        if publish.topic in self._short:
            self._loop.call_soon(self._serve, publish.topic)

    def _serve(self, topic: str) -> None:
        """Send those that waited for a writer."""
        queue = self._short.get(topic)
        while queue and self._has_writer(topic):
            publish = next(iter(queue))
            del queue[publish]
            self._dispatch(publish)
        if not queue:
            self._short.pop(topic, None)

    def _has_writer(self, topic: str) -> bool:
        """Whether one is free; True as well where there is nothing to publish to, so that it is waited for that."""
        assert self._writers is not None
        spots = [Spot(place.connection.address, topic, place.partition) for place in self._turns_of(topic).places]
        return not spots or any(map(self._writers.has_free, spots))

    # --- order ---

    def _dispatch_in_order(self, publish: Publish) -> None:
        """Put a publish that keeps its order behind those that came before."""
        waiting = self._unresolved.get(publish.topic)
        if waiting is None and self._stand_in_line(publish):
            return
        if publish.is_done:
            return
        self._register(publish)
        self._unresolved.setdefault(publish.topic, {})[publish] = None
        if waiting is None:
            self._look_up(publish.topic)

    def _stand_in_line(self, publish: Publish) -> bool:
        """Put a publish in the line of its partition; False while that cannot be known, or it failed for good."""
        if self._fail_impossible(publish):
            return False
        if publish.partition is None:
            count = self._routes.partition_count(publish.topic)
            if not count:
                return False
            assert publish.sharding_id is not None
            publish.partition = partition_of(publish.sharding_id, count, self._policy.sharding)
        key = publish.topic, publish.partition
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(*key)
        if lane.push(publish, self._policy.count_max, self._policy.bytes_max):
            self._forget(publish)  # another one carries its message, and its cost
        elif publish not in self.unfinished:
            self._register(publish)
        self._schedule(lane)
        return True

    def _resolve(self, topic: str) -> None:
        """Let those stand in line that waited for the number of partitions."""
        waiting = self._unresolved.pop(topic, {})
        while waiting:
            publish = next(iter(waiting))
            del waiting[publish]
            if not publish.is_done and not self._stand_in_line(publish) and not publish.is_done:
                self._unresolved[topic] = {publish: None, **waiting}
                return

    def _lane_of(self, publish: Publish) -> Lane | None:
        """The line a publish stands in; it is there as long as something of it has no end."""
        if not publish.is_in_line or publish.partition is None:
            return None
        return self._lanes.get((publish.topic, publish.partition))

    def _schedule(self, lane: Lane) -> None:
        if not (lane.is_due or lane.is_paused or lane.current is not None):
            lane.is_due = True
            self._loop.call_soon(self._advance, lane)

    def _pause_lane(self, lane: Lane, delay_s: float) -> None:
        """Look at a line again after a while."""
        if not delay_s:
            self._schedule(lane)
            return
        lane.is_paused = True
        self._loop.call_later(delay_s, self._resume, lane)

    def _resume(self, lane: Lane) -> None:
        lane.is_paused = False
        self._schedule(lane)

    def _advance(self, lane: Lane) -> None:
        """Send the oldest of a line, if it is its turn and there is somewhere to send it."""
        lane.is_due = False
        while lane.queue and lane.current is None and not lane.is_paused:
            publish = lane.queue[0]
            if not publish.drop_cancelled():
                self._end(publish)
            elif self._fail_impossible(publish):
                continue
            elif (place := self._place_in_line(lane, publish)) is not None:
                lane.is_stuck = False
                lane.queue.popleft()
                lane.current = publish
                self._send(publish, place)
                place.connection.flush()
            elif not self._fail_refused(publish):
                if not lane.is_stuck:
                    lane.is_stuck = True
                    self._look_up(lane.topic)
                return
        if lane.is_empty:
            self._lanes.pop((lane.topic, lane.partition), None)

    def _place_in_line(self, lane: Lane, publish: Publish) -> Place | None:
        """Where the oldest of a line goes, with a writer if it needs one."""
        if publish.writer is not None:
            return self._pinned(publish.writer)
        place = self._leader(lane)
        if place is not None and self._writers is not None:
            publish.writer = self._writers.take(Spot(place.connection.address, lane.topic, lane.partition, True))
            assert publish.writer is not None, "one of a line is on its way at a time"
        return place

    def _leader(self, lane: Lane) -> Place | None:
        address = self._routes.leader(lane.topic, lane.partition)
        connection = None if address is None else self._up.get(address)
        return None if connection is None else Place(connection, lane.partition)

    # --- outcomes ---

    def _answered(self, publish: Publish, outcome: bytes | FlintError) -> None:
        connection = publish.connection
        publish.connection = None
        if connection is not None and (way := self._on_the_way.get(connection)) is not None:
            way.count -= 1
            way.since = self._loop.time()
        lane = self._lane_of(publish)
        if lane is not None and lane.current is publish:
            lane.current = None
            self._schedule(lane)
        if publish.is_done:  # its call ended at its deadline
            self._admission.release(publish.cost)
            return
        if outcome == b"OK" and publish.trace_ids is None:
            self._stats.published += len(publish.bodies)
            self._free_writer(publish, len(publish.bodies))
            publish.succeed()
            self._end(publish)
            return
        address = connection.address if connection else ""
        if isinstance(outcome, bytes):
            self._stored(publish, outcome, address)
            return
        publish.error = outcome
        if isinstance(outcome, NsqdError):
            self._refused(publish, outcome, address)
        else:
            self._unanswered(publish, outcome)

    def _stored(self, publish: Publish, answer: bytes, address: str) -> None:
        try:
            stored = publish.read_answer(answer)
        except RemoteProtocolError as error:
            publish.is_unknown = True
            self._fail(publish, error.code, error.detail, address, retryable=False)
            return
        self._stats.published += len(publish.bodies)
        if publish.trace_ids is not None and self._is_traced(publish.topic):
            trace.published(publish.topic, address, publish.partition, stored, publish.trace_ids)
        publish.succeed(address, stored)
        self._end(publish)

    def _refused(self, publish: Publish, error: NsqdError, address: str) -> None:
        """Follow the retry table."""
        publish.tries += 1
        if publish.is_gathered and is_bad_message(error, publish.bodies):
            self._free_writer(publish)
            self._split(publish)
            return
        is_open = leaves_open(error)
        publish.is_unknown |= is_open
        is_out_of_sequence = publish.writer is not None and error.code == GAP_CODE
        if publish.writer is not None and (is_out_of_sequence or is_draining(error)):
            publish.is_unknown = False  # it would have been answered as a duplicate
        publish.is_out_of_sequence = is_out_of_sequence
        if not publish.is_unknown:
            self._free_writer(publish)
        has_moved = publish.partition is not None and error.code in MOVED_CODES
        if has_moved:
            assert publish.partition is not None
            self._routes.drop(publish.topic, publish.partition, address, self._loop.time())
            self._turns.pop(publish.topic, None)
        may_try = has_moved or is_draining(error) or publish.tries < self._policy.tries_max
        is_safe = self._policy.retries_unknown or not is_open or publish.writer is not None
        if (error.retryable or is_out_of_sequence) and may_try and is_safe:
            if refreshes_lookup(error):
                self._look_up(publish.topic)
            delay_s = retry_delay_s(publish.tries, self._env.random.random())
            self._redispatch(publish, delay_s * CONGESTED_FACTOR if error.code == CONGESTED_CODE else delay_s)
        else:
            self._fail(publish, error.code, error.detail, error.nsqd, retryable=error.retryable)

    def _fail_impossible(self, publish: Publish) -> bool:
        """Fail a publish that its topic will never take; False when there is hope."""
        partition = publish.partition if publish.keys is not None else None
        needs_only_headers = publish.headers is not None and publish.keys is None and not publish.is_trace_asked
        if needs_only_headers and self._routes.takes_headers_alone(publish.topic):
            publish.needs_partition = False
        elif refusal := self._routes.refusal(publish.topic, partition, publish.headers is not None):
            self._fail(publish, *refusal, retryable=False)
        return publish.is_done

    def _fail_refused(self, publish: Publish) -> bool:
        """Fail a publish that no nsqd of its topic will ever take; False when there is hope."""
        if (lane := self._lane_of(publish)) is not None:
            leader = self._routes.leader(lane.topic, lane.partition)
            wanted = [leader] if leader is not None else []
        else:
            wanted = [target.address for target in self._routes.targets(publish.topic)]
        error = self._refusals.of_all(wanted)
        if error is None:
            return False
        publish.error = error
        if isinstance(error, NsqdError):
            self._fail(publish, error.code, error.detail, error.nsqd, retryable=False)
        else:
            assert isinstance(error, ConnectionFailed)
            self._fail(publish, "TLS_REFUSED", error.reason, error.address, retryable=False)
        return True

    def _split(self, publish: Publish) -> None:
        """One message of a gathered MPUB is bad: send each alone, so that only the bad one fails."""
        publish.drop_cancelled()
        parts = publish.split()
        for part in parts:
            self.unfinished[part] = None
            part.error = publish.error
            self._arm(part)
            publish.cost -= part.cost
        if (lane := self._lane_of(publish)) is None:
            for part in parts:
                self._redispatch(part)
        else:
            self._stats.retries += len(parts)
            lane.put_back(*parts)
            self._schedule(lane)
        self._end(publish)

    def _unanswered(self, publish: Publish, error: FlintError) -> None:
        is_open = not isinstance(error, AnswerLost) or error.maybe_executed
        publish.is_unknown |= is_open
        if not publish.is_unknown:
            self._free_writer(publish)
        if is_open and not self._policy.retries_unknown and publish.writer is None:
            reason = error.reason if isinstance(error, ConnectionFailed) else str(error)
            self._fail(publish, "CONNECTION_LOST", f"nsqd did not answer: {reason}", retryable=True)
        else:
            self._redispatch(publish)

    def _expire(self, publish: Publish) -> None:
        """The deadline has come."""
        connection = publish.connection
        if connection is None:
            self._fail_unsent(publish)
            return
        publish.is_unknown = True
        waited_s = self._loop.time() - publish.sent_at
        self._fail(publish, "TIMEOUT", f"no answer within {waited_s:.3g} s", connection.address, retryable=True)
        self._abort_stalled(connection)

    def _fail_unsent(self, publish: Publish) -> None:
        """The deadline has come, and it was not under way."""
        lane = self._lane_of(publish)
        if lane is not None and lane.current is not None:
            detail = f"it waited behind earlier ones to partition {lane.partition}, which were not answered"
            self._fail(publish, "TIMEOUT", detail, retryable=True)
            return
        has_leader = lane is not None and self._routes.leader(publish.topic, lane.partition) is not None
        if publish.needs_partition and self._policy.has_lookup and not has_leader:
            publish.error = publish.error or self.last_error
            detail = self._routes.why_not(publish.topic, publish.partition if publish.keys is not None else None)
            self._fail(publish, "PARTITION_UNAVAILABLE", detail, retryable=True)
            return
        publish.error = publish.error or self.last_error or NoNsqd(publish.topic, "nothing is known of any nsqd")
        self._fail(publish, "TIMEOUT", f"no nsqd took it in time: {publish.error}", retryable=True)

    def _fail(self, publish: Publish, code: str, detail: str, nsqd: str = "", *, retryable: bool) -> None:
        self._stats.failed += len(publish.bodies)
        publish.fail(publish.outcome(code, detail, nsqd, retryable=retryable))
        followers = self._followers(publish)
        self._end(publish)
        for follower in followers:
            follower.error = follower.error or publish.error
            which = "sharding id" if follower.keys != [None] else "partition"
            detail = f"not sent: an earlier publish of the same {which} failed, and it must not be overtaken ({code})"
            self._stats.failed += len(follower.bodies)
            follower.fail(follower.outcome("E_ORDER", detail, retryable=True))
            self._end(follower)

    def _followers(self, publish: Publish) -> list[Publish]:
        """Take out what must not overtake a publish that has failed."""
        if (lane := self._lane_of(publish)) is not None:
            return lane.take_followers(publish)
        waiting = [*self._unresolved.get(publish.topic, ())]
        if publish not in waiting:
            return []
        behind = waiting[waiting.index(publish) + 1 :]
        return [each for each in behind if (each.keys, each.partition) == (publish.keys, publish.partition)]

    def _end(self, publish: Publish) -> None:
        """Let go of a publish whose waiters were told."""
        self._forget(publish)
        self._free_writer(publish)
        if (lane := self._lane_of(publish)) is not None:
            lane.remove(publish)
            self._schedule(lane)
        if publish.connection is None:
            self._admission.release(publish.cost)

    def _forget(self, publish: Publish) -> None:
        """Let go of a publish that has ended, or that another one carries."""
        publish.is_done = True
        self.unfinished.pop(publish, None)
        self._parked.pop(publish, None)
        if (queue := self._short.get(publish.topic)) is not None:
            queue.pop(publish, None)
        if publish.keys is not None and (waiting := self._unresolved.get(publish.topic)) is not None:
            waiting.pop(publish, None)
            if not waiting:
                del self._unresolved[publish.topic]
        if self._idle is not None and not self.unfinished and not self._idle.done():
            self._idle.set_result(None)
