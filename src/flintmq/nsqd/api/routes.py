"""Every request of nsqd's HTTP API: the rows of its rooms, and the rooms that answer them.

Rules of this file: what asks for a permission says so in its row; ``/debug`` has none and asks for ``admin`` of all
topics. The page in the reference is made of the rows.

Source: NSQ's HTTP API, Youzan's HTTP API.
"""

from __future__ import annotations

from dataclasses import dataclass

from flintmq.net.debug import DebugApi
from flintmq.net.http_auth import Table
from flintmq.net.http_messages import HttpError
from flintmq.net.http_router import Router
from flintmq.net.log_level import LogLevelApi
from flintmq.net.networks import Networks
from flintmq.nsqd.api import (
    cluster,
    config,
    damage,
    drain,
    messages,
    publishing,
    settings,
    state,
    topics,
    trace,
    youzan,
)
from flintmq.nsqd.api.arguments import KNOWN, NotHere, style_of
from flintmq.nsqd.api.lines import Lines
from flintmq.nsqd.api.route import ALL_ADMIN, LARGE, WALKS, add_routes
from flintmq.nsqd.figures.figures import Figures
from flintmq.nsqd.identity import Identity
from flintmq.nsqd.leadership import NOT_LEADER
from flintmq.nsqd.node import Node
from flintmq.nsqd.options import NsqdOptions
from flintmq.wire.server import ServerLimits

_LEADERS_SHOWN_MAX = 10
_LOG_LEVEL = ("POST", "/loglevel/set")  # answered by flintmq.net, as in nsqlookupd

PERMISSIONS: Table = {
    (row.method, row.path): row.needs
    for room in (state, publishing, topics, messages, settings, youzan, trace, config, damage, drain, cluster)
    for row in room.ROUTES
} | {_LOG_LEVEL: ALL_ADMIN}
"""The permission that each request asks for."""


@dataclass(frozen=True, slots=True)
class Api:
    """All rooms of the HTTP API of one nsqd."""

    node: Node
    identity: Identity
    figures: Figures
    limits: ServerLimits
    running: config.Running
    debug: DebugApi

    def router(self, options: NsqdOptions) -> Router:
        """Return every route, complete."""
        node, figures, running = self.node, self.figures, self.running
        style = style_of(options.http_style)
        networks = Networks(options.allow_config_from_cidr)
        changes = topics.TopicsApi(node)
        router = Router(KNOWN)
        lines = {WALKS: Lines(), LARGE: Lines(node.engine.broker.budget, node.engine.schedule)}
        for module, room in (
            (state, state.StateApi(node, self.identity, figures, options.durability, style)),
            (publishing, publishing.PublishingApi(node, self.limits, changes.published_nothing)),
            (topics, changes),
            (messages, messages.MessagesApi(node)),
            (settings, settings.SettingsApi(node)),
            (youzan, youzan.YouzanApi(node, figures)),
            (trace, trace.TraceApi(node)),
            (config, config.ConfigApi(running, networks)),
            (damage, damage.DamageApi(node)),
            (drain, drain.DrainApi(node.drain)),
            (cluster, cluster.ClusterApi(node)),
        ):
            add_routes(router, room, module.ROUTES, self.limits, style, self._led_elsewhere, lines)
        LogLevelApi(networks, lambda word: running.change(running.options().replace(log_level=word))).add_routes(router)
        self.debug.add_routes(router)
        return router

    def _led_elsewhere(self, missing: NotHere) -> HttpError:
        """Say of a topic of the cluster that it is asked for at the wrong node; of others what was missing."""
        leadership = self.node.topics.leadership
        rows = None if leadership is None else leadership.led_elsewhere(missing.topic)
        found = [row for row in rows or () if missing.number is None or row.number == missing.number]
        if not found:
            return missing
        led = [f"{row.number} by {row.address or 'nobody now'}" for row in found[:_LEADERS_SHOWN_MAX]]
        more = ", ..." if len(found) > len(led) else ""
        return HttpError(400, f"{NOT_LEADER} topic {missing.topic} is led elsewhere: partition {', '.join(led)}{more}")
