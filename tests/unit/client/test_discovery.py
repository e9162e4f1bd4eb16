"""Asking nsqlookupd: both forms of answers, the union, and what happens while one of them fails."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from flintmq.client.discovery import HttpFetch, Lookup, Node, PollTimes, parse_nodes
from flintmq.errors import DiscoveryError

A, B = "http://a:4161", "http://b:4161"


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
    """Answers from a dict: (status, body), or an exception."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes] | Exception] = {}
        self.asked: list[str] = []
        self.running = self.running_max = 0

    async def __call__(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        self.asked.append(url)
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        answer = self.answers[url.partition("?")[0].rpartition("/")[0]]
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


def addresses(nodes) -> list[str]:
    return [node.address for node in nodes]


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
    assert fetch.asked == [f"{A}/lookup?topic=orders", f"{B}/lookup?topic=orders"]
    assert fetch.running_max == 2


async def test_the_topic_is_quoted(lookup, fetch):
    fetch.answers = {A: (200, bare()), B: (200, bare())}
    await lookup.topic("a#ephemeral")
    assert fetch.asked[0].endswith("/lookup?topic=a%23ephemeral")


async def test_an_unknown_topic_is_an_answer(lookup, fetch):
    fetch.answers = {A: (404, b'{"message":"TOPIC_NOT_FOUND"}'), B: (200, bare(node("n1")))}
    assert addresses(await lookup.topic("t")) == ["n1:4150"]
    fetch.answers[B] = (404, b"")
    assert await lookup.topic("t") == ()


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
    assert fetch.asked == [f"{A}/nodes", f"{B}/nodes"]


async def test_close(lookup, fetch):
    await lookup.close()
    assert fetch.asked == ["closed"]


def test_a_node_is_its_address():
    assert Node("host", 4150).address == "host:4150"


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
