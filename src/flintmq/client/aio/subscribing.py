"""Keeps a consumer subscribed: on every nsqd that has the topic, or on every partition of it.

Rules of this file:

- A partition has one connection: that to the nsqd which leads it as far as is known. When another one leads it, the
  former connection is given up.
- In order means ``SUB_ORDER``, or ``SUB_ORDERED`` where nsqd is Youzan's (:class:`OrderCommands`); an nsqd that answers
  E_INVALID to the one is asked again as the other, on a new connection, and that is remembered.
- nsqd is told that headers are understood where the nsqlookupd say that the topic has them: it refuses anything else.
- Where the channel begins is said with ``SUB_ADVANCED``, to each nsqd or partition once.
- What is said of the topic ends the consumer (``TOPIC_CODES``), what is said of an nsqd only when all say so.

Source: seed 000 "Nsqd Connection Handling" and "Ordered Message Consumption", reference/youzan.md 1.3 and 1.8.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from flintmq.client.aio.connection import Connection, ConnectionOwner
from flintmq.client.aio.following import Following
from flintmq.client.aio.links import Links
from flintmq.client.aio.lookup import Lookup
from flintmq.client.core.discovery import PollTimes
from flintmq.client.core.flow import Flow
from flintmq.client.core.publish import MOVED_CODES
from flintmq.client.core.routing import Target
from flintmq.client.core.start import NS_PER_S, Beginning
from flintmq.client.core.topology import Topology
from flintmq.client.options import ConnectionOptions
from flintmq.client.security import Refusals
from flintmq.client.subscription import DOUBT_S, EXTEND_CODES, TOPIC_CODES, OrderCommands
from flintmq.env import Env
from flintmq.errors import DiscoveryError, FlintError, NsqdError

log = logging.getLogger("flintmq.client")


class Subscriptions:
    """The subscriptions of one consumer.

    Args:
        owner: is told what happens on the connections.
        flow: is told of each that is subscribed.
        is_ordered: subscribe in order.
        desired_tag: empty: none.
        wants_headers: also where nobody says that the topic has some.
        beginning: where the channel begins; None: where it is.
        tell: is told what went wrong.
        fail: is told why the consumer must end.
    """

    def __init__(
        self,
        topic: str,
        channel: str,
        owner: ConnectionOwner,
        flow: Flow[Connection],
        options: ConnectionOptions,
        env: Env,
        *,
        is_ordered: bool,
        desired_tag: str,
        wants_headers: bool,
        beginning: Beginning | None,
        tell: Callable[[FlintError], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._topic = topic
        self._channel = channel
        self._owner = owner
        self._flow = flow
        self._options = options
        self._env = env
        self._is_ordered = is_ordered
        self._desired_tag = desired_tag
        self._wants_headers = wants_headers
        self._beginning = beginning
        self._tell = tell
        self._fail = fail
        self._links: Links[Target] = Links(self._connect, self._note_attempt, fail, env)
        self._following: Following | None = None
        self._refusals = Refusals()
        self._order_commands = OrderCommands()
        self._doubted_since: float | None = None

    # --- life ---

    def keep(self, nsqd: tuple[str, ...]) -> None:
        """Want these nsqd, and no others."""
        self._links.keep(Target(address) for address in nsqd)

    def follow(self, lookup: Lookup, times: PollTimes) -> Following:
        """Want what the nsqlookupd list."""
        self._following = Following(lookup, self._topic, times, self._env, self._found)
        return self._following

    async def all_tried(self) -> None:
        """Wait until everything that is wanted was tried once."""
        await self._links.all_tried()

    def stop(self) -> None:
        """Connect no more; connections that are there stay."""
        self._links.stop()

    async def close(self) -> None:
        """Stop and wait until nothing is being connected any more."""
        await self._links.close()

    def note_lost(self) -> None:
        """Note that a connection was lost: its nsqd may be somewhere else soon."""
        if self._following is not None:
            self._following.hurry()

    # --- connecting ---

    async def _connect(self, target: Target) -> Connection:
        connection = await Connection.open(
            target.address,
            self._owner,
            self._options,
            self._env,
            extended=self._is_extended,
            desired_tag=self._desired_tag if self._is_extended else "",
        )
        try:
            await self._subscribe(connection, target)
        except BaseException as error:
            connection.abort("not subscribed")
            is_other = self._is_ordered and self._order_commands.may_know_other(target.address, error)
            if is_other or self._has_no_topic(error, target):
                return await self._connect(target)
            raise
        if self._following is not None and not self._following.leads(target):
            connection.abort("another nsqd leads the partition by now")
        if not connection.is_lost:
            log.info("subscribed to %s/%s on %s", self._topic, self._channel, target)
            self._flow.join(connection)
        return connection

    async def _subscribe(self, connection: Connection, target: Target) -> None:
        if self._beginning is not None:
            named, start = self._beginning.words(*target, self._env.clock.wall_ns() / NS_PER_S)
            await connection.subscribe_from(self._topic, self._channel, target.partition, named, start)
            self._beginning.note(*target)
            return
        if not self._is_ordered:
            await connection.subscribe(self._topic, self._channel, target.partition)
            return
        assert target.partition is not None
        command = self._order_commands.name(target.address, connection.features.version)
        await connection.subscribe_in_order(self._topic, self._channel, target.partition, command)

    def _has_no_topic(self, error: BaseException, target: Target) -> bool:
        """Whether an nsqd that does not have the topic yet is to make it: then there is one place to begin only."""
        is_missing = isinstance(error, NsqdError) and error.code == "E_TOPIC_NOT_EXIST"
        return is_missing and target.partition is None and self._beginning is not None and self._beginning.note(*target)

    @property
    def _is_extended(self) -> bool:
        """Whether nsqd is told that headers are understood: it refuses that on a topic without."""
        wants = self._wants_headers or (self._following is None and bool(self._desired_tag))
        return wants or (self._following is not None and self._following.topology.is_extended)

    def _note_attempt(self, target: Target, error: FlintError | None) -> None:
        self._refusals.note(str(target), error, self._wanted)
        if error is None:
            self._doubted_since = None
            return
        log.warning("cannot consume from nsqd %s: %s", target, error)
        self._tell(error)
        code = error.code if isinstance(error, NsqdError) else ""
        if self._following is not None and target.partition is not None:
            if code in MOVED_CODES:
                self._following.distrust(target)
            else:
                self._following.hurry()
        if code in TOPIC_CODES or (code in EXTEND_CODES and not self._is_in_doubt()):
            self._fail(error)
        refusal = self._refusals.of_all(self._wanted)
        if refusal is not None and not self._flow.connections and code not in EXTEND_CODES:
            self._fail(refusal)

    @property
    def _wanted(self) -> list[str]:
        return [str(target) for target in self._links.listed]

    def _is_in_doubt(self) -> bool:
        """Whether the next poll of the nsqlookupd may still explain what nsqd says about headers."""
        if self._following is None:
            return False
        if self._doubted_since is None:
            self._doubted_since = asyncio.get_running_loop().time()
        return asyncio.get_running_loop().time() - self._doubted_since < DOUBT_S

    def _found(self, topology: Topology) -> None:
        """Follow the topic to where it is."""
        if self._is_ordered and topology.nodes and not topology.is_partitioned:
            detail = f"topic {self._topic} has no partitions, so it cannot be consumed in order: drop ordered=True"
            self._fail(DiscoveryError(detail))
            return
        targets = [Target(address, partition) for partition, address in topology.leaders.items()]
        if not self._is_ordered:
            targets += [Target(address) for address in topology.plain]
        self._links.keep(targets)
        for connection in self._flow.connections:
            if connection.partition is None:
                continue
            leader = topology.leaders.get(connection.partition, connection.address)
            if leader != connection.address:
                connection.abort(f"partition {connection.partition} is led by {leader} now")
