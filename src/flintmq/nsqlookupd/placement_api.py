"""Requests that move copies, take nodes away, and change what is so of the whole cluster; and what becomes of them.

Rules of this file:

- An order is answered when it stands in the store; it is carried out by whoever is master, and ``GET /cluster/moves``
  tells how far that is. ``dry_run=true`` answers with what it comes to, and changes nothing.
- Parameters have the names of the redesigned NSQ where it has such a request, and ours beside them.

Source: Youzan's nsqlookupd; docs/decisions/0017.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

import msgspec

from flintmq.cluster import orders
from flintmq.cluster.balance import Loads
from flintmq.cluster.controller import Controller, Refused
from flintmq.cluster.state import NodeRecord
from flintmq.cluster.view import PartitionId
from flintmq.errors import UNREADABLE_JSON, ConnectionFailed
from flintmq.net.http_server import HttpError, Request, Response, Router, json_response
from flintmq.nsqlookupd.coordinator import Coordinator
from flintmq.nsqlookupd.options import parsed_window
from flintmq.topic_meta import PARTITION_NUM_MAX, parse_partition

MOVES_MAX = 1000
"""Rows of ``GET /cluster/moves``; the answer says how many there are."""
ASKED_MAX = 32
"""Nodes that are asked at once how far they are."""
TOP_COUNT = 10
TOP_COUNT_MAX = 1000

Change = Callable[[], Coroutine[Any, Any, dict[str, Any] | None]]
AtMaster = Callable[[Request, Change], Coroutine[Any, Any, Response]]
AskNode = Callable[[NodeRecord, str], Coroutine[Any, Any, tuple[int, bytes]]]


class CopyOfNode(msgspec.Struct):
    """The place that another node's copy has come to, as its leader tells: bytes on disk and messages."""

    bytes_done: int = 0
    messages_done: int = 0


class LedByNode(msgspec.Struct):
    """A partition, as its leader tells.

    Attributes:
        bytes: of its log on disk.
        messages: in its log.
        end_bytes: virtual offset of the end of its log, which only grows.
        followers: by node.
    """

    topic: str
    partition: int
    bytes: int = 0
    messages: int = 0
    end_bytes: int = 0
    followers: dict[str, CopyOfNode] = {}


class ToldByNode(msgspec.Struct):
    """An answer of ``GET /cluster/copies`` of an nsqd."""

    node: str
    partitions: list[LedByNode] = []


class PlacementApi:
    """The handlers.

    Args:
        at_master: has something done by the master.
        ask_node: asks the HTTP API of an nsqd; raises ConnectionFailed.
    """

    def __init__(self, coordinator: Coordinator, at_master: AtMaster, ask_node: AskNode) -> None:
        self._coordinator = coordinator
        self._at_master = at_master
        self._ask_node = ask_node

    def add_routes(self, router: Router) -> None:
        """Answer what is asked of placement."""
        dry = ("dry_run",)
        moved = ("topic", "partition", "move_source", "move_target", "move_from", "move_to", "move_leader", *dry)
        posts: tuple[tuple[str, Callable[[Request], Any], tuple[str, ...]], ...] = (
            ("/topic/partition/move", self.move, moved),
            ("/topic/partition/expand", self.expand, ("topic", "partition_num", *dry)),
            ("/cluster/node/remove", self.remove, ("remove_node", *dry)),
            ("/cluster/node/drain", self.drain, ("node", "undo", *dry)),
            ("/cluster/balance", self.balance, ("enabled", "window", *dry)),
            ("/cluster/balance/topn", self.balance_by_load, ("enable",)),
            ("/cluster/upgrade/begin", self.begin_upgrade, ()),
            ("/cluster/upgrade/done", self.end_upgrade, ()),
            ("/cluster/lookupd/tombstone", self.hide_lookupd, ("node", "restore")),
            ("/disable/write", self.disable_write, ("type",)),
        )
        for path, handler, takes in posts:
            router.add("POST", path, handler, takes=takes)
        router.add("GET", "/cluster/moves", self.moves, takes=("topic",))

    # --- orders

    def move(self, request: Request) -> Coroutine[Any, Any, Response]:
        """Move a copy of a partition."""
        query = request.query
        topic, number = _argument(query, "topic"), parse_partition(_argument(query, "partition", "TOPIC_PARTITION"))
        if number is None:
            raise HttpError(400, "INVALID_ARG_TOPIC_PARTITION_NUM")
        source, target = (_either(query, ours, theirs) for ours, theirs in _NODES_OF_MOVE)
        if query.get("move_leader", "") not in ("", "true", "false"):
            raise HttpError(400, "INVALID_ARG_MOVE_LEADER: it must be true or false")

        def order(controller: Controller) -> orders.Plan:
            view = controller.view
            ids = orders.node_named(view, source), orders.node_named(view, target)
            state = view.partitions.get((topic, number))
            wants_leader = query.get("move_leader")
            if wants_leader and state is not None and (wants_leader == "true") != (state.leader == ids[0]):
                is_it = "leads" if state.leader == ids[0] else "does not lead"
                raise Refused(f"move_leader={wants_leader}, and node {ids[0]} {is_it} partition {topic}/{number}")
            return orders.move(controller, (topic, number), *ids)

        return self._ordered(request, order)

    def expand(self, request: Request) -> Coroutine[Any, Any, Response]:
        """Give a topic more partitions."""
        topic = _argument(request.query, "topic")
        count = _number(request.query, "partition_num", "TOPIC_PARTITION_NUM", 1, PARTITION_NUM_MAX)

        async def ready() -> None:
            await self._coordinator.until_written(topic)

        return self._ordered(request, lambda controller: orders.expand(controller, topic, count), ready)

    def remove(self, request: Request) -> Coroutine[Any, Any, Response]:
        """Take everything from a node that is not to come back."""
        name = _argument(request.query, "remove_node")

        def order(controller: Controller) -> orders.Plan:
            return orders.drain(controller, orders.node_named(controller.view, name), is_removal=True)

        return self._ordered(request, order)

    def drain(self, request: Request) -> Coroutine[Any, Any, Response]:
        """Take everything from a node, or let it have something again."""
        name, is_undone = _argument(request.query, "node"), is_switched(request.query, "undo")

        def order(controller: Controller) -> orders.Plan:
            node = orders.node_named(controller.view, name)
            return orders.undrain(controller, node) if is_undone else orders.drain(controller, node)

        return self._ordered(request, order)

    def balance(self, request: Request) -> Coroutine[Any, Any, Response]:
        """Switch balancing on or off, or say when copies may be moved for it."""
        changes: dict[str, object] = {}
        if "enabled" in request.query:
            changes["balances"] = is_switched(request.query, "enabled")
        if "window" in request.query:
            changes["balance_window"] = window_of(request.query["window"])
        if not changes:
            raise HttpError(400, "MISSING_ARG_ENABLED: name enabled=true|false, window=HH-HH, or both")
        return self._settled(request, changes)

    def balance_by_load(self, request: Request) -> Coroutine[Any, Any, Response]:
        """Switch on or off that copies are moved by load."""
        _argument(request.query, "enable")
        return self._settled(request, {"balances_load": is_switched(request.query, "enable")})

    def begin_upgrade(self, request: Request) -> Coroutine[Any, Any, Response]:
        """Nodes are about to be restarted: move nothing."""
        return self._settled(request, {"is_upgrading": True})

    def end_upgrade(self, request: Request) -> Coroutine[Any, Any, Response]:
        """Nodes have been restarted."""
        return self._settled(request, {"is_upgrading": False})

    def disable_write(self, request: Request) -> Coroutine[Any, Any, Response]:
        """Name no leaders to publishers, of all topics or of those in order; or of none, as before."""
        kind = request.query.get("type", "")
        return self._settled(request, {"write_disabled": kind if kind in ("all", "ordered") else ""})

    def hide_lookupd(self, request: Request) -> Coroutine[Any, Any, Response]:
        """Name a nsqlookupd to clients no more, or again."""
        name, is_shown = _argument(request.query, "node"), request.query.get("restore", "") not in ("", "false")

        def order(controller: Controller) -> orders.Plan:
            hidden = controller.view.settings.hidden_lookupds
            if is_shown:
                if name not in hidden:
                    raise Refused("lookup node id not found", status=404)
                return orders.settle(controller, {"hidden_lookupds": tuple(each for each in hidden if each != name)})
            known = {f"{each.host}:0:{each.tcp_port}:nsqlookup" for each in controller.view.lookupds.values()}
            if name not in known:
                raise Refused("lookup node id not found", status=404)
            return orders.settle(controller, {"hidden_lookupds": tuple(dict.fromkeys((*hidden, name)))})

        return self._ordered(request, order)

    def _settled(self, request: Request, changes: Mapping[str, object]) -> Coroutine[Any, Any, Response]:
        return self._ordered(request, lambda controller: orders.settle(controller, changes))

    def _ordered(
        self,
        request: Request,
        order: Callable[[Controller], orders.Plan],
        then: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> Coroutine[Any, Any, Response]:
        is_dry_run = is_switched(request.query, "dry_run")

        async def change() -> dict[str, Any]:
            plan = await self._coordinator.order(order, is_dry_run)
            if then is not None and not is_dry_run:
                await then()
            return plan_row(plan, is_dry_run)

        return self._at_master(request, change)

    # --- questions

    async def moves(self, request: Request) -> Response:
        """``GET /cluster/moves``: copies that are made and taken away, and how far that is."""
        coordinator = self._coordinator
        wanted = request.query.get("topic")
        listed = [(each, since_s) for each, since_s in coordinator.moves() if wanted in (None, each[0])]
        rows = [coordinator.move_row(partition, since_s) for partition, since_s in listed[:MOVES_MAX]]
        copying = {(row["topic"], row["partition"]): row for row in rows if row["state"] == "copying"}
        view = coordinator.view
        leaders = {leader.node: leader for each in copying if (leader := view.leader(each)) is not None}
        found, deaf = await self._asked(leaders.values(), "/cluster/copies?lagging=true")
        for partition, row in copying.items():
            led = found.get(partition)
            if led is None:
                continue
            row["bytes_total"], row["messages_total"] = led.bytes, led.messages
            copies = [led.followers[node] for node in row["to"] if node in led.followers]
            row["bytes_done"] = min((copy.bytes_done for copy in copies), default=0)
            row["messages_done"] = min((copy.messages_done for copy in copies), default=0)
        return json_response({"moves": rows, "count": len(listed), "problems": deaf})

    async def loads(self) -> Loads:
        """Ask every node for what it leads; return the load of each partition, also of those asked for earlier."""
        coordinator = self._coordinator
        found, _ = await self._asked(coordinator.view.nodes.values(), "/cluster/copies")
        await coordinator.loaded([(each, led.end_bytes, led.bytes) for each, led in found.items()])
        return coordinator.loads

    async def _asked(self, nodes: Iterable[NodeRecord], target: str) -> tuple[dict[PartitionId, LedByNode], list[str]]:
        """Return what nodes tell of what they lead, and who did not tell anything, and why."""
        found: dict[PartitionId, LedByNode] = {}
        problems: list[str] = []
        room = asyncio.Semaphore(ASKED_MAX)

        async def one(node: NodeRecord) -> None:
            try:
                async with room:
                    status, body = await self._ask_node(node, target)
                if status != 200:
                    problems.append(f"node {node.node} answered {status}")
                    return
                told = msgspec.json.decode(body, type=ToldByNode)
                found.update({(each.topic, each.partition): each for each in told.partitions})
            except (ConnectionFailed, *UNREADABLE_JSON) as error:
                problems.append(f"node {node.node}: {error}")

        await asyncio.gather(*map(one, nodes))
        return found, problems


_NODES_OF_MOVE = (("move_source", "move_from"), ("move_target", "move_to"))


def plan_row(plan: orders.Plan, is_dry_run: bool) -> dict[str, Any]:
    """Return what an order comes to, as it is answered."""
    return {
        "dry_run": is_dry_run,
        "changes": plan.swap is not None,
        "what": "" if plan.swap is None else plan.swap.reason,
        "copies": plan.rows,
        "copy_count": plan.count,
        "notes": plan.notes,
    }


def window_of(text: str) -> tuple[int, int]:
    """Read hours of the day such as ``22-4``.

    Raises:
        HttpError: it is nothing of the kind.
    """
    window = parsed_window(text)
    if window is not None:
        return window
    raise HttpError(400, f"INVALID_ARG_WINDOW: window={text[:64]}, it must be HH-HH with hours from 0 to 24 of UTC")


def _argument(query: Mapping[str, str], name: str, called: str = "") -> str:
    value = query.get(name, "")
    if not value:
        raise HttpError(400, f"MISSING_ARG_{called or name.upper()}")
    return value


def _either(query: Mapping[str, str], ours: str, theirs: str) -> str:
    given = [query[name] for name in (ours, theirs) if query.get(name)]
    if len(given) == 2 and given[0] != given[1]:
        raise HttpError(400, f"INVALID_ARG_{ours.upper()}: {ours} and {theirs} name different nodes")
    return given[0] if given else _argument(query, ours)


def _number(query: Mapping[str, str], name: str, called: str, low: int, high: int) -> int:
    text = _argument(query, name, called)
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and low <= int(text) <= high):
        raise HttpError(400, f"INVALID_ARG_{called}: {name}={text[:64]}, it must be {low} to {high}")
    return int(text)


def is_switched(query: Mapping[str, str], name: str) -> bool:
    """Read a parameter that is true or false; without it, false.

    Raises:
        HttpError: it is something else.
    """
    text = query.get(name, "")
    if text not in ("true", "false", ""):
        raise HttpError(400, f"INVALID_ARG_{name.upper()}: {name}={text[:64]}, it must be true or false")
    return text == "true"
