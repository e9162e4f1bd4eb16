"""Stand-ins for what waits: a threads whose jobs are run by the test."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flintmq.client.blocking.thread_pool import ThreadPool


class FakeCrew(ThreadPool):
    """Keeps jobs until the test runs them.

    Attributes:
        jobs: handed in and not run.
    """

    def __init__(self) -> None:
        super().__init__("test")
        self.jobs: list[Callable[[], object]] = []

    def run(self, job: Callable[[], object]) -> None:
        self.jobs.append(job)

    def end(self) -> None:
        self.jobs.clear()

    def work(self, number: int = 0) -> None:
        """Run one job."""
        self.jobs.pop(number)()

    def work_all(self) -> None:
        """Run all of them, the first first."""
        while self.jobs:
            self.work()


@pytest.fixture
def threads():
    return FakeCrew()
