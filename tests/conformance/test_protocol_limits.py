"""Limits that flags move: each at its value and one beyond (NSQ's TCP protocol)."""

from __future__ import annotations

import time

import pytest
from tests.conformance.conftest import quick_flags
from tests.conformance.protocol_helpers import clients, consumer, counts, delivered, fatal, identify
from tests.integration.daemons import Daemons, Nsqd, dpub, mpub, mpub_body, pub, req, sized, wait_until

MAX_MSG, MAX_BODY = 100, 1000
MAX_REQ_MS = 400


@pytest.fixture(scope="module")
def small(shared_daemons: Daemons) -> Nsqd:
    """An nsqd with small limits."""
    return shared_daemons.nsqd(
        *quick_flags(),
        f"--max-msg-size={MAX_MSG}",
        f"--max-body-size={MAX_BODY}",
        "--max-rdy-count=5",
        f"--max-req-timeout={MAX_REQ_MS}ms",
        "--max-channel-consumers=2",
    )


def test_max_msg_size_PUB(small: Nsqd, topic: str):
    with small.connect() as connection:
        connection.ok(pub(topic, bytes(MAX_MSG)))
    assert fatal(small, pub(topic, bytes(MAX_MSG + 1))) == "E_BAD_MESSAGE PUB message too big 101 > 100"


def test_max_msg_size_DPUB(small: Nsqd, topic: str):
    with small.connect() as connection:
        connection.ok(dpub(topic, 1, bytes(MAX_MSG)))
    assert fatal(small, dpub(topic, 1, bytes(MAX_MSG + 1))) == "E_BAD_MESSAGE DPUB message too big 101 > 100"


def test_max_msg_size_MPUB(small: Nsqd, topic: str):
    with small.connect() as connection:
        connection.ok(mpub(topic, [bytes(MAX_MSG)] * 3))
    error = fatal(small, mpub(topic, [bytes(MAX_MSG), bytes(MAX_MSG + 1)]))
    assert error == "E_BAD_MESSAGE MPUB message too big 101 > 100"


def test_max_body_size_MPUB(small: Nsqd, topic: str):
    bodies = [bytes(MAX_MSG)] * 9 + [bytes(56)]
    assert len(mpub_body(bodies)) == MAX_BODY
    with small.connect() as connection:
        connection.ok(mpub(topic, bodies))
    assert fatal(small, mpub(topic, [*bodies[:-1], bytes(57)])) == "E_BAD_BODY MPUB body too big 1001 > 1000"


def test_max_message_count_MPUB(small: Nsqd, topic: str):
    """(max_body - 4) / 5: as many as could be there with one byte each."""
    with small.connect() as connection:
        connection.ok(mpub(topic, [b"x"] * 199))
    error = fatal(small, b"MPUB %s\n" % topic.encode() + sized((200).to_bytes(4, "big")))
    assert error == "E_BAD_BODY MPUB invalid message count 200"


def test_max_body_size_IDENTIFY(small: Nsqd):
    body = b"{" + b" " * (MAX_BODY - 2) + b"}"
    with small.connect() as connection:
        connection.ok(b"IDENTIFY\n" + sized(body))
    assert fatal(small, b"IDENTIFY\n" + sized(body + b" ")) == "E_BAD_BODY IDENTIFY body too big 1001 > 1000"


def test_max_body_size_AUTH(small: Nsqd):
    assert fatal(small, b"AUTH\n" + sized(bytes(MAX_BODY))) == "E_AUTH_DISABLED AUTH disabled"
    assert fatal(small, b"AUTH\n" + sized(bytes(MAX_BODY + 1))) == "E_BAD_BODY AUTH body too big 1001 > 1000"


def test_max_rdy_count(small: Nsqd, topic: str):
    small.publish(topic, *[b"x"] * 6)
    with consumer(small, topic, rdy_count=5) as connection:
        connection.messages(5)
        connection.nothing_comes()
    subscribed = b"SUB %s c\n" % topic.encode()
    with small.connect() as connection:
        connection.ok(subscribed)
        assert connection.error(b"RDY 6\n") == "E_INVALID RDY count 6 out of range 0-5"
        assert connection.wait_closed() == []


def test_max_rdy_count_is_told_by_IDENTIFY(small: Nsqd):
    with small.connect() as connection:
        assert connection.identify()["max_rdy_count"] == 5


def test_max_req_timeout_DPUB(small: Nsqd, topic: str):
    with small.connect() as connection:
        connection.ok(dpub(topic, MAX_REQ_MS, b"x"))
    assert fatal(small, dpub(topic, MAX_REQ_MS + 1, b"x")) == "E_INVALID DPUB timeout 401 out of range 0-400"


@pytest.mark.parametrize("asked_ms", [401, 3_600_000, 2**31])
def test_max_req_timeout_REQ_is_clamped(small: Nsqd, topic: str, asked_ms: int):
    with delivered(small, topic) as (connection, message):
        begun = time.monotonic()
        connection.send(req(message.id, asked_ms))
        again = connection.message()
        assert (again.id, again.attempts) == (message.id, 2)
        assert time.monotonic() - begun >= MAX_REQ_MS / 1000


# -- consumers of a channel --------------------------------------------------------------------------------------------


def test_max_channel_consumers(small: Nsqd, topic: str):
    with consumer(small, topic), consumer(small, topic):
        error = fatal(small, b"SUB %s c\n" % topic.encode())
        assert error == f"E_SUB_FAILED SUB failed consumers for {topic}:c exceeds limit of 2"
        assert len(clients(small, topic)) == 2


def test_max_channel_consumers_is_per_channel(small: Nsqd, topic: str):
    with consumer(small, topic), consumer(small, topic), consumer(small, topic, "d"):
        assert len(clients(small, topic, "d")) == 1


def test_max_channel_consumers_a_place_becomes_free(small: Nsqd, topic: str):
    with consumer(small, topic):
        with consumer(small, topic):
            pass
        wait_until(lambda: len(clients(small, topic)) == 1, "the second to be gone")
        with consumer(small, topic):
            assert len(clients(small, topic)) == 2


def test_many_consumers_without_a_limit(nsqd: Nsqd, topic: str):
    connections = [nsqd.connect().subscribe(topic, "c") for _ in range(30)]
    try:
        assert nsqd.stats(topic, "c")["client_count"] == 30
    finally:
        for connection in connections:
            connection.close()


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_a_default_timeout_beyond_the_longest_one_is_not_refused(shared_daemons: Daemons, topic: str):
    """--max-msg-timeout bounds what a client asks for, not --msg-timeout."""
    nsqd = shared_daemons.nsqd(*quick_flags(), "--msg-timeout=10s", "--max-msg-timeout=2s")
    with nsqd.connect() as connection:
        answer = connection.identify()
        assert (answer["msg_timeout"], answer["max_msg_timeout"]) == (10_000, 2000)
    assert fatal(nsqd, identify(msg_timeout=2001)) == "E_BAD_BODY IDENTIFY msg timeout (2001) is invalid"
    with delivered(nsqd, topic) as (_, _message):
        assert counts(nsqd, topic) == (0, 1, 0)
    nsqd.stop()
