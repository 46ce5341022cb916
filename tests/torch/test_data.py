"""The sampler for elastic worlds: what the loop used is saved, what was read ahead is not, and every world goes on."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import BatchSampler, DataLoader

from raftkv.checkpoint.positions import Position
from raftkv.client.records import RecordError
from raftkv.dataset.codec import Child
from raftkv.dataset.dataset import Snapshot
from raftkv.dataset.entry import Entry
from raftkv.dataset.keys import Head
from raftkv.errors import ConfigError
from raftkv.torch.data import ElasticSampler, Files, chunk_order


def samplers(world_size: int, length: int = 100, **settings: Any) -> list[ElasticSampler]:
    return [
        ElasticSampler(length, batch_size=4, rank=rank, world_size=world_size, seed=5, **settings)
        for rank in range(world_size)
    ]


def steps_of(ranks: list[ElasticSampler]) -> Iterator[list[int]]:
    """What all ranks use together, step by step."""
    loaders = [iter(rank.batches(BatchSampler(rank, 4, drop_last=False))) for rank in ranks]
    while True:
        parts = [next(loader, []) for loader in loaders]
        if not any(parts):
            return
        yield [sample for part in parts for sample in part]


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_over_three_worlds_uses_every_sample_once(shuffle: bool) -> None:
    used: list[int] = []
    state: dict[str, Any] = {}
    for world_size, steps in ((3, 4), (1, 5), (5, 99)):
        ranks = samplers(world_size, shuffle=shuffle)
        for rank in ranks:
            if state:
                rank.load_state_dict(state)
        assert sum(map(len, ranks)) == 100 - len(used)
        for _, step in zip(range(steps), steps_of(ranks), strict=False):
            used += step
        assert {tuple(rank.state_dict().items()) for rank in ranks} == {tuple(ranks[0].state_dict().items())}
        state = ranks[0].state_dict()
    assert sorted(used) == list(range(100))
    assert (used == list(range(100))) is not shuffle
    assert state == {"epoch": 0, "length": 100, "consumed": 100, "seed": 5, "dataset": ""}


def read_ahead(loader: Iterable[Any], count: int) -> Iterator[Any]:
    """Batches of a loader whose workers are so many ahead: it has taken their samples from the sampler."""
    ahead: deque[Any] = deque()
    for batch in loader:
        ahead.append(batch)
        if len(ahead) > count:
            yield ahead.popleft()
    yield from ahead


def test_samples_read_ahead_are_not_counted() -> None:
    sampler = ElasticSampler(40, batch_size=4, shuffle=False)
    batches = sampler.batches(read_ahead(DataLoader(list(range(40)), 4, sampler=sampler), 4))
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert sampler.position == Position(0, 40, 8)
    del batches
    rest = [batch.tolist() for batch in sampler.batches(DataLoader(list(range(40)), 4, sampler=sampler))]
    assert [sample for batch in rest for sample in batch] == list(range(8, 40))
    assert sampler.position.is_over


def test_an_epoch_after_the_other() -> None:
    sampler = ElasticSampler(range(10), batch_size=4)
    orders = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert len(sampler) == 10
        orders.append(
            [sample for batch in sampler.batches(BatchSampler(sampler, 4, drop_last=False)) for sample in batch]
        )
        assert list(sampler) == []
        sampler.set_epoch(epoch)  # as after a restart right at the end: nothing is used again
        assert len(sampler) == 0
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    sampler.set_epoch(3, length=5)
    assert sorted(sampler) == list(range(5))


class CountingLoader:
    """A loader that tells its sampler the number of its passes, from 0 in each process, as those of accelerate do."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler = sampler
        self._passes = 0

    def __iter__(self) -> Iterator[list[int]]:
        self._sampler.set_epoch(self._passes)
        yield from BatchSampler(self._sampler, self._sampler.batch_size, drop_last=False)
        self._passes += 1


def test_a_loader_that_counts_its_own_passes_does_not_lead_back_to_an_earlier_epoch() -> None:
    whole = ElasticSampler(12, batch_size=2, seed=3)
    orders = {epoch: list(whole.order(epoch)) for epoch in range(4)}
    sampler = ElasticSampler(12, batch_size=2, seed=3)
    sampler.position = Position(2, 12, 4, 3)
    loader, used = CountingLoader(sampler), []
    for epoch in range(sampler.epoch, 4):
        sampler.set_epoch(epoch)
        used += [sample for batch in sampler.batches(loader) for sample in batch]
    assert used == orders[2][4:] + orders[3]
    for batch in sampler.batches(loader):  # it has counted two passes
        raise AssertionError(batch)
    sampler.set_epoch(0)
    assert next(sampler.batches(CountingLoader(sampler))) == orders[0][:2]


def test_ranks_without_samples_in_the_last_step_end_where_the_others_do() -> None:
    ranks = samplers(5, length=22)
    assert [len(step) for step in steps_of(ranks)] == [20, 2]
    assert all(rank.position.is_over for rank in ranks)


def test_with_drop_last_all_ranks_have_full_batches() -> None:
    ranks = samplers(3, length=31, drop_last=True)
    steps = list(steps_of(ranks))
    assert [len(step) for step in steps] == [12, 12]
    assert all(rank.position.is_over for rank in ranks)


def test_the_state_goes_through_torch_save() -> None:
    sampler = ElasticSampler(10, batch_size=2, seed=3, name="images@4")
    next(sampler.batches(BatchSampler(sampler, 2, drop_last=False)))
    file = io.BytesIO()
    torch.save({"data": sampler.state_dict()}, file)
    file.seek(0)
    again = ElasticSampler(10, batch_size=5, name="images@4")
    again.load_state_dict(torch.load(file)["data"])
    assert again.position == sampler.position == Position(0, 10, 2, 3, "images@4")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_state_is_saved_with_the_model_by_dcp_and_loaded_in_another_world(tmp_path: Path) -> None:
    first, model = samplers(2, length=40), {"weight": torch.arange(3.0)}
    steps = steps_of(first)
    used = [sample for _ in range(2) for sample in next(steps)]
    dcp.save({"model": model, "data": first[1]}, checkpoint_id=tmp_path)
    last = samplers(3, length=40)
    for rank in last:
        dcp.load({"model": model, "data": rank}, checkpoint_id=tmp_path)
    used += [sample for step in steps_of(last) for sample in step]
    assert sorted(used) == list(range(40))


def test_a_length_may_be_a_number_of_numpy() -> None:
    assert list(ElasticSampler(numpy.int64(10), batch_size=2)) == list(ElasticSampler(10, batch_size=2))


def test_impossible_loaders_are_refused() -> None:
    sampler = ElasticSampler(10, batch_size=2, name="images@4")
    for length, name in ((11, "images@4"), (10, "images@5")):
        with pytest.raises(ConfigError, match="go on with the version that it was saved with"):
            sampler.load_state_dict(ElasticSampler(length, batch_size=2, name=name).state_dict())
    with pytest.raises(RecordError):
        sampler.load_state_dict({"epoch": 0})
    with pytest.raises(ConfigError, match="together"):
        ElasticSampler(10, batch_size=2, rank=0)
    with pytest.raises(ConfigError, match="does not exist"):
        ElasticSampler(10, batch_size=2, rank=2, world_size=2)
    with pytest.raises(ConfigError):
        ElasticSampler(10, batch_size=0)
    with pytest.raises(ConfigError, match="has 3 samples"):
        list(ElasticSampler(10, batch_size=2, shuffle=lambda _: range(3)))


def test_uncounted_samples_are_noticed_when_the_position_is_saved() -> None:
    sampler = ElasticSampler(10, batch_size=2)
    assert sampler.position.consumed == 0
    list(BatchSampler(sampler, 2, drop_last=False))
    with pytest.raises(ConfigError, match=r"sampler.batches\(loader\)"):
        _ = sampler.position


def test_the_world_is_asked_of_the_run_in_every_pass() -> None:
    class Run:
        rank = 0
        world_size = 2

    run = Run()
    sampler = ElasticSampler(16, run, batch_size=2, shuffle=False)
    assert list(sampler)[:3] == [0, 1, 4]
    sampler.advance()
    run.world_size = 1
    assert list(sampler) == list(range(4, 16))
    other = ElasticSampler(16, batch_size=2, rank=0, world_size=1, shuffle=False)
    other.set_world(1, 4)
    assert list(other) == [2, 3, 10, 11]


def test_a_pass_that_the_world_has_left_behind_ends() -> None:
    class Run:
        rank = 0
        world_size = 2

    run = Run()
    sampler = ElasticSampler(16, run, batch_size=2, shuffle=False)
    batches = sampler.batches(BatchSampler(sampler, 2, drop_last=False))
    assert [next(batches), next(batches)] == [[0, 1], [4, 5]]
    run.world_size = 3
    with pytest.raises(ConfigError, match="the world has changed from rank 0 of 2 to rank 0 of 3"):
        next(batches)
    assert sampler.position.consumed == 8
    assert list(sampler) == [8, 9]


class Loader:
    """What torchdata's ``StatefulDataLoader`` does with a sampler: the state of a batch goes with the batch."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self.sampler = sampler
        self.inner: Any = iter(sampler)

    def ahead(self, batches: int) -> list[tuple[list[int], dict[str, Any]]]:
        found = []
        for _ in range(batches):
            batch = [next(self.inner) for _ in range(self.sampler.batch_size)]
            found.append((batch, {"sampler": self.sampler.state_dict(), "iter": self.inner.state_dict()}))
        return found

    def load(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state["sampler"])
        self.inner = iter(self.sampler)
        self.inner.load_state_dict(state["iter"])


def test_a_stateful_loader_goes_on_behind_the_batch_that_it_gave_out() -> None:
    first = [Loader(rank) for rank in samplers(2, length=40)]
    sent = [loader.ahead(4) for loader in first]  # the loop got two of them
    used = [sample for rank in sent for batch, _ in rank[:2] for sample in batch]
    last = [Loader(rank) for rank in samplers(3, length=40)]
    for loader in last:
        loader.load(sent[0][1][1])
        used += list(loader.inner)
    assert sorted(used) == list(range(40))


class Chunks:
    def chunk(self, digest: str) -> Any:
        return Leaf(int(digest) * 10)

    def fetch_ahead(self, digests: Any) -> None:
        pass


class Leaf:
    def __init__(self, first: int) -> None:
        self.paths = [f"{number:03d}" for number in range(first, first + 10)]

    def __len__(self) -> int:
        return 10

    def __getitem__(self, position: int) -> Entry:
        return Entry(self.paths[position], 1)


def test_a_dataset_of_files_in_an_order_of_chunks() -> None:
    leaves = [Child(str(number), f"{number * 10:03d}", 10, 10) for number in range(8)]
    files = Snapshot(Head("", 1, 80, 80, 8, 0), leaves, Chunks())
    sampler = ElasticSampler(files, batch_size=4, shuffle=chunk_order(files, seed=2, window=2))
    loader = DataLoader(Files(files, lambda entry: int(entry.path)), batch_size=4, sampler=sampler)
    used = [int(sample) for batch in sampler.batches(loader) for sample in batch]
    assert sorted(used) == list(range(80))
    assert all(len({sample // 10 for sample in used[at : at + 20]}) == 2 for at in range(0, 80, 20))
