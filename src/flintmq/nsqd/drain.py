"""Draining and exiting: an nsqd that takes no more messages, lets consumers finish what it has, and ends.

::

    POST /drain, SIGUSR1 --> publishes are refused --> every channel is empty, or the time is up --> exit code 0
                             DELETE /drain: as before

A publisher is told E_PUB_FAILED (E_MPUB_FAILED, E_DPUB_FAILED), which every client takes for a reason to go to another
nsqd; on a topic with partitions E_FAILED_ON_NOT_WRITABLE, which says the same of one partition; over HTTP 503 DRAINING.
Nothing of a refused publish is stored.

nsqlookupd keeps listing the node: without that, a consumer that starts now would not find it and nobody would empty it.
An UNREGISTER or a tombstone hides a node from those who publish and from those who consume alike. So ours is told in a
new IDENTIFY that the node drains, and leaves it out of the answers to who asks where to publish (``access=w``); NSQ's
ignores the word, and NSQ's producers do not ask.

Rules of this file: what was accepted before counts as left; messages that wait for a consumer who never comes stay on
disk and are served by the next start; /ping goes on saying OK, because a liveness probe must not end the process first.

Source: nsqio/nsq#1302; Youzan's nsqlookupd (``access``), Youzan's TCP protocol (E_FAILED_ON_NOT_WRITABLE).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from flintmq.broker.topic import Topic
from flintmq.env import Env
from flintmq.errors import Exiting, FlintError, RemoteProtocolError
from flintmq.net.tasks import kept_up
from flintmq.nsqd.engine import Engine
from flintmq.nsqd.in_turns import in_turns

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.1
TOPIC_ROWS_MAX = 100


class Draining(FlintError):
    """This nsqd takes no messages, because it is about to end; another one does."""

    def __str__(self) -> str:
        return "draining"


class Drain:
    """Whether an nsqd drains, and how far it is.

    Args:
        timeout_ns: how long it may take, 0 for as long as it takes; what a request says goes before.
        changed: called when it begins, and when it is called off.

    Attributes:
        is_on: publishes are refused.
        is_exiting: so is everything else, because this nsqd ends now.
        finished: called once, when nothing is left or the time is up.
    """

    def __init__(self, env: Env, engine: Engine, timeout_ns: int, changed: Callable[[], None]) -> None:
        self.is_on = False
        self.is_exiting = False
        self.finished: Callable[[], None] = lambda: None
        self._env = env
        self._engine = engine
        self._loop = engine.loop
        self._timeout_ns = timeout_ns
        self._changed = changed
        self._since_ns = 0
        self._until = 0.0
        self._task: asyncio.Task[None] | None = None
        self._blocker = ""  # a topic that was not empty

    def begin(self, timeout_ns: int | None = None) -> None:
        """Refuse publishes from now on; when it drains already, only the time it may take begins anew.

        Args:
            timeout_ns: instead of the option; 0 for as long as it takes.
        """
        timeout_ns = self._timeout_ns if timeout_ns is None else timeout_ns
        self._until = self._loop.time() + timeout_ns / 1e9 if timeout_ns else float("inf")
        if self.is_on:
            return
        self.is_on = True
        self._since_ns = self._env.clock.wall_ns()
        limit = f"for at most {timeout_ns / 1e9:g} s" if timeout_ns else "for as long as it takes"
        log.info("draining %s: no more messages are taken, this nsqd ends when its channels are empty", limit)
        self._changed()
        self._task = self._loop.create_task(kept_up(self._run, "draining", pause_s=LOOK_INTERVAL_S))

    def end(self) -> None:
        """Take messages again."""
        if self.is_on:
            self.is_on = False
            self._stop()
            log.info("draining was called off: messages are taken again")
            self._changed()

    def close(self) -> None:
        """Refuse everything that is new from now on, and watch no longer."""
        self.is_exiting = True
        self._stop()

    def check_exiting(self) -> None:
        """Refuse what is new while this nsqd ends.

        Raises:
            Exiting: it does.
        """
        if self.is_exiting:
            raise Exiting

    def _stop(self) -> None:
        """Watch no longer."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def check(self, command: str, name: str, topics: Mapping[str, Topic]) -> None:
        """Refuse a publish while draining.

        Raises:
            Draining: this nsqd drains.
            RemoteProtocolError: the same, for a topic with partitions.
        """
        if not self.is_on:
            return
        topic = topics.get(name)
        if topic is not None and topic.meta.is_partitioned:
            raise RemoteProtocolError("E_FAILED_ON_NOT_WRITABLE", f"{command} topic {name}: draining", fatal=False)
        raise Draining

    async def _run(self) -> None:
        await self._engine.settle()  # what was taken before is stored, and counts
        while not self._is_empty():
            left_s = self._until - self._loop.time()
            if left_s <= 0:
                count = sum(map(left_in, self._engine.broker.topics.values()))
                log.warning("draining: the time is up; %d messages are left, for the next start", count)
                break
            await asyncio.sleep(min(LOOK_INTERVAL_S, left_s))
        else:
            log.info("drained: every channel is empty")
        self.finished()

    def _is_empty(self) -> bool:
        topics = self._engine.broker.topics
        blocker = topics.get(self._blocker)
        if blocker is not None and _is_busy(blocker):
            return False  # most of the time nothing else has to be looked at
        self._blocker = next((name for name, topic in topics.items() if _is_busy(topic)), "")
        return not self._blocker

    async def state(self) -> dict[str, Any]:
        """Return what is left, as ``GET /drain`` has it; others get their turn meanwhile."""
        if not self.is_on:
            return {"draining": False}
        topics = self._engine.broker.topics
        rows: list[dict[str, Any]] = []
        message_count = topic_count = 0
        async for name in in_turns(sorted(topics)):
            topic = topics.get(name)
            if topic is None or not _is_busy(topic):
                continue
            topic_count += 1
            message_count += left_in(topic)
            if len(rows) < TOPIC_ROWS_MAX:
                rows.append(_row(topic))
        left_s = self._until - self._loop.time()
        return {
            "draining": self.is_on,
            "since": self._since_ns // 1_000_000_000,
            "seconds_left": None if left_s == float("inf") else round(max(0.0, left_s), 3),
            "message_count": message_count,
            "topic_count": topic_count,
            "topics": rows,
        }


def left_in(topic: Topic) -> int:
    """Messages that some consumer has not finished; without those of an ephemeral topic that nobody listens to."""
    channels = [part for name in topic.channel_names for part in topic.channels(name)]
    count = sum(part.depth + part.in_flight_count + part.deferred_count for part in channels)
    return count if topic.ephemeral and not channels else count + topic.depth


def _is_busy(topic: Topic) -> bool:
    return topic.is_starting or left_in(topic) > 0


def _row(topic: Topic) -> dict[str, Any]:
    channels = []
    for name, is_paused in topic.channel_names.items():
        parts = topic.channels(name)
        row = {
            "channel_name": name,
            "depth": sum(part.depth for part in parts),
            "in_flight_count": sum(part.in_flight_count for part in parts),
            "deferred_count": sum(part.deferred_count for part in parts),
            "client_count": max(len(part.subscriptions) for part in parts),
            "paused": is_paused,
        }
        if row["depth"] or row["in_flight_count"] or row["deferred_count"]:
            channels.append(row)
    return {"topic_name": topic.name, "depth": topic.depth, "paused": topic.paused, "channels": channels}


class DrainSignal:
    """SIGUSR1, and SIGTERM where it means the same, which may come before there is an nsqd.

    Args:
        stop: sets the end of the process.
        drains_on_stop: the first SIGTERM drains, only the second ends.
    """

    def __init__(self, stop: Callable[[], None], drains_on_stop: bool) -> None:
        self._stop = stop
        self._drains_on_stop = drains_on_stop
        self._is_asked = False
        self._drain: Drain | None = None

    def attach(self, drain: Drain) -> None:
        """There is an nsqd now."""
        self._drain = drain
        if self._is_asked:
            drain.begin()

    def begin(self) -> None:
        """Drain."""
        self._is_asked = True
        if self._drain is not None:
            self._drain.begin()

    def terminate(self) -> None:
        """End, or drain first."""
        is_draining = self._is_asked if self._drain is None else self._drain.is_on
        if self._drains_on_stop and not is_draining:
            self.begin()
        else:
            self._stop()
