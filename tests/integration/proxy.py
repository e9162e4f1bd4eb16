"""A TCP proxy for tests: what networks do to connections, switched while it runs.

It listens on a free port of 127.0.0.1 and joins each connection with one of its own to the target. ``up`` is the
direction from the client to the target, ``down`` the other. A fault is an attribute of a direction and holds from the
next byte on, for open connections and later ones alike. Places count bytes of one connection in one direction, from its
start or from when the rule was set, whichever came later.

Rules of this file: an event loop in a thread does all IO; tests set plain attributes and call blocking methods, from
any thread; every buffer is bounded; nothing but 127.0.0.1 is spoken to; chance comes from a seed.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

CHUNK_BYTES = 64 * 1024
_WAITING_BYTES_MAX = 1024 * 1024
_PATIENCE_S = 60.0
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, 0 s: closing sends RST and drops what was not sent
_LOOK_S = 0.005

Watch = Callable[[int, str, bytes], None]


@dataclass
class Direction:
    """What happens to the bytes of one direction.

    Attributes:
        delay_s: how much later each byte arrives.
        bytes_per_s: how many may pass, for each connection; None: as many as there are.
        piece_bytes_max: bytes pass in pieces of 1 to so many, a packet each; 0: as they come.
        cut_between: each connection is cut after a random number of bytes from this range; None: never.
        is_reset: a cut is a RST on both sides; otherwise a FIN, behind the bytes that passed.
        corrupt_between: in each connection one bit is flipped, in a random byte of this range; None: in none.
        is_stalled: nothing is read any more, so that the sender's kernel fills up.
        is_dropped: bytes and ends of streams are read and thrown away, as when a cable is pulled.
        byte_count: bytes that were passed on.
        corrupted_count: bits that were flipped.
    """

    delay_s: float = 0.0
    bytes_per_s: float | None = None
    piece_bytes_max: int = 0
    cut_between: tuple[int, int] | None = None
    is_reset: bool = True
    corrupt_between: tuple[int, int] | None = None
    is_stalled: bool = False
    is_dropped: bool = False
    byte_count: int = 0
    corrupted_count: int = 0

    def heal(self) -> None:
        """Take every fault away; the counts stay."""
        for each in fields(self):
            if not each.name.endswith("_count"):
                setattr(self, each.name, each.default)


@dataclass(eq=False)
class _Pipe:
    """One direction of one connection."""

    name: str
    rules: Direction
    watch: Callable[[str, bytes], None]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    random: random.Random
    position: int = 0
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)
    waiting_bytes: int = 0
    has_come: asyncio.Event = field(default_factory=asyncio.Event)
    cut_range: tuple[int, int] | None = None
    cut_at: int = 0
    corrupt_range: tuple[int, int] | None = None
    corrupt_at: int = 0

    async def read(self) -> None:
        """Take bytes in and note when they are due."""
        loop = asyncio.get_running_loop()
        while True:
            if self.rules.is_stalled or self.waiting_bytes >= _WAITING_BYTES_MAX:
                await asyncio.sleep(_LOOK_S)
                continue
            try:
                data = await self.reader.read(CHUNK_BYTES)
            except OSError:
                if not self.rules.is_dropped:
                    raise
                data = b""
            if self.rules.is_dropped:
                if not data:
                    await asyncio.Event().wait()  # the other side never hears of the end
                continue
            self.waiting.append((loop.time() + self.rules.delay_s, data))
            self.waiting_bytes += len(data)
            self.has_come.set()
            if not data:
                return

    async def write(self) -> bool:
        """Pass on what is due; True when the connection is to be cut, False at the end of the stream."""
        loop = asyncio.get_running_loop()
        while True:
            if not self.waiting:
                self.has_come.clear()
                await self.has_come.wait()
            if self.rules.is_stalled or self.rules.is_dropped:
                await asyncio.sleep(_LOOK_S)
                continue
            due_at, data = self.waiting.popleft()
            self.waiting_bytes -= len(data)
            if (left_s := due_at - loop.time()) > 0:
                await asyncio.sleep(left_s)
            if not data:
                return False
            if await self._pass_on(data):
                return True

    async def _pass_on(self, data: bytes) -> bool:
        """Write ``data`` by the rules; True when it reached the place of the cut."""
        rules = self.rules
        while data:
            size = self.random.randint(1, rules.piece_bytes_max) if rules.piece_bytes_max else len(data)
            if rules.bytes_per_s is not None:
                size = min(size, max(1, int(rules.bytes_per_s / 50)))
            left = self._until_cut()
            if left is not None and left <= 0:
                return True
            piece, data = data[: min(size, left or size)], data[min(size, left or size) :]
            if rules.bytes_per_s is not None:
                await asyncio.sleep(len(piece) / rules.bytes_per_s)
            piece = self._corrupted(piece)
            self.position += len(piece)
            rules.byte_count += len(piece)
            self.watch(self.name, piece)
            self.writer.write(piece)
            await self.writer.drain()
            if rules.piece_bytes_max:
                await asyncio.sleep(0)
        left = self._until_cut()
        return left is not None and left <= 0

    def _until_cut(self) -> int | None:
        if self.rules.cut_between != self.cut_range:
            self.cut_range = self.rules.cut_between
            self.cut_at = self.position + self.random.randint(*self.cut_range) if self.cut_range else 0
        return self.cut_at - self.position if self.cut_range else None

    def _corrupted(self, piece: bytes) -> bytes:
        if self.rules.corrupt_between != self.corrupt_range:
            self.corrupt_range = self.rules.corrupt_between
            self.corrupt_at = self.position + self.random.randint(*self.corrupt_range) if self.corrupt_range else -1
        at = self.corrupt_at - self.position
        if not self.corrupt_range or not 0 <= at < len(piece):
            return piece
        self.rules.corrupted_count += 1
        flipped = piece[at] ^ (1 << self.random.randrange(8))
        return piece[:at] + bytes([flipped]) + piece[at + 1 :]


@dataclass(eq=False)
class _Connection:
    """Both sides of a connection."""

    writers: list[asyncio.StreamWriter]
    watch: Callable[[str, bytes], None]


class Proxy:
    """Passes TCP connections on to a target, with faults.

    Args:
        target: host and port; read anew for each connection.
        seed: decides the places of cuts, the sizes of pieces and the bits that are flipped.

    Attributes:
        up, down: what happens to bytes from the client, and to bytes from the target.
        accepts_only: new connections are accepted and nothing else: no byte is read, the target is not asked.
        watch: told, on the proxy's thread, of what passes: number of the connection, ``up`` or ``down``, the bytes; and
            ``end``, when the connection is over: once or twice, and before either side can know of a cut.
        connection_count: connections accepted so far.
        cut_count: connections that a rule or :meth:`cut` ended.
    """

    def __init__(self, target: tuple[str, int], seed: int = 0) -> None:
        self.target = target
        self.up = Direction()
        self.down = Direction()
        self.accepts_only = False
        self.watch: Watch | None = None
        self.connection_count = 0
        self.cut_count = 0
        self._random = random.Random(seed)
        self._port = 0
        self._open: dict[asyncio.Task[None], _Connection] = {}
        self._server: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._in_loop(self._listen)
        return self

    def __exit__(self, *error: object) -> None:
        self._in_loop(self._end)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_PATIENCE_S)
        self._loop.close()

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens, also while it refuses."""
        return "127.0.0.1", self._port

    @property
    def open_count(self) -> int:
        """Connections that are open now."""
        return len(self._open)

    def heal(self) -> None:
        """Take every fault away; connections that were cut stay cut."""
        self.up.heal()
        self.down.heal()
        self.accepts_only = False
        self.listen()

    def cut(self, *, is_reset: bool = True) -> None:
        """End every connection now, with RST or FIN."""

        async def cut() -> None:
            await self._cut_all(is_reset)

        self._in_loop(cut)

    def refuse(self) -> None:
        """Refuse new connections: nobody listens. Open ones go on."""
        self._in_loop(self._stop_listening)

    def listen(self) -> None:
        """Accept connections again, at the same port."""
        self._in_loop(self._listen)

    # in the loop

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _in_loop(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        asyncio.run_coroutine_threadsafe(function(), self._loop).result(_PATIENCE_S)

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port, limit=CHUNK_BYTES)
            self._port = self._server.sockets[0].getsockname()[1]

    async def _stop_listening(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()

    async def _end(self) -> None:
        await self._stop_listening()
        await self._cut_all(is_reset=True)

    async def _cut_all(self, is_reset: bool) -> None:
        for connection in self._open.values():
            connection.watch("end", b"")  # before anybody can act on it
            self._close(connection.writers, is_reset)
            self.cut_count += 1
        tasks = [*self._open]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @staticmethod
    def _close(writers: list[asyncio.StreamWriter], is_reset: bool) -> None:
        for writer in writers:
            own = writer.get_extra_info("socket")
            if is_reset and own.fileno() >= 0:
                own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                writer.transport.abort()
            else:
                writer.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.connection_count += 1
        connection = self._open[task] = _Connection([writer], partial(self._watched, self.connection_count))
        try:
            while self.accepts_only:
                await asyncio.sleep(_LOOK_S)
            await self._join(reader, writer, connection)
        except (OSError, asyncio.CancelledError):
            pass  # one side is gone or the test ended it: so is the other
        finally:
            self._close(connection.writers, is_reset=False)
            del self._open[task]
            connection.watch("end", b"")

    def _watched(self, connection: int, what: str, data: bytes) -> None:
        if self.watch is not None:
            self.watch(connection, what, data)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: _Connection) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self.target, limit=CHUNK_BYTES)
        connection.writers.append(far_writer)
        for each in connection.writers:
            each.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        chances = [random.Random(self._random.random()) for _ in range(2)]
        pipes = [
            _Pipe("up", self.up, connection.watch, reader, far_writer, chances[0]),
            _Pipe("down", self.down, connection.watch, far_reader, writer, chances[1]),
        ]
        tasks = [asyncio.ensure_future(work) for pipe in pipes for work in (pipe.read(), pipe.write())]
        try:
            await self._until_over(tasks, pipes, connection)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _until_over(
        self, tasks: Sequence[asyncio.Future[bool | None]], pipes: list[_Pipe], connection: _Connection
    ) -> None:
        """Return when a direction has ended, was cut, or broke.

        No client and no daemon of NSQ goes on after the end of one direction, so one ends the other.
        """
        writing = {tasks[1]: pipes[0], tasks[3]: pipes[1]}
        waiting = set(tasks)
        while True:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task, pipe in writing.items():
                if task in done:
                    if task.result():
                        self.cut_count += 1
                        connection.watch("end", b"")
                        self._close(connection.writers, pipe.rules.is_reset)
                    return
            for task in done:
                task.result()
