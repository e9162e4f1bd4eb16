"""Changes of topics with partitions, as a nsqlookupd has its nsqds make them."""

from __future__ import annotations

import asyncio

import pytest

from flintmq.cluster.registration import NsqdNode, RegistrationDatabase
from flintmq.env import Env
from flintmq.errors import ConnectionFailed
from flintmq.net.http_messages import HttpError
from flintmq.nsqlookupd.topics import TopicAdmin
from flintmq.topic_meta import TopicMeta

SECOND = 1_000_000_000
FOR_EVER = 2**62
"""A node counts, however long this machine is up: none of these says again that it is there."""


def node(name: str) -> NsqdNode:
    return NsqdNode(name, f"{name}:1", name, f"{name}.example", 4150, 4151, "1.3.0")


async def test_a_change_is_complete_when_the_last_connection_that_had_not_said_so_has_ended(
    monkeypatch: pytest.MonkeyPatch,
):
    """As of an nsqd that says everything anew on a second connection."""
    env = Env()
    database = RegistrationDatabase(3600 * SECOND, SECOND)
    admin = TopicAdmin(database, env.clock)
    asked = asyncio.Event()

    async def ask(*_: object) -> tuple[int, bytes]:
        asked.set()
        return 200, b""

    monkeypatch.setattr(admin, "ask", ask)
    for name, version in (("first", 0), ("second", 1)):
        database.add_node(node(name))
        database.describe_topic(name, "t", TopicMeta(partition_num=1, retention_days=7 * version, version=version))
    changing = asyncio.create_task(admin.change("t", {"retention": "7"}))
    await asked.wait()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not changing.done()
    database.remove_node("first")
    admin.left("t")
    await changing


WANTS_TLS = 403, b'{"message": "TLS_REQUIRED", "https_port": 0}'


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (WANTS_TLS, "wants TLS, which nsqlookupd does not speak to nsqd: start it with --tls-required=tcp-https"),
        (ConnectionFailed("first.example:4151", "Connection refused"), "does not answer: Connection refused"),
        (
            (401, b'{"message": "UNAUTHORIZED"}'),
            "asks for a token that it knows: give nsqlookupd --nsqd-http-token-file",
        ),
        ((403, b'{"message": "FORBIDDEN"}'), "answers 403 to /info"),
        ((200, b'{"version": "1.3.0"}'), "is not FlintMQ's"),
        ((200, b"no JSON"), "gives an answer to /info that cannot be read"),
        ((500, b""), "answers 500 to /info"),
    ],
)
async def test_why_no_nsqd_takes_partitions(
    monkeypatch: pytest.MonkeyPatch, answer: tuple[int, bytes] | ConnectionFailed, why: str
):
    database = RegistrationDatabase(FOR_EVER, SECOND)
    admin = TopicAdmin(database, Env().clock)
    database.add_node(node("first"))

    async def ask(*_: object) -> tuple[int, bytes]:
        if isinstance(answer, ConnectionFailed):
            raise answer
        return answer

    monkeypatch.setattr(admin, "ask", ask)
    with pytest.raises(HttpError) as refused:
        await admin.create("t", TopicMeta(partition_num=1))
    text = refused.value.message
    assert text.startswith("ErrType:9 ErrCode:1 : No node is available for topic - none of those registered can")
    assert f": nsqd first.example:4151 {why}" in text and "\n" not in text


async def test_why_none_of_many_nsqds_takes_partitions_is_not_endless(monkeypatch: pytest.MonkeyPatch):
    database = RegistrationDatabase(FOR_EVER, SECOND)
    admin = TopicAdmin(database, Env().clock)
    with pytest.raises(HttpError, match="no nsqd is registered"):
        await admin.create("t", TopicMeta(partition_num=1))

    async def ask(*_: object) -> tuple[int, bytes]:
        return WANTS_TLS

    monkeypatch.setattr(admin, "ask", ask)
    for number in range(20):
        database.add_node(node(f"n{number}"))
    with pytest.raises(HttpError, match=r"; and 17 more$") as refused:
        await admin.create("t", TopicMeta(partition_num=1))
    assert refused.value.message.count("wants TLS") == 3


async def test_a_change_that_an_nsqd_which_wants_tls_is_not_told_of_says_why(monkeypatch: pytest.MonkeyPatch):
    database = RegistrationDatabase(FOR_EVER, SECOND)
    admin = TopicAdmin(database, Env().clock)
    database.add_node(node("first"))
    database.describe_topic("first", "t", TopicMeta(partition_num=1))

    async def ask(*_: object) -> tuple[int, bytes]:
        return WANTS_TLS

    monkeypatch.setattr(admin, "ask", ask)
    with pytest.raises(HttpError, match=r"^500 nsqd first\.example:4151 wants TLS, .*--tls-required=tcp-https$"):
        await admin.change("t", {"retention": "7"})
