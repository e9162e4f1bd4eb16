"""``nsq_to_http``: make an HTTP request of each message.

Rules of this file: a message is finished when its request was answered well, given back otherwise, and never dropped;
the status is the answer, whatever is wrong with what follows it; a target that stalls has its share of the requests
under way and not more, so that the others go on; a request that takes long has its message touched meanwhile.

Source: NSQ 1.3, apps/nsq_to_http; NSQ's options.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import ssl
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, ClassVar
from urllib.parse import quote_plus

from flintmq.client.aio.consumer import Consumer
from flintmq.client.core.message import Message
from flintmq.errors import OptionError, UsageError, without_credentials
from flintmq.net.http_client import HttpClient
from flintmq.net.http_exchange import NoAnswer, Request
from flintmq.options import (
    SECOND,
    Choice,
    Duration,
    Integer,
    Number,
    Repeated,
    Switch,
    Text,
    option,
    read_command,
    version_line,
)
from flintmq.tools.asking import https_context
from flintmq.tools.client_opts import ClientOpts
from flintmq.tools.consuming import (
    HOW,
    WHAT,
    ConsumingOptions,
    check_topics,
    log_to_stderr,
    on_signals,
    run_to_end,
)
from flintmq.tools.host_pool import HOSTPOOL, MODES, ROUND_ROBIN, HostPool
from flintmq.tools.status_log import StatusLog
from flintmq.wire.identify import NSQ_VERSION

log = logging.getLogger(__name__)

MULTICAST = "multicast"
ANSWER_BYTES_MAX = 4 * 1024 * 1024
"""Of the body of an answer, which is thrown away; of one that is longer no more is read."""
REMEMBERED_MAX = 10_000
"""Messages of which it is known that some targets have them, and others not."""
_TO = "Where to"
_CONTENT_TYPE = "application/octet-stream"
_OK = 200
_PLACE = "%s"
_HEADER = re.compile(r"\s*([!#$%&'*+.^_`|~0-9A-Za-z-]+)\s*:\s*(\S(?:.*\S)?)\s*")
_OURS = ("Host", "Content-Length", "Connection", "Transfer-Encoding")
_LATER = (408, 425, 429)  # of the 4xx: it is not the message


class _Part(Number):
    """A number that is wrong on the command line, not in the start of a daemon."""

    def from_text(self, text: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise ValueError(self.refusal) from None

    def check(self, value: Any) -> None:
        if not isinstance(value, float) or not self.above < value <= self.maximum:
            raise ValueError(self.refusal)


@dataclass(frozen=True, kw_only=True)
class ToHttpOptions(ConsumingOptions):
    """The flags of nsq_to_http."""

    program: ClassVar[str] = "nsq_to_http"
    summary: ClassVar[str] = "nsq_to_http makes an HTTP request of each message of a topic."

    topic: str = option(Text("TOPIC"), "", "the topic to consume", group=WHAT)
    channel: str = option(Text("CHANNEL"), "nsq_to_http", "its channel", group=WHAT)
    sample: float = option(
        _Part(-1e-9, 1.0, "--sample must be between 0.0 and 1.0"),
        1.0,
        "the part of the messages of which a request is made, 0 to 1; the others are finished",
        group=WHAT,
    )
    post: tuple[str, ...] = option(
        Repeated(Text("URL")), (), "where to POST bodies to (may be given multiple times)", group=_TO
    )
    get: tuple[str, ...] = option(
        Repeated(Text("URL")), (), "where to GET; %s is replaced by the body (may be given multiple times)", group=_TO
    )
    mode: str = option(
        Choice((*MODES, MULTICAST), aliases={"all": MULTICAST}),
        HOSTPOOL,
        "which target is next: one after the other without those that fail, one after the other, the quicker ones "
        "more, or all of them",
        group=_TO,
    )
    header: tuple[str, ...] = option(
        Repeated(Text("NAME: VALUE")), (), "a header of the requests (may be given multiple times)", group=_TO
    )
    content_type: str = option(Text("TYPE"), _CONTENT_TYPE, "Content-Type of POST requests", group=_TO)
    http_client_connect_timeout_ns: int = option(
        Duration(1), 2 * SECOND, "the most time that connecting takes", group=_TO
    )
    http_client_request_timeout_ns: int = option(
        Duration(1), 20 * SECOND, "the most time that a whole request takes", group=_TO
    )
    http_client_tls_root_ca_file: str = option(
        Text("FILE"), "", "whom to trust, for https, PEM", group=_TO, origin="flintmq", default_text="the system's"
    )
    http_client_tls_cert: str = option(Text("FILE"), "", "certificate to show, PEM", group=_TO, origin="flintmq")
    http_client_tls_key: str = option(Text("FILE"), "", "its key, PEM", group=_TO, origin="flintmq")
    http_client_tls_insecure_skip_verify: bool = option(
        Switch(), False, "trust everybody, also whoever sits between", group=_TO, origin="flintmq"
    )
    n: int = option(Integer(1, 10_000), 100, "the most requests at a time", group=HOW)
    status_every: int = option(Integer(0), 250, "log how long requests took, after this many; 0: never", group=HOW)

    def check_whole(self) -> None:
        """Refuse what nsq_to_http refuses, and what cannot be sent.

        Raises:
            UsageError, OptionError: it is one of these.
        """
        if not self.topic or not self.channel:
            raise UsageError("--topic and --channel are required")
        check_topics([self.topic])
        check_topics([self.channel], "--channel")
        if self.content_type != _CONTENT_TYPE and not self.post:
            raise UsageError("--content-type only used with --post")
        if not self.content_type:
            raise UsageError("--content-type requires a value when used")
        super().check_whole()
        if not self.get and not self.post:
            raise UsageError("--get or --post required")
        if self.get and self.post:
            raise UsageError("use --get or --post not both")
        for url in self.get:
            if url.count(_PLACE) != 1:
                raise OptionError("--get", url, "invalid GET address - must be a printf string: %s, once", "flag")
        for flag, urls in (("--get", self.get), ("--post", self.post)):
            for url in urls:
                try:
                    _request(url, flag == "--get", b"x", self.headers()).encode()
                except NoAnswer as error:
                    raise OptionError(flag, url, error.reason, "flag") from error

    def headers(self) -> dict[str, str]:
        """Return the headers of a request.

        Raises:
            OptionError: one is none.
        """
        headers = {"User-Agent": f"nsq_to_http v{NSQ_VERSION}"}
        if self.post:
            headers["Content-Type"] = self.content_type
        return headers | {name: value for name, value in self._given_headers() if name not in _OURS}

    def headers_left_out(self) -> list[str]:
        """Return the names of those that were given and are not sent."""
        return [name for name, _ in self._given_headers() if name in _OURS]

    def _given_headers(self) -> Iterator[tuple[str, str]]:
        for each in self.header:
            match = _HEADER.fullmatch(each)
            if match is None:
                raise OptionError("--header", each, "it must be 'Name: value'", "flag")
            yield "-".join(word.capitalize() for word in match[1].split("-")), match[2]

    def tls(self) -> ssl.SSLContext:
        """Return whom to trust and what to show.

        Raises:
            UsageError: a certificate without a key, or a key without a certificate.
            OptionError: a file cannot be used.
        """
        return https_context(
            self.http_client_tls_root_ca_file,
            self.http_client_tls_cert,
            self.http_client_tls_key,
            is_verified=not self.http_client_tls_insecure_skip_verify,
        )


def run(arguments: Sequence[str]) -> int:
    """Run nsq_to_http; return its exit code.

    Raises:
        FlintError: the command line is wrong, or every nsqd refuses.
    """
    options = read_command(ToHttpOptions, arguments, "nsq_to_http", version_line("nsq_to_http", NSQ_VERSION))
    if options is None:
        return 0
    options.check_whole()
    targets = Targets(options)
    log_to_stderr()
    for name in options.headers_left_out():
        log.warning("--header=%s is not sent: it follows from the request", name)
    return run_to_end(Requesting(options, options.client_opts(), targets).run())


def _request(url: str, is_get: bool, body: bytes, headers: Mapping[str, str]) -> Request:
    """Return the request for a body; raises NoAnswer if there is none."""
    if not is_get:
        return Request.to("POST", url, headers, body)
    before, after = url.split(_PLACE)
    # for NSQ's, which takes the URL for a format, %% is a percent sign
    return Request.to("GET", f"{before.replace('%%', '%')}{quote_plus(body)}{after.replace('%%', '%')}", headers)


class Failed(Exception):
    """A request was not answered well.

    Attributes:
        is_about_message: others may do better, the target is well.
    """

    def __init__(self, reason: str, is_about_message: bool = False) -> None:
        super().__init__(reason)
        self.is_about_message = is_about_message


class Targets:
    """The addresses that requests go to."""

    def __init__(self, options: ToHttpOptions) -> None:
        self.urls = tuple(dict.fromkeys(options.post or options.get))
        self.pool = HostPool(self.urls, options.mode, monotonic, random.SystemRandom())
        self._is_get = bool(options.get)
        self._headers = options.headers()
        self._posts = {} if self._is_get else {url: _request(url, False, b"", self._headers) for url in self.urls}
        self._timeout_s = options.http_client_request_timeout_ns / SECOND
        self._connect_timeout_s = options.http_client_connect_timeout_ns / SECOND
        self._context = options.tls()
        self._client = HttpClient(idle_max=options.n)
        self._each: dict[str, StatusLog] = {}
        if len(self.urls) > 1:
            self._each = {
                url: StatusLog(options.status_every, f"[{without_credentials(url)}]:", monotonic) for url in self.urls
            }

    async def send(self, url: str, body: bytes) -> None:
        """Make the request of a body, and note how it went.

        Raises:
            Failed: it was not answered well.
        """
        began = monotonic()
        try:
            status = await self._ask(_request(url, True, body, self._headers) if self._is_get else
                                     replace(self._posts[url], body=body), began)  # fmt: skip
        except NoAnswer as error:
            self.pool.mark(url, False, monotonic() - began)
            raise Failed(str(error)) from error
        took_s = monotonic() - began
        is_well = status == _OK if self._is_get else _OK <= status < 300
        is_about_message = 400 <= status < 500 and status not in _LATER
        self.pool.mark(url, is_well or is_about_message, took_s)
        if not is_well:
            raise Failed(f"got status code {status}", is_about_message)
        if self._each:
            self._each[url].note(took_s)

    async def _ask(self, request: Request, began: float) -> int:
        """Return the status of the answer; raises NoAnswer if there is none."""
        try:
            return await self._ask_once(request, self._timeout_s, may_keep=True)
        except NoAnswer as error:
            left_s = self._timeout_s - (monotonic() - began)
            has_timed_out = isinstance(error.__cause__, TimeoutError) or left_s <= 0
            if error.error is not None or error.tls_name is not None or has_timed_out:
                raise
            # the server may have closed a kept connection just then
            return await self._ask_once(request, left_s, may_keep=False)

    async def _ask_once(self, request: Request, timeout_s: float, may_keep: bool) -> int:
        try:
            answer = await self._client.ask(
                request,
                timeout_s=timeout_s,
                connect_timeout_s=self._connect_timeout_s,
                context=self._context if request.endpoint.is_secured else None,
                body_bytes_max=ANSWER_BYTES_MAX,
                may_keep=may_keep,
            )
        except NoAnswer as error:
            if error.status:  # who has answered has the message, however the answer ends
                return error.status
            raise
        return answer.status

    async def close(self) -> None:
        """Let connections go."""
        await self._client.close()


class Requesting:
    """Messages that are being made requests of.

    Args:
        chance: for ``--sample``.
    """

    def __init__(
        self, options: ToHttpOptions, opts: ClientOpts, targets: Targets, chance: random.Random | None = None
    ) -> None:
        self._targets = targets
        self._mode = options.mode
        self._sample = options.sample
        self._chance = chance or random.SystemRandom()
        more: dict[str, Any] = {"max_attempts": 0, **opts.consumer}
        self._consumer: Consumer[bytes] = options.consumer(options.topic, options.channel, opts, **more)
        self._share = -(-options.n // len(targets.urls))
        self._under_way: Counter[str] = Counter()
        self._has_room = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._has: OrderedDict[bytes, set[str]] = OrderedDict()
        self._all = StatusLog(options.status_every, "[aggregate]:", monotonic)
        self._is_stopped = False
        self._failure: BaseException | None = None

    async def run(self) -> int:
        """Make requests until it is told to end.

        Raises:
            FlintError: every nsqd refuses.
        """
        task = asyncio.current_task()
        assert task is not None
        on_signals(task.cancel)
        try:
            async with self._consumer as consumer:
                on_signals(self._stop)
                try:
                    async for message in consumer:
                        if self._sample < 1.0 and self._chance.random() >= self._sample:
                            message.finish()
                        else:
                            await self._begin(message)
                finally:
                    if self._tasks:
                        await asyncio.wait(self._tasks)
        except asyncio.CancelledError:
            pass  # it was told to end before it had begun
        finally:
            await self._targets.close()
        if self._failure is not None:
            raise self._failure
        return 0

    def _stop(self) -> None:
        """Consume nothing more; the second time, give up what is under way."""
        if self._is_stopped:
            for task in self._tasks:
                task.cancel()
        self._is_stopped = True
        self._consumer.stop()

    async def _begin(self, message: Message[bytes]) -> None:
        """Begin the request, or the requests, of a message when there is room."""
        if self._mode == MULTICAST:
            urls = [url for url in self._targets.urls if url not in self._has.get(message.id, ())]
            for url in urls:
                await self._take([url])
        else:
            urls = [await self._take(self._targets.urls)]
        if message.is_lost:  # it waited too long for room, and comes again
            message.requeue(0)
            for url in urls:
                await self._leave(url)
            return
        task = asyncio.get_running_loop().create_task(self._handle(message, urls))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._consumer.stop()

    async def _take(self, urls: Sequence[str]) -> str:
        """Wait for room at one of these targets, and take it."""
        async with self._has_room:
            while True:
                free = [url for url in urls if self._under_way[url] < self._share]
                if free:
                    break
                await self._has_room.wait()
            url = free[0] if len(urls) == 1 else self._choose(free)
            self._under_way[url] += 1
            return url

    def _choose(self, free: Sequence[str]) -> str:
        """Return the next one of the pool that has room."""
        for _ in self._targets.urls:
            url = self._targets.pool.get()
            if url in free:
                return url
        return free[0]

    async def _leave(self, url: str) -> None:
        async with self._has_room:
            self._under_way[url] -= 1
            self._has_room.notify_all()

    async def _handle(self, message: Message[bytes], urls: Sequence[str]) -> None:
        began = monotonic()
        sending = [asyncio.get_running_loop().create_task(self._send(url, message)) for url in urls]
        try:
            await self._wait(message, sending)
        except asyncio.CancelledError:
            for task in sending:
                task.cancel()
            await asyncio.wait(sending)
            message.requeue(0)
            return
        errors = [error for task in sending if (error := task.exception()) is not None]
        failures = [error for error in errors if isinstance(error, Failed)]
        if len(failures) < len(errors):  # a mistake of ours, and no request
            message.requeue(backoff=True)
            raise next(error for error in errors if not isinstance(error, Failed))
        if self._mode == MULTICAST and failures:
            self._remember(message, {url for url, task in zip(urls, sending, strict=True) if not task.exception()})
        if not failures:
            self._has.pop(message.id, None)
            message.finish()
            self._all.note(monotonic() - began)
            return
        # what is wrong with one message is no reason to send no others
        message.requeue(backoff=not all(failure.is_about_message for failure in failures))

    async def _wait(self, message: Message[bytes], sending: Sequence[asyncio.Task[None]]) -> None:
        """Wait for requests, and keep their message meanwhile."""
        waiting: set[asyncio.Task[None]] = {*sending}
        while waiting:
            _, waiting = await asyncio.wait(waiting, timeout=max(0.1, message.time_left / 2))
            if waiting and not message.is_lost:
                message.touch()

    async def _send(self, url: str, message: Message[bytes]) -> None:
        """Make a request; of several targets another one is asked at once where one does not answer."""
        tried: set[str] = set()
        while True:
            tried.add(url)
            try:
                await self._targets.send(url, message.body)
                return
            except Failed as failure:
                log.error("%s: message %r: %s", without_credentials(url), message.id, failure)
                others = () if failure.is_about_message else self._others(tried)
                if not others:
                    raise
            finally:
                await self._leave(url)
            url = await self._take(others)

    def _others(self, tried: set[str]) -> Sequence[str]:
        if self._mode in (MULTICAST, ROUND_ROBIN):
            return ()
        return [url for url in self._targets.urls if url not in tried]

    def _remember(self, message: Message[bytes], urls: set[str]) -> None:
        """Note who has a message that comes again."""
        self._has.setdefault(message.id, set()).update(urls)
        self._has.move_to_end(message.id)
        while len(self._has) > REMEMBERED_MAX:
            self._has.popitem(last=False)
