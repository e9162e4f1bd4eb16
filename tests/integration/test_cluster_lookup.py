"""nsqlookupds of a cluster as real processes, over both stores: whoever is killed, topics are made and found then.

The nsqds are processes that keep no messages (tests/cluster_nodes.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.integration.daemons import PATIENCE_S, SOURCES, Daemons, Nsqlookupd, wait_until
from tests.integration.etcd import Etcd
from tests.integration.utilities import flintmq
from tests.ports import reserved_port

from flintmq.cluster.state import LEASE_TTL_S
from flintmq.net.etcd import REASON_COUNT_MAX

ROOT = Path(__file__).parents[2]
NAMES = "abc"


class Member:
    """An nsqd of the cluster."""

    def __init__(self, url: str, name: str, log_path: Path) -> None:
        self.name = name
        self._reserved = [reserved_port(), reserved_port()]
        self.ports = [each.getsockname()[1] for each in self._reserved]
        self._command = [sys.executable, "-m", "tests.cluster_nodes", url, name, *map(str, self.ports)]
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Member:
        paths = {"PYTHONPATH": f"{SOURCES}{os.pathsep}{ROOT}"}
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **paths}, cwd=ROOT
            )
        return self

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE_S)
            self._process = None


class Members:
    """Starts nsqds of a cluster and ends them all."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.by_name: dict[str, Member] = {}

    def start(self, url: str) -> None:
        for name in NAMES:
            self.by_name[name] = Member(url, name, self._directory / f"node-{name}.log").start()

    def close(self) -> None:
        for member in self.by_name.values():
            member.kill()


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    members = Members(tmp_path)
    try:
        yield members
    finally:
        members.close()


@pytest.fixture(params=["nsqlookupd", "etcd"])
def store(request: pytest.FixtureRequest, daemons: Daemons, tmp_path: Path) -> Iterator[str]:
    """Each of the two stores, kept by a process that is no member of the cluster itself."""
    if request.param == "nsqlookupd":
        (tmp_path / "store").mkdir()
        keeper = daemons.nsqlookupd(f"--store-path={tmp_path / 'store'}")
        yield f"http://127.0.0.1:{keeper.http[1]}"
        return
    etcd = Etcd(tmp_path, "one")
    try:
        yield etcd.launch().wait().url
    finally:
        etcd.discard()


def status(lookup: Nsqlookupd) -> dict[str, Any]:
    return dict(lookup.get("/cluster/status"))


def until_whole(lookups: list[Nsqlookupd], node_count: int = len(NAMES)) -> None:
    def whole() -> bool:
        found = [status(lookup) for lookup in lookups]
        masters = [each["is_master"] for each in found]
        counts = {(len(each["nodes"]), len(each["lookupds"])) for each in found}
        return counts == {(node_count, len(lookups))} and masters.count(True) == 1

    wait_until(whole, lambda: f"the cluster: {[status(lookup) for lookup in lookups]}", 2 * PATIENCE_S)


def master_of(lookups: list[Nsqlookupd]) -> Nsqlookupd:
    return next(lookup for lookup in lookups if status(lookup)["is_master"])


def create(lookup: Nsqlookupd, topic: str, query: str = "partition_num=3&replicator=3") -> None:
    """Create a topic; while nobody is master the answer is 503, and one asks again."""

    def created() -> bool:
        answer = lookup.request("POST", f"/topic/create?topic={topic}&{query}")
        assert answer.status in (200, 503), answer
        return answer.status == 200

    wait_until(created, lambda: f"topic {topic}: {lookup.log[-3000:]}", 2 * PATIENCE_S)


def leaders(lookup: Nsqlookupd, topic: str, access: str = "r") -> dict[str, int]:
    found = lookup.get(f"/lookup?topic={topic}&access={access}")["data"]  # in the envelope of the redesigned NSQ
    return {number: peer["tcp_port"] for number, peer in found["partitions"].items()}


def test_the_master_is_killed_and_topics_are_made_afterwards(
    store: str, daemons: Daemons, members: Members, tmp_path: Path
):
    lookups = [daemons.nsqlookupd(f"--cluster-store={store}") for _ in range(2)]
    members.start(store)
    until_whole(lookups)
    for number in range(2):
        for lookup in lookups:
            create(lookup, f"t{number}-{lookups.index(lookup)}")
        master = master_of(lookups)
        (other,) = (lookup for lookup in lookups if lookup is not master)
        master.kill()
        assert len(leaders(other, f"t{number}-0")) == 3, "lookups go on"
        wait_until(lambda at=other: status(at)["is_master"], "another master")  # type: ignore[misc]
        create(other, f"after{number}")
        assert len(leaders(other, f"after{number}")) == 3
        master.start()
        until_whole(lookups)
        create(master, f"again{number}")
        for topic in (f"t{number}-0", f"t{number}-1", f"after{number}", f"again{number}"):
            wait_until(lambda at=master, of=topic: len(leaders(at, of)) == 3, topic)  # type: ignore[misc]
    answer = lookups[0].request("POST", "/topic/delete?topic=after0&partition=**")
    assert answer.status == 200, answer
    assert lookups[0].request("GET", "/lookup?topic=after0").status == 404
    wait_until(lambda: "after0" not in lookups[1].get("/topics")["topics"], "the other one has heard of it")
    rows = status(lookups[1])["topics"]
    assert all(len(row["partitions"]) == 3 and row["replicator"] == 3 for row in rows)
    assert len(rows) == 7


def test_a_killed_leader_is_replaced_before_its_lease_runs_out(store: str, daemons: Daemons, members: Members):
    lookup = daemons.nsqlookupd(f"--cluster-store={store}")
    members.start(store)
    until_whole([lookup])
    create(lookup, "t")
    before = leaders(lookup, "t")
    for name in "ab":
        members.by_name[name].kill()
        wait_until(lambda gone=name: _is_led_without(lookup, gone), "other leaders")  # type: ignore[misc]
        assert "does not listen" in lookup.log, "it was looked after at once"
    after = leaders(lookup, "t", "w")
    assert set(after) == set(before) and set(after.values()) < set(before.values())
    members.by_name["a"].start()
    until_whole([lookup], 2)


def _is_led_without(lookup: Nsqlookupd, name: str) -> bool:
    (topic,) = status(lookup)["topics"]
    return all(row["leader"] not in ("", name) and row["is_ready"] for row in topic["partitions"])


def test_a_stopped_leader_is_replaced_when_its_lease_has_run_out(store: str, daemons: Daemons, members: Members):
    lookup = daemons.nsqlookupd(f"--cluster-store={store}")
    members.start(store)
    until_whole([lookup])
    create(lookup, "t")
    began = time.monotonic()
    members.by_name["a"].send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: _is_led_without(lookup, "a"), "other leaders")
        assert time.monotonic() - began > LEASE_TTL_S / 3, "not before its lease can have run out"
    finally:
        members.by_name["a"].send_signal(signal.SIGCONT)
    until_whole([lookup])


def test_a_nsqlookupd_with_its_own_store_is_killed(daemons: Daemons, members: Members, tmp_path: Path):
    (tmp_path / "store").mkdir()
    one = daemons.nsqlookupd(f"--store-path={tmp_path / 'store'}", "--cluster-store=own")
    url = f"http://127.0.0.1:{one.http[1]}"
    two = daemons.nsqlookupd(f"--cluster-store={url}")
    members.start(url)
    until_whole([one, two])
    create(two, "before")
    one.kill()
    for access in "rw":
        assert len(leaders(two, "before", access)) == 3, "as it was last known"
    answer = two.request("POST", "/topic/create?topic=meanwhile&partition_num=1")
    assert answer.status == 503, answer
    one.start()
    until_whole([one, two])
    for lookup in (one, two):
        create(lookup, f"after{lookup is one}")
        assert len(leaders(lookup, f"after{lookup is one}")) == 3
        wait_until(lambda at=lookup: len(leaders(at, "before")) == 3, "leaders")  # type: ignore[misc]
    (topic,) = lookup.get("/cluster/status?topic=before")["topics"]
    assert {row["epoch"] for row in topic["partitions"]} == {1}, "nobody was elected for that"


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_store_that_is_away_is_a_problem_wherever_one_looks(
    how: str, daemons: Daemons, members: Members, tmp_path: Path
):
    """The store goes: with its nsqlookupd, which was the master, or as an etcd that stands still."""
    leave: Callable[[], object]
    come_back: Callable[[], object]
    with contextlib.ExitStack() as stack:
        if how == "killed":
            (tmp_path / "store").mkdir()
            keeper = daemons.nsqlookupd(f"--store-path={tmp_path / 'store'}", "--cluster-store=own")
            url = f"http://127.0.0.1:{keeper.http[1]}"
            lookups, leave, come_back = [keeper], keeper.kill, keeper.start
        else:
            etcd = Etcd(tmp_path, "one")
            stack.callback(etcd.discard)
            url, lookups = etcd.launch().wait().url, []
            leave, come_back = (partial(etcd.signal, each) for each in (signal.SIGSTOP, signal.SIGCONT))
        asked = daemons.nsqlookupd(f"--cluster-store={url}")
        lookups.append(asked)
        members.start(url)
        until_whole(lookups)
        here = f"--lookupd-http-address=127.0.0.1:{asked.http[1]}"
        nsqadmin = daemons.nsqadmin(here)

        def is_whole() -> bool:
            return flintmq("cluster", "status", here).returncode == 0

        wait_until(is_whole, lambda: flintmq("cluster", "status", here).stdout)
        assert nsqadmin.get("/api/v2/cluster")["problem"] == ""

        leave()
        wait_until(lambda: status(asked)["store_away_since"] is not None, "it is noticed", 2 * PATIENCE_S)
        found = status(asked)
        assert found["master"] is None and len(found["nodes"]) == len(NAMES), "lookups go on as it was last known"
        figures = cluster_figures(asked)
        assert figures["has_master"] == figures["healthy"] == figures["store_followed"] == 0
        seen = flintmq("cluster", "status", here)
        assert seen.returncode == 1 and "is without the coordination store since" in seen.stdout, seen
        assert "master: not known" in seen.stdout and not seen.stdout.rstrip().endswith("whole")
        doctor = flintmq("doctor", "--json", here)
        findings = [json.loads(line) for line in doctor.stdout.splitlines()]
        assert doctor.returncode == 1
        (problem,) = [each for each in findings if "without the coordination store since" in each["text"]]
        assert problem["level"] == "problem"
        view = nsqadmin.get("/api/v2/cluster")
        assert view["master"] == "" and "without the coordination store since" in view["problem"]
        assert any(
            "without the coordination store" in each["text"] for each in nsqadmin.get("/api/v2/problems")["findings"]
        )
        lines = [line for line in asked.log.splitlines() if "STORE: the watch is tried again" in line]
        assert 1 <= len(lines) <= REASON_COUNT_MAX and "elsewhere" not in asked.log, "there is one address"

        come_back()
        until_whole(lookups)
        wait_until(is_whole, lambda: flintmq("cluster", "status", here).stdout, 2 * PATIENCE_S)
        figures = cluster_figures(asked)
        assert figures["has_master"] == figures["healthy"] == figures["store_followed"] == 1


def test_an_etcd_without_space_is_a_problem_wherever_one_looks(daemons: Daemons, members: Members, tmp_path: Path):
    """It answers reads and renews leases, so nothing seems to be wrong until somebody has to be elected."""
    etcd = Etcd(tmp_path, "one")
    try:
        url = etcd.launch().wait().url
        lookups = [daemons.nsqlookupd(f"--cluster-store={url}")]
        members.start(url)
        until_whole(lookups)
        create(lookups[0], "t")

        def is_whole() -> bool:
            return flintmq("cluster", "status", here(lookups[0])).returncode == 0

        wait_until(is_whole, lambda: flintmq("cluster", "status", here(lookups[0])).stdout)
        assert cluster_figures(lookups[0])["store_read_only"] == 0

        etcd.fill(True)
        refused = lookups[0].request("POST", "/topic/create?topic=u&partition_num=1&replicator=1")
        assert refused.status == 503 and "database space exceeded; make room: etcdctl compact" in refused.text
        lookups.append(daemons.nsqlookupd(f"--cluster-store={url}"))
        for each in lookups:
            wait_until(
                lambda at=each: status(at)["store_read_only_since"] is not None,  # type: ignore[misc]
                "it is noticed when a write has failed, and at the start",
                2 * PATIENCE_S,
            )
        leader = leaders(lookups[0], "t")["0"]
        next(each for each in members.by_name.values() if leader in each.ports).kill()

        wait_until(lambda: bool(unled(lookups[1])), "its lease runs out", 2 * PATIENCE_S)
        reasons = [each["reason"] for each in unled(lookups[1])]
        assert all("can lead, but nobody is elected while the coordination store" in each for each in reasons), reasons
        for seen in (flintmq("cluster", "status", here(lookups[1])), flintmq("doctor", *map(here, lookups))):
            assert seen.returncode == 1 and "mend the coordination store, which takes no writes" in seen.stdout, seen
            assert re.search("takes no writes since .* UTC: etcdserver: mvcc: database space exceeded", seen.stdout)
            assert "topic elect" not in seen.stdout
        for each in lookups:
            figures = cluster_figures(each)
            assert figures["store_read_only"] == figures["store_followed"] == 1 and figures["healthy"] == 0

        etcd.fill(False)
        wait_until(lambda: not unled(lookups[1]), "others are elected", 2 * PATIENCE_S)
        until_whole(lookups, len(NAMES) - 1)
        wait_until(lambda: all(status(each)["store_read_only_since"] is None for each in lookups), "it is noticed")
        assert {cluster_figures(each)["healthy"] for each in lookups} == {1}
        for each in lookups:
            begun = [line for line in each.log.splitlines() if "takes no writes: etcdserver: mvcc: database" in line]
            assert len(begun) == 1 and each.log.count("takes writes again") == 1, begun
        assert lookups[0].log.count("database space exceeded") == 1, "each write that fails is no news"
    finally:
        etcd.discard()


def here(lookup: Nsqlookupd) -> str:
    """The flag that has a command ask a nsqlookupd."""
    return f"--lookupd-http-address=127.0.0.1:{lookup.http[1]}"


def unled(lookup: Nsqlookupd) -> list[dict[str, Any]]:
    """The partitions that nobody leads, as a nsqlookupd knows it."""
    return [each for topic in status(lookup)["topics"] for each in topic["partitions"] if not each["leader"]]


def cluster_figures(lookup: Nsqlookupd) -> dict[str, float]:
    """The metrics of the cluster, by what follows the name of the daemon."""
    text = lookup.request("GET", "/metrics").text
    found = re.findall(r"^flintmq_nsqlookupd_cluster_(\w+) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def test_a_request_is_handed_on_with_its_token(store: str, daemons: Daemons, members: Members, tmp_path: Path):
    tokens = tmp_path / "tokens.toml"
    tokens.write_text('[[client]]\nname = "ops"\ntoken = "operator-token-0001"\npermissions = ["admin", "read"]\n')
    flags = [f"--cluster-store={store}", f"--http-auth-tokens-file={tokens}"]
    lookups = [daemons.nsqlookupd(*flags) for _ in range(2)]
    members.start(store)
    headers = {"Authorization": "Bearer operator-token-0001"}

    def created(lookup: Nsqlookupd) -> bool:
        answer = lookup.request("POST", f"/topic/create?topic=t{lookup is lookups[0]}", headers=headers)
        assert answer.status in (200, 400, 503), answer
        return answer.status == 200

    for lookup in lookups:
        assert lookup.request("POST", "/topic/create?topic=t").status == 401
        assert lookup.request("GET", "/cluster/status").status == 401
        wait_until(lambda at=lookup: created(at), lambda at=lookup: at.log[-2000:], 2 * PATIENCE_S)  # type: ignore[misc]
