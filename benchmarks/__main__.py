"""``python -m benchmarks``: run every ``bench_*.py`` beside this file, print a table of each, write JSON.

A module takes part by having ``main(quick: bool, ...) -> dict`` that returns ``title``, ``rows`` (flat dicts, the rows
of its table) and whatever else belongs into the JSON, and may return a ``note`` to print. It may take ``only``, a part
of a case's name, and ``peer``, the path of another nsqd.

Results go to ``benchmarks/results/local/``, which is not in git.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
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
    result: dict[str, Any] = function(**{key: value for key, value in arguments.items() if key in taken})
    return result


def main() -> int:
    """Parse the arguments, run, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="once and with fewer messages: does it work at all")
    parser.add_argument("--only", default="", metavar="NAME[/CASE]", help=f"one of {', '.join(modules())}")
    parser.add_argument("--peer", default="", metavar="PATH", help="an nsqd to measure beside ours")
    options = parser.parse_args()
    name, _, case = options.only.partition("/")
    if name and name not in modules():
        parser.error(f"--only={options.only}: there are {', '.join(modules())}")
    failed = 0
    for each in [name] if name else modules():
        facts = harness.machine()
        print(f"== {each}: {harness.machine_line(facts)}", flush=True)
        try:
            result = run(each, {"quick": options.quick, "only": case, "peer": options.peer})
        except Exception:
            # one that fails must not keep the others from running; the exit code tells
            traceback.print_exc()
            failed += 1
            continue
        print(f"\n{result.get('title', each)}{' (quick)' if options.quick else ''}\n")
        if result.get("rows"):
            print(harness.table(result["rows"]))
        if result.get("note"):
            print(result["note"])
        content = {"at": datetime.now(UTC).isoformat(), "quick": options.quick, "machine": facts, **result}
        print(f"written to {harness.write_json(each, content)}\n", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
