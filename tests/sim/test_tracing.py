"""Worlds in which every message is traced: nothing is lost, nothing differs, and the trace keeps no memory."""

import logging

import pytest
from tests.sim import nsqd_world
from tests.sim.loop import seeds

from flintmq.nsqd.server import Nsqd
from flintmq.nsqd.tracing import ALL, OFF, Tracing

COUNT = 60


@pytest.fixture(autouse=True)
def quiet():
    """What nsqd logs about planted faults is not what is looked for."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_nothing_acknowledged_is_lost_and_what_is_known_of_messages_is_forgotten(monkeypatch):
    traces = []

    def trace_all(self, topic, channel):
        return OFF if topic.name == self.topic_name else ALL

    def close(self):
        traces.append(self.node.tracing)
        return honest(self)

    honest = Nsqd.close
    monkeypatch.setattr(Nsqd, "close", close)
    monkeypatch.setattr(Tracing, "_mode", trace_all)
    for seed in seeds(COUNT):
        assert nsqd_world.run(seed) == []
    assert sum(tracing.recorded_count for tracing in traces) > 1000
    for tracing in traces:
        assert tracing.known_count == sum(len(trace._known) for trace in tracing._channels.values())
