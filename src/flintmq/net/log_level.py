"""``POST /loglevel/set?loglevel=n``: how much a running daemon logs, as the redesigned NSQ is told.

Its numbers are 0 for errors, 1 for warnings, 2 for what happens, 3 and 4 for details; NSQ's words are taken as well.
Only from where options may be changed: whoever may silence a daemon hides what is done to it.

Source: Youzan's nsqlookupd, Youzan's HTTP API.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from flintmq.net.http_messages import EMPTY, HttpError, Request, Response
from flintmq.net.http_router import Router
from flintmq.net.log import LEVELS, level_of
from flintmq.net.networks import Networks

log = logging.getLogger(__name__)

_NUMBERS = {"0": "error", "1": "warn", "2": "info", "3": "debug", "4": "debug"}


class LogLevelApi:
    """This route of one daemon.

    Args:
        networks: from where the level may be changed.
        change: puts a level word into force.
    """

    def __init__(self, networks: Networks, change: Callable[[str], None]) -> None:
        self._networks = networks
        self._change = change

    def add_routes(self, router: Router) -> None:
        """Route ``/loglevel/set``."""
        router.add("POST", "/loglevel/set", self._set, takes=("loglevel",), refuses=())

    def _set(self, request: Request) -> Response:
        if not self._networks.allows(request.remote_address):
            log.warning("%s may not change the log level", request.remote_address)
            raise HttpError(403, "FORBIDDEN")
        text = request.query.get("loglevel", "")
        if not text:
            raise HttpError(400, "MISSING_ARG_LEVEL")
        word = _NUMBERS.get(text, text.lower())
        if word not in LEVELS:
            allowed = f"0 (errors) to 4 (details), or one of {', '.join(LEVELS)}"
            raise HttpError(400, f"BAD_LEVEL_STRING: loglevel={text[:64]}, it must be {allowed}")
        self._change(word)
        log.info("%s set the log level to %s", request.remote_address, word)
        return EMPTY


def set_log_level(word: str) -> None:
    """Make this process log at another level from now on; other libraries speak from ``warn`` upwards."""
    level = level_of(word)
    logging.getLogger().setLevel(max(level, logging.WARNING))
    logging.getLogger("flintmq").setLevel(level)
