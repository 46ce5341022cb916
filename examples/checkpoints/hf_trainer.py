"""The Hugging Face Trainer, killed in the middle of a save and started again: it goes on from a whole checkpoint.

By itself this starts a cluster and trains a tiny model: until it is killed, then to the end, and once without a fault
to compare. With RAFTKV_ENDPOINTS it trains one job, from what the registry has. Needs torch and transformers.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile

import raftkv
import raftkv.checkpoint

STEPS = 6
KILL_IN_SAVE_OF = int(os.environ.get("KILL_IN_SAVE_OF", "0"))


def train(endpoints: str, run_id: str, directory: str) -> None:
    """Train, from the newest checkpoint on."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

    from raftkv.torch.transformers import RegistryCallback

    class Killer(TrainerCallback):
        """Kills this process after the Trainer has written its folder and before the commit."""

        def on_save(self, args, state, control, **_):
            if state.global_step == KILL_IN_SAVE_OF:
                os.remove(os.path.join(args.output_dir, f"checkpoint-{state.global_step}", "trainer_state.json"))
                os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=32, max_position_embeddings=16, **size))
    texts = torch.randint(0, 32, (64, 8), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": text, "labels": text.sum() % 2} for text in texts]
    settings = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "eval_strategy": "steps", "logging_steps": 1}
    arguments = TrainingArguments(
        f"{directory}/{run_id}-output",
        max_steps=STEPS,
        save_steps=2,
        eval_steps=2,
        per_device_train_batch_size=4,
        **settings,
    )
    with raftkv.connect(endpoints) as kv:
        registry = raftkv.checkpoint.Registry(kv, run_id, uri=f"{directory}/{run_id}")
        saving = RegistryCallback(registry)
        trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data, callbacks=[Killer, saving])
        found = saving.resume_from()
        print("goes on from step", registry.latest().step if found else 0, flush=True)
        trainer.train(resume_from_checkpoint=found)
        weights = sum(parameter.double().sum().item() for parameter in model.parameters())
        print("weights", repr(weights), flush=True)


def show() -> None:
    """A cluster; a job that is killed and started again, and one that nothing happens to."""
    with raftkv.local(size=1) as cluster, tempfile.TemporaryDirectory() as directory, cluster.connect() as kv:

        def start(*run_ids: str, **environment: str) -> list[str]:
            command = [sys.executable, __file__, directory, *run_ids]
            settings = {**os.environ, "RAFTKV_ENDPOINTS": ",".join(cluster.endpoints), **environment}
            done = subprocess.run(
                command, env=settings, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False
            )
            lines = [line for line in done.stdout.splitlines() if line.startswith(("goes on", "weights"))]
            print(*run_ids, *lines[:1], "- ended with", done.returncode)
            return lines

        start("job", KILL_IN_SAVE_OF="4")
        lines = start("job", "calm")
        registry = raftkv.checkpoint.Registry(kv, "job")
        print("checkpoints:", [found.step for found in registry.checkpoints()])
        print("metrics:", sorted(registry.latest().metrics), "best:", registry.best("eval_loss").step)
        print("the same weights as without the fault:", lines[1] == lines[3])


if __name__ == "__main__":
    if importlib.util.find_spec("transformers") is None:
        sys.exit("this example needs transformers: pip install transformers==5.23.0 accelerate torch")
    if "RAFTKV_ENDPOINTS" in os.environ:
        for run_id in sys.argv[2:]:
            train(os.environ["RAFTKV_ENDPOINTS"], run_id, sys.argv[1])
    else:
        show()
