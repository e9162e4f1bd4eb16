"""Two controllers at once over one store, while nodes come and go, lose power, drain, change their in-sync sets, and
while operators move copies, take nodes away, and want other numbers of copies and partitions.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.unit.cluster.models import KEYS, Master, World, node

from flintmq.cluster import orders
from flintmq.cluster.controller import Refused, Swap
from flintmq.cluster.power import asks_for_ends, contested, told
from flintmq.cluster.state import Ending, NodeRecord, NoLeader, PartitionState, candidates, decode, joined, without
from flintmq.cluster.store import Span
from flintmq.topic_meta import TopicMeta

NAMES = "abcde"
TOPICS = ("t", "u")
HOSTS = {"a": "1", "b": "2", "c": "3", "d": "3", "e": "4"}
_node = st.sampled_from(NAMES)
_which = st.sampled_from((0, 1))


class ControllerMachine(RuleBasedStateMachine):
    """Nobody asks who is master here: the comparisons of revisions alone have to keep everything whole."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.masters = [Master(self.world), Master(self.world)]
        self.given_out: list[tuple[Master, Swap]] = []
        self.incarnations = dict.fromkeys(NAMES, 0)
        self.boots = dict.fromkeys(NAMES, 0)
        self.seen_revision = 1
        self.last: dict[str, PartitionState] = {}

    @initialize(partition_num=st.integers(1, 2), replica=st.integers(1, 3))
    def begins_whole(self, partition_num: int, replica: int) -> None:
        for name in NAMES:
            self.starts(name, lost_power=False)
        self.masters[0].follow()
        self.is_created("t", partition_num, replica, which=0)
        self.settles(0)
        self.follows(1)

    # --- nodes

    def _record(self, name: str, **fields: object) -> NodeRecord:
        return node(
            name,
            incarnation=f"{name}{self.incarnations[name]}",
            boot_id=f"boot {self.boots[name]}",
            syncs=name == "d",
            host_id=HOSTS[name],
            **fields,
        )

    def _live(self) -> dict[str, NodeRecord]:
        found = self.world.store.range(KEYS.nodes).found
        return {pair.key[-1]: decode(pair.key, pair.value, NodeRecord) for pair in found}

    @rule(name=_node, lost_power=st.booleans())
    def starts(self, name: str, lost_power: bool) -> None:
        self.incarnations[name] += 1
        self.boots[name] += lost_power
        self.world.node(self._record(name))

    @rule(name=_node)
    def goes(self, name: str) -> None:
        self.world.delete(KEYS.node(name))

    @rule(name=_node, is_draining=st.booleans())
    def drains(self, name: str, is_draining: bool) -> None:
        if name in self._live():
            self.world.node(self._record(name, is_draining=is_draining))

    @rule(name=_node, is_full=st.booleans())
    def has_room(self, name: str, is_full: bool) -> None:
        if name in self._live():
            self.world.node(self._record(name, is_full=is_full))

    @rule(name=_node, which=_which)
    def is_suspected(self, name: str, which: int) -> None:
        self.masters[which].controller.suspect(name, f"{name}{self.incarnations[name]}")

    @rule(name=_node, which=_which)
    def is_trusted(self, name: str, which: int) -> None:
        self.masters[which].controller.trust(name, f"{name}{self.incarnations[name]}")

    # --- leaders

    @rule(name=_node, topic=st.sampled_from(TOPICS), joins=st.booleans(), leader_alone=st.booleans())
    def changes_its_in_sync_set(self, name: str, topic: str, joins: bool, leader_alone: bool) -> None:
        """As the leader of a partition does, at once with everybody else."""
        before, live = self.world.state(topic), self._live()
        if before is None or not before.has_leader(live):
            return
        if joins and name in live and name in before.holders:
            now = joined(before, live[name].member)
        elif name != before.leader:
            now = without(before, set(NAMES) - {before.leader} if leader_alone else {name})
        else:
            return
        self.world.put(KEYS.partition(topic, 0), now)

    # --- topics

    @rule(topic=st.sampled_from(TOPICS), partition_num=st.integers(1, 3), replica=st.integers(1, 3), which=_which)
    def is_created(self, topic: str, partition_num: int, replica: int, which: int) -> None:
        meta = TopicMeta(partition_num=partition_num, replica=replica)
        try:
            swap = self.masters[which].controller.creation(topic, meta, partition_num)
        except Refused:
            return
        if swap is not None:
            self.world.swap(swap)

    @rule(topic=st.sampled_from(TOPICS), which=_which)
    def is_deleted(self, topic: str, which: int) -> None:
        try:
            swap = self.masters[which].controller.deletion(topic)
        except Refused:
            return
        if swap is not None:
            self.world.swap(swap)

    # --- operators

    def _orders(self, order: Callable[[], orders.Plan]) -> None:
        try:
            plan = order()
        except Refused:
            return
        if plan.swap is not None:
            self.world.swap(plan.swap)

    @rule(which=_which, topic=st.sampled_from(TOPICS), number=st.integers(0, 1), source=_node, to=_node)
    def is_moved(self, which: int, topic: str, number: int, source: str, to: str) -> None:
        self._orders(lambda: orders.move(self.masters[which].controller, (topic, number), source, to))

    @rule(which=_which, name=_node, is_removal=st.booleans())
    def is_drained(self, which: int, name: str, is_removal: bool) -> None:
        self._orders(lambda: orders.drain(self.masters[which].controller, name, is_removal))

    @rule(which=_which, name=_node)
    def is_not_drained(self, which: int, name: str) -> None:
        self._orders(lambda: orders.undrain(self.masters[which].controller, name))

    @rule(which=_which, topic=st.sampled_from(TOPICS), replica=st.integers(1, 4))
    def gets_other_copies(self, which: int, topic: str, replica: int) -> None:
        def order() -> orders.Plan:
            controller = self.masters[which].controller
            meta = controller.record_of(topic).meta
            meta = msgspec.structs.replace(meta, replica=replica, version=meta.version + 1)
            return orders.alter(controller, topic, meta, min_in_sync=1)

        self._orders(order)

    @rule(which=_which, topic=st.sampled_from(TOPICS), partition_num=st.integers(1, 4))
    def is_expanded(self, which: int, topic: str, partition_num: int) -> None:
        self._orders(lambda: orders.expand(self.masters[which].controller, topic, partition_num))

    @rule(which=_which, is_upgrading=st.booleans())
    def is_upgraded(self, which: int, is_upgrading: bool) -> None:
        self._orders(lambda: orders.settle(self.masters[which].controller, {"is_upgrading": is_upgrading}))

    @rule(which=_which)
    def is_spread(self, which: int) -> None:
        for swap in self.masters[which].controller.spread():
            self.world.swap(swap)

    @rule(name=_node, topic=st.sampled_from(TOPICS), more=st.integers(0, 2))
    def knows_of_a_later_epoch(self, name: str, topic: str, more: int) -> None:
        """The store was put back from a backup, as a copy shows that the store may know nothing of."""
        for key, state in self.world.states().items() if name in self._live() else ():
            if KEYS.partition_in(key) == (topic, 0) and state.epoch:
                self.world.put(key, contested(state, name, state.epoch + more))

    @rule()
    def leaders_act(self) -> None:
        self.leaders_do_what_they_can()

    def leaders_do_what_they_can(self) -> bool:
        """Whoever lives catches up, says how far it is where that is asked, and leaves where it is to have nothing."""
        live, is_changed = self._live(), False
        for key, before in self.world.states().items():
            if not before.has_leader(live):
                now = before
                for name in live if asks_for_ends(before, live) else ():
                    end = 100 + ord(name)
                    now = told(now, Ending(name, live[name].incarnation, before.epoch, end)) or now
                if now != before:
                    is_changed = True
                    self.world.put(key, now)
                continue
            now = without(
                before, {each for each in before.in_sync_nodes if each not in before.holders} - {before.leader}
            )
            for name in before.holders:
                if name in live and live[name].member not in now.in_sync:
                    now = joined(now, live[name].member)
            if now != before:
                is_changed = True
                self.world.put(key, now)
        return is_changed

    # --- masters

    @rule(which=_which)
    def follows(self, which: int) -> None:
        self.masters[which].follow()

    @rule(which=_which)
    def settles(self, which: int) -> None:
        """It has all the time it needs, but for what was given out before."""
        self.masters[which].settle()

    @rule(which=_which)
    def is_told_everything(self, which: int) -> None:
        master = self.masters[which]
        master.controller.see(master.view.feed(self.world.store.range(KEYS.all)), is_whole=True)

    @rule(which=_which, count=st.integers(1, 9))
    def decides(self, which: int, count: int) -> None:
        master = self.masters[which]
        self.given_out += [(master, swap) for swap in master.swaps(count)]

    @precondition(lambda self: self.given_out)
    @rule(data=st.data(), answered=st.booleans())
    def carries_out(self, data: st.DataObject, answered: bool) -> None:
        master, swap = self.given_out.pop(data.draw(st.integers(0, len(self.given_out) - 1)))
        self.world.swap(swap)
        master.controller.ended(swap, is_known=answered)

    @precondition(lambda self: self.given_out)
    @rule(data=st.data())
    def is_carried_out_twice(self, data: st.DataObject) -> None:
        """A request without an answer is sent again, and the first one arrives late."""
        _, swap = data.draw(st.sampled_from(self.given_out))
        self.world.swap(swap)

    @rule(which=_which)
    def is_replaced(self, which: int) -> None:
        """The process dies, and another one begins; what it has sent still arrives."""
        self.masters[which] = Master(self.world)

    # --- what holds

    @invariant()
    def each_change_is_one_that_may_be_made(self) -> None:
        store = self.world.store
        for event in store.events(Span.of_prefix(KEYS.prefix), self.seen_revision, store.revision).events:
            if (partition := KEYS.partition_in(event.key)) is None:
                continue
            before = self.last.pop(event.key, None)
            if event.now is None:
                continue
            now = self.last[event.key] = decode(event.key, event.now.value, PartitionState)
            self._check_change(partition[0], before, now)
        self.seen_revision = store.revision

    def _check_change(self, topic: str, before: PartitionState | None, now: PartitionState) -> None:
        assert now.in_sync, "the in-sync set is never empty"
        assert len(set(now.in_sync_nodes)) == len(now.in_sync)
        assert not now.leader or now.leader in now.in_sync_nodes
        assert len(set(now.replicas)) == len(now.replicas)
        if before is None:
            record = self.world.record(topic)
            assert now.epoch == 1
            assert record is None or record.number == now.topic_number
            return
        assert (now.log_id, now.topic_number) == (before.log_id, before.topic_number)
        if now.is_contested and now.epoch != before.epoch:
            assert not now.leader and now.epoch > before.epoch and now.in_sync_nodes == before.in_sync_nodes
            assert set(before.holders) <= set(now.holders), "nobody loses a copy by that"
            return
        assert now.epoch == before.epoch or now.holders == before.holders, "one thing at a time"
        let_go = set(before.holders) - set(now.holders)
        assert not let_go or (not before.lacking and now.leader not in let_go), "nobody goes before the others have it"
        assert len(set(now.holders) - set(before.holders)) <= 1, "one copy at a time"
        assert now.replicas and len({HOSTS[name] for name in now.replicas}) == len(now.replicas), "never two on a host"
        has_new_leader = bool(now.leader) and (now.leader, now.incarnation) != (before.leader, before.incarnation)
        if now.epoch != before.epoch:
            assert now.epoch == before.epoch + 1 and now.leader, "an epoch is one leader's"
            lost_power = {
                member.node
                for member in before.in_sync
                if not member.syncs and member.boot_id != f"boot {self.boots[member.node]}"
            }
            if now.lossy_epoch == now.epoch:
                ends = {each.node: (each.epoch, each.end) for each in before.ends}
                assert lost_power == set(before.in_sync_nodes) <= set(ends), "all have said how far they are"
                assert ends[now.leader] == max(ends.values()) and now.in_sync_nodes == (now.leader,)
            else:
                assert set(now.in_sync_nodes) <= set(before.in_sync_nodes), "nobody gets in by an election"
                (member,) = (each for each in before.in_sync if each.node == now.leader)
                now_member = now.in_sync[now.in_sync_nodes.index(now.leader)]
                assert member.syncs or member.boot_id == now_member.boot_id, "only who has everything is elected"
        else:
            assert not has_new_leader, "a leader has an epoch of its own"

    def teardown(self) -> None:
        """Left alone, one master brings everything to an end, and both see the same."""
        self.given_out.clear()
        for name in NAMES:
            self.world.node(self._record(name))
        self.masters = [Master(self.world), Master(self.world)]
        self.masters[0].follow()
        self.is_upgraded(0, is_upgrading=False)
        for _ in range(100):
            self.masters[0].settle()
            self.masters[0].controller.moving.check()
            if not self.leaders_do_what_they_can():
                break
        assert not self.masters[0].settle(), "it comes to an end"
        self._spreads_leaders(self.masters[0])
        assert not self.masters[1].settle(), "nothing is left to do"
        self.each_change_is_one_that_may_be_made()
        live = self._live()
        drains, stuck = self.masters[0].view.drains, self.masters[0].controller.moving.stuck
        for topic in TOPICS:
            record = self.world.record(topic)
            numbers = [KEYS.partition_in(key) for key in self.world.states()]
            there = [each for each in numbers if each is not None and each[0] == topic]
            if not self.masters[0].controller.why_not_placed(topic):
                assert len(there) == (0 if record is None else record.partition_num), "made whole, or gone"
            for partition in there:
                state = self.world.state(*partition)
                assert state is not None
                assert state.has_leader(live)
                assert record is not None and msgspec.structs.asdict(state)["topic_number"] == record.number
                if state.has_leader(live):
                    assert not (state.leaving or state.target or state.lacking), "every move has ended"
                    assert set(state.in_sync_nodes) == set(state.replicas)
                    if partition not in stuck:
                        assert len(state.replicas) == record.meta.replica
                        assert not set(state.replicas) & set(drains), "they have nothing any more"

    def _spreads_leaders(self, master: Master) -> None:
        """Whoever leads two more than another one that could lead hands over, and that comes to an end."""
        for _ in range(20):
            swaps = master.controller.spread()
            for swap in swaps:
                self.world.swap(swap)
            assert not master.settle(), "nobody takes it back"
            if not swaps:
                break
        else:
            raise AssertionError("leaders are handed to and fro")
        led = {name: len(master.view.led.get(name, ())) for name in NAMES}
        live = self._live()
        for state in master.view.partitions.values():
            able = candidates(state, live)
            if isinstance(able, NoLeader) or not state.has_leader(live):
                continue
            for each in able:
                may_lead = each.node in state.replicas and each.node not in master.view.drains
                assert not may_lead or led[state.leader] < led[each.node] + 2


TestController = pytest.mark.slow(ControllerMachine.TestCase)
TestController.settings = hypothesis_settings(max_examples=150, stateful_step_count=40, deadline=None)
