"""Durations, addresses and connection options: what is accepted, and what is said about the rest."""

from __future__ import annotations

import pickle
import re
from datetime import timedelta
from functools import partial

import pytest

import flintmq.sync
from flintmq.addresses import format_address, shown_url
from flintmq.client.options import (
    ConnectionOptions,
    addresses,
    http_addresses,
    milliseconds,
    seconds,
    split_address,
    system_env,
    tcp_addresses,
    whole,
)
from flintmq.errors import UNKNOWN, LocalProtocolError, OptionError


@pytest.mark.parametrize(("value", "expected"), [(1, 1.0), (0.25, 0.25), (timedelta(minutes=2), 120.0)])
def test_durations_are_seconds_or_timedeltas(value, expected):
    assert seconds(value, "delay") == expected


@pytest.mark.parametrize("value", [-1, "5s", None, True, float("nan"), 1e9, timedelta(days=-1)])
def test_what_is_no_duration(value):
    with pytest.raises(OptionError, match="delay"):
        seconds(value, "delay")


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, 0), (0.0001, 1), (0.3, 300), (0.0015, 2), (1.1, 1100), (2.675, 2675), (86400, 86_400_000)],
)
def test_milliseconds_round_up_but_not_by_binary_fractions(value, expected):
    assert milliseconds(value, "delay") == expected


def test_none_is_a_value_and_not_the_name_of_an_option():
    with pytest.raises(OptionError, match=r"^argument: delay=None is not allowed; seconds or a timedelta from 0 to"):
        seconds(None, "delay")  # type: ignore[arg-type]
    unknown = pickle.loads(pickle.dumps(OptionError("dalay", UNKNOWN, "did you mean delay?", "flag")))
    assert str(unknown) == "flag: unknown option dalay; did you mean delay?"


@pytest.mark.parametrize("value", [0, 11, 2.5, True, "3", None, float("nan"), float("inf")])
def test_what_is_no_count(value):
    with pytest.raises(OptionError, match="whole number from 1 to 10"):
        whole(value, "size", 1, 10)


# --- addresses ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:4150", ("127.0.0.1", 4150)),
        ("nsqd.example", ("nsqd.example", 4150)),
        ("[::1]:5000", ("::1", 5000)),
        ("[::1]", ("::1", 4150)),
    ],
)
def test_split_address(text, expected):
    assert split_address(text) == expected
    assert split_address(format_address(*expected)) == expected


@pytest.mark.parametrize(
    "text", ["", " ", ":4150", "host:", "host:0", "host:65536", "host:x", "::1", "http://h:1", "h:١"]
)
def test_what_is_no_address(text):
    with pytest.raises(OptionError, match="nsqd_tcp_addresses"):
        tcp_addresses(text)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("http://a:1", "nsqd_tcp_addresses='http://a:1' is not allowed; host:port without http://, such as"),
        ("a:1,b:2", 'nsqd_tcp_addresses=\'a:1,b:2\' is not allowed; several addresses are a list: ["a:1", "b:2"]'),
        ("a:1 b:2", "nsqd_tcp_addresses='a:1 b:2' is not allowed; an address has no blanks; several"),
        ("a b:4150", "nsqd_tcp_addresses='a b:4150' is not allowed; an address has no blanks"),
        ("::1", "nsqd_tcp_addresses='::1' is not allowed; an IPv6 address with a port is written [::1]:4150"),
        (["a:1", None], "nsqd_tcp_addresses=None is not allowed; an address, or a list of addresses"),
        (None, "nsqd_tcp_addresses=None is not allowed; an address, or a list of addresses"),
        (b"a:1", "nsqd_tcp_addresses=b'a:1' is not allowed; an address, or a list of addresses"),
        (4150, "nsqd_tcp_addresses=4150 is not allowed; an address, or a list of addresses"),
    ],
)
def test_what_is_wrong_with_an_address_is_said(given, said):
    with pytest.raises(OptionError, match=re.escape(said)):
        tcp_addresses(given)


def test_one_address_or_several_without_repetitions():
    assert tcp_addresses("a:1") == ("a:1",)
    assert tcp_addresses(["b:2", " a:1 ", "b:2"]) == ("b:2", "a:1")
    with pytest.raises(OptionError):
        tcp_addresses([4150])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:4161", "http://127.0.0.1:4161"),
        ("http://l:4161/", "http://l:4161"),
        ("https://l/nsq/lookup", "https://l/nsq"),
        ("[::1]:4161", "http://[::1]:4161"),
        ("http://ann:secret@l:4161", "http://ann:secret@l:4161"),
    ],
)
def test_http_addresses(text, expected):
    assert http_addresses(text) == (expected,)


@pytest.mark.parametrize(
    "text",
    [
        "ftp://l:1",
        "http://",
        "http:///",
        "http://:1",
        "http://l:x",
        "l:0",
        "l:99999",
        "::1",
        "http://[::1",
        "l:1?x",
        "l#",
    ],
)
def test_what_is_no_http_address(text):
    with pytest.raises(OptionError, match=r"nsqlookupd_http_addresses=.* http://host:port, such as http://127"):
        http_addresses(text)


@pytest.mark.parametrize(("text", "said"), [("a:1,b:2", "addresses are a list"), ("http://a b:1", "has no blanks")])
def test_what_is_wrong_with_an_http_address_is_said(text, said):
    with pytest.raises(OptionError, match=f"nsqlookupd_http_addresses={text!r} is not allowed; .*{said}"):
        http_addresses(text)


def test_the_number_of_nsqlookupd_is_bounded():
    with pytest.raises(OptionError, match="at most 64"):
        http_addresses([f"l{number}:1" for number in range(65)])


@pytest.mark.parametrize(("nsqd", "lookups"), [((), ()), ("a:1", "l:1")])
def test_either_nsqd_or_nsqlookupd(nsqd, lookups):
    with pytest.raises(OptionError, match="not both"):
        addresses(nsqd, lookups)


# --- what clients are made with ---


@pytest.mark.parametrize("module", [flintmq, flintmq.sync], ids=["asyncio", "sync"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"options": 5}, "options=5 is not allowed; a flintmq.ConnectionOptions, or None"),
        ({"options": {}}, "options={} is not allowed; a flintmq.ConnectionOptions, or None"),
        ({"env": 5}, "env=5 is not allowed; a flintmq.env.Env, or None"),
    ],
)
def test_what_no_client_can_be_made_with(module, given, said):
    for make in (module.Producer, partial(module.Consumer, "t", "c")):
        with pytest.raises(OptionError, match=re.escape(said)):
            make(nsqd_tcp_addresses="a:1", **given)


@pytest.mark.parametrize("module", [flintmq, flintmq.sync], ids=["asyncio", "sync"])
def test_names_that_are_no_text_are_named(module):
    for topic, channel, said in [
        (None, "c", "topic name None is not valid: it is text, not NoneType"),
        (b"t", "c", "topic name b't' is not valid: it is text, not bytes"),
        ("t", 5, "channel name 5 is not valid: it is text, not int"),
    ]:
        with pytest.raises(LocalProtocolError, match=said):
            module.Consumer(topic, channel, nsqd_tcp_addresses="a:1")
    with pytest.raises(OptionError, match="desired_tag=None is not allowed; text: at most 100 of"):
        module.Consumer("t", "c", nsqd_tcp_addresses="a:1", desired_tag=None)
    with pytest.raises(OptionError, match="producer_id=5 is not allowed; text, at most"):
        module.Producer("a:1", idempotent=True, producer_id=5)
    with pytest.raises(OptionError, match="producer_id='web' is not allowed; only together with idempotent=True"):
        module.Producer("a:1", producer_id="web")
    module.Producer("a:1", producer_id="")


@pytest.mark.parametrize("module", [flintmq, flintmq.sync], ids=["asyncio", "sync"])
def test_a_text_is_one_topic_to_trace(module):
    assert module.Producer("a:1", trace="orders").traced == ("orders",)
    assert module.Producer("a:1", trace=["u", "t"]).traced == ("t", "u")
    assert module.Producer("a:1").traced == ()
    for wrong in (None, b"orders", ["orders", None]):
        with pytest.raises(OptionError, match=r"trace=.* is not allowed; the name of a topic, or a list of such"):
            module.Producer("a:1", trace=wrong)


# --- connection options ---


def test_what_nsqd_is_told_by_default():
    request = ConnectionOptions().identify_request("app01.example.net", "1.2")
    assert request.client_id == "app01"
    assert request.hostname == "app01.example.net"
    assert request.user_agent == "flintmq/1.2"
    assert request.feature_negotiation
    assert request.heartbeat_interval == 30_000
    assert request.output_buffer_timeout == 25
    assert request.msg_timeout == 0
    assert not (request.tls_v1 or request.snappy or request.deflate)


def test_what_nsqd_is_told_when_asked_to():
    options = ConnectionOptions(
        client_id="me",
        user_agent="mine/1",
        heartbeat_interval=timedelta(seconds=2),
        msg_timeout=1.5,
        sample_rate=10,
        output_buffer_size=64,
        output_buffer_timeout=0,
    )
    request = options.identify_request("h", "1")
    assert (request.client_id, request.user_agent) == ("me", "mine/1")
    assert (request.heartbeat_interval, request.msg_timeout, request.sample_rate) == (2000, 1500, 10)
    assert (request.output_buffer_size, request.output_buffer_timeout) == (64, 0)
    unbuffered = ConnectionOptions(output_buffer_size=-1).identify_request("h", "1")
    assert unbuffered.output_buffer_size == -1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("heartbeat_interval", 0.5),
        ("heartbeat_interval", 61),
        ("msg_timeout", 0),
        ("sample_rate", 100),
        ("output_buffer_size", 63),
        ("output_buffer_size", -2),
        ("output_buffer_timeout", 0.01),
        ("connect_timeout", 0),
        ("frame_size_max", 5),
        ("client_id", 7),
    ],
)
def test_a_value_out_of_range_names_its_option(name, value):
    with pytest.raises(OptionError, match=name):
        ConnectionOptions(**{name: value})


def test_overrides_replace_what_is_not_none():
    options = ConnectionOptions(client_id="a", msg_timeout=5).with_overrides(client_id="b", msg_timeout=None)
    assert (options.client_id, options.msg_timeout) == ("b", 5)
    with pytest.raises(OptionError):
        options.with_overrides(sample_rate=-1)


def test_the_real_world_has_a_name():
    assert system_env().hostname


def test_a_url_is_shown_without_its_password():
    assert shown_url("http://a:4161") == "http://a:4161"
    assert shown_url("https://user:pass@word@a:4161") == "https://***@a:4161"
    assert shown_url("user:pass@a:4161") == "***@a:4161"
    with pytest.raises(OptionError) as refused:
        http_addresses("http://user:pa/ss@a:4161")
    assert "ss@" not in str(refused.value) and "pa/" not in repr(refused.value)
