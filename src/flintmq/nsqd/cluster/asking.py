"""Questions between nodes, beside replication: who asks waits for each answer, who is asked gives it at once.

Rules of this file: an answer waits for nothing, so that nodes may ask each other; a question is bounded in bytes, an
answer in time; a connection on which something went wrong is not used again.

Source: docs/decisions/0018.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from flintmq.cluster.state import NodeRecord
from flintmq.nsqd.cluster.peers import Passage, PassageFailed, Peers
from flintmq.wire.peer import Frame, PeerError, PeerReader, Purpose, encode_one

log = logging.getLogger(__name__)

ANSWER_S = 5.0
"""Until an answer is not waited for any more."""
SILENT_S = 60.0
"""Until a connection on which nothing is asked is closed."""
QUESTION_BYTES_MAX = 256 * 1024

Q = TypeVar("Q", bound=Frame)
A = TypeVar("A", bound=Frame)


class Answering(asyncio.Protocol, Generic[Q]):
    """The end that is asked.

    Args:
        kind: of the questions; anything else ends the connection.
        answer: gives the answer to one, at once.
    """

    def __init__(self, kind: type[Q], answer: Callable[[Q], Frame]) -> None:
        self._kind = kind
        self._give_answer = answer
        self._reader = PeerReader(is_trusted=True)
        self._transport: asyncio.Transport | None = None
        self._silence: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # of a connection between nodes
        self._expect_more()

    def _expect_more(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
        self._silence = asyncio.get_running_loop().call_later(SILENT_S, self._end, "nothing is asked")

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.receive(data)
            while (found := self._reader.next_frame()) is not None:
                if not isinstance(found[0], self._kind):
                    raise PeerError(f"{type(found[0]).__name__} where only channels are asked about")
                self._answer(found[0])
            if self._reader.pending_bytes > QUESTION_BYTES_MAX:
                raise PeerError(f"a question of more than {QUESTION_BYTES_MAX} bytes")
        except PeerError as error:
            log.warning("PEER: a question of another node about channels: %s", error)
            self._end(str(error))

    def _answer(self, question: Q) -> None:
        answer = encode_one(self._give_answer(question))
        if self._transport is not None:
            self._transport.write(answer)
            self._expect_more()

    def _end(self, reason: str) -> None:
        if self._transport is not None:
            self._transport.abort()

    def pause_writing(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._silence is not None:
            self._silence.cancel()


class Asked(Generic[A]):
    """One node, and the connection on which it is asked one question after the other.

    Args:
        kind: of the answers.
        purpose: of the connection.
    """

    def __init__(self, peers: Peers, kind: type[A], purpose: Purpose) -> None:
        self._peers = peers
        self._kind = kind
        self._purpose = purpose
        self._record: NodeRecord | None = None
        self._passage: Passage | None = None
        self._reader = PeerReader(is_trusted=True)
        self._answer: asyncio.Future[A] | None = None

    async def ask(self, record: NodeRecord, question: Frame) -> A:
        """Return the answer; the one before has been given, or :meth:`close` was called.

        Raises:
            PassageFailed, TimeoutError: it is not known.
            PeerError: the node does not know such questions.
        """
        if self._record != record:
            self.close("its process is another one")
        async with asyncio.timeout(ANSWER_S):
            if self._passage is None:
                self._reader = PeerReader(is_trusted=True)
                self._passage = await self._peers.open_passage(record, self, self._purpose)
                self._record = record
            self._answer = asyncio.get_running_loop().create_future()
            self._passage.write(encode_one(question))
            return await self._answer

    def received(self, data: bytes) -> None:
        """Take what it says."""
        answer = self._answer
        try:
            self._reader.receive(data)
            while (found := self._reader.next_frame()) is not None:
                if not isinstance(found[0], self._kind):
                    raise PeerError(f"{type(found[0]).__name__} in place of an answer")
                if answer is not None and not answer.done():
                    answer.set_result(found[0])
        except PeerError as error:
            if answer is not None and not answer.done():
                answer.set_exception(error)

    def lost(self, reason: str) -> None:
        """The connection is gone."""
        self._passage = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(PassageFailed(reason))

    def close(self, reason: str) -> None:
        """Ask no more on this connection."""
        passage, self._passage = self._passage, None
        if passage is not None:
            passage.give_up(reason)
