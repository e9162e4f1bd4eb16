"""``nsq_to_nsq``: publish the messages of topics somewhere else.

::

    consumer --batch--> filter --pieces--> producers, one for each destination
        ^                                      |
        '------ FIN; REQ of what failed <------'

Rules of this file: a message is finished when its destination has answered OK, or when the filter keeps it back; a
destination that stalls holds up nothing but what went to it; one message that no destination takes holds up no other;
what comes from a destination, in a topic that is published to, ends it before it is published again.

Source: NSQ 1.3, apps/nsq_to_nsq; NSQ's options.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, ClassVar

from flintmq.addresses import shown_url
from flintmq.client.aio.consumer import Consumer
from flintmq.client.aio.peers import Peer, peers
from flintmq.client.aio.producer import Producer
from flintmq.client.core.message import Message, are_bare, finish_all
from flintmq.errors import BodyError, FlintError, LocalProtocolError, OptionError, PublishError, UsageError
from flintmq.message import TRACE_ID_HEADER
from flintmq.options import (
    SECOND,
    Address,
    Choice,
    Duration,
    Integer,
    Items,
    Repeated,
    Switch,
    Text,
    option,
    read_command,
    version_line,
)
from flintmq.tools.asking import check_lookup_address
from flintmq.tools.client_opts import ClientOpts, client_opts
from flintmq.tools.consuming import (
    HOW,
    WHAT,
    ConsumingOptions,
    batch_size,
    check_topics,
    log_to_stderr,
    on_signals,
    run_to_end,
)
from flintmq.tools.host_pool import HOSTPOOL, MODES, HostPool
from flintmq.tools.json_filter import JsonFilter
from flintmq.tools.loops import LoopFound, LoopGuard, lookup_place, nsqd_place
from flintmq.tools.status_log import StatusLog
from flintmq.wire.identify import NSQ_VERSION

log = logging.getLogger(__name__)

GATHER_S = 0.005
"""Messages that come within this time are published together."""
PIECE_COUNT_MAX = 1000
PIECE_BYTES_MAX = 1024 * 1024
"""Of one MPUB; nsqd takes five times that by default."""
BYTES_IN_FLIGHT_MAX = 256 * 1024 * 1024
PUBLISH_TIMEOUT_S = 5.0
ONCE_TIMEOUT_S = 20.0
"""Of ``--idempotent``: what has no answer is sent again until then; an election of a cluster takes a few seconds."""
_FILTER = "Which messages"
_TO = "Where to"
_CLUSTER = "the destinations' nsqlookupd"
_NO_HEADERS = "it has headers, with which nsqd defers nothing; --drop-headers leaves them behind"
_ABOUT_A_MESSAGE = ("E_BAD_MESSAGE", "E_BAD_BODY")
_SHOWN_BYTES = 200


@dataclass(frozen=True, kw_only=True)
class ToNsqOptions(ConsumingOptions):
    """The flags of nsq_to_nsq."""

    program: ClassVar[str] = "nsq_to_nsq"
    summary: ClassVar[str] = "nsq_to_nsq publishes the messages of topics to other nsqd."

    topic: tuple[str, ...] = option(
        Items(Text("TOPIC[:TO]")),
        (),
        "a topic to consume, and the one to publish to if that has another name (may be given multiple times)",
        group=WHAT,
    )
    channel: str = option(Text("CHANNEL"), "nsq_to_nsq", "their channel", group=WHAT)
    destination_nsqd_tcp_address: tuple[str, ...] = option(
        Items(Address(to_connect=True)), (), "an nsqd to publish to (may be given multiple times)", group=_TO
    )
    destination_lookupd_http_address: tuple[str, ...] = option(
        Items(Text("HOST:PORT")),
        (),
        "an nsqlookupd that knows where to publish to, in place of --destination-nsqd-tcp-address; or https://...",
        group=_TO,
        origin="flintmq",
    )
    destination_lookupd_http_token_file: str = option(
        Text("FILE"),
        "",
        "file with the token for the destinations' nsqlookupd; read again when it changes",
        group=_TO,
        origin="flintmq",
        default_text="none",
    )
    destination_topic: str = option(
        Text("TOPIC"), "", "the topic to publish to", group=_TO, default_text="the one that is consumed"
    )
    mode: str = option(
        Choice(MODES),
        HOSTPOOL,
        "which destination is next: one after the other without those that fail, one after the other, "
        "or the quicker ones more",
        group=_TO,
    )
    producer_opt: tuple[str, ...] = option(
        Repeated(Text("NAME,VALUE")),
        (),
        "an option of go-nsq's producers, such as tls_v1 or snappy,true (may be given multiple times)",
        group=_TO,
    )
    require_json_field: str = option(Text("FIELD"), "", "pass on only JSON objects that have this field", group=_FILTER)
    require_json_value: str = option(
        Text("VALUE"), "", "pass on only those in which the required field has this value", group=_FILTER
    )
    whitelist_json_field: tuple[str, ...] = option(
        Repeated(Text("FIELD")),
        (),
        "pass on only this field of JSON objects (may be given multiple times)",
        group=_FILTER,
    )
    status_every: int = option(
        Integer(0), 250, "log how long publishing took, after this many messages; 0: never", group=HOW
    )
    ordered: bool = option(
        Switch(),
        False,
        "consume partitions in order, and publish each to the same one; needs nsqlookupd on both sides",
        group=HOW,
        origin="flintmq",
    )
    keep_partition: bool = option(
        Switch(),
        False,
        f"publish to the same partition, with the trace id; needs {_CLUSTER}",
        group=HOW,
        origin="flintmq",
    )
    drop_headers: bool = option(
        Switch(),
        False,
        "leave headers of messages behind, for a destination topic without",
        group=HOW,
        origin="flintmq",
    )
    idempotent: bool = option(
        Switch(),
        False,
        "have the destination, which must be FlintMQ's, store nothing twice because an answer was lost",
        group=HOW,
        origin="flintmq",
    )
    defer_ns: int = option(
        Duration(0, 365 * 24 * 3600 * SECOND),
        0,
        "publish with this delay; 0: without",
        group=HOW,
        origin="flintmq",
    )

    @property
    def circle(self) -> frozenset[str]:
        """The topics that, within one nsqd, would get their own messages: at once, or by way of others."""
        ways = self.ways
        found = set()
        for topic in ways:
            reached, left = ways[topic], len(ways)
            while reached != topic and reached in ways and left:  # it may come to another circle, and never back
                reached, left = ways[reached], left - 1
            if reached == topic:
                found.add(topic)
        return frozenset(found)

    @property
    def ways(self) -> dict[str, str]:
        """The topics that are consumed, each with the one that its messages are published to."""
        found = (text.partition(":") for text in self.topic)
        return {name: to or self.destination_topic or name for name, _, to in found}

    def check_whole(self) -> None:
        """Refuse what nsq_to_nsq refuses, and what does not go together.

        Raises:
            UsageError, OptionError: it is one of these.
        """
        if not self.topic or not self.channel:
            raise UsageError("--topic and --channel are required")
        check_topics(self.ways)
        for text in self.topic:
            name, colon, to = text.partition(":")
            if colon:
                check_topics([to], f"--topic={name}:TO, TO")
                if self.destination_topic:
                    raise UsageError(f"use --topic={text} or --destination-topic not both: each says where to")
            if any(text != other and name == other.partition(":")[0] for other in self.topic):
                raise UsageError(
                    f"--topic={text}: a message goes to one topic; a second nsq_to_nsq with a --channel of "
                    "its own takes it to another"
                )
        check_topics(filter(None, [self.destination_topic]), "--destination-topic")
        check_topics([self.channel], "--channel")
        super().check_whole()
        nsqd, lookupd = self.destination_nsqd_tcp_address, self.destination_lookupd_http_address
        if not nsqd and not lookupd:
            raise UsageError("--destination-nsqd-tcp-address required")
        for address in lookupd:
            check_lookup_address("--destination-lookupd-http-address", address)
        if nsqd and lookupd:
            raise UsageError("use --destination-nsqd-tcp-address or --destination-lookupd-http-address not both")
        if self.require_json_value and not self.require_json_field:
            raise UsageError("--require-json-value needs --require-json-field")
        for flag, is_set in (("--ordered", self.ordered), ("--keep-partition", self.keep_partition)):
            if is_set and not lookupd:
                raise UsageError(f"{flag} needs --destination-lookupd-http-address: it knows where the partitions are")
        if self.ordered and not self.lookupd_http_address:
            raise UsageError("--ordered needs --lookupd-http-address: it knows where the partitions are")
        if self.ordered and self.defer_ns:
            raise UsageError(
                "use --ordered or --defer not both: nothing keeps the order of messages that are deferred, those "
                "that fall due together come in any"
            )
        nsqds, lookupds = set(map(nsqd_place, self.nsqd_tcp_address)), set(map(lookup_place, self.lookupd_http_address))
        same = [each for each in nsqd if nsqd_place(each) in nsqds]
        same += [each for each in lookupd if lookup_place(each) in lookupds]
        if same and self.circle:
            raise UsageError(f"{min(same)} would get again what is consumed from it, for ever; use --destination-topic")


def run(arguments: Sequence[str]) -> int:
    """Run nsq_to_nsq; return its exit code.

    Raises:
        FlintError: the command line is wrong, or every nsqd refuses.
    """
    options = read_command(ToNsqOptions, arguments, "nsq_to_nsq", version_line("nsq_to_nsq", NSQ_VERSION))
    if options is None:
        return 0
    options.check_whole()
    log_to_stderr()
    return run_to_end(_forward(options))


async def _forward(options: ToNsqOptions) -> int:
    task = asyncio.current_task()
    assert task is not None
    on_signals(task.cancel)
    opts = options.client_opts()
    try:
        async with contextlib.AsyncExitStack() as stack:
            destinations = Destinations(options)
            await destinations.start(stack)
            topics = [Forwarding(options, opts, topic, to, destinations) for topic, to in options.ways.items()]
            await _run_all(topics)
    except asyncio.CancelledError:
        pass  # it was told to end before it had begun
    return 0


async def _run_all(topics: Sequence[Forwarding]) -> None:
    """Run until one of them fails, or they are told to end.

    Raises:
        FlintError: one has failed; the others have ended well.
    """

    def stop() -> None:
        for topic in topics:
            topic.stop()

    on_signals(stop)
    tasks = [asyncio.get_running_loop().create_task(topic.run()) for topic in topics]
    for task in tasks:
        task.add_done_callback(lambda _: stop())
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


class Destinations:
    """The producers, how they do, and which is next."""

    def __init__(self, options: ToNsqOptions) -> None:
        opts = client_opts(
            "nsq_to_nsq",
            "--producer-opt",
            options.producer_opt,
            for_consumer=False,
            token_file=options.destination_lookupd_http_token_file,
        )
        shared: dict[str, Any] = {
            "options": opts.connection,
            "timeout": ONCE_TIMEOUT_S if options.idempotent else PUBLISH_TIMEOUT_S,
            "idempotent": options.idempotent,
            "retry_unknown": options.idempotent,
            "max_bytes_in_flight": BYTES_IN_FLIGHT_MAX,
        }
        self._guard = LoopGuard()
        lookups = options.destination_lookupd_http_address
        if lookups:
            self._producers = {",".join(map(shown_url, lookups)): Producer(nsqlookupd_http_addresses=lookups, **shared)}
        else:
            addresses = dict.fromkeys(options.destination_nsqd_tcp_address)
            self._producers = {address: Producer(address, **shared) for address in addresses}
        self.pool = HostPool([*self._producers], options.mode, monotonic, random.SystemRandom())
        self._all = StatusLog(options.status_every, "[aggregate]:", monotonic)
        self._each: dict[str, StatusLog] = {}
        if len(self._producers) > 1:
            self._each = {name: StatusLog(options.status_every, f"[{name}]:", monotonic) for name in self._producers}

    async def start(self, stack: contextlib.AsyncExitStack) -> None:
        """Connect; the stack closes them."""
        for producer in self._producers.values():
            await stack.enter_async_context(producer)

    async def check_sources(self, sources: Sequence[Peer]) -> None:
        """See that none of them is a destination.

        Raises:
            LoopFound: one is.
        """
        for producer in self._producers.values():
            await self._guard.check(sources, peers(producer))

    async def publish(self, name: str, count: int, send: Callable[[Producer], Any]) -> None:
        """Publish ``count`` messages to one.

        Raises:
            FlintError: at least one of them is not, or may not be, there.
        """
        began = monotonic()
        try:
            await send(self._producers[name])
        except FlintError as error:
            self.pool.mark(name, _is_about_a_message(error), monotonic() - began)
            raise
        took_s = monotonic() - began
        self.pool.mark(name, True, took_s)
        self._all.note(took_s, count)
        if self._each:
            self._each[name].note(took_s, count)


def _is_about_a_message(error: FlintError) -> bool:
    """Whether trying again does not help, and the destination itself is well."""
    if isinstance(error, PublishError):
        return error.code in _ABOUT_A_MESSAGE
    return isinstance(error, LocalProtocolError | OptionError)


@dataclass(slots=True)
class Piece:
    """Messages that go to one destination as one.

    Attributes:
        bodies: as they are published.
        more: trace ids, headers and the partition, where they are kept.
    """

    messages: list[Message[bytes]]
    bodies: list[bytes]
    more: Mapping[str, Any]

    def singles(self) -> Iterator[Piece]:
        """Yield each message by itself."""
        lists = {name: value for name, value in self.more.items() if isinstance(value, list)}
        for number, (message, body) in enumerate(zip(self.messages, self.bodies, strict=True)):
            more = {**self.more, **{name: [value[number]] for name, value in lists.items()}}
            yield Piece([message], [body], more)


class Forwarding:
    """The messages of one topic on their way to ``to``."""

    def __init__(
        self, options: ToNsqOptions, opts: ClientOpts, topic: str, to: str, destinations: Destinations
    ) -> None:
        self._options = options
        self._topic = to
        self._filter = JsonFilter(options.require_json_field, options.require_json_value, options.whitelist_json_field)
        self._destinations = destinations
        self._may_come_back = topic in options.circle
        more: dict[str, Any] = {"max_attempts": 0, **opts.consumer}
        self._consumer: Consumer[bytes] = options.consumer(
            topic, options.channel, opts, ordered=options.ordered, **more
        )
        self._keeps_partition = options.keep_partition or options.ordered
        # NSQ's nsqd takes deferred messages one by one alone; these flags are for destinations that are not NSQ's
        self._goes_singly = bool(options.defer_ns) and not (options.idempotent or options.keep_partition)
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    def stop(self) -> None:
        """Consume nothing more."""
        self._consumer.stop()

    async def run(self) -> None:
        """Forward until it is stopped.

        Raises:
            FlintError: every nsqd to consume from refuses, or one of them is a destination.
        """
        async with self._consumer as consumer:
            try:
                async for batch in consumer.batches(batch_size(consumer.max_in_flight), GATHER_S):
                    await self._check_sources(batch)
                    for piece in self._pieces(batch):
                        self._begin(piece)
            finally:
                if self._tasks:
                    await asyncio.wait(self._tasks)
        if self._failure is not None:
            raise self._failure

    async def _check_sources(self, batch: Sequence[Message[bytes]]) -> None:
        if not self._may_come_back:
            return
        try:
            await self._destinations.check_sources(peers(self._consumer))
        except LoopFound as error:
            for message in batch:
                message.requeue(0, backoff=False)
            raise LoopFound(f"topic {self._topic}: {error}; use --destination-topic") from error

    def _begin(self, piece: Piece) -> None:
        names = self._destinations.pool.deal(len(piece.messages))
        for number, name in enumerate(names):
            part = piece
            if len(names) > 1:
                part = Piece(piece.messages[number :: len(names)], piece.bodies[number :: len(names)], piece.more)
                part.more = {
                    key: value[number :: len(names)] if isinstance(value, list) else value
                    for key, value in piece.more.items()
                }
            task = asyncio.get_running_loop().create_task(self._send(name, part))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self.stop()

    # --- what is published ---

    def _pieces(self, batch: Sequence[Message[bytes]]) -> Iterator[Piece]:
        """Yield what is to be published, and finish what is not."""
        messages = [*batch]
        bodies = [message.body for message in messages]
        if self._filter.is_needed:
            messages, bodies = self._filtered(messages)
        if not messages:
            return
        if are_bare(messages):
            yield from _cut(messages, bodies, {})
            return
        groups: dict[tuple[Any, bool, bool], list[int]] = {}
        for number, message in enumerate(messages):
            partition = message.partition if self._keeps_partition else None
            try:
                has_headers = bool(_headers(message)) and not self._options.drop_headers
            except BodyError as error:
                log.error("message %r is given back: %s", message.id, error)
                message.requeue()
                continue
            if has_headers and self._options.defer_ns:
                log.error("message %r is given back: %s", message.id, _NO_HEADERS)
                message.requeue(backoff=False)
                continue
            is_traced = self._keeps_partition and bool(message.trace_id) and not self._options.defer_ns
            key = partition, is_traced, has_headers
            groups.setdefault(key, []).append(number)
        for (partition, is_traced, has_headers), numbers in groups.items():
            chosen = [messages[number] for number in numbers]
            more: dict[str, Any] = {} if partition is None else {"partition": partition}
            if is_traced:
                more["trace_id"] = [message.trace_id for message in chosen]
            if has_headers:
                more["headers"] = [_headers(message) for message in chosen]
            yield from _cut(chosen, [bodies[number] for number in numbers], more)

    def _filtered(self, batch: Sequence[Message[bytes]]) -> tuple[list[Message[bytes]], list[bytes]]:
        messages: list[Message[bytes]] = []
        bodies: list[bytes] = []
        for message in batch:
            try:
                body = self._filter.apply(message.body)
            except ValueError as error:
                log.error("Unable to decode json: %s: %r", error, message.body[:_SHOWN_BYTES])
                body = None
            if body is None:
                message.finish()
            else:
                messages.append(message)
                bodies.append(body)
        return messages, bodies

    # --- how it is published ---

    async def _send(self, name: str, piece: Piece) -> None:
        """Publish and finish; what cannot be published now is given back."""
        if self._goes_singly and len(piece.messages) > 1:
            await asyncio.gather(*(self._send(name, single) for single in piece.singles()))
            return
        try:
            await self._destinations.publish(name, len(piece.messages), lambda producer: self._publish(producer, piece))
        except FlintError as error:
            if len(piece.messages) > 1 and _is_about_a_message(error):  # all but one of them may be fine
                await asyncio.gather(*(self._send(name, single) for single in piece.singles()))
            else:
                self._give_back(name, piece, error)
        except BaseException:
            for message in piece.messages:
                message.requeue(0)
            raise
        else:
            finish_all(piece.messages)

    async def _publish(self, producer: Producer, piece: Piece) -> None:
        delay_s = self._options.defer_ns / SECOND
        if self._goes_singly:
            await producer.dpub(self._topic, piece.bodies[0], delay_s)
        else:
            await producer.mpub(self._topic, piece.bodies, delay=delay_s or None, **piece.more)

    def _give_back(self, name: str, piece: Piece, error: FlintError) -> None:
        count = len(piece.messages)
        is_bad = _is_about_a_message(error)
        what = f"message {piece.messages[0].id!r}" if count == 1 else f"{count} messages"
        log.error("%s: %s not published to %s: %s", name, what, self._topic, error)
        for message in piece.messages:
            # one that nobody will take is no reason to take no others
            message.requeue(backoff=not is_bad or self._options.ordered)


def _headers(message: Message[bytes]) -> dict[str, Any]:
    """Return the headers that a publish may name; the trace id is said otherwise."""
    headers = message.headers
    headers.pop(TRACE_ID_HEADER, None)
    return headers


def _cut(messages: list[Message[bytes]], bodies: list[bytes], more: Mapping[str, Any]) -> Iterator[Piece]:
    """Yield pieces that no nsqd finds too large."""
    start = size = 0
    if len(bodies) <= PIECE_COUNT_MAX and sum(map(len, bodies)) <= PIECE_BYTES_MAX:
        yield Piece(messages, bodies, more)
        return
    for end, body in enumerate(bodies):
        size += len(body)
        if end > start and (size > PIECE_BYTES_MAX or end - start >= PIECE_COUNT_MAX):
            yield _part(messages, bodies, more, start, end)
            start, size = end, len(body)
    yield _part(messages, bodies, more, start, len(bodies))


def _part(messages: list[Message[bytes]], bodies: list[bytes], more: Mapping[str, Any], start: int, end: int) -> Piece:
    cut = {name: value[start:end] if isinstance(value, list) else value for name, value in more.items()}
    return Piece(messages[start:end], bodies[start:end], cut)
