"""The parameters that a topic with partitions was created with, the same on every node that has a part of it.

Most of it is fixed for the topic's life; what ``/topic/meta/update`` changes makes a new version of all of it.

A plain topic, made by publishing or subscribing as NSQ does, has none of it: one partition, ids in hex.

Rules of this file: names of parameters and fields are those of the redesigned NSQ; both daemons read a query with the
same function, so that one refuses what the other would.

Source: Youzan's nsqlookupd (``/topic/create``, ``meta`` of ``/lookup``), docs/decisions/0017.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from flintmq.errors import FlintError
from flintmq.limits import PARTITION_COUNT_MAX

PARTITION_NUM_MAX = 255
REPLICATOR_MAX = 5
SUGGESTED_LOAD_MAX = 10_000
_TWO_IN_SYNC_FROM_COPIES = 3
RETENTION_DAYS_MAX = 36_500
SYNC_EVERY_MAX = 1_000_000
VERSION_MAX = 999_999_999
NOT_CREATED = "it is not created yet"
"""Why nobody leads a partition of which the store has nothing; more may stand behind it."""
TO_COME = f"{NOT_CREATED}: it comes with the node that has it"
"""The same of one that was a single nsqd's."""
NO_COPY = "no node that has a copy is alive"
"""Stands in why nobody leads a partition of which everything may be lost."""
TO_DECIDE = "an operator has to say who leads"
"""The same where who was in sync has lost its copy, and nobody is waited for."""
CHANGE_WORDS = ("retention", "syncdisk", "upgradeext", "disable_channel_auto_create", "replicator")
"""The parameters of ``/topic/meta/update``."""
CLUSTER_CHANGE_WORDS = ("min_in_sync",)
"""The parameters that it has beside them for topics of a cluster."""
CREATION_WORDS = ("partition_num", "replicator", "syncdisk", "retention", "orderedmulti", "multipart", "extend",
                  "disable_channel_auto_create", "suggestload")  # fmt: skip
"""The parameters of ``/topic/create`` that NSQ does not have."""


class BadTopicMeta(FlintError):
    """A parameter of ``/topic/create`` is not acceptable; its text is the answer."""


class TopicMeta(msgspec.Struct, frozen=True, omit_defaults=True):
    """The properties of one topic.

    Attributes:
        partition_num: partitions in all, wherever they are; 0 for a plain topic.
        replica: copies of each partition.
        ordered: can only be consumed in order.
        multi_part: made to have its partitions named; a publish that names none goes to the first that is there.
        extend_support: messages may carry headers.
        disable_channel_auto_create: subscribing creates no channel.
        retention_days: how long consumed messages stay; 0 as the node's options say.
        syncdisk: synced to the device after so many messages, 1 before each answer; 0 as ``--durability`` says.
        version: how often it was changed; a node that has missed a change takes the higher one.
    """

    partition_num: int = 0
    replica: int = 1
    ordered: bool = False
    multi_part: bool = False
    extend_support: bool = False
    disable_channel_auto_create: bool = False
    retention_days: int = 0
    syncdisk: int = 0
    version: int = 0

    @property
    def is_partitioned(self) -> bool:
        """Whether clients name its partitions; those of a plain topic, of which a cluster has several, they do not."""
        return self.partition_num > 0

    @property
    def has_raw_ids(self) -> bool:
        """Whether ids on the wire are 8 bytes internal id and 8 bytes trace id; else they are NSQ's 16 hex digits."""
        return self.is_partitioned

    @property
    def is_plain(self) -> bool:
        """Whether it says nothing that NSQ does not know, but for the number of copies."""
        return msgspec.structs.replace(self, replica=1) == PLAIN

    def query(self) -> dict[str, str]:
        """Return the parameters that :func:`meta_of_query` makes this of."""
        numbers = {"syncdisk": self.syncdisk, "retention": self.retention_days, "version": self.version}
        switches = {
            "orderedmulti": self.ordered,
            "multipart": self.multi_part,
            "extend": self.extend_support,
            "disable_channel_auto_create": self.disable_channel_auto_create,
        }
        return {
            "partition_num": str(self.partition_num),
            "replicator": str(self.replica),
            **{name: str(value) for name, value in numbers.items() if value},
            **{name: "true" for name, value in switches.items() if value},
        }

    @property
    def rank(self) -> tuple[int, bool, bytes]:
        """Of two states of one topic the higher one is in force; for all nodes the same one, also of equal versions.

        Of equal versions one with headers is higher, because a node that has them cannot give them up.
        """
        return self.version, self.extend_support, encode_meta(self)

    def is_like(self, other: TopicMeta) -> bool:
        """Whether it says the same, however often it was changed."""
        return msgspec.structs.replace(self, version=0) == msgspec.structs.replace(other, version=0)

    def with_headers_of(self, other: TopicMeta) -> TopicMeta:
        """This, with headers if another state of the same topic has them: a topic keeps them for its life."""
        if self.extend_support or not other.extend_support:
            return self
        return msgspec.structs.replace(self, extend_support=True)

    def changes(self) -> dict[str, str]:
        """Return the parameters of ``/topic/meta/update`` that make another state of this topic this one."""
        return {
            "retention": str(self.retention_days),
            "syncdisk": str(self.syncdisk),
            "upgradeext": "true" if self.extend_support else "false",
            "disable_channel_auto_create": "true" if self.disable_channel_auto_create else "false",
            "version": str(self.version),
        }

    def for_clients(self) -> dict[str, object]:
        """Return ``meta`` of ``/lookup``."""
        return {
            "partition_num": self.partition_num,
            "replica": self.replica,
            "extend_support": self.extend_support,
            "ordered": self.ordered,
            "multi_part": self.multi_part,
            "disable_channel_auto_create": self.disable_channel_auto_create,
        }

    def for_operators(self) -> dict[str, object]:
        """Return what ``/stats`` of nsqd says beside that."""
        return {"retention_days": self.retention_days, "syncdisk": self.syncdisk, "meta_version": self.version}


PLAIN = TopicMeta()
EXTENDED_PLAIN = TopicMeta(extend_support=True)
"""A plain topic whose messages may carry headers."""
encode_meta = msgspec.json.Encoder().encode
decode_meta = msgspec.json.Decoder(TopicMeta).decode


def asks_for_partitions(query: Mapping[str, str]) -> bool:
    """Whether a ``/topic/create`` is the redesigned NSQ's."""
    return any(name in query for name in CREATION_WORDS)


def asks_for_headers_alone(query: Mapping[str, str]) -> bool:
    """Whether a ``/topic/create`` of an nsqd is for a plain topic whose messages may carry headers."""
    return query.get("extend") == "true" and not any(name in query for name in CREATION_WORDS if name != "extend")


def meta_of_query(query: Mapping[str, str], copies_max: int = 1) -> TopicMeta:
    """Read the parameters of ``/topic/create``; one partition and one copy unless told otherwise.

    Args:
        copies_max: of each partition; more than one are for a cluster to make.

    Raises:
        BadTopicMeta: one of them is out of its range, or asks for what there is not.
    """
    replica = _number(query, "replicator", 1, 1, REPLICATOR_MAX, "INVALID_ARG_TOPIC_REPLICATOR")
    _number(query, "suggestload", 0, 0, SUGGESTED_LOAD_MAX, "INVALID_ARG_TOPIC_SUGGESTLOAD")
    meta = TopicMeta(
        partition_num=_number(query, "partition_num", 1, 1, PARTITION_NUM_MAX, "INVALID_ARG_TOPIC_PARTITION_NUM"),
        replica=replica,
        ordered=_switch(query, "orderedmulti"),
        multi_part=_switch(query, "multipart"),
        extend_support=_switch(query, "extend"),
        disable_channel_auto_create=_switch(query, "disable_channel_auto_create"),
        retention_days=_number(query, "retention", 0, 0, RETENTION_DAYS_MAX, "INVALID_ARG_TOPIC_RETENTION_DAYS"),
        syncdisk=_number(query, "syncdisk", 0, 0, SYNC_EVERY_MAX, "INVALID_ARG_TOPIC_SYNC_DISK"),
        version=_version(query, 0),
    )
    if replica > copies_max:
        raise BadTopicMeta(
            f"INVALID_ARG_TOPIC_REPLICATOR: replicator={replica}, and without a cluster there is one copy of a "
            "partition: start the daemons with --cluster-store, or create the topic with replicator=1"
        )
    return meta


def changed_meta(meta: TopicMeta, query: Mapping[str, str], is_of_cluster: bool = False) -> TopicMeta:
    """Return what ``/topic/meta/update`` makes of a topic: what is not named stays as it is.

    Its version is the next one, unless one is named, as between nodes.

    Args:
        is_of_cluster: there can be another number of copies.

    Raises:
        BadTopicMeta: a parameter is out of its range, or asks for what cannot be changed.
    """
    words = (*CHANGE_WORDS, *CLUSTER_CHANGE_WORDS) if is_of_cluster else CHANGE_WORDS
    if not any(name in query for name in words):
        raise BadTopicMeta(f"MISSING_ARG_TOPIC_META: name at least one of {', '.join(words)}")
    replica = _number(query, "replicator", meta.replica, 1, REPLICATOR_MAX, "INVALID_ARG_TOPIC_REPLICATOR")
    if replica != meta.replica and not is_of_cluster:
        raise BadTopicMeta(
            f"INVALID_ARG_TOPIC_REPLICATOR: replicator={replica}, and without a cluster there is one copy of a "
            "partition"
        )
    days = _number(query, "retention", meta.retention_days, 0, RETENTION_DAYS_MAX, "INVALID_ARG_TOPIC_RETENTION_DAYS")
    sync_every = _number(query, "syncdisk", meta.syncdisk, 0, SYNC_EVERY_MAX, "INVALID_ARG_TOPIC_SYNC_DISK")
    is_closed = meta.disable_channel_auto_create
    if query.get("disable_channel_auto_create"):
        is_closed = _switch(query, "disable_channel_auto_create")
    return msgspec.structs.replace(
        meta,
        replica=replica,
        retention_days=days,
        syncdisk=sync_every,
        extend_support=meta.extend_support or _switch(query, "upgradeext"),
        disable_channel_auto_create=is_closed,
        version=_version(query, meta.version + 1),
    )


def min_in_sync_of_query(query: Mapping[str, str]) -> int | None:
    """Read with how few copies in sync a topic of a cluster is still written to; None: that is not named.

    Raises:
        BadTopicMeta: it is out of its range.
    """
    if "min_in_sync" not in query:
        return None
    refusal = f"INVALID_ARG_TOPIC_MIN_IN_SYNC: it must be 1 to {REPLICATOR_MAX}, and at most replicator"
    return _number(query, "min_in_sync", 1, 1, REPLICATOR_MAX, refusal)


def usual_min_in_sync(copies: int) -> int:
    """Return with how few copies in sync a topic of a cluster is still written to, unless somebody says otherwise."""
    return 1 if copies < _TWO_IN_SYNC_FROM_COPIES else 2


def partitions_of_text(text: str, partition_num: int) -> list[int]:
    """Read numbers of partitions such as ``0,2,5``.

    Raises:
        BadTopicMeta: one is not a number below ``partition_num``.
    """
    numbers = []
    for word in text.split(","):
        number = parse_partition(word)
        if number is None or number >= partition_num:
            raise BadTopicMeta("INVALID_ARG_TOPIC_PARTITION")
        numbers.append(number)
    return sorted(dict.fromkeys(numbers))


def parse_partition(text: str) -> int | None:
    """Read a partition's number; None for what cannot be one."""
    if not (text.isascii() and text.isdigit() and len(text) <= 4):
        return None
    number = int(text)
    return number if number < PARTITION_COUNT_MAX else None


def _version(query: Mapping[str, str], default: int) -> int:
    return _number(query, "version", default, 0, VERSION_MAX, "INVALID_ARG_TOPIC_VERSION")


def _switch(query: Mapping[str, str], name: str) -> bool:
    text = query.get(name, "")
    if text not in ("true", "false", ""):
        raise BadTopicMeta(f"INVALID_ARG_TOPIC_{name.upper()}: {name}={text[:64]}, it must be true or false")
    return text == "true"


def _number(query: Mapping[str, str], name: str, default: int, low: int, high: int, refusal: str) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and low <= int(text) <= high):
        limits = "" if ":" in refusal else f": {name}={text[:64]}, it must be {low} to {high}"
        raise BadTopicMeta(refusal + limits)
    return int(text)
