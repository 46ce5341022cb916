"""Every sample of every epoch is used exactly once, while processes of the job are killed and others join it.

The model is how often each sample went into it, so that the use of every sample shows. It is committed together with
the position in the data, every few steps; the ranks of the next generation, however many, go on from both. Steps after
the last commit are done again, from the model before them: nothing is counted twice, and nothing is left out.

Needs fsspec: `pip install 'raftkv[checkpoint]'`.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from multiprocessing.synchronize import Event

import raftkv
import raftkv.training
from raftkv.checkpoint.positions import Position, load, save
from raftkv.checkpoint.storage.verify import read_verified
from raftkv.dataset import Permutation
from raftkv.training import GenerationOver, Run

SAMPLES, BATCH, EPOCHS, STEPS_A_COMMIT = 997, 4, 2, 4


def train(run: Run) -> None:
    """One generation: the same ranks from its beginning to its end."""
    with run.resume() as last:
        if last is None:
            step, position = 0, Position.begin(SAMPLES, seed=7)
            model = {"used": [[0] * SAMPLES for _ in range(EPOCHS)], "worlds": []}
        else:
            step, position, model = last.step, load(last, Position), json.loads(last.read("model.json"))
    model["worlds"].append(run.world_size)
    while position.epoch < EPOCHS:
        order = Permutation(SAMPLES, (position.seed, position.epoch))
        mine = [order[place] for place in position.share(BATCH, run.rank, run.world_size)]
        for batch in run.all_gather("gradients", json.dumps(mine)):
            for sample in json.loads(batch):
                model["used"][position.epoch][sample] += 1
        step, position = step + 1, position.step(BATCH, run.world_size)
        if position.is_over:
            position = position.next_epoch()
        if step % STEPS_A_COMMIT == 0 or position.epoch == EPOCHS:
            with run.checkpoint(step, metadata=position.metadata) as saving:
                if run.rank == 0:
                    saving.write("model.json", json.dumps(model).encode())
                    save(saving, position)


def work(endpoints: list[str], uri: str, may_join: Event) -> None:
    """One process, in as many generations as there are."""
    may_join.wait()
    options = {"min_nodes": 2, "max_nodes": 4, "lease_ttl_s": 5, "disconnect_grace_s": 0.03, "checkpoints": uri}
    with raftkv.training.join("job", endpoints=endpoints, **options) as run:
        while True:
            try:
                return train(run)
            except GenerationOver:
                run.rejoin()


if __name__ == "__main__":
    with (
        raftkv.local() as cluster,
        cluster.connect() as kv,
        tempfile.TemporaryDirectory() as uri,
    ):
        spawn = multiprocessing.get_context("spawn")
        gates = [spawn.Event() for _ in range(5)]
        nodes = [spawn.Process(target=work, args=(cluster.endpoints, uri, gate)) for gate in gates]
        for node in nodes:
            node.start()
        for gate in gates[:3]:
            gate.set()
        registry = raftkv.checkpoint.Registry(kv, "job")
        with registry.watch(start_revision=1) as commits:
            for number, _ in zip(range(21), commits, strict=False):
                if number in (3, 20):
                    nodes[number // 20].kill()
                if number == 10:
                    gates[3].set()
                    gates[4].set()
        for node in nodes:
            node.join()
        last = registry.latest()
        model = json.loads(read_verified(last, "model.json"))
        print("processes:", ["killed" if node.exitcode else "done" for node in nodes])
        print("world sizes:", model["worlds"])
        print("each sample was used once in every epoch:", model["used"] == [[1] * SAMPLES] * EPOCHS)
