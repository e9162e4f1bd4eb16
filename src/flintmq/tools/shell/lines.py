"""Messages as text: a line each, JSON, or as ``--format`` says.

Rules of this file: no IO; bytes that are no text are base64 in JSON and untouched elsewhere, but on a terminal, where
control characters are shown and not obeyed.
"""

from __future__ import annotations

import argparse
import re
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from flintmq.errors import UNREADABLE_JSON, OptionError
from flintmq.message import JSON, TAG, TAG_HEADER
from flintmq.tools.shell.output import plain, plain_bytes

_NS_PER_S = 1_000_000_000
_FIELD = re.compile(r"\{([a-z_]+)\}|\\(.)|([^{\\]+|.)", re.DOTALL)
_ESCAPES = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\0", "\\": b"\\", "{": b"{", "}": b"}"}


@dataclass(slots=True)
class Line:
    """A message that is to be printed; what is not known is None.

    Attributes:
        id: as nsqd's HTTP API takes it: 16 hex digits, or 32 on a topic with partitions.
    """

    topic: str
    body: bytes
    timestamp_ns: int
    id: str
    attempts: int = 1
    channel: str | None = None
    partition: int | None = None
    offset: int | None = None
    trace_id: int | None = None
    headers: Mapping[str, Any] | None = None
    nsqd: str | None = None


def id_text(message_id: bytes) -> str:
    """Return an id as nsqd's HTTP API takes it."""
    if all(byte in b"0123456789abcdef" for byte in message_id):
        return message_id.decode()
    return message_id.hex()


def headers_of(version: int, data: bytes) -> dict[str, Any]:
    """Return the headers in front of a body; what cannot be read is told under an empty name."""
    if version == TAG:
        return {TAG_HEADER: data.decode("utf-8", "backslashreplace")}
    if version != JSON or not data:
        return {}
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except UNREADABLE_JSON:
        return {"": data.decode("utf-8", "backslashreplace")}


def time_text(timestamp_ns: int) -> str:
    """Return a time as ISO 8601 has it, in UTC, to the millisecond."""
    seconds, rest = divmod(timestamp_ns, _NS_PER_S)
    try:
        at = datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return str(timestamp_ns)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{rest // 1_000_000:03d}Z"


def fields_of(line: Line) -> dict[str, Any]:
    """Return a message as JSON has it."""
    found: dict[str, Any] = {"topic": line.topic}
    for name in ("channel", "id", "timestamp_ns", "attempts", "partition", "offset", "trace_id", "nsqd"):
        if (value := getattr(line, name)) is not None:
            found[name] = value
    found["time"] = time_text(line.timestamp_ns)
    if line.headers is not None:
        found["headers"] = line.headers
    try:
        found["body"] = line.body.decode()
    except UnicodeDecodeError:
        found["body_base64"] = b64encode(line.body).decode()
    return found


def _json(line: Line) -> bytes:
    return msgspec.json.encode(fields_of(line)) + b"\n"


def _headers_text(line: Line) -> bytes:
    return msgspec.json.encode(line.headers or {})


_FIELDS: Mapping[str, Callable[[Line], bytes]] = {
    "body": lambda line: line.body,
    "id": lambda line: line.id.encode(),
    "time": lambda line: time_text(line.timestamp_ns).encode(),
    "timestamp": lambda line: b"%d" % line.timestamp_ns,
    "attempts": lambda line: b"%d" % line.attempts,
    "size": lambda line: b"%d" % len(line.body),
    "topic": lambda line: line.topic.encode(),
    "channel": lambda line: (line.channel or "-").encode(),
    "partition": lambda line: _number(line.partition),
    "offset": lambda line: _number(line.offset),
    "trace_id": lambda line: _number(line.trace_id),
    "headers": _headers_text,
    "nsqd": lambda line: (line.nsqd or "-").encode(),
}


def _number(value: int | None) -> bytes:
    return b"-" if value is None else b"%d" % value


def _formatted(text: str) -> Callable[[Line], bytes]:
    """Return what writes a message as a text with fields says.

    Raises:
        OptionError: there is no such field or escape.
    """
    parts: list[bytes | Callable[[Line], bytes]] = []
    for name, escape, rest in _FIELD.findall(text):
        if name:
            if name not in _FIELDS:
                known = ", ".join(f"{{{each}}}" for each in _FIELDS)
                raise OptionError("--format", text, f"there is no {{{name}}}; known are {known}", "flag")
            parts.append(_FIELDS[name])
        elif escape:
            if escape not in _ESCAPES:
                raise OptionError(
                    "--format", text, f"there is no \\{escape}; known are \\n \\t \\r \\0 \\\\ \\{{", "flag"
                )
            parts.append(_ESCAPES[escape])
        else:
            parts.append(rest.encode(errors="surrogateescape"))
    parts.append(b"\n")
    return lambda line: b"".join([part if isinstance(part, bytes) else part(line) for part in parts])


def writer(given: argparse.Namespace, for_terminal: bool) -> Callable[[Line], bytes]:
    """Return what writes a message as a command line wants it.

    Raises:
        OptionError: ``--format`` cannot be read.
    """
    if given.json:
        return _json
    if given.format is not None:
        write = _formatted(given.format)
    elif given.raw:
        return lambda line: line.body
    elif given.headers:

        def write(line: Line) -> bytes:
            return _headers_text(line) + b" " + line.body + b"\n"
    else:

        def write(line: Line) -> bytes:
            return line.body + b"\n"

    return (lambda line: plain_bytes(write(line))) if for_terminal else write


def preview(body: bytes, size: int, width: int = 60) -> str:
    """Return the beginning of a body as one line of a table.

    Args:
        size: of all of it.
    """
    text = plain(body.decode("utf-8", "replace")).replace("\n", "\\n").replace("\t", "\\t")
    return text if len(text) <= width and size <= len(body) else f"{text[:width]}… ({size:,} bytes)"
