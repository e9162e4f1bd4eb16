"""Arguments of requests: what is read, and what is said of what cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flintmq.net.http_messages import HttpError, Request
from flintmq.nsqd.api import arguments
from flintmq.wire.server import NOT_A_NUMBER


def request(query: str) -> Request:
    return Request(b"GET", b"/", query.encode(), {}, "10.0.0.1:5")


def refusal(read: Callable[[], Any]) -> str:
    with pytest.raises(HttpError) as raised:
        read()
    return f"{raised.value.status} {raised.value.message}"


@pytest.mark.parametrize(
    ("query", "said"),
    [("", "400 MISSING_ARG_TOPIC"), ("topic=", "400 INVALID_ARG_TOPIC"), ("topic=a%20b", "400 INVALID_ARG_TOPIC")],
)
def test_no_topic(query: str, said: str):
    assert refusal(lambda: arguments.topic_name(request(query))) == said


def test_names():
    both = request("topic=t%23ephemeral&channel=c")
    assert (arguments.topic_name(both), arguments.channel_name(both)) == ("t#ephemeral", "c")
    assert arguments.any_topic_name(request("topic=a%20b")) == "a b"
    assert refusal(lambda: arguments.topic_name(request("topic=a%20b"), "INVALID_TOPIC")) == "400 INVALID_TOPIC"
    assert refusal(lambda: arguments.channel_name(request("topic=t"))) == "400 MISSING_ARG_CHANNEL"
    assert refusal(lambda: arguments.channel_name(request("channel=%0A"))) == "400 INVALID_ARG_CHANNEL"


@pytest.mark.parametrize(
    ("query", "to_publish"), [("", None), ("partition=-1", None), ("partition=3", 3), ("partition=x", NOT_A_NUMBER)]
)
def test_the_partition_of_a_publish(query: str, to_publish: int | None):
    assert arguments.partition_to_publish(request(query)) == to_publish


def test_the_number_of_a_partition():
    assert arguments.partition_number(request("")) is None
    assert arguments.partition_number(request("partition=3")) == 3
    for text in ("-1", "x", "", "99999999999"):
        said = refusal(lambda text=text: arguments.partition_number(request(f"partition={text}")))  # type: ignore[misc]
        assert said == f"400 INVALID_ARG_PARTITION: partition={text}, it must be the number of a partition"


@pytest.mark.parametrize(
    ("text", "lenient", "strict"),
    [("true", True, True), ("1", True, True), ("false", False, False), ("0", False, False), ("TRUE", None, True)],
)
def test_switches(text: str, lenient: bool | None, strict: bool):
    asked = request(f"is_on={text}")
    assert arguments.switch(asked, "is_on") is strict
    for default in (True, False):
        assert arguments.lenient_switch(asked, "is_on", default) is (default if lenient is None else lenient)
    if lenient is None:
        assert refusal(lambda: arguments.needed_switch(asked, "is_on")) == "400 INVALID_ARG_IS_ON"
    else:
        assert arguments.needed_switch(asked, "is_on") is lenient


def test_a_switch_that_is_none():
    asked = request("is_on=maybe")
    assert refusal(lambda: arguments.switch(asked, "is_on")) == (
        "400 INVALID_ARG_IS_ON: is_on=maybe, it must be true or false"
    )
    assert arguments.lenient_switch(asked, "is_on", True) is True
    assert arguments.switch(request(""), "is_on") is None
    assert refusal(lambda: arguments.needed_switch(request(""), "is_on")) == "400 INVALID_ARG_IS_ON"


@pytest.mark.parametrize(("query", "value"), [("", 5), ("count=1", 1), ("count=9", 9), ("count=007", 7)])
def test_a_number_in_its_range(query: str, value: int):
    assert arguments.number_within(request(query), "count", 5, 1, 9) == value


@pytest.mark.parametrize("text", ["0", "10", "-1", "x", "", "1" * 20, "%D9%A3"])
def test_a_number_that_is_none_or_out_of_its_range(text: str):
    said = refusal(lambda: arguments.number_within(request(f"count={text}"), "count", 5, 1, 9))
    assert said == "400 INVALID_ARG_COUNT"


@pytest.mark.parametrize(
    ("text", "internal"),
    [
        ("7", 7),
        ("0004000000000005", 1 << 50 | 5),
        ("0004000000000005000000000000004d", 1 << 50 | 5),
        ("1125899906842629", 1 << 50 | 5),  # 16 digits that do not begin with 0 are a number
        ("0004", 4),
        ("x", None),
        ("", None),
        ("-1", None),
        (str(1 << 60), None),
        ("f" * 32, None),
    ],
)
def test_the_id_of_a_message(text: str, internal: int | None):
    assert arguments.message_id_of(text) == internal
    if internal is not None:
        assert arguments.message_id(request(f"msgid={text}")) == internal
    else:
        assert refusal(lambda: arguments.message_id(request(f"msgid={text}"))) == "400 INVALID_ARG_MSGID"


def test_no_id_of_a_message():
    assert refusal(lambda: arguments.message_id(request(""))) == "400 MISSING_ARG_MSGID"
