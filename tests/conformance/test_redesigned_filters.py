"""``ext_filter``: consumers that take messages by their headers (Youzan's NSQ)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.conformance.redesigned_helpers import create, extended, headed, several
from tests.integration.daemons import Connection, Nsqd, sized, wait_until


def item(number: int, value: str) -> bytes:
    return headed({"city": value, "k": "v"}, str(number).encode())


def publish(nsqd: Nsqd, topic: str, *values: str) -> None:
    with nsqd.connect() as connection:
        items = [item(number, value) for number, value in enumerate(values, 1)]
        connection.ok(several("MPUB_EXT", topic, 0, items))


@contextlib.contextmanager
def filtering(nsqd: Nsqd, topic: str, rdy_count: int = 100, **rule: Any) -> Iterator[Connection]:
    with nsqd.connect() as connection:
        connection.identify(extend_support=True, ext_filter=rule)
        connection.ok(f"SUB {topic} c\n".encode())
        connection.rdy(rdy_count)
        yield connection


@pytest.fixture
def cities(nsqd: Nsqd, topic: str) -> str:
    create(nsqd, topic, 1, extend="true")
    nsqd.post(f"/channel/create?topic={topic}&channel=c")
    publish(nsqd, topic, "berlin", "bremen", "rome", "", "Rome")
    return topic


BERLIN: dict[str, Any] = {"filter_ext_key": "city", "filter_data": "berlin"}
ROME: dict[str, Any] = {"filter_ext_key": "city", "filter_data": "rome"}


@pytest.mark.parametrize(
    ("rule", "bodies"),
    [
        ({"type": 1, **BERLIN}, [b"1"]),
        ({"type": 1, "inverse": True, **BERLIN}, [b"2", b"3", b"4", b"5"]),
        ({"type": 2, "filter_ext_key": "city", "filter_data": "^b|(?i)^ROME$"}, [b"1", b"2", b"3", b"5"]),
        ({"type": 2, "filter_ext_key": "nothing", "filter_data": "^$"}, [b"1", b"2", b"3", b"4", b"5"]),
        ({"type": 3, "filter_ext_key": "city", "filter_data": "{b*[!n],?ome}"}, [b"3", b"5"]),
        ({"type": 4, "filter_ext_key": "any", "filter_data_list": [BERLIN, ROME]}, [b"1", b"3"]),
        (
            {
                "type": 4,
                "filter_ext_key": "all",
                "filter_data_list": [ROME, {"filter_ext_key": "k", "filter_data": "v"}],
            },
            [b"3"],
        ),
        ({}, [b"1", b"2", b"3", b"4", b"5"]),
    ],
)
def test_what_does_not_match_is_finished(nsqd: Nsqd, cities: str, rule: dict[str, Any], bodies: list[bytes]):
    with filtering(nsqd, cities, **rule) as connection:
        messages = connection.messages(len(bodies))
        assert [extended(message.body).body for message in messages] == bodies
        connection.finish(*messages)
        wait_until(lambda: nsqd.unfinished(cities, "c") == 0)
        row = nsqd.stats(cities, "c")
        assert row.get("filtered_count", 0) == 5 - len(bodies)
        assert row["clients"][0].get("filtered_count", 0) == 5 - len(bodies)
        publish(nsqd, cities, "berlin", "rome")
        wait_until(lambda: nsqd.stats(cities, "c")["depth"] == 0)


def test_consumers_with_different_filters_lose_messages_to_each_other(nsqd: Nsqd, cities: str):
    with filtering(nsqd, cities, type=1, **BERLIN) as first:
        assert extended(first.message().body).body == b"1"
        wait_until(lambda: nsqd.stats(cities, "c")["filtered_count"] == 4)
        with filtering(nsqd, cities, type=1, **ROME) as second:
            second.nothing_comes()


def test_a_long_backlog_that_does_not_match_holds_up_nobody(nsqd: Nsqd, topic: str):
    create(nsqd, topic, 1, extend="true")
    nsqd.post(f"/channel/create?topic={topic}&channel=c")
    for _ in range(10):
        publish(nsqd, topic, *["x" * 200] * 1000)
    publish(nsqd, topic, "x", "berlin")
    with filtering(nsqd, topic, 1, type=2, filter_ext_key="city", filter_data="^(b+e?r*)+lin$") as connection:
        assert nsqd.request("GET", "/ping").body == b"OK"
        assert extended(connection.message().body).body == b"2"


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ({"type": 5, **BERLIN}, "type 5 is not"),
        (BERLIN, "type 0 is not"),
        ({"inverse": True}, "type 0 is not"),
        ({"type": 1, "filter_data": "x"}, "filter_ext_key '' is not the name of a header"),
        ({"type": 1, "filter_ext_key": "a.b", "filter_data": "x"}, "filter_ext_key 'a.b' is not the name"),
        ({"type": 1, "filter_ext_key": "k"}, "filter_data of 'k' has 0 of 1 to 1024"),
        ({"type": 1, "filter_ext_key": "k", "filter_data": "x" * 1025}, "filter_data of 'k' has 1025 of"),
        ({"type": 1, **BERLIN, "filter_data_list": [BERLIN]}, "only type 4 has filter_data_list"),
        ({"type": 2, "filter_ext_key": "k", "filter_data": "("}, "missing )"),
        ({"type": 2, "filter_ext_key": "k", "filter_data": "(a{99}){9}b{900}"}, "more than 1024 steps"),
        ({"type": 2, "filter_ext_key": "k", "filter_data": r"\p{Han}{999}"}, "pattern too large"),
        ({"type": 3, "filter_ext_key": "k", "filter_data": "[a"}, "[ without ]"),
        ({"type": 4, "filter_ext_key": "some", "filter_data_list": [BERLIN]}, "is not any or all"),
        ({"type": 4, "filter_ext_key": "any"}, "filter_data_list has 0 of 1 to 64"),
        ({"type": 4, "filter_ext_key": "any", "filter_data_list": [BERLIN] * 65}, "filter_data_list has 65 of"),
        ({"type": 4, "filter_ext_key": "any", "filter_data_list": [{"filter_ext_key": "k"}]}, "has 0 of 1"),
        ({"type": 4, "filter_ext_key": "any", "filter_data": "x", "filter_data_list": [BERLIN]}, "no filter_data"),
        ({"type": "1"}, "failed to decode JSON body"),
        ("berlin", "failed to decode JSON body"),
    ],
)
def test_what_is_no_filter_is_refused(nsqd: Nsqd, rule: object, reason: str):
    body = json.dumps({"extend_support": True, "ext_filter": rule}).encode()
    with nsqd.connect() as connection:
        error = connection.error(b"IDENTIFY\n" + sized(body))
    assert error.startswith("E_BAD_BODY ")
    assert reason in error


def test_no_filter_is_none(nsqd: Nsqd, cities: str):
    with nsqd.connect() as connection:
        connection.identify(extend_support=True, ext_filter=None)
        connection.ok(f"SUB {cities} c\n".encode())
        connection.rdy(100)
        assert len(connection.messages(5)) == 5


@pytest.mark.parametrize("exists", [True, False])
def test_on_a_topic_without_headers_a_filter_is_refused(nsqd: Nsqd, topic: str, exists: bool):
    if exists:
        nsqd.post(f"/topic/create?topic={topic}")
    with nsqd.connect() as connection:
        connection.identify(ext_filter={"type": 1, **BERLIN})
        assert connection.error(f"SUB {topic} c\n".encode()).startswith("E_SUB_EXTEND_FORBIDDON ")


def test_in_order(nsqd: Nsqd, topic: str):
    create(nsqd, topic, 1, extend="true")
    nsqd.post(f"/channel/create?topic={topic}&channel=c")
    publish(nsqd, topic, "rome", "rome", "berlin", "rome", "berlin")
    with nsqd.connect() as connection:
        connection.identify(extend_support=True, ext_filter={"type": 1, **BERLIN})
        connection.ok(f"SUB_ORDER {topic} c 0\n".encode())
        connection.rdy(10)
        for _ in range(2):
            connection.finish(connection.message())
        wait_until(lambda: nsqd.unfinished(topic, "c") == 0)
