"""Every message that one member encodes decodes to the same message on another."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from raftkv.pb import raft_pb2
from raftkv.raft.types import ConfState, Entry, EntryType, Message, MessageType, SnapshotMeta
from raftkv.replica.codec import BATCH_BYTES, ENTRIES_MAX, MESSAGES_MAX, BatchEncoder, decode

U64 = st.integers(0, 2**64 - 1)
IDS = st.lists(st.integers(1, 2**64 - 1), max_size=3, unique=True).map(tuple)


@st.composite
def logs(draw: st.DrawFn) -> list[Entry]:
    """Entries as a log has them: consecutive indexes, terms that never go down."""
    terms = sorted(draw(st.lists(st.integers(1, 2**40), max_size=6)))
    first = draw(st.integers(1, 2**50))
    kinds = st.sampled_from(EntryType)
    return [Entry(term, first + at, draw(st.binary(max_size=40)), draw(kinds)) for at, term in enumerate(terms)]


PROPOSALS = st.lists(st.builds(Entry, st.just(0), st.just(0), st.binary(max_size=40), st.sampled_from(EntryType)))
CONF_STATES = st.builds(ConfState, IDS, IDS, IDS, IDS, st.booleans())
MESSAGES = st.builds(
    Message,
    type=st.sampled_from(MessageType),
    to=U64,
    from_=U64,
    term=U64,
    log_term=U64,
    index=U64,
    entries=st.one_of(logs(), PROPOSALS),
    commit=U64,
    reject=st.booleans(),
    snapshot=st.none() | st.builds(SnapshotMeta, U64, U64, CONF_STATES),
    context=st.binary(max_size=16),
    quiet=st.booleans(),
)


def _fields(message: Message) -> tuple[object, ...]:
    ends = (message.type, message.from_, message.to, message.term)
    place = (message.log_term, message.index, message.commit, message.reject, message.reject_hint)
    return (*ends, *place, message.entries, message.snapshot, message.context, message.quiet)


@given(st.lists(MESSAGES, max_size=5))
def test_decoding_undoes_encoding(messages: list[Message]) -> None:
    for message in messages:
        message.reject_hint = message.index if message.reject else 0
    decoded = [message for batch in BatchEncoder().batches(messages) for message in decode(batch)]
    assert [_fields(message) for message in decoded] == [_fields(message) for message in messages]


def test_followers_at_the_same_point_share_the_bytes_of_the_entries() -> None:
    entries = [Entry(1, 1, b"x" * 100)]
    encoder = BatchEncoder()
    first, second = (Message(MessageType.APPEND, to=to, from_=1, entries=entries) for to in (2, 3))
    list(encoder.batches([first]))
    shared = encoder._entries_bytes
    list(encoder.batches([second]))
    assert encoder._entries_bytes is shared


def test_large_sends_are_cut_into_batches() -> None:
    half = b"x" * (BATCH_BYTES * 2 // 3)
    messages = [Message(MessageType.APPEND, to=2, from_=1, entries=[Entry(1, at, half)]) for at in (1, 2, 3)]
    assert [len(decode(batch)) for batch in BatchEncoder().batches(messages)] == [1, 1, 1]


Run = raft_pb2.EntryRun


def _append(*runs: raft_pb2.EntryRun) -> bytes:
    message = raft_pb2.Message(type=MessageType.APPEND, to_id=1, from_id=2, term=9, runs=runs)
    return raft_pb2.MessageBatch(messages=[message]).SerializeToString()


@pytest.mark.parametrize(
    "runs",
    [
        # Term, first index, number. Of the first three the ends are those of four entries from 3 on.
        [(5, 3, 2), (5, 4, 1), (5, 6, 1)],
        [(5, 3, 1), (5, 5, 1), (5, 5, 2)],
        [(5, 3, 2), (4, 5, 1), (5, 6, 1)],
        [(0, 0, 1), (5, 4, 1)],
        [(5, 3, 1), (5, 0, 1)],
    ],
    ids=["overlap", "gap", "term goes down", "behind a proposal", "then a proposal"],
)
def test_runs_that_do_not_follow_each_other_are_no_batch(runs: list[tuple[int, int, int]]) -> None:
    """The core looks at the ends of an append alone; a log on disk with a gap is refused at the next start."""
    with pytest.raises(DecodeError):
        decode(_append(*[Run(term=term, first_index=index, datas=[b""] * count) for term, index, count in runs]))


def test_oversized_batch_is_refused() -> None:
    """Three million empty entries, 6 MB, held a member for 0.8 s, and a leader to whom they were passed on for 4 s."""
    half = Run(term=5, first_index=3, datas=[b""] * (ENTRIES_MAX // 2))
    rest = Run(term=5, first_index=3 + ENTRIES_MAX // 2, datas=[b""] * (ENTRIES_MAX // 2))
    assert len(decode(_append(half, rest))[0].entries) == ENTRIES_MAX
    rest.datas.append(b"")
    one = raft_pb2.MessageBatch.FromString(_append(half)).messages[0]
    for batch in (
        _append(half, rest),
        _append(Run(datas=[b""] * (ENTRIES_MAX + 1))),
        raft_pb2.MessageBatch(messages=[one] * 3).SerializeToString(),
        raft_pb2.MessageBatch(messages=[raft_pb2.Message(type=8)] * (MESSAGES_MAX + 1)).SerializeToString(),
    ):
        with pytest.raises(DecodeError):
            decode(batch)
