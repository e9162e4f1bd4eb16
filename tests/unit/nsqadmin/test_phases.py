"""Changes that several kinds of daemons are asked for: one that hangs keeps nobody else waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from flintmq.nsqadmin import daemons
from flintmq.nsqadmin.actions import Actions
from flintmq.nsqadmin.snapshots import Known, Snapshot, merge
from flintmq.nsqadmin.upstream import Answers
from flintmq.nsqadmin.views import NodeRow

NODE = "a:4151"
SOON_S = 60.0


class PretendDeployment:
    """A nsqlookupd that answers a change only once an nsqd has been asked for it, and that nsqd."""

    lookupds = ("l:4161",)

    def __init__(self) -> None:
        node = NodeRow(address=NODE, hostname="a", broadcast_address="a", http_port=4151, kind="flintmq")
        answers = {NODE: daemons.Stats(health="OK", topics=[daemons.Topic("t")])}
        self._found = merge(1.0, Known({NODE: node}, ["t"], []), answers, [])
        self._nsqd_is_asked = asyncio.Event()
        self.snapshots = self

    async def fresh(self) -> Snapshot:
        return self._found

    def forget(self) -> None:
        pass

    async def holders(self, topic: str) -> tuple[list[str], Snapshot]:
        return [NODE], self._found

    async def look_all(self, daemon: str, addresses: Iterable[str], question: Any) -> Answers[Any]:
        return Answers({each: [] for each in addresses}, [])

    async def change_all(self, daemon: str, addresses: Iterable[str], question: Any) -> Answers[None]:
        if daemon == "nsqd":
            self._nsqd_is_asked.set()
        await self._nsqd_is_asked.wait()
        return Answers(dict.fromkeys(addresses), [])

    def note(self, *arguments: Any) -> None:
        pass

    tell = note


async def test_an_nsqd_makes_a_channel_while_a_nsqlookupd_does_not_answer():
    pretended: Any = PretendDeployment()
    visitor: Any = SimpleNamespace(
        require=lambda role: None, basic_user="", name="ann", is_believed=True, address="", user_agent="", url=""
    )
    env: Any = SimpleNamespace(clock=SimpleNamespace(wall_ns=lambda: 0))
    actions = Actions(env, pretended, pretended, pretended, pretended, "host")
    async with asyncio.timeout(SOON_S):
        done = await actions.create_channel(visitor, "t", "c")
    assert done.is_done and not done.failures
