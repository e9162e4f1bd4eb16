"""Names, and their spelling on disk."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flintmq.names import directory_name, is_ephemeral, is_valid_name, listed, topic_of_directory

legal = st.text("abcXYZ019._-", min_size=1, max_size=54).flatmap(lambda n: st.sampled_from([n, n + "#ephemeral"]))


@pytest.mark.parametrize("name", ["a", "a.b-c_D9", "x" * 64, ".", "..", "t#ephemeral", "x" * 54 + "#ephemeral"])
def test_valid_names(name):
    assert is_valid_name(name)
    assert is_ephemeral(name) == name.endswith("#ephemeral")


@pytest.mark.parametrize(
    "name", ["", "x" * 65, "a b", "a\n", "a/b", "é", "#ephemeral", "a#ephemera", "a#ephemeral.", "a#b#ephemeral"]
)
def test_invalid_names(name):
    assert not is_valid_name(name)


@given(name=legal)
def test_directories_are_plain_and_come_back(name):
    directory = directory_name(name)
    assert set(directory) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-%")
    assert topic_of_directory(directory) == name


@given(one=legal, other=legal)
def test_directories_differ_even_without_case(one, other):
    assert (directory_name(one).lower() == directory_name(other).lower()) == (one == other)


@pytest.mark.parametrize("directory", ["x", "t-", "t-A", "t-%2", "t-%61", "t-a%2fb", "p-0000"])
def test_foreign_directories_are_refused(directory):
    with pytest.raises(ValueError, match="not a topic directory"):
        topic_of_directory(directory)


def test_many_names_are_shown_in_part():
    assert listed([], 2) == ""
    assert listed(["a", "b"], 2) == "a, b"
    assert listed(iter("abcde"), 2) == "a, b and 3 more"
