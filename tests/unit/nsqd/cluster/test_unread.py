"""Which channels other nodes are asked about, what becomes of the answers, and how a consumer's RDY is shared out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from struct import pack
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.cluster.models import node

from flintmq.broker.shared_subscription import ChannelParts, PartSubscription, SharedSubscription
from flintmq.message import hex_id
from flintmq.net.problems import Problems
from flintmq.nsqd.cluster import asking, unread
from flintmq.nsqd.cluster.peers import PassageFailed
from flintmq.nsqd.cluster.relaying import IDLE_NS, Means, Supplement
from flintmq.nsqd.cluster.unread import AGAIN_NS, ASK_NS, BROUGHT_MAX, USELESS_NS, Answers, UnreadElsewhere
from flintmq.topic_meta import PLAIN
from flintmq.wire.frames import MESSAGE, RESPONSE
from flintmq.wire.identify import ReceivedRequest
from flintmq.wire.peer import ASK_UNREAD_MAX, AskUnread, PeerReader, Ping, Unread, encode_one
from flintmq.wire.server import Subscribe

MS = 1_000_000


class Consumer:
    """As a client is seen by what brings it messages."""

    def __init__(self, rdy_count: int) -> None:
        self.peer = "consumer"
        self.negotiated = None
        self.request = ReceivedRequest()
        self.has_hex_ids = False
        self.relay: Any = None
        self.out: list[bytes] = []
        self.part = PartSubscription([], 0, 0)
        self.subscription = SharedSubscription([self.part])
        self.channel = ChannelParts.__new__(ChannelParts)
        self.channel.upstreams = None
        self.channel._channels, self.channel._subscriptions = {}, {}
        self.subscription.is_open = True
        self.subscription.rdy_count = rdy_count

    @property
    def in_flight_count(self) -> int:
        relayed = 0 if self.relay is None else self.relay.in_flight_count
        return int(self.part.in_flight_count + relayed)


class Passage:
    """A connection to a node, which does what the test says."""

    def __init__(
        self, owner: Any, answer: Callable[[list[tuple[str, str]]], list[int]] | None = None, subscribes: bool = False
    ) -> None:
        self.owner = owner
        self._subscribes = subscribes
        self.written = b""
        self.is_closed = False
        self._answer = answer
        self._reader = PeerReader(is_trusted=True)

    def write(self, data: bytes) -> None:
        is_greeting, self.written = not self.written, self.written + data
        if self._subscribes and is_greeting:
            self.owner.received(_OK * 2)
        if self._answer is not None:
            self._reader.receive(data)
            found = self._reader.next_frame()
            assert found is not None and isinstance(found[0], AskUnread)
            self.owner.received(encode_one(Unread(self._answer(found[0].channels))))

    def hold_input(self, is_held: bool) -> None: ...

    def abort(self, reason: str) -> None:
        self.is_closed = True

    give_up = abort


class World:
    """One node with consumers, and others that lead partitions of every topic."""

    def __init__(self, *others: str) -> None:
        self.now_ns = 0
        self.leaders: dict[str, tuple[Any, tuple[int, ...]]] = {name: (node(name), (0,)) for name in ("me", *others)}
        self.unread: dict[str, set[tuple[str, str]]] = {name: set() for name in others}
        self.failing: dict[str, Exception] = {}
        self.questions: list[tuple[str, list[tuple[str, str]]]] = []
        self.consumers: list[tuple[Consumer, Subscribe]] = []
        self.passages: list[Passage] = []
        peers: Any = self
        clock: Any = SimpleNamespace(monotonic_ns=lambda: self.now_ns)
        self.finder = UnreadElsewhere(
            "me", peers, clock.monotonic_ns, lambda topic: self.leaders, self._supplement, Problems(clock)
        )
        self.finder.followers = lambda: self.consumers  # type: ignore[assignment, return-value]

    def is_silent(self, name: str) -> bool:
        return False

    async def open_passage(self, record: Any, owner: Any, purpose: Any = None) -> Passage:
        if record.node in self.failing:
            raise self.failing[record.node]

        def answer(channels: list[tuple[str, str]]) -> list[int]:
            self.questions.append((record.node, channels))
            return [at for at, name in enumerate(channels) if name in self.unread[record.node]]

        passage = Passage(owner, None if purpose is None else answer, subscribes=purpose is None)
        if purpose is None:
            self.passages.append(passage)
        return passage

    def _supplement(self, client: Any, event: Subscribe, on_idle: Any, on_end: Any) -> Supplement:
        peers: Any = self
        means = Means(peers, lambda: self.now_ns, lambda _: None, 60_000 * MS)
        return Supplement(means, client, event, PLAIN, lambda _: None, on_idle, on_end)

    def subscribe(self, topic: str, channel: str, rdy_count: int, command: str = "SUB") -> Consumer:
        consumer = Consumer(rdy_count)
        self.consumers.append((consumer, Subscribe(topic, channel, command=command)))
        return consumer

    async def after(self, ns: int) -> None:
        """Let time pass, and everybody answer."""
        self.now_ns += ns
        self.finder.tick(self.now_ns)
        for _ in range(10):
            await asyncio.sleep(0)


async def test_what_two_answers_in_a_row_call_unread_is_brought_to_one_consumer() -> None:
    world = World("a", "b")
    away, here, second = (world.subscribe("t", "ch", rdy_count) for rdy_count in (0, 1, 5))
    world.subscribe("t", "ordered", 1, "SUB_ORDER")
    world.unread["a"] = {("t", "ch")}
    await world.after(ASK_NS)
    assert world.questions == [("a", [("t", "ch")]), ("b", [("t", "ch")])]
    assert here.relay is None and second.relay is None
    world.unread["a"] = set()
    await world.after(ASK_NS)
    world.unread["a"] = {("t", "ch")}
    await world.after(ASK_NS)
    assert second.relay is None, "two answers, but not in a row"
    await world.after(ASK_NS)
    assert isinstance(second.relay, Supplement) and second.relay.nodes == {"a"}
    assert away.relay is None and here.relay is None
    world.unread["b"] = {("t", "ch")}
    await world.after(ASK_NS)
    assert len(world.passages) == 1, "it is brought by one connection"
    second.relay.add(world.leaders["a"][0])
    for passage in world.passages:  # so that it is not idle
        passage.owner.received(_message(1))
    await world.after(ASK_NS)
    assert isinstance(here.relay, Supplement) and here.relay.nodes == {"b"}, "the one that has the least to do"
    await world.finder.close()
    assert here.relay is None and second.relay is None
    assert all(passage.is_closed for passage in world.passages)


async def test_a_consumer_with_which_a_message_timed_out_comes_last() -> None:
    world = World("a")
    stuck, other = world.subscribe("t", "ch", 9), world.subscribe("t", "ch", 1)
    world.unread["a"] = {("t", "ch")}
    for _ in range(2):
        await world.after(ASK_NS)
    assert isinstance(stuck.relay, Supplement)
    world.passages[0].owner.received(_message(1))
    await world.after(60_000 * MS)
    assert stuck.relay is None and world.passages[0].is_closed
    await world.after(ASK_NS)
    assert stuck.relay is None and isinstance(other.relay, Supplement)
    await world.finder.close()


async def test_a_consumer_that_takes_nothing_any_more_leaves_it_to_another() -> None:
    world = World("a")
    stuck, other = world.subscribe("t", "ch", 2), world.subscribe("t", "ch", 1)
    world.unread["a"] = {("t", "ch")}
    await world.after(ASK_NS)
    await world.after(ASK_NS)
    assert isinstance(stuck.relay, Supplement)
    stuck.part.in_flight_count = 2
    for _ in range(80):
        await world.after(1000 * MS)
        if other.relay is not None:
            break
    assert stuck.relay is None and isinstance(other.relay, Supplement)
    await world.finder.close()


async def test_a_consumer_that_finishes_slowly_has_messages_of_all_leaders() -> None:
    world = World("a", "b")
    consumer = world.subscribe("t", "ch", 1)
    supplement = world._supplement(consumer, world.consumers[0][1], lambda *_: None, lambda _: None)
    consumer.part.in_flight_count = 1
    for name in ("a", "b"):
        supplement.add(world.leaders[name][0])
    await asyncio.sleep(0)
    upstreams = {passage.owner.record.node: passage.owner for passage in world.passages}
    had: list[str] = []
    for number in range(1, 10):
        for _ in range(100):  # its handler takes ten seconds
            world.now_ns += 100 * MS
            supplement.tick(world.now_ns)
        assert len(consumer.out) == number - 1 - had.count("here") and len(supplement.nodes) == 2
        consumer.part.in_flight_count = 0
        supplement.finish([each for upstream in upstreams.values() for each in upstream.in_flight])
        granted = [name for name, upstream in upstreams.items() if upstream.granted]
        had += granted or ["here"]
        if granted:
            upstreams[granted[0]].received(_message((1 if granted[0] == "a" else 2) << 51 | number))
        else:
            consumer.part.in_flight_count = 1
    assert sorted(had) == ["a"] * 3 + ["b"] * 3 + ["here"] * 3
    supplement.close()


async def test_nothing_is_brought_with_the_last_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread, "room", lambda wanted: wanted - 1)
    world = World("a")
    consumer = world.subscribe("t", "ch", 1)
    world.unread["a"] = {("t", "ch")}
    for _ in range(4):
        await world.after(ASK_NS)
    assert consumer.relay is None and not world.passages
    await world.finder.close()


async def test_who_holds_all_that_it_has_asked_for_is_not_chosen() -> None:
    world = World("a")
    stuck, free = world.subscribe("t", "ch", 9), world.subscribe("t", "ch", 1)
    stuck.part.in_flight_count = 9
    world.unread["a"] = {("t", "ch")}
    for _ in range(2):
        await world.after(ASK_NS)
    assert stuck.relay is None and isinstance(free.relay, Supplement)
    await world.finder.close()


async def test_very_many_are_brought_one_after_the_other() -> None:
    world = World("a")
    for number in range(2 * BROUGHT_MAX):
        world.subscribe("t", f"ch{number}", 1)
    world.unread["a"] = {("t", f"ch{number}") for number in range(2 * BROUGHT_MAX)}
    for count in (0, 1, 2):
        await world.after(ASK_NS)
        assert len(world.passages) == count * BROUGHT_MAX
        world.unread["a"] -= {(event.topic, event.channel) for consumer, event in world.consumers if consumer.relay}
    await world.finder.close()


async def test_what_is_brought_for_nothing_is_tried_ever_more_seldom() -> None:
    world = World("a")
    consumer = world.subscribe("t", "ch", 1)
    world.unread["a"] = {("t", "ch")}
    tried_ns: list[int] = []
    while len(tried_ns) < 8:
        before = len(world.passages)
        await world.after(100 * MS)
        tried_ns += [world.now_ns] * (len(world.passages) - before)
    between = [after - before for before, after in pairwise(tried_ns)]
    idle_ns = 2 * IDLE_NS  # it has half of the time
    assert between == sorted(between) and between[0] < 2 * (idle_ns + USELESS_NS[0]) < USELESS_NS[1] <= between[-1]
    assert between[-1] < idle_ns + USELESS_NS[1] + 2 * ASK_NS
    await world.finder.close()
    assert consumer.subscription.capacity == 1


async def test_a_node_that_gives_no_answer_is_asked_ever_more_seldom_and_no_other_waits() -> None:
    world = World("a", "b")
    world.subscribe("t", "ch", 1)
    world.failing["a"] = PassageFailed("it does not know the question")
    while world.now_ns < 3 * AGAIN_NS[1]:
        await world.after(ASK_NS)
    assert {name for name, _ in world.questions} == {"b"}
    assert len(world.questions) > AGAIN_NS[1] / ASK_NS
    del world.failing["a"]
    while not any(name == "a" for name, _ in world.questions):
        assert world.now_ns < 5 * AGAIN_NS[1]
        await world.after(ASK_NS)
    await world.finder.close()


async def test_an_answer_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "ANSWER_S", 0.01)
    world = World("a")
    world.subscribe("t", "ch", 1)

    async def open_passage(record: Any, owner: Any, purpose: Any = None) -> Passage:
        world.passages.append(Passage(owner))
        return world.passages[-1]

    monkeypatch.setattr(world, "open_passage", open_passage)
    await world.after(ASK_NS)
    (passage,) = world.passages
    while not passage.is_closed:
        await asyncio.sleep(0.01)
    await world.finder.close()


async def test_more_channels_than_a_question_takes_are_asked_about_in_turn() -> None:
    world = World("a")
    for number in range(ASK_UNREAD_MAX + 100):
        world.subscribe("t", f"ch{number}", 1)
    for _ in range(2):
        await world.after(ASK_NS)
    assert [len(names) for _, names in world.questions] == [ASK_UNREAD_MAX] * 2
    assert len({name for _, names in world.questions for name in names}) == ASK_UNREAD_MAX + 100
    await world.finder.close()


async def test_who_is_consumed_no_more_is_not_asked() -> None:
    world = World("a")
    world.subscribe("t", "ch", 1)
    await world.after(ASK_NS)
    world.consumers.clear()
    await world.after(ASK_NS)
    assert len(world.questions) == 1 and not world.finder._asked
    await world.finder.close()


class Transport:
    """What stands below the end that is asked."""

    def __init__(self) -> None:
        self.written = b""
        self.is_aborted = False

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.is_aborted = True


async def test_who_is_asked_answers_whatever_pieces_the_question_comes_in() -> None:
    answers, transport = Answers(lambda topic, channel: channel == "yes"), Transport()
    answers.connection_made(transport)  # type: ignore[arg-type]
    question = encode_one(AskUnread([("t", "no"), ("t", "yes"), ("u", "yes")]))
    for at in range(len(question)):
        answers.data_received(question[at : at + 1])
    answers.data_received(question * 2)
    assert transport.written == encode_one(Unread([1, 2])) * 3 and not transport.is_aborted
    answers.connection_lost(None)


@pytest.mark.parametrize(
    "data",
    [
        encode_one(Ping(1)),
        encode_one(Unread([1])),
        b"  V2" * 10,
        pack(">II", 1 << 20, 1 << 19) + bytes(asking.QUESTION_BYTES_MAX + 1),
    ],
)
async def test_what_is_no_question_ends_the_connection(data: bytes) -> None:
    answers, transport = Answers(lambda topic, channel: True), Transport()
    answers.connection_made(transport)  # type: ignore[arg-type]
    answers.data_received(data)
    assert transport.is_aborted and not transport.written
    answers.connection_lost(None)


def _message(internal: int) -> bytes:
    data = pack(">QH", 1, 1) + hex_id(internal) + b"x"
    return pack(">II", 4 + len(data), MESSAGE) + data


_OK = pack(">II", 6, RESPONSE) + b"OK"


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 12), st.lists(st.sampled_from(["here", "a", "b", "done here", "done", "tick"]), max_size=60))
async def test_all_leaders_together_send_no_more_than_rdy_and_each_has_its_turn(
    rdy_count: int, steps: list[str]
) -> None:
    world = World("a", "b")
    consumer = world.subscribe("t", "ch", rdy_count)
    ended: list[Supplement] = []
    supplement = world._supplement(consumer, world.consumers[0][1], lambda *_: None, ended.append)
    for name in ("a", "b"):
        supplement.add(world.leaders[name][0])
    await asyncio.sleep(0)
    upstreams = {passage.owner.record.node: passage.owner for passage in world.passages}
    numbers = {"a": 1 << 51, "b": 2 << 51}
    for step in steps:
        if step == "here" and consumer.subscription.capacity > 0:
            consumer.part.in_flight_count += 1
        elif step in upstreams and len(upstreams[step].in_flight) < upstreams[step].granted:
            numbers[step] += 1
            upstreams[step].received(_message(numbers[step]))
        elif step == "done here" and consumer.part.in_flight_count:
            consumer.part.in_flight_count -= 1
            supplement.share()
        elif step == "done":
            supplement.finish([each for upstream in upstreams.values() for each in list(upstream.in_flight)[:1]])
        elif step == "tick":
            world.now_ns += 100 * MS
            supplement.tick(world.now_ns)
        assert consumer.in_flight_count <= rdy_count
        promised = sum(max(upstream.granted, len(upstream.in_flight)) for upstream in upstreams.values())
        assert promised + consumer.part.in_flight_count + max(consumer.subscription.capacity, 0) <= rdy_count
    # with nothing in flight each of the three is given something within three turns
    consumer.part.in_flight_count = 0
    supplement.finish([each for upstream in upstreams.values() for each in upstream.in_flight])
    had = set()
    for _ in range(3):
        world.now_ns += 100 * MS
        supplement.tick(world.now_ns)
        had |= {name for name, upstream in upstreams.items() if upstream.granted}
        had |= {"here"} if consumer.subscription.capacity > 0 else set()
    assert had == {"a", "b", "here"}
    for _ in range(3 * 3 * IDLE_NS // (100 * MS)):
        world.now_ns += 100 * MS
        supplement.tick(world.now_ns)
    assert ended == [supplement] and consumer.relay is None
    assert consumer.subscription.capacity == rdy_count and consumer.channel.upstreams is None
