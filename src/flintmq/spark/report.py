"""Tells an nsqadmin about the queries of a driver: how far each is, and that one has ended.

The rules of this file: it imports no pyspark; one thread sends, and whoever reports never waits for it; only the
latest state of each query is kept, so a slow nsqadmin costs nothing; what fails is logged once until it works again,
and never touches a query.

Source: docs/decisions/0030.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from flintmq.client.blocking.http import ask
from flintmq.client.options import ConnectionOptions
from flintmq.errors import OptionError
from flintmq.spark.errors import SOURCE
from flintmq.spark.link import secret_of
from flintmq.spark.offsets import PartitionKey

EVERY_S = 15.0
TIMEOUT_S = 5.0
CLOSE_S = 5.0
LOGS_MAX = 1024
ERROR_MAX = 1000
NAME_MAX = 200
_PATH = "/api/v2/queries"

log = logging.getLogger("flintmq.spark")


@dataclass(slots=True)
class QueryState:
    """A query as it is reported.

    Attributes:
        state: ``running``, ``stopped`` or ``failed``.
        batch_at_s: when its last micro-batch ended, on the clock of ``time.monotonic``.
        logs: the next message to read, and the age of the oldest unread one at ``batch_at_s`` in seconds.
    """

    id: str
    name: str = ""
    state: str = "running"
    channel: str = ""
    batch: int | None = None
    batch_at_s: float | None = None
    row_count: int = 0
    error: str = ""
    logs: dict[PartitionKey, tuple[int, float | None]] = field(default_factory=dict)

    def to_json(self, now_s: float) -> dict[str, Any]:
        """Return it as nsqadmin takes it."""
        age_s = None if self.batch_at_s is None else max(0.0, now_s - self.batch_at_s)
        rows = [
            {
                "topic": key.topic,
                "partition": key.partition,
                "log_id": key.log_id,
                "read": read,
                "seconds": None if seconds is None else seconds + (age_s or 0.0),
            }
            for key, (read, seconds) in list(self.logs.items())[:LOGS_MAX]
        ]
        return {
            "id": self.id[:NAME_MAX], "name": self.name[:NAME_MAX], "state": self.state, "channel": self.channel,
            "batch": self.batch, "batch_age_s": age_s, "row_count": self.row_count, "error": self.error[:ERROR_MAX],
            "logs": rows,
        }  # fmt: skip


class Reporter:
    """Sends what it is given, from a thread of its own.

    Args:
        url: of nsqadmin, such as ``http://127.0.0.1:4171``, with its base path.
        token: where the token for it is: ``env:NAME`` or ``file:/path``; empty: none.
        ca_file: authorities to trust for ``https``; empty: those of the system.
        states: returns all queries as they are now.

    Raises:
        OptionError: the URL is none, or the token is not to be had.
    """

    def __init__(self, url: str, token: str, ca_file: str, states: Callable[[], list[QueryState]]) -> None:
        self._url = _checked(url) + _PATH
        secret = secret_of("nsqadmin_token", token) if token else None
        self._options = ConnectionOptions(lookup_token=secret, tls_ca_file=ca_file or None)
        self._states = states
        self._wake = threading.Condition()
        self._version = 0
        self._sent = 0
        self._is_closed = False
        self._failure = ""
        self._thread = threading.Thread(target=self._run, name="flintmq-report", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Send soon: something has changed."""
        with self._wake:
            self._version += 1
            self._wake.notify_all()

    def close(self) -> None:
        """Send what was not sent yet, for at most 5 s, and end."""
        with self._wake:
            self._is_closed = True
            self._wake.notify_all()
        self._thread.join(CLOSE_S + 1)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._is_closed or self._version > self._sent, EVERY_S)
                is_last, version, is_new = self._is_closed, self._version, self._version > self._sent
            if is_new or not is_last:
                self._send()
                self._sent = version
            if is_last:
                return

    def _send(self) -> None:
        states = self._states()
        if not states:
            return
        now_s = time.monotonic()
        body = json.dumps({"queries": [each.to_json(now_s) for each in states]}).encode()
        try:
            status, answer = ask("POST", self._url, TIMEOUT_S, self._options, time.monotonic, body)
            failure = "" if status == 200 else f"{status} {answer[:200].decode(errors='replace')}"
        except OSError as error:
            failure = str(error)
        if failure and failure != self._failure:
            log.warning("nsqadmin is not told about the queries of this driver: %s", failure)
        elif self._failure and not failure:
            log.info("nsqadmin is told about the queries of this driver again")
        self._failure = failure


def _checked(url: str) -> str:
    try:
        split = urlsplit(url)
        is_good = split.scheme in ("http", "https") and bool(split.hostname) and split.port != 0 and not split.query
    except ValueError:
        is_good = False
    if not is_good:
        raise OptionError("nsqadmin", url, "a URL such as http://127.0.0.1:4171", SOURCE)
    return url.rstrip("/")


__all__ = ["QueryState", "Reporter"]
