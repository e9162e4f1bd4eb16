"""The kinds of value an option can have, each with its spelling as a flag, in a TOML file and in the documentation.

The rules of this file: a kind turns text (flag, environment) or a TOML value into the value the program uses, and
checks it; what is wrong is said by ``ValueError`` in words that follow "x is not allowed;". A kind knows neither names
nor sources. Source: NSQ's options.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from flintmq.options.durations import MILLISECOND, format_duration, parse_duration_ns

_TRUE = frozenset(("1", "t", "T", "TRUE", "true", "True"))  # what Go's strconv.ParseBool takes
_FALSE = frozenset(("0", "f", "F", "FALSE", "false", "False"))
LIST_LENGTH_MAX = 1024
_GO_NUMBER = re.compile(r"[-+]?[0-9][0-9A-Za-z_]{0,79}")  # int() takes spaces and other digits as well
_GO_OCTAL = re.compile(r"([-+]?)0([0-7_]+)")


class NsqRefusal(ValueError):
    """Something that NSQ refuses as well, in its words."""


class Kind(Protocol):
    """A kind of value: how it is read, checked and written."""

    @property
    def placeholder(self) -> str:
        """The word for the value in ``--help``; empty when a bare flag is enough."""
        ...

    @property
    def bare(self) -> str | None:
        """The text a flag without a value stands for; None when it needs one."""
        ...

    @property
    def is_list(self) -> bool:
        """Whether repeated flags add up."""
        ...

    def from_text(self, text: str) -> Any:
        """Read a flag or an environment variable."""
        ...

    def from_file(self, raw: object) -> Any:
        """Read a value of a TOML file."""
        ...

    def check(self, value: Any) -> None:
        """Raise ValueError unless ``value`` may be used."""
        ...

    def show(self, value: Any) -> str:
        """Spell ``value`` as a flag would."""
        ...

    def toml(self, value: Any) -> str:
        """Spell ``value`` as in a TOML file."""
        ...

    def allowed(self) -> str:
        """Say in a few words what is accepted; empty when everything is."""
        ...


@dataclass(frozen=True)
class _Scalar:
    """The common part of the kinds with one value."""

    @property
    def placeholder(self) -> str:
        return "TEXT"

    @property
    def bare(self) -> str | None:
        return None

    @property
    def is_list(self) -> bool:
        return False

    def from_text(self, text: str) -> Any:
        return text

    def from_file(self, raw: object) -> Any:
        if not isinstance(raw, str):
            raise ValueError('it must be text in quotes: "..."')
        return self.from_text(raw)

    def check(self, value: Any) -> None:
        if not isinstance(value, str):
            raise ValueError("it must be text")

    def show(self, value: Any) -> str:
        return str(value)

    def toml(self, value: Any) -> str:
        return toml_text(self.show(value))

    def allowed(self) -> str:
        return ""


@dataclass(frozen=True)
class Switch(_Scalar):
    """true or false; ``--x`` alone is true."""

    placeholder = ""
    bare = "true"

    def from_text(self, text: str) -> bool:
        if text in _TRUE:
            return True
        if text in _FALSE:
            return False
        raise ValueError("it must be true or false")

    def from_file(self, raw: object) -> bool:
        return raw if isinstance(raw, bool) else self.from_text(str(raw))

    def check(self, value: Any) -> None:
        if not isinstance(value, bool):
            raise ValueError("it must be true or false")

    def show(self, value: Any) -> str:
        return "true" if value else "false"

    def toml(self, value: Any) -> str:
        return self.show(value)

    def allowed(self) -> str:
        return "true, false"


@dataclass(frozen=True)
class Text(_Scalar):
    """Any text."""

    placeholder_text: str = "TEXT"

    @property
    def placeholder(self) -> str:
        return self.placeholder_text


@dataclass(frozen=True)
class Choice(_Scalar):
    """One of a few words, case ignored.

    Args:
        choices: the words as the program uses them.
        aliases: further spellings and the word each stands for.
        bare_word: what the flag without a value means; None when it needs one.
        refusal: NSQ's own words for a bad value, where it has them.
    """

    choices: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    bare_word: str | None = None
    refusal: str = ""

    @property
    def placeholder(self) -> str:
        return "|".join(choice for choice in self.choices if choice)

    @property
    def bare(self) -> str | None:
        return self.bare_word

    def from_text(self, text: str) -> str:
        word = text.lower()
        return self.aliases.get(word, word)

    def from_file(self, raw: object) -> str:
        """Read a word, or a true, false, 1 or 0 without quotes, where it is one of the words."""
        word = str(raw).lower() if isinstance(raw, bool | int) else ""
        is_word = isinstance(raw, bool) or word in self.choices or word in self.aliases
        return self.from_text(word if word and is_word else super().from_file(raw))

    def check(self, value: Any) -> None:
        if value not in self.choices:
            raise _refusal(self.refusal, f"it must be one of: {self.allowed()}")

    def allowed(self) -> str:
        return ", ".join(choice or '""' for choice in self.choices)


@dataclass(frozen=True)
class Integer(_Scalar):
    """A whole number of ``unit`` from ``minimum`` to ``maximum``, both included."""

    minimum: int | None = None
    maximum: int | None = None
    unit: str = ""
    refusal: str = ""

    @property
    def placeholder(self) -> str:
        return self.unit.upper() or "N"

    def from_text(self, text: str) -> int:
        """Read a number as Go writes it: 1000, 1_000, 0x3e8, 0o1750, 0b11, and 01750, which is octal."""
        octal = _GO_OCTAL.fullmatch(text)
        try:
            value = int(f"{octal[1]}0o{octal[2]}" if octal else text, 0)
        except ValueError:
            value = None
        if value is None or not _GO_NUMBER.fullmatch(text) or not -(2**63) <= value < 2**63:
            raise ValueError("it must be a whole number")
        return value

    def from_file(self, raw: object) -> int:
        if isinstance(raw, int) and not isinstance(raw, bool):
            return raw
        if not isinstance(raw, str) or not re.fullmatch(r"[-+]?[0-9]{1,19}", raw):
            raise ValueError("it must be a whole number")
        return int(raw)

    def check(self, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError("it must be a whole number")
        if not _is_between(value, self.minimum, self.maximum):
            raise _refusal(self.refusal, f"it must be {self.allowed()}")

    def toml(self, value: Any) -> str:
        return str(value)

    def allowed(self) -> str:
        return _range_text(self.minimum, self.maximum, str)


@dataclass(frozen=True)
class Duration(_Scalar):
    """A length of time; text in Go's spelling outside, int nanoseconds inside."""

    minimum_ns: int | None = 0
    maximum_ns: int | None = None
    placeholder = "DURATION"

    def from_text(self, text: str) -> int:
        return parse_duration_ns(text)

    def from_file(self, raw: object) -> int:
        """Read text in Go's spelling, or an integer, which means milliseconds in NSQ's files."""
        if isinstance(raw, int) and not isinstance(raw, bool):
            return raw * MILLISECOND
        if not isinstance(raw, str):
            raise ValueError('it must be a duration in quotes, such as "2s", or a whole number of milliseconds')
        return self.from_text(raw)

    def check(self, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError("it must be a whole number of nanoseconds")
        if not _is_between(value, self.minimum_ns, self.maximum_ns):
            raise ValueError(f"it must be {self.allowed()}")

    def show(self, value: Any) -> str:
        return format_duration(value)

    def allowed(self) -> str:
        return _range_text(self.minimum_ns, self.maximum_ns, format_duration)


@dataclass(frozen=True)
class Address(_Scalar):
    """``host:port``; an empty host listens everywhere, port 0 takes a free one.

    Args:
        may_be_empty: whether "" turns the listener off.
        to_connect: the address of somebody else: host and port must be there.
        may_be_path: whether the path of a unix socket will do; it is told by its slash, and is no URL.
    """

    may_be_empty: bool = False
    to_connect: bool = False
    may_be_path: bool = False
    placeholder = "HOST:PORT"

    def check(self, value: Any) -> None:
        super().check(value)
        if not value and self.may_be_empty:
            return
        if self.may_be_path and "/" in value and "://" not in value:
            return
        host, port = _split_address(value)
        if self.to_connect and not (host and port):
            raise ValueError("it must name a host and a port, such as 127.0.0.1:4160")

    def allowed(self) -> str:
        forms = ["host:port"]
        if self.may_be_path:
            forms.append("the path of a unix socket, with a /")
        if self.may_be_empty:
            forms.append('""')
        return " or ".join(forms)


@dataclass(frozen=True)
class Items:
    """A list: repeated flags, a comma list, or a TOML array; a tuple inside."""

    item: Address | Text | Number | Choice
    bare: None = None
    is_list: bool = True

    @property
    def placeholder(self) -> str:
        return self.item.placeholder

    def from_text(self, text: str) -> tuple[Any, ...]:
        return tuple(self.item.from_text(part.strip()) for part in text.split(",")) if text else ()

    def from_file(self, raw: object) -> tuple[Any, ...]:
        if isinstance(raw, list):
            for part in raw:
                if isinstance(part, str) and "," in part and isinstance(self.item, Address):
                    shown = ", ".join(toml_text(each.strip()) for each in part.split(",", 3)[:3])
                    raise ValueError(f"a comma stands inside the quotes; entries are quoted one by one: [{shown}]")
            return tuple(self.item.from_file(part) for part in raw)
        if not isinstance(raw, str):
            raise ValueError('it must be an array, such as ["a", "b"], or a comma list in quotes')
        return self.from_text(raw)

    def check(self, value: Any) -> None:
        if not isinstance(value, tuple):
            raise ValueError("it must be a tuple")
        if len(value) > LIST_LENGTH_MAX:
            raise ValueError(f"it has {len(value)} entries, at most {LIST_LENGTH_MAX} are allowed")
        for part in value:
            self.item.check(part)

    def show(self, value: Any) -> str:
        return ",".join(self.item.show(part) for part in value)

    def toml(self, value: Any) -> str:
        return "[" + ", ".join(self.item.toml(part) for part in value) + "]"

    def allowed(self) -> str:
        return self.item.allowed()


@dataclass(frozen=True)
class Repeated(Items):
    """A list whose flag gives one item at a time, commas and all; a TOML array in a file."""

    def from_text(self, text: str) -> tuple[Any, ...]:
        return (self.item.from_text(text),)

    def show(self, value: Any) -> str:
        return " ".join(self.item.show(part) for part in value)


@dataclass(frozen=True)
class Number(_Scalar):
    """A decimal number, above ``above`` and up to ``maximum``.

    Args:
        refusal: NSQ's own words for a bad value; the value follows.
    """

    above: float
    maximum: float
    refusal: str
    placeholder = "NUMBER"

    def from_text(self, text: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise NsqRefusal(f"{self.refusal}: {text}") from None

    def from_file(self, raw: object) -> float:
        if isinstance(raw, bool) or not isinstance(raw, int | float | str):
            raise NsqRefusal(f"{self.refusal}: {raw}")
        return self.from_text(raw) if isinstance(raw, str) else float(raw)

    def check(self, value: Any) -> None:
        if not isinstance(value, float) or not self.above < value <= self.maximum:
            raise NsqRefusal(f"{self.refusal}: {value} (more than {self.above:g}, at most {self.maximum:g})")

    def toml(self, value: Any) -> str:
        return self.show(value)

    def allowed(self) -> str:
        return f"more than {self.above:g}, at most {self.maximum:g}"


def _split_address(text: str) -> tuple[str, int]:
    """Split ``host:port`` or ``[ipv6]:port``; the host may be empty.

    Raises:
        ValueError: it has no port, or the port is not 0..65535.
    """
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif "://" in text:
        raise ValueError("it must be host:port, without http:// or the like")
    elif ":" in host:
        raise ValueError("an IPv6 address goes in brackets, such as [::1]:4150")
    if not colon or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError("it must be host:port, such as 127.0.0.1:4150 or :4150, with a port from 0 to 65535")
    return host, int(port)


def toml_text(text: str) -> str:
    """Quote ``text`` as a TOML basic string."""
    import json  # for those who ask for their configuration

    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _is_between(value: int, minimum: int | None, maximum: int | None) -> bool:
    return (minimum is None or value >= minimum) and (maximum is None or value <= maximum)


def _refusal(nsq_words: str, our_words: str) -> ValueError:
    return NsqRefusal(nsq_words) if nsq_words else ValueError(our_words)


def _range_text(minimum: int | None, maximum: int | None, show: Callable[[int], str]) -> str:
    if minimum is None:
        return "" if maximum is None else f"at most {show(maximum)}"
    return f"at least {show(minimum)}" if maximum is None else f"from {show(minimum)} to {show(maximum)}"
