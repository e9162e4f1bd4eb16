"""What is answered where the mastership ends before something that was asked for is done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from flintmq.cluster.keys import Keys
from flintmq.nsqlookupd.coordinator import Coordinator, NotDone


class Deposed(Coordinator):
    """A master that is none any more when what was decided is written."""

    def __init__(self, unready: dict[int, str]) -> None:
        self._unready_partitions = unready
        self._is_master = True
        self._keys = Keys("c")
        self.view = SimpleNamespace(topics={"t": SimpleNamespace(number=7)}, unreadable={})  # type: ignore[assignment]

    @property
    def is_master(self) -> bool:
        return self._is_master

    async def _decided(self, decide: object) -> bool:
        self._is_master = False
        return True

    async def _until(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        return is_so()

    def unready(self, topic: str) -> dict[int, str]:
        return self._unready_partitions


def test_a_topic_that_is_there_is_not_said_to_be_deleted() -> None:
    coordinator = Deposed({})
    with pytest.raises(NotDone, match="being deleted, and something of it is left; this nsqlookupd is not the master"):
        asyncio.run(coordinator.delete("t"))


def test_partitions_that_cannot_be_written_to_are_not_said_to_be_there() -> None:
    coordinator = Deposed({3: "it is not created yet"})
    coordinator._is_master = False
    with pytest.raises(NotDone, match="it is begun, and topic t cannot be written to completely yet: partition 3"):
        asyncio.run(coordinator.until_written("t"))
