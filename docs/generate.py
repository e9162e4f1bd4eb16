"""Writes the pages and files that are derived from tables in the code; ``make docs`` runs it.

A test compares what it would write with what is in the tree, so neither can drift. Add a generated page by adding a row
to :func:`generated`.
"""

from __future__ import annotations

from pathlib import Path

from flintmq.nsqd.options import NsqdOptions
from flintmq.nsqlookupd.options import NsqlookupdOptions
from flintmq.options import example_file, reference_page

ROOT = Path(__file__).resolve().parent.parent


def generated() -> dict[str, str]:
    """Return path -> text of every generated file, paths relative to the root of the project."""
    return {
        "docs/reference/options.md": reference_page([NsqdOptions, NsqlookupdOptions]),
        "contrib/nsqd.cfg.example": example_file(NsqdOptions),
        "contrib/nsqlookupd.cfg.example": example_file(NsqlookupdOptions),
    }


def main() -> None:
    """Write every generated file."""
    for name, text in generated().items():
        path = ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"wrote {name}")


if __name__ == "__main__":
    main()
