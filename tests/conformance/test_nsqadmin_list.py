"""Every row of nsqadmin.md: of NSQ's JSON API each request with its status, each field with its type."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.conftest import is_ours
from tests.conformance.test_seed_sentences import names_in
from tests.integration.daemons import Daemons, wait_until
from tests.integration.test_nsqadmin_api import Deployment, Listener

LIST = Path(__file__).with_name("nsqadmin.md")
ROWS_MIN = {"Answers": 40, "Refusals": 35, "Fields": 100, "Behaviours": 20}


def tables() -> dict[str, list[list[str]]]:
    """The rows of each table, by its title."""
    found: dict[str, list[list[str]]] = {}
    for part in LIST.read_text(encoding="utf-8").split("\n## ")[1:]:
        lines = [line for line in part.splitlines() if line.startswith("| ")]
        found[part.splitlines()[0]] = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[1:]]
    return found


TABLES = tables()
SHAPES: dict[str, list[tuple[str, str]]] = {}
for _shape, _field, _kind in TABLES["Fields"]:
    SHAPES.setdefault(_shape, []).append((_field, _kind))


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, dict[str, str]]]:
    """The daemons, and what stands for the words in braces."""
    daemons = Daemons(tmp_path_factory.mktemp("list"))
    listener = Listener()
    try:
        deployment = Deployment(daemons, listener)
        deployment.nsqlookupd.post("/channel/create?topic=inactive&channel=left")
        topic, single, spoilt = deployment.topic("counted"), deployment.topic("single", 1), deployment.topic("spoilt")
        with deployment.nsqds[0].connect() as consumer, deployment.nsqds[1].connect() as other:
            for each in (consumer, other):
                each.identify(client_id="me", hostname="here", user_agent="test/1")
                each.subscribe(topic, "c", 1)
                each.finish(each.message())
                each.settle()
            wait_until(lambda: deployment.nsqadmin.get("/api/counter")["stats"], "a round of questions has found them")
            words = {"topic": topic, "single": single, "spoilt": spoilt, "inactive": "inactive"}
            yield deployment, {**words, "node": deployment.address(0), "lookupd": deployment.lookupd}
    finally:
        daemons.close()
        listener.close()


def wrong(value: Any, kind: str, where: str) -> list[str]:
    """What of a value is not as the list has it."""
    kind = kind.removesuffix(" if it has one")
    if kind.endswith(" or null"):
        return [] if value is None else wrong(value, kind.removesuffix(" or null"), where)
    if kind.startswith(("list of ", "map to ")):
        if not isinstance(value, list if kind.startswith("list") else dict):
            return [f"{where} is {value!r}, no {kind}"]
        each = kind.removeprefix("list of ").removeprefix("map to ")
        values: Any = value.values() if isinstance(value, dict) else value
        return [found for one in values for found in wrong(one, each, f"{where}[]")]
    if kind in SHAPES:
        if not isinstance(value, dict):
            return [f"{where} is {value!r}, no {kind}"]
        fields = [name for name, of in SHAPES[kind] if name in value or not of.endswith(" if it has one")]
        if list(value) != fields:
            return [f"{where} has {list(value)}, not {fields}"]
        return [
            each for name, of in SHAPES[kind] if name in value for each in wrong(value[name], of, f"{where}.{name}")
        ]
    types = {"text": (str,), "number": (int, float), "truth": (bool,), "null": (type(None),)}[kind]
    is_so = isinstance(value, types) and isinstance(value, bool) == (kind == "truth")
    return [] if is_so else [f"{where} is {value!r}, no {kind}"]


def judged(answer: Any, wanted: str) -> list[str]:
    """What of an answer is not as the list has it."""
    if wanted.startswith("text "):
        text = wanted.removeprefix("text ").removeprefix("`").removesuffix("`")
        return [] if answer.body.decode() == text else [f"{answer.body!r}, not {text!r}"]
    if answer.headers["Content-Type"] != "application/json; charset=utf-8":
        return [f"it is {answer.headers['Content-Type']}"]
    if wanted.startswith("`"):
        return [] if answer.json == json.loads(wanted.strip("`")) else [f"{answer.json}, not {wanted}"]
    return wrong(answer.json, wanted, "answer")


@pytest.mark.slow
def test_every_request_is_answered_as_listed(deployed: tuple[Deployment, dict[str, str]]):
    deployment, words = deployed
    found = []

    def filled(text: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda match: words.get(match[1], match[0]), text)

    refusals = [[*row[:3], f'`{{"message": "{row[3]}"}}`', *row[4:]] for row in TABLES["Refusals"]]
    for asked, given, status, wanted, state, *_ in refusals + TABLES["Answers"]:
        if state == "better" and not is_ours("nsqadmin"):
            continue
        method, path = filled(asked).strip("`").split(" ", 1)
        body = filled(given).strip("`").encode() if given else None
        answer = deployment.nsqadmin.request(method, path, body)
        mistakes = [] if answer.status == int(status) else [f"status {answer.status}, not {status}: {answer.body!r}"]
        found += [f"{method} {path} {given}: {each}" for each in mistakes or judged(answer, filled(wanted))]
    assert not found, "\n".join(found)


def test_every_behaviour_is_shown_by_tests_that_exist():
    for row in TABLES["Behaviours"]:
        tests = re.findall(r"`(tests/[^`]+)`", row[-1])
        assert len(row) == 4 and row[1] in ("same", "better") and tests, row
        for test in tests:
            path, _, name = test.partition("::")
            assert name in names_in(path), test


def test_no_row_was_lost():
    for title, least in ROWS_MIN.items():
        assert len(TABLES[title]) >= least, title
    routes = {tuple(re.split(r"[ ?]", row[0].strip("`"))[:2]) for row in TABLES["Answers"] + TABLES["Refusals"]}
    assert {method for method, _ in routes} == {"GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE"}
    kinds = {word for of in SHAPES.values() for _, kind in of for word in re.findall(r"\b[A-Z]\w+", kind)}
    used = {word for row in TABLES["Answers"] for word in re.findall(r"\b[A-Z]\w+", row[3])} | kinds
    assert SHAPES.keys() <= used
