"""The partitions that a command is for, and the error for one which cannot serve it.

A word behind the topic is a partition when it is a number, and -1 is none; NSQ ignores what stands there, so on a plain
topic anything else is ignored. Naming a partition creates nothing: it has to be here.

Rules of this file: no state, no IO; what is refused is a :class:`RemoteProtocolError` that says whether the connection
is closed, which for some codes depends on the command.

Source: Youzan's TCP protocol (commands, error table), NSQ's TCP protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flintmq.broker.partition import Partition
from flintmq.broker.topic import Topic
from flintmq.errors import NO_MORE_MESSAGES, RemoteProtocolError
from flintmq.nsqd import extended
from flintmq.wire.commands import COMMANDS
from flintmq.wire.server import NOT_A_NUMBER, Publish, Subscribe


def to_publish(topics: Mapping[str, Topic], event: Publish) -> Partition | None:
    """The partition that takes a publish; None for a plain topic that is to be created.

    Raises:
        RemoteProtocolError: there is none, it has to be named, or its topic has no room for trace ids or headers.
    """
    command, name, number = event.command, event.topic, event.partition
    topic = topics.get(name)
    if event.producer_id is not None:
        _check_counted(command, number, topic)
    if topic is None:
        if _is_number(number) or event.front:
            raise _not_here(command, name, number)
        return None
    partition = _partition_of(topic, command, number)
    if event.front:
        extended.check_room(event, topic.meta)
    return partition


def _check_counted(command: str, number: int | None, topic: Topic | None) -> None:
    """A producer counts the messages of each partition, so it says which one it means."""
    if number == NOT_A_NUMBER:
        raise bad_partition(command, "is neither a number nor -")
    if number is None and topic is not None and topic.meta.partition_num > 1:
        raise bad_partition(command, f"is missing, and topic {topic.name} has several")


def _partition_of(topic: Topic, command: str, number: int | None) -> Partition:
    if not topic.meta.is_partitioned and not _is_number(number):
        return topic.first_partition
    if number == NOT_A_NUMBER:
        raise bad_partition(command, "is not a number")
    if number is None:
        if topic.meta.ordered:
            raise bad_partition(command, f"is missing, and topic {topic.name} needs it")
        partition = topic.first_partition if topic.meta.multi_part else topic.next_partition()
    elif number not in topic.partitions:
        raise _not_here(command, topic.name, number)
    else:
        partition = topic.partitions[number]
    if partition.log.failed and topic.meta.is_partitioned:
        where = f"{command} topic {topic.name} partition {partition.number}"
        what = f"{where}: {partition.log.failed}; {NO_MORE_MESSAGES}"
        raise RemoteProtocolError("E_FAILED_ON_NOT_WRITABLE", what, fatal=False)
    return partition


def to_consume(
    topics: Mapping[str, Topic], event: Subscribe, is_order_must: Callable[[Topic, str], bool]
) -> list[int] | None:
    """The partitions that a subscription is for; None for a plain topic that may have to be created.

    In order that is one: the first that is here unless another is named.

    Args:
        is_order_must: whether a channel of a topic may only be consumed in order.

    Raises:
        RemoteProtocolError: it cannot be had in this way.
    """
    topic = topics.get(event.topic)
    command, number = event.command, event.partition
    if number == NOT_A_NUMBER and (event.is_located or (topic is not None and topic.meta.is_partitioned)):
        raise bad_partition(command, "is not a number")
    if topic is None:
        if _is_number(number) or event.is_ordered:
            raise _not_here(command, event.topic, number)
        return None
    if number is not None and number != NOT_A_NUMBER and number not in topic.partitions:
        raise _not_here(command, event.topic, number)
    check_start(event, topic.meta.partition_num)
    if not event.is_ordered and is_order_must(topic, event.channel):
        what = f"{command} topic {event.topic} channel {event.channel} can only be consumed with SUB_ORDER"
        raise RemoteProtocolError("E_SUB_ORDER_IS_MUST", what, fatal=True)
    if topic.meta.disable_channel_auto_create and event.channel not in topic.channel_names:
        what = f"{command} channel {event.channel} of topic {event.topic} has to be created before"
        raise RemoteProtocolError("E_SUB_CHANNEL_NOT_REGISTERED", what, fatal=True)
    if not topic.meta.is_partitioned and not event.is_ordered:
        return None
    if number is None:
        return [topic.first_partition.number] if event.is_ordered else list(topic.partitions)
    return [number]


def _is_number(number: int | None) -> bool:
    return number is not None and number != NOT_A_NUMBER


def check_start(event: Subscribe, partition_num: int) -> None:
    """See that a place to begin at says which partition it is in, where a topic has so many.

    Raises:
        RemoteProtocolError: it does not.
    """
    if event.start is not None and event.partition is None and partition_num > 1:
        where = f"topic {event.topic} has {partition_num}: a place to begin at is in one of them"
        raise bad_partition(event.command, f"is missing, and {where}")


def bad_partition(command: str, what: str) -> RemoteProtocolError:
    """Return the error for a partition that is missing or not a number."""
    return RemoteProtocolError("E_BAD_PARTITION", f"{command} partition {what}", fatal=True)


def _not_here(command: str, topic: str, number: int | None) -> RemoteProtocolError:
    shown = f" partition {number}" if number is not None and number != NOT_A_NUMBER else ""
    what = f"{command} topic {topic}{shown} is not on this nsqd"
    return RemoteProtocolError("E_TOPIC_NOT_EXIST", what, COMMANDS[command].closes("E_TOPIC_NOT_EXIST"))
