"""The Spark programs of examples/, all of them in one session."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from tests.integration.daemons import SPARK_PATIENCE_S
from tests.spark.processes import NsqdProcess

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(2 * SPARK_PATIENCE_S)]

EXAMPLES = Path(__file__).parents[2] / "examples"


def main_of(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def test_all_of_them(spark: Any, nsqd: NsqdProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    place, http_port = str(tmp_path), int(nsqd.http_address.rpartition(":")[2])

    windows = main_of("spark_event_time")(spark, nsqd.address, place)
    assert 20 <= windows["windows"] <= 33, "3 carriers, 10 minutes less the watermark"
    assert 700 <= windows["flights"] <= 1000

    assert main_of("spark_enrich")(spark, nsqd.address, place) == 1000
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == {"id": 999, "country": "xx", "price": 249.75}, "a country that the table lacks"

    (summary,) = main_of("spark_trace_latency")(spark, nsqd.address, http_port)
    assert (summary["messages"], summary["finished"], summary["repeated"]) == (500, 500, 10)

    candles = main_of("spark_candles")(spark, nsqd.address, place)
    assert {row[0] for row in candles} == {"FLNT", "NSQX"} and len(candles) > 5
    assert all(
        low <= min(opened, close) and high >= max(opened, close) for _, _, opened, high, low, close, *_ in candles
    )

    upsert = main_of("spark_upsert_delta")
    assert upsert(spark, nsqd.address, place) == 900
    assert upsert(spark, nsqd.address, place) == 900, "created and deleted again, in a later version"
