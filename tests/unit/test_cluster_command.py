"""``flintmq cluster|topic|node``: words become requests, tables fit a terminal, mistakes are one line."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.unit.test_cluster_health import NODES, PARTITION, TOPIC, WHOLE

from flintmq import cli
from flintmq.client.admin.question import HttpRefused
from flintmq.client.admin.results import ClusterNode, ClusterStatus, ClusterTopic, Drain, Found, ListedNode, Move
from flintmq.errors import ConnectionFailed
from flintmq.sync import LookupdAdmin
from flintmq.tools import cluster, cluster_tables
from flintmq.tools.shell.arguments import VARIABLES


class Master:
    """Stands in for the network."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.statuses: list[ClusterStatus] = [WHOLE]
        self.moves: list[list[Move]] = [[]]
        self.answer: Any = None
        self.refusals: list[str] = []
        self.dead: set[str] = set()
        self.patience_s: set[float] = set()
        self.is_cluster = True

    def ask(self, admin: Any, question: Any) -> Any:
        self.patience_s.add(admin._timeout_s)
        if admin.address in self.dead:
            raise ConnectionFailed(admin.address, "refused")
        if question.target.startswith("/cluster/status"):
            if not self.is_cluster:
                raise HttpRefused(admin.address, "GET /cluster/status", 404, "NOT_FOUND")
            return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if question.target == "/cluster/moves":
            return self.moves.pop(0) if len(self.moves) > 1 else self.moves[0]
        self.asked.append((admin.address, f"{question.method} {question.target}"))
        if self.refusals:
            status, text = self.refusals.pop(0).split(" ", 1)
            raise HttpRefused(admin.address, f"{question.method} {question.target}", int(status), text)
        return self.answer


def _ask_of(master: Master) -> Any:
    def ask(admin: Any, question: Any) -> Any:
        return master.ask(admin, question)

    return ask


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch) -> Master:
    found = Master()
    for variable in VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(LookupdAdmin.__base__, "ask", _ask_of(found))
    ticks = itertools.count()  # a millisecond for each look at the clock, however slow the machine is
    clock = SimpleNamespace(monotonic=lambda: next(ticks) / 1000, sleep=lambda _: None)
    monkeypatch.setattr(cluster, "time", clock)
    return found


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("topic create t --partitions=4 --replicas=3 --ordered",
         "POST /topic/create?topic=t&partition_num=4&orderedmulti=true&replicator=3"),
        ("topic create t", "POST /topic/create?topic=t"),
        ("topic create t --dry-run", "POST /topic/create?topic=t&dry_run=true"),
        ("topic delete t --yes", "POST /topic/delete?topic=t&partition=%2A%2A"),
        ("topic update t --replicas 2", "POST /topic/meta/update?topic=t&replicator=2"),
        ("topic update t --retention 7 --min-in-sync=1 --no-auto-channels",
         "POST /topic/meta/update?topic=t&retention=7&disable_channel_auto_create=true&min_in_sync=1"),
        ("topic expand t 8 --dry-run", "POST /topic/partition/expand?topic=t&partition_num=8&dry_run=true"),
        ("topic move t 0 --from a:4150 --to d",
         "POST /topic/partition/move?topic=t&partition=0&move_source=a&move_target=d"),
        ("topic elect t 0 b:4151 --accept-loss", "POST /cluster/partition/elect?topic=t&partition=0&node=b%3A4151"),
        ("topic elect t 0 --dry-run", "POST /cluster/partition/elect?topic=t&partition=0&dry_run=true"),
        ("node drain a", "POST /cluster/node/drain?node=a"),
        ("node drain a --undo", "POST /cluster/node/drain?node=a&undo=true"),
        ("node remove c:4150 --dry-run", "POST /cluster/node/remove?remove_node=c&dry_run=true"),
        ("cluster balance on --window=02-05", "POST /cluster/balance?enabled=true&window=02-05"),
        ("cluster balance off", "POST /cluster/balance?enabled=false"),
        ("cluster upgrade begin", "POST /cluster/upgrade/begin"),
        ("cluster upgrade done", "POST /cluster/upgrade/done"),
    ],
)  # fmt: skip
def test_words_become_a_request(master: Master, words: str, expected: str) -> None:
    assert cli.main(words.split()) == 0
    assert master.asked == [("http://localhost:4161", expected)]


_UNKNOWN = "503 it is not known whether topic t is created: no answer within 1 s; ask again"
_PRESENTLY = "503 this nsqlookupd is not the master any more: nothing was changed, ask again presently"


@pytest.mark.parametrize(
    "words",
    ["topic create t --partitions=1 --replicas=3", "topic update t --replicas=3", "topic expand t 1"],
)
def test_who_waits_asks_again_while_the_answer_says_so(master: Master, words: str, capsys: pytest.CaptureFixture[str]):
    master.refusals = [_UNKNOWN, _PRESENTLY]
    assert cli.main([*words.split(), "--wait"]) == 0
    assert len(master.asked) == 3 and len(set(master.asked)) == 1
    assert "it is not known whether topic t is created" in capsys.readouterr().err
    master.refusals = [_UNKNOWN]
    assert cli.main(words.split()) == 1, "it does not wait"
    assert len(master.asked) == 4
    for refusal in ("503 topic t was not created: nothing could be written", "400 topic t is there: delete it first"):
        master.asked, master.refusals = [], [refusal]
        assert cli.main([*words.split(), "--wait"]) == 1
        assert len(master.asked) == 1


def test_who_has_asked_for_as_long_as_it_waits_says_what_is_so(
    master: Master, capsys: pytest.CaptureFixture[str]
) -> None:
    master.refusals = [_UNKNOWN] * 500
    words = ["topic", "create", "t", "--partitions=1", "--wait", "--within=50ms"]
    assert cli.main(words) == 1
    assert 1 < len(master.asked) < 500
    error = capsys.readouterr().err.splitlines()[-1]
    assert "not within 0.05 s: topic t is created; the last answer: it is not known whether" in error
    assert error.endswith("; now: topic t is created")
    master.statuses = [msgspec.structs.replace(WHOLE, topics=[])]
    assert cli.main(words) == 1
    assert capsys.readouterr().err.rstrip().endswith("; now: topic t is not known yet")


@pytest.mark.parametrize(
    ("words", "within_s"),
    [("--wait --within=10s", 10), ("--wait --within=1ms", 5), ("--wait", 45), ("--wait --within=10s --timeout=7s", 7)],
)
def test_one_answer_is_not_waited_for_beyond_the_time_of_all(master: Master, words: str, within_s: float) -> None:
    assert cli.main(["topic", "create", "t", "--partitions=1", *words.split()]) == 0
    assert master.patience_s == {within_s}


def test_a_topic_that_is_gone_by_the_first_try_is_not_deleted_again(master: Master) -> None:
    left = "503 topic t is being deleted, and something of it is left; ask again"
    gone, deleting = (msgspec.structs.replace(WHOLE, topics=topics) for topics in ([], [TOPIC]))
    anew = msgspec.structs.replace(WHOLE, topics=[msgspec.structs.replace(TOPIC, number="2")])
    for then, count in (([gone], 1), ([anew, gone], 1), ([deleting, gone], 2)):
        master.asked, master.refusals, master.statuses = [], [left], [WHOLE, *then]
        assert cli.main(["topic", "delete", "t", "--yes", "--wait"]) == 0
        assert len(master.asked) == count


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("cluster stat", "there is no verb stat; did you mean status?"),
        ("topic xyzzy", "there is no verb xyzzy; flintmq topic --help lists all"),
        ("topic create", "the following arguments are required: topic"),
        ("topic create t --replicas=3", "need --partitions"),
        ("topic create t --partitions=1 --replicas=6", "argument --replicas: it must be 1 to 5"),
        ("topic update t --replicas=0", "argument --replicas: it must be 1 to 5"),
        ("topic update t --min-in-sync=6", "argument --min-in-sync: it must be 1 to 5"),
        ("topic expand t 0", "it must be 1 or more"),
        ("topic move t x --from a --to b", "it must be a number"),
        ("topic move t 0 --to b", "--from"),
        ("topic elect t 0 a", "--accept-loss"),
        (
            "topic update t",
            "needs at least one of --replicas, --min-in-sync, --retention, --syncdisk, --headers, "
            "--auto-channels and --no-auto-channels",
        ),
        ("cluster balance sideways", "invalid choice"),
        ("cluster balance on --window=5", "such as 02-05"),
        ("cluster balance off --window=02-05", "--window is for flintmq cluster balance on"),
        ("cluster balance top --dry-run", "neither --window nor --dry-run"),
        ("node drain", "the following arguments are required: node"),
        ("node list --wait", "unrecognized arguments: --wait"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_asked(
    master: Master, words: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words.split()) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1
    assert master.asked == []


@pytest.mark.parametrize("noun", ["cluster", "topic", "node"])
def test_help(noun: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([noun, "--help"]) == 0
    page = capsys.readouterr().out
    for verb in cluster._NOUNS[noun]:
        assert f"  {verb} " in page
        with pytest.raises(SystemExit) as ended:
            cli.main([noun, verb, "--help"])
        assert ended.value.code == 0
        assert f"flintmq {noun} {verb}" in capsys.readouterr().out


def test_status_says_by_its_exit_code_whether_all_is_whole(master: Master, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cluster", "status"]) == 0
    out = capsys.readouterr().out
    assert "a:4150" in out and out.endswith("whole\n") and "3 of 3" in out
    lacking = msgspec.structs.replace(PARTITION, in_sync=["a", "b"])
    master.statuses = [msgspec.structs.replace(WHOLE, topics=[msgspec.structs.replace(TOPIC, partitions=[lacking])])]
    assert cli.main(["cluster", "status"]) == 1
    assert "warning  topic t: partition 0: 2 of 3 copies are in sync" in capsys.readouterr().out
    assert cli.main(["topic", "show", "t"]) == 1
    assert "c:4150" in capsys.readouterr().out
    assert cli.main(["cluster", "status", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["topics"][0]["partitions"][0]["in_sync"] == ["a", "b"]


def test_ipv6_hosts_are_in_brackets(master: Master, capsys: pytest.CaptureFixture[str]) -> None:
    lookupd = msgspec.structs.replace(WHOLE.lookupds[0], host="2001:db8::1")
    master.statuses = [msgspec.structs.replace(WHOLE, master=lookupd, lookupds=[lookupd])]
    assert cli.main(["cluster", "status"]) == 0
    assert "nsqlookupd: [2001:db8::1]:4161; master: [2001:db8::1]:4161\n" in capsys.readouterr().out
    master.answer = Found([], [ListedNode(broadcast_address="::1", tcp_port=4150, http_port=4151)])
    assert cli.main(["topic", "replicate", "u"]) == 0
    assert master.asked[-1] == ("http://[::1]:4151", "POST /topic/replicate?topic=u")


def test_a_topic_that_several_have_is_given_by_the_one_that_is_named(
    master: Master, capsys: pytest.CaptureFixture[str]
) -> None:
    row = ListedNode(broadcast_address="a", tcp_port=4150, http_port=4151)
    master.answer = Found([], [row, msgspec.structs.replace(row, broadcast_address="b")])
    assert cli.main(["topic", "replicate", "u"]) != 0
    assert "a:4151, b:4151 has it: --node=HOST:PORT says which one" in capsys.readouterr().err
    assert cli.main(["topic", "replicate", "u", "--node=b:4150"]) == 0
    assert master.asked[-1] == ("http://b:4151", "POST /topic/replicate?topic=u")
    assert cli.main(["topic", "replicate", "u", "--node=x:4150"]) != 0


def test_who_has_one_alone_that_the_cluster_has_as_well_is_asked_for_it(
    master: Master, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    doubles = {"http://b:4151": ["t"]}

    def ask(admin: Any, question: Any) -> Any:
        if question.target.startswith("/stats"):
            return {"topics": [], "cluster": {"double_topics": doubles.get(admin.address, [])}}
        return master.ask(admin, question)

    monkeypatch.setattr(LookupdAdmin.__base__, "ask", ask)
    master.dead = {"http://c:4151"}
    assert cli.main(["topic", "replicate", "t"]) == 0
    assert master.asked[-1] == ("http://b:4151", "POST /topic/replicate?topic=t")
    doubles.clear()
    master.answer = Found([], [])
    assert cli.main(["topic", "replicate", "t"]) != 0
    assert "no nsqd has it" in capsys.readouterr().err


def test_the_next_nsqlookupd_is_asked_when_one_does_not_answer(
    master: Master, capsys: pytest.CaptureFixture[str]
) -> None:
    master.dead = {"http://x:4161"}
    flags = ["--lookupd-http-address=x", "--lookupd-http-address=y:1"]
    for given in (flags, ["--lookupd=x, y:1"]):
        master.asked.clear()
        assert cli.main(["node", "drain", "a", *given]) == 0
        assert master.asked == [("http://y:1", "POST /cluster/node/drain?node=a")]
    master.dead |= {"http://y:1"}
    assert cli.main(["node", "list", *flags]) == 1
    error = capsys.readouterr().err
    assert "http://x:4161" in error and "http://y:1" in error and error.count("\n") == 1


class Silent(Master):
    """Some nsqlookupds take what they are asked, and answer when the test has ended.

    Attributes:
        silent: their addresses.
        falls_silent: one that is silent, and the only one, when a change was sent to it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.silent: set[str] = set()
        self.falls_silent = ""
        self.has_ended = threading.Event()

    def ask(self, admin: Any, question: Any) -> Any:
        if admin.address in self.silent:
            self.has_ended.wait()
            raise ConnectionFailed(admin.address, "no answer in time")
        answer = super().ask(admin, question)
        if question.method == "POST" and admin.address == self.falls_silent:
            self.silent, self.dead = {admin.address}, set()
        return answer


@pytest.fixture
def silent(master: Master, monkeypatch: pytest.MonkeyPatch) -> Iterator[Silent]:
    found = Silent()
    monkeypatch.setattr(LookupdAdmin.__base__, "ask", _ask_of(found))
    monkeypatch.setattr(cluster, "_TURN_S", 0.01)
    yield found
    found.has_ended.set()


@pytest.mark.parametrize("words", ["cluster status", "node list", "topic show t", "topic create t", "node drain a"])
def test_one_that_is_silent_holds_nobody_up(silent: Silent, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    silent.silent = {"http://x:4161", "http://z:4161"}
    assert cli.main([*words.split(), "--lookupd=x,z,y:1"]) == 0
    said = capsys.readouterr()
    first, second = said.err.splitlines()[:2]
    assert first == "nsqlookupd http://x:4161 does not answer yet; http://z:4161 is asked as well"
    assert second == "nsqlookupd http://z:4161 does not answer yet; http://y:1 is asked as well"
    assert said.out and [address for address, _ in silent.asked] == ["http://y:1"] * len(silent.asked)
    assert len(silent.asked) == (words.split()[1] in ("create", "drain")), "a change is sent once"


def test_one_that_falls_silent_while_it_is_waited_ends_no_wait(
    silent: Silent, capsys: pytest.CaptureFixture[str]
) -> None:
    silent.dead = {"http://y:1"}  # so that x is the one that the change is sent to
    silent.falls_silent = "http://x:4161"
    silent.statuses = [WHOLE, msgspec.structs.replace(WHOLE, topics=[]), WHOLE]
    assert cli.main(["topic", "create", "t", "--wait", "--lookupd=x,y:1"]) == 0
    assert [address for address, _ in silent.asked] == ["http://x:4161"], "it was sent to that one alone"
    assert "http://x:4161 does not answer yet; http://y:1 is asked as well" in capsys.readouterr().err


def test_where_all_are_silent_it_ends(silent: Silent, capsys: pytest.CaptureFixture[str]) -> None:
    silent.silent = {"http://x:4161", "http://y:1"}
    assert cli.main(["cluster", "status", "--lookupd=x,y:1", "--timeout=20ms"]) == 1
    said = capsys.readouterr().err
    assert "nsqlookupd http://y:1 does not answer yet; it is waited for until --timeout" in said
    assert "no nsqlookupd answers: http://x:4161 does not answer; http://y:1 does not answer" in said.splitlines()[-1]


def test_a_nsqlookupd_without_a_cluster_is_asked_for_no_change(
    master: Master, capsys: pytest.CaptureFixture[str]
) -> None:
    master.is_cluster = False
    assert cli.main(["topic", "create", "t", "--dry-run"]) == 1
    assert master.asked == [] and "is in no cluster" in capsys.readouterr().err


def test_a_plan_is_printed_with_addresses(master: Master, capsys: pytest.CaptureFixture[str]) -> None:
    copies = [{"topic": "t", "partition": 0, "from": ["a"], "to": ["b"]}]
    master.answer = {"dry_run": True, "changes": True, "what": "", "copies": copies, "copy_count": 1, "notes": ["n"]}
    assert cli.main(["node", "remove", "a", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "a:4150" in out and "b:4150" in out and "copy_count: 1" in out and "notes: n" in out


def test_waiting_says_how_far_it_is(master: Master, capsys: pytest.CaptureFixture[str]) -> None:
    partitions = [PARTITION, msgspec.structs.replace(PARTITION, partition=1, leader="b", in_sync=["a"])]
    busy = msgspec.structs.replace(WHOLE, topics=[msgspec.structs.replace(TOPIC, partitions=partitions)])
    drains = [Drain("a", left=2, reason="nothing is moved")]
    master.statuses = [busy, msgspec.structs.replace(busy, drains=drains), _without("a", drains=[Drain("a")])]
    master.moves = [[Move("t", 0, ["a"], ["b"], 3_000_000, 12_000_000)]]
    assert cli.main(["node", "drain", "a:4150", "--wait"]) == 0
    said = capsys.readouterr()
    moved = "1 copy is being moved, 3.0 of 12.0 MB; nothing is moved"
    assert said.err == f"node a:4150 has 2 partitions still: t/0, t/1 (no other copy is in sync); {moved}\n"
    assert said.out == "node a:4150 drains\n"


def _without(node: str, is_there: bool = True, **fields: Any) -> ClusterStatus:
    """A cluster in which a node has nothing."""
    others = [each for each in "abc" if each != node]
    partition = msgspec.structs.replace(PARTITION, leader=others[0], in_sync=others, replicas=others)
    topic = msgspec.structs.replace(TOPIC, partitions=[partition], replicator=2, min_in_sync=1)
    nodes = [each for each in NODES if is_there or each.node != node]
    return msgspec.structs.replace(WHOLE, topics=[topic], nodes=nodes, **fields)


def _away(leaving: bool = False) -> ClusterStatus:
    """A cluster in which node a has the only copy of what matters, and died."""
    where: dict[str, Any] = {"replicas": ["b"], "leaving": ["a"]} if leaving else {"replicas": ["a"]}
    partition = msgspec.structs.replace(PARTITION, leader="", in_sync=["a"], **where)
    topic = msgspec.structs.replace(TOPIC, partitions=[partition], replicator=1, min_in_sync=1)
    return msgspec.structs.replace(WHOLE, topics=[topic], nodes=NODES[1:], drains=[Drain("a", left=1)])


@pytest.mark.parametrize("leaving", [False, True])
@pytest.mark.parametrize("verb", ["drain", "remove"])
def test_a_node_that_dies_while_it_is_drained_is_waited_for(
    master: Master, verb: str, leaving: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    master.statuses = [WHOLE, WHOLE, _away(leaving)]
    assert cli.main(["node", verb, "a:4150", "--wait", "--within=10ms"]) == 1
    said = capsys.readouterr()
    assert "has nothing any more (node a, which is away, has 1 partition still: t/0 (no other copy is in" in said.err
    assert not said.out


@pytest.mark.parametrize("verb", ["drain", "remove"])
def test_a_node_that_is_away_is_waited_for(master: Master, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    gone = _without("a", is_there=False, drains=[Drain("a")] if verb == "drain" else [])
    master.statuses = [_away(), _away(), gone]
    assert cli.main(["node", verb, "a", "--wait"]) == 0
    assert "node a, which is away, has 1 partition still: t/0" in capsys.readouterr().err
    assert [asked.partition("=")[2] for _, asked in master.asked] == ["a"]


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (_without("a"), "it is not known that node a:4150 drains"),
        (msgspec.structs.replace(WHOLE, topics=[], nodes=[], master=None), "no nsqlookupd is the master"),
        (_without("a", drains=[Drain("a")], problem="the store was emptied"), "the store was emptied"),
        (_without("a", drains=[Drain("a")], store_away_since_s=5.0), "without the coordination store since"),
        (_without("a", drains=[Drain("a")], unreadable=[{"key": "/x/partition/u/0"}]), "keys of the store cannot be"),
    ],
)  # fmt: skip
def test_what_is_not_listed_is_not_gone_where_not_all_is_known(
    master: Master, status: ClusterStatus, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ("node drain a", "node remove a"):
        master.statuses = [WHOLE, status]
        assert cli.main([*words.split(), "--wait", "--within=10ms"]) == 1
        assert text in capsys.readouterr().err


@pytest.mark.parametrize("words", ["topic delete t --yes", "topic create t", "cluster moves"])
def test_a_topic_is_waited_for_where_not_all_is_known(
    master: Master, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = msgspec.structs.replace(WHOLE, topics=[], problem="the store was emptied")
    master.statuses = [nothing, msgspec.structs.replace(WHOLE, problem="x"), nothing]
    assert cli.main([*words.split(), "--wait", "--within=10ms"]) == 1
    assert "does not know all of the cluster: the store was emptied" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["node drain a:4153", "node remove x", "topic move t 0 --from=a --to=a:4153"])
def test_who_is_to_be_waited_for_has_to_be_known(
    master: Master, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*words.split(), "--wait"]) == 1
    assert "there is no node" in capsys.readouterr().err and not master.asked
    assert cli.main(words.split()) == 0, "without that it is the nsqlookupd's to say"


def test_a_node_that_is_away_has_a_row(master: Master, capsys: pytest.CaptureFixture[str]) -> None:
    gone = ClusterNode("c", "10.0.0.3", 4150, 4151, holds=2, is_away=True)
    lacking = msgspec.structs.replace(PARTITION, in_sync=["a"])
    topic = msgspec.structs.replace(TOPIC, partitions=[lacking, msgspec.structs.replace(PARTITION, partition=1)])
    status = msgspec.structs.replace(WHOLE, nodes=NODES[:2], away=[gone], topics=[topic])
    master.statuses = [status]
    for words, code in (("cluster status", 1), ("node list", 0)):
        assert cli.main(words.split()) == code
        (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("was ")]
        assert row.split() == ["was", "10.0.0.3:4150", "c", "-", "0", "2", "away"]
    assert cli.main(["topic", "show", "t"]) == 1
    assert "b:4150 10.0.0.3:4150 (away)" in capsys.readouterr().out
    assert cli.main(["topic", "list"]) == 0
    assert " ".join(capsys.readouterr().out.splitlines()[-1].split()) == "t 2 3 2 3 of 6 1 acknowledge nothing"
    assert cli.main(["node", "list", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["node"], row["is_away"]) for row in rows] == [("a", False), ("b", False), ("c", True)]
    master.statuses = [msgspec.structs.replace(status, away=[], drains=[Drain("c", left=2)])]
    assert cli.main(["node", "list"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["-", "c", "-", "0", "2", "away;", "drains"]


def _copies(replicator: int, min_in_sync: int, replicas: str, in_sync: str = "", leaving: str = "") -> ClusterStatus:
    partition = msgspec.structs.replace(
        PARTITION, in_sync=list(in_sync or replicas), replicas=list(replicas), leaving=list(leaving)
    )
    topic = ClusterTopic("t", [partition], "1", 1, replicator, min_in_sync)
    return msgspec.structs.replace(WHOLE, topics=[topic])


def test_another_number_of_copies_is_waited_for_until_they_are_so(
    master: Master, capsys: pytest.CaptureFixture[str]
) -> None:
    master.statuses = [
        _copies(3, 2, "abc"),  # before
        _copies(3, 2, "abc"),  # the master has been told, through another nsqlookupd
        _copies(2, 2, "abc"),
        _copies(2, 2, "ab", leaving="c"),
        _copies(2, 2, "ab"),
    ]
    assert cli.main(["topic", "update", "t", "--replicas=2", "--wait"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "topic t is to have 3 copies still, as far as http://localhost:4161 knows",
        "topic t, partition 0: copies are to go",
    ]


@pytest.mark.parametrize(
    ("words", "before", "after", "is_asked"),
    [
        ("--replicas=3 --wait", _copies(1, 1, "a"), _copies(3, 1, "abc"), True),
        ("--replicas=3 --wait", _copies(2, 1, "ab"), _copies(3, 2, "abc"), False),  # the nsqlookupd saw to it
        ("--replicas=3 --wait", _copies(4, 1, "abc"), _copies(3, 1, "abc"), False),
        ("--replicas=4 --wait", _copies(3, 1, "abc"), _copies(4, 1, "abcd"), False),  # it was meant
        ("--replicas=3 --min-in-sync=1 --wait", _copies(1, 1, "a"), _copies(3, 1, "abc"), False),
        ("--replicas=3", _copies(1, 1, "a"), _copies(3, 1, "abc"), False),
        ("--retention=3 --wait", _copies(3, 1, "abc"), _copies(3, 1, "abc"), False),
    ],
)  # fmt: skip
def test_an_ok_needs_two_of_three_copies_when_they_are_there(
    master: Master, words: str, before: ClusterStatus, after: ClusterStatus, is_asked: bool
) -> None:
    live = [msgspec.structs.replace(NODES[0], node=name, host=name) for name in "abcd"]
    master.statuses = [msgspec.structs.replace(each, nodes=live) for each in (before, after)]
    assert cli.main(["topic", "update", "t", *words.split()]) == 0
    last = ("http://localhost:4161", "POST /topic/meta/update?topic=t&min_in_sync=2")
    assert len(master.asked) == 1 + is_asked and (master.asked[-1] == last) is is_asked


def test_waiting_ends(master: Master, capsys: pytest.CaptureFixture[str]) -> None:
    master.moves = [[Move("t", 0, ["a"], ["b"], 0, 12_000_000)]]
    assert cli.main(["cluster", "moves", "--wait", "--within=10ms"]) == 1
    assert "not within 0.01 s: nothing is being moved (1 copy is" in capsys.readouterr().err


def test_what_is_shown_without_the_store_is_called_not_known(
    master: Master, capsys: pytest.CaptureFixture[str]
) -> None:
    away = msgspec.structs.replace(WHOLE, master=None, store_away_since_s=1_795_967_800.0)
    master.statuses = [away]
    assert cli.main(["cluster", "status"]) == 1
    said = capsys.readouterr().out
    assert "master: not known" in said and "whole" not in said
    assert all(line.endswith("not known") for line in said.splitlines() if line.startswith(("a:4150", "t ")))
    assert "problem  cluster default: this nsqlookupd is without the coordination store since 2026-11-29" in said
    for flags in ([], ["--json"]):
        assert cli.main(["topic", "show", "t", *flags]) == 1
        assert "without the coordination store since" in capsys.readouterr().err


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_tables_fit_the_terminal(width: int) -> None:
    long = "a-topic-with-a-very-long-name-" * 4
    topic = msgspec.structs.replace(TOPIC, topic=long)
    status = msgspec.structs.replace(WHOLE, topics=[topic])
    pages = [
        cluster_tables.nodes_text(status, width),
        cluster_tables.topics_text(status, width),
        cluster_tables.topic_text(topic, status, width).partition("\n\n")[2],
        cluster_tables.moves_text([Move(long, 1, ["a"], ["b"], 1, 2)], {}, width),
    ]
    for page in pages:
        widest = max(map(len, page.splitlines()))
        assert widest <= width or width == 40, page
    assert ("…" in pages[1]) is (width < 200)


@pytest.mark.parametrize(
    "words",
    [
        "node drain a:4150",
        "node drain a:4150 --dry-run",
        "node drain a:4150 --undo",
        "node remove a:4151 --wait --within=1s",
        "topic move t 0 --from=c --to=a:4150",
        "topic move t 0 --from=a:4150 --to=c",
    ],
)
def test_an_address_of_several_nodes_is_refused(master: Master, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    same = [NODES[0], msgspec.structs.replace(NODES[1], host="a"), NODES[2]]
    master.statuses = [msgspec.structs.replace(WHOLE, nodes=same)]
    assert cli.main(words.split()) == 1
    assert ": a, b; name the id" in capsys.readouterr().err and not master.asked
    assert cli.main(["node", "drain", "b"]) == 0
    assert master.asked == [("http://localhost:4161", "POST /cluster/node/drain?node=b")]


@pytest.mark.parametrize("verb", ["drain", "remove"])
@pytest.mark.parametrize(
    ("after", "text"),
    [
        (WHOLE, "node a:4150 may have partitions again, and has 1 partition still: t/0"),
        (_without("a"), "node a:4150 may have partitions again, and has nothing"),
        (
            msgspec.structs.replace(_away(), drains=[]),
            "node a may have partitions again, and has 1 partition still: t/0",
        ),
    ],
)
def test_a_drain_that_is_undone_ends_the_wait(
    master: Master, verb: str, after: ClusterStatus, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    drained = msgspec.structs.replace(WHOLE, revision=6, drains=[Drain("a", left=1)])
    behind = msgspec.structs.replace(WHOLE, revision=5)
    master.statuses = [WHOLE, behind, drained, behind, msgspec.structs.replace(after, revision=7)]
    assert cli.main(["node", verb, "a", "--wait", "--within=1s"]) == 1
    said = capsys.readouterr()
    assert f"the drain was undone: {text}" in said.err.splitlines()[-1] and not said.out
    assert len(master.statuses) == 1, "one that is behind does not know of the drain"


def test_a_node_that_is_away_is_called_by_its_address(master: Master, capsys: pytest.CaptureFixture[str]) -> None:
    gone = ClusterNode("c", "10.0.0.3", 4150, 4151, holds=1, is_away=True)
    master.statuses = [msgspec.structs.replace(WHOLE, nodes=NODES[:2], away=[gone], drains=[Drain("c", left=1)])]
    for flags in (["--undo"], ["--undo", "--wait"], ["--dry-run"]):
        assert cli.main(["node", "drain", "10.0.0.3:4150", *flags]) == 0
        assert master.asked[-1][1].startswith("POST /cluster/node/drain?node=c&")
    assert cli.main(["node", "drain", "10.0.0.4:4150", "--undo", "--wait"]) == 0, "the nsqlookupd may know it"
    assert master.asked[-1][1] == "POST /cluster/node/drain?node=10.0.0.4%3A4150&undo=true"
