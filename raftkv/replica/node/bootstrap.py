"""The start of a member: a new one from its flags, an old one from its data directory.

    DATA/member/wal/            write-ahead log
    DATA/member/snap/db         database, and snapshots being transferred
    DATA/member/snap/applied    applied index when the member last ran (``storage/applied_mark``)

The log is created last: if it exists, the member exists, and from then on flags about the cluster are ignored, as in
etcd, and the ids are those in the log. A database with history but without its log is refused, because such a member
would have forgotten its votes and acknowledgements.

A member that joins a running cluster (``Origin``) begins with the cluster's id and members, an empty log and no
configuration: it does not stand for election, and receives everything else as a database from the leader.

A restart reads the database first: replay of the log begins after its applied index. It ends, before the member serves
any client, at the highest index that is known to be committed, from the log, the database or the mark. If the last
marker of the log is beyond the database, the member was stopped while it installed a snapshot; the installation is
finished or, if the received file is damaged by now, undone.

ONE MEMBER GOES ON ALONE: ``--force-new-cluster``, for a cluster that has lost its quorum for good.

    log      ... 7 8 | 9 10              8: the last entry that is known to be committed; 9 and 10 are discarded
             ... 7 8 | leave  remove 2  remove 3      entries that this member writes and commits by itself

As in etcd: keys, leases, ids and the id of the cluster stay; entries that are not known to be committed are discarded;
all other members are removed for good, by ordinary log entries, so a restart without the flag continues from there, and
members can be added again (with new ids).

Invariants

- The new entries and the commit index that covers them are one frame of the log: after a crash at any time either
  nothing or everything has changed.
- A member that is already the only voter has nothing to discard: all durable entries are committed.
- The steps are those that a leader may propose: one voter at a time, a joint configuration is left first, a learner
  becomes a voter before the last voter is removed.

Danger: acknowledged writes that this member does not have are lost for good. The removed members must never run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from raftkv import cluster_id
from raftkv.apply.membership import Membership, conf_change_of
from raftkv.config import DEFAULT_PEER_URL, ServerConfig
from raftkv.errors import ConfigError, CorruptionError, MemberRemovedError, StorageError
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.raft import confchange
from raftkv.raft.confchange import Configuration
from raftkv.raft.errors import ConfChangeError
from raftkv.raft.log import MemoryLog
from raftkv.raft.types import NO_LIMIT, ConfChange, ConfState, Entry, EntryType, HardState
from raftkv.replica.node.conf_changes import hide_beginning
from raftkv.replica.snapshots import remove_leftovers, snapshot_path
from raftkv.storage import schema
from raftkv.storage.applied_mark import MARK_BYTES, MARK_NAME, AppliedMark, check_mark_format
from raftkv.storage.backend.environment import READERS_MIN_BYTES, lock_path
from raftkv.storage.backend.lmdb import LMDBBackend, ThreadWriter, Writer, check_copy, read_value
from raftkv.storage.datadir import check_file, ensure_private_directory, refuse_etcd, warn_if_short
from raftkv.storage.mvcc import Store
from raftkv.storage.restore import scan_steps
from raftkv.storage.snapshot import meta_of, read_meta
from raftkv.storage.wal import WAL, Recovered, WALExistsError
from raftkv.storage.wal.disk import Disk, RealDisk, UnsyncedDisk
from raftkv.storage.wal.segment import LOCK_NAME

_log = logging.getLogger(__name__)


def go_on_alone(member_id: int, wal: WAL, log: MemoryLog, store: Store) -> None:
    """Make this member the only one of its cluster; durable on return.

    Arguments:
        member_id: id of this member.
        wal, log: log on disk and in memory, with the known commit index.
        store: the database.

    Raises:
        StorageError: this member does not belong to the cluster.
        MemberRemovedError: this member was removed.
    """
    state = log.hard_state
    future = _Future.at(log, store, state.commit)
    if future.config.all_voters() == {member_id}:
        # As the only voter it needed no other vote: it may have acknowledged entries as soon as they were durable here.
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
        _log.warning("--force-new-cluster: this member is already the only one; start it without the flag")
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
    log.hard_state = written
    _log.warning(
        "--force-new-cluster: this member is now a cluster of one, from entry %d (revision %d or later); removed: %s; "
        "discarded: %d entries not known to be committed; start it without the flag from now on, and never "
        "start the others again with their data",
        state.commit,
        store.revision,
        ", ".join(f"{one:x}" for one in removed),
        discarded,
    )


class _Records:
    """The future contents of the member buckets, in memory."""

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
    """Configuration and members after unapplied entries are applied, and the changes that follow.

    While authentication is enabled, an unapplied entry may be refused because of its caller, which is not known here.
    So members that such an entry names are handled in both cases: a change without effect is refused.
    """

    config: Configuration
    membership: Membership
    changes: list[ConfChange] = field(default_factory=list)
    in_doubt: set[int] = field(default_factory=set)

    @classmethod
    def at(cls, log: MemoryLog, store: Store, index: int) -> _Future:
        """Return the configuration and members after an unapplied entry."""
        future = cls(confchange.restore(store.conf_state), Membership(_Records(store)))
        for entry in log.entries(store.applied_index + 1, index + 1, NO_LIMIT) if index > store.applied_index else ():
            if entry.type != EntryType.NORMAL:
                future.apply(entry.data)
        return future

    def apply(self, data: bytes) -> None:
        """Simulate what a member does with an entry that changes the configuration (``Node.apply_conf_change``)."""
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
        """Add the changes after which only one member is left; return the members that they remove."""
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


MAP_MIN_BYTES: Final = 16 * 1024**3
"""Minimum address space reserved for the database; the file itself only grows with its data."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The initial state of a member without data.

    Attributes:
        cluster_id, member_id: ids of this member.
        members: initially known members.
        voters: the configuration at index 0; empty for a member that joins a running cluster.
    """

    cluster_id: int
    member_id: int
    members: tuple[rpc_pb2.Member, ...]
    voters: tuple[int, ...] = ()


@dataclass(slots=True)
class Durable:
    """The opened files of a member.

    Attributes:
        cluster_id, member_id: ids in the log.
        wal: open log.
        log: its entries, for the core.
        backend, store: the database.
        mark: applied mark, written before clients see the effects.
        snapshots: directory of databases being transferred.
    """

    cluster_id: int
    member_id: int
    wal: WAL
    log: MemoryLog
    backend: LMDBBackend
    store: Store
    mark: AppliedMark
    snapshots: Path

    @property
    def is_as_restored(self) -> bool:
        """Whether a restore made this data, and the member has not yet voted or followed with it."""
        state = self.log.hard_state
        return self.log.first_index() == 2 and self.log.last_index() == 1 and (state.term, state.vote) == (1, 0)


def is_new(config: ServerConfig) -> bool:
    """Return whether a member has no data yet. To join a running cluster, it then needs an ``Origin`` from there.

    Raises:
        StorageError: its directory is etcd's.
    """
    wal_dir = _wal_dir(config)
    refuse_etcd(config.data_dir, wal_dir)
    return not WAL.exists(wal_dir)


def _wal_dir(config: ServerConfig) -> str:
    return config.wal_dir or str(Path(config.data_dir) / "member" / "wal")


def open_writer(loop: asyncio.AbstractEventLoop, on_failure: Callable[[BaseException], None]) -> ThreadWriter:
    """Start the thread that writes the database; its reports run on the loop.

    Arguments:
        loop: loop of the member.
        on_failure: called with an error raised by a report: its listener did not get the outcome, and may wait forever.
    """

    def hear(report: Callable[[], None]) -> None:
        try:
            report()
        except Exception as error:
            on_failure(error)

    return ThreadWriter(lambda report: loop.call_soon_threadsafe(hear, report))


def open_durable(
    config: ServerConfig, writer: Writer, on_fatal: Callable[[BaseException], None], origin: Origin | None = None
) -> Durable:
    """Open the data of a member, or create it.

    Arguments:
        config: paths, and the settings of a new member.
        writer: writes batches of the database.
        on_fatal: called with an error of the writer, after which the member must stop.
        origin: initial state of a new member that joins a running cluster.

    Raises:
        ConfigError: the flags do not describe a cluster with this member in it, or name another member than the data.
        StorageError: a directory or file cannot be used, or belongs to another process.
        CorruptionError: data on disk is damaged.
    """
    wal_dir = _wal_dir(config)
    snapshots = Path(config.data_dir) / "member" / "snap"
    refuse_etcd(config.data_dir, wal_dir)
    if not WAL.exists(wal_dir):
        if config.force_new_cluster:
            raise ConfigError(f"--force-new-cluster: there is no data of a member in {config.data_dir}")
        origin = origin or _founder(config)
    for directory in (config.data_dir, str(snapshots)):
        ensure_private_directory(directory)
    check_member_files(wal_dir, snapshots)
    warn_if_short(lock_path(snapshots / "db"), READERS_MIN_BYTES)
    warn_if_short(snapshots / MARK_NAME, MARK_BYTES)
    if origin is not None and not WAL.exists(wal_dir):
        _begin(config, origin, wal_dir, snapshots)
    # Before the log is opened, which cuts a torn tail: data of a later version must stay unchanged.
    check_mark_format(snapshots / MARK_NAME)
    _check_database_format(snapshots / "db")
    with contextlib.ExitStack() as opened:  # closes all of it if any of it cannot be used
        wal, recovered = WAL.open(wal_dir, disk=_wal_disk(config))
        opened.callback(wal.close)
        if recovered.repair is not None:
            _log.warning("repaired the end of the write-ahead log: %s", recovered.repair)
        backend, recovered = _open_database(config, snapshots, wal, recovered)
        opened.callback(backend.close)
        store = _open_store(config, backend, writer, on_fatal)
        mark = AppliedMark(snapshots / MARK_NAME)
        opened.callback(mark.close)
        log = memory_log(recovered, store)
        take_mark(log, mark, may_be_lost=config.unsafe_no_fsync)
        metadata = raft_pb2.WALMetadata.FromString(recovered.metadata)
        if store.applied_index > 0 and metadata.cluster_id != cluster_id.cluster_id(Membership(store).members):
            hide_beginning(log, store.conf_state)  # some members are not founders
        if config.force_new_cluster:
            go_on_alone(metadata.member_id, wal, log, store)
        else:
            _refuse_data_of_another(config, metadata.member_id, Membership(store).members)
        opened.pop_all()
    return Durable(metadata.cluster_id, metadata.member_id, wal, log, backend, store, mark, snapshots)


def check_member_files(wal_dir: str, snapshots: Path) -> None:
    """Refuse directories, pipes and devices where a member keeps its files.

    Arguments:
        wal_dir: directory of the log.
        snapshots: directory of the database.

    Raises:
        StorageError: there is one; the text says what to do.
    """
    database = snapshots / "db"
    for path in (Path(wal_dir, LOCK_NAME), database, lock_path(database), snapshots / MARK_NAME):
        check_file(path)


def _refuse_data_of_another(config: ServerConfig, member_id: int, members: Mapping[int, rpc_pb2.Member]) -> None:
    """Refuse data of one member if both name and peer URLs in the flags are those of another; warn of unknown URLs.

    This happens with a disk in the wrong machine: the others look for the owner elsewhere, and do not answer this one.
    One of the two alone may be intended, so both must match: flags about the cluster count only at the first start.
    """
    own = members.get(member_id)
    urls = set(map(cluster_id.comparable, config.initial_advertise_peer_urls))
    if own is None or not urls.isdisjoint(map(cluster_id.comparable, own.peerURLs)):
        return
    # Of a member with its own name, only the address can be another.
    for other in members.values() if own.name != config.name else ():
        # One that was added and never started has no name.
        if other.name in (config.name, "") and not urls.isdisjoint(map(cluster_id.comparable, other.peerURLs)):
            whose = f"{other.name or 'to be started'} ({other.ID:x})"
            raise ConfigError(
                f"{config.data_dir} holds the data of member {own.name} ({member_id:x}, {','.join(own.peerURLs)}), and "
                f"--name and --initial-advertise-peer-urls are those of member {whose}: give the data of that member, "
                f"or the flags of {own.name}"
            )
    if len(members) > 1 and config.initial_advertise_peer_urls != (DEFAULT_PEER_URL,):
        advertised = ",".join(config.initial_advertise_peer_urls)
        _log.warning(
            "the others look for this member at %s, not at %s (--initial-advertise-peer-urls). If it has moved, and "
            "raftkvctl member list still shows the old address: raftkvctl member update %x --peer-urls %s",
            *(",".join(own.peerURLs), advertised, member_id, advertised),
        )


def _check_database_format(path: Path) -> None:
    try:
        schema.check_format(read_value(path, schema.META, schema.META_FORMAT_VERSION), f"the database {path}")
    except StorageError as refusal:
        # A damaged format number would name a version that may never exist: report the damage instead.
        with contextlib.suppress(StorageError):
            LMDBBackend(path, read_only=True).close()
        raise refusal


def _wal_disk(config: ServerConfig) -> Disk:
    if not config.unsafe_no_fsync:
        return RealDisk()
    _log.warning("UNSAFE: --unsafe-no-fsync: a crash of this machine loses acknowledged writes")
    return UnsyncedDisk()


def _founder(config: ServerConfig) -> Origin:
    """Return the initial state of a member that founds a cluster."""
    config.check_bootstrap()
    if config.initial_cluster_state != "new":
        raise ConfigError(
            f"--initial-cluster-state={config.initial_cluster_state}: no data of a member in {config.data_dir}, "
            "and the cluster to join was not asked"
        )
    founders = config.founding_members()
    members = tuple(rpc_pb2.Member(ID=key, name=name, peerURLs=urls) for key, (name, urls) in founders.items())
    return Origin(cluster_id.cluster_id(founders), config.member_id, members, tuple(sorted(founders)))


def _begin(config: ServerConfig, origin: Origin, wal_dir: str, snapshots: Path) -> None:
    """Write the initial state of a new member, the log last; of several concurrent starts only one does so."""
    metadata = raft_pb2.WALMetadata(cluster_id=origin.cluster_id, member_id=origin.member_id)
    prepare = partial(_write_first_state, config, origin, wal_dir, snapshots)
    try:
        wal = WAL.create(wal_dir, metadata.SerializeToString(), prepare=prepare)
    except WALExistsError:
        return  # a concurrent start made it
    with contextlib.closing(wal), contextlib.closing(LMDBBackend(snapshots / "db", _map_size_bytes(config))) as backend:
        store = Store.open(backend)
        store.meta_put(schema.CLUSTER, schema.CLUSTER_LOG_MADE, b"")
        store.set_applied(0, 0)
        store.commit()
        store.close()


def _write_first_state(config: ServerConfig, origin: Origin, wal_dir: str, snapshots: Path) -> None:
    with contextlib.closing(LMDBBackend(snapshots / "db", _map_size_bytes(config))) as backend:
        store = Store.open(backend)
        if store.applied_index > 0 or store.meta_get(schema.CLUSTER, schema.CLUSTER_LOG_MADE) is not None:
            raise StorageError(
                f"the write-ahead log in {wal_dir} is missing, but {backend.path} belongs to a member that had one "
                f"(entries up to {store.applied_index}): bring the log back, or remove the data directory"
            )
        # Left by a first start that made no log, perhaps without disk space, and perhaps with other flags.
        for key, _ in store.meta_items(schema.MEMBERS):
            store.meta_delete(schema.MEMBERS, key)
        Membership(store).bootstrap(origin.members)
        store.set_conf_state(ConfState(voters=origin.voters))
        store.set_applied(0, 0)
        store.commit()
        store.close()


def _open_database(
    config: ServerConfig, snapshots: Path, wal: WAL, recovered: Recovered
) -> tuple[LMDBBackend, Recovered]:
    """Return the database, after finishing an interrupted installation, and the log that belongs to it.

    A received database that is damaged by now is not installed: the member goes back to its own, which is the state
    that the leader knows, because the installation was never acknowledged.
    """
    backend, marker = LMDBBackend(snapshots / "db", _map_size_bytes(config)), recovered.snapshot
    try:
        applied = _applied_index(backend)
        received = snapshot_path(snapshots, marker.index)
        if applied < marker.index:
            if not received.exists():
                raise CorruptionError(
                    f"the log says that the database has entries up to {marker.index}, but {backend.path} "
                    f"has them up to {applied}, and there is no {received.name}"
                )
            try:
                check_copy(received, lambda worked_s: None, is_sealed=True, read_history=scan_steps)
                holds = read_meta(received).index
                if holds != marker.index:
                    raise CorruptionError(f"it has entries up to {holds}, the log says {marker.index}")
            except (CorruptionError, StorageError) as error:
                _log.error(
                    "the received database %s is damaged: %s; this member keeps its own database (entry %d) and asks "
                    "the leader for another copy",
                    *(received, error, applied),
                )
                with contextlib.closing(backend.begin_read()) as read:
                    recovered = wal.rewind(meta_of(read))
            else:
                _log.warning("finishing an interrupted installation of a snapshot (entry %d)", marker.index)
                backend.replace(received)
        remove_leftovers(snapshots)
    except BaseException:
        backend.close()
        raise
    return backend, recovered


def _open_store(
    config: ServerConfig, backend: LMDBBackend, writer: Writer, on_fatal: Callable[[BaseException], None]
) -> Store:
    try:
        store = Store.open(backend, writer, operations_max=config.backend_batch_limit, on_fatal=on_fatal)
    except CorruptionError as error:
        raise CorruptionError(f"the database {backend.path} is damaged: {error}") from error
    if not store.conf_state.voters and not any(True for _ in store.meta_items(schema.MEMBERS)):
        raise CorruptionError(f"the database {backend.path} is empty, but its member has a write-ahead log")
    return store


def _applied_index(backend: LMDBBackend) -> int:
    read = backend.begin_read()
    try:
        return schema.decode_integer(read.get(schema.META, schema.META_CONSISTENT_INDEX)) or 0
    except CorruptionError as error:
        raise CorruptionError(f"the database {backend.path} is damaged: {error}") from error
    finally:
        read.close()


def memory_log(recovered: Recovered, store: Store) -> MemoryLog:
    """Create the log for the core, consistent with the applied state.

    Arguments:
        recovered: contents of the write-ahead log.
        store: the applied state.

    Raises:
        CorruptionError: the log ends before the database, or belongs to another one.
    """
    log = MemoryLog()
    if recovered.snapshot.index > 0:
        log.apply_snapshot(recovered.snapshot)
    log.append(recovered.entries)
    if log.last_index() < store.applied_index:
        raise CorruptionError(
            f"the log ends at {log.last_index()}, but entries up to {store.applied_index} are in the database"
        )
    if log.term(store.applied_index) != store.applied_term:
        raise CorruptionError(
            f"entry {store.applied_index} is of term {log.term(store.applied_index)} in the log, and of term "
            f"{store.applied_term} in the database"
        )
    state = recovered.hard_state
    # The commit index on disk may lag: applied entries were committed.
    log.hard_state = HardState(state.term, state.vote, max(state.commit, store.applied_index))
    log.conf_state = store.conf_state
    return log


def take_mark(log: MemoryLog, mark: AppliedMark, *, may_be_lost: bool = False) -> None:
    """Commit in the log what had been applied, and so may have been visible to clients.

    Arguments:
        may_be_lost: the log was not synced, so it may lack applied entries.

    Raises:
        CorruptionError: the log lacks applied entries that it should have.
    """
    if mark.index < log.first_index():
        return  # older than the cut of the log: the database has these entries
    if mark.index > log.last_index() or log.term(mark.index) != mark.term:
        text = f"the log ends at {log.last_index()}, but entry {mark.index} of term {mark.term} had been applied"
        if not may_be_lost:
            raise CorruptionError(f"{text}: this member has lost what it acknowledged")
        _log.error("%s: entries were lost, because --unsafe-no-fsync was set", text)
        mark.forget()
        return
    state = log.hard_state
    log.hard_state = HardState(state.term, state.vote, max(state.commit, mark.index))


def _map_size_bytes(config: ServerConfig) -> int:
    return max(MAP_MIN_BYTES, 2 * (config.quota_bytes or 0))
