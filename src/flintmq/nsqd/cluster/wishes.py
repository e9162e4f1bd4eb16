"""Topics that clients of this node publish or subscribe to, and that are not there: the cluster is asked for them.

::

    PUB, SUB, /topic/create --> Wishes.ask --> wanted/<topic> in the store --> the master makes the topic
                                    |                                                    |
                                  Ended  <-- it can be used here, or was refused <-- the view

Rules of this file: one question for a topic, however many connections wait for it; a question has a deadline, and its
key goes with this node; what is refused is told to everybody who waits, and is asked anew by the next.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from flintmq.broker.partition import Ended
from flintmq.cluster.keys import Keys
from flintmq.cluster.state import WantedTopic, encode
from flintmq.cluster.store import Fate, KeyValue, Store, StoreError, swap
from flintmq.cluster.view import View
from flintmq.env import Env
from flintmq.errors import FlintError

log = logging.getLogger(__name__)

MADE_WITHIN_S = 5.0
"""Until whoever waits for a new topic is told that it is not there yet."""
WISHES_MAX = 4096
"""Topics that are asked for at the same time."""
AGAIN_S = 0.2
"""After the store could not be asked."""
_ID_BITS = 62


class TopicNotMade(FlintError):
    """The cluster has no topic of that name, and did not make one: nothing of it was stored.

    Args:
        topic: which.
        reason: why not, and what to do.
    """

    def __init__(self, topic: str, reason: str) -> None:
        super().__init__(topic, reason)
        self.topic = topic
        self.reason = reason

    def __str__(self) -> str:
        return f"topic {self.topic} is not there yet: {self.reason}"


class Wishes:
    """Asks the master for topics.

    Args:
        lease: returns the id of the lease that this node is registered with, as soon as it has one.
        is_usable: whether a topic can be published and subscribed to through this node.

    Attributes:
        problem: why nothing can be asked for any more; empty: it can.
    """

    def __init__(
        self,
        env: Env,
        node: str,
        keys: Keys,
        view: View,
        store: Store,
        lease: Callable[[], Awaitable[int]],
        is_usable: Callable[[str], bool],
    ) -> None:
        self._env = env
        self._node = node
        self._keys = keys
        self._view = view
        self._store = store
        self._lease = lease
        self._is_usable = is_usable
        self.problem = ""
        self._waiting: dict[str, Ended] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed: list[asyncio.Future[None]] = []

    def ask(self, topic: str, is_extended: bool = False, copies: int = 0) -> Ended:
        """Ask for a topic; what is returned ends when it can be used, or with :class:`TopicNotMade`.

        Args:
            is_extended: its messages may carry headers; one that is there is taken as it is.
            copies: of each partition; 0: as always.
        """
        found = self._waiting.get(topic)
        if found is not None:
            return found
        ended = Ended()
        if self.problem:
            ended.end(TopicNotMade(topic, self.problem))
            return ended
        if len(self._waiting) >= WISHES_MAX:
            ended.end(TopicNotMade(topic, f"{WISHES_MAX} others are being made; ask again"))
            return ended
        self._waiting[topic] = ended
        task = asyncio.get_running_loop().create_task(self._get(topic, is_extended, copies, ended))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return ended

    def look(self) -> None:
        """Something has changed that topics may have waited for."""
        if self._changed:
            changed, self._changed = self._changed, []
            for future in changed:
                if not future.done():
                    future.set_result(None)

    async def close(self) -> None:
        """Ask no more; who waits is told."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _get(self, topic: str, is_extended: bool, copies: int, ended: Ended) -> None:
        error: BaseException | None = TopicNotMade(topic, "this node ends")
        try:
            async with asyncio.timeout(MADE_WITHIN_S):
                await self._ask(topic, is_extended, copies)
            error = None
        except TimeoutError:
            where = "nsqlookupd made none" if topic not in self._view.topics else "its partitions are not ready"
            error = TopicNotMade(topic, f"{where} within {MADE_WITHIN_S:g} s; nothing was stored, try again")
        except TopicNotMade as refused:
            error = refused
        except Exception as defect:
            log.error("CLUSTER: asking for topic %s: %r", topic, defect, exc_info=defect)
            error = TopicNotMade(topic, f"internal error {defect!r}")
        finally:
            del self._waiting[topic]
            if isinstance(error, TopicNotMade):
                log.warning("CLUSTER: %s", error)
            ended.end(error)

    async def _ask(self, topic: str, is_extended: bool, copies: int) -> None:
        key = self._keys.wanted(topic)
        stale = self._view.pairs.get(key)  # what was refused to others before is asked anew
        asked_revision = 0
        while not self._is_usable(topic):
            pair, wish = self._view.pairs.get(key), self._view.wanted.get(topic)
            is_refused = wish is not None and bool(wish.refusal)
            if wish is not None and is_refused and pair != stale:
                if wish.node == self._node:
                    await self._withdraw(key, pair)
                raise TopicNotMade(topic, wish.refusal)
            is_open = pair is not None and not is_refused
            if topic in self._view.topics or is_open or self._view.revision < asked_revision:
                await self._change()
            else:
                asked_revision = await self._send(key, pair, topic, is_extended, copies)

    async def _send(self, key: str, before: KeyValue | None, topic: str, is_extended: bool, copies: int) -> int:
        """Put the question into the store; return from which revision on the view has it, or somebody else's."""
        wish = WantedTopic(self._env.random.getrandbits(_ID_BITS) + 1, self._node, is_extended, copies)
        try:
            swapped = await swap(self._store, key, before, encode(wish), await self._lease())
        except StoreError as error:
            log.warning("CLUSTER: topic %s cannot be asked for: %s", topic, error)
            await asyncio.sleep(AGAIN_S)
            return 0
        if swapped.fate is Fate.APPLIED:
            log.info("CLUSTER: topic %s is asked for", topic)
        return swapped.revision

    async def _withdraw(self, key: str, pair: KeyValue | None) -> None:
        with contextlib.suppress(StoreError):  # it goes with the lease of this node, or the master takes it away
            await swap(self._store, key, pair, None)

    async def _change(self) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changed.append(future)
        await future
