"""nsqd's figures written for Prometheus, under names with units.

Clients make topics and channels, so they decide how many series there are: at most ``ROWS_MAX`` topics and channels are
shown, in the order of their names, with about ten series each; ``flintmq_nsqd_rows_left_out`` counts the others. There
are no series per client.

Source: the names follow https://prometheus.io/docs/practices/naming/.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from flintmq.broker.broker import Broker
from flintmq.broker.topic import Topic
from flintmq.net.metrics import Family, labels_of
from flintmq.nsqd.damage import DamageRegister
from flintmq.nsqd.figures.collection import ChannelFigures, TopicFigures, topic_of
from flintmq.nsqd.figures.latencies import Latencies
from flintmq.nsqd.figures.limits import CHANNEL_FIELDS, TOPIC_FIELDS
from flintmq.nsqd.in_turns import in_turns

ROWS_MAX = 5000
_NAMESPACE = "flintmq_nsqd"


@dataclass(frozen=True, slots=True)
class _Column:
    """One metric of topics or of channels.

    Attributes:
        field: its attribute in the figures; of a limit its field, which is missing for zero.
    """

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    field: str
    is_limit: bool = False


_TOPIC_COLUMNS = (
    _Column("topic_depth", "gauge", "Messages of a topic that no channel has been given yet", "depth"),
    _Column("topic_messages_total", "counter", "Messages published to a topic", "message_count"),
    _Column("topic_message_bytes_total", "counter", "Bytes of the bodies published to a topic", "message_bytes"),
    _Column("topic_log_bytes", "gauge", "Size of a topic's log", "log_bytes"),
    _Column("topic_paused", "gauge", "1 while a topic is paused", "paused"),
    *(
        _Column(f"topic_{name}", "counter", TOPIC_FIELDS[field], field, True)
        for name, field in (
            ("refused_total", "refused_count"),
            ("expired_total", "expired_count"),
            ("dropped_total", "dropped_count"),
        )
    ),
)
_CHANNEL_COLUMNS = (
    _Column("channel_depth", "gauge", "Messages waiting for a consumer", "depth"),
    _Column("channel_in_flight", "gauge", "Messages that consumers hold", "in_flight_count"),
    _Column("channel_deferred", "gauge", "Messages waiting for their time", "deferred_count"),
    _Column("channel_messages_total", "counter", "Messages a channel was given", "message_count"),
    _Column("channel_finished_total", "counter", "Messages finished by consumers", "finish_count"),
    _Column("channel_requeued_total", "counter", "Messages given back by consumers", "requeue_count"),
    _Column("channel_timed_out_total", "counter", "Messages that consumers held for too long", "timeout_count"),
    _Column("channel_clients", "gauge", "Consumers of a channel", "client_count"),
    _Column("channel_paused", "gauge", "1 while a channel is paused", "paused"),
    _Column("channel_giving_up", "gauge", CHANNEL_FIELDS["giving_up_count"], "giving_up_count", True),
    *(
        _Column(f"channel_{name}", "counter", CHANNEL_FIELDS[field], field, True)
        for name, field in (
            ("dead_letters_total", "dead_letter_count"),
            ("expired_total", "expired_count"),
            ("dropped_total", "dropped_count"),
        )
    ),
)
_DELIVERIES_HELP = "Messages sent to consumers, repeated ones included, by how near these are: zone, region, global"
_LATENCY_HELP = "Time from publishing to FIN, over the window of --e2e-processing-latency-window-time"


class _Table:
    """The families of one kind of row."""

    def __init__(self, kind: str, columns: Iterable[_Column]) -> None:
        self._columns = [
            (column, Family(f"{_NAMESPACE}_{column.name}", column.kind, column.help)) for column in columns
        ]
        self._latency = Family(f"{_NAMESPACE}_{kind}_e2e_latency_seconds", "summary", _LATENCY_HELP)

    @property
    def families(self) -> list[Family]:
        return [*(family for _, family in self._columns), self._latency]

    def add(self, figures: TopicFigures | ChannelFigures, **labels: str) -> None:
        text = labels_of(**labels)
        for column, family in self._columns:
            if not column.is_limit:
                family.add(getattr(figures, column.field), text)
            elif column.field in figures.limits:
                family.add(figures.limits[column.field], text)
        for quantile, value_ns in figures.latency.percentiles or ():
            self._latency.add(value_ns / 1e9, labels_of(**labels, quantile=f"{quantile:.10g}"))


async def collect_topics(topics: Mapping[str, Topic], latencies: Latencies, rows_max: int = ROWS_MAX) -> list[Family]:
    """Return the figures of topics and channels; others get their turn meanwhile."""
    topic_table, channel_table = _Table("topic", _TOPIC_COLUMNS), _Table("channel", _CHANNEL_COLUMNS)
    deliveries = Family(f"{_NAMESPACE}_channel_deliveries_total", "counter", _DELIVERIES_HELP)
    room = rows_max
    left_out_count = channel_count = 0
    async for name in in_turns(sorted(topics)):
        topic = topics.get(name)
        if topic is None:
            continue
        channel_count += len(topic.channel_names)
        if not room:
            left_out_count += 1 + len(topic.channel_names)
            continue
        figures = topic_of(topic, latencies)
        topic_table.add(figures, topic=name)
        channels = figures.channels[: room - 1]
        for channel in channels:
            channel_table.add(channel, topic=name, channel=channel.name)
            for locality, count in channel.deliveries.items():
                if count:
                    deliveries.add(count, labels_of(topic=name, channel=channel.name, locality=locality.name.lower()))
        room -= 1 + len(channels)
        left_out_count += len(figures.channels) - len(channels)
    left_out_help = f"Topics and channels that are not shown, because there are more than {rows_max}"
    return [
        _gauge("topics", "Topics of this nsqd", len(topics)),
        _gauge("channels", "Channels of this nsqd", channel_count),
        _gauge("rows_left_out", left_out_help, left_out_count),
        *topic_table.families,
        *channel_table.families,
        deliveries,
    ]


def describe_daemon(
    version: str,
    durability: str,
    start_ns: int,
    is_healthy: bool,
    connection_count: int,
    damage: DamageRegister,
    nsqlookupds: Mapping[str, bool],
) -> list[Family]:
    """Return the figures of the daemon itself.

    Args:
        damage: what was found in the data directory.
        nsqlookupds: by address, whether it is connected.
    """
    about = Family(f"{_NAMESPACE}_build_info", "gauge", "Always 1; says what runs")
    damaged = Family(f"{_NAMESPACE}_damaged_stretches_total", "counter", "Damage that was found since the start")
    connected = Family(f"{_NAMESPACE}_nsqlookupd_connected", "gauge", "1 while a nsqlookupd is connected")
    for address, is_connected in nsqlookupds.items():
        connected.add(is_connected, labels_of(address=address))
    return [
        about.add(1, labels_of(version=version, durability=durability)),
        _gauge("start_time_seconds", "When nsqd was started, as Unix time", start_ns / 1e9),
        _gauge("healthy", "1 while /ping answers OK", is_healthy),
        _gauge("connections", "TCP connections of clients", connection_count),
        damaged.add(damage.found_count),
        _gauge("damage_reports", "Reports of damage that nobody has acknowledged", damage.count),
        _gauge("damage_lost_messages", "Messages lost by that, as far as it is known", damage.lost),
        connected,
    ]


def describe_memory(broker: Broker) -> list[Family]:
    """Return the memory budget and what clients use of it."""
    used = Family(f"{_NAMESPACE}_memory_used_bytes", "gauge", "Memory that clients make nsqd use, by share")
    for share, used_bytes in broker.memory_used().items():
        used.add(used_bytes, labels_of(share=share))
    closed_help = "Connections closed because they did not read while others waited for memory"
    closed = Family(f"{_NAMESPACE}_memory_closed_total", "counter", closed_help)
    refused_help = "Connections refused because of bodies that were not complete while others waited for memory"
    refused = Family(f"{_NAMESPACE}_memory_refused_total", "counter", refused_help)
    return [
        _gauge("memory_budget_bytes", "Most memory that clients can make nsqd use", broker.budget.limit_bytes),
        used,
        closed.add(broker.budget.closed_count),
        refused.add(broker.budget.refused_count),
    ]


def _gauge(name: str, about: str, value: float) -> Family:
    return Family(f"{_NAMESPACE}_{name}", "gauge", about).add(value)
