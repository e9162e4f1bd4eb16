"""The parameters of a command: how the server reads each kind, and how the client writes it.

Rules of this file:

- A kind is one class with both directions: :meth:`Word.read` refuses with the code and text that NSQ gives,
  :meth:`Word.write` raises :class:`LocalProtocolError`, so that nothing illegal is sent.
- Numbers are ASCII digits only; an empty one counts as 0, as in nsqd.
- A word where a redesigned NSQ has the partition is read as one; what is no number is :data:`NOT_A_NUMBER`, which NSQ
  ignores, so the caller decides by the topic.

Source: NSQ's TCP protocol, Youzan's TCP protocol, docs/idempotent.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

from flintmq.errors import LocalProtocolError
from flintmq.limits import MESSAGE_ID_SIZE, PRODUCER_ID_SIZE_MAX, PRODUCER_SEQUENCE_MAX
from flintmq.names import is_valid_name
from flintmq.topic_meta import parse_partition
from flintmq.wire.refusals import Refused

NOT_A_NUMBER = -1
"""A partition that is not the number of one."""
NO_PARTITION = b"-1"
"""The word with which clients of the redesigned NSQ name no partition."""
ONLY_PARTITION = b"-"
"""The word with which a producer that counts its messages names the only partition of a topic."""

_NUMBER_DIGITS_MAX = 19
_PRODUCER_ID = re.compile(rb"[A-Za-z0-9._:-]{1,%d}" % PRODUCER_ID_SIZE_MAX)
_PRODUCER_ID_FORM = f"1 to {PRODUCER_ID_SIZE_MAX} of [A-Za-z0-9._:-]"
_SWITCHES = dict.fromkeys((b"1", b"t", b"T", b"true", b"True", b"TRUE"), True) | dict.fromkeys(
    (b"0", b"f", b"F", b"false", b"False", b"FALSE"), False
)
_START = re.compile(r"(timestamp|virtual_queue|msgcount):[0-9]{1,18}|special:-1", re.ASCII)
_NAME_FORM = "1 to 64 of [.a-zA-Z0-9_-], optionally #ephemeral"


class Reader(Protocol):
    """The part of :class:`flintmq.wire.server.ServerConnection` that reading a word needs."""

    @property
    def limits(self) -> Any: ...

    last_topic: tuple[bytes | None, str]


def go_quote(text: bytes) -> str:
    """Quote as Go's %q does, because clients compare error texts."""
    parts = ['"']
    escapes = {0x07: "\\a", 0x08: "\\b", 0x0C: "\\f", 0x0A: "\\n", 0x0D: "\\r", 0x09: "\\t", 0x0B: "\\v"}
    for character in text.decode("utf-8", "surrogateescape"):
        point = ord(character)
        if character in '"\\':
            parts.append("\\" + character)
        elif point in escapes:
            parts.append(escapes[point])
        elif 0xDC80 <= point <= 0xDCFF:  # a byte that is not UTF-8
            parts.append(f"\\x{point - 0xDC00:02x}")
        elif character.isprintable():
            parts.append(character)
        elif point < 0x80:
            parts.append(f"\\x{point:02x}")
        else:
            parts.append(f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}")
    parts.append('"')
    return "".join(parts)


def shown(text: bytes) -> str:
    """Decode what a client sent so that an error frame gives it back byte for byte."""
    return text.decode("utf-8", "surrogateescape")


def number_of(text: bytes) -> int | None:
    """Parse ASCII digits; empty counts as 0, as in nsqd; None when it is not a number."""
    if not text:
        return 0
    if text.isdigit() and len(text.lstrip(b"0")) <= _NUMBER_DIGITS_MAX:
        return int(text.lstrip(b"0") or b"0")
    return None


@lru_cache(maxsize=4096)
def is_producer_id(producer_id: bytes) -> bool:
    """Whether a producer may have this id: 1 to 64 of ``[A-Za-z0-9._:-]``."""
    return _PRODUCER_ID.fullmatch(producer_id) is not None


def parse_sequence(text: bytes, count: int = 1) -> int | None:
    """Read the sequence of the first of ``count`` messages; None when one of them cannot be one."""
    if not (text.isdigit() and len(text) <= _NUMBER_DIGITS_MAX):
        return None
    sequence = int(text)
    return sequence if 0 < sequence <= PRODUCER_SEQUENCE_MAX - count + 1 else None


class Word:
    """One word of a command.

    Args:
        name: as it is documented.
        absent: its value when it is left out; ... for a word that has to be there.

    Attributes:
        field: which field of a publish it is; empty for words of other commands.
        varies: it is another one in every command, so that lines with it are not kept.
        is_shown: it is documented.
        errors: codes that it can be refused with.
    """

    field = ""
    varies = False
    is_shown = True
    errors: tuple[str, ...] = ("E_INVALID",)

    def __init__(self, name: str, absent: Any = ...) -> None:
        self.name = name
        self.absent = absent

    @property
    def is_optional(self) -> bool:
        """Whether it may be left out, and what stands behind it with it."""
        return self.absent is not ...

    def read(self, reader: Reader, command: str, line: Sequence[bytes], index: int) -> Any:
        """Return the value of the word at ``index`` of a line that has it.

        Raises:
            Refused: it cannot be.
        """
        raise NotImplementedError

    def write(self, command: str, value: Any) -> bytes:
        """Write the word for a value, empty when it is left out; the inverse of :meth:`read`.

        Raises:
            LocalProtocolError: the server would refuse it.
        """
        raise NotImplementedError


class Topic(Word):
    """The name of a topic.

    Args:
        twice: nsqd says the code twice when it refuses it, and clients that compare texts know it so.
    """

    field = "topic"
    errors = ("E_BAD_TOPIC",)

    def __init__(self, name: str = "topic", *, twice: bool = False) -> None:
        super().__init__(name)
        self._prefix = "E_BAD_TOPIC " if twice else ""

    def read(self, reader: Reader, command: str, line: Sequence[bytes], index: int) -> str:
        raw, name = reader.last_topic
        if line[index] != raw:
            raw = line[index]
            name = shown(raw)
            if not is_valid_name(name):
                what = f"{self._prefix}{command} topic name {go_quote(raw)} is not valid"
                raise Refused("E_BAD_TOPIC", what)
            reader.last_topic = raw, name
        return name

    def write(self, command: str, value: str) -> bytes:
        if not is_valid_name(value):
            raise LocalProtocolError("E_BAD_TOPIC", f"topic name {value!r} is not valid: {_NAME_FORM}")
        return value.encode()


class Channel(Word):
    """The name of a channel."""

    errors = ("E_BAD_CHANNEL",)

    def read(self, reader: Reader, command: str, line: Sequence[bytes], index: int) -> str:
        name = shown(line[index])
        if not is_valid_name(name):
            raise Refused("E_BAD_CHANNEL", f"{command} channel name {go_quote(line[index])} is not valid")
        return name

    def write(self, command: str, value: str) -> bytes:
        if not is_valid_name(value):
            raise LocalProtocolError("E_BAD_CHANNEL", f"channel name {value!r} is not valid: {_NAME_FORM}")
        return value.encode()


class Partition(Word):
    """The partition, where NSQ has nothing; None when none is named.

    Args:
        none: how the client says that it names none where the word has to be there.
    """

    field = "partition"
    errors = ("E_BAD_PARTITION",)

    def __init__(self, name: str = "partition", absent: Any = None, none: bytes = b"") -> None:
        super().__init__(name, absent)
        self._none = none
        self._nones = (none, NO_PARTITION) if none else (NO_PARTITION,)

    def read(self, reader: Reader, command: str, line: Sequence[bytes], index: int) -> int | None:
        word = line[index]
        if word in self._nones:
            return None
        number = parse_partition(word.decode("ascii", "replace"))
        return NOT_A_NUMBER if number is None else number

    def write(self, command: str, value: int | None) -> bytes:
        if value is None:
            return self._none
        if value < 0:
            raise LocalProtocolError("E_BAD_PARTITION", f"partition {value} is negative")
        return b"%d" % value


class Number(Word):
    """A number from 0 on.

    Args:
        what: how errors call it.
        limit: the field of the server's limits that it may not exceed; empty for none.
        unit: behind it in errors of the client.
        span: how many words errors show, itself and its neighbours.
        special: words that stand for negative numbers.
    """

    def __init__(
        self,
        name: str,
        what: str,
        *,
        absent: Any = ...,
        limit: str = "",
        unit: str = "",
        span: tuple[int, int] = (0, 1),
        special: Sequence[int] = (),
    ) -> None:
        super().__init__(name, absent)
        self._what = what
        self._limit = limit
        self._unit = unit
        self._span = span
        self._special = {b"%d" % each: each for each in special}

    def read(self, reader: Reader, command: str, line: Sequence[bytes], index: int) -> int:
        word = line[index]
        number = int(word) if word.isdigit() and len(word) <= _NUMBER_DIGITS_MAX else self._special.get(word)
        if number is None:
            number = number_of(word)
        if number is None:
            first, end = self._span
            words = b" ".join(line[index + first : index + end])
            raise Refused("E_INVALID", f"{command} could not parse {self._what}{shown(words)}")
        if self._limit and number > (most := getattr(reader.limits, self._limit)):
            raise Refused("E_INVALID", f"{command} {self._what}{number} out of range 0-{most}")
        return number

    def write(self, command: str, value: int | None) -> bytes:
        if value is None and self.is_optional:
            return b""
        if value is None or (value < 0 and value not in self._special.values()):
            raise LocalProtocolError("E_INVALID", f"{command} {self._what}{value}{self._unit} is negative")
        return b"%d" % value


class Delay(Number):
    """The delay of a publish: milliseconds until it may be delivered."""

    field = "defer_ms"

    def __init__(self) -> None:
        super().__init__("defer_ms", "timeout ", limit="max_req_timeout_ms")

    def write(self, command: str, value: int | None) -> bytes:
        if value is None or value < 0:
            raise LocalProtocolError("E_INVALID", f"{command} delay {value} ms is negative")
        return b"%d" % value


class Start(Word):
    """The place where a new channel begins in a partition; only its first consumer names one."""

    def read(self, reader: Reader, command: str, line: Sequence[bytes], index: int) -> str:
        return shown(line[index])

    def write(self, command: str, value: str | None) -> bytes:
        if value is None:
            return b""
        if _START.fullmatch(value) is None:
            what = "is not timestamp:, virtual_queue: or msgcount: and digits, or special:-1"
            raise LocalProtocolError("E_INVALID", f"start {value[:100]!r} {what}")
        return value.encode()


class NoStart(Start):
    """Nothing may stand where another command has its :class:`Start`: it would not be obeyed."""

    is_shown = False

    def read(self, reader: Reader, command: str, line: Sequence[bytes], index: int) -> str:
        what = f"{command} takes no place to begin at, which is {shown(line[index])}: SUB_ADVANCED does"
        raise Refused("E_INVALID", what)


class Switch(Word):
    """Something that is or is not, in the words that Go reads.

    Args:
        code: of the refusal of anything else.
    """

    def __init__(self, name: str, absent: bool, code: str) -> None:
        super().__init__(name, absent)
        self.errors = (code,)

    def read(self, reader: Reader, command: str, line: Sequence[bytes], index: int) -> bool:
        value = _SWITCHES.get(line[index])
        if value is None:
            raise Refused(self.errors[0], f"{command} {self.name} {go_quote(line[index])} is neither true nor false")
        return value

    def write(self, command: str, value: bool) -> bytes:
        return b"true" if value else b"false"


class MessageId(Word):
    """The id of a message, as it came with it."""

    varies = True

    def read(self, reader: Reader, command: str, line: Sequence[bytes], index: int) -> bytes:
        if len(line[index]) != MESSAGE_ID_SIZE:
            raise Refused("E_INVALID", "invalid message ID")
        return line[index]

    def write(self, command: str, value: bytes) -> bytes:
        if len(value) != MESSAGE_ID_SIZE:
            raise LocalProtocolError("E_INVALID", f"message id {value!r} has {len(value)} bytes, not 16")
        return value


class ProducerId(Word):
    """The id under which a producer counts its messages."""

    field = "producer_id"

    def read(self, reader: Reader, command: str, line: Sequence[bytes], index: int) -> bytes:
        producer_id = line[index]
        if not is_producer_id(producer_id):
            text = producer_id[: 2 * PRODUCER_ID_SIZE_MAX].decode("utf-8", "backslashreplace")
            raise Refused("E_INVALID", f"{command} producer id {text} is not valid: {_PRODUCER_ID_FORM}")
        return producer_id

    def write(self, command: str, value: str) -> bytes:
        raw_id = value.encode()
        if not is_producer_id(raw_id):
            raise LocalProtocolError("E_INVALID", f"producer id {value!r} is not valid: {_PRODUCER_ID_FORM}")
        return raw_id


class FirstSequence(Word):
    """The number that a producer gave the first message of a publish, 1 to 2^63-1."""

    field = "sequence"
    varies = True

    def read(self, reader: Reader, command: str, line: Sequence[bytes], index: int) -> int:
        text = line[index]
        sequence = int(text) if text.isdigit() and len(text) <= _NUMBER_DIGITS_MAX else 0
        if not 0 < sequence <= PRODUCER_SEQUENCE_MAX:
            raise self.refusal(command, text)
        return sequence

    @staticmethod
    def refusal(command: str, text: bytes) -> Refused:
        """Return the answer to a sequence that cannot be, or one of the messages behind the first would have."""
        as_text = text[:40].decode("utf-8", "backslashreplace")
        return Refused("E_INVALID", f"{command} sequence {as_text} is not a number from 1 to 2^63-1")

    def write(self, command: str, value: int) -> bytes:
        return b"%d" % value
