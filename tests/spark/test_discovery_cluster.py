"""All topics at once, of a real cluster: the lists name the nsqds that /lookup names for each topic."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.daemons import Cluster, running_cluster, wait_until
from tests.integration.flavours import address_of

from flintmq.spark.discovery import all_topics, listed_places, partition_counts, places_of


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory: Path = tmp_path_factory.mktemp("cluster")
    with running_cluster(directory, lookupd_flags=["--default-partitions=2"]) as cluster:
        yield cluster


def test_the_lists_say_what_is_said_of_each_topic(cluster: Cluster, topic: str):
    lookupd = cluster.nsqlookupd
    lookupd.post(f"/topic/create?topic={topic}-parts&partition_num=5&replicator=2")
    lookupd.post(f"/topic/create?topic={topic}-plain")
    lookupd.post(f"/topic/create?topic={topic}-gone")
    cluster.nodes[0].post(f"/topic/create?topic={topic}%23ephemeral")
    leader = cluster.leader_of_plain(f"{topic}-plain", 0)
    lookupd.post(f"/topic/tombstone?topic={topic}-plain&node={address_of(leader.http)}")
    lookupd.post(f"/topic/delete?topic={topic}-gone")
    asked = (address_of(lookupd.http),)
    topics = [f"{topic}-{which}" for which in ("parts", "plain", "gone")] + [f"{topic}#ephemeral"]

    def are_there() -> bool:
        places = places_of(asked, topics, 5)
        return all(places[each].nsqds for each in topics if not each.endswith("-gone"))

    wait_until(are_there, "the leaders are ready")
    listed, one_by_one = listed_places(asked, topics, 5), places_of(asked, topics, 5)
    assert {each: listed[each].nsqds for each in topics} == {each: one_by_one[each].nsqds for each in topics}
    assert address_of(leader.tcp) in listed[f"{topic}-plain"].nsqds, "a tombstone is for who publishes"
    assert f"{topic}-gone" not in all_topics(asked, 5)
    known = {each: found.partition_count for each, found in listed.items() if found.partition_count is not None}
    assert known == {f"{topic}-parts": 5, f"{topic}-plain": 0, f"{topic}#ephemeral": 0}
    assert known == partition_counts(asked, list(known), 5)
