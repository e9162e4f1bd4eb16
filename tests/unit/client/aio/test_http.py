"""HTTP of clients on asyncio, against a real server: answers, deadlines, refusals, bounds."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from aiohttp import web
from tests.unit.client.lookup_answers import bare, node

from flintmq.client.aio.http import HttpFetch
from flintmq.client.aio.lookup import Lookup
from flintmq.client.options import ConnectionOptions


def addresses(found) -> list[str]:
    return [node.address for node in found.nodes]


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


async def test_a_token_is_asked_for_before_each_question(server):
    script, url = server
    tokens = iter(["first", "second"])

    async def handler(request):
        return web.Response(text=request.headers["Authorization"])

    script["handler"] = handler
    fetch = HttpFetch(ConnectionOptions(lookup_token=lambda: next(tokens)))
    assert await fetch(url, 5.0) == (200, b"Bearer first")
    assert await fetch(url, 5.0) == (200, b"Bearer second")
    with pytest.raises(OSError, match=r"lookup_token\(\) raised StopIteration"):
        await fetch(url, 5.0)
    await fetch.close()


async def test_a_token_that_does_not_come(server):
    has_to_end = threading.Event()
    fetch = HttpFetch(ConnectionOptions(lookup_token=lambda: str(has_to_end.wait())))
    with pytest.raises(OSError, match=r"no token within 0.05 s: waiting for lookup_token\(\)"):
        await fetch(server[1], 0.05)
    has_to_end.set()
    await fetch.close()


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
    monkeypatch.setattr("flintmq.client.core.http.ANSWER_SIZE_MAX", 1000)

    async def handler(request):
        return web.Response(body=bytes(int(request.query["size"])))

    script["handler"] = handler
    assert await http(url + "/?size=1000", 5.0) == (200, bytes(1000))
    with pytest.raises(OSError, match="larger than 1000 bytes"):
        await http(url + "/?size=1001", 5.0)
