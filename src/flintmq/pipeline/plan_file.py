"""The file of ``flintmq pipeline run``: sources, steps, rules and sinks, checked before anything is started.

::

    name = "flights"                            of the queries; the application's in Spark
    checkpoint = "/data/checkpoints/flights"    one directory below it for each sink
    trigger = "available-now"                   or how often: "5s"

    [[source]]                                  each is a view, by its name
    [[step]]                                    a view made of others, by SQL or by a function in Python
    [[rule]]                                    a condition that rows of a view have to meet
    [[sink]]                                    where a view goes

The rules of this file: a name nobody knows is refused; every error says file and line. Nothing of Spark is imported.

Source: docs/decisions/0034.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from flintmq.errors import UsageError
from flintmq.pipeline.toml_lines import KeyPath, lines_of_keys

FILE_BYTES_MAX = 1 << 20
AVAILABLE_NOW = "available-now"
TRIGGER_MAX_H = 24 * 366
EXPECT, DROP, FAIL = "expect", "drop", "fail"
STREAM_MODES = ("append", "update", "complete")
OVERWRITE = "overwrite"
BATCH_MODES = ("append", OVERWRITE, "errorifexists", "ignore")

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_TRIGGER = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*(ms|s|m|h)")
_DEPTH = 4  # of what has a line of its own: an option of the second source is ("source", 1, "options", "topic")
_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}


class PlanError(UsageError):
    """The file of a pipeline says what cannot be done.

    Args:
        path: of the file.
        line: from 1; 0 when none can be named.
        reason: why, and what can be said instead.
    """

    def __init__(self, path: Path, line: int, reason: str) -> None:
        super().__init__(f"{path}:{line}: {reason}" if line else f"{path}: {reason}")
        self.path = path
        self.line = line
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Part:
    """A table of the file.

    Attributes:
        lines: where the table begins, as "", and each of its keys; of a table within it as ``options.path``.
    """

    lines: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Source(Part):
    """A view of what is read.

    Attributes:
        schema: for format nsq of the JSON in the body, which becomes the column ``json``; else of the rows.
        watermark: a column of times and how late a row may be, as Spark has it; or nothing.
    """

    name: str
    format: str
    stream: bool
    schema: str
    watermark: tuple[str, ...]
    options: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Step(Part):
    """A view made of others: by ``sql``, or by ``python``, ``file.py:function``."""

    name: str
    sql: str
    python: str


@dataclass(frozen=True, slots=True)
class Rule(Part):
    """A condition in SQL for the rows of a view; ``kind`` is what becomes of those that do not meet it."""

    name: str
    of: str
    kind: str
    condition: str


@dataclass(frozen=True, slots=True)
class Sink(Part):
    """A place that a view is written to; ``mode`` is Spark's, empty for append."""

    name: str
    view: str
    format: str
    mode: str
    options: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Plan:
    """A file that was read.

    Attributes:
        top: what stands before the tables.
        trigger: the arguments of Spark's ``trigger``.
        master: empty where the file names none.
    """

    path: Path
    top: Part
    name: str
    checkpoint: str
    trigger: Mapping[str, object]
    master: str
    jvm: str
    conf: Mapping[str, str]
    sources: Sequence[Source]
    steps: Sequence[Step]
    rules: Sequence[Rule] = field(default=())
    sinks: Sequence[Sink] = field(default=())

    def error(self, part: Part, key: str, reason: str) -> PlanError:
        """Return the exception for a key of a table, or ``options.path`` of one within it, as far as it has a line."""
        return PlanError(self.path, _line_of(part.lines, key), reason)


def read_plan(path: Path) -> Plan:
    """Read the file of a pipeline.

    Raises:
        PlanError: it cannot be read, or says what cannot be done; with the line.
    """
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise PlanError(path, 0, f"it is longer than {FILE_BYTES_MAX} bytes")
        text = data.decode("utf-8-sig")  # some editors put a byte order mark in front
        content = tomllib.loads(text)
        lines = _lines_of_tables(text)
    except OSError as error:
        raise PlanError(path, 0, f"it cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PlanError(path, error.object.count(b"\n", 0, error.start) + 1, "it is not UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        match = re.search(r"\(at line (\d+), column \d+\)", str(error))
        line = int(match[1]) if match else text.count("\n") + 1
        what = str(error).partition(" (at ")[0]
        raise PlanError(path, line, f"it is no TOML: {what}") from error
    except RecursionError as error:
        raise PlanError(path, 0, "its arrays or tables are nested too deeply") from error
    return _Reader(path, content, lines).plan()


def _line_of(lines: Mapping[str, int], key: str) -> int:
    """Return the line of a key of a table, or of one within it, as far as there is one; else the table's, or 0."""
    return next((lines[name] for name in (key, key.partition(".")[0], "") if name in lines), 0)


def _lines_of_tables(text: str) -> dict[KeyPath, dict[str, int]]:
    """Return :attr:`Part.lines` of the top, of the tables there, and of those of arrays there: ``("source", 0)``."""
    found: dict[KeyPath, dict[str, int]] = {(): {}}
    for path, line in lines_of_keys(text, _DEPTH).items():
        length = 2 if len(path) > 1 and isinstance(path[1], int) else 1
        found.setdefault(path[:length], {})[".".join(map(str, path[length:]))] = line
        if len(path) == 1:
            found[()][str(path[0])] = line
    return found


class _Reader:
    """Checks what TOML has read."""

    def __init__(self, path: Path, content: dict[str, Any], lines: Mapping[KeyPath, Mapping[str, int]]) -> None:
        self._path = path
        self._content = content
        self._lines = lines

    def plan(self) -> Plan:
        top = _Table(self, (), self._content)
        top.check_names(("name", "checkpoint", "trigger", "spark", "source", "step", "rule", "sink"))
        spark = _Table(self, ("spark",), top.table("spark"))
        spark.check_names(("master", "jvm", "conf"))
        sources = [self._source(table) for table in self._tables(top, "source")]
        steps = [self._step(table) for table in self._tables(top, "step")]
        parts: list[Source | Step] = [*sources, *steps]
        views = {part.name.lower(): part.name for part in parts}
        plan = Plan(
            path=self._path,
            top=Part(top.lines),
            name=top.name("name"),
            checkpoint=top.text("checkpoint"),
            trigger=_trigger(top),
            master=spark.text("master", ""),
            jvm=spark.one_of("jvm", ("quick", "throughput"), "quick"),
            conf=spark.texts("conf"),
            sources=sources,
            steps=steps,
            rules=[self._rule(table, views) for table in self._tables(top, "rule")],
            sinks=[self._sink(table, views) for table in self._tables(top, "sink")],
        )
        for name in plan.conf:
            if not name.startswith("spark."):
                raise spark.error(f"conf.{name}", f"{name}: names of Spark settings begin with spark.")
        self._check(plan, top)
        return plan

    def _tables(self, top: _Table, kind: str) -> Iterator[_Table]:
        given = self._content.get(kind, [])
        if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
            raise top.error(kind, f"write [[{kind}]], with two brackets: there may be several")
        for index, each in enumerate(given):
            yield _Table(self, (kind, index), each)

    def _source(self, table: _Table) -> Source:
        table.check_names(("name", "format", "stream", "schema", "watermark", "options"))
        kind = table.text("format", "nsq")
        watermark = table.content.get("watermark", [])
        if not isinstance(watermark, list) or len(watermark) not in (0, 2) or not _are_texts(watermark):
            raise table.error("watermark", 'watermark is ["column", "10 minutes"]: how late a row may be')
        stream = table.content.get("stream", kind == "nsq")
        if not isinstance(stream, bool):
            raise table.error("stream", "stream is true or false")
        return Source(
            table.lines, table.name("name"), kind, stream, table.text("schema", ""), tuple(watermark),
            table.texts("options"),
        )  # fmt: skip

    def _step(self, table: _Table) -> Step:
        table.check_names(("name", "sql", "python"))
        step = Step(table.lines, table.name("name"), table.text("sql", ""), table.text("python", ""))
        if bool(step.sql) == bool(step.python):
            raise table.error("", f"step {step.name} needs either sql or python")
        if step.python and not re.fullmatch(r".+\.py:[A-Za-z_]\w*", step.python):
            raise table.error("python", f'python is "file.py:function", not {step.python!r}')
        return step

    def _rule(self, table: _Table, views: Mapping[str, str]) -> Rule:
        table.check_names(("name", "of", EXPECT, DROP, FAIL))
        kinds = [kind for kind in (EXPECT, DROP, FAIL) if kind in table.content]
        if len(kinds) != 1:
            raise table.error("", f"a rule needs one of {EXPECT}, {DROP} and {FAIL}, a condition in SQL")
        name = table.text("name")
        return Rule(table.lines, name, _named(table.text("of"), views), kinds[0], table.text(kinds[0]))

    def _sink(self, table: _Table, views: Mapping[str, str]) -> Sink:
        table.check_names(("name", "from", "format", "mode", "options"))
        view = _named(table.text("from"), views)
        return Sink(
            table.lines, table.name("name", view), view, table.text("format"), table.text("mode", ""),
            table.texts("options"),
        )  # fmt: skip

    def _check(self, plan: Plan, top: _Table) -> None:
        """See that parts fit together."""
        if not plan.sources or not plan.sinks:
            raise top.error("", "a pipeline needs a [[source]] and a [[sink]]")
        views: dict[str, Source | Step] = {}
        parts: list[Source | Step] = [*plan.sources, *plan.steps]
        for part in parts:
            other = views.setdefault(part.name.lower(), part)
            if other is not part:
                raise plan.error(part, "name", _twice("views", part, other))
        names = [part.name for part in parts]
        rules: set[str] = set()
        for rule in plan.rules:
            self._known(plan, rule, "of", rule.of, names)
            if rule.name in rules:
                raise plan.error(rule, "name", f"there are two rules {rule.name!r}; each has a name of its own")
            rules.add(rule.name)
        sinks: dict[str, Sink] = {}
        for sink in plan.sinks:
            self._known(plan, sink, "from", sink.view, names)
            twin = sinks.setdefault(sink.name.lower(), sink)
            if twin is not sink:
                raise plan.error(sink, "name", _twice("sinks", sink, twin))
            if sink.mode not in ("", *STREAM_MODES, *BATCH_MODES):
                words = ", ".join(dict.fromkeys((*STREAM_MODES, *BATCH_MODES)))
                raise plan.error(sink, "mode", f"mode is one of {words}, not {sink.mode!r}")
            for name, value in sink.options.items():
                if name.lower() == "path":
                    _check_path(plan, sink, f"options.{name}", value)
                if name.lower() == "checkpointlocation":
                    raise plan.error(
                        sink, "options", "say checkpoint once, at the top; each sink gets a directory there"
                    )
        _check_path(plan, plan.top, "checkpoint", plan.checkpoint)
        if any(source.stream for source in plan.sources) and not plan.checkpoint:
            raise top.error("checkpoint", "give checkpoint, a directory of this pipeline alone: a source is a stream")

    def _known(self, plan: Plan, part: Part, key: str, view: str, views: Sequence[str]) -> None:
        if view not in views:
            raise plan.error(part, key, f"there is no view {view}; there is {', '.join(views)}")


class _Table:
    """A table of the file.

    Args:
        path: the names that lead to it; those of an array are numbered from 0.
    """

    def __init__(self, reader: _Reader, path: KeyPath, content: dict[str, Any]) -> None:
        self.content = content
        self.lines = reader._lines.get(path, {})
        self._reader = reader
        self._kind = str(path[0]) if path else ""
        self._header = f"[[{self._kind}]]" if len(path) > 1 else f"[{self._kind}]"

    def error(self, key: str, reason: str) -> PlanError:
        return PlanError(self._reader._path, _line_of(self.lines, key), reason)

    def check_names(self, names: Sequence[str]) -> None:
        for key in self.content:
            if key not in names:
                near = difflib.get_close_matches(key, names, 1)
                hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(names)}"
                where = f"{self._header} has" if self._kind else "there is"
                raise self.error(key, f"{where} no {key}; {hint}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.content.get(key, default)
        if value is None and self._kind == "" and key == "checkpoint":
            return ""
        if value is None:
            raise self.error("", f"{self._header} needs {key}" if self._kind else f"{key} is missing")
        if not isinstance(value, str) or (not value.strip() and default is None):
            raise self.error(key, f"{key} is a text, not {value!r}")
        return value

    def name(self, key: str, default: str | None = None) -> str:
        value = self.text(key, default)
        if not _NAME.fullmatch(value):
            raise self.error(key, f"{key} is a letter and at most 63 more letters, digits and _, not {value!r}")
        return value

    def one_of(self, key: str, words: Sequence[str], default: str) -> str:
        value = self.text(key, default)
        if value not in words:
            raise self.error(key, f"{key} is {' or '.join(words)}, not {value!r}")
        return value

    def table(self, key: str) -> dict[str, Any]:
        value = self.content.get(key, {})
        if not isinstance(value, dict):
            header = f"[{self._kind}.{key}]" if self._kind else f"[{key}]"
            raise self.error(key, f"{key} is a table, {header}")
        return value

    def texts(self, key: str) -> dict[str, str]:
        """Return a table as Spark's options: texts, where true is ``true``."""
        found = {}
        for name, value in self.table(key).items():
            if not isinstance(value, (str, int, float)):
                raise self.error(f"{key}.{name}", f"{key}: {name} is a text, a number, true or false, not {value!r}")
            found[name] = str(value).lower() if isinstance(value, bool) else str(value)
        return found


def _named(view: str, views: Mapping[str, str]) -> str:
    """Return the name of a view as the plan writes it, for one in any case, as in SQL.

    Args:
        views: names, by those in lower case.
    """
    return views.get(view.lower(), view)


def _twice(kind: str, part: Source | Step | Sink, other: Source | Step | Sink) -> str:
    """Say that two parts have one name: the views of Spark, and directories of some disks, do not tell case apart."""
    line = _line_of(other.lines, "name")
    and_other = "" if part.name == other.name else f" and {other.name}, which differ only in case"
    return f"there are two {kind} {part.name}{and_other} (line {line}); give each a name of its own"


def _check_path(plan: Plan, part: Part, key: str, path: str) -> None:
    """See that a path is one that a file can have.

    Raises:
        PlanError: it has the character U+0000, which no system takes in a name.
    """
    if "\0" in path:
        raise plan.error(part, key, f"a path has no character U+0000, as {path!r} does: leave it out")


def _are_texts(values: Sequence[object]) -> bool:
    return all(isinstance(value, str) for value in values)


def _trigger(top: _Table) -> dict[str, object]:
    text = top.text("trigger", AVAILABLE_NOW).strip()
    if text == AVAILABLE_NOW:
        return {"availableNow": True}
    if (match := _TRIGGER.fullmatch(text)) is None:
        raise top.error("trigger", f'trigger is "{AVAILABLE_NOW}", or how often, as "5s"; not {text!r}')
    milliseconds = Fraction(match[1]) * _UNITS_MS[match[2]]  # Spark takes no fractions of some units
    if milliseconds.denominator > 1 or milliseconds > TRIGGER_MAX_H * _UNITS_MS["h"]:
        raise top.error("trigger", f"trigger is of whole milliseconds, and at most {TRIGGER_MAX_H}h; not {text!r}")
    return {"processingTime": f"{milliseconds.numerator} milliseconds"}


__all__ = ["Plan", "PlanError", "Rule", "Sink", "Source", "Step", "read_plan"]
