"""The queue of a partition: whose turn it is, and who fails with whom."""

from __future__ import annotations

from flintmq.client.blocking.queues import FORGOTTEN_S, Queues

NOW = 100.0


class Call:
    def __init__(self, key: object) -> None:
        self.deadline = NOW
        self.key = key
        self.overtook = ""


def test_one_at_a_time_in_the_order_of_the_calls():
    queues: Queues[Call] = Queues()
    first, second, third = Call("a"), Call("b"), Call("a")
    assert queues.enter("t", 0, first, NOW)
    assert not queues.enter("t", 0, second, NOW)
    assert not queues.enter("t", 0, third, NOW)
    assert queues.enter("t", 0, first, NOW), "it stands there already"
    assert queues.leave("t", 0, first)
    assert not queues.enter("t", 0, third, NOW)
    assert queues.enter("t", 0, second, NOW)
    assert queues.leave("t", 0, second)
    assert not queues.leave("t", 0, second), "it left before"
    assert queues.enter("t", 0, third, NOW)
    assert not queues.leave("t", 0, third), "nobody waits"
    assert len(queues) == 0


def test_partitions_and_topics_do_not_wait_for_each_other():
    queues: Queues[Call] = Queues()
    calls = [Call("a") for _ in range(3)]
    assert queues.enter("t", 0, calls[0], NOW)
    assert queues.enter("t", 1, calls[1], NOW)
    assert queues.enter("u", 0, calls[2], NOW)
    assert len(queues) == 3


def test_those_of_the_same_key_behind_a_failure_are_told():
    queues: Queues[Call] = Queues()
    calls = [Call(key) for key in ("a", "b", "a", "b")]
    for call in calls:
        queues.enter("t", 0, call, NOW)
    queues.leave("t", 0, calls[1], "TIMEOUT")
    assert [call.overtook for call in calls] == ["", "", "", "TIMEOUT"]
    queues.leave("t", 0, calls[0])
    assert calls[2].overtook == "", "it went well"


def test_one_that_gives_up_waiting_leaves_from_the_middle():
    queues: Queues[Call] = Queues()
    calls = [Call(key) for key in ("a", "b", "b")]
    for call in calls:
        queues.enter("t", 0, call, NOW)
    queues.leave("t", 0, calls[1], "TIMEOUT")
    assert queues.enter("t", 0, calls[0], NOW)
    queues.leave("t", 0, calls[0])
    assert queues.enter("t", 0, calls[2], NOW)


def test_one_that_never_left_is_passed_by():
    queues: Queues[Call] = Queues()
    calls = [Call(key) for key in ("a", "a")]
    queues.enter("t", 0, calls[0], NOW)
    calls[1].deadline = NOW + 10
    assert not queues.enter("t", 0, calls[1], NOW + FORGOTTEN_S)
    assert queues.enter("t", 0, calls[1], NOW + FORGOTTEN_S + 0.1)
    queues.leave("t", 0, calls[1])
    assert len(queues) == 0
