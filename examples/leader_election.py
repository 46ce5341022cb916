"""One leader among several processes; when it dies, another takes over, and all see who leads.

A leader that was paused for longer than its TTL believes that it still leads. What it writes with ``fence=term`` is
refused all the same.
"""

from __future__ import annotations

import multiprocessing
import os

import raftkv

WORKERS = 3


def work(kv: raftkv.Client, name: str) -> None:
    """Wait to be leader, do one piece of work, and die without a word (kill -9 would be the same)."""
    # The lease of a dead process is over a second after its connection ended, long before its TTL.
    with kv.lease(10, disconnect_grace_s=1) as lease, kv.campaign("leader", name, lease=lease) as term:
        kv.put(f"done/{name}", str(term.fence), fence=term)
        os._exit(0)


if __name__ == "__main__":
    with raftkv.local() as cluster, cluster.connect() as kv:
        workers = [
            multiprocessing.get_context("fork").Process(target=work, args=(kv, f"worker-{number}"))
            for number in range(WORKERS)
        ]
        for worker in workers:
            worker.start()
        leaders = []
        for leader in kv.observe("leader"):
            leaders.append(leader.text)
            print("leads:", leader.text)
            if len(leaders) == WORKERS:
                break
        for worker in workers:
            worker.join()
        fences = [int(item.text) for item in kv.get_many([f"done/{name}" for name in leaders]) if item is not None]
        print("all have led:", sorted(leaders) == [f"worker-{number}" for number in range(WORKERS)])
        print("fences grow:", fences == sorted(fences))
