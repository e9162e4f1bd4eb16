"""The failure that ends the demo early.

The rules of this file: as in :mod:`flintmq.errors`: what is wrong, and what the user can do about it.
"""

from __future__ import annotations

from flintmq.errors import FlintError


class DemoFailed(FlintError):
    """The demo cannot go on.

    Args:
        what: what is wrong.
        remedy: what to do about it.
    """

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what, remedy)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"
