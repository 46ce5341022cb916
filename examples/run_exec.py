"""Any command as an elastic job: two nodes of ``raftkvctl run exec``, a worker that dies, and what the timeline says.

The workers here use nothing but sockets: rank 0 listens at ``MASTER_ADDR:MASTER_PORT``, and the others send it a
number. In the first generation rank 1 is killed; both nodes come back at once, with a fresh port, and finish.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading

import raftkv

JOB = "example"


def train() -> None:
    """One worker: add up the ranks of the world."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if os.environ["RAFTKV_EPOCH"] == "1":
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()  # as a collective does whose peer is gone
    if rank == 0:
        with socket.create_server(place) as server:
            total = 0
            for _ in range(size - 1):
                connection, _ = server.accept()
                with connection:
                    total += int(connection.recv(16))
        print(f"sum of the ranks of {size}: {total}", flush=True)
        return
    while True:
        try:
            connection = socket.create_connection(place)
        except ConnectionRefusedError:  # rank 0 is not there yet
            continue
        with connection:
            connection.sendall(str(rank).encode())
        return


def start_node(endpoints: str, name: str) -> subprocess.Popen[bytes]:
    """What would be typed on each machine."""
    command = f"run exec --job {JOB} --nnodes 2 --nproc-per-node 2 --max-restarts 3 --conf lease_ttl=10 --quiet".split()
    here = ["--node-name", name, "--local-addr", "127.0.0.1"]
    words = ["--endpoints", endpoints, *command, *here, "--", sys.executable, __file__]
    return subprocess.Popen([sys.executable, "-m", "raftkv.cli.ctl", *words])


def main() -> None:
    """Start two nodes, wait for them, and look at what happened."""
    with raftkv.local() as cluster:
        endpoints = ",".join(cluster.endpoints)
        nodes = [start_node(endpoints, name) for name in ("machine-a", "machine-b")]
        print("exit codes:", [node.wait(120) for node in nodes])
        words = ["--endpoints", endpoints, "run", "timeline", JOB, "--json"]
        timeline_json = subprocess.check_output([sys.executable, "-m", "raftkv.cli.ctl", *words])
        for generation in json.loads(timeline_json)["epochs"]:
            root = generation["root_fault"]
            why = f"rank {root['rank']}: {root['signal']}" if root else generation["reason"]
            print(f"generation {generation['epoch']}: {len(generation['members'])} nodes, over because: {why}")


if __name__ == "__main__":
    if "RAFTKV_RANK" in os.environ:
        train()
    else:
        main()
