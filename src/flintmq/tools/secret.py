"""Secrets of a command line, by a reference to where they are: everybody on the machine sees the command line itself.

Rules of this file: a secret is in no text, neither of an error nor of a log line.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from flintmq.errors import OptionError

log = logging.getLogger(__name__)

SECRET_BYTES_MAX = 4096


def secret_of(flag: str, reference: str, source: str = "flag") -> str:
    """Return the secret that ``env:NAME`` or ``file:/path`` stands for.

    Args:
        flag: what names it, for errors.
        source: where that was given, as in :class:`~flintmq.errors.OptionError`.

    Raises:
        OptionError: it stands for none.
    """
    kind, _, name = reference.partition(":")
    if kind == "env" and name:
        found = os.environ.get(name, "")
        if not found:
            raise OptionError(flag, reference, f"the environment variable {name} is not set", source)
        return found
    if kind != "file" or not name:
        raise OptionError(flag, "<hidden>", "env:NAME or file:/path: everybody sees a command line", source)
    try:
        with Path(name).open("rb") as file:
            data = file.read(SECRET_BYTES_MAX + 1).rstrip(b"\r\n")
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(flag, reference, f"it cannot be read: {error}", source) from None
    if not text or len(data) > SECRET_BYTES_MAX:
        raise OptionError(flag, reference, f"it must have 1 to {SECRET_BYTES_MAX} bytes", source)
    return text


class RenewedSecret:
    """A secret that is looked up again each time it is asked for, so that it can be renewed.

    Raises:
        OptionError: there is none.
    """

    def __init__(self, flag: str, reference: str) -> None:
        self._flag = flag
        self._reference = reference
        self._secret = secret_of(flag, reference)

    def now(self) -> str:
        """Return it; the last good one when it cannot be had now."""
        try:
            self._secret = secret_of(self._flag, self._reference)
        except OptionError as error:
            log.error("%s; the secret that was there is still used", error)
        return self._secret
