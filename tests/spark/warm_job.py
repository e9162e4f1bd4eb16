"""A session, and what its JVM was started with: ``flags ...``, ``said {"archives": [...], "home": "..."}``.

Usage: ``warm_job.py [<master> [<jvm>]]``; without words behind spark-submit.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main(master: str = "", jvm: str = "quick") -> None:
    from flintmq.spark import session

    if master:
        loopback = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        spark = session("warm", master, jvm, **{"spark.ui.enabled": "false"}, **loopback)
        gateway: Any = spark.sparkContext._gateway
        process_id = gateway.proc.pid
    else:
        spark = session("warm")
        process_id = os.getppid()
    of_process = Path(f"/proc/{process_id}")
    mapped = {line.split(maxsplit=5)[-1] for line in (of_process / "maps").read_text().splitlines()}
    archives = [each for each in mapped if each.endswith(".jsa") and "/spark-" in each]
    variables = (of_process / "environ").read_text().split("\0")
    home = next(each.partition("=")[2] for each in variables if each.startswith("SPARK_HOME="))
    print("flags", spark.conf.get("spark.driver.extraJavaOptions", ""))
    print("said", json.dumps({"archives": archives, "home": home}))


if __name__ == "__main__":
    main(*sys.argv[1:])
