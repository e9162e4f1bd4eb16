"""Changes by the commands for people, where not everybody does them, and where they must not be done."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any
from urllib.parse import urlencode

import pytest
from tests.integration.daemons import Daemons, Nsqd, Nsqlookupd, req, wait_until
from tests.integration.flavours import address_of
from tests.integration.test_shell import run, well

DEAD = "127.0.0.1:1"
ID = "0000000000000001"

_topics = (f"changed{number}" for number in count())


@pytest.fixture
def topic() -> str:
    return next(_topics)


@pytest.fixture(scope="module")
def second_nsqd(shared: Daemons) -> Nsqd:
    return shared.nsqd("--durability=os")


def http_of(daemon: Nsqd | Nsqlookupd) -> str:
    return "{}:{}".format(*daemon.http)


def at(*nsqds: Nsqd | None) -> list[str]:
    """Flags that name nsqds; None: one that is not there."""
    words = []
    for each in nsqds:
        tcp, http = (DEAD, DEAD) if each is None else (address_of(each), http_of(each))
        words += ["--nsqd", tcp, "--nsqd-http", http]
    return words


def channels_of(nsqd: Nsqd, topic: str) -> dict[str, Any]:
    return {row["channel_name"]: row for row in nsqd.stats(topic)["channels"]}


def has_topic(nsqd: Nsqd, topic: str) -> bool:
    return topic in [row["topic_name"] for row in nsqd.get("/stats?format=json")["topics"]]


# --- changes that not everybody does


def test_a_change_that_one_of_two_nsqds_does_not_do_is_no_success(single_nsqd: Nsqd, topic: str):
    """The other one does it, and the answer says no more than that."""
    t, name = topic, f"channel c of topic {topic}"

    def is_so(key: str, value: object) -> Callable[[], bool]:
        return lambda: channels_of(single_nsqd, t)["c"].get(key, False) == value

    def is_paused() -> bool:
        return bool(single_nsqd.stats(t)["paused"])

    steps: Sequence[tuple[str, str, Callable[[], bool]]] = (
        (f"topic create {t}", f"topic {t} is created", lambda: has_topic(single_nsqd, t)),
        (f"topic pause {t}", f"topic {t} is paused", is_paused),
        (f"topic unpause {t}", f"topic {t} is delivered again", lambda: not is_paused()),
        (f"topic empty {t}", f"topic {t} has nothing that waits for its channels", lambda: has_topic(single_nsqd, t)),
        (f"channel create {t} c", f"{name} is there", is_so("depth", 0)),
        (f"channel pause {t} c", f"{name} is paused", is_so("paused", True)),
        (f"channel unpause {t} c", f"{name} is delivered again", is_so("paused", False)),
        (f"channel empty {t} c --yes", f"{name} is empty", is_so("depth", 0)),
        (f"channel empty {t} c --deferred", f"{name} has nothing deferred", is_so("depth", 1)),
        (f"channel skip {t} c --yes", f"{name} is skipped", is_so("skipped", True)),
        (f"channel unskip {t} c", f"{name} is delivered again", is_so("skipped", False)),
        (f"channel delete {t} c --yes", f"{name} is deleted", lambda: not channels_of(single_nsqd, t)),
        (f"topic delete {t} --yes", f"topic {t} is deleted", lambda: not has_topic(single_nsqd, t)),
    )
    for words, text, is_done in steps:
        if words.startswith("channel empty"):
            single_nsqd.publish(t, b"x")
        done = run(single_nsqd, *words.split(), *at(single_nsqd, None))
        where = " on 1 of 2 nsqd"
        tail = ": flintmq channel unskip ends that" if "is skipped" in text else ""
        assert (done.returncode, done.stdout) == (1, f"{text}{where}{tail}\n"), (words, done.stderr)
        (line,) = done.stderr.splitlines()
        assert f"connection to http://{DEAD} failed" in line, words
        assert is_done(), words


def test_a_change_says_in_json_who_has_not_done_it(single_nsqd: Nsqd, topic: str):
    for words in (("topic", "create", topic), ("channel", "create", topic, "c"), ("channel", "pause", topic, "c")):
        done = run(None, *words, "--json", *at(single_nsqd, None))
        found = json.loads(done.stdout)
        assert (done.returncode, found["done"], found["failed_nodes"]) == (1, words[1], [f"http://{DEAD}"])
        assert found.get("nodes", [f"http://{http_of(single_nsqd)}"]) == [f"http://{http_of(single_nsqd)}"]
    found = json.loads(well(None, "channel", "unpause", topic, "c", "--json", *at(single_nsqd)))
    assert (found["done"], found["failed_nodes"]) == ("unpause", [])


def test_where_nobody_does_a_change_all_are_named(topic: str):
    done = run(None, "channel", "pause", topic, "c", "--nsqd-http", f"{DEAD},127.0.0.1:2")
    assert (done.returncode, done.stdout) == (1, "")
    first, second = done.stderr.splitlines()
    assert "connection to http://127.0.0.1:2 failed" in first and f"connection to http://{DEAD} failed" in second


def test_nsqd_that_only_an_absent_nsqlookupd_knows_are_missing(shared: Daemons, topic: str):
    """A change is done on those that are known, and is no success: there may be more."""
    lookups = [shared.nsqlookupd(), shared.nsqlookupd()]
    flags = "--lookupd-tcp-address={}:{}"
    nsqds = [
        shared.nsqd("--durability=os", "--broadcast-address=127.0.0.1", flags.format(*each.tcp)) for each in lookups
    ]
    for nsqd, lookup in zip(nsqds, lookups, strict=True):
        nsqd.post(f"/topic/create?topic={topic}")
        nsqd.post(f"/channel/create?topic={topic}&channel=c")
        wait_until(partial(lookup.channels, topic), "it is registered")
    where = [word for each in lookups for word in ("--lookupd", http_of(each))]
    assert well(None, "channel", "pause", topic, "c", *where) == f"channel c of topic {topic} is paused\n"
    well(None, "channel", "unpause", topic, "c", *where)
    lookups[1].stop()

    silent = "; 1 of 2 nsqlookupd did not answer, so nsqd that no other knows were not asked"
    for words, text in (
        (("channel", "pause", topic, "c"), f"channel c of topic {topic} is paused{silent}"),
        (("topic", "create", f"{topic}.new"), f"topic {topic}.new is created on 1 of 2 nsqlookupd"),
        (
            ("topic", "delete", topic, "--yes"),
            f"topic {topic} is deleted{silent}; it is forgotten on 1 of 2 nsqlookupd",
        ),
    ):
        done = run(None, *words, *where)
        assert (done.returncode, done.stdout) == (1, f"{text}\n"), done.stderr
        assert done.stderr.count("\n") == 1 and f"connection to http://{http_of(lookups[1])} failed" in done.stderr
    assert not has_topic(nsqds[0], topic) and not channels_of(nsqds[1], topic)["c"]["paused"]
    done = run(None, "node", "list", "--json", *where)
    (row,) = map(json.loads, done.stdout.splitlines())
    assert (done.returncode, row["node"], done.stderr.count("\n")) == (1, http_of(nsqds[0]), 1)


# --- dead letters


def die(nsqd: Nsqd, topic: str, *messages: tuple[bytes, dict[str, str]]) -> str:
    """Have messages of a topic with headers be given up; returns the topic of their letters."""
    nsqd.post(f"/topic/create?topic={topic}&extend=true")
    nsqd.post(f"/topic/settings?topic={topic}", b'{"max_attempts": 1}')
    for body, headers in messages:
        nsqd.post("/pub_ext?" + urlencode({"topic": topic, "ext": json.dumps(headers)}), body)
    with nsqd.connect() as consumer:
        consumer.subscribe(topic, "billing", 10)
        for message in consumer.messages(len(messages)):
            consumer.send(req(message.id, 0))
        wait_until(lambda: nsqd.stats(topic, "billing").get("dead_letter_count") == len(messages), "they are given up")
    return f"{topic}.dead"


def stored(nsqd: Nsqd, topic: str) -> list[tuple[str, dict[str, str]]]:
    """Bodies and headers of all messages of a topic, by their bodies."""
    lines = map(json.loads, well(nsqd, "tail", topic, "--no-follow", "--headers", "--json").splitlines())
    return sorted(((line["body"], line.get("headers") or {}) for line in lines), key=lambda each: each[0])


@pytest.mark.parametrize("which", ["--all", ID])
@pytest.mark.parametrize("through", ["nsqd", "nsqlookupd"])
def test_a_letter_that_is_requeued_has_all_headers_of_its_message(
    shared: Daemons, single_nsqd: Nsqd, topic: str, which: str, through: str
):
    nsqd, where = single_nsqd, at(single_nsqd)
    if through == "nsqlookupd":
        lookup = shared.nsqlookupd()
        nsqd = shared.nsqd("--durability=os", "--lookupd-tcp-address={}:{}".format(*lookup.tcp))
        where = ["--lookupd", http_of(lookup)]
    headers = {"##client_dispatch_tag": "blue", "##trace_id": "7", "##mine": "too", "user": "ann"}
    dead = die(nsqd, topic, (b"tagged", headers))
    if through == "nsqlookupd":
        wait_until(lambda: lookup.producers(dead) and lookup.producers(topic), "they are registered")
    well(None, "deadletters", "requeue", dead, which, "--yes", *where)
    assert stored(nsqd, topic) == [("tagged", headers)] * 2
    assert nsqd.unfinished(dead, "deadletters") == 0


@pytest.mark.parametrize("first", [b"bare", b"headed"])
def test_every_letter_keeps_its_headers_whatever_the_first_one_has(single_nsqd: Nsqd, topic: str, first: bytes):
    dead, to = f"{topic}.dead", f"{topic}.to"
    for name in (dead, to):
        single_nsqd.post(f"/topic/create?topic={name}&extend=true")
    for number in range(4):
        is_headed = (number % 2 == 0) == (first == b"headed")
        more = ("--header", f"user={number}") if is_headed else ()
        well(single_nsqd, "pub", dead, f"letter {number}", *more)
    before = stored(single_nsqd, dead)
    assert [bool(headers) for _, headers in before] == [
        (number % 2 == 0) == (first == b"headed") for number in range(4)
    ]
    done = well(single_nsqd, "deadletters", "requeue", dead, "--all", "--to", to, "--yes")
    assert done == f"4 dead letters of {dead} requeued\n"
    assert stored(single_nsqd, to) == before


def test_letters_of_two_nsqds_one_of_which_has_none_with_headers(single_nsqd: Nsqd, second_nsqd: Nsqd, topic: str):
    """Each is consumed as its topic wants it; an nsqd that has no such topic gets none."""
    dead, to = f"{topic}.dead", f"{topic}.to"
    for nsqd, more in ((single_nsqd, ""), (second_nsqd, "&extend=true")):
        nsqd.post(f"/topic/create?topic={dead}{more}")
        nsqd.post(f"/topic/create?topic={to}&extend=true")
    well(single_nsqd, "pub", dead, "a", "b")
    well(second_nsqd, "pub", dead, "c", "d", "--header", "user=ann")
    done = well(None, "deadletters", "requeue", dead, "--all", "--to", to, "--yes", *at(single_nsqd, second_nsqd))
    assert done == f"4 dead letters of {dead} requeued\n"
    ann = {"user": "ann"}
    found = stored(single_nsqd, to) + stored(second_nsqd, to)
    assert sorted(found, key=lambda each: each[0]) == [("a", {}), ("b", {}), ("c", ann), ("d", ann)]
    well(single_nsqd, "pub", f"{topic}.one.dead", "x")
    words = ("deadletters", "requeue", f"{topic}.one.dead", "--all", "--to", to, "--yes")
    well(None, *words, *at(single_nsqd, second_nsqd))
    assert not has_topic(second_nsqd, f"{topic}.one.dead")


@pytest.mark.parametrize(
    ("words", "code", "phrase"),
    [
        ("requeue {} --all", 1, f"letter {ID} does not say where it comes from: name a topic with --to"),
        ("requeue {} --all --yes", 1, f"letter {ID} does not say where it comes from: name a topic with --to"),
        (f"requeue {{}} {ID}", 1, f"letter {ID} does not say where it comes from: name a topic with --to"),
        ("requeue {} --all --to other", 2, "3 dead letters of {} go to other, and so to all channels there: say --yes"),
        ("requeue {} 4711", 1, "topic {} has no message 4711"),
        ("drop {} --all", 1, f"message {ID} of {{}} is no dead letter: it does not say where it comes from"),
        ("drop {} --all --yes", 1, f"message {ID} of {{}} is no dead letter: it does not say where it comes from"),
        (f"drop {{}} {ID} --yes", 1, f"message {ID} of {{}} is no dead letter: it does not say where it comes from"),
    ],
)
def test_messages_that_are_no_dead_letters_are_left_alone(
    single_nsqd: Nsqd, topic: str, words: str, code: int, phrase: str
):
    """A channel that nobody consumes would keep all that is published for ever."""
    well(single_nsqd, "pub", topic, "a", "b", "c")
    done = run(single_nsqd, "deadletters", *words.format(topic).split())
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert done.stderr.count("\n") == 1 and phrase.format(topic) in done.stderr
    assert channels_of(single_nsqd, topic) == {} and single_nsqd.stats(topic)["depth"] == 3


def test_dead_letters_get_their_channel_when_it_is_confirmed(single_nsqd: Nsqd, topic: str):
    dead = die(single_nsqd, topic, (b"one", {}), (b"two", {}), (b"three", {}))
    for words, what in (
        (("requeue", dead, "--all"), f"3 dead letters of {dead} go to the topics they come from"),
        (("drop", dead, "--all"), f"3 dead letters of {dead} will be dropped for good"),
        (("drop", dead, ID), f"1 dead letter of {dead} will be dropped for good"),
    ):
        done = run(single_nsqd, "deadletters", *words)
        assert (done.returncode, done.stdout) == (2, "") and what in done.stderr and "say --yes" in done.stderr
        assert channels_of(single_nsqd, dead) == {}
    assert well(single_nsqd, "deadletters", "drop", dead, ID, "--yes") == f"1 dead letter of {dead} dropped\n"
    assert single_nsqd.unfinished(dead, "deadletters") == 2
    assert well(single_nsqd, "deadletters", "drop", dead, "--all", "--yes") == f"2 dead letters of {dead} dropped\n"
    assert single_nsqd.unfinished(dead, "deadletters") == 0
    assert well(single_nsqd, "deadletters", "drop", dead, "--all", "--yes") == f"0 dead letters of {dead} dropped\n"


def test_a_topic_under_another_name_is_one_of_dead_letters_by_what_its_messages_say(single_nsqd: Nsqd, topic: str):
    """As those of clients are, of which nsqd knows nothing."""
    single_nsqd.post(f"/topic/create?topic={topic}&extend=true")
    well(single_nsqd, "pub", topic, "x", "--header", "##dead_letter_topic=orders")
    assert well(single_nsqd, "deadletters", "drop", topic, "--all", "--yes") == f"1 dead letter of {topic} dropped\n"


def test_letters_that_have_the_same_id_on_two_nsqds_are_both_requeued(single_nsqd: Nsqd, second_nsqd: Nsqd, topic: str):
    """Each nsqd counts its messages for itself; none is finished without its copy."""
    nsqds = (single_nsqd, second_nsqd)
    for nsqd, body in zip(nsqds, (b"first", b"second"), strict=True):
        dead = die(nsqd, topic, (body, {}))
    where = at(*nsqds)
    shown = list(map(json.loads, well(None, "deadletters", "show", dead, ID, "--json", *where).splitlines()))
    assert [line["body"] for line in shown] == ["first", "second"]
    done = well(None, "deadletters", "requeue", dead, ID, *where)
    assert done == f"letter {ID} is requeued to {topic}\n" * 2
    copies = [body for nsqd in nsqds for body, _ in stored(nsqd, topic)]
    assert sorted(copies) == ["first", "first", "second", "second"]
    assert [nsqd.unfinished(dead, "deadletters") for nsqd in nsqds] == [0, 0]


def test_letters_on_an_nsqd_that_was_away_the_last_time_are_not_forgotten(
    single_nsqd: Nsqd, second_nsqd: Nsqd, topic: str
):
    nsqds = (single_nsqd, second_nsqd)
    for nsqd in nsqds:
        dead = die(nsqd, topic, (b"x", {}), (b"y", {}))
    done = run(None, "deadletters", "drop", dead, "--all", "--yes", *at(single_nsqd, None))
    assert (done.returncode, done.stdout) == (1, f"2 dead letters of {dead} dropped on 1 of 2 nsqd\n")
    assert f"connection to http://{DEAD} failed" in done.stderr
    assert single_nsqd.unfinished(dead, "deadletters") == 0 and channels_of(second_nsqd, dead) == {}

    done = run(None, "deadletters", "requeue", dead, "--all", *at(*nsqds))
    assert done.returncode == 2 and f"all that are stored on nsqd {http_of(second_nsqd)} go to" in done.stderr
    assert channels_of(second_nsqd, dead) == {}
    done = run(None, "deadletters", "requeue", dead, "--all", "--yes", *at(*nsqds))
    assert (done.returncode, done.stdout) == (0, f"2 dead letters of {dead} requeued\n"), done.stderr
    assert second_nsqd.unfinished(dead, "deadletters") == 0


def test_letters_are_requeued_where_they_can_be_and_an_absent_nsqd_is_told(single_nsqd: Nsqd, topic: str):
    dead = die(single_nsqd, topic, (b"x", {}), (b"y", {}))
    done = run(None, "deadletters", "requeue", dead, ID, "--json", *at(single_nsqd, None))
    assert done.returncode == 1 and f"connection to http://{DEAD} failed" in done.stderr
    assert json.loads(done.stdout) == {"id": ID, "topic": dead, "to": topic, "failed_nodes": [f"http://{DEAD}"]}
    done = run(None, "deadletters", "requeue", dead, "--all", "--yes", *at(single_nsqd, None))
    assert (done.returncode, done.stdout) == (1, f"1 dead letter of {dead} requeued\n")
    assert f"connection to http://{DEAD} failed" in done.stderr
    assert single_nsqd.unfinished(dead, "deadletters") == 0 and len(stored(single_nsqd, topic)) == 4


# --- top


@pytest.mark.parametrize("more", [["--once"], ["--json", "--count", "1"], []])
def test_top_of_a_topic_that_is_not_there_says_so(single_nsqd: Nsqd, topic: str, more: list[str]):
    done = run(single_nsqd, "top", topic, "-i", "10ms", *more)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"flintmq top: there is no topic {topic} on nsqd {http_of(single_nsqd)}\n"
