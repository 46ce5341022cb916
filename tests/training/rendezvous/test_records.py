"""Records: what is written is read again, and what another program wrote is an error and nothing worse."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.client.records import Record, RecordError
from raftkv.training.records import CAUSES, PHASES, Fault, GenerationRecord, Member, Node, State

TEXTS = st.text(max_size=12)
TIMES = st.floats(0, 2e9)
COUNTS = st.integers(0, 2**40)
MEMBERS = st.builds(Member, TEXTS, TEXTS, TEXTS, st.integers(1, 99), TEXTS)
NODES = st.builds(
    Node, TEXTS, TEXTS, TEXTS, st.integers(1, 99), TEXTS, want=COUNTS, running=COUNTS, min_nodes=COUNTS,
    max_nodes=COUNTS, data=st.dictionaries(TEXTS, TEXTS, max_size=3), time=TIMES,
)  # fmt: skip
ROUNDS = st.builds(GenerationRecord, COUNTS, st.lists(MEMBERS, max_size=4).map(tuple), TIMES)
STATES = st.builds(
    State, COUNTS, st.sampled_from(PHASES), reason=TEXTS, cause=TEXTS, node=TEXTS, joined=COUNTS,
    min_nodes=COUNTS, max_nodes=COUNTS, time=TIMES,
)  # fmt: skip
FAULTS = st.builds(
    Fault, COUNTS, TEXTS, TEXTS, st.integers(-1, 9999), st.sampled_from(CAUSES), st.integers(-128, 255), TEXTS, TEXTS,
    TIMES,
)  # fmt: skip
KINDS: list[type[Record]] = [Member, Node, GenerationRecord, State, Fault]


@given(st.one_of(MEMBERS, NODES, ROUNDS, STATES, FAULTS))
def test_record_survives_encoding(record: Record) -> None:
    value = record.encode()
    assert type(record).decode(value) == record
    assert b", " not in value.replace(b"\\", b"") or any(", " in text for text in _texts(json.loads(value)))


def _texts(plain: object) -> list[str]:
    if isinstance(plain, str):
        return [plain]
    parts = [*plain.keys(), *plain.values()] if isinstance(plain, dict) else plain if isinstance(plain, list) else []
    return [text for part in parts for text in _texts(part)]


@given(st.binary(max_size=60), st.sampled_from(KINDS))
def test_any_bytes_are_a_record_or_an_error_of_one_line(value: bytes, kind: type[Record]) -> None:
    line = ""
    try:
        kind.decode(value)
    except RecordError as error:
        line = str(error)
    assert not line or line.startswith(f"not a {kind.NAME} record: ")
    assert "\n" not in line


def test_fields_of_a_newer_version_are_passed_over() -> None:
    assert Member.decode(b'{"id":"a-1","host":"a","color":"red"}') == Member("a-1", "a")


@pytest.mark.parametrize(
    ("kind", "value", "why"),
    [
        (Member, b"", "Expecting value"),
        (Member, b"\xff\xfe\x00", "codec can't decode"),
        (Member, b"[]", "list instead of an object"),
        (Member, b'{"host":"a"}', "id is missing"),
        (Member, b'{"id":"a","host":"a","slots":true}', "slots is True"),
        (Member, b'{"id":"a","host":"a","slots":"2"}', "slots is '2'"),
        (Member, b'{"id":"a","host":"a","slots":0}', "slots is 0"),
        (Member, b'{"id":"a","host":"a","slots":65537}', "slots is 65537"),
        (Node, b'{"id":"a","host":"a","slots":1000000}', "slots is 1000000"),
        (Node, b'{"id":"a","host":"a","data":{"x":1}}', "data is not a table of texts"),
        (Node, b'{"id":"a","host":"a","want":1.5}', "want is 1.5"),
        (GenerationRecord, b'{"epoch":1,"members":{}}', "members is {}"),
        (GenerationRecord, b'{"epoch":300000000000000}', "epoch is 300000000000000"),
        (GenerationRecord, b'{"epoch":1,"members":[{"id":"a","host":"a","slots":65537}]}', "slots is 65537"),
        (State, b'{"epoch":300000000000000,"phase":"running"}', "epoch is 300000000000000"),
        (State, b'{"epoch":1,"phase":"asleep"}', "phase is 'asleep'"),
        (State, b'{"epoch":1,"phase":["running"]}', "phase is ['running']"),
        (Fault, b'{"epoch":"1","node":"a"}', "epoch is '1'"),
    ],
)
def test_error_names_the_field(kind: type[Record], value: bytes, why: str) -> None:
    with pytest.raises(RecordError) as caught:
        kind.decode(value)
    assert why in str(caught.value)


def test_a_tower_of_brackets_is_an_error_too() -> None:
    with pytest.raises(RecordError):
        GenerationRecord.decode(b'{"epoch":1,"members":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


def test_a_member_of_a_round_that_is_none_is_an_error() -> None:
    with pytest.raises(RecordError, match="not a member record"):
        GenerationRecord.decode(b'{"epoch":1,"members":[{"id":"a"}]}')


def test_a_node_is_a_member_with_its_place() -> None:
    node = Node("a-1", "a", "10.0.0.1", 4, "row1/rack7", want=3)
    assert node.member == Member("a-1", "a", "10.0.0.1", 4, "row1/rack7")


@pytest.mark.parametrize(
    ("fault", "key", "line"),
    [
        (Fault(1, "a-1", "a", rank=3, exit_code=7), "000003", "rank 3 on a exited with 7"),
        (Fault(1, "a-1", rank=3, cause="signal", signal="SIGKILL"), "000003", "rank 3 on a-1 was killed by SIGKILL"),
        (Fault(1, "a-1", "a", cause="heartbeat lost"), "a-1", "node a heartbeat lost"),
        (Fault(1, "a-1", "a", cause="left", message="drained"), "a-1", "node a left: drained"),
    ],
)
def test_a_fault_has_a_place_and_a_line(fault: Fault, key: str, line: str) -> None:
    assert fault.key == key
    assert str(fault) == line


def test_faults_of_a_generation_lie_in_the_order_of_ranks() -> None:
    keys = [Fault(1, "a", rank=rank).key for rank in (0, 2, 10, 99_999)]
    assert keys == sorted(keys)
