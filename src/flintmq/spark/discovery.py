"""Which nsqds there are, asked from nsqlookupd over HTTP.

The rules of this file: every wait and every body has a bound; all nsqlookupds are asked and their answers united, one
that answers is enough; both forms of the JSON are understood (with and without the envelope of before 1.0).

Source: reference/nsq.md 2.3.
"""

from __future__ import annotations

import http.client
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from flintmq.errors import UNREADABLE_JSON, DiscoveryError
from flintmq.names import is_valid_name
from flintmq.spark.options import split_address

BODY_SIZE_MAX = 16 << 20

log = logging.getLogger("flintmq.spark")


def nsqds_of_topic(lookupds: Sequence[str], topic: str, timeout_s: float) -> list[str]:
    """Addresses of the nsqds that have a topic, sorted; none when nobody knows it.

    Raises:
        DiscoveryError: no nsqlookupd answered.
    """
    return _addresses(_ask_all(lookupds, f"/lookup?topic={quote(topic)}", timeout_s))


def all_nsqds(lookupds: Sequence[str], timeout_s: float) -> list[str]:
    """Addresses of all nsqds, sorted.

    Raises:
        DiscoveryError: no nsqlookupd answered.
    """
    return _addresses(_ask_all(lookupds, "/nodes", timeout_s))


def all_topics(lookupds: Sequence[str], timeout_s: float) -> list[str]:
    """Names of all topics, sorted.

    Raises:
        DiscoveryError: no nsqlookupd answered.
    """
    answers = _ask_all(lookupds, "/topics", timeout_s)
    names = {name for answer in answers for name in _list(answer, "topics") if isinstance(name, str)}
    return sorted(name for name in names if is_valid_name(name))


def _ask_all(lookupds: Sequence[str], path: str, timeout_s: float) -> list[Mapping[str, Any]]:
    answers, failures = [], []
    for address in lookupds:
        try:
            answers.append(_ask(address, path, timeout_s))
        except (OSError, http.client.HTTPException, *UNREADABLE_JSON) as error:
            log.warning("nsqlookupd %s does not answer %s: %s", address, path, error)
            failures.append(f"{address}: {error}")
    if not answers:
        raise DiscoveryError(f"no nsqlookupd answers {path}: " + "; ".join(failures))
    return answers


def _ask(address: str, path: str, timeout_s: float) -> Mapping[str, Any]:
    host, port = split_address(address)
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path, headers={"Accept": "application/vnd.nsq; version=1.0"})
        response = connection.getresponse()
        body = response.read(BODY_SIZE_MAX + 1)
    finally:
        connection.close()
    if len(body) > BODY_SIZE_MAX:
        raise ValueError(f"an answer of more than {BODY_SIZE_MAX} bytes")
    if response.status == 404:  # TOPIC_NOT_FOUND: an answer, and an empty one
        return {}
    if response.status != 200:
        raise ValueError(f"HTTP status {response.status}")
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
                found.add(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    return sorted(found)


def _list(answer: Mapping[str, Any], field: str) -> list[Any]:
    value = answer.get(field)
    return value if isinstance(value, list) else []
