"""Reading a topic by its log, where the broker is FlintMQ's: no channel, and nobody misses a message because of it.

Rules of this file: ranges are sequences of one partition, the end exclusive; what lies outside of what is stored is
told, never left out in silence; a log that moves to another node while it is read is looked for again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from struct import Struct
from time import monotonic
from typing import Any

from flintmq.batch import EXTENDED, RAW_IDS, BatchError, decode_batch
from flintmq.client.blocking.pipeline import Pipeline, SilentOptions
from flintmq.client.options import system_env
from flintmq.errors import UNREADABLE_JSON, FlintError, NsqdError, RemoteProtocolError
from flintmq.limits import SEQUENCE_BITS, SEQUENCE_MAX
from flintmq.message import FRAME_OVERHEAD_BYTES, MESSAGE_HEADER
from flintmq.tools.shell.lines import Line, headers_of, id_text
from flintmq.tools.shell.link import Link, NothingThere, NotOurs
from flintmq.wire import commands
from flintmq.wire.codes import MOVED_CODES
from flintmq.wire.extended import split_body, split_id

FETCH_BYTES = 1024 * 1024
_ANSWER_BYTES_MAX = 80 * 1024 * 1024
_NEXT = Struct(">Q")
_MOVED = (*MOVED_CODES, "E_STALE_EPOCH")


@dataclass(frozen=True, slots=True)
class Log:
    """The log of one partition.

    Attributes:
        start, end: the first stored sequence, and one past the last that is durable.
        at: the first sequence with the time that was asked for, or a later one.
    """

    nsqd: str
    partition: int
    log_id: str
    epoch: int
    start: int
    end: int
    at: int | None = None


class LogReader:
    """Reads the logs of one topic.

    Raises:
        NotOurs: an nsqd that has it cannot be read by offset.
    """

    def __init__(self, link: Link, topic: str) -> None:
        self._link, self.topic = link, topic
        self._lines: dict[str, Pipeline] = {}
        options = link.options
        self._options = SilentOptions(
            user_agent=options.user_agent, connect_timeout=options.connect_timeout, tls=options.tls,
            tls_ca_file=options.tls_ca_file, tls_cert=options.tls_cert, tls_key=options.tls_key,
            tls_verify=options.tls_verify, tls_server_name=options.tls_server_name, compression=options.compression,
            auth_secret=options.auth_secret,
        )  # fmt: skip

    def close(self) -> None:
        """Close the connections."""
        for line in self._lines.values():
            line.close()
        self._lines.clear()

    def __enter__(self) -> LogReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def logs(self, timestamp_ns: int | None = None, *, is_whole: bool = True) -> list[Log]:
        """Return the logs that can be read now, by partition.

        Args:
            timestamp_ns: fill in ``at`` for this time.
            is_whole: False: an nsqd that cannot be asked is told, and hides no other.

        Raises:
            NothingThere: no nsqd has the topic.
            FlintError: an nsqd cannot be asked.
        """
        errors: dict[str, FlintError] = {}
        asked: set[str] = set()
        waiting = list(self._link.tcp_addresses(self.topic))
        found: dict[tuple[int, str], Log] = {}
        while waiting:
            address = waiting.pop(0)
            if address in asked:
                continue
            asked.add(address)
            try:
                answer = self._offsets(address, timestamp_ns)
            except FlintError as error:
                if is_whole or isinstance(error, NotOurs):
                    raise
                errors[address] = error
                continue
            if answer is None:
                continue
            for row in answer["partitions"]:
                log = Log(
                    address, row["partition"], row["log_id"], row["epoch"], row["start"], row["end"], row.get("at")
                )
                found[log.partition, log.log_id] = log
            waiting += [row["nsqd"] for row in answer.get("elsewhere", ()) if row.get("nsqd")]
        if errors and not found:
            raise next(iter(errors.values()))
        for address, why in errors.items():
            self._link.note_failed(address, why)
        if not found:
            raise NothingThere(f"there is no topic {self.topic} on nsqd {', '.join(sorted(asked))}")
        return [found[key] for key in sorted(found)]

    def _offsets(self, address: str, timestamp_ns: int | None) -> dict[str, Any] | None:
        try:
            line = self._line(address)
            line.send(commands.offsets(self.topic, timestamp_ns))
            data = line.receive()
        except NsqdError as error:
            self._drop(address)
            if error.code == "E_TOPIC_NOT_EXIST":
                return None
            if error.code == "E_INVALID" and "invalid command" in error.detail:
                raise NotOurs(address, "be read by offset") from None
            raise
        except FlintError:
            self._drop(address)
            raise
        try:
            answer = json.loads(data)
            if isinstance(answer, dict) and isinstance(answer.get("partitions"), list):
                return answer
        except UNREADABLE_JSON:
            pass  # said below
        raise RemoteProtocolError("E_BAD_BODY", f"the answer of nsqd {address} to OFFSETS cannot be read")

    def read(self, log: Log, start: int, end: int) -> Iterator[Line]:
        """Yield the messages of a range, in order.

        Raises:
            FlintError: they cannot be read; of E_OFFSET_OUT_OF_RANGE, they are not stored any more.
        """
        while start < end:
            try:
                line = self._line(log.nsqd)
                line.send(commands.fetch(self.topic, log.partition, start, end, FETCH_BYTES, log.epoch))
                data = line.receive(_ANSWER_BYTES_MAX)
            except NsqdError as error:
                self._drop(log.nsqd)
                if error.code not in _MOVED:
                    raise
                log = self._found_again(log, error)
                continue
            except FlintError:
                self._drop(log.nsqd)
                raise
            (reached,) = _NEXT.unpack_from(data)
            if reached <= start:
                raise RemoteProtocolError("E_INVALID", f"nsqd {log.nsqd} does not get beyond {start}")
            yield from self._messages(log, data, start, end)
            start = reached

    def _found_again(self, log: Log, error: NsqdError) -> Log:
        for each in self.logs():
            if (each.partition, each.log_id) == (log.partition, log.log_id):
                if (each.nsqd, each.epoch) == (log.nsqd, log.epoch):
                    break
                return replace(log, nsqd=each.nsqd, epoch=each.epoch)
        raise error

    def _messages(self, log: Log, data: bytes, start: int, end: int) -> Iterator[Line]:
        position = _NEXT.size
        try:
            while position < len(data):
                batch = decode_batch(data, position)
                position += batch.size
                flags, at, positions = batch.header.flags, batch.frames_at, batch.positions()
                for index in range(max(0, start - batch.first), min(batch.header.count, end - batch.first)):
                    frame = batch.data[at + positions[index] : at + positions[index + 1]]
                    offset = batch.header.offset_bytes + positions[index]
                    yield self._message(log, bytes(frame), flags, offset)
        except BatchError as error:
            raise RemoteProtocolError("E_BAD_BATCH", f"nsqd {log.nsqd} sent a damaged batch: {error}") from error

    def _message(self, log: Log, frame: bytes, flags: int, offset: int) -> Line:
        _, _, timestamp_ns, attempts, message_id = MESSAGE_HEADER.unpack_from(frame)
        body = frame[FRAME_OVERHEAD_BYTES:]
        headers = None
        if flags & EXTENDED:
            extension, body = split_body(body, is_extended=True, is_ordered=False)
            headers = headers_of(extension.version, extension.headers)
        has_parts = bool(flags & RAW_IDS)
        trace_id = split_id(message_id)[1] if has_parts else None
        name = message_id.hex() if has_parts else id_text(message_id)
        return Line(
            self.topic, body, timestamp_ns, name, attempts, None, log.partition if has_parts else None, offset,
            trace_id, headers, log.nsqd,
        )  # fmt: skip

    def _line(self, address: str) -> Pipeline:
        found = self._lines.get(address)
        if found is None:
            found = Pipeline(address, self._options, system_env(), monotonic, self._link.timeout_s)
            self._lines[address] = found
        return found

    def _drop(self, address: str) -> None:
        line = self._lines.pop(address, None)
        if line is not None:
            line.close()


def sequence_of(message_id: str) -> tuple[int, int]:
    """Return partition and sequence of an id."""
    internal = int(message_id[:16], 16)
    return internal >> SEQUENCE_BITS, internal & SEQUENCE_MAX
