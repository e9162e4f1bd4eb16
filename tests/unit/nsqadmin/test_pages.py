"""The pages with views that no daemon gives on demand: thousands of topics, daemons away, words of strangers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import quote, unquote

import msgspec
import pytest
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.responses import HTMLResponse, Response
from starlette.types import Message

from flintmq.client.admin.results import StoredMessage
from flintmq.nsqadmin import daemons, messages
from flintmq.nsqadmin.actions import Actions
from flintmq.nsqadmin.errors import Refused
from flintmq.nsqadmin.pages import prepare
from flintmq.nsqadmin.pages.acts import ACTS, carry_out
from flintmq.nsqadmin.pages.assets import assets
from flintmq.nsqadmin.pages.routes import routes
from flintmq.nsqadmin.pages.told import Told
from flintmq.nsqadmin.views import (
    ChannelRow,
    ChannelView,
    ClientRow,
    DoneView,
    HistoryView,
    Missing,
    PeekRow,
    Percentile,
    TopicRow,
    TopicsQuery,
    TopicsView,
    TopicView,
)

HOSTILE = '"><img src=x onerror=alert(1)>'
SAID = "\u202e" + "<i>" * 1000
PAGE_BYTES_MAX = 150 * 1024
AWAY = [Missing("nsqd", "10.0.0.7:4151", "slow", "no answer within 2 s")]


def topic_row(name: str, number: int) -> TopicRow:
    return TopicRow(
        name=name, waiting=number * 10**9, message_count=number * 10**12, in_flight=number, deferred=number,
        requeue_count=number, channel_count=4, client_count=5, node_count=3, partition_count=8, in_per_s=1e6,
        paused=True, growth_per_s=-3.5, latency=[Percentile(0.99, 1, 1000, 3)],
    )  # fmt: skip


class PretendGather:
    """Answers with what is worst."""

    async def topics(self, query: TopicsQuery) -> TopicsView:
        rows = [topic_row(f"{HOSTILE[:20]}{number}".ljust(64, "x"), number) for number in range(query.page_size)]
        return TopicsView(
            at_s=1.7e9, missing=AWAY, query=query, topics=rows, total=2000, matching=2000, page=query.page,
            page_count=40, sums=topic_row("*", 1),
        )  # fmt: skip

    async def topic(self, name: str) -> TopicView:
        if name == "gone":
            return TopicView(at_s=1.7e9, name=name, is_found=False, total=TopicRow(name=name))
        channels = [ChannelRow(topic=name, name=HOSTILE)]
        return TopicView(
            at_s=1.7e9, name=name, is_found=True, total=topic_row(name, 1), channels=channels, missing=AWAY,
            nodes=[topic_row(name, 1)], lost_if_deleted="12,345 messages would be lost",
        )  # fmt: skip

    async def channel(self, topic: str, name: str) -> ChannelView:
        if name == "gone":
            total = ChannelRow(topic=topic, name=name)
            return ChannelView(at_s=1.7e9, topic=topic, name=name, is_found=False, total=total)
        return ChannelView(
            at_s=1.7e9, topic=topic, name=name, is_found=True, total=ChannelRow(topic=topic, name=name), client_total=1,
            clients=[
                ClientRow(
                    node="10.0.0.7:4151", address="10.0.0.8:1", client_id=SAID, hostname=SAID[1:], user_agent=SAID,
                    attributes=[SAID],
                )
            ],
        )  # fmt: skip

    async def seen_of(self, topic: str, channel: str = "") -> str:
        return "1.18e9b176265a2366"

    async def history(self, series: str, name: str, span_s: int) -> HistoryView:
        times = list(range(10))
        values: list[float | None] = [None, 0, 1e9, None, 5, 5, 5, 5, 5, 5]
        return HistoryView(
            at_s=1.7e9, series=series, name=name, step_s=10, is_recorded=True, times_s=times, depth=values,
            in_per_s=values, out_per_s=[None] * 10, in_flight=values, latency_ms=values,
        )  # fmt: skip


class PretendActions:
    """Does nothing, and says so."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        async def act(visitor: object, *arguments: Any, **named: Any) -> DoneView:
            self.calls.append((name, arguments, named))
            if named.get("confirm") == "wrong":
                raise Refused(400, f"wrong is not the name: {HOSTILE}")
            return DoneView(at_s=1.7e9, is_done=True, text=f"{name} {HOSTILE}", failures=AWAY)

        return act


@dataclass(frozen=True)
class Answer:
    """One answer of the application."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


class Renderer:
    """Answers with a template, as ``flintmq.nsqadmin.render.Render`` does."""

    def __init__(self, render: Callable[..., Response], url: Callable[..., str]) -> None:
        self._render = render
        self.url = url

    def __call__(self, *arguments: Any, **named: Any) -> Response:
        return self._render(*arguments, **named)


class Client:
    """Asks the pages as a server would."""

    def __init__(self, static_dir: str = "") -> None:
        environment = Environment(
            loader=PackageLoader("flintmq.nsqadmin"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
            lstrip_blocks=True,
        )  # fmt: skip
        link = SimpleNamespace(label="depth", target='"><i>', url="https://graphite.example/render?a=b&c=d")
        environment.globals.update(version="0", url=self._url, graphite=lambda series, name: [link])
        prepare(environment)
        self._environment = environment
        self._visitor = SimpleNamespace(
            name="alice", role="admin", may=lambda role: True, csrf="the-token", how="password"
        )
        admin = SimpleNamespace(gather=PretendGather(), actions=PretendActions(), env=SimpleNamespace(random=Random(1)))
        admin.render = Renderer(self._render, self._url)
        admin.options = SimpleNamespace(dev_static_dir=static_dir, users_file="")
        self._app = Starlette(routes=routes(admin))

    @staticmethod
    def _url(path: str, *words: str, **query: object) -> str:
        return "/base" + path + "".join(f"/{quote(word, safe='')}" for word in words)

    def _render(self, request: object, template: str, view: object = None, status: int = 200, **extra: Any) -> Response:
        context = {"view": view, "visitor": self._visitor, "path": "/", "warnings": [], "status": status, **extra}
        return HTMLResponse(self._environment.get_template(template).render(context), status)

    def get(self, target: str, headers: Mapping[str, str] | None = None) -> Answer:
        return self._ask("GET", target, {}, headers or {})

    def post(self, target: str, **form: str) -> Answer:
        return self._ask("POST", target, form, {})

    def _ask(self, method: str, target: str, form: Mapping[str, str], headers: Mapping[str, str]) -> Answer:
        path, _, query = target.partition("?")
        lines = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        scope = {
            "type": "http", "method": method, "path": unquote(path), "raw_path": path.encode(), "root_path": "",
            "query_string": query.encode(), "headers": lines, "state": {"visitor": self._visitor, "form": dict(form)},
        }  # fmt: skip
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        asyncio.run(self._app(scope, receive, send))
        found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return Answer(sent[0]["status"], found, b"".join(message.get("body", b"") for message in sent[1:]))


@pytest.fixture
def client() -> Client:
    return Client()


def test_a_page_of_2000_topics_is_small(client: Client):
    answer = client.get("/topics?sort=-waiting")
    assert answer.status == 200
    assert len(answer.body) <= PAGE_BYTES_MAX
    assert answer.text.count('<td class="name"><a') == 50


def test_strangers_write_no_markup(client: Client):
    for path in ("/topics", f"/topics/{quote(HOSTILE)}", f"/topics?text={quote(HOSTILE)}"):
        text = client.get(path).text
        assert "<img src=x" not in text and "10.0.0.7:4151" in text


def test_what_a_client_says_of_itself_is_short_and_seen(client: Client):
    """NSQ's nsqd hands on whatever it was told."""
    names = ("client_id", "hostname", "user_agent", "topology_zone", "auth_identity")
    row = msgspec.convert(dict.fromkeys(names, SAID), daemons.Client)
    assert {len(getattr(row, name)) for name in names} == {256}
    text = client.get("/topics/orders/billing").text
    assert "&lt;i&gt;" in text and r"\u202e" in text and "<i>" not in text and "\u202e" not in text
    shown = re.sub('title="[^"]*"', "", text)
    assert max(map(len, re.findall("(?:&lt;i&gt;)+", shown))) <= 80 * len("&lt;i&gt;") // 3


def test_headers_of_a_message_are_shown_up_to_a_bound():
    headers: dict[str, Any] = {"n" * 500: "v" * 5000, "nested": {"deep": ["w" * 5000]}, "short": {"a": 1}}
    headers.update((str(number), number) for number in range(100))
    ext = json.dumps(headers)
    message = msgspec.convert(
        {"id": 1, "message_id": "0" * 16, "body": "b", "timestamp": 1, "attempts": 1, "ext": ext}, StoredMessage
    )
    shown = messages._row(message, "node", cast("Any", SimpleNamespace(sees_bodies=True))).headers
    assert shown["n" * 255 + "…"] == "v" * 1023 + "…" and shown["short"] == {"a": 1}
    assert len(shown["nested"]) == 1024 and shown["…"] == "39 more headers" and len(shown) == 65


def test_pictures_of_graphite_are_linked(client: Client):
    text = client.get("/topics/orders").text
    assert '<a href="https://graphite.example/render?a=b&amp;c=d"' in text and "<i>" not in text


def test_nothing_is_inline(client: Client):
    for path in ("/topics", "/topics/orders", "/create", "/confirm/delete_topic?topic=orders"):
        text = client.get(path).text
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|<[a-z][^<>]*\s(style|on\w+)=", text), path


def test_the_loss_is_named_before(client: Client):
    text = client.get("/confirm/delete_topic?topic=orders").text
    assert "12,345 messages would be lost" in text and 'name="csrf" value="the-token"' in text
    assert "The figures below are not complete" in text


@pytest.mark.parametrize("act", ["empty_topic", "delete_topic", "tombstone", "empty_channel", "delete_channel"])
def test_what_is_gone_has_no_form(client: Client, act: str):
    of_channel = act.endswith("channel")
    what = "Channel gone of topic t" if of_channel else "Topic gone"
    with pytest.raises(Refused, match=f"{what} is not there any more") as caught:
        client.get(f"/confirm/{act}?topic={'t&channel=gone' if of_channel else 'gone'}&node=10.0.0.7:4151")
    assert caught.value.status == 404


def test_messages_of_two_nodes_have_ids_of_their_own(client: Client):
    rows = [PeekRow(node=node, message_id="0" * 16) for node in ("a:4151", "b:4151")]
    template = "{% import 'macros.html' as ui with context %}{{ ui.messages(rows, False, 't') }}"
    text = client._environment.from_string(template).render(rows=rows)
    assert len({*re.findall(r'<article [^>]*id="([^"]+)"', text)}) == 2


def test_what_no_name_can_be_is_looked_for_as_it_is(client: Client):
    assert client.get("/search?q=a/b/c").headers["location"].endswith("/topics?text=a%2Fb%2Fc")


def test_a_wrong_name_is_asked_for_again(client: Client):
    answer = client.post("/act/delete_topic", topic="orders", confirm="wrong")
    assert answer.status == 400
    assert "wrong is not the name" in answer.text and "<img src=x" not in answer.text


def test_an_outcome_is_told_once_and_to_its_visitor_alone(client: Client):
    answer = client.post("/act/pause_topic", topic="orders")
    assert answer.status == 303
    target = answer.headers["location"].removeprefix("/base")
    assert target.startswith("/topics/orders?told=")
    assert "pause_topic" in client.get(target).text
    assert "pause_topic &#34;" not in client.get(target).text
    told = Told(Random(1))
    key = told.keep("alice", DoneView(at_s=0, is_done=True, text="done"))
    assert told.take("mallory", key) is None
    assert told.take("alice", key) is not None and told.take("alice", key) is None


def test_outcomes_that_nobody_looks_at_have_a_bound():
    told = Told(Random(1))
    done = DoneView(at_s=0, is_done=True, text="done")
    keys = [told.keep("alice", done) for _ in range(1000)]
    assert sum(told.take("alice", key) is not None for key in keys) == 256


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("sort=colour", "sort is 'colour'; it must be one of name"),
        ("state=gone", "state is 'gone'; it must be one of all"),
        ("page=0", "page is '0'; it must be a whole number from 1 to"),
        ("page=-1", "page is '-1'"),
        ("page=1e3", "page is '1e3'"),
        ("page=" + "9" * 5000, "page is '999"),
        ("text=" + "x" * 65, "text is 65 characters long; at most 64"),
    ],
)
def test_parameters_that_cannot_be_obeyed_are_refused(client: Client, query: str, words: str):
    with pytest.raises(Refused, match=re.escape(words)) as refused:
        client.get(f"/topics?{query}")
    assert refused.value.status == 400


def test_the_state_of_a_page_is_in_its_links(client: Client):
    text = client.get("/topics?text=orders&sort=-waiting&page=3&told=abc").text
    assert "/topics?text=orders&amp;sort=-waiting&amp;page=4" in text
    assert "told=" not in text
    assert "/topics?text=orders&amp;sort=waiting" in text  # the other way round, from the first page


@pytest.mark.parametrize("name", sorted(ACTS))
def test_every_act_takes_what_the_form_has(name: str):
    act = ACTS[name]
    actions = PretendActions()
    form: Mapping[str, str] = {**{field: f" {field} " for field in act.takes}, "confirm": "typed"}
    asyncio.run(carry_out(act, actions, object(), form))
    ((called, arguments, named),) = actions.calls
    assert called == (act.method or name) and hasattr(Actions, called)
    assert bool(act.named_by) == ("confirm" in named)
    if name != "create_topic":
        assert {key: value for key, value in named.items() if key != "confirm"} == {key: key for key in act.takes}
    else:
        assert arguments == ("topic",) and named["auto_channels"] is True


def test_static_files_have_their_mark_and_nothing_else_is_served(client: Client):
    for name, mark in assets().marks.items():
        answer = client.get(f"/static/{name}?v={mark}")
        assert answer.status == 200 and "immutable" in answer.headers["cache-control"]
    name = "nsqadmin.js"
    assert client.get(f"/static/{name}").headers["cache-control"] == "no-cache"
    etag = {"If-None-Match": client.get(f"/static/{name}").headers["etag"]}
    assert client.get(f"/static/{name}", headers=etag).status == 304
    for path in ("../pages/routes.py", "%2e%2e/pages/routes.py", "vendor", "nothing.js", "/etc/passwd"):
        assert client.get(f"/static/{path}").status == 404


def test_another_directory_comes_first_and_shows_no_more(tmp_path: Path):
    (tmp_path / "nsqadmin.css").write_text("mine")
    (tmp_path / "secret.css").write_text("secret")
    client = Client(str(tmp_path))
    assert client.get("/static/nsqadmin.css").text == "mine"
    assert client.get("/static/nsqadmin.js").body == Client().get("/static/nsqadmin.js").body
    assert client.get("/static/secret.css").status == 404
