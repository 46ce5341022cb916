"""Two teams on one cluster: each may run, watch and save its own jobs, and nothing of the other's.

Alice's team has the runs that begin with ``vision-``, Bob's those with ``speech-``. A training run of Alice saves a
checkpoint; then Bob tries to read it, to join her run, to end it, and to watch it.

Needs fsspec: `pip install 'raftkv[checkpoint]'`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import raftkv
import raftkv.training
from raftkv import errors
from raftkv.checkpoint.keys import RegistryKeys
from raftkv.training.records import RunKeys

RUN = "vision-1"


def ctl(cluster: raftkv.LocalCluster, *words: str) -> None:
    """Run raftkvctl as root; its password is in no command line."""
    command = [sys.executable, "-m", "raftkv.cli.ctl", "--endpoints", cluster.endpoints[0], *words]
    done = subprocess.run(
        command, env={**os.environ, "RAFTKV_USER": "root:root-pw"}, capture_output=True, text=True, check=True
    )
    print(done.stdout, end="")


def set_up(cluster: raftkv.LocalCluster) -> None:
    """Make the users, and ask for them from now on."""
    with cluster.connect() as kv:
        kv.users.add("root", "root-pw")
        kv.users.grant_role("root", "root")
        kv.users.add("alice", "alice-pw")
        kv.users.add("bob", "bob-pw")
        kv.users.enable_auth()
    ctl(cluster, "run", "grant", "alice", "vision-*")
    ctl(cluster, "run", "grant", "bob", "speech-*")


def train(cluster: raftkv.LocalCluster, user: str, run_id: str, directory: str) -> int:
    """Train for a step and save it, as the user that the settings name."""
    settings = {"user": user, "password": f"{user}-pw"}
    with raftkv.training.join(
        run_id, endpoints=cluster.endpoints, client=settings, min_nodes=1, lease_ttl_s=10, checkpoints=directory
    ) as run:
        run.barrier("ready")
        with run.checkpoint(1) as saving:
            saving.write("model.bin", b"weights")
        return run.rank


def refused(what: str, action) -> None:
    """Print that the cluster refuses it."""
    try:
        action()
    except errors.PermissionDeniedError as error:
        print(f"bob may not {what}: {error}")
    else:
        raise SystemExit(f"bob could {what}")


if __name__ == "__main__":
    with raftkv.local() as cluster, tempfile.TemporaryDirectory() as directory:
        set_up(cluster)
        print("alice trains as rank", train(cluster, "alice", RUN, directory))
        with cluster.connect(user="bob", password="bob-pw") as bob:
            keys, saved = RunKeys(RUN), RegistryKeys(RUN)
            refused("read her checkpoints", lambda: bob.range(saved.base, prefix=True))
            refused("move her latest one", lambda: bob.put(saved.latest("files"), "mine"))
            refused("end her run", lambda: bob.put(keys.state, "closed"))
            refused("watch her nodes", lambda: bob.watch(keys.nodes, prefix=True))
            refused("join her run", lambda: train(cluster, "bob", RUN, directory))
            refused("read everything", lambda: bob.range("", prefix=True))
        print("bob trains as rank", train(cluster, "bob", "speech-1", directory))
        ctl(cluster, "user", "get", "alice")
