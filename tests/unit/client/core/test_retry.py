"""What becomes of a publish: each rule by itself, with no connection and no time."""

from __future__ import annotations

from typing import Any

import pytest

from flintmq.client.core.handshake import refusal
from flintmq.client.core.link import AnswerLost
from flintmq.client.core.once import Home, WriterKey, Writers
from flintmq.client.core.publish import CONGESTED_FACTOR, RETRY_BASE_S, RETRY_JITTER, Failure, Publish
from flintmq.client.core.retry import Policy, Retry, RetryRules, Split
from flintmq.client.core.routing import Routes
from flintmq.client.core.topology import Node, Topology
from flintmq.client.options import system_env
from flintmq.client.security import Refusals
from flintmq.errors import ConnectionFailed, FlintError, NoNsqd, PublishRefused, PublishUnknown, RemoteProtocolError

ADDRESS = "a:4150"
SPOT = WriterKey(Home(ADDRESS, "", "t", None))


class World:
    """One producer's rules, and what they touch."""

    def __init__(self, retries_unknown: bool = True, tries_max: int = 3, nsqd: tuple[str, ...] = (ADDRESS,)) -> None:
        env = system_env()
        self.routes = Routes(nsqd)
        self.refusals = Refusals()
        self.writers = Writers("", env)
        self.moved: list[str] = []
        policy = Policy(5.0, retries_unknown, tries_max, 1, 0, "murmur3", not nsqd)
        self.unanswered: list[str] = []
        self.rules = RetryRules(
            policy, env, self.routes, self.refusals, self.moved.append, self.writers, lambda: self.unanswered
        )

    def publish(self, *, partition: int | None = None, once: bool = False, **options: Any) -> Publish:
        made = Publish("t", [b"x"], [], 5.0, 1, **options)
        if partition is not None:
            made.partition = partition
            made.keys = [None]
        if once:
            made.writer = self.writers.take(SPOT)
        return made

    def refused(self, publish: Publish, answer: str) -> object:
        code, _, detail = answer.partition(" ")
        return self.rules.refused(publish, refusal(code, detail, ADDRESS, False), ADDRESS, 0.0)


def test_what_is_refused_often_enough_has_failed():
    world = World(tries_max=3)
    publish = world.publish()
    assert [type(world.refused(publish, "E_INVALID cannot")) for _ in range(3)] == [Retry, Retry, Failure]
    assert type(publish.exception(Failure("X", ""))) is PublishRefused


@pytest.mark.parametrize(
    ("answer", "defer_ms", "kind"),
    [
        ("E_INVALID DPUB timeout 3601000 out of range 0-3600000", 3_601_000, Failure),
        ("E_INVALID cannot DPUB in current state", 1000, Retry),
        ("E_FAILED_ON_NOT_LEADER MDPUB", 1000, Retry),
        ("E_INVALID PUB something out of range 0-9", None, Retry),
    ],
)
def test_a_delay_that_nsqd_does_not_allow_is_final(answer, defer_ms, kind):
    verdict = World(tries_max=3).refused(World().publish(defer_ms=defer_ms), answer)
    assert type(verdict) is kind
    if isinstance(verdict, Failure):
        assert not verdict.retryable


@pytest.mark.parametrize("code", ["E_FAILED_ON_NOT_LEADER", "E_FAILED_ON_NOT_WRITABLE", "E_TOPIC_NOT_EXIST"])
def test_a_leader_that_moved_is_followed_until_the_deadline(code):
    world = World(nsqd=())
    world.routes.learn("t", Topology(leaders={0: ADDRESS}, partition_count=1))
    publish = world.publish(partition=0)
    for _ in range(50):
        assert isinstance(world.refused(publish, code), Retry)
    assert world.routes.leader("t", 0) is None, "it is not asked again before somebody says so"
    assert world.moved == ["t"] * 50


@pytest.mark.parametrize("code", ["E_FAILED_ON_NOT_LEADER", "E_FAILED_ON_NOT_WRITABLE"])
def test_an_election_is_waited_for_where_no_partition_is_named(code):
    world = World(tries_max=3)
    publish = world.publish()
    for _ in range(50):
        assert isinstance(world.refused(publish, code), Retry)
    assert not publish.is_unknown


def test_draining_is_not_counted_as_a_failure():
    world = World(retries_unknown=False, tries_max=1)
    publish = world.publish()
    assert isinstance(world.refused(publish, "E_PUB_FAILED PUB failed draining"), Retry)
    assert not publish.is_unknown


@pytest.mark.parametrize(("retries_unknown", "once", "kind"), [(True, False, Retry), (False, False, Failure), (False, True, Retry)])  # fmt: skip  # noqa: E501
def test_what_may_be_stored_is_sent_again_only_if_that_is_wanted_or_safe(retries_unknown, once, kind):
    world = World(retries_unknown=retries_unknown)
    refused, lost = world.publish(once=once), world.publish(once=once)
    assert type(world.refused(refused, "E_PUB_FAILED PUB failed exiting")) is kind
    assert type(world.rules.unanswered(lost, AnswerLost(ADDRESS, "gone", maybe_executed=True))) is kind
    assert refused.is_unknown and lost.is_unknown


def test_what_was_certainly_not_executed_is_sent_again_in_any_case():
    world = World(retries_unknown=False)
    publish = world.publish()
    assert isinstance(world.rules.unanswered(publish, AnswerLost(ADDRESS, "gone", maybe_executed=False)), Retry)
    assert not publish.is_unknown


def test_unknown_stays_unknown_when_a_later_try_is_refused():
    world = World()
    publish = world.publish()
    world.rules.unanswered(publish, ConnectionFailed(ADDRESS, "gone"))
    failure = world.refused(publish, "E_BAD_TOPIC no")
    assert isinstance(failure, Failure)
    error = publish.exception(failure)
    assert type(error) is PublishUnknown
    assert str(error.__cause__).startswith("E_BAD_TOPIC")


@pytest.mark.parametrize("answer", ["E_SEQUENCE_GAP PUB_ONCE producer p", "E_PUB_ONCE_FAILED PUB_ONCE failed draining"])
def test_an_answer_to_a_writer_settles_what_was_unknown(answer):
    world = World()
    publish = world.publish(once=True)
    publish.is_unknown = True
    assert isinstance(world.refused(publish, answer), Retry)
    assert not publish.is_unknown


@pytest.mark.parametrize(
    ("state", "stored_count", "sequence"),
    [({}, 0, 1), ({}, 1, 2), ({"is_unknown": True}, 0, None), ({"is_out_of_sequence": True}, 0, None)],
)
def test_a_writer_is_used_again_unless_nobody_knows_how_far_nsqd_is(state, stored_count, sequence):
    world = World()
    publish = world.publish(once=True)
    former = publish.writer
    for name, value in state.items():
        setattr(publish, name, value)
    assert world.rules.free_writer(publish, stored_count)
    assert not world.rules.free_writer(publish), "it has none any more"
    following = world.writers.take(SPOT)
    assert following is not None
    assert (following is former) == (sequence is not None)
    assert following.sequence == (sequence or 1)


def test_congestion_is_waited_out_for_longer():
    world = World()
    retry = world.refused(world.publish(), "E_PUB_TOO_MUCH_WAITING")
    assert isinstance(retry, Retry)
    assert retry.delay_s >= CONGESTED_FACTOR * RETRY_BASE_S * (1 - RETRY_JITTER)
    assert not retry.refreshes


def test_one_of_several_gathered_is_bad():
    world = World()
    publish = Publish("t", [b"x", b"y"], [], 5.0, 2, is_gathered=True)
    assert isinstance(world.refused(publish, "E_BAD_MESSAGE MPUB message too big"), Split)
    whole = Publish("t", [b"x", b"y"], [], 5.0, 2)
    assert isinstance(world.refused(whole, "E_BAD_MESSAGE MPUB message too big"), Failure)


def test_an_answer_that_is_none():
    publish = World().publish()
    failure = World().rules.senseless(publish, RemoteProtocolError("E_INVALID", "answer b'NO'"), ADDRESS)
    assert failure == Failure("E_INVALID", "answer b'NO'", ADDRESS, retryable=False)
    assert publish.is_unknown


@pytest.mark.parametrize(
    ("retries_unknown", "once", "has_choice", "leaves"),
    [(True, False, True, True), (True, False, False, False), (False, False, True, False), (False, True, False, True)],
)
def test_who_leaves_a_silent_nsqd(retries_unknown, once, has_choice, leaves):
    world = World(retries_unknown=retries_unknown)
    assert world.rules.leaves_early(world.publish(once=once), lambda: has_choice) == leaves


def test_what_is_said_at_the_deadline():
    world = World(nsqd=())
    ordered = world.publish(partition=3)
    ordered.needs_partition = True
    assert world.rules.unsent(ordered, is_behind=True, last_error=None).code == "TIMEOUT"
    missing = world.rules.unsent(ordered, is_behind=False, last_error=None)
    assert (missing.code, missing.retryable) == ("PARTITION_UNAVAILABLE", True)
    assert "nothing is known" in world.rules.unsent(world.publish(), is_behind=False, last_error=None).detail
    assert world.rules.overtaken(ordered, "TIMEOUT").detail.startswith(
        "not sent: an earlier publish of the same partition"
    )


# --- where a publish did not get, and why ---


def test_a_topic_that_is_gone_is_not_called_unknown():
    world = World(nsqd=())
    world.routes.learn("t", Topology(leaders={0: ADDRESS}, partition_count=1))
    world.routes.drop("t", 0, ADDRESS, 0.0)
    world.routes.learn("t", Topology((Node("a", 4150),), reason="TOPIC_NOT_FOUND"), is_guess=True)
    assert "it had one partition, and no nsqlookupd knows it any more (deleted?)" in unsent_text(world)
    assert "create it again, or start a new producer" in unsent_text(world)


def test_a_dpub_is_not_sent_where_nsqd_wants_a_partition():
    world = World(nsqd=())
    world.rules = RetryRules(
        Policy(5.0, True, 3, 1, 0, "murmur3", True), system_env(), world.routes, world.refusals, print
    )
    assert world.rules.impossible(world.publish(defer_ms=1)) is None, "nothing is known of the topic"
    world.routes.learn("t", Topology(leaders={0: ADDRESS}, partition_count=1))
    assert world.rules.impossible(world.publish(defer_ms=1)) is None
    world.routes.learn("t", Topology(leaders={0: ADDRESS}, partition_count=1, is_ordered=True))
    failure = world.rules.impossible(world.publish(defer_ms=1))
    assert failure is not None
    assert (failure.code, failure.retryable) == ("E_BAD_PARTITION", False)
    assert "mpub([body], delay=..., sharding_id=...)" in failure.detail
    assert world.rules.impossible(world.publish()) is None
    placed = world.publish(partition=0, defer_ms=1)
    placed.needs_partition = True
    assert world.rules.impossible(placed) is None


def unsent_text(world: World, up: tuple[str, ...] = ()) -> str:
    failure = world.rules.unsent(world.publish(), False, None, up)
    assert failure.code == "TIMEOUT"
    return failure.detail


def test_who_was_waited_for_is_named():
    assert "connecting to a:4150 takes long" in unsent_text(World())
    assert "a:4150 had enough to do with earlier ones" in unsent_text(World(), up=("a:4150",))
    several = World(nsqd=("a:1", "b:1", "c:1", "d:1", "e:1", "a:1"))
    assert "connecting to a:1, c:1, d:1 and 1 more takes long" in unsent_text(several, up=("b:1",))


def test_what_an_nsqd_of_another_topic_did_is_no_reason():
    lost = ConnectionFailed(ADDRESS, "gone")
    assert "gone" in world_text(World(), lost)
    assert "gone" not in world_text(World(nsqd=()), lost)
    assert "list no nsqd" in world_text(World(nsqd=()), NoNsqd("t", "the nsqlookupd list no nsqd"))


def world_text(world: World, last_error: FlintError) -> str:
    return world.rules.unsent(world.publish(), False, last_error).detail


def test_nsqlookupd_that_have_not_answered_are_named():
    world = World(nsqd=())
    assert unsent_text(world).endswith("nothing is known of any nsqd")
    world.unanswered = ["http://l:4161", "http://m:4161"]
    assert unsent_text(world).endswith("and there is no answer yet of http://l:4161, http://m:4161")
