"""A coordination store that is emptied, another one, or older than the data, under real nodes: no copy is lost by it.

What a test waits for is what the nodes say or have; nothing is measured.

Source: docs/decisions/0016, 0017.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from functools import partial
from itertools import count
from pathlib import Path

from tests.integration.daemons import Cluster, Daemons, Nsqd, running_cluster, wait_until
from tests.integration.etcd import Etcd
from tests.integration.test_cluster import Publisher, _consumer, _received
from tests.integration.test_docs import BLOCKS
from tests.integration.test_doctor import Report, address_of
from tests.integration.utilities import end, is_finished, started

_topics = (f"stored{number}" for number in count())


def _wait_said(node: Nsqd, words: str) -> None:
    wait_until(lambda: words in node.log, lambda: f"{words!r} in: {node.log}")


def _filled(cluster: Cluster, copies: int) -> tuple[str, Publisher]:
    """Return a topic with so many copies, and who has published to it."""
    topic = next(_topics)
    cluster.create(topic, copies=copies)
    cluster.wait_in_sync(topic, copies)
    publisher = Publisher(cluster, topic)
    publisher.publish(*(b"%d-%d" % (copies, number) for number in range(20)))
    publisher.close()
    return topic, publisher


def _has_all(cluster: Cluster, topic: str, publisher: Publisher) -> None:
    with _consumer(cluster.leader(topic), topic) as connection:
        _received(connection, set(publisher.acknowledged))


def _aside(node: Nsqd) -> list[Path]:
    return [path for path in node.data_path.glob("set-aside/*") if not path.name.startswith("removed-")]


def _restart(cluster: Cluster) -> None:
    """Stop the nodes and the nsqlookupd; start it, and then them."""
    _stop(cluster)
    _start(cluster)


def _stop(cluster: Cluster) -> None:
    for node in cluster.nodes:
        if node.is_running:
            node.stop()
    if cluster.nsqlookupd.is_running:
        cluster.nsqlookupd.stop()


def _start(cluster: Cluster) -> None:
    cluster.nsqlookupd.discard()
    cluster.nsqlookupd.start()
    cluster.mend()


def _store_path(cluster: Cluster) -> Path:
    return next(Path(flag.partition("=")[2]) for flag in cluster.nsqlookupd.flags if flag.startswith("--store-path="))


def test_a_store_that_was_empty_for_a_while_changes_nothing(tmp_path: Path, daemons: Daemons) -> None:
    etcd = Etcd(tmp_path, "one").launch().wait()
    cluster = None
    try:
        cluster = Cluster(daemons, store=etcd.url)
        topics = [_filled(cluster, copies) for copies in (1, 3)]
        etcd.kill()
        (tmp_path / "one").rename(tmp_path / "kept")
        etcd.restart().wait()
        for node in cluster.nodes:
            _wait_said(node, "the store is another one, or was emptied")
            assert "belongs to" in node.get("/stats?format=json&cluster=true").get("cluster", {}).get("problem", ""), (
                node.get("/stats?format=json&cluster=true")
            )
        etcd.kill()
        shutil.rmtree(tmp_path / "one")
        (tmp_path / "kept").rename(tmp_path / "one")
        etcd.restart().wait()
        for node in cluster.nodes:
            _wait_said(node, "the store is that of cluster")
        cluster.nsqlookupd.restart()  # which takes no part any more
        for topic, publisher in topics:
            publisher.publish(b"after")
            publisher.close()
            _has_all(cluster, topic, publisher)
        assert not [path for node in cluster.nodes for path in _aside(node)]
    finally:
        if cluster is not None:
            cluster.close()
        etcd.discard()


def test_a_node_is_not_started_with_the_store_of_another_cluster(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    with (
        running_cluster(tmp_path / "a", copies_on=1) as cluster,
        running_cluster(tmp_path / "b", copies_on=1) as another,
    ):
        topic, publisher = _filled(cluster, 1)
        ids = [each.status()["cluster_id"] for each in (cluster, another)]
        (node,) = cluster.nodes
        node.stop()
        flags = node.flags
        host, port = another.nsqlookupd.http
        node.flags = [f"--cluster-store={host}:{port}" if "--cluster-store=" in flag else flag for flag in flags]
        node.launch()
        assert node.wait() == 1
        assert "FATAL" in node.log and all(each in node.log for each in ids) and "remove cluster.id" in node.log
        node.flags = flags
        cluster.mend()
        _has_all(cluster, topic, publisher)
        assert not _aside(node)
        assert {row["tcp_port"] for row in another.status()["nodes"]} == {another.nodes[0].tcp[1]}


def test_nodes_begin_anew_with_an_empty_store_when_they_are_told_to(tmp_path: Path, daemons: Daemons) -> None:
    """What they had is set aside, and can be read."""
    with running_cluster(tmp_path, copies_on=2) as cluster:
        topic, publisher = _filled(cluster, 2)
        _stop(cluster)
        shutil.rmtree(_store_path(cluster))
        _store_path(cluster).mkdir()
        for node in cluster.nodes:
            for name in ("cluster.id", "cluster.mark"):
                (node.data_path / name).unlink()
        _start(cluster)
        for node in cluster.nodes:
            wait_until(lambda node=node: _aside(node), lambda node=node: node.log)  # type: ignore[misc]
        cluster.create(topic, copies=2)
        cluster.wait_in_sync(topic, 2)
        node = cluster.nodes[0]
        assert node.get("/stats?format=json")["cluster"]["set_aside_count"] == 1
        report = Report(f"--nsqd-tcp-address={address_of(node.tcp)}", f"--nsqd-http-address={address_of(node.http)}")
        assert any("set-aside/" in text for text in report.of("nsqd", "note")), report.findings
        (aside,) = _aside(node)
        shutil.copytree(aside, tmp_path / "aside" / "topics" / f"t-{topic}" / "p-0000")
        alone = daemons.nsqd("--accept-lost-channels", data_path=tmp_path / "aside")
        expected = "ERROR: channels.db: it is missing, and so is channels.list; it is made anew without channels"
        assert expected in alone.log and not [*(tmp_path / "aside").glob("*.bad")], "nothing was there that is damaged"
        with _consumer(alone, topic) as connection:
            _received(connection, set(publisher.acknowledged))


def test_what_was_set_aside_is_read_back_with_the_commands_of_the_page(tmp_path: Path, daemons: Daemons) -> None:
    """Of a topic with partitions: one of them alone, as the page has it, and all."""
    topic, bodies = next(_topics), {number: [b"%d-%d" % (number, each) for each in range(20)] for number in range(3)}
    with running_cluster(tmp_path, copies_on=1) as cluster:
        (node,) = cluster.nodes
        cluster.create(topic, 3, copies=1)
        for number, each in bodies.items():
            path = f"/mpub?topic={topic}&partition={number}"
            wait_until(lambda t=path, b=each: node.post(t, b"\n".join(b)).status == 200, "published")  # type: ignore[misc]
        _stop(cluster)
        shutil.rmtree(_store_path(cluster))
        _store_path(cluster).mkdir()
        for name in ("cluster.id", "cluster.mark"):
            (node.data_path / name).unlink()
        _start(cluster)
        wait_until(lambda: len(_aside(node)) == len(bodies), lambda: node.log)
    (block,) = (each.text for each in BLOCKS if each.page == "docs/cluster.md" and "set-aside" in each.text)
    for numbers in ([2], [0, 1, 2]):
        aside = tmp_path / f"aside-{len(numbers)}"
        text = block.replace("/var/lib/aside", str(aside)).replace("/var/lib/nsqd", str(node.data_path))
        make, copy, serve, forward = (shlex.split(line.replace("orders", topic)) for line in text.splitlines())
        subprocess.run(make, check=True)
        for number in numbers:
            subprocess.run([word.replace("p-0002", f"p-{number:04d}") for word in copy], check=True)
        alone = daemons.nsqd(*(word for word in serve[1:] if "-address=" not in word and "data-path" not in word),
                             data_path=aside)  # fmt: skip
        target = daemons.nsqd()
        at_places = {"127.0.0.1:5150": address_of(alone.tcp), "10.0.0.11:4150": address_of(target.tcp)}
        words = [f"{flag}={at_places.get(value, value)}" for flag, _, value in (w.partition("=") for w in forward[1:])]
        expected = sorted(body for number in numbers for body in bodies[number])
        log = tmp_path / f"forward-{len(numbers)}.log"
        with started("nsq_to_nsq", *words, log=log) as process:
            wait_until(partial(is_finished, alone, topic, "back", len(expected)), log.read_text)
            end(process)
        assert "E_FIN_FAILED" not in log.read_text() and "E_INVALID" not in log.read_text()
        with target.connect() as connection:
            connection.subscribe(topic, "look", len(expected))
            assert sorted(connection.message().body for _ in expected) == expected
            connection.nothing_comes()


def _move(cluster: Cluster, topic: str) -> Nsqd:
    """Have the only copy of a topic moved to the other node; return that."""
    source = cluster.leader(topic)
    (target,) = (node for node in cluster.nodes if node is not source)
    order = f"/topic/partition/move?topic={topic}&partition=0&move_source={_at(source)}&move_target={_at(target)}"
    wait_until(lambda: cluster.nsqlookupd.request("POST", order).status == 200, "it is moved")
    wait_until(lambda: cluster.found_leader(topic) is target, lambda: f"it leads: {cluster.status(topic)}")
    wait_until(lambda: not source.segment_paths(topic), lambda: f"the other one has it no more: {source.log}")
    return target


def _at(node: Nsqd) -> str:
    return f"127.0.0.1:{node.tcp[1]}"


def test_an_older_store_takes_no_copy_that_was_moved_since(tmp_path: Path) -> None:
    with running_cluster(tmp_path, copies_on=2) as cluster:
        topic, publisher = _filled(cluster, 1)
        _stop(cluster)
        path = _store_path(cluster)
        shutil.copytree(path, tmp_path / "backup")
        _start(cluster)
        _move(cluster, topic)
        publisher.publish(b"after")
        publisher.close()
        _stop(cluster)
        shutil.rmtree(path)
        (tmp_path / "backup").rename(path)
        _start(cluster)
        _has_all(cluster, topic, publisher)
        assert any("the coordination store is older" in node.log for node in cluster.nodes)


def test_nobody_leads_an_empty_copy_in_the_place_of_one_that_is_lost(tmp_path: Path) -> None:
    """The node that the copy was moved to is not there, and an older store calls the other one in sync."""
    with running_cluster(tmp_path, copies_on=2) as cluster:
        topic, _ = _filled(cluster, 1)
        _stop(cluster)
        path = _store_path(cluster)
        shutil.copytree(path, tmp_path / "backup")
        _start(cluster)
        source = cluster.leader(topic)
        target = _move(cluster, topic)
        _stop(cluster)
        shutil.rmtree(path)
        (tmp_path / "backup").rename(path)
        cluster.nsqlookupd.discard()
        cluster.nsqlookupd.start()
        source.discard()
        source.start()
        _wait_said(source, f"{topic}/0: the copy that was in sync is not here any more")
        row = cluster.partition(topic)
        assert not row["leader"] and not source.segment_paths(topic), row
        assert target.segment_paths(topic)


def test_settings_and_the_number_of_partitions_go_by_a_store_that_was_put_back(tmp_path: Path) -> None:
    """Not by what nodes were told before, however often a topic was changed since the backup."""
    with running_cluster(tmp_path, copies_on=2) as cluster:
        topic = next(_topics)
        cluster.create(topic, 2, copies=2)
        _stop(cluster)
        path = _store_path(cluster)
        shutil.copytree(path, tmp_path / "backup")
        _start(cluster)
        for days in (10, 11, 12):
            _retain(cluster, topic, days)
        wait_until(lambda: cluster.expand(topic, 3), "it has more partitions")
        _wait_known(cluster, topic, 12, 3)
        _stop(cluster)
        shutil.rmtree(path)
        (tmp_path / "backup").rename(path)
        _start(cluster)
        _wait_known(cluster, topic, 0, 2)
        _retain(cluster, topic, 2)
        _wait_known(cluster, topic, 2, 2)
        cluster.nsqlookupd.request("POST", f"/topic/delete?topic={topic}&partition=**")
        for node in cluster.nodes:
            _wait_gone(node.data_path / "topics" / f"t-{topic}")


def _retain(cluster: Cluster, topic: str, days: int) -> None:
    order = f"/topic/meta/update?topic={topic}&retention={days}"
    wait_until(lambda: cluster.nsqlookupd.request("POST", order).status == 200, "its settings are changed")


def _wait_known(cluster: Cluster, topic: str, days: int, partition_num: int) -> None:
    """Wait until every partition is led, and every leader has these settings."""

    def is_known() -> bool:
        leaders = [cluster.found_leader(topic, number) for number in range(partition_num)]
        rows = [node.stats(topic) for node in leaders if node is not None]
        known = {(row["retention_days"], row["partition_num"]) for row in rows}
        return None not in leaders and known == {(days, partition_num)}

    wait_until(is_known, lambda: f"{days} days, {partition_num} partitions: {[node.log for node in cluster.nodes]}")


def _wait_gone(directory: Path) -> None:
    wait_until(lambda: not directory.exists(), lambda: f"{directory} is gone: {list(directory.rglob('*'))}")
