"""Discovery: the nsqds that nsqlookupd knows, over HTTP.

Topics that are named are asked about one by one, so that a token for these topics is enough. All that a pattern matches
are looked up with three requests, however many they are: it needs a token for all topics in any case::

    /topics             names
    /cluster/status     who leads what and can be read from, and how many partitions there are; 404 without a cluster
    /nodes              who has which of the topics that are no cluster's, and for which of them it is tombstoned

The rules of this file: every wait and every body has a bound; all nsqlookupds are asked and their answers united, one
that answers is enough; one that has just failed is asked last, and only if no other answers, so that its silence is
not waited for with every topic; whichever way a topic is looked up, the nsqds are those that ``/lookup`` names, which
for a topic of a cluster are its leaders alone; both forms of the JSON are understood (with and without the envelope of
before 1.0).

Source: NSQ's nsqlookupd; FlintMQ's in a cluster.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from flintmq.addresses import format_address
from flintmq.client.blocking.http import get
from flintmq.client.core.discovery import NODES_PATH, topic_path
from flintmq.client.core.http import ANSWER_SIZE_MAX
from flintmq.client.core.topology import NO_LOOKUPD
from flintmq.client.options import ConnectionOptions
from flintmq.errors import UNREADABLE_JSON, DiscoveryError
from flintmq.limits import PARTITION_COUNT_MAX
from flintmq.names import is_valid_name
from flintmq.spark.link import lookup_options, with_spark_names
from flintmq.spark.options import PLAIN, LinkOptions

BODY_SIZE_MAX = ANSWER_SIZE_MAX
TOPICS_PATH = "/topics"
STATUS_PATH = "/cluster/status"
ASKED_AT_ONCE_MAX = 8
"""Topics that are asked about at the same time, where that takes a request for each."""

_WHAT_TO_DO = {
    401: "it asks for permissions: set nsqlookupdToken to where a token is that it knows",
    403: "the token (or certificate) does not allow this: see docs/http-auth.md",
}

FAILING_PAUSE_S = 1.0
FAILING_PAUSE_MAX_S = 10.0
FAILING_MAX = 1000  # remembered in a process

log = logging.getLogger("flintmq.spark")

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class TopicPlaces:
    """The nsqds that have a topic.

    Attributes:
        nsqds: their addresses, sorted.
        partition_count: how many partitions it has, whoever serves them; 0: none; None: that is yet to be asked.
    """

    nsqds: tuple[str, ...] = ()
    partition_count: int | None = None


class LookupRefused(DiscoveryError):
    """Every nsqlookupd that answers refuses this client, now or later."""


class _Refused(ValueError):
    """One nsqlookupd refuses this client."""


class Failing:
    """The nsqlookupds that this process has found failing, and until when each is asked last."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._failures: dict[str, tuple[int, float]] = {}

    def note(self, address: str, has_answered: bool) -> None:
        """Note whether one answered; each failure on end doubles the pause, up to ``FAILING_PAUSE_MAX_S``."""
        count = self._failures.pop(address, (0, 0.0))[0]
        if has_answered:
            return
        if len(self._failures) >= FAILING_MAX:
            self._failures.clear()
        pause_s = min(FAILING_PAUSE_S * 2 ** min(count, 16), FAILING_PAUSE_MAX_S)
        self._failures[address] = (count + 1, self._now() + pause_s)

    def due(self, addresses: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return whom to ask now, and whom only if none of those answers."""
        now_s = self._now()
        last = [each for each in addresses if self._failures.get(each, (0, 0.0))[1] > now_s]
        return [each for each in addresses if each not in last], last


FAILING = Failing()


def nsqds_of_topic(lookupds: Sequence[str], topic: str, timeout_s: float, link: LinkOptions = PLAIN) -> list[str]:
    """Return the addresses of the nsqds that have a topic, sorted; none when nobody knows it.

    Raises:
        DiscoveryError: no nsqlookupd answered, or (LookupRefused) none lets this client ask.
        OptionError: a file or token that ``link`` names is not to be had on this host.
    """
    return _addresses(_ask_all(lookupds, topic_path(topic), timeout_s, link))


def all_nsqds(lookupds: Sequence[str], timeout_s: float, link: LinkOptions = PLAIN) -> list[str]:
    """Return the addresses of all nsqds, sorted; raises as :func:`nsqds_of_topic`."""
    return _addresses(_ask_all(lookupds, NODES_PATH, timeout_s, link))


def all_topics(lookupds: Sequence[str], timeout_s: float, link: LinkOptions = PLAIN) -> list[str]:
    """Return the names of all topics, sorted; raises as :func:`nsqds_of_topic`."""
    answers = _ask_all(lookupds, TOPICS_PATH, timeout_s, link)
    names = {name for answer in answers for name in _list(answer, "topics") if isinstance(name, str)}
    return sorted(name for name in names if is_valid_name(name))


def places_of(
    lookupds: Sequence[str], topics: Sequence[str], timeout_s: float, link: LinkOptions = PLAIN
) -> dict[str, TopicPlaces]:
    """Return where some topics are, with a request for each; raises as :func:`nsqds_of_topic`."""
    return {
        topic: TopicPlaces(tuple(nsqds))
        for topic, nsqds in _for_each(topics, lambda topic: nsqds_of_topic(lookupds, topic, timeout_s, link)).items()
    }


def listed_places(
    lookupds: Sequence[str], topics: Sequence[str], timeout_s: float, link: LinkOptions = PLAIN
) -> dict[str, TopicPlaces]:
    """Return where topics are, with two requests for any number of them; raises as :func:`nsqds_of_topic`.

    A nsqlookupd that lets this client ask for no lists, or whose lists are too long, is asked about each topic.
    """
    if not topics:
        return {}
    options = lookup_options(link, timeout_s)

    def ask(address: str) -> Mapping[str, TopicPlaces]:
        try:
            return _listed(
                _ask(address, STATUS_PATH, timeout_s, options), _ask(address, NODES_PATH, timeout_s, options), topics
            )
        except (OSError, *UNREADABLE_JSON) as error:
            reason = with_spark_names(str(error))
            log.info("nsqlookupd %s is asked about each topic, not for all at once: %s", address, reason)
        nsqds = _for_each(topics, lambda topic: _addresses([_ask(address, topic_path(topic), timeout_s, options)]))
        return {topic: TopicPlaces(tuple(found)) for topic, found in nsqds.items()}

    answers = _of_each(lookupds, f"where {len(topics)} topics are", ask)
    return {topic: _united(answer.get(topic, TopicPlaces()) for answer in answers) for topic in topics}


def partition_counts(
    lookupds: Sequence[str], topics: Sequence[str], timeout_s: float, link: LinkOptions = PLAIN
) -> dict[str, int]:
    """Return what :func:`partition_count` does for each of some topics, with a request for each."""
    return _for_each(topics, lambda topic: partition_count(lookupds, topic, timeout_s, link))


def partition_count(lookupds: Sequence[str], topic: str, timeout_s: float, link: LinkOptions = PLAIN) -> int:
    """Return how many partitions a topic has, whoever serves them; raises as :func:`nsqds_of_topic`.

    It is 0 where the topic has none, or where only nsqlookupds of NSQ's answer, which do not know of them.
    """
    return max(_count(answer) for answer in _ask_all(lookupds, topic_path(topic, "r"), timeout_s, link))


def _for_each(topics: Sequence[str], ask: Callable[[str], Value]) -> dict[str, Value]:
    """Ask about topics one by one, several at the same time.

    The first has its answer before the others are asked about, so that a nsqlookupd that is silent is found failing
    once, and not by every thread.
    """
    if not topics:
        return {}
    first, *others = topics
    found = {first: ask(first)}
    if others:
        with ThreadPoolExecutor(min(ASKED_AT_ONCE_MAX, len(others)), "nsqlookupd") as pool:
            found.update(zip(others, pool.map(ask, others), strict=True))
    return found


def _ask_all(lookupds: Sequence[str], path: str, timeout_s: float, link: LinkOptions) -> list[Mapping[str, Any]]:
    options = lookup_options(link, timeout_s)
    return _of_each(lookupds, path, lambda address: _ask(address, path, timeout_s, options))


def _of_each(lookupds: Sequence[str], what: str, ask: Callable[[str], Value]) -> list[Value]:
    """Return the answers of those that answer.

    Args:
        what: is asked, for messages: a path.
    """
    answers: list[Value] = []
    failures: list[str] = []
    refused_count = 0
    now, only_if_none = FAILING.due(lookupds)
    for address in (*now, *only_if_none):
        if answers and address in only_if_none:
            break
        try:
            answers.append(ask(address))
            FAILING.note(address, True)
        except (OSError, *UNREADABLE_JSON) as error:
            FAILING.note(address, False)
            reason = with_spark_names(str(error))
            log.warning("nsqlookupd %s does not answer %s: %s", address, what, reason)
            failures.append(f"{address}: {reason}")
            refused_count += isinstance(error, _Refused)
    if not answers:
        kind = LookupRefused if refused_count == len(failures) else DiscoveryError
        raise kind(f"no nsqlookupd answers {what}: " + "; ".join(failures))
    return answers


def _ask(address: str, path: str, timeout_s: float, options: ConnectionOptions) -> Mapping[str, Any]:
    url = address if "://" in address else f"http://{address}"
    status, body = get(url + path, timeout_s, options, time.monotonic)
    if len(body) > BODY_SIZE_MAX:
        raise ValueError(f"an answer of more than {BODY_SIZE_MAX} bytes")
    if status == 404:
        if path != STATUS_PATH and b'"NOT_FOUND"' in body:  # there is no such path; NSQ's own have not that one
            raise ValueError(f"HTTP status 404: {NO_LOOKUPD}")
        return {}
    if status in _WHAT_TO_DO:
        raise _Refused(f"HTTP status {status}: {_WHAT_TO_DO[status]}")
    if status != 200:
        raise ValueError(f"HTTP status {status}")
    answer = json.loads(body)
    if isinstance(answer, dict) and isinstance(answer.get("data"), dict):
        answer = answer["data"]
    if not isinstance(answer, dict):
        raise ValueError("an answer that is no JSON object")
    return answer


def _listed(status: Mapping[str, Any], nodes: Mapping[str, Any], topics: Sequence[str]) -> Mapping[str, TopicPlaces]:
    """Return where one nsqlookupd says that topics are.

    Args:
        status: answer to ``STATUS_PATH``; empty from one without a cluster.
        nodes: answer to ``NODES_PATH``.

    Raises:
        ValueError: they do not say it.
    """
    led = _led(status)
    producers = nodes.get("producers")
    if not isinstance(producers, list):
        raise ValueError("an answer without nodes")
    holders: dict[str, set[str]] = {topic: set() for topic in topics}
    partitioned: set[str] = set()
    for producer in producers:
        address = _address(producer)
        if address is None:
            continue
        partitions = producer.get("partitions")
        partitioned.update(partitions if isinstance(partitions, dict) else ())
        tombstones = _list(producer, "tombstones")
        for number, topic in enumerate(_list(producer, "topics")):
            is_tombstoned = number < len(tombstones) and tombstones[number] is True
            if isinstance(topic, str) and topic in holders and not is_tombstoned:
                holders[topic].add(address)

    def place(topic: str) -> TopicPlaces:
        if topic in led:
            return led[topic]
        # one that nobody has now may have partitions, too, of which its nsqlookupd still knows
        count = 0 if holders[topic] and topic not in partitioned else None
        return TopicPlaces(tuple(sorted(holders[topic])), count)

    return {topic: place(topic) for topic in topics}


def _led(status: Mapping[str, Any]) -> dict[str, TopicPlaces]:
    """Return where the topics of a cluster can be read.

    Raises:
        ValueError: it is not known of all of them.
    """
    if status.get("unreadable"):
        raise ValueError("the store of its cluster cannot be read in part")
    found: dict[str, TopicPlaces] = {}
    try:
        for row in _list(status, "topics"):
            ready = {str(each["address"]) for each in row["partitions"] if each["is_ready"]}
            split = (address.rpartition(":") for address in ready)
            nsqds = tuple(sorted(format_address(host, int(port)) for host, _, port in split))
            found[row["topic"]] = TopicPlaces(nsqds, _count(row) if "meta" in row else None)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a state of a cluster that cannot be read: {error!r}") from error
    return found


def _united(places: Iterable[TopicPlaces]) -> TopicPlaces:
    """Return one picture from what several nsqlookupds say of a topic."""
    nsqds: set[str] = set()
    counts: list[int | None] = []
    for each in places:
        nsqds.update(each.nsqds)
        counts.append(each.partition_count)
    known = [count for count in counts if count is not None]
    return TopicPlaces(tuple(sorted(nsqds)), max(known) if len(known) == len(counts) else None)


def _count(answer: Mapping[str, Any]) -> int:
    """Return how many partitions a topic's ``meta`` says; 0 for what cannot be."""
    meta = answer.get("meta")
    count = meta.get("partition_num") if isinstance(meta, dict) else None
    return count if isinstance(count, int) and 0 < count <= PARTITION_COUNT_MAX else 0


def _addresses(answers: Iterable[Mapping[str, Any]]) -> list[str]:
    found = {_address(producer) for answer in answers for producer in _list(answer, "producers")}
    return sorted(address for address in found if address is not None)


def _address(producer: object) -> str | None:
    """Return where an nsqd listens, if that is said."""
    if not isinstance(producer, dict):
        return None
    host, port = producer.get("broadcast_address"), producer.get("tcp_port")
    return format_address(host, port) if isinstance(host, str) and host and isinstance(port, int) else None


def _list(answer: Mapping[str, Any], field: str) -> list[Any]:
    value = answer.get(field)
    return value if isinstance(value, list) else []
