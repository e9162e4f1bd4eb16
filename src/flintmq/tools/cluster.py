"""``flintmq cluster|topic|node <verb>``: look at a cluster, and change it, through any of its nsqlookupds.

Rules of this file:

- The first nsqlookupd that answers is asked, and a change is sent to that one alone, once: whoever it is hands it on to
  the master. One that is in no cluster is told so before anything is changed. With ``--wait`` what comes to the same
  however often it is carried out is sent again while the answer says so.
- Who answers is found by looks: one that is silent for ``_TURN_S`` holds nobody up, the next one is asked beside it.
- stdout has the answer, a table or with ``--json`` a line of JSON for each thing; how far something is goes to stderr.
- Where there is no cluster, ``topic`` and ``node`` ask the single nsqds (:mod:`flintmq.tools.shell`), as far as they
  can.
- Exit code 0: done, or whole; 1: refused, not done in time, or something of the cluster is not whole; 2: the command
  line is wrong.

Source: Youzan's nsqlookupd for the requests.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from flintmq.addresses import format_address
from flintmq.client.admin.health import NOTE, away_nodes, is_whole, store_away, troubles, why_unready
from flintmq.client.admin.question import HttpRefused
from flintmq.client.admin.results import ClusterStatus, ClusterTopic, Move
from flintmq.client.admin.route import wants_tls
from flintmq.errors import ConnectionFailed, FlintError, UsageError
from flintmq.names import listed
from flintmq.options import nearest
from flintmq.sync import ConnectionOptions, LookupdAdmin, NsqdAdmin
from flintmq.tools import cluster_tables as tables
from flintmq.tools.admin import duration, fill_in
from flintmq.tools.shell import start
from flintmq.tools.shell.arguments import COMMANDS, TOKEN_VARIABLE, VARIABLES, Noun, Parser, add_token, add_yes, read
from flintmq.tools.shell.output import confirm
from flintmq.tools.shell.secrets import shown_token
from flintmq.topic_meta import REPLICATOR_MAX, usual_min_in_sync

_LOOKUPD = "localhost:4161"
_POLL_S = 0.5
_ANSWER_MIN = timedelta(seconds=5)  # a shorter --within does not make the daemons faster
_ASK_AGAIN_S_MAX = 5.0
"""Between two tries of a change, at most; it begins with ``_POLL_S``, and is twice as long each time."""
_TURN_S = 3.0
"""After so long without an answer the next nsqlookupd is asked as well."""
_SHOWN_MAX = 8
"""Partitions that are named one by one."""
_AGAIN = "ask again"
"""In answers to a change that may be carried out later."""
_WINDOW = re.compile(r"([01]\d|2[0-3])-([01]\d|2[0-4])")


class NotWithin(FlintError):
    """Something that was waited for has not come to pass in time.

    Args:
        what: it is.
        within_s: the time.
    """

    def __init__(self, what: str, within_s: float) -> None:
        super().__init__(what, within_s)
        self.what = what
        self.within_s = within_s

    def __str__(self) -> str:
        return f"not within {self.within_s:g} s: {self.what}; it goes on, look with flintmq cluster status and moves"


class StillRefused(FlintError):
    """A change was refused for as long as it was tried; the daemon says that it may be carried out later.

    Args:
        what: was to come to pass.
        within_s: how long it was tried.
        text: of the last answer.
        state: as far as that is known now; empty: it is not.
    """

    def __init__(self, what: str, within_s: float, text: str, state: str) -> None:
        super().__init__(what, within_s, text, state)
        self.what = what
        self.within_s = within_s
        self.text = text
        self.state = state

    def __str__(self) -> str:
        now = f"; now: {self.state}" if self.state else ""
        return f"not within {self.within_s:g} s: {self.what}; the last answer: {self.text}{now}"


class Command:
    """One command line that was read: whom it asks, and how it answers.

    Args:
        given: the arguments.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        if self.waits:  # nor is one answer waited for much longer than all is
            given.deadline = min(given.deadline, max(given.within, _ANSWER_MIN))
        self.is_json: bool = given.json
        self._token = shown_token(given)
        self._options = ConnectionOptions(
            tls_ca_file=given.tls_root_ca_file, tls_cert=given.tls_cert, tls_key=given.tls_key
        )
        self._admins = [
            LookupdAdmin(address, timeout=given.deadline, token=self._token, options=self._options)
            for address in given.address or [_LOOKUPD]
        ]  # the one that answered last is the first
        self._is_found = False
        self._said = ""
        self._silent: set[str] = set()
        self._began_s: float | None = None

    # --- asking

    def status(self, topic: str | None = None) -> ClusterStatus:
        """Return the state of the cluster, of the first nsqlookupd that answers.

        Raises:
            NobodyAnswers: none does.
            NoCluster: it is in no cluster.
            HttpRefused: it refuses.
        """
        try:
            found, status = _first_answer(self._admins, topic, self.given.deadline.total_seconds(), self._tell_silent)
        except HttpRefused as error:
            if error.status == 404:
                raise NoCluster(error.address) from error
            raise
        self._admins.remove(found)
        self._admins.insert(0, found)
        self._is_found = True
        return status

    def _tell_silent(self, silent: LookupdAdmin, following: LookupdAdmin | None) -> None:
        """Say that a nsqlookupd does not answer, once of each: else who waits for it would not know for whom."""
        if silent.address not in self._silent:
            self._silent.add(silent.address)
            then = f"{following.address} is asked as well" if following else "it is waited for until --timeout"
            print(f"nsqlookupd {silent.address} does not answer yet; {then}", file=sys.stderr, flush=True)

    @property
    def admin(self) -> LookupdAdmin:
        """The nsqlookupd that answered; it is looked for first.

        Raises:
            FlintError: as :meth:`status`.
        """
        if not self._is_found:
            self.status("")
        return self._admins[0]

    def nsqd(self, address: str) -> NsqdAdmin:
        """Return one to ask an nsqd with that the nsqlookupd names: the token is shown to it as to that."""
        is_secured = wants_tls(self._options) or self.admin.address.startswith("https://")
        return NsqdAdmin(
            address,
            timeout=self.given.deadline,
            token=self._token,
            options=self._options,
            token_in_clear=not is_secured,
        )

    def moves(self) -> list[Move]:
        """Return what is being moved; nothing where the master does not tell."""
        try:
            return self.admin.cluster_moves()
        except HttpRefused as error:
            if error.status == 404:
                return []
            raise

    # --- answering

    @property
    def width(self) -> int:
        """Columns of the terminal; 120 where stdout is none."""
        return shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else 120

    def answer(self, value: Any, text: Callable[[], str]) -> None:
        """Print an answer: as JSON, or as text."""
        if self.is_json:
            _print_json(value)
        else:
            print(text())

    def done(self, answer: dict[str, Any] | None, what: str) -> None:
        """Print what a change has come to; of a plan, all of it."""
        if self.is_json:
            _print_json(answer or {"dry_run": False, "what": what})
        elif answer is not None and self.is_dry_run:
            print(tables.plan_text(answer, tables.names_of(self.status("")), self.width))
        else:
            print("\n".join([what, *map(str, (answer or {}).get("notes", []))]))

    @property
    def is_dry_run(self) -> bool:
        """Whether nothing is to be changed."""
        return bool(getattr(self.given, "dry_run", False))

    @property
    def waits(self) -> bool:
        """Whether it is to return when what it asks for has come to pass."""
        return not self.is_dry_run and bool(getattr(self.given, "wait", False))

    def wait(self, what: str, is_so: Callable[[], str]) -> None:
        """Wait, where that was asked for, until something is so, and say how far it is.

        Args:
            is_so: tells what is missing; empty: nothing is.

        Raises:
            NotWithin: it took too long.
        """
        if self.waits:
            self.until(what, is_so, self.given.within.total_seconds(), self._deadline_s())

    def _deadline_s(self) -> float:
        """Return until when it is waited: ``--within`` is for the command, not for each of its steps."""
        if self._began_s is None:
            self._began_s = time.monotonic()
        return self._began_s + float(self.given.within.total_seconds())

    def change(
        self, what: str, ask: Callable[[], dict[str, Any] | None], missing: Callable[[], str]
    ) -> dict[str, Any] | None:
        """Ask for a change; where it is to be waited for again, while the answer is that it may be carried out later.

        Args:
            what: is to come to pass.
            ask: for it; it comes to the same however often.
            missing: tells what is missing; empty: nothing is.

        Raises:
            HttpRefused: it is refused.
            StillRefused: it was until the time was over.
        """
        if not self.waits:
            return ask()
        deadline_s, pause_s = self._deadline_s(), _POLL_S
        try:
            while True:
                try:
                    return ask()
                except HttpRefused as error:
                    if error.status != 503 or _AGAIN not in error.text:
                        raise
                    if time.monotonic() > deadline_s:
                        state = _state_of(missing)
                        within_s = self.given.within.total_seconds()
                        raise StillRefused(what, within_s, error.text, state or what) from None
                    self._progress(error.text)
                time.sleep(min(pause_s, max(0.0, deadline_s - time.monotonic())))
                pause_s = min(2 * pause_s, _ASK_AGAIN_S_MAX)
        finally:
            self._end_progress()

    def until(self, what: str, is_so: Callable[[], str], within_s: float, deadline_s: float | None = None) -> None:
        """Wait in any case, as :meth:`wait`.

        Args:
            deadline_s: of the monotonic clock; None: ``within_s`` from now.
        """
        deadline = time.monotonic() + within_s if deadline_s is None else deadline_s
        try:
            while missing := is_so():
                self._progress(missing)
                if time.monotonic() > deadline:
                    raise NotWithin(f"{what} ({missing})", within_s)
                time.sleep(_POLL_S)
        finally:
            self._end_progress()

    def _progress(self, text: str) -> None:
        """Say how far something is: in one line of a terminal, else in a new one when it has changed."""
        if sys.stderr.isatty():
            width = shutil.get_terminal_size((120, 24)).columns - 1
            sys.stderr.write(f"\r{text[:width]:<{min(width, len(self._said))}}")
        elif text != self._said:
            sys.stderr.write(f"{text}\n")
        self._said = text
        sys.stderr.flush()

    def _end_progress(self) -> None:
        if self._said and sys.stderr.isatty():
            sys.stderr.write("\n")

    # --- what is waited for

    def unsure(self, status: ClusterStatus) -> str:
        """Tell why something may be in the cluster that is not in a status of it; empty: it is not."""
        is_partly_read = any("/partition/" in each.get("key", "") for each in status.unreadable)
        why = status.problem or store_away(status) or ("" if status.master else "no nsqlookupd is the master")
        why = why or ("keys of the store cannot be read, see flintmq cluster status" if is_partly_read else "")
        return f"{self.admin.address} does not know all of the cluster: {why}" if why else ""

    def unled(self, topic: str, partition: int) -> str:
        """Tell why nobody leads a partition so that it can be consumed; empty: somebody does."""
        status = self.status(topic)
        row = _topic(status, topic)
        found = [each for each in row.partitions if each.partition == partition] if row else []
        if unsure := self.unsure(status):
            return unsure
        if not found or not found[0].leader:
            return found[0].reason if found else f"partition {topic}/{partition} is not known yet"
        return why_unready(found[0], {node.node: node for node in status.nodes})

    def topic_missing(self, topic: str, copies: int | None = None) -> str:
        """Tell what a topic lacks, or has too much; empty: nothing.

        Args:
            copies: that were asked for; None: as many as it is to have.
        """
        status = self.status(topic)
        found = [each for each in troubles(status) if each.subject == f"topic {topic}" and each.level != NOTE]
        moving = [each for each in self.moves() if each.topic == topic]
        if unsure := self.unsure(status):
            return unsure
        if moving:
            return f"topic {topic}: {tables.moves_line(moving)}"
        row = _topic(status, topic)
        if row is None:
            return f"topic {topic} is not known yet"
        if copies not in (None, row.replicator):  # the master may have been told through another nsqlookupd
            return f"topic {topic} is to have {row.replicator} copies still, as far as {self.admin.address} knows"
        if found:
            return f"topic {topic}, {found[0].text}"
        extra = next((each for each in row.partitions if len(each.replicas) > row.replicator or each.leaving), None)
        return f"topic {topic}, partition {extra.partition}: copies are to go" if extra is not None else ""


def _state_of(missing: Callable[[], str]) -> str:
    """Return what is missing, or why that is not known."""
    try:
        return missing()
    except FlintError as error:
        return f"not known ({error})"


def _first_answer(
    admins: Sequence[LookupdAdmin],
    topic: str | None,
    within_s: float,
    tell: Callable[[LookupdAdmin, LookupdAdmin | None], None],
) -> tuple[LookupdAdmin, ClusterStatus]:
    """Ask for the state of the cluster, one nsqlookupd after the other, until one answers, whichever that is.

    The next one is asked when one has failed, or for ``_TURN_S`` none has answered; an answer of those before it counts
    still. A thread that waits for one that is silent ends with the process.

    Args:
        within_s: how long each of them may take; all are asked within that time.
        tell: is called with one that is silent, and the one that is asked next, if there is one.

    Raises:
        NobodyAnswers: none does.
        HttpRefused: the first that answers refuses.
    """
    answers: SimpleQueue[tuple[LookupdAdmin, ClusterStatus | Exception]] = SimpleQueue()

    def ask(admin: LookupdAdmin) -> None:
        try:
            answers.put((admin, admin.cluster_status(topic=topic)))
        except Exception as error:  # noqa: BLE001 - it is for who waits for the answer
            answers.put((admin, error))

    turn_s = min(_TURN_S, within_s / len(admins))
    ends_s = time.monotonic() + within_s + turn_s * len(admins)  # whatever holds a thread up, such as a resolver
    left, silent, failures = deque(admins), deque[LookupdAdmin](), list[str]()
    while left or silent:
        if left:
            silent.append(left.popleft())
            threading.Thread(target=ask, args=(silent[-1],), daemon=True).start()
        try:
            admin, answer = answers.get(timeout=turn_s)
        except Empty:
            tell(silent[-1], left[0] if left else None)
            if left:
                continue
            try:
                admin, answer = answers.get(timeout=max(0.0, ends_s - time.monotonic()))
            except Empty:
                failures += [f"{each.address} does not answer" for each in silent]
                break
        silent.remove(admin)
        if isinstance(answer, ConnectionFailed):
            failures.append(str(answer))
        elif isinstance(answer, Exception):
            raise answer
        else:
            return admin, answer
    raise NobodyAnswers(failures)


def _print_json(value: Any) -> None:
    """Print a line of JSON for each thing."""
    for each in value if isinstance(value, list) else [value]:
        print(msgspec.json.encode(each).decode())


class NoCluster(FlintError):
    """A nsqlookupd is in no cluster.

    Args:
        address: of it.
    """

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.address = address

    def __str__(self) -> str:
        return (
            f"nsqlookupd {self.address} is in no cluster: start it with --cluster-store, or name another one with "
            "--lookupd; topics of single nodes are for flintmq topic --nsqd=HOST:PORT, and flintmq admin"
        )


class NobodyAnswers(FlintError):
    """No nsqlookupd answers.

    Args:
        failures: of each.
    """

    def __init__(self, failures: Sequence[str]) -> None:
        super().__init__(tuple(failures))
        self.failures = tuple(failures)

    def __str__(self) -> str:
        return f"no nsqlookupd answers: {'; '.join(self.failures)}; name one with --lookupd=HOST:PORT"


# -- flintmq cluster ---------------------------------------------------------------------------------------------------


def _cluster_status(command: Command) -> int:
    status = command.status()
    command.answer(status, lambda: tables.status_text(status, command.width))
    return 0 if is_whole(status) else 1


def _cluster_moves(command: Command) -> int:
    def missing() -> str:
        moves = command.admin.cluster_moves()
        return tables.moves_line(moves) if moves else command.unsure(command.status(""))

    command.wait("nothing is being moved", missing)
    moves = command.admin.cluster_moves()
    names = tables.names_of(command.status(""))
    command.answer(moves, lambda: tables.moves_text(moves, names, command.width))
    return 0


def _cluster_balance(command: Command) -> int:
    given = command.given
    if given.what == "top":
        if given.window is not None or given.dry_run:
            raise UsageError("flintmq cluster balance top takes neither --window nor --dry-run")
        answer = command.admin.balance_top()
        command.answer(answer, lambda: tables.plan_text(answer, tables.names_of(command.status("")), command.width))
        return 0
    is_on = given.what == "on"
    if given.window is not None and not is_on:
        raise UsageError("--window is for flintmq cluster balance on")
    answer_or_none = command.admin.set_balance(enabled=is_on, window=given.window, dry_run=given.dry_run)
    command.done(answer_or_none, f"balancing is {given.what}")
    return 0


def _cluster_upgrade(command: Command) -> int:
    if command.given.what == "begin":
        command.done(command.admin.begin_upgrade(), "nothing is moved until: flintmq cluster upgrade done")
    else:
        command.done(command.admin.end_upgrade(), "copies may be moved again")
    return 0


# -- flintmq topic -----------------------------------------------------------------------------------------------------


def _topic(status: ClusterStatus, name: str) -> ClusterTopic | None:
    return next((each for each in status.topics if each.topic == name and each.number), None)


def _topic_create(command: Command) -> int:
    given = command.given
    needs_partitions = given.replicas or given.syncdisk or given.retention or given.ordered or given.multipart
    if needs_partitions and not given.partitions:
        raise UsageError("--replicas, --syncdisk, --retention, --ordered and --multipart need --partitions")

    def create() -> dict[str, Any] | None:
        return command.admin.create_topic(
            given.topic,
            partitions=given.partitions or 0,
            ordered=given.ordered,
            multipart=given.multipart,
            headers=given.headers,
            retention_days=given.retention or 0,
            syncdisk=given.syncdisk or 0,
            auto_channels=given.auto_channels,
            replicas=given.replicas or 0,
            dry_run=given.dry_run,
        )

    def missing() -> str:
        return command.topic_missing(given.topic)

    answer = command.change(f"topic {given.topic} is created", create, missing)
    command.wait(f"topic {given.topic} is whole", missing)
    command.done(answer, f"topic {given.topic} is created")
    return 0


def _topic_delete(command: Command) -> int:
    topic = command.given.topic

    def missing() -> str:
        status = command.status(topic)
        return f"topic {topic} is being deleted" if _topic(status, topic) else command.unsure(status)

    found = _topic(command.status(topic), topic)
    if not command.given.dry_run and found is not None:
        loss = f"{found.partition_num} partitions with all their messages and channels, on every node"
        confirm(f"deleting topic {topic} loses {loss}", command.given.yes)
    is_asked = False

    def delete() -> dict[str, Any] | None:
        nonlocal is_asked
        if is_asked:
            now = _topic(command.status(topic), topic)
            is_another = now is not None and found is not None and now.number != found.number
            if is_another or (now is None and not missing()):
                return None  # the try before has done it
        is_asked = True
        return command.admin.delete_topic(topic, everywhere=True, dry_run=command.given.dry_run)

    answer = command.change(f"topic {topic} is deleted", delete, missing)
    command.wait(f"topic {topic} is gone", missing)
    command.done(answer, f"topic {topic} is deleted")
    return 0


def _topic_list(command: Command) -> int:
    status = command.status()
    command.answer(status.topics, lambda: tables.topics_text(status, command.width))
    return 0


def _topic_show(command: Command) -> int:
    name = command.given.topic
    status = command.status(name)
    topic = _topic(status, name)
    if topic is None:
        raise NoTopic(name)
    command.answer(topic, lambda: tables.topic_text(topic, status, command.width))
    if unsure := command.unsure(status):
        print(unsure, file=sys.stderr)
        return 1
    found = [each for each in troubles(status) if each.subject == f"topic {name}"]
    return 0 if all(each.level == NOTE for each in found) else 1


class NoTopic(FlintError):
    """The cluster has no such topic.

    Args:
        topic: its name.
    """

    def __init__(self, topic: str) -> None:
        super().__init__(topic)
        self.topic = topic

    def __str__(self) -> str:
        return f"the cluster has no topic {self.topic}; flintmq topic list lists all"


def _topic_update(command: Command) -> int:
    given = command.given
    named = (given.replicas, given.min_in_sync, given.retention, given.syncdisk, given.auto_channels)
    if not given.headers and all(each is None for each in named):
        raise UsageError(
            "flintmq topic update needs at least one of --replicas, --min-in-sync, --retention, --syncdisk, --headers, "
            "--auto-channels and --no-auto-channels"
        )
    answer = _changed(
        command,
        given.replicas,
        given.min_in_sync,
        retention_days=given.retention,
        syncdisk=given.syncdisk,
        auto_channels=given.auto_channels,
        headers=given.headers,
    )
    ending = "" if given.wait or given.replicas is None else "; copies follow in the background"
    command.done(answer, f"topic {given.topic} is changed{ending}")
    return 0


def _changed(
    command: Command, copies: int | None, min_in_sync: int | None = None, **others: Any
) -> dict[str, Any] | None:
    """Change a topic, wait for it where that was asked for, and return what it has come to.

    Nobody who publishes is to wait for copies that are made. So where too few are in sync yet for as many to be needed
    as are usual, that is asked for when there are enough.
    """
    topic = command.given.topic
    before = _topic(command.status(topic), topic) if command.waits and min_in_sync is None else None

    def change() -> dict[str, Any] | None:
        return command.admin.change_topic(
            topic, replicas=copies, min_in_sync=min_in_sync, **others, dry_run=command.is_dry_run
        )

    def missing() -> str:
        return command.topic_missing(topic, copies)

    what = f"topic {topic} is as it is wanted"
    answer = command.change(what, change, missing)
    command.wait(what, missing)
    if before is None or copies is None or copies <= before.replicator:
        return answer
    now, least = _topic(command.status(topic), topic), usual_min_in_sync(copies)
    was_usual = before.min_in_sync == usual_min_in_sync(before.replicator)
    if now is None or now.min_in_sync >= least or not was_usual:
        return answer
    return command.change(what, lambda: command.admin.change_topic(topic, min_in_sync=least), missing)


def _topic_expand(command: Command) -> int:
    given = command.given

    def missing() -> str:
        topic = _topic(command.status(given.topic), given.topic)
        count = 0 if topic is None else sum(bool(each.leader) for each in topic.partitions)
        return command.topic_missing(given.topic) if count >= given.partitions else f"{count} partitions are led"

    def expand() -> dict[str, Any] | None:
        return command.admin.expand_topic(given.topic, given.partitions, dry_run=given.dry_run)

    answer = command.change(f"topic {given.topic} has {given.partitions} partitions", expand, missing)
    command.wait(f"topic {given.topic} has {given.partitions} partitions", missing)
    command.done(answer, f"topic {given.topic} has {given.partitions} partitions")
    return 0


def _topic_move(command: Command) -> int:
    given = command.given
    source, target = _id_of(command, given.source), _id_of(command, given.target)

    def missing() -> str:
        topic = _topic(command.status(given.topic), given.topic)
        rows = [] if topic is None else [each for each in topic.partitions if each.partition == given.partition]
        moving = [each for each in command.moves() if (each.topic, each.partition) == (given.topic, given.partition)]
        if moving:
            return f"{given.topic}/{given.partition}: {tables.moves_line(moving)}"
        is_there = all(target in each.in_sync and source not in (*each.replicas, *each.leaving) for each in rows)
        return "" if rows and is_there else f"{given.topic}/{given.partition} is not there yet"

    answer = command.admin.move_partition(given.topic, given.partition, source, target, dry_run=given.dry_run)
    command.wait(f"{given.topic}/{given.partition} is moved", missing)
    verb = "is moved" if given.wait else "is being moved"
    command.done(answer, f"{given.topic}/{given.partition} {verb} from {given.source} to {given.target}")
    return 0


def _topic_replicate(command: Command) -> int:
    given = command.given

    def is_known() -> str:
        return "" if _topic(command.status(given.topic), given.topic) else f"topic {given.topic} is not known yet"

    command.nsqd(_owner(command, given.topic, given.node)).replicate_topic(given.topic)
    answer = None
    if given.replicas:
        command.until(f"topic {given.topic} is known", is_known, given.deadline.total_seconds())
        answer = _changed(command, given.replicas)
    command.wait(f"topic {given.topic} is whole", lambda: command.topic_missing(given.topic))
    command.done(answer, f"topic {given.topic} is one of the cluster")
    return 0


def _owner(command: Command, topic: str, name: str) -> str:
    """Return the HTTP address of the nsqd that is to give a topic to the cluster.

    Args:
        name: id or address of one; empty: the one that has it alone is looked for.

    Raises:
        NoNode: there is none of that name.
        UsageError: none has it, or several do.
    """
    status = command.status("")
    if name:
        node = status.find_node(name)
        if node is None or node.is_away:
            raise NoNode(name)
        return format_address(node.host, node.http_port)
    owners, silent = [], []
    is_known = _topic(command.status(topic), topic) is not None
    for node in status.nodes if is_known else ():  # lookups name its leaders, and not who has one of that name alone
        address = format_address(node.host, node.http_port)
        try:
            cluster = command.nsqd(address).stats(topic=topic).get("cluster")
        except FlintError:
            silent.append(address)
            continue
        if isinstance(cluster, dict) and topic in (cluster.get("double_topics") or ()):
            owners.append(address)
    if not owners:
        found = command.admin.lookup(topic).producers
        # of one that is the cluster's already any leader says that it is done
        owners = [format_address(each.broadcast_address, each.http_port) for each in found][: 1 if is_known else None]
    if len(owners) != 1:
        has = ", ".join(owners) or "no nsqd"
        unknown = f"; {', '.join(silent)} did not answer" if silent else ""
        advice = ": --node=HOST:PORT says which one is to give it, docs/cluster.md what becomes of the others"
        raise UsageError(
            f"one nsqd has to have topic {topic} alone, and {has} has it{unknown}{advice if owners else ''}"
        )
    return owners[0]


def _topic_elect(command: Command) -> int:
    given = command.given
    if not given.accept_loss and not given.dry_run:
        raise UsageError(
            "what the node lacks is lost for good: --dry-run says what that is, --accept-loss if that is meant"
        )
    answer = command.admin.elect(given.topic, given.partition, given.node, dry_run=given.dry_run)
    where = f"{given.topic}/{given.partition}"
    command.wait(f"{where} is led", lambda: command.unled(given.topic, given.partition))
    command.done(answer, f"{where} is led; when what is lost is known: flintmq topic acknowledge-loss {given.topic}")
    return 0


def _topic_acknowledge_loss(command: Command) -> int:
    given = command.given
    topic = _topic(command.status(given.topic), given.topic)
    if topic is None:
        raise NoTopic(given.topic)
    numbers = [each.partition for each in topic.partitions if each.may_have_lost]
    if given.partition is not None:
        if given.partition not in [each.partition for each in topic.partitions]:
            raise UsageError(f"there is no partition {given.topic}/{given.partition}")
        numbers = [number for number in numbers if number == given.partition]
    for number in numbers:
        answer = command.admin.acknowledge_loss(given.topic, number, dry_run=given.dry_run)
        command.done(answer, f"{given.topic}/{number}: it is not said any more that messages may be lost")
    if not numbers:
        command.done(None, f"of topic {given.topic} nothing is said to be lost")
    return 0


# -- flintmq node ------------------------------------------------------------------------------------------------------


def _node_list(command: Command) -> int:
    status = command.status("")
    nodes = [*status.nodes, *away_nodes(status)]
    command.answer(nodes, lambda: tables.nodes_text(status, command.width))
    return 0


class NoNode(FlintError):
    """The cluster has no such node.

    Args:
        name: it was called so.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return (
            f"there is no node {self.name}: name it by its id, or by the address of its TCP or HTTP port; flintmq node "
            "list lists all"
        )


class DrainUndone(FlintError):
    """A node that was waited for is drained no more, because somebody took that back.

    Args:
        node: it is called so.
        left: copies that it has, or is to have, still.
    """

    def __init__(self, node: str, left: Sequence[str]) -> None:
        super().__init__(node, tuple(left))
        self.node = node
        self.left = tuple(left)

    def __str__(self) -> str:
        has = f"{_counted(self.left)} still: {listed(self.left, _SHOWN_MAX)}" if self.left else "nothing"
        return f"the drain was undone: node {self.node} may have partitions again, and has {has}"


def _id_of(command: Command, name: str, is_awaited: bool = True) -> str:
    """Return the id of a node, which may be away: then it is called by that, or by the address that it had.

    Args:
        is_awaited: where waiting was asked for, it is this node that is waited for.

    Raises:
        NoNode: it is not known which it is, and is to be waited for.
        SeveralNodes: several have that address.
    """
    status = command.status("")
    node = status.find_node(name)
    if node is not None:
        return node.node
    is_known = bool(_held(status, name)) or any(each.node == name for each in status.drains)
    if command.waits and is_awaited and not is_known:
        raise NoNode(name)
    return name  # the nsqlookupd may know more


def _held(status: ClusterStatus, node: str) -> list[str]:
    """Name the partitions that a node has a copy of, whether or not it is there."""
    found = []
    for topic in status.topics:
        for each in topic.partitions:
            if node in (*each.replicas, *each.leaving, *each.in_sync):
                is_only = each.in_sync == [node]
                found.append(f"{topic.topic}/{each.partition}{' (no other copy is in sync)' if is_only else ''}")
    return found


def _counted(partitions: Sequence[str]) -> str:
    return f"{len(partitions)} partition{'s' * (len(partitions) != 1)}"


class _Left:
    """Tells what a node that is drained has still; it may be away.

    Args:
        node: its id.
    """

    def __init__(self, command: Command, node: str) -> None:
        self._command = command
        self._node = node
        self._drained_at = 0  # the revision of the store at which it was last seen to be drained; 0: it was not

    def __call__(self) -> str:
        """Tell it; empty: nothing.

        Raises:
            DrainUndone: it was drained, and is no more.
        """
        command, node = self._command, self._node
        status = command.status("")
        if unsure := command.unsure(status):
            return unsure
        found = next((each for each in status.nodes if each.node == node), None)
        drain = next((each for each in status.drains if each.node == node), None)
        held = _held(status, node)
        if drain is not None:
            self._drained_at = max(self._drained_at, status.revision)
        elif 0 < self._drained_at <= status.revision and (held or found is not None):
            # one that is behind does not know of the drain yet; a node that was removed is forgotten altogether
            raise DrainUndone(node if found is None else found.address, held)
        if not held:
            return "" if drain is not None or found is None else f"it is not known that node {found.address} drains"
        name = f"node {node}, which is away," if found is None else f"node {found.address}"
        parts = [f"{name} has {_counted(held)} still: {listed(held, _SHOWN_MAX)}"]
        moving = [each for each in command.moves() if node in each.sources]
        if moving:
            parts.append(tables.moves_line(moving))
        if drain is not None and drain.reason:
            parts.append(drain.reason)
        return "; ".join(parts)


def _node_drain(command: Command) -> int:
    given = command.given
    node = _id_of(command, given.node, is_awaited=not given.undo)
    answer = command.admin.drain_node(node, undo=given.undo, dry_run=given.dry_run)
    if not given.undo:
        command.wait(f"node {given.node} has nothing any more", _Left(command, node))
    command.done(answer, f"node {given.node} {'takes partitions again' if given.undo else 'drains'}")
    return 0


def _node_remove(command: Command) -> int:
    given = command.given
    node = _id_of(command, given.node)
    answer = command.admin.remove_node(node, dry_run=given.dry_run)
    command.wait(f"node {given.node} has nothing any more", _Left(command, node))
    command.done(answer, f"node {given.node} drains, and is forgotten when it has nothing and has ended")
    return 0


# -- the command line --------------------------------------------------------------------------------------------------


def run(noun: str, arguments: Sequence[str]) -> int:
    """Run ``flintmq cluster``, ``topic`` or ``node``; return its exit code.

    Raises:
        FlintError: the command line is wrong, or what was asked is refused, or nobody answers.
    """
    program, verbs = f"flintmq {noun}", _NOUNS[noun]
    word = arguments[0] if arguments else "--help"
    if word.lstrip("-") in ("help", "h"):
        sys.stdout.write(usage(noun))
        return 0
    verb = verbs.get(word)
    nodes = COMMANDS.get(noun)
    for_nodes = nodes.verbs if isinstance(nodes, Noun) else {}
    if word in for_nodes and (verb is None or (_names_nodes(arguments) and _is_for_nodes(noun, arguments))):
        return start.run(noun, arguments)
    if verb is None:
        near = nearest(word, [*verbs, *for_nodes])
        hint = f"did you mean {near}?" if near else f"{program} --help lists all"
        raise UsageError(f"there is no verb {word}; {hint}")
    given = parsers(noun)[word].parse_args(list(arguments[1:]))
    is_named = _from_environment(given)
    try:
        return verb.run(Command(given))
    except (NoCluster, NobodyAnswers) as error:
        if word not in for_nodes or (is_named and isinstance(error, NobodyAnswers)):
            raise
        return _run_for_nodes(noun, arguments, error)


def _names_nodes(arguments: Sequence[str]) -> bool:
    """Whether a command line, or the environment, names single nsqds."""
    flags = {word.partition("=")[0] for word in arguments}
    if flags & {"--nsqd", "--nsqd-http", "--nsqd-tcp-address", "--nsqd-http-address"}:
        return True
    is_named = bool(flags & {"--lookupd", "--lookupd-http-address"}) or VARIABLES["lookupd"] in os.environ
    return not is_named and any(os.environ.get(VARIABLES[name]) for name in ("nsqd", "nsqd_http"))


def _from_environment(given: argparse.Namespace) -> bool:
    """Fill in what is not given and stands in the environment; whether a nsqlookupd is named."""
    named = given.address or [os.environ.get(VARIABLES["lookupd"], "")]
    given.address = [part.strip() for each in named for part in each.split(",") if part.strip()]
    fill_in(given)
    return bool(given.address)


def _run_for_nodes(noun: str, arguments: Sequence[str], error: FlintError) -> int:
    """Ask single nsqds, where there is no cluster and they understand the command line.

    Raises:
        FlintError: they do not; then it is the one that was.
    """
    if not _is_for_nodes(noun, arguments):
        raise error
    return start.run(noun, arguments)


def _is_for_nodes(noun: str, arguments: Sequence[str]) -> bool:
    """Whether single nsqds understand a command line."""
    if {"-h", "--help"} & {*arguments}:
        return False
    try:
        read(noun, arguments)
    except UsageError:
        return False
    return True


def parsers(noun: str) -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each verb of ``flintmq cluster``, ``topic`` or ``node``."""
    found: dict[str, argparse.ArgumentParser] = {}
    for word, verb in _NOUNS[noun].items():
        parser = found[word] = Parser(prog=f"flintmq {noun} {word}", description=verb.about, allow_abbrev=False)
        verb.add(parser)
        _add_common(parser, verb)
    return found


def usage(noun: str) -> str:
    """Return what ``flintmq cluster --help`` and its siblings print."""
    verbs = _NOUNS[noun]
    nodes = COMMANDS.get(noun)
    for_nodes = nodes.verbs if isinstance(nodes, Noun) else {}
    width = max(map(len, [*verbs, *for_nodes]))
    lines = [f"Usage: flintmq {noun} <verb> [arguments] [flags]", "", _ABOUT[noun], ""]
    lines += [f"  {name:<{width}}  {verb.about}" for name, verb in verbs.items()]
    if for_nodes:
        lines += ["", "Without a cluster, of the single nsqds that --nsqd or --lookupd names:", ""]
        lines += [f"  {name:<{width}}  {each.about}" for name, each in for_nodes.items()]
    lines += [
        "",
        f"flintmq {noun} <verb> --help explains a verb. Whom to ask: --lookupd=HOST:PORT, {_LOOKUPD}.",
        f"A bearer token: --token=REF, --token-file=FILE, or {TOKEN_VARIABLE}.",
        "",
    ]
    return "\n".join(lines)


class _Verb:
    """One verb.

    Args:
        about: what it does, in a sentence.
        add: adds its arguments.
        is_change: it has ``--dry-run``.
        waits: it has ``--wait``.
    """

    def __init__(
        self,
        run: Callable[[Command], int],
        about: str,
        add: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
        is_change: bool = False,
        waits: bool = False,
    ) -> None:
        self.run = run
        self.about = about
        self.add = add
        self.is_change = is_change
        self.waits = waits


def _add_common(parser: argparse.ArgumentParser, verb: _Verb) -> None:
    if verb.is_change:
        parser.add_argument("--dry-run", action="store_true", help="change nothing, and print what would be done")
    if verb.waits:
        parser.add_argument("--wait", action="store_true", help="return when it is done, and say how far it is")
        parser.add_argument("--within", type=duration, default=timedelta(hours=1), metavar="1h",
                            help="how long --wait waits")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    common = parser.add_argument_group("whom to ask, and how")
    common.add_argument("--lookupd", "--lookupd-http-address", dest="address", action="append", metavar="HOST:PORT",
                        help=f"a nsqlookupd, or https://...; several (repeat it, or commas): the first that answers; "
                        f"{_LOOKUPD}; {VARIABLES['lookupd']}")  # fmt: skip
    common.add_argument("--timeout", dest="deadline", type=duration, default=timedelta(seconds=45), metavar="45s",
                        help=f"until an answer must be there; after {_TURN_S:g}s another nsqlookupd is asked "
                        "as well")  # fmt: skip
    add_token(common)
    common.add_argument("--tls-root-ca-file", metavar="FILE", help="PEM file with the authorities to trust")
    common.add_argument("--tls-cert", metavar="FILE", help="PEM file with a certificate to show")
    common.add_argument("--tls-key", metavar="FILE", help="PEM file with its key")


def _topic_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic")


def _deletion_arguments(parser: argparse.ArgumentParser) -> None:
    _topic_argument(parser)
    add_yes(parser)


def _creation_arguments(parser: argparse.ArgumentParser) -> None:
    _topic_argument(parser)
    parser.add_argument("--partitions", type=_count, metavar="N", help="partitions; default: a plain topic of NSQ")
    parser.add_argument("--replicas", type=_copies, metavar="N", help="copies of each partition; default: nsqlookupd's")
    _shared_arguments(parser)
    parser.add_argument("--ordered", action="store_true", help="it can only be consumed in order")
    parser.add_argument("--multipart", action="store_true", help="whoever publishes names a partition")
    parser.set_defaults(auto_channels=True)


def _update_arguments(parser: argparse.ArgumentParser) -> None:
    _topic_argument(parser)
    parser.add_argument("--replicas", type=_copies, metavar="N", help="copies of each partition")
    parser.add_argument("--min-in-sync", type=_copies, metavar="N", help="copies in sync that an OK needs")
    _shared_arguments(parser)
    parser.set_defaults(auto_channels=None)


def _shared_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--syncdisk", type=int, metavar="N", help="sync to the device every N messages; 0: no")
    parser.add_argument("--retention", type=int, metavar="DAYS", help="how long consumed messages are kept")
    parser.add_argument("--headers", action="store_true", help="messages may carry headers")
    parser.add_argument("--auto-channels", action=argparse.BooleanOptionalAction, help="subscribing creates channels")


def _expand_arguments(parser: argparse.ArgumentParser) -> None:
    _topic_argument(parser)
    parser.add_argument("partitions", type=_count, help="in all")


def _move_arguments(parser: argparse.ArgumentParser) -> None:
    _topic_argument(parser)
    parser.add_argument("partition", type=_number)
    parser.add_argument("--from", dest="source", required=True, metavar="NODE", help="id or address of who has it")
    parser.add_argument("--to", dest="target", required=True, metavar="NODE", help="id or address of who is to have it")


def _replicate_arguments(parser: argparse.ArgumentParser) -> None:
    _topic_argument(parser)
    parser.add_argument("--replicas", type=_copies, metavar="N", help="copies of each partition; default: 1")
    parser.add_argument(
        "--node", default="", help="id or address of the nsqd that has it, where several have such a one"
    )


def _elect_arguments(parser: argparse.ArgumentParser) -> None:
    _topic_argument(parser)
    parser.add_argument("partition", type=_number)
    parser.add_argument(
        "node", nargs="?", default="",
        help="id or address of one that has a copy; default: has most. Where no copy is left: where to begin anew",
    )  # fmt: skip
    parser.add_argument("--accept-loss", action="store_true", help="what that node lacks is lost, and that is meant")


def _loss_arguments(parser: argparse.ArgumentParser) -> None:
    _topic_argument(parser)
    parser.add_argument("partition", nargs="?", type=_number, help="default: all")


def _balance_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("on", "off", "top"))
    parser.add_argument("--window", type=_window, metavar="HH-HH", help="hours of the day (UTC) in which copies move")


def _upgrade_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("begin", "done"))


def _drain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("node", help="id or address")
    parser.add_argument("--undo", action="store_true", help="let it take partitions again")


def _remove_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("node", help="id or address")


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError("it must be a number, 0 or more")
    return int(text)


def _count(text: str) -> int:
    value = _number(text)
    if not value:
        raise argparse.ArgumentTypeError("it must be 1 or more")
    return value


def _copies(text: str) -> int:
    value = _number(text)
    if not 1 <= value <= REPLICATOR_MAX:
        raise argparse.ArgumentTypeError(f"it must be 1 to {REPLICATOR_MAX}")
    return value


def _window(text: str) -> str:
    if not _WINDOW.fullmatch(text):
        raise argparse.ArgumentTypeError("it must be two hours of the day, such as 02-05")
    return text


_ABOUT = {
    "cluster": "Looks at a cluster as a whole, and changes how it keeps itself.",
    "topic": "Makes, changes and moves topics of a cluster.",
    "node": "Looks at the nsqds of a cluster, and takes them out.",
}
_NOUNS: dict[str, dict[str, _Verb]] = {
    "cluster": {
        "status": _Verb(_cluster_status, "Print nodes, topics and what is wrong; exit code 1 if anything is."),
        "moves": _Verb(_cluster_moves, "Print the copies that are being made or taken away.", waits=True),
        "balance": _Verb(
            _cluster_balance, "Spread leaders and copies by load, or not; or print the load.", _balance_arguments, True
        ),
        "upgrade": _Verb(
            _cluster_upgrade, "Have nothing moved while nodes are restarted, one after the other.", _upgrade_arguments
        ),
    },
    "topic": {
        "create": _Verb(_topic_create, "Create a topic.", _creation_arguments, True, True),
        "delete": _Verb(
            _topic_delete, "Delete a topic, with its messages, on every node.", _deletion_arguments, True, True
        ),
        "list": _Verb(_topic_list, "Print all topics of the cluster."),
        "show": _Verb(
            _topic_show, "Print who leads and who has copies; exit code 1 if something lacks.", _topic_argument
        ),
        "update": _Verb(_topic_update, "Change copies, retention and more of a topic.", _update_arguments, True, True),
        "expand": _Verb(_topic_expand, "Give a topic more partitions.", _expand_arguments, True, True),
        "move": _Verb(_topic_move, "Move a copy of a partition to another node.", _move_arguments, True, True),
        "replicate": _Verb(
            _topic_replicate, "Make a topic of one node one of the cluster.", _replicate_arguments, waits=True
        ),
        "elect": _Verb(
            _topic_elect, "Let a node lead that may lack messages, where nobody else is left.", _elect_arguments,
            True, True,
        ),
        "acknowledge-loss": _Verb(
            _topic_acknowledge_loss, "Say that it is known that messages may be lost, after such an election.",
            _loss_arguments, True,
        ),
    },
    "node": {
        "list": _Verb(_node_list, "Print all nodes."),
        "drain": _Verb(
            _node_drain, "Have a node lead nothing, and give its copies to others.", _drain_arguments, True, True
        ),
        "remove": _Verb(
            _node_remove, "Drain a node for good; it is forgotten when it has ended.", _remove_arguments, True, True
        ),
    },
}  # fmt: skip
NOUNS = tuple(_NOUNS)
