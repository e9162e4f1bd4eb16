"""``/damage``: what was found in the data directory, and that it is known; see :mod:`flintmq.nsqd.damage`.

::

    GET  /damage               what was found
    POST /damage/acknowledge   it is known; /stats, metrics and doctor say nothing more of it

    {"count": 1, "lost": 200, "is_more_possible": false, "reports": [{"at": 1795175768, "path": "topics/t-x/p-0000",
     "reason": "...", "topic": "x", "partition": 0, "first": 401, "end": 601, "lost": 200}]}

What a copy of a cluster gets from another one is ``"elsewhere": 200`` in place of ``lost``.
"""

from __future__ import annotations

from flintmq.net.http_messages import HttpError, PendingResponse, Request, Response, json_response
from flintmq.nsqd.api.answers import PendingAnswer
from flintmq.nsqd.api.route import ALL_ADMIN, ALL_READ, Route
from flintmq.nsqd.node import Node


class DamageApi:
    """These routes of one nsqd."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def show(self, _request: Request | None = None) -> Response:
        """``/damage``."""
        return json_response(self._node.damage.state())

    def acknowledge(self, _request: Request) -> PendingResponse:
        """``/damage/acknowledge``; answered with what is left when that is durable."""
        node = self._node
        node.damage.acknowledge()
        node.engine.schedule()
        return PendingAnswer(node.topics.when_durable(), self.show, lambda error: HttpError(503, str(error))).pending


ROUTES = (
    Route("GET", "/damage", ALL_READ, DamageApi.show),
    Route("POST", "/damage/acknowledge", ALL_ADMIN, DamageApi.acknowledge),
)
