"""A random history of a cluster: its entries, the state at every revision, bases on the way, archives of its log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from raftkv.apply import wire
from raftkv.apply.alarms import Alarms
from raftkv.apply.applier import Applier
from raftkv.apply.leases import Leases
from raftkv.apply.membership import Membership
from raftkv.apply.wire import Caller, Kind
from raftkv.pb import admin_pb2, auth_pb2, raft_pb2, rpc_pb2
from raftkv.raft import confchange
from raftkv.raft.types import ConfChange, ConfChangeSingle, ConfChangeType, Entry, EntryType, HardState, SnapshotMeta
from raftkv.storage import schema
from raftkv.storage.backend.lmdb import LMDBBackend
from raftkv.storage.mvcc import Store
from raftkv.storage.wal import WAL
from raftkv.storage.wal.archive import MARKS_SUFFIX, Mark
from raftkv.storage.wal.disk import UnsyncedDisk
from tests.apply.machine import KINDS
from tests.apply.test_same_everywhere import _answer, _is_entry
from tests.compat.differential.generator import Generator, View

REQUEST_BYTES_MAX = 10_000
MAP_SIZE_BYTES = 64 << 20
TIME_0_S = 1_700_000_000.0
LEASES = range(1, 9)


@dataclass(frozen=True)
class State:
    """What clients see."""

    kvs: tuple[bytes, ...]
    leases: tuple[tuple[int, int], ...]
    compacted: int
    users: tuple[tuple[bytes, bytes], ...]


def users_of(store: Store) -> tuple[tuple[bytes, bytes], ...]:
    """All that is kept of users, roles and whether they are asked for."""
    return tuple(
        pair for bucket in (schema.AUTH, schema.AUTH_USERS, schema.AUTH_ROLES) for pair in store.meta_items(bucket)
    )


class History:
    """A cluster's committed entries, made up by a seed; entry ``i`` is applied at ``TIME_0_S + i``."""

    def __init__(self, seed: int, path: Path, steps: int) -> None:
        self.rng = Random(seed)
        self.path = path
        self.backend = LMDBBackend(path / "db", MAP_SIZE_BYTES)
        self.store = Store.open(self.backend)
        membership = Membership(self.store)
        self.leases = Leases(self.store)
        self.applier = Applier(self.store, Alarms(self.store, schema.ALARM), membership, self.leases)
        self.generator = Generator(seed=seed, view=View(base=1, revision=1))
        self.entries: list[Entry] = []
        self.term = 1
        self.at_revision: dict[int, State] = {}
        """By revision: as of the first entry that ends there; only the keys where the entry makes more revisions."""
        self.inside: dict[int, tuple[bytes, ...]] = {}
        self.at_index: dict[int, tuple[int, State]] = {}
        self.bases: dict[int, Path] = {}
        self._note(0)
        for _ in range(steps):
            self._step()

    def close(self) -> None:
        self.store.close()
        self.backend.close()

    def _state(self) -> State:
        kvs = tuple(self.store.range(b"\0", b"\0").kvs)
        return State(kvs, tuple(sorted(self.leases.granted.items())), self.store.compact_revision, users_of(self.store))

    def _note(self, index: int) -> None:
        state = self._state()
        self.at_index[index] = self.store.revision, state
        self.at_revision.setdefault(self.store.revision, state)

    def _step(self) -> None:
        roll = self.rng.random()
        if roll < 0.04:
            self.term += 1
            self._commit(Entry(self.term, len(self.entries) + 1, b""))
        elif roll < 0.08:
            steps = (ConfChangeSingle(ConfChangeType.ADD_LEARNER_NODE, self.rng.randrange(1, 99)),)
            data = confchange.encode(ConfChange(steps))
            self._commit(Entry(self.term, len(self.entries) + 1, data, EntryType.CONF_CHANGE))
        elif roll < 0.11:
            self._request(Kind.HISTORY_QUOTA, self._quota())
        elif roll < 0.16:
            self._request(Kind.AUTH, self._auth_change())
        elif roll < 0.41:
            self._request(*self._about_leases())
        else:
            step = self.generator.next_step()
            if _is_entry(step.request) and step.request.ByteSize() < REQUEST_BYTES_MAX:
                kind, _ = KINDS[type(step.request)]
                outcome = self._request(kind, step.request)
                self.generator.observe(step, _answer(outcome))
        if self.rng.random() < 0.05:
            self._save_base()

    def _about_leases(self) -> tuple[int, Any]:
        rng, lease = self.rng, self.rng.choice(LEASES)
        kind = rng.choice([Kind.LEASE_GRANT, Kind.PUT, Kind.PUT, Kind.PUT, Kind.LEASE_REVOKE, Kind.LEASE_EXPIRE])
        if kind == Kind.LEASE_GRANT:
            return kind, rpc_pb2.LeaseGrantRequest(ID=lease, TTL=rng.randrange(1, 100))
        if kind == Kind.PUT:
            return kind, rpc_pb2.PutRequest(key=b"lease/%d" % rng.randrange(20), value=b"v", lease=lease)
        if kind == Kind.LEASE_REVOKE:
            return kind, rpc_pb2.LeaseRevokeRequest(ID=lease)
        ids = rng.sample(LEASES, rng.randrange(1, 5))
        return kind, raft_pb2.LeaseDecision(term=self.term - rng.choice([0, 0, 0, 1]), ids=ids)

    def _quota(self) -> Any:
        """A quota that some of the writes exceed."""
        prefix, keys_max = self.rng.choice([b"lease/", b"a", b"e/"]), self.rng.choice([1, 2, 5, -1])
        return admin_pb2.QuotaSetRequest(prefix=prefix, keys_max=keys_max, bytes_max=min(keys_max, 0))

    def _auth_change(self) -> Any:
        name, role = self.rng.choice(["root", "alice", "bob"]), self.rng.choice(["root", "r", "s"])
        perm = auth_pb2.Permission(
            permType=auth_pb2.Permission.READWRITE, key=self.rng.choice([b"a", b"lease/"]), range_end=b"\0"
        )
        changes: list[dict[str, Any]] = [
            {"user_add": {"name": name}},
            {"user_grant_role": {"user": name, "role": role}},
            {"user_revoke_role": {"name": name, "role": role}},
            {"role_add": {"name": role}},
            {"role_grant_permission": {"name": role, "perm": perm}},
            {"enable": {}},
            {"enable": {}},
            {"disable": {}},
        ]
        return raft_pb2.AuthChange(**self.rng.choice(changes))

    def _caller(self) -> Caller | None:
        """Who causes an entry where users are asked for: nearly always root, of the present revision."""
        if not self.applier.auth.is_enabled or self.rng.random() < 0.05:
            return None
        user = b"root" if self.rng.random() < 0.8 else self.rng.choice([b"alice", b"bob", b""])
        return Caller(user, self.applier.auth.revision - self.rng.choice([0] * 9 + [1]))

    def _request(self, kind: int, request: Any) -> Any:
        body = request.SerializeToString()
        if kind >= wire.VERSIONED_FIRST:
            body = wire.versioned(kind, body)
        if (caller := self._caller()) is not None:
            kind, body = Kind.IDENTIFIED, wire.identified(caller, kind, body)
        data = wire.encode(kind, len(self.entries) + 1, body)
        return self._commit(Entry(self.term, len(self.entries) + 1, data))

    def _commit(self, entry: Entry) -> Any:
        self.entries.append(entry)
        self.applier.term = entry.term
        before, outcome = self.store.revision, None
        if entry.type == EntryType.NORMAL and entry.data:
            kind, _, body = wire.decode(entry.data)
            outcome = self.applier.apply(kind, body)
        self.store.set_applied(entry.index, entry.term)
        for revision in range(before + 1, self.store.revision):
            self.inside[revision] = tuple(self.store.range(b"\0", b"\0", revision=revision).kvs)
        self._note(entry.index)
        while self.store.is_compacting:
            self.store.compaction_step()
            self.store.commit()
        return outcome

    def _save_base(self) -> None:
        self.store.commit()
        path = self.path / f"base-{len(self.entries)}"
        if not path.exists():
            self.backend.copy_to(path)
            self.bases[len(self.entries)] = path


def write_archive(
    entries: Sequence[Entry], path: Path, rng: Random, *, member: int = 1, cluster: int = 7, first: int = 1
) -> list[Path]:
    """Archive entries as one member would have: small segments, drafts that are overwritten, marks on the way.

    Arguments:
        entries: all committed ones.
        path: the archive.
        rng: draws what differs between members.
        member, cluster: whose log it is.
        first: index at which the archive begins.

    Returns:
        the segments.
    """
    source = path / f"log-{cluster}-{member}"
    metadata = raft_pb2.WALMetadata(cluster_id=cluster, member_id=member).SerializeToString()
    wal = WAL.create(str(source), metadata, segment_bytes=rng.choice([1024, 4096]), disk=UnsyncedDisk())
    if first > 1:
        before = entries[first - 2]
        wal.save_snapshot(SnapshotMeta(before.index, before.term), HardState(before.term, 1, before.index))
    marks: dict[str, str] = {}
    for before, entry in zip([None, *entries], entries, strict=False):
        if entry.index < first:
            continue
        term_before = before.term if before is not None else 1
        if entry.term > term_before:  # a deposed leader left entries that no other member has
            drafts = [Entry(term_before, entry.index + i, b"\x01draft") for i in range(rng.randrange(4))]
            wal.append(HardState(term_before, 1, entry.index - 1), drafts)
        lag = rng.randrange(3)
        wal.append(HardState(entry.term, 1, max(entry.index - 1 - lag, 0)) if not lag else None, [entry])
        wal.sync()
        name = str(wal.open_segment)
        marks[name] = marks.get(name, "") + str(Mark(TIME_0_S + entry.index, entry.index, 0, entry.term))
        if rng.random() < 0.02:
            wal.cut()
    wal.close()
    for name, text in marks.items():
        (source / f"{name}{MARKS_SUFFIX}").write_text(text)
    return sorted(source.glob("*.wal"))
