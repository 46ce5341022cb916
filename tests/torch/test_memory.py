"""States of ranks in memory: what can be one, and what comes back; in a run of one node on a real member."""

from __future__ import annotations

import logging
import signal
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import raftkv.training
from raftkv.errors import ConfigError
from raftkv.torch.memory import Memory, unpacked
from raftkv.training.api.run import Run
from tests.procs import RAFTKV, Cluster

MEMORY_BYTES = 1 << 22


@pytest.fixture(scope="module")
def member() -> Iterator[Cluster]:
    with Cluster(RAFTKV) as cluster:
        yield cluster


@pytest.fixture
def run(member: Cluster, tmp_path: Path) -> Iterator[Run]:
    options: dict[str, Any] = {"memory_bytes": MEMORY_BYTES, "address": "127.0.0.1", "checkpoints": str(tmp_path)}
    with raftkv.training.join(tmp_path.name, endpoints=member.endpoints, lease_ttl_s=60, **options) as run:
        yield run


def state_of(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model": OrderedDict(
            weight=torch.randn(33, 7, generator=generator),
            half=torch.randn(5, generator=generator).to(torch.bfloat16),
            turned=torch.arange(12).reshape(3, 4).t(),
            none=torch.empty(0, 3),
        ),
        "optimizer": {"state": {0: {"step": torch.tensor(float(step))}}, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        "flags": torch.tensor([True, False]),
        "generator": generator.get_state(),
        "name": "rank", "steps": [step, None, False],
    }  # fmt: skip


def assert_same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for name, value in wanted.items():
            assert_same(found[name], value)
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    else:
        assert found == wanted


def test_the_newest_state_comes_back_with_all_its_types(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    memory = Memory(run, every=5, copies=0)
    assert memory.restore() is None
    assert [memory.save(step, lambda step=step: state_of(step)) for step in (4, 5, 6, 10)] == [False, True, False, True]
    memory.wait()
    assert memory.committed == 10
    last = memory.restore()
    assert last is not None
    assert (last.step, last.checkpoint.kind, last.checkpoint.world_size) == (10, "memory", 1)
    assert_same(last.state, state_of(10))
    torch.Generator().set_state(last.state["generator"])
    last.state["model"]["weight"].add_(1)  # it is the rank's own
    assert caplog.text == ""


def test_a_state_on_fewer_nodes_than_wanted_is_kept_and_named(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    memory = Memory(run, copies=1)
    memory.save(1, state_of(1))
    memory.wait()
    assert "step 1 of rank 0 has only 1 of 2 copies: nodes that keep copies: 1" in caplog.text
    assert memory.restore() is not None


def test_a_state_that_fits_no_node_leaves_the_one_before(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    memory = Memory(run, copies=0)
    memory.save(1, state_of(1))
    memory.save(2, {"large": torch.zeros(MEMORY_BYTES)})
    memory.wait()
    assert "step 2 could not be kept in memory: StorageError: no node of run" in caplog.text
    assert "do not fit into" in caplog.text
    last = memory.restore()
    assert last is not None
    assert last.step == 1


@pytest.mark.long
def test_a_cluster_that_does_not_answer_holds_no_training_up(member, run, caplog):
    """The second save waited for the first as long as the cluster was away."""
    memory = Memory(run, copies=0, timeout_s=5.0)
    memory.save(1, state_of(1))
    memory.wait()
    answers = threading.Event()
    process = member.members[0].process
    assert process is not None

    def resume() -> None:
        answers.set()
        process.send_signal(signal.SIGCONT)

    process.send_signal(signal.SIGSTOP)
    patience = threading.Timer(60.0, resume)
    patience.start()
    for step in (2, 3, 4):
        assert memory.save(step, state_of(step))
    assert not answers.is_set()
    assert caplog.text.count("the save before it has not ended in 5 s") == 1
    patience.cancel()
    resume()
    memory.wait()
    memory.save(5, state_of(5))
    memory.wait()
    assert memory.committed == 5


def test_a_newer_durable_checkpoint_goes_before(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    memory = Memory(run, copies=0)
    memory.save(10, state_of(10))
    memory.wait()
    with run.checkpoint(20) as saving:
        saving.write("model", b"20")
    assert memory.restore() is None
    assert "step 10 cannot be restored from memory: step 20 is durable" in caplog.text
    memory.save(5, state_of(5))  # what was before is forgotten
    memory.wait()
    assert memory.committed == 5


class Code:
    """A class of the user's."""


class Wrapped(torch.Tensor):
    """A tensor that is not one."""


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({"object": Code()}, "dicts, lists and tuples of tensors, numbers and texts"),
        ({"tensor": torch.ones(2).as_subclass(Wrapped)}, "a Wrapped cannot be kept in memory"),
        ({"sparse": torch.ones(2, 2).to_sparse()}, "a Tensor cannot be kept in memory"),
    ],
)
def test_what_cannot_be_restored_without_code_is_refused_at_once(run: Run, state: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Memory(run).save(1, state)


@pytest.mark.parametrize("data", [b"", b"short", bytes(8), b"\xff" * 64, bytes(7) + b"\x10" + b"x" * 80])
def test_bytes_that_are_no_state_are_refused(data: bytes) -> None:
    with pytest.raises(ConfigError):
        unpacked(memoryview(bytearray(data)))


def test_arguments_that_cannot_be_are_refused(run: Run) -> None:
    for wrong in ({"every": 0}, {"copies": -1}):
        with pytest.raises(ConfigError, match="is not valid: every is at least 1, copies at least 0"):
            Memory(run, **wrong)
