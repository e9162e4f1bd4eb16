"""CRC-32, computed by the fastest implementation that is installed.

All of them compute the same number, so that files and batches do not depend on which one it was. Everything that is
appended, copied, verified or read in bulk goes through here: zlib's is the bound of some of these paths, and that of
zlib-ng takes a tenth of it (docs/decisions/0038).

Source: RFC 1952, section 8.
"""

from __future__ import annotations

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:  # it comes with the extras fast and spark
    from zlib import crc32

__all__ = ["crc32"]
