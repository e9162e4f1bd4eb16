"""The common part of the utilities that consume: their flags, their consumers, and how they end.

Rules of this file: flags, defaults and refusals are those of NSQ's utilities; SIGINT and SIGTERM end the consumers
politely, so that messages are finished or given back; what ends a consumer ends the utility with an error.

Source: NSQ 1.3, apps/nsq_tail, apps/nsq_to_file, apps/nsq_to_http, apps/nsq_to_nsq.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from flintmq.client.aio.consumer import Consumer
from flintmq.errors import OptionError, UsageError
from flintmq.names import is_valid_name
from flintmq.net.log import NsqFormatter
from flintmq.net.loop import loop_factory
from flintmq.options import Address, Integer, Items, Options, Repeated, Text, option
from flintmq.tools.asking import check_one_kind
from flintmq.tools.client_opts import ClientOpts, client_opts

WHAT, WHERE, HOW = "What to consume", "Where", "How"
MAX_IN_FLIGHT = 200


@dataclass(frozen=True, kw_only=True)
class ConsumingOptions(Options):
    """The flags that all of them have."""

    nsqd_tcp_address: tuple[str, ...] = option(
        Items(Address(to_connect=True)), (), "an nsqd to consume from (may be given multiple times)", group=WHERE
    )
    lookupd_http_address: tuple[str, ...] = option(
        Items(Text("HOST:PORT")), (), "an nsqlookupd to find nsqd with (may be given multiple times)", group=WHERE
    )
    consumer_opt: tuple[str, ...] = option(
        Repeated(Text("NAME,VALUE")),
        (),
        "an option of go-nsq's consumers, such as tls_v1 or snappy,true (may be given multiple times)",
        group=HOW,
    )
    max_in_flight: int = option(
        Integer(1, 1_000_000), MAX_IN_FLIGHT, "the most messages that are on their way to here at a time", group=HOW
    )

    def check_whole(self) -> None:
        """Refuse what NSQ's utilities refuse, in their words.

        Raises:
            UsageError: something is missing, or there is too much.
        """
        check_one_kind(self.nsqd_tcp_address, self.lookupd_http_address, "nsqd-tcp-address")

    def client_opts(self) -> ClientOpts:
        """Return what ``--consumer-opt`` asks for.

        Raises:
            OptionError: one of them is wrong.
        """
        return client_opts(self.program, "--consumer-opt", self.consumer_opt, for_consumer=True)

    def consumer(self, topic: str, channel: str, opts: ClientOpts, **more: Any) -> Consumer[bytes]:
        """Make a consumer, not started yet."""
        settings: dict[str, Any] = {"max_in_flight": self.max_in_flight, **opts.consumer, **more}
        return Consumer(
            topic,
            channel,
            nsqd_tcp_addresses=self.nsqd_tcp_address,
            nsqlookupd_http_addresses=self.lookupd_http_address,
            options=opts.connection,
            **settings,
        )


def check_topics(topics: Iterable[str]) -> None:
    """Raise OptionError unless all of them are names of topics."""
    for topic in topics:
        if not is_valid_name(topic):
            raise OptionError("--topic", topic, "1 to 64 of . a-z A-Z 0-9 _ -, and perhaps #ephemeral", "flag")


def log_to_stderr() -> None:
    """Have what happens told on stderr, as NSQ's utilities do."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(NsqFormatter(""))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def run_to_end(work: Coroutine[Any, Any, int]) -> int:
    """Run until it ends; return its exit code."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(work)


def check_open(descriptor: int, name: str) -> None:
    """Refuse to go on with stdin or stdout closed: the next thing that is opened would take its place.

    Raises:
        UsageError: it is closed.
    """
    try:
        os.fstat(descriptor)
    except OSError as error:
        raise UsageError(f"{name} is closed; redirect it, perhaps to /dev/null") from error


def on_signals(function: Callable[[], object]) -> None:
    """Have a function called in this loop when the process is told to end, in place of the one that was."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, function)
