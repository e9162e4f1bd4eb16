"""Go's regular expressions: what they match, what is refused, what they may cost."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flintmq.net.regex import PATTERN_SIZE_MAX, BadPattern, Pattern, PatternsMissing, _compile

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
    assert [text for text in matches if not compiled.search(text)] == []
    assert [text for text in differs if compiled.search(text)] == []


@pytest.mark.parametrize(
    ("pattern", "matches", "differs"),
    [
        (r"^\pL$", ["é", "日", "a"], ["1"]),
        (r"^\p{Han}+$", ["日本"], ["ab"]),
        ("^[\u0400-\u04ff]$", ["ж"], ["z"]),
        ("^.$", ["\U0001f600"], ["\U0001f600a"]),
    ],
)
def test_larger_sets_beyond_ascii(pattern, matches, differs):
    compiled = Pattern(pattern)
    assert [text for text in matches if not compiled.search(text)] == []
    assert [text for text in differs if compiled.search(text)] == []


@pytest.mark.parametrize(
    ("pattern", "matches", "differs"),
    [
        ("orders", ["orders"], ["orders2", "private_orders"]),
        ("^orders$", ["orders"], ["orders2"]),
        (".*", ["orders", ""], ["a\nb"]),
        ("a|b", ["a", "b"], ["ab", "xa", "bx"]),
        ("a.*", ["a", "ab"], ["ba"]),
        ("", [""], ["a"]),
        ("(?i)a", ["A"], ["AB"]),
        ("a$", ["a"], ["ba"]),
    ],
)
def test_as_a_whole(pattern, matches, differs):
    compiled = Pattern(pattern, is_whole=True)
    assert [text for text in matches if not compiled.search(text)] == []
    assert [text for text in differs if compiled.search(text)] == []


def test_brackets_do_not_close_what_they_did_not_open():
    with pytest.raises(BadPattern):
        Pattern("a)|(b", is_whole=True)


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
    "pattern",
    [
        "(",
        "a)",
        "(?i",
        "[a",
        "[",
        "[^]",
        "*a",
        "a|*",
        "(+)",
        "a**",
        "a*+",
        "a{2}{3}",
        "a{1001}",
        "a{3,2}",
        "[b-a]",
        "[[:nothing:]]",
        r"\p{Klingon}",
        r"\p",
        r"\p{L",
        "a\\",
        r"\1",
        r"\8",
        r"\Z",
        r"\C",
        r"\x6",
        r"\x{110000}",
        "(?=a)",
        "(?!a)",
        "(?<=a)",
        "(?<!a)",
        "(?-)",
        "(?P=a)",
        "(?P<>a)",
        "(?#a)",
        "a" * (PATTERN_SIZE_MAX + 1),
        "((a{100}){100}){100}",
        "(a{1000}){1000}",
    ],
)
def test_what_is_refused(pattern: str):
    with pytest.raises(BadPattern) as caught:
        Pattern(pattern)
    assert caught.value.reason
    assert len(str(caught.value)) < 300


def test_groups_may_be_deep():
    """Go allows a thousand levels."""
    assert Pattern("(" * 101 + "a" + ")" * 101).search("a")


SIMPLE = ["", ".*", "orders", "^orders", "orders$", "^orders$", "^", "$", "^$", "ü", "#ephemeral$", "a-b_c"]


@pytest.mark.parametrize("is_whole", [False, True])
@given(name=st.one_of(st.sampled_from(["", "orders", "x_orders", "orders_x", "ü", "a#ephemeral"]), st.text(max_size=6)))
def test_what_needs_no_engine_means_the_same(is_whole: bool, name: str):
    for text in SIMPLE:
        by_engine = _compile(text, is_whole).search(name) is not None
        assert Pattern(text, is_whole).search(name) == by_engine, (text, name)


def test_without_the_package(monkeypatch):
    """Plain names go on, everything else is refused, and it is said what to do."""
    monkeypatch.setitem(sys.modules, "re2", None)
    for text in SIMPLE:
        Pattern(text)
        Pattern(text, is_whole=True)
    with pytest.raises(PatternsMissing) as caught:
        Pattern("^(eu|us)_")
    assert str(caught.value) == (
        "the regular expression '^(eu|us)_' needs the package google-re2, which is not installed here: "
        "pip install 'flintmq[auth]', or use plain names and .* alone"
    )


def test_it_is_imported_when_a_pattern_needs_it():
    code = (
        "import sys; from flintmq.net.regex import compiled; compiled('^a$'); assert 're2' not in sys.modules; "
        "compiled('a|b'); assert 're2' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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
