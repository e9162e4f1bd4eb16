"""MDPUB: several messages with one delay, built and parsed."""

import pytest

from flintmq.errors import LocalProtocolError
from flintmq.wire import commands
from flintmq.wire.server import NOT_A_NUMBER, Publish, ServerConnection, ServerLimits, Violation


def parse(data, pieces=1):
    parser = ServerConnection(ServerLimits(max_req_timeout_ms=2_592_000_000))
    size = -(-len(data) // pieces)
    assert parser.receive_data(commands.MAGIC_V2) == []
    return [event for at in range(0, len(data), size) for event in parser.receive_data(data[at : at + size])]


@pytest.mark.parametrize("pieces", [1, 2, 7, 1000])
@pytest.mark.parametrize("partition", [None, 3])
def test_it_is_parsed_as_it_is_built(pieces, partition):
    data = commands.mdpub("t", 2_592_000_000, [b"a", b"bb", b"ccc"], partition)
    (event,) = parse(data, pieces)
    assert isinstance(event, Publish)
    assert (event.command, event.topic, event.defer_ms, event.partition) == ("MDPUB", "t", 2_592_000_000, partition)
    assert list(event.bodies) == [b"a", b"bb", b"ccc"]
    assert event.replies == 1


def test_it_is_one_publish_beside_others():
    data = commands.pub("t", b"x") + commands.mdpub("t", 5, [b"a", b"b"]) + commands.mpub("t", [b"y", b"z"])
    events = parse(data)
    assert [(event.command, event.defer_ms) for event in events] == [("PUB", 0), ("MDPUB", 5), ("MPUB", 0)]


def test_a_word_that_is_no_partition():
    (event,) = parse(b"MDPUB t 5 x\n" + commands.mpub("t", [b"a"]).partition(b"\n")[2])
    assert event.partition == NOT_A_NUMBER


def test_a_delay_that_is_too_long():
    (event,) = parse(commands.mdpub("t", 2_592_000_001, [b"a"]))
    assert event == Violation("E_INVALID", "MDPUB timeout 2592000001 out of range 0-2592000000")


def test_permission_is_asked_before_the_body_is_gathered():
    parser = ServerConnection(ServerLimits())
    parser.refusal_of = lambda command, topic: ("E_UNAUTHORIZED", f"{command} {topic}")
    assert parser.receive_data(b"  V2MDPUB t 5\n") == [Violation("E_UNAUTHORIZED", "MDPUB t")]


@pytest.mark.parametrize(
    ("delay_ms", "bodies", "code"),
    [(-1, [b"a"], "E_INVALID"), (1, [], "E_BAD_MESSAGE"), (1, [b"a", b""], "E_BAD_MESSAGE")],
)
def test_what_cannot_be_built(delay_ms, bodies, code):
    with pytest.raises(LocalProtocolError, match="MDPUB") as caught:
        commands.mdpub("t", delay_ms, bodies)
    assert caught.value.code == code
