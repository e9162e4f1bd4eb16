"""A raw connection that goes through TLS, deflate or snappy as a client of nsqd does, with none of our code.

Snappy's framing is python-snappy's, deflate is zlib's, TLS is the standard library's, so that both sides of the wire
are not wrong in the same way. Source: NSQ's TCP protocol.
"""

from __future__ import annotations

import json
import socket
import ssl
import zlib
from typing import Any, Protocol

import snappy  # type: ignore[import-untyped]
from tests.integration.daemons import HEARTBEAT, RESPONSE, Connection, FrameReader, sized


class Codec(Protocol):
    def compress(self, data: bytes) -> bytes: ...
    def decompress(self, data: bytes) -> bytes: ...


class Deflate:
    """Raw deflate, flushed after every write."""

    def __init__(self, level: int = 6) -> None:
        self._compressor = zlib.compressobj(level, zlib.DEFLATED, -15)
        self._decompressor = zlib.decompressobj(-15)

    def compress(self, data: bytes) -> bytes:
        return self._compressor.compress(data) + self._compressor.flush(zlib.Z_SYNC_FLUSH)

    def decompress(self, data: bytes) -> bytes:
        return self._decompressor.decompress(data)


class Snappy:
    """Snappy's framing format."""

    def __init__(self) -> None:
        self._compressor = snappy.StreamCompressor()
        self._decompressor = snappy.StreamDecompressor()

    def compress(self, data: bytes) -> bytes:
        return bytes(self._compressor.compress(data))

    def decompress(self, data: bytes) -> bytes:
        return bytes(self._decompressor.decompress(data))


CODECS: dict[str, type[Deflate] | type[Snappy]] = {"deflate": Deflate, "snappy": Snappy}


class CompressedSocket:
    """Looks like a socket; what goes through it is compressed."""

    def __init__(self, below: socket.socket, codec: Codec) -> None:
        self._below = below
        self._codec = codec
        self.step = 1 << 20

    def sendall(self, data: bytes) -> None:
        compressed = self._codec.compress(data)
        for at in range(0, len(compressed), self.step):
            self._below.sendall(compressed[at : at + self.step])

    def recv(self, size: int) -> bytes:
        while True:
            data = self._below.recv(size)
            plain = self._codec.decompress(data) if data else b""
            if plain or not data:
                return plain

    def settimeout(self, timeout_s: float) -> None:
        self._below.settimeout(timeout_s)

    def close(self) -> None:
        self._below.close()


class Upgraded(Connection):
    """A connection that upgrades as far as nsqd grants."""

    codec: CompressedSocket | None = None

    def __enter__(self) -> Upgraded:
        return self

    def read_frame(self) -> tuple[int, bytes]:
        """One frame and not a byte behind it, which may belong to another layer."""
        data = self._exactly(8)
        return int.from_bytes(data[4:], "big"), self._exactly(int.from_bytes(data[:4], "big") - 4)

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self.socket.recv(size - len(data))
            if not piece:
                raise ConnectionError(f"closed after {data!r}")
            data += piece
        return data

    def negotiate(self, **fields: Any) -> dict[str, Any]:
        """Send IDENTIFY and return the answer, which comes in clear."""
        self.send(b"IDENTIFY\n" + sized(json.dumps({"feature_negotiation": True, **fields}).encode()))
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The JSON of the next response."""
        kind, data = self.read_frame()
        while (kind, data) == (RESPONSE, HEARTBEAT):
            kind, data = self.read_frame()
        assert kind == RESPONSE, (kind, data)
        answer: dict[str, Any] = json.loads(data)
        return answer

    def secure(self, context: ssl.SSLContext, name: str = "localhost") -> ssl.SSLSocket:
        """The TLS handshake and the OK behind it."""
        secured = context.wrap_socket(self.socket, server_hostname=name)
        self.socket = secured
        assert self.read_frame() == (RESPONSE, b"OK")
        return secured

    def compress(self, name: str) -> None:
        """From here on compressed; the OK is the first thing that is."""
        self.codec = CompressedSocket(self.socket, CODECS[name]())
        self.socket = self.codec  # type: ignore[assignment]  # what Connection uses of a socket
        self._reader = FrameReader()
        self.ok()

    def upgrade(self, context: ssl.SSLContext | None = None, codec: str = "", **fields: Any) -> dict[str, Any]:
        """All of it; what was asked for must be granted."""
        wanted = {**fields, **({"tls_v1": True} if context else {}), **({codec: True} if codec else {})}
        answer = self.negotiate(**wanted)
        assert answer["tls_v1"] == (context is not None)
        assert [each for each in CODECS if answer[each]] == ([codec] if codec else [])
        if context is not None:
            self.secure(context)
        if codec:
            self.compress(codec)
        return answer
