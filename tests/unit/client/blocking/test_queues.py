"""The queue of a partition: whose turn it is, and who fails with whom."""

from __future__ import annotations

from flintmq.client.blocking.queues import FORGOTTEN_S, Queues
from flintmq.client.core.publish import Publish

NOW = 100.0


def call(key: str, partition: int = 0, topic: str = "t") -> Publish:
    made = Publish(topic, [b"x"], [], NOW, 1)
    made.keys = [key]
    made.partition = partition
    return made


def test_one_at_a_time_in_the_order_of_the_calls():
    queues = Queues()
    first, second, third = call("a"), call("b"), call("a")
    assert queues.enter(first, NOW)
    assert not queues.enter(second, NOW)
    assert not queues.enter(third, NOW)
    assert queues.enter(first, NOW), "it stands there already"
    assert queues.leave(first)
    assert not queues.enter(third, NOW)
    assert queues.enter(second, NOW)
    assert queues.leave(second)
    assert not queues.leave(second), "it left before"
    assert queues.enter(third, NOW)
    assert not queues.leave(third), "nobody waits"
    assert len(queues) == 0


def test_partitions_and_topics_do_not_wait_for_each_other():
    queues = Queues()
    calls = [call("a"), call("a", partition=1), call("a", topic="u")]
    assert queues.enter(calls[0], NOW)
    assert queues.enter(calls[1], NOW)
    assert queues.enter(calls[2], NOW)
    assert len(queues) == 3


def test_those_of_the_same_key_behind_a_failure_are_told():
    queues = Queues()
    calls = [call(key) for key in ("a", "b", "a", "b")]
    for each in calls:
        queues.enter(each, NOW)
    queues.leave(calls[1], "TIMEOUT")
    assert [queues.overtook(each) for each in calls] == ["", "", "", "TIMEOUT"]
    queues.leave(calls[0])
    assert queues.overtook(calls[2]) == "", "it went well"


def test_one_that_gives_up_waiting_leaves_from_the_middle():
    queues = Queues()
    calls = [call(key) for key in ("a", "b", "b")]
    for each in calls:
        queues.enter(each, NOW)
    queues.leave(calls[1], "TIMEOUT")
    assert queues.enter(calls[0], NOW)
    queues.leave(calls[0])
    assert queues.enter(calls[2], NOW)


def test_one_that_never_left_is_passed_by():
    queues = Queues()
    calls = [call(key) for key in ("a", "a")]
    queues.enter(calls[0], NOW)
    calls[1].deadline = NOW + 10
    assert not queues.enter(calls[1], NOW + FORGOTTEN_S)
    assert queues.enter(calls[1], NOW + FORGOTTEN_S + 0.1)
    queues.leave(calls[1])
    assert len(queues) == 0


def test_those_without_a_partition_stand_in_the_order_of_the_calls():
    queues = Queues()
    calls = [call("a"), call("b"), call("a")]
    found: dict[Publish, int] = {}

    def find(publish: Publish) -> bool:
        publish.partition = found.get(publish)
        return publish.partition is not None

    for each in calls:
        assert not queues.place(each, find, NOW)
    found.update(dict.fromkeys(calls, 0))
    assert queues.place(calls[2], find, NOW), "the last one wakes first"
    assert [queues.enter(each, NOW) for each in calls] == [True, False, False]


def test_what_fails_before_its_partition_is_known_is_not_overtaken():
    queues = Queues()
    first, second, third = call("a"), call("b"), call("a")
    for each in (first, second, third):
        each.partition = None
        assert not queues.place(each, lambda _: False, NOW)
    assert queues.leave(first, "E_X")
    assert [queues.overtook(each) for each in (first, second, third)] == ["", "", "E_X"]
    assert not queues.leave(third), "it was taken out"
    assert not queues.leave(second)
