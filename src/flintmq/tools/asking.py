"""Ask nsqd and nsqlookupd over HTTP what the utilities want to know.

Rules of this file: several are asked at the same time; whoever needs all of them says so, for others it is an error
only that none answers, and who does not is told. Anybody can register with nsqlookupd's TCP port: where that is
asked over HTTPS, or an option says how TLS is spoken, an nsqd that it names is shown the token over TLS only.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import msgspec

from flintmq.addresses import shown_url
from flintmq.client.admin.route import Routes, Step, TokenWithheld
from flintmq.client.security import Token, obtain_token
from flintmq.env import Env
from flintmq.errors import UNREADABLE_JSON, FlintError, OptionError, UsageError
from flintmq.net.http_auth import TokenFile
from flintmq.net.http_client import HttpClient
from flintmq.net.http_exchange import Answer, NoAnswer, Request
from flintmq.net.tls import TlsSetupError, client_context, load_certificate
from flintmq.options import SECOND, Address, Duration, Options, Switch, Text, option

log = logging.getLogger(__name__)

HTTP = "HTTP"
_HTTP_OK = 200
_HTTP_UNAUTHORIZED = 401
_HTTP_NOT_FOUND = 404


class NoneAnswers(FlintError):
    """Nobody of all who were asked has answered."""


class NotAllAnswer(FlintError):
    """Somebody of all who were asked has not answered."""


@dataclass(frozen=True, kw_only=True)
class AskingOptions(Options):
    """The flags of those who ask over HTTP."""

    http_client_connect_timeout_ns: int = option(
        Duration(1), 2 * SECOND, "the most time that connecting takes", group=HTTP
    )
    http_client_request_timeout_ns: int = option(
        Duration(1), 5 * SECOND, "the most time that a whole request takes", group=HTTP
    )


@dataclass(frozen=True, kw_only=True)
class SecuredAskingOptions(AskingOptions):
    """The flags of those who also show a token and speak HTTPS."""

    http_client_tls_root_ca_file: str = option(
        Text("FILE"), "", "whom to trust, for https, PEM", group=HTTP, origin="flintmq", default_text="the system's"
    )
    http_client_tls_cert: str = option(Text("FILE"), "", "certificate to show, PEM", group=HTTP, origin="flintmq")
    http_client_tls_key: str = option(Text("FILE"), "", "its key, PEM", group=HTTP, origin="flintmq")
    http_client_tls_insecure_skip_verify: bool = option(
        Switch(), False, "trust everybody, also whoever sits between", group=HTTP, origin="flintmq"
    )
    http_client_token_file: str = option(
        Text("FILE"),
        "",
        "file with the token for daemons that ask for permissions; read again when it changes",
        group=HTTP,
        origin="flintmq",
        default_text="none",
    )

    def asker(self) -> Asker:
        """Return who asks so.

        Raises:
            FlintError: a file cannot be used.
        """
        context = https_context(
            self.http_client_tls_root_ca_file,
            self.http_client_tls_cert,
            self.http_client_tls_key,
            is_verified=not self.http_client_tls_insecure_skip_verify,
        )
        token = TokenFile(self.http_client_token_file, Env()).now if self.http_client_token_file else None
        named = (self.http_client_tls_root_ca_file, self.http_client_tls_cert)
        return Asker(self, context, token, wants_tls=any(named) or self.http_client_tls_insecure_skip_verify)


def https_context(root_ca_file: str, cert: str, key: str, *, is_verified: bool) -> ssl.SSLContext:
    """Return whom to trust and what to show, of the flags ``--http-client-tls-...``.

    Raises:
        UsageError: a certificate without a key, or a key without a certificate.
        OptionError: a file cannot be used; it names the flag.
    """
    if bool(cert) != bool(key):
        raise UsageError("--http-client-tls-cert and --http-client-tls-key go together")
    flag, path = "--http-client-tls-root-ca-file", root_ca_file
    try:
        context = client_context(root_ca_file, is_verified=is_verified)
        if cert:
            flag, path = "--http-client-tls-cert", cert
            load_certificate(context, cert, key)
    except TlsSetupError as error:
        if error.what == f"key {key}":
            flag, path = "--http-client-tls-key", key
        raise OptionError(flag, path, str(error), "flag") from error
    return context


def check_address(flag: str, address: str) -> None:
    """Refuse what is neither ``HOST:PORT`` nor ``https://HOST:PORT``.

    Raises:
        OptionError: it is something else.
    """
    try:
        Address(to_connect=True).check(address.removeprefix("https://"))
    except ValueError as error:
        raise OptionError(flag, address, f"HOST:PORT or https://HOST:PORT: {error}", "flag") from None


def check_lookup_address(flag: str, address: str) -> None:
    """Refuse what is neither ``HOST:PORT`` nor a URL of HTTP; NSQ's utilities that consume take either.

    Raises:
        OptionError: it is something else.
    """
    try:
        if "://" in address:
            Request.to("GET", address).encode()
        else:
            Address(to_connect=True).check(address)
    except (ValueError, NoAnswer) as error:
        reason = error.reason if isinstance(error, NoAnswer) else str(error)
        raise OptionError(
            flag, address, f"HOST:PORT, http://HOST:PORT or https://HOST:PORT: {reason}", "flag"
        ) from None


class Asker:
    """Asks for JSON.

    Args:
        context: for ``https``: whom to trust, what to show.
        token: shown to all who are asked; a function is called for each question.
        wants_tls: an option says how TLS is spoken: over plain HTTP the token is not shown before it is asked for.
    """

    def __init__(
        self,
        options: AskingOptions,
        context: ssl.SSLContext | None = None,
        token: Token | None = None,
        wants_tls: bool = False,
    ) -> None:
        self._context = context
        self._token = token
        self._wants_tls = wants_tls
        self._routes = Routes(has_token=token is not None, waits_for_401=wants_tls)
        self._client = HttpClient()
        self._timeout_s = options.http_client_request_timeout_ns / SECOND
        self._connect_timeout_s = options.http_client_connect_timeout_ns / SECOND

    def of_nsqd(self, lookupds: Sequence[str]) -> Asker:
        """Return who asks the nsqd that these nsqlookupd name; none: those that were named by hand."""
        is_secured = self._wants_tls or any(each.startswith("https://") for each in lookupds)
        found = copy.copy(self)
        found._routes = Routes(
            has_token=self._token is not None,
            waits_for_401=self._wants_tls,
            token_in_clear=not (lookupds and is_secured),
        )
        return found

    async def ask(self, address: str, path: str, **arguments: str) -> Any:
        """Return what one answers; None where there is no such thing.

        Raises:
            FlintError: it does not answer, or not with what can be used.
        """
        query = "&".join(f"{name}={quote(value, safe='')}" for name, value in arguments.items())
        target = path + (f"?{query}" if query else "")
        base = (address if "://" in address else f"http://{address}").rstrip("/")
        answer = await self._answer(address, base, target)
        if answer.status == _HTTP_NOT_FOUND:
            return None
        if answer.status != _HTTP_OK:
            meaning = ": it asks for a token that it knows" if answer.status == _HTTP_UNAUTHORIZED else ""
            raise NoAnswer(shown_url(address), f"it answers {answer.status} to {path}{meaning}")
        try:
            found = msgspec.json.decode(answer.body)
        except UNREADABLE_JSON as error:
            raise NoAnswer(shown_url(address), f"its answer to {path} cannot be read: {error}") from error
        # nsqd and nsqlookupd of long ago put everything into "data"
        return found["data"] if isinstance(found, dict) and isinstance(found.get("data"), dict) else found

    async def _answer(self, address: str, base: str, target: str) -> Answer:
        route = self._routes.to(base)
        step: Step | None = route.first()
        while step is not None:
            sent = step
            try:
                answer = await self._send(sent.base + target, sent.shows_token)
            except NoAnswer:
                route.failed(sent)
                raise
            step = route.after(sent, answer.status, answer.body)
        try:
            route.check(sent, answer.status, f"GET {target}")
        except TokenWithheld as error:
            reason = (
                "it asks for a token over plain HTTP, and an nsqd that nsqlookupd names gets it over TLS only; in "
                "place of nsqlookupd, --nsqd-http-address=https://HOST:PORT asks its HTTPS port, and "
                f"--nsqd-http-address={address} shows it the token in clear"
            )
            raise NoAnswer(shown_url(address), reason) from error
        return answer

    async def _send(self, url: str, shows_token: bool) -> Answer:
        headers = {"Accept": "application/vnd.nsq; version=1.0"}
        if self._token is not None and shows_token:
            headers["Authorization"] = f"Bearer {await asyncio.to_thread(obtain_token, self._token)}"
        request = Request.to("GET", url, headers)
        context = self._context if request.endpoint.is_secured else None
        return await self._client.ask(
            request, timeout_s=self._timeout_s, connect_timeout_s=self._connect_timeout_s, context=context
        )

    async def ask_all(self, addresses: Sequence[str], path: str, **arguments: str) -> dict[str, Any]:
        """Return what each answers, of those who do.

        Raises:
            NoneAnswers: nobody does.
        """
        found, failed = await self._ask_each(addresses, path, arguments)
        for error in failed:
            log.error("%s", error)
        if failed and not found:
            raise NoneAnswers("; ".join(map(str, failed)))
        return found

    async def ask_every(self, addresses: Sequence[str], path: str, **arguments: str) -> dict[str, Any]:
        """Return what each answers.

        Raises:
            NotAllAnswer: one of them does not.
        """
        found, failed = await self._ask_each(addresses, path, arguments)
        if failed:
            raise NotAllAnswer("; ".join(map(str, failed)))
        return found

    async def _ask_each(
        self, addresses: Sequence[str], path: str, arguments: Mapping[str, str]
    ) -> tuple[dict[str, Any], list[FlintError]]:
        asked = list(dict.fromkeys(addresses))
        answers = await asyncio.gather(*(self.ask(each, path, **arguments) for each in asked), return_exceptions=True)
        found: dict[str, Any] = {}
        failed: list[FlintError] = []
        for address, answer in zip(asked, answers, strict=True):
            if isinstance(answer, FlintError):
                failed.append(answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found[address] = answer
        return found, failed


def check_one_kind(nsqd: Sequence[str], lookupd: Sequence[str], nsqd_flag: str) -> None:
    """Refuse no address, and addresses of both kinds, in NSQ's words.

    Raises:
        UsageError: it is one of these.
    """
    if not nsqd and not lookupd:
        raise UsageError(f"--{nsqd_flag} or --lookupd-http-address required")
    if nsqd and lookupd:
        raise UsageError(f"use --{nsqd_flag} or --lookupd-http-address not both")
