"""Go's regular expressions: what they match, what is refused, what they may cost."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flintmq.net.regex import PATTERN_SIZE_MAX, BadPattern, Pattern

NAME = "private_orders-2.x"


@pytest.mark.parametrize(
    ("pattern", "matches", "differs"),
    [
        ("^.$", ["é", "日", "a"], ["\n", "éé", ""]),
        ("(?s)^.$", ["\n", "é"], []),
        ("(?m)^b$", ["a\nb\nc", "b"], ["ab"]),
        ("^b$", ["b"], ["a\nb", "b\n"]),
        ("^(?m:^b$)", ["b\nc"], ["a\nb"]),
        ("^日本$", ["日本"], ["日", "本日", "日中"]),
        ("^[éà]+$", ["éà"], ["è", "e"]),
        ("^[à-é]+$", ["àéç"], ["ê", "e"]),
        ("^[^é]$", ["è", "e", "\n"], ["é"]),
        ("(?i)^É$", ["é", "É"], ["è"]),
        ("(?i)^[à-é]$", ["Ç", "ç"], ["Ê"]),
        (r"^\x{e9}$", ["é"], ["è"]),
        (r"^\w$", ["a"], ["é"]),
        (r"^\W$", ["é"], ["a"]),
        (r"\bé", ["aé"], ["é", "-é"]),
    ],
)
def test_texts_beyond_names(pattern, matches, differs):
    compiled = Pattern(pattern)
    assert compiled.is_exact
    assert [text for text in matches if not compiled.search(text)] == []
    assert [text for text in differs if compiled.search(text)] == []


@pytest.mark.parametrize("pattern", [r"\pL", r"^\p{Han}+$", "[\u0400-\u04ff]", "".join(map(chr, range(300, 400)))])
def test_larger_sets_beyond_ascii_are_not_exact(pattern):
    assert not Pattern(pattern).is_exact


@pytest.mark.parametrize(
    ("pattern", "matches", "differs"),
    [
        ("", ["", "a"], []),
        (".*", ["", "a"], []),
        ("orders", ["orders", "private_orders_x"], ["order", "Orders"]),
        ("^orders$", ["orders"], ["orders2", "private_orders"]),
        (r"\Aorders\z", ["orders"], ["orders2", "private_orders"]),
        ("^(eu|us)_", ["eu_x", "us_"], ["asia_eu_x"]),
        ("^(eu|us|)$", ["", "eu"], ["e"]),
        ("^a.c$", ["abc", "a-c"], ["ac"]),
        ("^[a-c-]+$", ["abc", "-"], ["d", ""]),
        ("^[^a-c]+$", ["xyz"], ["xaz"]),
        ("^[]a]+$", ["]a"], ["b"]),
        ("^[[:alpha:][:digit:]_]+$", ["ab_9"], ["a-b"]),
        ("^[[:^digit:]]+$", ["ab-"], ["a9"]),
        (r"^[\d\-]+$", ["1-2"], ["a"]),
        (r"^\w+\.\w+$", ["a.b"], ["a-b"]),
        (r"^\D\S\W$", ["ab."], ["1b.", "ab9"]),
        (r"^\pL\p{Nd}\PL$", ["a1-"], ["11-", "a1b"]),
        (r"^\p{Latin}+$", ["abc"], ["a1"]),
        (r"^\p{^Lu}\p{Greek}?$", ["a"], ["A"]),
        (r"\bor\B", ["a-orders"], ["or", "xor_"]),
        (r"^\x61\x{62}\143\.$", ["abc."], ["abcx"]),
        (r"^\Qa.b*\E+$", ["a.b*", "a.b**"], ["axb"]),
        ("(?i)^OrDers$", ["orders", "ORDERS"], ["order"]),
        ("^(?i:a)b$", ["Ab", "ab"], ["AB"]),
        ("^(?i)a(?-i)b$", ["Ab"], ["AB"]),
        ("(?i)^[x-z]$", ["X", "y"], ["W"]),
        ("(?i)^ſ\u212a$", ["sk", "SK"], ["s"]),
        ("(?P<name>a)(?<other>b)", ["ab"], ["a"]),
        ("(?ms)^a$", ["a"], ["b"]),
        ("^a{2}$", ["aa"], ["a", "aaa"]),
        ("^a{2,}$", ["aa", "aaaa"], ["a"]),
        ("^a{1,2}?$", ["a", "aa"], ["", "aaa"]),
        ("^(ab){0,1}$", ["", "ab"], ["abab"]),
        ("^a{0}$", [""], ["a"]),
        ("^a{,2}$", ["a{,2}"], ["a"]),
        ("^a{x}{$", ["a{x}{"], []),
        ("^(a|b)*c$", ["c", "abbac"], ["abd"]),
        ("^(a*)*$", ["", "aaa"], ["b"]),
        ("^(|a)+$", ["", "aa"], ["b"]),
        ("^^a$$", ["a"], ["aa"]),
        ("(^)*a", ["ba"], ["b"]),
        ("^ü?a$", ["a"], ["ua"]),
        ("^#ephemeral|#ephemeral$", ["t#ephemeral"], ["ephemeral"]),
    ],
)
def test_what_matches(pattern: str, matches: list[str], differs: list[str]):
    compiled = Pattern(pattern)
    assert [name for name in matches if not compiled.search(name)] == []
    assert [name for name in differs if compiled.search(name)] == []


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "missing )"),
        ("a)", "unexpected )"),
        ("(?i", "missing )"),
        ("[a", "missing ]"),
        ("[", "missing ]"),
        ("[^]", "missing ]"),
        ("*a", "missing argument"),
        ("a|*", "missing argument"),
        ("(+)", "missing argument"),
        ("a**", "nested repetition"),
        ("a*+", "nested repetition"),
        ("a{2}{3}", "nested repetition"),
        ("a{1001}", "repeat count"),
        ("a{3,2}", "repeat count"),
        ("[b-a]", "range"),
        ("[[:nothing:]]", "unknown character class"),
        (r"\p{Klingon}", "unknown character class"),
        (r"\p", "invalid character class"),
        (r"\p{L", "invalid character class"),
        ("a\\", "trailing backslash"),
        (r"\1", "invalid escape"),
        (r"\8", "invalid escape"),
        (r"\Z", "invalid escape"),
        (r"\C", "invalid escape"),
        (r"\x6", "invalid escape"),
        (r"\x{110000}", "invalid escape"),
        ("(?=a)", "invalid group"),
        ("(?!a)", "invalid group"),
        ("(?<=a)", "invalid named group"),
        ("(?<!a)", "invalid named group"),
        ("(?-)", "invalid group"),
        ("(?P=a)", "invalid group"),
        ("(?P<>a)", "invalid named group"),
        ("(?#a)", "invalid group"),
        ("(" * 101 + ")" * 101, "deep"),
        ("a" * (PATTERN_SIZE_MAX + 1), "characters"),
        ("((a{100}){100}){100}", "steps"),
        ("(a{1000}){1000}", "steps"),
    ],
)
def test_what_is_refused(pattern: str, reason: str):
    with pytest.raises(BadPattern) as caught:
        Pattern(pattern)
    assert reason in caught.value.reason
    assert len(str(caught.value)) < 300


# what both sides read alike: no \B, which Python before 3.14 denies in the empty string, no possessive quantifiers
ATOMS = st.sampled_from(
    ["a", "b", "_", "0", ".", "[ab]", "[^a]", "[a-c]", r"\d", r"\w", r"\W", "^", r"\Z", r"\b", r"\."]
)
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=12,
)


@given(pattern=PATTERNS, names=st.lists(st.text("abc_0-.", max_size=8), max_size=5))
def test_it_agrees_with_python_where_both_speak_the_same(pattern: str, names: list[str]):
    oracle = re.compile(pattern)
    ours = Pattern(pattern.replace(r"\Z", r"\z"))
    for name in names:
        assert ours.search(name) == bool(oracle.search(name)), (pattern, name)


@given(pattern=st.text(r"ab01()[]{},*+?|\^$.-:PQEdwpLx<>=!i", max_size=20), name=st.text("ab01-", max_size=10))
def test_any_text_is_a_pattern_or_is_refused(pattern: str, name: str):
    try:
        compiled = Pattern(pattern)
    except BadPattern:
        assume(True)
        return
    assert compiled.search(name) in (True, False)


@pytest.mark.parametrize(
    "pattern",
    [
        "^(a+)+$",
        "(a|a)*$",
        "(a?){30}a{30}b",
        ".*.*.*.*.*.*x",
        r"(\w*)*!$",
        r"^(\w{1,64}\.){1,10}$",
        "((a{0,9}){0,9}){0,9}b",
    ],
)
def test_nothing_costs_more_than_a_few_milliseconds(pattern: str):
    begun = time.process_time()
    compiled = Pattern(pattern)
    compiled.search("a" * 64)
    compiled.search("a" * 63 + "-")
    assert time.process_time() - begun < 0.25  # re takes seconds to ages for each
