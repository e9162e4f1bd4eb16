"""The common part of the utilities that consume: their flags, their consumers, and how they end.

Rules of this file: flags, defaults and refusals are those of NSQ's utilities; SIGINT and SIGTERM end the consumers
politely, so that messages are finished or given back; what ends a consumer ends the utility with an error.

Source: NSQ 1.3, apps/nsq_tail, apps/nsq_to_file, apps/nsq_to_http, apps/nsq_to_nsq.
"""

from __future__ import annotations

import asyncio
import fcntl
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
from flintmq.tools.asking import check_lookup_address, check_one_kind
from flintmq.tools.client_opts import ClientOpts, client_opts

WHAT, WHERE, HOW = "What to consume", "Where", "How"
MAX_IN_FLIGHT = 200
BATCHES_IN_FLIGHT = 4
"""Parts of what may be in flight: nsqd sends one while another is written and a third one is finished."""
BATCH_SIZES = (200, 2500)
"""At least, as far as so many may be in flight, because a batch has its price; and at most."""


@dataclass(frozen=True, kw_only=True)
class ConsumingOptions(Options):
    """The flags that all of them have."""

    nsqd_tcp_address: tuple[str, ...] = option(
        Items(Address(to_connect=True)), (), "an nsqd to consume from (may be given multiple times)", group=WHERE
    )
    lookupd_http_address: tuple[str, ...] = option(
        Items(Text("HOST:PORT")),
        (),
        "an nsqlookupd to find nsqd with, or https://... (may be given multiple times)",
        group=WHERE,
    )
    lookupd_http_token_file: str = option(
        Text("FILE"),
        "",
        "file with the token for nsqlookupd that ask for permissions; read again when it changes",
        group=WHERE,
        origin="flintmq",
        default_text="none",
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
            OptionError: an address is none.
        """
        check_one_kind(self.nsqd_tcp_address, self.lookupd_http_address, "nsqd-tcp-address")
        for address in self.lookupd_http_address:
            check_lookup_address("--lookupd-http-address", address)

    def client_opts(self) -> ClientOpts:
        """Return what ``--consumer-opt`` asks for.

        Raises:
            OptionError: one of them is wrong.
            HttpAuthFileError: there is no token in ``--lookupd-http-token-file``.
        """
        return client_opts(
            self.program,
            "--consumer-opt",
            self.consumer_opt,
            for_consumer=True,
            token_file=self.lookupd_http_token_file,
        )

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


def batch_size(max_in_flight: int) -> int:
    """Return how many messages are handled together at most."""
    least, most = BATCH_SIZES
    return min(most, max_in_flight, max(least, max_in_flight // BATCHES_IN_FLIGHT))


def check_topics(topics: Iterable[str], flag: str = "--topic") -> None:
    """Raise OptionError unless all of them are names of topics, or of channels."""
    for topic in topics:
        if not is_valid_name(topic):
            raise OptionError(flag, topic, "1 to 64 of . a-z A-Z 0-9 _ -, and perhaps #ephemeral", "flag")


def log_to_stderr(level: int = logging.INFO, prefix: str = "") -> None:
    """Have what happens told on stderr, as NSQ's utilities do."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(NsqFormatter(prefix))
    logging.basicConfig(level=level, handlers=[handler], force=True)


def run_to_end(work: Coroutine[Any, Any, int]) -> int:
    """Run until it ends; return its exit code."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(work)


def check_open(descriptor: int, name: str, unusable: int) -> None:
    """Refuse to go on with a stdin that cannot be read, or a stdout that cannot be written: one that was closed.

    Args:
        unusable: the mode in which it is of no use, ``os.O_RDONLY`` for stdout.

    Raises:
        UsageError: it is of no use.
    """
    try:
        is_usable = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != unusable
    except OSError:
        is_usable = False
    if not is_usable:
        raise UsageError(f"{name} is closed; redirect it, perhaps to /dev/null")


def on_signals(function: Callable[[], object]) -> None:
    """Have a function called in this loop when the process is told to end, in place of the one that was."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, function)
