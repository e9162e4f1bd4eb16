"""A redesigned NSQ in memory: nsqds that lead partitions of shared logs, and what their nsqlookupd say.

It takes bytes apart and puts them together by itself, as Youzan's nsqlookupd and nsqd have them, and shares no code
with the product: what both sides got wrong in the same way would not be seen otherwise. It runs on any event loop
(:class:`tests.sim.loop.Simulation` or a real one).

The logs belong to the cluster, so a new leader has everything the former one answered OK. A command that a node
executes is in :attr:`Node.commands`.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

PORT = 4150
WALL_NS = 1_735_689_600_000_000_000
OK, STORE_AND_HANG_UP, HANG_UP, SILENCE = "OK", "store and hang up", "hang up", "silence"
ONCE = "PUB_ONCE", "MPUB_ONCE"
CLOSING = ("E_INVALID", "E_BAD_", "E_TOPIC_NOT_EXIST", "E_SUB_", "E_PUB_TOO_MUCH_WAITING")


@dataclass(slots=True, eq=False)
class Stored:
    """A message of a partition."""

    internal_id: int
    trace_id: int
    headers: bytes
    version: int
    body: bytes
    offset: int
    raw_size: int

    @property
    def id(self) -> bytes:
        return struct.pack(">QQ", self.internal_id, self.trace_id)


@dataclass(slots=True, eq=False)
class Channel:
    """What a channel has of a partition; survives its leader."""

    next: int = 0
    returned: deque[Stored] = field(default_factory=deque)
    attempts: dict[int, int] = field(default_factory=dict)
    finished: list[Stored] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Partition:
    """A log, and who leads it.

    Attributes:
        leader: a node's name; "" while there is none.
        log_id: as a cluster of FlintMQ names it; Youzan's does not.
        producers: the last sequence stored of each that publishes once; in the log, as its messages.
        listed: whom the nsqlookupd call leader; may lag behind.
    """

    number: int
    leader: str
    listed: str
    is_writable: bool = True
    log: list[Stored] = field(default_factory=list)
    channels: dict[str, Channel] = field(default_factory=dict)
    producers: dict[str, int] = field(default_factory=dict)
    log_id: str = ""
    end: int = 0

    def is_known(self, producer_id: str, sequence: int, count: int) -> bool:
        """Whether these sequences of a producer are stored; all of them are, or none is."""
        last = self.producers.get(producer_id, sequence - 1)
        assert last == sequence - 1 or last == sequence + count - 1, (producer_id, sequence, count, last)
        return last >= sequence

    def append(self, trace_id: int, headers: bytes, version: int, body: bytes, is_extended: bool) -> Stored:
        raw_size = 4 + 26 + len(body) + (1 + 2 + len(headers) if is_extended else 0)
        internal_id = self.number << 50 | len(self.log) + 2
        stored = Stored(internal_id, trace_id, headers, version, body, self.end, raw_size)
        self.end += raw_size
        self.log.append(stored)
        return stored

    @property
    def bodies(self) -> list[bytes]:
        return [stored.body for stored in self.log]


@dataclass(slots=True, eq=False)
class Topic:
    """A topic; ``partition_num`` is what its metadata say."""

    partitions: dict[int, Partition]
    partition_num: int
    is_extended: bool = False
    is_ordered: bool = False


class Cluster:
    """Nodes, topics and nsqlookupd.

    Attributes:
        answer: scripts publishes: node's name, command, partition and bodies to OK, SILENCE (from then on), HANG_UP,
            STORE_AND_HANG_UP or an error.
        lookups: HTTP addresses of the nsqlookupd; the first one is listed by all.
        is_enveloped: they answer in the envelope, as without an Accept header.
        broken_lookups: that do not answer.
        asked: URLs.
    """

    def __init__(self, *names: str) -> None:
        self.nodes = {name: Node(self, name) for name in names}
        self.topics: dict[str, Topic] = {}
        self.answer: Callable[[str, str, int, list[bytes]], str] = lambda name, command, number, bodies: OK
        self.lookups = ["http://l1:4161", "http://l2:4161"]
        self.is_enveloped = False
        self.broken_lookups: set[str] = set()
        self.lookup_error: Exception = OSError("refused")
        self.is_topic_unknown = False
        self.asked: list[str] = []

    def create(self, name: str, count: int, **options: Any) -> Topic:
        """Create a topic; its partitions are led by the nodes in turn."""
        names = [*self.nodes]
        partitions = {
            number: Partition(number, names[number % len(names)], names[number % len(names)]) for number in range(count)
        }
        topic = self.topics[name] = Topic(partitions, count, **options)
        return topic

    def move(self, topic: str, number: int, leader: str, listed: str | None = None, closes: bool = True) -> None:
        """Let another node lead a partition.

        Args:
            listed: whom the nsqlookupd call leader from now on; the new one if None.
            closes: the former leader closes the connections that are subscribed.
        """
        partition = self.topics[topic].partitions[number]
        former, partition.leader = partition.leader, leader
        partition.listed = leader if listed is None else listed
        if closes and former in self.nodes and former != leader:
            for session in [*self.nodes[former].sessions]:
                if session.subscription is not None and session.subscription[:2] == (topic, number):
                    session.hang_up()

    def pump(self) -> None:
        """Deliver what can be delivered."""
        for node in self.nodes.values():
            for session in [*node.sessions]:
                session.deliver()

    def stored(self, topic: str) -> list[bytes]:
        """All bodies of a topic."""
        return [body for partition in self.topics[topic].partitions.values() for body in partition.bodies]

    # --- nsqlookupd (a discovery.Fetch) ---

    async def __call__(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        self.asked.append(url)
        await asyncio.sleep(0.005)
        parts = urlsplit(url)
        if f"{parts.scheme}://{parts.netloc}" in self.broken_lookups:
            raise self.lookup_error
        return self.http(parts.path, {key: values[0] for key, values in parse_qs(parts.query).items()})

    async def close(self) -> None:
        self.asked.append("closed")

    def http(self, path: str, query: dict[str, str]) -> tuple[int, bytes]:
        """What a nsqlookupd answers."""
        if path == "/listlookup":
            nodes = [self._lookup_node(address) for address in self.lookups]
            return self._wrapped(200, {"lookupdleader": nodes[0], "lookupdnodes": nodes})
        if path == "/nodes":
            return self._wrapped(200, {"producers": [node.peer() for node in self.nodes.values()]})
        if path != "/lookup":
            return self._wrapped(404, "NOT_FOUND")
        topic = self.topics.get(query["topic"])
        if topic is None or self.is_topic_unknown:
            if query["access"] == "w":
                return self._wrapped(404, "Key not found")
            return self._wrapped(200, {"channels": [], "partitions": {}, "producers": []})
        leaders = {
            str(number): {
                **({"log_id": partition.log_id} if partition.log_id else {}),
                **self.nodes[partition.listed].peer(),
            }
            for number, partition in topic.partitions.items()
            if partition.listed and (query["access"] == "r" or partition.is_writable)
        }
        data: dict[str, Any] = {"channels": ["ch"], "partitions": leaders or None}
        data["producers"] = [*{peer["id"]: peer for peer in leaders.values()}.values()] or None
        if query.get("metainfo"):
            data["meta"] = {
                "partition_num": topic.partition_num,
                "replica": 1,
                "extend_support": topic.is_extended,
                "ordered": topic.is_ordered,
                "multi_part": False,
                "disable_channel_auto_create": False,
            }
        return self._wrapped(200, data)

    def _lookup_node(self, address: str) -> dict[str, Any]:
        host, _, port = address.removeprefix("http://").partition(":")
        identity = f"{host}:12340:4160:nsqlookup"
        return {"ID": identity, "NodeIP": host, "TcpPort": "4160", "HttpPort": port, "RpcPort": "12340", "Epoch": 1}

    def _wrapped(self, status: int, data: Any) -> tuple[int, bytes]:
        if not self.is_enveloped:
            return status, json.dumps(data if status == 200 else {"message": data}).encode()
        text, payload = ("OK", data) if status == 200 else (data, None)
        code = 200 if status == 200 else 500
        return code, json.dumps({"status_code": status, "status_txt": text, "data": payload}).encode()


class Node:
    """One nsqd of the cluster.

    Attributes:
        knows_sub_order, knows_sub_ordered: by the seeds' name; by Youzan's, whose own daemons know that alone.
        version: what it says of itself; empty: what those say that know as much.
        commands: (command, partition, bodies) of every publish, in order.
        identified: what clients said about themselves.
        subscribed: lines of SUB commands.
        rdy: (partition, count), as it came.
        touched: bodies of messages that were touched, as it came.
        violations: what clients did that no client may do.
    """

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.host, self.port = name, PORT
        self.knows_sub_order = True
        self.knows_sub_ordered = True
        self.version = ""
        self.sessions: list[Session] = []
        self.commands: list[tuple[str, int, list[bytes]]] = []
        self.identified: list[dict[str, Any]] = []
        self.subscribed: list[str] = []
        self.rdy: list[tuple[int, int]] = []
        self.requeued: list[tuple[bytes, int]] = []
        self.touched: list[bytes] = []
        self.violations: list[str] = []
        self._server: asyncio.AbstractServer | None = None

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def peer(self) -> dict[str, Any]:
        return {
            "id": f"{self.address}:1",
            "remote_address": f"{self.host}:50000",
            "hostname": self.name,
            "broadcast_address": self.host,
            "tcp_port": self.port,
            "http_port": self.port + 1,
            "version": "0.3.7-HA.1.13.0",
            "distributed_id": f"{self.host}:12340:{self.port}:1",
        }

    async def main(self) -> None:
        """Serve on a simulated machine until killed."""
        await asyncio.get_running_loop().create_server(lambda: Session(self), "0.0.0.0", PORT)
        await asyncio.get_running_loop().create_future()

    async def listen(self, port: int = 0) -> None:
        """Serve on a real socket, in the background."""
        self._server = await asyncio.get_running_loop().create_server(lambda: Session(self), "127.0.0.1", port)
        self.host, self.port = self._server.sockets[0].getsockname()

    def stop(self) -> None:
        """Close the port and all connections, as a killed process does."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for session in [*self.sessions]:
            session.hang_up()

    def crash(self) -> None:
        """Forget connections that the kernel has closed."""
        for session in [*self.sessions]:
            session.forget()


class Session(asyncio.Protocol):
    """One connection of a client."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.cluster = node.cluster
        self.subscription: tuple[str, int, str] | None = None
        self.is_ordered = False
        self.is_extended = False
        self.rdy_count = 0
        self.in_flight: dict[bytes, Stored] = {}
        self._transport: asyncio.Transport | None = None
        self._data = b""
        self._is_magic_read = False
        self._is_done = False
        self._timer: asyncio.TimerHandle | None = None

    # --- life ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.node.sessions.append(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.forget()
        self.cluster.pump()

    def hang_up(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self.forget()

    def forget(self) -> None:
        self._is_done = True
        if self._timer is not None:
            self._timer.cancel()
        if self in self.node.sessions:
            self.node.sessions.remove(self)
        self.take_back()

    def take_back(self) -> None:
        """Take back what was not answered, as when its time is over; it is delivered with the next pump."""
        if self.in_flight:
            channel = self._channel()
            channel.returned.extendleft(sorted(self.in_flight.values(), key=lambda each: -each.internal_id))
            self.in_flight.clear()

    # --- bytes ---

    def data_received(self, data: bytes) -> None:
        self._data += data
        if not self._is_magic_read and len(self._data) >= 4:
            assert self._data[:4] == b"  V2", self._data[:4]
            self._data = self._data[4:]
            self._is_magic_read = True
        while self._is_magic_read and not self._is_done and (size := self._execute(self._data)):
            self._data = self._data[size:]
            self.cluster.pump()  # at once, as a daemon with a thread per connection may

    def frame(self, kind: int, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(struct.pack(">II", len(data) + 4, kind) + data)

    def error(self, text: str) -> None:
        """Send an error; close where Youzan's nsqd does. An error without description ends with a blank."""
        self.frame(1, (text if " " in text else text + " ").encode())
        if text.startswith(CLOSING):
            self.forget()
            if self._transport is not None:
                self._transport.close()

    def _execute(self, data: bytes) -> int:
        """Execute the first command; returns its size, 0 when it is not complete."""
        for word in (b"FIN ", b"REQ ", b"TOUCH "):
            if data.startswith(word):
                end = data.find(b"\n", len(word) + 16)
                if len(data) < len(word) + 17 or end < 0:
                    return 0
                message_id = data[len(word) : len(word) + 16]
                self._answered(word.decode().strip(), message_id, data[len(word) + 16 : end].strip())
                return end + 1
        line, newline, rest = data.partition(b"\n")
        if not newline:
            return 0
        words = line.decode().split(" ")
        size = len(line) + 1
        if words[0] in ("IDENTIFY", "PUB", "MPUB", "PUB_TRACE", "MPUB_TRACE", "PUB_EXT", "MPUB_EXT", *ONCE):
            if len(rest) < 4 or len(rest) < 4 + (length := struct.unpack_from(">I", rest)[0]):
                return 0
            body = rest[4 : 4 + length]
            size += 4 + length
            if words[0] == "IDENTIFY":
                self._identify(body)
            else:
                self._publish(words, body)
        elif words[0] in ("SUB", "SUB_ORDER", "SUB_ORDERED"):
            self._subscribe(words)
        elif words[0] == "RDY":
            self.rdy_count = int(words[1])
            assert self.subscription is not None
            self.node.rdy.append((self.subscription[1], self.rdy_count))
        elif words[0] == "CLS":
            self.rdy_count = 0
            self.frame(0, b"CLOSE_WAIT")
        elif words[0] != "NOP":
            self.node.violations.append(line.decode())
            self.error(f"E_INVALID invalid command {words[0]}")
        return size

    def _identify(self, body: bytes) -> None:
        request = json.loads(body)
        self.node.identified.append(request)
        self.is_extended = bool(request.get("extend_support"))
        version = self.node.version or ("1.3.0" if self.node.knows_sub_order else "0.3.7-HA.1.13.0")
        answer = {
            "max_rdy_count": 2500, "version": version, "max_msg_timeout": 900000, "msg_timeout": 60000,
            "tls_v1": False, "deflate": False, "deflate_level": 0, "max_deflate_level": 6, "snappy": False,
            "sample_rate": 0, "auth_required": False, "output_buffer_size": 16384, "output_buffer_timeout": 250,
        }  # fmt: skip
        if request.get("producer_sequences"):
            answer["producer_sequences"] = True
        if request.get("desired_tag"):
            answer["desired_tag"] = request["desired_tag"]
        self.frame(0, json.dumps(answer).encode())
        self._beat(request["heartbeat_interval"] / 1000, is_first=True)

    def _beat(self, interval_s: float, is_first: bool = False) -> None:
        if not self._is_done:
            if not is_first:
                self.frame(0, b"_heartbeat_")
            self._timer = asyncio.get_running_loop().call_later(interval_s, self._beat, interval_s)

    # --- subscribing ---

    def _subscribe(self, words: list[str]) -> None:
        self.node.subscribed.append(" ".join(words))
        is_known = {"SUB_ORDER": self.node.knows_sub_order, "SUB_ORDERED": self.node.knows_sub_ordered}
        if not is_known.get(words[0], True):
            self.error(f"E_INVALID invalid command {words[0]}")
            return
        name, channel, number = words[1], words[2], int(words[3]) if len(words) > 3 else -1
        topic = self.cluster.topics.get(name)
        partition = None if topic is None else topic.partitions.get(number)
        is_ordered = words[0] != "SUB"
        if topic is None or partition is None:
            self.error("E_TOPIC_NOT_EXIST")
        elif partition.leader != self.node.name:
            self.frame(1, b"E_FAILED_ON_NOT_LEADER ")
            self.hang_up_soon()
        elif topic.is_ordered and not is_ordered:
            self.error("E_SUB_ORDER_IS_MUST this topic is configured only allow ordered sub")
        elif topic.is_extended and not self.is_extended:
            self.error("E_SUB_EXTEND_NEED need ext support")
        elif self.is_extended and not topic.is_extended:
            self.error("E_SUB_EXTEND_FORBIDDON no ext support")
        else:
            self.subscription = name, number, channel
            self.is_ordered = is_ordered
            partition.channels.setdefault(channel, Channel())
            self.frame(0, b"OK")

    def hang_up_soon(self) -> None:
        self.forget()
        assert self._transport is not None
        self._transport.close()

    def _partition(self) -> Partition:
        assert self.subscription is not None
        return self.cluster.topics[self.subscription[0]].partitions[self.subscription[1]]

    def _channel(self) -> Channel:
        assert self.subscription is not None
        return self._partition().channels[self.subscription[2]]

    def deliver(self) -> None:
        """Send what RDY allows; in order, one message that nobody else has."""
        if self.subscription is None or self._is_done or self._partition().leader != self.node.name:
            return
        partition, channel = self._partition(), self._channel()
        limit = min(self.rdy_count, 1) if self.is_ordered else self.rdy_count
        while len(self.in_flight) < limit:
            if self.is_ordered and self._is_blocked():
                return
            if channel.returned:
                stored = channel.returned.popleft()
            elif channel.next < len(partition.log):
                stored = partition.log[channel.next]
                channel.next += 1
            else:
                return
            self._send(stored, channel)

    def _is_blocked(self) -> bool:
        sessions = [each for node in self.cluster.nodes.values() for each in node.sessions]
        return any(each.in_flight and each.subscription == self.subscription for each in sessions)

    def _send(self, stored: Stored, channel: Channel) -> None:
        attempts = channel.attempts[stored.internal_id] = channel.attempts.get(stored.internal_id, 0) + 1
        self.in_flight[stored.id] = stored
        data = struct.pack(">qH", WALL_NS, attempts) + stored.id
        if self.is_extended:
            data += bytes((stored.version,))
            if stored.version:
                data += struct.pack(">H", len(stored.headers)) + stored.headers
        if self.is_ordered:
            data += struct.pack(">QI", stored.offset, stored.raw_size)
        self.frame(2, data + stored.body)

    def _answered(self, command: str, message_id: bytes, rest: bytes) -> None:
        partition = None if self.subscription is None else self._partition()
        if partition is None or partition.leader != self.node.name:
            self.frame(1, b"E_FAILED_ON_NOT_LEADER ")
            self.hang_up_soon()
            return
        stored = self.in_flight.get(message_id)
        if stored is None:
            self.frame(1, f"E_{command}_FAILED {command} ".encode() + message_id + b" failed ID not in flight")
        elif command == "FIN":
            del self.in_flight[message_id]
            self._channel().finished.append(stored)
        elif command == "REQ":
            del self.in_flight[message_id]
            self.node.requeued.append((stored.body, int(rest)))
            self._channel().returned.append(stored)
        elif command == "TOUCH":
            self.node.touched.append(stored.body)

    # --- publishing ---

    def _publish(self, words: list[str], data: bytes) -> None:
        command, name = words[0], words[1]
        topic = self.cluster.topics.get(name)
        if topic is None:
            self.error("E_TOPIC_NOT_EXIST")
            return
        if len(words) < 3:
            self.error("E_BAD_PARTITION partition is required")
            return
        partition = topic.partitions.get(int(words[2]))
        items = self._items(command, data)
        bodies = [body for _, _, body in items]
        if partition is None:
            self.error("E_TOPIC_NOT_EXIST")
            return
        self.node.commands.append((command, partition.number, bodies))
        if partition.leader != self.node.name:
            self.frame(1, b"E_FAILED_ON_NOT_LEADER ")
            return
        if not partition.is_writable:
            self.frame(1, b"E_FAILED_ON_NOT_WRITABLE ")
            return
        if command.endswith("_EXT") and not topic.is_extended:
            self.error("E_EXT_NOT_SUPPORT ext content not supported in topic")
            return
        answer = self.cluster.answer(self.node.name, command, partition.number, bodies)
        if command in ONCE and answer in (OK, STORE_AND_HANG_UP):
            producer_id, sequence = words[3], int(words[4])
            if partition.is_known(producer_id, sequence, len(bodies)):
                self.frame(0, b"OK")
                return
            partition.producers[producer_id] = sequence + len(bodies) - 1
        if answer in (OK, STORE_AND_HANG_UP):
            found = [
                partition.append(trace_id, headers, 4 if headers else 0, body, topic.is_extended)
                for trace_id, headers, body in items
            ]
        if answer == OK:
            self._confirm(command, items, found)
        elif answer in (STORE_AND_HANG_UP, HANG_UP):
            self.hang_up()
        elif answer == SILENCE:
            self._is_done = True  # answers come in order, so none comes any more
        else:
            self.error(answer)

    def _items(self, command: str, data: bytes) -> list[tuple[int, bytes, bytes]]:
        """(trace id, headers, body) of each message."""
        if not command.startswith("MPUB"):
            return [self._item(command, data)]
        items, position = [], 4
        for _ in range(struct.unpack_from(">I", data)[0]):
            size = struct.unpack_from(">I", data, position)[0]
            items.append(self._item(command, data[position + 4 : position + 4 + size]))
            position += 4 + size
        assert position == len(data)
        return items

    def _item(self, command: str, data: bytes) -> tuple[int, bytes, bytes]:
        if command.endswith("_TRACE"):
            return struct.unpack_from(">Q", data)[0], b"", data[8:]
        if command.endswith("_EXT"):
            size = struct.unpack_from(">H", data)[0]
            headers = data[2 : 2 + size]
            return int(json.loads(headers).get("##trace_id", "0")), headers, data[2 + size :]
        return 0, b"", data

    def _confirm(self, command: str, items: list[tuple[int, bytes, bytes]], found: list[Stored]) -> None:
        first = found[0]
        if not command.endswith("_TRACE") and not (command == "PUB_EXT" and items[0][0]):
            self.frame(0, b"OK")
            return
        trace_id = 0 if command.startswith("MPUB") else first.trace_id
        total = sum(stored.raw_size for stored in found)
        self.frame(0, b"OK" + struct.pack(">QQQI", first.internal_id, trace_id, first.offset, total))
