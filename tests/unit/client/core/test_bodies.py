"""What a type means, which are refused where they are declared, and what makes a body one that cannot be read."""

from __future__ import annotations

import collections.abc
import enum
import json
import math
import sys
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import msgspec
import pydantic
import pydantic.dataclasses
import pytest

from flintmq import BodyError, Consumer, Discard, OptionError, Requeue
from flintmq.client.core.bodies import REASON_SIZE_MAX, decoder, encoded, reader
from flintmq.sync import Consumer as BlockingConsumer


class Plain:
    """A class that nothing knows how to build."""


class Holder(msgspec.Struct):
    inside: Plain


class Measured(msgspec.Struct):
    at: float | None


class Tree(msgspec.Struct):
    name: str
    children: list[Tree] = []


@dataclass
class Point:
    x: int
    y: int


class Pair(NamedTuple):
    first: int
    second: str


class Row(TypedDict):
    a: int


class Colour(enum.Enum):
    RED = "red"


class Order(pydantic.BaseModel):
    id: int
    lines: list[str] = []


class Renamed(pydantic.BaseModel):
    shop: int = pydantic.Field(alias="shop-id")


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]


@pydantic.dataclasses.dataclass
class Positive:
    x: pydantic.PositiveInt


READABLE: list[tuple[Any, bytes, object]] = [
    (bytes, b"\xff", b"\xff"),
    (str, "ä".encode(), "ä"),
    (Annotated[bytes, "of the order"], b"\xff", b"\xff"),
    (int, b"7", 7),
    (Any, b'{"a":1}', {"a": 1}),
    (dict[str, object], b'{"a":[]}', {"a": []}),
    (collections.abc.Mapping[str, int], b'{"a":1}', {"a": 1}),
    (Tree, b'{"name":"a","children":[{"name":"b"}]}', Tree("a", [Tree("b")])),
    (Point, b'{"x":1,"y":2}', Point(1, 2)),
    (Point | None, b"null", None),
    (Pair, b'[1,"b"]', Pair(1, "b")),
    (Row, b'{"a":1}', {"a": 1}),
    (Colour, b'"red"', Colour.RED),
    (Annotated[int, msgspec.Meta(gt=1)], b"2", 2),
    (Order, b'{"id":"7"}', Order(id=7)),
    (list[Order], b'[{"id":1}]', [Order(id=1)]),
    (Order | None, b"null", None),
    (Annotated[Cat | Dog, pydantic.Field(discriminator="kind")], b'{"kind":"dog"}', Dog(kind="dog")),
    (Positive, b'{"x":1}', Positive(x=1)),
]


@pytest.mark.parametrize(("kind", "body", "value"), READABLE, ids=lambda case: str(case)[:30])
def test_bodies_are_read(kind: Any, body: bytes, value: object):
    assert decoder(kind)(body) == value


class Incomplete(pydantic.BaseModel):
    later: Missing  # type: ignore[name-defined]  # noqa: F821


REFUSED = [
    Plain, Holder, list[Plain], dict[str, Plain], Plain | None, complex, type, collections.abc.Callable, "Order", 7,
    complex | bytes, bytearray, Annotated[bytes, pydantic.Field(max_length=3)],
    Annotated[str, msgspec.Meta(max_length=3)], Incomplete,
]  # fmt: skip


@pytest.mark.parametrize("consumer", [Consumer, BlockingConsumer])
@pytest.mark.parametrize("kind", REFUSED, ids=str)
def test_types_that_nothing_can_build_are_refused_where_they_are_declared(kind: Any, consumer: Any):
    """msgspec makes a decoder for any class, which then refuses every body."""
    with pytest.raises(OptionError, match="type="):
        consumer("t", "c", nsqd_tcp_addresses="127.0.0.1:1", type=kind)


def test_the_refusal_names_the_class_and_the_way_out():
    with pytest.raises(OptionError, match=r"decode=.*cannot build Plain, of which Holder is made"):
        decoder(Holder)
    with pytest.raises(OptionError, match=r"Incomplete.*not fully defined"):
        decoder(Incomplete)


TOO_DEEP = "recursion" if sys.version_info < (3, 14) else "Stack overflow"


@pytest.mark.parametrize(
    ("kind", "body", "reason"),
    [
        (str, b"\xff", "text in UTF-8"),
        (Point, b'{"x":1}', r"JSON of type Point: .* missing required field `y`"),
        (Order, b'{"lines":3}', r"JSON of type Order: Field required - at `\$.id`; .*array - at `\$.lines`$"),
        (Positive, b'{"x":0}', r"greater than 0 - at `\$.x`"),
        (Order, b"nonsense", "JSON of type Order: Invalid JSON"),
        (Any, b"[" * 1_000_000, f"JSON of type .*Any: .*{TOO_DEEP}"),
        (Tree, b"\xff", "JSON of type Tree"),
    ],
)
def test_a_body_that_cannot_be_read_says_where(kind: Any, body: bytes, reason: str):
    with pytest.raises(BodyError, match=reason) as caught:
        decoder(kind)(body)
    assert "\n" not in str(caught.value)
    assert len(caught.value.reason) <= REASON_SIZE_MAX


def test_what_is_wrong_with_a_large_body_is_said_in_short():
    with pytest.raises(BodyError, match=r"and 9997 more") as caught:
        decoder(list[Order])(b"[" + b",".join([b'{"id":"x"}'] * 10_000) + b"]")
    assert len(caught.value.reason) <= REASON_SIZE_MAX


# -- decode= -----------------------------------------------------------------------------------------------------------


def test_a_function_reads_what_no_type_can():
    read = reader(None, lambda body: Plain if body == b"a" else int(body))
    assert read(b"a") is Plain
    assert read(b"7") == 7
    with pytest.raises(BodyError, match=r"what decode=.* reads: invalid literal"):
        read(b"x")


@pytest.mark.parametrize(
    "raised",
    [Requeue(3), Discard("old"), MemoryError(), ExceptionGroup("both", [Requeue(3), Discard("old")])],
    ids=repr,
)
def test_a_function_may_say_what_to_do_with_the_message(raised: Exception):
    def decode(body: bytes) -> object:
        raise raised

    with pytest.raises(type(raised)):
        reader(None, decode)(b"x")


async def task(body: bytes) -> bytes:
    return body


@pytest.mark.parametrize("consumer", [Consumer, BlockingConsumer])
@pytest.mark.parametrize(
    "options", [{"decode": 7}, {"decode": task}, {"decode": bytes.decode, "type": int}], ids=["7", "async", "both"]
)
def test_what_is_no_decode_is_refused(options: dict[str, Any], consumer: Any):
    with pytest.raises(OptionError, match="decode="):
        consumer("t", "c", nsqd_tcp_addresses="127.0.0.1:1", **options)


# -- publishing --------------------------------------------------------------------------------------------------------


def test_models_are_published_as_their_own_type_reads_them():
    for value in (Order(id=1, lines=["a"]), Renamed.model_validate({"shop-id": 7}), Positive(x=2)):
        assert decoder(type(value))(encoded(value)) == value
    assert encoded({"orders": [Order(id=1)]}) == b'{"orders":[{"id":1,"lines":[]}]}'


@pytest.mark.parametrize(
    "value", [Plain(), [Plain()], "text", None, {"a": Plain()}], ids=["object", "inside", "text", "None", "value"]
)
def test_what_json_cannot_say_is_refused(value: object):
    with pytest.raises(TypeError, match="a body is bytes or a value for JSON"):
        encoded(value)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_float_that_json_has_no_number_for_is_refused(number: float):
    for value in (number, [number], {"a": None, "b": [{"c": number}]}, Measured(number), {"big": 2**70, "a": number}):
        with pytest.raises(TypeError, match=r"^a body is bytes or a value for JSON, .*: JSON has no NaN"):
            encoded(value)


def test_a_null_is_a_null_and_what_looks_like_nan_is_none():
    alike = 0xCB7FF8000000
    for value in ({"a": None, "b": 1.5, "text": "null nan inf"}, [None, 2**70], {"a": None, "b": alike}):
        assert json.loads(encoded(value)) == value
    assert encoded({"a": None, "b": b"\xcb\x7f\xf8"}) == b'{"a":null,"b":"y3/4"}'
    assert encoded([None, msgspec.Raw(b"1"), alike]) == b"[null,1,%d]" % alike
    assert encoded(Measured(None)) == b'{"at":null}'
    assert encoded([None, Positive(x=2)]) == b'[null,{"x":2}]'
