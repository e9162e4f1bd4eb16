"""Which command is legal in which state, every cell of the table (NSQ's TCP protocol), and TLS required."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.certificates import Certificates
from tests.conformance.conftest import quick_flags
from tests.conformance.protocol_helpers import (
    COMMANDS,
    SOME_ID,
    fatal,
    fatal_on,
    goes_on,
    identify,
    only_client,
    producer,
    tls_flags,
)
from tests.integration.daemons import Connection, Daemons, Message, Nsqd, fin, pub, req, touch
from tests.integration.upgraded import Upgraded

OK, CLOSE_WAIT, NOTHING = "OK", "CLOSE_WAIT", ""
AUTH_DISABLED = "E_AUTH_DISABLED AUTH disabled"
NO_HEARTBEATS = "E_INVALID cannot SUB with heartbeats disabled"


def not_now(command: str) -> str:
    return f"E_INVALID cannot {command} in current state"


TABLE = {
    "init": {
        **dict.fromkeys(("IDENTIFY", "SUB", "PUB", "MPUB", "DPUB"), OK),
        **{command: not_now(command) for command in ("RDY", "FIN", "REQ", "TOUCH", "CLS")},
        "AUTH": AUTH_DISABLED,
        "NOP": NOTHING,
    },
    "init-without-heartbeats": {
        **dict.fromkeys(("IDENTIFY", "PUB", "MPUB", "DPUB"), OK),
        **{command: not_now(command) for command in ("RDY", "FIN", "REQ", "TOUCH", "CLS")},
        "SUB": NO_HEARTBEATS,
        "AUTH": AUTH_DISABLED,
        "NOP": NOTHING,
    },
    "subscribed": {
        **dict.fromkeys(("PUB", "MPUB", "DPUB"), OK),
        **dict.fromkeys(("RDY", "FIN", "REQ", "TOUCH", "NOP"), NOTHING),
        **{command: not_now(command) for command in ("IDENTIFY", "AUTH", "SUB")},
        "CLS": CLOSE_WAIT,
    },
    "closing": {
        **dict.fromkeys(("PUB", "MPUB", "DPUB"), OK),
        **dict.fromkeys(("RDY", "FIN", "REQ", "TOUCH", "NOP"), NOTHING),
        **{command: not_now(command) for command in ("IDENTIFY", "AUTH", "SUB", "CLS")},
    },
}
CELLS = [(state, command, outcome) for state, row in TABLE.items() for command, outcome in row.items()]
assert len(CELLS) == len(TABLE) * len(COMMANDS)


@contextmanager
def in_state(nsqd: Nsqd, state: str, topic: str) -> Iterator[tuple[Connection, Message | None]]:
    """A connection in a state; behind SUB it has a message in flight and RDY 1."""
    message = None
    with nsqd.connect() as connection:
        if state == "init-without-heartbeats":
            connection.ok(identify(heartbeat_interval=-1))
        elif state != "init":
            nsqd.publish(topic, b"x")
            message = connection.subscribe(topic, "c", 1).message()
        if state == "closing":
            connection.send(b"CLS\n")
            assert connection.response() == b"CLOSE_WAIT"
        yield connection, message


def with_id(command: str, message: Message | None) -> bytes:
    return COMMANDS[command].replace(SOME_ID, message.id if message else SOME_ID)


@pytest.mark.parametrize(("state", "command", "outcome"), CELLS, ids=[f"{s}-{c}" for s, c, _ in CELLS])
def test_command_in_state(nsqd: Nsqd, topic: str, state: str, command: str, outcome: str):
    with in_state(nsqd, state, topic) as (connection, message):
        line = with_id(command, message)
        if command == "SUB":
            line = b"SUB %s d\n" % topic.encode()
        if outcome.startswith("E_"):
            assert fatal_on(connection, line) == outcome
            return
        connection.send(line)
        if outcome:
            assert connection.response() == outcome.encode()
        if command == "REQ" and state == "subscribed":
            assert connection.message().attempts == 2  # RDY is 1 and nothing else is in flight
        goes_on(connection)


@pytest.mark.parametrize("state", ["init", "subscribed", "closing"])
def test_an_unknown_command_is_refused_in_every_state(nsqd: Nsqd, topic: str, state: str):
    with in_state(nsqd, state, topic) as (connection, _):
        assert fatal_on(connection, b"FOO\n") == "E_INVALID invalid command FOO"


def test_the_state_is_looked_at_before_the_parameters(nsqd: Nsqd):
    for command in ("FIN", "REQ", "TOUCH"):
        assert fatal(nsqd, command.encode() + b"\n") == not_now(command)
    assert fatal(nsqd, b"RDY x\n") == not_now("RDY")


@pytest.mark.parametrize("line", [b"SUB\n", b"SUB a/b c\n"], ids=["no-parameters", "bad-topic"])
def test_heartbeats_disabled_is_said_before_the_parameters_of_SUB(nsqd: Nsqd, line: bytes):
    with nsqd.connect() as connection:
        connection.ok(identify(heartbeat_interval=-1))
        assert fatal_on(connection, line) == NO_HEARTBEATS


def test_heartbeats_enabled_again_allow_SUB(nsqd: Nsqd, topic: str):
    with nsqd.connect() as connection:
        connection.ok(identify(heartbeat_interval=-1) + identify(heartbeat_interval=1000), count=2)
        connection.subscribe(topic, "c")


def test_RDY_in_closing_is_ignored_whatever_it_says(nsqd: Nsqd, topic: str):
    with in_state(nsqd, "closing", topic) as (connection, _):
        goes_on(connection, b"RDY x\nRDY 100000\nRDY -1\nRDY\n")
        assert only_client(nsqd, topic)["ready_count"] == 0


def test_state_numbers_in_stats(nsqd: Nsqd, topic: str):
    with nsqd.connect() as connection:
        connection.ok(pub(topic, b"x"))
        assert producer(nsqd, topic)["state"] == 0
        connection.subscribe(topic, "c")
        assert only_client(nsqd, topic)["state"] == 3
        connection.send(b"CLS\n")
        assert connection.response() == b"CLOSE_WAIT"
        assert only_client(nsqd, topic)["state"] == 4


# -- fatal or not ------------------------------------------------------------------------------------------------------

NOT_FATAL = {
    "FIN": (fin(SOME_ID), "E_FIN_FAILED FIN 0123456789abcdef failed ID not in flight"),
    "REQ": (req(SOME_ID, 0), "E_REQ_FAILED REQ 0123456789abcdef failed ID not in flight"),
    "TOUCH": (touch(SOME_ID), "E_TOUCH_FAILED TOUCH 0123456789abcdef failed ID not in flight"),
}


@pytest.mark.parametrize("command", NOT_FATAL)
def test_an_id_that_is_not_in_flight_is_not_fatal(nsqd: Nsqd, topic: str, command: str):
    line, error = NOT_FATAL[command]
    with in_state(nsqd, "subscribed", topic) as (connection, message):
        for _ in range(3):
            assert connection.error(line) == error
        assert message is not None
        connection.finish(message)
        goes_on(connection)


# -- TLS required ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls_nsqd(shared_daemons: Daemons, certificates: Certificates) -> Nsqd:
    """An nsqd that requires TLS."""
    return shared_daemons.nsqd(*quick_flags(), *tls_flags(certificates, "--tls-required=true"))


@pytest.mark.parametrize("command", [*(each for each in COMMANDS if each != "IDENTIFY"), "FOO", ""])
def test_tls_required_refuses(tls_nsqd: Nsqd, command: str):
    line = COMMANDS.get(command, command.encode() + b"\n")
    assert fatal(tls_nsqd, line) == f"E_INVALID cannot {command} in current state (TLS required)"


def test_tls_required_allows_IDENTIFY(tls_nsqd: Nsqd):
    with tls_nsqd.connect() as connection:
        assert connection.identify()["tls_v1"] is False  # because it was not asked for
        assert fatal_on(connection, b"NOP\n") == "E_INVALID cannot NOP in current state (TLS required)"


@pytest.mark.parametrize("codec", ["deflate", "snappy"])
def test_tls_required_is_not_satisfied_by_compression(tls_nsqd: Nsqd, codec: str):
    with Upgraded(tls_nsqd.tcp) as connection:
        connection.upgrade(codec=codec)
        assert fatal_on(connection, b"NOP\n") == "E_INVALID cannot NOP in current state (TLS required)"


def test_tls_required_is_satisfied_by_tls(tls_nsqd: Nsqd, certificates: Certificates, topic: str):
    with Upgraded(tls_nsqd.tcp) as connection:
        connection.upgrade(certificates.client_context())
        connection.ok(pub(topic, b"x"))
        message = connection.subscribe(topic, "c", 1).message()
        goes_on(connection, touch(message.id) + fin(message.id))
