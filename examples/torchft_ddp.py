"""torchft trains on when a replica dies, and its lighthouse is no single point of failure any more.

By itself this starts a cluster, the lighthouse and three replicas, kills one replica and watches the others. With
TORCHFT_LIGHTHOUSE=http://host:29510 it is one replica, for as many as you start. Needs torch and torchft-nightly.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta

import raftkv

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
ENDLESS = str(10**9)


def train(name: str) -> None:
    """One replica: plain torchft. Tells each committed step as a line of JSON."""
    import torch
    from torch.distributed import TCPStore
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    quorums: list[int] = []
    log = logging.getLogger("torchft_quorums")  # where torchft tells the id of each new quorum
    log.setLevel(logging.INFO)
    log.addFilter(lambda record: quorums.append(record.quorum_id))
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        min_replica_size=1,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        load_state_dict=lambda state: (
            model.load_state_dict(state["model"]),
            inner.load_state_dict(state["optimizer"]),
        ),
        replica_id=name,
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname="localhost",
    )
    replicated = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    while (done := manager.current_step()) < STEPS:
        optimizer.zero_grad()  # asks the lighthouse for a quorum
        replicated(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()  # only if all of the quorum are well
        if manager.current_step() > done:
            step = {"step": done + 1, "quorum_id": quorums[-1], "replicas": manager.num_participants()}
            step["at"] = time.monotonic()
            print(json.dumps(step), flush=True)
    manager.shutdown(wait=False)
    sys.stdout.flush()
    os._exit(0)  # threads of a dead quorum may still wait for their peers


class Replica:
    """A replica as a process, and the steps it has reported."""

    def __init__(self, name: str, lighthouse: str) -> None:
        environment = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse, "REPLICA": name, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, ENDLESS],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.steps: list[dict[str, float]] = []
        self.over = False
        self.changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            with self.changed:
                self.steps.append(json.loads(line))
                self.changed.notify_all()
        with self.changed:
            self.over = True
            self.changed.notify_all()

    def wait_step(self, after: float, replicas: int) -> dict[str, float]:
        """Wait until it has done a step behind that one, together with so many."""

        def found() -> dict[str, float] | None:
            return next(
                (report for report in self.steps if report["step"] > after and report["replicas"] == replicas), None
            )

        with self.changed:
            self.changed.wait_for(lambda: found() or self.over, timeout=90)
            report = found()
        if report is None:
            sys.exit(f"no step of {replicas} replicas after {after:g}; the last one was {self.steps[-1:]}")
        return report


def show() -> None:
    """A cluster of three members, a lighthouse, three replicas; one of them dies."""
    with raftkv.local(size=3) as cluster:
        command = [sys.executable, "-m", "raftkv", "torchft-lighthouse", "--listen=127.0.0.1:0", "--min-replicas=2"]
        lighthouse = subprocess.Popen(
            [*command, f"--endpoints={','.join(cluster.endpoints)}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        address = next(lighthouse.stdout or iter(["?"])).split()[-1]
        replicas = [Replica(f"replica_{number}", address) for number in range(3)]
        try:
            before = replicas[0].wait_step(0, 3)
            print("steps of", before["replicas"], "replicas")
            replicas[2].process.kill()
            after = replicas[0].wait_step(before["step"], 2)
            replicas[0].wait_step(after["step"] + 20, 2)
            print("one was killed, steps of", after["replicas"])
            print("quorum id has grown:", after["quorum_id"] > before["quorum_id"])
        finally:
            for process in (*(replica.process for replica in replicas), lighthouse):
                process.kill()
                process.wait()


if __name__ == "__main__":
    if importlib.util.find_spec("torchft") is None:
        sys.exit("this example needs torchft: pip install torchft-nightly==2026.10.26")
    if "TORCHFT_LIGHTHOUSE" in os.environ:
        train(os.environ.get("REPLICA", "replica"))
    else:
        show()
