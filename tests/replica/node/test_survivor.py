"""--force-new-cluster on the disk: written data, kept data, and crashes at any step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from raftkv.apply.membership import Membership, conf_change_of
from raftkv.apply.wire import Caller
from raftkv.config import ServerConfig
from raftkv.errors import ConfigError, MemberRemovedError, PermissionDeniedError, StorageError
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.raft import confchange
from raftkv.raft.types import (
    NO_LIMIT,
    ConfChange,
    ConfChangeSingle,
    ConfChangeType,
    ConfState,
    Entry,
    EntryType,
    HardState,
)
from raftkv.replica.node.bootstrap import Durable
from raftkv.storage import failpoints
from raftkv.storage.failpoints import FailpointPanic
from tests.replica.node.durable import close, opened

URLS = [f"http://127.0.0.1:{port}" for port in (1, 2, 3)]
KINDS = raft_pb2.MemberChange


def config_of(tmp_path: Path, *, force: bool = False) -> ServerConfig:
    return ServerConfig(
        name="m0",
        data_dir=str(tmp_path / "data"),
        initial_cluster=",".join(f"m{number}={url}" for number, url in enumerate(URLS)),
        initial_advertise_peer_urls=(URLS[0],),
        listen_peer_urls=(URLS[0],),
        force_new_cluster=force,
    )


def normal(index: int, data: bytes = b"") -> Entry:
    return Entry(1, index, data)


def changing(index: int, change: ConfChange) -> Entry:
    return Entry(1, index, confchange.encode(change), confchange.entry_type(change))


def member_change(*parts: tuple[raft_pb2.MemberChange.Kind, rpc_pb2.Member]) -> ConfChange:
    changes = [raft_pb2.MemberChange(kind=kind, member=member) for kind, member in parts]
    return conf_change_of(raft_pb2.MembershipChange(request_id=7, changes=changes))


def written(tmp_path: Path, entries: Sequence[Entry], commit: int, applied: int = 0) -> tuple[int, list[int]]:
    """A member of three with so many entries; its id, and those of the others."""
    durable = opened(config_of(tmp_path))
    durable.wal.append(HardState(1, 0, commit), entries)
    durable.wal.sync()
    if applied:
        durable.mark.note(applied, 1)
    others = [voter for voter in durable.store.conf_state.voters if voter != durable.member_id]
    close(durable)
    return durable.member_id, others


class After:
    """What a member is once it has applied what its log says is committed."""

    def __init__(self, durable: Durable, refused: str = "") -> None:
        state = durable.log.hard_state
        self.commit, self.last = state.commit, durable.log.last_index()
        self.config = confchange.restore(durable.store.conf_state)
        self.membership = Membership(durable.store)
        if refused:
            self.membership.check_caller = partial(_refuse, refused.encode())
        self.kept = []
        for entry in durable.log.entries(durable.store.applied_index + 1, state.commit + 1, NO_LIMIT):
            if entry.type == EntryType.NORMAL:
                self.kept.append(entry.index)
                continue
            decision = self.membership.decide(entry.data)
            if refused and decision.error is not None:
                continue
            assert decision.error is None
            assert decision.change is not None
            self.config = confchange.apply(self.config, decision.change)
            self.membership.execute(decision, self.config.conf_state())
        durable.store.set_applied(0, 0)

    @property
    def summary(self) -> tuple[ConfState, list[int], set[int]]:
        return self.config.conf_state(), sorted(self.membership.members), self.membership.removed


def _refuse(user: bytes, caller: Caller | None) -> None:
    if caller is None or caller.user == user:
        raise PermissionDeniedError


def after(tmp_path: Path, *, force: bool, refused: str = "") -> After:
    durable = opened(config_of(tmp_path, force=force))
    found = After(durable, refused)
    close(durable)
    return found


def test_survivor_removes_others_and_keeps_committed_entries(tmp_path: Path) -> None:
    mine, others = written(tmp_path, [normal(1), normal(2), normal(3)], commit=2)
    found = after(tmp_path, force=True)
    assert found.summary == (ConfState(voters=(mine,)), [mine], set(others))
    assert found.kept == [1, 2]
    assert found.commit == found.last == 4, "entry 3 was not known to be committed"


def test_shown_state_survives(tmp_path: Path) -> None:
    """The mark of what was applied counts: the commit index in the log lags behind it."""
    written(tmp_path, [normal(1), normal(2), normal(3)], commit=1, applied=2)
    assert after(tmp_path, force=True).kept == [1, 2]


def test_restart_without_flag_continues(tmp_path: Path) -> None:
    written(tmp_path, [normal(1), normal(2)], commit=2)
    forced = after(tmp_path, force=True)
    again = after(tmp_path, force=False)
    assert (again.summary, again.commit) == (forced.summary, forced.commit)


def test_the_flag_again_changes_nothing(tmp_path: Path) -> None:
    written(tmp_path, [normal(1), normal(2)], commit=2)
    forced = after(tmp_path, force=True)
    again = after(tmp_path, force=True)
    assert (again.summary, again.last) == (forced.summary, forced.last)


def test_one_that_is_alone_keeps_all_that_is_durable(tmp_path: Path) -> None:
    mine, others = written(tmp_path, [normal(1)], commit=1)
    after(tmp_path, force=True)
    durable = opened(config_of(tmp_path))
    durable.wal.append(None, [Entry(2, 4, b"acknowledged")])
    durable.wal.sync()
    close(durable)
    found = after(tmp_path, force=True)
    assert found.last == 4, "a single voter has acknowledged what is on its disk"
    assert found.summary == (ConfState(voters=(mine,)), [mine], set(others))


def test_the_only_voter_of_learners_keeps_all_that_is_durable(tmp_path: Path) -> None:
    """Keep what is on its disk: it has acknowledged that, and a power cut took the mark of what was applied."""
    mine, others = written(tmp_path, [normal(1)], commit=1)
    after(tmp_path, force=True)
    learner = rpc_pb2.Member(ID=99, peerURLs=["http://127.0.0.1:99"], isLearner=True)
    voter = rpc_pb2.Member(ID=98, peerURLs=["http://127.0.0.1:98"])
    durable = opened(config_of(tmp_path))
    durable.wal.append(HardState(2, mine, 4), [Entry(2, 4, *_changed(member_change((KINDS.ADD, learner))))])
    durable.wal.append(None, [Entry(2, 5, b"acknowledged"), Entry(2, 6, *_changed(member_change((KINDS.ADD, voter))))])
    durable.wal.append(None, [Entry(2, 7, b"perhaps by one of two")])
    durable.wal.sync()
    close(durable)
    found = after(tmp_path, force=True)
    assert found.summary == (ConfState(voters=(mine,)), [mine], {*others, 98, 99})
    assert {5, 7} <= set(found.kept)


def _changed(change: ConfChange) -> tuple[bytes, EntryType]:
    return confchange.encode(change), confchange.entry_type(change)


@pytest.mark.parametrize("is_left", [False, True])
def test_a_joint_configuration_is_left_first(tmp_path: Path, is_left: bool) -> None:
    mine, others = written(tmp_path, [], commit=0)
    new = rpc_pb2.Member(ID=99, peerURLs=["http://127.0.0.1:99"])
    joint = member_change((KINDS.ADD, new), (KINDS.REMOVE, rpc_pb2.Member(ID=others[0])))
    entries = [normal(1), changing(2, joint), changing(3, ConfChange())]
    durable = opened(config_of(tmp_path))
    durable.wal.append(HardState(1, 0, 3 if is_left else 2), entries)
    durable.wal.sync()
    close(durable)
    found = after(tmp_path, force=True)
    assert found.summary == (ConfState(voters=(mine,)), [mine], {*others, 99})


def test_member_whose_removal_is_unknown_is_removed(tmp_path: Path) -> None:
    """Whether a change that is not applied yet will be refused, for want of rights, is not known to the survivor."""
    mine, others = written(tmp_path, [normal(1)], commit=1)
    part = raft_pb2.MemberChange(kind=raft_pb2.MemberChange.REMOVE, member=rpc_pb2.Member(ID=others[0]))
    record = raft_pb2.MembershipChange(changes=[part], caller=raft_pb2.Caller(user=b"alice", auth_revision=3))
    durable = opened(config_of(tmp_path))
    durable.wal.append(HardState(1, 0, 2), [changing(2, conf_change_of(record))])
    durable.wal.sync()
    close(durable)
    expected = ConfState(voters=(mine,)), [mine], set(others)
    assert after(tmp_path, force=True, refused="alice").summary == expected
    assert after(tmp_path, force=False, refused="bob").summary == expected


def test_a_learner_becomes_the_voter(tmp_path: Path) -> None:
    mine, others = written(tmp_path, [], commit=0)
    member = rpc_pb2.Member(ID=mine, name="m0", peerURLs=[URLS[0]], isLearner=True)
    durable = opened(config_of(tmp_path))
    Membership(durable.store).bootstrap([member])
    durable.store.set_conf_state(ConfState(voters=tuple(others), learners=(mine,)))
    durable.store.set_applied(0, 0)
    durable.store.commit()
    durable.wal.append(HardState(1, 0, 1), [normal(1)])
    durable.wal.sync()
    close(durable)
    found = after(tmp_path, force=True)
    assert found.summary == (ConfState(voters=(mine,)), [mine], set(others))
    assert not found.membership.members[mine].isLearner


def test_removed_member_cannot_be_survivor(tmp_path: Path) -> None:
    mine, _ = written(tmp_path, [], commit=0)
    durable = opened(config_of(tmp_path))
    removal = changing(1, member_change((KINDS.REMOVE, rpc_pb2.Member(ID=mine))))
    durable.wal.append(HardState(1, 0, 1), [removal])
    durable.wal.sync()
    close(durable)
    with pytest.raises(MemberRemovedError):
        opened(config_of(tmp_path, force=True))


def test_member_outside_its_conf_state_cannot_be_survivor(tmp_path: Path) -> None:
    mine, others = written(tmp_path, [], commit=0)
    durable = opened(config_of(tmp_path))
    durable.store.set_conf_state(ConfState(voters=tuple(others)))
    durable.store.set_applied(0, 0)
    durable.store.commit()
    close(durable)
    with pytest.raises(StorageError, match=f"member {mine:x} does not belong to the cluster of its data"):
        opened(config_of(tmp_path, force=True))


def test_a_directory_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no data of a member in"):
        opened(config_of(tmp_path, force=True))
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("name", ["walBeforeWrite", "walAfterWrite", "walBeforeSync", "walAfterSync"])
def test_a_crash_leaves_all_or_nothing(tmp_path: Path, name: str) -> None:
    mine, others = written(tmp_path, [normal(1), normal(2), normal(3)], commit=2)
    failpoints.arm(name, "raise")
    try:
        with pytest.raises(FailpointPanic):
            opened(config_of(tmp_path, force=True))
    finally:
        failpoints.disarm_all()
    found = after(tmp_path, force=False)
    three = (ConfState(voters=tuple(sorted((mine, *others)))), sorted((mine, *others)), set())
    alone = (ConfState(voters=(mine,)), [mine], set(others))
    assert found.summary == (three if name == "walBeforeWrite" else alone)
    assert found.kept == [1, 2]
    assert after(tmp_path, force=True).summary == alone


def test_steps_without_context_of_members_are_followed_too(tmp_path: Path) -> None:
    """A change that is refused when it is applied does not count."""
    _mine, others = written(tmp_path, [], commit=0)
    stray = ConfChange((ConfChangeSingle(ConfChangeType.REMOVE_NODE, others[0]),), context=b"\xff")
    durable = opened(config_of(tmp_path))
    durable.wal.append(HardState(1, 0, 1), [changing(1, stray)])
    durable.wal.sync()
    close(durable)
    durable = opened(replace(config_of(tmp_path), force_new_cluster=True))
    changes = [confchange.decode(entry.data) for entry in durable.log.entries(2, 4, NO_LIMIT)]
    assert [step.node_id for change in changes for step in change.changes] == sorted(others)
    close(durable)
