"""The callbacks without their frameworks, which the examples have: what becomes of a folder, what all ranks learn."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import raftkv.checkpoint
from raftkv.checkpoint.errors import CheckpointError, FenceBroken, NotWhole, StaleStep
from raftkv.errors import ConfigError
from raftkv.torch import ranks
from tests.checkpoint.importers import fabricated as made


@pytest.fixture
def registry(raftkv_client, tmp_path) -> raftkv.checkpoint.Registry:
    return raftkv.checkpoint.Registry(raftkv_client, "job", uri=str(tmp_path / "registry"))


@pytest.fixture(autouse=True)
def _packages(monkeypatch) -> None:
    """The two packages, as far as the callbacks take anything from them."""
    callbacks = types.ModuleType("lightning.pytorch.callbacks")
    vars(callbacks)["Checkpoint"] = object
    transformers = types.ModuleType("transformers")
    vars(transformers)["TrainerCallback"] = object
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    for name in ("lightning", "lightning.pytorch"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "lightning.pytorch.callbacks", callbacks)
    for name in ("transformers", "lightning"):
        monkeypatch.delitem(sys.modules, f"raftkv.torch.{name}", raising=False)


class Trainer:
    """What the Trainer of transformers does around its callbacks."""

    def __init__(self, registry, output: Path) -> None:
        self.callback = importlib.import_module("raftkv.torch.transformers").RegistryCallback(registry)
        self.args = SimpleNamespace(output_dir=str(output))
        self.state = SimpleNamespace(global_step=0, log_history=[], best_model_checkpoint=None, best_global_step=None)

    def begin(self) -> None:
        self.callback.on_train_begin(self.args, self.state, None)

    def save(self, step: int, files=None) -> None:
        folder = made.write(Path(self.args.output_dir) / f"checkpoint-{step}", files or made.trainer(step))
        self.state.global_step, self.state.best_model_checkpoint = step, str(folder)
        self.state.best_global_step = step
        self.callback.on_save(self.args, self.state, None)

    def evaluate(self, loss: float) -> None:
        self.state.log_history.append({"step": self.state.global_step, "eval_loss": loss, "eval_runtime": 1.0})
        self.callback.on_evaluate(self.args, self.state, None)


def test_the_trainers_folder_is_moved_and_committed(registry, tmp_path):
    trainer = Trainer(registry, tmp_path / "out")
    assert trainer.callback.resume_from() is None
    trainer.begin()
    trainer.state.global_step = 4
    trainer.evaluate(0.5)
    trainer.save(4)
    trainer.callback.on_save(trainer.args, trainer.state, None)  # at the end of an epoch: the same step again
    latest = registry.latest()
    assert (latest.step, latest.kind, latest.metrics) == (4, "safetensors", {"eval_loss": 0.5})
    assert trainer.state.best_model_checkpoint == latest.uri == trainer.callback.resume_from()
    trainer.evaluate(0.25)
    assert registry.latest().metrics == {"eval_loss": 0.25}
    trainer.callback.on_train_end(trainer.args, trainer.state, None)
    assert trainer.args.output_dir == str(tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())

    again = Trainer(registry, tmp_path / "out")
    again.state.best_global_step = 4
    again.begin()
    assert again.state.best_model_checkpoint == latest.uri


def test_the_trainers_errors(registry, tmp_path):
    trainer, frozen = (Trainer(registry, tmp_path / "out") for _ in range(2))
    frozen.begin()
    trainer.begin()
    assert trainer.args.output_dir != frozen.args.output_dir
    trainer.save(4)
    with pytest.raises(NotWhole, match=r"rng_state\.pth is missing"):
        trainer.save(6, {name: data for name, data in made.trainer(6).items() if "rng" not in name})
    with pytest.raises(NotWhole, match="has written no checkpoint"):
        trainer.save(8, {"notes.txt": b""})
    with pytest.raises(StaleStep):
        trainer.save(2)
    with pytest.raises(FenceBroken):
        frozen.save(6)
    assert [found.step for found in registry.checkpoints()] == [4]


def test_lightning_writes_below_the_attempt(registry):
    callback = importlib.import_module("raftkv.torch.lightning").RegistryCheckpoint(registry, every_n_train_steps=2)
    written = []

    def save_checkpoint(path: str, weights_only: bool) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(f"step {trainer.global_step}".encode())
        written.append(trainer.global_step)
        if trainer.global_step == 6:
            raise OSError("disk full")

    metrics = {"val/loss": torch.tensor(0.5), "matrix": torch.zeros(2), "nan": torch.tensor(float("nan"))}
    trainer = SimpleNamespace(global_step=0, current_epoch=0, callback_metrics=metrics, save_checkpoint=save_checkpoint)
    assert callback.resume_from() is None
    callback.on_train_start(trainer, None)
    for step in (1, 2, 2, 3, 4):
        trainer.global_step = step
        callback.on_train_batch_end(trainer, None, None, None, step)
    callback.on_train_epoch_end(trainer, None)
    trainer.global_step = 6
    with pytest.raises(OSError, match="disk full"):
        callback.on_train_batch_end(trainer, None, None, None, 6)
    assert written == [2, 4, 6]
    latest = registry.latest()
    assert (latest.step, latest.kind, latest.metrics) == (4, "torch_save", {"val_loss": 0.5})
    assert Path(callback.resume_from()).read_bytes() == b"step 4"


class Connected:
    """``torch.distributed``, for as many threads as there are ranks."""

    def __init__(self, size: int) -> None:
        self.size, self.own, self.told = size, threading.local(), [None]
        self.barrier = threading.Barrier(size).wait

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def get_world_size(self) -> int:
        return self.size

    def get_rank(self) -> int:
        return self.own.rank

    def broadcast_object_list(self, items: list, src: int) -> None:
        if self.own.rank == src:
            self.told = list(items)
        self.barrier()
        items[:] = self.told
        self.barrier()


def in_all_ranks(monkeypatch, make) -> list[str]:
    connected = Connected(3)
    monkeypatch.setattr(ranks, "dist", connected)

    def one(rank: int) -> str:
        connected.own.rank = rank
        try:
            return ranks.decide(lambda: make(rank))
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(one, range(3)))


def test_all_ranks_learn_what_the_first_decides_or_why_it_cannot(monkeypatch):
    assert in_all_ranks(monkeypatch, lambda rank: f"by {rank}") == ["by 0"] * 3

    def fail(rank: int) -> str:
        raise CheckpointError("boom")

    assert in_all_ranks(monkeypatch, fail) == [
        "CheckpointError: boom",
        *["CheckpointError: rank 0 could not go on: CheckpointError: boom"] * 2,
    ]


def test_ranks_that_are_not_connected_inherit_or_are_refused(monkeypatch):
    monkeypatch.delenv(ranks.INHERITED, raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert ranks.decide(lambda: "found", inherited=True) == "found"
    assert json.loads(os.environ[ranks.INHERITED]) == "found"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert ranks.decide(lambda: "other", inherited=True) == "found"
    with pytest.raises(ConfigError, match="one of 2 ranks, and cannot ask the first one yet"):
        ranks.decide(lambda: "other")
