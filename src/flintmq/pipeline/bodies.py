"""JSON bodies as columns, and what becomes of those that do not fit.

The rules of this file: a body fits a schema wholly or not at all; why it does not is said in words, with the field; it
is never left out in silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flintmq.errors import OptionError, UsageError
from flintmq.options import Choice, Options, Text, option
from flintmq.pipeline.parquet import ARGUMENT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SCHEMA_SIZE_MAX = 1 << 20
REASON = "_reason"
BODIES = "JSON bodies"
PLACE = ("topic", "partition", "log_id", "offset", "timestamp")


@dataclass(frozen=True, kw_only=True)
class SchemaFlags(Options):
    """A schema of JSON bodies."""

    schema: str = option(
        Text("DDL"),
        "",
        "columns of JSON bodies, as 'id bigint NOT NULL, name string', or a file",
        group=BODIES,
    )
    unknown_fields: str = option(
        Choice(("bad", "drop")),
        "bad",
        "a field that the schema lacks makes a row bad, or is left out",
        group=BODIES,
    )
    bad_rows: str = option(
        Text("DIRECTORY"),
        "",
        "write rows that do not fit there; else the first one ends the job",
        group=BODIES,
    )
    bad_topic: str = option(Text("TOPIC"), "", "or publish them there, as JSON with the reason", group=BODIES)

    def check_schema(self) -> None:
        """See that the flags go together.

        Raises:
            UsageError: they do not.
        """
        if self.bad_rows and self.bad_topic:
            raise UsageError("give either --bad-rows or --bad-topic")
        if not self.schema and (self.bad_rows or self.bad_topic or self.unknown_fields != "bad"):
            raise UsageError("--bad-rows, --bad-topic and --unknown-fields need --schema")


def read_schema(given: str) -> str:
    """Return the DDL, from a file if there is one of that name.

    Raises:
        OptionError: the file is too long, or no text.
    """
    path = Path(given)
    try:
        if len(given) > 1000 or not path.is_file():
            return given
        if path.stat().st_size > SCHEMA_SIZE_MAX:
            raise OptionError("schema", given, f"a file of at most {SCHEMA_SIZE_MAX} bytes", ARGUMENT)
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError("schema", given, f"a file that can be read: {error}", ARGUMENT) from error


def with_columns(frame: DataFrame, schema: str, *, drops_unknown: bool = False) -> DataFrame:
    """Add the fields of JSON bodies as columns.

    Each field is a column of its name; all of them together are the column ``data``, also those whose names a message
    has already. ``_reason`` is null where the body fits, else it says why not.

    Args:
        frame: with a column ``body``.
        schema: as DDL, ``id bigint NOT NULL, name string``, or a file with that.
        drops_unknown: fields that the schema lacks are left out; else such a body does not fit.

    Raises:
        OptionError: the schema is none.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql import functions
    from pyspark.sql.types import StructType

    ddl = read_schema(schema)
    try:
        kinds: Any = StructType.fromDDL(ddl)
    except PySparkException as error:
        line = str(error).strip().splitlines()[0]
        raise OptionError("schema", schema, f"DDL such as 'id bigint, name string': {line}", ARGUMENT) from error
    if not kinds.fields or "_corrupt" in kinds.names:
        raise OptionError("schema", schema, "at least one field, none of them _corrupt", ARGUMENT)
    wide = StructType([*kinds.fields]).add("_corrupt", "string").simpleString()
    modes = "map('mode', 'PERMISSIVE', 'columnNameOfCorruptRecord', '_corrupt')"
    parsed = frame.withColumn("_text", functions.expr("cast(body AS string)")).withColumn(
        "data", functions.expr(f"from_json(_text, {_quoted(wide)}, {modes})")
    )
    parsed = parsed.withColumn(REASON, functions.expr(_reason(kinds, drops_unknown))).drop("_text")
    parsed = parsed.withColumn("data", functions.expr("data").dropFields("_corrupt"))
    more = {name: functions.expr(f"data.`{_ticked(name)}`") for name in kinds.names if name not in frame.columns}
    return parsed.withColumns(more) if more else parsed


def _reason(kinds: Any, drops_unknown: bool) -> str:
    cases = [
        ("body IS NULL", "'the body is null'"),
        ("length(body) = 0", "'the body is empty'"),
        ("NOT is_valid_utf8(_text)", "'the body is not UTF-8'"),
        ("json_object_keys(_text) IS NULL", "concat('the body is no JSON object: ', left(_text, 80))"),
    ]
    if not drops_unknown:
        known = ", ".join(_quoted(name) for name in kinds.names)
        extra = f"array_except(json_object_keys(_text), array({known}))"
        cases.append((f"size({extra}) > 0", f"concat('unknown fields: ', array_join({extra}, ', '))"))
    for field in kinds.fields:
        place = f"get_json_object(_text, {_quoted(_path(field.name))})"
        value = f"data.`{_ticked(field.name)}`"
        kind = field.dataType.simpleString()
        what = f"concat({_quoted(f'field {field.name} is no {kind}: ')}, left({place}, 80))"
        cases.append((f"{place} IS NOT NULL AND {value} IS NULL", what))
        if not field.nullable:
            cases.append((f"{value} IS NULL", _quoted(f"field {field.name} is missing, or null")))
    cases.append(("data._corrupt IS NOT NULL", "concat('the body does not fit: ', left(_text, 80))"))
    return "CASE " + " ".join(f"WHEN {test} THEN {said}" for test, said in cases) + " END"


def _path(name: str) -> str:
    return f"$['{name}']" if not name.isidentifier() else f"$.{name}"


def _ticked(name: str) -> str:
    return name.replace("`", "``")


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
