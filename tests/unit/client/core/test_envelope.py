"""The envelope, byte by byte, and what is none."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from flintmq.client.core.envelope import MAGIC, open_delivery, unwrap, wrap
from flintmq.client.core.message import Delivery
from flintmq.errors import LocalProtocolError
from flintmq.message import JSON, TAG
from flintmq.wire.extended import Extension


def test_bytes():
    data = wrap({"a": "b"}, b"body")
    assert data == b'\xf1FMH\x00\x09{"a":"b"}body'
    assert unwrap(data) == (b'{"a":"b"}', b"body")


@given(st.dictionaries(st.text(max_size=20), st.text(max_size=50), max_size=5), st.binary(max_size=100))
def test_round_trip(headers: dict[str, str], body: bytes):
    encoded, inner = unwrap(wrap(headers, body))
    assert (json.loads(encoded) if headers else {}, inner) == (headers, body)


@given(st.binary(max_size=60).filter(lambda body: not body.startswith(MAGIC)))
def test_what_never_was_in_an_envelope_is_handed_on(body: bytes):
    assert unwrap(body) == (b"", body)


def test_a_body_that_looks_like_an_envelope_is_put_into_one():
    assert unwrap(wrap({}, MAGIC + b"x")) == (b"{}", MAGIC + b"x")


@pytest.mark.parametrize("data", [MAGIC, MAGIC + b"\0", MAGIC + b"\0\5{}"])
def test_what_only_begins_as_an_envelope_is_handed_on(data: bytes):
    assert unwrap(data) == (b"", data)


def test_a_delivery_is_opened_and_its_places_stay_known():
    ids = [b"%016d" % number for number in range(3)]
    bodies = [wrap({"a": "b"}, b"in one"), b"bare", wrap({}, b"empty")]
    for extensions in (None, {each: Extension(0, b"", 100 + number, 7) for number, each in enumerate(ids)}):
        link: Any = SimpleNamespace(msg_timeout_s=1.0)
        delivery = Delivery(link, SimpleNamespace(), 0.0, [])
        delivery.records = [(1, 1, each, body) for each, body in zip(ids, bodies, strict=True)]
        delivery.extensions = None if extensions is None else {**extensions}
        open_delivery(delivery)
        assert [body for _, _, _, body in delivery.records] == [b"in one", b"bare", b"empty"]
        assert delivery.extensions is not None
        place = (-1, 0) if extensions is None else (100, 7)
        assert delivery.extensions[ids[0]] == Extension(JSON, b'{"a":"b"}', *place)
        assert delivery.extensions.get(ids[1]) == (extensions or {}).get(ids[1])


def test_headers_have_a_bound():
    with pytest.raises(LocalProtocolError, match="at most 65535"):
        wrap({"a": "x" * 70_000}, b"x")


def opened(extension: Extension) -> Extension:
    """What becomes of a message's own fields when it is taken out of an envelope."""
    link: Any = SimpleNamespace(msg_timeout_s=1.0)
    delivery = Delivery(link, SimpleNamespace(), 0.0, [(1, 1, b"0" * 16, wrap({"a": "in", "b": "in"}, b"x"))])
    delivery.extensions = {b"0" * 16: extension}
    open_delivery(delivery)
    return delivery.extensions[b"0" * 16]


def test_own_headers_win_over_those_in_the_envelope():
    found = opened(Extension(JSON, b'{"b":{"own":1.50},"c":null}', 5, 7))
    assert (found.version, found.offset, found.raw_size) == (JSON, 5, 7)
    assert json.loads(found.headers) == {"a": "in", "b": {"own": 1.5}, "c": None}
    assert json.loads(opened(Extension(JSON, b"", 5, 7)).headers) == {"a": "in", "b": "in"}


@pytest.mark.parametrize("own", [Extension(TAG, b"tag", 5, 7), Extension(JSON, b"{broken", 5, 7)])
def test_what_leaves_no_room_for_headers_stays(own: Extension):
    assert opened(own) == own
