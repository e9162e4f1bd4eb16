"""Parameters of tests that are large when they are used, and small in what every process keeps of the tests."""

from __future__ import annotations


def filled(body: bytes | int) -> bytes:
    """A body; a number is one of so many bytes, made when it is needed.

    A megabyte among the parameters would stay in the memory of each process for the whole run, and in the test's name.
    """
    return body if isinstance(body, bytes) else b"x" * body
