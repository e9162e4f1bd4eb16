"""Frames between nodes, and their handshake."""

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flintmq.wire import peer
from flintmq.wire.peer import (
    Acceptor,
    Acks,
    Append,
    AskChannels,
    AskUnread,
    ChannelRow,
    Channels,
    Close,
    CutTo,
    Dialer,
    Farewell,
    FloorAcks,
    Floors,
    Hello,
    Identity,
    NeedState,
    Open,
    Opened,
    PeerError,
    PeerReader,
    Ping,
    Pong,
    Progress,
    ProgressAcks,
    Proof,
    Ready,
    Refusal,
    Refused,
    StartOver,
    StateBegin,
    StateEnd,
    StatePart,
    StateTaken,
    Unread,
    Watermarks,
    Welcome,
    encode,
    encode_one,
)

NONCES = b"d" * 32, b"a" * 32
SECRET = b"0123456789abcdef"


def identity(node, cluster="c1", version=1):
    return Identity(cluster, node, "incarnation", "boot", False, version)


EXAMPLES = [
    (Hello(peer.MAGIC, identity("a"), NONCES[0]), b""),
    (Welcome(identity("b"), NONCES[1], b""), b""),
    (Proof(b"p" * 32), b""),
    (Farewell("because"), b""),
    (Open(3, "orders", 7, 11, 12, 5), b""),
    (Close(3), b""),
    (CutTo(3, 99), b""),
    (StartOver(3, 99, 1 << 40), b""),
    (Append(3, 99, 98), b"batches"),
    (Append(3, 99, 98), b""),
    (Append(3, 99, 98, 7), b"batches"),
    (Watermarks([(3, 5), (4, 9)]), b""),
    (Progress(3, (5, 2), (5, 1), 90), b"records"),
    (StateBegin(3, (5, 2), 90), b""),
    (StatePart(3), b"records"),
    (StateEnd(3), b""),
    (Floors(3, 5, [("mail", 70), ("books", 0)]), b""),
    (Ping(123456789), b""),
    (Opened(3, [(1, 0), (4, 50)], 0, 80, (4, 17)), b""),
    (Refused(3, 8, Refusal.HIGHER_EPOCH, "later"), b""),
    (Ready(3, 70), b""),
    (Acks([(3, 70), (9, 1)]), b""),
    (ProgressAcks([(3, 2)]), b""),
    (FloorAcks([(3, 5)]), b""),
    (NeedState(3), b""),
    (StateTaken(3, 2), b""),
    (Pong(123456789), b""),
    (AskUnread([("orders", "mail"), ("clicks", "books")]), b""),
    (Unread([0, 511]), b""),
    (AskChannels("orders", [4, 5], "mail"), b""),
    (Channels([0, 3], True, True, b"{}", [ChannelRow("mail", True, False, True, b'{"max_attempts":2}')], True), b""),
]


def reader_of(is_trusted=True) -> Any:
    return PeerReader(is_trusted)


def frames_of(reader):
    found = []
    while (each := reader.next_frame()) is not None:
        found.append((each[0], bytes(each[1])))
    return found


def test_there_is_an_example_of_every_frame():
    assert {type(frame) for frame, _ in EXAMPLES} == set(peer.Frame.__args__)


def put_into(reader: Any, data: bytes) -> None:
    """Have bytes put where the reader says, as a kernel does it."""
    while data:
        with reader.space() as space:
            count = min(len(space), len(data))
            space[:count] = data[:count]
        reader.filled(count)
        data = data[count:]


@pytest.mark.parametrize("block_bytes", [16, 100, 1000])
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(EXAMPLES)), st.data())
def test_frames_arrive_in_whatever_pieces(monkeypatch, block_bytes, frames, data):
    monkeypatch.setattr(peer, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(peer, "_BLOCK_BYTES_MIN", block_bytes // 4)
    monkeypatch.setattr(peer, "_SPACE_MIN", block_bytes // 16)
    stream = b"".join(bytes(piece) for frame in frames for piece in encode(*frame))
    spare: list[bytearray] = []
    reader, found, at, taken = PeerReader(True, data.draw(st.sampled_from([None, spare]))), list[Any](), 0, 0
    while at < len(stream):
        size = data.draw(st.integers(1, 200))
        if data.draw(st.booleans()):
            reader.receive(stream[at : at + size])
        else:
            put_into(reader, stream[at : at + size])
        at = min(at + size, len(stream))
        if data.draw(st.booleans()) or at == len(stream):
            found += frames_of(reader)
            taken = sum(len(piece) for frame in found for piece in encode(*frame))
        assert reader.pending_bytes == at - taken
    assert found == frames and reader.pending_bytes == 0
    assert len(spare) <= peer.SPARE_MAX and all(len(block) <= block_bytes for block in spare)


def test_memory_follows_what_has_come_and_not_what_is_announced():
    spare: list[bytearray] = []
    reader: Any = PeerReader(True, spare)
    frame = b"".join(encode(Append(1, 0, 0), bytes(range(256)) * 16384))
    blocks = []
    for at in range(0, len(frame), 50_000):
        assert reader.next_frame() is None
        put_into(reader, frame[at : at + 50_000])
        blocks.append(reader._block)
        assert len(reader._block) <= 2 * (at + 50_000 + peer._BLOCK_BYTES_MIN)
    assert len({id(block) for block in blocks}) < 10, "it is moved when it has doubled"
    assert reader.next_frame()[1] == bytes(range(256)) * 16384
    assert reader.next_frame() is None and len(reader._block) == 0
    assert all(len(block) <= peer.BLOCK_BYTES for block in spare)


def test_frames_as_leaders_send_them_are_read_where_they_came():
    spare: list[bytearray] = []
    reader: Any = PeerReader(True, spare)
    frame = b"".join(encode(Append(1, 0, 0), b"x" * (1024 * 1024)))
    used = []
    for _ in range(20):
        for at in range(0, len(frame), 300_000):
            put_into(reader, frame[at : at + 300_000])
            found = reader.next_frame()
        assert found is not None and found[1] == b"x" * (1024 * 1024)
        used.append(found[1].obj)
        assert reader.next_frame() is None
    assert len({id(block) for block in used[5:]}) == 1, "one block for all, once it is large enough"


def test_who_waits_for_nothing_holds_no_memory():
    spare: list[bytearray] = []
    readers: list[Any] = [PeerReader(True, spare) for _ in range(4)]
    stream = b"".join(encode(Append(1, 0, 0), b"x" * 1000))
    for reader in readers:
        put_into(reader, stream[:-1])
        assert reader.next_frame() is None
    assert sum(len(reader._block) for reader in readers) == 4 * peer._BLOCK_BYTES_MIN
    for reader in readers:
        put_into(reader, stream[-1:])
        assert reader.next_frame()[1] == b"x" * 1000
        assert reader.next_frame() is None
    assert [len(reader._block) for reader in readers] == [0] * 4
    assert len(spare) == peer.SPARE_MAX
    with readers[0].space():
        assert len(spare) == peer.SPARE_MAX - 1


def test_a_frame_in_very_small_pieces_is_not_moved_for_each():
    stream = b"".join(encode(Append(1, 0, 0), b"x" * 10_000))
    reader = reader_of()
    blocks = []
    for at in range(len(stream)):
        reader.receive(stream[at : at + 1])
        if at < len(stream) - 1:
            assert reader.next_frame() is None
        if at > 8:
            blocks.append(reader._block)
    assert len({id(block) for block in blocks}) < 12 and len(blocks[-1]) == len(stream)
    assert reader.next_frame()[1] == b"x" * 10_000


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff\xff\xff\xff\x00\x00\x00\x01", "a body of"),
        (b"\x00\x00\x00\x05\x00\x00\x00\x09", "a body of -8"),
        (b"\x00\x20\x00\x08\x00\x20\x00\x00", "a header of 2097152"),
        (b"\x00\x00\x00\x05\x00\x00\x00\x01\xc1", "cannot be read"),
        (b"\x00\x00\x00\x04\x00\x00\x00\x00", "cannot be read"),
        (b"GET / HTTP/1.1\r\n\r\n", "a header of"),
    ],
)
def test_what_is_no_frame_is_refused_for_good(data, words):
    reader = reader_of()
    reader.receive(data)
    for _ in range(2):
        with pytest.raises(PeerError, match=words):
            reader.next_frame()


def raw(header, body=b""):
    packed = msgspec.msgpack.encode(header)
    return peer._SIZES.pack(4 + len(packed) + len(body), len(packed)) + packed + body


@pytest.mark.parametrize(
    "header",
    [
        [99, 1],  # nothing has this number
        [16, 1, "t", 0, 1, 1],  # a field is missing
        [16, 1, "t", 0, 1, 1, 0],  # epoch 0 has no leader
        [16, -1, "t", 0, 1, 1, 1],
        [16, 1, "t", 1024, 1, 1, 1],
        [16, 1, "t" * 129, 0, 1, 1, 1],
        [18, 1, 1 << 51],
        [20, 1, -5, 0],
        [21, [[1, 2]] * (peer.TALLY_MAX + 1)],
        [35, [[1, 2, 3]]],
        [35, [[1]]],
        [32, 1, [[1, 0]] * (peer.HISTORY_MAX + 1), 0, 0, [0, 0]],
        [33, 1, 2, 77, "no such reason"],
        [1, b"FMQP", ["c", "n", "i", "b", False, 1], b"short"],
        "text",
        {"a": 1},
        [[[[[]]]]],
    ],
)
def test_fields_are_checked(header):
    reader = reader_of()
    reader.receive(raw(header))
    with pytest.raises(PeerError, match="cannot be read"):
        reader.next_frame()


def test_nesting_without_end_is_refused():
    reader = reader_of()
    header = b"\x91" * 100_000
    reader.receive(peer._SIZES.pack(4 + len(header), len(header)) + header)
    with pytest.raises(PeerError, match="cannot be read"):
        reader.next_frame()


def test_only_some_frames_have_bodies():
    reader = reader_of()
    reader.receive(raw([17, 1], b"body"))
    with pytest.raises(PeerError, match="Close with a body"):
        reader.next_frame()


def test_a_later_version_may_say_more():
    reader = reader_of()
    reader.receive(raw([17, 1, "more", {"and": "more"}]))
    assert reader.next_frame() == (Close(1), b"")


def test_a_stranger_sends_small_frames_only():
    reader = reader_of(is_trusted=False)
    reader.receive(encode_one(Hello(peer.MAGIC, identity("a"), NONCES[0])))
    assert isinstance(reader.next_frame()[0], Hello)
    reader.receive(b"".join(encode(Append(1, 0, 0), b"x"))[:8])
    with pytest.raises(PeerError, match="body of 1"):
        reader.next_frame()
    reader = reader_of(is_trusted=False)
    reader.trust()
    reader.receive(b"".join(encode(Append(1, 0, 0), b"x")))
    assert isinstance(reader.next_frame()[0], Append)


def test_what_could_not_be_read_is_not_sent():
    with pytest.raises(ValueError, match="Append with a header"):
        encode(Append(1, 0, 0), memoryview(bytes(peer.BODY_BYTES_MAX + 1)))
    assert list(map(len, peer.tallies([(1, 1)] * (peer.TALLY_MAX + 1)))) == [peer.TALLY_MAX, 1]
    assert peer.tallies([]) == []
    encode_one(Farewell(peer.shorten("x" * 10_000)))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_frames_or_an_error(data, is_trusted):
    reader = PeerReader(is_trusted)
    reader.receive(data)
    try:
        frames_of(reader)
    except PeerError as error:
        assert str(error).startswith("the peer sent ")


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(EXAMPLES), st.data())
def test_changed_bytes_are_frames_or_an_error(frame, data):
    stream = bytearray(b"".join(encode(*frame)))
    for _ in range(data.draw(st.integers(1, 3))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    reader = reader_of()
    reader.receive(bytes(stream))
    try:
        frames_of(reader)
    except PeerError as error:
        assert str(error).startswith("the peer sent ")


# -- the handshake -----------------------------------------------------------------------------------------------------


def one_frame(data):
    reader = reader_of(is_trusted=False)
    reader.receive(data)
    return reader.next_frame()[0]


def shake(dialer_secret=SECRET, acceptor_secret=SECRET, a=None, b=None, expected="b"):
    a, b = a or identity("a"), b or identity("b")
    dialer, acceptor = Dialer(a, dialer_secret, NONCES[0], expected), Acceptor(b, acceptor_secret, NONCES[1])
    welcome = acceptor.greeted(one_frame(dialer.hello()))
    found, proof = dialer.welcomed(one_frame(welcome))
    return found, acceptor.proved(one_frame(proof))


def test_two_nodes_know_each_other():
    assert shake() == (identity("b"), identity("a"))
    assert shake(b"", b"") == (identity("b"), identity("a"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dialer_secret": b"another secret.."}, "node b has another secret"),
        ({"acceptor_secret": b""}, "node b has no secret"),
        ({"dialer_secret": b""}, "node b has a secret, and this node has none"),
        ({"b": identity("b", "c2")}, "belongs to cluster c1, this one to c2"),
        (
            {"b": identity("b", "")},
            "node a belongs to cluster c1, .* does not know its own before it has reached the coordination",
        ),
        ({"a": identity("a", "")}, "node a has not reached the coordination store yet, and names no cluster"),
        ({"b": identity("a")}, "data directory copied"),
        ({"b": identity("c")}, "node c answered in place of node b"),
        ({"b": identity("b", version=3)}, "speaks version 1, this one 3"),
    ],
)
def test_who_does_not_belong_here_is_refused(options, words):
    with pytest.raises(PeerError, match=words):
        shake(**options)


def test_the_next_version_is_welcome():
    assert shake(b=identity("b", version=2))[0].version == 2


def test_a_dialer_without_the_secret_is_refused():
    acceptor = Acceptor(identity("b"), SECRET, NONCES[1])
    acceptor.greeted(one_frame(Dialer(identity("a"), b"", NONCES[0], "b").hello()))
    for proof in (b"", b"x" * 32):
        with pytest.raises(PeerError, match="node a has"):
            acceptor.proved(Proof(proof))


def test_a_proof_is_good_for_one_connection_and_one_role():
    hello = one_frame(Dialer(identity("a"), SECRET, NONCES[0], "b").hello())
    first = Acceptor(identity("b"), SECRET, NONCES[1])
    welcome = one_frame(first.greeted(hello))
    _, proof = Dialer(identity("a"), SECRET, NONCES[0], "b").welcomed(welcome)
    again = Acceptor(identity("b"), SECRET, b"n" * 32)  # another connection, with a nonce of its own
    again.greeted(hello)
    with pytest.raises(PeerError, match="another secret"):
        again.proved(one_frame(proof))
    with pytest.raises(PeerError, match="another secret"):
        first.proved(Proof(welcome.proof))  # what the acceptor said, sent back to it
    assert first.proved(one_frame(proof)) == identity("a")


def test_the_handshake_has_an_order():
    with pytest.raises(PeerError, match="not the Hello"):
        Acceptor(identity("b"), SECRET, NONCES[1]).greeted(Proof(b""))
    with pytest.raises(PeerError, match="not the Hello"):
        Acceptor(identity("b"), SECRET, NONCES[1]).greeted(Hello(b"HTTP", identity("a"), NONCES[0]))
    with pytest.raises(PeerError, match="in place of a proof"):
        Acceptor(identity("b"), SECRET, NONCES[1]).proved(Proof(b""))
    dialer = Dialer(identity("a"), SECRET, NONCES[0], "b")
    with pytest.raises(PeerError, match="refused by node b: go away"):
        dialer.welcomed(Farewell("go away"))
    with pytest.raises(PeerError, match="Ping in place of an answer"):
        dialer.welcomed(Ping(1))
