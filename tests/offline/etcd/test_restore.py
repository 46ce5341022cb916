"""Data directories made from snapshot files: whole or not at all, and the same state as before."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from raftkv.apply.quotas import Quotas
from raftkv.errors import ConfigError, StorageError
from raftkv.offline.etcd import restore as restoring
from raftkv.offline.etcd.file import opened
from raftkv.offline.etcd.restore import INDEX, TERM, restore
from raftkv.pb import raft_pb2
from raftkv.storage import schema
from raftkv.storage.backend.lmdb import LMDBBackend
from raftkv.storage.failpoints import PANIC_EXIT_STATUS, FailpointPanic, arm, disarm_all
from raftkv.storage.key_value import encode
from raftkv.storage.mvcc import Store
from raftkv.storage.revision import to_key
from raftkv.storage.wal import WAL
from tests.offline.etcd.files import LEASE_ID, NEGATIVE_LEASE_ID, REVISION, TTL_S, config, file_of, make_database, saved
from tests.replica.node.durable import opened as open_member


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    with closing(make_database(tmp_path / "source")) as backend:
        path.write_bytes(saved(backend))
    return path


@pytest.fixture(autouse=True)
def _nothing_armed() -> Iterator[None]:
    yield
    disarm_all()


def records_of(backend: LMDBBackend, bucket: bytes) -> dict[bytes, bytes]:
    with closing(backend.begin_read()) as read:
        return dict(read.items(bucket))


def database(data_dir: Path) -> LMDBBackend:
    return LMDBBackend(data_dir / "member" / "snap" / "db")


def test_the_state_is_the_one_that_was_saved(tmp_path: Path, file: Path) -> None:
    found = restore(file, config(tmp_path / "data"))
    assert found.revision == REVISION
    with closing(LMDBBackend(tmp_path / "source")) as before, closing(database(tmp_path / "data")) as after:
        for bucket in (schema.KEY, schema.LEASE, schema.ALARM, schema.AUTH, schema.AUTH_USERS, schema.AUTH_ROLES):
            assert records_of(after, bucket) == records_of(before, bucket), bucket
        store = Store.open(after)
        (quota,) = Quotas(store).by_prefix()
        assert (quota.prefix, quota.bytes_max, quota.bytes_used, quota.keys_used) == (b"a", 1 << 40, 132, 1)
        assert (store.revision, store.compact_revision, store.applied_index, store.applied_term) == (9, 4, INDEX, TERM)
        assert len(store.conf_state.voters) == 2
        assert not records_of(after, schema.MEMBERS_REMOVED)
        assert len(records_of(after, schema.MEMBERS)) == 2
        assert store.range(b"a").kvs == [encode(b"a", 2, 8, 3, b"5", LEASE_ID)]
        assert store.attachments.keys_unordered(NEGATIVE_LEASE_ID) == [b"large"]
        assert records_of(after, schema.LEASE)[LEASE_ID.to_bytes(8, "big")] == TTL_S.to_bytes(8, "big")
        store.close()
    wal, recovered = WAL.open(str(tmp_path / "data" / "member" / "wal"))
    wal.close()
    assert (recovered.snapshot.index, recovered.snapshot.term, recovered.entries) == (INDEX, TERM, [])
    metadata = raft_pb2.WALMetadata.FromString(recovered.metadata)
    assert (metadata.cluster_id, metadata.member_id) == (found.cluster_id, found.member_id)


def test_a_file_of_what_was_restored_is_the_same(tmp_path: Path, file: Path) -> None:
    restore(file, config(tmp_path / "data"))
    with closing(database(tmp_path / "data")) as backend:
        again = tmp_path / "again"
        again.write_bytes(saved(backend))
    with opened(file) as first, opened(again) as second:
        for bucket in (b"key", b"lease", b"alarm", b"auth", b"authUsers", b"authRoles", b"cluster"):
            assert dict(first.items(bucket)) == dict(second.items(bucket)), bucket


def test_bump_revision(tmp_path: Path, file: Path) -> None:
    """The revision is higher by that much, all of the history is compacted, and no key is lost."""
    assert restore(file, config(tmp_path / "data"), bump_revision=1_000_000_000).revision == 1_000_000_009
    with closing(database(tmp_path / "data")) as backend:
        store = Store.open(backend)
        assert (store.revision, store.compact_revision) == (1_000_000_009, 1_000_000_009)
        assert store.range(b"", b"\0").count == 5
        txn = store.begin()
        txn.put(b"new", b"")
        txn.end()
        assert store.revision == 1_000_000_010
        store.set_applied(2, 1)
        store.commit()
        store.close()
        again = tmp_path / "again"
        again.write_bytes(saved(backend))
    # Once more, from a file in which the compaction is not carried out yet.
    assert restore(again, config(tmp_path / "data2"), bump_revision=5).revision == 1_000_000_015


def test_etcds_mark_of_a_bumped_revision_is_no_key(tmp_path: Path) -> None:
    path = tmp_path / "file"
    history = {to_key(2 << 24): encode(b"k", 2, 2, 1, b"v"), to_key(50 << 24): b""}
    path.write_bytes(file_of({b"key": history, b"meta": {schema.META_SCHEDULED_COMPACT: to_key(50 << 24)}}))
    found = restore(path, config(tmp_path / "data"))
    assert (found.revision, found.records) == (50, 1)


def test_a_log_of_its_own_place(tmp_path: Path, file: Path) -> None:
    restore(file, config(tmp_path / "data", tmp_path / "log"))
    assert WAL.exists(str(tmp_path / "log"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "file", "log", "source", "source-lock"]
    assert sorted(path.name for path in (tmp_path / "data" / "member").iterdir()) == ["snap"]
    with pytest.raises(StorageError, match=r'^wal-dir ".*/log" exists$'):
        restore(file, config(tmp_path / "other", tmp_path / "log"))


def test_an_empty_directory_gives_way_and_another_does_not(tmp_path: Path, file: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    restore(file, config(data))
    assert data.stat().st_mode & 0o777 == 0o700
    with pytest.raises(StorageError, match=r'^data-dir ".*/data" not empty or could not be read$'):
        restore(file, config(data))


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        ({b"key": {b"short": b"x"}}, "cannot parse revision key"),
        ({b"key": {to_key(1 << 63): b"x"}}, "cannot parse revision key"),
        ({b"key": {to_key(2 << 24): b"\xff"}}, "revision 2.0 is damaged, or of another revision"),
        ({b"key": {to_key(2 << 24): encode(b"k", 3, 3, 1)}}, "revision 2.0 is damaged, or of another revision"),
        ({b"key": {to_key(2 << 24): encode(b"k", 2, 2, 1) + b"\x38\x01"}}, "a history that etcd does not write"),
        ({b"key": {to_key(n << 24) + b"t": b"\x0a\x01k" for n in (2, 3)}}, "a history that etcd does not write"),
        ({b"lease": {b"1": b"\x08\x01"}}, "not a lease"),
        ({b"alarm": {b"\xff": b""}}, "not an alarm"),
        ({b"cluster": {b"raftkv_quota/a": b"1"}}, "not a quota"),
        ({b"cluster": {b"raftkv_quota/a": b"\xff" * 16}}, "not a quota"),
        ({b"meta": {b"scheduledCompactRev": b"1"}}, "not a compacted revision"),
        ({b"meta": {b"scheduledCompactRev": b"\x7f" + to_key(0)[1:]}}, "out of range"),
        ({b"authUsers": {b"x" * 600: b""}}, "has 600 bytes"),
        ({b"authUsers": {b"joe": b"\xff"}}, "record 'joe' in bucket authUsers is none of a user or role; remove it"),
        ({b"authUsers": {b"joe": b"\x0a\x03jim"}}, "record 'joe' in bucket authUsers"),
        ({b"authUsers": {b"joe": b"\x0a\x03joe\x1a\x01\xff"}}, "record 'joe' in bucket authUsers"),
        ({b"authRoles": {b"\xff": b"\x0a\x01\xff"}}, r"record '\\\\xff' in bucket authRoles"),
        ({b"auth": {b"authRevision": b"1"}}, "revision of users and roles has 1 bytes"),
    ],
)
def test_refused_restore_leaves_nothing(tmp_path: Path, contents: dict[bytes, dict[bytes, bytes]], reason: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(file_of(contents))
    with pytest.raises(StorageError, match=reason) as refusal:
        restore(path, config(tmp_path / "data", tmp_path / "log"))
    assert "\n" not in str(refusal.value)
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_the_hash_is_asked_for(tmp_path: Path, file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:-32])
    with pytest.raises(StorageError, match="missing hash"):
        restore(file, config(tmp_path / "data"))
    file.write_bytes(data[:-32] + bytes(32))
    with pytest.raises(StorageError, match="expected sha256"):
        restore(file, config(tmp_path / "data"))
    restore(file, config(tmp_path / "data"), skip_hash_check=True)


def test_flags_that_describe_no_cluster(tmp_path: Path, file: Path) -> None:
    wrong = config(tmp_path / "data")
    with pytest.raises(ConfigError, match="couldn't find local name"):
        restore(file, type(wrong)(name="else", data_dir=wrong.data_dir, initial_cluster=wrong.initial_cluster))
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("point", ["restoreBeforeRename", "restoreBeforeRenameLog", "beforeCommit", "walBeforeSync"])
@pytest.mark.parametrize("action", ["raise", "error(ENOSPC)"])
def test_failed_restore_leaves_no_half_of_a_member(tmp_path: Path, file: Path, point: str, action: str) -> None:
    arm(point, action)
    with pytest.raises((FailpointPanic, StorageError, OSError)):
        restore(file, config(tmp_path / "data", tmp_path / "log"))
    left = {path.name for path in tmp_path.iterdir()} - {"file", "source", "source-lock"}
    # A database without its log, which a member refuses to start on.
    assert left == ({"data"} if point == "restoreBeforeRenameLog" else set())


def test_one_restore_at_a_time_makes_a_directory(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one is refused while the first is at work, and what it begins just after that is its own."""
    building, settings = tmp_path / "data.restoring", config(tmp_path / "data")

    def take_place(temporary: Path, target: Path) -> None:
        with pytest.raises(StorageError, match="another restore is at work in"):
            restore(file, settings)
        temporary.replace(target)
        building.mkdir()

    monkeypatch.setattr("raftkv.offline.etcd.restore._take_place", take_place)
    restore(file, settings)
    assert building.is_dir()


def test_restores_of_several_directories_do_not_make_one_log_together(tmp_path, file, monkeypatch):
    """With one --wal-dir for all, the second had removed what the first was about to give its name."""
    log, begun = tmp_path / "log", list[Path]()
    take_place = restoring._take_place

    def take_place_late(temporary: Path, target: Path) -> None:
        if not begun:
            begun.append(target)
            with pytest.raises(StorageError, match="another restore is at work in"):
                restore(file, config(tmp_path / "second", log))
        take_place(temporary, target)

    monkeypatch.setattr(restoring, "_take_place", take_place_late)
    restore(file, config(tmp_path / "first", log))
    assert WAL.exists(str(log))
    assert {path.name for path in tmp_path.iterdir()} == {"first", "log", "file", "source", "source-lock"}


def test_restore_leaves_a_directory_alone_that_another_has_made_just_now(tmp_path, file, monkeypatch):
    """A restore may wait for the lock of a directory that gets its final name meanwhile."""
    building = tmp_path / "data.restoring"
    flock = fcntl.flock

    def flock_late(descriptor: int, operation: int) -> None:
        building.rename(tmp_path / "restored by another")
        (building / "of a third").mkdir(parents=True)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock_late)
    with pytest.raises(StorageError, match="another restore is at work in"):
        restore(file, config(tmp_path / "data"))
    assert (building / "of a third").is_dir()


def _restore_killed(point: str, *paths: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from raftkv.offline.etcd.restore import restore\n"
        "from raftkv.storage.failpoints import arm\n"
        "from tests.offline.etcd.files import config\n"
        f"arm('{point}', 'panic'); restore(Path(sys.argv[1]), config(*map(Path, sys.argv[2:])))"
    )
    killed = subprocess.run([sys.executable, "-c", script, *map(str, paths)], check=False)
    assert killed.returncode == PANIC_EXIT_STATUS


def test_restore_killed_before_its_log_has_its_name_says_what_to_delete(tmp_path: Path, file: Path) -> None:
    data, log = tmp_path / "data", tmp_path / "log"
    _restore_killed("restoreBeforeRenameLog", file, data, log)
    with pytest.raises(StorageError, match=r"not empty .*: a restore was cut off there; delete (.+) and (.+), and res"):
        restore(file, config(data, log))
    shutil.rmtree(data)
    shutil.rmtree(tmp_path / "log.restoring")
    restore(file, config(data, log))
    (data / ".restoring").mkdir()
    with pytest.raises(StorageError, match=r"not empty .*; delete what is in .*/data, and restore again"):
        restore(file, config(data, tmp_path / "other"))


def test_a_killed_restore_is_begun_again(tmp_path: Path, file: Path) -> None:
    _restore_killed("restoreBeforeRename", file, tmp_path / "data")
    assert not (tmp_path / "data").exists()
    assert (tmp_path / "data.restoring").is_dir()
    restore(file, config(tmp_path / "data"))
    assert not (tmp_path / "data.restoring").exists()


def test_a_member_starts_behind_what_was_restored(tmp_path: Path, file: Path) -> None:
    """Its log has no entry for the restored state, so who joins later is sent the database and not the log."""
    restore(file, config(tmp_path / "data"))
    durable = open_member(config(tmp_path / "data"))
    assert (durable.log.first_index(), durable.log.last_index(), durable.store.revision) == (INDEX + 1, INDEX, REVISION)
    for part in (durable.wal, durable.mark, durable.store, durable.backend):
        part.close()


def test_no_member_starts_on_a_database_whose_log_has_not_its_name_yet(tmp_path: Path, file: Path) -> None:
    settings = config(tmp_path / "data", tmp_path / "log")
    arm("restoreBeforeRenameLog", "raise")
    with pytest.raises(FailpointPanic):
        restore(file, settings)
    with pytest.raises(StorageError, match=r"the write-ahead log in .*/log is missing"):
        open_member(settings)


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """An empty directory behind a link, below a read-only one: as a mount point of a user's own."""
    behind = tmp_path / "disk" / "volume"
    behind.mkdir(parents=True)
    (tmp_path / "link").symlink_to(behind)
    return tmp_path / "link"


@pytest.mark.parametrize("log", [None, "link/log", "apart"])
def test_a_directory_that_is_there_stays(tmp_path: Path, file: Path, linked: Path, log: str | None) -> None:
    """A rename cannot take the place of a mount point or a link: all was built, and then not moved."""
    (linked / "lost+found").mkdir()
    behind = linked.stat().st_ino
    restore(file, config(linked, None if log is None else tmp_path / log))
    assert linked.is_symlink()
    assert (linked.stat().st_ino, linked.stat().st_mode & 0o777) == (behind, 0o700)
    assert WAL.exists(str(linked / "member" / "wal" if log is None else tmp_path / log))
    assert {path.name for path in linked.iterdir()} == {"member", "lost+found", *(["log"] if log == "link/log" else [])}
    assert {path.name for path in (tmp_path / "disk").iterdir()} == {"volume"}
    with pytest.raises(StorageError, match=r'^data-dir ".*/link" not empty or could not be read$'):
        restore(file, config(linked))


def test_nothing_is_left_in_a_directory_that_was_there(tmp_path: Path, file: Path, linked: Path) -> None:
    for point in ("restoreBeforeRename", "beforeCommit", "walBeforeSync"):
        arm(point, "raise")
        with pytest.raises((FailpointPanic, StorageError, OSError)):
            restore(file, config(linked))
        disarm_all()
        assert list(linked.iterdir()) == []
    (linked / ".restoring" / "member").mkdir(parents=True)
    restore(file, config(linked))
    assert [path.name for path in linked.iterdir()] == ["member"]
