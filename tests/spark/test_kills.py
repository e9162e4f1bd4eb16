"""A short run of kills on a standalone Spark cluster; ``python -m tests.spark.kills`` is a long one."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from tests.integration.daemons import SPARK_PATIENCE_S
from tests.spark.kills import Run, difference

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def test_what_is_missing_repeated_or_of_nobody_is_named():
    wanted = pa.table({"offset": [1, 2, 3, 4], "body": [b"a", b"b", b"c", b"d"]})
    assert not difference(wanted, wanted.take([3, 1, 0, 2]))
    said = difference(wanted, wanted.take([0, 1, 1, 3]))
    assert said.startswith("1 missing, such as [{'offset': 3, 'body': b'c'}]; 1 repeated, such as [{'offset': 2")
    other = pa.table({"offset": [1, 2, 3, 4, 5], "body": [b"a", b"b", b"c", b"d", b"d"]})
    assert difference(wanted, other) == "1 of nobody, such as [{'offset': 5, 'body': b'd'}]"


FAULTS = ("kill executor", "kill nsqd", "kill archive", "kill driver")
TRIES_MAX = 3
"""Times that a fault is made to happen until it meets a micro-batch in flight: that may end a moment before."""


@pytest.mark.long
@pytest.mark.timeout(2 * SPARK_PATIENCE_S)
def test_each_message_once_in_three_outputs(tmp_path: Path):
    run = Run(tmp_path / "run", seed=1, stopped_max_s=3)
    try:
        run.wait_for_progress("both queries run")
        for fault in FAULTS:
            for _ in range(TRIES_MAX):
                run.suffer(fault)
                if run.hits[fault]:
                    break
        assert run.end(), run.report()
        assert run.hits.total() >= len(FAULTS) / 2, run.report()
    finally:
        run.close()
