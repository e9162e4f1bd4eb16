"""What a topic was created with is changed, on all nodes and on those that were away; who may create topics at all.

Source: Youzan's nsqlookupd (``/topic/create``, ``/topic/meta/update``, ``/topic/tombstone``).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.daemon_helpers import FakeNsqlookupd, unused_port, wait_for_lines
from tests.integration.daemons import PATIENCE_S, Daemons, Nsqd, Nsqlookupd, pub, wait_until

BARE = {"Accept": "application/vnd.nsq; version=1.0"}
YOUZANS = os.environ.get("YOUZAN_NSQLOOKUPD", "")


def flag_of(*nsqlookupds: Nsqlookupd) -> list[str]:
    return [f"--lookupd-tcp-address=127.0.0.1:{each.tcp[1]}" for each in nsqlookupds]


def started(daemons: Daemons, nsqlookupd: Nsqlookupd, count: int) -> list[Nsqd]:
    nsqds = [daemons.nsqd("--durability=os", *flag_of(nsqlookupd)) for _ in range(count)]
    wait_until(lambda: len(nsqlookupd.get("/nodes")["producers"]) == count, "all nodes")
    return nsqds


def state(nsqd: Nsqd, topic: str) -> tuple[int, int, int, bool]:
    """Version, retention in days, syncdisk, and whether subscribing creates no channel."""
    row = nsqd.stats(topic)
    closed = row.get("disable_channel_auto_create", False)
    return row.get("meta_version", 0), row.get("retention_days", 0), row.get("syncdisk", 0), closed


def refusal(daemon: Nsqd | Nsqlookupd, target: str) -> tuple[int, str]:
    return daemon.request("POST", target).error


# -- changing ----------------------------------------------------------------------------------------------------------


def test_a_change_reaches_every_node_and_survives(daemons: Daemons):
    nsqlookupd = daemons.nsqlookupd()
    nsqds = started(daemons, nsqlookupd, 2)
    nsqlookupd.request("PUT", "/topic/create?topic=t&partition_num=4&replicator=1&retention=2")
    assert [state(nsqd, "t") for nsqd in nsqds] == [(0, 2, 0, False)] * 2
    nsqlookupd.post("/topic/meta/update?topic=t&retention=7&syncdisk=100")
    assert [state(nsqd, "t") for nsqd in nsqds] == [(1, 7, 100, False)] * 2
    nsqlookupd.post("/topic/meta/update?topic=t&disable_channel_auto_create=true")
    assert [state(nsqd, "t") for nsqd in nsqds] == [(2, 7, 100, True)] * 2
    nsqlookupd.post("/topic/meta/update?topic=t&retention=7")  # what is so already is no change
    assert nsqlookupd.request("GET", "/lookup?topic=t&metainfo=true", headers=BARE).json["meta"][
        "disable_channel_auto_create"
    ]
    with nsqds[0].connect() as connection:
        assert connection.error(b"SUB t c\n").startswith("E_SUB_CHANNEL_NOT_REGISTERED ")
    for nsqd in nsqds:
        nsqd.kill()
        nsqd.start()
    assert [state(nsqd, "t") for nsqd in nsqds] == [(2, 7, 100, True)] * 2


def test_a_node_that_was_away_takes_the_higher_version(daemons: Daemons):
    nsqlookupd = daemons.nsqlookupd()
    here, away = started(daemons, nsqlookupd, 2)
    nsqlookupd.post("/topic/create?topic=t&partition_num=2")
    away.stop()
    wait_until(lambda: len(nsqlookupd.get("/nodes")["producers"]) == 1, "one node is gone")
    nsqlookupd.post("/topic/meta/update?topic=t&retention=9")
    assert state(here, "t") == (1, 9, 0, False)
    away.start()
    wait_until(lambda: state(away, "t") == (1, 9, 0, False), "the one that was away knows", PATIENCE_S)
    nsqlookupd.post("/topic/meta/update?topic=t&retention=9")  # answered when all have it on disk
    away.kill()
    away.start()
    assert state(away, "t") == (1, 9, 0, False)


def test_a_change_at_one_nsqd_reaches_the_others(daemons: Daemons):
    """Through nsqlookupd, also one that was started anew and has forgotten everything."""
    nsqlookupd = daemons.nsqlookupd()
    nsqds = started(daemons, nsqlookupd, 2)
    nsqlookupd.post("/topic/create?topic=t&partition_num=2")
    nsqlookupd.stop()
    nsqds[0].post("/topic/meta/update?topic=t&syncdisk=5")
    assert [state(nsqd, "t")[0] for nsqd in nsqds] == [1, 0]
    nsqlookupd.start()
    wait_until(lambda: state(nsqds[1], "t") == (1, 0, 5, False), "the other one knows", PATIENCE_S)


def test_a_plain_topic_can_be_changed(daemons: Daemons):
    nsqd = daemons.nsqd("--durability=os")
    nsqd.publish("t", b"a")
    nsqd.post("/topic/meta/update?topic=t&retention=3")
    assert state(nsqd, "t") == (1, 3, 0, False)
    nsqd.kill()
    nsqd.start()
    assert state(nsqd, "t") == (1, 3, 0, False)
    with nsqd.connect() as connection:
        connection.subscribe("t", "c", 1)
        assert connection.message().body == b"a"


def test_what_is_created_again_is_as_it_was_changed(daemons: Daemons):
    """A partition that lacks is made with the present state; the first one is no longer the topic's."""
    nsqlookupd = daemons.nsqlookupd()
    started(daemons, nsqlookupd, 1)
    nsqlookupd.post("/topic/create?topic=t&partition_num=2&retention=1")
    nsqlookupd.post("/topic/meta/update?topic=t&retention=5")
    nsqlookupd.post("/topic/create?topic=t&partition_num=2&retention=5")
    status, message = refusal(nsqlookupd, "/topic/create?topic=t&partition_num=2&retention=1")
    assert status == 400 and "retention=5" in message


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("topic=none&retention=1", (400, "topic is not created")),
        ("retention=1", (400, "MISSING_ARG_TOPIC")),
        ("topic=no!&retention=1", (400, "INVALID_ARG_TOPIC")),
        ("topic=t", (400, "MISSING_ARG_TOPIC_META: name at least one of retention, syncdisk, upgradeext, "
                          "disable_channel_auto_create, replicator")),
        ("topic=t&retention=x", (400, "INVALID_ARG_TOPIC_RETENTION_DAYS: retention=x, it must be 0 to 36500")),
        ("topic=t&syncdisk=-1", (400, "INVALID_ARG_TOPIC_SYNC_DISK: syncdisk=-1, it must be 0 to 1000000")),
        ("topic=t&upgradeext=1", (400, "INVALID_ARG_TOPIC_UPGRADEEXT: upgradeext=1, it must be true or false")),
        ("topic=t&replicator=2", (400, "INVALID_ARG_TOPIC_REPLICATOR: replicator=2, and without a cluster there is one "
                                       "copy of a partition")),
    ],
)  # fmt: skip
def test_changes_that_cannot_be(shared_nsqlookupd: Nsqlookupd, shared_nsqd: Nsqd, query: str, expected: Any):
    shared_nsqlookupd.post("/topic/create?topic=t&partition_num=1")
    assert refusal(shared_nsqlookupd, f"/topic/meta/update?{query}") == expected
    assert state(shared_nsqd, "t")[0] == 0


def test_an_old_version_is_refused(daemons: Daemons):
    nsqd = daemons.nsqd("--durability=os")
    nsqd.post("/topic/create?topic=t&partition_num=1")
    nsqd.post("/topic/meta/update?topic=t&retention=3&version=5")
    nsqd.post("/topic/meta/update?topic=t&retention=3&version=5")
    status, message = refusal(nsqd, "/topic/meta/update?topic=t&retention=4&version=4")
    assert (status, message) == (409, "OLD_VERSION: topic t is at version 5, this is 4")
    assert state(nsqd, "t") == (5, 3, 0, False)
    assert refusal(nsqd, "/topic/meta/update?topic=none&retention=4") == (404, "TOPIC_NOT_FOUND")


def test_a_tombstone_is_lifted(daemons: Daemons):
    nsqlookupd = daemons.nsqlookupd("--tombstone-lifetime=1h")
    (nsqd,) = started(daemons, nsqlookupd, 1)
    nsqd.post("/topic/create?topic=t")
    wait_until(lambda: nsqlookupd.producers("t"), "the topic")
    row = nsqlookupd.get("/nodes")["producers"][0]
    node = f"{row['broadcast_address']}:{row['http_port']}"
    nsqlookupd.post(f"/topic/tombstone?topic=t&node={node}")
    assert nsqlookupd.producers("t") == []
    status, message = refusal(nsqlookupd, f"/topic/tombstone?topic=t&node={node}&restore=yes")
    assert (status, message) == (400, "INVALID_ARG_RESTORE: restore=yes, it must be true or false")
    assert nsqlookupd.producers("t") == []
    nsqlookupd.post(f"/topic/tombstone?topic=t&node={node}&restore=true")
    assert nsqlookupd.producers("t") == [nsqd.tcp[1]]


# -- who creates topics ------------------------------------------------------------------------------------------------


def test_topics_are_not_created_by_themselves(daemons: Daemons):
    nsqd = daemons.nsqd("--durability=os", "--auto-create-topics=false")
    for line in (pub("t", b"x"), b"SUB t c\n", b"MPUB t\n" + bytes.fromhex("0000000900000001000000017878"),
                 b"DPUB t 5\n" + bytes.fromhex("0000000178"), b"PUB_ONCE t - me 1\n" + bytes.fromhex("0000000178"),
                 b"SUB_ORDER t c\n"):  # fmt: skip
        with nsqd.connect() as connection:
            assert connection.error(line).startswith("E_TOPIC_NOT_EXIST "), line
            assert connection.wait_closed() == []
    for target, body in (("/pub?topic=t", b"x"), ("/mpub?topic=t", b"x"), ("/mpub?topic=t", b"\n")):
        assert nsqd.request("POST", target, body).error == (404, "E_TOPIC_NOT_EXIST")
    assert nsqd.get("/stats?format=json")["topics"] == []
    nsqd.post("/topic/create?topic=t")
    nsqd.publish("t", b"x")
    with nsqd.connect() as connection:
        connection.subscribe("t", "c", 1)
        assert connection.message().body == b"x"


# -- Youzan's own nsqlookupd -------------------------------------------------------------------------------------------


def test_a_nsqlookupd_of_nsq_hears_no_partitions(daemons: Daemons):
    """One that is neither ours nor Youzan's: topics are registered as by NSQ's nsqd."""
    with FakeNsqlookupd() as fake:
        nsqd = daemons.nsqd("--durability=os", fake.flag)
        nsqd.post("/topic/create?topic=parts&partition_num=2")
        nsqd.post("/channel/create?topic=parts&channel=c")
        wait_for_lines(fake, "REGISTER parts", "REGISTER parts c")


def test_who_refuses_an_id_is_told_none(daemons: Daemons):
    """A fork whose version says nothing: after its first refusal it hears what NSQ's nsqd would say, for good."""
    with FakeNsqlookupd() as fake:
        nsqd = daemons.nsqd("--durability=os", fake.flag)
        wait_until(lambda: fake.identities, "nsqd")
        fake.answers["REGISTER"] = b"E_INVALID REGISTER insufficient number of params"
        nsqd.post("/topic/create?topic=parts&partition_num=2")
        wait_until(lambda: any(each.get("distributed_id") for each in fake.identities), "an id")
        wait_until(lambda: "distributed_id" not in fake.identities[-1], "no id any more")
        fake.answers.clear()
        count = len(fake.lines)
        wait_until(lambda: "REGISTER parts" in fake.lines[count:], "the topic")
        nsqd.post("/channel/create?topic=parts&channel=c")
        wait_for_lines(fake, "REGISTER parts c")


@pytest.fixture
def youzans(tmp_path: Path) -> Iterator[dict[str, int]]:
    """Youzan's nsqlookupd, built from its source: its ports."""
    ports = {"TCP": unused_port(), "HTTP": unused_port()}
    flags = [f"--tcp-address=127.0.0.1:{ports['TCP']}", f"--http-address=127.0.0.1:{ports['HTTP']}"]
    more = ["--broadcast-address=127.0.0.1", f"--log-dir={tmp_path}"]
    process = subprocess.Popen([YOUZANS, *flags, *more], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: is_listening(ports["HTTP"]), "its HTTP port")
        yield ports
    finally:
        process.kill()
        process.wait()


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.foreign
@pytest.mark.skipif(not YOUZANS, reason="YOUZAN_NSQLOOKUPD names no program")
def test_youzans_nsqlookupd_knows_plain_topics_and_partitions(daemons: Daemons, youzans: dict[str, int]):
    nsqd = daemons.nsqd("--durability=os", f"--lookupd-tcp-address=127.0.0.1:{youzans['TCP']}")

    def lookup(topic: str) -> Any:
        curl = ["curl", "-s", f"http://127.0.0.1:{youzans['HTTP']}/lookup?topic={topic}"]
        return json.loads(subprocess.run(curl, capture_output=True, check=True).stdout)["data"]

    nsqd.post("/topic/create?topic=before")
    wait_until(lambda: lookup("before")["producers"], "a plain topic")
    nsqd.post("/topic/create?topic=parts&partition_num=2")
    nsqd.post("/channel/create?topic=parts&channel=c")
    wait_until(lambda: sorted(lookup("parts")["partitions"]) == ["0", "1"], "the partitions")
    wait_until(lambda: lookup("parts")["channels"] == ["c"], "its channel")
    nsqd.post("/topic/create?topic=after")
    wait_until(lambda: lookup("before")["producers"] and lookup("after")["producers"], "both plain topics")
    nsqd.post("/topic/delete?topic=parts")
    wait_until(lambda: not lookup("parts")["producers"], "it is gone")
    assert lookup("before")["producers"]
