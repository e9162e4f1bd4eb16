"""The pages: each address with the views that it needs and the template that shows them.

Rules of this file: an endpoint asks for all its views at once; what visitors may do is decided by ``Actions`` and by
the middleware before, never here: a page only leaves out buttons that would be refused.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from flintmq.client.admin import cluster as cluster_questions
from flintmq.nsqadmin.actions import change_order, expand_order, move_order, of_the_cluster, read_number
from flintmq.nsqadmin.errors import Refused
from flintmq.nsqadmin.gather import is_another
from flintmq.nsqadmin.pages.acts import ACTS, Act, Form, carry_out
from flintmq.nsqadmin.pages.assets import assets
from flintmq.nsqadmin.pages.shown import SPAN_S, SPANS, asked, asked_choice, asked_number, show
from flintmq.nsqadmin.pages.told import Told
from flintmq.nsqadmin.pages.wording import in_words, plural
from flintmq.nsqadmin.views import TOPIC_SORTS, ChannelView, DoneView, PartitionRow, PlanView, TopicsQuery, TopicView

_PAGE_MAX = 1_000_000
_STATES = (
    ("all", "all"), ("waiting", "with messages that wait"), ("lonely", "waiting without a consumer"),
    ("paused", "paused"), ("active", "on a node"), ("inactive", "on no node"),
)  # fmt: skip
_BY = ("id", "trace", "time")
_WHAT = ("next", "in_flight", "deferred")
_HEX = frozenset("0123456789abcdefABCDEF")
_ID_SIZES = (16, 32)
_LISTED_MAX = 500
_SEEN = ("empty_topic", "delete_topic", "empty_channel", "delete_channel", "set_channel", "tombstone")
"""Changes of what may be another topic of the same name by then."""

_SEEN_SIZE_MAX = 1000
_PLANNED = ("drain_member", "remove_member", "elect", "move_partition", "change_topic", "expand_topic")
"""Orders to a cluster, which says what they come to before they are given."""
_BOUND = ("elect",)
"""Orders of which it depends on the moment what they lose: given only while that is what the page showed."""


class _Gone(Refused):
    """The topic or channel that the act is about is not there."""


def _check_found(view: TopicView | ChannelView, what: str) -> None:
    """Raise _Gone unless it is there, or somebody who may have it does not answer."""
    if not view.is_found and not view.missing:
        raise _Gone(404, f"{what} is not there any more: there is nothing to do")


class Pages:
    """All pages of one nsqadmin.

    Args:
        admin: ``flintmq.nsqadmin.app.Admin``: ``options``, ``env``, ``gather``, ``actions`` and ``render``.
    """

    def __init__(self, admin: Any) -> None:
        self._admin = admin
        self._gather = admin.gather
        self._told = Told(admin.env.random)

    def routes(self) -> list[BaseRoute]:
        """Every page, and the static files."""
        pages = {
            "/": self._overview, "/problems": self._problems, "/topics": self._topics, "/topics/{topic}": self._topic,
            "/topics/{topic}/{channel}": self._channel, "/nodes": self._nodes, "/nodes/{node}": self._node,
            "/counter": self._counter, "/lookup": self._lookup, "/cluster": self._cluster, "/peek": self._peek,
            "/search": self._search, "/messages": self._messages, "/dead-letters": self._dead_letters_index,
            "/dead-letters/{topic}": self._dead_letters, "/create": self._create, "/confirm/{act}": self._confirm,
            "/audit": self._audit, "/static/{path:path}": self._static,
        }  # fmt: skip
        found: list[BaseRoute] = [Route(path, endpoint, methods=["GET"]) for path, endpoint in pages.items()]
        return [*found, Route("/act/{act}", self._act, methods=["POST"])]

    async def _static(self, request: Request) -> Response:
        return assets().answer(request, self._admin.options.dev_static_dir)

    def _show(self, request: Request, template: str, view: Any, section: str, **extra: Any) -> Response:
        can_log_in = request.state.visitor.how == "open" and bool(self._admin.options.users_file)
        return show(
            self._admin, request, template, view, section, told=self._notes(request), can_log_in=can_log_in, **extra
        )

    def _notes(self, request: Request) -> list[dict[str, Any]]:
        key = request.query_params.get("told", "")
        done = self._told.take(request.state.visitor.name, key) if key else None
        if done is None:
            return []
        kind = "success" if done.is_done and not done.failures else "warning" if done.is_done else "danger"
        lines = [f"{one.daemon} {one.address}: {one.text}" for one in done.failures]
        return [{"kind": kind, "text": done.text, "lines": lines}]

    async def _charts(self, request: Request, series: str, name: str) -> dict[str, Any]:
        span_s = asked_number(request, "span", SPAN_S, 60, SPANS[-1][0])
        history = await self._gather.history(series, name, span_s)
        return {"history": history, "span_s": span_s, "has_charts": True}

    # -- figures ------------------------------------------------------------------------------------------------------

    async def _overview(self, request: Request) -> Response:
        gather = self._gather
        view, top, problems, charts = await asyncio.gather(
            gather.topics(TopicsQuery(page_size=1)), gather.top(), gather.problems(), self._charts(request, "total", "")
        )
        serious = sum(one.level == "problem" for one in problems.findings)
        findings = [one for one in problems.findings if one.level != "ok"]
        return self._show(
            request,
            "overview.html",
            view,
            "/",
            is_live=True,
            top=top,
            findings=findings,
            problem_count=serious,
            **charts,
        )

    async def _problems(self, request: Request) -> Response:
        view = await self._gather.problems()
        return self._show(request, "problems.html", view, "/", is_live=True)

    async def _topics(self, request: Request) -> Response:
        sorts = (*TOPIC_SORTS, *(f"-{sort}" for sort in TOPIC_SORTS))
        query = TopicsQuery(
            text=asked(request, "text", size_max=64),
            sort=asked_choice(request, "sort", sorts, "name"),
            state=asked_choice(request, "state", tuple(state for state, _ in _STATES), "all"),  # type: ignore[arg-type]
            page=asked_number(request, "page", 1, 1, _PAGE_MAX),
        )
        view = await self._gather.topics(query)
        return self._show(request, "topics.html", view, "/topics", is_live=True, states=_STATES)

    async def _topic(self, request: Request) -> Response:
        name = request.path_params["topic"]
        view, charts = await asyncio.gather(self._gather.topic(name), self._charts(request, "topic", name))
        status = 200 if view.is_found or view.missing else 404
        return self._show(request, "topic.html", view, "/topics", is_live=True, status=status, **charts)

    async def _channel(self, request: Request) -> Response:
        topic, name = request.path_params["topic"], request.path_params["channel"]
        view, charts = await asyncio.gather(
            self._gather.channel(topic, name), self._charts(request, "channel", f"{topic}/{name}")
        )
        status = 200 if view.is_found or view.missing else 404
        return self._show(request, "channel.html", view, "/topics", is_live=True, status=status, **charts)

    async def _nodes(self, request: Request) -> Response:
        return self._show(request, "nodes.html", await self._gather.nodes(), "/nodes", is_live=True)

    async def _node(self, request: Request) -> Response:
        address = request.path_params["node"]
        text = asked(request, "text", size_max=64)
        page = asked_number(request, "page", 1, 1, _PAGE_MAX)
        view, charts = await asyncio.gather(
            self._gather.node(address, page=page, text=text), self._charts(request, "node", address)
        )
        if view is None:
            raise Refused(404, f"no nsqlookupd knows a node {address[:256]!r}, and it was not named at the start")
        return self._show(request, "node.html", view, "/nodes", is_live=True, text=text, **charts)

    async def _counter(self, request: Request) -> Response:
        return self._show(request, "counter.html", await self._gather.counter(), "/counter", is_live=True)

    async def _lookup(self, request: Request) -> Response:
        return self._show(request, "lookup.html", await self._gather.lookup(), "/lookup", is_live=True)

    async def _cluster(self, request: Request) -> Response:
        return self._show(request, "cluster.html", await self._gather.cluster(), "/cluster", is_live=True)

    # -- messages -----------------------------------------------------------------------------------------------------

    async def _peek(self, request: Request) -> Response:
        what = asked_choice(request, "what", _WHAT, "next")
        view = await self._gather.peek(asked(request, "topic"), asked(request, "channel"), what, request.state.visitor)
        return self._show(request, "peek.html", view, "/topics")

    async def _messages(self, request: Request) -> Response:
        names = {"topic": asked(request, "topic"), "value": asked(request, "value").strip()}
        names["by"] = asked_choice(request, "by", _BY, "id")
        view = None
        if names["topic"] and names["value"]:
            view = await self._gather.message(names["topic"], names["by"], names["value"], request.state.visitor)
        return self._show(request, "messages.html", view, "/messages", asked=names)

    async def _search(self, request: Request) -> Response:
        """One word that may be anything: an id leads to the form for messages, else to what has such a name."""
        text = asked(request, "q").strip()
        topic, _, channel = text.partition("/")
        if "/" in channel:  # nothing has such a name, and the page of topics says so of all of it
            return self._to("/topics", text=text[:64])
        if len(text) in _ID_SIZES and set(text) <= _HEX:
            return self._to("/messages", by="id", value=text)
        view = await self._gather.topics(TopicsQuery(text=topic[:64], page_size=2))
        names = [row.name for row in view.topics]
        if topic in names or (view.matching == 1 and channel):
            name = topic if topic in names else names[0]
            return self._to(f"/topics/{name}" + (f"/{channel}" if channel else ""))
        if not view.matching and text.isascii() and text.isdigit():
            return self._to("/messages", by="trace", value=text)
        return self._to("/topics", text=topic[:64])

    async def _dead_letters_index(self, request: Request) -> Response:
        if topic := asked(request, "topic").strip():
            return self._to(f"/dead-letters/{topic}")
        return self._show(request, "dead_letters_index.html", await self._gather.dead_topics(), "/dead-letters")

    async def _dead_letters(self, request: Request) -> Response:
        view = await self._gather.dead_letters(request.path_params["topic"], request.state.visitor)
        return self._show(request, "dead_letters.html", view, "/dead-letters")

    async def _audit(self, request: Request) -> Response:
        text = asked(request, "text", size_max=64)
        return self._show(request, "audit.html", await self._gather.audit(_LISTED_MAX, text), "/audit", text=text)

    # -- changes ------------------------------------------------------------------------------------------------------

    async def _create(self, request: Request) -> Response:
        return self._show(request, "create.html", None, "/topics", asked={}, failed="")

    async def _confirm(self, request: Request) -> Response:
        act = _act_of(request)
        if not act.is_asked:
            raise Refused(404, f"{act.name} is done without being asked for; its page has a button")
        return await self._ask(request, act, dict(request.query_params), "", 200)

    async def _ask(self, request: Request, act: Act, form: Form, failed: str, status: int) -> Response:
        """The page that says what an act would lose, and asks for the name."""
        is_ordered = act.name in _PLANNED
        if act.name == "drain_node" and await self._gather.member(form.get("node", "").strip()) is not None:
            act, is_ordered = replace(act, what=ACTS["drain_member"].what), True
        names = (*act.takes, *act.optional)
        asked_for = {"when", *(each.name for each in act.asks)}
        is_planned = act.is_planned and bool(form.get("plan"))
        given = {name: form[name].strip()[:256] for name in names if form.get(name, "").strip()}
        fields = {name: text for name, text in given.items() if is_planned or name not in asked_for}
        if lacks := [name for name in act.takes if name not in fields and name not in asked_for]:
            raise Refused(400, f"{act.name} needs {' and '.join(lacks)}")
        stake, seen = "", ""
        missing: list[Any] = []
        plan: PlanView | None = None
        try:
            if is_ordered and (is_planned or not act.is_planned):
                question, topic = planned_order(act, fields)
                plan = await self._gather.plan(question, topic)
                missing = plan.missing
                if act.name in _BOUND:
                    seen = digest(plan)
            else:
                stake, missing = await self._stake(request, act, fields)
            if act.name in _SEEN:
                seen = await self._gather.seen_of(fields["topic"], fields.get("channel", ""))
        except _Gone:
            raise
        except Refused as refused:
            failed, status = failed or in_words(refused.text), 400
            if is_planned:
                is_planned, fields = False, {name: given[name] for name in given if name not in asked_for}
        nodes, copies = await self._nodes_to_choose(act, given) if act.asks_node else ({}, None)
        subject = act.is_about
        section = f"/{subject.split('/')[1]}"
        return self._show(
            request, "confirm.html", None, section, status=status, act=act, fields=fields, stake=stake,
            missing=missing, failed=failed, when=form.get("when", ""), trail=_trail(subject, fields),
            back=self._path(subject, fields), nodes=nodes, copies=copies, given=form, seen=seen, plan=plan,
            is_first=act.is_planned and not is_planned,
        )  # fmt: skip

    async def _nodes_to_choose(self, act: Act, given: Form) -> tuple[dict[str, list[str]], PartitionRow | None]:
        """The nodes by the fields in which they are chosen, and the partition whose copies they have."""
        live = [row.address for row in (await self._gather.cluster()).nodes]
        try:
            partitions = (await self._gather.topic(given.get("topic", ""))).partitions
        except Refused:  # there is no such topic: what is asked for is refused as well, and says so
            partitions = []
        row = next((row for row in partitions if str(row.number) == given.get("partition")), None)
        if row is None or not row.replicas:
            return {each.name: live for each in act.asks if each.kind == "node"}, None
        return {"source": row.replicas, "target": [node for node in live if node not in row.replicas]}, row

    async def _stake(self, request: Request, act: Act, fields: Form) -> tuple[str, list[Any]]:
        """The loss, as a sentence, and who did not answer when it was counted.

        Raises:
            _Gone: there is nothing any more that could be lost.
        """
        if act.name in ("empty_topic", "delete_topic"):
            topic = await self._gather.topic(fields["topic"])
            _check_found(topic, f"Topic {topic.name}")
            return (topic.lost_if_deleted if act.name == "delete_topic" else topic.lost_if_emptied), topic.missing
        if act.name in ("empty_channel", "delete_channel"):
            channel = await self._gather.channel(fields["topic"], fields["channel"])
            _check_found(channel, f"Channel {channel.name} of topic {channel.topic}")
            is_deleted = act.name == "delete_channel"
            return (channel.lost_if_deleted if is_deleted else channel.lost_if_emptied), channel.missing
        if act.name == "set_channel":
            channel = await self._gather.channel(fields["topic"], fields["channel"])
            _check_found(channel, f"Channel {channel.name} of topic {channel.topic}")
            return f"of {channel.lost_if_emptied}, those before that place would be lost", channel.missing
        if act.name == "tombstone":
            topic = await self._gather.topic(fields["topic"])
            _check_found(topic, f"Topic {topic.name}")
            if topic.is_of_cluster:
                raise Refused(400, of_the_cluster(topic.name))
            losses = [
                f"{plural(row.waiting, 'message')} and {plural(row.channel_count, 'channel')} would be lost there."
                for row in topic.nodes
                if row.node == fields["node"]
            ]
            return " ".join(losses), topic.missing
        if act.name == "drop_dead_letters" and not fields.get("message_id"):
            letters = await self._gather.dead_letters(fields["topic"], request.state.visitor)
            return f"{letters.waiting:,} dead letters would be lost.", letters.missing
        return "", []

    async def _act(self, request: Request) -> Response:
        act, form, visitor = _act_of(request), request.state.form, request.state.visitor
        try:
            await self._check_seen(act, form)
            done = await carry_out(act, self._admin.actions, visitor, form)
        except Refused as refused:
            if refused.status == 404:
                text = f"{in_words(refused.text)} Nothing was done: somebody else may have changed it since your page."
                raise Refused(404, text) from refused
            if refused.status != 400:
                raise
            if act.name == "create_topic":
                failed = in_words(refused.text)
                return self._show(
                    request, "create.html", None, "/topics", asked=form, failed=failed, status=refused.status
                )
            if act.is_asked:
                return await self._ask(request, act, form, in_words(refused.text), refused.status)
            raise Refused(400, in_words(refused.text)) from refused
        return self._after(act, form, visitor.name, done)

    async def _check_seen(self, act: Act, form: Form) -> None:
        """Refuse to drop what is not what the page showed, but has taken its name."""
        topic, channel, seen = form.get("topic", "").strip(), form.get("channel", "").strip(), form.get("seen", "")
        if act.name in _BOUND and seen:
            question, about = planned_order(act, {name: form.get(name, "").strip() for name in act.takes})
            if seen != digest(await self._gather.plan(question, about)):
                raise Refused(
                    400, "nothing was done: it would come to something else now than your page showed. It stands below."
                )
            return
        if act.name not in _SEEN or not seen:
            return
        if is_another(seen[:_SEEN_SIZE_MAX], await self._gather.seen_of(topic, channel)):
            name = f"{topic}/{channel}" if channel else topic
            raise Refused(
                400,
                f"nothing was done: {name} is not what your page showed, it was deleted and made again since then. "
                "What would be lost now stands below.",
            )

    def _after(self, act: Act, form: Form, name: str, done: DoneView) -> Response:
        query = {"told": self._told.keep(name, done)}
        return RedirectResponse(self._path(act.leads_to, form, **query), 303)

    def _path(self, pattern: str, fields: Form, **query: str) -> str:
        parts = [fields.get(part[1:-1], "").strip() if part.startswith("{") else part for part in pattern.split("/")]
        return self._address("/".join(_quoted(part) for part in parts), query)

    def _to(self, path: str, **query: str) -> Response:
        return RedirectResponse(self._address("/".join(_quoted(part) for part in path.split("/")), query), 303)

    def _address(self, quoted_path: str, query: dict[str, str]) -> str:
        address: str = self._admin.render.url(quoted_path)
        return f"{address}?{urlencode(query)}" if query else address


def planned_order(act: Act, fields: Form) -> tuple[Any, str]:
    """Return the question what an order would come to, and the topic that it is about; no topic: of all.

    Raises:
        Refused: with 400, the order is not whole.
    """
    topic = fields.get("topic", "")
    if act.name in ("drain_member", "drain_node"):
        return cluster_questions.drain_node(fields["node"], dry_run=True), ""
    if act.name == "remove_member":
        return cluster_questions.remove_node(fields["node"], dry_run=True), ""
    if act.name == "elect":
        number = read_number("partition", fields["partition"], 0, _PAGE_MAX)
        return cluster_questions.elect(topic, number, dry_run=True), ""
    if act.name == "move_partition":
        source, target = fields.get("source", ""), fields.get("target", "")
        return move_order(topic, fields.get("partition", ""), source, target, dry_run=True), topic
    if act.name == "change_topic":
        texts = (fields.get(name, "") for name in ("replicas", "min_in_sync", "retention_days"))
        return change_order(topic, *texts, dry_run=True), topic
    assert act.name == "expand_topic"
    return expand_order(topic, fields.get("partitions", ""), dry_run=True), topic


def digest(plan: PlanView) -> str:
    """Return what tells a plan from another one."""
    return hashlib.sha256(msgspec.json.encode((plan.is_change, plan.what, plan.copies, plan.notes))).hexdigest()[:32]


def _quoted(word: str) -> str:
    return quote(word, safe="")


def _trail(pattern: str, fields: Form) -> list[tuple[str, str]]:
    """Path and name of each page above, from the pattern of a path."""
    trail, path = [], ""
    for part in pattern.strip("/").split("/"):
        name = fields[part[1:-1]] if part.startswith("{") else part
        path += f"/{_quoted(name)}"
        trail.append((path, name if part.startswith("{") else name.replace("-", " ").capitalize()))
    return trail


def _act_of(request: Request) -> Act:
    act = ACTS.get(request.path_params["act"])
    if act is None:
        raise Refused(404, f"there is no change of the name {request.path_params['act'][:64]!r}")
    return act


def routes(admin: Any) -> list[BaseRoute]:
    """Every page of an nsqadmin."""
    return Pages(admin).routes()
