"""An nsqd that ends, and what it says to those who come late."""

from __future__ import annotations

import asyncio

import pytest
from tests.sim.loop import Simulation
from tests.sim.nsqd_world import World

from flintmq.wire import commands
from flintmq.wire.frames import ENDS_FRAME
from flintmq.wire.peer import Purpose


class Transport(asyncio.Transport):
    """Notes what is written to it, and how it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.end = ""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def write(self, data: object) -> None:
        self.written += bytes(data)  # type: ignore[call-overload]

    def close(self) -> None:
        self.end = "closed"

    def abort(self) -> None:
        self.end = "aborted"


@pytest.mark.parametrize("purpose", [Purpose.CLIENTS, Purpose.DEAD_LETTERS])
def test_a_node_that_hands_on_to_it_then_is_told_that_nothing_is_taken(purpose: Purpose):
    """Its connection may have been under way, with a publish behind the handshake: that is certainly not stored."""
    with Simulation(1) as sim:
        world = World(sim, "os")

        async def scenario() -> None:
            world.start()
            await asyncio.sleep(1.0)
            world.nsqd.clients.close()
            transport = Transport()
            session = world.nsqd._session_of_node(purpose)
            session.connection_made(transport)
            session.data_received(commands.MAGIC_V2 + commands.pub("orders", b"late"))
            assert (transport.written, transport.end) == (ENDS_FRAME, "closed")
            assert "orders" not in world.nsqd.node.engine.broker.topics

        sim.run(scenario())
