"""The members of the cluster, as agreed through the log, and the validation of membership changes.

Stored in two buckets: ``members``, id to ``etcdserverpb.Member``, and ``members_removed``, the ids of all former
members, which are kept for ever. Raft decides who votes (its ConfState is stored with the applied index); this module
has the members as shown to clients, and decides whether a change is valid when it is applied.

    entry of a change:  steps of Raft's configuration | context: MembershipChange (request id, the change)

    decision = membership.decide(data)      # pure: the entry's effect on the members, or its refusal
    membership.execute(decision, conf_state)   # once Raft has applied the change

Invariants

- ``decide`` depends only on the entry, the two buckets and the rights of the caller, so all members decide alike. Any
  bytes get a decision; a refused change alters neither the members nor Raft's configuration.
- A member that leaves by a joint change remains a member until the joint configuration is left: until then it votes.
- The id of a former member is never used again; no two members share a peer URL; there is at least one voter.
- The steps of an entry are those of its context (``conf_change_of``), so that the members shown and the voters never
  differ. An entry without context is Raft's own (leaving a joint configuration) and shows nothing.
- The raftkv version that a member published is in the cluster bucket, because older versions do not look there.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from google.protobuf.message import DecodeError

from raftkv import errors
from raftkv.apply.alarms import MetaStore
from raftkv.apply.wire import Caller
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.raft import confchange
from raftkv.raft.errors import ConfChangeError
from raftkv.raft.types import ConfChange, ConfChangeSingle, ConfChangeType, ConfState
from raftkv.storage import schema

_KEY: Final = struct.Struct(">Q")
_REMOVED: Final = b"removed"
"""Value of the id of a former member (as in etcd)."""

Change = raft_pb2.MemberChange
Members = Mapping[int, rpc_pb2.Member]


@dataclass(frozen=True, slots=True)
class Decision:
    """The effect of an entry that changes the configuration.

    Attributes:
        request_id: identifies the waiting caller.
        change: change for Raft; ``None`` if nothing changes.
        members: new or changed members.
        removed: ids of members that leave.
        has_caller: whether a user requested it.
        error: why nothing changes.
    """

    request_id: int = 0
    change: ConfChange | None = None
    members: tuple[rpc_pb2.Member, ...] = ()
    removed: tuple[int, ...] = ()
    has_caller: bool = False
    error: errors.StatusError | None = None


def conf_change_of(record: raft_pb2.MembershipChange) -> ConfChange:
    """Return the change of Raft's configuration for a change of members.

    Arguments:
        record: one change is one step; several are one joint change with ``auto_leave``.
    """
    steps = tuple(ConfChangeSingle(_step_of(change), change.member.ID) for change in record.changes)
    return ConfChange(steps, context=record.SerializeToString(deterministic=True))


_URL: Final = re.compile(
    r"(?:https?|unixs?)://(?:[^,/?#]*@)?(?:\[[0-9a-f:.]*:[0-9a-f:.]*(?:%25[^],/?#]*)?]|[^][:,/?#@]*)"
    r":0*(?P<port>[0-9]{0,5})(?:[?#][^\s,]*)?",
    re.ASCII | re.IGNORECASE,
)
"""A URL with a port and without a path; an IP address of version 6 stands in brackets."""


def _is_url(text: str) -> bool:
    """Return whether a text is one URL, by fixed rules: versions with different rules would make members diverge.

    So not by ``urllib.parse``, whose rules differ between patch releases of Python. ``raftkv.urls`` is stricter, and
    refuses a call before it is proposed.
    """
    match = _URL.fullmatch(text)
    return match is not None and int(match["port"] or 0) <= 0xFFFF


def _member(record: tuple[bytes, bytes]) -> tuple[int, rpc_pb2.Member]:
    """Return a stored member, with its id. Raises ValueError, or a parsing error, if the record is not a member."""
    key, value = record
    member = rpc_pb2.Member.FromString(value)
    if _KEY.pack(member.ID) != key:
        raise ValueError(f"the record of member {key.hex()} is of member {member.ID:x}")
    return member.ID, member


def _step_of(change: raft_pb2.MemberChange) -> ConfChangeType:
    if change.kind == Change.REMOVE:
        return ConfChangeType.REMOVE_NODE
    if change.kind == Change.UPDATE:
        return ConfChangeType.UPDATE_NODE
    if change.kind == Change.ADD and change.member.isLearner:
        return ConfChangeType.ADD_LEARNER_NODE
    return ConfChangeType.ADD_NODE


@dataclass(slots=True)
class _Draft:
    """The members while the parts of one change are checked."""

    members: dict[int, rpc_pb2.Member]
    gone: frozenset[int]
    learners_max: int | None
    changed: dict[int, rpc_pb2.Member] = field(default_factory=dict)
    removed: list[int] = field(default_factory=list)

    def take(self, change: raft_pb2.MemberChange) -> None:
        """Apply one part of the change. Raises StatusError if it is not valid now."""
        member_id = change.member.ID
        if change.kind == Change.ADD:
            self._add(change.member)
            return
        member = self.members.get(member_id)
        if member is None:
            raise errors.MemberNotFoundError
        if change.kind == Change.REMOVE:
            del self.members[member_id]
            self.changed.pop(member_id, None)
            self.removed.append(member_id)
        elif change.kind == Change.UPDATE:
            self._check_urls(member_id, change.member.peerURLs)
            self._put(member, peer_urls=change.member.peerURLs)
        elif change.kind == Change.PROMOTE:
            if not member.isLearner:
                raise errors.MemberNotLearnerError
            self._put(member, promoted=True)
        else:
            raise errors.MalformedEntryError

    def _add(self, member: rpc_pb2.Member) -> None:
        if member.ID in self.gone or member.ID in self.removed:
            raise errors.MemberNotFoundError  # etcd's error for the id of a former member
        if member.ID in self.members:
            raise errors.MemberExistsError
        if member.ID == 0:
            raise errors.MalformedEntryError
        self._check_urls(member.ID, member.peerURLs)
        learners = sum(each.isLearner for each in self.members.values())
        if member.isLearner and self.learners_max is not None and learners + 1 > self.learners_max:
            raise errors.TooManyLearnersError
        added = rpc_pb2.Member()
        added.CopyFrom(member)
        self.members[member.ID] = self.changed[member.ID] = added

    def _check_urls(self, member_id: int, urls: Iterable[str]) -> None:
        urls = set(urls)
        if not urls or not all(map(_is_url, urls)):
            raise errors.BadMemberURLsError
        for other in self.members.values():
            if member_id != other.ID and not urls.isdisjoint(other.peerURLs):
                raise errors.PeerURLExistsError

    def _put(self, member: rpc_pb2.Member, peer_urls: Iterable[str] | None = None, promoted: bool = False) -> None:
        changed = rpc_pb2.Member()
        changed.CopyFrom(member)
        if peer_urls is not None:
            changed.peerURLs[:] = peer_urls
        if promoted:
            changed.isLearner = False
        self.members[member.ID] = self.changed[member.ID] = changed

    def check_voters(self) -> None:
        """Raise ``NotEnoughStartedMembersError`` if no voter would be left."""
        if all(member.isLearner for member in self.members.values()):
            raise errors.NotEnoughStartedMembersError


class Membership:
    """The members by id, and the ids of former members.

    Arguments:
        store: store of the members.

    Attributes:
        check_caller: refuses a change depending on its caller; set by the applier, which knows users and roles.
    """

    def __init__(self, store: MetaStore) -> None:
        self._store = store
        self.members: dict[int, rpc_pb2.Member] = {}
        self._versions: dict[int, str] = {}
        self.check_caller: Callable[[Caller | None], None] = lambda caller: None
        self.removed: set[int] = set()
        self.reload()

    def reload(self) -> None:
        """Read the members from the store: at start, and after a snapshot replaced it."""
        with schema.reading(schema.MEMBERS):
            self.members = dict(map(_member, self._store.meta_items(schema.MEMBERS)))
            self.removed = {_KEY.unpack(key)[0] for key, _ in self._store.meta_items(schema.MEMBERS_REMOVED)}
        prefix = schema.CLUSTER_VERSION_PREFIX
        with schema.reading(schema.CLUSTER):
            self._versions = {
                _KEY.unpack(key[len(prefix) :])[0]: value.decode(errors="replace")
                for key, value in self._store.meta_items(schema.CLUSTER)
                if key.startswith(prefix)
            }

    def bootstrap(self, members: Iterable[rpc_pb2.Member]) -> None:
        """Write the initial members of a member without data."""
        for member in members:
            self._save(member)

    def set_attributes(self, record: raft_pb2.MemberRecord) -> None:
        """Store the name and the client URLs that a member published; unknown members are ignored, as they may have
        left.
        """
        member = self.members.get(record.member.ID)
        if member is None:
            return
        changed = rpc_pb2.Member()
        changed.CopyFrom(member)
        changed.name = record.member.name
        changed.ClearField("clientURLs")
        changed.clientURLs.extend(record.member.clientURLs)
        self._save(changed)
        self._save_version(member.ID, record.version)

    def version_of(self, member_id: int) -> str:
        """Return the version that a member published; empty if it has not published one."""
        return self._versions.get(member_id, "")

    def list(self) -> list[rpc_pb2.Member]:
        """Return all members by id."""
        return [self.members[member_id] for member_id in sorted(self.members)]

    def decide(self, data: bytes) -> Decision:
        """Return the effect of an entry that changes the configuration, without changing anything.

        Arguments:
            data: data of the entry; any bytes.
        """
        try:
            change = confchange.decode(data)
        except ConfChangeError:
            return Decision(error=errors.MalformedEntryError())
        if not change.context:
            return Decision(change=change)
        try:
            record = raft_pb2.MembershipChange.FromString(change.context)
        except DecodeError:
            return Decision(error=errors.MalformedEntryError())
        try:
            return self._decide(change, record)
        except errors.StatusError as error:
            return Decision(record.request_id, error=error.with_traceback(None))  # drop the frames of applying

    def _decide(self, change: ConfChange, record: raft_pb2.MembershipChange) -> Decision:
        wanted = conf_change_of(record)
        if not record.changes or (change.changes, change.transition) != (wanted.changes, wanted.transition):
            raise errors.MalformedEntryError
        caller = Caller(record.caller.user, record.caller.auth_revision) if record.HasField("caller") else None
        self.check_caller(caller)
        draft = self.draft(record)
        members, removed = tuple(draft.changed.values()), tuple(draft.removed)
        return Decision(record.request_id, change, members, removed, has_caller=bool(record.caller.user))

    def draft(self, record: raft_pb2.MembershipChange) -> _Draft:
        """Return the members as a change would make them.

        Raises:
            StatusError: the change is not valid now; the same error as applying it now would give.
        """
        learners_max = record.learners_max if record.HasField("learners_max") else None
        draft = _Draft(dict(self.members), frozenset(self.removed), learners_max)
        for part in record.changes:
            draft.take(part)
        draft.check_voters()
        return draft

    def execute(self, decision: Decision, conf_state: ConfState) -> None:
        """Execute the decision on an entry that Raft has applied too.

        Arguments:
            decision: decision on the entry.
            conf_state: the configuration after it.
        """
        for member in decision.members:
            self._save(member)
        removed = set(decision.removed)
        if decision.change is not None and not decision.change.changes:  # a joint configuration was left
            removed = self.members.keys() - {*conf_state.voters, *conf_state.learners}
        # A member that leaves by a joint change votes until that is left, so it must stay connected until then.
        for member_id in sorted(removed.difference(conf_state.voters_outgoing)):
            self._remove(member_id)

    def _remove(self, member_id: int) -> None:
        self.members.pop(member_id, None)
        self.removed.add(member_id)
        key = _KEY.pack(member_id)
        self._store.meta_delete(schema.MEMBERS, key)
        self._store.meta_put(schema.MEMBERS_REMOVED, key, _REMOVED)
        self._save_version(member_id, "")

    def _save_version(self, member_id: int, version: str) -> None:
        if version == self._versions.get(member_id, ""):
            return
        key = schema.CLUSTER_VERSION_PREFIX + _KEY.pack(member_id)
        if version:
            self._versions[member_id] = version
            self._store.meta_put(schema.CLUSTER, key, version.encode())
        else:
            self._versions.pop(member_id, None)
            self._store.meta_delete(schema.CLUSTER, key)

    def _save(self, member: rpc_pb2.Member) -> None:
        self.members[member.ID] = member
        self._store.meta_put(schema.MEMBERS, _KEY.pack(member.ID), member.SerializeToString(deterministic=True))


# -- downgrade ------------------------------------------------------------------------------------------------------
#
# The downgrade job of the cluster, agreed through the log: the version to go back to.
#
# One record of the cluster bucket, with etcd's name and form, so that etcd's tools find it in a snapshot file. There is
# at most one job: an entry that would begin a second one, or cancel an absent one, is refused on every member alike.
# (etcd checks this on the member that got the request, so two concurrent requests both succeed there.)
#
#     {"target-version":"3.5.0","enabled":true}
#
# While there is a job, its target is the version of the cluster, and of the snapshot files that it makes, which etcd of
# that version can restore. raftkv's own format stays the same. Not here: which versions may be requested
# (``server/maintenance/service``).


class Downgrade:
    """The downgrade job, if there is one.

    Arguments:
        store: store of the job.

    Attributes:
        info: the job, as shown by ``Status``.
    """

    def __init__(self, store: MetaStore) -> None:
        self._store = store
        self.info = rpc_pb2.DowngradeInfo()
        self.reload()

    def reload(self) -> None:
        """Read the job from the store: at start, and after a snapshot replaced it."""
        record = dict(self._store.meta_items(schema.CLUSTER)).get(schema.CLUSTER_DOWNGRADE)
        enabled, target = schema.decode_downgrade(record)
        self.info = rpc_pb2.DowngradeInfo(enabled=enabled, targetVersion=target)

    @property
    def cluster_version(self) -> str:
        """Version of the cluster, and of its storage: ``MAJOR.MINOR.0``."""
        return self.info.targetVersion if self.info.enabled else schema.CLUSTER_VERSION

    def execute(self, wanted: rpc_pb2.DowngradeInfo) -> None:
        """Begin a job, or cancel it if ``wanted`` is not enabled.

        Raises:
            DowngradeInProcessError: there is already a job.
            NoInflightDowngradeError: there is no job.
        """
        if wanted.enabled and self.info.enabled:
            raise errors.DowngradeInProcessError
        if not wanted.enabled and not self.info.enabled:
            raise errors.NoInflightDowngradeError
        target = wanted.targetVersion if wanted.enabled else ""
        self.info = rpc_pb2.DowngradeInfo(enabled=wanted.enabled, targetVersion=target)
        record = {"target-version": target, "enabled": wanted.enabled}
        self._store.meta_put(
            schema.CLUSTER, schema.CLUSTER_DOWNGRADE, json.dumps(record, separators=(",", ":")).encode()
        )
