"""Lightning and the Trainer of transformers themselves: metrics of checkpoints, and which model is the best."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from raftkv.checkpoint import Registry
from raftkv.client.local import LocalCluster
from tests.foreign.environments import interpreter

LIGHTNING = """
import json, logging, os, signal, sys, warnings
warnings.simplefilter("ignore")
import lightning.pytorch as lightning, torch
import raftkv
from raftkv.checkpoint import Best, Policy, Registry
from raftkv.torch.lightning import RegistryCheckpoint
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
LOSSES = [0.25, 0.5, 0.75, 1.0]

class Model(lightning.LightningModule):
    kill_at = fail_at = -1
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.register_buffer("steps", torch.zeros(()))
        self.validations = 0
    def training_step(self, batch, index):
        self.steps += 1
        if self.steps == self.kill_at:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.steps == self.fail_at:
            raise ValueError("boom")
        loss = self.layer(batch[0]).square().mean()
        self.log_dict({f"m{number}": float(number) for number in range(70)})
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss
    def on_validation_epoch_start(self):
        self.validations += not self.trainer.sanity_checking
    def validation_step(self, batch, index):
        self.log("val/loss", 0.0 if self.trainer.sanity_checking else LOSSES[self.validations - 1])
    test_step = validation_step
    def predict_step(self, batch, index):
        return self.steps.clone()
    def test_step(self, batch, index):
        self.log("tested", self.steps)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 4)), batch_size=4)
quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
def trainer_of(saving, epochs, **more):
    return lightning.Trainer(max_epochs=epochs, callbacks=[saving], default_root_dir=sys.argv[1], **quiet, **more)
def named(registry):
    return [[c.step, c.metrics.get("val/loss"), len(c.metrics)] for c in registry.checkpoints()]

result = {}
with raftkv.connect(os.environ["RAFTKV_ENDPOINTS"]) as kv:
    registry = Registry(kv, "second", uri=f"{sys.argv[1]}/second")
    saving = RegistryCheckpoint(registry, monitor="val/loss", policy=Policy(keep_last=1))
    trainer, model = trainer_of(saving, 5, check_val_every_n_epoch=2), Model()
    trainer.fit(model, data, data)
    result["second"] = named(registry)
    for path in ("best", "last"):
        result[path] = [
            trainer.test(model, data, ckpt_path=path, verbose=False)[0]["tested"],
            trainer.predict(model, data, ckpt_path=path)[0].item(),
            len(trainer.validate(model, data, ckpt_path=path, verbose=False)),
        ]
    more = trainer_of(RegistryCheckpoint(registry, monitor="val/loss"), 6)
    more.fit(Model(), data, data, ckpt_path="last")
    result["resumed"] = [c.step for c in registry.checkpoints()]
    more.test(ckpt_path="best", dataloaders=data, verbose=False)

    registry = Registry(kv, "steps", uri=f"{sys.argv[1]}/steps")
    policy = Policy(keep_last=1, keep_best=[Best("val/loss")])
    saving = RegistryCheckpoint(registry, every_n_train_steps=1, policy=policy)
    trainer_of(saving, 3).fit(Model(), data, data)
    result["steps"] = named(registry)

    for name, more in (("fails", {}), ("saved", {"save_on_exception": True})):
        registry = Registry(kv, name, uri=f"{sys.argv[1]}/{name}")
        model = Model()
        model.fail_at = 4
        try:
            trainer_of(RegistryCheckpoint(registry, every_n_train_steps=9, **more), 3).fit(model, data, data)
        except ValueError as error:
            result[name] = [str(error), *[c.step for c in registry.checkpoints()]]
    registry = Registry(kv, "told", uri=f"{sys.argv[1]}/told")
    model = Model()
    model.kill_at = 3
    try:
        trainer_of(RegistryCheckpoint(registry, every_n_train_steps=9), 3).fit(model, data, data)
    except SystemExit as error:
        result["told"] = [type(error).__name__, *[c.step for c in registry.checkpoints()]]
print(json.dumps(result))
"""

TRANSFORMERS = """
import json, os, signal, sys, warnings
warnings.simplefilter("ignore")
import torch, transformers
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments
import raftkv
from raftkv.checkpoint import Policy, Registry
from raftkv.torch.transformers import RegistryCallback
transformers.utils.logging.set_verbosity_error()
place, uri, told = sys.argv[1:]
size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
config = BertConfig(vocab_size=8, max_position_embeddings=8, **size)
data = [{"input_ids": torch.ones(4, dtype=torch.int64), "labels": torch.tensor(0)} for _ in range(8)]

class Told(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if state.global_step == int(told):
            os.kill(os.getpid(), signal.SIGTERM)

def weight(model):
    return sum(parameter.double().sum().item() for parameter in model.parameters())

class Noting(Trainer):
    def evaluate(self, *words, **more):
        noted[self.state.global_step] = weight(self.model)
        return super().evaluate(*words, **more)

with raftkv.connect(os.environ["RAFTKV_ENDPOINTS"]) as kv:
    registry, found = Registry(kv, uri.replace(":", "").replace("/", "") + told, uri=uri), []
    noted = {}
    for steps in (4, 6):
        torch.manual_seed(0)
        saving = RegistryCallback(registry, policy=Policy(keep_last=1), directory=f"{place}/cache")
        arguments = TrainingArguments(
            f"{place}/out", max_steps=steps, save_steps=2, eval_steps=2, eval_strategy="steps", report_to=[],
            use_cpu=True, disable_tqdm=True, per_device_train_batch_size=4, load_best_model_at_end=True,
            metric_for_best_model="score", greater_is_better=True,
        )
        model = BertForSequenceClassification(config)
        trainer = Noting(model, arguments, train_dataset=data, eval_dataset=data, callbacks=[Told(), saving],
            compute_metrics=lambda _: {"score": 0.75 if trainer.state.global_step == 2 else 0.5})
        trainer.train(resume_from_checkpoint=saving.resume_from())
        found.append([weight(trainer.model) == noted[2], [c.step for c in registry.checkpoints()]])
        trainer.evaluate()
    found.append({c.step: c.metrics["eval_score"] for c in registry.checkpoints()})
print(json.dumps(found))
"""


def played(script: str, cluster: LocalCluster, place: Path, *words: str) -> Any:
    """Return what a script prints as its last line."""
    settings = {"RAFTKV_ENDPOINTS": ",".join(cluster.endpoints), "TOKENIZERS_PARALLELISM": "false"}
    command = [str(interpreter("trainers")), "-c", script, str(place), *words]
    environment = {**os.environ, **settings}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode in (0, -signal.SIGTERM), done.stderr
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.returncode


@pytest.mark.long
def test_lightning_keeps_and_loads_its_best_model(raftkv_cluster: LocalCluster, tmp_path: Path) -> None:
    found = played(LIGHTNING, raftkv_cluster, tmp_path)
    assert found == {
        "second": [[4, 0.25, 60], [10, None, 59]],
        "best": [4.0, 4.0, 1],
        "last": [10.0, 10.0, 1],
        "resumed": [4, 10, 12],
        "steps": [[2, 0.25, 60], [6, 0.75, 60]],
        "fails": ["boom"],
        "saved": ["boom", 3],
        "told": ["SIGTERMException", 3],
    }


@pytest.mark.long
@pytest.mark.parametrize("place", ["local", "url"])
def test_trainer_of_transformers_loads_its_best_model(raftkv_cluster: LocalCluster, tmp_path: Path, place: str) -> None:
    uri = str(tmp_path / "registry") if place == "local" else "memory://bucket/registry"
    found = played(TRANSFORMERS, raftkv_cluster, tmp_path, uri, "-1")
    assert found == [[True, [2, 4]], [True, [2, 6]], {"2": 0.75, "6": 0.5}]


@pytest.mark.long
def test_trainer_of_transformers_saves_at_sigterm(raftkv_cluster: LocalCluster, tmp_path: Path) -> None:
    uri = str(tmp_path / "registry")
    assert played(TRANSFORMERS, raftkv_cluster, tmp_path, uri, "2") == -signal.SIGTERM
    with raftkv_cluster.connect() as kv:
        name = uri.replace("/", "") + "2"
        assert [found.step for found in Registry(kv, name).checkpoints()] == [2, 3]
