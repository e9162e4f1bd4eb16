"""An upgrade of a whole cluster under load: each nsqd and nsqlookupd is ended and started, one after the other.

No caller of this project's clients gets an error, everybody else only answers that say that nothing is stored; all that
was acknowledged is delivered. For how long a publish waited is printed, never asserted.

Source: docs/cluster.md (Upgrading), docs/decisions/0017.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.integration import flavours
from tests.integration.daemons import Cluster, Daemon, Daemons, mpub, pub, wait_until
from tests.integration.etcd import Etcd
from tests.integration.rolling import Came, CurlPublisher, OurPublisher, PlainConsumer, PlainPublisher, Publisher

PARTITIONED, PLAIN = "partitioned", "plain"
ROUND_COUNT = 10
"""Messages of each publisher, before and after each end and start."""


@pytest.fixture(params=["own", "etcd"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path, daemons: Daemons) -> Iterator[Cluster]:
    """Three nsqds; their store is a nsqlookupd's own, or an etcd."""
    with ExitStack() as ends:
        store = ""
        if request.param == "etcd":
            etcd = Etcd(tmp_path, "one").launch().wait()
            ends.callback(etcd.discard)
            store = etcd.url
        cluster = Cluster(daemons, store=store)
        ends.callback(cluster.close)
        yield cluster


def test_every_daemon_is_restarted_and_nobody_sees_an_error(cluster: Cluster) -> None:
    cluster.create(PARTITIONED, 2)
    cluster.nsqlookupd.post(f"/topic/create?topic={PLAIN}")
    lookup = "http://{}:{}".format(*cluster.nsqlookupd.http)
    came: dict[str, Came] = {}
    with ExitStack() as ends:
        publishers: list[Publisher] = []
        for name in flavours.FLAVOURS:
            flavour = ends.enter_context(flavours.opened(name))
            for topic in (PARTITIONED, PLAIN):
                channel, handler = f"{topic}-{name}", Came()
                came[channel] = handler
                for node in cluster.nodes:  # for what it leads of the topic: it is there before anything is published
                    node.request("POST", f"/channel/create?topic={topic}&channel={channel}")
                ends.enter_context(flavour.consumer(topic, channel, handler, nsqlookupd_http_addresses=lookup))
                producer = ends.enter_context(flavour.producer(nsqlookupd_http_addresses=lookup))
                publishers.append(OurPublisher(channel, producer, topic))
        plain = PlainConsumer(cluster.nodes, PLAIN, "others")
        ends.callback(plain.end)
        came[f"{PLAIN}-others"] = plain.came
        publishers.append(PlainPublisher("plain-pub", cluster.nodes, lambda body: pub(PLAIN, body)))
        publishers.append(PlainPublisher("plain-mpub", cluster.nodes[::-1], lambda body: mpub(PLAIN, [body])))
        publishers.append(CurlPublisher("plain-http", cluster.nodes, PLAIN))

        def go_on() -> None:
            for each in publishers:
                each.more(ROUND_COUNT)

        for each in publishers:
            each.begin()
        go_on()
        for daemon in (*cluster.nodes, cluster.nsqlookupd):
            _restart(cluster, daemon, go_on)
        for each in publishers:
            each.end()
        for channel, seen in came.items():
            _wait_for_all(channel, seen, [each for each in publishers if each.name.startswith(channel.split("-")[0])])
    print()
    for each in publishers:
        print(each)


def _wait_for_all(channel: str, came: Came, publishers: Sequence[Publisher]) -> None:
    wait_until(lambda: not came.lacks(publishers), lambda: f"{channel} gets everything: {came.lacks(publishers)[:9]}")


def _restart(cluster: Cluster, daemon: Daemon, go_on: Callable[[], None]) -> None:
    """End a daemon, see that everybody goes on, start it, and wait until everything is whole."""
    daemon.stop()
    go_on()
    daemon.start()
    for row in cluster.status()["topics"]:
        for number in range(row["partition_num"]):
            cluster.wait_in_sync(row["topic"], 3, number)
    go_on()
