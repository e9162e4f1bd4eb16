"""Publishes to topics of which nothing is led here: they are handed on to a leader, one hop.

::

    client --PUB--> Publishing.publish --> HandOn.take --(the topic is asked for, if there is none)--> Courier
       ^                                       |                                                          |
       +---------- the answer as it came <-----+<------- the leader's session: OK, or what is wrong <-----+

Rules of this file:

- What the leader certainly did not take is tried again, with whoever leads then, as long as a publisher waits; what it
  may have taken is answered as unknown, and never sent a second time. A leader that ends says so behind its last
  answer, and so it is certain of what was sent to it at that moment.
- What waits has a deadline and a bound in bytes; a leader that does not answer holds nobody but those it was sent to,
  and them no longer than until it is known to be silent.
- A publish that names a partition, or whose producer counts, is never handed on: it is about one log. One that counts
  has its topic made all the same, and is refused when that is there: which logs there are is known then.

Source: docs/decisions/0017; Youzan's TCP protocol (error table).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from struct import Struct

from flintmq.broker.partition import Ended
from flintmq.cluster.state import NodeRecord
from flintmq.errors import FlintError, RemoteProtocolError
from flintmq.net.isolation import for_each
from flintmq.net.tasks import tell
from flintmq.nsqd.cluster.peers import Passage, PassageFailed, Peers
from flintmq.nsqd.leadership import NOT_WRITABLE, not_leader
from flintmq.nsqd.pending_reply import PendingReply, RemoteReply
from flintmq.wire.bodies import Kind
from flintmq.wire.codes import MOVED_CODES
from flintmq.wire.commands import COMMANDS, MAGIC_V2, NOP
from flintmq.wire.extended import Stored, parse_stored
from flintmq.wire.frames import ENDS_FRAME, ERROR, HEARTBEAT, RESPONSE, error_frame
from flintmq.wire.peer import Purpose
from flintmq.wire.server import Publish

log = logging.getLogger(__name__)

STORED_WITHIN_S = 5.0
"""Until a publisher is told what became of its publish, or that nobody knows."""
BYTES_MAX = 64 * 1024 * 1024
"""Bodies that wait for leaders, of all connections together."""
IDLE_NS = 60_000_000_000
"""Before a connection that nothing is handed on over is closed."""
AGAIN_S = 0.05
"""Before somebody is asked again who just refused."""
_JUST_MADE = "has just been made, and its partitions are known now; nothing was stored: look them up, and try again"
_DELAYED = {"PUB": "DPUB", "MPUB": "MDPUB"}  # over HTTP these take a delay as well
_FRAME = Struct(">II")
_SIZE = Struct(">I")
_FRAME_BYTES_MAX = 1024 * 1024


class NotHandedOn(FlintError):
    """A leader was not sent a publish, so that it may be sent to another one; the text says why not."""


class NotAnswered(NotHandedOn):
    """A leader was sent a publish and did not answer: nobody knows whether it is stored."""


class HandedOn(Ended):
    """A publish that another node answers.

    Attributes:
        answers: frames for the client, when it ended well.
        reply: the answer of this node, when it took the publish itself in the end.
    """

    __slots__ = ("answers", "reply")

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[bytes] = []
        self.reply: PendingReply | None = None

    def frames(self) -> bytes:
        """Return the answers as the client gets them."""
        return b"".join(self.answers) if self.reply is None else self.reply.frames()

    def stored(self) -> Stored | None:
        """Return where the first message is; None where OK is all that the answer says."""
        if self.reply is not None:
            return None if self.reply.receipt is None else self.reply.receipt.stored()
        return parse_stored(self.answers[0][_FRAME.size :])


class _Job:
    """A run of commands that a leader is sent."""

    __slots__ = ("answers", "count", "data", "done", "is_sent")

    def __init__(self, data: bytes, count: int, done: asyncio.Future[list[bytes]]) -> None:
        self.data = data
        self.count = count
        self.done = done
        self.answers: list[bytes] = []
        self.is_sent = False


class Courier:
    """The connection to one leader, over which publishes go in the order in which they come, and their answers.

    Args:
        record: of the process.
        purpose: of what is published.
        forget: called when it is over.
    """

    def __init__(
        self, peers: Peers, record: NodeRecord, purpose: Purpose, now_ns: int, forget: Callable[[Courier], None]
    ) -> None:
        self.record = record
        self.purpose = purpose
        self.used_ns = now_ns
        self._forget = forget
        self._jobs: deque[_Job] = deque()
        self._passage: Passage | None = None
        self._received = b""
        self._opening = asyncio.get_running_loop().create_task(self._open(peers))
        self._opening.add_done_callback(tell("connecting for publishers"))

    def ask(self, data: bytes, count: int, now_ns: int) -> asyncio.Future[list[bytes]]:
        """Send commands; return what becomes as many frames, or :class:`NotHandedOn` or :class:`NotAnswered`."""
        self.used_ns = now_ns
        job = _Job(data, count, asyncio.get_running_loop().create_future())
        self._jobs.append(job)
        if self._passage is not None:
            self._send(job)
        return job.done

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits for an answer."""
        return not self._jobs

    async def _open(self, peers: Peers) -> None:
        try:
            passage = await peers.open_passage(self.record, self, self.purpose)
        except PassageFailed as error:
            self.lost(str(error))
            return
        self._passage = passage
        passage.write(MAGIC_V2)
        for job in self._jobs:
            self._send(job)

    def _send(self, job: _Job) -> None:
        assert self._passage is not None
        job.is_sent = True
        self._passage.write(job.data)
        job.data = b""

    def received(self, data: bytes) -> None:
        """Take what the leader says."""
        data, at = self._received + data, 0
        while len(data) - at >= _FRAME.size:
            size, kind = _FRAME.unpack_from(data, at)
            if size > _FRAME_BYTES_MAX or kind not in (RESPONSE, ERROR):
                self.close(f"a frame of kind {kind} and {size} bytes came in place of an answer")
                return
            end = at + _SIZE.size + size
            if len(data) < end:
                break
            frame, at = data[at:end], end
            if frame[_FRAME.size :] == HEARTBEAT and self._passage is not None:
                self._passage.write(NOP)
            elif frame == ENDS_FRAME:
                self._ended()
                return
            elif self._jobs:
                self._answered(frame)
        self._received = data[at:]

    def _answered(self, frame: bytes) -> None:
        job = self._jobs[0]
        job.answers.append(frame)
        if len(job.answers) == job.count:
            self._jobs.popleft()
            if not job.done.done():
                job.done.set_result(job.answers)

    def _ended(self) -> None:
        """The leader takes nothing more: what it has not answered it has not stored."""
        jobs, self._jobs = self._jobs, deque()
        for job in jobs:
            if not job.done.done():
                job.done.set_result(job.answers + [ENDS_FRAME] * (job.count - len(job.answers)))
        self.close("it ends")

    def lost(self, reason: str) -> None:
        """The connection is gone, or there never was one."""
        self._forget(self)
        jobs, self._jobs = self._jobs, deque()
        for job in jobs:
            if not job.done.done():
                what = f"node {self.record.node}: {reason}"
                job.done.set_exception(NotAnswered(what) if job.is_sent else NotHandedOn(what))

    def close(self, reason: str) -> None:
        """End it at once."""
        self._opening.cancel()
        if self._passage is not None:
            self._passage.abort(reason)
        self.lost(reason)


class HandOn:
    """Takes publishes to what is led elsewhere.

    Args:
        peers: opens connections to leaders.
        now_ns: the monotonic clock.
        is_here: whether something of a topic is led here.
        leaders: the processes that lead something of a topic and are not silent, in the order in which they are to be
            asked.
        wish: asks the cluster for a topic; see :meth:`flintmq.nsqd.cluster.wishes.Wishes.ask`.
        publish_here: takes a publish to what is led here, and hands nothing on.
    """

    def __init__(
        self,
        peers: Peers,
        now_ns: Callable[[], int],
        is_here: Callable[[str], bool],
        leaders: Callable[[str], list[NodeRecord]],
        wish: Callable[[str], Ended | None],
        publish_here: Callable[[Publish], PendingReply],
    ) -> None:
        self._peers = peers
        self._now_ns = now_ns
        self._is_here = is_here
        self._leaders = leaders
        self._wish = wish
        self._publish_here = publish_here
        self._couriers: dict[tuple[str, str, Purpose], Courier] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = 0
        self.waiting_bytes = 0
        self.handed_count = 0

    def take(self, event: Publish, purpose: Purpose = Purpose.CLIENTS) -> PendingReply:
        """Take a publish; what is returned ends when a leader has answered.

        One whose producer counts ends with NOT_LEADER when its topic is there, and nothing of it is stored.

        Args:
            purpose: dead letters make their topic one of dead letters.

        Raises:
            RemoteProtocolError: too much waits already.
        """
        size = sum(map(len, event.bodies))
        if self.waiting_bytes + size > BYTES_MAX:
            what = f"{event.command} topic {event.topic}: {BYTES_MAX >> 20} MiB wait for other nodes; not stored, retry"
            raise RemoteProtocolError(NOT_WRITABLE, what, fatal=False)
        self.waiting_bytes += size
        handed = HandedOn()
        task = asyncio.get_running_loop().create_task(self._run(event, handed, size, purpose))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return RemoteReply(handed, event.command, event.replies, COMMANDS[event.command].reply != "OK")

    async def _run(self, event: Publish, handed: HandedOn, size: int, purpose: Purpose) -> None:
        run = _Run(event)
        error: BaseException | None = None
        try:
            error = await self._stored(event, run, handed, purpose)
        except asyncio.CancelledError:
            error = (_unknown if run.is_sent else _refused)(event, "this node ends")
            raise
        except Exception as defect:
            log.error("CLUSTER: handing on to topic %s: %r", event.topic, defect, exc_info=defect)
            error = _unknown(event, f"internal error {defect!r}")
        finally:
            self.waiting_bytes -= size
            handed.end(error)

    async def _stored(self, event: Publish, run: _Run, handed: HandedOn, purpose: Purpose) -> BaseException | None:
        """Hand a publish on until somebody has taken it; return why nobody has, or that this is not known."""
        why = "nobody leads it, or nothing is heard of who does"
        try:
            async with asyncio.timeout(STORED_WITHIN_S) as deadline:
                while True:
                    wish = self._wish(event.topic)
                    if wish is not None:
                        await until(wish)
                        if wish.error is not None:
                            return _refused(event, str(wish.error))
                    if event.producer_id is not None:
                        return not_leader(event.command, event.topic, None, _JUST_MADE, fatal=False)
                    if self._is_here(event.topic):
                        reply, why = self._taken_here(event)
                        if reply is not None:
                            deadline.reschedule(None)  # what becomes of it here is known by itself
                            handed.reply = reply
                            await until(reply.source)
                            return reply.source.error
                    elif (courier := self._next_courier(event.topic, purpose)) is not None:
                        try:
                            why = await run.send(courier, self._now_ns())
                        except NotAnswered as error:
                            return _unknown(event, str(error))
                        except NotHandedOn as error:
                            why = str(error)
                        if not run.left:
                            handed.answers = run.answers
                            self.handed_count += len(event.bodies)
                            return run.error
                    await asyncio.sleep(AGAIN_S)
        except TimeoutError:
            if run.is_sent:
                return _unknown(event, f"the node that leads it did not answer within {STORED_WITHIN_S:g} s")
            if len(run.left) < event.replies:
                run.give_up(_refused(event, why))
                handed.answers = run.answers
                return None
            return _refused(event, f"{why}; this went on for {STORED_WITHIN_S:g} s")
        except RemoteProtocolError as error:
            return error

    def _taken_here(self, event: Publish) -> tuple[PendingReply | None, str]:
        """Take a publish to what is led here by now; without an answer it was not taken, and may be presently."""
        try:
            return self._publish_here(event), ""
        except RemoteProtocolError as error:
            if error.code not in MOVED_CODES:
                raise
            return None, error.detail
        except FlintError as error:
            raise RemoteProtocolError(NOT_WRITABLE, f"{event.command} failed {error}", fatal=False) from None

    def _next_courier(self, topic: str, purpose: Purpose) -> Courier | None:
        """Return the connection to the leader whose turn it is; None: nobody leads."""
        leaders = self._leaders(topic)
        if not leaders:
            return None
        self._turn += 1
        record = leaders[self._turn % len(leaders)]
        key = record.node, record.incarnation, purpose
        found = self._couriers.get(key)
        if found is None:
            found = self._couriers[key] = Courier(self._peers, record, purpose, self._now_ns(), self._forget)
        return found

    def _forget(self, courier: Courier) -> None:
        key = courier.record.node, courier.record.incarnation, courier.purpose
        if self._couriers.get(key) is courier:
            del self._couriers[key]

    # -- who comes and goes --------------------------------------------------------------------------------------------

    def look(self, why_given_up: Callable[[NodeRecord], str]) -> None:
        """Close connections that nobody needs, and those to processes of which nothing more is expected.

        Args:
            why_given_up: tells why that is so; empty: it is not.
        """
        now_ns = self._now_ns()
        for courier in list(self._couriers.values()):
            if why := why_given_up(courier.record):
                courier.close(why)
            elif courier.is_idle and now_ns - courier.used_ns > IDLE_NS:
                courier.close("nothing is handed on")

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for another node's answer."""
        return not self._tasks

    async def close(self) -> None:
        """Hand on nothing more; who waits is told."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for_each(list(self._couriers.values()), lambda courier: courier.close("this node ends"), "closing")


class _Run:
    """The commands of one publish, and what was answered to each.

    Attributes:
        left: those that nobody has taken.
        is_sent: somebody was sent them and has not answered.
    """

    def __init__(self, event: Publish) -> None:
        self._event = event
        self._found: list[bytes] = [b""] * event.replies
        self.left = list(range(event.replies))
        self.is_sent = False

    async def send(self, courier: Courier, now_ns: int) -> str:
        """Send what is left to a leader; return why it did not take all of it, if it may be taken yet.

        Raises:
            NotHandedOn: it was not sent. NotAnswered: nobody knows.
        """
        done = courier.ask(_encoded(self._event, self.left), len(self.left), now_ns)
        self.is_sent = True
        try:
            answers = await done
        except NotHandedOn:
            self.is_sent = False
            raise
        self.is_sent = False
        left, why = [], ""
        for index, frame in zip(self.left, answers, strict=True):
            code, detail = _error_of(frame)
            if code in MOVED_CODES:
                left.append(index)
                why = f"node {courier.record.node} answers {code} {detail}"
            self._found[index] = frame
        self.left = left
        return why

    def give_up(self, error: RemoteProtocolError) -> None:
        """Answer what is left with an error."""
        for index in self.left:
            self._found[index] = error_frame(error.code, error.detail)

    @property
    def answers(self) -> list[bytes]:
        return self._found

    @property
    def error(self) -> RemoteProtocolError | None:
        """The error that all of them got; None: some are stored."""
        code, detail = _error_of(self._found[0])
        if not code or not all(map(_is_error, self._found)):
            return None
        return RemoteProtocolError(code, detail, COMMANDS[self._event.command].closes(code))


def _is_error(frame: bytes) -> bool:
    kind: int = _FRAME.unpack_from(frame)[1]
    return kind == ERROR


def _error_of(frame: bytes) -> tuple[str, str]:
    """Return code and words of an answer; empty for one that is no error."""
    if not _is_error(frame):
        return "", ""
    code, _, detail = frame[_FRAME.size :].decode("utf-8", "surrogateescape").partition(" ")
    return code, detail


def _encoded(event: Publish, indices: list[int]) -> bytes:
    """Write a publish as a client would, without its partition, which is none."""
    name = _DELAYED.get(event.command, event.command) if event.defer_ms else event.command
    row = COMMANDS[name]
    line = row.line(*row.line_values((event.topic, None, event.defer_ms, None, 0)))
    bodies = event.bodies
    if row.body.kind is Kind.MESSAGES:
        messages = b"".join([part for body in bodies for part in (_SIZE.pack(len(body)), body)])
        return b"".join((line, _SIZE.pack(_SIZE.size + len(messages)), _SIZE.pack(len(bodies)), messages))
    return b"".join([part for index in indices for part in (line, _SIZE.pack(len(bodies[index])), bodies[index])])


def _refused(event: Publish, why: str) -> RemoteProtocolError:
    what = f"{event.command} topic {event.topic}: {why}; it is not stored, publish it again"
    return RemoteProtocolError(NOT_WRITABLE, what, fatal=False)


def _unknown(event: Publish, why: str) -> RemoteProtocolError:
    row = COMMANDS[event.command]
    what = f"{event.command} topic {event.topic} was handed on, and it is not known whether it is stored: {why}"
    return RemoteProtocolError(row.failure, what, row.closes(row.failure))


async def until(ended: Ended) -> None:
    """Wait until something has ended."""
    if not ended.ended:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ended.waiters.append(_Waiting(future))
        await future


class _Waiting:
    """Wakes who waits for something to end."""

    __slots__ = ("_future",)

    def __init__(self, future: asyncio.Future[None]) -> None:
        self._future = future

    def publish_ended(self) -> None:
        if not self._future.done():
            self._future.set_result(None)
