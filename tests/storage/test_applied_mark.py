"""The mark of applied entries, as a process killed at any moment leaves it for the next."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.errors import StorageError
from raftkv.storage.applied_mark import AppliedMark

NOTES = st.lists(st.integers(1, 2**40), min_size=1, max_size=6, unique=True).map(sorted)


def read(path: Path) -> tuple[int, int]:
    mark = AppliedMark(path)
    mark.close()
    return mark.index, mark.term


def test_a_new_mark_says_nothing(tmp_path: Path) -> None:
    assert read(tmp_path / "applied") == (0, 0)
    assert read(tmp_path / "applied") == (0, 0)
    assert (tmp_path / "applied").stat().st_mode & 0o777 == 0o600


@given(NOTES, st.data())
def test_the_newest_note_is_read_and_a_torn_one_leaves_the_one_before(tmp_path_factory, notes, data):
    path = tmp_path_factory.mktemp("mark") / "applied"
    mark = AppliedMark(path)
    before = path.read_bytes()
    for index in notes:
        before = path.read_bytes()
        mark.note(index, index + 1)
    after = path.read_bytes()
    # What the process does not close is read as well: a kill closes nothing.
    assert read(path) == (notes[-1], notes[-1] + 1)
    changed = [at for at in range(len(after)) if before[at] != after[at]]
    torn = bytearray(before)
    for at in data.draw(st.lists(st.sampled_from(changed), unique=True, max_size=len(changed) - 1)):
        torn[at] = after[at]
    path.write_bytes(torn)
    expected = notes[-2] if len(notes) > 1 else 0
    assert read(path) == (expected, expected + 1 if expected else 0)
    again = AppliedMark(path)
    again.note(notes[-1] + 1, 7)
    assert read(path) == (notes[-1] + 1, 7)


def test_forgotten_mark_counts_from_the_next_note_on(tmp_path: Path) -> None:
    mark = AppliedMark(tmp_path / "applied")
    for index in (99, 100):
        mark.note(index, 5)
    mark.forget()
    assert read(tmp_path / "applied") == (0, 0)
    mark.note(7, 6)
    assert read(tmp_path / "applied") == (7, 6)


def test_a_mark_never_goes_back_while_entries_are_applied_again(tmp_path: Path) -> None:
    """A member that was killed a second time, while it applied its log again, served less than it had shown before."""
    first = AppliedMark(tmp_path / "applied")
    first.note(443, 3)
    again = AppliedMark(tmp_path / "applied")
    for index in (420, 421, 422):
        again.note(index, 3)
    assert read(tmp_path / "applied") == (443, 3)


@given(st.binary(max_size=200))
def test_a_file_with_any_content_opens(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("mark") / "applied"
    path.write_bytes(content)
    assert read(path) == (0, 0)
    assert path.stat().st_size == 128


def test_a_directory_that_is_gone_is_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot open .*/gone/applied: No such file or directory"):
        AppliedMark(tmp_path / "gone" / "applied")
