"""Asking nsqlookupd: which there are, the union of what they say, and what happens while one of them fails.

What their answers mean: test_topology.py.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from tests.sim.loop import Simulation

from flintmq.client.discovery import (
    DEMOTED_AFTER,
    DEMOTED_EVERY,
    Directory,
    HttpFetch,
    Lookup,
    Node,
    PollTimes,
    parse_nodes,
)
from flintmq.client.options import NSQLOOKUPD_COUNT_MAX
from flintmq.errors import DiscoveryError

A, B = "http://a:4161", "http://b:4161"
HOW = "&access=r&metainfo=true"


def node(host: str, port: int = 4150) -> dict[str, object]:
    return {
        "remote_address": "",
        "hostname": host,
        "broadcast_address": host,
        "tcp_port": port,
        "http_port": port + 1,
        "version": "1.3.0",
        "topology_zone": "z",
    }


def bare(*nodes: dict[str, object]) -> bytes:
    return json.dumps({"channels": [], "producers": list(nodes)}).encode()


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


# --- answers ---


@pytest.mark.parametrize(
    "wrap",
    [lambda data: data, lambda data: {"status_code": 200, "status_txt": "OK", "data": data}],
    ids=["bare", "wrapped"],
)
def test_both_forms(wrap):
    body = json.dumps(wrap({"channels": ["c"], "producers": [node("n1"), node("n2", 5000)], "meta": {}})).encode()
    assert addresses(parse_nodes(body)) == ["n1:4150", "n2:5000"]


@pytest.mark.parametrize(
    "body", [b'{"producers":null}', b'{"producers":[]}', b"{}", b'{"status_code":200,"data":null}', b'{"data":{}}']
)
def test_no_nodes(body):
    assert parse_nodes(body) == ()


def test_nodes_that_cannot_be_connected_to_are_left_out():
    assert addresses(parse_nodes(bare(node(""), node("n", 0), node("::1")))) == ["[::1]:4150"]


@pytest.mark.parametrize("body", [b"", b"OK", b"[]", b'{"producers":5}', b'{"producers":[{"tcp_port":"x"}]}', b"\xff"])
def test_what_cannot_be_read(body):
    with pytest.raises(DiscoveryError, match="cannot be read"):
        parse_nodes(body)


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


def test_a_node_is_its_address():
    assert Node("host", 4150).address == "host:4150"


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


def test_a_directory_is_bounded():
    directory = Directory([A])
    directory.note_list(A, tuple(f"http://h:{port}" for port in range(1, 1000)))
    directory.take_lists()
    assert len(directory.addresses) == NSQLOOKUPD_COUNT_MAX
    assert directory.addresses[0] == A


# --- polling ---


def exact(interval_s: float, jitter: float) -> float:
    assert jitter == 0.3
    return interval_s


def test_polls_become_rare_and_hurry_after_a_loss():
    times = PollTimes(60.0, 0.3)
    assert [times.next_s(exact) for _ in range(7)] == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert times.hurry(), "a wait of 60 s is to be cut short"
    assert times.next_s(exact) == 2.0
    assert not times.hurry(), "the present one is short: losses in quick succession must not put the poll off for ever"
    assert [times.next_s(exact) for _ in range(2)] == [2.0, 4.0]


def test_polls_are_never_rarer_than_asked_for():
    times = PollTimes(0.5, 0.3)
    assert [times.next_s(exact) for _ in range(3)] == [0.5, 0.5, 0.5]


def test_a_topic_with_partitions_is_polled_more_often():
    times = PollTimes(60.0, 0.3)
    assert [times.next_s(exact) for _ in range(5)] == [2.0, 4.0, 8.0, 16.0, 32.0]
    times.limit(5.0, 1.0)
    assert [times.next_s(exact) for _ in range(2)] == [5.0, 5.0]
    assert times.hurry()
    assert [times.next_s(exact) for _ in range(4)] == [1.0, 2.0, 4.0, 5.0]


# --- over HTTP ---


@pytest.fixture
async def server():
    """A web server: a dict whose "handler" the test sets, and its URL."""
    script: dict[str, Any] = {}

    async def answer(request):
        return await script["handler"](request)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield script, f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.fixture
async def http():
    fetch = HttpFetch()
    yield fetch
    await fetch.close()


async def test_http_answers(server, http):
    script, url = server

    async def handler(request):
        assert request.headers["Accept"] == "application/vnd.nsq; version=1.0"
        if request.path == "/listlookup":
            return web.Response(status=404)
        return web.Response(body=bare(node(request.query["topic"])))

    script["handler"] = handler
    lookup = Lookup([url], 5.0, http)
    assert addresses(await lookup.topic("t")) == ["t:4150"]


async def test_http_deadline(server, http):
    script, url = server

    async def handler(request):
        await asyncio.sleep(30)

    script["handler"] = handler
    with pytest.raises(OSError, match=r"no answer within 0\.05 s"):
        await http(url + "/lookup", 0.05)


async def test_http_refused(http):
    with pytest.raises(OSError, match=r"127\.0\.0\.1"):
        await http("http://127.0.0.1:1/lookup", 5.0)


async def test_http_answer_too_large(server, http, monkeypatch):
    script, url = server
    monkeypatch.setattr("flintmq.client.discovery.ANSWER_SIZE_MAX", 1000)

    async def handler(request):
        return web.Response(body=bytes(int(request.query["size"])))

    script["handler"] = handler
    assert await http(url + "/?size=1000", 5.0) == (200, bytes(1000))
    with pytest.raises(OSError, match="larger than 1000 bytes"):
        await http(url + "/?size=1001", 5.0)
