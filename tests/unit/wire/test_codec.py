"""Compression: what one side writes the other reads, however it is cut; what a peer claims is not believed."""

from __future__ import annotations

import random
import struct
import tracemalloc
import zlib

import cramjam
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flintmq.wire.codec import READ_SIZE_MAX, Codec, CorruptStream, Deflate, Snappy

IDENTIFIER = b"\xff\x06\x00\x00sNaPpY"
CODECS = [Deflate, Snappy]


def read_all(codec: Codec, data: bytes = b"") -> bytes:
    codec.receive(data)
    pieces = []
    while piece := codec.read():
        assert len(piece) <= READ_SIZE_MAX
        pieces.append(piece)
    return b"".join(pieces)


def chunk(kind: int, data: bytes, length: int | None = None) -> bytes:
    return bytes([kind]) + (len(data) if length is None else length).to_bytes(3, "little") + data


def snappy_chunk(plain: bytes) -> bytes:
    """One chunk of data as another implementation frames it."""
    return bytes(cramjam.snappy.compress(plain))[len(IDENTIFIER) :]


def mixed(size: int, seed: int = 1) -> bytes:
    """Bytes of which half can be compressed."""
    chance = random.Random(seed)
    return b"".join(chance.randbytes(50) + b"a" * 50 for _ in range(size // 100 + 1))[:size]


# -- both --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@given(
    writes=st.lists(st.binary(min_size=1, max_size=300) | st.integers(1, 200_000).map(mixed), max_size=8),
    cuts=st.lists(st.integers(1, 70_000), min_size=1, max_size=20),
)
def test_what_is_written_is_read_however_it_is_cut(codec: type[Codec], writes: list[bytes], cuts: list[int]):
    writer, reader = codec(), codec()
    stream = b"".join(writer.write(data) for data in writes)
    out = b""
    at = turn = 0
    while at < len(stream):
        step = cuts[turn % len(cuts)]
        out += read_all(reader, stream[at : at + step])
        at, turn = at + step, turn + 1
    assert out == b"".join(writes)


@pytest.mark.parametrize("codec", CODECS)
def test_one_byte_at_a_time(codec: type[Codec]):
    writer, reader = codec(), codec()
    stream = writer.write(b"SUB t c\n") + writer.write(mixed(3000)) + writer.write(b"NOP\n")
    out = b"".join(read_all(reader, stream[at : at + 1]) for at in range(len(stream)))
    assert out == b"SUB t c\n" + mixed(3000) + b"NOP\n"


@pytest.mark.parametrize("codec", CODECS)
def test_every_write_can_be_read_at_once(codec: type[Codec]):
    writer, reader = codec(), codec()
    for number in range(50):
        data = b"%d" % number
        assert read_all(reader, writer.write(data)) == data


@pytest.mark.parametrize(("codec", "ratio"), [(Deflate, 900), (Snappy, 18)])
def test_a_bomb_comes_out_piece_by_piece(codec: type[Codec], ratio: int):
    plain_size = 64 * 1024 * 1024
    stream = codec().write(bytes(plain_size))
    assert len(stream) * ratio < plain_size
    reader = codec()
    tracemalloc.start()
    try:
        size = 0
        for at in range(0, len(stream), 256 * 1024):
            reader.receive(stream[at : at + 256 * 1024])
            while piece := reader.read():
                size += len(piece)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size == plain_size
    assert peak_bytes < 2 * 1024 * 1024


@pytest.mark.parametrize("codec", CODECS)
def test_commands_in_clear_are_refused(codec: type[Codec]):
    reader = codec()
    with pytest.raises(CorruptStream, match=f"^{reader.name}: "):
        read_all(reader, b"PUB t\n\x00\x00\x00\x01x")
    with pytest.raises(CorruptStream):
        read_all(reader, codec().write(b"NOP\n"))


@pytest.mark.parametrize("codec", CODECS)
@given(data=st.binary(max_size=200))
def test_no_bytes_make_it_fail_otherwise(codec: type[Codec], data: bytes):
    for prefix in (b"", codec().write(b"NOP\n")):
        try:
            read_all(codec(), prefix + data)
        except CorruptStream as error:
            assert error.reason


# -- deflate -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", range(1, 10))
def test_deflate_is_raw_and_flushed(level: int):
    stream = Deflate(level).write(b"hello " * 100)
    assert stream.endswith(b"\x00\x00\xff\xff")
    assert zlib.decompressobj(-15).decompress(stream) == b"hello " * 100


def test_deflate_is_one_stream():
    """The second write may refer to the first: an other side that starts afresh per write cannot read it."""
    codec = Deflate()
    first, second = codec.write(mixed(1000)), codec.write(mixed(1000))
    assert len(second) < len(first) / 5
    assert read_all(Deflate(), first + second) == 2 * mixed(1000)


def test_a_deflate_stream_that_ends_is_read_to_its_end():
    compressor = zlib.compressobj(6, zlib.DEFLATED, -15)
    stream = compressor.compress(b"NOP\n") + compressor.flush()
    reader = Deflate()
    reader.receive(stream + b"PUB")
    assert not reader.is_ended
    assert reader.read() == b"NOP\n"
    assert reader.is_ended
    assert read_all(reader, b"more") == b""


def test_a_deflate_stream_of_nothing_but_its_end():
    reader = Deflate()
    assert read_all(reader, b"\x03\x00") == b""
    assert reader.is_ended


def test_bytes_left_inside_the_decompressor_come_out():
    """The read that fills a piece may take all input, and what it stands for is still inside."""
    for extra_size in (-1, 0, 1, 2, 257, 258, 259, READ_SIZE_MAX):
        stream = Deflate().write(bytes(READ_SIZE_MAX + extra_size))
        for cut in range(1, 24):
            expected = zlib.decompressobj(-15).decompress(stream[:-cut])
            assert len(read_all(Deflate(), stream[:-cut])) == len(expected), (extra_size, cut)


# -- snappy ------------------------------------------------------------------------------------------------------------


def test_the_snappy_identifier_is_sent_once():
    codec = Snappy()
    assert codec.write(b"NOP\n").startswith(IDENTIFIER)
    assert IDENTIFIER not in codec.write(b"NOP\n")


def test_snappy_as_others_frame_it():
    """Go's and Python's libraries send the identifier once, some send it again and again."""
    one, two = snappy_chunk(b"one"), snappy_chunk(b"two")
    assert read_all(Snappy(), IDENTIFIER + one + two) == b"onetwo"
    assert read_all(Snappy(), IDENTIFIER + one + IDENTIFIER + two) == b"onetwo"


def test_snappy_chunks_that_are_not_compressed():
    plain = random.Random(1).randbytes(65536)
    framed = snappy_chunk(plain)
    assert framed[0] == 1
    assert read_all(Snappy(), IDENTIFIER + framed) == plain


@pytest.mark.parametrize("kind", [0x80, 0xFD, 0xFE])
def test_snappy_chunks_to_skip_are_not_gathered(kind: int):
    reader = Snappy()
    reader.receive(IDENTIFIER + chunk(kind, b"", length=(1 << 24) - 1))
    left = (1 << 24) - 1
    tracemalloc.start()
    try:
        while left:
            step = min(left, 100_000)
            assert read_all(reader, bytes(step)) == b""
            left -= step
        assert tracemalloc.get_traced_memory()[1] < 1024 * 1024
    finally:
        tracemalloc.stop()
    assert read_all(reader, chunk(kind, b"padding") + snappy_chunk(b"NOP\n")) == b"NOP\n"


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (snappy_chunk(b"NOP\n"), "before the stream identifier"),
        (chunk(0xFE, b"x"), "before the stream identifier"),
        (b"\xff\x06\x00\x00sNaPpX", "bad stream identifier"),
        (b"\xff\x07\x00\x00sNaPpY!", "bad stream identifier"),
        (IDENTIFIER + chunk(0x02, b"x"), "unknown chunk of type 0x02"),
        (IDENTIFIER + chunk(0x7F, b"x"), "unknown chunk of type 0x7f"),
        (IDENTIFIER + chunk(0x00, b"", length=3), "chunk of 3 bytes"),
        (IDENTIFIER + chunk(0x00, b"", length=76491 + 4), "chunk of 76495 bytes"),
        (IDENTIFIER + chunk(0x01, b"", length=65536 + 5), "chunk of 65541 bytes"),
        (IDENTIFIER + chunk(0x00, b"", length=(1 << 24) - 1), "chunk of 16777215 bytes"),
        (IDENTIFIER + chunk(0x00, b"crc!" + b"\x81\x80\x04" + b"x"), "more than 65536 bytes"),
        (IDENTIFIER + chunk(0x00, b"crc!" + b"\xff\xff\xff\xff\x0f"), "more than 65536 bytes"),
        (IDENTIFIER + chunk(0x00, b"crc!"), "more than 65536 bytes"),
        (IDENTIFIER + chunk(0x00, b"crc!\x05\x10abcde"), "snappy"),
        (IDENTIFIER + chunk(0x01, b"crc!NOP\n"), "checksum"),
    ],
)
def test_bad_snappy(stream: bytes, reason: str):
    reader = Snappy()
    with pytest.raises(CorruptStream) as caught:
        read_all(reader, stream)
    assert reason in str(caught.value)
    with pytest.raises(CorruptStream):
        reader.read()


def test_bad_lengths_are_refused_before_the_chunk_has_come():
    """Only the four bytes of the header were sent."""
    with pytest.raises(CorruptStream, match="limit"):
        read_all(Snappy(), IDENTIFIER + struct.pack("<I", (1 << 24) - 1 << 8))


@pytest.mark.parametrize("position", [4, 6, 8, 12])
def test_a_flipped_bit_is_found(position: int):
    framed = bytearray(snappy_chunk(mixed(200)))
    framed[position] ^= 1
    with pytest.raises(CorruptStream):
        read_all(Snappy(), IDENTIFIER + bytes(framed))


def test_good_chunks_before_a_bad_one_are_not_lost_when_they_came_earlier():
    reader = Snappy()
    assert read_all(reader, IDENTIFIER + snappy_chunk(b"one")) == b"one"
    with pytest.raises(CorruptStream):
        read_all(reader, chunk(0x02, b""))
