"""An MPUB ends behind its last message, whatever size it declares and whatever pieces it comes in."""

from itertools import pairwise
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flintmq.wire.refusals import Refused
from flintmq.wire.server import Nop, Publish, ServerConnection, ServerLimits, Violation
from flintmq.wire.size_walk import SizeWalk

LIMITS = ServerLimits(max_msg_size=100, max_body_size=2000)
COMMANDS = (b"MPUB t\n", b"MDPUB t 5\n", b"MPUB_TRACE t 0\n", b"MPUB_EXT t 0\n", b"MPUB_ONCE t - p 1\n")


def messages_of(bodies):
    return b"".join(pack(">i", len(body)) + body for body in bodies)


def mpub(line, declared, count, messages):
    return line + pack(">ii", declared, count) + messages


def feed(data, cuts=()):
    parser = ServerConnection(LIMITS)
    parser.receive_data(b"  V2")
    events = []
    edges = [0, *sorted(cut for cut in set(cuts) if 0 < cut < len(data)), len(data)]
    for start, end in pairwise(edges):
        events += parser.receive_data(data[start:end])
    for event in events:
        if hasattr(event, "bodies"):
            event.bodies = list(event.bodies)
    return events, parser


BODIES = st.one_of(
    st.lists(st.binary(min_size=1, max_size=100), min_size=1, max_size=15),
    st.builds(lambda body, count: [body] * count, st.binary(min_size=1, max_size=20), st.integers(1, 60)),
    st.builds(
        lambda body, count, other: [*[body] * count, other],
        st.binary(min_size=1, max_size=9), st.integers(8, 60), st.binary(min_size=1, max_size=9),
    ),
)  # fmt: skip


@given(BODIES, st.integers(1, LIMITS.max_body_size), st.lists(st.integers(1, 1000), max_size=40))
def test_every_message_comes_out_and_the_next_command_is_understood(bodies, declared, cuts):
    data = mpub(b"MPUB t\n", declared, len(bodies), messages_of(bodies)) + b"NOP\nPUB t\n\0\0\0\1x"
    events, parser = feed(data, cuts)
    assert events == [Publish("MPUB", "t", bodies, 1), Nop(), Publish("PUB", "t", [b"x"], 1)]
    assert parser.held_bytes == 0


@pytest.mark.parametrize("line", COMMANDS)
@pytest.mark.parametrize("declared", [1, 4, 55, 60, 64, 2000])
def test_every_command_with_several_messages(line, declared):
    bodies = [b"\0\0" + b"%010d" % number for number in range(3)]
    data = mpub(line, declared, 3, messages_of(bodies))
    for cuts in ((), range(len(data))):
        (event,), _ = feed(data, cuts)
        assert type(event) is Publish and event.command == line.split()[0].decode()
        assert getattr(event, "bodies", None) == bodies


@given(BODIES, st.integers(1, 2000), st.data())
def test_what_is_refused_is_the_same_in_pieces(bodies, declared, drawn):
    messages = bytearray(messages_of(bodies))
    at = drawn.draw(st.integers(0, len(messages) - 1))
    messages[at] ^= drawn.draw(st.integers(1, 255))
    data = mpub(b"MPUB t\n", declared, len(bodies), bytes(messages))
    whole, _ = feed(data)
    piecemeal, _ = feed(data, range(len(data)))
    assert piecemeal == whole
    cut, _ = feed(data, drawn.draw(st.lists(st.integers(1, len(data)), max_size=9)))
    assert cut == whole


def test_a_size_over_the_limit_is_refused_before_anything_else_comes():
    assert feed(b"MPUB t\n" + pack(">i", 2001))[0] == [Violation("E_BAD_BODY", "MPUB body too big 2001 > 2000")]


@pytest.mark.parametrize("cuts", [(), range(3000)], ids=["whole", "in pieces"])
@pytest.mark.parametrize("sizes", [[96] * 20, [*[95] * 18, 90, 90, 90]], ids=["of one size", "of several"])
def test_what_is_read_is_bounded_whatever_was_declared(sizes, cuts):
    data = mpub(b"MPUB t\n", 24, len(sizes), messages_of([bytes(size) for size in sizes]))
    total = next(t for i in range(99) if (t := 4 + sum(sizes[: i + 1]) + 4 * (i + 1)) > 2000)
    events, parser = feed(data, cuts)
    assert events == [Violation("E_BAD_BODY", f"MPUB body too big {total} > 2000")]
    assert parser.held_bytes == 0


def test_it_is_refused_before_the_message_that_is_too_much_has_come():
    messages = messages_of([bytes(96)] * 19) + pack(">i", 96)  # 4 + 19 * 100 + 100 > 2000
    events, _ = feed(mpub(b"MPUB t\n", 24, 20, messages), range(3000))
    assert events == [Violation("E_BAD_BODY", "MPUB body too big 2004 > 2000")]


def test_a_body_of_exactly_the_limit():
    bodies = [*[bytes(96)] * 19, bytes(92)]
    for cuts in ((), range(3000)):
        assert feed(mpub(b"MPUB t\n", 1, 20, messages_of(bodies)), cuts)[0] == [Publish("MPUB", "t", bodies, 1)]


def test_what_has_been_passed_is_not_passed_again():
    """Bytes in pieces are each looked at once, so that many small reads of a large body stay cheap."""
    passed = []

    class Noting(SizeWalk):
        def advance(self, data, at=0):
            passed.append(len(data) - at)
            return super().advance(data, at)

    walk = Noting(3, 100, 0, 2000)
    messages = messages_of([b"x" * 50] * 3)
    for at in range(len(messages)):
        assert walk.advance(messages[at : at + 1]) == (at == len(messages) - 1)
    assert passed == [1] * len(messages)


@pytest.mark.parametrize("size", [0, -1, 101])
def test_a_walk_refuses_a_bad_size(size):
    with pytest.raises(Refused) as refused:
        SizeWalk(2, 100, 0, 2000).advance(messages_of([b"x"]) + pack(">i", size))
    assert refused.value.args[0] == "E_BAD_MESSAGE"


def test_a_pub_of_the_same_topic_between_is_part_of_the_mpub():
    """What looks like a command inside an MPUB is not taken for one, also when it comes as a read of its own."""
    parser = ServerConnection(LIMITS)
    pub = b"PUB t\n\0\0\0\1x"
    parser.receive_data(b"  V2" + pub)
    assert parser.receive_data(mpub(b"MPUB t\n", 500, 1, pack(">i", len(pub)))) == []
    assert parser.repeated_pub(pub) is None
    assert parser.receive_data(pub) == [Publish("MPUB", "t", [pub], 1)]
    assert parser.repeated_pub(pub) == b"x"
