"""Sharding functions against the vectors of the other languages (Youzan's smart client)."""

from __future__ import annotations

import pytest

from flintmq.client.core.sharding import java_hash, murmur3_32, partition_of
from flintmq.errors import OptionError

VECTORS = [
    ("key0", 3994481879, 2, 3288497, 2),
    ("key1", 2610364709, 2, 3288498, 0),
    ("order-12345", 1785094598, 2, 478832884, 1),
]


@pytest.mark.parametrize(("key", "murmur", "murmur_partition", "java", "java_partition"), VECTORS)
def test_vectors_of_the_other_clients(key: str, murmur: int, murmur_partition: int, java: int, java_partition: int):
    assert murmur3_32(key.encode()) == murmur
    assert java_hash(key) == java
    assert partition_of(key, 3) == partition_of(key.encode(), 3) == murmur_partition
    assert partition_of(key, 3, "java") == java_partition


@pytest.mark.parametrize(
    ("data", "seed", "expected"),
    [
        (b"", 0, 0),
        (b"", 1, 0x514E28B7),
        (b"", 0xFFFFFFFF, 0x81F16F39),
        (b"\x00\x00\x00\x00", 0, 0x2362F9DE),
        (b"\x00\x00\x00", 0, 0x85F0B427),
        (b"\xff\xff\xff\xff", 0, 0x76293B50),
        (b"!Ce\x87", 0, 0xF55B516B),
        (b"!Ce", 0, 0x7E4A8634),
        (b"Hello, world!", 0x9747B28C, 0x24884CBA),
        (b"aaaa", 0x9747B28C, 0x5A97808A),
    ],
)
def test_murmur3_of_the_published_vectors(data: bytes, seed: int, expected: int):
    assert murmur3_32(data, seed) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0), (1, 1), (-1, 0), (2**31, -(2**31)), (2**32, 1), (2**63 - 1, -(2**31)), (-(2**63), -(2**31)),
        ("", 0), ("a", 97), ("polygenelubricants", -(2**31)), ("\U0001f600", 1772899),
    ],
)  # fmt: skip
def test_java_hash_codes(value: int | str, expected: int):
    """Long: (int)(v ^ v >>> 32); String: over UTF-16 units; both wrap at 32 bits."""
    assert java_hash(value) == expected


def test_java_takes_the_absolute_value_of_the_remainder():
    assert partition_of(2**31, 3, "java") == 2  # hash -2147483648 rem 3 is -2
    assert partition_of("polygenelubricants", 7, "java") == 2


def test_numbers():
    assert partition_of(12345, 3) == partition_of("12345", 3) == partition_of(b"12345", 3)
    assert [partition_of(number, 4, "mod") for number in (0, 5, 7, 2**63 - 1)] == [0, 1, 3, 3]


@pytest.mark.parametrize("sharding", ["murmur3", "java", "mod"])
def test_every_partition_gets_its_share(sharding: str):
    counts = [0] * 8
    for number in range(8000):
        counts[partition_of(number, 8, sharding)] += 1
    assert min(counts) > 800 and max(counts) < 1200


@pytest.mark.parametrize(
    ("sharding_id", "sharding", "reason"),
    [
        (b"x", "java", "no hash code for bytes"),
        ("x", "mod", "a number"),
        (1.5, "murmur3", "a whole number, text or bytes"),
        (True, "mod", "a whole number, text or bytes"),
        (2**63, "java", "64 bits"),
        (1, "md5", "one of murmur3, java, mod"),
    ],
)
def test_what_cannot_be_sharded_is_told(sharding_id: object, sharding: str, reason: str):
    with pytest.raises(OptionError, match=reason):
        partition_of(sharding_id, 3, sharding)  # type: ignore[arg-type]
