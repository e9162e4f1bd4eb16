"""Tells who pickles or copies what is tied to a connection what to do instead."""

from __future__ import annotations

from typing import ClassVar, NoReturn


class OfOneProcess:
    """Says what to do instead where one is pickled or copied, by multiprocessing or Spark say."""

    __slots__ = ()
    _instead: ClassVar[str]

    def __getstate__(self) -> NoReturn:  # not __reduce__: a subclass that says what its state is has one
        raise TypeError(f"a {type(self).__name__} cannot be pickled or copied: {self._instead}")


class Client(OfOneProcess):
    """A producer or a consumer."""

    __slots__ = ()
    _instead = "its connections belong to this process; make one where it is used"
