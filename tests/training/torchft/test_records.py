"""What a torchft job has in the store: read back as written, and refused when it is something else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.client.records import RecordError
from raftkv.integrations.torchft.rules import MEMBER_BYTES_MAX, Ask, JobKeys, MemberRecord, QuorumRecord, make_ask
from raftkv.pb import torchft_pb2

UNKNOWN_FIELD = bytes([0xFA, 0x3F, 2]) + b"hi"  # number 1023: of a future torchft


def ask(name: str, number: str = "d/1", **fields: object) -> Ask:
    message = torchft_pb2.QuorumMember(replica_id=name, **fields).SerializeToString()
    return make_ask(message + UNKNOWN_FIELD, number)


def test_an_ask_is_what_its_message_says():
    made = ask("a", "d/7", shrink_only=True, commit_failures=2)
    assert (made.replica_id, made.number, made.shrink_only, made.commit_failures) == ("a", "d/7", True, 2)
    assert MemberRecord.decode(MemberRecord.of(made).encode()).to_ask() == made
    assert MemberRecord.decode(MemberRecord.of(None).encode()).to_ask() is None


def test_the_answer_has_all_fields_of_all_members_known_or_not():
    record = QuorumRecord.of(7, (ask("b", step=3), ask("a", reconfigure_handle="h")), 12.5)
    response = QuorumRecord.decode(record.encode()).answer()
    quorum = torchft_pb2.LighthouseQuorumResponse.FromString(response).quorum
    assert (quorum.quorum_id, quorum.created.seconds, quorum.created.nanos) == (7, 12, 500_000_000)
    assert [member.replica_id for member in quorum.participants] == ["a", "b"]
    assert quorum.participants[0].reconfigure_handle == "h"
    assert response.count(UNKNOWN_FIELD) == 2


@pytest.mark.parametrize(
    ("number", "answered"),
    [
        *(("d/12", True), ("d/9", True), ("d/13", False), ("e/1", False), ("d/x", False), ("", False)),
        *((f"d/{'9' * 5000}", False), ("d/\u0663", False)),  # a stranger's; the first ended the daemon
    ],
)
def test_an_ask_that_comes_back_late_is_an_old_one(number, answered):
    assert QuorumRecord(1, {"a": "d/12"}).has_answered("a", number) is answered
    assert not QuorumRecord(1, {"a": "d/12"}).has_answered("b", number)
    assert not QuorumRecord(1, {"a": f"d/{'9' * 5000}"}).has_answered("a", number)


def test_one_replica_cannot_make_a_quorum_too_large_for_the_store():
    assert ask("a", data="x" * (MEMBER_BYTES_MAX // 2)).replica_id == "a"
    with pytest.raises(RecordError, match="the limit is"):
        ask("a", data="x" * MEMBER_BYTES_MAX)


@pytest.mark.parametrize("message", [b"", b"\xff", torchft_pb2.QuorumMember(replica_id="x" * 513).SerializeToString()])
def test_invalid_member_is_refused(message):
    with pytest.raises(RecordError):
        make_ask(message, "d/1")


@pytest.mark.parametrize("value", [b"", b"[]", b'{"quorum_id":"1"}', b'{"quorum_id":1,"asks":{"a":1}}'])
def test_invalid_quorum_is_refused(value):
    with pytest.raises(RecordError):
        QuorumRecord.decode(value)


def test_a_message_that_was_damaged_is_refused():
    with pytest.raises(RecordError):
        MemberRecord("d/1", "!!").to_ask()
    with pytest.raises(RecordError):
        QuorumRecord(1, {"a": "d/1"}, {"a": "/w=="}).answer()


@given(st.text(min_size=1), st.from_regex(r"[a-z-]{1,20}", fullmatch=True))
def test_a_replica_may_have_any_name(replica_id, daemon_id):
    keys = JobKeys("job")
    assert keys.parse_member(keys.member(daemon_id, replica_id)) == (daemon_id, replica_id)
