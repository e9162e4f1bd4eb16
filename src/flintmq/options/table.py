"""One table of options per program: a frozen dataclass whose fields are :func:`option` rows.

The rules of this file:

- A row is the only place that knows an option's name, kind, default, bounds and meaning. Flags, TOML keys, environment
  variables, ``--help``, the reference page and the example file are derived from it.
- The attribute is NSQ's flag with underscores; a duration is int nanoseconds and its attribute ends in ``_ns``.
- An option whose feature is not built yet is in the table with ``implemented=False``: anything but its default is
  refused, never silently accepted.
- Constructing the dataclass checks everything, so a wrong options object cannot exist.

Source: NSQ's options.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from flintmq.errors import OptionError
from flintmq.options.kinds import Duration, Kind, NsqRefusal

Origin = Literal["nsq", "youzan", "flintmq"]
_NOT_YET = "this version does not support it yet; leave it out"


class StartRefused(OptionError):
    """NSQ refuses it too when it starts; the text begins with NSQ's words, which scripts look for."""

    def __str__(self) -> str:
        return f"{self.allowed} ({self.source}: {self.given})"


def refused(option: str, value: object, error: ValueError, source: str) -> OptionError:
    """Return the error for a value that a kind refused; the arguments are OptionError's."""
    shown = "None" if value is None else value  # OptionError takes None for an unknown name
    return (StartRefused if isinstance(error, NsqRefusal) else OptionError)(option, shown, str(error), source)


@dataclass(frozen=True)
class Row:
    """Everything there is to know about one option.

    Attributes:
        attribute: its name in the dataclass.
        kind: how its value is read, checked and written.
        help: what it does, as a phrase without a full stop at its end.
        group: heading it stands under.
        origin: who invented it.
        key: its name in a TOML file.
        default_text: what stands for the default in documentation when the value itself says too little.
        implemented: whether anything but the default may be set.
        accepted: further values that may be set although it is not implemented, because they ask for nothing.
        deprecated: accepted for old scripts, without effect, not shown.
        hidden: obeyed and not shown: by itself it is of no use to anybody yet.
    """

    attribute: str
    kind: Kind
    default: Any
    help: str
    group: str
    origin: Origin
    key: str
    default_text: str
    implemented: bool
    accepted: tuple[Any, ...]
    deprecated: bool
    hidden: bool

    @property
    def flag(self) -> str:
        """The flag without its dashes."""
        return flag_of(self.attribute, self.kind)

    @property
    def keys(self) -> tuple[str, ...]:
        """Every name a TOML file may use, the official one first."""
        regular = self.flag.replace("-", "_")
        return (self.key,) if self.key == regular else (self.key, regular)

    def variable(self, program: str) -> str:
        """Return the environment variable of this option in ``program``."""
        return variable_prefix(program) + self.flag.replace("-", "_").upper()

    def show_default(self) -> str:
        """Return the default as documentation shows it."""
        return self.default_text or self.kind.show(self.default)

    def check(self, value: Any) -> None:
        """Raise ValueError unless ``value`` may be used in this version."""
        if value is None and self.default is None:
            return
        self.kind.check(value)
        if not self.implemented and value != self.default and value not in self.accepted:
            raise ValueError(_NOT_YET)


def option(
    kind: Kind,
    default: Any,
    help: str,  # noqa: A002 - the word everybody uses for it
    *,
    group: str,
    origin: Origin = "nsq",
    key: str = "",
    default_text: str = "",
    implemented: bool = True,
    accepted: tuple[Any, ...] = (),
    deprecated: bool = False,
    hidden: bool = False,
) -> Any:
    """Return a dataclass field that is one row of the table; the arguments are :class:`Row`'s."""
    row = {
        "kind": kind,
        "help": help,
        "group": group,
        "origin": origin,
        "key": key,
        "default_text": default_text,
        "implemented": implemented,
        "accepted": accepted,
        "deprecated": deprecated,
        "hidden": hidden,
    }
    return dataclasses.field(default=default, metadata={"row": row})


@dataclass(frozen=True, kw_only=True)
class Options:
    """Parent of the tables.

    Attributes:
        program: the command, which is also the name in environment variables.
        summary: one sentence for ``--help``.
        last_groups: headings that stand behind all others, in this order; for rows that tables have in common.
    """

    program: ClassVar[str]
    summary: ClassVar[str]
    last_groups: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for row in rows(type(self)):
            value = getattr(self, row.attribute)
            try:
                row.check(value)
            except ValueError as error:
                raise refused(row.attribute, value, error, "argument") from None
        self.check_together()

    def check_together(self) -> None:
        """Check what concerns more than one option.

        Raises:
            OptionError: its ``option`` is the attribute to blame.
        """

    def replace(self, **changes: Any) -> Self:
        """Return a checked copy with ``changes``."""
        return dataclasses.replace(self, **changes)


_MADE: dict[type[Options], tuple[Row, ...]] = {}  # a start asks for them seven times


def rows(table: type[Options]) -> tuple[Row, ...]:
    """Return the rows of a table in their order."""
    made = _MADE.get(table)
    if made is None:
        last = {group: place for place, group in enumerate(table.last_groups, 1)}
        made = tuple(sorted(map(_row_of, dataclasses.fields(table)), key=lambda row: last.get(row.group, 0)))
        _MADE[table] = made
    return made


def flag_of(attribute: str, kind: Kind) -> str:
    """Return the flag of an attribute: ``msg_timeout_ns`` is ``msg-timeout``."""
    name = attribute.removesuffix("_ns") if isinstance(kind, Duration) else attribute
    return name.replace("_", "-")


def variable_prefix(program: str) -> str:
    """Return what the environment variables of ``program`` start with: ``FLINTMQ_PIPELINE_ARCHIVE_``."""
    return f"FLINTMQ_{program.removeprefix('flintmq ').upper().replace(' ', '_')}_"


def _row_of(field: dataclasses.Field[Any]) -> Row:
    row: Mapping[str, Any] = field.metadata["row"]
    kind: Kind = row["kind"]
    assert field.name.endswith("_ns") == isinstance(kind, Duration), f"{field.name}: durations end in _ns"
    key = row["key"] or flag_of(field.name, kind).replace("-", "_")
    return Row(attribute=field.name, default=field.default, **{**row, "key": key})
