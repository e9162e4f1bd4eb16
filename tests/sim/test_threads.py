"""The kit's threads: one at a time, in virtual time, and never left behind."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from types import ModuleType
from typing import Any

import pytest
from tests.sim.loop import Simulation, SimulationError
from tests.sim.threads import Threads


def code() -> Any:
    """A module that has imported what blocking code waits with."""
    module: Any = ModuleType("code")
    module.threading = module.socket = module.select = module.selectors = module.Lock = None
    return module


def play(scenario: Any, seed: int = 0) -> Any:
    module = code()
    with Simulation(seed) as sim, Threads(sim) as threads, threads.installed(module):
        return sim.run(scenario(sim, threads, module))


def test_waiting_takes_virtual_time_and_others_run_meanwhile():
    async def scenario(sim: Simulation, threads: Threads, it: Any) -> list[object]:
        told: list[object] = []
        flag = it.threading.Event()

        def wait() -> None:
            told.append((flag.wait(2.0), sim.now_s))
            told.append((flag.wait(2.0), sim.now_s))

        def set_later() -> None:
            it.threading.Event().wait(3.0)
            flag.set()

        await asyncio.gather(threads.call(wait), threads.call(set_later))
        return told

    assert play(scenario) == [(False, 2.0), (True, 3.0)]


def test_a_lock_is_held_by_one_and_handed_on_in_turn():
    async def scenario(sim: Simulation, threads: Threads, it: Any) -> list[tuple[int, float]]:
        lock = it.Lock()
        held: list[tuple[int, float]] = []

        def hold(number: int) -> None:
            with lock, lock:
                held.append((number, sim.now_s))
                it.threading.Event().wait(1.0)

        await asyncio.gather(*(threads.call(partial(hold, number)) for number in range(3)))
        assert lock.take(0.0)
        return held

    assert play(scenario) == [(0, 0.0), (1, 1.0), (2, 2.0)]


def test_a_condition_lets_others_have_its_lock():
    async def scenario(sim: Simulation, threads: Threads, it: Any) -> tuple[bool, bool]:
        changed = it.threading.Condition(it.Lock())
        box: list[int] = []

        def put() -> None:
            with changed:
                box.append(1)
                changed.notify_all()

        def take(timeout_s: float) -> bool:
            with changed:
                return bool(changed.wait_for(lambda: box, timeout_s))

        late = await threads.call(lambda: take(0.5))
        found, _ = await asyncio.gather(threads.call(lambda: take(5.0)), threads.call(put))
        return late, found

    assert play(scenario) == (False, True)


def test_a_socket_reads_what_comes_and_sees_the_end():
    async def scenario(sim: Simulation, threads: Threads, it: Any) -> tuple[list[bytes], bool]:
        async def serve() -> None:
            async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.write(b"hello " + await reader.readexactly(3))
                writer.close()

            await (await asyncio.start_server(greet, "0.0.0.0", 80)).serve_forever()

        sim.node("a").start(serve)
        await asyncio.sleep(1)

        def talk() -> tuple[list[bytes], bool]:
            address = it.socket.getaddrinfo("a", 80)[0][4]
            made = it.socket.socket()
            made.settimeout(1.0)
            made.connect(address)
            made.setblocking(False)
            with pytest.raises(BlockingIOError):
                made.recv(100)
            assert made.send(b"you") == 3
            pieces: list[bytes] = []
            while not pieces or pieces[-1]:
                poll = it.select.poll()
                poll.register(made, it.select.POLLIN)
                assert poll.poll(5000.0)
                pieces.append(made.recv(100))
            made.close()
            return [b"".join(pieces)], sim.now_s < 2.0

        return await threads.call(talk)

    assert play(scenario) == ([b"hello you"], True)


@pytest.mark.parametrize("error", [ConnectionRefusedError, TimeoutError])
def test_a_connection_that_cannot_be_made(error: type[OSError]):
    async def scenario(sim: Simulation, threads: Threads, it: Any) -> None:
        node = sim.node("a")
        node.start(lambda: asyncio.sleep(100))
        if error is TimeoutError:
            sim.network.partition("driver", "a")

        def connect() -> None:
            made = it.socket.socket()
            made.settimeout(3.0)
            made.connect((node.address, 80))

        with pytest.raises(error):
            await threads.call(connect)

    play(scenario)


def test_a_selector_notices_what_is_registered_and_sent_meanwhile():
    async def scenario(sim: Simulation, threads: Threads, it: Any) -> list[object]:
        told: list[object] = []
        selector = it.selectors.DefaultSelector()
        (one, other), (late, waker) = it.socket.socketpair(), it.socket.socketpair()
        selector.register(one, it.selectors.EVENT_READ, "one")

        def wait() -> None:
            for _ in range(4):
                told.append((sim.now_s, [(key.data, events) for key, events in selector.select(2.0)]))
                for key, _ in selector.select(0.0):
                    key.fileobj.recv(10)
            with pytest.raises(BlockingIOError):
                one.recv(1)

        def act() -> None:
            pause = it.threading.Event()
            pause.wait(3.0)
            other.send(b"x")
            pause.wait(0.5)
            waker.send(b"y")
            selector.register(late, it.selectors.EVENT_READ, "late")
            pause.wait(0.5)
            selector.unregister(late)
            waker.send(b"z")

        await asyncio.gather(threads.call(wait), threads.call(act))
        selector.close()
        late.close()
        with pytest.raises(BrokenPipeError):
            waker.send(b"z")
        return told

    read = 1
    assert play(scenario) == [(0.0, []), (2.0, [("one", read)]), (3.0, [("late", read)]), (3.5, [])]


def test_what_fails_in_a_thread_fails_the_run():
    async def scenario(sim: Simulation, threads: Threads, it: Any) -> None:
        def fail() -> None:
            raise ValueError("a mistake")

        it.threading.Thread(target=fail, name="job", daemon=True).start()
        await asyncio.sleep(1)

    with pytest.raises(SimulationError):
        play(scenario)


def test_no_thread_outlives_its_world():
    async def scenario(sim: Simulation, threads: Threads, it: Any) -> None:
        started = it.threading.Event()

        def stay() -> None:
            started.set()
            it.threading.Event().wait()

        for _ in range(3):
            it.threading.Thread(target=stay, name="stays", daemon=True).start()
        await threads.call(started.wait)

    before = threading.active_count()
    play(scenario)
    assert threading.active_count() == before


def test_the_loop_itself_never_waits():
    async def scenario(sim: Simulation, threads: Threads, it: Any) -> None:
        it.threading.Event().wait(1.0)

    with pytest.raises(SimulationError, match="the event loop would wait"):
        play(scenario)
