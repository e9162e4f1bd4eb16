"""The environment of a daemon or client, handed to it: time, chance, threads, fault points.

Everything that would make two runs of the same seed differ comes in through an :class:`Env`, so that whole daemons run
inside a simulation (tests/sim/README.md). The network is the running event loop's
``create_server``/``create_connection``; the disk is a :class:`flintmq.storage.Files`, handed in beside the Env.
"""

from __future__ import annotations

import random as _random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from flintmq.clock import Clock, SystemClock


class RunBlocking(Protocol):
    """Runs a function that may block for the disk, off the event loop; returns its result or raises its exception."""

    def __call__(self, function: Callable[..., Any], /, *args: Any) -> Awaitable[Any]: ...


async def run_in_thread(function: Callable[..., Any], /, *args: Any) -> Any:
    """Run ``function(*args)`` in the loop's default executor."""
    import asyncio  # a client on blocking sockets has an Env and no event loop

    return await asyncio.get_running_loop().run_in_executor(None, function, *args)


def never(_name: str) -> bool:
    """Return False, as every fault point does in production: nothing is made to go wrong."""
    return False


@dataclass(slots=True)
class Env:
    """The outside world as one argument.

    Attributes:
        clock: reads wall and monotonic time.
        random: seeded in simulations; used for jitter and choice, never for secrets.
        run_blocking: runs a blocking disk call; calls of one caller run one after the other when it awaits each.
        buggify: ``buggify("name")`` is True where a simulation wants rare behaviour (tiny segments, early flushes).
        hostname: this machine's name as shown to peers.
        local_names: further names that mean this machine to itself alone, as its ``/etc/hosts`` has them.
        has_threads: whether threads may be started, for handlers or with an event loop of their own; not in a
            simulation, where ``run_blocking`` stands for the former.
    """

    clock: Clock = field(default_factory=SystemClock)
    random: _random.Random = field(default_factory=_random.Random)
    run_blocking: RunBlocking = run_in_thread
    buggify: Callable[[str], bool] = never
    hostname: str = "localhost"
    local_names: tuple[str, ...] = ()
    has_threads: bool = True
