"""A topic of a single node is given to the cluster, and nothing that stands there is written over."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.cluster.models import KEYS, World, node

from flintmq.cluster.view import View
from flintmq.nsqd.cluster.bringing import Bringing, NotBrought
from flintmq.topic_meta import PLAIN


def test_a_topic_that_cannot_be_read_is_not_written_over() -> None:
    world, view = World(), View(KEYS)
    key, newer = KEYS.topic("t"), b'{"of": "a newer release"}'
    world.put(key, newer)
    view.feed(world.store.range(KEYS.all))

    async def txn(request: Any) -> Any:
        raise AssertionError(request)

    async def nothing(*_: object) -> None: ...

    store: Any = SimpleNamespace(txn=txn)
    topics: Any = {"t": SimpleNamespace(name="t", meta=PLAIN, partitions={})}
    bringing = Bringing(KEYS, view, store, random.Random(1), topics, lambda: node("a"), nothing, nothing)
    with pytest.raises(NotBrought, match="a newer release wrote it"):
        asyncio.run(bringing.bring("t"))
