"""Tables to the byte; the expected ones were printed by etcdctl 3.5.1."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.cli.printer import human_size
from raftkv.cli.table import fold, render, width

ENDPOINTS = """\
+-----------------+------------+
|    ENDPOINT     |    HASH    |
+-----------------+------------+
| 127.0.0.1:16586 | 1909432967 |
+-----------------+------------+"""


def test_headers_are_centred_and_cells_right():
    assert render(["endpoint", "hash"], [["127.0.0.1:16586", "1909432967"]]) == ENDPOINTS


def test_an_empty_table_has_no_last_rule():
    assert render(["hash_revision"], []) == "+---------------+\n| HASH REVISION |\n+---------------+"


def test_long_cells_are_folded_evenly():
    cell = "etcdserver: no leader memberID:1 alarm:NOSPACE"
    lines = render(["errors"], [[cell]]).split("\n")
    assert lines[3:5] == ["|    etcdserver: no leader |", "| memberID:1 alarm:NOSPACE |"]


def test_a_long_word_is_never_cut():
    word = "x" * 60
    assert word in render(["a"], [[f"short {word}"]])


def folded(words: list[str], limit: int) -> tuple[int, int]:
    """Return the least cost of the lines and the end of the first one, as etcdctl computes them."""
    if width(" ".join(words)) <= limit:
        return 0, len(words)
    slack = [limit - width(" ".join(words[:end])) for end in range(len(words))]
    return min(
        (slack[end] ** 2 + 100_000 * (slack[end] < 0) + folded(words[end:], limit)[0], end)
        for end in range(1, len(words))
    )


@given(st.lists(st.sampled_from(["a", "漢é", "b" * 9, "c" * 400]), min_size=1, max_size=9), st.integers(1, 40))
def test_lines_are_as_even_as_can_be(words, limit):
    lines, widest = fold(" ".join(words), limit), max(limit, *map(width, words))
    while words:
        end = folded(words, widest)[1]
        assert lines.pop(0) == " ".join(words[:end])
        words = words[end:]
    assert not lines


@pytest.mark.parametrize("word", ["a", "b" * 16])
def test_a_cell_of_any_length_is_folded(word):
    """Fold a text of another program: from about 1,000 words on, the table ended with a traceback."""
    lines = fold(" ".join([word] * 30_000), 30)
    assert len(lines) == 30_000 // (31 // (len(word) + 1))


@given(st.lists(st.text(alphabet="abc:é漢", min_size=1, max_size=12), min_size=1, max_size=12), st.integers(1, 40))
def test_folding_keeps_every_word(words, limit):
    lines = fold(" ".join(words), limit)
    assert " ".join(lines).split(" ") == words
    assert all(width(line) <= max(limit, *map(width, words)) for line in lines)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (9, "9 B"),
        (20480, "20 kB"),
        (1500, "1.5 kB"),
        (9950, "10 kB"),
        (999, "999 B"),
        (2147483648, "2.1 GB"),
    ],
)
def test_sizes(size, text):
    assert human_size(size) == text
