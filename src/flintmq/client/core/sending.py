"""From the moment a publish is taken to its end: where it is sent, when again, how it ends.

Rules of this file:

- A publish is always in exactly one place: parked (nothing is up that could take it), in a line, waiting for the number
  of partitions, sent, or waiting for its next try; its timer runs in all of them, so it ends by its deadline.
- What becomes of it, :mod:`.retry` says; this file carries that out.
- A publish that must keep its order stands in the line of its partition (:mod:`.lanes`) and goes there
  or nowhere; while the number of partitions is not known, it waits in the order of the calls.
- Nothing is sent again from inside a callback of a connection: that connection is about to be lost.
- A publish with a writer (:mod:`.once`) is sent again to the nsqd that has the writer's log, and to no other, until its
  outcome is known; one that finds all writers in use waits for one, with those behind it gathered.
- What was sent counts against the back-pressure until it is answered or its connection is lost, also when its call has
  ended: its bytes are still in the way. A connection is given up for what it does not answer, not for being slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import inf

from flintmq.client.core import trace
from flintmq.client.core.admission import Admission
from flintmq.client.core.lanes import Lane, fits
from flintmq.client.core.once import Writer, WriterKey, Writers
from flintmq.client.core.publish import TOPIC_COUNT_MAX, CallSoon, Carrier, Failure, Publish
from flintmq.client.core.retry import Policy, RetryRules, Split, Verdict
from flintmq.client.core.routing import Place, Routes, Turns
from flintmq.client.core.stats import ProducerStats
from flintmq.client.core.timers import Timer, Timers
from flintmq.client.security import Refusals
from flintmq.env import Env
from flintmq.errors import FlintError, NsqdError, RemoteProtocolError

BATCH_COUNT_MAX = 200
BATCH_BYTES_MAX = 1024 * 1024
BYTES_IN_FLIGHT_MAX = 16 * 1024 * 1024


class _OnTheWay:
    """The commands that one connection has not answered.

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
        call_soon: runs what may not run inside a callback of a connection.
        look_up: refreshes what is known of a topic.
        is_traced: whether a topic is traced now.
        writers: to publish idempotently with; None: not so.
        unanswered: the nsqlookupd that are being asked and have not answered yet.
        hasten: called when something begins to wait for an nsqd that is not connected.

    Attributes:
        unfinished: what has not ended.
        last_error: why something could not be done, for who asks why it takes so long.
    """

    def __init__(
        self,
        timers: Timers,
        call_soon: CallSoon,
        env: Env,
        policy: Policy,
        routes: Routes,
        refusals: Refusals,
        admission: Admission,
        stats: ProducerStats,
        look_up: Callable[[str], None],
        is_traced: Callable[[str], bool],
        writers: Writers | None,
        unanswered: Callable[[], Iterable[str]],
        hasten: Callable[[], object],
    ) -> None:
        self.unfinished: dict[Publish, None] = {}
        self.last_error: FlintError | None = None
        self._timers = timers
        self._call_soon = call_soon
        self._env = env
        self._policy = policy
        self._routes = routes
        self._refusals = refusals
        self._admission = admission
        self._stats = stats
        self._look_up = look_up
        self._is_traced = is_traced
        self._writers = writers
        self._hasten = hasten
        self._rules = RetryRules(policy, env, routes, refusals, self._forget_turns, writers, unanswered)
        self._short: dict[str, dict[Publish, None]] = {}  # what waits for a writer, by topic
        self._up: dict[str, Carrier] = {}
        self._turns: dict[str, Turns] = {}
        self._parked: dict[Publish, None] = {}
        self._lanes: dict[tuple[str, int], Lane] = {}
        self._unresolved: dict[str, dict[Publish, None]] = {}
        self._unflushed: dict[Carrier, None] = {}
        self._on_the_way: dict[Carrier, _OnTheWay] = {}
        self._idle: Callable[[], object] | None = None
        self._is_forsaken = False  # somebody waits no more, and nobody has looked since
        self._timer: Timer | None = None
        self._timer_at = inf

    # --- what the producer tells ---

    @property
    def connections(self) -> tuple[Carrier, ...]:
        """All that are up."""
        return tuple(self._up.values())

    @property
    def waiting_topics(self) -> Iterable[str]:
        """Topics for which something waits until more is known."""
        yield from dict.fromkeys(publish.topic for publish in self._parked)
        yield from self._unresolved
        yield from dict.fromkeys(lane.topic for lane in self._lanes.values() if lane.is_stuck)

    @property
    def is_anything_waiting(self) -> bool:
        """Whether something waits until more is known, or connected."""
        return bool(self._parked or self._unresolved) or any(lane.is_stuck for lane in self._lanes.values())

    def join(self, connection: Carrier) -> None:
        """Use a new connection."""
        self._up[connection.address] = connection
        self._turns.clear()
        self._dispatch_waiting()

    def leave(self, connection: Carrier, error: FlintError) -> None:
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
            now = self._timers.time()
            self._register(publish, now)
            self._dispatch(publish, will_flush, now)
        else:
            self._dispatch_in_order(publish)

    def _register(self, publish: Publish, now: float) -> None:
        """Look again at the deadline, and once before: a stuck nsqd should not use up all the time there is."""
        self.unfinished[publish] = None
        publish.look_at = when = now + (publish.deadline - now) / 2
        if when < self._timer_at:
            self._set_timer(when)

    def forsaken(self) -> None:
        """Somebody waits no more: what nobody waits for, and was not sent, ends in the next turn.

        While no nsqd is up nothing else looks at it, and it would take room, and hold up the end, until its deadline.
        """
        if not self._is_forsaken:
            self._is_forsaken = True
            self._timers.call_later(0, self._end_forsaken)

    def _end_forsaken(self) -> None:
        self._is_forsaken = False
        for publish in [*self.unfinished]:
            is_sent = publish.connection is not None or publish.is_unknown
            if not is_sent and publish.waiters and all(waiter.done() for waiter in publish.waiters):
                self._end(publish)

    def when_idle(self, idle: Callable[[], object]) -> None:
        """Have ``idle`` called when everything has ended; at once if it has."""
        if self.unfinished:
            self._idle = idle
        else:
            idle()

    def close(self) -> None:
        """End whatever has not ended, and all connections."""
        if self._timer is not None:
            self._timer.cancel()
        for connection in [*self._up.values()]:
            connection.close()
        for publish in [*self.unfinished]:
            if not publish.is_done:
                detail = "the producer was closed before nsqd answered"
                self._fail(publish, Failure("CLOSED", detail, retryable=False))

    # --- sending ---

    def _set_timer(self, when: float) -> None:
        """One timer serves all: most publishes have ended long before anybody looks, and a timer each would cost."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        self._timer = self._timers.call_at(when, self._look)

    def _look(self) -> None:
        """Look at those whose time has come."""
        self._timer, self._timer_at = None, inf
        now = self._timers.time()
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
        if self._rules.leaves_early(publish, partial(self._has_choice, publish, connection)):
            then = "another nsqd is tried" if publish.writer is None else "it is tried again"
            self._abort_stalled(connection, f"; {then}")

    def _abort_stalled(self, connection: Carrier, then: str = "") -> None:
        """Give up a connection that answers nothing for long."""
        way = self._on_the_way.get(connection)
        if way is None or not way.count:
            return
        silent_s = self._timers.time() - way.since
        if silent_s >= self._policy.stalled_s:
            connection.abort(f"a publish was not answered for {silent_s:.3g} s{then}")

    def _has_choice(self, publish: Publish, connection: Carrier) -> bool:
        """Whether a publish could be sent somewhere else than where it waits for an answer."""
        lane = self._lane_of(publish)
        if lane is None:
            return len(self._turns_of(publish.topic).places) > 1
        return self._routes.leader(lane.topic, lane.partition) not in (None, connection.address)

    def _dispatch(self, publish: Publish, will_flush: bool = False, now: float | None = None) -> None:
        """Send a publish, or park it until an nsqd is up."""
        if publish.is_done:
            return
        if not publish.drop_cancelled():
            self._end(publish)
            return
        if (publish.needs_partition or publish.defer_ms is not None) and self._fail_impossible(publish):
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
            is_first = not self._parked
            self._parked[publish] = None
            if self._fail_refused(publish):
                return
            if is_first:
                self._hasten()
            if not self._routes.knows(publish.topic):
                self._look_up(publish.topic)
            return
        self._send(publish, place, now)
        if will_flush:
            self._unflushed[place.connection] = None
        else:
            place.connection.flush_soon()

    def _send(self, publish: Publish, place: Place, now: float | None = None) -> None:
        if publish.context is not None:
            publish.settle_context(self._routes.is_extended(publish.topic))
        publish.sent_at = self._timers.time() if now is None else now
        connection = place.connection
        way = self._on_the_way.get(connection)
        if way is None:
            way = self._on_the_way[connection] = _OnTheWay()
        if not way.count:
            way.since = publish.sent_at
        way.count += 1
        self._stats.commands += 1
        publish.send(connection, place.partition, partial(self._answered, publish))

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
            self._timers.call_later(delay_s, self._dispatch, publish)
        else:
            self._call_soon(self._dispatch, publish)

    def _dispatch_waiting(self) -> None:
        parked, self._parked = self._parked, {}
        for publish in parked:
            self._dispatch(publish)
        for topic in [*self._short]:
            self._serve(topic)
        for lane in self._lanes.values():
            self._schedule(lane)

    def _forget_turns(self, topic: str) -> None:
        self._turns.pop(topic, None)

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
        """The only place for a publish that may be stored in the log of its writer."""
        address = self._routes.nsqd_of(writer.key.home)
        connection = None if address is None else self._up.get(address)
        return None if connection is None else Place(connection, writer.key.home.partition)

    def _writer_key(self, place: Place, topic: str, is_lane: bool = False) -> WriterKey:
        return WriterKey(self._routes.home(topic, place.partition, place.connection.address), is_lane)

    def _with_writer(self, publish: Publish, place: Place, writers: Writers) -> Place | None:
        """Take a writer of this place, or of the next that has one; None when all are in use."""
        turns = self._turns_of(publish.topic)
        for _ in turns.places:
            publish.writer = writers.take(self._writer_key(place, publish.topic))
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
        if self._rules.free_writer(publish, stored_count) and publish.topic in self._short:
            self._call_soon(self._serve, publish.topic)

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
        spots = [self._writer_key(place, topic) for place in self._turns_of(topic).places]
        return not spots or any(map(self._writers.has_free, spots))

    # --- order ---

    def _dispatch_in_order(self, publish: Publish) -> None:
        """Put a publish that keeps its order behind those that came before."""
        waiting = self._unresolved.get(publish.topic)
        if waiting is None and self._stand_in_line(publish):
            return
        if publish.is_done:
            return
        self._register(publish, self._timers.time())
        self._unresolved.setdefault(publish.topic, {})[publish] = None
        if waiting is None:
            self._look_up(publish.topic)

    def _stand_in_line(self, publish: Publish) -> bool:
        """Put a publish in the line of its partition; False while that cannot be known, or it failed for good."""
        if self._fail_impossible(publish):
            return False
        if not self._rules.place(publish):
            return False
        assert publish.partition is not None
        key = publish.topic, publish.partition
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(*key)
        if lane.push(publish, self._policy.count_max, self._policy.bytes_max):
            self._forget(publish)  # another one carries its message, and its cost
        elif publish not in self.unfinished:
            self._register(publish, self._timers.time())
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
            self._call_soon(self._advance, lane)

    def _pause_lane(self, lane: Lane, delay_s: float) -> None:
        """Look at a line again after a while."""
        if not delay_s:
            self._schedule(lane)
            return
        lane.is_paused = True
        self._timers.call_later(delay_s, self._resume, lane)

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
                    self._hasten()
                return
        if lane.is_empty:
            self._lanes.pop((lane.topic, lane.partition), None)

    def _place_in_line(self, lane: Lane, publish: Publish) -> Place | None:
        """Return where the oldest of a line goes, with a writer if it needs one."""
        if publish.writer is not None:
            return self._pinned(publish.writer)
        place = self._leader(lane)
        if place is not None and self._writers is not None:
            publish.writer = self._writers.take(self._writer_key(place, lane.topic, is_lane=True))
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
            way.since = self._timers.time()
        if publish.is_in_line and (lane := self._lane_of(publish)) is not None and lane.current is publish:
            lane.current = None
            self._schedule(lane)
        if publish.is_done:  # its call ended at its deadline
            self._admission.release(publish.cost)
            return
        if outcome == b"OK" and publish.trace_ids is None:
            self._stats.published += len(publish.bodies)
            if publish.writer is not None:
                self._free_writer(publish, len(publish.bodies))
            publish.succeed()
            self._end(publish)
            return
        address = connection.address if connection else ""
        if isinstance(outcome, bytes):
            self._stored(publish, outcome, address)
            return
        if isinstance(outcome, NsqdError):
            verdict = self._rules.refused(publish, outcome, address, self._timers.time())
        else:
            verdict = self._rules.unanswered(publish, outcome)
        self._carry_out(publish, verdict)

    def _stored(self, publish: Publish, answer: bytes, address: str) -> None:
        try:
            stored = publish.read_answer(answer)
        except RemoteProtocolError as error:
            self._fail(publish, self._rules.senseless(publish, error, address))
            return
        self._stats.published += len(publish.bodies)
        if publish.writer is not None:
            self._free_writer(publish, len(publish.bodies))
        if publish.trace_ids is not None and self._is_traced(publish.topic):
            trace.published(publish.topic, address, publish.partition, stored, publish.trace_ids)
        publish.succeed(address, stored)
        self._end(publish)

    def _carry_out(self, publish: Publish, verdict: Verdict) -> None:
        if isinstance(verdict, Split):
            self._free_writer(publish)
            self._split(publish)
            return
        if not publish.is_unknown:
            self._free_writer(publish)
        if isinstance(verdict, Failure):
            self._fail(publish, verdict)
            return
        if verdict.refreshes:
            self._look_up(publish.topic)
        self._redispatch(publish, verdict.delay_s)

    def _fail_impossible(self, publish: Publish) -> bool:
        """Fail a publish that its topic will never take; False when there is hope."""
        if failure := self._rules.impossible(publish):
            self._fail(publish, failure)
        return publish.is_done

    def _fail_refused(self, publish: Publish) -> bool:
        """Fail a publish that no nsqd of its topic will ever take; False when there is hope."""
        failure = self._rules.refused_by_all(publish)
        if failure is None:
            return False
        self._fail(publish, failure)
        return True

    def _split(self, publish: Publish) -> None:
        """One message of a gathered MPUB is bad: send each alone, so that only the bad one fails."""
        publish.drop_cancelled()
        parts = publish.split()
        now = self._timers.time()
        for part in parts:
            self._register(part, now)
            part.error = publish.error
            publish.cost -= part.cost
        if (lane := self._lane_of(publish)) is None:
            for part in parts:
                self._redispatch(part)
        else:
            self._stats.retries += len(parts)
            lane.put_back(*parts)
            self._schedule(lane)
        self._end(publish)

    def _expire(self, publish: Publish) -> None:
        """The deadline has come."""
        connection = publish.connection
        if connection is None:
            lane = self._lane_of(publish)
            is_behind = lane is not None and lane.current is not None
            self._fail(publish, self._rules.unsent(publish, is_behind, self.last_error, self._up))
            return
        waited_s = self._timers.time() - publish.sent_at
        self._fail(publish, self._rules.late(publish, connection.address, waited_s))
        self._abort_stalled(connection)

    def _fail(self, publish: Publish, failure: Failure) -> None:
        self._tell(publish, failure)
        followers = self._followers(publish)
        self._end(publish)
        for follower in followers:
            follower.error = follower.error or publish.error
            self._tell(follower, self._rules.overtaken(follower, failure.code))
            self._end(follower)

    def _tell(self, publish: Publish, failure: Failure) -> None:
        self._stats.failed += len(publish.bodies)
        publish.fail(failure)

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
        if publish.writer is not None:
            self._free_writer(publish)
        if publish.is_in_line and (lane := self._lane_of(publish)) is not None:
            lane.remove(publish)
            self._schedule(lane)
        if publish.connection is None:
            self._admission.release(publish.cost)

    def _forget(self, publish: Publish) -> None:
        """Let go of a publish that has ended, or that another one carries."""
        publish.is_done = True
        self.unfinished.pop(publish, None)
        self._parked.pop(publish, None)
        if self._short and (queue := self._short.get(publish.topic)) is not None:
            queue.pop(publish, None)
        if publish.keys is not None and (waiting := self._unresolved.get(publish.topic)) is not None:
            waiting.pop(publish, None)
            if not waiting:
                del self._unresolved[publish.topic]
        if self._idle is not None and not self.unfinished:
            idle, self._idle = self._idle, None
            idle()
