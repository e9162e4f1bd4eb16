"""Arguments of a consumer, read once and checked; the same on asyncio and on blocking sockets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, cast

from flintmq.client.core.bodies import reader
from flintmq.client.core.discovery import PollTimes
from flintmq.client.core.handlers import Handler
from flintmq.client.core.message import Message
from flintmq.client.core.order import Order
from flintmq.client.core.rdy import RdyPolicy
from flintmq.client.core.start import NS_PER_S, Beginning, StartAt
from flintmq.client.options import (
    SOURCE,
    ConnectionOptions,
    Seconds,
    addresses,
    check_keywords,
    checked_env,
    checked_fetch,
    checked_options,
    checked_telemetry,
    seconds,
    switch,
    whole,
)
from flintmq.env import Env
from flintmq.errors import FlintError, LocalProtocolError, OptionError
from flintmq.limits import ATTEMPTS_MAX
from flintmq.names import is_valid_name, why_invalid

if TYPE_CHECKING:
    from typing_extensions import TypeForm

MAX_IN_FLIGHT_MAX = 1_000_000
TAG_SIZE_MAX = 100
_TAG = re.compile("[A-Za-z0-9_-]*")


class Telemetry(Protocol):
    """The part of :class:`flintmq.Telemetry` that is needed here."""

    has_envelope: bool

    def around(self, handler: Handler, topic: str, channel: str) -> Handler: ...


class ConsumerOptions(TypedDict, total=False):
    """Options that few consumers set; keyword arguments of both. All durations are seconds or a timedelta.

    Attributes:
        on_error: a plain function, told of answers that came too late, of nsqd that cannot be used, and each time that
            no nsqlookupd has answered. Called on the event loop, or in a thread that iterates.
        requeue_delay: until a failed message comes again, times its attempts; 90 s.
        max_requeue_delay: the most that becomes; 900 s.
        backoff: the pause after a first failure; it doubles with each further one; 0: never pause; 1 s.
        max_backoff: the longest pause; 0: never pause; 120 s.
        drain_timeout: how long handlers may take to end when the consumer is closed; 30 s.
        low_rdy_idle_timeout: with ``max_in_flight`` lower than the number of nsqd: how long one without messages keeps
            its turn; 10 s.
        low_rdy_timeout: in the same case: how long a busy one keeps its turn; 30 s.
        blocked_warn_attempts, blocked_error_attempts: a message with more attempts is logged as blocking its partition;
            10 and 50.
        desired_tag: of a topic with headers: the messages with this tag come to the consumers that desire it.
        headers: ask for headers also where no nsqlookupd says that the topic has some, as with ``nsqd_tcp_addresses``:
            nsqd's dead letters say in theirs why they are there. A topic without headers refuses that.
        start: where the channel begins, if it has no other consumer then: a datetime with a time zone, a timedelta (so
            long ago), ``"beginning"``, ``"end"``, :meth:`Start.offset` or :meth:`Start.count`; each time that this
            consumer starts. Only FlintMQ's and Youzan's nsqd; with ``nsqd_tcp_addresses`` only topics without
            partitions that no cluster keeps in several logs.
        trace: log every message to ``flintmq.trace``; the consumer's attribute of that name can be changed while it
            runs.
        telemetry: a span of OpenTelemetry around the handler, which continues the producer's trace.
        lookup_interval: between two polls of the nsqlookupd; shorter after the start and after a loss; 60 s.
        lookup_jitter: by how much that is spread, 0 to 1; 0.3.
        lookup_timeout: until an nsqlookupd must have answered; 5 s.
        client_id, msg_timeout, heartbeat_interval, sample_rate: instead of those of ``options``.
        env: time, chance and threads; the real ones if None.
        fetch: how nsqlookupd are asked; over HTTP if None.
    """

    on_error: Callable[[FlintError], object] | None
    requeue_delay: Seconds
    max_requeue_delay: Seconds
    backoff: Seconds
    max_backoff: Seconds
    drain_timeout: Seconds
    low_rdy_idle_timeout: Seconds
    low_rdy_timeout: Seconds
    blocked_warn_attempts: int
    blocked_error_attempts: int
    desired_tag: str
    headers: bool
    start: StartAt | None
    trace: bool
    telemetry: Telemetry | None
    lookup_interval: Seconds
    lookup_jitter: float
    lookup_timeout: Seconds
    client_id: str | None
    msg_timeout: Seconds | None
    heartbeat_interval: Seconds | None
    sample_rate: int | None
    env: Env | None
    fetch: Any


_DEFAULTS: ConsumerOptions = {
    "on_error": None,
    "requeue_delay": 90.0,
    "max_requeue_delay": 900.0,
    "backoff": 1.0,
    "max_backoff": 120.0,
    "drain_timeout": 30.0,
    "low_rdy_idle_timeout": 10.0,
    "low_rdy_timeout": 30.0,
    "blocked_warn_attempts": 10,
    "blocked_error_attempts": 50,
    "desired_tag": "",
    "headers": False,
    "start": None,
    "trace": False,
    "telemetry": None,
    "lookup_interval": 60.0,
    "lookup_jitter": 0.3,
    "lookup_timeout": 5.0,
    "client_id": None,
    "msg_timeout": None,
    "heartbeat_interval": None,
    "sample_rate": None,
    "env": None,
    "fetch": None,
}


class Settings:
    """Everything that a consumer is told.

    Args:
        more: what few consumers set.

    Raises:
        OptionError: an argument is out of range, or does not go together with another.
        LocalProtocolError: a topic or channel cannot have this name.
        TypeError: there is no such argument.
    """

    def __init__(
        self,
        topic: str,
        channel: str,
        nsqd_tcp_addresses: str | Iterable[str],
        nsqlookupd_http_addresses: str | Iterable[str],
        *,
        handler: Handler | None,
        type: TypeForm[Any] | None,  # noqa: A002 - the word that says it
        decode: Callable[[bytes], Any] | None,
        max_in_flight: int,
        max_attempts: int,
        on_giving_up: Callable[[Message[Any]], object] | None,
        dead_letter: str | None,
        ordered: bool,
        options: ConnectionOptions | None,
        more: Mapping[str, Any],
    ) -> None:
        check_keywords("Consumer", more, _DEFAULTS)
        rest: ConsumerOptions = {**_DEFAULTS, **more}  # type: ignore[typeddict-item] # its names are known ones
        check_names(topic, channel, dead_letter)
        self.topic, self.channel = topic, channel
        self.decode = reader(type, decode)
        self.given_env, self.env = rest["env"], checked_env(rest["env"])
        self.fetch = checked_fetch(rest["fetch"])
        self.options = checked_options(options).with_overrides(
            client_id=rest["client_id"],
            msg_timeout=rest["msg_timeout"],
            heartbeat_interval=rest["heartbeat_interval"],
            sample_rate=rest["sample_rate"],
        )
        self.nsqd, self.lookups = addresses(nsqd_tcp_addresses, nsqlookupd_http_addresses)
        interval_s = seconds(rest["lookup_interval"], "lookup_interval", 0.01)
        self.times = PollTimes(interval_s, seconds(rest["lookup_jitter"], "lookup_jitter", 0, 1))
        self.lookup_timeout_s = seconds(rest["lookup_timeout"], "lookup_timeout", 0.01, 3600)
        telemetry = checked_telemetry(rest["telemetry"], "around")
        self.handler = handler if handler is None or telemetry is None else telemetry.around(handler, topic, channel)
        self.opens_envelopes = telemetry is not None and telemetry.has_envelope
        self.trace = switch(rest["trace"], "trace")
        self.is_ordered = switch(ordered, "ordered")
        self.order = Order(
            topic,
            whole(rest["blocked_warn_attempts"], "blocked_warn_attempts", 1, ATTEMPTS_MAX),
            whole(rest["blocked_error_attempts"], "blocked_error_attempts", 1, ATTEMPTS_MAX),
        )
        limit = whole(max_attempts, "max_attempts", 0, ATTEMPTS_MAX)
        self.attempts_max = limit if limit and not ordered else ATTEMPTS_MAX + 1
        self.on_giving_up = on_giving_up
        self.dead_letter = dead_letter
        self.takes_given_up = on_giving_up is not None or dead_letter is not None
        if ordered:
            check_ordered(bool(self.lookups), bool(self.options.sample_rate), self.takes_given_up)
        self.on_error = rest["on_error"]
        self.requeue_delay_s = seconds(rest["requeue_delay"], "requeue_delay")
        self.requeue_delay_max_s = seconds(rest["max_requeue_delay"], "max_requeue_delay")
        self.drain_timeout_s = seconds(rest["drain_timeout"], "drain_timeout")
        self.backoff_s = seconds(rest["backoff"], "backoff")
        self.backoff_max_s = seconds(rest["max_backoff"], "max_backoff") if self.backoff_s else 0.0
        self.policy = RdyPolicy(
            whole(max_in_flight, "max_in_flight", 1, MAX_IN_FLIGHT_MAX),
            seconds(rest["low_rdy_idle_timeout"], "low_rdy_idle_timeout", 0.001),
            seconds(rest["low_rdy_timeout"], "low_rdy_timeout", 0.001),
        )
        self.desired_tag = checked_tag(rest["desired_tag"])
        self.wants_headers = switch(rest["headers"], "headers")
        self.beginning = new_beginning(rest["start"], ordered, self.env)
        self.names_logs = self.beginning is not None

    @property
    def backs_off(self) -> bool:
        """Whether a failure makes the consumer pause."""
        return self.backoff_max_s > 0

    def dead_letter_producer(self) -> dict[str, Any]:
        """Arguments of the producer that publishes dead letters."""
        return {
            "nsqd_tcp_addresses": self.nsqd,
            "nsqlookupd_http_addresses": self.lookups,
            "options": self.options,
            "lookup_timeout": self.lookup_timeout_s,
            "env": self.given_env,
            "fetch": self.fetch,
        }


def check_names(topic: str, channel: str, dead_letter: str | None) -> None:
    """Raise LocalProtocolError or OptionError unless these names can be used."""
    names = [("E_BAD_TOPIC", "topic", topic), ("E_BAD_CHANNEL", "channel", channel)]
    if dead_letter is not None:
        names.append(("E_BAD_TOPIC", "dead-letter topic", dead_letter))
    for code, what, name in names:
        if not is_valid_name(name):
            raise LocalProtocolError(code, why_invalid(what, name))
    if dead_letter == topic:
        raise OptionError("dead_letter", dead_letter, "another topic than the one that is consumed", SOURCE)


def check_ordered(has_lookup: bool, samples: bool, gives_up: bool) -> None:
    """Raise OptionError unless these go together with consuming in order."""
    if not has_lookup:
        allowed = "with nsqlookupd_http_addresses, which know where the partitions are"
        raise OptionError("ordered", True, allowed, SOURCE)
    if samples:
        raise OptionError("ordered", True, "without sample_rate: what is left out would be out of order", SOURCE)
    if gives_up:
        allowed = "without on_giving_up and dead_letter: a message blocks its partition until the handler finishes it"
        raise OptionError("ordered", True, allowed, SOURCE)


def new_beginning(start: StartAt | None, is_ordered: bool, env: Env) -> Beginning | None:
    """Return where the channel begins; None: where it is.

    Raises:
        OptionError: the start is none, or does not go together with the rest.
    """
    if start is None:
        return None
    if is_ordered:
        allowed = "without ordered=True: SUB_ORDER says no place; move the channel with NsqdAdmin.set_offset before"
        raise OptionError("start", start, allowed, SOURCE)
    return Beginning(start, env.clock.wall_ns() / NS_PER_S)


def checked_tag(tag: str) -> str:
    """A tag that messages may be given first for.

    Raises:
        OptionError: nsqd would refuse it.
    """
    if not isinstance(cast(object, tag), str) or len(tag) > TAG_SIZE_MAX or not _TAG.fullmatch(tag):
        raise OptionError("desired_tag", tag, f"text: at most {TAG_SIZE_MAX} of [A-Za-z0-9_-]", SOURCE)
    return tag
