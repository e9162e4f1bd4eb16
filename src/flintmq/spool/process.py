"""A spool from its start to its end.

It is told everything in one line of JSON on its standard input, says in one line on its standard output where it
listens, and ends when its standard input does: with whoever started it, in whatever way that ended.

::

    {"directory": "/data/spool", "topics": ["clicks"], "channel": "spark", ...}   ->   see Settings
    {"address": "127.0.0.1:41234", "logs": {"clicks": "187a..."}}                  <-
    {"failed": "..."}                                                              <-   if it will end by itself

In ``directory`` (one process at a time, by flock)::

    spool.json          version, channel, by topic everything below which was read and committed, and whether it was
                        ended well
    t-<topic>/          a log of flintmq.storage: segments named by their first offset
    token               that clients have to say; its reader is the owner alone

The rules of this file: the directory is checked before anything is written to it; ``spool.json`` has one writer at a
time, so who writes it is not cancelled: its thread would go on, in the file that the next one writes.

Source: docs/decisions/0032.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
import threading
from contextlib import suppress
from typing import Any

import msgspec

from flintmq.client.aio.consumer import BulkConsumer
from flintmq.client.core.subscribing import EXTEND_CODES
from flintmq.env import Env
from flintmq.errors import UNREADABLE_JSON, DataPathLocked, FlintError, NsqdError, StorageError
from flintmq.limits import BATCH_SIZE_MAX, DISK_RESERVE_BYTES
from flintmq.net.address import ListenFailed
from flintmq.net.listen import listen
from flintmq.net.loop import loop_factory
from flintmq.spark.errors import EXIT_TAKEN
from flintmq.spark.link import consumer_options
from flintmq.spark.options import LinkOptions
from flintmq.spool.feed import TICK_S, Feed
from flintmq.spool.headers import HeadersDiffer, Said, ask, what_holds
from flintmq.spool.server import Connection, Service
from flintmq.storage import (
    Corruption,
    File,
    FileIdentity,
    MemoryLog,
    OsFile,
    OsFiles,
    PartitionLog,
    ReadCache,
    replace_file,
)

FORM = 1
STATE = "spool.json"
STATE_SIZE_MAX = 1 << 20
SEGMENT_BYTES_MAX = 64 << 20
SEGMENTS_MIN = 8  # of the most bytes that are kept, so that what is read can go
FRAME_SIZE_MAX = BATCH_SIZE_MAX - (1 << 20)
SETTINGS_SIZE_MAX = 1 << 20
STATE_INTERVAL_S = 0.5
LOOK_S = 1.0
"""Between two looks whether the directory is still where it was; besides, each sync looks before it counts."""
DISK_BYTES_MIN = DISK_RESERVE_BYTES + (4 << 20)
"""A smaller file system has no room for messages beside the reserve, however empty it is."""
STATE_SLOW_S = 5.0
"""So long the end waits for a write of ``spool.json`` before it says so."""
HEARD_S = 5.0
"""The time that who started a spool has to hear that it ends by itself; until then it can be asked."""
ASK_AGAIN_S = 2.0
"""Between two questions to an nsqd that is away, whether a topic has headers there."""
QUIET_S = 1.0
"""So long nothing old has to come before everything has: nsqd hands out what waits as fast as it is taken. What was in
flight when a spool was killed comes only after its message timeout."""

log = logging.getLogger("flintmq.spool")


class Settings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """All that a spool is told.

    Attributes:
        directory: of its logs; empty: they are in memory, and messages are finished when they are committed.
        token_file: where clients find the token.
        nsqd, lookupd: where messages come from; one of the two.
        bytes_max: of one topic that are kept.
        host, port: to listen on; another port is taken if that one cannot be had.
        ends: find out when all that waited in nsqd has been taken.
        link: how connections are secured: fields of :class:`flintmq.spark.options.LinkOptions`.
    """

    directory: str
    token_file: str
    topics: list[str]
    channel: str
    nsqd: list[str]
    lookupd: list[str]
    max_in_flight: int
    bytes_max: int
    host: str
    port: int
    msg_timeout: float
    connect_timeout: float
    lookupd_poll_interval: float
    link: dict[str, Any]
    ends: bool = False


class _State(msgspec.Struct, kw_only=True):
    version: int
    channel: str
    floors: dict[str, int]
    is_ended: bool = True


class NotThisSpool(FlintError):
    """A directory is no spool, or another one.

    Args:
        directory: it.
        reason: what it is instead.
    """

    def __init__(self, directory: str, reason: str) -> None:
        super().__init__(directory, reason)
        self.directory = directory
        self.reason = reason

    def __str__(self) -> str:
        return f"spoolLocation {self.directory}: {self.reason}"


class SpoolTaken(NotThisSpool):
    """Another process has the directory."""


def main() -> int:
    """Run a spool; return its exit code, and unless that is 0 the reason as the last line on standard error.

    Returns:
        0, 1, or ``EXIT_TAKEN`` where another process has the directory.
    """
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        line = sys.stdin.buffer.readline(SETTINGS_SIZE_MAX)
        settings = msgspec.json.decode(line, type=Settings)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_run(settings))
    except SpoolTaken as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_TAKEN
    except (FlintError, OSError, *UNREADABLE_JSON) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


async def _run(settings: Settings) -> None:
    env, end = Env(), asyncio.get_running_loop().create_future()
    files = _open(settings.directory) if settings.directory else None
    try:
        state = _read_state(files, settings)
        token = _write_token(settings.token_file)  # now that nobody else's is there
        try:
            await Spool(env, settings, files, state, end).run(token, end)
        finally:
            with suppress(FileNotFoundError):  # another driver has removed what this one's, which was killed, left
                os.unlink(settings.token_file)
                if files is None:
                    os.rmdir(os.path.dirname(settings.token_file))
    finally:
        if files is not None:
            files.close()


class Spool:
    """One spool.

    Args:
        files: of its directory; None: it keeps nothing.
    """

    def __init__(
        self, env: Env, settings: Settings, files: OsFiles | None, state: _State, end: asyncio.Future[None]
    ) -> None:
        self._env = env
        self._settings = settings
        self._files = files
        self._state = state
        self._end = end
        self._cache = ReadCache()
        self._quiet_s = QUIET_S if state.is_ended else QUIET_S + settings.msg_timeout
        self._link = LinkOptions(**settings.link)
        self._feeds = {topic: self._feed(topic) for topic in settings.topics}
        self._has_headers = dict.fromkeys(settings.topics, False)  # as far as is known
        self._is_state_due = False
        self._has_stopped = asyncio.Event()  # nothing more is read
        self._is_left = asyncio.Event()

    def _feed(self, topic: str) -> Feed:
        settings, wall_ns = self._settings, self._env.clock.wall_ns()
        partition_log: PartitionLog | MemoryLog
        if self._files is None:
            partition_log = MemoryLog(0, 1, log_id=wall_ns)
        else:
            partition_log = PartitionLog.open(
                self._files,
                f"t-{topic}",
                partition=0,
                segment_bytes=max(1 << 16, min(SEGMENT_BYTES_MAX, settings.bytes_max // SEGMENTS_MIN)),
                cache=self._cache,
                report=_damaged,
                created_ns=wall_ns,
            )
        return Feed(
            topic,
            partition_log,
            self._consumer(topic, has_headers=False),
            self._env,
            is_kept=self._files is not None,
            bytes_max=settings.bytes_max,
            in_flight_max=settings.max_in_flight,
            floor=self._state.floors.get(topic, 1),
            quiet_s=self._quiet_s,
            is_ending=self._settings.ends,
            fail=self._fail,
            gone=self._gone_file,
        )

    def _consumer(self, topic: str, has_headers: bool) -> BulkConsumer:
        settings = self._settings
        return BulkConsumer(
            topic,
            settings.channel,
            nsqd_tcp_addresses=settings.nsqd,
            nsqlookupd_http_addresses=settings.lookupd,
            max_in_flight=settings.max_in_flight,
            options=consumer_options(self._link, settings.connect_timeout, FRAME_SIZE_MAX),
            msg_timeout=settings.msg_timeout,
            lookup_interval=max(1.0, settings.lookupd_poll_interval),
            headers=has_headers,
        )

    def _fail(self, error: BaseException) -> None:
        if not self._end.done():
            self._end.set_exception(error)

    def _stop(self) -> None:
        self._is_left.set()
        if not self._end.done():
            self._end.set_result(None)

    async def run(self, token: bytes, end: asyncio.Future[None]) -> None:
        """Serve until standard input ends.

        Raises:
            FlintError: nsqd refuses this client, the disk failed, or it cannot be listened.
        """
        settings, loop = self._settings, asyncio.get_running_loop()
        service = Service(self._feeds, settings.channel, token, self._moved)
        listener = await _listen(lambda: Connection(service), settings)
        await self._write_state()
        logs = {topic: f"{feed.log.log_id:016x}" for topic, feed in self._feeds.items()}
        _say({"address": listener.name, "logs": logs})
        threading.Thread(target=_wait_for_end, args=(loop, self._stop), name="stdin", daemon=True).start()
        tasks = [loop.create_task(self._consume(feed)) for feed in self._feeds.values()]
        tasks.append(loop.create_task(self._tick()))
        if self._files is not None:
            tasks.append(loop.create_task(self._watch()))
        writer = loop.create_task(self._write_states())
        for task in (*tasks, writer):
            task.add_done_callback(self._task_ended)
        try:
            await end
        except (FlintError, OSError) as error:
            _say({"failed": str(error)})
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARD_S):  # else a question that is under way finds nobody there
                    await self._is_left.wait()
            raise
        finally:
            listener.close()
            service.close()
            for feed in self._feeds.values():
                await feed.close()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await self._write_last_state(writer)

    async def _consume(self, feed: Feed) -> None:
        """Take a topic until its consumer ends.

        An nsqd that refuses a consumer because of headers is asked again as it wants: the topic may have been given
        some, or been created anew. Nsqds that contradict each other in that are given up.

        Raises:
            FlintError: nsqd refuses it for good.
        """
        topic = feed.topic
        has_headers, away = await self._learn(topic)
        late = asyncio.create_task(self._check_late(topic, away))
        late.add_done_callback(self._task_ended)
        tried: set[bool] = set()
        try:
            while True:
                tried.add(has_headers)
                self._has_headers[topic] = has_headers
                feed.use(self._consumer(topic, has_headers))
                try:
                    await feed.consumer.start()
                    tried.clear()  # all of them took it
                    async for _ in feed.consumer:
                        raise AssertionError("deliveries are taken before they become messages")
                    return
                except NsqdError as error:
                    if error.code not in EXTEND_CODES:
                        raise
                    has_headers = error.code == "E_SUB_EXTEND_NEED"
                    if has_headers in tried:
                        raise (HeadersDiffer(topic) if self._settings.nsqd else error) from None
                    how = "with headers" if has_headers else "without headers"
                    log.warning("nsqd %s wants topic %s to be consumed %s, so it is", error.nsqd, topic, how)
                await feed.consumer.close()
        finally:
            late.cancel()

    async def _learn(self, topic: str) -> tuple[bool, list[str]]:
        """Return whether a topic has headers, and the nsqds that are yet to say it.

        Raises:
            HeadersDiffer: it has some on one nsqd, and none on another.
        """
        away = list(self._settings.nsqd)  # nsqlookupd say it to the consumer
        is_told = False
        while away:
            said = await self._ask(topic, away)
            left = [address for address, each in said.items() if each is Said.AWAY]
            if len(left) < len(away):
                return what_holds(topic, said.values()), left
            if not is_told:
                log.warning("topic %s: waiting for nsqd %s", topic, ",".join(away))
                is_told = True
            await asyncio.sleep(ASK_AGAIN_S)
        return False, []

    async def _check_late(self, topic: str, away: list[str]) -> None:
        """Hear those who were away when the consumer began: a plain topic gives the bodies alone, and does not say so.

        Raises:
            HeadersDiffer: the topic has headers there, and the consumer asks for none.
        """
        while away:
            await asyncio.sleep(ASK_AGAIN_S)
            said = await self._ask(topic, away)
            if Said.YES in said.values() and not self._has_headers[topic]:
                raise HeadersDiffer(topic)
            away = [address for address in away if said[address] is Said.AWAY]

    async def _ask(self, topic: str, addresses: list[str]) -> dict[str, Said]:
        timeout_s, run = self._settings.connect_timeout, self._env.run_blocking
        said = await asyncio.gather(*(run(ask, address, topic, self._link, timeout_s) for address in addresses))
        return dict(zip(addresses, said, strict=True))

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for feed in self._feeds.values():
                feed.tick()

    def _gone_file(self, path: str, file: File | None) -> str:
        return self._gone(path, file.identity() if isinstance(file, OsFile) else None)

    def _gone(self, path: str, identity: FileIdentity | None) -> str:
        """Say why the next start would not find something in the directory; empty when it would. Blocks.

        Args:
            identity: of what has to have this path; None: whatever it is.
        """
        files = self._files
        assert files is not None, "what is in memory has no place"
        if files.displaced():
            what = "it is not there any more"
        elif (found := files.identity(path)) is None:
            what = f"{path} in it is not there any more"
        elif identity not in (None, found):
            what = f"{path} in it is another one than the spool writes to"
        else:
            return ""
        return (
            f"spoolLocation {files.root}: {what}: it was removed, moved, or something was mounted over it. No more "
            "messages are finished in nsqd. Put it back and start the query again; if it cannot be, what was stored "
            "there and not yet read is lost: start with failOnDataLoss=false, or a new checkpoint"
        )

    async def _watch(self) -> None:
        """Look now and then whether all is still there: what is finished in nsqd is nowhere else.

        Raises:
            StorageError: it is not.
        """
        assert self._files is not None, "what is in memory has no place"
        places = {path: self._files.identity(path) for path in (f"t-{topic}" for topic in self._feeds)}
        while True:
            await asyncio.sleep(LOOK_S)
            for path, identity in places.items():
                if gone := await self._env.run_blocking(self._gone, path, identity):
                    raise StorageError(gone)

    # -- what is known over a restart ---------------------------------------------------------------------------------

    def _moved(self) -> None:
        self._is_state_due = True

    async def _write_states(self) -> None:
        while not self._has_stopped.is_set():
            if self._is_state_due:
                await self._write_state()
            with suppress(TimeoutError):
                async with asyncio.timeout(STATE_INTERVAL_S):  # of the pause alone: a write is never cut short
                    await self._has_stopped.wait()

    async def _write_last_state(self, writer: asyncio.Task[None]) -> None:
        """Write down that this is the end, behind what is being written.

        However long a disk takes, the directory is kept until then: who takes it next writes the same file. Who started
        this process kills it when that is too long.
        """
        self._has_stopped.set()
        if not (await asyncio.wait([writer], timeout=STATE_SLOW_S))[0]:
            log.error("%s of the spool is being written for %g s: waiting for the disk", STATE, STATE_SLOW_S)
            await asyncio.wait([writer])
        await self._write_state(is_ended=True)

    async def _write_state(self, is_ended: bool = False) -> None:
        """Write down how far reading is; behind a kill a new query begins a little earlier."""
        if self._files is None:
            return
        self._is_state_due = False
        self._state.is_ended = is_ended
        self._state.floors |= {topic: feed.floor for topic, feed in self._feeds.items()}
        try:
            await self._env.run_blocking(replace_file, self._files, STATE, msgspec.json.encode(self._state))
        except OSError as error:
            log.error("%s of the spool cannot be written: %s", STATE, error)


def _say(what: dict[str, Any]) -> None:
    try:
        sys.stdout.write(msgspec.json.encode(what).decode() + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        pass  # who started it has ended, and so does this


def _open(directory: str) -> OsFiles:
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        info = os.statvfs(directory)
        if 0 < info.f_blocks * info.f_frsize < DISK_BYTES_MIN:  # 0: it does not say
            size = info.f_blocks * info.f_frsize
            raise NotThisSpool(
                directory,
                f"its file system has {size} bytes in all, a spool needs at least {DISK_BYTES_MIN}, of which "
                f"{DISK_RESERVE_BYTES} always stay free: choose a larger one, or mode=direct",
            )
        return OsFiles(directory)
    except DataPathLocked as error:
        reason = "another process has it: each query needs a directory and a channel of its own"
        raise SpoolTaken(directory, reason) from error
    except OSError as error:
        raise NotThisSpool(directory, f"it cannot be used: {error.strerror or error}") from error


def _read_state(files: OsFiles | None, settings: Settings) -> _State:
    """Return what a directory says of itself.

    Raises:
        NotThisSpool: it is not this one.
    """
    new = _State(version=FORM, channel=settings.channel, floors={})
    if files is None:
        return new
    names = files.list("")
    if STATE not in names:
        ours = ("token", f"{STATE}.tmp")  # a kill leaves the latter over the first write
        others = [name for name in names if not name.startswith(ours)]
        if others:
            raise NotThisSpool(files.root, f"it is no spool and not empty: {', '.join(sorted(others)[:5])}")
        try:
            replace_file(files, STATE, msgspec.json.encode(new))
            files.sync_directory("")
        except OSError as error:
            raise StorageError(f"{STATE} cannot be written: {error.strerror or error}") from error
        return new
    file = files.open(STATE)
    try:
        state = msgspec.json.decode(file.read_at(0, STATE_SIZE_MAX), type=_State)
    except UNREADABLE_JSON as error:
        reason = f"{STATE} is damaged ({error}): remove that file, and what is still there is read from its beginning"
        raise NotThisSpool(files.root, reason) from error
    finally:
        file.close()
    if state.version != FORM:
        raise NotThisSpool(files.root, f"form {state.version}; this release knows {FORM}")
    if state.channel != settings.channel:
        raise NotThisSpool(files.root, f"it is of channel {state.channel!r}, not {settings.channel!r}")
    return state


def _write_token(path: str) -> bytes:
    token = secrets.token_hex(16).encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(token)
    return token


async def _listen(new_connection: Any, settings: Settings) -> Any:
    """Listen where tasks that began before a restart still look, if that can be had."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    if settings.port:
        try:
            return await listen(new_connection, f"{host}:{settings.port}")
        except ListenFailed as error:
            log.warning("%s; taking another port", error)
    return await listen(new_connection, f"{host}:0")


def _wait_for_end(loop: asyncio.AbstractEventLoop, stop: Any) -> None:
    while os.read(sys.stdin.fileno(), 4096):  # not through the buffer, whose lock the end of the process would wait for
        pass
    try:
        loop.call_soon_threadsafe(stop)
    except RuntimeError:
        pass  # it has ended by itself


def _damaged(found: Corruption) -> None:
    log.error("%s", found)
