"""``GET /cluster/copies``: what this node leads in a cluster, how much that is, and how far the other copies are.

Asked by nsqlookupd, for the progress of moves and for the load of nodes.
"""

from __future__ import annotations

from typing import Any

from flintmq.net.http_messages import HttpError, Request, Response, json_response
from flintmq.nsqd.api.arguments import switch
from flintmq.nsqd.api.route import ALL_READ, Route
from flintmq.nsqd.node import Node


class ClusterApi:
    """This route of one nsqd."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def copies(self, request: Request) -> Response:
        """Answer with every partition that is led here; ``lagging=true``: those that another copy is not in sync of."""
        agent = self._node.agent
        if agent is None:
            raise HttpError(400, "NOT_IN_CLUSTER: this nsqd belongs to no cluster, start it with --cluster-store")
        rows: list[dict[str, Any]] = agent.shown.copies(lags_only=switch(request, "lagging") is True)
        return json_response({"node": agent.node_id, "partitions": rows})


ROUTES = (Route("GET", "/cluster/copies", ALL_READ, ClusterApi.copies, ("lagging",)),)
