"""Horovod workers that meet at raftkv: no rendezvous server of horovodrun, and nothing that dies with its first host.

python examples/horovod_rendezvous.py            # two workers on a throwaway cluster

Members started with `--horovod-run JOB` serve Horovod's HTTP rendezvous on their client port, each of them the same
state. A worker needs the environment that is printed here and nothing else. Where Horovod is not installed (it has to
be built), a stand-in meets the other worker with the requests that Horovod's would send.
"""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import threading

import raftkv

JOB = "job"
SIZE = 2


def environment(rank: int, endpoint: str) -> dict[str, str]:
    """What tells a worker of one host who it is and where to meet the others."""
    host, _, port = endpoint.rpartition(":")
    return {
        "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_RANK": f"{rank}",
        "HOROVOD_SIZE": f"{SIZE}",
        "HOROVOD_LOCAL_RANK": f"{rank}",
        "HOROVOD_LOCAL_SIZE": f"{SIZE}",
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": host,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
    }


def train() -> None:
    """One worker: rank and size, and the sum of all ranks."""
    try:
        import horovod.torch as hvd
        import torch
    except ImportError:
        ranks = [int(value) for value in meet()]
        print(f"rank {os.environ['HOROVOD_RANK']} of {len(ranks)}, sum of ranks {sum(ranks)}")
        return
    hvd.init()
    total = hvd.allreduce(torch.tensor(hvd.rank()), op=hvd.Sum).item()
    print(f"rank {hvd.rank()} of {hvd.size()}, sum of ranks {total}")


def meet() -> list[bytes]:
    """Tell the other workers something and hear from all, as Horovod's rendezvous does with addresses."""
    rank = os.environ["HOROVOD_RANK"]
    ask("PUT", f"/global/{rank}", rank.encode())
    values = [wait_for(f"/global/{other}") for other in range(int(os.environ["HOROVOD_SIZE"]))]
    ask("DELETE", f"/global/{rank}")  # "finished": when all are, the scope is empty again
    return values


def wait_for(path: str) -> bytes:
    """Look every 10 ms until there is a value; Horovod knows no other way."""
    while True:
        status, value = ask("GET", path)
        if status == 200:
            return value
        threading.Event().wait(0.01)


def ask(method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    """One request to the member that the environment names."""
    address, port = (os.environ[f"HOROVOD_GLOO_RENDEZVOUS_{name}"] for name in ("ADDR", "PORT"))
    connection = http.client.HTTPConnection(address, int(port))
    connection.request(method, path, body)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def main() -> None:
    """A cluster, and two workers that get the addresses of different members."""
    with raftkv.local(size=3, flags=["--horovod-run", JOB]) as cluster:
        workers = []
        for rank in range(SIZE):
            place = environment(rank, cluster.endpoints[rank])
            print(f"rank {rank}:", *(f"{name}={value}" for name, value in place.items() if "GLOO_R" in name))
            command = [sys.executable, __file__, "worker"]
            workers.append(subprocess.Popen(command, env={**os.environ, **place}, stdout=subprocess.PIPE, text=True))
        for worker in workers:
            print(worker.communicate()[0], end="")
        with cluster.connect() as kv:
            print("left behind:", len(list(kv.range("/raftkv/horovod/", prefix=True))))


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        train()
    else:
        main()
