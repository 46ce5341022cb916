"""Connects the parts of a member: every subscription is made here, in the order in which subscribers are called.

    wire(Parts(store=store, applier=applier, node=node, disk=disk, installer=installer, hub=hub, watch_runner=runner,
               lessor=lessor, guard=guard, graces=graces, leader_log=leader_log))

Parts are made first and know nothing of each other beyond what their constructors ask for; nothing happens before
``wire`` returns. ``Member`` calls it once, and so does the simulator of members: there is no socket, no process and no
time in here.

    store.on_changes        a write txn changed keys       -> watch hub
    leases.observer         a lease was applied            -> lease times -> lessor.on_end -> disconnect graces
    auth.on_change (and two more)   users were changed     -> tokens, live calls of users
    node.on_applied         a turn's entries are applied   -> live calls, watch hub, lessor
    node.on_leader_change   a leader is found or lost      -> leader guard, lessor, leader log
    node.on_conf_change     members or voters changed      -> admission, departure, connections to peers
    installer.on_swapped    the database was replaced      -> the log, the state beside the store, watch hub, hashes

Leaves out: callbacks that one object hands to one other (errors, wake-ups), which constructors take; and waits that
come and go (``Node.wait_until``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from raftkv.apply.applier import Applier
from raftkv.pb import rpc_pb2
from raftkv.raft.types import SnapshotMeta
from raftkv.server.auth.users import Users
from raftkv.server.lease.keep_alives import Graces
from raftkv.server.lease.lessor import Lessor
from raftkv.server.maintenance.hashes import Hashes
from raftkv.server.membership.presence import Departure
from raftkv.server.node.admission import Admission
from raftkv.server.node.disk import Batch, Marker
from raftkv.server.node.leader_log import LeaderLog
from raftkv.server.node.node import Node
from raftkv.server.services.leader_guard import LeaderGuard
from raftkv.server.watch.hub import WatchHub
from raftkv.server.watch.service import WatchRunner
from raftkv.storage.mvcc import Beside, Store


class Disk(Protocol):
    """Makes records of the log durable."""

    def submit(self, batch: Batch) -> None:
        """Write a batch, some time later."""


class Installer(Protocol):
    """Replaces the database by a received one."""

    on_received: list[Beside]
    """Called before that, with the received database."""
    on_swapped: list[Callable[[SnapshotMeta], None]]
    """Called in the turn of the swap, before an entry is applied to the new database."""


class Peers(Protocol):
    """The ways to the other members."""

    def follow(self, members: Mapping[int, rpc_pb2.Member], removed: Collection[int]) -> None:
        """Keep connections to these members, at their present URLs, and to none that was removed.

        Arguments:
            members: by id; this one is left out.
            removed: ids that have left.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of one member.

    Attributes:
        store, applier: the replicated state, and what changes it.
        node, disk: the loop, and where its log becomes durable.
        installer: replaces the store by a received database.
        hub, watch_runner: watches that are live, and those that are behind.
        guard: ends streams that insist on a leader; None where nobody serves streams.
        lessor: leases.
        graces: leases whose owner's connection is watched; None where there are no connections.
        hashes: of the last compactions; None where nobody compares them.
        users: who calls; None where nobody is asked.
        leader_log: writes about leaders to the log; None where nobody reads it.
        admission: refuses what a learner does not serve.
        departure: notices that this member was removed.
        peers: outgoing and incoming connections, in that order.
    """

    store: Store
    applier: Applier
    node: Node
    disk: Disk
    installer: Installer
    hub: WatchHub
    watch_runner: WatchRunner
    lessor: Lessor
    guard: LeaderGuard | None = None
    graces: Graces | None = None
    leader_log: LeaderLog | None = None
    admission: Admission | None = None
    departure: Departure | None = None
    peers: tuple[Peers, ...] = ()
    hashes: Hashes | None = None
    users: Users | None = None


def wire(parts: Parts) -> None:
    """Make every subscription among the parts of a member.

    Arguments:
        parts: made, not yet connected, and not started.
    """
    node, applier, hub, lessor = parts.node, parts.applier, parts.hub, parts.lessor

    # While an entry is applied: what changed is noted, nothing is sent yet.
    parts.store.on_changes = hub.changed
    applier.leases.observer = lessor.times
    if parts.graces is not None:
        lessor.on_end.append(parts.graces.lease_ended)

    # After the entries of a turn were applied and their callers answered. Watchers come first: an event of a key that
    # was deleted with its lease leaves before the keep-alive of that lease is answered with TTL 0.
    parts.watch_runner.hub = hub
    hub.on_damage = node.damaged
    # Before all of them, watches that may not go on are ended: what was written after the change of users is not for
    # them.
    if parts.users is not None:
        node.on_applied.append(parts.users.live.applied)
        applier.auth.on_token_grant.append(parts.users.granted)
        applier.auth.on_password_change.append(parts.users.tokens.forget_user)
        applier.auth.on_change.append(parts.users.changed)
    node.on_applied += [hub.applied, lessor.applied]

    # The guard only starts or stops a timer. The lessor must know the new role before anybody acts on it: from here on
    # nothing is answered in the name of a leadership that ended. The log comes last, so that it says what holds.
    if parts.guard is not None:
        node.on_leader_change.append(parts.guard.leader_changed)
    node.on_leader_change.append(lessor.leader_changed)
    if parts.leader_log is not None:
        node.on_leader_change.append(parts.leader_log.leader_changed)

    # What this member may still answer comes first, then who it talks to.
    if parts.admission is not None:
        node.on_conf_change.append(parts.admission.conf_changed)
        parts.admission.conf_changed()
    if parts.departure is not None:
        node.on_conf_change.append(parts.departure.conf_changed)
    for peers in parts.peers:
        node.on_conf_change.append(partial(_follow, peers, applier))

    # The log is cut to the new database first. Then what is kept in memory beside the store is read again, and only
    # then are watchers served from the new history. There may be a million leases, which are read beforehand.
    parts.installer.on_received.append(applier.leases.receive)
    parts.installer.on_swapped += [
        lambda meta: _mark(parts, meta),
        lambda _: applier.membership.reload(),
        lambda _: applier.alarms.reload(),
        lambda _: applier.downgrade.reload(),
        lambda _: applier.quotas.reload(),
        lambda _: applier.auth.reload(),
        lambda _: applier.leases.reload(),
        lambda _: hub.restored(),
    ]
    if parts.users is not None:
        # Passwords may have changed in entries that this member has never seen.
        tokens = parts.users.tokens
        parts.installer.on_swapped.append(lambda _: tokens.forget_all())
    if parts.hashes is not None:
        hashes = parts.hashes
        parts.installer.on_swapped.append(lambda _: hashes.forget())


def _follow(peers: Peers, applier: Applier) -> None:
    peers.follow(applier.membership.members, applier.membership.removed)


def _mark(parts: Parts, meta: SnapshotMeta) -> None:
    # A newer database may have come while this one was installed. Its marker is in the log already, and markers never
    # go back; what is before them goes when that database is in place.
    if meta.index >= parts.node.log.snapshot().index:
        parts.disk.submit(Marker(meta, lambda: None))
