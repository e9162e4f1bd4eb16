"""Which topic and channel a request of FlintMQ's own HTTP API is about.

Rules of this file: the texts of errors are NSQ's; its own endpoints, whose checks differ from one to the next, make
theirs in :mod:`flintmq.nsqd.http_api`.

Source: reference/nsq.md 2.1 (error texts).
"""

from __future__ import annotations

from flintmq.broker.broker import Broker, TopicNotFound
from flintmq.broker.topic import Topic
from flintmq.names import is_valid_name
from flintmq.net.http_messages import HttpError, Request


def topic_name_of(request: Request) -> str:
    """The name of a topic, which need not be here.

    Raises:
        HttpError: 400, it is missing or no name.
    """
    name = request.query.get("topic")
    if name is None:
        raise HttpError(400, "MISSING_ARG_TOPIC")
    if not is_valid_name(name):
        raise HttpError(400, "INVALID_ARG_TOPIC")
    return name


def found_topic(broker: Broker, name: str) -> Topic:
    """The topic of that name.

    Raises:
        HttpError: 404, there is none.
    """
    try:
        return broker.get_topic(name)
    except TopicNotFound:
        raise HttpError(404, "TOPIC_NOT_FOUND") from None


def topic_of(broker: Broker, request: Request) -> Topic:
    """The topic that is named.

    Raises:
        HttpError: 400, the name is missing or none; 404, there is no such topic.
    """
    return found_topic(broker, topic_name_of(request))


def channel_of(broker: Broker, request: Request) -> tuple[Topic, str]:
    """The topic that is named, and the name of its channel.

    Raises:
        HttpError: as :func:`topic_of`, for the channel as well.
    """
    topic = topic_of(broker, request)
    name = request.query.get("channel")
    if name is None:
        raise HttpError(400, "MISSING_ARG_CHANNEL")
    if not is_valid_name(name):
        raise HttpError(400, "INVALID_ARG_CHANNEL")
    if name not in topic.channel_names:
        raise HttpError(404, "CHANNEL_NOT_FOUND")
    return topic, name
