"""What docs/cluster.md prints is run: commands against a real cluster, flags by the tables."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.daemons import PATIENCE_S, Cluster, running_cluster, wait_until
from tests.integration.etcd import Etcd, binary
from tests.integration.test_docs import BLOCKS

from flintmq import cli
from flintmq.nsqd.options import NsqdOptions
from flintmq.nsqlookupd.options import NsqlookupdOptions
from flintmq.options import Options
from flintmq.options.resolve import resolve
from flintmq.tools.nsq_to_nsq import ToNsqOptions
from flintmq.up import UpOptions

LINES = [line for each in BLOCKS if each.page == "docs/cluster.md" for line in each.text.splitlines()]
NOUNS = ("flintmq cluster ", "flintmq topic ", "flintmq node ")
FILES = ("mkdir ", "cp ")
"""What is done with a log that was set aside; test_cluster_store.py reads one back so."""
TABLES: dict[str, type[Options]] = {
    "nsqd": NsqdOptions, "nsqlookupd": NsqlookupdOptions, "nsq_to_nsq": ToNsqOptions, "up": UpOptions,
}  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("docs"), copies_on=4) as found:
        yield found


def test_every_command_of_the_page_works_in_its_order(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    commands = [line for line in LINES if line.startswith(NOUNS)]
    assert len(commands) > 10
    here = "--lookupd-http-address={}:{}".format(*cluster.nsqlookupd.http)
    for line in commands:
        words = shlex.split(line)[1:]
        if "move" in words:
            nodes = cluster.partition("orders")["replicas"]
            rows = {row["node"]: f"127.0.0.1:{row['tcp_port']}" for row in cluster.status()["nodes"]}
            source, target = rows[nodes[0]], next(rows[node] for node in rows if node not in nodes)
            words = [word.replace("10.0.0.11:4150", source).replace("10.0.0.14:4150", target) for word in words]
        words = [word.replace("10.0.0.14:4150", f"127.0.0.1:{cluster.nodes[3].tcp[1]}") for word in words]
        if words[1] in ("status", "show"):  # leaders that were elected a moment ago are not ready yet
            wait_until(lambda words=words: cli.main([*words, here]) == 0, line)  # type: ignore[misc]
        else:
            assert cli.main([*words, here]) == 0, (line, capsys.readouterr())


def test_the_commands_for_an_etcd_work_in_their_order_and_make_room(tmp_path: Path) -> None:
    (tmp_path / "store-password").write_text("secret\n")
    commands = [line.replace("/etc/flintmq", str(tmp_path)) for line in LINES if line.startswith("etcdctl ")]
    assert len(commands) > 5
    etcd = Etcd(tmp_path, "one")
    tools = f"{binary().parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": tools, "ETCDCTL_API": "3", "ETCDCTL_ENDPOINTS": etcd.url}

    def run(line: str) -> str:
        done = subprocess.run(["bash", "-c", line], env=env, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, (line, done)
        return done.stdout

    try:
        etcd.launch().wait()
        wait_until(lambda: subprocess.run(["bash", "-c", "etcdctl put a b"], env=env).returncode == 0, "it is written")
        etcd.fill(True)
        said = [run(line) for line in commands]
        assert any("NOSPACE" in each for each in said), said
        assert "OK" in run("etcdctl put a b") and run("etcdctl alarm list") == ""
        assert "[/flintmq/default/, /flintmq/default0)" in run("etcdctl role get flintmq")
    finally:
        etcd.discard()


DAEMONS = [line for line in LINES if not line.startswith((*NOUNS, *FILES, "etcdctl "))]


@pytest.mark.parametrize("line", DAEMONS, ids=lambda line: line[:60])
def test_the_daemons_of_the_page_take_their_flags(line: str) -> None:
    words = shlex.split(line.removeprefix("flintmq "))
    assert resolve(TABLES[words[0]], words[1:], {}).action == "run"
