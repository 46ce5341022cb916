"""Checkpoints come and go: exports and imports, cut off anywhere."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raftkv.checkpoint import exchange
from raftkv.checkpoint.commit.manifest import NAME as MANIFEST
from raftkv.checkpoint.commit.manifest import Manifest
from raftkv.checkpoint.digest import of_bytes
from raftkv.checkpoint.errors import DigestMismatch, StaleStep, StorageError
from raftkv.checkpoint.keys import RegistryKeys
from raftkv.checkpoint.records import FileRecord, Prepared
from raftkv.checkpoint.registry import Registry
from raftkv.checkpoint.retention.policy import Policy
from raftkv.checkpoint.storage.place import Place
from raftkv.checkpoint.storage.verify import verify
from raftkv.client.control import Grant
from raftkv.client.operations import get_range
from raftkv.errors import ConfigError
from tests.checkpoint.retention.kept import Kept
from tests.virtual_store.direct import FakeControl

LAST = Policy(keep_last=1)


class _Lease:
    silent_s = 0.0

    def __init__(self, lease_id: int, ttl_s: int) -> None:
        self.id, self.ttl_s = lease_id, ttl_s


class Leasing(FakeControl):
    """A control that grants leases, which need not be kept alive."""

    def __init__(self, world: Kept) -> None:
        super().__init__(world, world.control()._rng, 0.0)
        self.granted: list[int] = []

    async def grant(self, ttl_s: int, grace_s: float, on_lost: Any) -> Grant:
        self.granted.append(self._world.store.grant(ttl_s))
        return _Lease(self.granted[-1], ttl_s)

    async def end(self, grant: Grant, *, revoke: bool) -> None:
        self._world.store.revoke(grant.id)


def leasing(world: Kept, run_id: str = "job") -> Registry:
    return world.registry(run_id, control=Leasing(world))


async def test_export_of_a_checkpoint_whose_directory_was_deleted_says_what_to_do(tmp_path: Path) -> None:
    world = Kept(tmp_path / "a")
    saved = await world.save(7)
    Place(saved.uri).fs.rm(Place(saved.uri).root, recursive=True)
    with pytest.raises(StorageError, match=r"step 7 of this run was committed there: put .* begin afresh"):
        await leasing(world).export(saved, str(tmp_path / "export"))


async def test_an_export_is_imported_in_another_cluster(tmp_path: Path) -> None:
    world, other = Kept(tmp_path / "a"), Kept(tmp_path / "b")
    saved = await world.save(7, {"loss": 0.5})
    told: list[tuple[int, int]] = []
    uri = f"memory://{tmp_path}/export"
    await leasing(world).export(saved, uri, on_progress=lambda *one: told.append(one))
    assert told == [(1000, 1000)]
    assert [found.name for found in Place(uri).list()] == [exchange.RECORD, MANIFEST, "sub/a.bin"]
    assert world.keys("/raftkv/checkpoint/run/job/hold") == []

    registry = other.registry("copy")
    taken = await registry.import_export(await registry.claim(), uri)
    assert verify(taken).is_whole
    assert (taken.step, taken.kind, taken.metrics, taken.root) == (7, saved.kind, saved.metrics, saved.root)
    assert (taken.parent, taken.metadata) == (None, {exchange.ORIGIN: "job@7 (files)"})
    with pytest.raises(StaleStep):
        await registry.import_export(await registry.claim(), uri, step=6)
    assert (await registry.import_export(await registry.claim(), uri, step=8)).step == 8


async def test_an_export_that_was_cut_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = Kept(tmp_path)
    attempt, first = await world.begin(1)
    files = [first, *(Place(attempt.uri).write(f"{number}", bytes(2000)) for number in range(5))]
    await attempt.prepare(0, files)
    saved = await attempt.commit()
    uri, registry = f"memory://{tmp_path}/export", leasing(world)
    open_writer, written = Place.open_writer, list[str]()

    def stumble(place: Place, name: str, **more: Any) -> Any:
        if len(written) == 4:
            raise StorageError("killed")
        written.append(name)
        return open_writer(place, name, **more)

    monkeypatch.setattr(Place, "open_writer", stumble)
    with pytest.raises(StorageError, match="killed"):
        await registry.export(saved, uri)
    with pytest.raises(
        ConfigError, match=f"is not an export of a checkpoint, or an incomplete one: .*{exchange.RECORD}"
    ):
        await registry.import_export(await registry.claim(), uri, step=2)
    whole = [name for name in written if name != MANIFEST]
    Place(uri).fs.pipe_file(Place(uri).path(whole[0]), bytes(len(Place(uri).read(whole[0])) - 1) + b"x")
    written.clear()
    monkeypatch.setattr(
        Place, "open_writer", lambda *one, **more: (written.append(one[1]), open_writer(*one, **more))[1]
    )
    await registry.export(saved, uri)
    assert set(whole[1:]).isdisjoint(written)  # those are right already
    assert whole[0] in written
    assert exchange.RECORD in written
    taken = await registry.import_export(await registry.claim(), uri, step=2)
    assert verify(taken).is_whole


async def test_nothing_is_exported_over_what_is_there(tmp_path: Path) -> None:
    world = Kept(tmp_path)
    one, two = [await world.save(step) for step in (1, 2)]
    registry, uri = leasing(world), f"memory://{tmp_path}/export"
    await registry.export(one, uri)
    with pytest.raises(ConfigError, match="another checkpoint lies at"):
        await registry.export(two, uri)
    for inside in (two.uri, f"{two.uri}/sub"):
        with pytest.raises(ConfigError, match="has the name of a directory that collectors delete"):
            await registry.export(one, inside)
    with pytest.raises(ConfigError, match="is where job@1"):
        await registry.export(one, one.uri + "/")
    mine = Place(f"memory://{tmp_path}/mine")
    mine.write("sub/a.bin", b"mine")
    with pytest.raises(ConfigError, match=r"other files lie at .*, such as sub/a\.bin; export to an empty directory"):
        await registry.export(one, mine.uri)
    assert mine.read("sub/a.bin") == b"mine"
    mine.delete("sub/a.bin")
    mine.write(f"{MANIFEST}.part-0", b"")  # of an export that was killed
    await registry.export(one, mine.uri)
    assert verify(one).is_whole
    assert verify(two).is_whole


async def test_a_file_without_a_digest_is_not_copied(tmp_path: Path) -> None:
    """Refuse a list of files that verifies none: through a link in the directory it named any file of this machine."""
    world, secret = Kept(tmp_path, ""), tmp_path / "secret"
    saved = await world.save(7)
    manifest, file = Path(saved.uri) / MANIFEST, Path(saved.uri) / "sub" / "a.bin"
    secret.write_bytes(b"s" * file.stat().st_size)
    file.unlink()
    file.symlink_to(secret)
    manifest.write_bytes(manifest.read_bytes().replace(of_bytes(bytes([7]) * 1000).encode(), b""))
    forged = replace(saved, manifest=of_bytes(manifest.read_bytes()))
    (Path(saved.uri) / exchange.RECORD).write_bytes(forged.encode())
    registry = leasing(world, "tuned")
    claim = await registry.claim()
    with pytest.raises(DigestMismatch, match="with the digest '' cannot be"):
        await registry.import_export(claim, saved.uri)
    assert not Place(registry.uri).list()


@pytest.mark.parametrize("name", [exchange.RECORD, MANIFEST, "sub/a.bin"])
async def test_a_damaged_export_is_not_imported(name: str, tmp_path: Path) -> None:
    world = Kept(tmp_path)
    uri, registry = f"memory://{tmp_path}/export", leasing(world)
    await registry.export(await world.save(1), uri)
    Place(uri).write(name, b"x" * 1000)
    claim = await registry.claim()
    with pytest.raises(DigestMismatch):
        await registry.import_export(claim, uri, step=2)
    await world.collect()
    assert (world.steps(), len(world.directories())) == ([1], 1)  # what was copied of it is gone


async def test_an_import_that_is_cancelled_stops_and_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Kept(tmp_path)
    one = await world.save(1)
    uri = str(tmp_path / "export")
    await leasing(world).export(one, uri)
    registry = world.registry("tuned")
    claim = await registry.claim()
    pieces: list[str] = []
    begun, go_on = asyncio.Event(), __import__("threading").Event()
    chunks, loop = Place.chunks, asyncio.get_running_loop()

    def slow(place: Place, name: str, *more: Any) -> Any:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait(90)
        for _ in range(100):  # a long file
            yield from chunks(place, name, *more)
            pieces.append(name)

    monkeypatch.setattr(Place, "chunks", slow)
    copying = asyncio.ensure_future(registry.import_export(claim, uri))
    await begun.wait()
    copying.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert len(pieces) < 100
    keys = RegistryKeys("tuned")
    assert (world.keys(keys.records), world.keys(keys.attempts)) == ([], [])
    assert len(world.keys(keys.deletings)) == 1


async def test_the_manifest_of_the_attempt_itself_is_written_again(tmp_path: Path) -> None:
    """Go on where a process died while it wrote it, or right after."""
    world = Kept(tmp_path)
    for step, damage in ((5, lambda data: data), (6, lambda data: data[:-9]), (7, lambda data: b"")):
        attempt, file = await world.begin(step)
        manifest = Manifest.of(attempt.record, {0: Prepared(0, (file,))}).encoded
        Place(attempt.uri).write(MANIFEST, damage(manifest))
        await attempt.prepare(0, [file])
        assert verify(await attempt.commit()).is_whole


def test_many_files_are_prepared_in_parts() -> None:
    files = [FileRecord(f"{number:05d}-{'x' * 900}", number, "") for number in range(1000)]
    parts = exchange.in_parts(files)
    assert [file for part in parts for file in part] == files
    assert len(parts) == 5
    assert exchange.in_parts([]) == [[]]


async def _export_of_many_files(world: Kept, tmp_path: Path) -> str:
    attempt, first = await world.begin(1)
    files = [first, *(Place(attempt.uri).write(f"{number}.bin", b"1") for number in range(20))]
    await attempt.prepare(0, files)
    await leasing(world).export(await attempt.commit(), str(tmp_path / "export"))
    return str(tmp_path / "export")


async def test_a_checkpoint_of_many_files_is_taken_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = Kept(tmp_path)
    uri, registry = await _export_of_many_files(world, tmp_path), world.registry("copy")
    monkeypatch.setattr(exchange, "PREPARED_MAX_BYTES", 1000)
    taken = await registry.import_export(await registry.claim(), uri)
    assert (taken.file_count, verify(taken).is_whole) == (21, True)
    assert taken.world_size > 1


async def test_too_many_files_are_refused_before_one_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = Kept(tmp_path)
    uri, registry = await _export_of_many_files(world, tmp_path), world.registry("copy")
    monkeypatch.setattr(exchange, "PREPARED_MAX_BYTES", 1000)
    monkeypatch.setattr(exchange, "PARTS_MAX", 2)
    with pytest.raises(ConfigError, match=r"has 21 files, too many for one checkpoint: .* pack them"):
        await registry.import_export(await registry.claim(), uri)
    result = await registry.control.txn((), [get_range(registry.keys.attempts, prefix=True)])
    assert not result.results[0].items
    assert not Place(registry.uri).list()
