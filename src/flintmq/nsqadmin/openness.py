"""Whether the daemons behind nsqadmin take changes from everybody who reaches them: then its roles keep nobody away.

Rules of this file: a daemon is asked, without any token, for a change that names no topic, which none can make: one
that answers what is missing would have made a whole one; one that asks for permissions says so first. Each is asked
again after ``AGAIN_S``; nobody waits for it.

Source: NSQ's HTTP API (MISSING_ARG_TOPIC); docs/http-auth.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from flintmq.names import listed
from flintmq.net.tasks import kept_up
from flintmq.nsqadmin.snapshots import Snapshots
from flintmq.nsqadmin.upstream import Upstream

AGAIN_S = 600.0
_LOOK_S = 30.0
_SHOWN_MAX = 3
_BAD_REQUEST = 400


class Openness:
    """Finds out."""

    def __init__(self, upstream: Upstream, snapshots: Snapshots) -> None:
        self._upstream = upstream
        self._snapshots = snapshots
        self._asked_at_s: dict[str, float] = {}
        self._open: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def warning(self) -> str:
        """A sentence for every page; empty: none that has answered is open."""
        if not self._open:
            return ""
        names = [f"{daemon} {address}" for address, daemon in sorted(self._open.items())]
        return (
            f"Whoever reaches {listed(names, _SHOWN_MAX)} over HTTP may change everything there, whatever "
            "nsqadmin allows: --http-auth-tokens-file of FlintMQ's daemons, or a firewall."
        )

    def start(self) -> None:
        """Begin to ask."""
        self._task = asyncio.ensure_future(kept_up(self._watch, "asking the daemons whether they are open"))

    async def close(self) -> None:
        """Ask no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            found = await self._snapshots.get()
            nodes = [address for address, node in found.nodes.items() if node.problem is None]
            await self.look(nodes, self._snapshots.lookupds)
            await asyncio.sleep(_LOOK_S)

    async def look(self, nsqds: Iterable[str], lookupds: Iterable[str]) -> None:
        """Ask those whose turn it is, and forget those that are gone."""
        here = {**dict.fromkeys(nsqds, "nsqd"), **dict.fromkeys(lookupds, "nsqlookupd")}
        for address in set(self._asked_at_s) - here.keys():
            del self._asked_at_s[address]
            self._open.pop(address, None)
        now_s = asyncio.get_running_loop().time()
        due = [each for each in here if now_s - self._asked_at_s.get(each, -AGAIN_S) >= AGAIN_S]
        await asyncio.gather(*(self._ask(here[address], address, now_s) for address in due))

    async def _ask(self, daemon: str, address: str, now_s: float) -> None:
        target = "/topic/pause" if daemon == "nsqd" else "/topic/tombstone"
        status = await self._upstream.status_of(address, "POST", target)
        if not status:
            return  # it does not answer; the next time
        self._asked_at_s[address] = now_s
        if status == _BAD_REQUEST:
            self._open[address] = daemon
        else:
            self._open.pop(address, None)


__all__ = ["AGAIN_S", "Openness"]
