"""In-process recovery with real processes: killed, frozen, thawed and new ranks, and what wakes who is blocked."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import raftkv
import raftkv.torch
import raftkv.training
from raftkv.client.records import RecordError
from raftkv.errors import ConfigError
from raftkv.torch import recovery
from raftkv.torch.interrupt import cut_connections, cut_gloo, gloo_devices
from raftkv.training import GenerationOver, RunClosed
from tests import forked

PATIENCE_S = 90.0


class Rank:
    """A rank's process, and where it says that it is."""

    def __init__(self, command: list[str]) -> None:
        reading, writing = os.pipe()
        with open(os.devnull, "rb") as nothing, open(writing, "wb") as output:
            self.process = forked.spawn(command, (nothing, output, output), environment=os.environ)
        self.process.stdout = os.fdopen(reading, "rb")
        self.at: dict[str, Any] = {"epoch": 0, "rank": -1}
        self.end: dict[str, Any] = {}


class Job:
    """Ranks of one run."""

    def __init__(self, endpoints: list[str], stop: Path) -> None:
        self.ranks: list[Rank] = []
        self._said: queue.Queue[tuple[Rank, dict[str, Any]]] = queue.Queue()
        self._command = [sys.executable, "-m", "tests.torch.recovery_rank", ",".join(endpoints), str(stop)]

    def start(self, count: int) -> None:
        for _ in range(count):
            rank = Rank(self._command)
            self.ranks.append(rank)
            threading.Thread(target=self._listen, args=(rank,), daemon=True).start()

    def wait_generation(self, size: int, ranks: list[Rank] | None = None) -> int:
        """Wait until these ranks are all those of one generation; its number."""
        members = self.ranks if ranks is None else ranks
        while {(rank.at["epoch"], rank.at.get("size")) for rank in members} != {(self._newest(), size)}:
            self.next_word()
        assert sorted(rank.at["rank"] for rank in members) == list(range(size))
        return self._newest()

    def next_word(self) -> None:
        rank, facts = self._said.get(timeout=PATIENCE_S)
        if facts["event"] == "epoch":
            rank.at = facts
        else:
            rank.end = facts

    def by_rank(self, number: int) -> Rank:
        return next(rank for rank in self.ranks if rank.at["rank"] == number)

    def close(self) -> None:
        for rank in self.ranks:
            rank.process.kill()
            rank.process.communicate()

    def _newest(self) -> int:
        return max(rank.at["epoch"] for rank in self.ranks)

    def _listen(self, rank: Rank) -> None:
        for line in rank.process.stdout or ():
            if line.startswith(b"{"):  # not a warning
                self._said.put((rank, json.loads(line)))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with raftkv.local(size=3) as cluster:
        job = Job(cluster.endpoints, tmp_path / "stop")
        try:
            yield job
            with cluster.connect() as kv:
                assert kv.count("/raftkv/train/recovery/", prefix=True) == 2, "round and state alone outlive a run"
        finally:
            job.close()


@pytest.mark.long
def test_survivors_go_on_in_their_processes(job, tmp_path):
    job.start(3)
    assert job.wait_generation(3) == 1

    # A rank is killed: the others are a generation of two, in order, without a step lost.
    victim = job.by_rank(0)
    survivors = [job.by_rank(1), job.by_rank(2)]
    pids = [rank.at["pid"] for rank in survivors]
    job.ranks.remove(victim)
    victim.process.kill()
    victim.process.communicate()
    assert job.wait_generation(2) == 2, "one round a fault"
    assert [rank.at["rank"] for rank in survivors] == [0, 1]
    assert [rank.at["pid"] for rank in survivors] == pids
    assert survivors[0].at["step"] == survivors[1].at["step"]

    # A new process comes: it is last, and begins with the step and the weight of the others.
    job.start(1)
    assert job.wait_generation(3) == 3
    newcomer = job.by_rank(2)
    assert newcomer not in survivors
    assert newcomer.at["step"] == survivors[0].at["step"] >= survivors[0].at["epoch"] - 3

    # Rank 0 freezes, with its connections open and the others blocked in a collective with it; later it thaws.
    frozen, others = job.by_rank(0), [job.by_rank(1), job.by_rank(2)]
    frozen.process.send_signal(signal.SIGSTOP)
    assert job.wait_generation(2, others) == 4
    frozen.process.send_signal(signal.SIGCONT)
    assert job.wait_generation(3) == 5
    assert frozen.at["rank"] == 2, "it comes back as a newcomer"

    (tmp_path / "stop").touch()
    while not all(rank.end for rank in job.ranks):
        job.next_word()
    assert [rank.process.wait(PATIENCE_S) for rank in job.ranks] == [0, 0, 0]
    assert len({rank.end["step"] for rank in job.ranks}) == 1
    assert {rank.end["weight"] for rank in job.ranks} == {job.ranks[0].end["step"]}, "no step lost, none done twice"


# ---- what wakes a blocked thread


@pytest.fixture
def pair() -> Iterator[list[Any]]:
    """Two gloo groups of one world, in this process."""
    store = dist.HashStore()

    def make(rank: int) -> Any:
        return dist.ProcessGroupGloo(store, rank, 2, timeout=timedelta(seconds=PATIENCE_S))

    with ThreadPoolExecutor() as threads:
        yield list(threads.map(make, range(2)))


def blocked(threads: ThreadPoolExecutor, call: Callable[[], Any]) -> Any:
    """A call on another thread, that has begun."""
    begun = threading.Event()

    def run() -> Any:
        begun.set()
        return call()

    future = threads.submit(run)
    assert begun.wait(PATIENCE_S)
    return future


def test_a_collective_with_a_frozen_peer_is_interrupted(pair):
    with ThreadPoolExecutor() as threads:
        waiting = blocked(threads, lambda: pair[0].allreduce([torch.ones(1)]).wait())
        assert cut_gloo() >= 1  # both ends are here: the second may be closed by its peer before its turn
        with pytest.raises(RuntimeError, match="gloo/transport"):
            waiting.result(PATIENCE_S)
    with pytest.raises(RuntimeError, match="gloo/transport"):
        pair[0].allreduce([torch.ones(1)]).wait()


def test_groups_of_others_are_left_alone(pair):
    with ThreadPoolExecutor() as threads:
        assert cut_gloo(ignore=gloo_devices()) == 0
        tensors = [torch.ones(1), torch.ones(1)]
        list(threads.map(lambda rank: pair[rank].allreduce([tensors[rank]]).wait(), range(2)))
    assert [tensor.item() for tensor in tensors] == [2.0, 2.0]


def test_python_servers_are_not_mistaken_for_gloo():
    before = gloo_devices()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        ended.set()

    async def serve() -> frozenset[int]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            try:
                return gloo_devices()
            finally:
                writer.close()
                await writer.wait_closed()
                await ended.wait()

    ended = asyncio.Event()
    assert asyncio.run(serve()) == before
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    assert gloo_devices() == before
    del server


def test_a_call_to_a_store_is_interrupted():
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=PATIENCE_S))
    with ThreadPoolExecutor() as threads:
        waiting = blocked(threads, lambda: store.get("never"))
        assert cut_connections("127.0.0.1", server.port) == 2  # the server's own client as well
        with pytest.raises(dist.DistNetworkError):
            waiting.result(PATIENCE_S)
    dist.TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=PATIENCE_S)).set("still", "serves")


# ---- what counts as the end of a generation


class FakeRun:
    """A run of one rank; ``rejoin`` begins the next generation."""

    run_id = "fake"
    rank = 0
    world_size = 1
    changed = False
    is_worker = False

    def __init__(self) -> None:
        self.generation = 1
        self.members = (SimpleNamespace(id="n", host="127.0.0.1", address="127.0.0.1"),)
        self.world = SimpleNamespace(member=self.members[0])

    def on_change_nowait(self, callback: Callable[[], object]) -> Callable[[], None]:
        return lambda: None

    def publish_nowait(self, value: str) -> None:
        self.published = value

    def barrier(self, name: str) -> None:
        """Alone: there is no rank to wait for."""

    def rejoin(self) -> None:
        self.generation += 1


def test_errors_that_a_new_generation_cures_and_others():
    run: Any = FakeRun()
    hook = sys.excepthook
    with raftkv.torch.ElasticGroup(run) as group:
        assert dist.get_world_size() == 1
        assert group.is_recoverable(GenerationOver("fake", 1))
        assert group.is_recoverable(dist.DistNetworkError("reset"))
        assert group.is_recoverable(RuntimeError("[/gloo/transport/tcp/pair.cc:537] Read error"))
        assert not group.is_recoverable(RuntimeError("shapes do not match"))
        assert not group.is_recoverable(RunClosed("fake", ""))
        assert not group.is_recoverable(ZeroDivisionError())
        with pytest.raises(GenerationOver, match="Read error"), group.guard():
            raise RuntimeError("[/gloo/transport/tcp/pair.cc:537] Read error\nat C++")
        with pytest.raises(RuntimeError, match="shapes"), group.guard():
            raise RuntimeError("shapes do not match")
        run.changed = True
        assert group.is_recoverable(RuntimeError("whatever, as the generation is over"))
        assert not group.is_recoverable(ZeroDivisionError())
        with pytest.raises(ConfigError, match="there is a process group already"):
            raftkv.torch.ElasticGroup(run)
    assert not dist.is_initialized()
    run.is_worker = True
    with pytest.raises(ConfigError, match="this process is a worker, which its agent starts anew in every generation"):
        raftkv.torch.ElasticGroup(run)
    assert sys.excepthook is hook, "torch wraps it anew with every group"


def test_steps_are_repeated_until_they_are_done():
    run: Any = FakeRun()
    synced = []
    done: list[tuple[int, int]] = []
    with raftkv.torch.ElasticGroup(
        run, sync=lambda group: synced.append((group.generation, group.step)), step=3
    ) as group:
        for step in group.steps(6):
            with step as number:
                if number == 4 and run.generation < 3:
                    raise dist.DistNetworkError("lost")
                done.append((run.generation, number))
    assert done == [(1, 3), (3, 4), (3, 5)]
    assert synced == [(1, 3), (2, 4), (3, 4)]
    assert group.last_recovery is not None
    assert group.last_recovery.generation == 3


def fail_each_step(group: raftkv.torch.ElasticGroup, error: Exception) -> None:
    for step in group.steps(1):
        with step:
            raise error


def test_a_failure_that_no_generation_cures_is_raised_in_the_end():
    run: Any = FakeRun()
    with raftkv.torch.ElasticGroup(run) as group, pytest.raises(dist.DistNetworkError, match="for good"):
        fail_each_step(group, dist.DistNetworkError("for good"))
    assert run.generation == 1 + recovery.RECOVERIES_MAX


def test_an_error_of_the_users_is_the_users():
    run: Any = FakeRun()
    with raftkv.torch.ElasticGroup(run) as group, pytest.raises(ZeroDivisionError):
        fail_each_step(group, ZeroDivisionError())
    assert run.generation == 1


# ---- checkpoints of the run


class Checkpointed:
    """A job of one rank whose state is one number: the steps that it has done."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.value = 0
        self.happened: list[str] = []
        self.lost_at: set[int] = set()

    def sync(self, group: raftkv.torch.ElasticGroup) -> None:
        self.happened.append(f"sync {group.step}")

    def load(self, group: raftkv.torch.ElasticGroup, last: Any) -> None:
        self.value = int(last.read("value"))
        self.happened.append(f"load {last.step}")

    def save(self, group: raftkv.torch.ElasticGroup, saving: Any) -> None:
        saving.write("value", str(self.value).encode())
        if group.step in self.lost_at:
            self.lost_at.remove(group.step)
            raise dist.DistNetworkError("lost")

    def leave_undecided(self, step: int) -> None:
        """Save as a generation does that ends before its coordinator can commit."""
        world = self.run.world
        claim = self.run.checkpoints.claim_run(world.generation, world.revision, world.fence)
        self.run.checkpoints.begin(claim, step).prepare(0, [])

    def train(self, stop: int) -> None:
        with raftkv.torch.ElasticGroup(
            self.run, sync=self.sync, load=self.load, save=self.save, save_every=10
        ) as group:
            for step in group.steps(stop):
                with step as number:
                    if number in self.lost_at:
                        self.lost_at.remove(number)
                        self.leave_undecided(number)
                        raise dist.DistNetworkError("lost")
                    self.value += 1


@pytest.mark.long
def test_a_job_that_is_started_again_goes_on_from_the_latest_checkpoint(raftkv_cluster, tmp_path):
    options = {"endpoints": raftkv_cluster.endpoints, "min_nodes": 1, "address": "127.0.0.1", "lease_ttl_s": 60}
    with raftkv.training.join("saved", checkpoints=str(tmp_path), **options) as run:
        first = Checkpointed(run)
        first.train(25)
        assert first.happened == ["sync 0"]
        assert [found.step for found in run.checkpoints.checkpoints()] == [10, 20]
        # Who has state goes on with it, though the registry has an older one. A save that was lost is none; one
        # that was whole when its generation ended is committed before the next.
        again = Checkpointed(run)
        again.lost_at = {25, 30}
        again.train(41)
        assert again.happened == ["load 20", "sync 20", "sync 25", "sync 30"]
        assert again.value == 41
        assert [found.step for found in run.checkpoints.checkpoints()] == [10, 20, 25, 40]
    with (
        raftkv.training.join("saved", **options) as run,
        pytest.raises(ConfigError, match="no directory for checkpoints"),
    ):
        Checkpointed(run).train(50)
    with raftkv.training.join("saved", checkpoints=str(tmp_path), **options) as run:
        with pytest.raises(ConfigError, match="give both save= and save_every=, or neither"):
            raftkv.torch.ElasticGroup(run, save_every=10)
        with raftkv.torch.ElasticGroup(run, load=lambda group, last: pytest.fail("it is behind"), step=60) as group:
            assert group.step == 60, "what the program has itself is further"


@pytest.mark.parametrize("address", ["", "h", "h:", ":1", "h:x", f"h:{'9' * 5000}", "[::1]", "h:-1", "h:65536"])
def test_published_text_that_is_no_address_is_a_record_error(address):
    with pytest.raises(RecordError, match="not a boot record"):
        recovery.resolve_address(address)
