"""The identity of a node: a number that its data directory keeps, whatever host and port it has.

Byte picture of ``node.id``, and of other files that hold one number: 16 hex digits, a space, 8 hex digits (CRC-32 of
the 16), a newline.

Rules of this file: an identity is made once, and durable before anybody hears of it; one that is not as it was written
is refused, because a node under another identity would be a new one without replicas.

Source: docs/decisions/0016.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from flintmq.checksum import crc32
from flintmq.errors import StorageError
from flintmq.storage.files import Files, replace_file

IDENTITY_NAME = "node.id"
_LINE = re.compile(rb"([0-9a-f]{16}) ([0-9a-f]{8})\n")


class DamagedIdentity(StorageError):
    """``node.id`` of a data directory is not what was written there."""

    def __str__(self) -> str:
        return (
            f"{IDENTITY_NAME} of the data directory is damaged: it should be 16 hex digits and their checksum. "
            "Restore it from a backup. Without one, remove it: the node is a new one then, to which the cluster has to "
            "give its replicas anew"
        )


def node_id(
    files: Files,
    random_bytes: Callable[[int], bytes] = os.urandom,  # noqa: TID251 - no two may be equal, ever
) -> str:
    """Return the identity of a data directory, 16 hex digits; make it if there is none. Blocks.

    Args:
        random_bytes: returns so many of them; a simulation has its own.

    Raises:
        DamagedIdentity: it is not as it was written.
        StorageError: it can be neither read nor written.
    """
    try:
        try:
            identity = read_number(files, IDENTITY_NAME)
        except FileNotFoundError:
            identity = random_bytes(8).hex()
            write_number(files, IDENTITY_NAME, identity)
    except OSError as error:
        raise StorageError(f"{IDENTITY_NAME}: {error.strerror or error}") from error
    if identity is None:
        raise DamagedIdentity
    return identity


def read_number(files: Files, name: str) -> str | None:
    """Read a file of one number: its 16 hex digits; None when it is not as it was written. Blocks.

    Raises:
        OSError: it is not there (FileNotFoundError), or cannot be read.
    """
    file = files.open(name)
    try:
        line = _LINE.fullmatch(file.read_at(0, 64))
    finally:
        file.close()
    return line[1].decode() if line is not None and int(line[2], 16) == crc32(line[1]) else None


def write_number(files: Files, name: str, digits: str) -> None:
    """Write a file of one number, 16 hex digits, durably. Blocks.

    Raises:
        OSError: what was there before is there still, or the whole of this.
    """
    replace_file(files, name, b"%b %08x\n" % (digits.encode(), crc32(digits.encode())))
    files.sync_directory("")
