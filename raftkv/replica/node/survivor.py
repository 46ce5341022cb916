"""One member goes on alone: ``--force-new-cluster``, for a cluster that has lost its quorum for good.

    log      ... 7 8 | 9 10              8: the last entry that is known to be committed; 9 and 10 are discarded
             ... 7 8 | leave  remove 2  remove 3      entries that this member writes and commits by itself

As etcd does it: keys, leases, ids and the id of the cluster stay; what was not known to be committed is discarded; all
other members are removed for good, by entries of the log like any others, so a restart without the flag goes on from
there, and members can be added again (under new ids).

Invariants

- The entries and the commit index that covers them are one frame of the log: after a crash at any moment either
  nothing has changed or all of it has.
- A member that decides alone already has nothing to discard: all that is durable here is committed.
- The steps are those that a leader may propose: one voter at a time, a joint configuration is left first, a learner
  votes before the last voter goes.

Danger: acknowledged writes that this member does not have are lost for good. The members that are
removed must never run again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from raftkv.apply.membership import Membership, conf_change_of
from raftkv.errors import MemberRemovedError, StorageError
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.raft import confchange
from raftkv.raft.confchange import Configuration
from raftkv.raft.errors import ConfChangeError
from raftkv.raft.log import MemoryLog
from raftkv.raft.types import NO_LIMIT, ConfChange, Entry, EntryType, HardState
from raftkv.storage import schema
from raftkv.storage.mvcc import Store
from raftkv.storage.wal import WAL

_log = logging.getLogger(__name__)


def go_on_alone(member_id: int, wal: WAL, log: MemoryLog, store: Store) -> None:
    """Make this member the only one of its cluster; durable on return.

    Arguments:
        member_id: of this member.
        wal, log: on disk and in memory, with everything that is known to be committed marked so.
        store: the database.

    Raises:
        StorageError: this member does not belong to the cluster.
        MemberRemovedError: it was removed.
    """
    state, _ = log.initial_state()
    future = _Future.at(log, store, state.commit)
    if future.config.all_voters() == {member_id}:
        # It needed no other vote: it may have acknowledged an entry as soon as that was durable here.
        state = HardState(state.term, state.vote, log.last_index())
        future = _Future.at(log, store, state.commit)
    if member_id in future.membership.removed:
        raise MemberRemovedError(MemberRemovedError.text)
    if member_id not in future.config.members() or member_id not in future.membership.members:
        raise StorageError(
            f"--force-new-cluster: member {member_id:x} does not belong to the cluster of its data: it was added, but "
            "has not heard of that yet; take another survivor"
        )
    discarded = log.last_index() - state.commit
    removed = future.leave_all_but(member_id)
    if not future.changes:
        _log.warning("--force-new-cluster: this member is the only one already; start it without the flag")
        return
    term = max(state.term, 1)
    entries = [
        Entry(term, index, confchange.encode(change), confchange.entry_type(change))
        for index, change in enumerate(future.changes, state.commit + 1)
    ]
    written = HardState(term, state.vote, entries[-1].index)
    wal.append(written, entries)
    wal.sync()
    log.append(entries)
    log.set_hard_state(written)
    _log.warning(
        "--force-new-cluster: this member goes on alone after entry %d (revision %d or later); removed for good: %s; "
        "discarded: %d entries that were not known to be committed; start it without the flag from now on, and never "
        "start the others again with their data",
        state.commit,
        store.revision,
        ", ".join(f"{one:x}" for one in removed),
        discarded,
    )


class _Records:
    """The buckets of the members as they will be, in memory."""

    def __init__(self, store: Store) -> None:
        self._buckets = {
            name: dict(store.meta_items(name)) for name in (schema.MEMBERS, schema.MEMBERS_REMOVED, schema.CLUSTER)
        }

    def meta_put(self, bucket: bytes, key: bytes, value: bytes) -> None:
        """Implement ``MetaStore.meta_put``."""
        self._buckets[bucket][key] = value

    def meta_delete(self, bucket: bytes, key: bytes) -> None:
        """Implement ``MetaStore.meta_delete``."""
        self._buckets[bucket].pop(key, None)

    def meta_items(self, bucket: bytes) -> list[tuple[bytes, bytes]]:
        """Implement ``MetaStore.meta_items``."""
        return sorted(self._buckets[bucket].items())


@dataclass(slots=True)
class _Future:
    """Configuration and members as they are once entries are applied, and the changes that follow.

    Where users are asked for, an entry that is not applied yet may be refused because of who caused it, and that is not
    known here. So members that such an entry names are dealt with in either case: a change that has no effect by
    then is refused.
    """

    config: Configuration
    membership: Membership
    changes: list[ConfChange] = field(default_factory=list)
    in_doubt: set[int] = field(default_factory=set)

    @classmethod
    def at(cls, log: MemoryLog, store: Store, index: int) -> _Future:
        """Return what they are after an entry that is not applied yet."""
        future = cls(confchange.restore(store.conf_state), Membership(_Records(store)))
        for entry in log.entries(store.applied_index + 1, index + 1, NO_LIMIT) if index > store.applied_index else ():
            if entry.type != EntryType.NORMAL:
                future.apply(entry.data)
        return future

    def apply(self, data: bytes) -> None:
        """Do what a member does with an entry that changes the configuration (``Node.apply_conf_change``)."""
        decision = self.membership.decide(data)
        if decision.has_caller:
            self.in_doubt.update(decision.removed, (member.ID for member in decision.members))
        if decision.error is not None or decision.change is None:
            return
        try:
            self.config = confchange.apply(self.config, decision.change)
        except ConfChangeError:
            return
        self.membership.execute(decision, self.config.conf_state())

    def leave_all_but(self, member_id: int) -> list[int]:
        """Note the changes after which one member is alone; who is removed by them."""
        if self.config.joint:
            self._change(ConfChange())
        kinds = raft_pb2.MemberChange
        if member_id in self.config.learners or member_id in self.in_doubt:
            self._change(_step(kinds.PROMOTE, member_id))
        removed = sorted(set(self.membership.members) - {member_id})
        for other in sorted({*removed, *self.in_doubt} - {member_id}):
            self._change(_step(kinds.REMOVE, other))
        return removed

    def _change(self, change: ConfChange) -> None:
        self.changes.append(change)
        self.apply(confchange.encode(change))


def _step(kind: raft_pb2.MemberChange.Kind, member_id: int) -> ConfChange:
    part = raft_pb2.MemberChange(kind=kind, member=rpc_pb2.Member(ID=member_id))
    return conf_change_of(raft_pb2.MembershipChange(changes=[part], caller=raft_pb2.Caller()))
