"""One call parses so many commands; what is left is parsed by more()."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flintmq.wire import server
from flintmq.wire.server import FinishRun, Publish, ServerConnection, ServerLimits

COMMANDS = {
    "pub": b"PUB t\n\0\0\0\1x",
    "other": b"PUB u\n\0\0\0\2xy",
    "mpub": b"MPUB t\n\0\0\0\x0e\0\0\0\2\0\0\0\1a\0\0\0\1b",
    "nop": b"NOP\n",
    "fin": b"FIN 0000000000000001\n",
    "odd fin": b"FIN 000000000000000X\n",
    "rdy": b"RDY 1\n",
}


def flat(events: list[Any]) -> list[Any]:
    """What was parsed, however it was cut into events."""
    found: list[Any] = []
    for event in events:
        if isinstance(event, Publish):
            found += [(event.command, event.topic, body) for body in event.bodies]
        elif isinstance(event, FinishRun):
            found += [("FIN", each) for each in event.ids]
        else:
            found.append(event)
    return found


def parse(pieces, commands_max):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "COMMANDS_MAX", commands_max)
        parser = ServerConnection(ServerLimits())
        parser.receive_data(b"  V2SUB t c\n")
        events, calls = [], []
        for piece in pieces:
            calls.append(parser.receive_data(piece))
            if len(calls) % 2:
                continue  # what comes while there is more to parse waits behind it
            while parser.has_more:
                calls.append(parser.more())
        while parser.has_more:
            calls.append(parser.more())
        for call in calls:
            assert len(call) <= commands_max
            events += call
        assert parser.held_bytes == 0
        return events


@given(
    st.lists(st.sampled_from(sorted(COMMANDS)), min_size=1, max_size=60),
    st.integers(1, 7),
    st.lists(st.integers(1, 200), max_size=10),
)
def test_what_is_parsed_does_not_depend_on_how_it_is_cut(names, commands_max, cuts):
    data = b"".join(COMMANDS[name] for name in names)
    pieces = []
    for cut in cuts:
        pieces.append(data[:cut])
        data = data[cut:]
    pieces.append(data)
    pieces = [piece for piece in pieces if piece]
    assert flat(parse(pieces, commands_max)) == flat(parse(pieces, 1_000_000))


def test_a_violation_comes_behind_what_was_before_it():
    parser = ServerConnection(ServerLimits())
    parser.receive_data(b"  V2")
    events = parser.receive_data(COMMANDS["pub"] * (server.COMMANDS_MAX + 1) + b"BOGUS\n" + COMMANDS["pub"])
    assert parser.has_more
    assert len(flat(events)) == server.COMMANDS_MAX
    last = parser.more()
    assert not parser.has_more
    assert [type(event).__name__ for event in last] == ["Publish", "Violation"]


def runs(events: list[Any]) -> list[int]:
    return [len(event.ids) for event in events]


def test_a_run_of_fins_is_as_long_as_its_owner_wants():
    parser = ServerConnection(ServerLimits())
    parser.receive_data(b"  V2SUB t c\n")
    assert runs(parser.receive_data(COMMANDS["fin"] * 5000)) == [2048, 2048, 904]
    parser.finish_run_max = 100
    assert runs(parser.receive_data(COMMANDS["fin"] * 250)) == [100, 100, 50]


def test_a_lone_publish_waits_behind_what_is_left():
    parser = ServerConnection(ServerLimits())
    parser.receive_data(b"  V2")
    parser.receive_data(COMMANDS["pub"] * (server.COMMANDS_MAX + 1))
    assert parser.repeated_pub(COMMANDS["pub"]) is None
    assert parser.receive_data(COMMANDS["pub"]) == []
    assert len(flat(parser.more())) == 2
