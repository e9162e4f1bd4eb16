"""Stand-ins for time and disk, for tests of code that takes a Clock and a Files.

::

    disk = MemoryDisk()
    broker = Broker(ManualClock(), disk.attach())
    disk.crash(power_loss=True, rng=random.Random(7))
    broker = Broker(ManualClock(), disk.attach())      # recovers from what survived
"""

from flintmq.testing.clock import ManualClock
from flintmq.testing.files import DiskCrashed, MemoryDatabase, MemoryDisk, MemoryFile, MemoryFiles, Operation

__all__ = ["DiskCrashed", "ManualClock", "MemoryDatabase", "MemoryDisk", "MemoryFile", "MemoryFiles", "Operation"]
