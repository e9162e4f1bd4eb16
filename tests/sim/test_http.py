"""HTTP between daemons on the simulated network: the client that runs there is the real one."""

from __future__ import annotations

import asyncio

import pytest
from tests.sim.loop import Simulation

from flintmq.net.http_client import HttpClient
from flintmq.net.http_exchange import NoAnswer, Request

PORT = 4161


class Server(asyncio.Protocol):
    """Answers every request with its number on this machine."""

    count = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.received = b""

    def data_received(self, data: bytes) -> None:
        self.received += data
        while b"\r\n\r\n" in self.received:
            _, _, self.received = self.received.partition(b"\r\n\r\n")
            type(self).count += 1
            body = b"%d" % self.count
            answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
            self.transport.write(answer)  # type: ignore[attr-defined]


async def serve() -> None:
    await asyncio.get_running_loop().create_server(Server, "", PORT)
    await asyncio.get_running_loop().create_future()


def run(seed: int) -> tuple[list[str], str]:
    """Ask while the network is cut, healed, and the server is killed and comes again; what was heard, and the trace."""
    heard: list[str] = []
    Server.count = 0
    with Simulation(seed) as sim:
        server = sim.node("lookup")
        server.start(serve)

        async def ask(client: HttpClient) -> None:
            request = Request.to("GET", f"http://lookup:{PORT}/nodes")
            try:
                answer = await client.ask(request, timeout_s=5.0, connect_timeout_s=2.0)
                heard.append(answer.body.decode())
            except NoAnswer as failure:
                heard.append(failure.reason)

        async def scenario() -> None:
            client = HttpClient(idle_max=2)
            await asyncio.sleep(1)
            await ask(client)
            await ask(client)
            sim.network.partition("driver", "lookup")
            await ask(client)
            sim.network.heal()
            await ask(client)
            server.kill()
            await asyncio.sleep(1)
            await ask(client)
            server.restart()
            await asyncio.sleep(20)
            await ask(client)
            await client.close()

        sim.run(scenario())
        return heard, sim.trace_hash


@pytest.mark.parametrize("seed", range(10))
def test_a_client_on_a_bad_network(seed: int):
    heard, trace = run(seed)
    assert heard[:2] == ["1", "2"]
    assert heard[2] in ("no answer within 5 s", "no connection within 2 s")
    assert heard[3].isdigit()
    assert heard[4] == "Connection refused"
    assert heard[5].isdigit()
    assert (heard, trace) == run(seed), "the same seed is the same run"
