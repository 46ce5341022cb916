"""A program of a run that starts while the store is away: it waits for ``connect_timeout``, then says what to do."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import raftkv
import raftkv.training
from raftkv.errors import StatusError
from raftkv.training.api.attachment import announce
from raftkv.training.config import RunConfig
from raftkv.training.errors import ClusterAway
from raftkv.training.rendezvous.sync_participant import Participant
from tests.procs import RAFTKV, Cluster, free_port

PATIENCE_S = 120.0
WORKER = {"RAFTKV_RUN_ID": "job", "RAFTKV_EPOCH": "1", "RAFTKV_RANK": "0"}


@pytest.mark.long
def test_a_node_that_starts_before_the_store_begins_when_that_does() -> None:
    trouble = threading.Event()
    with Cluster(RAFTKV) as cluster:
        (member,) = cluster.members
        member.stop()
        with ThreadPoolExecutor() as threads, raftkv.connect(cluster.endpoints) as kv:
            config = RunConfig(run_id="job").checked()
            opening = threads.submit(Participant.open, kv, config, on_trouble=lambda _: trouble.set())
            assert trouble.wait(PATIENCE_S)
            member.restart()
            participant = opening.result(PATIENCE_S)
            world = participant.next_world()
            environment: dict[str, str] = {}
            announce("job", world.generation, ",".join(cluster.endpoints), environment)
            environment["RAFTKV_RANK"] = "0"
            member.stop()
            with pytest.MonkeyPatch.context() as patch:
                for name, value in environment.items():
                    patch.setenv(name, value)
                working = threads.submit(raftkv.training.join)
                member.restart()
                with working.result(PATIENCE_S) as run:
                    assert (run.generation, run.rank, run.is_worker) == (1, 0, True)
            participant.leave()


@pytest.mark.long
@pytest.mark.parametrize(("arguments", "environment"), [(("job",), {}), ((), WORKER)], ids=["node", "worker"])
def test_a_start_that_no_cluster_answers_ends_with_what_to_do(arguments, environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setitem(os.environ, name, value)
    endpoint = f"127.0.0.1:{free_port()}"
    more: dict[str, Any] = {"connect_timeout_s": 0.2}
    with pytest.raises(ClusterAway) as away:
        raftkv.training.join(*arguments, endpoints=endpoint, **more)
    assert isinstance(away.value, StatusError)
    text = str(away.value)
    assert text.startswith(f"run 'job' cannot be joined: the cluster at {endpoint} did not answer within 0.2 s (")
    assert text.endswith("and start this again (connect_timeout says how long to try)")
    assert "\n" not in text
