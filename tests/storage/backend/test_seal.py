"""Data without a checksum in the database is sealed: a flipped bit in it is found when the file is opened."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import lmdb
import pytest

from raftkv.errors import CorruptionError, SpaceError
from raftkv.storage import schema
from raftkv.storage.backend.base import WriteBatch
from raftkv.storage.backend.environment import SEAL, SEALED_BUCKETS, total
from raftkv.storage.backend.lmdb import LMDBBackend
from tests.storage.conftest import MAP_SIZE_BYTES

NEEDLE = b"needle-%b-0123456789"


def _batch(**values: bytes | None) -> WriteBatch:
    batch = WriteBatch()
    batch.values = {(schema.LEASE, name.encode()): value for name, value in values.items()}
    batch.values[schema.META, schema.META_CONSISTENT_INDEX] = schema.encode_integer(7)
    return batch


def _sum(backend: LMDBBackend) -> int:
    with closing(backend.begin_read()) as read:
        return total((bucket, read.items(bucket)) for bucket in SEALED_BUCKETS)


def _stated(path: Path) -> tuple[int, int]:
    """Return the transaction and the checksum of the seal."""
    with lmdb.open(str(path), subdir=False, max_dbs=20) as environment, environment.begin() as txn:
        data = txn.get(SEAL)
        assert data is not None
        txn_id, _, found, _ = struct.unpack("<QQII", data)
        return txn_id, found


def _last_txn(path: Path) -> int:
    with lmdb.open(str(path), subdir=False) as environment:
        return int(environment.info()["last_txnid"])


def _write_without_seal(path: Path, values: dict[bytes, bytes]) -> None:
    with lmdb.open(str(path), subdir=False, max_dbs=20) as environment:
        meta = environment.open_db(schema.META)
        with environment.begin(write=True) as txn:
            for key, value in values.items():
                txn.put(key, value, db=meta)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database with one value in each sealed bucket, closed."""
    with closing(LMDBBackend(tmp_path / "db", MAP_SIZE_BYTES)) as backend:
        batch = _batch()
        batch.values |= {(bucket, b"some name"): NEEDLE % bucket for bucket in SEALED_BUCKETS}
        backend.commit(batch)
    return tmp_path / "db"


def _flip(path: Path, needle: bytes, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[data.rindex(needle) + rng.randrange(len(needle))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


@pytest.mark.parametrize("bucket", SEALED_BUCKETS)
def test_a_flipped_bit_in_a_value_is_found_at_open(path: Path, bucket: bytes) -> None:
    clean, rng = path.read_bytes(), random.Random(bucket)
    for needle in (NEEDLE % bucket, b"some name" + NEEDLE % bucket):
        for _ in range(5):
            path.write_bytes(clean)
            _flip(path, needle, rng)
            for read_only in (True, False):
                with pytest.raises(CorruptionError, match="/db is damaged: "):
                    LMDBBackend(path, MAP_SIZE_BYTES, read_only=read_only)


def test_a_flipped_bit_in_the_applied_index_is_found_at_open(path: Path) -> None:
    """Else entries would be applied twice, or left out."""
    _flip(path, schema.META_CONSISTENT_INDEX + schema.encode_integer(7), random.Random(1))
    with pytest.raises(CorruptionError, match=r"its applied index, members, leases or users are not what was written"):
        LMDBBackend(path, MAP_SIZE_BYTES)


def test_flipped_bit_in_a_file_that_was_copied_is_warned_of(path, tmp_path, caplog):
    """The seal names the file, so of a data directory that was brought back from elsewhere it said nothing."""
    for name, spoils in (("whole", False), ("spoiled", True)):
        copy = tmp_path / name
        copy.write_bytes(path.read_bytes())
        if spoils:
            _flip(copy, NEEDLE % schema.AUTH_ROLES, random.Random(1))
        LMDBBackend(copy, MAP_SIZE_BYTES).close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        f"the database {copy} was copied to this place, and its applied index, members, leases or users are"
    )
    caplog.clear()
    with closing(LMDBBackend(path, MAP_SIZE_BYTES)) as backend:
        backend.copy_to(tmp_path / "compact")
    LMDBBackend(tmp_path / "compact", MAP_SIZE_BYTES).close()
    assert not caplog.records


OPENED_SLOWLY = """
import sys
from pathlib import Path
from raftkv.storage.backend.lmdb import LMDBBackend

begin_read = LMDBBackend.begin_read

def begin_later(self):
    print("opened", flush=True)
    sys.stdin.readline()
    return begin_read(self)

LMDBBackend.begin_read = begin_later
LMDBBackend(Path(sys.argv[1]), read_only=True)
"""


def test_file_that_another_process_commits_to_meanwhile_is_not_taken_for_damaged(path: Path) -> None:
    """The process that exports a snapshot opens the file of its running member, which commits ten times a second."""
    with closing(LMDBBackend(path, MAP_SIZE_BYTES)) as backend:
        command = [sys.executable, "-c", OPENED_SLOWLY, str(path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "opened\n"
            backend.commit(_batch(a=b"1"))
            reader.communicate("\n")
        assert reader.returncode == 0


def test_the_sum_follows_every_change(tmp_path: Path) -> None:
    rng = random.Random(3)
    path = tmp_path / "db"
    for _ in range(4):
        with closing(LMDBBackend(path, MAP_SIZE_BYTES)) as backend:
            for _ in range(10):
                names = rng.sample("abcdefgh", 4)
                backend.commit(_batch(**{name: rng.choice([None, b"", rng.randbytes(20)]) for name in names}))
            found = _sum(backend)
        assert _stated(path)[1] == found


def test_a_batch_without_room_does_not_count(tmp_path: Path) -> None:
    with closing(LMDBBackend(tmp_path / "db", 1 << 18)) as backend:
        backend.commit(_batch(a=b"1"))
        with pytest.raises(SpaceError):
            backend.commit(_batch(a=b"2", b=bytes(1 << 20)))
        backend.commit(_batch(c=b"3"))
    LMDBBackend(tmp_path / "db", 1 << 18).close()


def test_records_without_seals_are_accepted(path: Path) -> None:
    with lmdb.open(str(path), subdir=False, max_dbs=20) as environment:
        lease = environment.open_db(schema.LEASE)
        with environment.begin(write=True) as txn:
            txn.put(b"other", b"value", db=lease)
    with closing(LMDBBackend(path, MAP_SIZE_BYTES)) as backend:
        backend.commit(_batch(a=b"1"))
        found = _sum(backend)
    assert _stated(path)[1] == found
    LMDBBackend(path, MAP_SIZE_BYTES).close()


@pytest.mark.parametrize("changed", [{}, {schema.META_CONSISTENT_INDEX: schema.encode_integer(9)}, {b"other": b"8"}])
def test_copy_is_sealed_again(path: Path, tmp_path: Path, changed: dict[bytes, bytes]) -> None:
    """A version without seals may have written to the source, and left the applied index as it was."""
    _write_without_seal(path, changed)
    with closing(LMDBBackend(path, MAP_SIZE_BYTES)) as backend:
        backend.copy_to(tmp_path / "copy")
    with closing(LMDBBackend(tmp_path / "copy", MAP_SIZE_BYTES)) as backend:
        backend.commit(_batch(a=b"1"))
        found = _sum(backend)
    assert _stated(tmp_path / "copy")[1] == found
    LMDBBackend(tmp_path / "copy", MAP_SIZE_BYTES).close()


def test_a_copy_at_the_same_transaction_without_a_seal_is_taken(path: Path, tmp_path: Path) -> None:
    """A copy begins with transaction 1 again, and has the seal of its source."""
    with closing(LMDBBackend(path, MAP_SIZE_BYTES)) as backend:
        backend.copy_to(tmp_path / "copy")
    copy, sealed = tmp_path / "copy", _stated(path)[0]
    while _last_txn(copy) < sealed:
        _write_without_seal(copy, {b"other": b"%d" % _last_txn(copy)})
    with closing(LMDBBackend(copy, MAP_SIZE_BYTES)) as backend:
        backend.commit(_batch(a=b"1"))
    LMDBBackend(copy, MAP_SIZE_BYTES).close()


def test_a_defragmented_database_is_sealed(path: Path) -> None:
    with closing(LMDBBackend(path, MAP_SIZE_BYTES)) as backend:
        defragmentation = backend.defragment(path.with_name("copy"))
        defragmentation.copy()
        backend.commit(_batch(a=b"1", b=b"2"))
        defragmentation.catch_up()
        backend.commit(_batch(a=None, b=b"3"))
        defragmentation.finish()
        defragmentation.adopt()
        defragmentation.close()
        found = _sum(backend)
    assert _stated(path)[1] == found
    LMDBBackend(path, MAP_SIZE_BYTES).close()
