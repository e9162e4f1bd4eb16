"""Whether the messages of a topic have headers, as its nsqds say it; nsqlookupd say it to every consumer by themselves.

A consumer has to know it before it subscribes. With ``extend_support`` an nsqd refuses a topic without headers, and
makes one with headers where there was none; without, it refuses a topic with partitions and headers, and of a plain
topic it gives the bodies alone, without a word. So it is asked:

- ``PRODUCERS`` says it, to whoever may publish.
- ``OFFSETS`` says to whoever may subscribe that the topic is there: then asking for headers makes none, and the answer
  to SUB says whether there are any.

Rules of this file: it blocks, for a thread; it decides nothing for the nsqds that are not FlintMQ's, whose answer to
SUB says it.

Source: docs/headers.md ("Consuming").
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import closing
from enum import Enum

from flintmq.errors import UNREADABLE_JSON, FlintError, NsqdError, OptionError
from flintmq.spark.broker import FAILURES, NsqdConnection, is_final
from flintmq.spark.options import LinkOptions
from flintmq.wire import commands

NOBODY = "flintmq.spool:nobody"
"""A prefix that no producer has: only the answer about the topic is wanted."""


class Said(Enum):
    """The answer of one nsqd.

    Attributes:
        MAYBE: the topic is there, and who may not publish is not told more.
        NOTHING: the topic is not there, or this nsqd does not know the question.
        AWAY: it may answer later.
    """

    YES = "yes"
    NO = "no"
    MAYBE = "maybe"
    NOTHING = "nothing"
    AWAY = "away"


class HeadersDiffer(FlintError):
    """A topic has headers on one nsqd and none on another, and one consumer cannot ask for both.

    Args:
        topic: the topic.
    """

    def __init__(self, topic: str) -> None:
        super().__init__(topic)
        self.topic = topic

    def __str__(self) -> str:
        return (
            f"topic {self.topic!r} has headers on one of the nsqds that option nsqd names and none on another: read "
            "them with a query each, or give it headers on all of them (POST /topic/meta/update?topic=...&"
            "upgradeext=true)"
        )


def ask(address: str, topic: str, link: LinkOptions, timeout_s: float) -> Said:
    """Ask one nsqd; blocks.

    Args:
        timeout_s: until it has let this process in, and again until it has answered.
    """
    try:
        try:
            return _ask_who_knows(address, topic, link, timeout_s)
        except NsqdError as error:
            if error.code != "E_UNAUTHORIZED":
                raise
            return _ask_whether_it_is_there(address, topic, link, timeout_s)
    except FAILURES as error:
        is_answer = isinstance(error, NsqdError) and error.code in ("E_TOPIC_NOT_EXIST", "E_INVALID")
        # what is refused for good the consumer is told as well, and says it as a consumer does
        return Said.NOTHING if is_answer or is_final(error, address, link) else Said.AWAY
    except OptionError:
        return Said.NOTHING
    except (*UNREADABLE_JSON, KeyError, TypeError):
        return Said.NOTHING


def _ask_who_knows(address: str, topic: str, link: LinkOptions, timeout_s: float) -> Said:
    with closing(NsqdConnection(address, timeout_s, timeout_s, link)) as connection:
        connection.send(commands.producers(topic, NOBODY))
        answer = json.loads(connection.receive())
    if not answer["partitions"]:  # a node of a cluster that leads none of them may not know the topic
        return Said.NOTHING
    return Said.YES if answer["has_headers"] else Said.NO


def _ask_whether_it_is_there(address: str, topic: str, link: LinkOptions, timeout_s: float) -> Said:
    with closing(NsqdConnection(address, timeout_s, timeout_s, link)) as connection:
        (found,) = connection.offsets([topic])
    return Said.MAYBE if found.logs else Said.NOTHING


def what_holds(topic: str, said: Iterable[Said]) -> bool:
    """Return whether to ask for headers.

    Raises:
        HeadersDiffer: it has some on one nsqd, and none on another.
    """
    said = set(said)
    if Said.YES in said and Said.NO in said:
        raise HeadersDiffer(topic)
    return Said.YES in said or (Said.MAYBE in said and Said.NO not in said)
