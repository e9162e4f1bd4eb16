"""Asking several nsqlookupd without an event loop: who is waited for, and for how long."""

from __future__ import annotations

import json
import threading

import pytest

from flintmq.client.blocking.lookup import DEADLINE_SLACK_S, Lookup
from flintmq.client.blocking.timers import Timers
from flintmq.client.core.discovery import DEMOTED_AFTER, LISTS_INTERVAL_S, NO_LIST_S, PATIENCE_S, topic_path
from flintmq.client.core.topology import Topology
from flintmq.errors import DiscoveryError
from flintmq.testing import ManualClock

A, B = "http://a:4161", "http://b:4161"
TIMEOUT_S = 5.0


def listing(*hosts: str) -> tuple[int, bytes]:
    return 200, json.dumps({"producers": [{"broadcast_address": host, "tcp_port": 4150} for host in hosts]}).encode()


class World:
    """A lookup whose answers and threads are the test's."""

    def __init__(self, threads) -> None:
        self.clock = ManualClock()
        self.timers = Timers(self.clock)
        self.threads = threads
        self.answers: dict[str, tuple[int, bytes] | Exception] = {}
        self.lists: dict[str, tuple[int, bytes] | Exception] = {}
        self.asked: list[str] = []
        self.outcomes: list[object] = []
        self.told = 0
        self.lookup = Lookup([A, B], TIMEOUT_S, self.fetch, threads, self.timers, threading.RLock(), self.tell)

    def tell(self) -> None:
        self.told += 1

    def fetch(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        assert timeout_s == TIMEOUT_S
        self.asked.append(url)
        host, _, path = url.removeprefix("http://").partition("/")
        if path == "listlookup":
            answer = self.lists.get(f"http://{host}", (404, b""))
        else:
            answer = self.answers[f"http://{host}"]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def ask(self) -> None:
        self.lookup.ask(topic_path("t"), self.note)

    def note(self, outcome) -> None:
        self.outcomes.append(
            outcome if isinstance(outcome, DiscoveryError) else sorted(node.address for node in outcome.nodes)
        )

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(round(seconds * 1e9) + 1000)
        self.timers.run_due()


@pytest.fixture
def world(threads):
    return World(threads)


def test_answers_are_united(world):
    world.answers = {A: listing("n1", "n2"), B: listing("n2", "n3")}
    world.ask()
    world.threads.work()
    assert world.outcomes == [], "the other one is waited for"
    world.threads.work()
    assert world.outcomes == [["n1:4150", "n2:4150", "n3:4150"]]
    assert world.told == 2
    assert world.timers.next_at() is None


def test_an_unknown_topic_is_an_answer(world):
    world.answers = {A: (404, b""), B: (404, b"")}
    world.ask()
    world.threads.work_all()
    assert world.outcomes == [[]]


def test_one_that_hangs_gets_a_little_time_after_the_first_answer(world):
    world.answers = {A: listing("n1"), B: listing("n2")}
    world.ask()
    world.threads.work(0)
    world.pass_time(PATIENCE_S)
    assert world.outcomes == [["n1:4150"]]
    world.threads.work(0)
    assert len(world.outcomes) == 1, "told once"
    world.answers[B] = OSError("down")
    world.ask()
    world.threads.work_all()
    assert world.outcomes[1] == ["n1:4150", "n2:4150"], "what came late counts the next time, and stands"


def test_one_that_hangs_is_waited_for_once(world):
    world.answers = {A: listing("n1"), B: listing("n2")}
    world.ask()
    world.threads.work(0)
    world.pass_time(PATIENCE_S)
    assert world.lookup.unanswered == (B,)
    world.ask()
    world.threads.work(1)
    assert world.outcomes == [["n1:4150"], ["n1:4150"]], "the second one at once"
    world.threads.work_all()
    assert world.lookup.unanswered == ()
    world.ask()
    world.threads.work(0)
    assert len(world.outcomes) == 2, "it has answered, so it is waited for again"
    world.threads.work_all()
    assert world.outcomes[2] == ["n1:4150", "n2:4150"]


def test_one_that_failed_the_last_time_is_not_waited_for(world, caplog):
    world.answers = {A: listing("n1"), B: OSError("no answer within 5 s")}
    world.ask()
    world.threads.work_all()
    world.ask()
    world.threads.work(0)
    assert world.outcomes == [["n1:4150"], ["n1:4150"]]
    assert caplog.text.count("is skipped") == 1


def test_no_answer_at_all_is_an_error_at_the_deadline(world):
    world.ask()
    world.pass_time(TIMEOUT_S + DEADLINE_SLACK_S)
    (error,) = world.outcomes
    assert isinstance(error, DiscoveryError)
    assert A in str(error)
    assert B in str(error)
    world.answers = {A: OSError("x"), B: (500, b"")}
    world.threads.work_all()
    assert len(world.outcomes) == 1


def test_failures_all_around_are_an_error_at_once(world):
    world.answers = {A: OSError("refused"), B: (200, b"not JSON")}
    world.ask()
    world.threads.work_all()
    assert "refused" in str(world.outcomes[0])
    assert "cannot be read" in str(world.outcomes[0])


# --- which nsqlookupd there are ---

C = "http://c:4161"


def members(*hosts: str) -> tuple[int, bytes]:
    return 200, json.dumps({"lookupdnodes": [{"NodeIP": host, "HttpPort": "4161"} for host in hosts]}).encode()


def test_those_that_are_listed_are_asked_as_well(world):
    world.answers = {A: listing("n1"), B: listing("n2"), C: listing("n3")}
    world.lists = {A: members("a", "c")}
    world.ask()
    world.threads.work_all()
    assert world.outcomes == [["n1:4150", "n2:4150", "n3:4150"]]
    assert world.lookup.addresses == (A, B, C)
    assert world.asked == [
        f"{A}/listlookup", f"{A}/lookup?topic=t", f"{B}/listlookup", f"{B}/lookup?topic=t", f"{C}/lookup?topic=t",
    ]  # fmt: skip
    world.ask()
    world.threads.work_all()
    assert world.asked[5:] == [f"{each}/lookup?topic=t" for each in (A, B, C)], "lists are asked for rarely"


def test_one_without_lists_is_asked_for_them_even_more_rarely(world):
    world.answers = {A: listing("n1"), B: listing("n2")}
    world.lists = {A: members("a")}
    for after_s, asked in ((0.0, [A, B]), (LISTS_INTERVAL_S + 1, [A]), (NO_LIST_S, [A, B])):
        world.asked.clear()
        world.pass_time(after_s)
        world.ask()
        world.threads.work_all()
        assert [url for url in world.asked if url.endswith("/listlookup")] == [f"{each}/listlookup" for each in asked]


def test_one_that_gives_no_list_for_want_of_an_answer_is_not_asked_for_the_topic(world):
    world.answers = {A: listing("n1"), B: listing("n2")}
    world.lists = {B: OSError("down")}
    world.ask()
    world.threads.work_all()
    assert world.outcomes == [["n1:4150"]]
    assert f"{B}/lookup?topic=t" not in world.asked


def test_one_that_fails_on_end_is_asked_when_no_other_answers(world):
    world.answers = {A: listing("n1"), B: OSError("down")}
    for _ in range(DEMOTED_AFTER):
        world.ask()
        world.threads.work_all()
    world.asked.clear()
    world.ask()
    world.threads.work_all()
    assert world.asked == [f"{A}/lookup?topic=t"]
    world.answers = {A: OSError("down too"), B: listing("n2")}
    world.ask()
    world.threads.work_all()
    assert world.outcomes[-1] == ["n1:4150", "n2:4150"]


def test_a_leader_that_was_found_wrong_is_believed_last(world):
    def leading(host: str) -> tuple[int, bytes]:
        peer = {"broadcast_address": host, "tcp_port": 4150}
        answer = {"producers": [peer], "partitions": {"0": peer}, "meta": {"partition_num": 1}}
        return 200, json.dumps({"status_code": 200, "data": answer}).encode()

    world.answers = {A: leading("n1"), B: leading("n2")}
    found: list[Topology] = []
    for distrusted in ((), ((0, "n1:4150"),)):
        world.lookup.ask(topic_path("t", "w"), found.append, distrusted)
        world.threads.work_all()
    assert [topology.leaders for topology in found] == [{0: "n1:4150"}, {0: "n2:4150"}]
    assert world.asked[-1].endswith("/lookup?topic=t&access=w&metainfo=true")


def test_a_request_that_no_thread_can_be_started_for_is_a_failed_one(world, monkeypatch):
    def refuse(job: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(world.threads, "run", refuse)
        world.ask()
        assert world.outcomes == [], "not before it has been asked"
        world.pass_time(0)
    (error,) = world.outcomes
    assert "can't start new thread" in str(error)
    assert world.lookup.unanswered == ()
    world.answers = {A: listing("n"), B: listing("n")}
    world.ask()
    world.threads.work_all()
    assert world.outcomes[1:] == [["n:4150"]]


def test_an_interrupted_request_is_not_waited_for(world, monkeypatch):
    def refuse(job: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(world.threads, "run", refuse)
        world.ask()
    assert world.lookup.unanswered == ()
    world.pass_time(TIMEOUT_S + DEADLINE_SLACK_S)
    assert len(world.outcomes) == 1
