"""What other members say: batches of Raft messages stepped into a member, and membership entries."""

from __future__ import annotations

import random
from pathlib import Path

from google.protobuf.message import DecodeError

from raftkv.pb import raft_pb2
from raftkv.raft import confchange
from raftkv.raft.errors import (
    ConfChangeError,
    InvalidMessage,
    InvariantError,
    ProposalDropped,
    StepLocalMessage,
    StepPeerNotFound,
)
from raftkv.raft.log import MemoryLog
from raftkv.raft.types import (
    ConfChange,
    ConfChangeSingle,
    ConfChangeTransition,
    ConfChangeType,
    ConfState,
    Entry,
    EntryType,
    Message,
    MessageType,
    RaftConfig,
    SnapshotMeta,
)
from raftkv.replica.codec import BatchEncoder, decode
from tests.fuzz.target import Parse, Target
from tests.raft.member import Member

VOTERS = (1, 2, 3)
STEPS_MAX = 200
"""Inputs that one member takes before a fresh one takes its place."""
REFUSED = (DecodeError, KeyError, IndexError)
"""What ``codec.decode`` documents, and the peer service refuses a batch for."""


def _member(leads: bool) -> Member:
    log = MemoryLog(conf_state=ConfState(voters=VOTERS, learners=(4,)))
    member = Member(RaftConfig(id=1, election_ticks=10), log, random.Random(1))
    member.node.step(
        Message(MessageType.APPEND, to=1, from_=2, term=1, entries=[Entry(1, 1, b"a"), Entry(1, 2, b"b")], commit=2)
    )
    member.work()
    if leads:
        member.node.campaign()
        member.work()
        for kind in (MessageType.PRE_VOTE_RESPONSE, MessageType.VOTE_RESPONSE):
            member.node.step(Message(kind, to=1, from_=2, term=2))
            member.work()
        member.node.propose(b"c")
        member.work()
    return member


class _Stepped:
    """A member that steps what it is sent, and does its duties; a broken invariant stops it, and a fresh one starts."""

    def __init__(self, leads: bool) -> None:
        self._leads = leads
        self._steps = STEPS_MAX

    def __call__(self, data: bytes) -> None:
        if self._steps >= STEPS_MAX:
            self._member, self._steps = _member(self._leads), 0
        self._steps += 1
        try:
            for message in decode(data):
                try:
                    self._member.node.step(message)
                except (ProposalDropped, StepPeerNotFound, StepLocalMessage, InvalidMessage):
                    continue
            while self._member.node.has_ready():
                self._work()
        except InvariantError:
            self._steps = STEPS_MAX
            raise

    def _work(self) -> None:
        ready = self._member.take()
        if ready.snapshot is not None:  # a database would come with it
            self._steps = STEPS_MAX
            raise InvariantError("a snapshot without its database")
        self._member.write()
        while self._member.applying:
            try:
                self._member.apply()
            except ConfChangeError:  # as an applier does that refuses a malformed entry
                self._steps = STEPS_MAX
                raise InvariantError("an entry is no change of members") from None
        self._member.node.tick()


def _batches() -> list[bytes]:
    entries = [Entry(1, 3, b"x" * 20), Entry(2, 4, b"y")]
    snapshot = SnapshotMeta(9, 2, ConfState(VOTERS, (4,)))
    kinds = [
        Message(MessageType.APPEND, to=1, from_=2, term=2, log_term=1, index=2, entries=entries, commit=3),
        Message(MessageType.APPEND_RESPONSE, to=1, from_=2, term=2, index=4),
        Message(MessageType.APPEND_RESPONSE, to=1, from_=3, term=2, index=4, reject=True, reject_hint=3, log_term=1),
        Message(MessageType.HEARTBEAT, to=1, from_=2, term=2, commit=2, context=b"c" * 8),
        Message(MessageType.HEARTBEAT_RESPONSE, to=1, from_=2, term=2, context=b"c" * 8),
        Message(MessageType.SNAPSHOT, to=1, from_=2, term=2, snapshot=snapshot),
        Message(MessageType.PROPOSE, to=1, from_=2, entries=[Entry(0, 0, b"p")]),
    ]
    kinds += [
        Message(kind, to=1, from_=3, term=2, log_term=1, index=2, context=b"12345678")
        for kind in MessageType
        if kind not in {message.type for message in kinds}
    ]
    encoder = BatchEncoder()
    return [batch for message in kinds for batch in encoder.batches([message])] + list(encoder.batches(kinds))


def _changes() -> list[bytes]:
    context = raft_pb2.MembershipChange(request_id=7, learners_max=1).SerializeToString()
    steps = tuple(ConfChangeSingle(kind, node) for node, kind in enumerate(ConfChangeType, start=4))
    return [
        confchange.encode(ConfChange((ConfChangeSingle(ConfChangeType.ADD_NODE, 4),), context=context)),
        confchange.encode(ConfChange(steps, ConfChangeTransition.JOINT_EXPLICIT)),
        confchange.encode(ConfChange()),
    ]


def _change(directory: Path) -> Parse:
    def parse(data: bytes) -> None:
        change = confchange.decode(data)
        assert confchange.decode(confchange.encode(change)) == change
        config = confchange.restore(ConfState(voters=VOTERS, learners=(4,)))
        confchange.check(confchange.apply(config, change))

    return parse


TYPES = tuple(bytes((8, kind)) for kind in MessageType) + tuple(bytes((0x18, kind)) for kind in EntryType)
TARGETS = (
    Target(
        "raft-follower", lambda directory: _Stepped(leads=False), _batches, (*REFUSED, InvariantError), tokens=TYPES
    ),
    Target("raft-leader", lambda directory: _Stepped(leads=True), _batches, (*REFUSED, InvariantError), tokens=TYPES),
    Target("conf-change", _change, _changes, (ConfChangeError,)),
)
