"""Applied membership changes against a model: members, voters, removed members, and every refusal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftkv import errors
from raftkv.apply.membership import Change, Membership, conf_change_of
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.raft import confchange
from raftkv.raft.errors import ConfChangeError
from raftkv.raft.types import ConfChange, ConfChangeSingle, ConfChangeTransition, ConfChangeType
from raftkv.storage.mvcc import Store
from tests.storage.memory import MemoryBackend

FOUNDERS = (1, 2, 3)


def url(number: int) -> str:
    return f"http://m{number}:2380"


class Replica:
    """The members and Raft's configuration of one member, changed only by entries."""

    def __init__(self) -> None:
        self.store = Store.open(MemoryBackend())
        self.membership = Membership(self.store)
        self.membership.bootstrap(rpc_pb2.Member(ID=each, name=f"m{each}", peerURLs=[url(each)]) for each in FOUNDERS)
        self.config = confchange.Configuration(voters=frozenset(FOUNDERS))

    def apply(self, data: bytes) -> errors.StatusError | None:
        """Do as ``Node.apply_conf_change`` does, and leave a joint configuration as Raft does by itself."""
        decision = self.membership.decide(data)
        if decision.error is not None:
            return decision.error
        try:
            self.config = confchange.apply(self.config, decision.change or ConfChange())
        except ConfChangeError as error:
            return errors.ConfChangeRefusedError(str(error))
        self.membership.execute(decision, self.config.conf_state())
        if self.config.auto_leave:
            outgoing = self.config.outgoing
            assert outgoing <= self.membership.members.keys(), "who votes is a member"
            self.apply(confchange.encode(ConfChange()))
        return None

    def state(self) -> tuple[object, ...]:
        return self.membership.list(), sorted(self.membership.removed), self.config


@dataclass
class Model:
    """etcd's rules on plain dicts: id to (URLs, learner)."""

    members: dict[int, tuple[frozenset[str], bool]]
    gone: set[int] = field(default_factory=set)

    def apply(self, parts: list[tuple[str, int, frozenset[str], bool]], learners_max: int | None) -> type | None:
        """The error of a change, or None after making it."""
        members, gone = dict(self.members), set(self.gone)
        for kind, member, urls, learner in parts:
            error = self._part(members, gone, kind, member, urls, learner, learners_max)
            if error is not None:
                return error
        if not any(not learner for _, learner in members.values()):
            return errors.NotEnoughStartedMembersError
        self.members, self.gone = members, gone
        return None

    def _part(self, members: Any, gone: Any, kind: str, member: int, urls: Any, learner: bool, most: Any) -> Any:
        taken = frozenset().union(*(theirs for each, (theirs, _) in members.items() if each != member))
        if kind == "ADD":
            if member in gone:
                return errors.MemberNotFoundError
            if member in members:
                return errors.MemberExistsError
            if not urls or urls & taken:
                return errors.PeerURLExistsError if urls else errors.BadMemberURLsError
            if learner and most is not None and sum(is_one for _, is_one in members.values()) >= most:
                return errors.TooManyLearnersError
            members[member] = urls, learner
            return None
        if member not in members:
            return errors.MemberNotFoundError
        if kind == "REMOVE":
            del members[member]
            gone.add(member)
        elif kind == "UPDATE":
            if not urls or urls & taken:
                return errors.PeerURLExistsError if urls else errors.BadMemberURLsError
            members[member] = urls, members[member][1]
        elif not members[member][1]:
            return errors.MemberNotLearnerError
        else:
            members[member] = members[member][0], False
        return None


IDS = st.integers(1, 7)
PARTS = st.tuples(
    st.sampled_from(["ADD", "ADD", "REMOVE", "UPDATE", "PROMOTE"]),
    IDS,
    st.frozensets(st.integers(1, 9).map(url), max_size=2),
    st.booleans(),
)
CHANGES = st.tuples(st.lists(PARTS, min_size=1, max_size=3), st.sampled_from([None, 0, 1, 3]))


def record_of(
    parts: list[tuple[str, int, frozenset[str], bool]], learners_max: int | None
) -> raft_pb2.MembershipChange:
    record = raft_pb2.MembershipChange(request_id=7)
    for kind, member, urls, learner in parts:
        record.changes.add(
            kind=Change.Kind.Value(kind), member=rpc_pb2.Member(ID=member, peerURLs=sorted(urls), isLearner=learner)
        )
    if learners_max is not None:
        record.learners_max = learners_max
    return record


@settings(max_examples=120, deadline=None)
@given(st.lists(CHANGES, max_size=12))
def test_changes_match_model(changes: list[Any]) -> None:
    replica, model = Replica(), Model({each: (frozenset([url(each)]), False) for each in FOUNDERS})
    for parts, learners_max in changes:
        before = replica.state()
        error = replica.apply(confchange.encode(conf_change_of(record_of(parts, learners_max))))
        if isinstance(error, errors.ConfChangeRefusedError):
            # Only several parts at once can be more than one joint change takes: nothing is changed then.
            assert len(parts) > 1
            assert replica.state() == before
            continue
        expected = model.apply(parts, learners_max)
        assert (type(error) if error is not None else None) == expected
        if error is not None:
            assert replica.state() == before
        members = replica.membership.members
        assert {each: (frozenset(one.peerURLs), one.isLearner) for each, one in members.items()} == model.members
        assert replica.membership.removed == model.gone
        assert replica.config.voters == {each for each, (_, learner) in model.members.items() if not learner}
        assert replica.config.learners == {each for each, (_, learner) in model.members.items() if learner}
        again = Membership(replica.store)
        assert (again.members, again.removed) == (members, replica.membership.removed), "a restart forgets something"


ENTRIES = st.one_of(
    st.binary(max_size=40),
    st.builds(
        lambda steps, transition, context: confchange.encode(ConfChange(tuple(steps), transition, context)),
        st.lists(st.builds(ConfChangeSingle, st.sampled_from(ConfChangeType), IDS), max_size=3),
        st.sampled_from(ConfChangeTransition),
        st.one_of(
            st.binary(min_size=1, max_size=30), CHANGES.map(lambda change: record_of(*change).SerializeToString())
        ),
    ),
)


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(st.lists(ENTRIES, max_size=6))
def test_an_entry_of_any_bytes_has_one_outcome_on_all_members(entries: list[bytes]) -> None:
    one, other = Replica(), Replica()
    is_raft_alone = False
    for data in entries:
        before = one.state()
        error = one.apply(data)
        other.membership.reload()
        again = other.apply(data)
        assert repr(error) == repr(again)
        assert one.state() == other.state()
        if error is not None:
            assert one.state() == before
        is_raft_alone |= not _context(data) and error is None
        if not is_raft_alone:
            shown = {each.ID for each in one.membership.list()}
            assert one.config.members() == shown


def _context(data: bytes) -> bytes:
    try:
        return confchange.decode(data).context
    except ConfChangeError:
        return b""


def test_the_last_voter_stays() -> None:
    replica = Replica()
    for parts, error in (
        ([("ADD", 4, frozenset([url(4)]), True)], None),
        ([("REMOVE", 1, frozenset(), False)], None),
        ([("REMOVE", 2, frozenset(), False)], None),
        ([("REMOVE", 3, frozenset(), False)], errors.NotEnoughStartedMembersError),
        ([("REMOVE", 4, frozenset(), False)], None),
    ):
        found = replica.apply(confchange.encode(conf_change_of(record_of(parts, None))))
        assert (None if found is None else type(found)) is error
    assert [member.ID for member in replica.membership.list()] == [3]


def test_steps_differing_from_context_are_refused() -> None:
    replica = Replica()
    record = record_of([("REMOVE", 2, frozenset(), False)], None)
    wrong = ConfChange((ConfChangeSingle(ConfChangeType.REMOVE_NODE, 3),), context=record.SerializeToString())
    assert isinstance(replica.apply(confchange.encode(wrong)), errors.MalformedEntryError)
    assert [member.ID for member in replica.membership.list()] == [1, 2, 3]


@pytest.mark.parametrize(
    "text",
    [
        *("", "nonsense", "http://m1", "http://m1:port", "http://[::1:1", "http://a:1,http://b:1", " http://a:1"),
        *("\x00:1", "http://a:65536", "http://a:1/b", "http://[a:b:1", "http://[zz]:1", "http://[1.2.3.4]:1"),
    ],
)
def test_urls_without_a_connectable_address_are_refused(text: str) -> None:
    """Only a faulty member proposes them: its own check comes before."""
    replica = Replica()
    for kind in ("ADD", "UPDATE"):
        record = record_of([(kind, 3 if kind == "UPDATE" else 9, frozenset([text]), False)], None)
        assert isinstance(replica.apply(confchange.encode(conf_change_of(record))), errors.BadMemberURLsError)


@pytest.mark.parametrize(
    "text",
    [
        *("http://a:1", "HTTPS://a:", "unix://a:0", "http://:000080", "http://u:p@[::1]:1?x#y", "http://%c3%a4:65535"),
        *("http://[fe80::1%25eth0]:1", "http://[::ffff:1.2.3.4]:1", "http://[::1%25]:1"),
    ],
)
def test_urls_are_accepted_by_rules_that_no_release_of_python_changes(text: str, monkeypatch) -> None:
    monkeypatch.setattr("raftkv.apply.membership.urlsplit", None, raising=False)
    replica = Replica()
    record = record_of([("ADD", 9, frozenset([text]), False)], None)
    assert replica.apply(confchange.encode(conf_change_of(record))) is None


@pytest.mark.parametrize("kind", [200, -1])
def test_a_kind_of_change_that_is_not_known_is_refused(kind: Any) -> None:
    replica = Replica()
    record = raft_pb2.MembershipChange(changes=[Change(kind=kind, member=rpc_pb2.Member(ID=2))])
    assert isinstance(replica.apply(confchange.encode(conf_change_of(record))), errors.MalformedEntryError)
