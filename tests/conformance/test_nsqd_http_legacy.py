"""What clients from before NSQ 1.0 find: /put, /mput, the envelope for who asks for it (NSQ's HTTP API)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.conformance.http_helpers import (
    JSON_TYPE,
    NSQ_TYPE,
    assert_refused,
    assert_text,
    bodies_of,
    chunked,
    exchange,
)
from tests.integration.daemons import Answer, Nsqd, mpub_body
from tests.parameters import filled

OLD = {"Accept": "application/vnd.nsq; version=0"}

pytestmark = pytest.mark.improvement  # NSQ 1.0 removed all of it: 404, and no envelope for anybody


# -- /put and /mput ----------------------------------------------------------------------------------------------------


def test_put_is_pub(nsqd: Nsqd, topic: str):
    assert_text(nsqd.request("POST", f"/put?topic={topic}", b"a\nb"), "OK")
    assert bodies_of(nsqd, topic, 1) == [b"a\nb"]


def test_mput_is_mpub(nsqd: Nsqd, topic: str):
    assert_text(nsqd.request("POST", f"/mput?topic={topic}", b"a\n\nb\n"), "OK")
    assert bodies_of(nsqd, topic, 2) == [b"a", b"b"]


def test_mput_can_be_binary(nsqd: Nsqd, topic: str):
    assert_text(nsqd.request("POST", f"/mput?topic={topic}&binary=true", mpub_body([b"a\nb"])), "OK")
    assert bodies_of(nsqd, topic, 1) == [b"a\nb"]


def test_put_can_be_deferred(nsqd: Nsqd, topic: str):
    assert_text(nsqd.request("POST", f"/put?topic={topic}&defer=3600000", b"x"), "OK")
    assert_refused(nsqd.request("POST", f"/put?topic={topic}&defer=3600001", b"x"), 400, "INVALID_DEFER")


def test_put_takes_a_chunked_body(nsqd: Nsqd, topic: str):
    assert_text(exchange(nsqd, chunked(f"/put?topic={topic}", b"a", b"b")), "OK")


@pytest.mark.parametrize(
    ("target", "body", "status", "text"),
    [
        ("/put", b"", 400, "MSG_EMPTY"),
        ("/put", b"x", 400, "MISSING_ARG_TOPIC"),
        ("/put?topic=no!", b"x", 400, "INVALID_TOPIC"),
        ("/put?topic=t", 1048577, 413, "MSG_TOO_BIG"),
        ("/mput", b"x", 400, "MISSING_ARG_TOPIC"),
        ("/mput?topic=no!", b"x", 400, "INVALID_TOPIC"),
        ("/mput?topic=t", 5242881, 413, "BODY_TOO_BIG"),
        ("/mput?topic=t&binary=true", b"", 413, "BAD_BODY"),
    ],
)
def test_put_and_mput_refuse(nsqd: Nsqd, target: str, body: bytes | int, status: int, text: str):
    assert_refused(nsqd.request("POST", target, filled(body)), status, text)


@pytest.mark.parametrize("path", ["/put", "/mput"])
def test_put_and_mput_are_posts(nsqd: Nsqd, path: str):
    answer = nsqd.request("GET", path)
    assert_refused(answer, 405, "METHOD_NOT_ALLOWED")
    assert answer.headers["Allow"] == "OPTIONS, POST"


# -- the envelope ------------------------------------------------------------------------------------------------------


def assert_envelope(answer: Answer, code: int, text: str, data: Any) -> None:
    """See the answer of an nsqd before 1.0."""
    assert answer.status == code
    assert answer.headers["Content-Type"] == JSON_TYPE
    assert "X-NSQ-Content-Type" not in answer.headers
    assert list(answer.json) == ["status_code", "status_txt", "data"]
    assert answer.json == {"status_code": code, "status_txt": text, "data": data}


def test_info_in_the_envelope(nsqd: Nsqd):
    assert_envelope(nsqd.request("GET", "/info", headers=OLD), 200, "OK", nsqd.get("/info"))


def test_stats_in_the_envelope(nsqd: Nsqd, topic: str):
    nsqd.post(f"/topic/create?topic={topic}")
    target = f"/stats?format=json&include_mem=false&topic={topic}"
    assert_envelope(nsqd.request("GET", target, headers=OLD), 200, "OK", nsqd.get(target))


def test_text_stats_have_no_envelope(nsqd: Nsqd):
    assert nsqd.request("GET", "/stats", headers=OLD).text.startswith("nsqd v")


@pytest.mark.parametrize("path", ["/pub", "/mpub", "/put", "/mput"])
def test_ok_has_no_envelope(nsqd: Nsqd, topic: str, path: str):
    assert nsqd.request("POST", f"{path}?topic={topic}", b"x", OLD).body == b"OK"


@pytest.mark.parametrize(
    ("target", "body", "text"),
    [
        ("/pub", b"x", "MISSING_ARG_TOPIC"),
        ("/pub?topic=t", b"", "MSG_EMPTY"),
        ("/put?topic=no!", b"x", "INVALID_TOPIC"),
        ("/mput?topic=t&binary=true", b"", "BAD_BODY"),
        ("/mpub?topic=%zz", b"x", "INVALID_REQUEST"),
    ],
)
def test_errors_are_500_in_the_envelope(nsqd: Nsqd, target: str, body: bytes, text: str):
    assert_envelope(nsqd.request("POST", target, body, OLD), 500, text, None)


@pytest.mark.parametrize(
    "accept", ["application/vnd.nsq", "application/vnd.nsq; version=0.3", "a/b, application/vnd.nsq"]
)
def test_who_names_the_old_type_gets_the_envelope(nsqd: Nsqd, accept: str):
    assert "status_code" in nsqd.request("GET", "/info", headers={"Accept": accept}).json


@pytest.mark.parametrize("accept", ["application/vnd.nsq; version=1.0", "*/*", "application/json", ""])
def test_everybody_else_gets_none(nsqd: Nsqd, accept: str):
    answer = nsqd.request("GET", "/info", headers={"Accept": accept})
    assert "status_code" not in answer.json
    assert answer.headers["X-NSQ-Content-Type"] == NSQ_TYPE


@pytest.mark.parametrize("action", ["create", "delete"])
def test_what_is_younger_than_the_envelope_has_none(nsqd: Nsqd, topic: str, action: str):
    nsqd.post(f"/topic/create?topic={topic}")
    answer = nsqd.request("POST", f"/topic/{action}?topic={topic}", headers=OLD)
    assert (answer.status, answer.body) == (200, b"")
