"""DCP on the registry, one rank: save, load, what is refused, what one commit holds."""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import raftkv
import raftkv.training
from raftkv.checkpoint import Registry
from raftkv.checkpoint.commit.manifest import NAME, Manifest
from raftkv.checkpoint.digest import of_bytes
from raftkv.checkpoint.errors import CheckpointNotFound, DigestMismatch, FenceBroken, StaleStep
from raftkv.checkpoint.keys import RegistryKeys
from raftkv.checkpoint.records import Checkpoint, FileRecord
from raftkv.errors import ConfigError
from raftkv.torch.checkpoint import Reader, Writer, resume
from raftkv.torch.checkpoint.reader import typed
from raftkv.training import GenerationOver

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def kv() -> Iterator[raftkv.Client]:
    with raftkv.local() as cluster, cluster.connect() as kv:
        yield kv


@pytest.fixture
def registry(kv: raftkv.Client, tmp_path: Path, request: pytest.FixtureRequest) -> Registry:
    return Registry(kv, request.node.name, uri=str(tmp_path))


def again(registry: Registry) -> Registry:
    """The registry of the same run in a program that is started anew."""
    return Registry(registry.kv, registry.run_id, uri=registry.uri)


def state(value: float = 0.0) -> dict[str, Any]:
    return {"model": {"w": torch.full((4, 3), value), "b": torch.full((2,), -value)}, "step": value}


def save(registry: Any, step: int, value: float | None = None, **options: Any) -> Writer:
    writer = Writer(registry, step, **options)
    dcp.save(state(step if value is None else value), storage_writer=writer)
    return writer


def load(registry: Any, which: Any = "latest", **options: Any) -> float:
    loaded = state()
    reader = Reader(registry, which, **options)
    with typed(reader):
        dcp.load(loaded, storage_reader=reader)
    assert torch.equal(loaded["model"]["w"], torch.full((4, 3), loaded["step"]))
    return float(loaded["step"])


@pytest.mark.long
def test_saved_checkpoint_is_found_and_loaded(registry):
    saved = [save(registry, step, metrics={"loss": abs(step - 20)}).checkpoint for step in (10, 20, 30)]
    assert [load(registry), load(registry, 10), load(registry, saved[1])] == [30, 10, 20]
    assert [load(registry, step) for step in (numpy.int64(10), torch.tensor(20))] == [10, 20]
    assert load(registry, ("best", "loss")) == 20
    assert load(registry, ("best", "loss", "max")) in (10, 30)
    assert load(registry, verify="all") == 30
    with pytest.raises(CheckpointNotFound, match="no checkpoint of step 11"):
        load(registry, 11)
    with pytest.raises(ConfigError, match="names no checkpoint"):
        load(registry, ("worst", "loss"))


@pytest.mark.long
def test_torch_itself_reads_the_directory(registry):
    checkpoint = save(registry, 7).checkpoint
    assert (checkpoint.kind, checkpoint.file_count) == ("dcp", 2)
    loaded = state()
    dcp.load(loaded, checkpoint_id=checkpoint.uri)
    assert loaded["step"] == 7
    assert sorted(os.listdir(checkpoint.uri)) == [".metadata", "__0_0.distcp", "raftkv-manifest.jsonl"]


@pytest.mark.long
def test_one_commit_has_model_optimizer_data_and_random_numbers(registry):
    """Stateful objects and plain values lie in DCP's files, further bytes beside them: all of one step."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())

    def everything() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng.0": torch.get_rng_state()}

    def train() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.rand(8, 2)).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    train()
    position = [17]
    writer = Writer(registry, 1, files={"data/rank-0.json": lambda: str(position[0]).encode(), "note": b"n"})
    dcp.save(everything(), storage_writer=writer)
    first = [train() for _ in range(3)]

    loaded = everything()
    reader = Reader(registry)
    dcp.load(loaded, storage_reader=reader)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    torch.set_rng_state(loaded["rng.0"])
    assert [train() for _ in range(3)] == first
    assert (reader.read("data/rank-0.json"), reader.read("note"), reader.checkpoint.file_count) == (b"17", b"n", 4)
    with pytest.raises(DigestMismatch, match="is not a file of this checkpoint"):
        reader.read("other.json")


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "raftkv-manifest.jsonl"])
@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_changed_files_are_not_loaded(registry, name, damage):
    path = Path(save(registry, 5).checkpoint.uri, name)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink() if damage == "missing" else path.write_bytes(data)
    loaded = state(1)
    with pytest.raises(Exception, match=name.replace(".", r"\.")) as found:
        resume(again(registry), loaded)
    assert isinstance(found.value, DigestMismatch if damage == "changed" else raftkv.checkpoint.errors.StorageError)
    assert torch.equal(loaded["model"]["w"], torch.full((4, 3), 1.0)), "nothing of it was used"


def test_a_writer_that_another_program_has_replaced(registry):
    """Its bytes lie beside, its ``.metadata`` is not written, and it commits nothing."""
    old, new = registry, again(registry)
    save(old, 1)
    frozen = Writer(old, 3)
    written: list[str] = []
    finish = frozen.finish

    def thaw(metadata: Any, results: Any) -> None:
        assert resume(new, state()).step == 1
        save(new, 2)
        written.append(frozen.checkpoint_id)
        finish(metadata, results)

    frozen.finish = thaw
    with pytest.raises(FenceBroken), typed():
        dcp.save(state(3), storage_writer=frozen)
    assert os.listdir(written[0]) == ["__0_0.distcp"]
    assert [checkpoint.step for checkpoint in old.checkpoints()] == [1, 2]
    with pytest.raises(FenceBroken), typed():
        save(old, 4)
    assert load(new) == 2


def test_checkpoint_is_pinned_while_loaded(registry):
    """Until the load is over, however it ends, and until the reader is collected if there is none."""
    save(registry, 1)
    seen = []

    reader = Reader(registry)
    opened = reader.open
    reader.open = lambda name: seen.append(registry.pins()) or opened(name)
    dcp.load(state(), storage_reader=reader)
    assert [len(pins) for pins in seen] == [1, 1]
    assert registry.pins() == []
    Path(reader.checkpoint.uri, ".metadata").write_bytes(b"")
    with pytest.raises(DigestMismatch):
        load(registry)
    assert registry.pins() == []
    assert Reader(registry).checkpoint.step == 1
    while registry.pins():
        pass


def test_trackers_follow_commits(registry):
    """And a start repairs those that a death between commit and tracker has left behind."""
    for step in (1, 2):
        save(registry, step, trackers=() if step == 2 else ("megatron", "deepspeed"))
    tracker = Path(registry.uri, "latest_checkpointed_iteration.txt")
    assert tracker.read_text() == "1"
    third = Writer(registry, 3, trackers=("megatron",))
    third.write_data = lambda *_: tracker.read_text() == "2" and 1 / 0
    with pytest.raises(CheckpointException, match="ZeroDivisionError"):
        dcp.save(state(), storage_writer=third)
    assert tracker.read_text() == "2"
    loaded = state()
    dcp.load(loaded, checkpoint_id=os.path.join(registry.uri, "iter_0000002"))
    assert loaded["step"] == 2


def test_latest_never_goes_back(registry):
    save(registry, 5)
    for step in (4, 5):
        with pytest.raises(Exception, match="step"), typed():
            save(registry, step)
    with pytest.raises(StaleStep), typed():
        save(registry, 4)
    save(registry, 6)


def test_a_failed_save_leaves_nothing_and_can_be_repeated(registry):
    def fail() -> bytes:
        raise OSError("no such loader")

    with pytest.raises(CheckpointException, match="no such loader"):
        save(registry, 1, files={"a": fail})
    assert registry.kv.count(registry._inner.keys.attempts, prefix=True) == 0
    save(registry, 1)
    assert load(registry) == 1


def test_a_thread_that_fails_to_write_fails_the_save(registry, monkeypatch):
    """torch's writer goes on without what a second thread could not write."""
    opened = raftkv.checkpoint.storage.rank_files.RankFiles.open

    def failing(self: Any, name: str) -> Any:
        if name == "__0_1.distcp":
            raise raftkv.checkpoint.errors.StorageError("disk full")
        return opened(self, name)

    monkeypatch.setattr(raftkv.checkpoint.storage.rank_files.RankFiles, "open", failing)
    with pytest.raises(CheckpointException):
        save(registry, 1, thread_count=2)
    assert registry.checkpoints() == []


def test_a_planner_that_caches_plans(registry):
    """It hands out the part of an earlier attempt: the bytes go to the new one all the same."""
    uris = []
    for step in (1, 2, 3):
        writer = Writer(registry, step)
        dcp.save(state(step), storage_writer=writer, planner=DefaultSavePlanner(enable_plan_caching=True))
        uris.append(writer.checkpoint.uri)
    assert len(set(uris)) == 3
    assert [load(registry, step) for step in (1, 2, 3)] == [1, 2, 3]


def test_async_save_in_a_thread(registry):
    writer = Writer(registry, 1, files={"position": lambda: b"%d" % position})
    position = 1
    future: Any = dcp.async_save(state(1), storage_writer=writer, no_dist=True)
    position = 2
    assert future.result().state_dict_metadata
    assert load(registry) == 1
    assert Reader(registry).read("position") == b"1", "as it was when the state was staged"


def test_without_collectives(registry):
    dcp.save(state(1), storage_writer=Writer(registry, 1), use_collectives=False)
    assert registry.latest().kind == "dcp_per_rank"
    assert load(registry, kind="dcp_per_rank") == 1
    with pytest.raises(CheckpointNotFound):
        load(registry)


def test_resume_decides_what_a_dead_program_has_left(registry):
    assert resume(registry, state()) is None
    save(registry, 1)
    whole = Writer(registry, 2)
    whole.finish = lambda **_: whole._attempt.prepare(0, [])  # all have prepared; then the program dies
    dcp.save(state(2), storage_writer=whole)
    half = Writer(registry, 3)
    half.finish = lambda **_: None
    dcp.save(state(3), storage_writer=half)
    new = again(registry)
    taken = new.take_over(new.claim())
    assert [each.checkpoint.step for each in taken if each.checkpoint is not None] == [2]
    assert [checkpoint.step for checkpoint in new.checkpoints()] == [1, 2]


def test_a_program_that_was_replaced_may_begin_anew(registry):
    """Play a rank of an in-process recovery that is rank 0 again; a save alone never takes the claim back."""
    save(registry, 1)
    save(again(registry), 2)
    with pytest.raises(FenceBroken), typed():
        save(registry, 3)
    assert resume(registry, state()).step == 2
    save(registry, 3)


def test_in_a_run(kv, tmp_path):
    with raftkv.training.join("dcp-run", kv=kv, lease_ttl_s=60, checkpoints=str(tmp_path)) as run:
        loaded = state()
        assert resume(run, loaded) is None
        writer = save(run, 4)
        assert writer.checkpoint == run.checkpoints.latest()
        assert resume(run, loaded).step == 4
        assert loaded["step"] == 4
        late = Writer(run, 5)
    with pytest.raises(GenerationOver), typed():
        dcp.save(state(5), storage_writer=late)


def test_a_generation_that_ends_in_mid_save(kv, tmp_path):
    run = raftkv.training.join("mid-save", kv=kv, lease_ttl_s=60, checkpoints=str(tmp_path))
    writer = Writer(run, 1)
    finish = writer.finish

    def late(metadata: Any, results: Any) -> None:
        run.leave()
        finish(metadata, results)

    writer.finish = late
    with pytest.raises(GenerationOver), typed():
        dcp.save(state(1), storage_writer=writer)
    assert os.listdir(writer.checkpoint_id) == ["__0_0.distcp"]
    assert Registry(kv, "mid-save").checkpoints() == []


def test_bytes_in_an_object_store(kv):
    """Not on a disk: no files are synced, linked or read back there; who only loads needs no uri."""
    registry = Registry(kv, "objects", uri="memory://dcp/objects")
    save(registry, 3, thread_count=2, digest="crc32c", files={"note": b"n"})
    reader = Reader(Registry(kv, "objects"), verify="all", anywhere=True)
    loaded = state()
    dcp.load(loaded, storage_reader=reader)
    assert (loaded["step"], reader.read("note")) == (3, b"n")
    assert reader.record("__0_0.distcp").digest.startswith("crc32c:")


class Planted:
    """What runs code where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def planted_checkpoint(registry: Registry, place: Path, metadata: bytes) -> Checkpoint:
    """Save a checkpoint, and plant a record of it that names a directory with other metadata."""
    saved = save(registry, 1).checkpoint
    shutil.copytree(saved.uri, place)
    manifest = Manifest.decode((place / NAME).read_bytes())
    files = tuple(
        (rank, FileRecord(file.name, len(metadata), of_bytes(metadata)) if file.name == ".metadata" else file)
        for rank, file in manifest.files
    )
    made = Manifest(manifest.head, files)
    (place / ".metadata").write_bytes(metadata)
    (place / NAME).write_bytes(made.encoded)
    planted = dataclasses.replace(saved, uri=str(place), manifest=made.digest)
    registry.kv.put(RegistryKeys(registry.run_id).record("dcp", 1), planted.encode())
    return planted


@pytest.mark.parametrize("where", ["elsewhere", "below"])
def test_a_planted_record_runs_no_code(registry, tmp_path_factory, where):
    """Choose URL and digest, as any user may who writes below the run: nothing elsewhere is read, and no code runs."""
    other = tmp_path_factory.mktemp("other")
    place = other / "step" if where == "elsewhere" else Path(registry.uri) / "planted"
    planted_checkpoint(registry, place, pickle.dumps(Planted(other / "ran")))
    if where == "elsewhere":
        with pytest.raises(ConfigError, match=r"it lies in .*, not below"):
            load(registry)
        with pytest.raises(ConfigError, match=r"it lies in .*, not below"):
            resume(again(registry), state())
    for options in ({"anywhere": True}, {} if where == "below" else {"anywhere": True}):
        with pytest.raises(DigestMismatch, match=r"is not DCP metadata: it names posix\.mkdir") as refused:
            load(registry, **options)
        assert "\n" not in str(refused.value)
    assert not (other / "ran").exists()


@pytest.mark.parametrize(
    "metadata",
    [
        b"", b"x", pickle.dumps({}), pickle.dumps(None), b"ctorch\nload\n.", b"ctorch.storage\n_load_from_bytes\n.",
        b"cbuiltins\neval\n.", b"\x80\x04\x8c\x05torch\x8c\x0dSize.__call__\x93.", b"(" * 100_000, b"I1\nI2\n\x86R.",
        b"ctorch.distributed.checkpoint.metadata\nos\n.",
    ],
    ids=range(11),
)  # fmt: skip
def test_metadata_that_dcp_does_not_write_is_refused_in_one_line(registry, metadata):
    planted_checkpoint(registry, Path(registry.uri) / "planted", metadata)
    with pytest.raises(DigestMismatch, match=r"DCP metadata") as refused:
        load(registry)
    assert "\n" not in str(refused.value)


def test_impossible_saves_are_refused(registry):
    with pytest.raises(ConfigError, match="give the blocking Run"):
        Writer("job", 1)
    with pytest.raises(ConfigError, match="no checkpoint_id"):
        dcp.save(state(), storage_writer=Writer(registry, 1), checkpoint_id="/tmp/x")
    with pytest.raises(ConfigError, match="no checkpoint_id"):
        dcp.load(state(), storage_reader=Reader(registry), checkpoint_id="/tmp/x")
    with pytest.raises(ConfigError, match="loads checkpoints of kind"):
        Reader(registry, kind="files")
    with pytest.raises(ConfigError, match="not a digest algorithm"):
        Writer(registry, 1, digest="md5")


@pytest.mark.long
def test_async_save_in_a_process(registry, monkeypatch):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for step in (1, 2):
            writer = Writer(registry, step, files={"position": lambda: b"7"}, metrics={"loss": 1.0})
            future = dcp.async_save(
                state(step), storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS
            )
            future.result(timeout=120)
            assert writer.checkpoint == registry.latest()
        assert load(registry) == 2
        assert Reader(registry, ("best", "loss")).read("position") == b"7"
        again(registry).claim()
        with pytest.raises(CheckpointException, match="FenceBroken"):
            dcp.async_save(
                state(3), storage_writer=Writer(registry, 3), async_checkpointer_type=AsyncCheckpointerType.PROCESS
            ).result(timeout=120)
    finally:
        torch.distributed.destroy_process_group()
