"""The story of the demo, in its order.

The rules of this file: it says what it does before it does it; both runs are one and the same function, the second with
a hand that kills nsqd; Spark's channel exists before the first flight is published, so that nsqd keeps what Spark has
not read.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from flintmq import LookupdAdmin, NsqdAdmin
from flintmq.demo.archive import Archive, Delay
from flintmq.demo.archiver import CHANNEL
from flintmq.demo.failures import DemoFailed
from flintmq.demo.flights import Flights, carrier_names, read_flights
from flintmq.demo.options import DemoOptions
from flintmq.demo.processes import Server
from flintmq.demo.screen import Meter, Row, Screen
from flintmq.demo.traffic import Counters, new_producer, publish, together
from flintmq.demo.verdict import Verdict, compare
from flintmq.up import python_command

TOPIC = "flights"
CRASH_TOPIC = "flights-crash"
CHART_NAME = "departure-delays.png"
CHANNELS = {"counts": 2, "audit": 1}  # and how many consumers it has
_READY_S_MAX = 60.0
_STALL_S_MAX = 30.0
_POLL_S = 0.1
_KILL_POLL_S = 0.005
_FIRST_BATCH = "Spark compiles the query for its first batch"


@dataclass
class Outcome:
    """The outcome of one run.

    Attributes:
        resent: commands that were sent again, because no answer came.
        rows: of the archive.
    """

    published: Meter
    resent: int
    counters: list[Counters]
    archived: Meter
    rows: int
    verdict: Verdict

    @property
    def lost(self) -> int:
        """Acknowledged flights that one channel or the archive never got; the worst of them counts."""
        return max(self.verdict.lost, *(counters.missing for counters in self.counters))

    @property
    def is_good(self) -> bool:
        """Whether nothing was lost, and nothing doubled, altered or skipped on the way into the archive."""
        return self.verdict.is_good and not self.lost


class Story:
    """The whole demo.

    Args:
        directory: empty; everything is written into it.
    """

    def __init__(self, options: DemoOptions, directory: Path, screen: Screen) -> None:
        self._options = options
        self._directory = directory
        self._screen = screen
        self._lookupd = Server("nsqlookupd", directory / "nsqlookupd.log")
        self._nsqd: Server | None = None
        self._archived = Meter("archived", options.rows)
        self._archive = Archive(directory / "archive", directory / "spark.log", self._note_archived, screen.say)
        self._flights = Flights([], [])

    def kill_processes(self) -> None:
        """End every process that was started and still runs."""
        self._archive.kill()
        if self._nsqd is not None:
            self._nsqd.kill()
        self._lookupd.kill()

    async def tell(self) -> bool:
        """Run the demo; returns whether all is well.

        Raises:
            DemoFailed: something it needs failed.
        """
        began = time.monotonic()
        options, screen = self._options, self._screen
        screen.step(f"FlintMQ demo: {options.rows:,} flights through nsqd, three consumers and Spark")
        screen.say(f"everything goes to {self._directory}")
        nsqd = await self._start()
        screen.step(
            f"1. Publish to topic {TOPIC}; two consumers count on channel counts, one on audit; Spark archives it"
        )
        first = await self._run(nsqd, TOPIC, kills=0, delays_each=options.rows // 3)
        delays = await self._archive.delays(TOPIC)
        times = "once" if options.kills == 1 else f"{options.kills} times"
        screen.step(f"2. The same with topic {CRASH_TOPIC}, and nsqd is killed with kill -9 {times}")
        second = await self._run(nsqd, CRASH_TOPIC, kills=options.kills, delays_each=0)
        for process in (self._archive, nsqd, self._lookupd):
            await process.stop()
        chart = None if options.no_chart else await asyncio.to_thread(self._draw, delays)
        screen.step(f"3. What came of it, after {time.monotonic() - began:.0f} s")
        is_good = self._show([first, second])
        self._suggest(chart)
        return is_good

    async def _start(self) -> Server:
        screen = self._screen
        screen.say("starting nsqlookupd, nsqd and Spark, and reading the flights; Spark's Java takes 5 to 30 s ...")
        began = time.monotonic()
        data_path = self._directory / "nsqd"
        data_path.mkdir()

        async def start_servers() -> Server:
            await self._lookupd.start()
            flags = (f"--data-path={data_path}", f"--lookupd-tcp-address={self._lookupd.tcp}")
            nsqd = self._nsqd = Server("nsqd", self._directory / "nsqd.log", *flags)
            await nsqd.start()
            screen.say(f"nsqlookupd listens on {self._lookupd.tcp}, nsqd on {nsqd.tcp} (--durability=fsync)")
            return nsqd

        async def read() -> None:
            self._flights = await asyncio.to_thread(read_flights, self._options.rows)
            screen.say(f"{len(self._flights.bodies):,} flights are read")

        nsqd, version, _ = await together(start_servers(), self._archive.start(), read())
        screen.say(f"Spark {version} is there; all that took {time.monotonic() - began:.1f} s")
        assert isinstance(nsqd, Server)
        return nsqd

    async def _run(self, nsqd: Server, topic: str, *, kills: int, delays_each: int) -> Outcome:
        flights = self._flights
        published = Meter("published", len(flights.bodies))
        archived = self._archived = Meter("archived", published.total, until_first=_FIRST_BATCH, source=published)
        channels = [Counters(channel, count, published) for channel, count in CHANNELS.items()]
        self._screen.say("Spark opens the topic and checks where it begins ...")
        await self._open(nsqd, topic, delays_each)
        async with AsyncExitStack() as stack:
            for channel in channels:
                await stack.enter_async_context(channel.listening(topic, f"http://{self._lookupd.http}"))
            meters = [published, *(channel.meter for channel in channels), archived]
            await stack.enter_async_context(self._screen.watching(meters))
            producer = await stack.enter_async_context(new_producer(nsqd.tcp))
            archived.begin(time.monotonic())
            await together(publish(producer, topic, flights, published), self._kill(nsqd, published, kills))
            await together(_delivered(channels), self._archive.drain(published.count))
        found = await self._archive.contents(topic)
        verdict = await asyncio.to_thread(compare, flights.bodies, flights.keys, found)
        return Outcome(published, producer.stats().retries, channels, archived, len(found.id), verdict)

    async def _open(self, nsqd: Server, topic: str, delays_each: int) -> None:
        """Create the topic and have Spark wait for what comes."""
        async with NsqdAdmin(nsqd.http) as nsqd_admin, LookupdAdmin(self._lookupd.http) as lookupd_admin:
            await nsqd_admin.create_topic(topic)
            await self._archive.begin(topic, nsqd.tcp, delays_each)

            async def has_channel() -> bool:
                return bool((await nsqd_admin.stats(topic, CHANNEL))["topics"])

            async def is_known() -> bool:
                return bool((await lookupd_admin.lookup(topic)).producers)

            await _until(has_channel, f"Spark has not opened topic {topic}", self._directory / "spark.log")
            await _until(is_known, f"nsqlookupd does not know topic {topic}", self._directory / "nsqlookupd.log")

    async def _kill(self, nsqd: Server, published: Meter, kills: int) -> None:
        """Kill nsqd in the middle of publishing, and start it again."""
        for number in range(1, kills + 1):
            while published.count < published.total * number // (kills + 1):  # noqa: ASYNC110 - often enough
                await asyncio.sleep(_KILL_POLL_S)
            pid = nsqd.pid
            nsqd.kill()
            self._screen.say(f"kill -9 {pid}: nsqd is dead, {published.count:,} flights are acknowledged")
            took_s = await nsqd.start()
            self._screen.say(f"nsqd listens again on the same ports after {took_s:.1f} s, pid {nsqd.pid}")

    def _note_archived(self, count: int) -> None:
        self._archived.reach(count, time.monotonic())

    def _draw(self, delays: list[Delay]) -> Path:
        from flintmq.demo.chart import draw

        path = Path(self._options.chart).absolute() if self._options.chart else self._directory / CHART_NAME
        draw(delays, carrier_names(), path)
        return path

    def _show(self, outcomes: list[Outcome]) -> bool:
        """Print the table and the verdict; return whether all is well."""
        self._screen.table([f"run {number}" for number, _ in enumerate(outcomes, 1)], list(_rows(outcomes)))
        self._screen.say(
            f"msg/s: from the first message of a stage to its last; all stages at once on {os.cpu_count()} cores"
        )
        is_good = all(outcome.is_good for outcome in outcomes)
        if is_good:
            text = "Nothing is lost: every acknowledged flight is in the Parquet exactly once."
        else:
            text = f"This is not as it should be: see the red lines, and the logs in {self._directory}."
        self._screen.loud(text, is_good)
        return is_good

    def _suggest(self, chart: Path | None) -> None:
        python = python_command()
        archive = self._directory / "archive" / TOPIC
        data_path = shlex.quote(str(self._directory / "nsqd"))
        screen = self._screen
        screen.step("Try next")
        if chart is not None:
            screen.say(f"the chart: {chart}\n")
        screen.say("ask the archive something else:\n")
        screen.code(
            f"{python} - <<'END'\n"
            "from flintmq.spark import session\n"
            f'flights = session("try").read.parquet("{archive}")\n'
            'flights.groupBy("origin").agg({"dep_delay": "mean", "id": "count"}).show()\n'
            "END\n"
        )
        screen.say("run the same nsqd by hand, and look at its topics and channels from another shell:\n")
        screen.code(f"{python} -m flintmq up --data-path={data_path}\ncurl http://127.0.0.1:4151/stats\n")
        written_bytes = sum(path.stat().st_size for path in self._directory.rglob("*") if path.is_file())
        screen.say(f"remove everything this demo wrote, {written_bytes / 1e6:,.0f} MB:\n")
        screen.code(f"rm -r {shlex.quote(str(self._directory))}\n")


def _rows(outcomes: list[Outcome]) -> Iterator[Row]:
    verdicts = [outcome.verdict for outcome in outcomes]
    published = [outcome.published for outcome in outcomes]
    yield Row("published and acknowledged", [meter.count for meter in published], published)
    yield Row("commands sent again, because no answer came", [o.resent for o in outcomes], is_detail=True)
    for same_channel in zip(*(outcome.counters for outcome in outcomes), strict=True):
        channel, count = same_channel[0].channel, same_channel[0].consumer_count
        label = f"delivered on channel {channel} ({count} consumer{'s' if count > 1 else ''})"
        yield Row(label, [each.delivered for each in same_channel], [each.meter for each in same_channel])
        yield Row("delivered more than once", [each.repeated for each in same_channel], is_detail=True)
    yield Row("archived in Parquet", [o.rows for o in outcomes], [o.archived for o in outcomes])
    doubled = [v.archived_twice + v.stored_twice + v.invented for v in verdicts]
    yield Row("duplicates made by nsqd or Spark", doubled, is_bad=True)
    wrong = [v.altered + v.skipped + v.out_of_order for v in verdicts]
    yield Row("altered, skipped or out of order", wrong, is_bad=True)
    yield Row("lost", [outcome.lost for outcome in outcomes], is_bad=True)


async def _delivered(channels: list[Counters]) -> None:
    """Wait until every channel has seen every flight, or nothing has come for long: then the rest is lost."""
    last, since = -1, time.monotonic()
    while any(channel.missing for channel in channels):
        count = sum(channel.delivered for channel in channels)
        if count != last:
            last, since = count, time.monotonic()
        elif time.monotonic() - since > _STALL_S_MAX:
            return
        await asyncio.sleep(_POLL_S)


async def _until(condition: Callable[[], Awaitable[bool]], what: str, log_path: Path) -> None:
    deadline = time.monotonic() + _READY_S_MAX
    while not await condition():
        if time.monotonic() > deadline:
            raise DemoFailed(f"{what} after {_READY_S_MAX:g} s", f"see {log_path}")
        await asyncio.sleep(_POLL_S)
