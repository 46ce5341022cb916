"""A flipped bit in a database is found by its reader, does not spread, and one log line names the member."""

from __future__ import annotations

import asyncio
import hashlib
import random
import struct
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raftkv.errors import CorruptionError, StorageError
from raftkv.offline.etcd.export import messages
from raftkv.pb import rpc_pb2
from raftkv.raft.types import ConfState
from raftkv.replica.maintenance import damage
from raftkv.replica.maintenance.damage import Damage, Scrub, is_quorum
from raftkv.storage import schema
from raftkv.storage.backend.base import WriteBatch
from raftkv.storage.backend.environment import SEAL
from raftkv.storage.backend.lmdb import LMDBBackend
from raftkv.storage.mvcc import Store
from raftkv.storage.revision import pack, to_key
from raftkv.storage.snapshot import DamagedSourceError, SnapshotInfo, read_meta, verify_snapshot, write_snapshot
from tests.long import long_except
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
    """Receive an unchecked copy of a damaged database with its true hash, as older versions send it."""
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
def test_a_flipped_bit_goes_no_further(made, tmp_path, place, reader):
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


def content(backend: LMDBBackend) -> list[list[tuple[bytes, bytes]]]:
    with closing(backend.begin_read()) as read:
        return [list(read.items(bucket)) for bucket in schema.BUCKETS]


@pytest.mark.parametrize("flips", long_except((20, 500), (20,)))
@pytest.mark.parametrize("reader", [send, scrub], ids=lambda reader: reader.__name__)
def test_any_flipped_bit_of_the_file_is_refused_or_changes_nothing(made, tmp_path, reader, flips):
    """Half of them in the heads of pages, which LMDB follows."""
    rng = random.Random(flips)
    path, copy = tmp_path / "db", tmp_path / "copy"
    refused = 0
    for _ in range(flips):
        copy.unlink(missing_ok=True)
        path.write_bytes(made)
        backend = LMDBBackend(path, MAP_SIZE_BYTES)
        batch = WriteBatch()
        batch.values[schema.CLUSTER, b"sealed here"] = b"1"
        backend.commit(batch)
        expected = content(backend)
        pages = len(made) // 4096
        at = rng.choice([rng.randrange(len(made)), rng.randrange(pages) * 4096 + rng.randrange(64)])
        with path.open("r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))
        try:
            reader(backend, tmp_path)
        except CorruptionError:
            refused += 1
        else:
            with closing(LMDBBackend(copy, read_only=True) if reader is send else backend) as found:
                assert content(found) == expected, at
        backend.close()
    assert refused > flips // 10


def test_a_damaged_meta_page_is_damage_to_the_scrub(made: bytes, tmp_path: Path) -> None:
    """LMDB's own error ended the task that scrubs, and the member with it."""
    (tmp_path / "db").write_bytes(made)
    backend = LMDBBackend(tmp_path / "db", MAP_SIZE_BYTES)
    with (tmp_path / "db").open("r+b") as file:
        for page in (0, 4096):
            file.seek(page + 44)  # the flags of a tree
            file.write(b"\x28")
    with pytest.raises(CorruptionError, match="it cannot be read"):
        scrub(backend, tmp_path)
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


class World:
    """A member of three that found damage: who is connected, and who leads."""

    def __init__(self, leader: int, connected: dict[int, float], behind: tuple[int, ...] = ()) -> None:
        self.stopped_by: list[CorruptionError] = []
        self.transfers: list[int] = []
        self.connected = connected
        self.node: Any = SimpleNamespace(
            stopped=False,
            leader=leader,
            committed=9,
            conf_state=ConfState((1, 2, 3)),
            settings=SimpleNamespace(member_id=1, election_s=1.0),
            has_log=lambda peer, index: peer not in behind,
            transfer_leader=self._transfer,
            wait_until=self._wait_until,
        )
        self.damage = Damage(self.node, "/data/db of this member (m1, 1)", connected.get, self.stopped_by.append)

    def _transfer(self, target: int) -> None:
        self.transfers.append(target)
        self.node.leader = target

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        assert condition()

    async def rounds(self, count: int = 20) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    def shown(self) -> dict[str, float]:
        return {
            "/".join((sample.name, *sample.labels.values())): sample.value
            for metric in self.damage.collect()
            for sample in metric.samples
        }


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(damage, "LOOK_S", 0.0)


LONG_AGO = -1e9


async def test_damaged_leader_transfers_to_complete_member_and_stops() -> None:
    world = World(leader=1, connected={2: LONG_AGO, 3: LONG_AGO + 1}, behind=(2,))
    world.damage.found(CorruptionError("record of revision 2.0 is corrupt"))
    await world.rounds()
    assert world.transfers == [3]
    (error,) = world.stopped_by
    assert str(error) == "the database /data/db of this member (m1, 1) is damaged: record of revision 2.0 is corrupt"
    assert world.shown()["raftkv_database_damaged"] == 1


async def test_leadership_is_kept_while_others_lack_entries() -> None:
    """A transfer holds writes up, and a member that needs the database is never sent it."""
    world = World(leader=1, connected={2: LONG_AGO}, behind=(2,))
    world.damage.found(CorruptionError("a record"))
    await world.rounds()
    assert (world.transfers, world.stopped_by) == ([], [])
    world.damage.close()


@pytest.mark.parametrize(
    "connected",
    [{}, {2: LONG_AGO}, {2: LONG_AGO, 3: 1e18}],
    ids=["no member is connected", "the others are no quorum", "one has just come"],
)
async def test_damaged_member_runs_while_quorum_needs_it(connected: dict[int, float]) -> None:
    world = World(leader=2, connected=connected)
    world.damage.found(CorruptionError("a record"))
    await world.rounds()
    assert not world.stopped_by
    connected.update({2: LONG_AGO, 3: LONG_AGO})
    await world.rounds()
    assert len(world.stopped_by) == 1


async def test_compacted_damage_is_forgotten() -> None:
    world = World(leader=2, connected={})
    store: Any = SimpleNamespace(size_bytes=1, space_error=None)
    store.backend = store
    outcomes: list[Exception | None] = [CorruptionError("a record"), StorageError("given up"), None]

    def check(rest: Callable[[float], None]) -> None:
        rest(0.0)
        if (error := outcomes.pop(0)) is not None:
            raise error

    store.check = check
    scrub = Scrub(store, world.damage)
    for damaged in (1, 1, 0):
        await scrub.pass_once()
        assert world.shown()["raftkv_database_damaged"] == damaged
    shown = world.shown()
    assert [shown[f"raftkv_scrub_passes_total/{result}"] for result in ("clean", "damaged", "given up")] == [1, 1, 1]
    assert shown["raftkv_scrub_clean_timestamp_seconds"] > 0
    world.damage.close()


def test_a_pass_rests_in_proportion_and_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = SimpleNamespace(size_bytes=1, space_error=None)
    store.backend = store
    rests: list[float] = []
    given_up: Any = SimpleNamespace(wait=rests.append)
    scrub = Scrub(store, World(2, {}).damage)
    scrub._rest(given_up, 1, 0.01)
    assert rests == [pytest.approx(0.01 * (1 / damage.SHARE - 1))]
    store.size_bytes = damage.GROWTH_MAX_BYTES + 2
    with pytest.raises(StorageError, match="grew"):
        scrub._rest(given_up, 1, 0.01)


@pytest.mark.parametrize(
    ("members", "conf", "expected"),
    [
        ({2, 3}, ConfState((1, 2, 3)), True),
        ({2}, ConfState((1, 2, 3)), False),
        (set(), ConfState((1,)), False),
        ({2, 3}, ConfState((1, 2, 3), voters_outgoing=(1, 4, 5)), False),
        ({2, 3, 4, 5}, ConfState((1, 2, 3), voters_outgoing=(1, 4, 5)), True),
    ],
)
def test_both_majorities_are_needed_in_a_joint_configuration(members, conf, expected):
    assert is_quorum(members, conf) is expected
