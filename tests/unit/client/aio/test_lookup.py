"""Asking nsqlookupd: which there are, the union of what they say, and what happens while one of them fails.

What their answers mean: test_topology.py.
"""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.sim.loop import Simulation
from tests.unit.client.lookup_answers import bare, node

from flintmq.client.aio.lookup import UNANSWERED_MAX, Lookup
from flintmq.client.core.discovery import DEMOTED_AFTER, DEMOTED_EVERY, PATIENCE_S
from flintmq.errors import DiscoveryError

A, B = "http://a:4161", "http://b:4161"
HOW = "&access=r&metainfo=true"


class FakeFetch:
    """Answers from a dict: (status, body), or an exception; to listlookup from another one, 404 by default."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes] | Exception] = {}
        self.lists: dict[str, tuple[int, bytes]] = {}
        self.asked: list[str] = []
        self.running = self.running_max = 0

    async def __call__(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        self.asked.append(url)
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        address = url.partition("?")[0].rpartition("/")[0]
        answer = self.answers[address]
        if url.endswith("/listlookup") and not isinstance(answer, Exception):
            answer = self.lists.get(address, (404, b'{"message":"NOT_FOUND"}'))
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None:
        self.asked.append("closed")


@pytest.fixture
def fetch():
    return FakeFetch()


@pytest.fixture
def lookup(fetch):
    return Lookup([A, B], 1.0, fetch)


def addresses(found) -> list[str]:
    return [node.address for node in getattr(found, "nodes", found)]


def questions(fetch) -> list[str]:
    return [url for url in fetch.asked if not url.endswith("/listlookup")]


# --- several nsqlookupd ---


async def test_all_are_asked_at_the_same_time_and_united(lookup, fetch):
    fetch.answers = {A: (200, bare(node("n1"), node("n2"))), B: (200, bare(node("n2"), node("n3")))}
    assert addresses(await lookup.topic("orders")) == ["n1:4150", "n2:4150", "n3:4150"]
    assert questions(fetch) == [f"{A}/lookup?topic=orders{HOW}", f"{B}/lookup?topic=orders{HOW}"]
    assert fetch.running_max == 2


async def test_the_topic_is_quoted(lookup, fetch):
    fetch.answers = {A: (200, bare()), B: (200, bare())}
    await lookup.topic("a#ephemeral")
    assert questions(fetch)[0].endswith(f"/lookup?topic=a%23ephemeral{HOW}")


async def test_an_unknown_topic_is_an_answer(lookup, fetch):
    fetch.answers = {A: (404, b'{"message":"TOPIC_NOT_FOUND"}'), B: (200, bare(node("n1")))}
    assert addresses(await lookup.topic("t")) == ["n1:4150"]
    fetch.answers[B] = (404, b"")
    assert addresses(await lookup.topic("t")) == []


@pytest.mark.parametrize("failure", [OSError("refused"), (500, b"oops"), (200, b"<html>")])
async def test_a_failing_one_is_skipped_and_its_last_word_stands(lookup, fetch, failure, caplog):
    fetch.answers = {A: (200, bare(node("n1"))), B: (200, bare(node("n2")))}
    await lookup.topic("t")
    fetch.answers[B] = failure
    for _ in range(3):
        assert addresses(await lookup.topic("t")) == ["n1:4150", "n2:4150"]
    assert caplog.text.count("is skipped") == 1, "told once, not at every poll"
    fetch.answers[B] = (200, bare())
    assert addresses(await lookup.topic("t")) == ["n1:4150"]


async def test_all_failing_is_an_error_that_names_them(lookup, fetch):
    fetch.answers = {A: OSError("refused"), B: (500, b"oops")}
    with pytest.raises(DiscoveryError) as caught:
        await lookup.topic("t")
    assert f"{A}: refused" in str(caught.value)
    assert f"{B}: status 500" in str(caught.value)


async def test_all_nodes(lookup, fetch):
    fetch.answers = {A: (200, bare(node("n1"))), B: (404, b"")}
    assert addresses(await lookup.nodes()) == ["n1:4150"]
    assert questions(fetch) == [f"{A}/nodes", f"{B}/nodes"]


async def test_close(lookup, fetch):
    await lookup.close()
    assert fetch.asked == ["closed"]


# --- which nsqlookupd there are ---


def members(*addresses: str) -> tuple[int, bytes]:
    nodes = []
    for address in addresses:
        host, _, port = address.removeprefix("http://").rpartition(":")
        nodes.append({"ID": address, "NodeIP": host, "TcpPort": "4160", "HttpPort": port, "RpcPort": "1", "Epoch": 3})
    return 200, json.dumps({"lookupdleader": nodes[0], "lookupdnodes": nodes}).encode()


C = "http://c:4161"


async def test_those_that_are_listed_are_asked_and_the_seeds_stay(lookup, fetch):
    fetch.lists = {A: members(A, C)}
    fetch.answers = {A: (200, bare(node("n1"))), B: (200, bare()), C: (200, bare(node("n3")))}
    assert addresses(await lookup.topic("t")) == ["n1:4150", "n3:4150"]
    assert lookup.addresses == (A, B, C)
    assert fetch.asked[:2] == [f"{A}/listlookup", f"{B}/listlookup"], "first of all"


def test_lists_are_asked_for_rarely_and_of_nsqs_own_more_rarely(fetch):
    with Simulation(0) as sim:

        async def scenario():
            lookup = Lookup([A, B], 1.0, fetch)
            fetch.lists = {A: members(A)}
            fetch.answers = {A: (200, bare()), B: (200, bare())}
            for _ in range(200):
                await lookup.topic("t")
                await asyncio.sleep(10)

        sim.run(scenario())
    assert 30 <= fetch.asked.count(f"{A}/listlookup") <= 34
    assert 3 <= fetch.asked.count(f"{B}/listlookup") <= 4


def test_who_is_listed_no_more_is_asked_no_more(fetch):
    with Simulation(0) as sim:

        async def scenario():
            lookup = Lookup([A], 1.0, fetch)
            fetch.lists = {A: members(A, C), C: members(A, C)}
            fetch.answers = {A: (200, bare(node("n1"))), C: (200, bare(node("n3")))}
            await lookup.topic("t")
            fetch.lists[A] = members(A)
            fetch.answers[C] = OSError("refused")
            await asyncio.sleep(61)
            assert addresses(await lookup.topic("t")) == ["n1:4150"]
            assert lookup.addresses == (A,)
            fetch.answers[A] = OSError("refused")
            await asyncio.sleep(61)
            with pytest.raises(DiscoveryError):
                await lookup.topic("t")
            assert lookup.addresses == (A,), "a seed is never dropped"

        sim.run(scenario())


async def test_who_gave_no_list_is_not_waited_for_twice(lookup, fetch):
    fetch.answers = {A: OSError("no answer within 1 s"), B: (200, bare(node("n1")))}
    assert addresses(await lookup.topic("t")) == ["n1:4150"]
    assert fetch.asked.count(f"{A}/lookup?topic=t{HOW}") == 0
    await lookup.topic("t")
    assert fetch.asked.count(f"{A}/lookup?topic=t{HOW}") == 1


async def test_a_failing_one_is_asked_last_and_gets_its_place_back(lookup, fetch):
    fetch.answers = {A: OSError("refused"), B: (200, bare(node("n1")))}
    polls = 40
    for _ in range(polls):
        await lookup.topic("t")
    asked = fetch.asked.count(f"{A}/lookup?topic=t{HOW}")
    assert polls / DEMOTED_EVERY <= asked <= polls / DEMOTED_EVERY + DEMOTED_AFTER
    fetch.answers[A] = (200, bare(node("n2")))
    for _ in range(DEMOTED_EVERY):
        found = await lookup.topic("t")
    assert addresses(found) == ["n2:4150", "n1:4150"]
    fetch.asked.clear()
    for _ in range(10):
        await lookup.topic("t")
    assert fetch.asked.count(f"{A}/lookup?topic=t{HOW}") == 10


async def test_a_failing_one_is_asked_at_once_when_no_other_answers(lookup, fetch):
    fetch.answers = {A: OSError("refused"), B: (200, bare())}
    for _ in range(DEMOTED_AFTER + 1):
        await lookup.topic("t")
    fetch.answers = {A: (200, bare(node("n2"))), B: OSError("refused")}
    for _ in range(3):
        assert addresses(await lookup.topic("t")) == ["n2:4150"]


# --- one that hangs ---

TIMEOUT_S = 5.0
GRACE_S = 0.1


class HangingFetch(FakeFetch):
    """Addresses in ``hanging`` answer ``after_s`` later, or fail with the timeout."""

    def __init__(self) -> None:
        super().__init__()
        self.hanging: dict[str, float] = {}

    async def __call__(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        address = url.partition("?")[0].rpartition("/")[0]
        if (after_s := self.hanging.get(address)) is not None:
            await asyncio.sleep(min(after_s, timeout_s))
            if after_s > timeout_s:
                self.asked.append(url)
                raise TimeoutError(f"no answer within {timeout_s:g} s")
        return await super().__call__(url, timeout_s)


def play(scenario) -> None:
    fetch = HangingFetch()
    fetch.answers = {A: (200, bare(node("n1"))), B: (200, bare(node("n2")))}
    with Simulation(0) as sim:
        sim.run(scenario(fetch))


def now() -> float:
    return asyncio.get_running_loop().time()


def test_one_that_hangs_holds_up_the_first_answer_for_a_second_and_later_ones_not_at_all():
    async def scenario(fetch):
        fetch.hanging[B] = 3600.0
        lookup = Lookup([A, B], TIMEOUT_S, fetch)
        began = now()
        assert addresses(await lookup.topic("t")) == ["n1:4150"]
        assert now() - began <= PATIENCE_S + GRACE_S
        assert list(lookup.unanswered) == [B]
        began = now()
        assert addresses(await lookup.nodes()) == ["n1:4150"]
        assert addresses(await lookup.topic("other")) == ["n1:4150"]
        assert now() - began <= GRACE_S, "it was waited for once"
        await lookup.close()
        assert not lookup.unanswered

    play(scenario)


def test_what_comes_late_counts_and_is_told():
    async def scenario(fetch):
        told: list[str] = []
        fetch.hanging[B] = 1.2  # the list, and then the topic
        lookup = Lookup([A, B], TIMEOUT_S, fetch, came_late=told.append)
        assert addresses(await lookup.topic("t")) == ["n1:4150"]
        assert told == []
        await asyncio.sleep(3)
        assert told == ["t"]
        assert addresses(lookup.known("t")) == ["n1:4150", "n2:4150"]
        fetch.hanging[B] = 0.5
        began = now()
        assert addresses(await lookup.topic("t")) == ["n1:4150", "n2:4150"]
        assert now() - began >= 0.5, "it has answered, so it is waited for again"
        assert told == ["t"]
        fetch.hanging[B] = 3600.0
        assert addresses(await lookup.topic("t")) == ["n1:4150", "n2:4150"], "what it said last stands"
        await lookup.close()

    play(scenario)


def test_one_that_lists_nothing_in_time_keeps_none_of_the_others_from_being_asked():
    async def scenario(fetch):
        fetch.lists = {A: members(A, C)}
        fetch.answers[C] = (200, bare(node("n3")))
        fetch.hanging[B] = 3600.0
        lookup = Lookup([A, B], TIMEOUT_S, fetch)
        assert addresses(await lookup.topic("t")) == ["n1:4150"]
        await asyncio.sleep(TIMEOUT_S)
        assert lookup.addresses == (A, B, C), "taken when the last one has failed"
        assert addresses(await lookup.topic("t")) == ["n1:4150", "n3:4150"]
        await lookup.close()

    play(scenario)


def test_one_that_hangs_is_waited_for_when_no_other_answers():
    async def scenario(fetch):
        fetch.hanging[B] = 2.0
        fetch.answers[A] = OSError("refused")
        lookup = Lookup([A, B], TIMEOUT_S, fetch)
        assert addresses(await lookup.topic("t")) == ["n2:4150"]
        fetch.hanging[B] = 3600.0
        with pytest.raises(DiscoveryError, match="no answer within 5 s"):
            await lookup.topic("t")

    play(scenario)


def test_one_that_hangs_is_not_asked_for_ever_more():
    async def scenario(fetch):
        lookup = Lookup([A, B], 60.0, fetch)
        await lookup.topic("t")
        fetch.hanging[B] = 3600.0
        most = 0
        for number in range(3 * UNANSWERED_MAX):
            await lookup.topic(f"t{number}")
            most = max(most, len(lookup._asking))
        assert most <= UNANSWERED_MAX + 1
        await lookup.close()

    play(scenario)
