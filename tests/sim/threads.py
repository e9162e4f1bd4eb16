"""Threads, locks and sockets of a simulated machine: blocking code as it is, in virtual time, one thread at a time.

::

    with Simulation(seed) as sim, Threads(sim) as threads, threads.installed(module, ...):
        result = sim.run(threads.call(function))     # in a thread; what it waits for takes virtual time

Each simulated thread is a greenlet: the loop switches to it in a callback, and it switches back as soon as it has to
wait, or has ended. So there is never more than one that runs, who is next is decided by the loop, and a seed gives the
same run; and a switch costs a microsecond, where threads of the operating system take a hundred on a busy machine.

Rules of this file: what blocking code may wait for is here and nowhere else (:meth:`Threads.wait`); a thread never
waits in any other way. What the client does not use of ``threading``, ``socket``, ``select`` and
``selectors`` is not there; its :class:`~flintmq.client.blocking.lock.Lock` and ``Condition`` are those of here.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import os
import select as real_select
import selectors as real_selectors
import socket as real_socket
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol, TypeVar
from unittest import mock

from greenlet import getcurrent, greenlet
from tests.sim.loop import SimTransport, Simulation, SimulationError

SHORTEST_WAIT_S = 1e-6
"""The kernel's is 1 ms. Without one, who waits for a time that floats round away would ask for it 200,000 times."""
T = TypeVar("T")


class _Ended(BaseException):
    """The world ends: raised where a thread waits."""


class _Thread:
    """One simulated thread.

    Attributes:
        wake_count: how often it has waited; who wakes it says which wait is meant.
    """

    def __init__(self, threads: Threads, target: Callable[[], object], name: str) -> None:
        self.name = name
        self.wake_count = 0
        self.is_woken = False
        self.is_over = False
        self.failure: BaseException | None = None
        self.greenlet = greenlet(self._run)
        self.greenlet.gr_context = contextvars.copy_context()
        self._threads = threads
        self._target = target

    def _run(self) -> None:
        try:
            if not self._threads.is_ending:
                self._target()
        except _Ended:
            pass
        except BaseException as error:  # noqa: BLE001 - raised on the loop
            self.failure = error
        finally:
            self.is_over = True


class Threads:
    """The threads of the driver of a simulation.

    Attributes:
        is_ending: nothing is waited for any more.
    """

    def __init__(self, sim: Simulation) -> None:
        self.loop = sim.loop
        self.is_ending = False
        self._process = sim.driver.process
        self._current: _Thread | None = None
        self._living: dict[_Thread, None] = {}
        self._numbers = count(1)
        self._sockets: dict[int, Ready] = {}

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_ending = True
        for thread in [*self._living]:
            self._hand_to(thread)

    @contextmanager
    def installed(self, *modules: ModuleType) -> Iterator[None]:
        """Let these modules find simulated threads and sockets where they imported real ones."""
        simulated = {
            "threading": self._threading(),
            "socket": self._socket(),
            "select": self._select(),
            "selectors": self._selectors(),
            "Lock": lambda: Lock(self),
            "Condition": lambda lock: Condition(self, lock),
        }
        with ExitStack() as stack:
            for module in modules:
                for name, thing in simulated.items():
                    if name in vars(module):
                        stack.enter_context(mock.patch.object(module, name, thing))
            yield

    # -- running and waiting

    def _running(self) -> _Thread:
        if self._current is None:
            raise SimulationError("the event loop would wait for a thread, which can only go on when the loop does")
        return self._current

    @property
    def ident(self) -> int:
        """Which thread runs; 0: none, but the loop."""
        return 0 if self._current is None else id(self._current)

    def start(self, target: Callable[[], object], name: str = "") -> _Thread:
        """Have a thread run soon."""
        thread = _Thread(self, target, name)
        self._living[thread] = None
        self.loop.call_soon(self._hand_to, thread)
        return thread

    async def call(self, function: Callable[[], T]) -> T:
        """Call it in a thread, and wait for that."""
        done: asyncio.Future[T] = self.loop.create_future()

        def run() -> None:
            try:
                result = function()
            except _Ended:
                raise
            except BaseException as error:  # noqa: BLE001 - for whoever awaits it
                if not done.cancelled():
                    done.set_exception(error)
            else:
                if not done.cancelled():
                    done.set_result(result)

        self.start(run, "call")
        return await done

    def wait(self, until: float | None = None) -> bool:
        """Have others run until :meth:`wake` is called for this thread; False when that does not come in time."""
        thread = self._running()
        if self.is_ending:
            raise _Ended
        timer = None if until is None else self.loop.call_at(until, self._go_on, thread, thread.wake_count)
        self._current = None
        thread.greenlet.parent.switch()
        if self.is_ending:
            raise _Ended
        if timer is not None:
            timer.cancel()
        return thread.is_woken

    def waiter(self) -> Callable[[], None]:
        """Call it to end the next :meth:`wait` of this thread; it does nothing after that."""
        thread = self._running()
        count = thread.wake_count

        def wake() -> None:
            if thread.wake_count == count and not thread.is_woken:
                thread.is_woken = True
                self.loop.call_soon(self._go_on, thread, count)

        thread.is_woken = False
        return wake

    def run(self, work: Coroutine[Any, Any, T], until: float | None) -> T:
        """Wait in a thread for what the loop does.

        Raises:
            TimeoutError: it was not done in time, and is cancelled.
        """
        task = self.loop.create_task(work)
        wake = self.waiter()
        task.add_done_callback(lambda _: wake())
        self.wait(until)
        if not task.done():
            task.cancel()
            raise TimeoutError
        return task.result()

    def _go_on(self, thread: _Thread, count: int) -> None:
        if thread.wake_count == count and not thread.is_over:
            self._hand_to(thread)

    def _hand_to(self, thread: _Thread) -> None:
        """Run a thread until it waits or ends; on the loop."""
        if thread.is_over:
            return
        loop = asyncio._get_running_loop()
        thread.wake_count += 1
        before, self._current = self._current, thread
        thread.greenlet.parent = getcurrent()
        asyncio._set_running_loop(None)  # none runs in the thread
        try:
            thread.greenlet.switch()
        finally:
            asyncio._set_running_loop(loop)
        self._current = before
        if thread.is_over:
            del self._living[thread]
            if thread.failure is not None:
                raise thread.failure

    # -- what modules find

    def _threading(self) -> SimpleNamespace:
        def thread(target: Callable[[], object], name: str = "", daemon: bool = True) -> SimpleNamespace:
            assert daemon, "one that is waited for at the end is not simulated"
            return SimpleNamespace(start=lambda: self.start(target, name), name=name)

        return SimpleNamespace(
            Thread=thread,
            Condition=lambda lock=None: Condition(self, lock or Lock(self)),
            Event=lambda: Event(self),
            get_ident=lambda: self.ident,
        )

    def _socket(self) -> SimpleNamespace:
        return SimpleNamespace(
            socket=lambda *_: Socket(self, self._process),
            socketpair=lambda: Pipe.pair(self),
            getaddrinfo=self._find,
            SOCK_STREAM=real_socket.SOCK_STREAM,
            IPPROTO_TCP=real_socket.IPPROTO_TCP,
            TCP_NODELAY=real_socket.TCP_NODELAY,
        )

    def _find(self, host: str, port: int, **_: object) -> list[tuple[Any, ...]]:
        return [(real_socket.AF_INET, real_socket.SOCK_STREAM, 0, "", (self.loop.network.address_of(host), port))]

    def number(self, thing: Ready) -> int:
        """A number by which a selector finds it; they are not used again."""
        number = next(self._numbers)
        self._sockets[number] = thing
        return number

    def socket_of(self, number: int) -> Ready:
        """The inverse of :meth:`number`."""
        return self._sockets[number]

    def _selectors(self) -> SimpleNamespace:
        return SimpleNamespace(
            DefaultSelector=lambda: Selector(self),
            EVENT_READ=real_selectors.EVENT_READ,
            EVENT_WRITE=real_selectors.EVENT_WRITE,
        )

    def _select(self) -> SimpleNamespace:
        return SimpleNamespace(poll=lambda: Poll(self), POLLIN=real_select.POLLIN, POLLOUT=real_select.POLLOUT)


class Lock:
    """A lock; also one that its holder may take again."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._owner: int | None = None
        self._depth = 0
        self._waiting: deque[Callable[[], None]] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = self._threads.ident
        until = None if timeout < 0 else self._threads.loop.time() + timeout
        while self._owner not in (None, me):
            if not blocking:
                return False
            self._waiting.append(self._threads.waiter())
            if not self._threads.wait(until):
                return False
        self._owner = me
        self._depth += 1
        return True

    def take(self, timeout_s: float = -1) -> bool:
        return self.acquire(timeout_s != 0, timeout_s or -1)

    def release(self) -> None:
        assert self._owner == self._threads.ident or self._threads.is_ending
        self._depth -= 1
        if not self._depth:
            self._owner = None
            if self._waiting:
                self._waiting.popleft()()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def give_up(self) -> int:
        """Release it, however often it was taken."""
        depth, self._depth = self._depth, 1
        self.release()
        return depth

    def take_back(self, depth: int) -> None:
        """The inverse of :meth:`give_up`."""
        if self._threads.is_ending:
            self._owner = self._threads.ident
        else:
            self.acquire()
        self._depth = depth


class Condition:
    """A condition of some lock."""

    def __init__(self, threads: Threads, lock: Lock) -> None:
        self._threads = threads
        self._lock = lock
        self._waiting: deque[Callable[[], None]] = deque()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        wake = self._threads.waiter()
        self._waiting.append(wake)
        until = None if timeout is None else self._threads.loop.time() + timeout
        depth = self._lock.give_up()
        try:
            return self._threads.wait(until)
        finally:
            if wake in self._waiting:
                self._waiting.remove(wake)
            self._lock.take_back(depth)

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        until = None if timeout is None else self._threads.loop.time() + timeout
        while not (found := predicate()):
            left_s = None if until is None else until - self._threads.loop.time()
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return found

    def notify(self, count: int = 1) -> None:
        for _ in range(min(count, len(self._waiting))):
            self._waiting.popleft()()

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    """A flag that is waited for."""

    def __init__(self, threads: Threads) -> None:
        self._condition = Condition(threads, Lock(threads))
        self._is_set = False

    def set(self) -> None:
        self._is_set = True
        self._condition.notify_all()

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        with self._condition:
            return self._condition.wait_for(lambda: self._is_set, timeout)


class Ready(Protocol):
    """Is read from or written to when it is ready."""

    watchers: dict[Selector, None]

    def ready(self, mask: int) -> int:
        """Which of ``POLLIN`` and ``POLLOUT`` can be done without waiting."""


class Socket(asyncio.Protocol):
    """A TCP socket on the simulated network."""

    def __init__(self, threads: Threads, process: Any) -> None:
        self.watchers: dict[Selector, None] = {}
        self._threads = threads
        self._number = threads.number(self)
        self._process = process
        self._timeout_s: float | None = None
        self._transport: SimTransport | None = None
        self._received = bytearray()
        self._is_ended = False
        self._is_choked = False
        self._error: Exception | None = None
        self._waiting: list[Callable[[], None]] = []

    # -- as the kernel has it

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._wake()

    def eof_received(self) -> bool:
        self._is_ended = True
        self._wake()
        return True  # the other direction stays open

    def connection_lost(self, error: Exception | None) -> None:
        self._is_ended = True
        self._error = error
        self._wake()

    def pause_writing(self) -> None:
        self._is_choked = True

    def resume_writing(self) -> None:
        self._is_choked = False
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()
        for selector in self.watchers:
            selector.note_change()

    def ready(self, mask: int) -> int:
        """Which of these can be done without waiting."""
        can_read = self._received or self._is_ended
        can_write = not self._is_choked or self._is_ended
        return mask & ((real_select.POLLIN if can_read else 0) | (real_select.POLLOUT if can_write else 0))

    def when_ready(self, wake: Callable[[], None]) -> None:
        """Have it called when something has changed."""
        self._waiting.append(wake)

    # -- as code has it

    def fileno(self) -> int:
        return self._number

    def settimeout(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def setblocking(self, is_blocking: bool) -> None:
        assert not is_blocking, "reads and writes that wait are not simulated"

    def setsockopt(self, *_: object) -> None:
        assert self._transport is not None

    def connect(self, address: tuple[str, int]) -> None:
        network = self._threads.loop.network
        until = None if self._timeout_s is None else self._threads.loop.time() + self._timeout_s

        async def connect() -> SimTransport:
            transport = await network.connect(self._process, *address)
            await transport.begin(self)
            return transport

        self._transport = self._threads.run(connect(), until)

    def recv(self, size: int) -> bytes:
        if self._received:
            data = bytes(self._received[:size])
            del self._received[:size]
            return data
        if self._error is not None:
            raise self._error
        if self._is_ended:
            return b""
        raise BlockingIOError

    def send(self, data: bytes | bytearray) -> int:
        assert self._transport is not None
        if self._transport.is_closing():
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        if self._is_choked:
            raise BlockingIOError
        self._transport.write(data)
        return len(data)

    def close(self) -> None:
        if self._transport is not None and not self._threads.is_ending:
            self._transport.close()
        self._wake()

    def getsockname(self) -> tuple[str, int]:
        assert self._transport is not None
        name: tuple[str, int] = self._transport.get_extra_info("sockname")
        return name

    def getpeername(self) -> tuple[str, int]:
        assert self._transport is not None
        name: tuple[str, int] = self._transport.get_extra_info("peername")
        return name


class Poll:
    """Waits for one socket."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._socket: Socket
        self._mask = 0

    def register(self, socket: Socket, mask: int) -> None:
        self._socket, self._mask = socket, mask

    def poll(self, timeout_ms: float) -> list[tuple[Socket, int]]:
        until = self._threads.loop.time() + timeout_ms / 1000
        while not (events := self._socket.ready(self._mask)):
            self._socket.when_ready(self._threads.waiter())
            if not self._threads.wait(until):
                return []
        return [(self._socket, events)]


class Pipe:
    """One end of a pair of sockets that wakes whoever waits for the other."""

    def __init__(self, threads: Threads) -> None:
        self.watchers: dict[Selector, None] = {}
        self._other: Pipe
        self._number = threads.number(self)
        self._received = bytearray()
        self._is_closed = False

    @classmethod
    def pair(cls, threads: Threads) -> tuple[Pipe, Pipe]:
        """Two ends of one."""
        one, other = cls(threads), cls(threads)
        one._other, other._other = other, one
        return one, other

    def fileno(self) -> int:
        return self._number

    def setblocking(self, is_blocking: bool) -> None:
        assert not is_blocking, "reads and writes that wait are not simulated"

    def ready(self, mask: int) -> int:
        return mask & (real_select.POLLOUT | (real_select.POLLIN if self._received else 0))

    def send(self, data: bytes) -> int:
        if self._is_closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if self._other._is_closed:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        self._other._received += data
        for selector in self._other.watchers:
            selector.note_change()
        return len(data)

    def recv(self, size: int) -> bytes:
        if not self._received:
            raise BlockingIOError
        data = bytes(self._received[:size])
        del self._received[:size]
        return data

    def close(self) -> None:
        self._is_closed = True


class Selector:
    """Waits for several sockets; what is registered meanwhile is noticed, as with epoll."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._watched: dict[Any, tuple[Ready, SimpleNamespace]] = {}
        self._waiting: list[Callable[[], None]] = []

    def register(self, thing: Any, events: int, data: object = None) -> None:
        assert thing not in self._watched
        socket = self._threads.socket_of(thing.fileno())
        self._watched[thing] = socket, SimpleNamespace(fileobj=thing, events=events, data=data)
        socket.watchers[self] = None
        self.note_change()

    def modify(self, thing: Any, events: int, data: object = None) -> None:
        self._watched[thing][1].__dict__.update(events=events, data=data)
        self.note_change()

    def unregister(self, thing: Any) -> None:
        socket, _ = self._watched.pop(thing)
        del socket.watchers[self]

    def note_change(self) -> None:
        """Look again at what is ready."""
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()

    def select(self, timeout_s: float) -> list[tuple[SimpleNamespace, int]]:
        now = self._threads.loop.time()
        until = now + (timeout_s and max(timeout_s, SHORTEST_WAIT_S))
        while not (found := self._ready()) and self._threads.loop.time() < until:
            self._waiting.append(self._threads.waiter())
            if not self._threads.wait(until):
                break
        return found

    def _ready(self) -> list[tuple[SimpleNamespace, int]]:
        found = []
        for socket, key in self._watched.values():
            can_read = key.events & real_selectors.EVENT_READ and socket.ready(real_select.POLLIN)
            can_write = key.events & real_selectors.EVENT_WRITE and socket.ready(real_select.POLLOUT)
            events = (real_selectors.EVENT_READ if can_read else 0) | (real_selectors.EVENT_WRITE if can_write else 0)
            if events:
                found.append((key, events))
        return found

    def close(self) -> None:
        for thing in [*self._watched]:
            self.unregister(thing)
