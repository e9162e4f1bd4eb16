"""Changes of topics with partitions, as a nsqlookupd has its nsqds make them."""

from __future__ import annotations

import asyncio

import pytest

from flintmq.cluster.registration import NsqdNode, RegistrationDatabase
from flintmq.env import Env
from flintmq.nsqlookupd.topics import TopicAdmin
from flintmq.topic_meta import TopicMeta

SECOND = 1_000_000_000


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
