"""Ask nsqd and nsqlookupd over HTTP what the utilities want to know.

Rules of this file: several are asked at the same time; that one does not answer is told and hides no other; that none
does is an error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import msgspec

from flintmq.errors import UNREADABLE_JSON, FlintError, UsageError
from flintmq.net.http_client import HttpClient
from flintmq.net.http_exchange import NoAnswer, Request
from flintmq.options import SECOND, Duration, Options, option

log = logging.getLogger(__name__)

HTTP = "HTTP"
_HTTP_OK = 200
_HTTP_NOT_FOUND = 404


class NoneAnswers(FlintError):
    """Nobody of all who were asked has answered."""


@dataclass(frozen=True, kw_only=True)
class AskingOptions(Options):
    """The flags of those who ask over HTTP."""

    http_client_connect_timeout_ns: int = option(
        Duration(1), 2 * SECOND, "the most time that connecting takes", group=HTTP
    )
    http_client_request_timeout_ns: int = option(
        Duration(1), 5 * SECOND, "the most time that a whole request takes", group=HTTP
    )


class Asker:
    """Asks for JSON."""

    def __init__(self, options: AskingOptions) -> None:
        self._client = HttpClient()
        self._timeout_s = options.http_client_request_timeout_ns / SECOND
        self._connect_timeout_s = options.http_client_connect_timeout_ns / SECOND

    async def ask(self, address: str, path: str, **arguments: str) -> Any:
        """Return what one answers; None where there is no such thing.

        Raises:
            FlintError: it does not answer, or not with what can be used.
        """
        query = "&".join(f"{name}={quote(value, safe='')}" for name, value in arguments.items())
        url = (address if "://" in address else f"http://{address}").rstrip("/") + path + (f"?{query}" if query else "")
        request = Request.to("GET", url, {"Accept": "application/vnd.nsq; version=1.0"})
        answer = await self._client.ask(request, timeout_s=self._timeout_s, connect_timeout_s=self._connect_timeout_s)
        if answer.status == _HTTP_NOT_FOUND:
            return None
        if answer.status != _HTTP_OK:
            raise NoAnswer(address, f"it answers {answer.status} to {path}")
        try:
            found = msgspec.json.decode(answer.body)
        except UNREADABLE_JSON as error:
            raise NoAnswer(address, f"its answer to {path} cannot be read: {error}") from error
        # nsqd and nsqlookupd of long ago put everything into "data"
        return found["data"] if isinstance(found, dict) and isinstance(found.get("data"), dict) else found

    async def ask_all(self, addresses: Sequence[str], path: str, **arguments: str) -> dict[str, Any]:
        """Return what each answers, of those who do.

        Raises:
            NoneAnswers: nobody does.
        """
        asked = list(dict.fromkeys(addresses))
        answers = await asyncio.gather(*(self.ask(each, path, **arguments) for each in asked), return_exceptions=True)
        found: dict[str, Any] = {}
        for address, answer in zip(asked, answers, strict=True):
            if isinstance(answer, FlintError):
                log.error("%s", answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found[address] = answer
        if asked and not found:
            raise NoneAnswers("; ".join(str(each) for each in answers))
        return found


def check_one_kind(nsqd: Sequence[str], lookupd: Sequence[str], nsqd_flag: str) -> None:
    """Refuse no address, and addresses of both kinds, in NSQ's words.

    Raises:
        UsageError: it is one of these.
    """
    if not nsqd and not lookupd:
        raise UsageError(f"--{nsqd_flag} or --lookupd-http-address required")
    if nsqd and lookupd:
        raise UsageError(f"use --{nsqd_flag} or --lookupd-http-address not both")
