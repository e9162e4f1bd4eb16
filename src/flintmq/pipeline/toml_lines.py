"""Finds the lines of the keys of a TOML document, which ``tomllib`` does not tell.

The rules of this file: a document that ``tomllib`` has read is looked at, so nothing is checked here; names are as they
are meant, however they are quoted; a line ends where TOML ends it, at a line feed alone.

Source: TOML 1.0, https://toml.io/en/v1.0.0.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator

KeyPath = tuple[str | int, ...]

# strings first: what looks like a comment, a table or a key within them is none
_TOKEN = re.compile(
    r'''
    """(?:[^"\\]|\\.|"(?!""))*+"{3,5}     # up to two quotes stand before the three that end it
    | \'\'\'(?:[^']|'(?!\'\'))*+'{3,5}
    | "(?:[^"\\\n]|\\.)*+"
    | '[^'\n]*'
    | \#[^\n]* | [ \t\r]+                 # comments and blanks
    | [][{}=,.\n]
    | [^][{}=,.\n \t\r"'\#]+              # names, and what is no string
    ''',
    re.VERBOSE | re.DOTALL,
)
_END = ""


def lines_of_keys(text: str, depth: int) -> dict[KeyPath, int]:
    """Return the line, from 1, of each table and key, by the names that lead to it from the top.

    Elements of arrays are numbered from 0: ``("sink", 0, "options", "path")``. Those that are no tables are left out.
    A table has the line of its header or brace, an array of tables that of the first of them, and a table that has
    neither that of the first key that makes it.

    Args:
        text: TOML that ``tomllib`` takes.
        depth: names and numbers of a path, at most; from 1. What has more is left out.

    Raises:
        RecursionError: arrays or tables are nested too deeply.
    """
    reader = _Reader(text, depth)
    reader.read()
    return reader.found


def _tokens(text: str) -> Iterator[tuple[str, int]]:
    """Yield all but blanks and comments, each with its line, and the end again and again."""
    line = 1
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token[0] not in " \t\r#":
            yield token, line
        line += token.count("\n")
    while True:
        yield _END, line


class _Reader:
    """Goes through a document once.

    Attributes:
        found: the lines so far.
    """

    def __init__(self, text: str, depth: int) -> None:
        self._depth = depth
        self.found: dict[KeyPath, int] = {}
        self._last: dict[KeyPath, int] = {}  # the number of the last table of each array of tables
        self._tokens = _tokens(text)
        self._token, self._line = next(self._tokens)

    def read(self) -> None:
        table: KeyPath = ()
        while self._token != _END:
            if self._token == "\n":
                self._go_on()
            elif self._token == "[":
                table = self._header()
            else:
                self._pair(table)

    def _go_on(self) -> None:
        self._token, self._line = next(self._tokens)

    def _header(self) -> KeyPath:
        line = self._line
        self._go_on()
        if is_array := self._token == "[":
            self._go_on()
        *above, last = self._names("]")
        path: KeyPath = ()
        for name in above:
            path = self._within(path, name, line)
            if path in self._last:
                path = self._within(path, self._last[path], line)
        table = self._within(path, last, line)
        if is_array:
            self._go_on()
            self._last[table] = self._last.get(table, -1) + 1
            return self._within(table, self._last[table], line)
        if table is not path:
            self.found[table] = line  # a table within it may have stood before it
        return table

    def _pair(self, table: KeyPath) -> None:
        line, path = self._line, table
        for name in self._names("="):
            path = self._within(path, name, line)
        self._value(path)

    def _within(self, table: KeyPath, name: str | int, line: int) -> KeyPath:
        """Return the path of what is in a table, and note its line if that is the first; the table's if it is deep."""
        if len(table) >= self._depth:
            return table
        path = (*table, name)
        self.found.setdefault(path, line)
        return path

    def _names(self, end: str) -> list[str]:
        """Return the names of a dotted key, and go on behind the sign that ends it."""
        names = []
        while self._token not in (end, _END):
            if self._token != ".":
                names.append(_name(self._token))
            self._go_on()
        self._go_on()
        return names

    def _value(self, path: KeyPath) -> None:
        if self._token == "[":
            self._array(path)
        elif self._token == "{":
            self._go_on()
            while self._token not in ("}", _END):
                if self._token in ",\n":
                    self._go_on()
                else:
                    self._pair(path)
            self._go_on()
        else:
            while self._token not in (",", "\n", "]", "}", _END):
                self._go_on()

    def _array(self, path: KeyPath) -> None:
        number = 0
        self._go_on()
        while self._token not in ("]", _END):
            if self._token in ",\n":
                number += self._token == ","
                self._go_on()
            else:
                self._value(self._within(path, number, self._line) if self._token == "{" else (*path, number))
        self._go_on()


def _name(token: str) -> str:
    if token[0] == '"':
        (name,) = tomllib.loads(f"{token} = 0")  # it may have escapes
        return name
    return token[1:-1] if token[0] == "'" else token


__all__ = ["KeyPath", "lines_of_keys"]
