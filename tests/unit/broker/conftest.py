"""A broker on a real data directory, without a daemon around it."""

import random

import pytest

from flintmq.broker.broker import Broker, BrokerOptions
from flintmq.storage import ChannelStore, OsFiles


class Disk:
    """A data directory and the brokers that live on it, one after the other."""

    files: OsFiles
    broker: Broker

    def __init__(self, path):
        self.path = path

    def open(self):
        self.files = OsFiles(str(self.path))
        self.broker = Broker(self.files, ChannelStore(self.files), BrokerOptions(), random.Random(1), print)
        self.broker.open(1)
        return self.broker

    def flush(self):
        flush = self.broker.take_flush(0)
        self.broker.flush_ended(flush, self.broker.run_flush(flush, 0, False), None, 0)

    def die(self):
        """End as kill -9 does: nothing more is written."""
        self.broker.close()
        self.files.close()

    def publish(self, topic, count):
        self.broker.publish(topic, [b"x"] * count)
        self.broker.commit_groups(self.broker.write_pending(1))


@pytest.fixture
def disk(tmp_path):
    disk = Disk(tmp_path)
    disk.open()
    yield disk
    disk.die()
