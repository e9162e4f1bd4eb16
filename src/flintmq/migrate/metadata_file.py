"""``nsqd.dat``: the list of topics and channels as NSQ's nsqd keeps it, read when it is NSQ's and kept up to date.

Files in the data directory::

    nsqd.dat           {"topics":[{"name":"t","paused":false,"channels":[{"name":"c","paused":false}]}],
                        "version":"1.3.0"}, on one line
    nsqd.dat.flintmq   SHA-256 of the nsqd.dat that this nsqd wrote last and of the one before, a line each

Rules of this file: the truth is in ``channels.db``; nsqd.dat is for NSQ's scripts and for going back to NSQ's nsqd. It
is ours when its bytes have a digest that stands beside it, so that one which NSQ's nsqd, a script or an editor wrote is
recognised. The digests are written first: after a crash between the two, either nsqd.dat is known. Ephemeral topics and
channels are not listed.

Source: NSQ's data files.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from flintmq.broker.topic import Topic
from flintmq.env import Env
from flintmq.errors import UNREADABLE_JSON, StorageError
from flintmq.names import is_ephemeral
from flintmq.net.tasks import tell
from flintmq.storage import Files, replace_file
from flintmq.wire.identify import NSQ_VERSION

log = logging.getLogger(__name__)

FILE_NAME = "nsqd.dat"
DIGESTS_NAME = "nsqd.dat.flintmq"
FILE_BYTES_MAX = 64 * 1024 * 1024
WRITE_INTERVAL_S = 1.0
_RETRY_S = 5.0
_RETRY_S_MAX = 300.0
"""Before a write that failed is tried again: twice as long each time, so that a full disk is not told of for ever."""
_DIGESTS_BYTES_MAX = 4096


class ChannelEntry(msgspec.Struct):
    """A channel in nsqd.dat."""

    name: str
    paused: bool = False


class TopicEntry(msgspec.Struct):
    """A topic in nsqd.dat."""

    name: str
    paused: bool = False
    channels: list[ChannelEntry] | None = None


class Metadata(msgspec.Struct):
    """The content of nsqd.dat; what else stands there is not looked at."""

    topics: list[TopicEntry] | None = None
    version: str = ""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Metadata).decode


def describe(topics: Iterable[Topic]) -> Metadata:
    """Return what nsqd.dat is to say of these topics."""
    rows = []
    for topic in topics:
        if topic.ephemeral:
            continue
        channels = [
            ChannelEntry(name, paused) for name, paused in topic.channel_names.items() if not is_ephemeral(name)
        ]
        rows.append(TopicEntry(topic.name, topic.paused, channels or None))
    return Metadata(rows, NSQ_VERSION)


def parse(data: bytes) -> Metadata:
    """Read the bytes of an nsqd.dat.

    Raises:
        ValueError: they are not one.
    """
    try:
        return _decode(data)
    except UNREADABLE_JSON as error:
        raise ValueError(str(error)) from error


def read_small(files: Files, path: str, size_max: int) -> bytes:
    """Read a whole file that may not be large; a link is followed.

    Raises:
        OSError: it cannot be opened or read.
        StorageError: it is larger than ``size_max``.
    """
    file = files.open_to_read(path)
    try:
        size = file.size()
        if size > size_max:
            raise StorageError(f"{path} has {size} bytes; no more than {size_max} are read")
        return file.read_at(0, size)
    finally:
        file.close()


def own_digest(files: Files, data: bytes) -> str:
    """Return the digest of an nsqd.dat when this nsqd wrote it; empty when somebody else did.

    Raises:
        OSError: what is ours is noted and cannot be read.
    """
    try:
        digests = read_small(files, DIGESTS_NAME, _DIGESTS_BYTES_MAX).decode("ascii", "replace").split()
    except FileNotFoundError:
        return ""
    digest = digest_of(data)
    return digest if digest in digests else ""


def digest_of(data: bytes) -> str:
    """Return the digest that stands for these bytes beside nsqd.dat."""
    return hashlib.sha256(data).hexdigest()


def write_metadata(files: Files, metadata: Metadata, previous: str) -> str:
    """Replace nsqd.dat, durably; return the digest of the new one. Blocks.

    Args:
        previous: digest of the one that is there; empty when there is none of ours.

    Raises:
        OSError: the old one is still there.
    """
    data = _encode(metadata)
    digest = digest_of(data)
    replace_file(files, DIGESTS_NAME, f"{digest}\n{previous}\n".encode())
    files.sync_directory("")
    replace_file(files, FILE_NAME, data)
    return digest


@dataclass(slots=True)
class MetadataFile:
    """Keeps nsqd.dat up to date, at most one write a second. All methods run on the event loop.

    Attributes:
        topics: what there is now.
    """

    env: Env
    files: Files
    topics: Callable[[], Iterable[Topic]]
    _digest: str = ""  # of the nsqd.dat that is there, when it is ours
    _task: asyncio.Task[None] | None = None
    _is_due: bool = False
    _closing: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> None:
        """Write it for the first time.

        Raises:
            OSError, StorageError: the one that is there cannot be read.
        """
        try:
            self._digest = own_digest(self.files, read_small(self.files, FILE_NAME, FILE_BYTES_MAX))
        except FileNotFoundError:
            self._digest = ""
        if not await self._write():
            self.changed()

    def changed(self) -> None:
        """Write it soon, because topics, channels or pauses changed."""
        self._is_due = True
        if self._task is None and not self._closing.is_set():
            self._task = asyncio.get_running_loop().create_task(self._write_while_due())
            self._task.add_done_callback(self._ended)
            self._task.add_done_callback(tell(f"writing {FILE_NAME}"))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None

    async def _write_while_due(self) -> None:
        retry_s = _RETRY_S
        while self._is_due and not self._closing.is_set():
            if await self._write():
                pause_s, retry_s = WRITE_INTERVAL_S, _RETRY_S
            else:
                pause_s, retry_s = retry_s, min(2 * retry_s, _RETRY_S_MAX)
            try:
                async with asyncio.timeout(pause_s):
                    await self._closing.wait()
            except TimeoutError:
                pass

    async def _write(self) -> bool:
        self._is_due = False
        metadata = describe(self.topics())
        try:
            self._digest = await self.env.run_blocking(write_metadata, self.files, metadata, self._digest)
        except OSError as error:
            self._is_due = True
            log.error("cannot write %s, which NSQ's tools read: %s; nothing else depends on it", FILE_NAME, error)
            return False
        except Exception as error:
            self._is_due = True
            log.error("writing %s ended unexpectedly, it is tried again: %r", FILE_NAME, error, exc_info=error)
            return False
        return True

    async def close(self) -> None:
        """Write it for the last time."""
        self._closing.set()
        if self._task is not None:
            await asyncio.wait([self._task])
        await self._write()
