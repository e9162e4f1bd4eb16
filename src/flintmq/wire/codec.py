"""Compression of a connection: bytes in, bytes out, the same code for servers and clients.

Rules of this file:

- Reading is pulled: :meth:`Codec.receive` only keeps the bytes, each :meth:`Codec.read` makes at most ``READ_SIZE_MAX``
  bytes out of them. A small input that swells to gigabytes thus costs its reader one piece at a time, and the reader
  may stop in between. What is kept is what was received and not read, so whoever feeds a codec bounds it.
- Everything the peer claims is checked before it is believed: lengths of chunks before they are gathered, sizes before
  they are decoded, check sums after.
- :meth:`Codec.write` ends with a flush: what was written can be read on the other side, without a byte that follows.

Byte pictures::

    deflate   one endless raw stream per direction (RFC 1951, no header), each write ends 00 00 ff ff

    snappy    +------+-----------------+------
              | type | length (24, LE) | data          type 00 compressed, 01 as it is: data begins with the masked
              +------+-----------------+------         CRC-32C of the plain bytes, of which there are at most 65536;
                                                       ff stream identifier, first of all; 80 to fe skipped

Source: NSQ's TCP protocol; RFC 1951; google/snappy framing_format.txt.
"""

from __future__ import annotations

import zlib
from typing import Protocol

from flintmq.errors import FlintError

READ_SIZE_MAX = 64 * 1024
DEFLATE_LEVEL_DEFAULT = 6

_RAW_DEFLATE = -15

_CHUNK_HEADER_SIZE = 4
_CHUNK_PLAIN_MAX = 65536  # of the framing format
_CHUNK_CRC_SIZE = 4
_CHUNK_DATA_MAX = _CHUNK_CRC_SIZE + 32 + _CHUNK_PLAIN_MAX + _CHUNK_PLAIN_MAX // 6  # snappy's worst case
_COMPRESSED, _PLAIN, _FIRST_SKIPPABLE, _IDENTIFIER = 0x00, 0x01, 0x80, 0xFF
_STREAM_START = b"\xff\x06\x00\x00sNaPpY"
_VARINT_SIZE_MAX = 3  # 65536 fits in three groups of seven bits

assert READ_SIZE_MAX >= _CHUNK_PLAIN_MAX


class CorruptStream(FlintError):
    """The peer sent something else than the compression that was agreed on.

    Args:
        codec: ``deflate`` or ``snappy``.
        reason: what is wrong with it.
    """

    def __init__(self, codec: str, reason: str) -> None:
        super().__init__(codec, reason)
        self.codec = codec
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.codec}: {self.reason}"


class Codec(Protocol):
    """Compresses one direction of a connection and decompresses the other."""

    @property
    def name(self) -> str:
        """The name that it has in IDENTIFY."""

    @property
    def is_ended(self) -> bool:
        """Whether the peer has ended its stream; what came behind the end counts for nothing."""

    def write(self, data: bytes) -> bytes:
        """Compress and flush."""

    def receive(self, data: bytes) -> None:
        """Keep compressed bytes for :meth:`read`."""

    def read(self) -> bytes:
        """Decompress the next piece, at most ``READ_SIZE_MAX`` bytes; empty when more has to be received first.

        Raises:
            CorruptStream: and again with every further call.
        """


class Deflate:
    """Raw deflate.

    Args:
        level: of compression, 1 to 9.
    """

    name = "deflate"

    def __init__(self, level: int = DEFLATE_LEVEL_DEFAULT) -> None:
        self.is_ended = False
        self._compressor = zlib.compressobj(level, zlib.DEFLATED, _RAW_DEFLATE)
        self._decompressor = zlib.decompressobj(_RAW_DEFLATE)
        self._received = b""
        self._has_more = False
        self._corrupt = ""

    def write(self, data: bytes) -> bytes:
        return self._compressor.compress(data) + self._compressor.flush(zlib.Z_SYNC_FLUSH)

    def receive(self, data: bytes) -> None:
        self._received = self._received + data if self._received else data
        self._has_more = True

    def read(self) -> bytes:
        if self._corrupt:
            raise CorruptStream(self.name, self._corrupt)
        if not self._has_more or self.is_ended:
            return b""
        decompressor = self._decompressor
        try:
            plain = decompressor.decompress(self._received, READ_SIZE_MAX)
        except zlib.error as error:
            self._corrupt = str(error)
            self._received = b""
            raise CorruptStream(self.name, self._corrupt) from error
        self._received = decompressor.unconsumed_tail
        # a full piece may have left bytes inside the decompressor although all input was taken
        self._has_more = len(plain) == READ_SIZE_MAX
        if decompressor.eof:
            self.is_ended = True
            self._received = b""
            self._has_more = False
        return plain


class Snappy:
    """Snappy in its framing format."""

    name = "snappy"
    is_ended = False  # the format has no end

    def __init__(self) -> None:
        import cramjam  # for those who negotiate it

        self._decompress, self._error = cramjam.snappy.decompress, cramjam.DecompressionError
        self._compressor = cramjam.snappy.Compressor()  # sends the stream identifier with the first write only
        self._received = b""
        self._at = 0  # what stands before it in _received is done with
        self._skip_bytes = 0  # of a chunk that is to be skipped, not received yet
        self._is_identified = False
        self._corrupt = ""

    def write(self, data: bytes) -> bytes:
        self._compressor.compress(data)
        return bytes(self._compressor.flush())

    def receive(self, data: bytes) -> None:
        self._received = self._received[self._at :] + data
        self._at = 0

    def read(self) -> bytes:
        if self._corrupt:
            raise CorruptStream(self.name, self._corrupt)
        try:
            while True:
                start, end = self._next_chunks()
                if start == end:
                    return b""
                # the library's own decoder of streams wants a stream from its start, and whole chunks
                plain = bytes(self._decompress(_STREAM_START + self._received[start:end]))
                if plain:
                    return plain
        except self._error as error:
            self._give_up(str(error))
            raise CorruptStream(self.name, self._corrupt) from error

    def _next_chunks(self) -> tuple[int, int]:
        """Step over a run of whole chunks of data that make at most ``READ_SIZE_MAX`` bytes; return where it stands."""
        data = self._received
        start = at = self._at
        plain_size = 0
        while len(data) - at >= _CHUNK_HEADER_SIZE or self._skip_bytes:
            if self._skip_bytes:
                step = min(self._skip_bytes, len(data) - at)
                self._skip_bytes -= step
                start = at = at + step
                if not step:
                    break
                continue
            kind = data[at]
            length = int.from_bytes(data[at + 1 : at + _CHUNK_HEADER_SIZE], "little")
            body = at + _CHUNK_HEADER_SIZE
            if kind in (_COMPRESSED, _PLAIN):
                self._check_length(kind, length)
                if len(data) - body < length:
                    break
                plain_size += self._plain_size(kind, body, length)
                if plain_size > READ_SIZE_MAX and at > start:
                    break
                at = body + length
            elif at > start:
                break  # a run ends before anything else
            elif kind == _IDENTIFIER:
                if data[at : at + len(_STREAM_START)] != _STREAM_START[: len(data) - at]:
                    raise self._give_up("bad stream identifier")
                if len(data) - at < len(_STREAM_START):
                    break
                self._is_identified = True
                start = at = at + len(_STREAM_START)
            elif not self._is_identified:
                raise self._give_up(f"chunk of type {kind:#04x} before the stream identifier")
            elif kind < _FIRST_SKIPPABLE:
                raise self._give_up(f"unknown chunk of type {kind:#04x}")
            else:
                self._skip_bytes = length
                start = at = body
        self._at = at
        return start, at

    def _check_length(self, kind: int, length: int) -> None:
        if not self._is_identified:
            raise self._give_up("data before the stream identifier")
        longest = _CHUNK_DATA_MAX if kind == _COMPRESSED else _CHUNK_CRC_SIZE + _CHUNK_PLAIN_MAX
        if not _CHUNK_CRC_SIZE <= length <= longest:
            raise self._give_up(f"chunk of {length} bytes; {longest} is the limit")

    def _plain_size(self, kind: int, body: int, length: int) -> int:
        """Return the size that a chunk claims to have when it is decompressed, in bytes."""
        if kind == _PLAIN:
            return length - _CHUNK_CRC_SIZE
        size = shift = 0
        first = body + _CHUNK_CRC_SIZE
        for byte in self._received[first : min(first + _VARINT_SIZE_MAX, body + length)]:
            size |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
        else:
            size = _CHUNK_PLAIN_MAX + 1  # longer than any size that is allowed
        if size > _CHUNK_PLAIN_MAX:
            raise self._give_up(f"chunk of more than {_CHUNK_PLAIN_MAX} bytes when decompressed")
        return size

    def _give_up(self, reason: str) -> CorruptStream:
        self._corrupt = reason
        self._received = b""
        self._at = 0
        return CorruptStream(self.name, reason)
