"""The part of nsqd's HTTP API that shows and changes the settings of topics and channels.

::

    GET  /topic/settings?topic=               what was set, and what is in force
    POST /topic/settings?topic=               change what the JSON object in the body names; null: inherit it again
    GET  /channel/settings?topic=&channel=
    POST /channel/settings?topic=&channel=

Rules of this file: a change is answered when it is as durable as a topic's creation, with what a GET would answer.

Source: NSQ's HTTP API (order of checks, names of errors).
"""

from __future__ import annotations

import msgspec

from flintmq.broker.topic import Topic
from flintmq.net.http_messages import HttpError, PendingResponse, Request, Response, json_response
from flintmq.nsqd.api.answers import when
from flintmq.nsqd.api.arguments import channel_of, topic_of
from flintmq.nsqd.api.route import TOPIC_ADMIN, TOPIC_READ, Route
from flintmq.nsqd.node import Node
from flintmq.settings import BadSetting, merged

_BODY_BYTES_MAX = 16 * 1024


class SettingsApi:
    """These routes of one nsqd."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._broker = node.engine.broker

    def show_topic(self, request: Request) -> Response:
        """``GET /topic/settings``."""
        return self._row(topic_of(self._broker, request), None)

    def show_channel(self, request: Request) -> Response:
        """``GET /channel/settings``."""
        return self._row(*channel_of(self._broker, request))

    def change_topic(self, request: Request) -> PendingResponse:
        """``POST /topic/settings``."""
        return self._change(topic_of(self._broker, request), None, request.body)

    def change_channel(self, request: Request) -> PendingResponse:
        """``POST /channel/settings``."""
        return self._change(*channel_of(self._broker, request), request.body)

    def _row(self, topic: Topic, channel: str | None) -> Response:
        own = self._broker.own_settings(topic.name, channel)
        effective = self._broker.settings_of(topic.name, channel)
        who = {"topic": topic.name} | ({"channel": channel} if channel else {})
        return json_response({**who, "settings": own, "effective": msgspec.structs.asdict(effective)})

    def _change(self, topic: Topic, channel: str | None, body: bytes) -> PendingResponse:
        try:
            settings = merged(self._broker.own_settings(topic.name, channel), body)
            self._broker.change_settings(topic, channel, settings)
        except BadSetting as error:
            raise HttpError(400, str(error)) from None
        answer = self._row(topic, channel)
        self._node.engine.schedule()
        return when(self._node.topics.when_durable(topic), answer)


_CHANNEL = ("topic", "channel")
ROUTES = (
    Route("GET", "/topic/settings", TOPIC_READ, SettingsApi.show_topic, ("topic",)),
    Route("POST", "/topic/settings", TOPIC_ADMIN, SettingsApi.change_topic, ("topic",),
          body_limit=lambda _limits: _BODY_BYTES_MAX),
    Route("GET", "/channel/settings", TOPIC_READ, SettingsApi.show_channel, _CHANNEL),
    Route("POST", "/channel/settings", TOPIC_ADMIN, SettingsApi.change_channel, _CHANNEL,
          body_limit=lambda _limits: _BODY_BYTES_MAX),
)  # fmt: skip
