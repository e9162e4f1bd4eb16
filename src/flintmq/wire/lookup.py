"""The protocol V1 between nsqd and nsqlookupd, both sides.

Byte picture::

    nsqd -> nsqlookupd    "  V1" once, then lines ended by "\\n" (white space around a line is dropped, words are split
                          at single spaces); IDENTIFY and META are followed by  int32 size | JSON
    nsqlookupd -> nsqd    int32 size | data            no frame type; an error is data that starts with "E_"

Rules of this file:

- Every command is answered, in order. An error is fatal unless it says otherwise: nothing after it is parsed.
- Sizes come from the peer: none is allocated, each is checked first, negative ones too.
- Whether a peer names partitions is a fact of its IDENTIFY (``distributed_id``): ``REGISTER topic partition [channel]``
  and ``REGISTER topic [channel]`` cannot be told apart by looking at the line. nsqlookupd says ``partitions`` to such a
  peer, and only then are they sent, ``META topic`` as well; NSQ's own nsqlookupd hears from it what NSQ's nsqd says. A
  topic without partitions is registered there with partition -11, which is what the redesigned NSQ calls it.

Source: NSQ's nsqlookupd; Youzan's nsqlookupd for partitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct

import msgspec

from flintmq.errors import UNREADABLE_JSON, LocalProtocolError, RemoteProtocolError
from flintmq.limits import COMMAND_LINE_SIZE_MAX, PARTITION_COUNT_MAX
from flintmq.names import is_valid_name
from flintmq.topic_meta import TopicMeta, decode_meta, encode_meta
from flintmq.wire.magic import bad_magic

MAGIC_V1 = b"  V1"
OK = b"OK"
IDENTIFY_SIZE_MAX = 64 * 1024
RESPONSE_SIZE_MAX = 1024 * 1024
_HTTP = int.from_bytes(b"HTTP")  # in the place of a size
PORT_MAX = 65535
ALL_PARTITIONS = -11
"""In place of a partition: a topic without partitions, or all that there are."""

_INT32 = Struct(">i")
_TLS_HINT = "TLS, which nsqlookupd speaks over HTTP alone, --https-address"
_OTHER_MAGICS = {b"  V2": "a client of nsqd: it finds nsqds at nsqlookupd's HTTP address"}


class PeerInfo(msgspec.Struct, frozen=True):
    """The body of an nsqd's IDENTIFY: how clients reach it.

    Attributes:
        distributed_id: the node's id when it has topics with partitions; empty for a plain nsqd.
        draining: it takes no more messages; only ours say so, and only while they do.
        cluster_id: of the cluster that the node is one of; empty: of none.
    """

    version: str = ""
    tcp_port: int = 0
    http_port: int = 0
    hostname: str = ""
    broadcast_address: str = ""
    topology_zone: str = ""
    topology_region: str = ""
    distributed_id: str = ""
    draining: bool = False
    cluster_id: str = ""

    def problem(self) -> str:
        """Return what is wrong with it, as the detail of an E_BAD_BODY; empty when nothing is."""
        if not (self.broadcast_address and self.tcp_port and self.http_port and self.version):
            return "IDENTIFY missing fields"
        for name, port in (("tcp_port", self.tcp_port), ("http_port", self.http_port)):
            if not 0 < port <= PORT_MAX:
                return f"IDENTIFY {name} {port} out of range 1-{PORT_MAX}"
        return ""


class LookupdInfo(msgspec.Struct, frozen=True):
    """nsqlookupd's answer to IDENTIFY; on the wire its fields are sorted.

    Attributes:
        partitions: it takes REGISTER with partitions, and META. Said only to a node that has an id; NSQ's never does.
    """

    broadcast_address: str = ""
    hostname: str = ""
    http_port: int = 0
    tcp_port: int = 0
    version: str = ""
    partitions: bool = False


@dataclass(frozen=True, slots=True)
class Identify:
    """The nsqd has introduced itself, completely."""

    peer: PeerInfo


@dataclass(frozen=True, slots=True)
class Register:
    """The nsqd serves a topic, and a channel of it if one is named.

    Attributes:
        channel: empty for the topic alone.
        partition: None from a peer without partitions, and for a topic without them.
    """

    topic: str
    channel: str
    partition: int | None = None


@dataclass(frozen=True, slots=True)
class Unregister:
    """The nsqd no longer serves a channel, or the topic with all its channels when none is named."""

    topic: str
    channel: str
    partition: int | None = None


@dataclass(frozen=True, slots=True)
class Describe:
    """META: the nsqd serves a topic with partitions or headers, which was created with this."""

    topic: str
    meta: TopicMeta


@dataclass(frozen=True, slots=True)
class Ping:
    """The nsqd is alive; also sent before IDENTIFY."""


Event = Identify | Register | Unregister | Describe | Ping

_IDENTIFY_DECODER = msgspec.json.Decoder(PeerInfo)
_INFO_DECODER = msgspec.json.Decoder(LookupdInfo)


class LookupServerConnection:
    """nsqlookupd's end of one connection: bytes in, events out.

    Feed with :meth:`receive_data`, then take :meth:`next_event` until it returns None; what is kept between two feeds
    is less than one command line or one IDENTIFY body. After a fatal error it returns None for ever.

    Attributes:
        note: for the log beside a fatal error, which the peer is not told; empty where there is nothing to say.
    """

    def __init__(self, identify_size_max: int = IDENTIFY_SIZE_MAX) -> None:
        self._identify_size_max = identify_size_max
        self._buffer = bytearray()
        self._position = 0
        self._searched = 0
        self._has_magic = False
        self._body_size: int | None = None  # -1: the size itself is awaited
        self._body_topic = ""  # whose META it is; empty for an IDENTIFY
        self._is_identified = False
        self._has_partitions = False
        self._is_broken = False
        self.note = ""

    @property
    def has_magic(self) -> bool:
        """Whether the peer has said which protocol it speaks."""
        return self._has_magic

    def receive_data(self, data: bytes) -> None:
        """Take what the peer sent; any split of its bytes gives the same events."""
        if not self._is_broken:
            del self._buffer[: self._position]
            self._searched -= self._position
            self._position = 0
            self._buffer += data

    def next_event(self) -> Event | None:
        """Return the next complete command, or None when more bytes are needed.

        Raises:
            RemoteProtocolError: to be answered; when it is fatal the connection is to be closed.
        """
        if self._is_broken:
            return None
        try:
            return self._parse()
        except RemoteProtocolError as error:
            if error.fatal:
                self._break()
            raise

    def receive_eof(self) -> None:
        """Note that the peer will send no more.

        Raises:
            RemoteProtocolError: it stopped inside the body of an IDENTIFY.
        """
        body_size, is_broken = self._body_size, self._is_broken
        self._break()
        if body_size is not None and not is_broken:
            what = "body size" if body_size < 0 else "body"
            raise RemoteProtocolError("E_BAD_BODY", f"{self._body_command} failed to read {what}")

    def describe(self) -> str:
        state = "broken" if self._is_broken else "identified" if self._is_identified else "new"
        return f"{state} buffered={len(self._buffer) - self._position} body_size={self._body_size}"

    @property
    def _body_command(self) -> str:
        return "META" if self._body_topic else "IDENTIFY"

    def _break(self) -> None:
        self._is_broken = True
        self._buffer.clear()
        self._position = self._searched = 0

    def _parse(self) -> Event | None:
        if not self._has_magic and not self._take_magic():
            return None
        if self._body_size is not None:
            return self._take_body()
        line = self._take_line()
        return None if line is None else self._command(line)

    def _take_magic(self) -> bool:
        if len(self._buffer) < len(MAGIC_V1):
            return False
        if not self._buffer.startswith(MAGIC_V1):
            self.note = bad_magic(self._buffer, _TLS_HINT, _OTHER_MAGICS)
            raise RemoteProtocolError("E_BAD_PROTOCOL")
        self._has_magic = True
        self._position = self._searched = len(MAGIC_V1)
        return True

    def _take_line(self) -> bytes | None:
        end = self._buffer.find(b"\n", self._searched)
        size = (end if end >= 0 else len(self._buffer)) - self._position
        if size > COMMAND_LINE_SIZE_MAX:
            raise RemoteProtocolError("E_INVALID", f"command line too long, more than {COMMAND_LINE_SIZE_MAX} bytes")
        if end < 0:
            self._searched = len(self._buffer)
            return None
        line = bytes(self._buffer[self._position : end])
        self._position = self._searched = end + 1
        return line.strip()

    def _command(self, line: bytes) -> Event | None:
        words = line.decode("utf-8", "surrogateescape").split(" ")
        name, params = words[0], words[1:]
        if name == "PING":
            return Ping()
        if name == "IDENTIFY":
            if self._is_identified:
                raise RemoteProtocolError("E_INVALID", "cannot IDENTIFY again")
            self._body_size = -1
            return self._take_body()
        if name == "META" and self._has_partitions:
            if not params or not is_valid_name(params[0]):
                raise RemoteProtocolError("E_BAD_TOPIC", f"META topic name '{' '.join(params)}' is not valid")
            self._body_size, self._body_topic = -1, params[0]
            return self._take_body()
        if name in ("REGISTER", "UNREGISTER"):
            if not self._is_identified:
                raise RemoteProtocolError("E_INVALID", "client must IDENTIFY")
            topic, channel, partition = self._registration(name, params)
            return (Register if name == "REGISTER" else Unregister)(topic, channel, partition)
        raise RemoteProtocolError("E_INVALID", f"invalid command {name}")

    def _registration(self, name: str, params: Sequence[str]) -> tuple[str, str, int | None]:
        if len(params) < (2 if self._has_partitions else 1):
            raise RemoteProtocolError("E_INVALID", f"{name} insufficient number of params")
        topic = params[0]
        channel = "".join(params[2:3] if self._has_partitions else params[1:2])
        if not is_valid_name(topic):
            raise RemoteProtocolError("E_BAD_TOPIC", f"{name} topic name '{topic}' is not valid")
        if channel and not is_valid_name(channel):
            raise RemoteProtocolError("E_BAD_CHANNEL", f"{name} channel name '{channel}' is not valid")
        return topic, channel, _partition(name, params[1]) if self._has_partitions else None

    def _take_body(self) -> Identify | Describe | None:
        if self._body_size == -1:
            size = self._take_body_size()
            if size is None:
                return None
            self._body_size = size
        assert self._body_size is not None
        end = self._position + self._body_size
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[self._position : end])
        self._position = self._searched = end
        self._body_size = None
        topic, self._body_topic = self._body_topic, ""
        if topic:
            return Describe(topic, _decode_meta(body))
        peer = _decode_peer(body)
        self._is_identified = True
        self._has_partitions = bool(peer.distributed_id)
        return Identify(peer)

    def _take_body_size(self) -> int | None:
        end = self._position + _INT32.size
        if len(self._buffer) < end:
            return None
        size: int = _INT32.unpack_from(self._buffer, self._position)[0]
        if size < 0:
            raise RemoteProtocolError("E_BAD_BODY", f"{self._body_command} invalid body size {size}")
        if size > self._identify_size_max:
            limit = self._identify_size_max
            raise RemoteProtocolError("E_BAD_BODY", f"{self._body_command} body too big {size} > {limit}")
        self._position = self._searched = end
        return size


def _partition(name: str, text: str) -> int | None:
    if text == str(ALL_PARTITIONS):
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and int(text) < PARTITION_COUNT_MAX):
        raise RemoteProtocolError("E_BAD_PARTITIONID", f"{name} partition id '{text}' is not valid")
    return int(text)


def _decode_meta(body: bytes) -> TopicMeta:
    try:
        meta = decode_meta(body)
    except UNREADABLE_JSON as error:
        raise RemoteProtocolError("E_BAD_BODY", "META failed to decode JSON body") from error
    is_plain = meta.partition_num == 0 and (meta.extend_support or meta.version > 0)
    if not 0 < meta.partition_num <= PARTITION_COUNT_MAX and not is_plain:
        limit = f"1 to {PARTITION_COUNT_MAX}"
        raise RemoteProtocolError("E_BAD_BODY", f"META partition_num {meta.partition_num} is not {limit}")
    return meta


def _decode_peer(body: bytes) -> PeerInfo:
    try:
        peer = _IDENTIFY_DECODER.decode(body)
    except UNREADABLE_JSON as error:
        raise RemoteProtocolError("E_BAD_BODY", "IDENTIFY failed to decode JSON body") from error
    problem = peer.problem()
    if problem:
        raise RemoteProtocolError("E_BAD_BODY", problem)
    return peer


# --- what nsqlookupd sends


def encode_response(data: bytes) -> bytes:
    """Frame an answer."""
    return _INT32.pack(len(data)) + data


def encode_error(error: RemoteProtocolError) -> bytes:
    """Frame an error: the code and, after one space, the detail."""
    return encode_response(str(error).encode("utf-8", "surrogateescape"))


def encode_lookupd_info(info: LookupdInfo) -> bytes:
    """Frame the answer to IDENTIFY."""
    fields = msgspec.structs.asdict(info)
    if not info.partitions:
        del fields["partitions"]
    return encode_response(msgspec.json.encode(dict(sorted(fields.items()))))


OK_RESPONSE = encode_response(OK)


# --- what nsqd sends


def encode_identify(peer: PeerInfo) -> bytes:
    """Encode IDENTIFY with its body.

    Raises:
        LocalProtocolError: a field that nsqlookupd requires is missing.
    """
    problem = peer.problem()
    if problem:
        raise LocalProtocolError(
            "E_BAD_BODY", f"{problem}: broadcast_address, tcp_port, http_port, version are required"
        )
    fields = msgspec.structs.asdict(peer)
    if not peer.distributed_id:
        del fields["distributed_id"]  # NSQ's nsqd sends every field but this one, empty ones too
    if not peer.draining:
        del fields["draining"]
    if not peer.cluster_id:
        del fields["cluster_id"]
    body = msgspec.json.encode(fields)
    return b"IDENTIFY\n" + _INT32.pack(len(body)) + body


def encode_register(topic: str, channel: str = "", partition: int | None = None) -> bytes:
    """Encode REGISTER; with a partition only to a nsqlookupd that was sent a ``distributed_id``.

    Raises:
        LocalProtocolError: a name or the partition is not valid.
    """
    return _registration_line("REGISTER", topic, channel, partition)


def encode_unregister(topic: str, channel: str = "", partition: int | None = None) -> bytes:
    """Encode UNREGISTER; without a channel it is the topic and all its channels.

    Raises:
        LocalProtocolError: a name or the partition is not valid.
    """
    return _registration_line("UNREGISTER", topic, channel, partition)


def encode_describe(topic: str, meta: TopicMeta) -> bytes:
    """Encode META: how a topic with partitions or headers was created; for a nsqlookupd that says ``partitions``."""
    body = encode_meta(meta)
    return b"META " + topic.encode() + b"\n" + _INT32.pack(len(body)) + body


PING = b"PING\n"


def _registration_line(name: str, topic: str, channel: str, partition: int | None) -> bytes:
    if not is_valid_name(topic):
        raise LocalProtocolError("E_BAD_TOPIC", f"{name} topic name {topic!r} is not valid")
    if channel and not is_valid_name(channel):
        raise LocalProtocolError("E_BAD_CHANNEL", f"{name} channel name {channel!r} is not valid")
    words = [name, topic]
    if partition is not None:
        if partition != ALL_PARTITIONS and not 0 <= partition < PARTITION_COUNT_MAX:
            limit = f"0 to {PARTITION_COUNT_MAX - 1}"
            raise LocalProtocolError("E_BAD_PARTITIONID", f"{name} partition {partition} is not {limit}")
        words.append(str(partition))
    if channel:
        words.append(channel)
    return " ".join(words).encode() + b"\n"


class LookupClientConnection:
    """nsqd's end of one connection: bytes in, answers out, in the order of the commands."""

    def __init__(self, response_size_max: int = RESPONSE_SIZE_MAX) -> None:
        self._response_size_max = response_size_max
        self._buffer = bytearray()
        self._position = 0

    def receive_data(self, data: bytes) -> None:
        """Take what nsqlookupd sent."""
        del self._buffer[: self._position]
        self._position = 0
        self._buffer += data

    def next_response(self) -> bytes | None:
        """Return the next answer, or None when more bytes are needed.

        Raises:
            RemoteProtocolError: the size is negative or beyond the bound; the connection is to be closed.
        """
        start = self._position + _INT32.size
        if len(self._buffer) < start:
            return None
        size: int = _INT32.unpack_from(self._buffer, self._position)[0]
        if not 0 <= size <= self._response_size_max:
            if size == _HTTP:
                port = "name nsqlookupd's TCP port, 4160 where nothing else is set"
                raise RemoteProtocolError("E_BAD_BODY", f"what answers speaks HTTP: {port}")
            limit = f"0 to {self._response_size_max}"
            raise RemoteProtocolError("E_BAD_BODY", f"nsqlookupd sent a response of {size} bytes, not {limit}")
        if len(self._buffer) < start + size:
            return None
        self._position = start + size
        return bytes(self._buffer[start : self._position])


def error_of(response: bytes) -> RemoteProtocolError | None:
    """Return the error an answer stands for, None when it is not one."""
    if not response.startswith(b"E_"):
        return None
    code, _, detail = response.decode("utf-8", "surrogateescape").partition(" ")
    return RemoteProtocolError(code, detail)


def decode_lookupd_info(response: bytes) -> LookupdInfo:
    """Read nsqlookupd's answer to IDENTIFY; a bare ``OK`` says nothing about it.

    Raises:
        RemoteProtocolError: an error, or not the JSON it should be.
    """
    if response == OK:
        return LookupdInfo()
    error = error_of(response)
    if error is not None:
        raise error
    try:
        return _INFO_DECODER.decode(response)
    except UNREADABLE_JSON as decode_error:
        shown = response[:100]
        raise RemoteProtocolError("E_BAD_BODY", f"nsqlookupd answered IDENTIFY with {shown!r}") from decode_error
