"""Doing one thing to many connections so that what goes wrong with one is not felt by the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

Member = TypeVar("Member")

_log = logging.getLogger(__name__)


def for_each(members: Iterable[Member], do: Callable[[Member], object], what: str) -> None:
    """Call ``do`` with every member; an exception is logged with the member, and the others have their turn.

    Args:
        what: is being done, for the log: "closing", for instance.
    """
    for member in list(members):
        try:
            do(member)
        except Exception as error:  # noqa: BLE001 - logged; it is one member's and not to be the others'
            _log.error("%s %s failed: %r", what, member, error, exc_info=error)
