"""A scripted nsqd for tests of the client: strict about the protocol, and it does what the test says.

It puts TLS and compression in as nsqd does and asks for secrets. It runs on any event loop
(:class:`tests.sim.loop.Simulation` or a real one), keeps messages in memory, and records what clients do. It shares the
command parser and the layers with the real nsqd, nothing else.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flintmq.message import FRAME_TYPE_MESSAGE, MESSAGE_HEADER
from flintmq.net.layers import LayeredTransport
from flintmq.net.tls_engine import NewEngine, TlsFailed
from flintmq.wire import server as wire
from flintmq.wire.codec import Deflate, Snappy
from flintmq.wire.frames import CLOSE_WAIT_FRAME, HEARTBEAT_FRAME, OK_FRAME, error_frame, response_frame
from flintmq.wire.identify import Negotiated, ServerFeatures, negotiate, parse_request

PORT = 4150
WALL_NS = 1_735_689_600_000_000_000

OK, SILENCE, HANG_UP = "OK", "silence", "hang up"
"""Answers to a publish beside error texts: say OK, say nothing, close without a word."""


@dataclass(slots=True, eq=False)
class Stored:
    """A message the fake has for delivery."""

    id: bytes
    body: bytes
    attempts: int = 0


@dataclass(slots=True)
class Ledger:
    """What is in flight over several fakes: for the rule that it never exceeds ``max_in_flight``."""

    in_flight: int = 0
    in_flight_max: int = 0
    rdy_max: int = 0
    fakes: list[FakeNsqd] = field(default_factory=list)

    def change(self, by: int) -> None:
        self.in_flight += by
        self.in_flight_max = max(self.in_flight_max, self.in_flight)

    def note_rdy(self) -> None:
        total = sum(session.rdy_count for fake in self.fakes for session in fake.sessions)
        self.rdy_max = max(self.rdy_max, total)


class FakeNsqd:
    """One nsqd; deliver with :meth:`add`, script publishes with :attr:`answer`.

    Attributes:
        answer: what to say to a publish: OK, SILENCE, HANG_UP or an error text; called with the command and the bodies.
        refuse_identify, refuse_sub: error texts.
        after_sub: bytes that follow the answer to SUB.
        new_tls: makes the server's side of TLS, when ``features`` grant it.
        is_stuck: it says nothing after the answer to IDENTIFY.
        secrets, secrets_given: what AUTH accepts, and what it was sent.
        late: error text for FIN, REQ and TOUCH.
        commands: (command, bodies) of every publish, in order.
        onces: (producer id, sequence, count of bodies) of those with a sequence.
        stored: bodies answered OK, in order.
        finished, requeued, touched: bodies, (body, timeout in ms), bodies.
        violations: what clients did that no client may do.
    """

    def __init__(self, features: ServerFeatures | None = None, ledger: Ledger | None = None) -> None:
        self.features = features or ServerFeatures(version="fake")
        self.ledger = ledger or Ledger()
        self.ledger.fakes.append(self)
        self.answer: Callable[[str, list[bytes]], str] = lambda command, bodies: OK
        self.refuse_identify = ""
        self.refuse_sub = ""
        self.after_sub = b""
        self.late = ""
        self.new_tls: NewEngine | None = None
        self.is_stuck = False
        self.secrets: list[bytes] = []
        self.secrets_given: list[bytes] = []
        self.is_mute = False
        self.sessions: list[Session] = []
        self.session_count = 0
        self.identified: list[Any] = []
        self.commands: list[tuple[str, list[bytes]]] = []
        self.onces: list[tuple[bytes, int, int]] = []
        self.stored: list[bytes] = []
        self.finished: list[bytes] = []
        self.requeued: list[tuple[bytes, int]] = []
        self.touched: list[bytes] = []
        self.violations: list[str] = []
        self.rdy_history: list[int] = []
        self.backlog: deque[Stored] = deque()
        self.port = 0
        self._next_id = 0
        self._server: asyncio.AbstractServer | None = None

    async def main(self, host: str = "0.0.0.0", port: int = PORT) -> None:
        """Serve until cancelled."""
        await self.listen(host, port)
        await asyncio.get_running_loop().create_future()

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Serve in the background; return the address."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Session(self), host, port)
        self.port = port or self._server.sockets[0].getsockname()[1]
        return f"{host}:{self.port}"

    def stop(self) -> None:
        """Close the port and all connections, as a killed process does."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.drop_all()

    def crash(self) -> None:
        """Forget connections that the kernel has closed; what was in flight will be delivered again."""
        for session in self.sessions:
            session.die()
            self.backlog.extend(session.take_all())
        self.sessions.clear()

    def recover(self) -> None:
        """Be ready for a new life."""
        assert not self.sessions

    def drop_all(self) -> None:
        """Break all connections."""
        for session in [*self.sessions]:
            session.hang_up()

    def add(self, *bodies: bytes, attempts: int = 0) -> None:
        """Have messages delivered."""
        for body in bodies:
            self._next_id += 1
            self.backlog.append(Stored(b"%016x" % self._next_id, body, attempts))
        self.pump()

    def add_many(self, count: int, body: bytes = b"x") -> None:
        self.add(*[body] * count)

    def pump(self) -> None:
        """Deliver what RDY allows, evenly."""
        progress = True
        while self.backlog and progress:
            progress = False
            for session in self.sessions:
                if self.backlog and session.deliver_one(self.backlog[0]):
                    self.backlog.popleft()
                    progress = True
        for session in self.sessions:
            session.flush()

    def expire(self) -> None:
        """Take every message in flight back, as nsqd does when its timeout is over."""
        for session in self.sessions:
            for stored in session.take_all():
                self.backlog.append(stored)
        self.pump()

    def deliver_unasked(self, frame: bytes) -> None:
        """Send raw bytes to every client."""
        for session in self.sessions:
            session.send(frame)


class Session(asyncio.Protocol):
    """One connection of a client."""

    def __init__(self, fake: FakeNsqd) -> None:
        self.fake = fake
        self.rdy_count = 0
        self.in_flight: dict[bytes, Stored] = {}
        self.negotiated: Negotiated | None = None
        self.subscription: tuple[str, str] | None = None
        self.is_closing = False
        self._is_upgrading = False
        self._parser = wire.ServerConnection(wire.ServerLimits())
        self._transport: asyncio.Transport | None = None
        self._out: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.fake.sessions.append(self)
        self.fake.session_count += 1

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self in self.fake.sessions:
            self.fake.sessions.remove(self)
        self.fake.backlog.extend(self.take_all())
        self.fake.pump()

    def die(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._transport = None

    def hang_up(self) -> None:
        assert self._transport is not None
        self._transport.abort()
        if self in self.fake.sessions:
            self.fake.sessions.remove(self)
        self.fake.backlog.extend(self.take_all())

    def take_all(self) -> list[Stored]:
        taken = [*self.in_flight.values()]
        self.in_flight.clear()
        self.fake.ledger.change(-len(taken))
        return taken

    def send(self, data: bytes) -> None:
        self._out.append(data)
        self.flush()

    def flush(self) -> None:
        if self._out and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(self._out))
        self._out.clear()

    def deliver_one(self, stored: Stored) -> bool:
        if self.subscription is None or self.is_closing or len(self.in_flight) >= self.rdy_count:
            return False
        stored.attempts += 1
        self.in_flight[stored.id] = stored
        self.fake.ledger.change(1)
        header = MESSAGE_HEADER.pack(30 + len(stored.body), FRAME_TYPE_MESSAGE, WALL_NS, stored.attempts, stored.id)
        self._out.append(header + stored.body)
        return True

    def heartbeat(self) -> None:
        assert self.negotiated is not None
        if not self.fake.is_mute:
            self.send(HEARTBEAT_FRAME)
        self._beat_later()

    def _beat_later(self) -> None:
        assert self.negotiated is not None
        interval_s = self.negotiated.heartbeat_interval_ms / 1000
        self._timer = asyncio.get_running_loop().call_later(interval_s, self.heartbeat)

    # --- commands ---

    def data_received(self, data: bytes) -> None:
        self._execute(self._parser.receive_data(data))

    def _execute(self, events: list[wire.Event]) -> None:
        while events:
            for event in events:
                self._handle(event)
            is_paused = any(isinstance(event, wire.Identify | wire.Auth) for event in events)
            events = self._parser.resume() if is_paused and not self._is_upgrading else []
        self.fake.pump()
        self.flush()

    def _handle(self, event: wire.Event) -> None:
        fake = self.fake
        if isinstance(event, wire.Identify):
            self._identify(event)
        elif isinstance(event, wire.Auth):
            self._auth(event)
        elif isinstance(event, wire.Subscribe):
            self._subscribe(event)
        elif isinstance(event, wire.Publish):
            self._publish(event)
        elif isinstance(event, wire.Ready):
            self.rdy_count = event.count
            fake.rdy_history.append(event.count)
            fake.ledger.note_rdy()
        elif isinstance(event, wire.FinishRun):
            for number in event.ids:
                self._finish(b"%016x" % number)
        elif isinstance(event, wire.Finish):
            self._finish(event.message_id)
        elif isinstance(event, wire.Requeue):
            if stored := self._answered("REQ", event.message_id):
                fake.requeued.append((stored.body, event.timeout_ms))
                if not event.timeout_ms:
                    fake.backlog.append(stored)
        elif isinstance(event, wire.Touch):
            self._touch(event.message_id)
        elif isinstance(event, wire.Close):
            self.is_closing = True
            self._out.append(CLOSE_WAIT_FRAME)
        elif isinstance(event, wire.Violation):
            fake.violations.append(f"{event.code} {event.detail}")
            self.send(error_frame(event.code, event.detail))
            self.hang_up()
        else:
            assert isinstance(event, wire.Nop), event

    def _identify(self, event: wire.Identify) -> None:
        request = parse_request(event.body)
        self.fake.identified.append(request)
        if self.fake.refuse_identify:
            self._refuse(self.fake.refuse_identify)
            return
        self.negotiated = negotiate(request, self.fake.features)
        self._out.append(response_frame(self.negotiated.response or b"OK"))
        self._beat_later()
        if self.negotiated.upgrades:
            self._is_upgrading = True
            self._upgrade(self.negotiated)

    def _upgrade(self, negotiated: Negotiated) -> None:
        self.flush()
        if self.fake.is_stuck:
            return
        assert self._transport is not None
        layers = LayeredTransport(self, asyncio.get_running_loop())
        layers.take_over(self._transport)
        self._transport = layers
        if negotiated.tls:
            assert self.fake.new_tls is not None
            layers.start_tls(self.fake.new_tls(), self._parser.take_held(), self._secured)
        else:
            self._compress(self._parser.take_held())

    def _secured(self, failure: TlsFailed | None) -> None:
        if failure is not None:
            self._refuse(f"E_IDENTIFY_FAILED IDENTIFY failed {failure}")
            return
        self.send(OK_FRAME)
        self._compress(b"")

    def _compress(self, received: bytes) -> None:
        negotiated, layers = self.negotiated, self._transport
        assert negotiated is not None
        if negotiated.snappy or negotiated.deflate_level:
            assert isinstance(layers, LayeredTransport)
            layers.start_codec(Snappy() if negotiated.snappy else Deflate(negotiated.deflate_level), received)
            self.send(OK_FRAME)
        self._is_upgrading = False
        self._execute(self._parser.resume())
        self.flush()

    def _auth(self, event: wire.Auth) -> None:
        self.fake.secrets_given.append(event.secret)
        if event.secret in self.fake.secrets:
            self._out.append(response_frame(b'{"identity":"me","identity_url":"","permission_count":1}'))
        else:
            self._refuse("E_AUTH_FAILED AUTH failed")

    def _subscribe(self, event: wire.Subscribe) -> None:
        if self.fake.refuse_sub:
            self._refuse(self.fake.refuse_sub)
            return
        self.subscription = event.topic, event.channel
        self._out.append(OK_FRAME + self.fake.after_sub)

    def _refuse(self, error: str) -> None:
        self.send(error_frame(error))
        assert self._transport is not None
        self._transport.close()

    def _publish(self, event: wire.Publish) -> None:
        if event.producer_id is not None:
            self.fake.onces.append((event.producer_id, event.sequence, len(event.bodies)))
        if event.command == "PUB":
            for body in event.bodies:
                self._answer("PUB", [body])
        else:
            self._answer(event.command, [*event.bodies])

    def _answer(self, command: str, bodies: list[bytes]) -> None:
        fake = self.fake
        if self._transport is None or self._transport.is_closing() or self._parser.state == "broken":
            return  # nothing is executed after a fatal error
        fake.commands.append((command, bodies))
        answer = fake.answer(command, bodies)
        if answer == OK:
            fake.stored.extend(bodies)
            self._out.append(OK_FRAME)
        elif answer == HANG_UP:
            self.flush()
            self.hang_up()
        elif answer != SILENCE:
            self._refuse(answer)

    def _finish(self, message_id: bytes) -> None:
        if stored := self._answered("FIN", message_id):
            self.fake.finished.append(stored.body)

    def _touch(self, message_id: bytes) -> None:
        if self.fake.late or message_id not in self.in_flight:
            self._out.append(error_frame("E_TOUCH_FAILED", f"TOUCH {message_id.decode()} failed ID not in flight"))
        else:
            self.fake.touched.append(self.in_flight[message_id].body)

    def _answered(self, command: str, message_id: bytes) -> Stored | None:
        stored = None if self.fake.late else self.in_flight.pop(message_id, None)
        if stored is None:
            text = f"{command} {message_id.decode()} failed ID not in flight"
            self._out.append(error_frame(f"E_{command}_FAILED", text))
        else:
            self.fake.ledger.change(-1)
        return stored
