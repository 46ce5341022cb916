"""A record in the store is untrusted input: its bytes are a valid record of its key, or a one-line error."""

from __future__ import annotations

import importlib
import math
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

import raftkv
from raftkv.checkpoint.records import Checkpoint, Deleting
from raftkv.client.records import TIME_MAX_S, Record, RecordError, read, readable
from raftkv.client.values import KeyValue
from raftkv.training.records import Fault, State
from tests.spoiled import SAMPLES, Sample, spoiled

LINE_MAX = 700
KEPT = [sample for sample in SAMPLES if sample.key]


def name_of(sample: Sample) -> str:
    return f"{type(sample.record).__module__.rpartition('.')[2]}.{type(sample.record).__name__}"


def item(key: str, value: bytes) -> KeyValue:
    return KeyValue(key.encode(), value, 1, 2, 3, 0)


def kinds(base: type[Record] = Record) -> Iterator[type[Record]]:
    for kind in base.__subclasses__():
        yield kind
        yield from kinds(kind)


def test_every_kind_of_record_has_a_sample() -> None:
    for module in pkgutil.walk_packages(raftkv.__path__, "raftkv."):
        area, is_program = module.name.split(".")[1], "__main__" in module.name
        if area in ("checkpoint", "dataset", "training", "client", "cli") and not is_program:
            importlib.import_module(module.name)
    # With slots, a dataclass is made anew: the class that it was made of is none that anything uses.
    used = {kind for kind in kinds() if getattr(sys.modules[kind.__module__], kind.__name__) is kind}
    concrete = {kind for kind in used if kind.__module__.startswith("raftkv.") and kind.NAME != "?"}
    assert concrete == {type(sample.record) for sample in SAMPLES}
    for sample in SAMPLES:
        left_out = {each.name for each in fields(sample.record)} - set(_set_fields(sample.record))
        assert not left_out, f"{name_of(sample)} leaves out {left_out}"


def _set_fields(record: Record) -> Iterator[str]:
    """Return the fields that are written: those that are needed, and those that hold no default."""
    for each in fields(record):
        if getattr(record, each.name) != each.default or each.name not in ("parent", "metadata"):
            yield each.name


@pytest.mark.parametrize("sample", SAMPLES, ids=name_of)
def test_a_spoiled_field_is_refused_in_one_line_or_still_sound(sample: Sample) -> None:
    kind = type(sample.record)
    assert kind.decode(sample.record.encode()) == sample.record
    refused = []
    for value in spoiled(sample.record.encode()):
        try:
            found = kind.decode(value)
        except RecordError as error:
            refused.append(str(error))
        else:
            _check_sound(found)
    assert len(refused) > 5 * len(fields(sample.record))
    assert [line for line in refused if "\n" in line or len(line) > LINE_MAX] == []


def _check_sound(record: Record) -> None:
    """All that is kept can be written again, printed, put into keys, and counted with."""
    spoken = {name: getattr(record, name) for name in record.SPOKEN}  # which is cut
    again = replace(type(record).decode(record.encode()), **spoken)
    assert again == record or any(value != value for value in _numbers(record))
    for each in fields(record):
        value = getattr(record, each.name)
        if each.name == "time" or each.name.endswith("_s"):
            assert abs(value) <= TIME_MAX_S
        if isinstance(value, str):
            value.encode()


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value if not math.isnan(value) else math.nan
    elif isinstance(value, Record):
        for each in fields(value):
            yield from _numbers(getattr(value, each.name))
    elif isinstance(value, dict):
        for each in value.values():
            yield from _numbers(each)


TOLD = (
    Fault(1, "a-1", message="cannot read caf\udce9.txt\ud800"),
    State(1, "closed", reason="ValueError: caf\udce9"),
    Deleting("/job/step", reason="OSError: caf\udce9"),
)


@pytest.mark.parametrize("record", TOLD, ids=lambda record: record.NAME)
def test_exception_text_is_always_written(record: Record) -> None:
    """A name that is no UTF-8 in an exception: the fault was not reported, and ended its node."""
    (name,) = record.SPOKEN
    said = getattr(record, name)
    again = type(record).decode(record.encode())
    assert getattr(again, name) == said.encode(errors="replace").decode()
    long = replace(record, **{name: "x" * 5_000_000})
    assert len(long.encode()) < 3000


@pytest.mark.parametrize("sample", KEPT, ids=name_of)
def test_a_record_of_a_key_is_read_and_its_error_names_the_key(sample: Sample) -> None:
    kind = type(sample.record)
    assert read(kind, item(sample.key, sample.record.encode())) == sample.record
    with pytest.raises(RecordError) as refused:
        read(kind, item(sample.key, b"[]"))
    assert f": {sample.key}: list instead of an object" in str(refused.value)
    assert readable(kind, [item("x", b"[]"), item(sample.key, sample.record.encode())]) == [sample.record]


BOUND = [
    sample for sample in KEPT if type(sample.record).belongs_to is not Record.belongs_to
]  # fmt: skip


def test_records_that_name_their_key_are_these() -> None:
    assert sorted(type(sample.record).__name__ for sample in BOUND) == [
        "AttemptRecord", "Checkpoint", "CopyRecord", "Fault", "Head", "HolderRecord", "Manifest", "Node", "Offer",
        "Prepared", "TakenRange",
    ]  # fmt: skip


@pytest.mark.parametrize("sample", BOUND, ids=name_of)
def test_a_record_speaks_for_no_other_key(sample: Sample) -> None:
    """Copy a sound record to the key of another: of another run, kind, step, attempt, rank, node or version."""
    value, keys = sample.record.encode(), {each.key for each in KEPT} - {sample.key}
    below = (f"{sample.key}/x", f"{sample.key}{sample.key}")  # the second ends as its own key does
    for key in (*keys, *below, f"{sample.key}1", sample.key[:-1], "", "x"):
        with pytest.raises(RecordError, match="it is the record of another key"):
            read(type(sample.record), item(key, value))


def test_a_checkpoint_speaks_for_its_own_run_kind_and_step_alone() -> None:
    sample = next(each for each in KEPT if type(each.record) is Checkpoint)
    for change in ({"run_id": "other"}, {"run_id": "job/x"}, {"kind": "dcp"}, {"step": 8}, {"kind": "files/../dcp"}):
        with pytest.raises(RecordError):
            read(Checkpoint, item(sample.key, replace(sample.record, **change).encode()))


def test_error_about_a_key_controls_no_terminal() -> None:
    with pytest.raises(RecordError) as refusal:
        read(State, item("/a\x1b[2J\x9b2J", b"{"))
    assert "/a\\x1b[2J\\x9b2J: " in str(refusal.value)
    assert str(refusal.value).isprintable()
