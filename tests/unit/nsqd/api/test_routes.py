"""The tables of routes: each has its permission and says what it obeys."""

from __future__ import annotations

import re
from collections.abc import Coroutine
from pathlib import Path

import pytest

from flintmq.env import Env
from flintmq.net.http_auth import Table
from flintmq.net.http_messages import HttpError, Request, Response
from flintmq.net.http_router import Router
from flintmq.nsqd.api.routes import PERMISSIONS as NSQD_TABLE
from flintmq.nsqd.options import NsqdOptions
from flintmq.nsqd.server import Nsqd
from flintmq.nsqlookupd import store_api
from flintmq.nsqlookupd.http_permissions import CLUSTER_TABLE as NSQLOOKUPD_CLUSTER_TABLE
from flintmq.nsqlookupd.http_permissions import TABLE as NSQLOOKUPD_TABLE
from flintmq.nsqlookupd.options import NsqlookupdOptions
from flintmq.nsqlookupd.server import Nsqlookupd
from flintmq.storage import OsFiles

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
    """A new route has to say what it obeys."""
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


NSQ_HAS = {
    "nsqd": ["/pub", "/mpub", "/topic/create", "/topic/delete", "/topic/empty", "/topic/pause", "/topic/unpause",
             "/channel/create", "/channel/delete", "/channel/empty", "/channel/pause", "/channel/unpause"],
    "nsqlookupd": ["/topic/create", "/topic/delete", "/topic/tombstone", "/channel/create", "/channel/delete"],
}  # fmt: skip
REFUSED = {"partition", "dry_run", "min_in_sync"}
"""All that one of them may refuse."""


@pytest.mark.parametrize("daemon", ["nsqd", "nsqlookupd"])
async def test_what_a_new_route_takes_is_not_refused_by_those_that_nsq_has(tmp_path, daemon: str):
    """Whoever has asked NSQ for years sends parameters that mean nothing there, and later something here."""
    files = OsFiles(str(tmp_path))
    if daemon == "nsqd":
        router = Nsqd(Env(), files, NsqdOptions()).router()
    else:
        router = Nsqlookupd(Env(), NsqlookupdOptions(cluster_store=("a:1",)))._http.router
    routes = {path: route for method, path, route in router.routes() if method == "POST"}
    words = {word for _, _, route in router.routes() for word in route.takes or ()} - REFUSED
    for path in NSQ_HAS[daemon]:
        route = routes[path]
        query = "&".join(f"{word}=1" for word in sorted(words - set(route.takes or ()))).encode()
        request = Request(b"POST", path.encode(), query, {}, "@", route)
        try:
            answer = route.handler(request)
        except HttpError as error:
            text = error.message
        else:  # in an envelope, or not before it has asked others
            text = answer.body.decode() if isinstance(answer, Response) else ""
            if isinstance(answer, Coroutine):
                answer.close()
        assert "does not take" not in text
    files.close()
