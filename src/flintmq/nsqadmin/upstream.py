"""Questions to the daemons over HTTP: many at a time, each with a deadline, none of which fails the others.

Rules of this file:

- Looking takes at most ``LOOK_S`` for all who are asked together, those who wait for their turn included. A page asks
  several things one after the other: who let a look run out of time, and has answered nothing else meanwhile, has
  ``SUSPECTED_S`` for the next ones, until it answers or ``_SUSPECTED_FOR_S`` are over; so a page does not wait for the
  same daemon again and again.
- The figures of all topics take an nsqd that has thousands of them, or little CPU, longer than that. So one that is
  late with them is asked for ``/ping`` meanwhile: who answers that has until ``--http-client-request-timeout``, and is
  not suspected; who does not, is.
- Nothing is asked twice, because what was not answered may have been done; only an nsqd that has refused is: over TLS
  if it wants that, as it says itself, or with the token.
- Where options say how TLS is spoken, an nsqd is not shown the token in clear before it asks for one: it may want TLS.
- A failure is a :class:`flintmq.nsqadmin.views.Missing` with words for people. No text shows a token.

Source: NSQ's HTTP API (TLS_REQUIRED).
"""

from __future__ import annotations

import asyncio
import ssl
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from flintmq.client.admin.nsqd import ping
from flintmq.client.admin.question import HttpRefused, Question
from flintmq.client.admin.route import Routes, Step
from flintmq.client.options import why_unreachable
from flintmq.client.security import client_context
from flintmq.env import Env
from flintmq.errors import FlintError, OptionError, RemoteProtocolError
from flintmq.net.http_auth import TokenFile
from flintmq.net.http_client import HttpClient
from flintmq.net.http_exchange import Answer, NoAnswer, Request
from flintmq.nsqadmin.options import NsqadminOptions
from flintmq.nsqadmin.views import Missing, Why
from flintmq.options import SECOND

LOOK_S = 1.5
"""The most time that looking takes at a daemon that shows no life. A page has 2 s: the rest is for making it."""

SUSPECTED_S = 0.4
"""The time for a daemon that let a look run out of time, and has answered nothing else meanwhile; and for a sign of
life."""

CONCURRENT_MAX = 64
ANSWER_BYTES_MAX = 64 * 1024 * 1024
_SUSPECTED_MAX = 1024
_SUSPECTED_FOR_S = 8.0

Value = TypeVar("Value")


class NotAnswered(FlintError):
    """One daemon did not answer; ``missing`` says why."""

    def __init__(self, missing: Missing, status: int = 0, word: str = "") -> None:
        super().__init__(missing)
        self.missing = missing
        self.status = status
        self.word = word

    def __str__(self) -> str:
        return f"{self.missing.daemon} {self.missing.address}: {self.missing.text}"


@dataclass(frozen=True, slots=True)
class Answers(Generic[Value]):
    """The answers of several daemons to one question.

    Attributes:
        found: by address.
        failures: of those who did not answer.
    """

    found: dict[str, Value]
    failures: list[NotAnswered]

    @property
    def missing(self) -> list[Missing]:
        """All who did not answer."""
        return [each.missing for each in self.failures]


class Upstream:
    """Asks.

    Raises:
        OptionError: a file that is needed to ask cannot be used.
        HttpAuthFileError: there is no token in its file.
    """

    def __init__(self, options: NsqadminOptions, env: Env) -> None:
        self._options = options
        self._env = env
        self._client = HttpClient(idle_max=CONCURRENT_MAX)
        self._turns = asyncio.Semaphore(CONCURRENT_MAX)
        self._turns_of_pings = asyncio.Semaphore(CONCURRENT_MAX)  # those that are pinged may have all of the others
        self._change_s = options.http_client_request_timeout_ns / SECOND
        self._connect_s = options.http_client_connect_timeout_ns / SECOND
        self._suspected: dict[str, int] = {}  # until when, by address
        self._answered: OrderedDict[str, int] = OrderedDict()  # when they did last
        path = options.http_client_token_file
        self._token = TokenFile(path, env, "--http-client-token-file") if path else None
        named = (options.http_client_tls_root_ca_file, options.http_client_tls_cert)
        waits_for_401 = any(named) or options.http_client_tls_insecure_skip_verify
        has_token = self._token is not None
        self._routes = {
            "nsqd": Routes(has_token=has_token, waits_for_401=waits_for_401),
            "nsqlookupd": Routes(has_token=has_token),
        }
        self._context()  # files that cannot be used stop a start

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def look(self, daemon: str, address: str, question: Question[Value], within_s: float = LOOK_S) -> Value:
        """Ask one daemon.

        Raises:
            NotAnswered: it does not answer, or not in time, or not with what can be used.
        """
        return await self._look(daemon, address, question, within_s)

    async def _look(self, daemon: str, address: str, question: Question[Value], within_s: float) -> Value:
        now_ns = self._env.clock.monotonic_ns()
        is_suspected = self._suspected.get(address, 0) > now_ns
        ask = self._ask_patiently if _is_of_all_topics(question) else self._ask
        try:
            found = await ask(daemon, address, question, min(within_s, SUSPECTED_S) if is_suspected else within_s)
        except NotAnswered as error:
            if error.missing.why != "slow":
                self._suspected.pop(address, None)
            elif is_suspected and self._answered.get(address, 0) < now_ns:
                text = f"{error.missing.text}, for which alone it was asked as it had not answered before"
                raise NotAnswered(msgspec.structs.replace(error.missing, text=text)) from error
            elif not is_suspected and self._answered.get(address, 0) < now_ns:
                if len(self._suspected) >= _SUSPECTED_MAX:
                    del self._suspected[next(iter(self._suspected))]
                self._suspected[address] = self._env.clock.monotonic_ns() + int(_SUSPECTED_FOR_S * SECOND)
            raise
        self._note_life(address)
        return found

    async def _ask_patiently(self, daemon: str, address: str, question: Question[Value], within_s: float) -> Value:
        """Ask what may take long: within ``within_s``, and longer if there is a sign of life until then.

        Raises:
            NotAnswered: as :meth:`look`.
        """
        longer_s = max(within_s, self._change_s)
        loop = asyncio.get_running_loop()
        end = loop.time() + within_s
        asking = asyncio.ensure_future(self._ask(daemon, address, question, longer_s))
        living = None
        try:
            await asyncio.wait({asking}, timeout=max(0.0, within_s - SUSPECTED_S))
            if not asking.done():
                living = asyncio.ensure_future(self._lives(daemon, address, min(within_s, SUSPECTED_S)))
                await asyncio.wait({asking, living}, return_when=asyncio.FIRST_COMPLETED)
                if not asking.done() and not living.result():
                    await asyncio.wait({asking}, timeout=max(0.0, end - loop.time()))
                    if not asking.done():
                        raise _slow(daemon, address, within_s)
            return await asking
        except NotAnswered as error:
            if living is not None and living.done() and living.result() and error.missing.why == "slow":
                text = (
                    f"{error.missing.text} to the question for all of its topics, though it does answer /ping: "
                    "--http-client-request-timeout says how long that may take"
                )
                raise NotAnswered(msgspec.structs.replace(error.missing, text=text)) from error
            raise
        finally:
            left = [each for each in (asking, living) if each is not None and not each.done()]
            for each in left:
                each.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _lives(self, daemon: str, address: str, within_s: float) -> bool:
        """Return whether a daemon answers at all, however it does."""
        try:
            await self._ask(daemon, address, ping(), within_s, self._turns_of_pings)
        except NotAnswered as error:
            if error.missing.why in ("slow", "down"):
                return False
        self._note_life(address)
        return True

    def _note_life(self, address: str) -> None:
        self._suspected.pop(address, None)
        self._answered[address] = self._env.clock.monotonic_ns()
        self._answered.move_to_end(address)
        if len(self._answered) > _SUSPECTED_MAX:
            self._answered.popitem(last=False)

    async def change(self, daemon: str, address: str, question: Question[Value]) -> Value:
        """Have one daemon change something, within ``--http-client-request-timeout``.

        Raises:
            NotAnswered: as :meth:`look`.
        """
        return await self._ask(daemon, address, question, self._change_s)

    async def look_all(
        self, daemon: str, addresses: Iterable[str], question: Question[Value], within_s: float = LOOK_S
    ) -> Answers[Value]:
        """Ask several at the same time."""
        return await self._all(addresses, lambda each: self._look(daemon, each, question, within_s))

    async def change_all(self, daemon: str, addresses: Iterable[str], question: Question[Value]) -> Answers[Value]:
        """Have several change something, at the same time."""
        return await self._all(addresses, lambda each: self._ask(daemon, each, question, self._change_s))

    async def _all(self, addresses: Iterable[str], ask: Callable[[str], Awaitable[Value]]) -> Answers[Value]:
        asked = list(dict.fromkeys(addresses))
        answers = await asyncio.gather(*(ask(each) for each in asked), return_exceptions=True)
        found: dict[str, Value] = {}
        failures: list[NotAnswered] = []
        for address, answer in zip(asked, answers, strict=True):
            if isinstance(answer, NotAnswered):
                failures.append(answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found[address] = answer
        return Answers(found, failures)

    async def status_of(self, address: str, method: str, target: str) -> int:
        """Return the status of the answer to somebody who shows no token; 0: there is none."""
        try:
            async with asyncio.timeout(LOOK_S), self._turns:
                base = self._routes["nsqd"].to(f"http://{address}").first().base
                request = Request.to(method, base + target, {"Accept": "application/vnd.nsq; version=1.0"})
                context = self._context() if request.endpoint.is_secured else None
                return (await self._client.ask(request, timeout_s=LOOK_S, context=context)).status
        except (NoAnswer, OptionError, TimeoutError):
            return 0

    async def fetch(self, daemon: str, url: str, body_bytes_max: int, headers: dict[str, str] | None = None) -> Answer:
        """Fetch a URL that the operator named, such as Graphite's, whatever its status.

        Raises:
            NotAnswered: there is no answer.
        """
        try:
            request = Request.to("GET", url, headers or {})
            context = self._context() if request.endpoint.is_secured else None
            return await self._client.ask(
                request, timeout_s=self._change_s, connect_timeout_s=self._connect_s, context=context,
                body_bytes_max=body_bytes_max,
            )  # fmt: skip
        except (NoAnswer, OptionError) as error:
            raise NotAnswered(_missing(daemon, "", error)) from error

    async def post(self, url: str, body: bytes) -> Answer:
        """POST JSON to a URL that the operator named.

        Raises:
            NotAnswered: there is no answer.
        """
        try:
            request = Request.to("POST", url, {"Content-Type": "application/json"}, body)
            context = self._context() if request.endpoint.is_secured else None
            return await self._client.ask(
                request, timeout_s=self._change_s, connect_timeout_s=self._connect_s, context=context
            )
        except (NoAnswer, OptionError) as error:
            raise NotAnswered(_missing("notification endpoint", "", error)) from error

    async def _ask(
        self,
        daemon: str,
        address: str,
        question: Question[Value],
        within_s: float,
        turns: asyncio.Semaphore | None = None,
    ) -> Value:
        try:
            async with asyncio.timeout(within_s), turns or self._turns:
                answer = await self._exchange(daemon, address, question, within_s)
        except TimeoutError as error:
            raise _slow(daemon, address, within_s) from error
        except (NoAnswer, OptionError) as error:
            raise NotAnswered(_missing(daemon, address, error)) from error
        try:
            return question.answer(address, answer.status, answer.body)
        except HttpRefused as error:
            path = question.target.partition("?")[0]
            text = f"it answers {error.status} {error.text} to {path}"
            if (error.status, error.text) == (404, "NOT_FOUND"):
                text = f"it knows no request {path}: this kind or version of {daemon} cannot do that"
            raise NotAnswered(Missing(daemon, address, "refused", text), error.status, error.text) from error
        except RemoteProtocolError as error:
            text = (
                f"its answer to {question.target.partition('?')[0]} cannot be read; is this the HTTP port of {daemon}?"
            )
            raise NotAnswered(Missing(daemon, address, "unreadable", text)) from error

    async def _exchange(self, daemon: str, address: str, question: Question[Any], within_s: float) -> Answer:
        route = self._routes[daemon].to(f"http://{address}")
        step: Step | None = route.first()
        while step is not None:
            sent = step
            try:
                answer = await self._send(sent.base, question, within_s, sent.shows_token)
            except NoAnswer:
                route.failed(sent)
                raise
            step = route.after(sent, answer.status, answer.body)
        return answer

    async def _send(self, base: str, question: Question[Any], within_s: float, shows_token: bool) -> Answer:
        headers = await self._headers(shows_token)
        request = Request.to(question.method, base + question.target, headers, question.body)
        context = self._context() if request.endpoint.is_secured else None
        return await self._client.ask(
            request, timeout_s=within_s, connect_timeout_s=min(within_s, self._connect_s), context=context,
            body_bytes_max=ANSWER_BYTES_MAX,
        )  # fmt: skip

    def _context(self) -> ssl.SSLContext:
        options = self._options
        return client_context(
            options.http_client_tls_root_ca_file or None,
            options.http_client_tls_cert or None,
            options.http_client_tls_key or None,
            "tls1.2",
            not options.http_client_tls_insecure_skip_verify,
        )

    async def _headers(self, shows_token: bool) -> dict[str, str]:
        headers = {"Accept": "application/vnd.nsq; version=1.0"}
        if self._token is not None and shows_token:
            headers["Authorization"] = f"Bearer {await self._token.current()}"
        return headers


def _is_of_all_topics(question: Question[Any]) -> bool:
    path, _, query = question.target.partition("?")
    return path == "/stats" and not any(pair.startswith("topic=") for pair in query.split("&"))


def _slow(daemon: str, address: str, within_s: float) -> NotAnswered:
    return NotAnswered(Missing(daemon, address, "slow", f"no answer within {within_s:g} s"))


def _missing(daemon: str, address: str, error: Exception) -> Missing:
    if isinstance(error, NoAnswer):
        if error.error is not None:
            return Missing(daemon, address, "down", why_unreachable(error.error))
        if error.tls_name is not None:
            return Missing(daemon, address, "refused", f"TLS: {error.reason}")
        why: Why = "slow" if "within" in error.reason else "unreadable" if "HTTP" in error.reason else "down"
        return Missing(daemon, address, why, error.reason)
    return Missing(daemon, address, "refused", str(error))


__all__ = ["ANSWER_BYTES_MAX", "LOOK_S", "Answers", "NotAnswered", "Upstream"]
