"""What the admin clients ask and how they read answers, without a daemon: both flavours have every request there is."""

from __future__ import annotations

import inspect
import re
from datetime import UTC, datetime, timedelta, timezone
from types import ModuleType
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest

from flintmq.client.admin import clients, cluster, nsqd, nsqlookupd
from flintmq.client.admin.question import TEXT_SIZE_MAX, HttpRefused, Question, base_url, fields, get, nothing, post
from flintmq.client.admin.results import PeekedMessage, StoredMessage
from flintmq.client.blocking import admin as blocking
from flintmq.client.core.start import PART_COUNT_MAX, PROMPT_S, Beginning, Start, StartAt, start_text
from flintmq.client.options import ConnectionOptions
from flintmq.errors import OptionError, RemoteProtocolError
from flintmq.net.http_auth import Table
from flintmq.nsqd.api.routes import PERMISSIONS as NSQD_TABLE
from flintmq.nsqlookupd.http_permissions import CLUSTER_TABLE
from flintmq.nsqlookupd.http_permissions import TABLE as NSQLOOKUPD_TABLE

PUBLISHING = {"/pub", "/put", "/mpub", "/mput", "/mdpub", "/pubtrace", "/pub_ext"}
"""What ``Producer`` is for."""

SAMPLES = {
    "topic": "t", "channel": "c", "ordered": True, "start": "end", "message_id": 7, "name": "log_level",
    "value": "debug", "node": "a:4151", "ready": 5, "level": "debug", "partition": 0, "partitions": 4,
    "source": "a:4150",
    "target": "b:4150", "enabled": True, "kind": "all",
}  # fmt: skip


def makers(module: ModuleType) -> dict[str, Any]:
    """Every function that makes a question, by name."""
    found = {}
    for name, function in inspect.getmembers(module, inspect.isfunction):
        returned = str(inspect.signature(function).return_annotation)
        if function.__module__ == module.__name__ and returned.startswith("Question["):
            found[name] = function
    return found


def sample(function: Any) -> Question[Any]:
    """The question with no more arguments than it needs."""
    needed = [each.name for each in inspect.signature(function).parameters.values() if each.default is each.empty]
    question = function(**{name: SAMPLES[name] for name in needed} | sample_extra(function))
    assert isinstance(question, Question)
    return question


def sample_extra(function: Any) -> dict[str, object]:
    if function in (nsqd.change_topic_settings, nsqd.change_channel_settings):
        return {"max_attempts": 3}
    if function in (nsqd.change_topic, nsqlookupd.change_topic):
        return {"retention_days": 3}
    return {"message_id": 7} if function in (nsqd.get_message, nsqd.find_trace) else {}


def asked_by(module: ModuleType) -> set[tuple[str, str]]:
    questions = map(sample, makers(module).values())
    return {(question.method, urlsplit(question.target).path) for question in questions}


def test_every_request_to_a_cluster_has_a_method():
    assert asked_by(cluster) >= set(CLUSTER_TABLE)


@pytest.mark.parametrize(
    ("modules", "table", "prefix"), [([nsqd], NSQD_TABLE, "Nsqd"), ([nsqlookupd, cluster], NSQLOOKUPD_TABLE, "Lookupd")]
)
def test_every_request_has_a_method_in_both_flavours(modules: list[ModuleType], table: Table, prefix: str):
    questions = {name: sample(each) for module in modules for name, each in makers(module).items()}
    wanted = {(method, path.replace("{opt}", "log_level")) for method, path in table if path not in PUBLISHING}
    wanted -= {("PUT", "/topic/create")}  # the same as POST
    assert asked_by(modules[0]) == wanted
    for flavour in (clients, blocking):
        kind = getattr(flavour, f"{prefix}Admin")
        methods = {name: each for name, each in vars(kind).items() if inspect.isfunction(each)}
        assert methods.keys() == questions.keys()
        for name, method in methods.items():
            assert method.__wrapped__ in [getattr(module, name, None) for module in modules]  # type: ignore[attr-defined]
            assert inspect.getdoc(method), name
            assert inspect.iscoroutinefunction(method) == (flavour is clients)
            bound = inspect.signature(getattr(kind("a"), name))
            assert bound.parameters == inspect.signature(method.__wrapped__).parameters  # type: ignore[attr-defined]


def query_of(question: Question[Any]) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlsplit(question.target).query).items()}


def test_arguments_become_a_query():
    question = post("/x", nothing, b"body", topic="a b&c#ephemeral", one=True, two=False, left_out=None, number=3)
    assert question == Question("POST", "/x?topic=a+b%26c%23ephemeral&one=true&two=false&number=3", nothing, b"body")
    assert get("/x", nothing, topic=None) == Question("GET", "/x", nothing)


def test_what_a_topic_is_created_with():
    assert query_of(nsqd.create_topic("t")) == {"topic": "t"}
    assert query_of(nsqd.create_topic("t", headers=True)) == {"topic": "t", "extend": "true"}
    assert query_of(nsqlookupd.create_topic("t", partitions=3, ordered=True, syncdisk=1, auto_channels=False)) == {
        "topic": "t", "partition_num": "3", "orderedmulti": "true", "syncdisk": "1",
        "disable_channel_auto_create": "true",
    }  # fmt: skip
    assert query_of(nsqlookupd.delete_topic("t", everywhere=True)) == {"topic": "t", "partition": "**"}
    assert query_of(nsqlookupd.delete_topic("t")) == {"topic": "t"}


@pytest.mark.parametrize(
    ("message_id", "text"),
    [
        (42, "42"),
        ("000000000000002a", "000000000000002a"),
        (b"000000000000002a", "000000000000002a"),
        (bytes.fromhex("0004000000000001000000000000007b"), "0004000000000001000000000000007b"),
        (b"\x00" * 7 + b"1" + b"0" * 8, "00" * 7 + "31" + "30" * 8),
    ],
)
def test_ids(message_id: nsqd.MessageId, text: str):
    assert nsqd.message_id_text(message_id) == text


def test_arguments_that_cannot_be():
    with pytest.raises(OptionError, match="16 bytes"):
        nsqd.finish_message("t", "c", b"short")
    for wrong in ({}, {"message_id": 1, "count": 1}, {"offset": 0, "count": 1}):
        with pytest.raises(OptionError, match="one of message_id, offset and count"):
            nsqd.get_message("t", **wrong)
    for name in ("", "a/b", "../x", "a?b", "ä"):
        with pytest.raises(OptionError, match="the name of an option"):
            nsqd.get_config(name)
    with pytest.raises(OptionError, match="timeout"):
        nsqd.drain(-1)
    for wrong in ({}, {"message_id": 1, "trace_id": 1}):
        with pytest.raises(OptionError, match="one of message_id and trace_id"):
            nsqd.find_trace("t", **wrong)
    with pytest.raises(OptionError, match="not set in the same call"):
        nsqd.change_channel_settings("t", "c", ttl=5, inherit="ttl_ms")
    with pytest.raises(OptionError, match="ttl"):
        nsqd.change_channel_settings("t", "c", ttl=-5)


@pytest.mark.parametrize(
    ("ask", "names"),
    [
        (nsqd.change_topic, "retention_days, syncdisk, auto_channels and headers"),
        (nsqlookupd.change_topic, "retention_days, syncdisk, auto_channels, headers, replicas and min_in_sync"),
        (
            nsqd.change_topic_settings,
            "max_attempts, dead_letter_topic, ttl, max_messages, max_bytes, overflow and inherit",
        ),
    ],
)
def test_a_change_of_nothing_says_all_that_can_be_changed(ask, names):
    with pytest.raises(OptionError) as refused:
        ask("t")
    assert str(refused.value) == f"argument: nothing is to be changed; give at least one of {names}"
    arguments = {*inspect.signature(ask).parameters} - {"topic", "dry_run"}
    assert {*re.split(", | and ", names)} == arguments


@pytest.mark.parametrize(
    "kind", [each for module in (clients, blocking) for each in (module.NsqdAdmin, module.LookupdAdmin)]
)
def test_what_no_admin_can_be_made_with(kind):
    with pytest.raises(OptionError, match="address=None is not allowed; the HTTP address of one nsq"):
        kind(None)
    with pytest.raises(OptionError, match="options=5 is not allowed; a flintmq"):
        kind("a:1", options=5)


def test_values():
    assert nsqd.set_config("log_level", "debug").body == b"debug"
    assert nsqd.set_config("nsqlookupd_tcp_addresses", ["a:1"]).body == b'["a:1"]'
    assert query_of(nsqd.drain(timedelta(seconds=1.5))) == {"timeout": "1500ms"}
    assert query_of(nsqd.drain()) == {}
    assert nsqd.set_offset("t", "c", "end").body == b"special:-1"
    settings = nsqd.change_topic_settings("t", ttl=timedelta(days=1), max_bytes=0, inherit=["overflow", "trace"])
    assert settings.body == b'{"ttl_ms":86400000,"max_bytes":0,"overflow":null,"trace":null}'
    assert (
        nsqd.change_channel_settings("t", "c", inherit="ttl_ms,max_bytes").body == b'{"ttl_ms":null,"max_bytes":null}'
    )
    assert query_of(nsqd.enable_trace("t", only_traced=True)) == {"topic": "t", "only": "traced"}
    assert query_of(nsqd.find_trace("t", trace_id=5)) == {"topic": "t", "traceid": "5", "limit": "100"}


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (404, b'{"message":"TOPIC_NOT_FOUND"}', "404 TOPIC_NOT_FOUND"),
        (404, b'{"message":"NOT_FOUND"}', "404 NOT_FOUND (does this daemon know the request? NSQ's own has fewer)"),
        (
            401,
            b"",
            "401 (show a token that it knows (token=, --token) or a certificate (options=, --tls-cert))",
        ),
        (500, b"NOK - disk \xff\n", "500 NOK - disk \ufffd"),
        (400, b'{"message":7}', '400 {"message":7}'),
        (301, b"", "301"),
    ],
)
def test_refusals(status: int, body: bytes, text: str):
    with pytest.raises(HttpRefused) as caught:
        get("/x", nothing, topic="t").answer("http://a:1", status, body)
    assert str(caught.value) == f"http://a:1 refused GET /x?topic=t: {text}"
    assert caught.value.status == status


def test_a_refusal_is_bounded():
    with pytest.raises(HttpRefused) as caught:
        get("/x", nothing).answer("http://a:1", 500, b"x" * 10_000)
    assert len(caught.value.text) == TEXT_SIZE_MAX


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b'"text"'])
def test_answers_that_cannot_be_read(body: bytes):
    with pytest.raises(RemoteProtocolError, match="the answer of http://a:1 to GET /x"):
        get("/x", fields).answer("http://a:1", 200, body)
    with pytest.raises(RemoteProtocolError, match="GET /listlookup"):
        nsqlookupd.members().answer("http://a:1", 200, body)


def test_messages_are_read():
    row = {
        "id": 5, "trace_id": 0, "body": "\ufffd", "body_base64": "/w==", "timestamp": 17, "attempts": 1, "offset": 3,
        "queue_cnt_index": 5, "ext": '{"color":"red"}', "message_id": "0000000000000005", "partition": 0,
        "body_size": 1, "due": 9, "due_in_ms": 2, "of a later release": [],
    }  # fmt: skip
    found = msgspec.json.decode(msgspec.json.encode(row), type=PeekedMessage)
    assert (found.body, found.text, found.headers, found.due_ns, found.timestamp_ns) == (
        b"\xff", "\ufffd", {"color": "red"}, 9, 17,
    )  # fmt: skip
    row = {name: row[name] for name in ("id", "body", "timestamp", "message_id")}
    bare = msgspec.json.decode(msgspec.json.encode(row | {"body": "ä"}), type=StoredMessage)
    assert (bare.body, bare.headers) == ("ä".encode(), {})


# -- addresses and starts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("a", "http://a:4151"),
        ("127.0.0.1:80", "http://127.0.0.1:80"),
        ("https://a.example", "https://a.example:4151"),
        ("http://a:1/", "http://a:1"),
        ("[::1]", "http://[::1]:4151"),
        ("[::1]:5", "http://[::1]:5"),
    ],
)
def test_addresses(address: str, url: str):
    assert base_url(address, "nsqd") == url


@pytest.mark.parametrize("address", ["", "http://", "ftp://a", "::1", "a/b", "a b", "user@a", "a?x", "ä"])
def test_addresses_that_are_none(address: str):
    with pytest.raises(OptionError, match=r"the HTTP address of one nsqlookupd, such as 127\.0\.0\.1:4161"):
        base_url(address, "nsqlookupd")


def test_a_token_is_in_no_text():
    for admin in (clients.NsqdAdmin("a", token="s3cret"), blocking.NsqdAdmin("a", token="s3cret")):
        assert repr(admin) == "<NsqdAdmin of http://a:4151>"
    with pytest.raises(OptionError) as caught:
        blocking.LookupdAdmin("a", token="s3cret\n")
    assert "s3cret" not in str(caught.value)
    with pytest.raises(OptionError, match="tls_ca_file"):
        clients.LookupdAdmin("https://a", options=ConnectionOptions(tls_ca_file="no/such/file"))


@pytest.mark.parametrize(
    ("start", "text"),
    [
        ("beginning", "timestamp:0"),
        ("end", "special:-1"),
        (Start.offset(0), "virtual_queue:0"),
        (Start.count(17), "msgcount:17"),
        (datetime(2023, 11, 14, 22, 13, 20, 999_999, UTC), "timestamp:1700000000"),
        (datetime(2023, 11, 14, 23, 13, 20, tzinfo=timezone(timedelta(hours=1))), "timestamp:1700000000"),
        (timedelta(seconds=90.5), "timestamp:909"),
        (timedelta(0), "timestamp:1000"),
        (timedelta(days=365), "timestamp:0"),
        (datetime(1960, 1, 1, tzinfo=UTC), "timestamp:0"),
    ],
)
def test_starts(start: StartAt, text: str):
    assert start_text(start, 1000.25) == text


@pytest.mark.parametrize("start", ["now", 5, None, datetime(2023, 1, 1), timedelta(-1), b"end", ""])
def test_starts_that_are_none(start: Any):
    with pytest.raises(OptionError, match="start"):
        start_text(start, 1000.0)


def test_a_part_begins_once():
    beginning = Beginning(timedelta(seconds=100), 1000.0)
    assert beginning.word("a:1", None, 1000.0) == "timestamp:900"
    assert beginning.word("a:1", 3, 9999.0) == "timestamp:900", "so long ago when it was made"
    assert beginning.note("a:1", None) is True
    assert beginning.note("a:1", None) is False
    assert beginning.word("a:1", None, 1000.0) is None
    assert beginning.word("b:1", None, 1000.0) == "timestamp:900"
    assert beginning.note("a:1", 3) is True
    assert beginning.word("b:1", 3, 1000.0) is None, "a partition that has moved"


def test_the_end_is_where_it_was_at_the_start():
    beginning = Beginning("end", 1000.7)
    assert beginning.word("a:1", None, 1001.0) == "special:-1"
    assert beginning.word("late:1", None, 1000.7 + PROMPT_S + 1) == "timestamp:1000"


def test_what_has_begun_is_bounded():
    beginning = Beginning("beginning", 0.0)
    for number in range(PART_COUNT_MAX + 2):
        assert beginning.note(f"{number}:1", None)
    assert beginning.word("0:1", None, 0.0) == "timestamp:0"
    assert beginning.word(f"{PART_COUNT_MAX}:1", None, 0.0) is None


@pytest.mark.parametrize("value", [-1, 1.5, True, "3", 10**18])
def test_numbers_that_are_none(value: Any):
    for make in (Start.offset, Start.count):
        with pytest.raises(OptionError):
            make(value)
