"""Producers and consumers in a child made by ``os.fork()``.

A child has its parent's sockets and none of its threads; its copy of a lock may be held by a thread that is not there.
Two processes that write to one connection would corrupt it, so the child lets go of everything before any other code
of it runs.

Rules of this file: who is told may drop others, a producer its connections say. All are kept alive until each of them
has been told, so that a socket is closed and not destroyed, which Python warns of.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import count
from typing import Protocol

from flintmq.client.core.weak_call import WeakCall


class Forkable(Protocol):
    """Is told in the child."""

    def after_fork(self) -> None:
        """Let go of locks, threads and sockets that are the parent's, without a word to any peer."""


_living: dict[int, WeakCall] = {}
_numbers = count()


def call_in_child(method: Callable[[], object]) -> None:
    """Call a bound method in children, as long as its object lives."""
    number = next(_numbers)

    def forget(_: object, living: dict[int, WeakCall] = _living) -> None:  # also when this module is gone already
        living.pop(number, None)

    _living[number] = WeakCall(method, forget)


def watch(thing: Forkable) -> None:
    """Call ``thing.after_fork()`` in children, as long as it lives."""
    call_in_child(thing.after_fork)


def _in_child() -> None:
    kept = [(call, call.target) for call in [*_living.values()]]
    for call, _ in kept:
        call()


os.register_at_fork(after_in_child=_in_child)
