"""Numbers and times as the pages show them."""

from __future__ import annotations

import pytest

from flintmq.nsqadmin.pages import wording


def test_what_a_stranger_wrote_is_short_and_seen() -> None:
    assert wording.visible("\u202eevil\u202c \x1b[31m\0") == r"\u202eevil\u202c \u001b[31m\u0000"
    assert wording.visible("שלום <b>é") == "שלום <b>é"
    assert wording.visible("a" * 3000) == "a" * 79 + "…"


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (wording.count(1234567), "1,234,567"),
        (wording.count(None), "–"),
        (wording.count(float("nan")), "–"),
        (wording.compact(0), "0"),
        (wording.compact(99_999), "99,999"),
        (wording.compact(100_000), "100 k"),
        (wording.compact(1_234_567), "1.23 M"),
        (wording.compact(-2_500_000_000), "-2.5 G"),
        (wording.rate(None), "–"),
        (wording.rate(0), "0/s"),
        (wording.rate(0.254), "0.25/s"),
        (wording.rate(-12.55), "-12.6/s"),
        (wording.rate(1234), "1,234/s"),
        (wording.rate(2_500_000), "2.5 M/s"),
        (wording.size(512), "512 B"),
        (wording.size(1536), "1.5 KiB"),
        (wording.size(2**90), "1,099,511,627,776 PiB"),
        (wording.span(None), "–"),
        (wording.span(0), "0 s"),
        (wording.span(0.00035), "350 µs"),
        (wording.span(90), "1.5 min"),
        (wording.span(86_400 * 2.5), "2.5 d"),
        (wording.percent(0.5), "50 %"),
        (wording.percent(1, 1000), "<1 %"),
        (wording.percent(0, 1000), "0 %"),
        (wording.percent(1, 0), "–"),
        (wording.moment(1_700_000_000), "2023-11-14 22:13:20"),
        (wording.exact_moment(1_700_000_000.25), "2023-11-14 22:13:20.250"),
        (wording.iso(1_700_000_000), "2023-11-14T22:13:20Z"),
        (wording.moment(1e300), "–"),
        (wording.iso(None), ""),
        (wording.plural(1, "message"), "1 message"),
        (wording.plural(2, "message"), "2 messages"),
    ],
)
def test_words(shown: str, text: str):
    assert shown.replace(wording.NO_BREAK_SPACE, " ") == text


def test_bodies_keep_their_lines():
    assert wording.readable("a\tb\r\n\u202eevil \x1b[31m\n") == "a\tb\r\n\\u202eevil \\u001b[31m\n"
    assert wording.readable("שלום\n") == "שלום\n"
