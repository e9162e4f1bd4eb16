"""Stand-ins for tests: a whole nsqd in this process, a clock moved by hand, a disk that fails on demand.

For the tests of an application that publishes or consumes::

    with MemoryNsqd(clock=ManualClock()) as nsqd:
        ...                      # clients connect to nsqd.tcp_address or look it up at nsqd.nsqlookupd_http_address

For the tests of code that takes a Clock and a Files::

    disk = MemoryDisk()
    broker = Broker(ManualClock(), disk.attach())
    disk.release()                                     # the process ends; what it wrote stays
    broker = Broker(ManualClock(), disk.attach())
"""

from flintmq.testing.clock import ManualClock
from flintmq.testing.files import MemoryDatabase, MemoryDisk, MemoryFile, MemoryFiles, Operation
from flintmq.testing.nsqd import ChannelCounts, MemoryNsqd, StoredMessage

__all__ = [
    "ChannelCounts",
    "ManualClock",
    "MemoryDatabase",
    "MemoryDisk",
    "MemoryFile",
    "MemoryFiles",
    "MemoryNsqd",
    "Operation",
    "StoredMessage",
]
