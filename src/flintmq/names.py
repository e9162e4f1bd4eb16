"""Names of topics and channels, their spelling on disk, and how a text shows many names.

Source: NSQ's TCP protocol (names), docs/operations.md (topic name on disk).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from flintmq.limits import NAME_SIZE_MAX

EPHEMERAL_SUFFIX = "#ephemeral"
_NAME = re.compile(r"[.a-zA-Z0-9_-]+(#ephemeral)?\Z")
_PLAIN_ON_DISK = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_-")


def is_valid_name(name: object) -> bool:
    """Whether ``name`` may name a topic or a channel: 1 to 64 bytes of ``[.a-zA-Z0-9_-]``, optional ``#ephemeral``."""
    return isinstance(name, str) and 0 < len(name) <= NAME_SIZE_MAX and _NAME.match(name) is not None


def why_invalid(what: str, name: object) -> str:
    """Return what is said of a name that cannot be that of a topic or a channel; ``what`` it should be the name of."""
    is_text = isinstance(name, str)
    form = "1 to 64 of [.a-zA-Z0-9_-], optionally #ephemeral" if is_text else f"it is text, not {type(name).__name__}"
    return f"{what} name {name!r} is not valid: {form}"


def listed(names: Iterable[str], most: int) -> str:
    """Return the first names of some, at most ``most``, for a text, and say how many more there are."""
    found = [*names]
    more = len(found) - most
    return ", ".join(found[:most]) + (f" and {more} more" if more > 0 else "")


def shortened(text: str, most: int) -> str:
    """Return at most so many characters of a text; an ellipsis stands for what is cut off."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def is_ephemeral(name: str) -> bool:
    """Whether the topic or channel is not kept on disk and goes with its last client."""
    return name.endswith(EPHEMERAL_SUFFIX)


def directory_name(topic: str) -> str:
    """Return the topic's directory: injective also on file systems that fold case, and never ``.`` or ``..``."""
    return "t-" + "".join(c if c in _PLAIN_ON_DISK else f"%{ord(c):02x}" for c in topic)


def topic_of_directory(directory: str) -> str:
    """Return the topic that has a directory; the inverse of :func:`directory_name`.

    Raises:
        ValueError: the directory was not named by :func:`directory_name`.
    """
    if not directory.startswith("t-"):
        raise ValueError(f"{directory!r} is not a topic directory")
    name = re.sub(r"%([0-9a-f]{2})", lambda m: chr(int(m.group(1), 16)), directory[2:])
    if directory_name(name) != directory or not is_valid_name(name):
        raise ValueError(f"{directory!r} is not a topic directory")
    return name
