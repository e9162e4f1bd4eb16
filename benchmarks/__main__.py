"""``python -m benchmarks``: run every ``bench_*.py`` beside this file, print a table of each, write JSON.

A module takes part by having ``main(quick: bool, ...) -> dict`` that returns ``title``, ``rows`` (flat dicts, the rows
of its table) and whatever else belongs into the JSON, and may return a ``note`` to print. It may take ``only``, a part
of a case's name, and ``peer``, the path of another nsqd. A module whose ``main`` takes nothing is a script of its own:
it is run, and prints a JSON object with an object of figures for each case.

Results go to ``benchmarks/results/local/``, which is not in git.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import subprocess
import sys
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import harness


def modules() -> list[str]:
    """Names of the benchmarks: ``nsqd`` for ``bench_nsqd.py``."""
    return sorted(path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py"))


def run(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run one benchmark with those of the arguments that it takes."""
    function = importlib.import_module(f"benchmarks.bench_{name}").main
    taken = inspect.signature(function).parameters
    if not taken:
        return run_script(name, arguments["quick"])
    result: dict[str, Any] = function(**{key: value for key, value in arguments.items() if key in taken})
    return result


def run_script(name: str, quick: bool) -> dict[str, Any]:
    """Run a benchmark that is a script and make rows of what it prints."""
    command = [sys.executable, "-m", f"benchmarks.bench_{name}", *(["--repeat=1"] if quick else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(harness.ROOT), str(harness.ROOT / "src")))}
    done = subprocess.run(command, stdout=subprocess.PIPE, cwd=harness.ROOT, env=environment, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    rows = [
        {"case": case, "figure": figure, "value": value}
        for case, figures in report.items()
        if isinstance(figures, dict)
        for figure, value in figures.items()
    ]
    return {"title": name, "rows": rows, "report": report}


def main() -> int:
    """Parse the arguments, run, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="once and with fewer messages: does it work at all")
    parser.add_argument("--only", default="", metavar="NAME[/CASE]", help=f"one of {', '.join(modules())}")
    parser.add_argument("--peer", default="", metavar="PATH", help="an nsqd to measure beside ours")
    options = parser.parse_args()
    peer = str(Path(options.peer).resolve()) if options.peer else ""
    name, _, case = options.only.partition("/")
    if name and name not in modules():
        parser.error(f"--only={options.only}: there are {', '.join(modules())}")
    sys.path.insert(0, str(harness.ROOT / "src"))  # this tree is measured, also where another one is installed
    failed = 0
    for each in [name] if name else modules():
        facts = harness.machine()
        print(f"== {each}: {harness.machine_line(facts)}", flush=True)
        try:
            result = run(each, {"quick": options.quick, "only": case, "peer": peer})
        except Exception:  # noqa: BLE001 - one that fails must not keep the others from running; the exit code tells
            traceback.print_exc()
            failed += 1
            continue
        print(f"\n{result.get('title', each)}{' (quick)' if options.quick else ''}\n")
        if result.get("rows"):
            print(harness.table(result["rows"]))
        if result.get("note"):
            print(result["note"])
        content = {"at": datetime.now(UTC).isoformat(), "quick": options.quick, "machine": facts, **result}
        # a part must not take the place of a whole run
        path = harness.write_json(f"{each}-part" if case or options.quick else each, content)
        print(f"written to {path}\n", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
