"""Which topics of the cluster can be published and subscribed to through a node."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from tests.unit.cluster.models import KEYS, World, state

from flintmq.cluster.state import TopicRecord
from flintmq.cluster.view import View
from flintmq.nsqd.cluster.serving import Serving
from flintmq.topic_meta import PLAIN


@pytest.mark.parametrize(("brought_num", "is_usable"), [(3, True), (2, False)])
def test_a_topic_is_usable_before_what_may_never_come_and_not_before_what_is_made(
    brought_num: int, is_usable: bool
) -> None:
    """Partitions 0 and 2 of a restored topic are lost, perhaps for good; one that the cluster makes is there soon."""
    world, view, parts = World(), View(KEYS), Mock()
    world.nodes("ab")
    world.put(KEYS.topic("t"), TopicRecord(7, PLAIN, 3, is_brought=True, brought_num=brought_num))
    world.partition("t", 1, state("b", "b"))
    view.feed(world.store.range(KEYS.all))
    names: Any = dict.fromkeys(("env", "broker", "keys", "store", "peers", "lease", "wants_output", "schedule"), parts)
    serving = Serving(
        node="a", view=view, led={}, own_topics=frozenset(), makes_topics=True, are_created=True, msg_timeout_ns=1,
        **names,
    )  # fmt: skip
    assert serving.wishes._is_usable("t") is is_usable
