"""The keys of a cluster in its coordination store.

::

    /flintmq/<cluster>/cluster                     ClusterRecord      made once
    /flintmq/<cluster>/master                      LookupdRecord      with the lease of the nsqlookupd that coordinates
    /flintmq/<cluster>/lookupd/<id>                LookupdRecord      with its lease
    /flintmq/<cluster>/node/<id>                   NodeRecord         with its lease
    /flintmq/<cluster>/topic/<name>                TopicRecord
    /flintmq/<cluster>/wanted/<name>               WantedTopic        with the lease of the node that asks for it
    /flintmq/<cluster>/drain/<id>                  DrainRecord        a node that is to have nothing any more
    /flintmq/<cluster>/disk/<id>                   DiskRecord         how far a node's data directory has counted,
                                                                      and where it is, also while it is away
    /flintmq/<cluster>/settings                    SettingsRecord     once somebody has changed one
    /flintmq/<cluster>/check                       never there        whether the store takes writes is asked with it
    /flintmq/<cluster>/partition/<name>/<number>   PartitionState     numbers have four digits

Rules of this file: keys are made and read here and nowhere else.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from flintmq.cluster.store import Span

CLUSTER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NUMBER = re.compile(r"[0-9]{4}")


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one cluster.

    Args:
        cluster: its name, as :data:`CLUSTER_NAME` has it.
    """

    cluster: str

    def __post_init__(self) -> None:
        if CLUSTER_NAME.fullmatch(self.cluster) is None:
            raise ValueError(f"a cluster is called by 1 to 64 of A-Z a-z 0-9 _ . -, not {self.cluster[:80]!r}")

    @property
    def prefix(self) -> str:
        """The beginning of all of them."""
        return f"/flintmq/{self.cluster}/"

    @property
    def all(self) -> Span:
        """Every key of the cluster."""
        return Span.of_prefix(self.prefix)

    @property
    def record(self) -> str:
        """The key of the cluster itself."""
        return f"{self.prefix}cluster"

    @property
    def master(self) -> str:
        """The key that the nsqlookupd holds which coordinates."""
        return f"{self.prefix}master"

    def lookupd(self, lookupd: str) -> str:
        """The key of a nsqlookupd."""
        return f"{self.prefix}lookupd/{lookupd}"

    @property
    def lookupds(self) -> Span:
        """All nsqlookupds."""
        return Span.of_prefix(f"{self.prefix}lookupd/")

    def node(self, node: str) -> str:
        """The key of an nsqd."""
        return f"{self.prefix}node/{node}"

    @property
    def nodes(self) -> Span:
        """All nsqds."""
        return Span.of_prefix(f"{self.prefix}node/")

    def topic(self, topic: str) -> str:
        """The key of a topic."""
        return f"{self.prefix}topic/{topic}"

    @property
    def topics(self) -> Span:
        """All topics."""
        return Span.of_prefix(f"{self.prefix}topic/")

    def wanted(self, topic: str) -> str:
        """The key under which a topic is asked for."""
        return f"{self.prefix}wanted/{topic}"

    def drain(self, node: str) -> str:
        """The key that says that an nsqd is to have nothing any more."""
        return f"{self.prefix}drain/{node}"

    def disk(self, node: str) -> str:
        """The key that says how far the data directory of an nsqd has counted."""
        return f"{self.prefix}disk/{node}"

    @property
    def settings(self) -> str:
        """The key of what operators have said of the whole cluster."""
        return f"{self.prefix}settings"

    @property
    def check(self) -> str:
        """The key that is never there: a write that does not take place names it."""
        return f"{self.prefix}check"

    def partition(self, topic: str, number: int) -> str:
        """The key of a partition."""
        return f"{self.prefix}partition/{topic}/{number:04d}"

    def partitions(self, topic: str = "") -> Span:
        """All partitions of a topic; of all topics when none is named."""
        return Span.of_prefix(f"{self.prefix}partition/{topic}/" if topic else f"{self.prefix}partition/")

    def name_in(self, key: str, kind: str) -> str | None:
        """The rest of a key of this kind, such as ``node``; None for a key of another."""
        head = f"{self.prefix}{kind}/"
        return key[len(head) :] if key.startswith(head) else None

    def partition_in(self, key: str) -> tuple[str, int] | None:
        """Topic and number that a key names; None for one that names none."""
        rest = self.name_in(key, "partition")
        if rest is None:
            return None
        topic, _, number = rest.rpartition("/")
        return (topic, int(number)) if topic and _NUMBER.fullmatch(number) else None
