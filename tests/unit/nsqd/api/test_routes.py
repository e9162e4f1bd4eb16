"""The tables of routes: each has its permission and says what it obeys; those that look at everything wait in line."""

from __future__ import annotations

import re
from asyncio import Lock, create_task, sleep
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from flintmq.env import Env
from flintmq.net.http_auth import OPEN, Table
from flintmq.net.http_messages import HttpError, Request, Response, plain_response
from flintmq.net.http_router import Router
from flintmq.nsqd.api.arguments import KNOWN, NotHere, style_of
from flintmq.nsqd.api.route import Route, add_routes
from flintmq.nsqd.api.routes import PERMISSIONS as NSQD_TABLE
from flintmq.nsqd.in_turns import PER_TURN, in_turns
from flintmq.nsqd.options import NsqdOptions
from flintmq.nsqd.server import Nsqd
from flintmq.nsqlookupd import store_api
from flintmq.nsqlookupd.http_permissions import CLUSTER_TABLE as NSQLOOKUPD_CLUSTER_TABLE
from flintmq.nsqlookupd.http_permissions import TABLE as NSQLOOKUPD_TABLE
from flintmq.nsqlookupd.options import NsqlookupdOptions
from flintmq.nsqlookupd.server import Nsqlookupd
from flintmq.storage import OsFiles
from flintmq.wire.server import ServerLimits

PERMISSIONS_PAGE = Path(__file__).parents[4] / "docs/reference/http-permissions.md"


def compare(router: Router, table: Table) -> None:
    routes = {(method, path) for method, path, _ in router.routes() if not path.startswith("/debug/")}
    assert routes - set(table) == set(), "say what these ask for"
    assert set(table) - routes == set(), "these are no routes"


async def test_nsqd(tmp_path):
    files = OsFiles(str(tmp_path))
    nsqd = Nsqd(Env(), files, NsqdOptions())
    compare(nsqd.router(), NSQD_TABLE)
    files.close()


async def test_nsqlookupd():
    compare(Nsqlookupd(Env(), NsqlookupdOptions())._http.router, NSQLOOKUPD_TABLE)


async def test_nsqlookupd_in_a_cluster():
    options = NsqlookupdOptions(cluster_store=("a:1",))
    compare(Nsqlookupd(Env(), options)._http.router, {**NSQLOOKUPD_TABLE, **NSQLOOKUPD_CLUSTER_TABLE})


async def test_the_page_of_permissions_has_every_route(tmp_path):
    files = OsFiles(str(tmp_path))
    nsqd = Nsqd(Env(), files, NsqdOptions()).router()
    nsqlookupd = Nsqlookupd(Env(), NsqlookupdOptions(cluster_store=("a:1",)))._http.router
    store = Router()
    store_api.add_routes(store, None, Env())  # type: ignore[arg-type]
    page = PERMISSIONS_PAGE.read_text(encoding="utf-8")
    listed = {title: set(re.findall(r"^\| `(\w+ \S+)` \|", part, re.M)) for title, part in parts(page)}
    both = listed.pop("both")
    assert {f"{method} {path}" for method, path, _ in nsqd.routes()} == listed.pop("nsqd") | both
    assert {f"{method} {path}" for method, path, _ in nsqlookupd.routes()} == listed.pop("nsqlookupd") | both
    assert {f"{method} {path}" for method, path, _ in store.routes()} == listed.pop("store")
    assert not listed
    files.close()


def parts(page: str) -> list[tuple[str, str]]:
    """The tables of the page by the daemon that they are of."""
    found: dict[str, str] = {}
    for part in page.split("\n## ")[1:]:
        title = part.partition("\n")[0]
        name = "store" if "store" in title else re.split(r"\W", title)[0]
        found[name] = found.get(name, "") + part
    return list(found.items())


async def test_every_route_says_which_parameters_it_takes(tmp_path):
    """What is not obeyed is refused: a new route has to say what it obeys."""
    files = OsFiles(str(tmp_path))
    nsqd = Nsqd(Env(), files, NsqdOptions()).router()
    nsqlookupd = Nsqlookupd(Env(), NsqlookupdOptions(cluster_store=("a:1",)))._http.router
    silent = {path for router in (nsqd, nsqlookupd) for _, path, route in router.routes() if route.takes is None}
    assert {path for path in silent if not path.startswith("/debug/")} == {"/ping"}
    files.close()


@pytest.mark.parametrize("table", [NSQD_TABLE, NSQLOOKUPD_TABLE])
def test_what_concerns_one_topic_says_so(table):
    for (_, path), row in table.items():
        is_below = path.startswith(("/topic/", "/channel/", "/message/"))
        is_publish = "pub" in path or "put" in path
        assert row.by_topic == (is_below or is_publish or path in ("/stats", "/lookup", "/channels")), path


class Walker:
    """A room whose requests look at many things."""

    def __init__(self, things: int) -> None:
        self.things = things
        self.looked_at = 0
        self.running = self.most_running = 0

    async def walk(self, request: Request) -> Response:
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            async for _ in in_turns(range(self.things)):
                self.looked_at += 1
        finally:
            self.running -= 1
        if request.query_bytes == b"topic=none":
            raise NotHere("none", None, "TOPIC_NOT_FOUND")
        return plain_response("walked")


def walk_router(room: Walker) -> Router:
    router = Router(KNOWN)
    row = Route("GET", "/walk", OPEN, Walker.walk, ("topic",), is_walk=True)
    add_routes(
        router,
        room,
        [row],
        ServerLimits(),
        style_of("nsq"),
        lambda missing: HttpError(404, f"{missing.topic} is led elsewhere"),
        Lock(),
    )
    return router


def ask(router: Router, query: bytes = b"") -> Coroutine[Any, Any, Response]:
    handler = router.exact[b"GET", b"/walk"].handler
    return cast(Coroutine[Any, Any, Response], handler(Request(b"GET", b"/walk", query, {}, "@")))


async def test_others_wait_for_one_request_that_looks_at_everything_and_not_for_all():
    room = Walker(10 * PER_TURN)
    router = walk_router(room)
    walks = [create_task(ask(router)) for _ in range(20)]
    most = 0
    while not all(walk.done() for walk in walks):
        before = room.looked_at
        await sleep(0)
        most = max(most, room.looked_at - before)
    assert [walk.result().body for walk in walks] == [b"walked"] * 20
    assert room.most_running == 1
    assert most <= PER_TURN


async def test_a_request_that_fails_or_is_cancelled_holds_up_nobody():
    room = Walker(3 * PER_TURN)
    router = walk_router(room)
    first, second, failing, last = (create_task(ask(router, query)) for query in (b"", b"", b"topic=none", b""))
    await sleep(0)
    second.cancel()  # in line
    first.cancel()  # while it looks
    assert (await last).body == b"walked"
    with pytest.raises(HttpError, match="none is led elsewhere"):
        await failing
    assert first.cancelled() and second.cancelled()
    assert room.running == 0
