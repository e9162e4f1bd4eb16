"""``nsq_stat``: the figures of a channel over all nsqd, a line every interval.

Rules of this file: a line is of all nsqd or there is none; rates are between two looks at the same ones.

Source: NSQ 1.3, apps/nsq_stat; NSQ's options.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from flintmq.addresses import format_address
from flintmq.errors import FlintError, UsageError
from flintmq.options import SECOND, Duration, Integer, Items, Text, option, read_command, version_line
from flintmq.tools.asking import Asker, SecuredAskingOptions, check_address, check_one_kind
from flintmq.tools.consuming import HOW, WHERE, log_to_stderr, on_signals, run_to_end
from flintmq.wire.identify import NSQ_VERSION

log = logging.getLogger(__name__)

HEADER_EVERY = 25
_WHAT = "What to look at"
_HEADER = (
    f"{'------rate------'}+{'----------------depth----------------'}+{'--------------metadata---------------'}\n"
    f"{'ingress':>7} {'egress':>7} | {'total':>7} {'mem':>7} {'disk':>7} {'inflt':>5} {'def':>5} | "
    f"{'req':>7} {'t-o':>7} {'msgs':>12} {'clients':>7}"
)


class NoChannel(FlintError):
    """No nsqd has the channel."""


@dataclass(frozen=True, kw_only=True)
class StatOptions(SecuredAskingOptions):
    """The flags of nsq_stat."""

    program: ClassVar[str] = "nsq_stat"
    summary: ClassVar[str] = "nsq_stat prints the figures of a channel over all nsqd that have its topic."

    topic: str = option(Text("TOPIC"), "", "the topic", group=_WHAT)
    channel: str = option(Text("CHANNEL"), "", "the channel", group=_WHAT)
    nsqd_http_address: tuple[str, ...] = option(
        Items(Text("HOST:PORT")), (), "an nsqd to ask, or https://... (may be given multiple times)", group=WHERE
    )
    lookupd_http_address: tuple[str, ...] = option(
        Items(Text("HOST:PORT")),
        (),
        "an nsqlookupd to find nsqd with, or https://... (may be given multiple times)",
        group=WHERE,
    )
    interval_ns: int = option(Duration(1), 2 * SECOND, "the time between two lines", group=HOW)
    count: int | None = option(Integer(1), None, "end after this many lines", group=HOW, default_text="never")


@dataclass(slots=True)
class Figures:
    """The figures of a channel, summed over all nsqd."""

    depth: int = 0
    backend_depth: int = 0
    in_flight_count: int = 0
    deferred_count: int = 0
    requeue_count: int = 0
    timeout_count: int = 0
    message_count: int = 0
    client_count: int = 0

    def add(self, channel: dict[str, Any]) -> None:
        """Add those of one nsqd, as its ``/stats`` has them; what an old one does not say counts nothing."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + int(channel.get(name) or 0))
        if "client_count" not in channel:
            self.client_count += len(channel.get("clients") or ())

    def line(self, before: Figures, interval_s: float) -> str:
        """Return the line that NSQ's nsq_stat prints."""
        published = self.message_count - before.message_count
        taken = published - (self.depth - before.depth)
        return (
            f"{int(published / interval_s):>7} {int(taken / interval_s):>7} | {self.depth:>7} "
            f"{self.depth - self.backend_depth:>7} {self.backend_depth:>7} {self.in_flight_count:>5} "
            f"{self.deferred_count:>5} | {self.requeue_count:>7} {self.timeout_count:>7} {self.message_count:>12} "
            f"{self.client_count:>7}"
        )


def run(arguments: Sequence[str]) -> int:
    """Run nsq_stat; return its exit code.

    Raises:
        FlintError: the command line is wrong, somebody does not answer, or there is no such channel.
    """
    options = read_command(StatOptions, arguments, "nsq_stat", version_line("nsq_stat", NSQ_VERSION))
    if options is None:
        return 0
    if not options.topic or not options.channel:
        raise UsageError("--topic and --channel are required")
    check_one_kind(options.nsqd_http_address, options.lookupd_http_address, "nsqd-http-address")
    for flag, addresses in (
        ("--nsqd-http-address", options.nsqd_http_address),
        ("--lookupd-http-address", options.lookupd_http_address),
    ):
        for address in addresses:
            check_address(flag, address)
    log_to_stderr()
    return run_to_end(_watch(options, options.asker()))


async def _watch(options: StatOptions, asker: Asker) -> int:
    task = asyncio.current_task()
    assert task is not None
    on_signals(task.cancel)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, task.cancel)  # as NSQ's ends: nothing is to be reread
    interval_s = options.interval_ns / SECOND
    of_nsqd = asker.of_nsqd(options.lookupd_http_address)
    before: Figures | None = None
    nodes_before: set[str] = set()
    number = 0
    try:
        while options.count is None or number <= options.count:
            now, nodes = await _figures(options, asker, of_nsqd)
            if before is None or nodes == nodes_before:
                if number % HEADER_EVERY == 0:
                    print(_HEADER, flush=True)
                if before is not None:
                    print(now.line(before, interval_s), flush=True)
                number += 1
            else:
                log.warning("no line: topic %s is at other nsqd now: %s", options.topic, ", ".join(sorted(nodes)))
            before, nodes_before = now, nodes
            if options.count is None or number <= options.count:
                await asyncio.sleep(interval_s)
    except asyncio.CancelledError:
        pass  # it was told to end
    return 0


async def _figures(options: StatOptions, asker: Asker, of_nsqd: Asker) -> tuple[Figures, set[str]]:
    """Return the figures, and the nsqd that were asked for them.

    Raises:
        NotAllAnswer: one of those who were asked does not answer.
        NoChannel: none of them has the channel.
    """
    topic, channel = options.topic, options.channel
    found = Figures()
    is_there = False
    nsqds = options.nsqd_http_address
    if options.lookupd_http_address:
        answers = await asker.ask_every(options.lookupd_http_address, "/lookup", topic=topic)
        nsqds = tuple(_producers(answers.values()))
        if not nsqds:
            raise NoChannel(f"failed to get topic producers - no nsqlookupd knows topic {topic}")
    stats = await of_nsqd.ask_every(
        nsqds, "/stats", format="json", topic=topic, channel=channel, include_clients="false"
    )
    for answer in stats.values():
        for row in _rows(answer, "topics", "topic_name", topic):
            for each in _rows(row, "channels", "channel_name", channel):
                is_there = True
                found.add(each)
    if not is_there:
        raise NoChannel(f"failed to find channel({channel}) in stats metadata for topic({topic})")
    return found, {*nsqds}


def _rows(answer: Any, name: str, key: str, wanted: str) -> Iterable[dict[str, Any]]:
    rows = answer.get(name) if isinstance(answer, dict) else None
    return [row for row in rows or () if isinstance(row, dict) and row.get(key) == wanted]


def _producers(answers: Iterable[Any]) -> Iterable[str]:
    found: dict[str, None] = {}
    for answer in answers:
        for each in (answer.get("producers") if isinstance(answer, dict) else None) or ():
            host = str(each.get("broadcast_address"))
            found[format_address(host, each.get("http_port"))] = None
    return found
