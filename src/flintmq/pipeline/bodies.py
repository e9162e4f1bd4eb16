"""JSON bodies as columns, and what becomes of those that do not fit.

The rules of this file: a body fits a schema wholly or not at all; why it does not is said in words, with the field; it
is never left out in silence; no field takes the place of a column that the message has, or a job needs.

Spark's ``from_json`` makes the columns, but what it is given it makes the best of: it stops behind the first value,
takes text for numbers, rounds decimals, leaves out nested fields. So whether a body fits is seen from the type of the
body itself, as a VARIANT, which knows strict JSON alone: ``OBJECT<at: OBJECT<x: DOUBLE>, id: BIGINT>``, in which the
schema is looked for as a regular expression.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
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
DATA = "data"
ANY_DEPTH = 32
SHOWN = 80
DIGITS_MAX = 1000
DEPTH_MAX = 1000
"""Limits of the JSON that Spark reads: of the digits of a number, and of nesting."""

_STRING = r'"(?:[^"\\]++|\\.)*+"'
_NUMBER = r"-?\d++(?:\.\d++)?+(?:[eE][+-]?\d++)?+"
_TOO_LONG = r"^-?(?:[1-9](?:\.?\d){38,}+|\d++\.\d{39,}+)$"  # for a decimal, of which a VARIANT makes a double
_MAYBE_DOUBLE = r"\b(?:DOUBLE|VARIANT)\b"  # VARIANT: an array's whose values differ in type
_DATELESS = r"^\s*T?\d{1,2}:"  # Spark would take the day on which it reads
_KEY = "(?:[A-Za-z0-9_]++|`(?:[^`]|``)*+`)"
_WHOLE = ("byte", "short", "integer", "long")
_BEYOND = (
    f"the body is no JSON object, or has a number of more than {DIGITS_MAX} digits or nests {DEPTH_MAX} deep, "
    "which Spark does not read: "
)
_POINTED = (
    r"^DECIMAL\((?:[0-9]|1[0-8]), ?0\)$"  # the type of 1.0, which a VARIANT shows as 1; that of a plain 1 is BIGINT
)


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


def unused(name: str, taken: Collection[str]) -> str:
    """Return the name of a column that a job adds, with underscores before it while there is one of that name.

    Args:
        taken: names in any case, as Spark does not tell them apart by it.
    """
    lower = {each.lower() for each in taken}
    while name.lower() in lower:
        name = f"_{name}"
    return name


def ticked(name: str) -> str:
    """Return a name as an identifier of SQL, whatever it has in it."""
    return "`" + name.replace("`", "``") + "`"


def quoted(text: str) -> str:
    """Return text as a literal of SQL."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def read_schema(given: str) -> str:
    """Return the DDL, from a file if there is one of that name.

    Raises:
        OptionError: the file is too long, or no text.
    """
    path = Path(given)
    try:
        if not os.path.isfile(given):  # unlike Path.is_file it takes DDL that is too long for a name
            return given
        if path.stat().st_size > SCHEMA_SIZE_MAX:
            raise OptionError("schema", given, f"a file of at most {SCHEMA_SIZE_MAX} bytes", ARGUMENT)
        return path.read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError("schema", given, f"a file that can be read: {error}", ARGUMENT) from error


def with_columns(frame: DataFrame, schema: str, *, drops_unknown: bool = False) -> DataFrame:
    """Add the fields of JSON bodies as columns.

    Each field is a column of its name; all of them together are the column ``data``, also those whose names a message
    has already, in whatever case. ``_reason`` is null where the body fits, else it says why not.

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
    if not kinds.fields:
        raise OptionError("schema", schema, "at least one field", ARGUMENT)
    for names in names_of_structs(kinds):
        if len({name.lower() for name in names}) < len(names):
            allowed = f"fields whose names differ in more than case: {', '.join(names)}"
            raise OptionError("schema", schema, allowed, ARGUMENT)
    corrupt = unused("_corrupt", kinds.names)
    taken = [*frame.columns, DATA, REASON]
    text, whole, shape, numbers, times = (
        unused(name, taken) for name in ("_text", "_whole", "_shape", "_numbers", "_times")
    )
    how = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": corrupt, "dateFormat": "yyyy-MM-dd"}
    loose = _loose(kinds, is_wide=True)
    wide = StructType([*loose.fields]).add(corrupt, "string")
    parsed = (
        frame.withColumn(text, functions.expr("cast(body AS string)"))
        .withColumn(DATA, functions.from_json(functions.col(text), wide, how))
        .withColumn(whole, functions.expr(f"try_parse_json(concat('{{\"b\":', {text}, '}}'))"))
        .withColumn(shape, functions.expr(f"schema_of_variant({whole})"))
    )
    refused = list(_unkept(kinds, DATA, numbers, "", 0))
    if refused:
        parsed = parsed.withColumn(numbers, functions.expr(_numbers_beyond(text)))
    if (part := _times(kinds)) is not None:
        parsed = parsed.withColumn(times, functions.from_json(functions.col(text), part))
        refused += _dateless(kinds, times, "", 0)
    reason = _Reason(kinds, drops_unknown, text, whole, shape, corrupt, refused).sql()
    parsed = parsed.withColumn(REASON, functions.expr(reason)).drop(text, whole, shape, numbers, times)
    data, kind = functions.col(DATA).dropFields(corrupt), _loose(kinds, is_wide=False)
    parsed = parsed.withColumn(DATA, data if loose == kind else data.try_cast(kind))
    there = {name.lower() for name in taken}
    more = {name: functions.expr(f"{DATA}.{ticked(name)}") for name in kinds.names if name.lower() not in there}
    return parsed.select("*", *(column.alias(name) for name, column in more.items())) if more else parsed


def names_of_structs(kind: Any) -> Iterator[Sequence[str]]:
    """Yield the names of the fields of each struct in a type."""
    if kind.typeName() == "struct":
        yield kind.names
        for field in kind.fields:
            yield from names_of_structs(field.dataType)
    elif kind.typeName() == "array":
        yield from names_of_structs(kind.elementType)
    elif kind.typeName() == "map":
        yield from names_of_structs(kind.valueType)


def _loose(kind: Any, *, is_wide: bool) -> Any:
    """Return a type in which everything may be null, as from_json has it.

    Args:
        is_wide: with smallint for tinyint, as from_json takes 255 for a tinyint, and makes -1 of it.
    """
    from pyspark.sql import types

    name = kind.typeName()
    if name == "struct":
        fields = [types.StructField(field.name, _loose(field.dataType, is_wide=is_wide)) for field in kind.fields]
        return types.StructType(fields)
    if name == "array":
        return types.ArrayType(_loose(kind.elementType, is_wide=is_wide))
    if name == "map":
        return types.MapType(kind.keyType, _loose(kind.valueType, is_wide=is_wide))
    return types.ShortType() if is_wide and isinstance(kind, types.ByteType) else kind


@dataclass(frozen=True, slots=True)
class _Reason:
    """Why a body does not fit, as an expression of SQL; what fits is seen first, so that it costs no more than that.

    Attributes:
        text, whole, shape: columns: the body; ``{"b": body}`` as a VARIANT, null if that is no strict JSON; its type.
        corrupt: the field of ``data`` that is null where all values are in the range of their types.
        refused: cases of values that Spark takes and a body may not have.
    """

    kinds: Any
    drops_unknown: bool
    text: str
    whole: str
    shape: str
    corrupt: str
    refused: Sequence[tuple[str, str]]

    def sql(self) -> str:
        """Return the expression."""
        # The braces around the body end at its own where something follows it that has one more, and brackets where it
        # has one of these: who gets by both is one value and nothing else.
        is_one = f"json_array_length(concat('[', {self.text}, ']')) = 1"
        broken = [*_broken(self.kinds, DATA, "", 0), *self.refused]
        fits = [
            f"is_valid_utf8({self.text})",
            f"{self.shape} RLIKE {quoted(f'^OBJECT<b: {self._shape_of(self.kinds)}>$')}",
            is_one,
            f"{DATA}.{self.corrupt} IS NULL",
            *(f"NOT ({test})" for test, _ in broken),
        ]
        start = f"left({self.text}, {SHOWN})"
        cases = [
            (" AND ".join(fits), "NULL"),
            ("body IS NULL", "'the body is null'"),
            ("length(body) = 0", "'the body is empty'"),
            (f"NOT is_valid_utf8({self.text})", "'the body is not UTF-8'"),
            (f"json_object_keys({self.text}) IS NULL AND {self._is_beyond()}",
             f"concat({quoted(_BEYOND)}, {start})"),
            (f"json_object_keys({self.text}) IS NULL", f"concat('the body is no JSON object: ', {start})"),
            (
                f"try_parse_json({self.text}) IS NULL",
                f"concat('the body is no strict JSON, or has a name twice: ', {start})",
            ),
            (f"{self.whole} IS NULL OR NOT coalesce({is_one}, false)",
             f"concat('the body is more than one JSON object: ', {start})"),
        ]  # fmt: skip
        fields = f"try_variant_get({self.whole}, '$.b', 'map<string,variant>')"
        if not self.drops_unknown:
            extra = f"concat({', '.join(_unknown(self.kinds, fields, ''))})"
            cases.append((f"size({extra}) > 0", f"concat('unknown fields: ', array_join({extra}, ', '))"))
        cases += self._misfits(self.kinds, fields, DATA, "")
        out = f"concat('the body has a value out of the range of its type: ', {start})"  # within an array or a map
        cases.append((f"{DATA}.{self.corrupt} IS NOT NULL", out))
        cases += broken
        cases.append(("true", f"concat('the body does not fit: ', {start})"))
        return "CASE " + " ".join(f"WHEN {test} THEN {said}" for test, said in cases) + " END"

    def _is_beyond(self) -> str:
        """Return whether a body may be JSON that is beyond what Spark reads; a string in it may look like that."""
        opening = f"length({self.text}) - length(translate({self.text}, {quoted('[{')}, ''))"
        return f"({self.text} RLIKE {quoted(f'[0-9.]{{{DIGITS_MAX},}}')} OR {opening} >= {DEPTH_MAX - 2})"

    def _misfits(self, kinds: Any, fields: str, data: str, path: str) -> Iterator[tuple[str, str]]:
        """Yield the cases of fields that are of another type, or out of its range; what is within comes first."""
        for field in kinds.fields:
            value, kind = f"try_element_at({fields}, {quoted(field.name)})", field.dataType
            place, name = f"{data}.{ticked(field.name)}", f"{path}{field.name}"
            if kind.typeName() == "struct":
                within = f"try_variant_get({value}, '$', 'map<string,variant>')"
                yield from self._misfits(kind, within, place, f"{name}.")
            shown = f"left({_told(value)}, {SHOWN})"
            if kind.typeName() in _WHOLE:
                shown += f", if(schema_of_variant({value}) RLIKE {quoted(_POINTED)}, ', written with a point', '')"
            told = f"concat({quoted(f'field {name} is no {kind.simpleString()}: ')}, {shown})"
            is_other = f"NOT schema_of_variant({value}) RLIKE {quoted(f'^{self._shape_of(kind)}$')}"
            yield f"{is_other} OR (schema_of_variant({value}) <> 'VOID' AND {place} IS NULL)", told

    def _shape_of(self, kind: Any) -> str:
        """Return the regular expression of the types that JSON may have for a type of the schema.

        Repetitions are possessive: Java goes through these in a loop, and through others in a recursion, which a map
        of some thousand keys would end.
        """
        name = kind.typeName()
        if name == "variant":
            return _any(ANY_DEPTH)
        if name == "struct":
            keys = [f"{_shape_of_name(field.name)}: " for field in kind.fields]
            parts = [key + self._shape_of(field.dataType) for key, field in zip(keys, kind.fields, strict=True)]
            if self.drops_unknown:
                known = f"(?!{'|'.join(keys)})" if keys else ""
                parts.append(f"{known}{_KEY}: {_any(ANY_DEPTH)}")
            found = f"OBJECT<(?:(?:{'|'.join(parts)})(?:, |(?=>)))*+>" if parts else "OBJECT<>"
        elif name == "array":
            found = f"ARRAY<{self._shape_of(kind.elementType)}>"
        elif name == "map":
            found = f"OBJECT<(?:{_KEY}: {self._shape_of(kind.valueType)}(?:, |(?=>)))*+>"
        elif name == "decimal":
            scales = "|".join(str(scale) for scale in range(kind.scale + 1))
            found = rf"BIGINT|DECIMAL\(\d+, ?(?:{scales})\)"
        elif name in ("float", "double"):
            found = r"BIGINT|DOUBLE|DECIMAL\(\d+, ?\d+\)"
        elif name in _WHOLE:
            found = r"BIGINT"
        elif name == "boolean":
            found = "BOOLEAN"
        else:
            found = "STRING"  # of which from_json makes dates, times, bytes
        return f"(?:VOID|{found})"


def _any(depth: int) -> str:
    """Return the regular expression of any type of JSON, as deep as that: one for all depths Java has not."""
    found = r"[A-Z]++(?:\(\d+, ?\d+\))?+"
    for _ in range(depth):
        found = rf"(?:(?:ARRAY|OBJECT)<(?:(?:{_KEY}: )?+{found}(?:, |(?=>)))*+>|[A-Z]++(?:\(\d+, ?\d+\))?+)"
    return found


def _shape_of_name(name: str) -> str:
    """Return the regular expression of a field's name as Spark writes it in a type."""
    plain = "".join(
        letter if letter.isascii() and (letter.isalnum() or letter == "_") else f"\\x{{{ord(letter):x}}}"
        for letter in name.replace("`", "``")
    )
    return f"`?+{plain}`?+" if re.fullmatch("[A-Za-z0-9_]+", name) else f"`{plain}`"


def _unknown(kinds: Any, fields: str, path: str) -> Iterator[str]:
    """Yield arrays of the names that a struct, and those within, lack."""
    known = f"cast(array({', '.join(quoted(name) for name in kinds.names)}) AS array<string>)"
    extra = f"array_except(map_keys({fields}), {known})"
    yield f"coalesce(transform({extra}, _name -> concat({quoted(path)}, _name)), array())"
    for field in kinds.fields:
        if field.dataType.typeName() == "struct":
            within = f"try_variant_get(try_element_at({fields}, {quoted(field.name)}), '$', 'map<string,variant>')"
            yield from _unknown(field.dataType, within, f"{path}{field.name}.")


def _broken(kind: Any, data: str, path: str, depth: int) -> Iterator[tuple[str, str]]:
    """Yield the cases of values that are missing, and of numbers that are out of range, at any depth."""
    name = kind.typeName()
    if name == "struct":
        for field in kind.fields:
            place, within = f"{data}.{ticked(field.name)}", f"{path}.{field.name}".removeprefix(".")
            if not field.nullable:
                said = quoted(f"field {within} is missing, or null")
                yield f"{data} IS NOT NULL AND {place} IS NULL" if path else f"{place} IS NULL", said
            yield from _broken(field.dataType, place, within, depth)
    elif name in ("array", "map"):
        values = data if name == "array" else f"map_values({data})"
        inner = kind.elementType if name == "array" else kind.valueType
        for test, said in _broken(inner, f"_each{depth}", f"{path}[]", depth + 1):
            yield f"coalesce(exists({values}, _each{depth} -> {test}), false)", said
    elif name in ("float", "double", "byte"):
        beyond = f"NOT {data} BETWEEN -128 AND 127" if name == "byte" else f"abs({data}) = double('Infinity')"
        said = quoted(f"field {path} is no {kind.simpleString()}: it is out of its range")
        yield f"coalesce({beyond}, false)", said


def _numbers_beyond(text: str) -> str:
    """Return the numbers of JSON that a VARIANT does not keep, as an array: it has decimals of 38 digits, and doubles.

    One with an exponent becomes the nearest double, as in a column of that type, and has to be in its range.
    """
    bare = f"regexp_replace({text}, {quoted(_STRING)}, '_')"
    is_beyond = f"_n RLIKE {quoted(_TOO_LONG)} OR abs(try_cast(_n AS double)) = double('Infinity')"
    return f"filter(regexp_extract_all({bare}, {quoted(_NUMBER)}, 0), _n -> {is_beyond})"


def _times(kind: Any) -> Any:
    """Return the type with which from_json gives timestamps as the texts that they are; None: there is none."""
    from pyspark.sql import types

    name = kind.typeName()
    if name == "timestamp":
        return types.StringType()
    if name == "struct":
        parts = [(field.name, _times(field.dataType)) for field in kind.fields]
        fields = [types.StructField(name, part) for name, part in parts if part is not None]
        return types.StructType(fields) if fields else None
    if name == "array" and (part := _times(kind.elementType)) is not None:
        return types.ArrayType(part)
    if name == "map" and (part := _times(kind.valueType)) is not None:
        return types.MapType(kind.keyType, part)
    return None


def _dateless(kind: Any, text: str, path: str, depth: int) -> Iterator[tuple[str, str]]:
    """Yield the cases of timestamps without a date, at any depth; ``text`` has them as :func:`_times` says."""
    name = kind.typeName()
    if name == "timestamp":
        said = f"concat({quoted(f'field {path} is no {name}: it has no date: ')}, left({text}, {SHOWN}))"
        yield f"coalesce({text} RLIKE {quoted(_DATELESS)}, false)", said
    elif name == "struct":
        for field in kind.fields:
            within = f"{path}.{field.name}".removeprefix(".")
            yield from _dateless(field.dataType, f"{text}.{ticked(field.name)}", within, depth)
    elif name in ("array", "map"):
        inner, values = (kind.elementType, text) if name == "array" else (kind.valueType, f"map_values({text})")
        for test, _ in _dateless(inner, f"_each{depth}", f"{path}[]", depth + 1):
            said = quoted(f"field {path} is no {kind.simpleString()}: a timestamp in it has no date")
            yield f"coalesce(exists({values}, _each{depth} -> {test}), false)", said


def _unkept(kind: Any, data: str, numbers: str, path: str, depth: int) -> Iterator[tuple[str, str]]:
    """Yield the cases of variants that have a double, in bodies with a number of which one would keep too little.

    Nobody but the body tells what a double of a variant was written as, so it may have been another number's fault.
    """
    name = kind.typeName()
    if name == "variant":
        has_double = f"schema_of_variant({data}) RLIKE {quoted(_MAYBE_DOUBLE)}"
        said = (
            f"concat({quoted(f'field {path} is no {name}: it cannot hold the number ')}, left({numbers}[0], {SHOWN}))"
        )
        yield f"coalesce(size({numbers}) > 0 AND {has_double}, false)", said
    elif name == "struct":
        for field in kind.fields:
            within = f"{path}.{field.name}".removeprefix(".")
            yield from _unkept(field.dataType, f"{data}.{ticked(field.name)}", numbers, within, depth)
    elif name in ("array", "map"):
        inner, values = (kind.elementType, data) if name == "array" else (kind.valueType, f"map_values({data})")
        for test, said in _unkept(inner, f"_each{depth}", numbers, f"{path}[]", depth + 1):
            yield f"coalesce(exists({values}, _each{depth} -> {test}), false)", said


def _told(value: str) -> str:
    return f"try_variant_get({value}, '$', 'string')"
