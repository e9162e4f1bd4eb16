"""An idempotent producer and two real nsqds in simulated worlds: kills, power losses, cuts, stopped processes.

What must hold for every seed, beside what test_client.py looks for: no message is stored twice, whatever was sent
again. A message that is delivered again has the same id; one that was stored twice has two.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from tests.sim.loop import Simulation, share
from tests.sim.test_client import World
from tests.sim.test_client import quiet as quiet
from tests.sim.threads import Threads
from tests.unit.client.blocking_client import ASYNCIO, SYNC, seeds_of_both, threads_of

from flintmq import Message, Producer

SEEDS = 60


class OnceWorld(World):
    """Knows every id that a message was delivered with."""

    producer_options: ClassVar[dict[str, Any]] = {"idempotent": True}

    def __init__(self, sim: Simulation, threads: Threads | None) -> None:
        super().__init__(sim, threads)
        self.ids: dict[bytes, set[tuple[str, bytes]]] = {}
        self.retry_count = 0

    async def handle(self, message: Message) -> None:
        self.ids.setdefault(message.body, set()).add((message.nsqd, message.id))
        await super().handle(message)

    async def publish(self, producer: Producer, worker: int) -> None:
        await super().publish(producer, worker)
        self.retry_count = producer.stats().retries


def play(seed: int, client: str) -> OnceWorld:
    with Simulation(seed) as sim, threads_of(sim, client) as threads:
        world = OnceWorld(sim, threads)
        sim.run(world.play())
        assert world.problems == []
        assert world.acknowledged
        assert {body: ids for body, ids in world.ids.items() if len(ids) > 1} == {}, "stored twice"
        return world


@pytest.mark.parametrize(("client", "seed"), seeds_of_both(share(SEEDS)))
def test_nothing_is_lost_and_nothing_stored_twice(client, seed):
    play(seed, client)


@pytest.mark.parametrize("client", [ASYNCIO, SYNC])
def test_something_is_sent_again(client):
    assert sum(play(seed, client).retry_count for seed in range(5)) > 0
