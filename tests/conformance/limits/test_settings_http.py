"""/topic/settings and /channel/settings of nsqd, parameter by parameter."""

from __future__ import annotations

import json

import pytest
from tests.conformance.http_helpers import assert_refused
from tests.integration.daemons import Daemons, Nsqd

pytestmark = pytest.mark.improvement

PATHS = ("/topic/settings", "/channel/settings")
METHODS = ("GET", "POST")
NO_LIMITS = {
    "max_attempts": 0,
    "dead_letter_topic": "",
    "ttl_ms": 0,
    "max_messages": 0,
    "max_bytes": 0,
    "overflow": "refuse",
    "trace": "",
}
BAD = {
    "INVALID_BODY: not JSON": (b"", b"{", b"\xff"),
    "INVALID_BODY: it must be a JSON object": (b"[]", b"5", b'"x"', b"null"),
    "INVALID_SETTING: ": (b'{"dead_letters": true}', b'{"max_attempt": 3}'),
    "INVALID_ARG_MAX_ATTEMPTS: ": (
        b'{"max_attempts": -1}',
        b'{"max_attempts": 65536}',
        b'{"max_attempts": "3"}',
        b'{"max_attempts": true}',
        b'{"max_attempts": 1.5}',
    ),
    "INVALID_ARG_TTL_MS: ": (b'{"ttl_ms": -5}', b'{"ttl_ms": 99999999999999}', b'{"ttl_ms": "1s"}'),
    "INVALID_ARG_MAX_MESSAGES: ": (b'{"max_messages": -1}', b'{"max_messages": [1]}'),
    "INVALID_ARG_MAX_BYTES: ": (b'{"max_bytes": -1}', b'{"max_bytes": {}}'),
    "INVALID_ARG_OVERFLOW: ": (b'{"overflow": "drop"}', b'{"overflow": ["refuse"]}'),
    "INVALID_ARG_TRACE: ": (b'{"trace": "on"}', b'{"trace": true}'),
    "INVALID_ARG_DEAD_LETTER_TOPIC: ": (
        b'{"max_attempts": 3, "dead_letter_topic": "a b"}',
        b'{"max_attempts": 3, "dead_letter_topic": "{topic}"}',
        b'{"dead_letter_topic": "{topic}-' + b"x" * 64 + b'"}',
        b'{"dead_letter_topic": 5}',
    ),
}


def created(nsqd: Nsqd, topic: str) -> dict[str, str]:
    nsqd.post(f"/topic/create?topic={topic}")
    nsqd.post(f"/channel/create?topic={topic}&channel=c")
    return {path: path + of(topic, path) for path in PATHS}


def of(topic: str, path: str) -> str:
    """The query of a path; /topic/settings refuses a channel."""
    return f"?topic={topic}&channel=c" if path == "/channel/settings" else f"?topic={topic}"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", METHODS)
def test_what_is_asked_about_must_be_there(nsqd: Nsqd, topic: str, method: str, path: str):
    assert_refused(nsqd.request(method, path, b"{}"), 400, "MISSING_ARG_TOPIC")
    assert_refused(nsqd.request(method, f"{path}?topic=a%20b", b"{}"), 400, "INVALID_ARG_TOPIC")
    assert_refused(nsqd.request(method, f"{path}{of(topic, path)}", b"{}"), 404, "TOPIC_NOT_FOUND")


@pytest.mark.parametrize("method", METHODS)
def test_a_channel_must_be_there(nsqd: Nsqd, topic: str, method: str):
    created(nsqd, topic)
    target = f"/channel/settings?topic={topic}"
    assert_refused(nsqd.request(method, target, b"{}"), 400, "MISSING_ARG_CHANNEL")
    assert_refused(nsqd.request(method, f"{target}&channel=a%20b", b"{}"), 400, "INVALID_ARG_CHANNEL")
    assert_refused(nsqd.request(method, f"{target}&channel=other", b"{}"), 404, "CHANNEL_NOT_FOUND")


def test_nothing_is_set_at_first(nsqd: Nsqd, topic: str):
    targets = created(nsqd, topic)
    assert nsqd.get(targets["/topic/settings"]) == {"topic": topic, "settings": {}, "effective": NO_LIMITS}
    of_channel = {"topic": topic, "channel": "c", "settings": {}, "effective": NO_LIMITS}
    assert nsqd.get(targets["/channel/settings"]) == of_channel


def test_a_change_names_what_it_changes_and_null_is_inherited_again(nsqd: Nsqd, topic: str):
    targets = created(nsqd, topic)
    of_topic, of_channel = targets["/topic/settings"], targets["/channel/settings"]
    answer = nsqd.post(of_topic, b'{"max_attempts": 5, "ttl_ms": 60000, "overflow": "drop_oldest"}')
    assert answer.json == nsqd.get(of_topic)
    assert answer.json["effective"]["dead_letter_topic"] == f"{topic}.dead"
    nsqd.post(of_topic, b'{"ttl_ms": null, "max_bytes": 1000}')
    assert nsqd.get(of_topic)["settings"] == {"max_attempts": 5, "max_bytes": 1000, "overflow": "drop_oldest"}
    nsqd.post(of_channel, b'{"max_attempts": 0, "max_messages": 7, "trace": "traced"}')
    found = nsqd.get(of_channel)
    assert found["settings"] == {"max_attempts": 0, "max_messages": 7, "trace": "traced"}
    assert found["effective"] == {
        **NO_LIMITS,
        "max_messages": 7,
        "max_bytes": 1000,
        "overflow": "drop_oldest",
        "trace": "traced",
    }
    nsqd.post(of_channel, b'{"max_attempts": null, "dead_letter_topic": "graves-{topic}"}')
    found = nsqd.get(of_channel)["effective"]
    assert (found["max_attempts"], found["dead_letter_topic"]) == (5, f"graves-{topic}")


@pytest.mark.parametrize("path", PATHS)
def test_what_cannot_be_set_is_refused_with_name_value_and_range(nsqd: Nsqd, topic: str, path: str):
    target = created(nsqd, topic)[path]
    for text, bodies in BAD.items():
        for body in bodies:
            answer = nsqd.request("POST", target, body)
            assert answer.status == 400, body
            assert answer.json["message"].startswith(text), (body, answer.text)
    answer = nsqd.request("POST", target, b'{"max_attempts": 65536}')
    text = "max_attempts=65536, it must be 0 to 65535, 0 for no limit, or null to inherit it"
    assert_refused(answer, 400, f"INVALID_ARG_MAX_ATTEMPTS: {text}")
    assert nsqd.get(target)["settings"] == {}


def test_a_long_body_is_refused(nsqd: Nsqd, topic: str):
    target = created(nsqd, topic)["/topic/settings"]
    assert_refused(nsqd.request("POST", target, b" " * 20_000), 413, "BODY_TOO_BIG")


def test_settings_outlive_a_kill_and_go_with_the_channel(shared_daemons: Daemons, topic: str):
    nsqd = shared_daemons.nsqd("--durability=os")
    targets = created(nsqd, topic)
    nsqd.post(targets["/topic/settings"], b'{"max_messages": 10}')
    nsqd.post(targets["/channel/settings"], b'{"ttl_ms": 1000}')
    nsqd.kill()
    nsqd.start()
    assert nsqd.get(targets["/topic/settings"])["settings"] == {"max_messages": 10}
    assert nsqd.get(targets["/channel/settings"])["settings"] == {"ttl_ms": 1000}
    nsqd.post(f"/channel/delete?topic={topic}&channel=c")
    nsqd.post(f"/channel/create?topic={topic}&channel=c")
    assert nsqd.get(targets["/channel/settings"])["settings"] == {}
    nsqd.post(f"/topic/delete?topic={topic}")
    nsqd.restart()
    nsqd.post(f"/topic/create?topic={topic}")
    assert nsqd.get(targets["/topic/settings"])["settings"] == {}


def test_what_topics_inherit_is_said_by_flags(shared_daemons: Daemons):
    flags = ("--max-attempts=4", "--dead-letter-topic=graves.{topic}", "--message-ttl=1h", "--topic-max-messages=5")
    nsqd = shared_daemons.nsqd("--durability=os", *flags, "--topic-max-bytes=6000", "--overflow=drop_oldest")
    targets = created(nsqd, "t")
    for target in targets.values():
        found = nsqd.get(target)
        assert found["settings"] == {}
        assert found["effective"] == {
            "max_attempts": 4,
            "dead_letter_topic": "graves.t",
            "ttl_ms": 3_600_000,
            "max_messages": 5,
            "max_bytes": 6000,
            "overflow": "drop_oldest",
            "trace": "",
        }
    long = "x" * 60  # graves.xxx is no name: nothing can be given up there
    nsqd.post(f"/topic/create?topic={long}")
    assert nsqd.get(f"/topic/settings?topic={long}")["effective"]["max_attempts"] == 0
    answer = nsqd.request("POST", f"/topic/settings?topic={long}", json.dumps({"max_attempts": 2}).encode())
    assert answer.status == 400 and answer.json["message"].startswith("INVALID_ARG_DEAD_LETTER_TOPIC: ")


@pytest.mark.parametrize(
    "flag",
    ["--max-attempts=-1", "--max-attempts=70000", "--dead-letter-topic=a b", "--message-ttl=-1s", "--overflow=drop"],
)
def test_flags_that_cannot_be_used_are_refused_at_the_start(shared_daemons: Daemons, flag: str):
    nsqd = shared_daemons.new_nsqd(flag)
    nsqd.launch()
    assert nsqd.wait() != 0
    assert flag.split("=")[0].lstrip("-").replace("-", "_") in nsqd.log.replace("-", "_")
