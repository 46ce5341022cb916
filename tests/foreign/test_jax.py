"""JAX itself: processes that are given nothing but the name of a job."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from raftkv.client.local import LocalCluster
from tests.foreign.environments import interpreter

TOGETHER = """
import raftkv.jax, jax
jax.distributed.initialize()
print(jax.process_count(), jax.process_index())
"""
REFUSALS = """
import json, os
import jax, raftkv.jax
from raftkv.jax import RaftKVCluster
from jax._src.clusters import ClusterEnv

def error_of(**environment):
    os.environ.update(environment)
    try:
        jax.distributed.initialize(initialization_timeout=1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

results = {"first": ClusterEnv._cluster_types[0].__name__}
results["unreadable"] = error_of(RAFTKV_NNODES="two")
results["too few"] = error_of(RAFTKV_NNODES="2")
del os.environ["RAFTKV_JOB"]
results["no job"] = RaftKVCluster.is_env_present()
os.environ.update(RAFTKV_RUN_ID="j", RAFTKV_RANK="3", RAFTKV_WORLD_SIZE="4", LOCAL_WORLD_SIZE="2", LOCAL_RANK="1",
                  MASTER_ADDR="::1", MASTER_PORT="29400")
address = RaftKVCluster.get_coordinator_address(None, None)
results["worker"] = [RaftKVCluster.is_env_present(), address, RaftKVCluster.get_process_count(),
                  RaftKVCluster.get_process_id(), RaftKVCluster.get_local_process_id()]
del os.environ["LOCAL_RANK"]
try:
    RaftKVCluster.get_coordinator_address(None, None)
except Exception as error:
    results["no worker"] = f"{type(error).__name__}: {error}"
print(json.dumps(results))
"""


def start(cluster: LocalCluster, script: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """One process of the job "j"."""
    settings = {"JAX_PLATFORMS": "cpu", "RAFTKV_JOB": "j", "RAFTKV_ENDPOINTS": ",".join(cluster.endpoints)}
    return subprocess.Popen(
        [str(interpreter("jax")), "-W", "error", "-c", script, *arguments],
        env={**os.environ, **settings, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> str:
    """What it has printed, once it has ended well."""
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return out


@pytest.mark.long
def test_processes_of_a_job_find_each_other_and_leave_nothing(raftkv_cluster: LocalCluster):
    processes = [start(raftkv_cluster, TOGETHER, RAFTKV_NNODES="2") for _ in range(2)]
    assert sorted(map(ended, processes)) == ["2 0\n", "2 1\n"]
    with raftkv_cluster.connect() as kv:
        left: dict[str, Any] = {
            item.key.decode().rpartition("/")[2]: json.loads(item.value) for item in kv.range("/raftkv/", prefix=True)
        }
        assert left.keys() == {"round", "state"}
        assert (left["state"]["phase"], left["state"]["reason"]) == ("closed", "finished")


@pytest.mark.long
def test_impossible_settings_are_refused_in_one_line(raftkv_cluster: LocalCluster):
    results = json.loads(ended(start(raftkv_cluster, REFUSALS)))
    assert results["first"] == "RaftKVCluster"
    assert results["unreadable"].startswith("ConfigError: RAFTKV_NNODES is N or MIN:MAX (set to 'two')")
    assert results["too few"].startswith("JoinTimeout: run 'j' did not begin within 1 s: 1 of at least 2")
    assert results["no job"] is False
    assert results["worker"] == [True, "[::1]:29400", 4, 3, 1]
    assert results["no worker"].startswith("ConfigError: the environment is not that of a worker")
