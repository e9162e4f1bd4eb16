"""The part of nsqd's HTTP API that creates, changes and deletes topics and channels.

::

    POST /topic/create /topic/delete /topic/empty /topic/pause /topic/unpause          ?topic=
    POST /channel/create /channel/delete /channel/empty /channel/pause /channel/unpause  ?topic=&channel=&partition=
    POST /topic/replicate            give a topic of this node alone to its cluster
    POST /topic/meta/update          change what a topic with partitions was created with
    POST /channel/emptydelayed       finish what is deferred, and nothing else
    POST /channel/setorder           consume a channel in order, or no longer

Rules of this file: the order of the checks is nsqd's, because clients know which error comes first; a change is
answered when it is durable.

Source: NSQ's HTTP API, Youzan's HTTP API.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias

from flintmq.broker.broker import ChannelNotFound, TopicConflict
from flintmq.broker.partition import Ended
from flintmq.broker.topic import Topic
from flintmq.errors import FlintError
from flintmq.names import is_ephemeral
from flintmq.net.descriptors import TooFewDescriptors
from flintmq.net.http_messages import EMPTY, HttpError, PendingResponse, Request, Response
from flintmq.nsqd.api.answers import PendingAnswer, too_few_files, when
from flintmq.nsqd.api.arguments import (
    any_topic_name,
    channel_name,
    found_topic,
    needed_switch,
    partition_here,
    topic_name,
)
from flintmq.nsqd.api.route import DRY, TOPIC_ADMIN, Route
from flintmq.nsqd.leadership import NOT_LEADER, OfTheCluster
from flintmq.nsqd.node import Node
from flintmq.topic_meta import (
    CHANGE_WORDS,
    CLUSTER_CHANGE_WORDS,
    CREATION_WORDS,
    BadTopicMeta,
    asks_for_headers_alone,
    asks_for_partitions,
    changed_meta,
    meta_of_query,
    partitions_of_text,
)

log = logging.getLogger(__name__)

Change: TypeAlias = Callable[[Node, Topic, str, int | None], object]
"""Does something to a channel of that name, in one partition or in all."""


def _not_leader(error: OfTheCluster) -> HttpError:
    return HttpError(400, f"{NOT_LEADER} {error}")


def _when_made(wish: Ended, answer: Response) -> PendingResponse:
    """Answer when the cluster has made a topic."""
    return PendingAnswer(wish, answer, lambda error: HttpError(503, str(error))).pending


class TopicsApi:
    """These routes of one nsqd."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._drain = node.drain
        self._topics = node.topics
        self._engine = node.engine
        self._broker = node.engine.broker

    def _durable(self, topic: Topic | None = None, answer: Response = EMPTY) -> PendingResponse:
        """Answer when the change survives, and the topic, which may be new."""
        self._engine.schedule()
        return when(self._topics.when_durable(topic), answer)

    # -- topics ------------------------------------------------------------------------------------------------------

    def created(self, name: str, answer: Response) -> PendingResponse:
        """Answer when a topic exists and will."""
        if (wish := self._topics.wish(name)) is not None:
            return _when_made(wish, answer)
        try:
            topic = self._topics.create(name)
        except OfTheCluster as error:
            raise _not_leader(error) from None
        except TooFewDescriptors as error:
            raise too_few_files(error) from None
        except FlintError:
            raise HttpError(500, "INTERNAL_ERROR") from None
        return self._durable(topic, answer)

    def published_nothing(self, name: str, answer: Response) -> PendingResponse:
        """Answer a publish without messages, which creates its topic."""
        if name not in self._broker.topics and not self._topics.are_created:
            raise HttpError(404, "E_TOPIC_NOT_EXIST")
        return self.created(name, answer)

    def create(self, request: Request) -> PendingResponse:
        """``/topic/create``."""
        name = topic_name(request, "INVALID_TOPIC")
        if asks_for_headers_alone(request.query):
            return self._create_extended(name)
        if asks_for_partitions(request.query):
            return self._create_partitions(name, request)
        return self.created(name, EMPTY)

    def _refuse_while_draining(self) -> None:
        if self._drain.is_on:
            raise HttpError(503, "DRAINING")

    def _create_extended(self, name: str) -> PendingResponse:
        """Create a plain topic whose messages may carry headers."""
        self._refuse_while_draining()
        if (wish := self._topics.wish(name, is_extended=True)) is not None:
            return _when_made(wish, EMPTY)
        try:
            topic = self._topics.create_extended(name)
        except TopicConflict as error:
            raise HttpError(400, str(error)) from None
        except OfTheCluster as error:
            raise _not_leader(error) from None
        except TooFewDescriptors as error:
            raise too_few_files(error) from None
        except FlintError:
            raise HttpError(503, "EXITING") from None
        return self._durable(topic)

    def _create_partitions(self, name: str, request: Request) -> PendingResponse:
        """Create partitions of a topic, as nsqlookupd asks; ``partitions=0,2`` are those of them that come here."""
        self._refuse_while_draining()
        try:
            meta = meta_of_query(request.query)
            text = request.query.get("partitions")
            numbers = range(meta.partition_num) if text is None else partitions_of_text(text, meta.partition_num)
            if is_ephemeral(name):
                raise BadTopicMeta(f"topic {name} is ephemeral and cannot have partitions: take another name")
            topic = self._topics.create_partitions(name, meta, numbers)
        except (BadTopicMeta, TopicConflict) as error:
            raise HttpError(400, str(error)) from None
        except OfTheCluster as error:
            raise _not_leader(error) from None
        except TooFewDescriptors as error:
            raise too_few_files(error) from None
        except FlintError:
            raise HttpError(503, "EXITING") from None
        return self._durable(topic)

    def update_meta(self, request: Request) -> PendingResponse:
        """``/topic/meta/update``; nsqlookupd names the version, so that all nodes have the same."""
        topic, leadership = found_topic(self._broker, topic_name(request)), self._topics.leadership
        if leadership is not None and leadership.is_replicated(topic.name):
            raise HttpError(400, f"OF_THE_CLUSTER: {OfTheCluster(topic.name)}")
        try:
            meta = changed_meta(topic.meta, request.query)
            if "version" not in request.query and meta.is_like(topic.meta):
                return self._durable(topic)
            if meta.rank < topic.meta.rank:
                at = f"topic {topic.name} is at version {topic.meta.version}"
                raise HttpError(409, f"OLD_VERSION: {at}, this is {meta.version}")
            if self._topics.change_meta(topic, meta):
                log.info("TOPIC(%s): changed to version %d: %s", topic.name, meta.version, meta.changes())
        except (BadTopicMeta, TopicConflict) as error:
            raise HttpError(400, str(error)) from None
        return self._durable(topic)

    async def replicate(self, request: Request) -> Response:
        """``/topic/replicate``: give a topic that is this node's alone to its cluster, with one copy."""
        name, agent = topic_name(request), self._node.agent
        if agent is None:
            raise HttpError(400, "NO_CLUSTER: this nsqd belongs to none, start it with --cluster-store")
        if not agent.admission.is_replicated(name):
            found_topic(self._broker, name)
        if is_ephemeral(name):
            raise HttpError(400, f"INVALID_ARG_TOPIC: {name} is ephemeral, and stays one node's alone")
        try:
            await agent.alone.bring(name)
        except FlintError as error:
            raise HttpError(409, f"NOT_REPLICATED: {error}") from None
        return EMPTY

    def delete(self, request: Request) -> PendingResponse:
        """``/topic/delete``; what the cluster has deleted is done: nsqadmin asks nsqlookupd, and then every nsqd."""
        name, leadership = any_topic_name(request), self._topics.leadership
        if leadership is not None and leadership.was_deleted(name):
            return self._durable()
        topic = found_topic(self._broker, name)
        try:
            self._topics.delete(topic.name)
        except OfTheCluster as error:
            raise HttpError(400, f"OF_THE_CLUSTER: {error}") from None
        return self._durable()

    def empty(self, request: Request) -> PendingResponse:
        """``/topic/empty``."""
        self._broker.empty_topic(found_topic(self._broker, topic_name(request, "INVALID_TOPIC")))
        return self._durable()

    def pause(self, request: Request, is_paused: bool) -> PendingResponse:
        """``/topic/pause`` and ``/topic/unpause``."""
        self._broker.pause_topic(found_topic(self._broker, any_topic_name(request)), is_paused)
        return self._durable()

    # -- channels ----------------------------------------------------------------------------------------------------

    def _channel(self, request: Request) -> tuple[Topic, str, int | None]:
        """The topic, the name of a channel that need not be there, and the partition that is meant."""
        topic, channel = topic_name(request), channel_name(request)
        found = found_topic(self._broker, topic)
        return found, channel, partition_here(request, found)

    def create_channel(self, request: Request) -> PendingResponse:
        """``/channel/create``."""
        topic, channel, number = self._channel(request)
        self._broker.channel(topic, channel, numbers=None if number is None else [number])
        return self._durable(topic)

    def order_channel(self, request: Request) -> PendingResponse:
        """``/channel/setorder``."""
        is_ordered = needed_switch(request, "order")
        return self.change_channel(
            request, lambda node, topic, name, _: node.engine.broker.order_channel(topic, name, is_ordered, True)
        )

    def change_channel(self, request: Request, change: Change) -> PendingResponse:
        """Do to a channel what a row says."""
        try:
            change(self._node, *self._channel(request))
        except ChannelNotFound:
            raise HttpError(404, "CHANNEL_NOT_FOUND") from None
        return self._durable()


_TOPIC = ("topic",)
_PART = ("topic", "channel", "partition")
_NO_PART = ("partition", *DRY)
"""Refused where everything that a topic or channel has here is changed, and not one partition."""
_FIXED = ("partition_num", "multipart", "orderedmulti", "extend", *CLUSTER_CHANGE_WORDS)
"""Of a topic that is there; only a cluster changes some of it."""


def _row(
    path: str,
    handler: Callable[[TopicsApi, Request], PendingResponse],
    takes: tuple[str, ...],
    refuses: tuple[str, ...] = _NO_PART,
) -> Route:
    return Route("POST", path, TOPIC_ADMIN, handler, takes, refuses)


def _change(path: str, change: Change) -> Route:
    return _row(path, lambda api, request: api.change_channel(request, change), _PART)


ROUTES = (
    _row("/topic/create", TopicsApi.create, ("topic", *CREATION_WORDS, "partitions", "version"),
         (*_NO_PART, *CLUSTER_CHANGE_WORDS)),
    _row("/topic/meta/update", TopicsApi.update_meta, ("topic", *CHANGE_WORDS, "version"), (*_NO_PART, *_FIXED)),
    _row("/topic/delete", TopicsApi.delete, _TOPIC),
    Route("POST", "/topic/replicate", TOPIC_ADMIN, TopicsApi.replicate, _TOPIC),
    _row("/topic/empty", TopicsApi.empty, _TOPIC),
    _row("/topic/pause", lambda api, request: api.pause(request, True), _TOPIC),
    _row("/topic/unpause", lambda api, request: api.pause(request, False), _TOPIC),
    _row("/channel/create", TopicsApi.create_channel, _PART),
    _change("/channel/delete", lambda node, *part: node.topics.delete_channel(*part)),
    _change("/channel/empty", lambda node, *part: node.engine.broker.empty_channel(*part)),
    _change("/channel/emptydelayed", lambda node, *part: node.engine.broker.empty_deferred(*part)),
    _change(
        "/channel/pause", lambda node, topic, name, part: node.engine.broker.pause_channel(topic, name, True, part)
    ),
    _change(
        "/channel/unpause", lambda node, topic, name, part: node.engine.broker.pause_channel(topic, name, False, part)
    ),
    _row("/channel/setorder", TopicsApi.order_channel, ("topic", "channel", "order")),
)  # fmt: skip
