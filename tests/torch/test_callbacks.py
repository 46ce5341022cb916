"""The callbacks without their frameworks, which the examples have: what becomes of a folder, what all ranks learn."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import raftkv.checkpoint
from raftkv.checkpoint.errors import (
    CheckpointError,
    CheckpointNotFound,
    DigestMismatch,
    FenceBroken,
    NotWhole,
    StaleStep,
)
from raftkv.checkpoint.keys import RegistryKeys
from raftkv.checkpoint.retention.policy import Best, Policy
from raftkv.errors import ConfigError
from raftkv.integrations import ranks
from tests.integrations.importers import fabricated as made


@pytest.fixture
def registry(raftkv_client, tmp_path) -> raftkv.checkpoint.Registry:
    return raftkv.checkpoint.Registry(raftkv_client, "job", uri=str(tmp_path / "registry"))


@pytest.fixture(autouse=True)
def _packages(monkeypatch) -> None:
    """The two packages, as far as the callbacks take anything from them."""
    callbacks = types.ModuleType("lightning.pytorch.callbacks")
    vars(callbacks)["ModelCheckpoint"] = object
    transformers = types.ModuleType("transformers")
    vars(transformers)["TrainerCallback"] = object
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    for name in ("lightning", "lightning.pytorch"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "lightning.pytorch.callbacks", callbacks)
    for name in ("transformers", "lightning"):
        for package in ("torch", "integrations"):
            monkeypatch.delitem(sys.modules, f"raftkv.{package}.{name}", raising=False)


class Trainer:
    """What the Trainer of transformers does around its callbacks."""

    def __init__(self, registry, output: Path, *, directory: str = "", policy=None, **arguments) -> None:
        made_of = importlib.import_module("raftkv.torch.transformers").RegistryCallback
        self.callback = made_of(registry, directory=directory, policy=policy)
        best = {"load_best_model_at_end": bool(arguments), "metric_for_best_model": None, "greater_is_better": None}
        self.args = SimpleNamespace(output_dir=str(output), device="cpu", **{**best, **arguments})
        self.control = SimpleNamespace(should_save=False, should_training_stop=False)
        self.state = SimpleNamespace(global_step=0, log_history=[], best_model_checkpoint=None, best_global_step=None)

    def begin(self) -> None:
        self.callback.on_train_begin(self.args, self.state, None)

    def save(self, step: int, files=None) -> None:
        folder = made.write(Path(self.args.output_dir) / f"checkpoint-{step}", files or made.trainer(step))
        self.state.global_step, self.state.best_model_checkpoint = step, str(folder)
        self.state.best_global_step = step
        self.callback.on_save(self.args, self.state, None)

    def evaluate(self, loss: float, **more: float) -> None:
        self.state.log_history.append({"step": self.state.global_step, "eval_loss": loss, "eval_runtime": 1.0, **more})
        self.callback.on_evaluate(self.args, self.state, None)

    def train(self, losses: dict[int, float]) -> None:
        """Train to the end: evaluate and save at some steps; then the Trainer loads the best model."""
        self.begin()
        for step, loss in losses.items():
            self.state.global_step = step
            self.evaluate(loss)
            self.save(step)
        self.callback.on_log(self.args, self.state, None, logs={"loss": 1.0})
        self.callback.on_log(self.args, self.state, None, logs={"train_runtime": 1.0})
        self.callback.on_train_end(self.args, self.state, None)

    @property
    def best_step(self) -> int:
        return json.loads(Path(self.state.best_model_checkpoint, "trainer_state.json").read_text())["global_step"]


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


LOSS = {"metric_for_best_model": "loss", "greater_is_better": False}


@pytest.mark.long
@pytest.mark.parametrize("policy", [None, Policy(keep_last=1), Policy(keep_last=1, keep_best=[Best("loss", "max")])])
@pytest.mark.parametrize("place", ["local", "url"])
def test_trainer_loads_the_best_model_at_the_end(raftkv_client, tmp_path, place, policy):
    """Load the best of all starts of the job, wherever it lies: it was the last one, or none."""
    uri = str(tmp_path / "registry") if place == "local" else f"memory://bucket/{tmp_path.name}"
    registry = raftkv.checkpoint.Registry(raftkv_client, "best", uri=uri)
    trainer = Trainer(registry, tmp_path / "out", directory=str(tmp_path / "cache"), policy=policy, **LOSS)
    trainer.train({2: 0.5, 4: 0.25, 6: 0.75})
    assert trainer.best_step == 4
    trainer.evaluate(0.0)  # of the model that is loaded by now, which is not that of step 6
    assert registry.best("eval_loss").step == 4
    again = Trainer(registry, tmp_path / "out", directory=str(tmp_path / "cache"), policy=policy, **LOSS)
    assert again.callback.resume_from()
    again.train({8: 0.875, 10: 1.0})
    assert again.best_step == 4
    better = Trainer(registry, tmp_path / "out", directory=str(tmp_path / "cache"), policy=policy, **LOSS)
    better.train({12: 0.125, 14: 1.0})
    assert better.best_step == 12


def test_writer_between_the_comparison_and_the_trainers_load_is_noticed(registry, tmp_path):
    """Hand out a path, and check it when it was read: what lay there in between was trained on, and saved."""
    trainer = Trainer(registry, tmp_path / "out", **LOSS)
    trainer.train({2: 0.5})
    again = Trainer(registry, tmp_path / "out", **LOSS)
    weights = Path(again.callback.resume_from(), "model.safetensors")
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + b"x")
    again.begin()  # the Trainer has loaded it by now
    weights.write_bytes(data)
    with pytest.raises(DigestMismatch, match=r"model\.safetensors was changed or deleted after it was compared"):
        again.callback.on_step_end(again.args, again.state, again.control)
    calm = Trainer(registry, tmp_path / "out", **LOSS)
    assert calm.callback.resume_from()
    calm.begin()
    for _ in range(2):
        calm.callback.on_step_end(calm.args, calm.state, calm.control)
    calm.callback.on_log(calm.args, calm.state, None, logs={"train_runtime": 1.0})
    (Path(calm.state.best_model_checkpoint) / "optimizer.bin").write_bytes(b"planted")
    with pytest.raises(DigestMismatch, match=r"optimizer\.bin was changed or deleted"):
        calm.callback.on_train_end(calm.args, calm.state, None)


def test_trainers_note_of_its_best_names_no_damaged_checkpoint(registry, tmp_path, caplog):
    """Compare its bytes first, and forget a note of a path where anything may lie by now."""
    Trainer(registry, tmp_path / "out", **LOSS).train({2: 0.5})
    (Path(registry.latest().uri) / "optimizer.pt").write_bytes(b"x")
    for step in (2, 4):
        again = Trainer(registry, tmp_path / "out", **LOSS)
        again.state.best_global_step, again.state.best_model_checkpoint = step, str(tmp_path / "planted")
        again.begin()
        assert again.state.best_model_checkpoint is None
    assert "the best checkpoint so far can no longer be loaded" in caplog.text


def test_trainer_whose_best_cannot_be_loaded_is_told(raftkv_client, registry, tmp_path, caplog):
    far = raftkv.checkpoint.Registry(raftkv_client, "far", uri=f"memory://bucket/{tmp_path.name}")
    with pytest.raises(
        ConfigError, match=r"load_best_model_at_end needs RegistryCallback\(directory=PATH\): memory://"
    ):
        Trainer(far, tmp_path / "out", **LOSS).begin()
    trainer = Trainer(registry, tmp_path / "out", **{**LOSS, "metric_for_best_model": "accuracy"})
    trainer.train({2: 0.5})
    assert trainer.state.best_model_checkpoint is None
    assert "the last model stays loaded: run 'job' has no checkpoint with the metric 'eval_accuracy'" in caplog.text


def test_trainer_files_named_metrics_first(registry, tmp_path):
    trainer = Trainer(registry, tmp_path / "out", metric_for_best_model="eval_z/f1", greater_is_better=True)
    trainer.begin()
    trainer.state.global_step = 2
    trainer.evaluate(0.5, **{f"eval_m{number}": 1.0 for number in range(70)}, **{"eval_z/f1": 0.75})
    trainer.save(2)
    assert len(registry.latest().metrics) == 60
    assert registry.best("eval_z/f1", "max").step == 2


def test_trainer_that_is_told_to_end_saves_first(registry, tmp_path):
    trainer, ended = Trainer(registry, tmp_path / "out"), []
    before = signal.signal(signal.SIGTERM, lambda *_: ended.append(registry.latest().step))
    try:
        trainer.begin()
        trainer.state.global_step = 3
        trainer.callback.on_step_end(trainer.args, trainer.state, trainer.control)
        assert not trainer.control.should_save
        signal.raise_signal(signal.SIGTERM)
        assert ended == []
        trainer.callback.on_step_end(trainer.args, trainer.state, trainer.control)
        assert trainer.control.should_save
        assert trainer.control.should_training_stop
        trainer.save(3)
        assert ended == [3]
        again = Trainer(registry, tmp_path / "out")
        again.begin()
        for _ in range(2):  # the second one is not held back
            signal.raise_signal(signal.SIGTERM)
        assert ended == [3, 3]
        last = Trainer(registry, tmp_path / "out")
        last.train({5: 1.0})
        signal.raise_signal(signal.SIGTERM)
        assert ended == [3, 3, 5]
    finally:
        signal.signal(signal.SIGTERM, before)


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


class Fit:
    """What the Trainer of Lightning does around its callbacks: a value stays until the next one of its name."""

    def __init__(self, registry, **options) -> None:
        self.callback = importlib.import_module("raftkv.torch.lightning").RegistryCheckpoint(registry, **options)
        self.global_step = self.current_epoch = 0
        self.callback_metrics: dict[str, torch.Tensor] = {}
        self.state = SimpleNamespace(fn="fit")
        self.sanity_checking = self.fast_dev_run = self.received_sigterm = False
        self.written: list[int] = []

    def save_checkpoint(self, path: str, weights_only: bool) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(f"step {self.global_step}".encode())
        self.written.append(self.global_step)
        if self.global_step == 6:
            raise OSError("disk full")

    def log(self, **values: float) -> None:
        self.callback_metrics |= {name: torch.tensor(value) for name, value in values.items()}

    def start(self) -> None:
        self.callback.on_train_start(self, None)

    def step(self, **logged: float) -> None:
        self.global_step += 1
        self.log(**logged)
        self.callback.on_train_batch_end(self, None, None, None, 0)

    def validate(self, **logged: float) -> None:
        self.log(**logged)
        self.callback.on_validation_end(self, None)

    def end_epoch(self) -> None:
        self.callback.on_train_epoch_end(self, None)
        self.current_epoch += 1

    def end(self) -> None:
        self.callback.on_train_end(self, None)


def metrics_by_step(registry) -> dict[int, dict[str, float]]:
    return {found.step: dict(found.metrics) for found in registry.checkpoints()}


def test_lightning_writes_below_the_attempt(registry):
    fit = Fit(registry, every_n_train_steps=2)
    fit.callback_metrics = {"matrix": torch.zeros(2), "nan": torch.tensor(float("nan"))}
    assert fit.callback.resume_from() is None
    fit.start()
    for _ in range(4):
        fit.step(**{"val/loss": 0.5})
    fit.end_epoch()
    fit.global_step = 5
    with pytest.raises(OSError, match="disk full"):
        fit.step()
    assert fit.written == [2, 4, 6]
    latest = registry.latest()
    assert (latest.step, latest.kind, latest.metrics) == (4, "torch_save", {"val_loss": 0.5})
    assert Path(fit.callback.resume_from()).read_bytes() == b"step 4"


def test_lightning_files_a_metric_at_the_step_where_it_was_measured(registry):
    """Keep the best by its own validation: it was filed under every later step, and then deleted."""
    policy = Policy(keep_last=1, keep_best=[Best("val/loss")])
    fit = Fit(registry, every_n_train_steps=1, policy=policy)
    fit.sanity_checking = True
    fit.validate(**{"val/loss": 0.0})
    fit.sanity_checking, fit.callback_metrics = False, {}
    fit.start()
    fit.step(loss=3.0)
    fit.validate(**{"val/loss": 0.25, "val/acc": 0.5})  # after the save of its step
    fit.step(loss=2.0)
    fit.step()
    fit.validate(**{"val/loss": 0.5})
    fit.end_epoch()
    fit.step(loss=1.0)
    fit.end_epoch()
    fit.state.fn = "validate"
    fit.validate(**{"val/loss": 0.0})
    assert metrics_by_step(registry) == {1: {"loss": 3.0, "val/loss": 0.25, "val_acc": 0.5}, 4: {"loss": 1.0}}
    assert Path(fit.callback.best_model_path).read_bytes() == b"step 1"
    assert Path(fit.callback.last_model_path).read_bytes() == b"step 4"


def test_lightning_with_a_validation_every_second_epoch(registry):
    fit = Fit(registry, monitor="val_loss", policy=Policy(keep_last=1))
    fit.start()
    for loss in (0.1, None, 0.3, None):
        fit.step()
        if loss is not None:
            fit.validate(val_loss=loss)
        fit.end_epoch()
    assert metrics_by_step(registry) == {1: {"val_loss": pytest.approx(0.1)}, 4: {}}
    assert Path(fit.callback.best_model_path).read_bytes() == b"step 1"


@pytest.mark.parametrize("is_before", [True, False])
def test_metrics_that_are_named_come_first_of_more_than_fit(registry, caplog, is_before):
    fit = Fit(registry, every_n_train_steps=1, monitor="val_loss", policy=Policy(keep_best=[Best("acc", "max")]))
    fit.start()
    for _ in range(2):
        many, named = {f"m{number}": 1.0 for number in range(70)}, {"val_loss": 0.5, "acc": 0.25}
        if is_before:
            fit.log(**many, **named)
        fit.step(**({} if is_before else many))
        fit.validate(**({} if is_before else named))
        fit.validate(more=1.0)
        metrics = registry.latest().metrics
        assert len(metrics) == 60
        assert named.items() <= metrics.items()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("raftkv: a checkpoint has at most 60 metrics: step 1 lacks 12 of this job's, such as m58; ")


def test_lightning_saves_the_end_of_training(registry):
    fit = Fit(registry, every_n_train_steps=2)
    fit.start()
    for _ in range(3):
        fit.step()
    fit.end()
    fit.end()
    assert fit.written == [2, 3]
    assert Path(fit.callback.best_model_path).read_bytes() == b"step 3"  # no metric is named


@pytest.mark.parametrize(
    ("error", "options", "written"),
    [
        (KeyError("boom"), {}, []),
        (KeyError("boom"), {"save_on_exception": True}, [1]),
        (SystemExit(), {}, [1]),
    ],
)  # fmt: skip
def test_lightning_saves_when_it_is_told_to_end_and_if_wanted_when_it_fails(registry, error, options, written):
    fit = Fit(registry, every_n_train_steps=5, **options)
    fit.start()
    fit.step()
    fit.received_sigterm = isinstance(error, SystemExit)
    fit.callback.on_exception(fit, None, error)
    fit.callback.on_exception(fit, None, error)
    assert fit.written == written
    assert [found.step for found in registry.checkpoints()] == written


def test_save_at_an_exception_that_fails_hides_no_exception(registry, caplog):
    frozen, other = (Fit(registry, every_n_train_steps=5, save_on_exception=True) for _ in range(2))
    frozen.start()
    other.start()
    for fit, step in ((frozen, 1), (other, 6)):
        fit.global_step = step
        fit.callback.on_exception(fit, None, KeyError("boom"))
        assert f"the last checkpoint (step {step}) could not be saved" in caplog.text
    assert registry.checkpoints() == []


def test_paths_of_the_best_and_the_last_model_are_found_or_refused(raftkv_client, tmp_path):
    far = raftkv.checkpoint.Registry(raftkv_client, "far", uri=f"memory://bucket/{tmp_path.name}")
    local = raftkv.checkpoint.Registry(raftkv_client, "job", uri=str(tmp_path / "registry"))
    fit = Fit(local, monitor="val_loss")
    assert (fit.callback.best_model_path, fit.callback.last_model_path) == ("", "")
    fit.start()
    fit.step()
    fit.end()
    with pytest.raises(CheckpointNotFound, match="has no checkpoint with the metric 'val_loss'"):
        _ = fit.callback.best_model_path
    saver = raftkv.checkpoint.Saver(far)
    for step, loss in ((1, 0.1), (2, 0.2)):
        data = f"step {step}".encode()
        folder = made.write(tmp_path / "out", {"lightning.ckpt": data})
        saver.save_directory(step, str(folder), kind="torch_save", metrics={"val_loss": loss})
    with pytest.raises(ConfigError, match="is not a local disk; name a directory"):
        _ = Fit(far, monitor="val_loss").callback.best_model_path
    there = Fit(far, monitor="val_loss", directory=str(tmp_path / "cache"))
    assert Path(there.callback.best_model_path).read_bytes() == b"step 1"
    assert Path(there.callback.last_model_path).read_bytes() == b"step 2"


def test_writer_between_the_comparison_and_lightnings_load_is_noticed(registry):
    fit = Fit(registry, every_n_train_steps=1)
    fit.start()
    fit.step()
    fit.end()
    other = Fit(registry)
    path = Path(other.callback.resume_from())
    other.callback.setup(other, None, "fit")
    path.write_bytes(b"planted")
    with pytest.raises(DigestMismatch, match=r"lightning\.ckpt was changed or deleted .* it is not loaded"):
        other.callback.setup(other, None, "fit")
    with pytest.raises(DigestMismatch, match=r"lightning\.ckpt was changed or deleted after it was compared"):
        other.start()
    path.write_bytes(b"step 1")
    for fn in ("validate", "test", "predict"):
        other.state.fn = fn
        check = getattr(other.callback, {"validate": "on_validation_start"}.get(fn, f"on_{fn}_start"))
        assert other.callback.best_model_path == str(path)
        check(other, None)
        assert other.callback.last_model_path == str(path)
        os.utime(path)
        with pytest.raises(DigestMismatch):
            check(other, None)
    path.write_bytes(b"planted")
    with pytest.raises(DigestMismatch, match="not what was committed"):
        _ = other.callback.best_model_path


def test_lightning_loads_no_checkpoint_whose_record_names_a_foreign_directory(registry, tmp_path):
    """Lightning unpickles it: the right to write keys of the run is not the right to run code in its processes."""
    fit = Fit(registry, every_n_train_steps=1, monitor="loss")
    fit.start()
    fit.step(loss=1.0)
    fit.end()
    found = registry.latest()
    planted = shutil.copytree(found.uri, tmp_path / "planted")
    key = RegistryKeys("job").record(found.kind, found.step)
    registry.kv.put(key, replace(found, uri=str(planted)).encode())
    again = Fit(registry, monitor="loss").callback
    for ask in (lambda: again.best_model_path, lambda: again.last_model_path, again.resume_from):
        with pytest.raises(ConfigError, match="is not loaded: it lies in"):
            ask()
    trusting = Fit(registry, monitor="loss", anywhere=True).callback
    for ask in (lambda: trusting.best_model_path, lambda: trusting.last_model_path, trusting.resume_from):
        assert Path(ask()).parent == planted


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
        *["CheckpointError: rank 0 could not continue: CheckpointError: boom"] * 2,
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


def _of_trainer(registry, output: Path):
    trainer = Trainer(registry, output)
    return trainer.callback.resume_from, lambda: trainer.callback.on_step_end(trainer.args, trainer.state, None)


def _best_of_trainer(registry, output: Path):
    trainer = Trainer(registry, output, **LOSS)
    trainer.begin()

    def load() -> str:
        trainer.callback.on_log(trainer.args, trainer.state, None, logs={"train_runtime": 1.0})
        return trainer.state.best_model_checkpoint

    return load, lambda: trainer.callback.on_train_end(trainer.args, trainer.state, None)


def _of_lightning(name: str):
    def make(registry, output: Path):
        fit = Fit(registry, monitor="eval_loss", kind="safetensors")

        def load() -> str:
            found = getattr(fit.callback, name)
            return str(Path(found() if callable(found) else found).parent)

        return load, fit.start

    return make


LOADERS = {
    "Trainer": _of_trainer,
    "Trainer, best": _best_of_trainer,
    **{f"Lightning, {name}": _of_lightning(name) for name in ("resume_from", "best_model_path", "last_model_path")},
}


@pytest.mark.parametrize("loader", LOADERS)
def test_checkpoint_stays_until_its_path_was_loaded(registry, tmp_path, loader):
    for step in (1, 2):
        folder = made.write(tmp_path / "out" / str(step), made.trainer(step))
        raftkv.checkpoint.Saver(registry).save_directory(
            step, str(folder), kind="safetensors", metrics={"eval_loss": 1.0}
        )
        if step == 1:
            load, loaded = LOADERS[loader](registry, tmp_path / "other")
            path = load()
    policy = Policy(keep_last=1)
    registry.collect(policy)
    assert Path(path, "trainer_state.json").exists()
    loaded()
    registry.collect(policy)
    assert not Path(path).exists()
