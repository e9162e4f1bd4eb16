"""From a sharding id to a partition: the functions of Youzan's Go, Java and PHP clients.

Producers that publish to one topic must agree on the function: the same id has to reach the same partition, whatever
language they are written in.

========  ====================================  ===================================================
function  partition of n                        of what
========  ====================================  ===================================================
murmur3   MurmurHash3 (32 bit, seed 0) mod n    the bytes; text in UTF-8, a number as decimal digits
java      absolute value of (hashCode rem n)    text as UTF-16 units, a number as a Java Long
mod       id mod n                              a number
========  ====================================  ===================================================

Source: Youzan's smart client, "Production in ordered message scenario"; its vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import iter_unpack
from typing import TypeAlias

from flintmq.errors import OptionError

ShardingId: TypeAlias = int | str | bytes
"""The thing that messages which stay in order have in common: a number, text or bytes."""

_MASK = 0xFFFFFFFF
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


def murmur3_32(data: bytes, seed: int = 0) -> int:
    """MurmurHash3 for x86, 32 bits, as an unsigned number."""
    state = seed & _MASK
    whole = len(data) & ~3
    for (word,) in iter_unpack("<I", data[:whole]):
        state ^= _scramble(word)
        state = (state << 13 | state >> 19) & _MASK
        state = (state * 5 + 0xE6546B64) & _MASK
    if tail := data[whole:]:
        state ^= _scramble(int.from_bytes(tail, "little"))
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & _MASK
    state = (state ^ state >> 13) * 0xC2B2AE35 & _MASK
    return state ^ state >> 16


def _scramble(word: int) -> int:
    word = word * 0xCC9E2D51 & _MASK
    word = (word << 15 | word >> 17) & _MASK
    return word * 0x1B873593 & _MASK


def java_hash(sharding_id: int | str) -> int:
    """``hashCode()`` of a Java String or Long, as a signed number of 32 bits."""
    if isinstance(sharding_id, int):
        bits = sharding_id & 0xFFFFFFFFFFFFFFFF
        code = (bits ^ bits >> 32) & _MASK
    else:
        code = 0
        for (unit,) in iter_unpack("<H", sharding_id.encode("utf-16-le", "surrogatepass")):
            code = (31 * code + unit) & _MASK
    return code - (1 << 32) if code >> 31 else code


def _by_murmur3(sharding_id: ShardingId, count: int) -> int:
    if isinstance(sharding_id, int):
        sharding_id = str(sharding_id)
    return murmur3_32(sharding_id.encode() if isinstance(sharding_id, str) else sharding_id) % count


def _by_java(sharding_id: ShardingId, count: int) -> int:
    if isinstance(sharding_id, bytes):
        raise OptionError("sharding_id", sharding_id, "text or a number: Java has no hash code for bytes", "argument")
    return abs(java_hash(sharding_id)) % count  # |a rem n| as Java has it, where rem keeps the sign of a


def _by_mod(sharding_id: ShardingId, count: int) -> int:
    if not isinstance(sharding_id, int):
        raise OptionError("sharding_id", sharding_id, 'a number; sharding="mod" divides it', "argument")
    return sharding_id % count


SHARDINGS: dict[str, Callable[[ShardingId, int], int]] = {"murmur3": _by_murmur3, "java": _by_java, "mod": _by_mod}


def partition_of(sharding_id: ShardingId, partition_count: int, sharding: str = "murmur3") -> int:
    """The partition that messages of a sharding id go to, from 0 to ``partition_count - 1``.

    Args:
        sharding: ``murmur3``, ``java`` or ``mod``.

    Raises:
        OptionError: the function is unknown, or takes no sharding id of this kind.
    """
    if isinstance(sharding_id, bool) or not isinstance(sharding_id, int | str | bytes):
        raise OptionError("sharding_id", sharding_id, "a whole number, text or bytes", "argument")
    if isinstance(sharding_id, int) and not _INT64_MIN <= sharding_id <= _INT64_MAX:
        raise OptionError("sharding_id", sharding_id, "a number of 64 bits; write larger ones as text", "argument")
    function = SHARDINGS.get(sharding)
    if function is None:
        raise OptionError("sharding", sharding, f"one of {', '.join(SHARDINGS)}", "argument")
    return function(sharding_id, partition_count)
