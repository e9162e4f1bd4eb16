"""Frames between the nodes of a cluster, both sides, and how two nodes make sure who the other is.

The node that leads partitions dials each node that has copies of them; one connection serves all of these, each as a
*stream* with a number. Byte picture (big-endian)::

    0      4             8                    8+n
    +------+-------------+--------------------+------------------
    | size | header_size | header: msgpack    | body: as it is
    +------+-------------+--------------------+------------------
    size counts everything behind itself; a header is an array whose first item says which frame it is

::

    dialer -> acceptor   Hello                            acceptor -> dialer   Welcome
                         Proof
    leader -> follower   Open Close CutTo StartOver       follower -> leader   Opened Refused Ready
                         Append (batches) Watermarks                           Acks
                         Progress (records) StateBegin
                         StatePart (records) StateEnd                          ProgressAcks NeedState StateTaken
                         Floors                                                FloorAcks
                         Ping                                                  Pong
    both                 Farewell
    Hello(CLIENTS)       behind the proof: the protocol of clients, wire/commands.py; last ENDS_FRAME
    Hello(UNREAD)        behind the proof: AskUnread                             Unread
    Hello(CHANNELS)      behind the proof: AskChannels                           Channels

Rules of this file:

- Nothing that a peer says is believed before it is checked: sizes before bytes are gathered, counts and ranges when a
  header is decoded. What breaks a rule is a :class:`PeerError`, and ends that connection alone.
- Bodies are not looked at, and not copied when they arrive in one piece.
- A peer of the next version may send more fields at the end of a header; they are passed over. Frames that the other
  side's version does not know are not sent to it.
- The proofs bind both nodes, their processes and both nonces to the secret; they encrypt nothing, which is TLS's task.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from enum import IntEnum
from hashlib import sha256
from struct import Struct
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from flintmq.errors import FlintError
from flintmq.limits import BATCH_SIZE_MAX, PARTITION_COUNT_MAX, SEQUENCE_MAX

MAGIC = b"FMQP"
NONCE_BYTES = 32
PROOF_BYTES = sha256().digest_size
SECRET_BYTES_MIN = 16
"""Of a shared secret; shorter ones can be guessed from what goes over the wire."""
HEADER_BYTES_MAX = 1024 * 1024
BODY_BYTES_MAX = BATCH_SIZE_MAX + 1024 * 1024
HANDSHAKE_BYTES_MAX = 4096
"""Of any frame before a peer has shown that it knows the secret."""
TALLY_MAX = 8192
"""Streams that one frame of acknowledgements or watermarks speaks of."""
HISTORY_MAX = 4096
"""Epochs of one log that a frame names; the oldest are left out."""
FLOORS_MAX = 1024
"""Channels that one frame of floors speaks of."""
ASK_UNREAD_MAX = 512
"""Channels that one frame asks about."""
CHANNELS_MAX = 512
"""Channels that one answer tells of."""
SETTINGS_BYTES_MAX = 1024
"""Of what is set for a topic or a channel."""
FLOORS_VERSION = 2
"""Of peers, from which on they know :class:`Floors`."""
STREAM_MAX = (1 << 31) - 1
BLOCK_BYTES = 1024 * 1024 + 64 * 1024
"""Of the largest block that is used again: a chunk of a log, as leaders send it at most, with what is around it. Where
less comes at a time only its beginning is touched, which stays in the cache of the core."""
SPARE_MAX = 2
"""Blocks that are kept for the next reader that needs one."""
_BLOCK_BYTES_MIN = 64 * 1024
_SPACE_MIN = 16 * 1024

_SIZES = Struct(">II")
_SIZE_FIELD = 4
_TEXT_MAX = 1024

Stream = Annotated[int, Meta(ge=0, le=STREAM_MAX)]
Epoch = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Sequence63 = Annotated[int, Meta(ge=0, le=SEQUENCE_MAX + 1)]
Number63 = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Position: TypeAlias = tuple[Epoch, Number63]
"""Of progress: an epoch, and the number of a record list in it; (0, 0): none was taken yet."""
_Name = Annotated[str, Meta(min_length=1, max_length=128)]
_Id = Annotated[str, Meta(max_length=128)]
_Text = Annotated[str, Meta(max_length=_TEXT_MAX)]
_Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class PeerError(FlintError):
    """A peer broke a rule of the protocol, or is not who it should be; its connection is to be closed.

    Args:
        reason: what was wrong, and with which stream.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    """A frame: fields of plain data, in the order in which they are written down."""


# -- who it is ---------------------------------------------------------------------------------------------------------


class Identity(_Frame, frozen=True):
    """The process at one end of a connection.

    Attributes:
        cluster_id: of the cluster that it belongs to; empty: it does not know yet, because it has not heard the store.
        node: its id.
        incarnation: of the process.
        boot_id: of its machine's start.
        syncs: whether it acknowledges only what was synced to the device.
        version: of this protocol that it speaks.
    """

    cluster_id: _Id
    node: _Id
    incarnation: _Id
    boot_id: _Id
    syncs: bool
    version: Annotated[int, Meta(ge=1, le=1 << 20)]


class Purpose(IntEnum):
    """Tells what a connection is for."""

    REPLICATION = 0
    CLIENTS = 1
    """Behind the proof it speaks the protocol of clients: a node serves its own with what this one leads."""
    DEAD_LETTERS = 2
    """As for clients; what is published are messages that were given up."""
    UNREAD = 3
    """Behind the proof it asks which channels nobody consumes here. Who does not know it takes it for CLIENTS."""
    CHANNELS = 4
    """Behind the proof it asks which channels topics have here. Who does not know it takes it for CLIENTS."""


class Hello(_Frame, frozen=True, tag=1):
    """The first frame of whoever dialled.

    Attributes:
        purpose: a :class:`Purpose`.
    """

    magic: Annotated[bytes, Meta(max_length=16)]
    identity: Identity
    nonce: _Nonce
    purpose: Annotated[int, Meta(ge=0, le=255)] = 0


class Welcome(_Frame, frozen=True, tag=2):
    """The answer to :class:`Hello`.

    Attributes:
        proof: that it knows the secret; empty when none is configured.
    """

    identity: Identity
    nonce: _Nonce
    proof: Annotated[bytes, Meta(max_length=PROOF_BYTES)]


class Proof(_Frame, frozen=True, tag=3):
    """The dialer knows the secret, too. Its other frames may follow at once."""

    proof: Annotated[bytes, Meta(max_length=PROOF_BYTES)]


class Farewell(_Frame, frozen=True, tag=4):
    """The connection is being closed, for this reason."""

    reason: _Text


# -- from the leader ---------------------------------------------------------------------------------------------------


class Open(_Frame, frozen=True, tag=16):
    """A stream begins: this node leads a partition in an epoch; answered by :class:`Opened` or :class:`Refused`."""

    stream: Stream
    topic: _Name
    partition: Annotated[int, Meta(ge=0, lt=PARTITION_COUNT_MAX)]
    topic_number: Number63
    log_id: Number63
    epoch: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]


class Close(_Frame, frozen=True, tag=17):
    """A stream is over; its number is not used again on this connection."""

    stream: Stream


class CutTo(_Frame, frozen=True, tag=18):
    """The logs agree up to ``sequence`` (exclusive): cut off the rest, if there is any; answered by :class:`Ready`."""

    stream: Stream
    sequence: Sequence63


class StartOver(_Frame, frozen=True, tag=19):
    """Begin with an empty log at ``sequence``, at this virtual position in bytes; answered by :class:`Ready`."""

    stream: Stream
    sequence: Sequence63
    offset_bytes: Number63


class Append(_Frame, frozen=True, tag=20):
    """Whole batches, as they are stored: the body.

    Attributes:
        first: sequence where the follower's log ends.
        watermark: everything below is committed; 0 when the leader does not know yet.
        gap: messages between ``first`` and the first batch that the leader does not have, either: it lost them, and
            said so. Without it the first batch begins at ``first``.
    """

    stream: Stream
    first: Sequence63
    watermark: Sequence63
    gap: Sequence63 = 0


class Watermarks(_Frame, frozen=True, tag=21):
    """New watermarks of streams that have nothing else to say."""

    watermarks: Annotated[list[tuple[Stream, Sequence63]], Meta(max_length=TALLY_MAX)]


class Progress(_Frame, frozen=True, tag=22):
    """Records of one flush of the leader: the body.

    Attributes:
        position: of the follower with them.
        after: of the follower without them; a follower that is elsewhere needs the whole state.
        needs: end that the follower's log has at least.
    """

    stream: Stream
    position: Position
    after: Position
    needs: Sequence63


class StateBegin(_Frame, frozen=True, tag=23):
    """The whole state of the partition follows, in parts.

    Attributes:
        position: of the follower with it.
        needs: end that the follower's log has at least.
    """

    stream: Stream
    position: Position
    needs: Sequence63


class StatePart(_Frame, frozen=True, tag=24):
    """Records of the whole state: the body."""

    stream: Stream


class StateEnd(_Frame, frozen=True, tag=25):
    """The whole state is complete."""

    stream: Stream


class Ping(_Frame, frozen=True, tag=26):
    """Asks whether the follower still follows in all streams that are open; ``sent_ns`` is the leader's own time."""

    sent_ns: Number63


class Floors(_Frame, frozen=True, tag=27):
    """The floors of channels in order: kept by the follower before what is behind them is delivered.

    Attributes:
        number: of the last of them, of all that the leader has told of the partition in its epoch.
        floors: the name of a channel, and the sequence up to which everything is finished; 0: what was kept of it is
            not so any more.
    """

    stream: Stream
    number: Number63
    floors: Annotated[list[tuple[_Name, Sequence63]], Meta(max_length=FLOORS_MAX)]


# -- from the follower -------------------------------------------------------------------------------------------------


class Opened(_Frame, frozen=True, tag=32):
    """The follower will follow: its epoch is noted, durably.

    Attributes:
        history: epochs of its log, each with its first sequence, the latest ones.
        start: of its log.
        end: of its log, exclusive.
        progress: position of the channels' state that it has.
    """

    stream: Stream
    history: Annotated[list[tuple[Epoch, Sequence63]], Meta(max_length=HISTORY_MAX)]
    start: Sequence63
    end: Sequence63
    progress: Position


class Refusal(IntEnum):
    """Why a node does not follow."""

    HIGHER_EPOCH = 1
    """It knows a later leader: whoever asked leads no longer."""
    NOT_HERE = 2
    """It has no such replica, or not yet."""
    OTHER_LOG = 3
    """Its replica is of another log or another topic of this name; it will be set aside."""
    BROKEN = 4
    """Its disk does not do what it should."""
    TAKEN = 5
    """The same leader has opened the partition on another connection."""


class Refused(_Frame, frozen=True, tag=33):
    """The follower does not follow, or not any more; the leader closes the stream.

    Attributes:
        epoch: the highest that it knows of the partition.
    """

    stream: Stream
    epoch: Epoch
    refusal: Refusal
    reason: _Text = ""


class Ready(_Frame, frozen=True, tag=34):
    """The follower's log is a prefix of the leader's, and ends at ``end``."""

    stream: Stream
    end: Sequence63


class Acks(_Frame, frozen=True, tag=35):
    """The ends up to which the follower has the logs of streams, synced where it is to be."""

    ends: Annotated[list[tuple[Stream, Sequence63]], Meta(max_length=TALLY_MAX)]


class ProgressAcks(_Frame, frozen=True, tag=36):
    """The numbers up to which the follower has stored the progress of streams, in their epoch."""

    numbers: Annotated[list[tuple[Stream, Number63]], Meta(max_length=TALLY_MAX)]


class FloorAcks(_Frame, frozen=True, tag=40):
    """The numbers up to which the follower keeps the floors of channels in order, of streams, in their epoch."""

    numbers: Annotated[list[tuple[Stream, Number63]], Meta(max_length=TALLY_MAX)]


class NeedState(_Frame, frozen=True, tag=37):
    """Progress did not fit: the follower needs the whole state."""

    stream: Stream


class StateTaken(_Frame, frozen=True, tag=39):
    """So many parts of the whole state that is under way are written: there is room for more."""

    stream: Stream
    count: Number63


class Pong(_Frame, frozen=True, tag=38):
    """The follower still follows in all streams that were open and that it has not refused; see :class:`Ping`."""

    sent_ns: Number63


# -- for consumers -----------------------------------------------------------------------------------------------------


class AskUnread(_Frame, frozen=True, tag=48):
    """Asks which of these channels have messages that nobody consumes at the other node; see :class:`Unread`.

    Attributes:
        channels: topic and channel of each.
    """

    channels: Annotated[list[tuple[_Name, _Name]], Meta(max_length=ASK_UNREAD_MAX)]


class Unread(_Frame, frozen=True, tag=49):
    """The answer to :class:`AskUnread`.

    Attributes:
        places: of the channels that nobody consumes, among those that were asked about.
    """

    places: Annotated[list[Annotated[int, Meta(ge=0, lt=ASK_UNREAD_MAX)]], Meta(max_length=ASK_UNREAD_MAX)]


_Numbers = Annotated[list[Annotated[int, Meta(ge=0, lt=PARTITION_COUNT_MAX)]], Meta(max_length=PARTITION_COUNT_MAX)]
_Settings = Annotated[bytes, Meta(max_length=SETTINGS_BYTES_MAX)]


class AskChannels(_Frame, frozen=True, tag=50):
    """Asks which channels a topic has at the other node, for partitions of it that begin; see :class:`Channels`.

    Attributes:
        numbers: of the partitions that begin.
        after: the last channel that the answer before told of; empty: the first ones are asked for.
    """

    topic: _Name
    numbers: _Numbers
    after: _Id = ""


class ChannelRow(_Frame, frozen=True):
    """A channel of a topic, or a name for which something is set.

    Attributes:
        is_there: whether there is such a channel.
        paused: whether nothing of it is delivered.
        skipped: whether everything of it is finished without being delivered.
        settings: that were made for it, as :func:`flintmq.settings.encode_settings` has them; empty: none were.
    """

    name: _Name
    is_there: bool
    paused: bool
    skipped: bool
    settings: _Settings


class Channels(_Frame, frozen=True, tag=51):
    """The answer to :class:`AskChannels`.

    Attributes:
        numbers: of the partitions for which this is all that there is, because they are led there, or are about to
            begin as well. None, if the node does not know yet of those that begin: it would not make channels there.
        is_led: whether one of them is led there; else the rest says nothing.
        paused: whether the topic is.
        settings: of the topic.
        rows: by name, those behind the one that was asked for.
        has_more: whether more follow them.
    """

    numbers: _Numbers
    is_led: bool = False
    paused: bool = False
    settings: _Settings = b""
    rows: Annotated[list[ChannelRow], Meta(max_length=CHANNELS_MAX)] = []
    has_more: bool = False


Frame: TypeAlias = (
    Hello
    | Welcome
    | Proof
    | Farewell
    | Open
    | Close
    | CutTo
    | StartOver
    | Append
    | Watermarks
    | Progress
    | StateBegin
    | StatePart
    | StateEnd
    | Ping
    | Floors
    | Opened
    | Refused
    | Ready
    | Acks
    | ProgressAcks
    | FloorAcks
    | NeedState
    | StateTaken
    | Pong
    | AskUnread
    | Unread
    | AskChannels
    | Channels
)

_WITH_BODY = Append, Progress, StatePart
_encode_header = msgspec.msgpack.Encoder().encode
_decode_header = msgspec.msgpack.Decoder(Frame).decode


def encode(frame: Frame, body: bytes | memoryview = b"") -> list[bytes | memoryview]:
    """Return the pieces of a frame; the body is one of them, not copied.

    Raises:
        ValueError: they are too large to be read on the other side.
    """
    header = _encode_header(frame)
    if len(header) > HEADER_BYTES_MAX or len(body) > BODY_BYTES_MAX:
        raise ValueError(f"{type(frame).__name__} with a header of {len(header)} and a body of {len(body)} bytes")
    head = _SIZES.pack(_SIZE_FIELD + len(header) + len(body), len(header)) + header
    return [head, body] if len(body) else [head]


def encode_one(frame: Frame) -> bytes:
    """Return a frame without a body."""
    return b"".join(encode(frame))


class PeerReader:
    """Takes bytes in whatever pieces, gives frames. After an error it gives the same error again.

    What comes is put into one block of memory, where the frames are read; whoever can have it put there by the kernel
    (:meth:`space`) copies nothing. While nothing waits for its end, the block is with ``spare``.

    Args:
        is_trusted: the peer has shown who it is; until then frames are small (:meth:`trust`).
        spare: blocks for all readers of a loop, of which the ``SPARE_MAX`` largest are kept; None: none is.
    """

    def __init__(self, is_trusted: bool = False, spare: list[bytearray] | None = None) -> None:
        self._body_bytes_max = BODY_BYTES_MAX if is_trusted else 0
        self._header_bytes_max = HEADER_BYTES_MAX if is_trusted else HANDSHAKE_BYTES_MAX
        self._spare = spare
        self._block = bytearray()
        self._at = self._end = 0  # what has come and is not read yet stands between them
        self._needed = 0  # bytes of the frame that is not whole, as far as is known
        self._error: PeerError | None = None

    def trust(self) -> None:
        """Let frames be as large as they are between nodes of one cluster."""
        self._body_bytes_max, self._header_bytes_max = BODY_BYTES_MAX, HEADER_BYTES_MAX

    def receive(self, data: bytes) -> None:
        """Take bytes; then take all frames before the next ones."""
        self._make_room(len(data))
        self._block[self._end : self._end + len(data)] = data
        self._end += len(data)

    def space(self) -> memoryview:
        """Return where the next bytes may be put; tell then how many were (:meth:`filled`), and take all frames."""
        missing = self._needed - self.pending_bytes
        self._make_room(min(missing, _SPACE_MIN) if missing > 0 else _SPACE_MIN)
        return memoryview(self._block)[self._end :]

    def filled(self, count: int) -> None:
        """Take so many bytes that were put into the space."""
        self._end += count

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that is not complete."""
        return self._end - self._at

    def next_frame(self) -> tuple[Frame, memoryview] | None:
        """Return the next frame and its body, None when more bytes are needed.

        The body is there until the next call of anything here.

        Raises:
            PeerError: it is no frame, or larger than one may be.
        """
        if self._error is not None:
            raise self._error
        at, waiting = self._at, self._end - self._at
        if waiting < max(self._needed, _SIZES.size):
            if not waiting:
                self._leave_block()
            return None
        size, header_size = _SIZES.unpack_from(self._block, at)
        body_size = size - _SIZE_FIELD - header_size
        if header_size > self._header_bytes_max or not 0 <= body_size <= self._body_bytes_max:
            limits = f"at most {self._header_bytes_max} and {self._body_bytes_max}"
            raise self._fail(f"a frame with a header of {header_size} and a body of {body_size} bytes, {limits}")
        header_at = at + _SIZES.size
        end = header_at + header_size + body_size
        if self._end < end:
            self._needed = end - at
            return None
        view = memoryview(self._block)
        try:
            frame: Frame = _decode_header(view[header_at : header_at + header_size])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._fail(f"a frame that cannot be read: {str(error)[:200]}") from None
        if body_size and not isinstance(frame, _WITH_BODY):
            raise self._fail(f"{type(frame).__name__} with a body of {body_size} bytes")
        self._at, self._needed = end, 0
        return frame, view[end - body_size : end]

    def _make_room(self, count: int) -> None:
        """Have room for so many bytes behind what waits; for the rest of a frame whose size is known as soon as may be.

        A block is never more than twice as large as what has come: a size may be a lie.
        """
        waiting = self._end - self._at
        least = waiting + count
        best = max(least, self._needed)
        if self._at + best <= len(self._block):
            return
        view = memoryview(self._block)
        if best <= len(self._block):
            view[:waiting] = view[self._at : self._end]  # a view's slices may overlap, a bytearray's may not
        elif self._at + least <= len(self._block):
            return
        else:
            grown = self._new_block(least, best)
            grown[:waiting] = view[self._at : self._end]
            self._leave_block()
            self._block = grown
        self._at, self._end = 0, waiting

    def _new_block(self, least: int, best: int) -> bytearray:
        if self._spare is None:
            return bytearray(min(best, 2 * least))
        if self._spare and len(self._spare[-1]) >= least:
            return self._spare.pop()
        return bytearray(min(max(best, BLOCK_BYTES), max(2 * least, _BLOCK_BYTES_MIN)))

    def _leave_block(self) -> None:
        """Hold no memory any more; the largest blocks are kept for the next reader."""
        spare = self._spare
        if spare is not None and 0 < len(self._block) <= BLOCK_BYTES:
            spare.append(self._block)
            spare.sort(key=len)
            del spare[:-SPARE_MAX]
        self._block = bytearray()
        self._at = self._end = 0

    def _fail(self, reason: str) -> PeerError:
        self._error = PeerError(f"the peer sent {reason}")
        self._leave_block()
        return self._error


# -- the handshake -----------------------------------------------------------------------------------------------------


def _proof(secret: bytes, role: bytes, dialer: Identity, nonce: bytes, acceptor: Identity, answer: bytes) -> bytes:
    if not secret:
        return b""
    said = [_encode_header(part) for part in (MAGIC, role, dialer, nonce, acceptor, answer)]
    return hmac.new(secret, b"".join(said), sha256).digest()


def _check_identity(me: Identity, peer: Identity, purpose: int) -> None:
    if not me.cluster_id and peer.cluster_id:
        raise PeerError(
            f"node {peer.node} belongs to cluster {peer.cluster_id}, and this one does not know its own before it has "
            "reached the coordination store"
        )
    if not peer.cluster_id and me.cluster_id:
        raise PeerError(f"node {peer.node} has not reached the coordination store yet, and names no cluster")
    if peer.cluster_id != me.cluster_id:
        raise PeerError(f"node {peer.node} belongs to cluster {peer.cluster_id}, this one to {me.cluster_id}")
    is_itself = peer.incarnation == me.incarnation and purpose != Purpose.REPLICATION
    if peer.node == me.node and not is_itself:
        raise PeerError(f"node {peer.node} has the id of this node; was its data directory copied?")
    if abs(peer.version - me.version) > 1:
        raise PeerError(
            f"node {peer.node} speaks version {peer.version}, this one {me.version}; upgrade one version at a time"
        )


def _check_proof(peer: Identity, proof: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(proof, expected):
        state = "no secret" if not proof else "another secret" if expected else "a secret, and this node has none"
        raise PeerError(f"node {peer.node} has {state}; all nodes of a cluster need the same")


class Dialer:
    """The handshake of the node that dialled.

    Args:
        me: this process.
        secret: of the cluster; empty: none is configured.
        nonce: ``NONCE_BYTES`` that were never used before.
        expected_node: id of the node that should answer.
        purpose: of the connection.
    """

    def __init__(
        self,
        me: Identity,
        secret: bytes,
        nonce: bytes,
        expected_node: str,
        purpose: Purpose = Purpose.REPLICATION,
    ) -> None:
        self._me = me
        self._secret = secret
        self._nonce = nonce
        self._expected_node = expected_node
        self._purpose = purpose

    def hello(self) -> bytes:
        """Return the first bytes to send."""
        return encode_one(Hello(MAGIC, self._me, self._nonce, self._purpose))

    def welcomed(self, frame: Frame) -> tuple[Identity, bytes]:
        """Take the answer; return who answered, and what to send before anything else.

        Raises:
            PeerError: it is not who it should be, does not know the secret, or refused.
        """
        if isinstance(frame, Farewell):
            raise PeerError(f"refused by node {self._expected_node}: {frame.reason}")
        if not isinstance(frame, Welcome):
            raise PeerError(f"{type(frame).__name__} in place of an answer to Hello")
        peer = frame.identity
        _check_identity(self._me, peer, self._purpose)
        if peer.node != self._expected_node:
            raise PeerError(f"node {peer.node} answered in place of node {self._expected_node}")
        said = self._me, self._nonce, peer, frame.nonce
        _check_proof(peer, frame.proof, _proof(self._secret, b"acceptor", *said))
        return peer, encode_one(Proof(_proof(self._secret, b"dialer", *said)))


class Acceptor:
    """The handshake of the node that was dialled; arguments as for :class:`Dialer`.

    Attributes:
        purpose: of the connection, as whoever dialled said.
    """

    def __init__(self, me: Identity, secret: bytes, nonce: bytes) -> None:
        self._me = me
        self._secret = secret
        self._nonce = nonce
        self.purpose: int = Purpose.REPLICATION
        self._peer: Identity | None = None
        self._expected = b""

    def greeted(self, frame: Frame) -> bytes:
        """Take the first frame; return what to send.

        Raises:
            PeerError: it is no node of this cluster, or of a version that is too far away.
        """
        if not isinstance(frame, Hello) or frame.magic != MAGIC:
            raise PeerError("the first frame is not the Hello of a node of FlintMQ")
        peer = frame.identity
        _check_identity(self._me, peer, frame.purpose)
        said = peer, frame.nonce, self._me, self._nonce
        self._peer, self.purpose = peer, frame.purpose
        self._expected = _proof(self._secret, b"dialer", *said)
        return encode_one(Welcome(self._me, self._nonce, _proof(self._secret, b"acceptor", *said)))

    def proved(self, frame: Frame) -> Identity:
        """Take the second frame; return who dialled.

        Raises:
            PeerError: it does not know the secret.
        """
        peer = self._peer
        if peer is None or not isinstance(frame, Proof):
            raise PeerError(f"{type(frame).__name__} in place of a proof")
        _check_proof(peer, frame.proof, self._expected)
        return peer


def shorten(reason: str) -> str:
    """Return a reason that fits into a frame."""
    return reason[:_TEXT_MAX]


def tallies(pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Divide what is said of many streams into lists that fit into a frame each."""
    return [list(pairs[at : at + TALLY_MAX]) for at in range(0, len(pairs), TALLY_MAX)]
