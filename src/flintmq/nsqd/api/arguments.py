"""The arguments of requests: one function for each kind, and the text of the refusal of one that cannot be obeyed.

Parameters come only from the query string. Requests that NSQ has ignore what they do not obey, as there; others refuse
what means something to who sends it (:mod:`flintmq.net.http_router`), and so do those in :data:`KNOWN`, although no
route of ours takes them, or not every route does.

Rules of this file: the texts of errors are NSQ's, and so is which error comes first: its own requests look at all
names before they look for a topic (:func:`channel_name`), those of the redesigned NSQ find the topic first
(:func:`channel_of`).

Source: NSQ's HTTP API (order and texts), Youzan's nsqlookupd, Youzan's HTTP API.
"""

from __future__ import annotations

from flintmq.broker.broker import Broker, TopicNotFound
from flintmq.broker.partition import Partition
from flintmq.broker.topic import Topic
from flintmq.limits import MESSAGE_ID_SIZE, SEQUENCE_BITS
from flintmq.names import is_valid_name
from flintmq.net.http_envelope import Style
from flintmq.net.http_messages import HttpError, Request
from flintmq.topic_meta import CREATION_WORDS, parse_partition
from flintmq.wire.server import NOT_A_NUMBER

YOUZAN_ALONE = ("partition", "leaderOnly", "needClients")
"""Parameters that show that a request which NSQ has, too, is the redesigned NSQ's."""
OURS_ALONE = ("producer_id", "sequence")
"""Parameters that neither NSQ has, of requests that both have."""
KNOWN = (
    *YOUZAN_ALONE,
    *CREATION_WORDS,
    "access", "checkcorrupt", "client_prefix", "consistent", "delayed_queue", "dry_run", "force", "loglevel",
    "metaInfo", "metainfo", "move_from", "move_leader", "move_to", "needext", "order", "ratekilobytes", "ready",
    "remove_node", "restore", "search_mode", "search_pos", "slow", "topn", "upgradeext",
)  # fmt: skip
_SWITCHES = {"true": True, "1": True, "false": False, "0": False}
_SHOWN_MAX = 20
_NUMBER_DIGITS_MAX = 19
_HEX = frozenset("0123456789abcdef")


class NotHere(HttpError):
    """The topic or the partition that a request is about is not here; another node may have it.

    Args:
        topic: its name.
        number: of the partition; None: the request named none.
        message: the error's text.
    """

    def __init__(self, topic: str, number: int | None, message: str) -> None:
        super().__init__(404, message)
        self.topic = topic
        self.number = number


def style_of(name: str) -> Style:
    """Return how an nsqd that was started with this ``--http-style`` answers."""
    return Style(name, YOUZAN_ALONE, OURS_ALONE)


# -- topics and channels -----------------------------------------------------------------------------------------------


def any_topic_name(request: Request) -> str:
    """Return what is given as a topic, which need not be a name.

    Raises:
        HttpError: 400, it is missing.
    """
    name = request.query.get("topic")
    if name is None:
        raise HttpError(400, "MISSING_ARG_TOPIC")
    return name


def topic_name(request: Request, invalid: str = "INVALID_ARG_TOPIC") -> str:
    """Return the name of a topic, which need not be here.

    Args:
        invalid: the error for one that is none, which is not the same everywhere.

    Raises:
        HttpError: 400, it is missing or no name.
    """
    name = any_topic_name(request)
    if not is_valid_name(name):
        raise HttpError(400, invalid)
    return name


def channel_name(request: Request) -> str:
    """Return the name of a channel, which need not be here.

    Raises:
        HttpError: 400, it is missing or no name.
    """
    name = request.query.get("channel")
    if name is None:
        raise HttpError(400, "MISSING_ARG_CHANNEL")
    if not is_valid_name(name):
        raise HttpError(400, "INVALID_ARG_CHANNEL")
    return name


def found_topic(broker: Broker, name: str) -> Topic:
    """Return the topic of that name.

    Raises:
        HttpError: 404, there is none.
    """
    try:
        return broker.get_topic(name)
    except TopicNotFound:
        raise NotHere(name, None, "TOPIC_NOT_FOUND") from None


def topic_of(broker: Broker, request: Request) -> Topic:
    """Return the topic that is named.

    Raises:
        HttpError: 400, the name is missing or none; 404, there is no such topic.
    """
    return found_topic(broker, topic_name(request))


def channel_of(broker: Broker, request: Request) -> tuple[Topic, str]:
    """Return the topic that is named, and the name of its channel.

    Raises:
        HttpError: as :func:`topic_of`, for the channel as well.
    """
    topic = topic_of(broker, request)
    name = channel_name(request)
    if name not in topic.channel_names:
        raise HttpError(404, "CHANNEL_NOT_FOUND")
    return topic, name


# -- partitions --------------------------------------------------------------------------------------------------------


def partition_to_publish(request: Request) -> int | None:
    """Return the partition of a publish as :class:`flintmq.wire.server.Publish` has it; -1 names none."""
    text = request.query.get("partition")
    if text is None or text == "-1":
        return None
    number = parse_partition(text)
    return NOT_A_NUMBER if number is None else number


def partition_number(request: Request) -> int | None:
    """Return the number of the partition that a request names, which need not be here; None when it names none.

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
        what = f"PARTITION_NOT_FOUND: topic {topic.name} has here {_shown(topic)}, not {number}"
        raise NotHere(topic.name, number, what)
    return number


def partitions_of(request: Request, topic: Topic) -> list[Partition]:
    """Return the partition that is named, else all of them.

    Raises:
        HttpError: as :func:`partition_here`.
    """
    number = partition_here(request, topic)
    return list(topic.partitions.values()) if number is None else [topic.partitions[number]]


def one_partition(request: Request, topic: Topic) -> Partition:
    """Return the partition that is named, or the only one.

    Raises:
        HttpError: as :func:`partition_here`; 400, there are several and none is named.
    """
    found = partitions_of(request, topic)
    if len(found) > 1:
        raise HttpError(400, "MISSING_ARG_PARTITION")
    return found[0]


def _shown(topic: Topic) -> str:
    numbers = list(topic.partitions)
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"partition {numbers[0]}" if len(numbers) == 1 else f"partitions {numbers[0]} to {numbers[-1]}"
    return "partitions " + ", ".join(map(str, numbers[:_SHOWN_MAX])) + (" ..." if len(numbers) > _SHOWN_MAX else "")


# -- values ------------------------------------------------------------------------------------------------------------


def lenient_switch(request: Request, name: str, default: bool) -> bool:
    """Return a parameter that is true or false, as NSQ reads it: anything else is the default."""
    return _SWITCHES.get(request.query.get(name, ""), default)


def switch(request: Request, name: str) -> bool | None:
    """Return a parameter that is true or false, in any case of letters; None when it was not given.

    Raises:
        HttpError: 400, it is neither.
    """
    text = request.query.get(name)
    if text is None:
        return None
    try:
        return _SWITCHES[text.lower()]
    except KeyError:
        shown = text[:64]
        raise HttpError(400, f"INVALID_ARG_{name.upper()}: {name}={shown}, it must be true or false") from None


def needed_switch(request: Request, name: str) -> bool:
    """Return a parameter that has to be true or false.

    Raises:
        HttpError: 400, it is missing or neither.
    """
    value = _SWITCHES.get(request.query.get(name, ""))
    if value is None:
        raise HttpError(400, f"INVALID_ARG_{name.upper()}")
    return value


def number(text: str) -> int | None:
    """Read decimal digits; None for anything else, huge numbers too."""
    is_number = text.isascii() and text.isdigit() and len(text) <= _NUMBER_DIGITS_MAX
    return int(text) if is_number else None


def number_within(request: Request, name: str, default: int, least: int, most: int) -> int:
    """Return a parameter that is a number in a range.

    Raises:
        HttpError: 400, it is none, or not in the range.
    """
    text = request.query.get(name)
    value = default if text is None else number(text)
    if value is None or not least <= value <= most:
        raise HttpError(400, f"INVALID_ARG_{name.upper()}")
    return value


def message_id(request: Request) -> int:
    """Return the internal id of the message that ``msgid`` names.

    Raises:
        HttpError: 400, it is missing or no id.
    """
    text = request.query.get("msgid")
    if text is None:
        raise HttpError(400, "MISSING_ARG_MSGID")
    internal = message_id_of(text)
    if internal is None:
        raise HttpError(400, "INVALID_ARG_MSGID")
    return internal


def message_id_of(text: str) -> int | None:
    """Read the internal id in a number, or in the hex digits of the 16 or 8 bytes that consumers see.

    Numbers of 16 digits do not begin with 0, and ids have less than 61 bits: so 16 hex digits do.
    """
    if len(text) == 2 * MESSAGE_ID_SIZE and _HEX.issuperset(text):
        internal: int | None = int(text[:MESSAGE_ID_SIZE], 16)
    elif len(text) == MESSAGE_ID_SIZE and text.startswith("0") and _HEX.issuperset(text):
        internal = int(text, 16)
    else:
        internal = number(text)
    return internal if internal is not None and internal < 1 << (SEQUENCE_BITS + 10) else None
