"""Arguments of a producer, read once and checked; the same on asyncio and on blocking sockets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from flintmq.client.core.intake import Intake, Telemetry
from flintmq.client.core.once import Writers
from flintmq.client.core.publish import TRIES_MAX
from flintmq.client.core.retry import Policy
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
    listed,
    seconds,
    switch,
    whole,
)
from flintmq.env import Env
from flintmq.errors import OptionError


class ProducerOptions(TypedDict, total=False):
    """Options that few producers set; keyword arguments of both. All durations are seconds or a timedelta.

    Attributes:
        producer_id: what nsqd knows an idempotent producer by begins with it; only with ``idempotent=True``.
        max_tries: how often a publish may be refused with an error that can pass; where a partition's leader has only
            moved, it is tried until its deadline; 3.
        sharding: from a sharding id to a partition: ``murmur3`` as Youzan's Go client, ``java``, or ``mod``. All
            producers of a topic must agree; ``murmur3``.
        trace: topics to trace from the start, one or several, see :meth:`flintmq.Producer.trace`.
        telemetry: a span of OpenTelemetry for every publish, its context carried with the message.
        lookup_interval: until a topic's nsqd are looked up again; 60 s.
        lookup_timeout: until an nsqlookupd must have answered; 5 s.
        client_id, heartbeat_interval: instead of those of ``options``.
        env: time and chance; the real ones if None.
        fetch: how nsqlookupd are asked; over HTTP if None.
    """

    producer_id: str
    max_tries: int
    sharding: str
    trace: str | Iterable[str]
    telemetry: Telemetry | None
    lookup_interval: Seconds
    lookup_timeout: Seconds
    client_id: str | None
    heartbeat_interval: Seconds | None
    env: Env | None
    fetch: Any


_DEFAULTS: ProducerOptions = {
    "producer_id": "",
    "max_tries": TRIES_MAX,
    "sharding": "murmur3",
    "trace": (),
    "telemetry": None,
    "lookup_interval": 60.0,
    "lookup_timeout": 5.0,
    "client_id": None,
    "heartbeat_interval": None,
    "env": None,
    "fetch": None,
}


class ProducerSettings:
    """Everything that a producer is told.

    Args:
        batch_count_max, batch_bytes_max: of what is gathered.
        more: what few producers set.

    Attributes:
        nsqd, lookups: addresses; one of them is empty.
        producer_id: None: the producer is not idempotent.

    Raises:
        OptionError: an argument is out of range, or means nothing without another one.
        TypeError: there is no such argument.
    """

    def __init__(
        self,
        nsqd_tcp_addresses: str | Iterable[str],
        nsqlookupd_http_addresses: str | Iterable[str],
        *,
        timeout: Seconds,
        retry_unknown: bool,
        idempotent: bool,
        batch_count_max: int,
        batch_bytes_max: int,
        options: ConnectionOptions | None,
        more: Mapping[str, Any],
    ) -> None:
        check_keywords("Producer", more, _DEFAULTS)
        rest: ProducerOptions = {**_DEFAULTS, **more}  # type: ignore[typeddict-item] # its names are known ones
        self.env = checked_env(rest["env"])
        self.fetch = checked_fetch(rest["fetch"])
        self.options = checked_options(options).with_overrides(
            client_id=rest["client_id"], heartbeat_interval=rest["heartbeat_interval"]
        )
        self.nsqd, self.lookups = addresses(nsqd_tcp_addresses, nsqlookupd_http_addresses)
        self.lookup_timeout_s = seconds(rest["lookup_timeout"], "lookup_timeout", 0.01, 3600)
        self.lookup_interval_s = seconds(rest["lookup_interval"], "lookup_interval", 0.01)
        self.producer_id = rest["producer_id"] if switch(idempotent, "idempotent") else None
        if self.producer_id is None and rest["producer_id"] != "":
            raise OptionError("producer_id", rest["producer_id"], "only together with idempotent=True", SOURCE)
        self.policy = Policy(
            seconds(timeout, "timeout", 0.001),
            switch(retry_unknown, "retry_unknown"),
            whole(rest["max_tries"], "max_tries", 1, 1000),
            whole(batch_count_max, "batch_count_max", 1, 100_000),
            whole(batch_bytes_max, "batch_bytes_max", 1, 2**30),
            rest["sharding"],
            bool(self.lookups),
        )
        self._traced = listed(rest["trace"], "trace", "the name of a topic, or a list of such")
        self._telemetry = checked_telemetry(rest["telemetry"], "publishing")

    def new_intake(self, writers: Writers | None, is_gathered: bool) -> Intake:
        """Return what makes the publishes of the producer.

        Args:
            writers: to publish idempotently with; None: not so.
            is_gathered: single messages may travel with others.

        Raises:
            OptionError: the function ``sharding`` is not known, or a topic cannot be traced.
        """
        return Intake(
            has_lookup=self.policy.has_lookup,
            sharding=self.policy.sharding,
            writers=writers,
            is_gathered=is_gathered,
            traced=self._traced,
            telemetry=self._telemetry,
            env=self.env,
        )
