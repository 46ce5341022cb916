"""Checkpoints of a run: all ranks save one together, or none does; all go on from the same one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import raftkv
import raftkv.training
from raftkv.checkpoint.errors import AttemptOver, CheckpointError, DigestMismatch, StaleStep
from raftkv.checkpoint.keys import RegistryKeys
from raftkv.checkpoint.sync import Attempt
from raftkv.errors import ConfigError
from raftkv.training import BarrierTimeout, GenerationOver, Run
from raftkv.training.api import checkpoint
from raftkv.training.api.generation import Generation
from raftkv.training.api.run import Resuming, Saving

PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[raftkv.LocalCluster]:
    with raftkv.local() as one:
        yield one


@pytest.fixture
def ranks(cluster: raftkv.LocalCluster, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[Run]]:
    """Two ranks in this process, by rank."""
    options: dict[str, Any] = {"min_nodes": 2, "lease_ttl_s": 60, "checkpoints": str(tmp_path)}
    runs = in_all(range(2), lambda _: raftkv.training.join(request.node.name, endpoints=cluster.endpoints, **options))
    runs.sort(key=lambda run: run.rank)
    yield runs
    for run in runs:
        run.leave()


def in_all(items: Any, what: Callable[[Any], Any]) -> list[Any]:
    with ThreadPoolExecutor() as threads:
        return list(threads.map(what, items, timeout=PATIENCE_S))


def outcome(what: Callable[[], Any]) -> Any:
    try:
        return what()
    except Exception as error:
        return error


def save(run: Run, step: int, **options: Any) -> Any:
    with run.checkpoint(step, **options) as saving:
        saving.write(f"model-{run.rank}.bin", f"{step}/{run.rank}".encode())
        with saving.open(f"opened-{run.rank}") as file:
            file.write(b"o")
        Path(saving.path(f"rank-{run.rank}/deep/state.bin")).mkdir(parents=True)
        Path(saving.path(f"rank-{run.rank}/deep/state.bin"), "part").write_bytes(b"p" * 1000)
        saving.metrics["loss"] = 1 / step
    return saving.checkpoint


def test_all_ranks_save_one_checkpoint_and_go_on_from_it(ranks, tmp_path):
    first, second = in_all(ranks, lambda run: save(run, 100, metadata={"who": "me"}))
    assert first == second == ranks[0].checkpoints.latest()
    assert (first.step, first.world_size, first.file_count, first.metrics) == (100, 2, 6, {"loss": 0.01})
    assert first.uri.startswith(f"{tmp_path}/{ranks[0].run_id}/step-000000000100.g1.")

    def resume(run: Run) -> tuple[Any, ...]:
        with run.resume() as last:
            assert last is not None
            run.barrier("reading")
            assert len(run.checkpoints.pins()) == 2
            run.barrier("seen")
            return last.step, last.read(f"model-{run.rank}.bin"), len(last.read(f"rank-{run.rank}/deep/state.bin/part"))

    assert in_all(ranks, resume) == [(100, b"100/0", 1000), (100, b"100/1", 1000)]
    assert ranks[0].checkpoints.pins() == []
    Path(first.uri, "model-1.bin").write_bytes(b"100/2")
    found = in_all(ranks, lambda run: outcome(lambda: resume(run)))
    assert [type(each) for each in found] == [tuple, DigestMismatch]
    assert "differs in contents from what was committed" in str(found[1])
    assert ranks[0].checkpoints.pins() == []


def test_record_that_names_another_place_is_not_read_from_there(ranks, tmp_path):
    """Others may write the records of the store than its files; what is read is often unpickled."""
    first, _ = in_all(ranks, lambda run: save(run, 100))
    elsewhere = tmp_path / "elsewhere"
    Path(first.uri).rename(elsewhere)
    key = RegistryKeys(first.run_id).record(first.kind, first.step)
    ranks[0].kv.put(key, replace(first, uri=str(elsewhere)).encode())

    def resume(run: Run) -> bytes:
        with run.resume() as last:
            assert last is not None
            with pytest.raises(ConfigError, match="not below"):
                last.read("model-0.bin")
            return last.read("model-0.bin", anywhere=True)

    assert in_all(ranks, resume) == [b"100/0"] * 2


def test_ranks_agree_again_after_one_of_them_came_too_late(ranks):
    """Rank 0 decided a second time, and the others took its answers one resume late: ranks went on from two steps."""
    in_all(ranks, lambda run: save(run, 100))
    with pytest.raises(BarrierTimeout), ranks[0].resume(timeout_s=0.1):
        pass

    def resume(run: Run) -> int:
        with run.resume() as last:
            return last.step

    assert in_all(ranks, resume) == [100, 100]
    in_all(ranks, lambda run: save(run, 200))
    assert in_all(ranks, resume) == [200, 200]


def test_nothing_was_saved_yet(ranks):
    def resume(run: Run) -> Any:
        with run.resume() as last:
            return last

    assert in_all(ranks, resume) == [None, None]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_gives_it_up_for_all(ranks, failing):
    def broken(run: Run) -> None:
        with run.checkpoint(7) as saving:
            saving.write(f"{run.rank}", b"")
            if run.rank == failing:
                raise ValueError("no room")

    found = in_all(ranks, lambda run: outcome(lambda: broken(run)))
    assert isinstance(found[failing], ValueError)
    assert isinstance(found[1 - failing], AttemptOver)
    assert ranks[0].checkpoints.checkpoints() == []
    committed, _ = in_all(ranks, lambda run: save(run, 7))
    assert committed.step == 7


def test_an_error_of_rank_0_is_raised_by_all(ranks):
    in_all(ranks, lambda run: save(run, 8))
    assert [type(error) for error in in_all(ranks, lambda run: outcome(lambda: save(run, 7)))] == [StaleStep] * 2


def test_every_failure_of_rank_0_reaches_all_ranks(ranks, monkeypatch):
    async def broken(*args, **options):
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(ranks[0]._inner.checkpoints, "begin", broken)
        failures = in_all(ranks, lambda run: outcome(lambda: save(run, 5)))
    assert [type(failure) for failure in failures] == [OSError, CheckpointError]
    assert str(failures[1]) == "rank 0: OSError: the disk is gone"
    with pytest.raises(TypeError, match="parent= takes the reference of a checkpoint"):
        ranks[0].checkpoint(6, parent="no reference")
    assert [done.step for done in in_all(ranks, lambda run: save(run, 6))] == [6, 6]


def test_ranks_that_save_different_steps_save_none(ranks):
    failures = in_all(ranks, lambda run: outcome(lambda: save(run, 5 + run.rank)))
    assert [type(failure) for failure in failures] == [AttemptOver, ConfigError]
    words = "the coordinator saves step 5, and rank 1 step 6: all ranks save the same steps, in the same order"
    assert str(failures[1]) == words
    assert f"was aborted, or deleted: rank 1 failed: ConfigError: {words}" in str(failures[0])
    assert [done.step for done in in_all(ranks, lambda run: save(run, 7))] == [7, 7]


@pytest.mark.parametrize("begin", [lambda run: run.checkpoint(1, timeout_s=0.1), lambda run: run.resume(timeout_s=0.1)])
def test_a_time_limit_holds_for_a_rank_0_that_does_not_come(ranks, begin):
    with pytest.raises(BarrierTimeout, match=r"was not complete within 0.1 s; missing: rank 0$"), begin(ranks[1]):
        pass
    assert not ranks[1].changed


def test_rank_that_does_not_wait_has_prepared(ranks):
    committed, nothing = in_all(ranks, lambda run: save(run, 3, wait=False))
    assert (committed.step, nothing) == (3, None)


def test_a_rank_that_leaves_ends_the_wait(ranks):
    def leave(run: Run) -> Any:
        if run.rank == 1:
            run.leave()
        return outcome(lambda: save(run, 5)) if run.rank == 0 else None

    assert isinstance(in_all(ranks, leave)[0], GenerationOver)


def test_a_file_that_was_promised_and_is_not_there(ranks):
    def promise(run: Run) -> None:
        with run.checkpoint(1) as saving:
            saving.path(f"{run.rank}.bin")
            if run.rank == 0:
                saving.write("0.json", b"{}")
                with pytest.raises(ConfigError, match="already exists"):
                    saving.write("0.json", b"")

    found = in_all(ranks, lambda run: outcome(lambda: promise(run)))
    assert any("was announced by path" in str(error) for error in found)
    assert ranks[0].checkpoints.checkpoints() == []


def test_without_a_place(cluster):
    with raftkv.training.join("nowhere", endpoints=cluster.endpoints, lease_ttl_s=60) as run:
        with pytest.raises(ConfigError, match="no place for the checkpoints of run 'nowhere'"):
            save(run, 1)
        assert run.checkpoints.uri == ""


def test_a_worker_of_an_agent_saves_under_the_fence_of_its_node(cluster, tmp_path, monkeypatch):
    agent = raftkv.training.join("agent", endpoints=cluster.endpoints, disconnect_grace_s=0.05, lease_ttl_s=60)
    place = {"RUN_ID": "agent", "EPOCH": "1", "RANK": "0", "ENDPOINTS": ",".join(cluster.endpoints)}
    for name, value in {**place, "CHECKPOINT_URI": str(tmp_path)}.items():
        monkeypatch.setenv(f"RAFTKV_{name}", value)
    with raftkv.training.join() as worker:
        assert worker.is_worker
        with worker.resume() as last:
            assert last is None
        assert save(worker, 1).uri.startswith(f"{tmp_path}/agent/step-000000000001.g1.")
        agent.leave()
        assert isinstance(outcome(lambda: save(worker, 2)), GenerationOver)


@pytest.mark.long
async def test_for_asyncio(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("RAFTKV_CHECKPOINT_URI", str(tmp_path))
    async with await raftkv.training.aio.join("aio", endpoints=cluster.endpoints, lease_ttl_s=60) as run:
        async with run.resume() as last:
            assert last is None
        async with run.checkpoint(1) as saving:
            saving.write("a", b"1")
        assert (await run.checkpoints.latest()) == saving.checkpoint
        async with run.resume() as last:
            assert last is not None
            assert last.read("a") == b"1"


def test_a_block_of_the_parent_is_left_in_silence_in_a_forked_child():
    child = SimpleNamespace(is_disowned=True)
    for block in (Saving, Resuming):
        block(None, child, None).__exit__(SystemExit, SystemExit(0), None)


async def test_a_pin_that_is_taken_in_the_moment_of_a_cancellation_is_given_back(monkeypatch):
    class Pin:
        def __init__(self, waiting):
            self.waiting = waiting
            self.released = False

        async def take(self):
            self.waiting.cancel()

        async def release(self):
            self.released = True

    pins = []

    def pin_of(_):
        pins.append(Pin(entering))
        return pins[0]

    async def told(name, make, timeout_s):
        return {"checkpoint": "{}"}

    generation = Generation(None, SimpleNamespace(run_id="job", generation=1), 1)
    resuming = checkpoint.Resuming(
        SimpleNamespace(generation=generation, decide=told, registry=None, collectives=SimpleNamespace(decided={})), ""
    )
    monkeypatch.setattr(checkpoint.Checkpoint, "decode", lambda data: data)
    resuming._pin_of = pin_of
    entering = asyncio.ensure_future(resuming.__aenter__())
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert pins[0].released


def prepared(attempt: Attempt) -> object:
    return attempt.prepared(20.0, but=[0])


def outcome_of(attempt: Attempt) -> object:
    return attempt.outcome(20.0)


@pytest.mark.long
@pytest.mark.parametrize("wait", [prepared, outcome_of])
@pytest.mark.parametrize("how", ["leaves", "closes"])
def test_waits_end_with_the_generation_without_a_next_claim(ranks, wait, how):
    """A rank that waits is one of those without whom no next generation begins."""
    registry, world = ranks[0].checkpoints, ranks[0].world
    attempt = registry.begin(registry.claim_run(world.generation, world.revision, world.fence), 1, world_size=2)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(outcome, lambda: wait(attempt))
        if how == "leaves":
            ranks[1].leave()
        else:
            ranks[1].close("enough")
        over = waiting.result()
    assert type(over) is GenerationOver
    assert str(over).startswith(f"generation 1 of run {ranks[0].run_id!r} is over: ")


def test_end_of_generation_interrupts_wait_for_the_start_of_a_save(ranks):
    registry, world = ranks[1].checkpoints, ranks[1].world
    claim = registry.claim_run(world.generation, world.revision, world.fence)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(outcome, lambda: registry.join(claim, 1, timeout_s=20.0))
        ranks[0].leave()
        assert type(waiting.result()) is GenerationOver
