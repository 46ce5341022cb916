"""Where a bit flips in a database, and who reads it: nobody passes it on, and what it says of the member is one line."""

from __future__ import annotations

import asyncio
import hashlib
import random
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raftkv.errors import CorruptionError, StorageError
from raftkv.offline.etcd.export import messages
from raftkv.pb import rpc_pb2
from raftkv.raft.types import NONE, ConfState
from raftkv.server.maintenance import damage
from raftkv.server.maintenance.damage import Damage, Scrub, is_quorum
from raftkv.storage import schema
from raftkv.storage.backend.base import WriteBatch
from raftkv.storage.backend.lmdb import LMDBBackend
from raftkv.storage.backend.seal import SEAL
from raftkv.storage.mvcc import Store
from raftkv.storage.revision import pack, to_key
from raftkv.storage.snapshot import DamagedSourceError, SnapshotInfo, read_meta, verify_snapshot, write_snapshot
from tests.storage.conftest import MAP_SIZE_BYTES

KEYS = 60
MEMBER = rpc_pb2.Member(ID=0x1122334455667788, name="needle-member", peerURLs=["http://10.0.0.1:2380"])
NAME = b"some name"
VALUES = {
    **{bucket: (NAME, b"needle-%b-0123456789" % bucket) for bucket in schema.BUCKETS[6:]},
    schema.LEASE: (struct.pack(">q", 0x2122334455667788), struct.pack(">q", 0x3132333435363738)),
    schema.ALARM: (struct.pack(">Qi", 0x4142434445464748, 1), b""),
    schema.MEMBERS: (struct.pack(">Q", MEMBER.ID), MEMBER.SerializeToString()),
    schema.MEMBERS_REMOVED: (struct.pack(">Q", 0x5152535455565758), b""),
}
"""One record of each bucket that has a seal, in the form that its owner gives it."""
PLACES = {
    "value of a record": lambda: b"value 07",
    "key of a record": lambda: b"key 07",
    "revision of a record": lambda: to_key(pack(9, 0)),
    "a large value": lambda: b"L" * 9000,
    "applied index": lambda: schema.META_CONSISTENT_INDEX + schema.encode_integer(KEYS + 1),
    "members of the cluster": lambda: schema.encode_conf_state(ConfState((1, 2, 3))),
    **{f"bucket {bucket.decode()}": lambda item=item: b"".join(item) for bucket, item in VALUES.items()},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a database with something in each bucket."""
    path = tmp_path_factory.mktemp("made") / "db"
    backend = LMDBBackend(path, MAP_SIZE_BYTES)
    store = Store.open(backend)
    for number in range(KEYS):
        txn = store.begin()
        txn.put(b"key %02d" % number, b"value %02d " % number * 10)
        txn.end()
        store.set_applied(number + 1, 1)
    txn = store.begin()
    txn.put(b"large", b"L" * 9000)
    txn.end()
    for bucket, (key, value) in VALUES.items():
        store.meta_put(bucket, key, value)
    store.set_conf_state(ConfState((1, 2, 3)))
    store.set_applied(KEYS + 1, 1)
    store.commit()
    store.close()
    backend.close()
    return path.read_bytes()


def flip(path: Path, needle: bytes, rng: random.Random) -> None:
    """Flip one bit of the last place where something is, in place: as a disk does under a member that runs."""
    data = path.read_bytes()
    at = data.rindex(needle) + rng.randrange(len(needle))
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([data[at] ^ 1 << rng.randrange(8)]))


def send(backend: LMDBBackend, directory: Path) -> None:
    write_snapshot(backend, directory / "copy")


def receive(backend: LMDBBackend, directory: Path) -> None:
    """Take what a version sends that does not look at it: the copy of a damaged database, and its true hash."""
    path = directory / "copy"
    with closing(backend.copy_pieces()) as pieces:
        path.write_bytes(b"".join(pieces))
    meta = read_meta(path)
    described = SnapshotInfo(meta.index, meta.term, meta.conf_state, path.stat().st_size, sha256(path), True)
    verify_snapshot(path, described)


def sha256(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def defragment(backend: LMDBBackend, directory: Path) -> None:
    defragmentation = backend.defragment(directory / "copy")
    try:
        defragmentation.copy()
    finally:
        defragmentation.close()


def save(backend: LMDBBackend, directory: Path) -> None:
    """Make a snapshot for a client, by a process that opens the file."""
    with closing(LMDBBackend(backend.path, read_only=True)) as source, closing(source.begin_read()) as read:
        for _ in messages(read):
            pass


def scrub(backend: LMDBBackend, directory: Path) -> None:
    backend.check(lambda worked_s: None)


@pytest.mark.parametrize("reader", [send, receive, defragment, scrub, save], ids=lambda reader: reader.__name__)
@pytest.mark.parametrize("place", PLACES)
def test_a_flipped_bit_goes_no_further(
    made: bytes, tmp_path: Path, place: str, reader: Callable[[LMDBBackend, Path], None]
) -> None:
    rng = random.Random(place)
    for number in range(3):
        directory = tmp_path / str(number)
        directory.mkdir()
        path = directory / "db"
        path.write_bytes(made)
        backend = LMDBBackend(path, MAP_SIZE_BYTES)
        batch = WriteBatch()
        batch.values[schema.CLUSTER, b"sealed here"] = b"1"
        backend.commit(batch)
        if reader is save:
            backend.close()  # its process opens a file that the member has open, which one process may not
        (directory / "whole").mkdir()
        reader(backend, directory / "whole")
        flip(path, PLACES[place](), rng)
        with pytest.raises((CorruptionError, StorageError)) as refused:
            reader(backend, directory)
        assert isinstance(refused.value, CorruptionError), refused.value
        assert "\n" not in str(refused.value)
        if reader is not receive:
            assert not (directory / "copy").exists()
        if reader is not save:
            backend.close()


def test_a_whole_database_passes_every_reader(made: bytes, tmp_path: Path) -> None:
    (tmp_path / "db").write_bytes(made)
    with closing(LMDBBackend(tmp_path / "db", MAP_SIZE_BYTES)) as backend:
        send(backend, tmp_path)
        scrub(backend, tmp_path)


def test_a_flipped_seal_is_damage_in_a_copy(made: bytes, tmp_path: Path) -> None:
    (tmp_path / "db").write_bytes(made)
    with closing(LMDBBackend(tmp_path / "db", MAP_SIZE_BYTES)) as backend:
        backend.commit(WriteBatch())
        info = write_snapshot(backend, tmp_path / "copy")
    flip(tmp_path / "copy", SEAL + (tmp_path / "copy").read_bytes().rpartition(SEAL)[2][:20], random.Random(2))
    info = replace(info, sha256=sha256(tmp_path / "copy"))
    with pytest.raises((DamagedSourceError, CorruptionError)):
        verify_snapshot(tmp_path / "copy", info)
