"""Comparison of members' state with the replay of the log; and the promises to lease owners.

Owns the committed entries, the replay, which gets each entry when the first member applies it, and the first violation.
The violation is kept and raised again at the end of the turn, because an exception inside production code stops the
member, not the simulation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from raftkv.pb import kv_pb2
from raftkv.raft.types import Entry
from tests.sim.clients.history import ViolationError
from tests.sim.clients.users import beginning
from tests.sim.replay import Change, Replay, key_value

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster
    from tests.sim.member import Member

BOOT_INDEX = 1
"""The cluster begins with a state that has the membership in it, as if it had run before."""


class StateChecks:
    """The part of ``Checkers`` that interprets the log."""

    def __init__(self, cluster: Cluster, disabled: frozenset[str]) -> None:
        self._cluster = cluster
        self._disabled = disabled
        self._expired: dict[int, float] = {}
        self.log: dict[int, Entry] = {}
        """Every entry that was handed out to be applied."""
        self.replay = Replay(BOOT_INDEX)
        if cluster.parameters.has_users:
            self.replay.begin_with_users(beginning())
        self.violation: ViolationError | None = None
        self.promises: dict[int, float] = {}
        """Until when the owner of each lease may rely on it."""

    def fail(self, property_id: str, text: str) -> None:
        """Report a broken property. Raises ViolationError, unless its check is off."""
        if property_id not in self._disabled:
            self.violated(ViolationError(property_id, f"{text} (at {self._cluster.scheduler.now:.6f} s)"))

    def violated(self, error: ViolationError) -> NoReturn:
        """Keep the first violation and abort the current action."""
        self.violation = self.violation or error
        raise error

    # -- what members have ----------------------------------------------------------------------------------

    def changed(self, member: Member, revision: int, changes: list[Change]) -> None:
        """Check that the replay has a store's new revision with the same changes."""
        replay = self.replay
        while replay.revision < revision and replay.index + 1 in self.log:
            self._replay_next()
        wrong = replay.check_changes(revision, changes)
        if wrong:
            self.fail("R4", f"{member.id}: {wrong}")

    def check_state(self, member: Member, index: int) -> None:
        """Check that store and replay agree at an index."""
        replay, store = self.replay, member.store
        while replay.index < index:
            if replay.index + 1 not in self.log:
                self.fail("R4", f"{member.id} has applied {index}, no member was ever given {replay.index + 1}")
            self._replay_next()
        state = replay.states[index]
        users = member.applier.auth.revision
        is_state = (store.revision, store.compact_revision) == state[:2] and users == state.auth_revision
        if not is_state or len(member.applier.leases.granted) != state.leases:
            leases = sorted(member.applier.leases.granted)
            found = f"revision {store.revision}, compacted {store.compact_revision}, leases {leases}, users {users}"
            self.fail("R4", f"{member.id} has {found} at index {index}, the log gives {state}")

    def check_contents(self, member: Member) -> None:
        """Check all keys of a member that has just read its database."""
        wrong = self.contents_differ(member, member.store.revision)
        if wrong:
            self.fail("R4", wrong)

    def contents_differ(self, member: Member, revision: int) -> str:
        """Describe how a member's keys at a revision differ from the replay; empty if they do not."""
        found = tuple(
            key_value(kv_pb2.KeyValue.FromString(data))
            for data in member.store.range(b"\0", b"\0", revision=revision).kvs
        )
        expected = self.replay.read("\0", "\0", revision)
        return "" if found == expected else f"{member.id} has {found} at revision {revision}, the log gives {expected}"

    # -- what the log does, and what owners of leases know of it --------------------------------------------

    def _replay_next(self) -> None:
        replay = self.replay
        try:
            replay.apply(self.log[replay.index + 1])
        except ViolationError as error:
            self.violated(error)
        now = self._cluster.scheduler.now
        for lease_id, expired in replay.ended:
            self._expired[lease_id] = now
            until = self.promises.get(lease_id, 0.0)
            if expired and now < until:
                self.fail("L2", f"lease {lease_id} ended, its owner was promised {until - now:.6f} s more")

    def kept_alive(self, lease_id: int, sent_at: float, ttl_s: int) -> None:
        """Record an answered renewal, from which L2 counts; check that no ended lease is revived (L5)."""
        if ttl_s <= 0:
            return
        if self._expired.get(lease_id, sent_at + 1.0) < sent_at:
            self.fail("L5", f"lease {lease_id} was kept alive {sent_at - self._expired[lease_id]:.6f} s after its end")
        self.promises[lease_id] = max(self.promises.get(lease_id, 0.0), sent_at + ttl_s)

    def let_go(self, lease_id: int, grace_s: float) -> None:
        """Record that a lease's owner lost the connection whose disconnect grace then begins."""
        until = self._cluster.scheduler.now + grace_s
        self.promises[lease_id] = min(self.promises.get(lease_id, 0.0), until)

    def found_gone(self, lease_id: int) -> None:
        """Check an answer "lease not found" to an owner: the log must have ended the lease."""
        if lease_id in self.replay.leases:
            self.fail("L5", f"the owner of lease {lease_id} was answered that it is gone, in the log it is not")
