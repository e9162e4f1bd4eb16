"""What docs/cluster.md and contrib/cluster print is run: commands against a real cluster, flags by the tables."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.daemons import Cluster, running_cluster, wait_until
from tests.integration.test_docs import BLOCKS

from flintmq import cli
from flintmq.nsqd.options import NsqdOptions
from flintmq.nsqlookupd.options import NsqlookupdOptions
from flintmq.options import Options
from flintmq.options.resolve import resolve
from flintmq.up import UpOptions

ROOT = Path(__file__).resolve().parents[2]
CONTRIB = ROOT / "contrib" / "cluster"
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


def test_the_compose_file_starts_daemons_that_take_their_flags() -> None:
    text = (CONTRIB / "compose.yaml").read_text()
    commands = [json.loads(found) for found in re.findall(r"^    command: (\[.*\])$", text, re.MULTILINE)]
    assert [words[0] for words in commands].count("nsqd") == 3 and len(commands) == 6
    for program, *flags in commands:
        if program != "etcd":
            assert resolve(TABLES[program], flags, {}).action == "run"


@pytest.mark.parametrize("program", ["nsqd", "nsqlookupd"])
def test_a_unit_starts_a_daemon_that_takes_its_flags(program: str) -> None:
    text = (CONTRIB / f"{program}.service").read_text()
    found = re.search(r"^ExecStart=/opt/flintmq/bin/(\S+) (.*)$", text, re.MULTILINE)
    assert found is not None and found[1] == program
    variables = dict(re.findall(r"\b(FLINTMQ_\w+)=(\S+)", text))
    if program == "nsqd":
        assert variables, "where the addresses come from is said"
        variables |= {"FLINTMQ_NSQD_CLUSTER_STORE": "10.0.0.1:4161"}
    assert resolve(TABLES[program], shlex.split(found[2]), variables).action == "run"
