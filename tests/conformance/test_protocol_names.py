"""Names of topics and channels, and how a bad one is quoted in the error (NSQ's TCP protocol)."""

from __future__ import annotations

import pytest
from tests.conformance.protocol_helpers import channels, fatal, topics
from tests.integration.daemons import Nsqd, mpub, pub, sized

GOOD = {
    "one-letter": "x",
    "every-legal-character": "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ._-",
    "digits": "0123456789",
    "dot": ".",
    "two-dots": "..",
    "dash-first": "-x",
    "upper-case-is-another-name": "X",
    "64-bytes": "n" * 64,
    "ephemeral": "x#ephemeral",
    "64-bytes-with-suffix": "n" * 54 + "#ephemeral",
}

BAD: dict[str, tuple[bytes, str]] = {
    "65-bytes": (b"n" * 65, '"' + "n" * 65 + '"'),
    "65-bytes-with-suffix": (b"n" * 55 + b"#ephemeral", '"' + "n" * 55 + '#ephemeral"'),
    "only-the-suffix": (b"#ephemeral", '"#ephemeral"'),
    "suffix-cut-short": (b"x#ephemera", '"x#ephemera"'),
    "suffix-with-more": (b"x#ephemeralx", '"x#ephemeralx"'),
    "suffix-in-upper-case": (b"x#EPHEMERAL", '"x#EPHEMERAL"'),
    "suffix-twice": (b"x#ephemeral#ephemeral", '"x#ephemeral#ephemeral"'),
    "hash": (b"a#b", '"a#b"'),
    "slash": (b"a/b", '"a/b"'),
    "colon": (b"a:b", '"a:b"'),
    "star": (b"*", '"*"'),
    "percent": (b"%s", '"%s"'),
    "tab": (b"a\tb", r'"a\tb"'),
    "bell": (b"a\x07", r'"a\a"'),
    "zero-byte": (b"a\x00b", r'"a\x00b"'),
    "escape": (b"\x1b[0m", r'"\x1b[0m"'),
    "delete": (b"a\x7f", r'"a\x7f"'),
    "double-quote": (b'a"b', r'"a\"b"'),
    "backslash": (b"a\\b", r'"a\\b"'),
    "single-quote": (b"it's", '"it\'s"'),
    "utf-8-is-shown": ("tür".encode(), '"tür"'),
    "not-utf-8-is-escaped": (b"a\xffb", r'"a\xffb"'),
    "no-break-space-is-escaped": ("a\u00a0b".encode(), r'"a\u00a0b"'),
    "control-beyond-ascii-is-escaped": ("a\u0085".encode(), r'"a\u0085"'),
}

COMMANDS = {
    "SUB-topic": (b"SUB %s c\n", "E_BAD_TOPIC SUB topic name %s is not valid"),
    "SUB-channel": (b"SUB names %s\n", "E_BAD_CHANNEL SUB channel name %s is not valid"),
    "PUB": (b"PUB %s\n", "E_BAD_TOPIC PUB topic name %s is not valid"),
    "MPUB": (b"MPUB %s\n", "E_BAD_TOPIC E_BAD_TOPIC MPUB topic name %s is not valid"),
    "DPUB": (b"DPUB %s 1\n", "E_BAD_TOPIC DPUB topic name %s is not valid"),
}


@pytest.mark.parametrize("name", GOOD.values(), ids=GOOD)
def test_good_topic(nsqd: Nsqd, name: str):
    with nsqd.connect() as connection:
        connection.ok(pub(name, b"x") + mpub(name, [b"x"]) + b"DPUB %s 0\n" % name.encode() + sized(b"x"), count=3)
    assert name in topics(nsqd)


@pytest.mark.parametrize("name", GOOD.values(), ids=GOOD)
def test_good_channel(nsqd: Nsqd, topic: str, name: str):
    with nsqd.connect() as connection:
        connection.subscribe(topic, name)
        assert channels(nsqd, topic) == [name]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", BAD)
def test_bad_name(nsqd: Nsqd, command: str, name: str):
    line, error = COMMANDS[command]
    raw, quoted = BAD[name]
    assert fatal(nsqd, line % raw) == error % quoted


def test_bad_topic_is_said_before_bad_channel(nsqd: Nsqd):
    assert fatal(nsqd, b"SUB a/b c/d\n") == 'E_BAD_TOPIC SUB topic name "a/b" is not valid'


def test_a_bad_channel_creates_no_topic(nsqd: Nsqd, topic: str):
    fatal(nsqd, b"SUB %s c/d\n" % topic.encode())
    assert topic not in topics(nsqd)


def test_topic_and_channel_may_have_the_same_name(nsqd: Nsqd, topic: str):
    with nsqd.connect() as connection:
        connection.subscribe(topic, topic)
        assert channels(nsqd, topic) == [topic]
