"""What the processes of a job do together without a line of torch: ranks, barriers, values, counters, elections.

One of three ends early. The others see it at once in any wait, and go on as a generation of two.
"""

from __future__ import annotations

import multiprocessing

import raftkv
import raftkv.training
from raftkv.training import GenerationOver

RANKS = 3


def work(endpoints: list[str], lines: multiprocessing.Queue[str]) -> None:
    """One rank."""
    run = raftkv.training.join(
        "example",
        endpoints=endpoints,
        min_nodes=2,
        max_nodes=RANKS,
        expected_nodes=RANKS,
        last_call_timeout_s=60,
        disconnect_grace_s=0.03,
        lease_ttl_s=30,
    )
    with run:
        config = run.broadcast("config", b"batch=32" if run.rank == 0 else None)
        names = run.all_gather("names", f"rank {run.rank} of {run.world_size}")
        sample = run.counter("samples").add(1)  # no two ranks get the same
        if run.rank == 0:
            lines.put(f"config {config.decode()}; {', '.join(name.decode() for name in names)}")
        with run.elect("writer") as term:  # one after the other; the term ends with the generation at the latest
            run.kv.put("samples", f"sample {sample}", fence=term)
        run.barrier("first part", timeout_s=60)
        if run.rank == 2:
            run.leave()
            return
        try:
            run.barrier("never complete")
        except GenerationOver as over:
            run.rejoin()
            lines.put(f"rank {run.rank} of {run.world_size} in generation {run.generation}, because {over.reason}")
        run.kv.put(f"result/{run.rank}", b"done", fence=run.fence)  # only while the generation lasts


if __name__ == "__main__":
    with raftkv.local(size=3) as cluster, cluster.connect() as kv:
        spawn = multiprocessing.get_context("spawn")
        lines: multiprocessing.Queue[str] = spawn.Queue()
        ranks = [spawn.Process(target=work, args=(cluster.endpoints, lines)) for _ in range(RANKS)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        said = [lines.get(timeout=10) for _ in range(RANKS)]
        print("\n".join(sorted(said)))
        print("results:", [item.key.decode() for item in kv.range("result/", prefix=True)])
