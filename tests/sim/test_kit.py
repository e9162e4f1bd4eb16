"""The simulation kit proved on itself: planted bugs are found, a correct broker passes, equal seeds are equal runs.

The subject is a toy broker: a log in segments, group commit, in-flight messages with a timeout. Its wire: frames of
nine bytes, a kind (``P`` publish, ``A`` acknowledged, ``S`` subscribe, ``M`` message, ``F`` finish) and an 8-byte id.

``python -m tests.sim.test_kit`` prints the speed; ``--seed N [--bug NAME]`` replays one seed.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import gc
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
import warnings
import zlib
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.sim.checkers import TotalQueue, Violation, in_flight, order, timeline, total_queue
from tests.sim.disk import CrashingDisk, DiskCrashed
from tests.sim.loop import (
    Node,
    SimTransport,
    Simulation,
    SimulationError,
    first_failing_seed,
    seeds,
)

from flintmq.env import Env
from flintmq.storage import File, Files

# ------------------------------------------------------------------------------------------------------- a toy broker

HEADER = struct.Struct(">II")  # size and checksum of what follows
FRAME = struct.Struct(">cQ")
PORT = 4150
SEGMENT_BYTES = 600
MSG_TIMEOUT_S = 1.0
BUGS = {
    # name: seeds within which it must be found
    "ack_before_sync": 400,
    "torn_tail_kept": 400,
    "finish_on_delivery": 400,
    "directory_not_synced": 400,
}


class ToyLog:
    """Records in segments of a directory; a torn record at the end is cut off before anything is appended."""

    def __init__(self, files: Files, bug: str) -> None:
        self.records: list[tuple[bytes, int]] = []
        self.unsynced: list[File] = []
        self._files = files
        self._bug = bug
        files.make_directory("log")
        names = files.list("log")
        for name in names:
            self._recover(f"log/{name}")
        if not names:
            self._roll()

    def _recover(self, path: str) -> None:
        self._file = self._files.open(path)
        raw = self._file.read_at(0, self._file.size())
        position = 0
        while position + HEADER.size <= len(raw):
            size, checksum = HEADER.unpack_from(raw, position)
            record = raw[position + HEADER.size : position + HEADER.size + size]
            if size != FRAME.size or zlib.crc32(record) != checksum:
                break
            self.records.append(FRAME.unpack(record))
            position += HEADER.size + size
        self._position = position
        if position < len(raw):
            if self._bug == "torn_tail_kept":
                self._position = len(raw)
            else:
                self._file.truncate(position)
        # What was read may not be durable yet, and what follows builds upon it.
        self._file.sync()

    def _roll(self) -> None:
        name = f"log/{len(self._files.list('log')):08}"
        self._file = self._files.open(name, create=True)
        self._position = 0
        if self._bug != "directory_not_synced":
            self._files.sync_directory("log")

    def append(self, kind: bytes, number: int) -> None:
        if self._position >= SEGMENT_BYTES:
            self._roll()
        record = FRAME.pack(kind, number)
        self._file.write_at(self._position, HEADER.pack(len(record), zlib.crc32(record)) + record)
        self._position += HEADER.size + len(record)
        if self._file not in self.unsynced:
            self.unsynced.append(self._file)


class ToyBroker:
    def __init__(self, env: Env, files: Files, bug: str) -> None:
        self.loop = asyncio.get_running_loop()
        self.bug = bug
        self.log = ToyLog(files, bug)
        self.queue: deque[int] = deque()
        self.in_flight: dict[int, asyncio.TimerHandle] = {}
        self.consumers: dict[ToyConnection, None] = {}
        self._env = env
        self._waiting: list[tuple[ToyConnection, int]] = []
        self._kick = asyncio.Event()
        finished = {number for kind, number in self.log.records if kind == b"F"}
        self.queue.extend(number for kind, number in self.log.records if kind == b"P" and number not in finished)

    async def commit_groups(self) -> None:
        while True:
            await self._kick.wait()
            self._kick.clear()
            waiting, self._waiting = self._waiting, []
            unsynced, self.log.unsynced = self.log.unsynced, []
            for file in unsynced:
                await self._env.run_blocking(file.sync)
            for connection, number in waiting:
                self._accept(connection, number)

    def _accept(self, connection: ToyConnection, number: int) -> None:
        connection.send(b"A", number)
        self.queue.append(number)
        self.deliver()

    def publish(self, connection: ToyConnection, number: int) -> None:
        self.log.append(b"P", number)
        if self.bug == "ack_before_sync":
            self._accept(connection, number)
        else:
            self._waiting.append((connection, number))
        self._kick.set()

    def deliver(self) -> None:
        for connection in self.consumers:
            while self.queue and not connection.is_full:
                number = self.queue.popleft()
                self.in_flight[number] = self.loop.call_later(MSG_TIMEOUT_S, self.requeue, number)
                connection.send(b"M", number)
                if self.bug == "finish_on_delivery":
                    self.log.append(b"F", number)

    def requeue(self, number: int) -> None:
        del self.in_flight[number]
        self.queue.append(number)
        self.deliver()

    def finish(self, number: int) -> None:
        timer = self.in_flight.pop(number, None)
        if timer is not None:
            timer.cancel()
            self.log.append(b"F", number)
            self._kick.set()


class ToyConnection(asyncio.Protocol):
    def __init__(self, broker: ToyBroker) -> None:
        self.is_full = False
        self._broker = broker
        self._transport: Any = None
        self._unread = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._unread += data
        while len(self._unread) >= FRAME.size:
            kind, number = FRAME.unpack_from(self._unread)
            del self._unread[: FRAME.size]
            if kind == b"P":
                self._broker.publish(self, number)
            elif kind == b"F":
                self._broker.finish(number)
            else:
                self._broker.consumers[self] = None
                self._broker.deliver()

    def send(self, kind: bytes, number: int) -> None:
        self._transport.write(FRAME.pack(kind, number))

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        self._broker.deliver()

    def connection_lost(self, exc: Exception | None) -> None:
        self._broker.consumers.pop(self, None)


async def toy_main(env: Env, files: Files, bug: str = "") -> None:
    broker = ToyBroker(env, files, bug)
    server = await asyncio.get_running_loop().create_server(lambda: ToyConnection(broker), "", PORT)
    async with server, asyncio.TaskGroup() as group:
        group.create_task(broker.commit_groups())
        group.create_task(server.serve_forever())


class History:
    def __init__(self) -> None:
        self.attempted: list[int] = []
        self.acked: list[int] = []
        self.delivered: list[int] = []


async def toy_producer(env: Env, history: History, count: int) -> None:
    number = 0
    while number < count:
        writer = None
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection("broker", PORT), 2.0)
            while number < count:
                history.attempted.append(number)
                number += 1
                writer.write(FRAME.pack(b"P", number - 1))
                async with asyncio.timeout(2.0):
                    answer = await reader.readexactly(FRAME.size)
                assert answer == FRAME.pack(b"A", number - 1)
                history.acked.append(number - 1)
                await asyncio.sleep(env.random.expovariate(50.0))
        except (OSError, asyncio.IncompleteReadError):
            await asyncio.sleep(0.1)
        finally:
            if writer is not None:
                writer.close()


async def toy_consumer(env: Env, history: History, delay_s: float) -> None:
    await asyncio.sleep(delay_s)
    while True:
        writer = None
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection("broker", PORT), 2.0)
            writer.write(FRAME.pack(b"S", 0))
            while True:
                async with asyncio.timeout(3.0):
                    _, number = FRAME.unpack(await reader.readexactly(FRAME.size))
                await asyncio.sleep(env.random.expovariate(50.0))
                history.delivered.append(number)
                writer.write(FRAME.pack(b"F", number))
        except (OSError, asyncio.IncompleteReadError):
            await asyncio.sleep(0.1)
        finally:
            if writer is not None:
                writer.close()


async def break_things(sim: Simulation, broker: Node) -> None:
    rng = sim.random
    for _ in range(rng.randint(1, 5)):
        await asyncio.sleep(rng.uniform(0.02, 0.6))
        fault = rng.choice(["kill", "power", "power", "operation", "partition", "one-way", "reset", "pause", "freeze"])
        client = rng.choice(["producer", "consumer"])
        if fault in ("kill", "power", "operation"):
            if fault == "operation":
                broker.crash_at_operation(broker.disk.operation_count + rng.randint(1, 8), rng.random() < 0.5)
                await asyncio.wait([asyncio.ensure_future(broker.exited())], timeout=2.0)
            broker.kill(power_loss=fault == "power")
            await asyncio.sleep(rng.uniform(0.01, 0.5))
            broker.restart()
        elif fault == "pause":
            broker.pause()
            await asyncio.sleep(rng.uniform(0.1, 3.0))
            broker.resume()
        elif fault == "freeze":
            broker.freeze_disk(rng.uniform(0.1, 1.0))
        elif fault == "reset":
            sim.network.reset("broker", client)
        else:
            sim.network.cut(client, "broker")
            if fault == "partition":
                sim.network.cut("broker", client)
            await asyncio.sleep(rng.uniform(0.1, 3.0))
            sim.network.heal()


def run_toy(seed: int, bug: str = "", message_count: int = 40) -> Simulation:
    """One seed; raises when a promise was broken."""
    history = History()
    with Simulation(seed) as sim:
        broker, producer, consumer = (sim.node(name) for name in ("broker", "producer", "consumer"))
        broker.start(lambda: toy_main(broker.env, broker.files, bug))
        publishing = producer.start(lambda: toy_producer(producer.env, history, message_count))
        broker.disk_delay_s = (1e-6, sim.random.choice([1e-3, 20e-3, 300e-3]))
        delay_s = sim.random.choice([0.0, 1.0, 5.0])  # a message delivered at once cannot be lost any more
        consumer.start(lambda: toy_consumer(consumer.env, history, delay_s))

        async def scenario() -> None:
            await break_things(sim, broker)
            if sim.random.random() < 0.5:
                broker.restart(power_loss=sim.random.random() < 0.5)
            for _ in range(240):
                await asyncio.sleep(0.5)
                if publishing.done() and set(history.acked) <= set(history.delivered):
                    return

        sim.run(scenario())
        result = total_queue(history.attempted, history.acked, (), history.delivered)
        assert result.is_ok, str(result)
        assert result.acked_count > 0
    return sim


def test_the_correct_broker_keeps_its_promise():
    for seed in seeds(300):
        run_toy(seed)


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug):
    assert first_failing_seed(lambda seed: run_toy(seed, bug), range(BUGS[bug])) is not None


def lost_records(bug: str, number: int, power_loss: bool) -> set[int]:
    """Let three lives append to one log and crash; the operation with this number dies half done."""
    disk = CrashingDisk()
    rng = random.Random(number)
    disk.crash_at(number, power_loss, rng)
    synced: set[int] = set()
    for life in range(3):
        try:
            log = ToyLog(disk.attach(), bug)
            for index in range(15):
                log.append(b"P", 100 * life + index)
                for file in log.unsynced:
                    file.sync()
                synced.add(100 * life + index)
        except DiskCrashed:
            continue
        disk.crash(power_loss, rng)
    return synced - {index for _, index in ToyLog(disk.attach(), bug).records}


@pytest.mark.parametrize(("bug", "is_found"), [("", False), ("torn_tail_kept", True), ("directory_not_synced", True)])
def test_a_crash_at_each_operation_and_two_more(bug, is_found):
    points = [(number, power_loss) for number in range(1, 80) for power_loss in (False, True)]
    assert any(lost_records(bug, *point) for point in points) == is_found


def test_what_a_killed_process_asked_of_the_collector_goes_with_it():
    """Or every killed daemon is kept for as long as the process of the tests, its disk and all its messages with it."""
    called = []

    def collecting(phase: str, about: dict[str, int]) -> None:
        called.append(phase)

    async def main() -> None:
        gc.callbacks.append(collecting)
        await asyncio.Event().wait()

    before = list(gc.callbacks)
    with Simulation(1) as sim:
        node = sim.node("nsqd")
        node.start(main)
        sim.run_for(1)
        assert collecting in gc.callbacks
        node.kill()
    gc.collect()
    assert gc.callbacks == before and not called


def test_a_failure_prints_seed_and_events():
    seed = first_failing_seed(lambda seed: run_toy(seed, "ack_before_sync"), range(BUGS["ack_before_sync"]))
    assert seed is not None
    with pytest.raises(AssertionError) as caught:
        run_toy(seed, "ack_before_sync")
    note = "\n".join(caught.value.__notes__)
    assert f"FLINTMQ_SIM_SEED={seed} " in note
    assert "disk       broker sync log/" in note
    assert "receive    consumer broker" in note


def test_one_seed_is_one_run_whatever_the_hash_seed():
    code = "from tests.sim.test_kit import run_toy; print([run_toy(seed).trace_hash for seed in range(8)])"
    hashes = set()
    for hash_seed in ("0", "1", "12345"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        root = Path(__file__).parents[2]
        done = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        hashes.add(done.stdout)
    assert hashes == {f"{[run_toy(seed).trace_hash for seed in range(8)]}\n"}


def test_different_seeds_are_different_runs():
    assert len({run_toy(seed).trace_hash for seed in range(20)}) == 20


def test_seeds_can_be_narrowed_to_one(monkeypatch):
    assert list(seeds(3, first=5)) == [5, 6, 7]
    monkeypatch.setenv("FLINTMQ_SIM_SEED", "42")
    assert list(seeds(3)) == [42]


# ---------------------------------------------------------------------------------------------------- loop and its time


def simulate(main: Callable[[], Any], seed: int = 0, **options: Any) -> Any:
    with Simulation(seed, **options) as sim:
        return sim.run(main())


def test_time_is_virtual_and_exact():
    async def main():
        loop = asyncio.get_running_loop()
        start = loop.time()
        await asyncio.sleep(1800)
        return loop.time() - start

    began = time.perf_counter()
    assert simulate(main) == 1800
    assert time.perf_counter() - began < 5


def test_equal_timers_run_in_the_order_they_were_made():
    async def main():
        loop = asyncio.get_running_loop()
        order: list[int] = []
        when = loop.time() + 1.0
        for number in range(200):
            loop.call_at(when, order.append, number)
        await asyncio.sleep(2)
        return order

    assert simulate(main) == list(range(200))


def test_timeouts_groups_and_thread_calls():
    async def main():
        loop = asyncio.get_running_loop()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(10), 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await asyncio.Event().wait()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(asyncio.sleep(n, n)) for n in range(3)]
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.sleep(100))
                group.create_task(fail())
        done = loop.create_future()
        loop.call_soon_threadsafe(done.set_result, "called")
        timer = loop.call_later(1, done.set_result, "again")
        timer.cancel()
        await asyncio.sleep(2)
        result = await asyncio.to_thread(sum, (1, 2))
        return [task.result() for task in tasks], await done, result

    assert simulate(main) == ([0, 1, 2], "called", 3)


async def fail() -> None:
    raise LookupError("on purpose")


async def forever() -> None:
    await asyncio.Event().wait()


def test_async_generators_are_closed_by_nobody_but_their_user():
    closed: list[str] = []

    async def numbers():
        try:
            yield 1
            yield 2
        finally:
            closed.append("generator")

    async def main():
        async for number in numbers():
            if number == 1:
                break
        return list(closed)

    assert simulate(main) == []


def test_a_deadlock_is_an_error():
    with pytest.raises(SimulationError, match="deadlock"):
        simulate(forever)


def test_a_busy_loop_is_an_error():
    async def main():
        while True:
            await asyncio.sleep(0)

    with pytest.raises(SimulationError, match="busy loop"):
        simulate(main)


def test_a_run_that_takes_too_long_is_an_error():
    with Simulation(0) as sim, pytest.raises(SimulationError, match="not done after 10 virtual seconds"):
        sim.run(asyncio.sleep(11), timeout_s=10)


def test_it_refuses_to_run_inside_a_loop():
    async def main():
        with Simulation(0) as sim, pytest.raises(RuntimeError, match="plain function"):
            sim.run(asyncio.sleep(1))

    asyncio.run(main())


def test_exceptions_nobody_handled_end_the_run():
    async def callback_fails():
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(1)

    async def task_fails():
        asyncio.get_running_loop().create_task(fail())
        await asyncio.sleep(1)

    async def held_task_fails():
        holder.append(asyncio.get_running_loop().create_task(fail()))
        await asyncio.sleep(1)

    holder: list[asyncio.Task[None]] = []
    with pytest.raises(SimulationError, match="ZeroDivisionError"):
        simulate(callback_fails)
    with pytest.raises(SimulationError, match="never retrieved"):
        simulate(task_fails)
    with pytest.raises(SimulationError, match="never retrieved"):
        simulate(held_task_fails)


def test_a_daemon_whose_main_fails_ends_the_run():
    with pytest.raises(SimulationError, match=r"nsqd: main failed: LookupError\('on purpose'\)"), Simulation(0) as sim:
        sim.node("nsqd").start(fail)
        sim.run(asyncio.sleep(1))
    with Simulation(0, strict=False) as sim:
        sim.node("nsqd").start(fail)
        sim.run(asyncio.sleep(1))
        assert [failure.node for failure in sim.failures] == ["nsqd"]
        assert not sim.node("nsqd").is_running


def test_exception_handlers_belong_to_a_process():
    seen: list[str] = []

    async def main(name: str):
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: seen.append(f"{name}: {context['message']}"))
        await asyncio.sleep(1)
        loop.call_exception_handler({"message": "mine"})

    with Simulation(0, strict=False) as sim:
        sim.node("one").start(lambda: main("one"))
        sim.run(main("driver"))
    assert seen == ["one: mine", "driver: mine"]


def test_the_private_names_of_asyncio_exist():
    """What loop.py uses beyond asyncio's public API; when this fails, look there."""

    async def main():
        loop = asyncio.get_running_loop()
        handle = loop.call_soon(lambda: None)
        assert handle._cancelled is False
        assert callable(handle._run)
        task = loop.create_task(fail())
        assert task._log_traceback is False
        assert task._log_destroy_pending is True  # type: ignore[attr-defined]
        await asyncio.wait([task])
        assert task._log_traceback is True
        task.exception()
        assert task._log_traceback is False

    simulate(main)
    assert asyncio._get_running_loop() is None
    assert callable(asyncio._set_running_loop)


# ------------------------------------------------------------------------------------------------------------- network


class Recorder(asyncio.Protocol):
    """Writes down what its transport tells it."""

    def __init__(self, keep_open: bool = False) -> None:
        self.events: list[str] = []
        self.data = bytearray()
        self.chunk_count = 0
        self.error: Exception | None = None
        self.transport: Any = None
        self._keep_open = keep_open

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.events.append("made")

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.chunk_count += 1

    def eof_received(self) -> bool:
        self.events.append("end")
        return self._keep_open

    def pause_writing(self) -> None:
        self.events.append("pause")

    def resume_writing(self) -> None:
        self.events.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.error = exc
        self.events.append("lost")


class Pair:
    """A driver connected to a server on a node; both ends record."""

    def __init__(self, sim: Simulation, keep_open: bool = False) -> None:
        self.sim = sim
        self.node = sim.node("server")
        self.server = Recorder(keep_open)
        self.client = Recorder(keep_open)
        self.node.start(self._serve)

    async def _serve(self) -> None:
        server = await asyncio.get_running_loop().create_server(lambda: self.server, "0.0.0.0", PORT)
        await server.serve_forever()

    async def connect(self) -> SimTransport:
        await asyncio.sleep(0.001)
        transport, protocol = await self.sim.loop.create_connection(lambda: self.client, "server", PORT)
        assert protocol is self.client
        assert self.client.events == ["made"]
        await asyncio.sleep(0.5)
        return transport


def connected(test: Callable[[Pair], Any]) -> Callable[[], None]:
    """Run a coroutine test with a connected pair, on several seeds."""

    def run() -> None:
        for seed in range(10):
            with Simulation(seed) as sim:
                pair = Pair(sim)

                async def main(pair: Pair = pair) -> None:
                    await pair.connect()
                    await test(pair)

                sim.run(main())

    run.__name__ = test.__name__
    return run


@connected
async def test_bytes_arrive_in_order_however_they_are_cut(pair):
    data = bytes(range(256)) * 2000
    for start in range(0, len(data), 1000):
        pair.client.transport.write(data[start : start + 1000])
    pair.server.transport.writelines([b"a", bytearray(b"b"), memoryview(b"c")])
    await asyncio.sleep(60)
    assert pair.server.data == data
    assert pair.client.data == b"abc"


def test_writes_are_split_and_joined():
    counts = []
    for seed in range(30):
        with Simulation(seed) as sim:
            pair = Pair(sim)

            async def main(pair: Pair = pair) -> None:
                await pair.connect()
                for _ in range(3):
                    pair.client.transport.write(b"0123456789")
                await asyncio.sleep(5)

            sim.run(main())
            counts.append(pair.server.chunk_count)
    assert min(counts) < 3 < max(counts)


@connected
async def test_addresses(pair):
    client, server = pair.client.transport, pair.server.transport
    assert client.get_extra_info("peername") == (pair.node.address, PORT)
    assert client.get_extra_info("sockname") == server.get_extra_info("peername")
    assert server.get_extra_info("sockname")[1] == PORT
    assert client.get_extra_info("socket").getpeername() == (pair.node.address, PORT)
    assert client.get_extra_info("sslcontext") is None
    assert client.get_extra_info("nothing", 7) == 7


@connected
async def test_close_flushes_and_ends(pair):
    pair.client.transport.write(b"x" * 600_000)
    pair.client.transport.close()
    pair.client.transport.write(b"ignored")
    assert pair.client.transport.is_closing()
    await asyncio.sleep(60)
    assert len(pair.server.data) == 600_000
    assert (pair.server.events, pair.server.error) == (["made", "end", "lost"], None)
    assert (pair.client.events[-1], pair.client.error) == ("lost", None)


@connected
async def test_abort_forgets_what_the_kernel_has_not_taken(pair):
    pair.client.transport.write(b"x" * 600_000)
    pair.client.transport.abort()
    await asyncio.sleep(60)
    assert 0 < len(pair.server.data) < 600_000
    assert (pair.client.events[-1], pair.client.error) == ("lost", None)
    assert pair.server.events[-1] == "lost"


@pytest.mark.parametrize("keep_open", [False, True])
def test_half_close(keep_open):
    with Simulation(1) as sim:
        pair = Pair(sim, keep_open)

        async def main() -> None:
            await pair.connect()
            pair.client.transport.write(b"x" * 300_000)
            pair.client.transport.write_eof()
            with pytest.raises(RuntimeError):
                pair.client.transport.write(b"more")
            await asyncio.sleep(60)
            assert len(pair.server.data) == 300_000
            if keep_open:
                assert pair.server.events == ["made", "end"]
                pair.server.transport.write(b"answer")
                await asyncio.sleep(5)
                assert pair.client.data == b"answer"
                assert "lost" not in pair.client.events
            else:
                assert pair.server.events == ["made", "end", "lost"]
                assert pair.client.events[-2:] == ["end", "lost"]

        sim.run(main())


@connected
async def test_a_reader_that_stops_stops_the_writer(pair):
    pair.server.transport.pause_reading()
    assert not pair.server.transport.is_reading()
    sent = 0
    for _ in range(100):
        pair.client.transport.write(bytes(10_000))
        sent += 10_000
        await asyncio.sleep(0.1)
    assert pair.client.events == ["made", "pause"]
    assert pair.client.transport.get_write_buffer_size() >= sent - 256 * 1024
    assert not pair.server.data
    pair.server.transport.resume_reading()
    await asyncio.sleep(60)
    assert len(pair.server.data) == sent
    assert pair.client.events == ["made", "pause", "resume"]
    assert pair.client.transport.get_write_buffer_size() == 0


@connected
async def test_write_buffer_limits(pair):
    transport = pair.client.transport
    assert transport.get_write_buffer_limits() == (16 * 1024, 64 * 1024)
    transport.set_write_buffer_limits(high=0)
    assert transport.get_write_buffer_limits() == (0, 0)
    with pytest.raises(ValueError, match="must be"):
        transport.set_write_buffer_limits(high=1, low=2)
    pair.server.transport.pause_reading()
    transport.write(bytes(4 * 1024))
    assert "pause" not in pair.client.events
    transport.write(bytes(256 * 1024))
    assert "pause" in pair.client.events


@connected
async def test_buffered_protocols(pair):
    class Buffered(asyncio.BufferedProtocol):
        def __init__(self) -> None:
            self.buffer = bytearray(7)
            self.data = bytearray()

        def get_buffer(self, sizehint: int) -> bytearray:
            return self.buffer

        def buffer_updated(self, nbytes: int) -> None:
            self.data += self.buffer[:nbytes]

    buffered = Buffered()
    pair.server.transport.set_protocol(buffered)
    assert pair.server.transport.get_protocol() is buffered
    pair.client.transport.write(b"0123456789" * 100)
    await asyncio.sleep(10)
    assert buffered.data == b"0123456789" * 100


@connected
async def test_closing_with_unread_input_resets(pair):
    pair.server.transport.pause_reading()
    pair.client.transport.write(b"unread")
    await asyncio.sleep(2)
    pair.server.transport.close()
    await asyncio.sleep(2)
    assert pair.client.events == ["made", "lost"]
    assert isinstance(pair.client.error, ConnectionResetError)


@connected
async def test_a_killed_process_ends_its_connections(pair):
    pair.server.transport.write(b"last words")
    pair.node.kill()
    await asyncio.sleep(5)
    assert pair.client.data == b"last words"
    assert pair.client.events == ["made", "end", "lost"]
    assert pair.server.events == ["made"]
    with pytest.raises(ConnectionRefusedError):
        await pair.sim.loop.create_connection(Recorder, "server", PORT)


@connected
async def test_a_machine_without_power_says_nothing_until_it_is_up_again(pair):
    began = pair.sim.now_s
    pair.node.kill(power_loss=True)
    await asyncio.sleep(100)
    assert pair.client.events == ["made"]
    pair.client.transport.write(b"hello?")
    with pytest.raises(TimeoutError):
        await pair.sim.loop.create_connection(Recorder, "server", PORT)
    assert pair.sim.now_s - began == pytest.approx(227)
    assert pair.client.events == ["made"]
    pair.node.restart()
    await asyncio.sleep(5)
    assert pair.client.events == ["made", "lost"]
    assert isinstance(pair.client.error, ConnectionResetError)


@connected
async def test_a_cut_holds_bytes_until_it_heals(pair):
    pair.sim.network.cut("driver", "server")
    pair.client.transport.write(b"held")
    pair.server.transport.write(b"passes")
    await asyncio.sleep(60)
    assert pair.client.data == b"passes"
    assert pair.server.data == b""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(pair.sim.loop.create_connection(Recorder, "server", PORT), 10)
    pair.sim.network.heal()
    await asyncio.sleep(2)
    assert pair.server.data == b"held"


@connected
async def test_a_machine_without_power_does_not_send_again_what_a_cut_held(pair):
    pair.sim.network.cut("server", "driver")
    pair.server.transport.write(b"held")
    await asyncio.sleep(1)
    pair.node.kill(power_loss=True)
    pair.node.restart()
    pair.sim.network.heal()
    await asyncio.sleep(60)
    assert pair.client.data == b""


@connected
async def test_a_connection_that_is_given_up_is_closed(pair):
    connecting = asyncio.ensure_future(pair.sim.loop.create_connection(Recorder, "server", PORT))
    await asyncio.sleep(0.00001)
    connecting.cancel()
    await asyncio.sleep(5)
    assert list(pair.sim.driver.transports) == [pair.client.transport]
    assert [transport.peer for transport in pair.node.transports] == [pair.client.transport]


def test_a_factory_that_fails_leaves_no_connection():
    def factory() -> Recorder:
        raise LookupError("on purpose")

    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(Recorder, "", PORT)
        with pytest.raises(LookupError):
            await asyncio.get_running_loop().create_connection(factory, "driver", PORT)
        await asyncio.sleep(1)
        assert not sim.driver.transports
        server.close()
        await server.wait_closed()

    with Simulation(0) as sim:
        sim.run(main())


@connected
async def test_one_direction_can_be_restored(pair):
    pair.sim.network.partition("driver", "server")
    pair.client.transport.write(b"there")
    pair.server.transport.write(b"back")
    pair.sim.network.restore("driver", "server")
    await asyncio.sleep(5)
    assert (pair.server.data, pair.client.data) == (b"there", b"")
    pair.sim.network.restore("server", "driver")
    await asyncio.sleep(5)
    assert pair.client.data == b"back"


@connected
async def test_lost_acknowledgements_stop_the_sender(pair):
    pair.sim.network.cut("server", "driver")
    pair.client.transport.write(bytes(500_000))
    await asyncio.sleep(60)
    assert 0 < len(pair.server.data) <= 256 * 1024
    pair.sim.network.heal()
    await asyncio.sleep(60)
    assert len(pair.server.data) == 500_000


@connected
async def test_a_cut_that_lasts_breaks_the_connection(pair):
    pair.sim.network.isolate("server")
    pair.client.transport.write(b"never arrives")
    await asyncio.sleep(1000)
    assert isinstance(pair.client.error, TimeoutError)
    assert pair.server.events == ["made"]
    pair.sim.network.heal()
    await asyncio.sleep(10)
    assert pair.server.data == b""


@connected
async def test_reset_by_the_network(pair):
    pair.sim.network.reset("server", "driver")
    await asyncio.sleep(1)
    assert isinstance(pair.client.error, ConnectionResetError)
    assert isinstance(pair.server.error, ConnectionResetError)


@connected
async def test_a_paused_process_receives_when_it_goes_on(pair):
    pair.node.pause()
    pair.client.transport.write(b"waits")
    await asyncio.sleep(30)
    assert pair.server.data == b""
    pair.node.resume()
    await asyncio.sleep(0.1)
    assert pair.server.data == b"waits"


def test_an_exception_in_data_received_closes_the_connection():
    class Broken(Recorder):
        def data_received(self, data: bytes) -> None:
            raise LookupError("on purpose")

    with Simulation(0, strict=False) as sim:
        pair = Pair(sim)
        pair.server = Broken()

        async def main() -> None:
            await pair.connect()
            pair.client.transport.write(b"x")
            await asyncio.sleep(5)

        sim.run(main())
        assert isinstance(pair.server.error, LookupError)
        assert pair.client.events[-1] == "lost"
        assert "data_received() call failed" in sim.failures[0].message


def test_servers():
    async def main():
        loop = asyncio.get_running_loop()
        first = await loop.create_server(Recorder, "127.0.0.1", 0)
        second = await loop.create_server(Recorder, None, 0)
        port = first.sockets[0].getsockname()[1]
        assert first.sockets[0].getsockname() == ("127.0.0.1", port)
        assert port not in (0, second.sockets[0].getsockname()[1])
        with pytest.raises(OSError, match="attempting to bind") as caught:
            await loop.create_server(Recorder, "", port)
        assert caught.value.errno == errno.EADDRINUSE
        transport, _ = await loop.create_connection(Recorder, "localhost", port)
        with pytest.raises(ConnectionRefusedError):
            await loop.create_connection(Recorder, "driver", port)  # only the loopback address listens
        await loop.create_connection(Recorder, "driver", second.sockets[0].getsockname()[1])
        first.close()
        assert first.sockets == ()
        assert not first.is_serving()
        with pytest.raises(ConnectionRefusedError):
            await loop.create_connection(Recorder, "localhost", port)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(first.wait_closed(), 5)
        transport.close()
        await first.wait_closed()
        late = await loop.create_server(Recorder, "localhost", port, start_serving=False)
        assert not late.is_serving()
        await late.start_serving()
        assert late.is_serving()
        with pytest.raises(OSError, match="Cannot assign"):
            await loop.create_server(Recorder, "10.9.9.9", 1)
        with pytest.raises(socket.gaierror):
            await loop.create_connection(Recorder, "nowhere", 1)
        with pytest.raises(NotImplementedError, match="ssl"):
            await loop.create_connection(Recorder, "driver", 1, ssl=True)
        assert await loop.getaddrinfo("driver", 80, type=socket.SOCK_STREAM) == [
            (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("10.0.0.1", 80))
        ]

    simulate(main)


# ----------------------------------------------------------------------------------------------- machines and processes


def test_a_killed_process_runs_nothing_more():
    log: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().call_later(2, log.append, "timer")
        try:
            log.append("started")
            await asyncio.sleep(3)
        finally:
            log.append("finally")

    with Simulation(0) as sim:
        node = sim.node("nsqd")
        node.start(main)
        sim.run_for(1)
        node.kill()
        sim.run_for(10)
        assert log == ["started"]
        node.restart()
        sim.run_for(10)
        assert log == ["started", "started", "timer", "finally"]


def test_what_dead_coroutines_do_at_the_end_reaches_nothing():
    problems: list[str] = []

    async def main(node: Node) -> None:
        file = node.files.open("data", create=True)
        try:
            await asyncio.sleep(100)
        finally:
            try:
                file.write_at(0, b"from the dead")
            except OSError as error:
                problems.append(str(error))
            await asyncio.sleep(1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Simulation(0) as sim:
            node = sim.node("nsqd")
            node.start(lambda: main(node))
            sim.run_for(1)
        gc.collect()
    assert node.disk.content("data") == b""
    assert len(problems) == 1


def test_stop_ends_a_daemon_as_it_wants_to_be_ended():
    log: list[str] = []

    async def with_handler() -> None:
        stopping = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
        await stopping.wait()
        await asyncio.sleep(1)
        log.append("clean")

    async def without_handler() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(1)
            log.append("cancelled")

    with Simulation(0) as sim:
        for main in (with_handler, without_handler):
            node = sim.node("nsqd")
            node.start(main)
            sim.run_for(1)
            node.stop()
            assert node.is_running
            sim.run(node.exited())
            assert not node.is_running
    assert log == ["clean", "cancelled"]


def test_a_signal_without_handler_kills():
    with Simulation(0) as sim:
        node = sim.node("nsqd")
        node.start(forever)
        sim.run_for(1)
        node.signal(signal.SIGTERM)
        assert not node.is_running


def test_the_end_of_main_ends_the_process():
    log: list[str] = []

    async def helper() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            log.append("helper cancelled")

    async def main(node: Node) -> None:
        node.files.open("data", create=True).write_at(0, b"kept")
        tasks.append(asyncio.get_running_loop().create_task(helper()))
        await asyncio.sleep(1)
        assert node.task_count == 2

    tasks: list[asyncio.Task[None]] = []
    with Simulation(0) as sim:
        node = sim.node("nsqd")
        node.start(lambda: main(node))
        sim.run(node.exited())
        assert log == ["helper cancelled"]
        assert node.disk.attach().open("data").read_at(0, 10) == b"kept"


def test_files_of_a_dead_process_refuse():
    async def main(node: Node) -> None:
        holder.append(node.files)
        await asyncio.sleep(100)

    holder: list[Files] = []
    with Simulation(0) as sim:
        node = sim.node("nsqd")
        node.start(lambda: main(node))
        sim.run_for(1)
        node.restart()
        sim.run_for(1)
        assert len(holder) == 2
        with pytest.raises(OSError, match="dead"):
            holder[0].list("")
        assert holder[1].list("") == []


def test_a_crash_at_an_operation_stops_the_process_inside_it():
    log: list[str] = []

    async def main(node: Node) -> None:
        file = node.files.open("data", create=True)
        for number in range(10):
            try:
                file.write_at(number, b"x")
            except Exception:  # noqa: BLE001  a daemon may do that; it must not survive its own death by it
                log.append("handled")
            await asyncio.sleep(0.1)
            log.append(f"wrote {number}")

    with Simulation(0) as sim:
        node = sim.node("nsqd")
        node.start(lambda: main(node))
        node.crash_at_operation(4)
        sim.run_for(5)
        assert not node.is_running
        assert log == ["wrote 0", "wrote 1"]
        assert len(node.disk.content("data")) in (2, 3)


def test_a_crash_inside_a_blocking_call():
    async def main(node: Node) -> None:
        file = node.files.open("data", create=True)
        await node.env.run_blocking(file.write_at, 0, bytes(1000))
        log.append("done")

    log: list[str] = []
    sizes = set()
    for seed in range(10):
        with Simulation(seed) as sim:
            node = sim.node("nsqd")
            node.start(partial(main, node))
            node.crash_at_operation(2)
            sim.run_for(1)
            assert not node.is_running
            sizes.add(len(node.disk.content("data")))
    assert not log
    assert len(sizes) > 5


def test_blocking_calls_take_time_and_keep_their_order():
    async def main() -> None:
        env = sim.driver.env
        loop = asyncio.get_running_loop()
        done: list[int] = []

        async def call(number: int) -> None:
            await env.run_blocking(executed.append, number)
            done.append(number)

        began = loop.time()
        await asyncio.gather(*(call(number) for number in range(100)))
        assert executed == done == list(range(100))
        assert 0.02 < loop.time() - began < 2.0
        with pytest.raises(ZeroDivisionError):
            await env.run_blocking(lambda: 1 // 0)
        sim.driver.freeze_disk(5.0)
        began = loop.time()
        assert await env.run_blocking(lambda: 7) == 7
        assert loop.time() - began >= 5.0

    executed: list[int] = []
    with Simulation(0) as sim:
        sim.run(main())


def test_a_cancelled_blocking_call_does_not_disturb_the_next():
    async def main() -> None:
        env = sim.driver.env
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(env.run_blocking(executed.append, 1), 1e-9)
        await env.run_blocking(executed.append, 2)

    executed: list[int] = []
    with Simulation(0) as sim:
        sim.run(main())
    assert executed == [1, 2]


def test_a_kill_leaves_a_blocking_call_done_or_not():
    outcomes = set()
    for seed in range(20):
        executed: list[int] = []
        resumed: list[int] = []

        async def main(node: Node, executed: list[int] = executed, resumed: list[int] = resumed) -> None:
            await node.env.run_blocking(executed.append, 1)
            resumed.append(1)

        with Simulation(seed) as sim:
            node = sim.node("nsqd")
            node.disk_delay_s = (1.0, 2.0)
            node.start(partial(main, node))
            sim.run_for(0.9)
            node.kill()
            sim.run_for(10)
            assert not resumed
            outcomes.add(len(executed))
    assert outcomes == {0, 1}


def test_clocks():
    with Simulation(0) as sim:
        clock, other = sim.driver.env.clock, sim.node("other")
        other.start(forever)
        wall, monotonic = clock.wall_ns(), clock.monotonic_ns()
        sim.run_for(1.5)
        assert clock.wall_ns() - wall == clock.monotonic_ns() - monotonic == 1_500_000_000
        sim.driver.jump_wall_clock(-3600)
        assert clock.wall_ns() - wall == 1_500_000_000 - 3_600_000_000_000
        assert clock.monotonic_ns() - monotonic == 1_500_000_000
        assert other.env.clock.wall_ns() - wall == 1_500_000_000


def test_a_timer_made_from_nanoseconds_finds_its_time_passed():
    async def main():
        loop, clock = asyncio.get_running_loop(), sim.driver.env.clock
        for delay_ns in range(1, 1_000_000, 997):
            due_ns = clock.monotonic_ns() + delay_ns
            await asyncio.sleep(due_ns / 1e9 - loop.time())
            assert clock.monotonic_ns() >= due_ns

    with Simulation(0) as sim:
        sim.run(main())


def test_chance_is_seeded_per_node_and_life():
    def draw(seed: int) -> list[float]:
        with Simulation(seed) as sim:
            values = []
            for name in ("one", "two"):
                node = sim.node(name)
                for _ in range(2):
                    node.start(forever)
                    values.append(node.env.random.random())
                    node.kill()
            return values

    assert draw(1) == draw(1)
    assert len(set(draw(1) + draw(2))) == 8


def test_buggify_is_rare_seeded_and_can_be_switched_off():
    def draw(seed: int, is_buggified: bool = True) -> list[bool]:
        with Simulation(seed) as sim:
            node = sim.node("nsqd")
            node.is_buggified = is_buggified
            node.start(forever)
            return [node.env.buggify(f"point {number % 50}") for number in range(500)]

    assert draw(3) == draw(3)
    assert 5 < sum(draw(3)) < 70
    assert not any(draw(3, is_buggified=False))


def test_misuse_is_explained():
    with Simulation(0) as sim:
        node = sim.node("nsqd")
        with pytest.raises(SimulationError, match="not running"):
            _ = node.env
        with pytest.raises(SimulationError, match="never started"):
            node.restart()
        node.start(forever)
        with pytest.raises(SimulationError, match="running already"):
            node.start(forever)


# ------------------------------------------------------------------------------------------------------------ checkers


def test_total_queue():
    result = total_queue(range(10), range(7), [9], [0, 1, 2, 2, 3, 4, 5, 5, 5, 7, 9, 77])
    assert result == TotalQueue(
        attempted_count=10,
        acked_count=7,
        lost=[6],
        unexpected=[77],
        ghosts=[9],
        recovered_count=2,
        duplicate_count=3,
    )
    assert not result.is_ok
    assert str(result).endswith("3 duplicates, lost [6], unexpected [77], ghosts [9]")
    assert total_queue("abc", "ab", "", "bca").is_ok
    assert "and 15 more" in str(total_queue(range(25), range(25), (), ()))


def test_order():
    published = {"p": ["a", "b", "c", "d"]}
    assert order({"p": [("a", 1), ("b", 2), ("a", 1), ("c", 3), ("b", 2)]}, published) == []
    assert order({"p": [("a", 1), ("x", 2), ("b", 3)]}, published) == []
    (skipped,) = order({"p": [("a", 1), ("c", 3), ("d", 4)]}, published)
    assert skipped == Violation("p", "skipped, and a later message was delivered", ("b", "c"))
    (swapped,) = order({"p": [("a", 1), ("c", 2), ("b", 3), ("d", 4)]}, published)
    assert swapped == Violation("p", "delivered before a message published earlier", ("c", "b"))
    (back,) = order({"p": [("a", 2), ("b", 1)]}, {})
    assert back.problem == "offset went back on a first delivery"


def test_in_flight():
    def check(*steps, **options):
        return [(v.where, v.problem) for v in in_flight(steps, **options)]

    too_many = ("c", "more in flight than RDY")
    assert check((0, "message", "c", 1)) == [too_many]
    assert check((0, "rdy", "c", 1), (1, "message", "c", 1), (2, "message", "c", 1)) == []
    assert check((0, "rdy", "c", 1), (1, "message", "c", 1), (2, "message", "c", 2)) == [too_many]
    assert check((0, "rdy", "c", 1), (1, "message", "c", 1), (2, "done", "c", 1), (3, "message", "c", 2)) == []
    lowered = [(0, "rdy", "c", 2), (1, "message", "c", 1), (2, "rdy", "c", 1), (7, "message", "c", 2)]
    assert check(*lowered) == [too_many]
    assert check(*lowered, tolerance_ns=5) == []
    assert check(*lowered, (8, "message", "c", 3), tolerance_ns=5) == [too_many]
    assert check(*lowered[:3], (4, "rdy", "c", 2), lowered[3]) == []
    assert check((0, "rdy", "c", 1), (1, "close", "c", 0), (2, "message", "c", 1)) == [too_many]
    two = [(0, "rdy", "c", 1), (0, "rdy", "d", 1), (1, "message", "c", 1), (2, "message", "d", 2)]
    assert check(*two, max_in_flight=2) == []
    assert check(*two, max_in_flight=1) == [("d", "more in flight than max_in_flight")]
    assert check(*two[:3], (2, "close", "c", 0), two[3], max_in_flight=1) == []
    with pytest.raises(ValueError, match="unknown step 'fin'"):
        check((0, "fin", "c", 1))


def test_timeline():
    def check(*steps, **options):
        return [v.problem for v in timeline(steps, msg_timeout_ns=100, **options)]

    held, early = "delivered while a connection held it", "delivered before it was due"
    first = (0, "deliver", "c", "m", 1)
    assert check(first, (100, "deliver", "d", "m", 2), (200, "deliver", "c", "m", 3)) == []
    assert check(first, (99, "deliver", "d", "m", 2)) == [held]
    assert check(first, (99, "deliver", "d", "m", 2), tolerance_ns=1) == []
    assert check(first, (100, "deliver", "d", "m", 3)) == ["attempts 3 where 2 was due"]
    assert check(first, (100, "deliver", "d", "m", 1)) == ["attempts 1 where 2 was due"]
    assert check(first, (10, "close", "c", "", 0), (11, "deliver", "d", "m", 3)) == []
    assert check(first, (10, "close", "d", "", 0), (11, "deliver", "d", "m", 2)) == [held]
    assert check(first, (10, "restart", "", "", 0), (11, "deliver", "d", "m", 1)) == []
    assert check(first, (10, "restart", "", "", 0), (11, "deliver", "d", "m", 3)) == ["attempts 3 where 2 was due"]
    assert check(first, (10, "finish", "c", "m", 0), (11, "deliver", "d", "m", 2)) == []
    requeued = (50, "requeue", "c", "m", 1000)
    assert check(first, requeued, (1050, "deliver", "d", "m", 2)) == []
    assert check(first, requeued, (1049, "deliver", "d", "m", 2)) == [early]
    assert check(first, requeued, (60, "close", "c", "", 0), (61, "deliver", "d", "m", 2)) == []
    assert check(first, (99, "requeue", "c", "m", 1000), (101, "deliver", "d", "m", 2), tolerance_ns=5) == []
    touched = (50, "touch", "c", "m", 0)
    assert check(first, touched, (149, "deliver", "d", "m", 2)) == [held]
    assert check(first, touched, (149, "deliver", "d", "m", 2), max_msg_timeout_ns=120) == []
    deferred = (0, "defer", "p", "m", 500)
    assert check(deferred, (499, "deliver", "c", "m", 1)) == [early]
    assert check(deferred, (9, "restart", "", "", 0), (499, "deliver", "c", "m", 1)) == [early]
    assert check(deferred, (800, "deliver", "c", "m", 1), late_ns=300) == []
    assert check(deferred, (801, "deliver", "c", "m", 1), late_ns=300) == ["delivered late"]
    assert check(first, (401, "deliver", "d", "m", 2), late_ns=300) == ["delivered late"]
    with pytest.raises(ValueError, match="unknown step 'fin'"):
        check((0, "fin", "c", "m", 0))


@pytest.mark.parametrize("count", [200_000])
def test_checkers_are_fast(count):
    """A fifth of a million ids in well under a second; the bound is wide because machines differ."""
    began = time.process_time()
    assert total_queue(range(count), range(count), (), [*range(count), *range(1000)]).is_ok
    assert order({0: ((number, number) for number in range(count))}, {0: range(count)}) == []
    steps = ((number, step, 0, number) for number in range(count) for step in ("message", "done"))
    assert in_flight([(0, "rdy", 0, 1), *steps]) == []
    lives = ((number, step, 0, number, 1) for number in range(count) for step in ("deliver", "finish"))
    assert timeline(lives, msg_timeout_ns=100) == []
    assert time.process_time() - began < 10


# --------------------------------------------------------------------------------------------------------------- speed


def measure(count: int) -> None:
    began = time.perf_counter()
    events = 0
    virtual_s = 0.0
    for seed in range(count):
        sim = run_toy(seed)
        events += sim.loop.event_count
        virtual_s += sim.now_s
    took_s = time.perf_counter() - began
    print(
        f"{count} seeds in {took_s:.1f} s: {count / took_s * 60:.0f} seeds/min, "
        f"{events / took_s / 1000:.0f} k callbacks/s, {virtual_s / took_s:.0f} times real time"
    )
    for bug, limit in BUGS.items():
        began = time.perf_counter()
        found = first_failing_seed(partial(run_toy, bug=bug), range(limit))
        print(f"{bug}: found by seed {found} after {time.perf_counter() - began:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int)
    parser.add_argument("--bug", default="", choices=["", *BUGS])
    parser.add_argument("--count", type=int, default=500)
    arguments = parser.parse_args()
    if arguments.seed is None:
        measure(arguments.count)
    else:
        print(run_toy(arguments.seed, arguments.bug).describe())


if __name__ == "__main__":
    main()
