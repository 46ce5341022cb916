"""A snapshot file or a copy of a database, and archived segments, become a data directory of that point in time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from raftkv.apply.wire import Kind
from raftkv.errors import StorageError
from raftkv.offline.archive import ArchiveGapError, Target, replay
from raftkv.offline.database import hash_database_file
from raftkv.offline.etcd.restore import restore
from raftkv.pb import admin_pb2, rpc_pb2
from raftkv.storage.backend.lmdb import LMDBBackend
from tests.offline.etcd.files import config, saved
from tests.offline.history import History, write_archive
from tests.offline.test_replay import state_of


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[History]:
    made = History(4, tmp_path_factory.mktemp("history"), 150)
    write_archive(made.entries, made.path / "archive", made.rng)
    yield made
    made.close()


@pytest.fixture(params=["snapshot", "copy"])
def base(request: pytest.FixtureRequest, history: History, tmp_path: Path) -> Path:
    """The oldest base, as a snapshot file or as it is."""
    path = history.bases[min(history.bases)]
    if request.param == "copy":
        return path
    with closing(LMDBBackend(path)) as backend:
        (tmp_path / "file").write_bytes(saved(backend))
    return tmp_path / "file"


def to(history: History, target: Target):
    return partial(replay, archive=history.path / "archive", target=target)


def test_the_directory_is_that_of_the_revision(history: History, base: Path, tmp_path: Path) -> None:
    last = history.store.revision
    for revision in (history.at_index[min(history.bases)][0] + 1, last - 3, last):
        data_dir = tmp_path / f"to-{revision}"
        made = restore(base, config(data_dir), skip_hash_check=True, forward=to(history, Target(revision=revision)))
        found, state = state_of(data_dir / "member" / "snap" / "db")
        assert (made.revision, found) == (revision, revision)
        assert state.kvs == history.at_revision[revision].kvs


def test_the_latest_has_the_hash_of_the_source(history: History, base: Path, tmp_path: Path) -> None:
    restore(base, config(tmp_path / "m"), skip_hash_check=True, forward=to(history, Target()))
    history.store.commit()
    wanted = hash_of(history)
    assert hash_database_file(str(tmp_path / "m")) == wanted


def test_quotas_that_were_set_before_the_snapshot_hold_after_it(tmp_path: Path) -> None:
    """A write that a quota refused is not in the restored state, although the archive has its entry."""
    history = History(0, tmp_path, 0)
    history._request(Kind.HISTORY_QUOTA, admin_pb2.QuotaSetRequest(prefix=b"few/", keys_max=1))
    history._request(Kind.PUT, rpc_pb2.PutRequest(key=b"few/a"))
    history._save_base()
    assert history._request(Kind.PUT, rpc_pb2.PutRequest(key=b"few/b")).error is not None
    history._request(Kind.PUT, rpc_pb2.PutRequest(key=b"other"))
    write_archive(history.entries, tmp_path / "archive", history.rng)
    copy = history.bases[min(history.bases)]
    with closing(LMDBBackend(copy)) as backend:
        (tmp_path / "file").write_bytes(saved(backend))
    for name, base in (("a", copy), ("b", tmp_path / "file")):
        restore(base, config(tmp_path / name), skip_hash_check=True, forward=to(history, Target()))
        _, state = state_of(tmp_path / name / "member" / "snap" / "db")
        assert state.kvs == history.at_index[len(history.entries)][1].kvs
    history.close()


def hash_of(history: History):
    jobs = []
    history.store.hash_kv(0, jobs.append)
    return jobs[0]()


def test_unreachable_point_in_time_makes_nothing(history: History, base: Path, tmp_path: Path) -> None:
    beyond = to(history, Target(revision=history.store.revision + 1))
    with pytest.raises(StorageError, match="the archive ends at revision"):
        restore(base, config(tmp_path / "m"), skip_hash_check=True, forward=beyond)
    late = tmp_path / "late"
    write_archive(history.entries, late, history.rng, first=min(history.bases) + 20)
    with pytest.raises(ArchiveGapError, match="the archive lacks the entries"):
        restore(
            base, config(tmp_path / "m"), skip_hash_check=True, forward=partial(replay, archive=late, target=Target())
        )
    assert not (tmp_path / "m").exists()
    assert not list(tmp_path.glob("*.restoring"))


def test_a_copy_of_a_database_has_no_hash(history: History, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="snapshot missing hash but --skip-hash-check=false"):
        restore(history.bases[min(history.bases)], config(tmp_path / "m"))
