"""What a type checker makes of users' code: ``make static`` looks, and here each of it is done as well."""

from __future__ import annotations

from typing import assert_type

from pydantic import BaseModel

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
