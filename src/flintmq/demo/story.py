"""What happens in the demo, in its order.

The rules of this file: it says what it does before it does it; both runs are one and the same function, the second with
a hand that kills nsqd; Spark's channel exists before the first flight is published, so that nsqd keeps what Spark has
not read.
"""

from __future__ import annotations

import asyncio
import calendar
import os
import shlex
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flintmq.demo.archive import Archive, Event
from flintmq.demo.archiver import FLIGHTS_MIN
from flintmq.demo.failures import DemoFailed
from flintmq.demo.flights import Flights, carrier_names, read_flights
from flintmq.demo.meters import Meter
from flintmq.demo.screen import Row, Screen
from flintmq.demo.servers import Server
from flintmq.demo.together import together
from flintmq.demo.traffic import Audience, Ledger, new_producer, publish
from flintmq.demo.verdict import Verdict, compare
from flintmq.up import python_command

if TYPE_CHECKING:
    from flintmq.demo import DemoOptions

TOPIC = "flights"
CRASH_TOPIC = "flights-crash"
CHART_NAME = "departure-delays.png"
AUDIENCES = {"counts": 2, "audit": 1}
_READY_S_MAX = 60.0
_STALL_S_MAX = 30.0
_POLL_S = 0.1
_FIRST_BATCH = "Spark compiles the query for its first batch"


@dataclass
class Outcome:
    """What one run came to."""

    ledger: Ledger
    audiences: list[Audience]
    archived: Meter
    verdict: Verdict

    @property
    def lost(self) -> int:
        """Acknowledged flights that one channel or the archive never got; the worst of them counts."""
        acknowledged = self.ledger.acknowledged
        return max(self.verdict.lost, *(audience.lost(acknowledged) for audience in self.audiences))

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
        self._archive = Archive(directory / "archive", directory / "spark.log", self._heard)
        self._archived = Meter("archived", options.rows)
        self._flights = Flights([], [])
        self._carriers = carrier_names()

    def kill_processes(self) -> None:
        """End every process that was started and still runs."""
        self._archive.kill()
        if self._nsqd is not None:
            self._nsqd.kill()
        self._lookupd.kill()

    async def tell(self) -> list[Outcome]:
        """Run the demo; returns what came of each run.

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
        await self._archive.stop()
        await nsqd.stop()
        await self._lookupd.stop()
        chart = None if options.no_chart else await asyncio.to_thread(self._draw, delays)
        screen.step(f"3. What came of it, after {time.monotonic() - began:.0f} s")
        self._show([first, second])
        self._suggest(chart)
        return [first, second]

    async def _start(self) -> Server:
        screen = self._screen
        screen.say("starting nsqlookupd, nsqd and Spark, and reading the flights; Spark's Java takes 5 to 30 s ...")
        began = time.monotonic()
        data_path = self._directory / "nsqd"
        data_path.mkdir()

        async def start_servers() -> Server:
            await self._lookupd.start()
            nsqd = self._nsqd = Server(
                "nsqd",
                self._directory / "nsqd.log",
                f"--data-path={data_path}",
                f"--lookupd-tcp-address={self._lookupd.tcp}",
            )
            await nsqd.start()
            screen.say(f"nsqlookupd listens on {self._lookupd.tcp}, nsqd on {nsqd.tcp} (--durability=fsync)")
            return nsqd

        async def read() -> None:
            self._flights = await asyncio.to_thread(read_flights, self._options.rows)
            screen.say(f"{len(self._flights.bodies):,} flights are read")

        started: tuple[Server, str, None] = tuple(await together(start_servers(), self._archive.start(), read()))
        nsqd, version, _ = started
        screen.say(f"Spark {version} is there; all that took {time.monotonic() - began:.1f} s")
        return nsqd

    async def _run(self, nsqd: Server, topic: str, *, kills: int, delays_each: int) -> Outcome:
        total = len(self._flights.bodies)
        ledger = Ledger(total, Meter("published", total))
        self._archived = archived = Meter("archived", total, until_first=_FIRST_BATCH, source=ledger.meter)
        audiences = [Audience(channel, count, ledger.meter) for channel, count in AUDIENCES.items()]
        self._screen.say("Spark opens the topic and checks where it begins ...")
        await self._open(nsqd, topic, delays_each)
        meters = [ledger.meter, *(audience.meter for audience in audiences), archived]
        async with AsyncExitStack() as stack:
            for audience in audiences:
                await stack.enter_async_context(audience.listening(topic, f"http://{self._lookupd.http}"))
            await stack.enter_async_context(self._screen.watching(meters))
            producer = await stack.enter_async_context(new_producer(nsqd.tcp))
            archived.begin(time.monotonic())
            await together(publish(producer, topic, self._flights, ledger), self._kill(nsqd, ledger, kills))
            _, rows = await together(self._delivered(audiences), self._archive.drain(ledger.meter.count))
            archived.reach(rows, time.monotonic())
        found = await self._archive.contents(topic)
        flights = self._flights
        verdict = await asyncio.to_thread(
            compare, flights.bodies, flights.keys, ledger.sent, ledger.acknowledged, found
        )
        return Outcome(ledger, audiences, archived, verdict)

    async def _open(self, nsqd: Server, topic: str, delays_each: int) -> None:
        """Create the topic and have Spark wait for what comes."""
        await nsqd.post(f"/topic/create?topic={topic}")
        await self._archive.begin(topic, nsqd.tcp, delays_each)

        async def has_channel() -> bool:
            stats = await nsqd.get(f"/stats?format=json&topic={topic}&channel={self._archive.channel}")
            return bool(stats["topics"])

        async def is_known() -> bool:
            found = await self._lookupd.get(f"/lookup?topic={topic}")
            return bool(found and found["producers"])

        await _until(has_channel, f"Spark has not opened topic {topic}", self._directory / "spark.log")
        await _until(is_known, f"nsqlookupd does not know topic {topic}", self._directory / "nsqlookupd.log")

    async def _kill(self, nsqd: Server, ledger: Ledger, kills: int) -> None:
        """Kill nsqd in the middle of publishing, and start it again."""
        for number in range(1, kills + 1):
            await ledger.wait_for(ledger.meter.total * number // (kills + 1))
            pid = nsqd.pid
            nsqd.kill()
            self._screen.say(f"kill -9 {pid}: nsqd is dead, {ledger.meter.count:,} flights are acknowledged")
            took_s = await nsqd.start()
            self._screen.say(f"nsqd listens again on the same ports after {took_s:.1f} s, pid {nsqd.pid}")

    async def _delivered(self, audiences: list[Audience]) -> None:
        """Wait until every channel has seen every flight, or nothing has come for long: then the rest is lost."""
        last, since = -1, time.monotonic()
        while any(audience.meter.count < audience.meter.total for audience in audiences):
            count = sum(sum(audience.delivered) for audience in audiences)
            if count != last:
                last, since = count, time.monotonic()
            elif time.monotonic() - since > _STALL_S_MAX:
                return
            await asyncio.sleep(_POLL_S)

    def _heard(self, event: Event) -> None:
        """Spark has told something."""
        if event["event"] == "archived":
            self._archived.reach(event["rows"], time.monotonic())
        elif event["event"] == "delays":
            self._screen.say(delays_so_far(event, self._carriers))

    def _draw(self, delays: list[tuple[str, int, float, int]]) -> Path:
        from flintmq.demo.chart import draw

        path = Path(self._options.chart).absolute() if self._options.chart else self._directory / CHART_NAME
        draw(delays, self._carriers, path)
        return path

    def _show(self, outcomes: list[Outcome]) -> None:
        verdicts = [outcome.verdict for outcome in outcomes]
        rows = [
            Row(
                "published and acknowledged",
                [(o.verdict.acknowledged, o.ledger.meter.rate(time.monotonic())) for o in outcomes],
            ),
            Row("sent again, because no answer came", [(o.ledger.resent, None) for o in outcomes], is_detail=True),
        ]
        for index, (channel, count) in enumerate(AUDIENCES.items()):
            heard = [outcome.audiences[index] for outcome in outcomes]
            rows += [
                Row(
                    f"delivered on channel {channel} ({count} consumer{'s' if count > 1 else ''})",
                    [(sum(each.delivered), each.meter.rate(time.monotonic())) for each in heard],
                ),
                Row("delivered more than once", [(each.repeated, None) for each in heard], is_detail=True),
            ]
        rows += [
            Row("archived in Parquet", [(o.verdict.archived, o.archived.rate(time.monotonic())) for o in outcomes]),
            Row("stored twice, because sent again", [(v.stored_twice, None) for v in verdicts], is_detail=True),
            Row(
                "duplicates made by nsqd or Spark",
                [(v.archived_twice + v.invented, None) for v in verdicts],
                is_bad=True,
            ),
            Row(
                "altered, skipped or out of order",
                [(v.altered + v.skipped + v.out_of_order, None) for v in verdicts],
                is_bad=True,
            ),
            Row("lost", [(outcome.lost, None) for outcome in outcomes], is_bad=True),
        ]
        self._screen.table(["run 1", "run 2"], rows)
        cores = os.cpu_count()
        self._screen.say(f"msg/s: from the first message of a stage to its last; all stages at once on {cores} cores")
        is_good = all(outcome.is_good for outcome in outcomes)
        self._screen.loud(self._sentence(is_good, sum(verdict.stored_twice for verdict in verdicts)), is_good)

    def _sentence(self, is_good: bool, stored_twice: int) -> str:
        if not is_good:
            return f"This is not as it should be: see the red lines, and the logs in {self._directory}."
        if not stored_twice:
            return "Nothing is lost: every acknowledged flight is in the Parquet exactly once."
        return (
            "Nothing is lost: every acknowledged flight is in the Parquet, exactly once for each time nsqd stored it.\n"
            f"{stored_twice:,} are stored twice: nsqd died after it had stored them and before it could say so, "
            "so they were sent again."
        )

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


def delays_so_far(event: Event, carriers: Mapping[str, str]) -> str:
    """What Spark has computed of what is archived so far; it says how much of it was compared."""
    code, month, minutes, flights = event["worst"]
    left_out = ""
    if event["too_small"]:
        left_out = f"; {event['too_small']} pairs with fewer than {FLIGHTS_MIN} flights are left out"
    return (
        f"delays, from {event['rows']:,} flights archived so far: of {event['compared']} pairs of carrier and month "
        f"the worst is {carriers.get(code, code)} in {calendar.month_name[month]}, {minutes:.0f} minutes on average "
        f"of {flights:,} flights{left_out}"
    )


async def _until(condition: Callable[[], Awaitable[bool]], what: str, log_path: Path) -> None:
    deadline = time.monotonic() + _READY_S_MAX
    while not await condition():
        if time.monotonic() > deadline:
            raise DemoFailed(f"{what} after {_READY_S_MAX:g} s", f"see {log_path}")
        await asyncio.sleep(_POLL_S)
