"""nsqlookupd as its users meet it: a process spoken to over TCP and HTTP; rules about time in the test's own loop."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import signal
import socket
import struct
import subprocess
import time
from pathlib import Path

import pytest
from tests.integration import forked
from tests.integration.utilities import flintmq

from flintmq.env import Env
from flintmq.errors import OptionError
from flintmq.net.address import ListenFailed
from flintmq.nsqlookupd.options import NsqlookupdOptions
from flintmq.nsqlookupd.server import Nsqlookupd, main
from flintmq.nsqlookupd.session import LookupSession, Sessions
from flintmq.testing import ManualClock
from flintmq.version import __version__

SECOND = 1_000_000_000
PATIENCE_S = 10.0
PEER = {
    "version": "1.3.0",
    "tcp_port": 4150,
    "http_port": 4151,
    "hostname": "nsqd-host",
    "broadcast_address": "nsqd.example",
    "topology_zone": "z1",
    "topology_region": "r1",
}


class Daemon:
    """A nsqlookupd process; its log is a file."""

    def __init__(self, log: Path, *flags: str) -> None:
        addresses = ("--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0", "--broadcast-address=lookup.example")
        self.log = log
        # What is set later wins, so a test may override an address.
        words = ("nsqlookupd", *addresses, *flags)
        with log.open("wb") as stderr:
            self.process = forked.start(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr)
        self.tcp: tuple[str, int] = self._address("TCP")
        self.http: tuple[str, int] = self._address("HTTP")

    def _address(self, what: str) -> tuple[str, int]:
        wait_until(
            lambda: re.search(what + r": listening on (\S+):(\d+)\n", self.text) or self.process.poll() is not None
        )
        found = re.search(what + r": listening on (\S+):(\d+)\n", self.text)
        assert found is not None, self.text
        return found[1], int(found[2])

    @property
    def text(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def request(self, method: str, target: str) -> tuple[int, object]:
        status, _, body = self.raw_request(method, target)
        return status, json.loads(body) if body else None

    def raw_request(self, method: str, target: str) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection = http.client.HTTPConnection(*self.http, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.request(method, target)
            response = connection.getresponse()
            return response.status, response.headers, response.read()

    def get(self, target: str) -> object:
        status, value = self.request("GET", target)
        assert status == 200, value
        return value

    def post(self, target: str) -> tuple[int, object]:
        return self.request("POST", target)

    def producers(self, topic: str) -> list[str]:
        found = self.get(f"/lookup?topic={topic}")
        return [producer["broadcast_address"] for producer in found["producers"]]  # type: ignore[index]

    def connect(self, *, magic: bytes = b"  V1") -> Nsqd:
        return Nsqd(self.tcp, magic)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


class Nsqd:
    """The nsqd's end of a connection to nsqlookupd, on a raw socket."""

    def __init__(self, address: tuple[str, int], magic: bytes = b"  V1") -> None:
        self.socket = socket.create_connection(address, PATIENCE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.reader = self.socket.makefile("rb")
        if magic:
            self.socket.sendall(magic)

    @property
    def name(self) -> str:
        host, port = self.socket.getsockname()
        return f"{host}:{port}"

    def send(self, data: bytes) -> bytes:
        self.socket.sendall(data)
        return self.answer()

    def answer(self) -> bytes:
        head = self.reader.read(4)
        assert len(head) == 4, "closed without an answer"
        return self.reader.read(struct.unpack(">i", head)[0])

    def identify(self, **fields: object) -> dict[str, object]:
        body = json.dumps({**PEER, **fields}).encode()
        return json.loads(self.send(b"IDENTIFY\n" + struct.pack(">i", len(body)) + body))

    def is_closed(self) -> bool:
        try:
            return self.reader.read(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.reader.close()
        self.socket.close()

    def __enter__(self) -> Nsqd:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def wait_until(condition, patience_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One process for the tests that leave nothing behind but their own topics."""
    daemon = Daemon(tmp_path_factory.mktemp("nsqlookupd") / "log")
    yield daemon
    daemon.process.kill()
    daemon.process.wait()


@pytest.fixture
def start(tmp_path):
    started: list[Daemon] = []

    def start(*flags: str) -> Daemon:
        started.append(Daemon(tmp_path / f"log{len(started)}", *flags))
        return started[-1]

    yield start
    for daemon in started:
        daemon.process.kill()
        daemon.process.wait()


class TestProcess:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_it_stops_cleanly(self, start, number):
        daemon = start()
        with daemon.connect() as nsqd:
            nsqd.identify()
            assert daemon.raw_request("GET", "/ping")[2] == b"OK"
            assert daemon.stop(number) == 0
            assert nsqd.is_closed()
        assert len(re.findall("TCP: listening on", daemon.text)) == 1
        assert len(re.findall("HTTP: listening on", daemon.text)) == 1
        assert "Traceback" not in daemon.text

    def test_log_format(self, start):
        daemon = start("--log-prefix=[x] ")
        daemon.stop()
        for line in daemon.text.splitlines():
            assert re.match(r"\[x\] \d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{6} (DEBUG|INFO|WARNING|ERROR|FATAL): ", line)

    def test_hang_up_does_not_kill(self, start):
        daemon = start()
        daemon.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "SIGHUP" in daemon.text)
        assert daemon.raw_request("GET", "/ping")[0] == 200

    @pytest.mark.parametrize("flag", ["--tcp-address", "--http-address"])
    def test_address_in_use(self, flag):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            flags = {"--tcp-address": "127.0.0.1:0", "--http-address": "127.0.0.1:0", flag: address}
            done = flintmq("nsqlookupd", *(f"{name}={value}" for name, value in flags.items()))
        assert done.returncode == 1
        assert f"FATAL: failed to instantiate nsqlookupd - listen ({address}) failed - " in done.stderr
        assert "in use" in done.stderr
        assert "Traceback" not in done.stderr

    def test_thousands_of_registrations_are_not_as_many_lines(self, start):
        daemon, count = start(), 500
        with daemon.connect() as nsqd:
            nsqd.identify()
            for number in range(count):
                assert nsqd.send(b"REGISTER topic%d\n" % number) == b"OK"

            def told() -> tuple[int, int]:
                sums = re.findall(r"INFO: DB: client\(\S+\) (\d+) more registrations changed", daemon.text)
                return daemon.text.count(" REGISTER topic:"), sum(map(int, sums))

            wait_until(lambda: sum(told()) == count)
        assert told()[0] < count

    def test_nothing_a_peer_sends_can_fake_a_log_line(self, start):
        daemon = start()
        with daemon.connect() as nsqd:
            nsqd.identify(broadcast_address="a\n[nsqlookupd] FATAL: fake")
        daemon.raw_request("GET", "/x%0aFATAL:%20fake")
        wait_until(lambda: "IDENTIFY Address:a" in daemon.text)
        assert all(line.startswith("[nsqlookupd] 2") for line in daemon.text.splitlines())


class TestProtocol:
    def test_identify_answer(self, shared):
        with shared.connect() as nsqd:
            info = nsqd.identify()
        assert list(info) == ["broadcast_address", "hostname", "http_port", "tcp_port", "version"]
        assert info == {
            "broadcast_address": "lookup.example",
            "hostname": socket.gethostname(),
            "http_port": shared.http[1],
            "tcp_port": shared.tcp[1],
            "version": "1.3.0",
        }

    def test_register_lookup_disconnect(self, shared):
        with shared.connect() as nsqd:
            nsqd.identify()
            assert nsqd.send(b"REGISTER flow chan\n") == b"OK"
            assert nsqd.send(b"REGISTER flow\n") == b"OK"
            assert shared.get("/lookup?topic=flow") == {
                "channels": ["chan"],
                "producers": [
                    {
                        "remote_address": nsqd.name,
                        "hostname": "nsqd-host",
                        "broadcast_address": "nsqd.example",
                        "tcp_port": 4150,
                        "http_port": 4151,
                        "version": "1.3.0",
                        "topology_zone": "z1",
                        "topology_region": "r1",
                    }
                ],
            }
            assert nsqd.send(b"UNREGISTER flow chan\n") == b"OK"
            assert shared.get("/channels?topic=flow") == {"channels": ["chan"]}
        wait_until(lambda: shared.get("/lookup?topic=flow") == {"channels": ["chan"], "producers": []})

    def test_a_reset_is_a_disconnect(self, shared):
        nsqd = shared.connect()
        nsqd.identify()
        nsqd.send(b"REGISTER reset chan#ephemeral\n")
        assert shared.get("/channels?topic=reset") == {"channels": ["chan#ephemeral"]}
        nsqd.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        nsqd.close()
        wait_until(lambda: shared.get("/lookup?topic=reset") == {"channels": [], "producers": []})

    def test_ephemeral_topic_goes_with_its_producer(self, shared):
        with shared.connect() as nsqd:
            nsqd.identify()
            nsqd.send(b"REGISTER gone#ephemeral c\n")
            assert "gone#ephemeral" in shared.get("/topics")["topics"]
        wait_until(lambda: "gone#ephemeral" not in shared.get("/topics")["topics"])

    def test_byte_by_byte(self, shared):
        body = json.dumps(PEER).encode()
        stream = b"  V1PING\nIDENTIFY\n" + struct.pack(">i", len(body)) + body + b"REGISTER bytes c\r\nPING\n"
        with shared.connect(magic=b"") as nsqd:
            for byte in stream:
                nsqd.socket.sendall(bytes((byte,)))
            assert nsqd.answer() == b"OK"
            assert b"tcp_port" in nsqd.answer()
            assert (nsqd.answer(), nsqd.answer()) == (b"OK", b"OK")
            assert shared.producers("bytes") == ["nsqd.example"]

    def test_pipelined(self, shared):
        body = json.dumps(PEER).encode()
        stream = b"  V1IDENTIFY\n" + struct.pack(">i", len(body)) + body
        topics = b"".join(b"REGISTER many%d c%d\n" % (i, i) for i in range(2000))
        with shared.connect(magic=b"") as nsqd:
            nsqd.socket.sendall(stream + topics)
            assert b"tcp_port" in nsqd.answer()
            assert {nsqd.answer() for _ in range(2000)} == {b"OK"}
            (listed,) = [found for found in shared.get("/nodes")["producers"] if found["remote_address"] == nsqd.name]
            assert len(listed["topics"]) == len(listed["tombstones"]) == 2000
            assert listed["topics"] == sorted(listed["topics"])

    @pytest.mark.parametrize(
        ("data", "answer"),
        [
            (b"IDENTIFY\n\xff\xff\xff\xff", b"E_BAD_BODY IDENTIFY invalid body size -1"),
            (b"IDENTIFY\n\x80\x00\x00\x00", b"E_BAD_BODY IDENTIFY invalid body size -2147483648"),
            (b"IDENTIFY\n\x7f\xff\xff\xff", b"E_BAD_BODY IDENTIFY body too big 2147483647 > 65536"),
            (b"IDENTIFY\n\x00\x00\x00\x02{}", b"E_BAD_BODY IDENTIFY missing fields"),
            (b"IDENTIFY\n\x00\x00\x00\x02[}", b"E_BAD_BODY IDENTIFY failed to decode JSON body"),
            (b"REGISTER t\n", b"E_INVALID client must IDENTIFY"),
            (b"\xff\xfe\n", b"E_INVALID invalid command \xff\xfe"),
            (b"\n", b"E_INVALID invalid command "),
            (b"x" * 20_000, b"E_INVALID command line too long, more than 16384 bytes"),
        ],
    )
    def test_errors_are_answered_and_close(self, shared, data, answer):
        with shared.connect() as nsqd:
            assert nsqd.send(data + b"PING\n" * 1000) == answer
            assert nsqd.is_closed()
        assert shared.raw_request("GET", "/ping")[0] == 200

    @pytest.mark.parametrize("magic", [b"  V2", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"])
    def test_wrong_magic(self, shared, magic):
        with shared.connect(magic=magic) as nsqd:
            assert nsqd.answer() == b"E_BAD_PROTOCOL"
            assert nsqd.is_closed()
        assert f"] - E_BAD_PROTOCOL bad protocol magic {repr(magic[:4])[1:]} - " in shared.log.read_text()

    def test_errors_once_identified(self, shared):
        with shared.connect() as nsqd:
            nsqd.identify()
            assert nsqd.send(b"REGISTER $ c\n") == b"E_BAD_TOPIC REGISTER topic name '$' is not valid"
            assert nsqd.is_closed()

    def test_half_closed_in_the_middle_of_a_body(self, shared):
        with shared.connect() as nsqd:
            nsqd.socket.sendall(b"IDENTIFY\n\x00\x00\x00\x09{")
            nsqd.socket.shutdown(socket.SHUT_WR)
            assert nsqd.answer() == b"E_BAD_BODY IDENTIFY failed to read body"
            assert nsqd.is_closed()

    def test_partitions_of_a_clustered_peer(self, shared):
        with shared.connect() as nsqd:
            nsqd.identify(distributed_id="10.0.0.1:4250:4150:1", broadcast_address="part.example")
            for line in (b"REGISTER parts 0 c\n", b"REGISTER parts 1\n", b"UNREGISTER parts 0\n"):
                assert nsqd.send(line) == b"OK"
            assert shared.producers("parts") == ["part.example"]
            assert nsqd.send(b"UNREGISTER parts 1\n") == b"OK"
            assert shared.producers("parts") == []
            assert nsqd.send(b"REGISTER parts c\n") == b"E_BAD_PARTITIONID REGISTER partition id 'c' is not valid"

    def test_many_idle_connections(self, shared):
        peers = [shared.connect() for _ in range(200)]
        for peer in peers:
            assert peer.send(b"PING\n") == b"OK"
        assert shared.raw_request("GET", "/ping")[0] == 200
        for peer in peers:
            peer.close()


class TestHttpApi:
    def test_ping_and_info(self, shared):
        status, headers, body = shared.raw_request("GET", "/ping")
        assert (status, body) == (200, b"OK")
        assert headers["Content-Type"] == "text/plain; charset=utf-8"
        assert shared.get("/info") == {"version": "1.3.0", "flintmq_version": __version__}

    def test_create_and_delete(self, shared):
        assert shared.post("/channel/create?topic=made&channel=c") == (200, None)
        assert shared.post("/topic/create?topic=made2") == (200, None)
        assert shared.get("/lookup?topic=made") == {"channels": ["c"], "producers": []}
        assert {"made", "made2"} <= set(shared.get("/topics")["topics"])
        assert shared.post("/channel/delete?topic=made&channel=c") == (200, None)
        assert shared.get("/channels?topic=made") == {"channels": []}
        assert shared.post("/topic/delete?topic=made") == (200, None)
        assert shared.post("/topic/delete?topic=made") == (200, None)
        assert shared.request("GET", "/lookup?topic=made") == (404, {"message": "TOPIC_NOT_FOUND"})

    def test_success_without_data_is_empty(self, shared):
        status, headers, body = shared.raw_request("POST", "/topic/create?topic=quiet")
        assert (status, body, headers["Content-Type"], headers["Content-Length"]) == (200, b"", None, "0")
        assert headers["X-NSQ-Content-Type"] == "nsq; version=1.0"

    @pytest.mark.parametrize(
        ("method", "target", "status", "message"),
        [
            ("GET", "/lookup", 400, "MISSING_ARG_TOPIC"),
            ("GET", "/lookup?topic=unknown", 404, "TOPIC_NOT_FOUND"),
            ("GET", "/lookup?topic=", 404, "TOPIC_NOT_FOUND"),
            ("GET", "/lookup?topic=*", 404, "TOPIC_NOT_FOUND"),
            ("GET", "/lookup?topic=a;b", 400, "INVALID_REQUEST"),
            ("GET", "/channels", 400, "MISSING_ARG_TOPIC"),
            ("GET", "/channels?topic=%zz", 400, "INVALID_REQUEST"),
            ("POST", "/topic/create", 400, "MISSING_ARG_TOPIC"),
            ("POST", "/topic/create?topic=", 400, "INVALID_ARG_TOPIC"),
            ("POST", "/topic/create?topic=a%20b", 400, "INVALID_ARG_TOPIC"),
            ("POST", "/topic/create?topic=" + "x" * 65, 400, "INVALID_ARG_TOPIC"),
            ("POST", "/topic/delete", 400, "MISSING_ARG_TOPIC"),
            ("POST", "/channel/create", 400, "MISSING_ARG_TOPIC"),
            ("POST", "/channel/create?topic=$", 400, "INVALID_ARG_TOPIC"),
            ("POST", "/channel/create?topic=t", 400, "MISSING_ARG_CHANNEL"),
            ("POST", "/channel/create?topic=t&channel=$", 400, "INVALID_ARG_CHANNEL"),
            ("POST", "/channel/delete?topic=t&channel=$", 400, "INVALID_ARG_CHANNEL"),
            ("POST", "/channel/delete?topic=t&channel=c", 404, "CHANNEL_NOT_FOUND"),
            ("POST", "/topic/tombstone", 400, "MISSING_ARG_TOPIC"),
            ("POST", "/topic/tombstone?topic=t", 400, "MISSING_ARG_NODE"),
            ("POST", "/lookup?topic=t", 405, "METHOD_NOT_ALLOWED"),
            ("GET", "/topic/create?topic=t", 405, "METHOD_NOT_ALLOWED"),
            ("GET", "/lookups", 404, "NOT_FOUND"),
            ("GET", "/create_topic?topic=t", 404, "NOT_FOUND"),
        ],
    )
    def test_errors(self, shared, method, target, status, message):
        assert shared.request(method, target) == (status, {"message": message})

    def test_unknown_topic_has_no_channels(self, shared):
        assert shared.get("/channels?topic=unknown") == {"channels": []}

    def test_a_star_deletes_nothing(self, shared):
        shared.post("/topic/create?topic=survivor")
        assert shared.post("/topic/delete?topic=*") == (200, None)
        assert "survivor" in shared.get("/topics")["topics"]

    def test_head_and_redirects(self, shared):
        status, headers, body = shared.raw_request("HEAD", "/topics")
        assert (status, headers["Allow"], body) == (405, "GET, OPTIONS", b"")
        status, headers, _ = shared.raw_request("GET", "/Lookup/?topic=a%20b")
        assert (status, headers["Location"]) == (301, "/lookup?topic=a%20b")
        status, headers, body = shared.raw_request("POST", "/topic/create/?topic=a")
        assert (status, headers["Location"], body) == (308, "/topic/create?topic=a", b"")

    def test_pipelining_keeps_the_order(self, shared):
        with socket.create_connection(shared.http, PATIENCE_S) as peer:
            targets = [b"/info", b"/ping", b"/nope"] * 100
            peer.sendall(b"".join(b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % target for target in targets))
            received = b""
            while received.count(b"HTTP/1.1 ") < 300 or not received.endswith(b'NOT_FOUND"}'):
                received += peer.recv(65536)
            assert re.findall(rb"HTTP/1.1 (\d+)", received) == [b"200", b"200", b"404"] * 100

    def test_chunked_body_over_the_limit(self, shared):
        with socket.create_connection(shared.http, PATIENCE_S) as peer:
            peer.sendall(
                b"POST /topic/create?topic=chunky HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            for _ in range(20):
                peer.sendall(b"1000\r\n" + b"x" * 0x1000 + b"\r\n")
            received = b""
            while chunk := peer.recv(65536):
                received += chunk
        assert received.startswith(b"HTTP/1.1 413 ")
        assert b"Connection: close" in received
        assert "chunky" not in shared.get("/topics")["topics"]

    def test_debug(self, shared):
        with shared.connect() as nsqd:
            nsqd.identify()
            nsqd.send(b"REGISTER bug c\n")
            shared.post("/topic/tombstone?topic=bug&node=nsqd.example:4151")
            listed = shared.get("/debug")
            assert {"client::", "topic:bug:", "channel:bug:c"} <= set(listed)
            (row,) = listed["topic:bug:"]
            assert list(row) == [
                "id",
                "hostname",
                "broadcast_address",
                "tcp_port",
                "http_port",
                "version",
                "topology_zone",
                "topology_region",
                "last_update",
                "tombstoned",
                "tombstoned_at",
            ]
            assert row["id"] == nsqd.name
            assert row["tombstoned"] is True
            for moment in (row["last_update"], row["tombstoned_at"]):
                assert abs(moment / 1e9 - time.time()) < 60
            (row,) = listed["channel:bug:c"]
            assert (row["tombstoned"], row["tombstoned_at"]) == (False, 0)


class Inside:
    """A nsqlookupd in the test's own loop, on a clock that the test moves."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.stop = asyncio.Event()
        self.daemon: Nsqlookupd | None = None
        self.writers: list[asyncio.StreamWriter] = []

    async def nsqd(self, **fields: object) -> asyncio.StreamReader:
        assert self.daemon is not None
        reader, writer = await asyncio.open_connection(*self.daemon.tcp_address)
        self.writers.append(writer)
        body = json.dumps({**PEER, **fields}).encode()
        writer.write(b"  V1IDENTIFY\n" + struct.pack(">i", len(body)) + body)
        assert b"tcp_port" in await self.answer(reader)
        return reader

    async def send(self, reader: asyncio.StreamReader, line: bytes, index: int = -1) -> bytes:
        self.writers[index].write(line)
        return await self.answer(reader)

    @staticmethod
    async def answer(reader: asyncio.StreamReader) -> bytes:
        size = struct.unpack(">i", await reader.readexactly(4))[0]
        return await reader.readexactly(size)

    async def request(self, method: str, target: str):
        assert self.daemon is not None
        reader, writer = await asyncio.open_connection(*self.daemon.http_address)
        writer.write(f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 200 "), head
        return json.loads(body) if body else None

    async def producers(self, topic: str) -> int:
        return len((await self.request("GET", f"/lookup?topic={topic}"))["producers"])


def options(**fields) -> NsqlookupdOptions:
    return NsqlookupdOptions(**{"tcp_address": "127.0.0.1:0", "http_address": "127.0.0.1:0", **fields})


@contextlib.asynccontextmanager
async def running(**fields):
    inside, ready = Inside(), asyncio.Event()

    def on_ready(daemon: Nsqlookupd) -> None:
        inside.daemon = daemon
        ready.set()

    env = Env(clock=inside.clock, hostname="this-host")
    task = asyncio.create_task(main(env, options(**fields), on_ready, inside.stop))
    await asyncio.wait((task, asyncio.create_task(ready.wait())), return_when=asyncio.FIRST_COMPLETED)
    try:
        yield inside
    finally:
        inside.stop.set()
        await asyncio.wait_for(task, PATIENCE_S)
        for writer in inside.writers:
            writer.close()


class TestTime:
    async def test_tombstone(self):
        async with running() as inside:
            nsqd = await inside.nsqd()
            for line in (b"REGISTER t c\n", b"REGISTER other c\n"):
                await inside.send(nsqd, line)
            assert await inside.request("POST", "/topic/tombstone?topic=t&node=nsqd.example:4151") is None
            assert (await inside.producers("t"), await inside.producers("other")) == (0, 1)
            await inside.send(nsqd, b"REGISTER t c\n")
            assert await inside.producers("t") == 0
            (found,) = (await inside.request("GET", "/nodes"))["producers"]
            assert dict(zip(found["topics"], found["tombstones"], strict=True)) == {"t": True, "other": False}
            inside.clock.advance(45 * SECOND)
            assert await inside.producers("t") == 1
            (found,) = (await inside.request("GET", "/nodes"))["producers"]
            assert found["tombstones"] == [False, False]

    async def test_tombstone_of_an_unknown_node(self):
        async with running() as inside:
            nsqd = await inside.nsqd()
            await inside.send(nsqd, b"REGISTER t\n")
            assert await inside.request("POST", "/topic/tombstone?topic=t&node=other:4151") is None
            assert await inside.producers("t") == 1

    async def test_inactive_until_the_next_ping(self):
        async with running(inactive_producer_timeout_ns=2 * SECOND) as inside:
            nsqd = await inside.nsqd()
            await inside.send(nsqd, b"REGISTER t\n")
            inside.clock.advance(2 * SECOND)
            assert await inside.producers("t") == 1
            inside.clock.advance(1)
            assert await inside.producers("t") == 0
            assert await inside.request("GET", "/nodes") == {"producers": []}
            assert await inside.send(nsqd, b"PING\n") == b"OK"
            assert await inside.producers("t") == 1
            assert len((await inside.request("GET", "/nodes"))["producers"]) == 1

    async def test_only_a_ping_keeps_it_active(self):
        async with running(inactive_producer_timeout_ns=2 * SECOND) as inside:
            nsqd = await inside.nsqd()
            inside.clock.advance(3 * SECOND)
            await inside.send(nsqd, b"REGISTER t\n")
            assert await inside.producers("t") == 0

    async def test_the_wall_clock_does_not_matter(self):
        async with running() as inside:
            nsqd = await inside.nsqd()
            await inside.send(nsqd, b"REGISTER t\n")
            inside.clock.jump_wall(10**9 * SECOND)
            assert await inside.producers("t") == 1

    async def test_lists_are_ordered(self):
        async with running() as inside:
            for name in ("c", "a", "b"):
                nsqd = await inside.nsqd(broadcast_address=name)
                await inside.send(nsqd, b"REGISTER t x\n")
                await inside.send(nsqd, b"REGISTER t a\n")
            found = await inside.request("GET", "/lookup?topic=t")
            assert [producer["broadcast_address"] for producer in found["producers"]] == ["a", "b", "c"]
            assert found["channels"] == ["a", "x"]

    async def test_no_magic_in_time(self, monkeypatch):
        monkeypatch.setattr("flintmq.nsqlookupd.session.MAGIC_DEADLINE_S", 0.05)
        async with running() as inside:
            reader, writer = await asyncio.open_connection(*inside.daemon.tcp_address)
            writer.write(b"  V")
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
            writer.close()

    async def test_no_command_in_time(self, monkeypatch):
        monkeypatch.setattr("flintmq.nsqlookupd.session.MAGIC_DEADLINE_S", 0.05)
        monkeypatch.setattr("flintmq.nsqlookupd.session.FIRST_COMMAND_DEADLINE_S", 0.2)
        async with running() as inside:
            busy = await inside.nsqd()
            for first in (b"  V1", b"  V1IDENTI", b"  V1IDENTIFY\n\0\0\0\x08{"):
                reader, writer = await asyncio.open_connection(*inside.daemon.tcp_address)
                writer.write(first)
                with contextlib.suppress(ConnectionResetError):
                    assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
                writer.close()
            assert await inside.send(busy, b"PING\n", 0) == b"OK"  # its idle time is minutes

    async def test_silent_connection(self, monkeypatch):
        monkeypatch.setattr("flintmq.nsqlookupd.session.IDLE_DEADLINE_MIN_S", 0.1)
        monkeypatch.setattr("flintmq.nsqlookupd.session.MAGIC_DEADLINE_S", 0.05)
        async with running(inactive_producer_timeout_ns=SECOND // 10) as inside:
            silent, busy = await inside.nsqd(), await inside.nsqd()
            await inside.send(silent, b"REGISTER t c\n", 0)
            inside.writers[0].write(b"PIN")  # less than a command is silence
            with contextlib.suppress(ConnectionResetError):
                for _ in range(100):
                    assert await inside.send(busy, b"PING\n", 1) == b"OK"
                    if silent.at_eof():
                        break
                    await asyncio.sleep(0.02)
                assert await silent.read() == b""
            assert await inside.send(busy, b"PING\n", 1) == b"OK"
            assert (await inside.request("GET", "/lookup?topic=t"))["producers"] == []


class TestRoot:
    async def test_the_host_name_stands_for_a_missing_broadcast_address(self):
        async with running() as inside:
            assert inside.daemon._info().broadcast_address == "this-host"
        async with running(broadcast_address="b") as inside:
            assert inside.daemon._info().broadcast_address == "b"

    async def test_a_second_one_lives_beside_the_first(self):
        async with running() as one, running() as two:
            await one.send(await one.nsqd(), b"REGISTER t\n")
            assert (await one.request("GET", "/topics"), await two.request("GET", "/topics")) == (
                {"topics": ["t"]},
                {"topics": []},
            )

    async def test_nothing_is_left_listening_when_it_cannot_start(self):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            daemon = Nsqlookupd(Env(), options(tcp_address=f"127.0.0.1:{taken.getsockname()[1]}"))
            with pytest.raises(ListenFailed, match="in use"):
                await daemon.start()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*daemon.http_address)

    async def test_an_address_that_is_none(self):
        with pytest.raises(OptionError):
            await main(Env(), options(http_address="127.0.0.1:99999"))

    async def test_cancelling_stops_it(self):
        task = asyncio.create_task(main(Env(), options()))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def test_stopping_closes_the_connections(self):
        async with running() as inside:
            nsqd = await inside.nsqd()
            inside.stop.set()
            assert await asyncio.wait_for(nsqd.read(), PATIENCE_S) == b""

    async def test_describe(self):
        async with running() as inside:
            await inside.nsqd()
            text = inside.daemon.describe()
            assert "nodes=1" in text
            assert "identified" in text


class TestSessions:
    """What needs no socket: bounds and colliding addresses."""

    class Transport(asyncio.Transport):
        def __init__(self, name=("1.2.3.4", 5)):
            super().__init__()
            self.name = name
            self.calls: list[str] = []
            self.written = b""

        def get_extra_info(self, name, default=None):
            return self.name if name == "peername" else default

        def set_write_buffer_limits(self, high=None, low=None):
            pass

        def is_closing(self):
            return False

        def write(self, data):
            self.written += data

        def abort(self):
            self.calls.append("abort")

        def pause_reading(self):
            self.calls.append("pause")

        def resume_reading(self):
            self.calls.append("resume")

    @pytest.fixture
    async def daemon(self):
        daemon = Nsqlookupd(Env(), options())
        daemon._sessions.clock = ManualClock()  # so no slice is over before all that came is answered
        return daemon

    def connect(self, sessions: Sessions, **fields) -> tuple[LookupSession, TestSessions.Transport]:
        session, transport = sessions.new(asyncio.get_running_loop()), self.Transport(**fields)
        session.connection_made(transport)
        return session, transport

    async def test_an_address_that_comes_back_early(self, daemon):
        body = json.dumps(PEER).encode()
        hello = b"  V1IDENTIFY\n" + struct.pack(">i", len(body)) + body + b"REGISTER t\n"
        first, _ = self.connect(daemon._sessions)
        second, _ = self.connect(daemon._sessions)
        first.data_received(hello)
        second.data_received(hello)
        assert [node.node_id for node in daemon.database.all_nodes()] == ["1.2.3.4:5", "1.2.3.4:5#1"]
        first.connection_lost(None)
        assert [node.node_id for node in daemon.database.lookup("t", 0).nodes] == ["1.2.3.4:5#1"]
        second.connection_lost(ConnectionResetError())
        assert daemon.database.all_nodes() == []

    async def test_two_live_connections_of_one_address_are_told_once(self, daemon, caplog):
        """Of an nsqd that came back the older connection pings no more, whatever of it arrives late."""
        sessions = daemon._sessions
        body = json.dumps(PEER).encode()
        hello = b"  V1IDENTIFY\n" + struct.pack(">i", len(body)) + body

        def said() -> list[str]:
            return [record.message for record in caplog.records if "two connections that both live" in record.message]

        def ping(session: LookupSession) -> None:
            session.data_received(b"PING\n")

        (first, _), (second, _) = (self.connect(sessions, name=("1.2.3.4", port)) for port in (5, 6))
        first.data_received(hello)
        for _ in range(2):
            sessions.clock.advance(15 * SECOND)
            ping(first)
        second.data_received(hello)
        ping(first)
        ping(first)
        for _ in range(3):
            sessions.clock.advance(15 * SECOND)
            ping(second)
        assert said() == [], "the older one was silent since"
        for _ in range(3):
            ping(first)
            ping(second)
            sessions.clock.advance(15 * SECOND)
        (line,) = said()
        assert "nsqd nsqd.example:4150" in line and line.endswith(": 1.2.3.4:5 and 1.2.3.4:6")

    async def test_an_nsqd_that_comes_back_is_not_two(self, daemon, caplog):
        sessions = daemon._sessions
        body = json.dumps(PEER).encode()
        hello = b"  V1IDENTIFY\n" + struct.pack(">i", len(body)) + body
        before, _ = self.connect(sessions, name=("1.2.3.4", 5))
        before.data_received(hello)
        for port in range(6, 9):
            after, _ = self.connect(sessions, name=("1.2.3.4", port))
            after.data_received(hello)
            before.connection_lost(None)
            for _ in range(3):
                sessions.clock.advance(15 * SECOND)
                after.data_received(b"PING\n")
            before = after
        assert "two connections" not in caplog.text
        before.connection_lost(None)
        assert sessions._by_address == {}

    async def test_too_many_connections(self, daemon):
        daemon._sessions.connections_max = 1
        first, transport = self.connect(daemon._sessions)
        assert transport.calls == []
        _, transport = self.connect(daemon._sessions)
        assert transport.calls == ["abort"]
        first.connection_lost(None)
        _, transport = self.connect(daemon._sessions)
        assert transport.calls == []

    async def test_a_peer_that_does_not_read_is_not_read_from(self, daemon):
        session, transport = self.connect(daemon._sessions)
        session.pause_writing()
        session.resume_writing()
        assert transport.calls == ["pause", "resume"]
        session.connection_lost(None)

    async def test_too_many_registrations_do_not_close(self, daemon):
        daemon.database._registrations_per_node_max = 2
        session, transport = self.connect(daemon._sessions)
        body = json.dumps(PEER).encode()
        session.data_received(b"  V1IDENTIFY\n" + struct.pack(">i", len(body)) + body)
        transport.written = b""
        session.data_received(b"REGISTER t c\nREGISTER u\nPING\n")
        assert b"E_INVALID REGISTER failed too many registrations of one nsqd, at most 2" in transport.written
        assert transport.written.endswith(b"\0\0\0\x02OK")
        session.connection_lost(None)
