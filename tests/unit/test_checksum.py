"""CRC-32 of whatever computes it: the same number, in one piece or in many."""

from __future__ import annotations

import importlib
import sys
import zlib

from hypothesis import given
from hypothesis import strategies as st

from flintmq import checksum


@given(pieces=st.lists(st.binary(max_size=10_000), max_size=4), start=st.integers(0, (1 << 32) - 1))
def test_it_is_that_of_zlib(pieces, start):
    found = start
    for piece in pieces:
        found = checksum.crc32(memoryview(piece), found)
    assert found == zlib.crc32(b"".join(pieces), start)


def test_without_the_extra_it_is_that_of_zlib(monkeypatch):
    assert checksum.crc32 is not zlib.crc32, "the extra fast brings another"
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "zlib_ng.zlib_ng", None)
        assert importlib.reload(checksum).crc32 is zlib.crc32
    assert importlib.reload(checksum).crc32 is not zlib.crc32
