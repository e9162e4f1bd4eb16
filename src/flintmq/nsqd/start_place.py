"""The place where a channel begins for the first that subscribes to it with SUB_ADVANCED.

Rules of this file: a place is read before anything is created; it means something to the first consumer of a channel
alone, so that who comes later does not take messages away from the others, or has them delivered again.

Source: Youzan's TCP protocol (SUB_ADVANCED), docs/replay.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from flintmq.broker.broker import Broker
from flintmq.broker.channel import Channel
from flintmq.broker.seek import BadPlace, Place, parse_place, seek, sequence_at
from flintmq.broker.topic import Topic
from flintmq.errors import RemoteProtocolError
from flintmq.wire.server import Subscribe


def start_of(event: Subscribe) -> Place | None:
    """The place that a subscription names; None when the channel is to go on where it is.

    Raises:
        RemoteProtocolError: what stands there is none; fatal.
    """
    if event.start is None:
        return None
    try:
        return parse_place(event.start)
    except BadPlace as error:
        raise RemoteProtocolError("E_INVALID", f"{event.command} {error}", fatal=True) from None


def begin_at(broker: Broker, topic: Topic, channels: Mapping[int, Channel], place: Place) -> None:
    """Let those of a channel's parts go on at a place that have no consumer; it is durable with the topic's metadata.

    Args:
        channels: by the number of their partition.

    Raises:
        StorageError: the log cannot be read now; nothing has changed.
    """
    idle = [(channel, topic.partitions[number]) for number, channel in channels.items() if not channel.subscriptions]
    moves = [(channel, sequence_at(place, partition)) for channel, partition in idle]
    for channel, sequence in moves:
        seek(channel, place, sequence)
        broker.was_changed(channel)
