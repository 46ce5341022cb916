"""Ranks that step together: in the committed history every sample of an epoch is used once, after any failure."""

from __future__ import annotations

import doctest
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.checkpoint import positions
from raftkv.checkpoint.errors import DigestMismatch
from raftkv.checkpoint.positions import Position, Used, load, save
from raftkv.checkpoint.records import Checkpoint
from raftkv.client.records import RecordError
from raftkv.errors import ConfigError

EVENTS = st.lists(st.one_of(st.just("step"), st.just("step"), st.just("commit"), st.integers(1, 9)), max_size=60)


@given(st.integers(0, 90), st.integers(1, 7), st.integers(1, 9), EVENTS)
def test_every_sample_of_the_committed_history_is_used_once(length, batch_size, world_size, events):
    """The model is how often each sample went into it; a number is a crash, and the size of the next world."""
    at = saved = Position.begin(length)
    model = [0] * length
    saved_model = list(model)
    for event in [*events, *["step"] * (length + 1)]:
        if event == "step" and not at.is_over:
            for rank in range(world_size):
                for sample in at.share(batch_size, rank, world_size):
                    model[sample] += 1
            at = at.step(batch_size, world_size)
        elif event == "commit":
            saved, saved_model = Position.decode(at.encode()), list(model)
        elif isinstance(event, int):
            world_size, at, model = event, saved, list(saved_model)
        assert model == [1] * at.consumed + [0] * at.remaining
    assert at.is_over
    assert at.next_epoch().remaining == length


@given(st.integers(0, 200), st.integers(1, 9), st.integers(1, 9))
def test_shares_are_apart_and_even(length: int, batch_size: int, world_size: int) -> None:
    at, steps = Position(3, length, 0, seed=7, dataset="x"), 0
    while not at.is_over:
        shares = [at.share(batch_size, rank, world_size) for rank in range(world_size)]
        assert [number for share in shares for number in share] == list(
            range(at.consumed, at.step(batch_size, world_size).consumed)
        )
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert max(map(len, shares)) <= batch_size
        at, steps = at.step(batch_size, world_size), steps + 1
    assert steps == Position(3, length, 0).steps(batch_size, world_size)
    assert (at.seed, at.dataset) == (7, "x")


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Position(-1, 5, 0),
        lambda: Position(0, 5, 6),
        lambda: Position(0, 5, -1),
        lambda: Position.begin(5, seed=2**64),
        lambda: Position.begin(5).share(0, 0, 1),
        lambda: Position.begin(5).share(1, 0, 0),
        lambda: Position.begin(5).share(1, 2, 2),
        lambda: Position.begin(5).after(6),
    ],
)
def test_impossible_positions_are_refused(wrong: object) -> None:
    with pytest.raises(ConfigError):
        wrong()


@pytest.mark.parametrize("data", [b"", b"[]", b'{"epoch":0}', b'{"epoch":0,"length":3,"consumed":9}', b"\xff"])
def test_a_damaged_position_is_a_typed_error(data: bytes) -> None:
    with pytest.raises(RecordError):
        Position.decode(data)


class Folder:
    """Stands for a checkpoint that is saved, and then resumed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, name: str, data: bytes) -> None:
        (self._path / name).write_bytes(data)

    def read(self, name: str) -> bytes:
        return (self._path / name).read_bytes()


def test_a_position_is_a_file_of_a_checkpoint(tmp_path: Path) -> None:
    at, used = Position(2, 100, 64, seed=5, dataset="v3"), Used(1, 10, ((0, 4), (6, 10)))
    save(Folder(tmp_path), at)
    save(Folder(tmp_path), used, "other.json")
    assert load(Folder(tmp_path), Position) == at
    assert load(Folder(tmp_path), Used, "other.json") == used
    assert at.metadata == {"epoch": "2", "samples": "64/100"}
    with pytest.raises(RecordError):
        load(Folder(tmp_path), Used)


def test_a_committed_position_that_was_changed_is_refused(tmp_path: Path) -> None:
    record = Checkpoint("job", 1, 1, 1, "files", 1, str(tmp_path), "sha256:00", "sha256:00", 1, 1)
    (tmp_path / "raftkv-manifest.jsonl").write_text("{}")
    with pytest.raises(DigestMismatch):
        load(record, Position)


def test_examples_of_the_documentation() -> None:
    assert doctest.testmod(positions).failed == 0


def test_an_epoch_may_have_another_length() -> None:
    assert Position(0, 5, 5).next_epoch(9) == Position(1, 9, 0)
    assert replace(Position(0, 5, 5), consumed=0).remaining == 5


@pytest.mark.parametrize("number", [1.0, "1", None, numpy.float64(1)])
def test_unreadable_position_is_not_written(number: Any) -> None:
    """Refuse at once what JSON writes as another kind of number: the checkpoint with it could not be gone on from."""
    for make in (
        lambda: Position.begin(number), lambda: Position.begin(5, seed=number), lambda: Position.begin(5).after(number),
        lambda: Position.begin(5).next_epoch(number) if number is not None else Position(None, 5, 0),
        lambda: Used.begin(number),
    ):  # fmt: skip
        with pytest.raises(TypeError, match="is a whole number, not"):
            make()
    with pytest.raises(TypeError, match="the dataset of a position is a text, not 3"):
        Position.begin(5, dataset=3)


@pytest.mark.parametrize("used", [Used.begin(-1), Used(-1, 5, ()), Used.begin(5, dataset=None), Used(0, 5, ((3, 2),))])
def test_used_samples_that_could_not_be_loaded_are_not_saved(used: Used, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="could not be read again: not a used samples record"):
        save(Folder(tmp_path), used)
    assert not list(tmp_path.iterdir())


def test_numbers_of_numpy_and_torch_are_written_as_numbers() -> None:
    at = Position.begin(numpy.int64(100), seed=numpy.uint32(7)).step(numpy.int32(4), numpy.int64(2))
    assert Position.decode(at.encode()) == at == Position(0, 100, 8, 7)
    assert list(at.share(numpy.int64(4), numpy.int64(1), numpy.int64(2))) == [12, 13, 14, 15]
    assert Position.begin(1000).steps(numpy.uint8(32), numpy.uint8(200)) == 1
    assert Used.decode(Used.begin(numpy.int64(9)).encode()) == Used(0, 9, ())
