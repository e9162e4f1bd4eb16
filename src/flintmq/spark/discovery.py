"""Discovery: the nsqds that nsqlookupd knows, over HTTP.

The rules of this file: every wait and every body has a bound; all nsqlookupds are asked and their answers united, one
that answers is enough; one that has just failed is asked last, and only if no other answers, so that its silence is
not waited for with every topic; both forms of the JSON are understood (with and without the envelope of before 1.0).

Source: NSQ's nsqlookupd.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flintmq.addresses import format_address
from flintmq.client.blocking.http import get
from flintmq.client.core.discovery import NODES_PATH, topic_path
from flintmq.client.core.http import ANSWER_SIZE_MAX
from flintmq.client.options import ConnectionOptions
from flintmq.errors import UNREADABLE_JSON, DiscoveryError
from flintmq.limits import PARTITION_COUNT_MAX
from flintmq.names import is_valid_name
from flintmq.spark.link import lookup_options, with_spark_names
from flintmq.spark.options import PLAIN, LinkOptions

BODY_SIZE_MAX = ANSWER_SIZE_MAX
TOPICS_PATH = "/topics"
_WHAT_TO_DO = {
    401: "it asks for permissions: set nsqlookupdToken to where a token is that it knows",
    403: "the token (or certificate) does not allow this: see docs/http-auth.md",
}

FAILING_PAUSE_S = 1.0
FAILING_PAUSE_MAX_S = 10.0
FAILING_MAX = 1000  # remembered in a process

log = logging.getLogger("flintmq.spark")


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


def partition_count(lookupds: Sequence[str], topic: str, timeout_s: float, link: LinkOptions = PLAIN) -> int:
    """Return how many partitions a topic has, whoever serves them; raises as :func:`nsqds_of_topic`.

    It is 0 where the topic has none, or where only nsqlookupds of NSQ's answer, which do not know of them.
    """
    counts = [0]
    for answer in _ask_all(lookupds, topic_path(topic, "r"), timeout_s, link):
        meta = answer.get("meta")
        count = meta.get("partition_num") if isinstance(meta, dict) else None
        if isinstance(count, int) and 0 < count <= PARTITION_COUNT_MAX:
            counts.append(count)
    return max(counts)


def _ask_all(lookupds: Sequence[str], path: str, timeout_s: float, link: LinkOptions) -> list[Mapping[str, Any]]:
    options = lookup_options(link, timeout_s)
    answers: list[Mapping[str, Any]] = []
    failures: list[str] = []
    refused_count = 0
    now, only_if_none = FAILING.due(lookupds)
    for address in (*now, *only_if_none):
        if answers and address in only_if_none:
            break
        try:
            answers.append(_ask(address, path, timeout_s, options))
            FAILING.note(address, True)
        except (OSError, *UNREADABLE_JSON) as error:
            FAILING.note(address, False)
            reason = with_spark_names(str(error))
            log.warning("nsqlookupd %s does not answer %s: %s", address, path, reason)
            failures.append(f"{address}: {reason}")
            refused_count += isinstance(error, _Refused)
    if not answers:
        kind = LookupRefused if refused_count == len(failures) else DiscoveryError
        raise kind(f"no nsqlookupd answers {path}: " + "; ".join(failures))
    return answers


def _ask(address: str, path: str, timeout_s: float, options: ConnectionOptions) -> Mapping[str, Any]:
    url = address if "://" in address else f"http://{address}"
    status, body = get(url + path, timeout_s, options, time.monotonic)
    if len(body) > BODY_SIZE_MAX:
        raise ValueError(f"an answer of more than {BODY_SIZE_MAX} bytes")
    if status == 404:  # TOPIC_NOT_FOUND: an answer, and an empty one
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


def _addresses(answers: Sequence[Mapping[str, Any]]) -> list[str]:
    found = set()
    for answer in answers:
        for producer in _list(answer, "producers"):
            if not isinstance(producer, dict):
                continue
            host, port = producer.get("broadcast_address"), producer.get("tcp_port")
            if isinstance(host, str) and host and isinstance(port, int):
                found.add(format_address(host, port))
    return sorted(found)


def _list(answer: Mapping[str, Any], field: str) -> list[Any]:
    value = answer.get(field)
    return value if isinstance(value, list) else []
