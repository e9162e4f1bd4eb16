"""``/debug``: what a running daemon does, for its operators, in Python's terms; ``_INDEX`` lists it.

``/debug/pprof/...`` answers the same under Go's names.

Rules of this file: nothing here slows the daemon unless it is asked for; every answer is bounded; only peers in
``networks`` are answered, because stacks and names are nobody else's business.

Source: NSQ's HTTP API; docs/operations.md (loopback only).
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine
from types import CodeType, FrameType
from typing import Any

from flintmq.env import Env
from flintmq.errors import without_credentials
from flintmq.net.http_messages import HttpError, Request, Response, plain_response
from flintmq.net.http_router import Router
from flintmq.net.networks import Networks

SECONDS_DEFAULT = 30.0  # as Go
SECONDS_MAX = 60.0
_SAMPLE_INTERVAL_S = 0.01
_DEPTH_MAX = 100
_STACK_COUNT_MAX = 20_000
_TASK_COUNT_MAX = 1000
_TASK_DEPTH_MAX = 20
_TYPE_COUNT_MAX = 60
_INT = 1 << 63

Handler = Callable[[Request], Response | Coroutine[Any, Any, Response]]
Stack = tuple[CodeType, ...]


class DebugApi:
    """The handlers of ``/debug``.

    Args:
        networks: who is answered.
        describe: the state of the daemon, one line per part.
    """

    def __init__(self, env: Env, networks: Networks, describe: Callable[[], str]) -> None:
        self._env = env
        self._networks = networks
        self._describe = describe
        self._stop = threading.Event()
        self._is_profiling = False

    def add_routes(self, router: Router) -> None:
        """Route everything but ``/debug`` itself."""
        routes: tuple[tuple[str, str, Handler], ...] = (
            ("GET", "/debug/", self._index),
            ("GET", "/debug/state", self._state),
            ("GET", "/debug/profile", self._profile),
            ("GET", "/debug/tasks", self._tasks),
            ("GET", "/debug/threads", self._threads),
            ("GET", "/debug/memory", self._memory),
            ("GET", "/debug/pprof/", self._index),
            ("GET", "/debug/pprof/cmdline", self._command_line),
            ("GET", "/debug/pprof/profile", self._profile),
            ("GET", "/debug/pprof/heap", self._memory),
            ("GET", "/debug/pprof/goroutine", self._goroutine),
            ("GET", "/debug/pprof/threadcreate", self._threads),
            ("GET", "/debug/pprof/block", self._block),
            ("GET", "/debug/pprof/symbol", self._symbol),
            ("POST", "/debug/pprof/symbol", self._symbol),
            ("PUT", "/debug/setblockrate", self._set_block_rate),
            ("POST", "/debug/freememory", self._free_memory),
        )
        for method, path, handler in routes:
            router.add(method, path, self._guarded(handler), plain=True)

    def close(self) -> None:
        """End a profile that is being taken, so that nobody has to wait for it."""
        self._stop.set()

    def _guarded(self, handler: Handler) -> Handler:
        def answer(request: Request) -> Response | Coroutine[Any, Any, Response]:
            if not self._networks.allows(request.remote_address):
                raise HttpError(403, f"FORBIDDEN: /debug does not answer {request.remote_address}")
            return handler(request)

        return answer

    def _index(self, request: Request) -> Response:
        return plain_response(_INDEX)

    def _state(self, request: Request) -> Response:
        return plain_response(self._describe() + "\n")

    async def _profile(self, request: Request) -> Response:
        seconds = _seconds(request.query.get("seconds"))
        if self._is_profiling:
            raise HttpError(409, "a profile is being taken already, try again when it is done")
        self._is_profiling = True
        try:
            stacks = await self._env.run_blocking(_sample, seconds, self._env.clock.monotonic_ns, self._stop)
        finally:
            self._is_profiling = False
        return plain_response(_folded(stacks))

    def _tasks(self, request: Request) -> Response:
        return plain_response(_tasks_text())

    def _threads(self, request: Request) -> Response:
        return plain_response(_threads_text())

    def _goroutine(self, request: Request) -> Response:
        return plain_response(f"{_tasks_text()}\n{_threads_text()}")

    async def _memory(self, request: Request) -> Response:
        return plain_response(await self._env.run_blocking(_memory_text))

    def _command_line(self, request: Request) -> Response:
        return plain_response("\0".join(map(without_credentials, sys.argv)))

    def _block(self, request: Request) -> Response:
        return plain_response("Python has no profile of blocking; /debug/tasks shows what waits, and where\n")

    def _symbol(self, request: Request) -> Response:
        return plain_response("num_symbols: 0\n")

    def _set_block_rate(self, request: Request) -> Response:
        text = request.query.get("rate", "")
        digits = text[1:] if text[:1] in ("+", "-") else text
        if not (digits.isascii() and digits.isdigit() and len(digits) < 20 and -_INT <= int(text) < _INT):
            raise HttpError(400, f'invalid block rate : strconv.Atoi: parsing "{text[:100]}": invalid syntax')
        return Response()

    async def _free_memory(self, request: Request) -> Response:
        await self._env.run_blocking(_free_memory)
        return Response()


_INDEX = """\
GET  /debug/state         the state of every part
GET  /debug/profile       where time goes: stacks sampled for ?seconds=30, one "frame;frame;frame count" per line, which
                          flamegraph.pl and speedscope.app read
GET  /debug/tasks         tasks of the event loop, and where they wait
GET  /debug/threads       stacks of the threads
GET  /debug/memory        objects by type
POST /debug/freememory    collect garbage and give free memory back to the system
PUT  /debug/setblockrate  accepted as nsqd does; Python has no profile of blocking
GET  /debug/pprof/        the same under Go's names: cmdline, profile, heap, goroutine, threadcreate, block, symbol
"""


def _seconds(text: str | None) -> float:
    try:
        seconds = SECONDS_DEFAULT if text is None else float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= SECONDS_MAX:
        raise HttpError(400, f"seconds must be a number above 0 and at most {SECONDS_MAX:g}")
    return seconds


# -- profile -----------------------------------------------------------------------------------------------------------


def _sample(seconds: float, monotonic_ns: Callable[[], int], stop: threading.Event) -> Counter[tuple[str, Stack]]:
    """Look at the stacks of all other threads every 10 ms. For a worker thread."""
    own = threading.get_ident()
    stacks: Counter[tuple[str, Stack]] = Counter()
    names: dict[int, str] = {}
    end_ns = monotonic_ns() + int(seconds * 1e9)
    while monotonic_ns() < end_ns and not stop.wait(_SAMPLE_INTERVAL_S):
        for identity, frame in sys._current_frames().items():
            if identity == own:
                continue
            if identity not in names:
                names = {thread.ident or 0: thread.name for thread in threading.enumerate()}
            key = (names.get(identity, "unknown"), _stack(frame))
            if key in stacks or len(stacks) < _STACK_COUNT_MAX:
                stacks[key] += 1
    return stacks


def _stack(frame: FrameType | None) -> Stack:
    """Return the code of a frame and of its callers, outermost first; the outermost are left out of a deep one."""
    codes: list[CodeType] = []
    while frame is not None and len(codes) < _DEPTH_MAX:
        codes.append(frame.f_code)
        frame = frame.f_back
    codes.reverse()
    return tuple(codes)


def _folded(stacks: Counter[tuple[str, Stack]]) -> str:
    lines = []
    for (thread, stack), count in stacks.most_common():
        frames = [f"{_module(code.co_filename)}.{code.co_qualname}" for code in stack]
        lines.append(f"{';'.join([thread.replace(' ', '_'), *frames])} {count}\n")
    return "".join(lines)


def _module(path: str) -> str:
    """Return the last parts of a path, as a module's name."""
    parts = path.removesuffix(".py").split("/")
    package = parts.index("flintmq") if "flintmq" in parts else max(0, len(parts) - 2)
    return ".".join(parts[package:]).replace(" ", "_").replace(";", "_")


# -- dumps -------------------------------------------------------------------------------------------------------------


def _tasks_text() -> str:
    tasks = sorted(asyncio.all_tasks(), key=lambda task: task.get_name())
    lines = [f"{len(tasks)} tasks"]
    for task in tasks[:_TASK_COUNT_MAX]:
        lines += [f"task {task.get_name()}", *_awaited(task.get_coro())]
    if len(tasks) > _TASK_COUNT_MAX:
        lines.append(f"and {len(tasks) - _TASK_COUNT_MAX} more")
    return "\n".join(lines) + "\n"


def _awaited(coroutine: Any) -> list[str]:
    """Return the lines at which a coroutine waits, the one it waits for, and so on."""
    lines: list[str] = []
    while coroutine is not None and len(lines) < _TASK_DEPTH_MAX:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None:
            lines.append(f"  {coroutine!r}"[:200])
        else:
            code = frame.f_code
            lines.append(f"  {_module(code.co_filename)}.{code.co_qualname} line {frame.f_lineno}")
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return lines


def _threads_text() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    parts = [f"{len(frames)} threads\n"]
    for identity, frame in sorted(frames.items(), key=lambda item: item[0] != threading.main_thread().ident):
        stack = traceback.format_stack(frame, limit=_DEPTH_MAX)
        parts.append(f"thread {names.get(identity, 'unknown')} ({identity})\n{''.join(stack)}")
    return "".join(parts)


def _memory_text() -> str:
    """Count the objects that the garbage collector knows, by type. For a worker thread: there may be millions."""
    counts: Counter[type] = Counter()
    sizes: Counter[type] = Counter()
    for each in gc.get_objects():
        kind = type(each)
        counts[kind] += 1
        sizes[kind] += sys.getsizeof(each, 0)
    lines = [
        f"allocated blocks  {sys.getallocatedblocks()}",
        f"tracked objects   {counts.total()}",
        f"own bytes of them {sizes.total()}",
        f"collections       {' '.join(str(each['collections']) for each in gc.get_stats())} by generation",
        f"waiting           {' '.join(map(str, gc.get_count()))} of {' '.join(map(str, gc.get_threshold()))}",
        "",
        f"{'objects':>10} {'own bytes':>12}  type",
    ]
    for kind, size in sizes.most_common(_TYPE_COUNT_MAX):
        lines.append(f"{counts[kind]:>10} {size:>12}  {kind.__module__}.{kind.__qualname__}")
    lines.append("\nNot tracked, hence not shown: bytes, text, numbers.\n")
    return "\n".join(lines)


def _free_memory() -> None:
    """Collect garbage and give free pages back to the system where its allocator can. For a worker thread."""
    import ctypes  # only ever needed here

    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
