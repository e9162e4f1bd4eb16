"""What docs/cluster.md prints is run: commands against a real cluster, flags by the tables."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import pytest
from tests.integration.daemons import Cluster, running_cluster, wait_until
from tests.integration.test_docs import BLOCKS

from flintmq import cli
from flintmq.nsqd.options import NsqdOptions
from flintmq.nsqlookupd.options import NsqlookupdOptions
from flintmq.options import Options
from flintmq.options.resolve import resolve
from flintmq.up import UpOptions

LINES = [line for each in BLOCKS if each.page == "docs/cluster.md" for line in each.text.splitlines()]
NOUNS = ("flintmq cluster ", "flintmq topic ", "flintmq node ")
TABLES: dict[str, type[Options]] = {"nsqd": NsqdOptions, "nsqlookupd": NsqlookupdOptions, "up": UpOptions}


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


@pytest.mark.parametrize("line", [line for line in LINES if not line.startswith(NOUNS)], ids=lambda line: line[:60])
def test_the_daemons_of_the_page_take_their_flags(line: str) -> None:
    words = shlex.split(line.removeprefix("flintmq "))
    assert resolve(TABLES[words[0]], words[1:], {}).action == "run"
