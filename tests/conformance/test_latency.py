"""End-to-end processing latency: from publishing to FIN, in percentiles (NSQ's latencies)."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.conformance.conftest import quick_flags
from tests.integration.daemons import Daemons, Nsqd, wait_until

QUANTILES = [1.0, 0.99, 0.5]
SLOW_S = 0.15


@pytest.fixture(scope="module")
def timed(shared_daemons: Daemons) -> Nsqd:
    """An nsqd that keeps three percentiles."""
    flags = ("--e2e-processing-latency-percentile=1.0", "--e2e-processing-latency-percentile=0.99,0.5")
    return shared_daemons.nsqd(*quick_flags(), *flags)


def latency_of(row: dict[str, Any]) -> dict[str, Any]:
    latency: dict[str, Any] = row["e2e_processing_latency"]
    return latency


def values_of(row: dict[str, Any]) -> list[float]:
    return [each["value"] for each in latency_of(row)["percentiles"]]


def finish_one(nsqd: Nsqd, topic: str, channel: str = "c", after_s: float = 0.0) -> None:
    """Publish a message, hold it for a while and finish it."""
    with nsqd.connect() as consumer:
        consumer.subscribe(topic, channel, 1)
        nsqd.publish(topic, b"x")
        message = consumer.message()
        time.sleep(after_s)
        consumer.finish(message)
        consumer.settle()


# -- what is shown -----------------------------------------------------------------------------------------------------


def test_without_the_flag_there_is_no_latency(nsqd: Nsqd, topic: str):
    finish_one(nsqd, topic)
    for row in (nsqd.stats(topic), nsqd.stats(topic, "c")):
        assert latency_of(row) == {"count": 0, "percentiles": None}


def test_nothing_finished_is_count_0_and_value_0(timed: Nsqd, topic: str):
    timed.post(f"/topic/create?topic={topic}")
    timed.post(f"/channel/create?topic={topic}&channel=c")
    zeros = [{"quantile": quantile, "value": 0} for quantile in QUANTILES]
    for row in (timed.stats(topic), timed.stats(topic, "c")):
        assert latency_of(row) == {"count": 0, "percentiles": zeros}


def test_a_topic_without_channels_has_no_latency(timed: Nsqd, topic: str):
    timed.publish(topic, b"x")
    assert latency_of(timed.stats(topic)) == {"count": 0, "percentiles": None}
    (line,) = [each for each in timed.request("GET", "/stats").text.splitlines() if f"[{topic} " in each]
    assert line.endswith("e2e%: ")


def test_fields_stand_in_order(timed: Nsqd, topic: str):
    finish_one(timed, topic)
    latency = latency_of(timed.stats(topic, "c"))
    assert list(latency) == ["count", "percentiles"]
    assert [list(each) for each in latency["percentiles"]] == [["quantile", "value"]] * 3


def test_the_highest_quantile_comes_first(timed: Nsqd, topic: str):
    timed.post(f"/topic/create?topic={topic}")
    timed.post(f"/channel/create?topic={topic}&channel=c")
    for row in (timed.stats(topic), timed.stats(topic, "c")):
        assert [each["quantile"] for each in latency_of(row)["percentiles"]] == QUANTILES


# -- what is measured --------------------------------------------------------------------------------------------------


def test_every_fin_is_counted(timed: Nsqd, topic: str):
    with timed.connect() as consumer:
        consumer.subscribe(topic, "c", 10)
        timed.publish(topic, *[b"x"] * 10)
        consumer.finish(*consumer.messages(10))
        consumer.settle()
    assert latency_of(timed.stats(topic, "c"))["count"] == 10


def test_values_are_in_nanoseconds(timed: Nsqd, topic: str):
    finish_one(timed, topic, after_s=SLOW_S)
    for value in values_of(timed.stats(topic, "c")):
        assert SLOW_S * 1e9 <= value < 10e9


def test_time_in_the_queue_counts(timed: Nsqd, topic: str):
    timed.publish(topic, b"x")
    time.sleep(SLOW_S)
    with timed.connect() as consumer:
        consumer.finish(consumer.subscribe(topic, "c", 1).message())
        consumer.settle()
    assert values_of(timed.stats(topic, "c"))[0] >= SLOW_S * 1e9


def test_time_before_a_requeue_counts(timed: Nsqd, topic: str):
    with timed.connect() as consumer:
        consumer.subscribe(topic, "c", 1)
        timed.publish(topic, b"x")
        consumer.send(b"REQ %s 150\n" % consumer.message().id)
        consumer.finish(consumer.message())
        consumer.settle()
    row = timed.stats(topic, "c")
    assert latency_of(row)["count"] == 1
    assert values_of(row)[0] >= 0.15e9


def test_the_delay_of_a_deferred_message_counts(timed: Nsqd, topic: str):
    with timed.connect() as consumer:
        consumer.subscribe(topic, "c", 1)
        timed.post(f"/pub?topic={topic}&defer=150", b"x")
        message = consumer.message()
        waited_ns = time.time_ns() - message.timestamp_ns  # the delay began before the message had its time
        consumer.finish(message)
        consumer.settle()
    assert values_of(timed.stats(topic, "c"))[0] >= 0.99 * waited_ns


@pytest.mark.parametrize("command", ["REQ", "TOUCH"])
def test_nothing_but_fin_is_counted(timed: Nsqd, topic: str, command: str):
    with timed.connect() as consumer:
        consumer.subscribe(topic, "c", 1)
        timed.publish(topic, b"x")
        timeout = b" 60000" if command == "REQ" else b""
        consumer.send(command.encode() + b" " + consumer.message().id + timeout + b"\n")
        consumer.settle()
        assert latency_of(timed.stats(topic, "c"))["count"] == 0


def test_a_fin_that_fails_is_not_counted(timed: Nsqd, topic: str):
    with timed.connect() as consumer:
        consumer.subscribe(topic, "c", 1)
        timed.publish(topic, b"x")
        message = consumer.message()
        consumer.finish(message, message)
        assert consumer.error().startswith("E_FIN_FAILED ")
    assert latency_of(timed.stats(topic, "c"))["count"] == 1


def test_percentiles_tell_slow_ones_from_quick_ones(timed: Nsqd, topic: str):
    with timed.connect() as consumer:
        consumer.subscribe(topic, "c", 20)
        timed.publish(topic, *[b"x"] * 20)
        messages = consumer.messages(20)
        consumer.finish(*messages[:18])
        consumer.settle()
        time.sleep(2 * SLOW_S)
        consumer.finish(*messages[18:])
        consumer.settle()
    slowest, usual, half = values_of(timed.stats(topic, "c"))
    assert slowest >= usual >= half + 2 * SLOW_S * 1e9


# -- topics and channels -----------------------------------------------------------------------------------------------


def test_a_channel_has_its_own(timed: Nsqd, topic: str):
    timed.post(f"/topic/create?topic={topic}")
    timed.post(f"/channel/create?topic={topic}&channel=other")
    finish_one(timed, topic)
    assert latency_of(timed.stats(topic, "c"))["count"] == 1
    assert latency_of(timed.stats(topic, "other"))["count"] == 0


def test_a_topic_has_those_of_its_channels(timed: Nsqd, topic: str):
    with timed.connect() as quick, timed.connect() as slow:
        quick.subscribe(topic, "quick", 1)
        slow.subscribe(topic, "slow", 1)
        timed.publish(topic, b"x")
        quick.finish(quick.message())
        quick.settle()
        message = slow.message()
        time.sleep(SLOW_S)
        slow.finish(message)
        slow.settle()
    row = timed.stats(topic)
    slowest, quickest = values_of(timed.stats(topic, "slow"))[0], values_of(timed.stats(topic, "quick"))[0]
    assert latency_of(row)["count"] == 2
    assert (values_of(row)[0], values_of(row)[2]) == (slowest, quickest)
    assert slowest >= quickest + SLOW_S * 1e9


def test_a_filter_changes_nothing(timed: Nsqd, topic: str):
    finish_one(timed, topic)
    (row,) = timed.get(f"/stats?format=json&topic={topic}&channel=c")["topics"]
    assert latency_of(row) == latency_of(timed.stats(topic))


# -- how long it is kept -----------------------------------------------------------------------------------------------


def test_it_is_forgotten_after_the_window_and_at_a_restart(shared_daemons: Daemons):
    nsqd = shared_daemons.nsqd(
        *quick_flags(),
        "--e2e-processing-latency-percentile=1",
        "--e2e-processing-latency-window-time=1s",
    )
    finish_one(nsqd, "t")
    assert latency_of(nsqd.stats("t", "c"))["count"] == 1
    wait_until(lambda: latency_of(nsqd.stats("t", "c"))["count"] == 0, "the window to pass")
    finish_one(nsqd, "t")
    nsqd.restart()
    assert latency_of(nsqd.stats("t", "c")) == {"count": 0, "percentiles": [{"quantile": 1, "value": 0}]}
