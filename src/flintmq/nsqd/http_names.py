"""Which topic, channel and partition a request is about, and how a publish that is refused is answered.

Rules of this file: the texts of errors are NSQ's; of its own endpoints those whose checks differ from one to the next
make theirs in :mod:`flintmq.nsqd.http_api`.

Source: reference/nsq.md 2.1 (error texts).
"""

from __future__ import annotations

from flintmq.broker.bounds import TopicFull
from flintmq.broker.broker import Broker, TopicNotFound
from flintmq.broker.topic import Topic
from flintmq.errors import FlintError, RemoteProtocolError
from flintmq.names import is_valid_name
from flintmq.net.http_messages import HttpError, Request
from flintmq.topic_meta import parse_partition
from flintmq.wire.server import NOT_A_NUMBER


def topic_name_of(request: Request, invalid: str = "INVALID_ARG_TOPIC") -> str:
    """The name of a topic, which need not be here.

    Args:
        invalid: what is said of one that is none, which is not the same everywhere.

    Raises:
        HttpError: 400, it is missing or no name.
    """
    name = request.query.get("topic")
    if name is None:
        raise HttpError(400, "MISSING_ARG_TOPIC")
    if not is_valid_name(name):
        raise HttpError(400, invalid)
    return name


def partition_of(request: Request) -> int | None:
    """The partition that a request is for, as :class:`flintmq.wire.server.Publish` has it."""
    text = request.query.get("partition")
    if text is None:
        return None
    number = parse_partition(text)
    return NOT_A_NUMBER if number is None else number


def publish_refusal(error: FlintError, is_draining: bool = False) -> HttpError:
    """The answer to a publish that nsqd does not take."""
    if isinstance(error, TopicFull):
        return HttpError(429, "TOPIC_FULL")
    if isinstance(error, RemoteProtocolError):
        return HttpError(404 if error.code == "E_TOPIC_NOT_EXIST" else 400, error.code)
    return HttpError(503, "DRAINING" if is_draining else "EXITING")


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
