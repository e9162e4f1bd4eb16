"""The errors of nsqadmin that a visitor is told."""

from __future__ import annotations

from flintmq.errors import FlintError


class Refused(FlintError):
    """A request that is not carried out.

    Args:
        status: of HTTP.
        text: for the visitor: what, where, the limit, what to do. In the JSON API of NSQ one of its words.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)
        self.status = status
        self.text = text

    def __str__(self) -> str:
        return self.text


__all__ = ["Refused"]
