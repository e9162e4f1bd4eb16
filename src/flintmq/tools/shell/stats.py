"""``/stats`` of all nsqd together: rows of topics and channels, over every node and partition that has a part of them.

Rules of this file: figures are added up; what an nsqd does not tell counts as nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flintmq.tools.shell.link import Link, NothingThere

_ADDED = (
    "depth",
    "in_flight_count",
    "deferred_count",
    "message_count",
    "requeue_count",
    "timeout_count",
    "client_count",
)


@dataclass(slots=True)
class ChannelRow:
    """A channel; a topic as well, where ``channel`` is empty.

    Attributes:
        depth: messages that wait.
        clients: consumers, as nsqd tells them.
        nodes: HTTP addresses of the nsqd that have it.
    """

    topic: str
    channel: str = ""
    depth: int = 0
    in_flight_count: int = 0
    deferred_count: int = 0
    message_count: int = 0
    requeue_count: int = 0
    timeout_count: int = 0
    client_count: int = 0
    paused: bool = False
    skipped: bool = False
    clients: list[Mapping[str, Any]] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)

    @property
    def finished_count(self) -> int:
        """Deliveries that came to an end, as far as can be told: published less what is still there."""
        return max(0, self.message_count - self.depth - self.in_flight_count - self.deferred_count)

    def add(self, row: Mapping[str, Any], node: str) -> None:
        """Add what one nsqd says."""
        for name in _ADDED:
            value = row.get(name)
            if isinstance(value, int):
                setattr(self, name, getattr(self, name) + value)
        self.paused |= row.get("paused") is True
        self.skipped |= row.get("skipped") is True
        clients = row.get("clients")
        if isinstance(clients, list):
            self.clients += [each for each in clients if isinstance(each, dict)]
            if not row.get("client_count"):
                self.client_count += len(clients)
        self.nodes.append(node.removeprefix("http://"))


def rows_of(answers: Iterable[tuple[str, Mapping[str, Any]]]) -> list[ChannelRow]:
    """Return a row for each topic, followed by those of its channels, by name."""
    found: dict[tuple[str, str], ChannelRow] = {}
    for node, answer in answers:
        body = answer["data"] if isinstance(answer.get("data"), dict) else answer
        topics = body.get("topics")
        for topic in topics if isinstance(topics, list) else []:
            name = str(topic.get("topic_name", ""))
            found.setdefault((name, ""), ChannelRow(name)).add({**topic, "clients": None}, node)
            for channel in topic.get("channels") or []:
                key = (name, str(channel.get("channel_name", "")))
                found.setdefault(key, ChannelRow(*key)).add(channel, node)
    return [found[key] for key in sorted(found)]


def stats(link: Link, topic: str | None = None, channel: str | None = None, clients: bool = False) -> list[ChannelRow]:
    """Ask all nsqd for rows: of all topics, of one, or of one channel.

    Raises:
        NothingThere: there is no such topic or channel.
        FlintError: nobody answers.
    """
    admins = link.nsqds(topic)
    answers = link.each(admins, lambda admin: admin.stats(topic, channel, clients=clients))
    rows = rows_of((admin.address, answer) for admin, answer in answers)
    asked = ", ".join(admin.address.removeprefix("http://") for admin, _ in answers)
    if topic is not None and channel is None and not rows:
        raise NothingThere(f"there is no topic {topic} on nsqd {asked}")
    if channel is not None:
        rows = [row for row in rows if row.channel == channel]
        if not rows:
            raise NothingThere(f"there is no channel {channel} of topic {topic} on nsqd {asked}")
    return rows


def only_channel(link: Link, topic: str) -> str:
    """Return the channel of a topic that has one.

    Raises:
        NothingThere: it has none, or several.
    """
    names = [row.channel for row in stats(link, topic) if row.channel]
    if len(names) == 1:
        return names[0]
    has = f"several channels, name one: {', '.join(names)}" if names else "no channel"
    raise NothingThere(f"topic {topic} has {has}")
