"""Partitions that are led here and may be read: it is known what is committed, and nobody else delivers.

Rules of this file: who is elected lets nobody read before the leader before it has ended for certain: it is dead, or
its time is over; what changes in a turn is told once for each topic.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from flintmq.clock import Clock
from flintmq.cluster.state import NodeRecord
from flintmq.net.isolation import for_each
from flintmq.nsqd.cluster.led import Led
from flintmq.nsqd.cluster.seen import name_of

log = logging.getLogger(__name__)

OnReady = Callable[[str, Sequence[int] | None], None]


class Readiness:
    """Lets readers in, and tells whoever has to know.

    Args:
        on_ready: called with a topic and the partitions of it that can be read here from now on; None: some of it
            can be read no longer.
        told: called when that was told.
        note: has something looked at again when the turn has ended.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        on_ready: OnReady,
        told: Callable[[], None],
        note: Callable[[Led], None],
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._on_ready = on_ready
        self._told = told
        self._note = note
        self._unready: dict[Led, None] = {}
        # topics of which it is to be told what is ready, and partitions: only these, and none is not any more
        self._changed: dict[str, list[int] | None] = {}

    def wait_for(self, led: Led) -> None:
        """Let readers in when that may be; something is led here from now on, or goes on."""
        self._unready[led] = None

    def forget(self, led: Led) -> None:
        """It is led here no longer."""
        self.end(led)
        self._unready.pop(led, None)

    def end(self, led: Led) -> None:
        """Let nobody read any more."""
        self._set(led, False)

    def look(self, led: Led) -> None:
        """Let readers in, if they may be."""
        if led not in self._unready:
            return
        is_known = led.leading.watermark is not None and not led.awaits_channels
        if is_known and not led.is_fenced and self._clock.monotonic_ns() >= led.deliver_from_ns:
            del self._unready[led]
            self._set(led, True)

    def is_dead(self, record: NodeRecord) -> None:
        """A process is dead: what it led is delivered by nobody else any more."""
        for led in self._unready:
            if led.previous == (record.node, record.incarnation):
                led.deliver_from_ns = 0
                self._note(led)

    def tick(self, now_ns: int) -> None:
        """Look at those whose time has come."""
        for led in list(self._unready):
            if now_ns >= led.deliver_from_ns:
                self.look(led)

    def _set(self, led: Led, is_ready: bool) -> None:
        if led.is_ready != is_ready:
            led.is_ready = is_ready
            if is_ready:
                log.info("CLUSTER: %s is ready, committed up to %s", name_of(led.leading), led.leading.watermark)
            if not self._changed:
                self._loop.call_soon(self._tell)
            topic, number = led.leading.topic, led.leading.number
            gained = self._changed.setdefault(topic, [])
            if not is_ready:
                self._changed[topic] = None
            elif gained is not None:
                gained.append(number)

    def _tell(self) -> None:
        """Tell of each topic once: hundreds of its partitions may have become ready in a turn."""
        changed, self._changed = self._changed, {}
        for_each(changed, lambda topic: self._on_ready(topic, changed[topic]), "telling what is ready of")
        self._told()
