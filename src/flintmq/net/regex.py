"""Regular expressions for topic and channel names, and for headers: Go's syntax, matched in linear time.

Why not :mod:`re`: it backtracks, so one pattern such as ``^(a+)+$`` stops the event loop for ever, and its syntax is
not Go's, so a pattern that nsqd takes may be refused or mean something else. Here all alternatives are followed at
once: matching costs at most the length of the name times the size of the program, and both have a bound.

A set of characters is one integer: a bit for each of ASCII, one for each character beyond it that stands in the
pattern, and one for all others. That is exact as long as a pattern names no larger sets beyond ASCII, see
:attr:`Pattern.is_exact`; names have none. Searches are unanchored, as nsqd's are: ``orders`` matches
``private_orders_x``. The flag U means nothing here.

Source: reference/nsq.md 1.7; Go's regexp/syntax; design/reliability.md section 6 (AUTH).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from flintmq.errors import FlintError

PATTERN_SIZE_MAX = 1024
PROGRAM_SIZE_MAX = 2000
DEPTH_MAX = 100
REPEAT_MAX = 1000  # Go's

_OTHER = 128  # the bit of every character that is neither ASCII nor in the pattern
_LETTERS_MAX = 63  # beyond ASCII that a pattern may have
_ALL = (1 << _OTHER + 1 + _LETTERS_MAX) - 1
_LINE_BREAK = 1 << 10
_BEGIN, _END, _WORD_BOUNDARY, _NO_WORD_BOUNDARY, _BEGIN_OF_LINE, _END_OF_LINE = range(6)


class BadPattern(FlintError):
    """A regular expression that Go would refuse, or that is beyond our bounds.

    Args:
        pattern: the whole of it.
        reason: what is wrong.
    """

    def __init__(self, pattern: str, reason: str) -> None:
        super().__init__(pattern, reason)
        self.pattern = pattern
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason} in the regular expression {self.pattern[:100]!r}"


def _set_of(characters: str) -> int:
    return sum(1 << ord(character) for character in set(characters) if ord(character) < 128)


def _where(test: Callable[[str], bool]) -> int:
    return sum(1 << code for code in range(128) if test(chr(code)))


_DIGITS = _where(str.isdigit)
_WORD = _where(lambda c: c.isalnum() or c == "_")
_PERL = {"d": _DIGITS, "w": _WORD, "s": _set_of("\t\n\f\r ")}
_POSIX = {
    "alnum": _where(str.isalnum),
    "alpha": _where(str.isalpha),
    "ascii": _ALL,
    "blank": _set_of("\t "),
    "cntrl": _where(lambda c: ord(c) < 32 or ord(c) == 127),
    "digit": _DIGITS,
    "graph": _where(lambda c: 33 <= ord(c) <= 126),
    "lower": _where(str.islower),
    "print": _where(lambda c: 32 <= ord(c) <= 126),
    "punct": _where(lambda c: 33 <= ord(c) <= 126 and not c.isalnum()),
    "space": _set_of("\t\n\v\f\r "),
    "upper": _where(str.isupper),
    "word": _WORD,
    "xdigit": _set_of("0123456789abcdefABCDEF"),
}
_CATEGORY_LETTERS = {"C": "cfos", "L": "lmotu", "M": "cen", "N": "dlo", "P": "cdefios", "S": "ckmo", "Z": "lps"}
_CATEGORIES = frozenset(major + minor for major, minors in _CATEGORY_LETTERS.items() for minor in ("", *minors))
_SCRIPTS = {"Latin": _where(str.isalpha), "Common": _where(lambda c: not c.isalpha()), "Any": _ALL}
_SCRIPTS |= dict.fromkeys(("Arabic", "Cyrillic", "Greek", "Han", "Hangul", "Hebrew", "Hiragana", "Katakana", "Thai"), 0)
_ESCAPES = {"a": "\a", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


@dataclass(slots=True)
class _Characters:
    mask: int


@dataclass(slots=True)
class _Assertion:
    kind: int


@dataclass(slots=True)
class _Sequence:
    nodes: list[_Node]


@dataclass(slots=True)
class _Choice:
    nodes: list[_Node]


@dataclass(slots=True)
class _Repeat:
    node: _Node
    least: int
    most: int | None


_Node = _Characters | _Assertion | _Sequence | _Choice | _Repeat


class _Parser:
    """Reads a pattern into nodes; recursive descent, one method per level."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0
        self._flags_on: frozenset[str] = frozenset()
        self.letters: dict[str, int] = {}
        self.is_exact = True

    @property
    def _is_folding(self) -> bool:
        return "i" in self._flags_on

    def parse(self) -> _Node:
        node = self._alternatives()
        if self._at < len(self._pattern):
            raise self._bad("unexpected )")
        return node

    def _bad(self, reason: str) -> BadPattern:
        return BadPattern(self._pattern, reason)

    def _looking_at(self, text: str) -> bool:
        return self._pattern.startswith(text, self._at)

    def _take(self, text: str) -> bool:
        if not self._looking_at(text):
            return False
        self._at += len(text)
        return True

    def _next(self, missing: str) -> str:
        if self._at >= len(self._pattern):
            raise self._bad(missing)
        self._at += 1
        return self._pattern[self._at - 1]

    # -- structure

    def _alternatives(self) -> _Node:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise self._bad(f"groups are more than {DEPTH_MAX} deep")
        nodes = [self._sequence()]
        while self._take("|"):
            nodes.append(self._sequence())
        self._depth -= 1
        return nodes[0] if len(nodes) == 1 else _Choice(nodes)

    def _sequence(self) -> _Node:
        nodes: list[_Node] = []
        is_repeated = False
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            counts = self._counts()
            if counts is None:
                nodes += self._atom()
                is_repeated = False
            elif not nodes:
                raise self._bad("missing argument to repetition operator")
            elif is_repeated:
                raise self._bad("nested repetition operator")
            else:
                self._take("?")  # lazy: which match is found does not matter, whether there is one does
                nodes[-1] = _Repeat(nodes[-1], *counts)
                is_repeated = True
        return nodes[0] if len(nodes) == 1 else _Sequence(nodes)

    def _counts(self) -> tuple[int, int | None] | None:
        for operator, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(operator):
                return counts
        if not self._looking_at("{"):
            return None
        end = self._pattern.find("}", self._at)
        least, comma, most = self._pattern[self._at + 1 : max(end, 0)].partition(",")
        if not _is_number(least) or (most and not _is_number(most)):
            return None  # an ordinary {
        self._at = end + 1
        low = int(least)
        high = None if comma and not most else int(most or least)
        if max(low, high or 0) > REPEAT_MAX or (high is not None and high < low):
            raise self._bad("invalid repeat count")
        return low, high

    def _atom(self) -> list[_Node]:
        """What a repetition applies to, as its last element; empty for a change of flags."""
        character = self._next("")
        if character == "(":
            return self._group()
        if character == "[":
            return [_Characters(self._class())]
        if character == ".":
            return [_Characters(_ALL if "s" in self._flags_on else _ALL & ~_LINE_BREAK)]
        if character in "^$":
            kinds = (_BEGIN_OF_LINE, _END_OF_LINE) if "m" in self._flags_on else (_BEGIN, _END)
            return [_Assertion(kinds["^$".index(character)])]
        if character == "\\":
            return self._escape()
        return [self._literal(character)]

    def _group(self) -> list[_Node]:
        outside = self._flags_on
        if self._take("?"):
            is_named = self._take("P<") or self._take("<")
            if is_named:
                end = self._pattern.find(">", self._at)
                if end < 0 or not _is_name(self._pattern[self._at : end]):
                    raise self._bad("invalid named group")
                self._at = end + 1
            elif self._flags() == ")":
                return []
        node = self._alternatives()
        if not self._take(")"):
            raise self._bad("missing )")
        self._flags_on = outside
        return [node]

    def _flags(self) -> str:
        """Flags up to the ``:`` or ``)`` that ends them."""
        is_on = True
        has_flag = False
        while True:
            character = self._next("missing )")
            if character in "imsU":
                has_flag = True
                self._flags_on = self._flags_on | {character} if is_on else self._flags_on - {character}
            elif character == "-" and is_on:
                is_on = False
                has_flag = False
            elif character in ":)" and (is_on or has_flag):
                return character
            else:
                raise self._bad("invalid group")

    # -- characters

    def _folded(self, mask: int) -> int:
        if not self._is_folding:
            return mask
        letters = [chr(code) for code in range(128) if mask >> code & 1 and chr(code).isalpha()]
        return mask | _set_of("".join(letters).swapcase())

    def _literal(self, character: str) -> _Characters:
        # the two letters beyond ASCII that fold into it
        plain = {"ſ": "s", "\u212a": "k"}.get(character, character) if self._is_folding else character
        if plain.isascii():
            return _Characters(self._folded(_set_of(plain)))
        forms = {plain, plain.lower(), plain.upper()} if self._is_folding else {plain}
        return _Characters(sum(1 << self._code(each) for each in sorted(forms) if len(each) == 1))

    def _code(self, letter: str) -> int:
        """The bit of a character beyond ASCII."""
        if letter not in self.letters and len(self.letters) >= _LETTERS_MAX:
            self.is_exact = False
            return _OTHER
        return self.letters.setdefault(letter, _OTHER + 1 + len(self.letters))

    def _escape(self) -> list[_Node]:
        if self._take("Q"):
            end = self._pattern.find("\\E", self._at)
            text = self._pattern[self._at :] if end < 0 else self._pattern[self._at : end]
            self._at = len(self._pattern) if end < 0 else end + 2
            return [self._literal(character) for character in text]
        for letter, kind in (("A", _BEGIN), ("z", _END), ("b", _WORD_BOUNDARY), ("B", _NO_WORD_BOUNDARY)):
            if self._take(letter):
                return [_Assertion(kind)]
        mask = self._escaped_set()
        if mask is not None:
            return [_Characters(mask)]
        return [self._literal(self._escaped_character())]

    def _escaped_set(self) -> int | None:
        """``\\d`` and its like, ``\\pL`` and its like; None when something else stands here."""
        letter = self._pattern[self._at : self._at + 1]
        if letter and letter in "dwsDWS":
            self._at += 1
            mask = self._folded(_PERL[letter.lower()])
            return mask if letter.islower() else _ALL & ~mask
        if letter not in ("p", "P"):
            return None
        self._at += 1
        is_negated = letter == "P"
        self.is_exact = False  # beyond ASCII
        name = self._next("invalid character class")
        if name == "{":
            end = self._pattern.find("}", self._at)
            if end < 0:
                raise self._bad("invalid character class")
            name = self._pattern[self._at : end]
            self._at = end + 1
        if name.startswith("^"):
            is_negated = not is_negated
            name = name[1:]
        if name in _SCRIPTS:
            mask = _SCRIPTS[name]
        elif name in _CATEGORIES:
            mask = _where(lambda c: unicodedata.category(c).startswith(name))
        else:
            raise self._bad(f"unknown character class {name[:20]!r}")
        mask = self._folded(mask)
        return _ALL & ~mask if is_negated else mask

    def _escaped_character(self) -> str:
        character = self._next("trailing backslash")
        if character in _ESCAPES:
            return _ESCAPES[character]
        following = self._pattern[self._at : self._at + 1]
        if character == "0" or (character in "1234567" and following and following in "01234567"):
            digits = character
            while len(digits) < 3 and (more := self._pattern[self._at : self._at + 1]) and more in "01234567":
                digits += more
                self._at += 1
            return chr(int(digits, 8))
        if character == "x":
            return self._hex_character()
        if character.isascii() and not character.isalnum():
            return character
        raise self._bad(f"invalid escape sequence \\{character}")

    def _hex_character(self) -> str:
        if self._take("{"):
            end = self._pattern.find("}", self._at)
            digits = self._pattern[self._at : max(end, 0)]
            self._at = end + 1
        else:
            digits = self._pattern[self._at : self._at + 2]
            self._at += 2
            if len(digits) < 2:
                raise self._bad("invalid escape sequence")
        if not digits or not all(digit in "0123456789abcdefABCDEF" for digit in digits) or int(digits, 16) > 0x10FFFF:
            raise self._bad("invalid escape sequence")
        return chr(int(digits, 16))

    def _class(self) -> int:
        is_negated = self._take("^")
        mask = 0
        is_first = True
        while is_first or not self._looking_at("]"):
            is_first = False
            named = self._named_set()
            if named is not None:
                mask |= named
                continue
            low = self._class_character()
            high = low
            if self._looking_at("-") and not self._looking_at("-]") and self._at + 1 < len(self._pattern):
                self._at += 1
                high = self._class_character()
                if high < low:
                    raise self._bad("invalid character class range")
            mask |= self._range(low, high)
        self._at += 1
        return _ALL & ~mask if is_negated else mask

    def _named_set(self) -> int | None:
        if self._looking_at("[:"):
            end = self._pattern.find(":]", self._at)
            if end >= 0:
                name = self._pattern[self._at + 2 : end]
                self._at = end + 2
                mask = _POSIX.get(name.removeprefix("^"))
                if mask is None:
                    raise self._bad(f"unknown character class [:{name[:20]}:]")
                mask = self._folded(mask)
                return _ALL & ~mask if name.startswith("^") else mask
        if self._looking_at("\\"):
            self._at += 1
            mask = self._escaped_set()
            if mask is not None:
                return mask
            self._at -= 1
        return None

    def _class_character(self) -> int:
        character = self._next("missing ]")
        return ord(self._escaped_character() if character == "\\" else character)

    def _range(self, low: int, high: int) -> int:
        mask = self._folded(sum(1 << code for code in range(low, min(high, 127) + 1)))
        if high >= 128:
            first = max(low, 128)
            self.is_exact = self.is_exact and high - first < _LETTERS_MAX
            if self._is_folding:
                mask |= sum((self._literal(each).mask for each in "ſ\u212a" if low <= ord(each) <= high), 0)
            if self.is_exact:
                for code in range(first, high + 1):
                    mask |= self._literal(chr(code)).mask
        return mask


def _is_number(text: str) -> bool:
    # Go reads no leading zeros and no more digits than it needs
    return text.isascii() and text.isdigit() and len(text) <= 8 and (text == "0" or not text.startswith("0"))


def _is_name(text: str) -> bool:
    return bool(text) and all(character.isalnum() or character == "_" for character in text)


# -- programs ----------------------------------------------------------------------------------------------------------

_SET, _ASSERT, _FORK, _MATCH = range(4)
_Step = tuple[int, int, tuple[int, ...]]  # operation, its mask or assertion, what follows


class _Compiler:
    """Turns nodes into steps, from the end to the beginning, so that each knows what follows it."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.steps: list[_Step] = []

    def emit(self, operation: int, argument: int, *following: int) -> int:
        if len(self.steps) >= PROGRAM_SIZE_MAX:
            raise BadPattern(self._pattern, f"more than {PROGRAM_SIZE_MAX} steps")
        self.steps.append((operation, argument, following))
        return len(self.steps) - 1

    def compile(self, node: _Node, following: int) -> int:
        match node:
            case _Characters(mask):
                return self.emit(_SET, mask, following)
            case _Assertion(kind):
                return self.emit(_ASSERT, kind, following)
            case _Sequence(nodes):
                for each in reversed(nodes):
                    following = self.compile(each, following)
                return following
            case _Choice(nodes):
                return self.emit(_FORK, 0, *[self.compile(each, following) for each in nodes])
            case _Repeat(inner, least, most):
                return self._repeat(inner, least, most, following)

    def _repeat(self, node: _Node, least: int, most: int | None, following: int) -> int:
        if most is None:
            loop = self.emit(_FORK, 0)
            body = self.compile(node, loop)
            self.steps[loop] = (_FORK, 0, (body, following))
            following = loop
        else:
            end = following
            for _ in range(most - least):
                following = self.emit(_FORK, 0, self.compile(node, following), end)
        for _ in range(least):
            following = self.compile(node, following)
        return following


class Pattern:
    """A compiled expression.

    Attributes:
        is_exact: whether it finds in any text what Go finds; else in ASCII alone.

    Raises:
        BadPattern: its syntax is wrong or it is too big.
    """

    __slots__ = ("_letters", "_start", "_steps", "is_exact")

    def __init__(self, text: str) -> None:
        if len(text) > PATTERN_SIZE_MAX:
            raise BadPattern(text, f"more than {PATTERN_SIZE_MAX} characters")
        compiler = _Compiler(text)
        end = compiler.emit(_MATCH, 0)
        parser = _Parser(text)
        self._start = compiler.compile(parser.parse(), end)
        self._steps = compiler.steps
        self._letters = parser.letters
        self.is_exact = parser.is_exact

    @property
    def step_count(self) -> int:
        """What a character costs at most."""
        return len(self._steps)

    def search(self, name: str) -> bool:
        """Whether the expression matches anywhere in an ASCII name, or in any text if it is exact."""
        if name.isascii():
            return self._search(name.encode("ascii"))
        letters = self._letters
        return self._search(bytes([ord(each) if each < "\x80" else letters.get(each, _OTHER) for each in name]))

    def _search(self, codes: bytes) -> bool:
        waiting: list[int] = []
        for at in range(len(codes) + 1):
            waiting.append(self._start)  # a match may begin anywhere
            sets = self._follow(waiting, codes, at)
            if sets is None:
                return True
            if at < len(codes):
                bit = 1 << codes[at]
                waiting = [following[0] for mask, following in sets if mask & bit]
        return False

    def _follow(self, waiting: list[int], codes: bytes, at: int) -> list[tuple[int, tuple[int, ...]]] | None:
        """The sets of characters that can come next; None when the end of the program is reached."""
        stack = list(dict.fromkeys(waiting))
        seen = set(stack)
        sets = []
        while stack:
            operation, argument, following = self._steps[stack.pop()]
            if operation == _SET:
                sets.append((argument, following))
                continue
            if operation == _MATCH:
                return None
            if operation == _ASSERT and not _holds(argument, codes, at):
                continue
            for step in following:
                if step not in seen:
                    seen.add(step)
                    stack.append(step)
        return sets


def _holds(assertion: int, codes: bytes, at: int) -> bool:
    if assertion == _BEGIN:
        return at == 0
    if assertion == _END:
        return at == len(codes)
    if assertion == _BEGIN_OF_LINE:
        return at == 0 or codes[at - 1] == 10
    if assertion == _END_OF_LINE:
        return at == len(codes) or codes[at] == 10
    is_word_before = at > 0 and bool(_WORD >> codes[at - 1] & 1)
    is_word_after = at < len(codes) and bool(_WORD >> codes[at] & 1)
    return (is_word_before != is_word_after) == (assertion == _WORD_BOUNDARY)


@lru_cache(maxsize=1024)
def compiled(text: str) -> Pattern:
    """Compile an expression, or remember that it was.

    Raises:
        BadPattern: its syntax is wrong or it is too big.
    """
    return Pattern(text)
