"""A job of Lightning, killed in the middle of a save and started again: it goes on from a whole checkpoint.

By itself this starts a cluster and fits a tiny model: until it is killed, then to the end, and once without a fault to
compare. With RAFTKV_ENDPOINTS it fits one job, from what the registry has. Needs torch and lightning.
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

EPOCHS = 3
KILL_IN_SAVE_OF = int(os.environ.get("KILL_IN_SAVE_OF", "0"))


def fit(endpoints: str, run_id: str, directory: str) -> None:
    """Fit, from the newest checkpoint on."""
    import lightning.pytorch as lightning
    import torch

    from raftkv.torch.lightning import RegistryCheckpoint

    class Model(lightning.LightningModule):
        """One layer."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, _):
            loss = self.layer(batch[0]).sub(batch[0].sum(1, keepdim=True)).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.1)

    class Killed(RegistryCheckpoint):
        """Kills this process after a checkpoint is written and before its commit."""

        def _save(self, trainer):
            if trainer.global_step == KILL_IN_SAVE_OF:
                save = trainer.save_checkpoint
                trainer.save_checkpoint = lambda *a, **k: (save(*a, **k), os.kill(os.getpid(), signal.SIGKILL))
            super()._save(trainer)

    lightning.seed_everything(0, verbose=False)
    data = torch.utils.data.TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(0)))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    with raftkv.connect(endpoints) as kv:
        registry = raftkv.checkpoint.Registry(kv, run_id, uri=f"{directory}/{run_id}")
        saving = Killed(registry, every_n_epochs=1)
        trainer = lightning.Trainer(max_epochs=EPOCHS, callbacks=[saving], default_root_dir=directory, **quiet)
        found = saving.resume_from()
        print("goes on from step", registry.latest().step if found else 0, flush=True)
        model = Model()
        trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4), ckpt_path=found)
        print("weights", [weight.tolist() for weight in model.parameters()], flush=True)


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

        start("job", KILL_IN_SAVE_OF="8")
        lines = start("job", "calm")
        registry = raftkv.checkpoint.Registry(kv, "job")
        print("checkpoints:", [found.step for found in registry.checkpoints()])
        print("metrics:", sorted(registry.latest().metrics))
        print("the same weights as without the fault:", lines[1] == lines[3])


if __name__ == "__main__":
    if importlib.util.find_spec("lightning") is None:
        sys.exit("this example needs Lightning: pip install lightning==2.6.6")
    if "RAFTKV_ENDPOINTS" in os.environ:
        for run_id in sys.argv[2:]:
            fit(os.environ["RAFTKV_ENDPOINTS"], run_id, sys.argv[1])
    else:
        show()
