"""Protocol V1, both sides: every command and error, any split, any size."""

from __future__ import annotations

import struct
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flintmq.errors import LocalProtocolError, RemoteProtocolError
from flintmq.limits import COMMAND_LINE_SIZE_MAX
from flintmq.wire.lookup import (
    IDENTIFY_SIZE_MAX,
    MAGIC_V1,
    OK_RESPONSE,
    PING,
    Identify,
    LookupClientConnection,
    LookupdInfo,
    LookupServerConnection,
    PeerInfo,
    Ping,
    Register,
    Unregister,
    decode_lookupd_info,
    encode_error,
    encode_identify,
    encode_lookupd_info,
    encode_register,
    encode_response,
    encode_unregister,
    error_of,
)

PEER = PeerInfo(
    version="1.3.0",
    tcp_port=4150,
    http_port=4151,
    hostname="h",
    broadcast_address="b.example",
    topology_zone="z",
    topology_region="r",
)
PARTITIONED = PeerInfo(version="1", tcp_port=1, http_port=2, broadcast_address="b", distributed_id="b:3:1:7")


def body(content: bytes, size: int | None = None) -> bytes:
    return b"IDENTIFY\n" + struct.pack(">i", len(content) if size is None else size) + content


def drain(connection: LookupServerConnection) -> list[object]:
    """Events, and the text of the error that ended them."""
    found: list[object] = []
    try:
        while (event := connection.next_event()) is not None:
            found.append(event)
    except RemoteProtocolError as error:
        found.append(str(error))
    return found


def parse(*chunks: bytes) -> list[object]:
    connection = LookupServerConnection()
    found: list[object] = []
    for chunk in chunks:
        connection.receive_data(chunk)
        found.extend(drain(connection))
    return found


def after_identify(data: bytes, peer: PeerInfo = PEER) -> list[object]:
    events = parse(MAGIC_V1 + encode_identify(peer) + data)
    assert events[0] == Identify(peer)
    return events[1:]


class TestServer:
    def test_a_whole_conversation(self):
        data = (
            MAGIC_V1
            + PING
            + encode_identify(PEER)
            + encode_register("t")
            + encode_register("t", "c")
            + encode_unregister("t", "c")
            + encode_unregister("t")
            + PING
        )
        expected = [
            Ping(),
            Identify(PEER),
            Register("t", ""),
            Register("t", "c"),
            Unregister("t", "c"),
            Unregister("t", ""),
            Ping(),
        ]
        assert parse(data) == expected
        assert parse(*(bytes((byte,)) for byte in data)) == expected

    @pytest.mark.parametrize("magic", [b"  V2", b"GET ", b"\x16\x03\x01\x00", b"  v1", b"\n\n\n\n"])
    def test_wrong_magic(self, magic):
        assert parse(magic) == ["E_BAD_PROTOCOL"]

    @pytest.mark.parametrize(
        ("data", "note"),
        [
            (b"  V2SUB t c\n", "bad protocol magic '  V2' - a client of nsqd: "),
            (b"\x16\x03\x01\x00", "bad protocol magic '\\x16\\x03\\x01\\x00' - TLS, "),
            (b"PROXY TCP4", "bad protocol magic 'PROX' - a proxy "),
        ],
    )
    def test_wrong_magic_is_for_the_log_alone(self, data, note):
        connection = LookupServerConnection()
        connection.receive_data(data)
        with pytest.raises(RemoteProtocolError) as caught:
            connection.next_event()
        assert encode_error(caught.value) == b"\0\0\0\x0eE_BAD_PROTOCOL"
        assert connection.note.startswith(note)

    def test_incomplete_magic(self):
        connection = LookupServerConnection()
        connection.receive_data(b"  V")
        assert drain(connection) == []
        assert not connection.has_magic
        connection.receive_data(b"1")
        assert drain(connection) == []
        assert connection.has_magic

    @pytest.mark.parametrize(
        ("line", "error"),
        [
            (b"NOPE a b\n", "E_INVALID invalid command NOPE"),
            (b"ping\n", "E_INVALID invalid command ping"),
            (b"\n", "E_INVALID invalid command "),
            (b"REGISTER t\n", "E_INVALID client must IDENTIFY"),
            (b"UNREGISTER t\n", "E_INVALID client must IDENTIFY"),
        ],
    )
    def test_errors_before_identify(self, line, error):
        assert parse(MAGIC_V1 + line + PING) == [error]

    @pytest.mark.parametrize(
        ("line", "error"),
        [
            (b"IDENTIFY\n", "E_INVALID cannot IDENTIFY again"),
            (b"REGISTER\n", "E_INVALID REGISTER insufficient number of params"),
            (b"REGISTER \n", "E_INVALID REGISTER insufficient number of params"),
            (b"UNREGISTER\n", "E_INVALID UNREGISTER insufficient number of params"),
            (b"REGISTER $ c\n", "E_BAD_TOPIC REGISTER topic name '$' is not valid"),
            (b"REGISTER  c\n", "E_BAD_TOPIC REGISTER topic name '' is not valid"),
            (b"UNREGISTER t $\n", "E_BAD_CHANNEL UNREGISTER channel name '$' is not valid"),
            (b"REGISTER " + b"t" * 65 + b"\n", f"E_BAD_TOPIC REGISTER topic name '{'t' * 65}' is not valid"),
            (b"REGISTER \xff\n", "E_BAD_TOPIC REGISTER topic name '\udcff' is not valid"),
        ],
    )
    def test_errors_after_identify(self, line, error):
        assert after_identify(line + PING) == [error]

    @pytest.mark.parametrize(
        ("line", "event"),
        [
            (b"REGISTER t c\r\n", Register("t", "c")),
            (b"  REGISTER t c  \n", Register("t", "c")),
            (b"REGISTER t  c\n", Register("t", "")),
            (b"REGISTER t c extra words\n", Register("t", "c")),
            (b"REGISTER t#ephemeral c#ephemeral\n", Register("t#ephemeral", "c#ephemeral")),
        ],
    )
    def test_spelling(self, line, event):
        assert after_identify(line) == [event]

    def test_partitions(self):
        lines = b"REGISTER t 0\nREGISTER t 1023 c\nUNREGISTER t 12 c\nUNREGISTER t 3\n"
        assert after_identify(lines, PARTITIONED) == [
            Register("t", "", 0),
            Register("t", "c", 1023),
            Unregister("t", "c", 12),
            Unregister("t", "", 3),
        ]
        assert (
            encode_register("t", partition=0) + encode_register("t", "c", 1023) == b"REGISTER t 0\nREGISTER t 1023 c\n"
        )

    @pytest.mark.parametrize("text", ["-1", "+1", "1024", "x", "", "1.5", "٣", "99999999999"])
    def test_bad_partitions(self, text):
        line = f"REGISTER t {text} c\n".encode()
        assert after_identify(line, PARTITIONED) == [f"E_BAD_PARTITIONID REGISTER partition id '{text}' is not valid"]

    def test_a_partitioned_peer_must_name_a_partition(self):
        assert after_identify(b"REGISTER t\n", PARTITIONED) == ["E_INVALID REGISTER insufficient number of params"]

    @pytest.mark.parametrize(
        ("data", "error"),
        [
            (body(b"", -1), "E_BAD_BODY IDENTIFY invalid body size -1"),
            (body(b"", -(2**31)), f"E_BAD_BODY IDENTIFY invalid body size {-(2**31)}"),
            (body(b"", 2**31 - 1), f"E_BAD_BODY IDENTIFY body too big {2**31 - 1} > {IDENTIFY_SIZE_MAX}"),
            (body(b"", IDENTIFY_SIZE_MAX + 1), f"E_BAD_BODY IDENTIFY body too big 65537 > {IDENTIFY_SIZE_MAX}"),
            (body(b""), "E_BAD_BODY IDENTIFY failed to decode JSON body"),
            (body(b"{"), "E_BAD_BODY IDENTIFY failed to decode JSON body"),
            (body(b"[]"), "E_BAD_BODY IDENTIFY failed to decode JSON body"),
            (body(b'{"tcp_port":"4150"}'), "E_BAD_BODY IDENTIFY failed to decode JSON body"),
            (body(b'{"hostname":"\xff"}'), "E_BAD_BODY IDENTIFY failed to decode JSON body"),
            (body(b"[" * 60_000), "E_BAD_BODY IDENTIFY failed to decode JSON body"),
            (body(b"{}"), "E_BAD_BODY IDENTIFY missing fields"),
        ],
    )
    def test_bad_bodies(self, data, error):
        assert parse(MAGIC_V1 + data + PING) == [error]

    @pytest.mark.parametrize("name", ["broadcast_address", "tcp_port", "http_port", "version"])
    def test_missing_field(self, name):
        fields = msgspec.to_builtins(PEER)
        del fields[name]
        assert parse(MAGIC_V1 + body(msgspec.json.encode(fields))) == ["E_BAD_BODY IDENTIFY missing fields"]

    @pytest.mark.parametrize("port", [-1, 65536])
    def test_ports_out_of_range(self, port):
        fields = {**msgspec.to_builtins(PEER), "tcp_port": port}
        assert parse(MAGIC_V1 + body(msgspec.json.encode(fields))) == [
            f"E_BAD_BODY IDENTIFY tcp_port {port} out of range 1-65535"
        ]

    def test_unknown_fields_are_ignored(self):
        fields = {**msgspec.to_builtins(PEER), "new": {"a": 1}}
        assert parse(MAGIC_V1 + body(msgspec.json.encode(fields))) == [Identify(PEER)]

    def test_a_body_of_exactly_the_limit(self):
        content = msgspec.json.encode(PEER)
        content += b" " * (IDENTIFY_SIZE_MAX - len(content))
        assert parse(MAGIC_V1 + body(content)) == [Identify(PEER)]

    def test_line_limit(self):
        line = b"PING" + b" " * (COMMAND_LINE_SIZE_MAX - 4)
        assert parse(MAGIC_V1 + line + b"\n") == [Ping()]
        error = f"E_INVALID command line too long, more than {COMMAND_LINE_SIZE_MAX} bytes"
        assert parse(MAGIC_V1 + line + b" \n") == [error]
        assert parse(MAGIC_V1, *[b"x" * 1000] * 17) == [error]

    def test_nothing_is_kept_after_an_error(self):
        connection = LookupServerConnection()
        connection.receive_data(b"GET / HTTP/1.1\r\n")
        assert drain(connection) == ["E_BAD_PROTOCOL"]
        assert connection.note.startswith("bad protocol magic 'GET ' - HTTP: ")
        for _ in range(10):
            connection.receive_data(b"x" * 100_000)
            assert drain(connection) == []
        assert "buffered=0" in connection.describe()

    @pytest.mark.parametrize(
        ("data", "error"),
        [
            (b"", None),
            (MAGIC_V1 + b"PIN", None),
            (MAGIC_V1 + b"IDENTIFY\n", "E_BAD_BODY IDENTIFY failed to read body size"),
            (MAGIC_V1 + b"IDENTIFY\n\0\0", "E_BAD_BODY IDENTIFY failed to read body size"),
            (MAGIC_V1 + body(b"{", 10), "E_BAD_BODY IDENTIFY failed to read body"),
            (MAGIC_V1 + body(b"", -5), None),
        ],
    )
    def test_end_of_stream(self, data, error):
        connection = LookupServerConnection()
        connection.receive_data(data)
        drain(connection)
        if error is None:
            connection.receive_eof()
        else:
            with pytest.raises(RemoteProtocolError, match=error):
                connection.receive_eof()

    @given(data=st.binary(max_size=300), cuts=st.lists(st.integers(0, 320), max_size=6), with_magic=st.booleans())
    def test_any_bytes_in_any_split(self, data, cuts, with_magic):
        stream = MAGIC_V1 + data if with_magic else data
        places = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
        chunks = [stream[start:end] for start, end in pairwise(places)]
        assert parse(*chunks) == parse(stream)

    @given(
        lines=st.lists(
            st.sampled_from(
                [
                    PING,
                    b"REGISTER t\n",
                    b"REGISTER t c\r\n",
                    b"UNREGISTER t\n",
                    encode_identify(PEER),
                    b"X\n",
                    body(b"{}"),
                ]
            ),
            max_size=8,
        ),
        step=st.integers(1, 40),
    )
    def test_any_split_of_commands(self, lines, step):
        stream = MAGIC_V1 + b"".join(lines)
        assert parse(*(stream[i : i + step] for i in range(0, len(stream), step))) == parse(stream)


class TestServerEncoders:
    def test_errors_keep_the_bytes_they_quote(self):
        connection = LookupServerConnection()
        connection.receive_data(MAGIC_V1 + b"\xff\xfe\n")
        with pytest.raises(RemoteProtocolError) as caught:
            connection.next_event()
        assert encode_error(caught.value) == b"\0\0\0\x1cE_INVALID invalid command \xff\xfe"

    def test_error_without_detail_has_no_space(self):
        assert encode_error(RemoteProtocolError("E_BAD_PROTOCOL")) == b"\0\0\0\x0eE_BAD_PROTOCOL"

    def test_ok(self):
        assert OK_RESPONSE == b"\0\0\0\x02OK"

    def test_info_has_sorted_keys(self):
        info = LookupdInfo(broadcast_address="b", hostname="h", http_port=4161, tcp_port=4160, version="1.3.0")
        assert encode_lookupd_info(info)[4:] == (
            b'{"broadcast_address":"b","hostname":"h","http_port":4161,"tcp_port":4160,"version":"1.3.0"}'
        )


class TestClient:
    def test_answers_in_any_split(self):
        stream = OK_RESPONSE + encode_response(b"") + encode_response(b"E_INVALID x")
        for step in range(1, len(stream) + 1):
            connection = LookupClientConnection()
            found = []
            for start in range(0, len(stream), step):
                connection.receive_data(stream[start : start + step])
                while (response := connection.next_response()) is not None:
                    found.append(response)
            assert found == [b"OK", b"", b"E_INVALID x"]

    @pytest.mark.parametrize("size", [-1, -(2**31), 101, 2**31 - 1])
    def test_sizes_out_of_bounds(self, size):
        connection = LookupClientConnection(response_size_max=100)
        connection.receive_data(struct.pack(">i", size))
        with pytest.raises(RemoteProtocolError, match=f"{size} bytes, not 0 to 100"):
            connection.next_response()

    def test_http_is_told(self):
        connection = LookupClientConnection()
        connection.receive_data(b"HTTP/1.1 400 Bad Request")
        with pytest.raises(RemoteProtocolError, match="speaks HTTP: name nsqlookupd's TCP port, 4160"):
            connection.next_response()

    def test_error_of(self):
        error = error_of(b"E_BAD_TOPIC REGISTER topic name '$' is not valid")
        assert error is not None
        assert (error.code, error.detail) == ("E_BAD_TOPIC", "REGISTER topic name '$' is not valid")
        assert error_of(b"OK") is None

    def test_decode_lookupd_info(self):
        info = LookupdInfo("b", "h", 4161, 4160, "1.3.0")
        assert decode_lookupd_info(encode_lookupd_info(info)[4:]) == info
        assert decode_lookupd_info(b"OK") == LookupdInfo()
        with pytest.raises(RemoteProtocolError, match="E_BAD_BODY IDENTIFY missing fields"):
            decode_lookupd_info(b"E_BAD_BODY IDENTIFY missing fields")
        with pytest.raises(RemoteProtocolError, match="answered IDENTIFY with b'<html>'"):
            decode_lookupd_info(b"<html>")

    def test_identify_carries_only_what_is_set(self):
        sent = encode_identify(PeerInfo(version="1", tcp_port=1, http_port=2, broadcast_address="b"))
        assert b"distributed_id" not in sent
        assert sent.startswith(b"IDENTIFY\n\0\0\0")

    @pytest.mark.parametrize(
        ("build", "code"),
        [
            (lambda: encode_identify(PeerInfo(version="1")), "E_BAD_BODY"),
            (lambda: encode_register("$"), "E_BAD_TOPIC"),
            (lambda: encode_register("t\nPING"), "E_BAD_TOPIC"),
            (lambda: encode_unregister("t", "c d"), "E_BAD_CHANNEL"),
            (lambda: encode_register("t", "c", 1024), "E_BAD_PARTITIONID"),
            (lambda: encode_register("t", "c", -1), "E_BAD_PARTITIONID"),
        ],
    )
    def test_nothing_illegal_is_sent(self, build, code):
        with pytest.raises(LocalProtocolError, match=code):
            build()
