"""Whole daemons in one process: an event loop on virtual time, a network, and machines that can be killed.

::

    with Simulation(seed=7) as sim:
        nsqd = sim.node("nsqd")
        nsqd.start(lambda: main(nsqd.env, nsqd.files, options))
        sim.run(scenario(sim))                  # a coroutine; connects to ("nsqd", 4150), kills nsqd, asserts

What is here: :class:`Simulation` (one seed, one world), :class:`Node` (a machine: name, address, disk, clock) and
:class:`Process` (one life of its daemon), :class:`Network` with :class:`SimTransport` (TCP), :class:`SimLoop`.

Rules of this file:

- A run is decided by its seed and by nothing else: no real time, no threads, no iteration over sets, no hash order, no
  garbage collection while it runs. ``sim.trace_hash`` is equal for equal seeds.
- Every callback belongs to the process in whose context it was made. Callbacks of dead processes are dropped when they
  come up, so a killed process runs nothing more: no ``finally``, no ``connection_lost``. Those of paused ones wait.
- What a kernel does (segments, acknowledgements, resets of orphaned sockets) belongs to no process and goes on.
- Time passes only while nothing can run. Computing takes no time.
- Of asyncio's private names only ``Handle._run``, ``Handle._cancelled``, ``Task._log_destroy_pending`` and
  ``Task._log_traceback`` are used; ``test_kit.py`` guards them for new Python versions.

The model of TCP: bytes in order, cut and glued at random, delayed; at most a window of bytes that the peer's process
has not read; a direction that is cut holds segments (and, for the other direction, acknowledgements) until it heals or
the retransmission gives up. A killed process's sockets are closed by its kernel: end of stream, or a reset when it left
bytes unread. A machine without power answers nothing, and resets old connections once it is up again, but only when it
hears from them: who does not send never learns. Left out: TLS, UDP, unix sockets, listen backlogs, file descriptors.

Source: tests/sim/README.md.
"""

from __future__ import annotations

import asyncio
import contextvars
import enum
import errno
import gc
import hashlib
import heapq
import ipaddress
import os
import random
import signal
import socket
import sys
import weakref
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar, TypeVarTuple

from tests.sim.disk import CrashingDisk, DiskCrashed

from flintmq.env import Env
from flintmq.testing import MemoryFiles, Operation
from flintmq.testing.clock import WALL_START_NS

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

START_S = 1000.0  # of the monotonic clock; not zero, so that nothing mistakes "at the start" for "never"
RUN_S_MAX = 3600.0
EVENT_COUNT_MAX = 20_000_000
INSTANT_EVENT_COUNT_MAX = 200_000  # callbacks without time passing: more is a busy loop
TRACE_COUNT = 200
EXIT_GRACE_S = 60.0
BURY_TRIES = 10  # of a coroutine that awaits something when it is cancelled
EPHEMERAL_PORT = 40_000
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ANY_ADDRESS = ("", "0.0.0.0", "::")
SYN_RETRIES_S = (1, 2, 4, 8, 16, 32, 64)  # Linux: gives up after 127 s
UNACKNOWLEDGED_S = 0.4
"""After which a sender that hears of no acknowledgement sends the same again and nothing new, as TCP does."""
SEED_VARIABLE = "FLINTMQ_SIM_SEED"
ALL_VARIABLE = "FLINTMQ_SIM_ALL"
TRACE_VARIABLE = "FLINTMQ_SIM_TRACE"


class SimulationError(Exception):
    """The simulated world cannot go on, or something in it failed that nobody handled."""


# ---------------------------------------------------------------------------------------------------------- event loop

_PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class _Handle(asyncio.Handle):
    __slots__ = ("process",)

    process: Process | None


class _TimerHandle(asyncio.TimerHandle):
    __slots__ = ("process",)

    process: Process | None


class Failure(NamedTuple):
    """Something the event loop was told of because nobody handled it.

    Attributes:
        node: where.
        message: what asyncio says about it.
        exception: what was raised, if anything.
    """

    node: str
    message: str
    exception: BaseException | None


class SimLoop(asyncio.AbstractEventLoop):
    """An asyncio event loop whose time is virtual and whose callbacks belong to simulated processes.

    Timers that are due at the same time run in the order they were made; asyncio's own loop does not promise that.

    Attributes:
        network: carries what :meth:`create_connection` connects.
        failures: what reached the exception handler.
        event_count: callbacks run so far.
        deadline: :meth:`time` at which the run is given up.
        is_strict: whether a failure ends the run.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.failures: list[Failure] = []
        self.event_count = 0
        self.deadline = float("inf")
        self.is_strict = True
        self.recent: deque[tuple[Any, ...]] = deque(maxlen=TRACE_COUNT)
        self.echo: Callable[[str], None] | None = None
        self._hash = hashlib.blake2b(digest_size=8)
        self._now = START_S
        self._ready: deque[_Handle | _TimerHandle] = deque()
        self._timers: list[tuple[float, int, _TimerHandle]] = []
        self._timer_count = 0
        self._instant_event_count = 0
        self._asyncgens: list[AsyncGenerator[Any, Any]] = []
        self._is_running = False
        self._is_stopping = False
        self._is_closed = False
        self._debug = False

    # -- what happened

    def trace(self, kind: str, *details: object) -> None:
        """Add an event to the trace hash and to the events shown when the run fails."""
        event = (round(self._now, 9), kind, *details)
        self._hash.update(repr(event).encode())
        self.recent.append(event)
        if self.echo is not None:
            self.echo(format_event(event))

    @property
    def trace_hash(self) -> str:
        return f"{self._hash.hexdigest()}-{self.event_count}"

    # -- running

    def run_forever(self) -> None:
        self._check_closed()
        if asyncio._get_running_loop() is not None:
            raise RuntimeError("a simulation cannot run inside a running event loop: make the test a plain function")
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=self._asyncgens.append, finalizer=None)
        asyncio._set_running_loop(self)
        self._is_running = True
        self._is_stopping = False
        try:
            while not self._is_stopping:
                self._run_once()
        finally:
            self._is_running = False
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def run_until_complete(self, future: Generator[Any, None, T] | Awaitable[T]) -> T:
        done: asyncio.Future[T] = asyncio.ensure_future(future, loop=self)  # type: ignore[arg-type]  # as in typeshed
        done.add_done_callback(self._stop_after)
        try:
            self.run_forever()
        finally:
            done.remove_done_callback(self._stop_after)
        return done.result()

    def _stop_after(self, _future: asyncio.Future[Any]) -> None:
        self.stop()

    def _run_once(self) -> None:
        if not self._ready:
            self._pass_time()
        timers = self._timers
        while timers and timers[0][0] <= self._now:
            self._ready.append(heapq.heappop(timers)[2])
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if handle._cancelled:
                continue
            process = handle.process
            if process is not None and not process.is_scheduled:
                if process.is_alive:
                    process.held.append(handle)
                continue
            self.event_count += 1
            self._instant_event_count += 1
            handle._run()
        self.check()
        if self._instant_event_count > INSTANT_EVENT_COUNT_MAX or self.event_count > EVENT_COUNT_MAX:
            raise SimulationError(
                f"busy loop: {self.event_count} callbacks, {self._instant_event_count} at this instant"
            )

    def _pass_time(self) -> None:
        """Go to the next timer that will run."""
        timers = self._timers
        while timers and (timers[0][2]._cancelled or _is_dead(timers[0][2].process)):
            heapq.heappop(timers)
        if not timers:
            raise SimulationError("deadlock: nothing is scheduled any more and the awaited coroutine is not done")
        when = timers[0][0]
        if when > self.deadline:
            raise SimulationError(f"not done after {self.deadline - START_S:.0f} virtual seconds")
        if when > self._now:
            self._now = when
            self._instant_event_count = 0

    def stop(self) -> None:
        self._is_stopping = True

    def is_running(self) -> bool:
        return self._is_running

    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        if self._is_running:
            raise RuntimeError("Cannot close a running event loop")
        self._is_closed = True
        self._ready.clear()
        self._timers.clear()

    def _check_closed(self) -> None:
        if self._is_closed:
            raise RuntimeError("Event loop is closed")

    async def shutdown_asyncgens(self) -> None:
        for generator in self._asyncgens:
            await generator.aclose()
        self._asyncgens.clear()

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Return at once: there are no threads."""

    # -- callbacks

    def time(self) -> float:
        return self._now

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        self._check_closed()
        handle = _Handle(callback, args, self, context)
        handle.process = _PROCESS.get() if context is None else context.get(_PROCESS)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Same as :meth:`call_soon`: there are no other threads."""
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        self._check_closed()
        handle = _TimerHandle(when, callback, args, self, context)
        handle.process = _PROCESS.get() if context is None else context.get(_PROCESS)
        self._timer_count += 1
        heapq.heappush(self._timers, (when, self._timer_count, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """A cancelled timer is dropped when its time comes."""

    def resume(self, handles: Iterable[_Handle | _TimerHandle]) -> None:
        """Run callbacks that were held while their process was paused."""
        self._ready.extend(handles)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]  # newer Pythons add arguments
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, **options: Any
    ) -> asyncio.Task[T]:
        if self._is_closed:
            coro.close()  # or Python complains that it was never awaited
        self._check_closed()
        task = asyncio.Task(coro, loop=self, name=name, **options)
        context: contextvars.Context | None = options.get("context")
        process = _PROCESS.get() if context is None else context.get(_PROCESS)
        if process is not None:
            process.adopt(task)
        return task

    def run_in_executor(  # type: ignore[override]  # a coroutine there, the future it returns here
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run it as ``env.run_blocking`` of the calling process does."""
        return _current_process().submit(func, args)

    def get_task_factory(self) -> None:
        return None

    # -- failures

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        process = _PROCESS.get()
        exception = context.get("exception")
        if isinstance(exception, DiskCrashed) or _is_dead(process):
            return  # the last words of the dead
        self.fail(process, context.get("message") or "unhandled exception", exception)
        if process is not None and process.exception_handler is not None:
            process.exception_handler(self, context)

    def fail(self, process: Process | None, message: str, exception: BaseException | None) -> None:
        """Record that something went wrong which nobody handled."""
        node = process.node.name if process is not None else "kernel"
        self.trace("failure", node, message, repr(exception))
        self.failures.append(Failure(node, message, exception))

    def check(self) -> None:
        """Raise the first failure, if the loop is strict."""
        if self.failures and self.is_strict:
            failure = self.failures[0]
            raise SimulationError(f"{failure.node}: {failure.message}: {failure.exception!r}") from failure.exception

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Nothing beyond the record that :meth:`call_exception_handler` has made."""

    def set_exception_handler(
        self, handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None
    ) -> None:
        """Set the handler of the calling process; failures are recorded all the same."""
        _current_process().exception_handler = handler

    def get_exception_handler(self) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None:
        return _current_process().exception_handler

    def get_debug(self) -> bool:
        return self._debug

    def set_debug(self, enabled: bool) -> None:
        self._debug = enabled

    # -- signals: node.signal() delivers them

    def add_signal_handler(self, sig: int, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        _current_process().signal_handlers[sig] = partial(callback, *args)

    def remove_signal_handler(self, sig: int) -> bool:
        return _current_process().signal_handlers.pop(sig, None) is not None

    # -- network

    async def getaddrinfo(  # type: ignore[override]  # the types of hosts and ports that make sense here
        self,
        host: str | None,
        port: int | str | None,
        *,
        family: int = 0,
        type: int = 0,  # noqa: A002  asyncio's name
        proto: int = 0,
        flags: int = 0,
    ) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        """Resolve names and addresses of nodes; ``localhost`` is 127.0.0.1."""
        address = self.network.address_of(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, int(port or 0)))]

    async def create_server(  # type: ignore[override]  # what does not exist here is in options
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str | Sequence[str] | None = None,
        port: int | None = None,
        *,
        ssl: object = None,
        sock: object = None,
        start_serving: bool = True,
        **options: Any,
    ) -> SimServer:
        _refuse_unsupported(ssl=ssl, sock=sock)
        hosts = [host or ""] if host is None or isinstance(host, str) else list(host)
        server = SimServer(_current_process(), protocol_factory, hosts, port or 0)
        if start_serving:
            await server.start_serving()
        return server

    async def create_connection(  # type: ignore[override]  # what does not exist here is in options
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str | None = None,
        port: int | None = None,
        *,
        ssl: object = None,
        sock: object = None,
        **options: Any,
    ) -> tuple[SimTransport, asyncio.BaseProtocol]:
        """Connect to a listener of a node, named by the node's name or address.

        Raises:
            ConnectionRefusedError: nobody listens there.
            TimeoutError: the machine is down or unreachable, after 127 virtual seconds.
            socket.gaierror: no node has that name.
        """
        _refuse_unsupported(ssl=ssl, sock=sock)
        transport = await self.network.connect(_current_process(), host or "localhost", port or 0)
        try:
            protocol = protocol_factory()
        except BaseException:
            transport.abandon()
            raise
        await transport.begin(protocol)
        return transport, protocol


def _refuse_unsupported(**arguments: object) -> None:
    for name, value in arguments.items():
        if value:
            raise NotImplementedError(f"the simulated network has no {name}=")


def _is_dead(process: Process | None) -> bool:
    return process is not None and not process.is_alive


def _current_process() -> Process:
    process = _PROCESS.get()
    if process is None:
        raise SimulationError("this runs in no process: start it with node.start() or sim.run()")
    return process


def format_event(event: tuple[Any, ...]) -> str:
    """One line of the trace."""
    when, kind, *details = event
    return f"{when - START_S:12.6f} {kind:<10} {' '.join(str(detail) for detail in details)}"


# ------------------------------------------------------------------------------------------------------------- network


class Mark(enum.Enum):
    """What travels besides bytes."""

    END = "end of stream"
    RESET = "reset"


class Network:
    """Every connection of the simulation, and what is wrong with the cables.

    Attributes:
        latency_min_s, latency_mean_s: one way, exponential above the minimum.
        retransmit_probability: how often a segment takes 0.2 s longer, as a lost one does.
        split_probability: how often a write arrives in several pieces.
        windows_bytes: how much a sender may have under way; each connection draws one of these.
        give_up_s: how long a cut connection retransmits before it fails; Linux: about 924 s.
    """

    def __init__(self, rng: random.Random) -> None:
        self.latency_min_s = 50e-6
        self.latency_mean_s = 0.5e-3
        self.retransmit_probability = 0.002
        self.split_probability = 0.3
        self.windows_bytes = (4 * 1024, 64 * 1024, 256 * 1024)
        self.give_up_s = 924.0
        self.rng = rng
        self.nodes: dict[str, Node] = {}
        self.loop = SimLoop(self)  # type: ignore[abstract]  # what is missing raises NotImplementedError
        self._cuts: dict[tuple[str, str], None] = {}
        self._stalled: dict[_Wire, None] = {}

    # -- faults

    def cut(self, source: str, target: str) -> None:
        """Let nothing through from one node to another; the other direction still works."""
        self.loop.trace("cut", source, target)
        self._cuts[source, target] = None

    def partition(self, one: str, other: str) -> None:
        """Cut both directions between two nodes."""
        self.cut(one, other)
        self.cut(other, one)

    def isolate(self, name: str) -> None:
        """Cut a node off from all others."""
        for other in self.nodes:
            if other != name:
                self.partition(name, other)

    def restore(self, source: str, target: str) -> None:
        """Let one direction through again; what was held arrives after a retransmission."""
        self.loop.trace("restore", source, target)
        self._cuts.pop((source, target), None)
        self.retry()

    def heal(self) -> None:
        """Let everything through again."""
        self.loop.trace("heal")
        self._cuts.clear()
        self.retry()

    def reset(self, one: str, other: str) -> None:
        """Reset every connection between two nodes, as a firewall that loses its table does."""
        self.loop.trace("reset", one, other)
        for transport in [*self.nodes[one].transports, *self.nodes[other].transports]:
            if {transport.node.name, transport.peer.node.name} == {one, other}:
                transport.arrive(Mark.RESET)

    def is_cut(self, source: Node, target: Node) -> bool:
        return source is not target and (source.name, target.name) in self._cuts

    def note_stalled(self, wire: _Wire, is_stalled: bool) -> None:
        """Keep the wires that wait for a cable or for a machine."""
        if is_stalled:
            self._stalled[wire] = None
        else:
            self._stalled.pop(wire, None)

    def retry(self) -> None:
        """Let the wires that wait try again."""
        for wire in list(self._stalled):
            wire.retry()

    # -- names and connections

    def address_of(self, host: str | None) -> str:
        """The address a name stands for.

        Raises:
            socket.gaierror: no node has that name.
        """
        if host in LOOPBACK:
            return "127.0.0.1"
        if not host or host in ANY_ADDRESS:
            return "0.0.0.0"
        if host in self.nodes:
            return self.nodes[host].address
        try:
            return str(ipaddress.ip_address(host))
        except ValueError:
            raise socket.gaierror(socket.EAI_NONAME, f"Name or service not known: {host}") from None

    def _node_at(self, address: str, caller: Node) -> Node | None:
        if address in ("127.0.0.1", "0.0.0.0"):
            return caller
        return next((node for node in self.nodes.values() if node.address == address), None)

    def _is_reachable(self, source: Node, target: Node) -> bool:
        return target.is_up and not self.is_cut(source, target) and not self.is_cut(target, source)

    def latency_s(self, source: Node, target: Node) -> float:
        if source is target:
            return self.rng.uniform(5e-6, 30e-6)
        late = 0.2 if self.rng.random() < self.retransmit_probability else 0.0
        return self.latency_min_s + self.rng.expovariate(1 / self.latency_mean_s) + late

    async def connect(self, process: Process, host: str, port: int) -> SimTransport:
        """Do the three-way handshake; returns the connecting end."""
        source = process.node
        address = self.address_of(host)
        target = self._node_at(address, source)
        for wait_s in SYN_RETRIES_S:
            if target is not None and self._is_reachable(source, target):
                await asyncio.sleep(self.latency_s(source, target))
                server = target.listener(address, port)
                if server is None:
                    await asyncio.sleep(self.latency_s(target, source))
                    raise ConnectionRefusedError(errno.ECONNREFUSED, f"Connect call failed ({host!r}, {port})")
                transport = self._open(process, server, address, port)
                try:
                    await asyncio.sleep(self.latency_s(target, source))
                except BaseException:
                    transport.abandon()
                    raise
                return transport
            await asyncio.sleep(wait_s)
        raise TimeoutError(errno.ETIMEDOUT, f"Connect call failed ({host!r}, {port})")

    def _open(self, process: Process, server: SimServer, address: str, port: int) -> SimTransport:
        local_address = address if address == "127.0.0.1" else process.node.address
        local = (local_address, process.node.free_port())
        remote = (address if address != "0.0.0.0" else "127.0.0.1", port)
        window_bytes = self.rng.choice(self.windows_bytes)
        client = SimTransport(self, process, local, remote, window_bytes)
        accepted = SimTransport(self, server.process, remote, local, window_bytes)
        client.join(accepted)
        accepted.join(client)
        self.loop.trace("connect", process.node.name, server.process.node.name, local[1], port)
        server.accept(accepted)
        return client


class _Wire:
    """One direction of a connection: what one kernel has sent and the other has not received, in order.

    It belongs to no process: a killed sender's bytes still arrive.
    """

    def __init__(self, network: Network, source: SimTransport, target: SimTransport) -> None:
        self._network = network
        self._loop = network.loop
        self._source = source
        self._target = target
        self._segments: deque[tuple[float, bytes | Mark]] = deque()
        self._last_arrival = 0.0
        self._is_moving = False
        self._is_stuck = False
        self._acknowledged_bytes = 0
        self._unheard_since: float | None = None  # acknowledgements that do not come back
        self._give_up: asyncio.TimerHandle | None = None

    def send(self, payload: bytes | Mark) -> None:
        rng = self._network.rng
        now = self._loop.time()
        arrival = max(self._last_arrival, now + self._network.latency_s(self._source.node, self._target.node))
        if isinstance(payload, bytes) and len(payload) > 1 and rng.random() < self._network.split_probability:
            for piece in self._split(payload):
                self._segments.append((arrival, piece))
                arrival += rng.expovariate(1 / 100e-6)
        else:
            self._segments.append((arrival, payload))
        self._last_arrival = self._segments[-1][0]
        self._move()

    def _split(self, data: bytes) -> Iterable[bytes]:
        rng = self._network.rng
        cuts = sorted({rng.randrange(1, len(data)) for _ in range(rng.randint(1, 3))})
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            yield data[start:end]

    def acknowledge(self, size: int) -> None:
        """The target's process has read bytes; the sender's kernel may hear of it later."""
        self._acknowledged_bytes += size
        self._pass_acknowledgements()
        self._note_stalled()

    def _pass_acknowledgements(self) -> None:
        if not self._network.is_cut(self._target.node, self._source.node):
            size, self._acknowledged_bytes, self._unheard_since = self._acknowledged_bytes, 0, None
            self._source.acknowledged(size)
        elif self._acknowledged_bytes and self._unheard_since is None:
            self._unheard_since = self._loop.time()

    def _is_blocked(self) -> bool:
        if self._unheard_since is not None and self._loop.time() - self._unheard_since >= UNACKNOWLEDGED_S:
            return True
        return self._network.is_cut(self._source.node, self._target.node) or not self._target.node.is_up

    def _note_stalled(self) -> None:
        is_stalled = self._is_stuck or self._acknowledged_bytes > 0
        if is_stalled and self._give_up is None:
            self._give_up = self._loop.call_later(self._network.give_up_s, self._fail, context=_KERNEL)
        if not is_stalled and self._give_up is not None:
            self._give_up.cancel()
            self._give_up = None
        self._network.note_stalled(self, is_stalled)

    def _fail(self) -> None:
        self._segments.clear()
        self._source.fail(TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))

    def retry(self) -> None:
        """Something was repaired; what waits for it goes on with the next retransmission."""
        self._pass_acknowledgements()
        if self._is_stuck and not self._is_blocked():
            self._is_stuck = False
            self._move(self._network.rng.uniform(0.0, 0.5))
        self._note_stalled()

    def _move(self, delay_s: float = 0.0) -> None:
        if self._segments and not self._is_moving and not self._is_stuck:
            self._is_moving = True
            when = max(self._segments[0][0], self._loop.time() + delay_s)
            self._loop.call_at(when, self._arrive, context=_KERNEL)

    def _arrive(self) -> None:
        self._is_moving = False
        if self._is_blocked():
            self._is_stuck = bool(self._segments)
            self._note_stalled()
            return
        now = self._loop.time()
        while self._segments and self._segments[0][0] <= now:
            self._target.arrive(self._segments.popleft()[1])
        self._move()

    def lose_power(self) -> None:
        """The sender's machine is gone: only some of what it had sent was on the cable already."""
        lost_count = self._network.rng.randint(0, len(self._segments))
        for _ in range(len(self._segments) if self._is_stuck else lost_count):
            self._segments.pop()

    def clear(self) -> None:
        self._segments.clear()


_KERNEL = contextvars.Context()  # of no process


class SimSocket:
    """What ``get_extra_info("socket")`` and ``Server.sockets`` hold: addresses, and options nobody reads."""

    family = socket.AF_INET
    type = socket.SOCK_STREAM
    proto = socket.IPPROTO_TCP

    def __init__(self, local: tuple[str, int], remote: tuple[str, int] | None = None) -> None:
        self._local = local
        self._remote = remote

    def getsockname(self) -> tuple[str, int]:
        return self._local

    def getpeername(self) -> tuple[str, int]:
        if self._remote is None:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return self._remote

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        """Accept and ignore."""

    def getsockopt(self, level: int, option: int) -> int:
        return 0

    def fileno(self) -> int:
        return -1


class SimTransport(asyncio.Transport):
    """One end of a simulated TCP connection.

    The lower half is the kernel's: :meth:`arrive`, :meth:`acknowledged`, :meth:`close_socket`. It works whether or not
    the process runs. The upper half is the process's; it is reached only through callbacks of that process.
    """

    def __init__(
        self, network: Network, process: Process, local: tuple[str, int], remote: tuple[str, int], window_bytes: int
    ) -> None:
        super().__init__({"sockname": local, "peername": remote, "socket": SimSocket(local, remote)})
        self.node = process.node
        self.peer: SimTransport
        self.server: SimServer | None = None
        self.context = process.context.copy()
        self._network = network
        self._loop = network.loop
        self._wire: _Wire
        # kernel
        self._window_bytes = window_bytes
        self._under_way_bytes = 0
        self._received: deque[bytes] = deque()
        self._end_received = False
        self._end_sent = False
        self._error: OSError | None = None
        self._is_open = True
        self._is_waking = False
        # process
        self._protocol: asyncio.BaseProtocol | None = None
        self._buffer: deque[bytes] = deque()
        self._buffer_bytes = 0
        self._high_bytes = 64 * 1024
        self._low_bytes = 16 * 1024
        self._is_reading = False
        self._is_read_paused = False
        self._is_write_paused = False
        self._is_closing = False
        self._is_lost = False
        self._end_asked = False
        self._end_seen = False
        self.node.transports[self] = None

    def join(self, peer: SimTransport) -> None:
        self.peer = peer
        self._wire = _Wire(self._network, self, peer)

    # -- kernel

    def arrive(self, payload: bytes | Mark) -> None:
        """Take a segment from the network."""
        if not self._is_open:
            if isinstance(payload, bytes):
                self._wire.send(Mark.RESET)
            return
        if payload is Mark.RESET:
            if self._network.rng.random() < 0.5:
                self._received.clear()  # what was not read yet may be lost by a reset
            self._error = ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            self._wire.clear()
        elif payload is Mark.END:
            self._end_received = True
        else:
            self._loop.trace("receive", self.node.name, self.peer.node.name, len(payload), zlib.crc32(payload))
            self._received.append(payload)
        self._wake()

    def fail(self, error: OSError) -> None:
        """Break the connection at this end only: the kernel gave up."""
        if self._is_open:
            self._error = error
            self._wake()

    def acknowledged(self, size: int) -> None:
        self._under_way_bytes -= size
        if self._is_open and self._buffer:
            self._wake()

    def _wake(self) -> None:
        if not self._is_waking:
            self._is_waking = True
            self._loop.call_soon(self._work, context=self.context)

    def _transmit(self, data: bytes) -> None:
        self._under_way_bytes += len(data)
        self._wire.send(data)

    def _send_end(self) -> None:
        if not self._end_sent:
            self._end_sent = True
            self._wire.send(Mark.END)

    def close_socket(self) -> None:
        """Close as a kernel does: in order when everything was read, otherwise with a reset."""
        if not self._is_open:
            return
        self._is_open = False
        self.node.transports.pop(self, None)
        if self.server is not None:
            self.server.forget(self)
        if self._error is not None:
            return
        if self._received:
            self._wire.send(Mark.RESET)
        else:
            self._send_end()

    def lose_power(self) -> None:
        """The machine is gone: nothing is said to the peer."""
        self._is_open = False
        self.node.transports.pop(self, None)
        self._wire.lose_power()

    # -- process: life

    async def begin(self, protocol: asyncio.BaseProtocol) -> None:
        """Hand the connection to its protocol; returns when ``connection_made`` has been called."""
        started = self._loop.create_future()
        self.hand_to(protocol)
        self._loop.call_soon(_set_result, started)
        try:
            await started
        except BaseException:
            self.close()
            raise

    def hand_to(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol
        self._loop.call_soon(protocol.connection_made, self, context=self.context)
        self._loop.call_soon(self._start_reading, context=self.context)

    def abandon(self) -> None:
        """Close a connection that its process does not want after all."""
        self._is_closing = self._is_lost = True
        self.close_socket()

    def _start_reading(self) -> None:
        self._is_reading = True
        self._wake()

    def _work(self) -> None:
        """Do what became possible: fail, write, read."""
        self._is_waking = False
        if self._is_lost or not self._is_open:
            return
        self._flush()
        if not self._is_reading or self._is_read_paused or self._is_closing:
            if self._error is not None and self._buffer:
                self._force_close(self._error)
            return
        if self._received:
            self._read()
        elif self._error is not None:
            self._force_close(self._error)
        elif self._end_received and not self._end_seen:
            self._end_seen = True
            self._see_end()
        if self._received or self._error is not None or (self._end_received and not self._end_seen):
            self._wake()

    def _read(self) -> None:
        data = b"".join(self._received)
        self._received.clear()
        self.peer._wire.acknowledge(len(data))
        try:
            if isinstance(self._protocol, asyncio.BufferedProtocol):
                _feed(self._protocol, data)
            else:
                assert isinstance(self._protocol, asyncio.Protocol)
                self._protocol.data_received(data)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001  asyncio's transports do the same
            self._fatal_error(error, "Fatal error: protocol.data_received() call failed.")

    def _see_end(self) -> None:
        assert isinstance(self._protocol, asyncio.Protocol | asyncio.BufferedProtocol)
        try:
            keep_open = self._protocol.eof_received()
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001  asyncio's transports do the same
            self._fatal_error(error, "Fatal error: protocol.eof_received() call failed.")
            return
        if not keep_open:
            self.close()

    def _fatal_error(self, error: BaseException, message: str) -> None:
        if not isinstance(error, OSError):
            self._loop.call_exception_handler(
                {"message": message, "exception": error, "transport": self, "protocol": self._protocol}
            )
        self._force_close(error)

    def _force_close(self, error: BaseException | None) -> None:
        if self._is_lost:
            return
        self._buffer.clear()
        self._buffer_bytes = 0
        self._is_closing = True
        self._is_lost = True
        self._loop.call_soon(self._connection_lost, error, context=self.context)

    def _connection_lost(self, error: BaseException | None) -> None:
        try:
            if self._protocol is not None:
                self._protocol.connection_lost(error if error is None or isinstance(error, Exception) else None)
        finally:
            self.close_socket()

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        if not self._buffer:
            self._force_close(None)

    def abort(self) -> None:
        self._force_close(None)

    def is_closing(self) -> bool:
        return self._is_closing

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None
        return self._protocol

    # -- process: reading

    def is_reading(self) -> bool:
        return not self._is_closing and not self._is_read_paused

    def pause_reading(self) -> None:
        self._is_read_paused = True

    def resume_reading(self) -> None:
        if self._is_read_paused:
            self._is_read_paused = False
            self._wake()

    # -- process: writing

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"data argument must be a bytes-like object, not {type(data).__name__!r}")
        if self._end_asked:
            raise RuntimeError("Cannot call write() after write_eof()")
        if not data or self._is_closing or not self._is_open:
            return
        if self._error is not None:
            self._force_close(BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)))
            return
        content = bytes(data)
        if not self._buffer:
            room = self._window_bytes - self._under_way_bytes
            if room >= len(content):
                self._transmit(content)
                return
            if room > 0:
                self._transmit(content[:room])
                content = content[room:]
        self._buffer.append(content)
        self._buffer_bytes += len(content)
        self._pause_writing_if_full()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def _flush(self) -> None:
        """Hand as much of the buffer to the kernel as the window lets through."""
        if self._error is not None:
            return
        room = self._window_bytes - self._under_way_bytes
        while self._buffer and room > 0:
            content = self._buffer.popleft()
            if len(content) > room:
                self._buffer.appendleft(content[room:])
                content = content[:room]
            room -= len(content)
            self._buffer_bytes -= len(content)
            self._transmit(content)
        if self._is_write_paused and self._buffer_bytes <= self._low_bytes:
            self._is_write_paused = False
            self._notify("resume_writing")
        if not self._buffer:
            if self._is_closing:
                self._force_close(None)
            elif self._end_asked:
                self._send_end()

    def _pause_writing_if_full(self) -> None:
        if self._buffer_bytes > self._high_bytes and not self._is_write_paused:
            self._is_write_paused = True
            self._notify("pause_writing")

    def _notify(self, method: str) -> None:
        try:
            getattr(self._protocol, method)()
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001  asyncio's transports do the same
            self._loop.call_exception_handler(
                {"message": f"protocol.{method}() failed", "exception": error, "transport": self}
            )

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if self._is_closing or self._end_asked:
            return
        self._end_asked = True
        if not self._buffer:
            self._send_end()

    def get_write_buffer_size(self) -> int:
        return self._buffer_bytes

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low_bytes, self._high_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if high is None:
            high = 64 * 1024 if low is None else 4 * low
        if low is None:
            low = high // 4
        if not high >= low >= 0:
            raise ValueError(f"high ({high!r}) must be >= low ({low!r}) must be >= 0")
        self._high_bytes = high
        self._low_bytes = low
        self._pause_writing_if_full()


def _set_result(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _feed(protocol: asyncio.BufferedProtocol, data: bytes) -> None:
    view = memoryview(data)
    while view:
        buffer = memoryview(protocol.get_buffer(len(view)))
        if not buffer:
            raise RuntimeError("get_buffer() returned an empty buffer")
        size = min(len(buffer), len(view))
        buffer[:size] = view[:size]
        protocol.buffer_updated(size)
        view = view[size:]


class SimServer(asyncio.AbstractServer):
    """A listener of one process."""

    def __init__(
        self, process: Process, protocol_factory: Callable[[], asyncio.BaseProtocol], hosts: Sequence[str], port: int
    ) -> None:
        self.process = process
        self._factory = protocol_factory
        self._transports: dict[SimTransport, None] = {}
        self._is_serving = False
        self._is_closed = False
        self._waiters: list[asyncio.Future[None]] = []
        node = process.node
        if any(":" in host for host in hosts):  # its machines have no IPv6
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL), *hosts[:1])
        addresses = [node.network.address_of(host) for host in hosts]
        for address in addresses:
            if address not in ("0.0.0.0", "127.0.0.1", node.address):
                raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL), address)
        self.port = port or node.free_port()
        for address in addresses:
            if node.listener(address, self.port) is not None:
                raise OSError(errno.EADDRINUSE, f"error while attempting to bind on address {(address, self.port)}")
        self.addresses = addresses

    @property
    def sockets(self) -> tuple[SimSocket, ...]:
        return () if self._is_closed else tuple(SimSocket((address, self.port)) for address in self.addresses)

    def accept(self, transport: SimTransport) -> None:
        """Take a connection whose handshake is done; the process sees it when it runs next."""
        transport.server = self
        self._transports[transport] = None
        self.process.loop.call_soon(self._make_protocol, transport, context=transport.context)

    def _make_protocol(self, transport: SimTransport) -> None:
        try:
            protocol = self._factory()
        except BaseException:
            transport.abandon()
            raise
        transport.hand_to(protocol)

    def forget(self, transport: SimTransport) -> None:
        self._transports.pop(transport, None)
        self._wake_waiters()

    def _wake_waiters(self) -> None:
        if self._is_closed and not self._transports:
            for waiter in self._waiters:
                _set_result(waiter)
            self._waiters.clear()

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self.process.loop

    def is_serving(self) -> bool:
        return self._is_serving

    async def start_serving(self) -> None:
        if not self._is_serving and not self._is_closed:
            self._is_serving = True
            self.process.servers.append(self)

    async def serve_forever(self) -> None:
        await self.start_serving()
        try:
            await self.process.loop.create_future()
        finally:
            self.close()
            await self.wait_closed()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._is_serving:
            self._is_serving = False
            self.process.servers.remove(self)
        self._wake_waiters()

    def close_clients(self) -> None:
        for transport in list(self._transports):
            transport.close()

    def abort_clients(self) -> None:
        for transport in list(self._transports):
            transport.abort()

    async def wait_closed(self) -> None:
        """Wait until it is closed and its connections are gone, as Python 3.12 and uvloop do."""
        if not self._is_closed or self._transports:
            waiter: asyncio.Future[None] = self.process.loop.create_future()
            self._waiters.append(waiter)
            await waiter

    async def __aenter__(self) -> SimServer:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        await self.wait_closed()


# --------------------------------------------------------------------------------------------- machines and processes


class NodeClock:
    """The clocks of a machine: wall time can jump, monotonic time is the loop's but for what it was suspended."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def wall_ns(self) -> int:
        return WALL_START_NS + self._node.wall_offset_ns + self.boottime_ns() - int(START_S * 1e9)

    def monotonic_ns(self) -> int:
        return self.boottime_ns() - self._node.suspended_ns

    def boottime_ns(self) -> int:
        # Rounded, not cut off: a timer made from nanoseconds must find that they have passed when it fires.
        return round(self._node.network.loop.time() * 1e9)


@dataclass(slots=True, eq=False)
class _BlockingCall:
    function: Callable[..., Any]
    args: Sequence[Any]
    future: asyncio.Future[Any]
    is_executed: bool = False


class Process:
    """One life of a daemon on a node: its tasks, sockets, files and blocking calls.

    Attributes:
        env: handed to the daemon.
        is_alive: false for ever after a kill or an exit.
        is_scheduled: alive and not paused.
        held: callbacks that came up while it was paused.
    """

    def __init__(self, node: Node, number: int) -> None:
        self.node = node
        self.loop = node.network.loop
        self.context = contextvars.Context()
        self.context.run(_PROCESS.set, self)
        self.is_alive = True
        self.is_scheduled = True
        self.held: list[_Handle | _TimerHandle] = []
        self.servers: list[SimServer] = []
        self.signal_handlers: dict[int, Callable[[], object]] = {}
        self.exception_handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None = None
        self.main: asyncio.Task[Any] | None = None
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._failed_tasks: list[weakref.ref[asyncio.Task[Any]]] = []
        self._calls: deque[_BlockingCall] = deque()
        self._exit_waiters: list[asyncio.Future[None]] = []
        self._files: MemoryFiles | None = None
        stream = f"{node.seed}/{node.name}/{number}"
        self._buggify_random = random.Random(f"{stream}/buggify")
        self._buggify_points: dict[str, bool] = {}
        self.env = Env(
            clock=NodeClock(node),
            random=random.Random(f"{stream}/random"),
            run_blocking=self.run_blocking,
            buggify=self.buggify,
            hostname=node.name,
            has_threads=False,
        )

    @property
    def files(self) -> MemoryFiles:
        if self._files is None:
            self._files = self.node.disk.attach()
        return self._files

    # -- tasks

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """Keep a task until it is done: a coroutine that is dropped would run its ``finally``."""
        if not task.done():
            self._tasks[task] = None
            task.add_done_callback(self._forget, context=_KERNEL)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if task._log_traceback:
            if self.is_alive:
                self._failed_tasks.append(weakref.ref(task))
            else:
                task.exception()  # or asyncio complains that nobody asked

    def pending_tasks(self) -> list[asyncio.Task[Any]]:
        return [task for task in self._tasks if not task.done()]

    def report_failed_tasks(self) -> None:
        """Tell of failed tasks whose exception nobody has asked for; asyncio does so when they are garbage."""
        for reference in self._failed_tasks:
            task = reference()
            if task is not None and task._log_traceback:
                self.loop.fail(self, f"exception of task {task.get_name()} was never retrieved", task.exception())
        self._failed_tasks.clear()

    def bury(self) -> None:
        """Close what a dead process has left, quietly; its ``finally`` blocks run now and can reach nothing."""
        for task in self._tasks:
            if task._log_traceback:
                task.exception()  # or asyncio complains that nobody asked
            if task.done():
                continue
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            coroutine = task.get_coro()
            assert coroutine is not None
            try:
                for _ in range(BURY_TRIES):  # not closed: that does not reach into asynchronous generators
                    self.context.copy().run(coroutine.throw, asyncio.CancelledError())
            except BaseException:  # noqa: BLE001  the dead may say what they like
                pass
        self._tasks.clear()

    # -- blocking calls, in order, one at a time

    async def run_blocking(self, function: Callable[..., Any], /, *args: Any) -> Any:
        return await self.submit(function, args)

    def submit(self, function: Callable[..., Any], args: Sequence[Any]) -> asyncio.Future[Any]:
        call = _BlockingCall(function, args, self.loop.create_future())
        self._calls.append(call)
        if len(self._calls) == 1:
            self._begin_call()
        return call.future

    def _begin_call(self) -> None:
        """It happens at a random moment of its duration: what else is done meanwhile may come before or after it."""
        delay_s = self.node.disk_delay_now_s()
        until_s = delay_s * self.node.rng.random()
        self.loop.call_later(until_s, self._execute_call, delay_s - until_s, context=self.context)

    def _execute_call(self, rest_s: float) -> None:
        call = self._calls[0]
        call.is_executed = True
        result: Any = None
        error: BaseException | None = None
        try:
            result = call.function(*call.args)
        except (KeyboardInterrupt, SystemExit, DiskCrashed):
            raise
        except BaseException as raised:  # noqa: BLE001  it goes to the caller
            error = raised
        self.loop.call_later(rest_s, self._end_call, result, error, context=self.context)

    def _end_call(self, result: Any, error: BaseException | None) -> None:
        call = self._calls.popleft()
        if self._calls:
            self._begin_call()
        if call.future.done():
            return  # cancelled; a thread does not notice either
        if error is not None:
            call.future.set_exception(error)
        else:
            call.future.set_result(result)

    # -- fault points

    def buggify(self, name: str) -> bool:
        """A quarter of the points is live in a process, and a live one fires each fourth time."""
        if not self.node.is_buggified:
            return False
        chance = self._buggify_random.random
        if name not in self._buggify_points:
            self._buggify_points[name] = chance() < 0.25
        fires = self._buggify_points[name] and chance() < 0.25
        if fires:
            self.loop.trace("buggify", self.node.name, name)
        return fires

    # -- the end

    def die(self, power_loss: bool) -> None:
        """Stop running this instant."""
        self.is_alive = self.is_scheduled = False
        self.held.clear()
        if self._calls and not self._calls[0].is_executed and self.node.rng.random() < 0.5:
            self._execute_orphan(self._calls[0])
        self._calls.clear()
        self.servers.clear()
        for transport in list(self.node.transports):
            if power_loss:
                transport.lose_power()
            else:
                transport.close_socket()
        for waiter in self._exit_waiters:
            _set_result(waiter)
        self._exit_waiters.clear()

    def _execute_orphan(self, call: _BlockingCall) -> None:
        """Let the kernel finish what the dying process had asked for; nobody hears the answer."""
        try:
            self.context.copy().run(call.function, *call.args)
        except BaseException:  # noqa: BLE001  nobody hears the answer
            pass

    async def wait_dead(self) -> None:
        if self.is_alive:
            waiter = self.loop.create_future()
            self._exit_waiters.append(waiter)
            await waiter


class Node:
    """A machine with one disk, on which one daemon lives at a time. Get it from :meth:`Simulation.node`.

    Attributes:
        name: also its host name.
        address: its IP address.
        disk: survives kills; see :class:`tests.sim.disk.CrashingDisk` for its faults.
        wall_offset_ns: how wrong its wall clock is.
        suspended_ns: how long it has been suspended, which its monotonic clock does not count.
        disk_delay_s: shortest and longest duration of a blocking call.
        is_up: false from a power loss until the next start: nothing answers.
        is_buggified: whether ``env.buggify`` ever says yes.
    """

    def __init__(self, network: Network, name: str, address: str, seed: int | str) -> None:
        self.network = network
        self.name = name
        self.address = address
        self.seed = seed
        self.rng = random.Random(f"{seed}/{name}")
        self.disk = CrashingDisk(rng=random.Random(f"{seed}/{name}/disk"))
        self.disk.observers.append(self._trace_operation)
        self.wall_offset_ns = 0
        self.suspended_ns = 0
        self._suspended_at_s = 0.0
        self.disk_delay_s = (1e-6, 20e-3)
        self.is_up = True
        self.is_buggified = True
        self.transports: dict[SimTransport, None] = {}
        self.process: Process | None = None
        self.graves: list[Process] = []
        self._frozen_until_s = 0.0
        self._next_port = EPHEMERAL_PORT
        self._main: Callable[[], Coroutine[Any, Any, Any]] | None = None

    def _trace_operation(self, operation: Operation) -> None:
        self.network.loop.trace("disk", self.name, operation.kind, operation.path, operation.size_bytes)

    # -- life of its daemon

    def start(self, main: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Task[Any]:
        """Start a daemon: a function without arguments that returns its main coroutine.

        The function is called at once, when :attr:`env` and :attr:`files` are those of the new process. The process
        ends when the coroutine does; what is left then is cancelled, as ``asyncio.run`` does, and its sockets closed.

        Returns:
            the task of the main coroutine.
        """
        if self.is_running:
            raise SimulationError(f"{self.name} is running already")
        process = self.process = Process(self, len(self.graves))
        self._main = main
        if not self.is_up:
            self.is_up = True
            self.network.retry()
        self.network.loop.trace("start", self.name)
        process.main = process.context.run(lambda: process.loop.create_task(main(), name=self.name))
        process.main.add_done_callback(partial(self._main_done, process), context=_KERNEL)
        return process.main

    def _main_done(self, process: Process, main: asyncio.Task[Any]) -> None:
        if not process.is_alive:
            return
        if not main.cancelled() and main.exception() is not None:
            self.network.loop.fail(process, "main failed", main.exception())
        for task in process.pending_tasks():
            task.cancel()
        exit_task = self.network.loop.create_task(self._exit(process), context=_KERNEL.copy())
        process.adopt(exit_task)

    async def _exit(self, process: Process) -> None:
        pending = [task for task in process.pending_tasks() if task is not asyncio.current_task()]
        if pending:
            await asyncio.wait(pending, timeout=EXIT_GRACE_S)
        if process.is_alive:
            self._end(process, power_loss=False)
            self.disk.release()

    def _end(self, process: Process, power_loss: bool) -> None:
        self.network.loop.trace("power" if power_loss else "end", self.name)
        process.die(power_loss)
        self.graves.append(process)
        self.process = None

    def kill(self, power_loss: bool = False) -> None:
        """Kill the daemon (``kill -9``), or pull the plug of the machine. Nothing of it runs any more."""
        if self.process is not None:
            self._end(self.process, power_loss)
        self.disk.crash(power_loss, self.rng)
        if power_loss:
            self.is_up = False

    def restart(self, power_loss: bool = False) -> asyncio.Task[Any]:
        """Kill the daemon if it runs and start it again as it was started last."""
        if self._main is None:
            raise SimulationError(f"{self.name} was never started")
        self.kill(power_loss)
        return self.start(self._main)

    def crash_at_operation(self, number: int, power_loss: bool = False) -> None:
        """Kill the daemon inside the disk operation with this number (``disk.operation_count`` counts them)."""
        self.disk.crash_at(number, power_loss, self.rng, lambda: self.kill(power_loss))

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send a signal: its handler runs, or, without one, the process dies as from a kill."""
        process = self._running()
        self.network.loop.trace("signal", self.name, int(number))
        handler = process.signal_handlers.get(number)
        if handler is None:
            self.kill()
        else:
            process.loop.call_soon(handler, context=process.context)

    def stop(self) -> None:
        """Ask the daemon to end: SIGTERM where it handles that, otherwise cancel its main coroutine."""
        process = self._running()
        if signal.SIGTERM in process.signal_handlers:
            self.signal(signal.SIGTERM)
        elif process.main is not None:
            process.main.cancel()

    def pause(self) -> None:
        """Stop the daemon's clock hands (SIGSTOP): its kernel still takes and acknowledges what arrives."""
        self._running().is_scheduled = False
        self.network.loop.trace("pause", self.name)

    def resume(self) -> None:
        """Let a paused daemon go on (SIGCONT)."""
        process = self._running()
        process.is_scheduled = True
        self.network.loop.trace("resume", self.name)
        held, process.held = process.held, []
        process.loop.resume(held)

    def suspend(self) -> None:
        """Suspend the machine; unlike a pause it stops its monotonic clock. Its network is as if it were paused."""
        self.pause()
        self._suspended_at_s = self.network.loop.time()

    def wake(self) -> None:
        """Let a suspended machine go on."""
        self.suspended_ns += round((self.network.loop.time() - self._suspended_at_s) * 1e9)
        self.resume()

    async def exited(self) -> None:
        """Wait until no daemon runs here: it ended or was killed."""
        if self.process is not None:
            await self.process.wait_dead()

    def _running(self) -> Process:
        if self.process is None:
            raise SimulationError(f"{self.name} is not running")
        return self.process

    @property
    def is_running(self) -> bool:
        return self.process is not None

    @property
    def task_count(self) -> int:
        """Tasks of the daemon that are not done; for finding leaks."""
        return len(self._running().pending_tasks())

    @property
    def env(self) -> Env:
        """The Env of the running daemon; a new one after each start."""
        return self._running().env

    @property
    def files(self) -> MemoryFiles:
        """The data directory as the running daemon sees it, locked by it; a new one after each start."""
        return self._running().files

    # -- clock and disk

    def jump_wall_clock(self, seconds: float) -> None:
        """Set its wall clock forward or back."""
        self.network.loop.trace("clock", self.name, seconds)
        self.wall_offset_ns += round(seconds * 1e9)

    def freeze_disk(self, seconds: float) -> None:
        """Let blocking calls that have not begun yet wait."""
        self.network.loop.trace("freeze", self.name, seconds)
        self._frozen_until_s = self.network.loop.time() + seconds

    def disk_delay_now_s(self) -> float:
        shortest, longest = self.disk_delay_s
        frozen_s = max(0.0, self._frozen_until_s - self.network.loop.time())
        return frozen_s + float(shortest * (longest / shortest) ** self.rng.random())

    # -- ports

    def free_port(self) -> int:
        self._next_port += 1
        return self._next_port

    def listener(self, address: str, port: int) -> SimServer | None:
        """The server that takes connections to an address; 0.0.0.0 is each of them."""
        for server in self.process.servers if self.process is not None else ():
            if server.port == port and (address == "0.0.0.0" or {address, "0.0.0.0"}.intersection(server.addresses)):
                return server
        return None


# ---------------------------------------------------------------------------------------------------------- simulation


class Simulation:
    """One seeded world; use it in a ``with`` statement.

    Args:
        seed: decides everything.
        strict: raise when something failed that nobody handled (a daemon's main, a task, a protocol callback).

    Attributes:
        random: for the test's own choices (what to break, and when).
        network: cut, partition, heal.
        loop: the event loop; virtual time is ``loop.time()``.
        driver: the node that :meth:`run` runs its coroutine on; it is never killed.
    """

    def __init__(self, seed: int, strict: bool = True) -> None:
        self.seed = seed
        self.random = random.Random(f"{seed}/test")
        self.network = Network(random.Random(f"{seed}/network"))
        self.loop = self.network.loop
        self.loop.is_strict = strict
        self.loop.echo = print if os.environ.get(TRACE_VARIABLE) else None
        self.nodes = self.network.nodes
        self.driver = self.node("driver")
        self._driver_process = self.driver.process = Process(self.driver, 0)
        self._collect_garbage = False
        self._collection_callbacks: list[Any] = []

    def node(self, name: str) -> Node:
        """Get the machine of this name, a new one the first time."""
        if name not in self.nodes:
            self.nodes[name] = Node(self.network, name, f"10.0.0.{len(self.nodes) + 1}", self.seed)
        return self.nodes[name]

    @property
    def now_s(self) -> float:
        """Virtual seconds since the simulation began."""
        return self.loop.time() - START_S

    @property
    def trace_hash(self) -> str:
        """Equal for equal runs: network, disk, faults, and the number of callbacks."""
        return self.loop.trace_hash

    @property
    def failures(self) -> list[Failure]:
        """What nobody handled; clear it when a test expects it."""
        return self.loop.failures

    def run(self, main: Coroutine[Any, Any, T], timeout_s: float = RUN_S_MAX) -> T:
        """Run a coroutine on the driver until it is done, the world with it.

        Raises:
            SimulationError: deadlock, busy loop, ``timeout_s`` virtual seconds passed, or an unhandled failure.
        """
        self.loop.deadline = self.loop.time() + timeout_s
        task = self._driver_process.context.run(lambda: self.loop.create_task(main, name="driver"))
        return self.loop.run_until_complete(task)

    def run_for(self, seconds: float) -> None:
        """Let the world go on for some virtual seconds."""
        self.run(asyncio.sleep(seconds), timeout_s=seconds + 1.0)

    def describe(self) -> str:
        """What a failing test prints: the seed, how to replay it, the last events."""
        events = "\n".join(format_event(event) for event in self.loop.recent)
        return (
            f"simulation seed {self.seed}, {self.now_s:.6f} virtual seconds, {self.loop.event_count} callbacks\n"
            f"replay: {SEED_VARIABLE}={self.seed} pytest <this test>   (and {TRACE_VARIABLE}=1 for every event)\n"
            f"last {len(self.loop.recent)} events:\n{events}"
        )

    def __enter__(self) -> Simulation:
        # A collection would run destructors of dead tasks at a moment that no seed decides.
        self._collect_garbage = gc.isenabled()
        self._collection_callbacks = list(gc.callbacks)
        gc.disable()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        try:
            if error is None:
                self._check_tasks()
        except SimulationError as failure:
            failure.add_note(self.describe())
            raise
        finally:
            if error is not None:
                error.add_note(self.describe())
            self._bury()
            gc.callbacks[:] = self._collection_callbacks  # those of killed processes went with their interpreter
            if self._collect_garbage:
                gc.enable()

    def _check_tasks(self) -> None:
        """Find the tasks that failed and that nobody asked, though somebody still holds them."""
        for node in self.nodes.values():
            if node.process is not None:
                node.process.report_failed_tasks()
        self.loop.check()

    def _bury(self) -> None:
        self.loop.echo = None
        for node in self.nodes.values():
            if node.process is not None:
                node.kill()
        self.loop.close()
        for node in self.nodes.values():
            for process in node.graves:
                process.bury()


def seeds(count: int, first: int = 0) -> Iterable[int]:
    """The seeds a test runs: ``count`` of them, or the one that FLINTMQ_SIM_SEED names."""
    only = os.environ.get(SEED_VARIABLE)
    return [int(only)] if only else range(first, first + count)


def share(count: int) -> int:
    """How many of ``count`` seeds, or chunks of them, a test plays: all where FLINTMQ_SIM_ALL is set, else a third."""
    return count if os.environ.get(ALL_VARIABLE) else -(-count // 3)


def beginning_with(found_by: int, others: Iterable[int]) -> Iterator[int]:
    """Seeds to look for a planted bug with: the one that finds it first, as the code stands, and then ``others``.

    A change of the code makes other worlds of all seeds; the search then takes longer, until the seed is written anew.
    """
    yield found_by
    yield from others


def first_failing_seed(scenario: Callable[[int], object], candidates: Iterable[int]) -> int | None:
    """The first seed for which a scenario raises an AssertionError or a SimulationError: proves that a bug is found."""
    for seed in candidates:
        try:
            scenario(seed)
        except (AssertionError, SimulationError):
            return seed
    return None
