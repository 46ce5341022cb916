"""Each system call fails once with each error while a database is defragmented, copied and replaced."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from raftkv.errors import CorruptionError, InvariantError, SpaceError, StorageError
from raftkv.replica.snapshots.files import check_room, outgoing_path, remove_database, remove_leftovers, remove_soon
from raftkv.storage import schema
from raftkv.storage.backend.lmdb import LMDBBackend
from raftkv.storage.mvcc import Store
from raftkv.storage.snapshot import verify_snapshot, write_snapshot
from tests.long import long_except
from tests.system_faults import Call, Calls

NUMBERS = (errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EMFILE)
KEYS = 50
MAP_BYTES = 1 << 24


def _filled(directory: Path) -> None:
    with closing(LMDBBackend(directory / "db", MAP_BYTES)) as backend:
        store = Store.open(backend)
        for number in range(KEYS):
            txn = store.begin()
            txn.put(b"k%d" % number, bytes(1_000))
            txn.end()
            store.set_applied(number + 1, 1)
        store.commit()
        store.close()


def _values(directory: Path) -> int:
    with closing(LMDBBackend(directory / "db", MAP_BYTES)) as backend, closing(backend.begin_read()) as read:
        return sum(1 for _ in read.items(schema.KEY))


def _story(directory: Path, calls: Calls) -> None:
    """Defragment, copy, verify, clean up, and take a received database; as a member does."""
    calls.phase = "open"
    remove_leftovers(directory)
    with closing(LMDBBackend(directory / "db", MAP_BYTES)) as backend:
        calls.phase = "defragment"
        check_room(directory, 1, "a copy")
        defragmentation = backend.defragment(outgoing_path(directory))
        try:
            defragmentation.copy()
            defragmentation.catch_up()
            defragmentation.finish()
            defragmentation.adopt()
        finally:
            calls.phase = "defragment: clean up"
            defragmentation.close()
        calls.phase = "copy"
        copy = outgoing_path(directory)
        info = write_snapshot(backend, copy)
        verify_snapshot(copy, info)
        calls.phase = "replace"
        backend.replace(copy)
        calls.phase = "clean up"
        shutil.copyfile(directory / "db", copy)
        remove_database(copy)
        shutil.copyfile(directory / "db", copy)
        remove_soon(copy)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Calls:
    """What the story calls."""
    directory, calls = tmp_path_factory.mktemp("noted"), Calls()
    _filled(directory)
    with calls.noted():
        _story(directory, calls)
    assert len(calls.seen) > 40
    return calls


@pytest.mark.parametrize("number", long_except(NUMBERS, {errno.ENOSPC}), ids=lambda number: errno.errorcode[number])
def test_each_failure_is_typed_or_passed_over_and_loses_nothing(calls: Calls, tmp_path: Path, number: int) -> None:
    room = number in (errno.ENOSPC, errno.EDQUOT)
    wrong = []
    for at, call in enumerate(list(calls.seen)):
        directory = tmp_path / str(at)
        directory.mkdir()
        _filled(directory)
        outcome: Exception | None = None
        with calls.failing({call: number}):
            try:
                _story(directory, calls)
            except Exception as error:
                outcome = error
        if not _is_allowed(call, outcome, room):
            wrong.append(f"{tuple(call)}: {outcome!r}")
        assert _values(directory) == KEYS, call
        shutil.rmtree(directory)
    assert not wrong, "\n".join(wrong)


def _is_allowed(call: Call, outcome: Exception | None, is_room: bool) -> bool:
    if outcome is None or "clean up" in call.phase:
        return outcome is None
    if isinstance(outcome, InvariantError):
        # The new file has the name, and that may be lost: nothing may be committed to either.
        return not isinstance(outcome, CorruptionError) and "is not durable" in str(outcome)
    if isinstance(outcome, OSError):
        # A member that receives a database, or starts, names the file and what to do.
        return (call.phase in ("open", "copy") and outcome.filename is not None) or call.place.startswith(
            "storage/snapshot:"
        )
    is_system_call_of_space = is_room and call.what not in ("os.statvfs", "lmdb.open", "os.stat")
    return isinstance(outcome, SpaceError if is_system_call_of_space else StorageError) and os.linesep not in str(
        outcome
    )
