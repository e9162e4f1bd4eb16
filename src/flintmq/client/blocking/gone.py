"""Close what belonged to a producer or consumer that nothing refers to any more.

Rules of this file: an object goes in any thread and between any two instructions, also while that thread holds a lock:
what is called then takes none, and waits for nothing. At the end of a program nothing is done.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable


def close_with(owner: object, close: Callable[[], object]) -> None:
    """Have ``close`` called when the owner is gone, so that a descriptor is closed and not destroyed.

    Python warns of one that is destroyed, at whatever line runs in that moment.

    Args:
        close: may be called when it was closed before; refers to the owner neither itself nor by what it refers to.
    """
    weakref.finalize(owner, close).atexit = False
