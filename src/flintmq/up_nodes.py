"""Several nsqd for ``flintmq up --nsqd=N``: each a process of its own, because one uses one core.

Rules of this file: every process is ended by who started it, and ends by itself when that one is gone; Ctrl-C of a
terminal reaches ``flintmq up`` alone, which stops them in order.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from flintmq.addresses import format_address
from flintmq.nsqd import server as nsqd_server
from flintmq.nsqd.options import NsqdOptions

STOP_S_MAX = 30.0
"""Until a process that was asked to stop is killed."""


class NodeFailed(Exception):
    """An nsqd did not start; its log says why.

    Args:
        number: of the nsqd, from 1.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def __str__(self) -> str:
        return f"nsqd {self.number} did not start"


class Nodes:
    """The processes.

    Args:
        on_end: called with the number (from 1) and the exit code of one that ended by itself.
    """

    def __init__(self, on_end: Callable[[int, int | None], None]) -> None:
        self._on_end = on_end
        self._processes: list[SpawnProcess] = []
        self._watched: set[int] = set()

    async def start(self, options: Sequence[NsqdOptions]) -> list[tuple[str, str]]:
        """Start one process for each; return their TCP and HTTP addresses when all listen.

        Raises:
            NodeFailed: one of them does not.
        """
        context = multiprocessing.get_context("spawn")
        pipes: list[Connection] = []
        for each in options:
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(each, there), daemon=True)
            process.start()
            there.close()  # so that the end of the process is the end of the pipe
            self._processes.append(process)
            pipes.append(here)
        found = []
        for number, pipe in enumerate(pipes, 1):
            try:
                found.append(await asyncio.to_thread(pipe.recv))
            except EOFError:
                raise NodeFailed(number) from None
            finally:
                pipe.close()
        loop = asyncio.get_running_loop()
        for number, process in enumerate(self._processes, 1):
            self._watched.add(process.sentinel)
            loop.add_reader(process.sentinel, self._ended, number, process)
        return found

    def _ended(self, number: int, process: SpawnProcess) -> None:
        asyncio.get_running_loop().remove_reader(process.sentinel)
        self._watched.discard(process.sentinel)
        process.join()
        self._on_end(number, process.exitcode)

    async def stop(self) -> None:
        """Stop all of them, and return when they have ended."""
        loop = asyncio.get_running_loop()
        for sentinel in self._watched:
            loop.remove_reader(sentinel)
        self._watched.clear()
        for process in self._processes:
            process.terminate()
        await asyncio.to_thread(self._wait)

    def _wait(self) -> None:
        for process in self._processes:
            process.join(STOP_S_MAX)
            if process.is_alive():
                process.kill()
                process.join()


def _run(options: NsqdOptions, ready: Connection) -> None:
    """Be an nsqd until who started it says so, or is gone."""
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def listens(nsqd: nsqd_server.Nsqd) -> None:
        tcp, http = nsqd.addresses.tcp, nsqd.addresses.http
        assert tcp is not None and http is not None
        ready.send((format_address(*tcp), format_address(*http)))
        ready.close()

    raise SystemExit(nsqd_server.run(options, listens))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
