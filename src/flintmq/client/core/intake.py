"""Calls to a producer: checked, and made a :class:`Publish`.

Rules of this file:

- Nothing is sent and nothing waits here; what is wrong is raised before anything is sent.
- The context of a span goes in headers where the call passes some or the topic is known to have them. While nothing is
  known of a topic, the publish takes the context along, and it is decided when it is sent (:class:`.publish.Context`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from flintmq.client.core.once import NOT_TRACED, Writers, check_not_delayed
from flintmq.client.core.publish import (
    Body,
    Context,
    Publish,
    check_topic,
    checked_bodies,
    checked_trace_ids,
    headers_of_all,
    in_envelopes,
    message_cost,
    messages_cost,
    with_carried,
)
from flintmq.client.core.routing import Routes, check_place
from flintmq.client.core.sharding import ShardingId, partition_of
from flintmq.client.options import DELAY_MAX_S, SOURCE, Seconds, milliseconds
from flintmq.env import Env
from flintmq.errors import OptionError

AnyHeaders = Mapping[str, object] | Sequence[Mapping[str, object]]

ENVELOPE_SIZE = 6
"""Bytes of an envelope beside its headers."""


class Telemetry(Protocol):
    """Makes spans; see :class:`flintmq.client.telemetry.Telemetry`."""

    @property
    def has_envelope(self) -> bool: ...
    def publishing(self, topic: str, count: int, size: int) -> AbstractContextManager[dict[str, str]]: ...


class Intake:
    """Makes the publishes of one producer.

    Args:
        has_lookup: there are nsqlookupd, which know how many partitions there are.
        sharding: from a sharding id to a partition.
        writers: to publish idempotently with; None: not so.
        is_gathered: single messages may travel with others.
        traced: topics to trace from the start.

    Attributes:
        traced: the topics that are traced now.
        telemetry: makes spans; None: there are none.

    Raises:
        OptionError: the function ``sharding`` is not known, or a topic cannot be traced.
    """

    def __init__(
        self,
        *,
        has_lookup: bool,
        sharding: str,
        writers: Writers | None,
        is_gathered: bool,
        traced: Iterable[str],
        telemetry: Telemetry | None,
        env: Env,
    ) -> None:
        partition_of(0, 1, sharding)
        self.traced: set[str] = set()
        self.telemetry = telemetry
        self._has_lookup = has_lookup
        self._sharding = sharding
        self._writers = writers
        self._is_gathered = is_gathered
        self._env = env
        for topic in traced:
            self.trace(topic)

    def trace(self, topic: str, on: bool = True) -> None:
        """Trace a topic from now on, or no more.

        Raises:
            LocalProtocolError: no topic can have this name.
            OptionError: the producer is idempotent.
        """
        check_topic(topic)
        if on:
            if self._writers is not None:
                raise OptionError("trace", topic, NOT_TRACED, SOURCE)
            self.traced.add(topic)
        else:
            self.traced.discard(topic)

    def one(
        self,
        topic: str,
        data: bytes,
        deadline: float,
        sharding_id: ShardingId | None,
        partition: int | None,
        trace_id: int | None,
        headers: Mapping[str, object] | None,
        undecided: Mapping[str, str] | None = None,
    ) -> Publish:
        """One message.

        Args:
            undecided: headers with the context of a span, of which it is decided later how they go with the message.

        Raises:
            OptionError, LocalProtocolError, TypeError: it cannot be published like this.
        """
        publish = Publish(topic, [data], [], deadline, message_cost(data))
        self._place(publish, sharding_id, partition)
        self._add(publish, None if trace_id is None else [trace_id], None if headers is None else [headers])
        if undecided is not None:
            self._take_along(publish, undecided)
        is_bare = publish.trace_ids is None and publish.headers is None and publish.context is None
        publish.is_gathered = self._is_gathered and is_bare
        return publish

    @contextmanager
    def several(
        self,
        routes: Routes,
        topic: str,
        bodies: Iterable[Body],
        deadline: float,
        delay: Seconds | None = None,
        sharding_id: ShardingId | None = None,
        partition: int | None = None,
        trace_id: int | Sequence[int] | None = None,
        headers: AnyHeaders | None = None,
    ) -> Iterator[Publish]:
        """Several messages that travel as one, and the span around their publish.

        Raises:
            OptionError, LocalProtocolError, TypeError: they cannot be published like this.
        """
        check_topic(topic)
        data = checked_bodies(bodies)
        defer_ms = None if delay is None else milliseconds(delay, "delay", 0, DELAY_MAX_S)
        check_not_delayed(delay, trace_id=trace_id, headers=headers)
        with self._span(topic, data) as carried:
            data, headers, undecided = self._carry(routes, topic, data, headers, carried)
            publish = Publish(topic, data, [], deadline, messages_cost(data), defer_ms=defer_ms)
            self._place(publish, sharding_id, partition)
            if defer_ms is None:
                self._add(publish, trace_id, headers)
            if undecided is not None:
                self._take_along(publish, undecided)
            yield publish

    @contextmanager
    def carried(
        self, routes: Routes, topic: str, data: bytes, headers: Mapping[str, object] | None
    ) -> Iterator[tuple[bytes, Mapping[str, object] | None, Mapping[str, str] | None]]:
        """A span around the publish of one message.

        Yields:
            Body and headers, with the span's context if it can go with them; and that context where it is not known yet
            how it goes with the message.
        """
        assert self.telemetry is not None
        with self.telemetry.publishing(topic, 1, len(data)) as carried:
            (body,), found, undecided = self._carry(routes, topic, [data], headers, carried)
            assert found is None or isinstance(found, Mapping)
            yield body, found, undecided

    @contextmanager
    def _span(self, topic: str, bodies: list[bytes]) -> Iterator[dict[str, str]]:
        """A span around a publish, if that is wanted; yields the headers that carry its context."""
        if self.telemetry is None:
            yield {}
            return
        with self.telemetry.publishing(topic, len(bodies), sum(map(len, bodies))) as carried:
            yield carried

    def _carry(
        self,
        routes: Routes,
        topic: str,
        bodies: list[bytes],
        headers: AnyHeaders | None,
        carried: Mapping[str, str],
    ) -> tuple[list[bytes], AnyHeaders | None, Mapping[str, str] | None]:
        """Put the context of a span into headers or envelopes; it is returned where that cannot be decided yet."""
        has_envelope = self.telemetry is not None and self.telemetry.has_envelope
        has_headers = headers is not None or routes.is_extended(topic)
        if carried and not has_headers and not routes.decides_headers(topic):
            return bodies, None, carried
        if has_envelope:
            bodies = in_envelopes({} if has_headers else carried, bodies)
        return bodies, with_carried(headers, carried) if carried and has_headers else headers, None

    def _take_along(self, publish: Publish, values: Mapping[str, str]) -> None:
        """Have a publish find out, when it is sent, how the context of its span goes with the messages."""
        assert self.telemetry is not None
        count = len(publish.bodies)
        headers = headers_of_all(values, count, publish.trace_ids)
        publish.cost += sum(map(len, headers)) + ENVELOPE_SIZE * count
        is_delayed = publish.defer_ms is not None
        publish.context = Context(values, None if is_delayed else headers, self.telemetry.has_envelope)

    def _place(self, publish: Publish, sharding_id: ShardingId | None, partition: int | None) -> None:
        """Note where a publish must go, if that is not all the same."""
        check_place(sharding_id, partition, self._has_lookup, self._sharding)
        if sharding_id is not None or partition is not None:
            publish.sharding_id, publish.partition = sharding_id, partition
            publish.keys = [sharding_id]
            publish.needs_partition = True

    def _add(self, publish: Publish, trace_id: int | Sequence[int] | None, headers: AnyHeaders | None) -> None:
        """Note what goes with the messages of a publish."""
        count = len(publish.bodies)
        publish.trace_ids = checked_trace_ids(trace_id, count)
        publish.is_trace_asked = trace_id is not None
        if trace_id is None and publish.topic in self.traced:
            publish.trace_ids = [self._env.random.getrandbits(63) or 1 for _ in publish.bodies]
        if headers is not None:
            publish.headers = headers_of_all(headers, count, publish.trace_ids)
            publish.cost += sum(map(len, publish.headers))
        publish.needs_partition |= publish.is_trace_asked or (headers is not None and self._has_lookup)
        if publish.needs_partition and publish.keys is None and not self._has_lookup:
            allowed = "it needs a partition, or nsqlookupd_http_addresses to learn one from"
            asked = publish.trace_ids[0] if publish.trace_ids and count == 1 else trace_id
            raise OptionError("trace_id", asked, allowed, SOURCE)
