"""What a type checker makes of users' code: ``make static`` looks, and here each of it is done as well."""

from __future__ import annotations

from typing import assert_type

import pytest
from pydantic import BaseModel

import flintmq.client
import flintmq.sync
from flintmq import Consumer, Message

AT = "a:1"


class Model(BaseModel):
    number: int


def bill(message: Message[Model | None]) -> None: ...


def test_the_type_of_the_bodies():
    assert_type(Consumer("t", "c", nsqd_tcp_addresses=AT), Consumer[bytes])
    assert_type(Consumer("t", "c", nsqd_tcp_addresses=AT, type=Model), Consumer[Model])
    assert_type(Consumer("t", "c", nsqd_tcp_addresses=AT, type=Model | None), Consumer[Model | None])
    assert_type(Consumer("t", "c", nsqd_tcp_addresses=AT, type=list[Model]), Consumer[list[Model]])
    assert_type(Consumer("t", "c", nsqd_tcp_addresses=AT, type=dict[str, int] | int), Consumer[dict[str, int] | int])
    assert_type(Consumer("t", "c", nsqd_tcp_addresses=AT, type=Model | None, handler=bill), Consumer[Model | None])
    assert_type(Consumer("t", "c", nsqd_tcp_addresses=AT, decode=int), Consumer[int])


def test_likewise_without_asyncio():
    consumer = flintmq.sync.Consumer
    assert_type(consumer("t", "c", nsqd_tcp_addresses=AT), flintmq.sync.Consumer[bytes])
    assert_type(consumer("t", "c", nsqd_tcp_addresses=AT, type=list[Model]), flintmq.sync.Consumer[list[Model]])
    assert_type(consumer("t", "c", nsqd_tcp_addresses=AT, type=Model | None), flintmq.sync.Consumer[Model | None])
    assert_type(consumer("t", "c", nsqd_tcp_addresses=AT, decode=int), flintmq.sync.Consumer[int])


def test_a_function_in_place_as_handler():
    assert_type(
        Consumer("t", "c", nsqd_tcp_addresses=AT, handler=lambda message: message.body.decode()), Consumer[bytes]
    )
    assert_type(
        flintmq.sync.Consumer("t", "c", nsqd_tcp_addresses=AT, handler=lambda message: message.body.decode()),
        flintmq.sync.Consumer[bytes],
    )


def test_a_name_that_is_not_there_is_seen():
    """The comments are themselves errors to a type checker that would take any name."""
    with pytest.raises(AttributeError):
        flintmq.Prodcer  # type: ignore[attr-defined] # noqa: B018
    with pytest.raises(AttributeError):
        flintmq.client.Consummer  # type: ignore[attr-defined] # noqa: B018
    with pytest.raises(TypeError):
        flintmq.testing.MemoryNsqd(no_such=1)  # type: ignore[call-arg]
