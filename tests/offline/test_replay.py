"""A base and archived segments give the state at any revision and any time; what is missing is named."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import pytest

from raftkv.apply.leases import Leases
from raftkv.errors import CorruptionError, StorageError
from raftkv.offline.archive import CLOCK_S, ArchiveGapError, MemberArchive, Replayed, Target, prune, replay
from raftkv.offline.database import Base
from raftkv.raft.types import Entry, HardState, SnapshotMeta
from raftkv.storage.backend.lmdb import LMDBBackend
from raftkv.storage.mvcc import Store
from raftkv.storage.wal import WAL
from raftkv.storage.wal.archive import Mark
from tests.long import long_except
from tests.offline.history import TIME_0_S, History, State, users_of, write_archive

STEPS = 300
SEEDS = range(6)


@pytest.fixture
def drawn(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[History]:
    """The history of a seed."""
    made = History(request.param, tmp_path, STEPS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[History]:
    """One that tests share: each archives it in a directory of its own."""
    made = History(0, tmp_path_factory.mktemp("history"), 120)
    yield made
    made.close()


def state_of(database: Path) -> tuple[int, State]:
    with closing(LMDBBackend(database)) as backend:
        store = Store.open(backend)
        kvs = tuple(store.range(b"\0", b"\0").kvs)
        leases = tuple(sorted(Leases(store).granted.items()))
        found = store.revision, State(kvs, leases, store.compact_revision, users_of(store))
        store.close()
    return found


def restored(base: Path, archive: Path, target: Target) -> tuple[Replayed, int, State]:
    copy = base.with_name(f"restored-{archive.parent.name}")
    shutil.copy(base, copy)
    with closing(LMDBBackend(copy)) as backend:
        store = Store.open(backend)
        stands = Base(store.applied_index, store.applied_term)
        store.close()
        done = replay(backend, stands, archive, target)
    revision, state = state_of(copy)
    assert revision == done.revision
    return done, revision, state


@pytest.mark.parametrize("drawn", long_except(SEEDS, {0, 1}), indirect=True)
def test_every_revision_is_restored_exactly(drawn: History) -> None:
    archive, rng = drawn.path / "archive", drawn.rng
    for member in (1, 2):
        write_archive(drawn.entries, archive, rng, member=member)
    bases = sorted(drawn.bases.items())
    checked = inside = 0
    for revision in sorted({*rng.sample(range(1, drawn.store.revision + 1), 25), *list(drawn.inside)[:5]}):
        usable = [path for index, path in bases if drawn.at_index[index][0] <= revision]
        if not usable:
            continue
        _, found, state = restored(rng.choice(usable), archive, Target(revision=revision))
        assert found == revision
        if revision in drawn.inside:
            inside += 1
            assert state.kvs == drawn.inside[revision]
        elif drawn.at_index[bases[0][0]][0] != revision:
            assert state.kvs == drawn.at_revision[revision].kvs
        checked += 1
    assert checked > 5
    assert inside or not drawn.inside


@pytest.mark.parametrize("drawn", long_except(SEEDS, {2}), indirect=True)
def test_every_time_is_restored_exactly(drawn: History) -> None:
    archive, rng = drawn.path / "archive", drawn.rng
    write_archive(drawn.entries, archive, rng)
    (first, base), *_ = sorted(drawn.bases.items())
    for index in [first, *rng.sample(range(first, len(drawn.entries)), 10)]:
        done, revision, state = restored(base, archive, Target(time_s=TIME_0_S + index + 0.9))
        assert (done.index, done.remark) == (index, "")
        assert (revision, state) == drawn.at_index[index]


def move_marks(archive: Path, time_of: Callable[[Mark], float]) -> None:
    """Give the marks below a directory other times."""
    for path in archive.rglob("*.marks"):
        marks = [mark for line in path.read_text().splitlines(keepends=True) if (mark := Mark.parse(line))]
        path.write_text("".join(str(replace(mark, time_s=time_of(mark))) for mark in marks))


def _later(late_s: float, mark: Mark) -> float:
    return mark.time_s + late_s


@pytest.mark.parametrize("jump_s", [-30 * 3600.0, 5 * 3600.0])
def test_a_time_that_a_wrong_clock_made_meaningless_is_refused(history: History, tmp_path: Path, jump_s: float) -> None:
    """The clock of the member jumps at an entry in the middle, and is right again near the end."""
    archive, count = tmp_path / "archive", len(history.entries)
    write_archive(history.entries, archive, Random(1))
    base_index, base = min(history.bases.items())
    wrong = range((base_index + count) // 2, count - 5)
    move_marks(archive, lambda mark: TIME_0_S + 100 * mark.index + jump_s * (mark.index in wrong))
    time_s = TIME_0_S + 100 * (base_index if jump_s < 0 else count)
    with pytest.raises(StorageError, match=r"the clock of a member jumped: .* give --to-revision"):
        restored(base, archive, Target(time_s=time_s))
    done, *_ = restored(base, archive, Target(revision=history.at_index[count][0]))
    assert done.revision == history.at_index[count][0]


def test_a_member_that_lags_makes_no_time_meaningless(history: History, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    for member, late_s in ((1, 0), (2, 10 * CLOCK_S)):
        write_archive(history.entries, archive, Random(member), member=member)
        move_marks(archive / f"log-7-{member}", partial(_later, late_s))
    base_index, base = min(history.bases.items())
    done, *_ = restored(base, archive, Target(time_s=TIME_0_S + base_index + 10.5))
    assert done.index == base_index + 10


@pytest.mark.parametrize("drawn", long_except(SEEDS, {3}), indirect=True)
def test_the_latest_is_all_that_was_committed(drawn: History) -> None:
    archive = drawn.path / "archive"
    write_archive(drawn.entries, archive, drawn.rng)
    for base in drawn.bases.values():
        done, revision, state = restored(base, archive, Target())
        assert (done.index, revision, state) == (len(drawn.entries), *drawn.at_index[len(drawn.entries)])


def test_entries_that_are_not_known_to_be_committed_are_left_out(history: History, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    segments = write_archive(history.entries, archive, history.rng)
    for marks in archive.rglob("*.marks"):
        marks.unlink()
    base = min(history.bases.items())[1]
    done, *found = restored(base, archive, Target())
    assert done.index <= len(history.entries)
    assert tuple(found) == history.at_index[done.index]
    assert len(segments) > 1


def gap_of(segments: list[Path], number: int) -> tuple[int, int]:
    first, after = (int(segments[i].name[17:33], 16) for i in (number, number + 1))
    return first, after - 1


def test_a_gap_names_what_is_missing_and_another_member_fills_it(history: History, tmp_path: Path) -> None:
    archive, other = tmp_path / "archive", tmp_path / "other"
    segments = write_archive(history.entries, archive, Random(1))
    first_base = min(history.bases)
    number = next(i for i, path in enumerate(segments) if int(path.name[17:33], 16) > first_base)
    first, last = gap_of(segments, number)
    segments[number].unlink()
    base = history.bases[first_base]
    with pytest.raises(ArchiveGapError, match=r"the archive lacks the entries \d+ to \d+; .* are missing") as caught:
        restored(base, archive, Target())
    lacking = [int(text) for text in re.findall(r"entries (\d+) to (\d+)", str(caught.value))[0]]
    assert first - 3 <= lacking[0] <= first
    assert last <= lacking[1] <= last + 40
    shutil.copytree(archive, other)
    write_archive(history.entries, other, Random(2), member=2)
    _, *found = restored(base, other, Target())
    assert tuple(found) == history.at_index[len(history.entries)]


def test_a_damaged_segment_is_a_gap_that_says_where(history: History, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    segments = write_archive(history.entries, archive, history.rng)
    data = bytearray(segments[-2].read_bytes())
    data[len(bytes(data).rstrip(b"\0")) // 2] ^= 1
    segments[-2].write_bytes(data)
    with pytest.raises(ArchiveGapError, match=rf"{segments[-2].name} is damaged at offset \d+"):
        restored(history.bases[min(history.bases)], archive, Target())


def test_damaged_segment_that_is_not_needed_stops_neither_restore_nor_pruning(history: History, tmp_path: Path) -> None:
    """The first segment of a member was read for the id of its cluster, and no other one."""
    archive, base = tmp_path / "archive", max(history.bases)
    segments = write_archive(history.entries, archive, Random(1))
    segments[0].write_bytes(b"damage" + segments[0].read_bytes()[6:])
    _, *found = restored(history.bases[base], archive, Target())
    assert tuple(found) == history.at_index[len(history.entries)]
    assert segments[0] in prune(archive, {7: base})


@pytest.mark.parametrize("flipped", [0x80, 0x01])
def test_damaged_marks_are_passed_over(history: History, tmp_path: Path, flipped: int) -> None:
    """Every second mark is damaged: a restore goes to the state of another one, and to nothing that never was."""
    archive, count = tmp_path / "archive", len(history.entries)
    write_archive(history.entries, archive, Random(1))
    for path in archive.rglob("*.marks"):
        lines = path.read_bytes().splitlines(keepends=True)
        for number in range(0, len(lines), 2):
            damaged = bytearray(lines[number])
            damaged[damaged.index(b" ") + 1] ^= flipped  # in the index
            lines[number] = bytes(damaged)
        path.write_bytes(b"".join(lines))
    base_index, base = min(history.bases.items())
    for index in range(base_index + 3, count, 10):
        done, revision, state = restored(base, archive, Target(time_s=TIME_0_S + index + 0.9))
        assert index - 2 <= done.index <= index
        assert (revision, state) == history.at_index[done.index]


def test_an_archive_that_begins_too_late(history: History, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    base = min(history.bases)
    write_archive(history.entries, archive, history.rng, first=base + 11)
    with pytest.raises(ArchiveGapError, match=f"the archive lacks the entries {base + 1} to {base + 10}"):
        restored(history.bases[base], archive, Target())
    write_archive(history.entries, archive, history.rng, first=base + 1, member=2)
    restored(history.bases[base], archive, Target())


def test_targets_that_cannot_be_reached(history: History, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    write_archive(history.entries, archive, history.rng)
    base = max(history.bases)
    path, revision, last = history.bases[base], history.at_index[base][0], history.store.revision
    for target, line in [
        (Target(revision=revision - 1), f"the snapshot is at revision {revision}, after revision {revision - 1}"),
        (
            Target(revision=last + 1),
            f"the archive ends at revision {last}, before revision {last + 1}; a running member",
        ),
        (Target(time_s=TIME_0_S + base - 5), f"the snapshot has entries up to {base}"),
        (Target(time_s=TIME_0_S), "the archive begins at 2023-11-14T22:13:21.000000Z"),
    ]:
        with pytest.raises(StorageError, match=line):
            restored(path, archive, target)
    done, *_ = restored(path, archive, Target(time_s=TIME_0_S + 1e6))
    assert "the archive ends at" in done.remark


def test_a_base_of_another_history(history: History, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    entries = [type(entry)(entry.term + 5, entry.index, entry.data, entry.type) for entry in history.entries]
    write_archive(entries, archive, history.rng)
    with pytest.raises(CorruptionError, match="the snapshot is not of the cluster of this archive"):
        restored(history.bases[min(history.bases)], archive, Target())
    write_archive(history.entries, archive, history.rng, cluster=8)
    done, *_ = restored(history.bases[min(history.bases)], archive, Target())
    assert done.index == len(history.entries), "the archive of the database's own cluster is found"


def test_folder_that_is_no_archive_is_refused(history: History, tmp_path: Path) -> None:
    base = history.bases[min(history.bases)]
    (tmp_path / "empty").mkdir()
    for path, line in [("nothing", "there is no archive at .*nothing"), ("empty", "there are no archived segments")]:
        with pytest.raises(StorageError, match=line):
            restored(base, tmp_path / path, Target())
    bad = tmp_path / "bad" / "0000000000000000-0000000000000001.wal"
    bad.parent.mkdir()
    bad.write_bytes(b"something else")
    with pytest.raises(CorruptionError, match="the head of the segment is damaged"):
        restored(base, tmp_path / "bad", Target())


def test_pruning_leaves_what_the_oldest_backup_needs(history: History, tmp_path: Path) -> None:
    archive, bases = tmp_path / "archive", sorted(history.bases)
    assert prune(archive, {7: 1}) == [], "nothing was archived yet"
    for member in (1, 2):
        write_archive(history.entries, archive, Random(member), member=member)
    other = write_archive(history.entries, archive, Random(3), cluster=9)
    before = len(list(archive.rglob("*.wal")))
    oldest = bases[len(bases) // 2]
    deleted = prune(archive, {7: oldest})
    assert deleted
    assert len(list(archive.rglob("*.wal"))) == before - len(deleted)
    assert all(path.exists() for path in other)
    assert {path.name for path in archive.rglob("*.marks")} <= {path.name + ".marks" for path in archive.rglob("*.wal")}
    shutil.rmtree(other[0].parent)
    done, *found = restored(history.bases[oldest], archive, Target())
    assert (done.index, tuple(found)) == (len(history.entries), history.at_index[len(history.entries)])
    assert prune(archive, {7: 10**9})
    assert len(list(archive.rglob("*.wal"))) == 2, "the newest of each member stays"


def test_a_received_database_replaces_what_was_not_committed(tmp_path: Path) -> None:
    """Drafts before the marker of a received database do not count; entries after it do."""
    wal = WAL.create(str(tmp_path / "log"), b"", segment_bytes=4096)
    wal.append(HardState(1, 1, 4), [Entry(1, index, b"\x01") for index in range(1, 7)])
    wal.save_snapshot(SnapshotMeta(20, 3), HardState(3, 0, 20))
    wal.append(HardState(3, 0, 22), [Entry(3, index, b"\x01") for index in range(21, 24)])
    wal.close()
    committed = [(entry.index, entry.term) for entry in MemberArchive.open(tmp_path / "log").committed()]
    assert committed == [(1, 1), (2, 1), (3, 1), (4, 1), (21, 3), (22, 3)]
