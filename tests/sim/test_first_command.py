"""How long nsqd waits for a client to say something, in simulated time: who only opens the door is shown out."""

from __future__ import annotations

import asyncio
from functools import partial

from tests.sim.loop import Simulation
from tests.sim.nsqd_world import PORT, Wire, World

from flintmq.limits import FIRST_COMMAND_DEADLINE_S, FIRST_HEARTBEAT_S, MAGIC_DEADLINE_S
from flintmq.wire import commands
from flintmq.wire.frames import HEARTBEAT

PATIENCE_S = 200.0


class Mute(Wire):
    """Reads what it is sent and answers nothing."""

    def data_received(self, data):
        self._on_frame(-1, data)


class Doors(World):
    """Clients that say more or less, and when each was closed: seconds from its connection, None for not at all."""

    def __init__(self, sim):
        super().__init__(sim, "os")
        self.closed_s: dict[str, float | None] = {}
        self.heartbeats_s: dict[str, list[float]] = {}

    async def play(self):
        self.start()
        node = self.sim.node("c")
        node.start(self._knock)
        await node.exited()

    async def _knock(self):
        await asyncio.sleep(1.0)
        await asyncio.gather(
            self._client("nothing", Mute, b""),
            self._client("half a magic", Mute, commands.MAGIC_V2[:2]),
            self._client("magic", Mute, commands.MAGIC_V2),
            self._client("magic, heartbeats answered", Wire, commands.MAGIC_V2),
            self._client("half a command", Mute, commands.MAGIC_V2 + b"PUB t\n\0\0"),
            self._client("half a command, heartbeats ignored", Mute, commands.MAGIC_V2 + b"IDENTI"),
            self._client("a command, then silence", Mute, commands.MAGIC_V2 + commands.NOP),
            self._client("a producer that never identified", Wire, commands.MAGIC_V2 + commands.pub("t", b"x")),
            self._client("a consumer that never identified", Wire, commands.MAGIC_V2 + commands.sub("t", "c")),
            self._client("identified", Wire, commands.MAGIC_V2 + commands.identify(b"{}")),
        )

    async def _client(self, name, kind, first):
        loop = asyncio.get_running_loop()
        times = self.heartbeats_s[name] = []
        begun = loop.time()

        def on_frame(_kind, data):
            if HEARTBEAT in data:
                times.append(round(loop.time() - begun))

        _, wire = await loop.create_connection(partial(kind, on_frame), "nsqd", PORT)
        wire.send(first)
        await asyncio.wait((wire.lost,), timeout=PATIENCE_S)
        self.closed_s[name] = round(loop.time() - begun) if wire.lost.done() else None
        wire.transport.abort()


def test_who_says_nothing_is_closed_in_time():
    with Simulation(1) as sim:
        world = Doors(sim)
        sim.run(world.play())
    assert world.closed_s == {
        "nothing": MAGIC_DEADLINE_S,
        "half a magic": MAGIC_DEADLINE_S,
        "magic": FIRST_COMMAND_DEADLINE_S,
        "magic, heartbeats answered": None,
        "half a command": FIRST_COMMAND_DEADLINE_S,
        "half a command, heartbeats ignored": FIRST_COMMAND_DEADLINE_S,
        "a command, then silence": 90,  # the heartbeat after two that were not answered
        "a producer that never identified": None,
        "a consumer that never identified": None,
        "identified": None,
    }
    assert world.heartbeats_s["magic"][0] == FIRST_HEARTBEAT_S
    assert world.heartbeats_s["nothing"] == []
    assert world.heartbeats_s["a command, then silence"][0] == 30, "only who has said nothing is asked earlier"
