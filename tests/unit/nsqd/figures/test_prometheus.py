"""Prometheus: how lines look, and that the number of series is bounded."""

import random

from prometheus_client.parser import text_string_to_metric_families

from flintmq.broker.channel import Channel, ChannelState
from flintmq.broker.partition import Partition
from flintmq.broker.spilled import SpilledStore
from flintmq.broker.topic import Topic
from flintmq.net.metrics import Family, exposition, labels_of
from flintmq.nsqd.figures.latencies import Latencies
from flintmq.nsqd.figures.prometheus import collect_topics
from flintmq.storage.memory_log import MemoryLog


def topic_with(name, *channels):
    log = MemoryLog(0, 10)
    partition = Partition(name, 0, log)
    topic = Topic(name, {0: partition})
    for channel in channels:
        partition.channels[channel] = Channel(channel, 0, log, ChannelState(1), SpilledStore(), random.Random(1))
        topic.channel_names[channel] = False
    return topic


async def samples_of(topics, rows_max):
    families = await collect_topics({topic.name: topic for topic in topics}, Latencies(), rows_max)
    text = exposition(families).body.decode()
    return {
        (sample.name.removeprefix("flintmq_nsqd_"), *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_no_more_rows_than_allowed_and_the_others_are_counted():
    topics = [topic_with("b", "x", "y"), topic_with("a", "x", "y"), topic_with("c")]
    everything = await samples_of(topics, 7)
    assert everything[("rows_left_out",)] == 0
    assert ("channel_depth", "b", "y") in everything and ("topic_depth", "c") in everything
    some = await samples_of(topics, 5)
    assert (some[("topics",)], some[("channels",)], some[("rows_left_out",)]) == (3, 4, 2)
    shown = sorted(key[1:] for key in some if key[0] in ("topic_depth", "channel_depth"))
    assert shown == [("a",), ("a", "x"), ("a", "y"), ("b",), ("b", "x")]
    one = await samples_of(topics, 1)
    assert one[("rows_left_out",)] == 6


async def test_many_topics_are_all_shown():
    topics = [topic_with(f"t{number}", "c") for number in range(100)]
    samples = await samples_of(topics, 5000)
    assert sum(key[0] == "channel_clients" for key in samples) == 100


def test_labels_are_escaped():
    family = Family("x_total", "counter", "About x").add(3, labels_of(path='a"b\\c\nd')).add(True)
    text = exposition([family, Family("empty", "gauge", "Nothing")]).body.decode()
    assert text == ('# HELP x_total About x\n# TYPE x_total counter\nx_total{path="a\\"b\\\\c\\nd"} 3\nx_total 1\n')
    (found,) = text_string_to_metric_families(text)
    assert found.samples[0].labels == {"path": 'a"b\\c\nd'}
