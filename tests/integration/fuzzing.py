"""Streams that hardly any client sends, for every port of nsqd and nsqlookupd.

A case begins as a stream that a client could send, made of the commands and requests of the tables below; then it is
cut, repeated, spliced, flipped, given extreme numbers, and sent in pieces, in clear, in TLS or compressed. A case is
known by its name alone: the same name makes the same bytes, TLS apart.

Rules of this file: only what leaves the daemons running is in the tables: no drain, no other nsqlookupd; topics begin
with ``fuzz``; an address that a daemon could connect to is 127.0.0.1, whatever else becomes of its stream.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import ssl
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import snappy  # type: ignore[import-untyped]
from tests.integration.daemons import Nsqd, Nsqlookupd, mpub_body, sized

_EXTREMES = (0, 1, -1, 2, 4, 5, 127, 128, 255, 256, 4096, 65535, 65536, 1 << 20, 5 << 20, (1 << 31) - 1, -(1 << 31))
_NUMBERS = (
    "0",
    "1",
    "-1",
    "2500",
    "2501",
    "00",
    "9223372036854775807",
    "18446744073709551616",
    "1e3",
    "",
    "x",
    "-0",
    "٣",
)
_ANSWER_WAIT_S = 0.02  # most cases break the connection, and are answered at once
_PIECES_MAX = 12
_STREAM_MAX = 256 * 1024
_ADDRESS = re.compile(rb'("broadcast_address"\s*:\s*)"[^"]*"')
_PARTITIONED, _HEADERS = "fuzz-parts", "fuzz-headers"
TOPICS = (*(f"fuzz{number}" for number in range(6)), "fuzz#ephemeral", _PARTITIONED, _HEADERS)


@dataclass(frozen=True)
class Targets:
    """Where to send what."""

    nsqd: Nsqd
    nsqlookupd: Nsqlookupd
    https: tuple[str, int]


def _topic(chance: random.Random) -> str:
    return chance.choice(TOPICS)


def _number(chance: random.Random) -> str:
    return chance.choice(_NUMBERS) if chance.random() < 0.5 else str(chance.randrange(5000))


def _body(chance: random.Random) -> bytes:
    size = chance.choice((0, 1, 8, 9, 10, 26, 100, 1000, 40_000))
    return chance.choice((chance.randbytes(size), b"x" * size, b"\0" * size, b'{"a":1}' * (size // 7)))


def _json(chance: random.Random, fields: dict[str, Sequence[Any]]) -> bytes:
    names = [name for name in fields if chance.random() < 0.6]
    return json.dumps({name: chance.choice([*fields[name], *_VALUES]) for name in names}).encode()


_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    1.5,
    1e308,
    1 << 40,
    1 << 70,
    "",
    "x",
    "٣",
    [],
    {},
    [[]],
    {"a": {}},
    "\ud800",
)
_IDENTIFY: dict[str, Sequence[Any]] = {
    "client_id": ["c"], "hostname": ["h"], "user_agent": ["fuzz/1"], "feature_negotiation": [True],
    "heartbeat_interval": [1000, 60000], "output_buffer_size": [64, 16384], "output_buffer_timeout": [25, 250],
    "sample_rate": [0, 50, 99], "msg_timeout": [1000, 60000], "topology_region": ["r"], "topology_zone": ["z"],
    "extend_support": [True], "desired_tag": ["t"], "short_id": ["s"], "long_id": ["l"], "ext_filter": [{"type": 1}],
}  # fmt: skip


# -- what a client could send ------------------------------------------------------------------------------------------


def _identify(chance: random.Random, **fields: Any) -> bytes:
    wanted = json.loads(_json(chance, _IDENTIFY)) | fields
    return b"IDENTIFY\n" + sized(json.dumps(wanted).encode())


def _several(chance: random.Random) -> bytes:
    bodies = [_body(chance) for _ in range(chance.choice((1, 2, 3, 40)))]
    body = mpub_body(bodies)
    if chance.random() < 0.3:
        return struct.pack(">i", chance.choice((*_EXTREMES, len(body) + 4, len(body) - 4))) + body
    return sized(body)


def _id(chance: random.Random) -> bytes:
    return chance.choice((b"%016x" % chance.randrange(20), chance.randbytes(16), b"%016x" % chance.getrandbits(64)))


def _command(chance: random.Random) -> bytes:
    topic, number, other = _topic(chance), _number(chance), _number(chance)
    several, single = _several(chance), sized(_body(chance))
    headers = _json(chance, {"##a": ["b"], "trace_id": ["1", 1], "tag": ["t"]})
    with_headers = sized(struct.pack(">H", len(headers) & 0xFFFF) + headers + _body(chance))
    with_trace = sized(struct.pack(">Q", chance.getrandbits(64)) + _body(chance))
    line, rest = chance.choice((
        ("NOP", b""), ("CLS", b""), (f"RDY {number}", b""), ("AUTH", single), (f"SUB {topic} c", b""),
        (f"SUB {topic} c#ephemeral {number}", b""), (f"SUB_ORDERED {_PARTITIONED} c 0", b""),
        (f"SUB_ADVANCED {topic} c {number} {chance.choice(('count:1', 'timestamp:0', 'head', other))}", b""),
        (f"PUB {topic}", single), (f"PUB {topic} {number}", single), (f"MPUB {topic}", several),
        (f"MPUB {topic} {number}", several), (f"DPUB {topic} {number}", single), (f"MDPUB {topic} {number}", several),
        (f"PUB_ONCE {topic} - p{other} {number}", single), (f"MPUB_ONCE {topic} 0 p {number}", several),
        (f"PUB_TRACE {_PARTITIONED} {number}", with_trace), (f"MPUB_TRACE {topic} 0", several),
        (f"PUB_EXT {_HEADERS} {number}", with_headers), (f"MPUB_EXT {_HEADERS} 0", several),
        (f"OFFSETS {topic} {number}", b""), (f"FETCH {topic} {number}", chance.randbytes(24)),
        (f"FETCH {topic} 0", struct.pack(">qqii", 0, 1 << 40, 1 << 16, 0)), (f"CURSOR {topic} c {number} {other}", b""),
    ))  # fmt: skip
    if chance.random() < 0.2:
        name = chance.choice(("FIN", "REQ", "TOUCH"))
        return name.encode() + b" " + _id(chance) + (f" {number}".encode() if name == "REQ" else b"") + b"\n"
    return line.encode() + b"\n" + rest


def _commands(chance: random.Random) -> bytes:
    stream = b"  V2"
    if chance.random() < 0.3:
        stream += _identify(chance)
    if chance.random() < 0.4:
        stream += f"SUB {_topic(chance)} c\nRDY {chance.choice((1, 100))}\n".encode()
    return stream + b"".join(_command(chance) for _ in range(chance.randrange(1, 12)))


_NSQD_PATHS = (
    "/ping", "/info", "/stats", "/stats?format=json", "/stats?format=json&include_clients=false", "/metrics", "/pub",
    "/mpub", "/mpub?binary=true", "/mdpub?defer=5", "/put", "/mput", "/pub_ext", "/pubtrace", "/topic/create",
    "/topic/delete", "/topic/empty", "/topic/pause", "/topic/unpause", "/topic/settings", "/channel/create",
    "/channel/delete", "/channel/empty", "/channel/pause", "/channel/unpause", "/channel/settings", "/channel/peek",
    "/channel/setoffset", "/channel/setorder", "/channel/skip", "/channel/unskip", "/message/get", "/message/finish",
    "/message/cancel", "/message/trace", "/message/trace/enable", "/message/trace/disable", "/config/log_level",
    "/debug/state", "/debug/tasks", "/debug/threads", "/debug/pprof/", "/debug/pprof/cmdline", "/debug/pprof/goroutine",
    "/channel/emptydelayed", "/channel/setclientlimit", "/loglevel/set", "/message/stats", "/message/historystats",
    "/serverstats", "/damage", "/damage/acknowledge",
)  # fmt: skip
_LOOKUPD_PATHS = (
    "/ping", "/info", "/lookup", "/lookup?access=w&metainfo=true", "/topics", "/channels", "/nodes", "/debug",
    "/listlookup", "/metrics", "/topic/tombstone", "/topic/delete", "/channel/create", "/channel/delete",
    "/topic/create", "/debug/state", "/debug/pprof/cmdline",
)  # fmt: skip
_PARAMETERS: dict[str, Sequence[str]] = {
    "topic": TOPICS, "channel": ("c", "c#ephemeral", "%00", "*"), "defer": _NUMBERS, "binary": ("true", "false", "x"),
    "partition": _NUMBERS, "offset": _NUMBERS, "timestamp": _NUMBERS, "count": _NUMBERS, "format": ("json", "x"),
    "producer_id": ("p", "%ff"), "sequence": _NUMBERS, "search_mode": ("count", "id", "trace_id"), "node": ("a:1", "x"),
    "search_pos": _NUMBERS, "id": ("0000000000000001", "x"), "limit": _NUMBERS, "orderdisable": ("true", "x"),
}  # fmt: skip
_HEADERS_SENT = (
    b"Content-Type: application/json", b"Accept: application/vnd.nsq; version=1.0", b"Connection: close",
    b"Expect: 100-continue", b"Connection: keep-alive",
    b"Transfer-Encoding: chunked", b"Content-Length: 5", b"Content-Length: -1", b"Host: x",
    b"Authorization: Bearer x", b"X-Nsqext-A: b", b"Upgrade: h2c", b"Cookie: a=b; a", b"A:\x00", b": x", b" folded",
)  # fmt: skip


def _request(chance: random.Random, paths: Sequence[str]) -> bytes:
    method = chance.choice(("GET", "POST", "POST", "PUT", "HEAD", "OPTIONS", "DELETE", "get", ""))
    path = chance.choice(paths)
    query = "&".join(f"{name}={chance.choice(values)}" for name, values in _PARAMETERS.items() if chance.random() < 0.3)
    if chance.random() < 0.8:
        query = f"topic={_topic(chance).replace('#', '%23')}&{query}"
    body = chance.choice((_body(chance), mpub_body([_body(chance)] * 3), _json(chance, _SETTINGS), b""))
    headers = chance.sample(_HEADERS_SENT, chance.randrange(4))
    if chance.random() < 0.8:
        headers.append(b"Content-Length: %d" % len(body))
    version = chance.choice(("HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/9.9", ""))
    target = path + ("&" if "?" in path else "?") + query
    if chance.random() < 0.2 and b"Transfer-Encoding: chunked" in headers:
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    return b"\r\n".join([f"{method} {target} {version}".encode(), *headers, b"", body])


_SETTINGS: dict[str, Sequence[Any]] = {
    "max_attempts": [1, 5], "message_ttl": ["1s", 1000], "max_depth": [10], "overflow": ["drop"], "dead_letter": ["x"]
}  # fmt: skip


def _requests(chance: random.Random, paths: Sequence[str]) -> bytes:
    return b"".join(_request(chance, paths) for _ in range(chance.choice((1, 1, 2, 5))))


def _registration(chance: random.Random) -> bytes:
    """What an nsqd tells nsqlookupd."""
    fields: dict[str, Sequence[Any]] = {
        "broadcast_address": ["127.0.0.1"], "hostname": ["h"], "tcp_port": [1], "http_port": [1],
        "version": ["1.3.0"], "topology_zone": ["z"], "id": ["i"], "distributed_id": ["d"],
    }  # fmt: skip
    stream = b"  V1IDENTIFY\n" + sized(_json(chance, fields))
    for _ in range(chance.randrange(8)):
        name = chance.choice(("REGISTER", "UNREGISTER", "PING", "IDENTIFY", "REGISTER"))
        stream += " ".join((name, _topic(chance), *chance.choice(((), ("c",), ("c", "0"))))).encode() + b"\n"
    return stream


# -- what becomes of it ------------------------------------------------------------------------------------------------


def mutated(chance: random.Random, stream: bytes, another: Callable[[], bytes]) -> bytes:
    """``stream`` after some accidents; now and then it stays as it is."""
    for _ in range(chance.choice((0, 1, 1, 1, 2, 3, 6))):
        at = chance.randrange(len(stream) + 1)
        end = min(len(stream), at + chance.choice((1, 2, 4, 16, 300)))
        accident = chance.randrange(9)
        if accident == 0:
            stream = stream[:at]
        elif accident == 1:
            stream = stream[:at] + stream[at:end] * chance.choice((2, 3, 50)) + stream[end:]
        elif accident == 2:
            stream = stream[:at] + another()[chance.randrange(40) :]
        elif accident == 3 and at < len(stream):
            stream = stream[:at] + bytes([stream[at] ^ 1 << chance.randrange(8)]) + stream[at + 1 :]
        elif accident == 4:
            stream = stream[:at] + struct.pack(">i", chance.choice(_EXTREMES)) + stream[at + 4 :]
        elif accident == 5:
            stream = stream[:at] + stream[end:]
        elif accident == 6:
            stream = stream[:at] + chance.randbytes(chance.choice((1, 4, 200, 5000))) + stream[at:]
        elif accident == 7:
            stream = stream[:at] + chance.choice(_NUMBERS).encode() + stream[at:]
        else:
            stream = stream.replace(b"\n", chance.choice((b"\r\n", b"\n\n", b"\r", b"", b" \n")), 3)
    return _ADDRESS.sub(rb'\1"127.0.0.1"', stream[:_STREAM_MAX])


def _send(chance: random.Random, connection: socket.socket, stream: bytes) -> None:
    """Send it in pieces, read what comes, and go away in one of the ways there are."""
    connection.settimeout(_ANSWER_WAIT_S)
    cuts = sorted(chance.randrange(len(stream) + 1) for _ in range(chance.choice((0, 0, 1, 3, _PIECES_MAX))))
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        connection.sendall(stream[start:end])
        if chance.random() < 0.1:
            time.sleep(0.001)
    ending = chance.randrange(4)
    if ending == 0:
        connection.shutdown(socket.SHUT_WR)
    elif ending == 1:
        return
    elif ending == 2:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        return
    for _ in range(20):
        if not connection.recv(65536):
            return


def _compressed(chance: random.Random, codec: str, stream: bytes) -> bytes:
    if codec == "deflate":
        compressor = zlib.compressobj(6, zlib.DEFLATED, -15)
        return compressor.compress(stream) + compressor.flush(zlib.Z_SYNC_FLUSH)
    return bytes(snappy.StreamCompressor().compress(stream))


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionError("closed")
        data += piece
    return data


def _upgraded(chance: random.Random, targets: Targets, context: ssl.SSLContext) -> None:
    """TLS, deflate or snappy as it should be, and accidents inside; or garbage where the layer begins."""
    codec = chance.choice(("deflate", "snappy", ""))
    is_tls = not codec or chance.random() < 0.3
    with socket.create_connection(targets.nsqd.tcp, timeout=2) as clear:
        fields = {"tls_v1": is_tls, "feature_negotiation": True, **({codec: True} if codec else {})}
        clear.sendall(b"  V2IDENTIFY\n" + sized(json.dumps(fields).encode()))
        _exactly(clear, int.from_bytes(_exactly(clear, 4), "big"))
        stream = mutated(chance, _commands(chance)[4:], lambda: _commands(chance))
        if codec:
            stream = _compressed(chance, codec, stream)
            if chance.random() < 0.5:
                stream = mutated(chance, stream, lambda: chance.randbytes(100))
        if not is_tls or chance.random() < 0.3:
            return _send(chance, clear, stream)
        with context.wrap_socket(clear, server_hostname="localhost") as secured:
            _send(chance, secured, stream)
    return None


def _hello(chance: random.Random, context: ssl.SSLContext) -> bytes:
    """The first flight of a TLS client."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


def play(name: str, targets: Targets, context: ssl.SSLContext) -> None:
    """Play the case of this name: one connection to one port.

    Raises:
        OSError: the daemon closed the connection in the middle, as it should.
    """
    chance = random.Random(name)
    kind = chance.choice(
        ("tcp",) * 6 + ("http",) * 4 + ("upgrade",) * 3 + ("https", "hello", "lookupd", "lookupd-http")
    )
    if kind == "upgrade":
        return _upgraded(chance, targets, context)
    if kind == "https":
        clear = socket.create_connection(targets.https, timeout=2)
        with clear, context.wrap_socket(clear, server_hostname="localhost") as secured:
            stream = mutated(chance, _requests(chance, _NSQD_PATHS), lambda: _requests(chance, _NSQD_PATHS))
            _send(chance, secured, stream)
        return None
    make: dict[str, tuple[tuple[str, int], Callable[[], bytes]]] = {
        "tcp": (targets.nsqd.tcp, lambda: _commands(chance)),
        "http": (targets.nsqd.http, lambda: _requests(chance, _NSQD_PATHS)),
        "hello": (targets.https, lambda: _hello(chance, context)),
        "lookupd": (targets.nsqlookupd.tcp, lambda: _registration(chance)),
        "lookupd-http": (targets.nsqlookupd.http, lambda: _requests(chance, _LOOKUPD_PATHS)),
    }
    address, stream_of = make[kind]
    stream = mutated(chance, stream_of(), stream_of)
    if chance.random() < 0.05:  # to a port that expects something else
        address = chance.choice([address for address, _ in make.values()])
    with socket.create_connection(address, timeout=2) as connection:
        _send(chance, connection, stream)
    return None


def lookupd_answers(chance: random.Random) -> bytes:
    """What a broken nsqlookupd could answer an nsqd."""
    info = {"tcp_port": 1, "http_port": 1, "version": "1.3.0", "broadcast_address": "127.0.0.1", "hostname": "h"}
    frames = (b"OK", json.dumps(info).encode(), b"E_INVALID x", b"_heartbeat_", _body(chance), _json(chance, _IDENTIFY))
    stream = b"".join(sized(chance.choice(frames)) for _ in range(chance.randrange(1, 6)))
    return mutated(chance, stream, lambda: sized(_body(chance)))
