"""A node that knows of epochs which the coordination store does not have: nobody leads before all have said so."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from tests.unit.broker.test_replicas import Batches
from tests.unit.cluster.models import KEYS, node, state
from tests.unit.nsqd.cluster.test_agent import Case, Store, Stream

from flintmq.cluster.power import contested
from flintmq.cluster.state import Ending, Older, PartitionState
from flintmq.cluster.store import Span
from flintmq.nsqd.cluster.settling import SWEEP_TICKS
from flintmq.wire.peer import CutTo, Identity, Open, Refusal

EVERYTHING = Span.of_prefix(KEYS.prefix)


@pytest.fixture
def case() -> Case:
    """Node a has led partition 0 in epoch 5."""
    case = Case()
    case.elect(5)
    case.hear()
    case.settle()
    case.store.txn = Store(case).txn
    return case


def now(case: Case) -> PartitionState:
    found = case.cluster.state("t")
    assert found is not None
    return found


def carry_out(case: Case) -> None:
    """Have written what is to be, and hear of it."""

    async def run() -> None:
        while case.loop.begun:
            await asyncio.gather(*(case.loop.begun.pop(0) for _ in list(case.loop.begun)))
            case.loop.turn()

    for _ in range(3):
        case.loop.turn()
        asyncio.run(run())
        case.hear()
        case.settle()


def test_who_is_elected_in_an_epoch_that_its_copy_knows_has_all_say_how_far_they_are(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    case.elect(2)  # by a store that was put back
    case.hear()
    carry_out(case)
    assert now(case).older == Older(2, 5) and not now(case).leader and now(case).epoch == 6
    incarnation = case.agent.incarnation
    assert now(case).ends == (Ending("a", incarnation, 5, 1, (5, incarnation)),)
    assert case.copy.led is None and case.copy.replica.history == [(5, 1)]
    told = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert len(told) == 1 and "the coordination store is older than the data" in told[0]
    assert "t/0 is of epoch 2 there, and 5 here" in told[0]


def test_who_is_elected_in_an_epoch_in_which_another_one_led_does_not_begin_it_anew(case: Case) -> None:
    """Both would have batches of that epoch, and nobody could tell them apart."""
    case.cluster.node(node("b"))
    case.cluster.partition("t", 0, state("b", "ba", "ba", epoch=6))
    case.hear()
    case.settle()
    follow(case, "b1", 6)
    case.elect(6, "ba", "ba")
    case.hear()
    carry_out(case)
    assert now(case).older == Older(6, 6) and not now(case).leader
    assert case.copy.led is None and (6, 1) not in case.copy.replica.history


def test_who_is_told_late_of_an_election_says_nothing(case: Case) -> None:
    case.cluster.node(node("b"))
    case.cluster.partition("t", 0, state("b", "ba", "ba", epoch=6))
    case.hear()
    case.settle()
    follow(case, "b1", 6)
    case.cluster.partition("t", 0, state("c", "cba", "cba", epoch=7))
    follow(case, "c1", 7)  # before the view has it
    case.agent._due.note(("t", 0))
    case.loop.turn()
    assert case.loop.begun, "it takes the store for older, until the store refuses that"
    carry_out(case)
    assert now(case) == state("c", "cba", "cba", epoch=7)


def follow(case: Case, incarnation: str, epoch: int) -> Stream | tuple[Refusal, int, str]:
    """Another node leads; the stream that it opens, or why not."""
    frame = Open(epoch, "t", 0, 7, 9, epoch)
    peer = Identity("", incarnation[0], incarnation, "boot", False, 2)
    found: Any = case.agent._followings.find(frame, peer)
    if isinstance(found, tuple):
        return found
    stream: Any = Stream(epoch)
    found.open(stream, frame)
    case.settle()
    return stream


def appended(case: Case, stream: Any, epoch: int) -> None:
    """One message comes from a leader."""
    case.copy.following.cut_to(stream, CutTo(stream.number, 1))
    case.settle()
    batches = Batches(number=0)
    case.copy.following.append(stream, 1, 1, memoryview(batches.next(epoch, [b"of before"])))


def followed_and_restored(case: Case, case_epoch: int, others_epoch: int, others_leader: str) -> None:
    """The copy has a message of an epoch, and another one that leads now had the store known to be older."""
    case.cluster.node(node("b"))
    case.cluster.partition("t", 0, state("b", "ba", "ba", epoch=case_epoch))
    case.hear()
    case.settle()
    appended(case, follow(case, "b1", case_epoch), case_epoch)
    before = contested(state("b", "ba", "ba", epoch=case_epoch), "b", others_epoch)
    case.cluster.partition("t", 0, before)
    case.hear()
    carry_out(case)
    said = now(case).ends
    assert said == (Ending("a", case.agent.incarnation, case_epoch, 2, (case_epoch, "b1")),)
    assert before.older is not None
    older = msgspec.structs.replace(before.older, led_by=(others_epoch, others_leader))
    case.cluster.partition("t", 0, state("b", "b", "ba", epoch=before.epoch + 1, older=older))


def test_a_copy_that_may_have_other_messages_of_the_same_epoch_is_set_aside_and_fetched_anew(case: Case) -> None:
    followed_and_restored(case, 6, 9, "c1")
    replica = case.copy.replica
    refused: Any = follow(case, "b1", 11)
    assert refused[0] is Refusal.NOT_HERE and "not yet why" in refused[2], "it may be such a copy"
    case.hear()
    case.settle()
    refused = follow(case, "b1", 11)
    assert refused[0] is Refusal.BROKEN
    for _ in range(2 * SWEEP_TICKS):
        case.agent._settling.tick()
        case.settle()
    assert replica.is_deleted and case.copy.replica is not replica
    assert list(case.broker.files.list("set-aside"))
    stream = follow(case, "b1", 11)
    assert isinstance(stream, Stream), stream


def test_a_copy_that_was_led_by_the_same_process_last_is_followed_as_it_is(case: Case) -> None:
    followed_and_restored(case, 6, 6, "b1")
    case.hear()
    case.settle()
    replica = case.copy.replica
    stream = follow(case, "b1", 8)
    assert isinstance(stream, Stream), stream
    assert case.copy.replica is replica and replica.log.next_sequence == 2


def test_another_process_that_leads_in_an_epoch_that_is_known_is_not_followed(case: Case) -> None:
    case.cluster.node(node("b"))
    case.cluster.partition("t", 0, state("b", "ba", "ba", epoch=6))
    case.hear()
    case.settle()
    assert isinstance(follow(case, "b1", 6), Stream)
    refused: Any = follow(case, "b2", 6)
    assert refused[0] is Refusal.NOT_HERE and "the coordination store is older" in refused[2]
    case.cluster.partition("t", 0, state("b", "ba", "ba", epoch=6, incarnation="b2"))
    case.hear()
    carry_out(case)
    assert now(case).older == Older(6, 6)


def test_who_led_before_is_told_of_the_later_epoch(case: Case) -> None:
    case.cluster.node(node("b"))
    case.cluster.partition("t", 0, state("b", "ba", "ba", epoch=6))
    case.hear()
    case.settle()
    follow(case, "b1", 6)
    late: Any = follow(case, "c1", 5)
    assert late.heard[-1][0] is Refusal.HIGHER_EPOCH


def test_it_is_said_before_the_node_can_be_elected(case: Case) -> None:
    case.elect(2)
    told = case.cluster.store.events(EVERYTHING, case.agent.view.revision, case.cluster.store.revision)
    case.agent.view.feed(told)  # nothing is settled yet
    damaged = case.agent._damaged

    async def run() -> None:
        task = asyncio.ensure_future(damaged.renounce_all())
        while now(case).older is None:
            await asyncio.sleep(0)
        more = case.cluster.store.events(EVERYTHING, case.agent.view.revision, case.cluster.store.revision)
        case.agent.view.feed(more)
        await task

    asyncio.run(run())
    assert not now(case).leader and now(case).older == Older(2, 5)


def test_who_led_is_written_with_the_copy(case: Case) -> None:
    assert case.copy.replica.about.led_by == (5, case.agent.incarnation)
