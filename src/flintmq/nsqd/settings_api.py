"""The part of nsqd's HTTP API that shows and changes the settings of topics and channels.

::

    GET  /topic/settings?topic=               what was set, and what is in force
    POST /topic/settings?topic=               change what the JSON object in the body names; null: inherit it again
    GET  /channel/settings?topic=&channel=
    POST /channel/settings?topic=&channel=

Rules of this file: a change is answered when it is as durable as a topic's creation, with what a GET would answer.

Source: reference/nsq.md 2.1 (order of checks, names of errors).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec

from flintmq.broker.broker import Broker
from flintmq.broker.topic import Topic
from flintmq.net.http_messages import HttpError, Request, Response, json_response
from flintmq.net.http_router import Router
from flintmq.nsqd.engine import Engine
from flintmq.nsqd.http_names import channel_of, topic_of
from flintmq.settings import BadSetting, merged

_BODY_BYTES_MAX = 16 * 1024
Names = Callable[[Request], tuple[Topic, str | None]]


class SettingsApi:
    """These routes of one nsqd."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._broker: Broker = engine.broker

    def add_routes(self, router: Router) -> None:
        """Add them to a router."""
        for path, names, takes in (
            ("/topic/settings", self._of_topic, ("topic",)),
            ("/channel/settings", self._of_channel, ("topic", "channel")),
        ):
            router.add("GET", path, partial(self._show, names), takes=takes)
            router.add("POST", path, partial(self._change, names), body_limit_bytes=_BODY_BYTES_MAX, takes=takes)

    def _of_topic(self, request: Request) -> tuple[Topic, str | None]:
        return topic_of(self._broker, request), None

    def _of_channel(self, request: Request) -> tuple[Topic, str | None]:
        return channel_of(self._broker, request)

    def _show(self, names: Names, request: Request) -> Response:
        return self._row(*names(request))

    def _row(self, topic: Topic, channel: str | None) -> Response:
        own = self._broker.own_settings(topic.name, channel)
        effective = self._broker.settings_of(topic.name, channel)
        who = {"topic": topic.name} | ({"channel": channel} if channel else {})
        return json_response({**who, "settings": own, "effective": msgspec.structs.asdict(effective)})

    async def _change(self, names: Names, request: Request) -> Response:
        topic, channel = names(request)
        try:
            settings = merged(self._broker.own_settings(topic.name, channel), request.body)
            self._broker.change_settings(topic, channel, settings)
        except BadSetting as error:
            raise HttpError(400, str(error)) from None
        answer = self._row(topic, channel)
        self._engine.schedule()
        done: asyncio.Future[BaseException | None] = self._engine.loop.create_future()

        def settle(error: BaseException | None) -> None:
            if not done.done():  # else whoever asked is gone
                done.set_result(error)

        if self._broker.when_metadata_durable(settle, topic) and await done is not None:
            raise HttpError(503, "EXITING")
        return answer
