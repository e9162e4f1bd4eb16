"""From a command line to clients: producers, consumers, questions over HTTP, all with the same addresses and secrets.

Rules of this file: a secret is read where it is used and shown nowhere; of several nsqd that are asked, one that does
not answer is told on stderr and hides no other, nor does one that nsqlookupd names by what is no address; it is
remembered, so that a change that is not done everywhere never ends with 0; clients are imported by who needs them, so
that ``flintmq pub`` starts quickly. Anybody can register with nsqlookupd's TCP port: where that is asked over HTTPS, or
an option says how TLS is spoken, an nsqd that it names is shown the token over TLS only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from flintmq.addresses import format_address, shown_url
from flintmq.client.options import ConnectionOptions, http_addresses, tcp_addresses
from flintmq.errors import ConnectionFailed, FlintError, OptionError
from flintmq.tools.shell.arguments import HOST, LOOKUPD_HTTP_PORT, NSQD_TCP_PORT, split_host
from flintmq.tools.shell.secrets import named_secret, shown_token

if TYPE_CHECKING:
    from flintmq.sync import LookupdAdmin, NsqdAdmin

Value = TypeVar("Value")
ASKED_AT_ONCE_MAX = 16
SHOWN_SIZE_MAX = 100
"""Characters of a name that anybody may have made up."""


class NothingThere(FlintError):
    """Nobody who was asked has the thing."""


class NotOurs(FlintError):
    """An nsqd is not FlintMQ's, and cannot do what was asked for.

    Args:
        address: of it.
        what: cannot be done.
    """

    def __init__(self, address: str, what: str) -> None:
        super().__init__(address, what)
        self.address = address.removeprefix("http://")
        self.what = what

    def __str__(self) -> str:
        return f"nsqd {self.address} is not FlintMQ's: it cannot {self.what}"


class NotInClear(FlintError):
    """An nsqd that nsqlookupd has named asks for a token over plain HTTP, where it is not shown.

    Args:
        address: of it, ``http://host:port``.
    """

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.address = address

    def __str__(self) -> str:
        return (
            f"nsqd {self.address.removeprefix('http://')} asks for a token over plain HTTP, and an nsqd that "
            "nsqlookupd names gets it over TLS only; in place of --lookupd, --nsqd-http=https://HOST:PORT asks its "
            f"HTTPS port, and --nsqd-http={self.address} shows it the token in clear"
        )


class NotAnAddress(FlintError):
    """An nsqd has registered with nsqlookupd under an address that nobody can connect to.

    Args:
        address: of it, ``host:port``.
    """

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.address = address

    def __str__(self) -> str:
        return (
            f"nsqd {self.address[:SHOWN_SIZE_MAX]!r}, as nsqlookupd names it, is not asked: that is not an address; "
            "its --broadcast-address has to be a name or an IP address"
        )


@dataclass(frozen=True, slots=True)
class Changed(Generic[Value]):
    """A change that was asked for.

    Attributes:
        kind: of those who were asked.
        answers: of those who have done it.
        failed: how many have not, those that have not got it left out.
    """

    kind: str
    answers: list[tuple[Any, Value]]
    failed: int

    @property
    def nodes(self) -> list[str]:
        """HTTP addresses of those who have done it."""
        return [admin.address for admin, _ in self.answers]

    @property
    def where(self) -> str:
        """Return where it is done, with a space in front; nothing if that is everywhere."""
        done = len(self.answers)
        return f" on {done} of {done + self.failed} {self.kind}" if self.failed else ""


class Link:
    """Makes the clients of one command.

    Args:
        given: what was read from its command line.

    Attributes:
        failed: addresses of those who were asked something and have not answered, or refused.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.timeout_s: float = given.timeout
        self.lookupd = tuple(
            each if "://" in each else "{}:{}".format(*split_host(each, LOOKUPD_HTTP_PORT, "--lookupd"))
            for each in given.lookupd
        )
        self._nsqd = [split_host(each, NSQD_TCP_PORT, "--nsqd") for each in given.nsqd]
        if not self.lookupd and not self._nsqd:
            # an HTTP address alone says on which machine the TCP port is
            http = [each for each in given.nsqd_http if "://" not in each]
            self._nsqd = [
                (host, port - 1) for host, port in (split_host(each, NSQD_TCP_PORT + 1, "--nsqd-http") for each in http)
            ] or [(HOST, NSQD_TCP_PORT)]
        self.nsqd = tuple(f"{host}:{port}" for host, port in self._nsqd)
        self._told: set[str] = set()
        self.failed: dict[str, None] = {}
        self._silent: dict[str, None] = {}  # nsqlookupd that did not say who is concerned
        self._unusable: dict[str, None] = {}  # what nsqlookupd calls nsqd, and is no address

    @cached_property
    def options(self) -> ConnectionOptions:
        """Options of connections to nsqd.

        Raises:
            OptionError: a file or secret cannot be used.
        """
        given = self.given
        return ConnectionOptions(
            user_agent=f"flintmq-{given.command}",
            connect_timeout=self.timeout_s,
            tls=bool(getattr(given, "tls", False)),
            tls_ca_file=given.tls_root_ca_file,
            tls_cert=given.tls_cert,
            tls_key=given.tls_key,
            tls_server_name=given.tls_server_name,
            tls_verify=not given.tls_insecure_skip_verify,
            compression=getattr(given, "compression", None),
            auth_secret=named_secret(given, "auth_secret"),
            lookup_token=shown_token(given),
        )

    @property
    def addresses(self) -> dict[str, Any]:
        """The arguments of producers and consumers that say where nsqd are."""
        if self.lookupd:
            return {"nsqlookupd_http_addresses": self.lookupd}
        return {"nsqd_tcp_addresses": self.nsqd}

    # --- over HTTP

    def lookups(self) -> list[LookupdAdmin]:
        """Return one to ask each nsqlookupd with."""
        from flintmq.sync import LookupdAdmin

        options = self.options.with_overrides()
        return [
            LookupdAdmin(each, timeout=self.timeout_s, token=options.lookup_token, options=options)
            for each in self.lookupd
        ]

    def nsqds(self, topic: str | None = None) -> list[NsqdAdmin]:
        """Return one to ask each nsqd with: those that have a topic, or all.

        One that nsqlookupd names is shown the token in clear only if that is, too, and there are no options of TLS.

        Raises:
            NothingThere: nsqlookupd knows none.
            ConnectionFailed: no nsqlookupd answers.
        """
        from flintmq.client.admin.route import wants_tls
        from flintmq.sync import NsqdAdmin

        options = self.options
        is_secured = wants_tls(options) or any(each.startswith("https://") for each in self.lookupd)
        in_clear = not (self.lookupd and is_secured)
        return [
            NsqdAdmin(
                each, timeout=self.timeout_s, token=options.lookup_token, options=options, token_in_clear=in_clear
            )
            for each in self._http_addresses(topic)
        ]

    def tcp_addresses(self, topic: str) -> tuple[str, ...]:
        """Return the TCP addresses of the nsqd that have a topic."""
        if not self.lookupd:
            return self.nsqd
        return tuple(dict.fromkeys(tcp for tcp, _ in self._found(topic)))

    def _http_addresses(self, topic: str | None) -> list[str]:
        if self.lookupd:
            return list(dict.fromkeys(http for _, http in self._found(topic)))
        return self.given.nsqd_http or [f"{host}:{port + 1}" for host, port in self._nsqd]

    def _found(self, topic: str | None) -> list[tuple[str, str]]:
        """Return TCP and HTTP addresses; a node that has none that can be used is told, and hides no other.

        Raises:
            NothingThere: nsqlookupd knows none.
            NotAnAddress: of those that it knows none can be used; that of the first.
            ConnectionFailed: no nsqlookupd answers.
        """

        def ask(admin: LookupdAdmin) -> list[Any]:
            if topic is None:
                return list(admin.nodes())
            found = admin.lookup(topic)
            return [*found.producers, *found.partitions.values()]

        asked = self.lookups()
        answers = self.each(asked, ask)
        self._silent |= {each.address: None for each in asked if each.address in self.failed}
        found: set[tuple[str, str]] = set()
        unusable: dict[str, NotAnAddress] = {}
        for node in (node for _, nodes in answers for node in nodes):
            try:
                found.add(_addresses_of(node.broadcast_address, node.tcp_port, node.http_port))
            except NotAnAddress as error:
                unusable.setdefault(error.address, error)
        if not found:
            if unusable:
                raise next(iter(unusable.values()))
            what = "no nsqd at all" if topic is None else f"no nsqd with topic {topic}"
            raise NothingThere(f"nsqlookupd {', '.join(map(shown_url, self.lookupd))} knows {what}")
        for address, why in unusable.items():
            self._unusable[address] = None
            self.note_failed(address, why)
        return sorted(found)

    def each(
        self, admins: Sequence[Any], ask: Callable[[Any], Value], missing: str = "", cannot: str = ""
    ) -> list[tuple[Any, Value]]:
        """Ask several at the same time; return who has answered what.

        Args:
            missing: to be said if nobody has it; one of several that has it not is left out.
            cannot: what an nsqd of another kind cannot do, if only FlintMQ's can.

        Raises:
            NothingThere: all say that it is not there.
            NotOurs: no FlintMQ's nsqd is there.
            FlintError: nobody answers; that of the first.
        """
        found, errors, absent = self._answers(admins, ask, cannot)
        if not found:
            raise self._nobody(errors, absent, missing)
        self._tell_all(errors)
        return found

    def change(
        self,
        admins: Sequence[Any],
        ask: Callable[[Any], Value],
        missing: str = "",
        cannot: str = "",
        *,
        kind: str = "nsqd",
        is_needed: bool = True,
    ) -> Changed[Value]:
        """Have several do something at the same time, as :meth:`each`; those that have not done it are all told.

        Args:
            kind: of those who are asked.
            is_needed: somebody must have done it.
        """
        found, errors, absent = self._answers(admins, ask, cannot)
        if not found and is_needed:
            self._tell_all(errors[1:])
            raise self._nobody(errors, absent, missing)
        self._tell_all(errors)
        return Changed(kind, found, len(errors))

    @property
    def unasked(self) -> str:
        """Return whom a change could not be asked of, behind the words that say what was done; empty: nobody."""
        found = ""
        if self._silent:
            count = f"{len(self._silent)} of {len(self.lookupd)}"
            found = f"; {count} nsqlookupd did not answer, so nsqd that no other knows were not asked"
        if self._unusable:
            found += f"; {len(self._unusable)} nsqd without an address that can be used: not asked"
        return found

    @property
    def exit_code(self) -> int:
        """The exit code of a change: 1 if anybody who was asked has not answered, or refused."""
        return 1 if self.failed else 0

    def _answers(
        self, admins: Sequence[Any], ask: Callable[[Any], Value], cannot: str
    ) -> tuple[list[tuple[Any, Value]], list[FlintError], list[FlintError]]:
        """Ask several at the same time; return their answers, what has failed, and who has not got it."""
        from flintmq.client.admin.question import HttpRefused
        from flintmq.client.admin.route import TokenWithheld

        def one(admin: Any) -> Value | FlintError:
            try:
                return ask(admin)
            except TokenWithheld as error:
                return NotInClear(error.address)
            except FlintError as error:
                return error

        if len(admins) == 1:
            answers: list[Any] = [one(admins[0])]
        else:
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor(ASKED_AT_ONCE_MAX) as pool:
                answers = list(pool.map(one, admins))
        found: list[tuple[Any, Value]] = []
        errors: list[FlintError] = []
        absent: list[FlintError] = []
        for admin, answer in zip(admins, answers, strict=True):
            if not isinstance(answer, FlintError):
                found.append((admin, answer))
            elif isinstance(answer, HttpRefused) and answer.status == 404 and answer.text.endswith("_NOT_FOUND"):
                absent.append(answer)
            else:
                is_other = isinstance(answer, HttpRefused) and answer.status == 404 and cannot
                errors.append(NotOurs(admin.address, cannot) if is_other else answer)
                self.failed[admin.address] = None
        return found, errors, absent

    def _nobody(self, errors: Sequence[FlintError], absent: Sequence[FlintError], missing: str) -> FlintError:
        return self._advised(errors[0]) if errors else NothingThere(missing or str(absent[0]))

    def _tell_all(self, errors: Sequence[FlintError]) -> None:
        for error in errors:
            self.tell(str(error))

    def _advised(self, error: FlintError) -> FlintError:
        if isinstance(error, ConnectionFailed) and not self.lookupd:
            return Unreachable(error.address, error.reason)
        return error

    def check_ours(self, what: str) -> None:
        """Refuse what only FlintMQ's nsqd obeys: NSQ's own ignores it without a word.

        Raises:
            NotOurs: one of them is another's.
            FlintError: it cannot be asked.
        """
        for admin, found in self.each(self.nsqds(), lambda admin: admin.info()):
            if not found.get("flintmq_version"):
                raise NotOurs(admin.address, what)

    def check_redesigned(self, what: str, topic: str | None = None) -> None:
        """Refuse what NSQ's own nsqd ignores without a word, or answers with something else.

        Args:
            topic: only those are asked that have it, if anybody has.

        Raises:
            NotOurs: one of them is NSQ's own.
            FlintError: it cannot be asked.
        """
        try:
            admins = self.nsqds(topic if self.lookupd else None)
        except NothingThere:
            return
        for admin, found in self.each(admins, lambda admin: admin.info()):
            if not found.get("flintmq_version") and "HA" not in str(found.get("version", "")):  # "HA": Youzan's
                raise NotOurs(admin.address, what)

    def note_failed(self, address: str, error: FlintError) -> None:
        """Say and remember that somebody has not done what was asked for."""
        self.failed[address] = None
        self.tell(str(error))

    def tell(self, text: str) -> None:
        """Say something on stderr, once."""
        if text not in self._told:
            self._told.add(text)
            sys.stderr.write(f"flintmq {self.given.command}: {text}\n")


def _addresses_of(host: str, tcp_port: int, http_port: int) -> tuple[str, str]:
    """Return the TCP and the HTTP address of an nsqd.

    Raises:
        NotAnAddress: clients take one of them for none.
    """
    from flintmq.client.admin.question import base_url

    tcp, http = format_address(host, tcp_port), format_address(host, http_port)
    checks: tuple[tuple[str, Callable[[str], object]], ...] = (
        (tcp, tcp_addresses),
        (http, http_addresses),
        (http, lambda address: base_url(address, "nsqd")),
    )
    for address, check in checks:
        try:
            check(address)
        except OptionError:
            raise NotAnAddress(address) from None
    return tcp, http


class Unreachable(ConnectionFailed):
    """Nobody answers at an address that was given, or guessed."""

    def __str__(self) -> str:
        return f"{super().__str__()}; another one is named with --nsqd, --nsqd-http or --lookupd"
