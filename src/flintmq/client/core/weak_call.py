"""Call a method of an object that is not kept alive for it.

Rules of this file: nothing is written to stderr when the interpreter ends, which :class:`weakref.WeakMethod` does when
it goes in the same moment as its object.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, ParamSpec, TypeVar

Args = ParamSpec("Args")
Result = TypeVar("Result")


class WeakCall:
    """A bound method, as long as its object lives.

    Args:
        method: bound.
        gone: is called when its object is gone.
    """

    __slots__ = ("_function", "_object")

    def __init__(self, method: Callable[..., object], gone: Callable[[object], None] | None = None) -> None:
        assert isinstance(method, MethodType)
        self._function = method.__func__
        self._object = weakref.ref(method.__self__, gone)

    @property
    def target(self) -> Any:
        """The object whose method it is; None when that is gone."""
        return self._object()

    def __call__(self, *args: Any) -> bool:
        """Call it; False when its object is gone."""
        found = self._object()
        if found is None:
            return False
        self._function(found, *args)
        return True


def weakly(method: Callable[Args, Result], gone: Result) -> Callable[Args, Result]:
    """Return a bound method that does not keep its object alive, and returns ``gone`` when that is gone."""
    assert isinstance(method, MethodType)
    function, living = method.__func__, weakref.ref(method.__self__)

    def call(*args: Args.args, **named: Args.kwargs) -> Result:
        found = living()
        if found is None:
            return gone
        result: Result = function(found, *args, **named)
        return result

    return call
