"""A partition that this node leads: what is committed, who is in sync, and what has to change in the store.

Invariants:

- L1: the watermark never goes back. It is None until every in-sync member has, in this epoch, acknowledged the log as
  it was when this node was elected: what stands behind the last known watermark may have been acknowledged or not.
- L2: below the watermark every in-sync member has everything; while a change of the in-sync set is under way, or may
  be, the members before and after it. A member that is silent or late holds it until the store has it out of the set.
- L3: with fewer members than the topic demands nothing is acknowledged: the watermark stays, new publishes are refused.
- L4: who joins has all that is committed, and all progress that somebody was told is safe, when the store is asked.
  Whoever is about to holds the watermark for a moment: else, where messages come more often than acknowledgements,
  there is always something that it lacks, and it never joins.
- L5: a leader that has ended, because it was told of a later one, moves nothing any more.
- L6: who cannot reach as many as the topic demands, where others live that could go on without it, has the partition
  led by them: it leaves the in-sync set, of which it has all and they as well, and acts on nothing from when the store
  is asked. What it does not reach and does not live is nobody who could. A member that answers and acknowledges nothing
  is not waited for where another one lives that is not reached: that one may have it acknowledge.
- L7: what every in-sync member keeps of how far a channel in order is, before what is behind that is delivered, whoever
  leads later knows.
- L8: who fell out of the in-sync set again and again, and had publishers wait for it or left by itself because it is
  unfit, is taken in again only when it has been steady for a while (:mod:`flintmq.cluster.steadiness`); at once where
  without it there are fewer members than the topic demands, or not more than half of the copies.

Rules of this file: no IO and no clock; one object for an epoch of a partition; nothing is done for single messages.
Whoever owns it asks again what it wants (:meth:`Leading.wanted_state`) when it says that it has changed.

Source: docs/decisions/0017; Kafka's in-sync replicas for what "behind" means.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from flintmq.cluster.history import LogShape
from flintmq.cluster.state import LAG_NS_MAX, LEASE_TTL_S, Member, PartitionState, joined, renounced, without
from flintmq.cluster.steadiness import Steadiness
from flintmq.errors import FlintError

SLOW_NS_MAX = 2 * LAG_NS_MAX
"""Behind for so long and heard of, a replica is slow; before, it may be that nothing will be heard of it either."""
HEARD_NS = 1_000_000_000
"""Heard of within so long, a follower is reached: twice what lies between two pings."""
MARK_NS = 250_000_000
"""Between two moments as of which it is known whether a member had caught up."""
JOIN_NS = 1_000_000_000
"""So long the watermark is held at most for somebody who is about to join."""
JOIN_AGAIN_NS = 5_000_000_000
"""From the beginning of that until it is held for the same one again."""
STALL_NS = 1_000_000_000
"""Ticks that are further apart say that this node stood still, and nothing about others."""
CONFIRMED_MARGIN_NS = 300_000_000
"""A leader that acts by confirmations stops so much earlier than they run out."""
PROGRESS_BYTES_MAX = 32 * 1024 * 1024
"""Of records of one partition that are kept for followers; who is further behind gets the whole state."""
PROGRESS_TOTAL_MAX = 64 * 1024 * 1024
"""Of records of all partitions of a node."""
PROGRESS_COUNT_MAX = 1024
ALL_FLOORS = 1 << 62
"""Stands for the number of whatever floors there will be, of a follower that knows of none."""
_LEASE_NS = LEASE_TTL_S * 1_000_000_000


class LeadingEnded(FlintError):
    """This node leads the partition no longer; what was asked may have happened or not.

    Args:
        topic: of the partition.
        number: of the partition.
        epoch: in which it led.
    """

    def __init__(self, topic: str, number: int, epoch: int) -> None:
        super().__init__(topic, number, epoch)
        self.topic = topic
        self.number = number
        self.epoch = epoch

    def __str__(self) -> str:
        return f"this node leads partition {self.number} of topic {self.topic} no longer (epoch {self.epoch} is over)"


class NotInLog(FlintError):
    """A sequence is not there to be read: it was dropped, or no batch begins there."""


Done = Callable[[Exception | None], None]
StateDone = Callable[["WholeState | None"], None]
MoreDone = Callable[[list[bytes] | None], None]
CanGoOn = Callable[[PartitionState, Collection[str], int], bool]


class WholeState:
    """All records of a partition, as of one flush.

    Args:
        number: of that flush, as :meth:`Leading.progress` gave it; 0 for the state at the election.
        needs: end that a log has at least for it.
        parts: the records, divided; each is sent as it is.
        more: reads further parts, a few at a time, and calls back with them, at once or later; with none: there are no
            more; with None: they cannot be read. None: ``parts`` are all there are.
        close: lets go of what they are read from.
    """

    __slots__ = ("_close", "more", "needs", "number", "parts")

    def __init__(
        self,
        number: int,
        needs: int,
        parts: Iterable[bytes],
        more: Callable[[MoreDone], None] | None = None,
        close: Callable[[], None] | None = None,
    ) -> None:
        self.number = number
        self.needs = needs
        self.parts = deque(parts)
        self.more = more
        self._close = close

    def close(self) -> None:
        """Let go of it; nothing more of it is wanted."""
        close, self._close, self.more = self._close, None, None
        if close is not None:
            close()


class Kept:
    """The records that the partitions of a node keep for followers, all together.

    Attributes:
        size_bytes: of them.
    """

    __slots__ = ("bytes_max", "size_bytes")

    def __init__(self, bytes_max: int = PROGRESS_TOTAL_MAX) -> None:
        self.bytes_max = bytes_max
        self.size_bytes = 0


class LeaderLog(Protocol):
    """The log and the state of a led partition, which somebody else keeps."""

    def shape(self) -> LogShape:
        """Return the log's history, start and end."""
        ...

    def read(self, sequence: int, bytes_max: int) -> tuple[bytes | memoryview, int, int]:
        """Return whole batches from the one that begins at ``sequence``, or behind it if the log has a gap there, where
        they end, and how many messages the gap has: at least one batch, no more of them than fit into ``bytes_max``,
        and none behind another gap.

        Raises:
            NotInLog: the log begins behind ``sequence``, or it is inside a batch.
            StorageError: it cannot be read.
        """
        ...

    def whole_state(self, done: StateDone) -> None:
        """Gather the state of the partition, and call ``done`` with it, at once or later; None: that is not possible
        now, ask again later.
        """
        ...


class OpenStream(Protocol):
    """A connection's part in one partition, see :mod:`flintmq.cluster.link`."""

    @property
    def confirmed_ns(self) -> int | None:
        """Time at which the last ping was sent that the follower answered, on this stream; None: none was."""
        ...

    @property
    def heard_ns(self) -> int:
        """Time at which something was heard of the follower."""
        ...

    @property
    def sent(self) -> int:
        """The end up to which it was sent the log; -1 before it is known where to begin."""
        ...

    @property
    def state_number(self) -> int | None:
        """The number of the whole state that it is being sent; None: it is not."""
        ...

    def wake(self) -> None:
        """There is more to be sent."""
        ...

    def wake_watermark(self) -> None:
        """The watermark has moved."""
        ...

    def wake_floors(self) -> None:
        """There are more floors to be told."""
        ...


class Follower:
    """Another node's copy, as its leader knows it.

    Attributes:
        node: its id.
        member: its entry in an in-sync set, of the process that is connected, or was last; None before one was, and
            when another process has taken its place.
        acked: end up to which it has the log, acknowledged in this epoch; -1: not known yet.
        progress: number of the progress that it has stored in this epoch; -1: none, it needs the whole state.
        floors: number of the floors of channels in order that it keeps; -1: not known yet.
        is_silent: nothing was heard of it for too long, or it is known to take nothing.
        is_unreached: for so long that it would not be among the living any more if it were dead.
        is_gone: for so long that it would be among the living again if it had only stood still; or nobody listens where
            it did.
        is_dead: nobody listens where it did, or the store does not count it among the living.
        why_silent: why it takes nothing, as it said; empty: it did not.
        is_late: it was behind for too long.
        is_slow: for so long that it would be silent by now if it were not reached, and it was heard of just now.
        has_lost: it lacks what it had when it was in sync.
        is_ending: its process ends in a moment.
        stream: where it is connected.
    """

    __slots__ = (
        "acked",
        "caught_ns",
        "floors",
        "has_lost",
        "hold_again_ns",
        "is_dead",
        "is_ending",
        "is_gone",
        "is_late",
        "is_silent",
        "is_slow",
        "is_unreached",
        "marks",
        "member",
        "node",
        "progress",
        "steady_ns",
        "stream",
        "why_silent",
    )

    def __init__(self, node: str) -> None:
        self.node = node
        self.member: Member | None = None
        self.acked = -1
        self.progress = -1
        self.floors = -1
        self.is_silent = False
        self.is_unreached = False
        self.is_gone = False
        self.is_dead = False
        self.why_silent = ""
        self.is_late = False
        self.is_slow = False
        self.has_lost = False
        self.is_ending = False
        self.stream: OpenStream | None = None
        self.hold_again_ns = 0
        """The watermark is not held for it before."""
        self.steady_ns: int | None = None
        """Since when it answers and keeps up, on this connection; None: it does not."""
        self.caught_ns = 0
        """Everything as of then it has; counts only while there are marks."""
        self.marks: deque[tuple[int, int, int, int]] = deque()
        """Moments with what there was then: time, end, number of progress and of floors. Empty while it has
        everything."""


class Leading:
    """One epoch of a partition, at its leader.

    Args:
        topic, number: of the partition.
        node: id of this node.
        state: as it is in the store; it names this process as the leader.
        revision: at which the state was written last.
        log: to be read.
        end: of the log, when this node was elected.
        base: position of the progress that this node had then.
        min_in_sync: with fewer members nothing is acknowledged.
        needs_sync: this node's own copy counts as far as it is synced.
        can_go_on: tells whether somebody can be elected from a state without a leader, and so many nodes with a copy
            live, as far as the store knows; without those nodes that are not to be counted on whatever it knows.
        kept: counts the records that are kept, with those of other partitions.
        steadiness: knows which nodes fell out of in-sync sets lately, also of other partitions.
        is_registered: tells whether the process that is connected as a node is the one that the store has: only that
            joins.
        on_change: is called when the watermark, :attr:`is_writable`, the end of it, or what it wants of the store may
            have changed. It must not call back; note it, and look when the turn ends.

    Attributes:
        epoch: of it.
        state: as the store has it.
        watermark: everything below is committed; None: not known yet.
        followers: the other nodes that hold the partition, by id.
        progress_number: of the records that were handed over last; 0: none yet.
        floor_number: of the floor of a channel in order that was told last; 0: none yet.
        superseded_by: the epoch that ended it, 0 when only the store says so.
    """

    def __init__(
        self,
        topic: str,
        number: int,
        node: str,
        state: PartitionState,
        revision: int,
        log: LeaderLog,
        *,
        end: int,
        base: tuple[int, int] = (0, 0),
        min_in_sync: int = 1,
        needs_sync: bool = False,
        can_go_on: CanGoOn = lambda _state, _away, _least: False,
        kept: Kept | None = None,
        steadiness: Steadiness | None = None,
        is_registered: Callable[[str], bool] = lambda _node: True,
        on_change: Callable[[Leading], None] = lambda leading: None,
    ) -> None:
        if state.leader != node or node not in state.in_sync_nodes:
            raise ValueError(f"node {node} does not lead {topic}/{number} in epoch {state.epoch}")
        self.topic = topic
        self.number = number
        self.node = node
        self.epoch = state.epoch
        self.state = state
        self.log = log
        self.base = base
        self.watermark: int | None = None
        self.followers: dict[str, Follower] = {}
        self.progress_number = 0
        self.floor_number = 0
        self.superseded_by = 0
        self.is_ended = False
        self._incarnation = state.incarnation
        self._revision = revision
        self._min_in_sync = min_in_sync
        self._needs_sync = needs_sync
        self._can_go_on = can_go_on
        self._kept = Kept() if kept is None else kept
        self._steadiness = Steadiness() if steadiness is None else steadiness
        self._is_registered = is_registered
        self._on_change = on_change
        self._promoted_end = end
        self._written = end
        self._synced = 0 if needs_sync else end
        self._pending: PartitionState | None = None
        self._is_swapping = False
        self._is_doubtful = False
        self._member_count = 0
        self._watched: tuple[Follower, ...] = ()
        """The other members of the in-sync set; while it is being changed, of both."""
        self._members: dict[str, set[Member]] = {}
        self._joining: dict[Follower, int] = {}
        """Followers that are about to become members, and until when the watermark is held for them."""
        self._replicated_number = 0
        self._waiting: deque[tuple[int, Done]] = deque()
        self._floors: dict[str, tuple[int, int]] = {}  # by channel: number and floor, in the order of the numbers
        self._floors_replicated = 0
        self._floors_waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._entries: deque[tuple[int, bytes]] = deque()  # needs and records, of the last numbers
        self._entries_bytes = 0
        self._read: tuple[int, bytes | memoryview, int, int] | None = None
        self._last_tick_ns: int | None = None
        self._adopt_members()
        self._advance()

    # --- what is so

    @property
    def revision(self) -> int:
        """Revision at which :attr:`state` was written: a change of it is compared with that."""
        return self._revision

    @property
    def end(self) -> int:
        """The end of the log."""
        return self._written

    @property
    def is_writable(self) -> bool:
        """Whether a publish may be taken: it can be acknowledged by enough members."""
        return not self.is_ended and not self.gives_up and self._has_enough() and not self._is_short()

    @property
    def gives_up(self) -> bool:
        """Whether the store is being asked to have others lead, or was and may have done so: nothing may be
        acknowledged or delivered.
        """
        return self._pending is not None and not self._pending.leader

    @property
    def is_level(self) -> bool:
        """Whether every in-sync member has everything, and nobody is about to join: there is nothing to watch."""
        if self._joining or not all(map(self._is_level, self._watched)):
            return False
        # who waits to be taken in is told by the time
        is_whole = len(self._watched) == len(self.followers)
        return is_whole or all(each.stream is None or not self.steady_wait_ns(each) for each in self._others())

    def _others(self) -> list[Follower]:
        return [each for node, each in self.followers.items() if node not in self._members]

    def steady_wait_ns(self, follower: Follower) -> int:
        """Return for how long a follower has to have been steady before it is a member again; 0: it need not."""
        wait_ns = self._steadiness.wait_ns(follower.node)
        if not wait_ns or follower.node in self._members:
            return 0
        count = len(self.state.in_sync)
        is_needed = count < self._min_in_sync or 2 * count <= len(self.state.replicas)
        return 0 if is_needed else wait_ns

    def _is_steady(self, follower: Follower) -> bool:
        wait_ns = self.steady_wait_ns(follower)
        if not wait_ns:
            return True
        return follower.steady_ns is not None and self._steadiness.now_ns - follower.steady_ns >= wait_ns

    @property
    def oldest_needed(self) -> int:
        """The sequence from which on somebody who is connected still has to be sent the log."""
        sent = [each.stream.sent for each in self.followers.values() if each.stream is not None]
        return min((each for each in sent if each >= 0), default=self._written)

    def is_confirmed(self, now_ns: int, margin_ns: int = CONFIRMED_MARGIN_NS) -> bool:
        """Whether every in-sync member has confirmed this epoch so lately that none of them can deliver: what a
        leader may act on that cannot reach the store.
        """
        until_ns = self.confirmed_until_ns(margin_ns)
        return until_ns is None or now_ns < until_ns

    def confirmed_until_ns(self, margin_ns: int = CONFIRMED_MARGIN_NS) -> int | None:
        """Return until when :meth:`is_confirmed` holds if nothing more is confirmed, and nobody else becomes a member.

        0: it does not hold; None: nobody has to confirm anything.
        """
        if self.is_ended:
            return 0
        oldest_ns: int | None = None
        for follower in self._watched:
            confirmed_ns = None if follower.stream is None else follower.stream.confirmed_ns
            if confirmed_ns is None:
                return 0
            if oldest_ns is None or confirmed_ns < oldest_ns:
                oldest_ns = confirmed_ns
        return None if oldest_ns is None else oldest_ns + _LEASE_NS - margin_ns

    def wanted_state(self) -> PartitionState | None:
        """Return what should be written to the store in place of :attr:`state`; None: nothing.

        Call :meth:`swap_began` in the same turn if it is going to be.
        """
        if self.is_ended or self._is_swapping:
            return None
        if self._pending is not None:
            return self._pending  # its outcome has to be known before anything else is asked
        state = self.state
        out = self._out()
        if out:
            left = without(state, out)
            if len(left.in_sync) >= self._min_in_sync:
                return left
            given_up = self._given_up()
            if given_up is not None:
                if not self._reaches_enough():
                    return given_up if self._is_cut_off() else None
                # who is heard of still may be cut off as well; then it is silent before the others count as unreached
                return left if all(map(self._is_clear, self._watched)) else None
            if self._are_settled(out):
                return left
            # with these members gone nobody else could ever lead, so who may only have stood still is waited for
        members = {member.node: member for member in state.in_sync}
        for node, follower in self.followers.items():
            if follower.member is not None and follower.member != members.get(node) and self._may_join(follower):
                state = joined(state, follower.member)
        return None if state is self.state else state

    def _out(self) -> list[str]:
        """Return the members that are not to be members any longer."""
        nodes = self.state.in_sync_nodes
        return [node for node in nodes if node != self.node and self._must_leave(self.followers[node])]

    def _is_short(self) -> bool:
        """Whether members are waited for that may only have stood still, and there are too few others."""
        if not any(each.is_silent for each in self._watched):
            return False
        out = self._out()
        if len(self.state.in_sync) - len(out) >= self._min_in_sync or self._are_settled(out):
            return False
        return self._given_up() is None

    def _reaches_enough(self) -> bool:
        """Whether this node could acknowledge presently, as far as is known."""
        is_severed = self._is_severed()
        reached = [each for each in self.followers.values() if self._is_reached(each, is_severed)]
        return 1 + len(reached) >= self._min_in_sync

    def _given_up(self) -> PartitionState | None:
        """Return the state from which others lead; None: none of them could acknowledge."""
        followers = self.followers
        lacking = [node for node in self.state.in_sync_nodes if node != self.node and not self._is_whole(node)]
        state = renounced(without(self.state, lacking), self.node)
        dead = {each.node for each in followers.values() if each.is_dead or each.why_silent}
        if state is None or not self._can_go_on(state, {*dead, self.node}, self._min_in_sync):
            return None
        return state

    def _is_reached(self, follower: Follower, is_severed: bool) -> bool:
        if follower.is_silent or follower.is_ending or follower.node not in self.state.holders:
            return False
        return not follower.is_late or (follower.is_slow and not is_severed)

    def _is_severed(self) -> bool:
        """Whether a member is not reached that lives and may lead."""
        return any(each.is_unreached and self._is_whole(each.node) for each in self._watched)

    def _is_whole(self, node: str) -> bool:
        """Whether a member may lead, as far as is known here: it need not be reached for that."""
        follower = self.followers[node]
        if follower.has_lost or follower.is_dead or follower.why_silent or follower.is_ending:
            return False
        return node in self.state.holders

    def _is_cut_off(self) -> bool:
        """Whether it is known of everybody who answers nothing that it is not reached, and not merely dead or slow."""
        if not all(map(self._is_clear, self._watched)):
            return False
        return self._is_severed() or all(
            each.is_slow or not each.is_late for each in self._watched if not each.is_silent
        )

    def _is_clear(self, follower: Follower) -> bool:
        """Whether a member that answers nothing is known to be dead, or would not count as living if it were."""
        is_known = follower.is_unreached or follower.is_dead or bool(follower.why_silent)
        return is_known or not follower.is_silent

    def _are_settled(self, nodes: Iterable[str]) -> bool:
        return all(self._is_settled(self.followers[node]) for node in nodes)

    def _is_settled(self, follower: Follower) -> bool:
        """Whether a member is not one that answers nothing and may only have stood still."""
        is_known = follower.is_gone or bool(follower.why_silent) or follower.is_ending
        return is_known or follower.has_lost or not follower.is_silent or follower.node not in self.state.holders

    def _must_leave(self, follower: Follower) -> bool:
        has_left = follower.node not in self.state.holders
        return follower.is_silent or follower.is_late or follower.has_lost or follower.is_ending or has_left

    def _may_join(self, follower: Follower) -> bool:
        if follower.is_silent or follower.is_ending or follower.stream is None:
            return False
        if follower.node not in self.state.holders or not self._is_steady(follower):
            return False
        if not self._is_registered(follower.node):
            return False
        mark = self._promoted_end if self.watermark is None else self.watermark
        is_there = follower.acked >= mark and follower.progress >= self._replicated_number
        return is_there and follower.floors >= self._floors_replicated

    # --- the store

    def state_changed(self, state: PartitionState, revision: int) -> None:
        """Take note of the state in the store, whoever wrote it.

        Args:
            revision: at which it was written; one that is not later than what is known changes nothing.
        """
        if revision <= self._revision or self.is_ended:
            return
        self._revision = revision
        is_ours = state == self._pending
        self._drop_pending()  # it was compared with what is no more: if it was not carried out, it never will be
        if state.epoch != self.epoch or not state.is_led_by(self.node, self._incarnation):
            self.ended(state.epoch if state.epoch > self.epoch else 0)
            return
        before, self.state = self.state, state
        self._note_falls(before, is_ours)
        self._adopt_members()
        self._changed()

    def _note_falls(self, before: PartitionState, is_ours: bool) -> None:
        """Note who is out of the in-sync set, where publishers waited for that or it left by itself, and who is in.

        Args:
            is_ours: the change is one that was wanted here.
        """
        now = self.state.in_sync_nodes
        for node in before.in_sync_nodes:
            follower = self.followers.get(node)
            if node in now or follower is None or follower.is_ending or node not in self.state.holders:
                continue
            is_known = follower.is_dead or bool(follower.why_silent)  # it was not waited for
            left_by_itself = not is_ours and not (follower.is_dead or follower.has_lost)  # its disk or its copy is bad
            if follower.is_late or left_by_itself or (follower.is_silent and not is_known):
                self._steadiness.fell(node)
        for node in now:
            if node not in before.in_sync_nodes:
                self._steadiness.joined(node)

    def swap_began(self, state: PartitionState) -> None:
        """The store is being asked for a state that was wanted.

        Raises:
            ValueError: it is not wanted, or not any more.
        """
        if state != self.wanted_state():
            raise ValueError(f"{self.topic}/{self.number}: this state is not wanted (any more); ask again")
        self._pending = state
        self._is_swapping = True
        self._adopt_members()

    def swap_ended(self, state: PartitionState | None, revision: int = 0) -> None:
        """The store has answered, or not.

        Args:
            state: what is in the store now, whether that was written or something else; None: nobody knows, it may
                have been carried out and may still be.
            revision: at which ``state`` was written.
        """
        self._is_swapping = False
        if state is not None:
            self.state_changed(state, revision)
        else:
            self._is_doubtful = self._pending is not None
        self._changed()

    def swap_not_sent(self) -> None:
        """The store was not asked this time: it could not be reached, or it refused without looking."""
        self._is_swapping = False
        if not self._is_doubtful:  # else it was asked before, and may still do it
            self._drop_pending()
            self._adopt_members()
        self._changed()

    def swap_refused(self) -> None:
        """The store has the state as it was: something else that the change depends on holds no more, so it was not
        carried out, and never will be.
        """
        self._is_swapping = False
        self._drop_pending()
        self._adopt_members()
        self._changed()

    def _drop_pending(self) -> None:
        self._pending = None
        self._is_doubtful = False

    def min_in_sync_changed(self, min_in_sync: int) -> None:
        """The topic demands another number of members."""
        self._min_in_sync = min_in_sync
        self._changed()

    def ended(self, epoch: int = 0) -> None:
        """Stop: there is a later leader, or none.

        Args:
            epoch: of the later one, as far as it is known.
        """
        self.superseded_by = max(self.superseded_by, epoch)
        if self.is_ended:
            return
        self.is_ended = True
        waiting, self._waiting = self._waiting, deque()
        self._floors_waiting.clear()  # what waits for them is delivered elsewhere
        self._read = None
        self._joining.clear()
        self._forget_entries()
        for _, done in waiting:
            done(LeadingEnded(self.topic, self.number, self.epoch))
        self._on_change(self)

    def _adopt_members(self) -> None:
        sets = [self.state.in_sync] if self._pending is None else [self.state.in_sync, self._pending.in_sync]
        members: dict[str, set[Member]] = {}
        for member in (member for members in sets for member in members):
            members.setdefault(member.node, set()).add(member)
        followers = self.followers
        nodes = dict.fromkeys([*self.state.holders, *members])
        nodes.pop(self.node, None)
        for node in nodes:
            if node not in followers:
                followers[node] = Follower(node)
        for node in [node for node in followers if node not in nodes]:
            del followers[node]
        for node, follower in followers.items():
            if node not in members:
                follower.is_late = follower.is_slow = follower.has_lost = False
                follower.marks.clear()
        for follower in [each for each in self._joining if each.node in members or each.node not in followers]:
            del self._joining[follower]
        self._members = members
        self._member_count = min(map(len, sets))
        self._watched = tuple(followers[node] for node in members if node != self.node)

    # --- the log

    def written(self, end: int) -> None:
        """This node has written its log up to ``end``."""
        if self.is_ended:
            return
        self._written = end
        for follower in self.followers.values():
            if follower.stream is not None:
                follower.stream.wake()
        if not self._needs_sync:
            self._synced = end
            self._changed()

    def synced(self, end: int) -> None:
        """This node has synced its log up to ``end``."""
        if end > self._synced:
            self._synced = end
            self._changed()

    def opened(self, node: str, member: Member, stream: OpenStream) -> None:
        """A follower is connected and about to say how far it is.

        Args:
            member: its process, as it is in sync.
        """
        follower = self.followers[node]
        self._joining.pop(follower, None)
        follower.stream = stream
        follower.member = member
        follower.acked = follower.progress = follower.floors = -1
        follower.has_lost = False
        follower.steady_ns = None

    def closed(self, node: str, stream: OpenStream) -> None:
        """A follower is not connected there any more; what it acknowledged it still has."""
        follower = self.followers.get(node)
        if follower is not None and follower.stream is stream:
            follower.stream = None
            follower.steady_ns = None
            if self._joining.pop(follower, None) is not None:
                self._changed()
            self._trim_entries()

    def replaced(self, node: str) -> None:
        """Another process is the node from now on: what the one before acknowledged, that one may not have. Nothing is
        committed that it has to have before it has said how far it is.
        """
        follower = self.followers.get(node)
        if follower is not None and follower.member is not None:
            follower.member = None
            self._joining.pop(follower, None)
            self._changed()

    def acked(self, node: str, end: int, now_ns: int) -> None:
        """A follower has the log up to ``end`` (synced, where it does that)."""
        follower = self.followers.get(node)
        if follower is None or self.is_ended:
            return
        if end < follower.acked:
            raise ValueError(f"node {node} acknowledged {end} after {follower.acked}")
        is_first = follower.acked < 0
        follower.acked = end
        if is_first and node in self.state.in_sync_nodes and self.watermark is not None and end < self.watermark:
            follower.has_lost = True  # it must not be elected: what it lacks was acknowledged
        self._catch_up(follower, now_ns)
        self._look_who_joins(follower, now_ns)
        self._changed()

    def progress_acked(self, node: str, number: int, now_ns: int) -> None:
        """A follower has stored the progress up to a number."""
        follower = self.followers.get(node)
        if follower is None or self.is_ended:
            return
        if number > self.progress_number:
            raise ValueError(f"node {node} acknowledged progress {number} of {self.progress_number}")
        follower.progress = max(follower.progress, number)
        self._catch_up(follower, now_ns)
        self._look_who_joins(follower, now_ns)
        self._trim_entries()
        self._changed()

    def floors_acked(self, node: str, number: int, now_ns: int) -> None:
        """A follower keeps the floors up to a number."""
        follower = self.followers.get(node)
        if follower is None or self.is_ended:
            return
        follower.floors = max(follower.floors, number)
        self._catch_up(follower, now_ns)
        self._look_who_joins(follower, now_ns)
        self._changed()

    def silent(self, node: str, why: str = "", is_dead: bool = False) -> None:
        """Nothing was heard of a follower for ``LAG_NS_MAX``, or it is known to be dead, or to take nothing.

        Args:
            why: it takes nothing, as it said.
            is_dead: it is known to be.
        """
        self._set_silent(node, True, why, is_dead)

    def unreached(self, node: str) -> None:
        """Nothing was heard of a silent follower for so long that the store knows whether it is dead."""
        follower = self.followers.get(node)
        if follower is not None and follower.is_silent and not follower.is_unreached:
            follower.is_unreached = True
            self._changed()

    def gone(self, node: str) -> None:
        """A silent follower would live again by now if it had only stood still, or it cannot have: nobody listens."""
        follower = self.followers.get(node)
        if follower is not None and follower.is_silent and not follower.is_gone:
            follower.is_gone = True
            self._changed()

    def heard(self, node: str) -> None:
        """A follower that was silent is not any more."""
        self._set_silent(node, False)

    def ends(self, node: str, is_ending: bool) -> None:
        """A follower's process ends in a moment, so it is not waited for until then; or another one has begun."""
        follower = self.followers.get(node)
        if follower is not None and follower.is_ending != is_ending:
            follower.is_ending = is_ending
            self._joining.pop(follower, None)
            self._changed()

    def _set_silent(self, node: str, is_silent: bool, why: str = "", is_dead: bool = False) -> None:
        follower = self.followers.get(node)
        if follower is not None and (follower.is_silent, follower.is_dead) != (is_silent, is_dead):
            follower.is_silent = is_silent
            follower.is_dead = is_dead
            follower.why_silent = why
            if not is_silent:
                follower.is_unreached = follower.is_gone = False
            if is_silent:
                self._joining.pop(follower, None)
                follower.steady_ns = None
            self._changed()

    def tick(self, now_ns: int) -> None:
        """Look who is behind for too long; call it a few times a second while not :attr:`is_level`."""
        last_ns, self._last_tick_ns = self._last_tick_ns, now_ns
        stall_ns = 0 if last_ns is None or now_ns - last_ns < STALL_NS else now_ns - last_ns
        is_changed = False
        for follower in self._watched:
            if stall_ns and follower.marks:
                follower.caught_ns = now_ns
                follower.marks.clear()
            self._catch_up(follower, now_ns)
            behind_ns = now_ns - follower.caught_ns if follower.marks else 0
            is_late = behind_ns >= LAG_NS_MAX
            is_heard = follower.stream is not None and now_ns - follower.stream.heard_ns < HEARD_NS
            is_slow = behind_ns >= SLOW_NS_MAX and is_heard
            if (is_late, is_slow) != (follower.is_late, follower.is_slow):
                follower.is_late, follower.is_slow = is_late, is_slow
                is_changed = True
        if len(self._watched) < len(self.followers):
            for follower in self._others():
                is_changed |= self._watch_steadiness(follower, now_ns, stall_ns > 0)
        for follower, until_ns in list(self._joining.items()):
            if stall_ns:
                self._joining[follower] = until_ns + stall_ns
            elif now_ns >= until_ns:
                del self._joining[follower]
                is_changed = True
        if is_changed:
            self._changed()

    def _watch_steadiness(self, follower: Follower, now_ns: int, is_stalled: bool) -> bool:
        """Look whether a follower keeps up that is to be taken in later; whether it may be now."""
        if not self._is_near(follower) or not self.steady_wait_ns(follower):
            return False
        if is_stalled:
            follower.marks.clear()
        self._catch_up(follower, now_ns)
        if follower.marks and now_ns - follower.caught_ns >= LAG_NS_MAX:
            follower.steady_ns = None
        elif follower.steady_ns is None:
            follower.steady_ns = now_ns
        elif self._is_steady(follower):
            self._look_who_joins(follower, now_ns)
            return True
        return False

    def _is_near(self, follower: Follower) -> bool:
        """Whether a follower was sent all that is committed, and has said how far it is."""
        stream = follower.stream
        if stream is None or follower.is_silent or follower.is_ending or self.watermark is None:
            return False
        is_sent = stream.sent >= self.watermark and stream.state_number is None
        return is_sent and min(follower.acked, follower.progress, follower.floors) >= 0

    def _look_who_joins(self, follower: Follower, now_ns: int) -> None:
        """Hold the watermark for a follower that was sent all that is committed, until it has acknowledged that."""
        if follower.node in self._members or follower in self._joining or not self._is_near(follower):
            return
        if follower.node not in self.state.holders or not self._is_steady(follower):
            return
        if not self._is_registered(follower.node):
            return
        if now_ns >= follower.hold_again_ns:
            follower.hold_again_ns = now_ns + JOIN_AGAIN_NS
            self._joining[follower] = now_ns + JOIN_NS

    def _is_level(self, follower: Follower) -> bool:
        is_there = follower.acked >= self._written and follower.progress >= self.progress_number
        return is_there and follower.floors >= self.floor_number

    def _catch_up(self, follower: Follower, now_ns: int) -> None:
        """Find out as of when a follower has everything."""
        marks = follower.marks
        if self._is_level(follower):
            marks.clear()
            follower.is_late = follower.is_slow = False
            return
        if not marks:
            follower.caught_ns = now_ns
        while (
            marks
            and follower.acked >= marks[0][1]
            and follower.progress >= marks[0][2]
            and follower.floors >= marks[0][3]
        ):
            follower.caught_ns = max(follower.caught_ns, marks.popleft()[0])
        if not marks or now_ns - marks[-1][0] >= MARK_NS:
            if len(marks) <= LAG_NS_MAX // MARK_NS:
                marks.append((now_ns, self._written, self.progress_number, self.floor_number))

    # --- what is committed

    def _has_enough(self) -> bool:
        return self._member_count >= self._min_in_sync

    def _changed(self) -> None:
        if not self.is_ended:
            self._advance()
            self._on_change(self)

    def _counts(self, follower: Follower) -> bool:
        """Whether a member is the process that is in sync: another one may have lost what that had, or may lose what
        that would have kept.
        """
        entries = self._members[follower.node]
        return follower.member is not None and len(entries) == 1 and follower.member in entries

    def _advance(self) -> None:
        end, number, floors = min(self._synced, self._written), self.progress_number, self.floor_number
        for follower in self._watched:
            end = min(end, follower.acked) if self._counts(follower) else -1
            number = min(number, follower.progress)
            floors = min(floors, follower.floors)
        for follower in self._joining:
            end, number = min(end, follower.acked), min(number, follower.progress)
            floors = min(floors, follower.floors)
        if self.watermark is None:
            if end >= self._promoted_end:
                self._move_watermark(end if self._has_enough() else self._promoted_end)
        elif end > self.watermark and self._has_enough():
            self._move_watermark(end)
        self._replicated_number = max(self._replicated_number, number)
        waiting = self._waiting
        while waiting and waiting[0][0] <= number:
            waiting.popleft()[1](None)
        self._floors_replicated = max(self._floors_replicated, floors)
        while self._floors_waiting and self._floors_waiting[0][0] <= floors:
            self._floors_waiting.popleft()[1]()

    def _move_watermark(self, watermark: int) -> None:
        self.watermark = watermark
        for follower in self.followers.values():
            if follower.stream is not None:
                follower.stream.wake_watermark()

    # --- progress

    def progress(self, records: bytes, needs: int) -> int:
        """Hand over the records of one flush, which this node has written; return their number.

        Args:
            needs: end that a log has at least for them: of what was committed then.
        """
        if self.is_ended:
            return self.progress_number
        self.progress_number += 1
        if any(follower.stream is not None for follower in self.followers.values()):
            self._entries.append((needs, records))
            self._entries_bytes += len(records)
            self._kept.size_bytes += len(records)
            while self._entries_bytes > PROGRESS_BYTES_MAX or len(self._entries) > PROGRESS_COUNT_MAX:
                self._forget_entry()
            if self._kept.size_bytes > self._kept.bytes_max:
                self._forget_entries()
        else:
            self._forget_entries()
        for follower in self.followers.values():
            if follower.stream is not None:
                follower.stream.wake()
        self._changed()
        return self.progress_number

    def when_progress_replicated(self, number: int, done: Done) -> None:
        """Call ``done(None)`` when every in-sync member has stored the progress up to a number (which may be at once),
        or with :class:`LeadingEnded`. Numbers must not descend from call to call.
        """
        if self.is_ended:
            done(LeadingEnded(self.topic, self.number, self.epoch))
            return
        self._waiting.append((number, done))
        self._advance()

    def entry(self, number: int) -> tuple[int, bytes] | None:
        """Return what the records of a number need, and these; None when they are not kept any more."""
        index = number - 1 - (self.progress_number - len(self._entries))
        return self._entries[index] if 0 <= index < len(self._entries) else None

    def next_progress(self, position: tuple[int, int]) -> int | None:
        """Return the number that follows for somebody at a position; None: nothing does, it needs the whole state."""
        epoch, number = position
        if position == self.base and position != (0, 0):
            number = 0
        elif epoch != self.epoch:
            return None
        is_kept = self.progress_number - len(self._entries) <= number <= self.progress_number
        return number + 1 if is_kept else None

    def _trim_entries(self) -> None:
        """Forget what everybody who is connected has."""
        having = [self.progress_number]
        for follower in self.followers.values():
            if follower.stream is not None and follower.progress >= 0:
                having.append(follower.progress)
            elif follower.stream is not None and follower.stream.state_number is not None:
                having.append(follower.stream.state_number)
        kept_from = min(having) + 1
        while self._entries and self.progress_number - len(self._entries) + 1 < kept_from:
            self._forget_entry()

    def _forget_entry(self) -> None:
        size = len(self._entries.popleft()[1])
        self._entries_bytes -= size
        self._kept.size_bytes -= size

    def _forget_entries(self) -> None:
        self._kept.size_bytes -= self._entries_bytes
        self._entries_bytes = 0
        self._entries.clear()

    # --- channels in order

    def keep_floor(self, channel: str, floor: int, done: Callable[[], None]) -> bool:
        """Have every member keep how far a channel in order is.

        Args:
            floor: everything below is finished; 0: what was told of the channel is not so any more.
            done: called when every in-sync member keeps it, and not now; never, when this node leads no longer.

        Returns:
            Whether every one does already: there is no other one, or none that knows of floors.
        """
        if self.is_ended:
            return False
        self.floor_number += 1
        self._floors.pop(channel, None)
        self._floors[channel] = self.floor_number, floor
        for follower in self.followers.values():
            if follower.stream is not None:
                follower.stream.wake_floors()
        if all(each.floors >= self.floor_number for each in (*self._watched, *self._joining)):
            self._floors_replicated = self.floor_number
            return True
        self._floors_waiting.append((self.floor_number, done))
        self._changed()
        return False

    def forget_floor(self, channel: str) -> None:
        """A channel is gone: its progress says so to the others."""
        self._floors.pop(channel, None)

    def floors_after(self, number: int) -> list[tuple[int, str, int]]:
        """Return the floors that were told behind a number, each with its own and its channel, in their order."""
        found: list[tuple[int, str, int]] = []
        for channel, (its_number, floor) in reversed(self._floors.items()):
            if its_number <= number:
                break
            found.append((its_number, channel, floor))
        found.reverse()
        return found

    # --- reading

    def read(self, sequence: int, bytes_max: int) -> tuple[bytes | memoryview, int, int]:
        """Read the log for a follower, as :meth:`LeaderLog.read`; for several at the same place once."""
        kept, self._read = self._read, None
        if kept is not None and kept[0] == sequence and len(kept[1]) <= bytes_max:
            found = kept
        else:
            found = (sequence, *self.log.read(sequence, bytes_max))
        here = sum(each.stream is not None and each.stream.sent == sequence for each in self.followers.values())
        if here > 1:  # the one that reads now is one of them
            self._read = found
        return found[1], found[2], found[3]

    def describe(self) -> str:
        """One line, for logs and failing tests."""
        followers = " ".join(
            f"{each.node}:{each.acked}/{each.progress}{'?' * each.is_silent}{'!' * each.is_late}"
            for each in self.followers.values()
        )
        return (
            f"Leading {self.topic}/{self.number} epoch={self.epoch} watermark={self.watermark} end={self._written} "
            f"synced={self._synced} in_sync={','.join(self.state.in_sync_nodes)} progress={self.progress_number} "
            f"{'ended ' if self.is_ended else ''}{'swapping ' if self._pending else ''}{followers}"
        )
