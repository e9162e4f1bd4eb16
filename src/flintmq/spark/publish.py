"""Publishes to one of several nsqds, several MPUBs ahead of their answers.

The rules of this file: an MPUB counts as stored when nsqd answered OK, not before; what has no answer when a connection
breaks is sent again, so it may be stored twice unless it says of which producer it is; no more than ``maxInFlight``
MPUBs wait for an answer; order holds as long as nothing fails, and for each producer in any case; to a topic that
was not there one MPUB goes, and the next when that is answered.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from struct import Struct

from flintmq.errors import FlintError, NsqdError, PublishRefused, RemoteProtocolError
from flintmq.spark.broker import FAILURES, TOPIC_NOT_EXIST, NsqdConnection, is_final
from flintmq.spark.options import SinkOptions
from flintmq.spark.placing import Place, Placing
from flintmq.spark.retry import Retries
from flintmq.wire.bodies import HEADED, TRACED, Front
from flintmq.wire.commands import COMMANDS

COUNT_FIELD_BYTES = 4
_SIZE_AND_COUNT = Struct(">II")
_SIZE = Struct(">I")
_HAS_SEVERAL = "E_BAD_PARTITION"
"""The answer to a publish that names no partition of a topic that has got some since it was looked for."""

# what nsqd says about a request that will never do, and the option that knows its limit
_LIMITS = {
    "E_BAD_MESSAGE": "a message is empty or longer than nsqd's --max-msg-size; maxMessageSize={0.max_message_size}",
    "E_BAD_BODY": "the MPUB is longer than nsqd's --max-body-size; batchBytes={0.batch_bytes}",
}
_HEADERS = "rows with headers make no topic: create it with extend=true, as by POST /topic/create?topic={}&extend=true"
_TRACES = "rows with a trace_id make no topic: flintmq topic create {} --partitions=N"
_NOT_MADE = "topics are not made by publishing there: flintmq topic create {} --partitions=N"
_FOR_WANT_OF = {HEADED: _HEADERS, TRACED: _TRACES}  # a topic, by what the rows have
_DELAY_LIMIT = "defer_ms is more than nsqd's --max-req-timeout"


class NotTaken(Exception):
    """A topic that its nsqd did not have took nothing yet, or nobody knows: where it is has to be looked for again.

    Args:
        error: why.
    """

    def __init__(self, error: FlintError) -> None:
        super().__init__(error)
        self.error = error


class Publisher:
    """Sends the MPUBs of one task; owns its connection.

    Args:
        addresses: nsqds in order of preference; the next one is taken when one fails.
        sleep: how to pause between attempts; seconds.
        moved: told after a failure, when nothing is on its way: it may :meth:`take` what is now led elsewhere.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        options: SinkOptions,
        sleep: Callable[[float], None] = time.sleep,
        moved: Callable[[Publisher], None] | None = None,
    ) -> None:
        self._moved = moved
        self._addresses = addresses
        self._options = options
        self._link = options.link
        self._retries = Retries(options.retries, sleep)
        self._pending: deque[tuple[Place, bytes]] = deque()
        self._unsent = 0  # how many of the last pending ones this connection has not been given
        self._turn = 0
        self._refused_by: set[str] = set()
        self._connection: NsqdConnection | None = None

    def publish(self, topic: str, count: int, messages: memoryview) -> None:
        """Send one MPUB; returns before it is answered, unless too many are unanswered.

        Args:
            messages: ``count`` times size and body.

        Raises:
            PublishRefused: nsqd refuses this or an earlier MPUB for good.
            FlintError: no nsqd took it as often as the retries allow.
        """
        self.publish_with(Place(topic, None), f"MPUB {topic}\n".encode(), count, messages)

    def publish_with(self, place: Place, line: bytes, count: int, messages: memoryview) -> None:
        """Send several messages behind a line of any command that takes them, as :meth:`publish`.

        Args:
            place: where they go, for ``moved``.
        """
        self._add(place, line, count, messages)
        self._pump(self._options.max_in_flight - 1)

    def publish_first(self, place: Place, line: bytes, count: int, messages: memoryview) -> None:
        """As :meth:`publish_with`, to a topic that this nsqd did not have: once, and it waits for the answer.

        A node of a cluster has the topic made and takes nothing: what goes to which log is known when it is there. So
        nothing else may be on its way, of which nsqd could take a later part.

        Raises:
            PublishRefused: nsqd refuses it for good, or makes no topics.
            NotTaken: where it goes has to be looked for again.
            FlintError: as :meth:`publish`.
        """
        self._pump(0)
        self._add(place, line, count, messages)
        try:
            self._send_unsent()
            self._take_answer()
        except FAILURES as error:
            self.close()
            code = error.code if isinstance(error, NsqdError) else ""
            is_refused = code == TOPIC_NOT_EXIST or is_final(error, self.address, self._link)
            if not is_refused or code == _HAS_SEVERAL:
                raise NotTaken(error) from error
            if isinstance(error, NsqdError):
                raise self._refused(error) from error
            raise
        finally:
            self._pending.clear()
            self._unsent = 0

    def _add(self, place: Place, line: bytes, count: int, messages: memoryview) -> None:
        head = line + _SIZE_AND_COUNT.pack(len(messages) + COUNT_FIELD_BYTES, count)
        self._pending.append((place, b"".join((head, messages))))
        self._unsent += 1

    def drain(self) -> None:
        """Wait until every MPUB is answered.

        Raises:
            FlintError: as :meth:`publish`.
        """
        self._pump(0)

    def finish(self) -> None:
        """Wait until every MPUB is answered, and close the connection.

        Raises:
            FlintError: as :meth:`publish`.
        """
        self._pump(0)
        self.close()

    @property
    def places(self) -> set[Place]:
        """The places of what has no answer."""
        return {place for place, _ in self._pending}

    def take(self, place: Place) -> list[bytes]:
        """Give up what goes to a place and has no answer; in its order."""
        taken = [data for other, data in self._pending if other == place]
        self._pending = deque(entry for entry in self._pending if entry[0] != place)
        self._unsent = len(self._pending)
        return taken

    def adopt(self, place: Place, commands: Sequence[bytes]) -> None:
        """Send what another one gave up; with the next call that sends."""
        self._pending.extend((place, data) for data in commands)
        self._unsent += len(commands)

    def close(self) -> None:
        """Close the connection; what is not answered may or may not be stored."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _pump(self, in_flight_max: int) -> None:
        """Send what is unsent and take answers until at most ``in_flight_max`` MPUBs have none."""
        while self._unsent or len(self._pending) > in_flight_max:
            try:
                self._send_unsent()
                while len(self._pending) > in_flight_max:
                    self._take_answer()
            except FAILURES as error:
                was_connected = self._connection is not None
                self.close()
                self._unsent = len(self._pending)
                is_missing = self._is_missing(error)
                if is_missing or is_final(error, self.address, self._link):
                    # what one nsqd has against this client, or lacks, another may not; what it has against a message it
                    # has
                    self._refused_by.add(self.address)
                    if (was_connected and not is_missing) or self._refused_by.issuperset(self._addresses):
                        if isinstance(error, NsqdError):
                            raise self._refused(error) from error
                        raise
                self._turn += 1
                self._retries.failed(error, f"publishing to nsqd {self.address}")
                if self._moved is not None:
                    self._moved(self)

    @property
    def address(self) -> str:
        """The nsqd that is published to."""
        return self._addresses[self._turn % len(self._addresses)]

    def _send_unsent(self) -> None:
        options = self._options
        if self._connection is None:
            self._connection = NsqdConnection(self.address, options.connect_timeout, options.pub_timeout, self._link)
        while self._unsent:
            # after a failure there may be more to send again than may be unanswered; a window's worth at most
            self._connection.send(self._pending[len(self._pending) - self._unsent][1])
            self._unsent -= 1

    def _take_answer(self) -> None:
        assert self._connection is not None
        answer = self._connection.receive()
        if not answer.startswith(b"OK"):  # MPUB_TRACE says more behind it
            raise RemoteProtocolError("E_INVALID", f"nsqd {self.address} answered a publish with {answer[:80]!r}")
        self._pending.popleft()
        self._retries.succeeded()

    def _is_missing(self, error: FlintError) -> bool:
        """Whether it is for want of a topic that nsqd does not make by itself, and that is on its way to no other."""
        if not isinstance(error, NsqdError) or error.code != TOPIC_NOT_EXIST or not self._pending:
            return False
        place, data = self._pending[0]  # answers come in order: this one is for the first
        return place.partition is None and _front(data) is HEADED

    def _refused(self, error: NsqdError) -> PublishRefused:
        hint = _LIMITS.get(error.code, "").format(self._options)
        if error.code == "E_INVALID" and "timeout" in error.detail and "out of range" in error.detail:
            hint = _DELAY_LIMIT
        if error.code == TOPIC_NOT_EXIST and self._pending:
            place, data = self._pending[0]
            hint = _FOR_WANT_OF.get(_front(data), _NOT_MADE).format(place.topic)
        detail = f"{error.detail} ({hint})" if hint else error.detail
        if self._pending:  # answers come in order: this one is for the first
            place, data = self._pending[0]
            partition = "" if place.partition is None else f", partition {place.partition}"
            detail += f", for topic {place.topic!r}{partition}"
            if error.code == "E_BAD_MESSAGE":
                detail += f": {_longest(data)}"
        return PublishRefused(error.code, detail, error.nsqd)


def _front(data: bytes) -> Front:
    """Return what stands in front of the bodies of a command."""
    return COMMANDS[data[: data.index(b" ")].decode()].body.front


def _longest(data: bytes) -> str:
    """Say which message of several is the longest, with what stands in front of its body."""
    at = data.index(b"\n") + 1
    count = _SIZE_AND_COUNT.unpack_from(data, at)[1]
    at += _SIZE_AND_COUNT.size
    sizes = []
    for _ in range(count):
        sizes.append(_SIZE.unpack_from(data, at)[0])
        at += _SIZE.size + sizes[-1]
    longest = max(sizes)
    return f"the longest of {count} messages sent at once has {longest} bytes, message {sizes.index(longest)} of them"


class Publishers:
    """The publishers of one task, one for each nsqd, who hand over to each other what is led elsewhere by now.

    Args:
        placing: asked where a partition is, after a failure.
    """

    def __init__(self, placing: Placing, options: SinkOptions, sleep: Callable[[float], None] = time.sleep) -> None:
        self._placing = placing
        self._options = options
        self._sleep = sleep
        self._by_address: dict[str, Publisher] = {}
        self._moved_to: dict[Place, str] = {}

    def publish(self, place: Place, address: str, line: bytes, count: int, messages: memoryview) -> None:
        """Send several messages to a place; as :meth:`Publisher.publish_with`.

        Args:
            address: where the place was when the task began.
        """
        self._at(self._moved_to.get(place, address)).publish_with(place, line, count, messages)

    def publish_first(self, place: Place, address: str, line: bytes, count: int, messages: memoryview) -> None:
        """Send messages to a topic that its nsqd did not have, and wait; as :meth:`Publisher.publish_first`."""
        self._at(address).publish_first(place, line, count, messages)

    def drain(self) -> None:
        """Wait until everything is answered; raises as :meth:`Publisher.publish`."""
        while any(publisher.places for publisher in self._by_address.values()):
            for publisher in list(self._by_address.values()):
                publisher.drain()

    def close(self) -> None:
        """Close all connections; what is not answered may or may not be stored."""
        for publisher in self._by_address.values():
            publisher.close()

    def _at(self, address: str) -> Publisher:
        publisher = self._by_address.get(address)
        if publisher is None:
            publisher = self._by_address[address] = Publisher([address], self._options, self._sleep, self._hand_over)
        return publisher

    def _hand_over(self, publisher: Publisher) -> None:
        for place in publisher.places:
            address = self._placing.find(place)
            if address and address != publisher.address:
                self._moved_to[place] = address
                self._at(address).adopt(place, publisher.take(place))
