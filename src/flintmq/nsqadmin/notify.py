"""Notifications: a POST to ``--notification-http-endpoint`` for each change, as NSQ's nsqadmin sends them.

Rules of this file: nobody waits for it, one is sent after the other, at most ``WAITING_MAX`` wait, and what does not
arrive is said in the log, with what it was.

Source: NSQ's options (``--notification-http-endpoint``).
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from flintmq.net.tasks import kept_up
from flintmq.nsqadmin.upstream import NotAnswered, Upstream

WAITING_MAX = 1000

_log = logging.getLogger(__name__)


class Notification(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One change.

    Attributes:
        timestamp: seconds since 1970.
        user: of ``Authorization: Basic``, or as the visitor is known; empty where that is what anybody can put into
            a header.
        remote_ip: ``ip:port`` of the connection.
        via: name of the host that nsqadmin runs on.
    """

    action: str
    topic: str | None = None
    channel: str = ""
    node: str = ""
    timestamp: int
    user: str = ""
    remote_ip: str
    user_agent: str | None = None
    url: str
    via: str


class Notifier:
    """Sends.

    Args:
        endpoint: URL; empty: nobody is told.
    """

    def __init__(self, endpoint: str, upstream: Upstream) -> None:
        self._endpoint = endpoint
        self._upstream = upstream
        self._waiting: asyncio.Queue[Notification] = asyncio.Queue(WAITING_MAX)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Send what comes from now on."""
        if self._endpoint:
            self._task = asyncio.ensure_future(kept_up(self._send_all, "notifying of changes"))

    def tell(self, notification: Notification) -> None:
        """Have one sent."""
        if not self._endpoint:
            return
        try:
            self._waiting.put_nowait(notification)
        except asyncio.QueueFull:
            _log.error("%d notifications wait; not sent: %s", WAITING_MAX, _shown(notification))

    async def _send_all(self) -> None:
        while True:
            notification = await self._waiting.get()
            try:
                answer = await self._upstream.post(self._endpoint, msgspec.json.encode(notification))
            except NotAnswered as error:
                _log.error("notification not sent, %s: %s", error.missing.text, _shown(notification))
                continue
            if not 200 <= answer.status < 300:
                _log.error("notification answered with status %d: %s", answer.status, _shown(notification))

    async def close(self) -> None:
        """Send nothing more; what waits is said in the log."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        while not self._waiting.empty():
            _log.error("notification not sent, nsqadmin ends: %s", _shown(self._waiting.get_nowait()))


def _shown(notification: Notification) -> str:
    return msgspec.json.encode(notification).decode()


__all__ = ["Notification", "Notifier"]
