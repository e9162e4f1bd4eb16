"""Which topic, channel and partition a request is about, and how a publish that is refused is answered.

Rules of this file: the texts of errors are NSQ's; of its own endpoints those whose checks differ from one to the next
make theirs in :mod:`flintmq.nsqd.http_api`.

Source: reference/nsq.md 2.1 (error texts).
"""

from __future__ import annotations

from flintmq.broker.bounds import TopicFull
from flintmq.broker.broker import Broker, TopicNotFound
from flintmq.broker.producers import SequenceGap
from flintmq.broker.topic import Topic
from flintmq.errors import FlintError, RemoteProtocolError
from flintmq.names import is_valid_name
from flintmq.net.http_messages import HttpError, Request
from flintmq.topic_meta import parse_partition
from flintmq.wire.server import NOT_A_NUMBER

_SHOWN_MAX = 20


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
    """The partition that a publish is for, as :class:`flintmq.wire.server.Publish` has it; -1 names none."""
    text = request.query.get("partition")
    if text is None or text == "-1":
        return None
    number = parse_partition(text)
    return NOT_A_NUMBER if number is None else number


def partition_number(request: Request) -> int | None:
    """The number of the partition that a request names, which need not be here; None when it names none.

    Raises:
        HttpError: 400, it is no number.
    """
    text = request.query.get("partition")
    number = None if text is None else parse_partition(text)
    if text is not None and number is None:
        raise HttpError(400, f"INVALID_ARG_PARTITION: partition={text[:64]}, it must be the number of a partition")
    return number


def partition_here(request: Request, topic: Topic) -> int | None:
    """As :func:`partition_number` for a topic that must have that partition here.

    Raises:
        HttpError: also 404, it is not here.
    """
    number = partition_number(request)
    if number is not None and number not in topic.partitions:
        raise HttpError(404, f"PARTITION_NOT_FOUND: topic {topic.name} has here {_shown(topic)}, not {number}")
    return number


def _shown(topic: Topic) -> str:
    numbers = list(topic.partitions)
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"partition {numbers[0]}" if len(numbers) == 1 else f"partitions {numbers[0]} to {numbers[-1]}"
    return "partitions " + ", ".join(map(str, numbers[:_SHOWN_MAX])) + (" ..." if len(numbers) > _SHOWN_MAX else "")


def publish_refusal(error: FlintError, is_draining: bool = False) -> HttpError:
    """The answer to a publish that nsqd does not take."""
    if isinstance(error, TopicFull):
        return HttpError(429, "TOPIC_FULL")
    if isinstance(error, SequenceGap):
        return HttpError(409, f"SEQUENCE_GAP: {error}")
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
