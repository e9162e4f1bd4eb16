"""Exceptions with which the parsers of commands stop; none of them leaves :mod:`flintmq.wire`."""

from __future__ import annotations


class Incomplete(Exception):
    """More bytes are needed; args are how many in all, counted from the start of the command, and what is missing.

    What is missing is code and detail of the error for a client that ends its stream here; absent for half a line.
    """


class Refused(Exception):
    """A violation; args are code and detail, and what only the log is told, if anything."""
