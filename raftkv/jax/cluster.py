"""A cluster environment by which JAX finds its processes through raftkv.

Each process joins the run named by ``RAFTKV_JOB``, its rank is its process id, and process 0 publishes an address for
JAX's coordination service. In a worker of ``raftkvctl run exec``, which restarts all processes when one dies, all
values come from the environment.

Variables, all optional except the first:

- ``RAFTKV_JOB``: the run;
- ``RAFTKV_ENDPOINTS``: members of the cluster (127.0.0.1:2379);
- ``RAFTKV_NNODES``: ``N`` or ``MIN:MAX`` processes (1:1024: all that join within ``RAFTKV_LAST_CALL`` seconds, 5);
- ``RAFTKV_ADDRESS``: where others reach this machine (the source address of its connection to the cluster);
- ``RAFTKV_USER``, ``RAFTKV_PASSWORD_FILE``, ``RAFTKV_CACERT``, ``RAFTKV_CERT``, ``RAFTKV_KEY``.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from raftkv.client.credentials import client_settings
from raftkv.client.local import free_port
from raftkv.client.sync.library import Client, connect
from raftkv.errors import ConfigError, RaftKVError
from raftkv.training.config import CONNECT_TIMEOUT_S, RunConfig, guess_address
from raftkv.training.records import EXIT, Fault
from raftkv.training.rendezvous.sync_participant import Participant
from raftkv.training.rendezvous.world import World
from raftkv.urls import join_address, parse_endpoints

if TYPE_CHECKING:

    class ClusterEnv:
        """The base of JAX's cluster environments; JAX is not there when types are checked."""

        _cluster_types: ClassVar[list[type[ClusterEnv]]]

else:
    try:
        from jax._src.clusters import ClusterEnv
    except ImportError as missing:
        raise ImportError(
            f"raftkv.jax needs JAX, and finds none that it knows (pip install jax==0.10.2): {missing}"
        ) from None

DEFAULT_NODES: Final = "1:1024"
WORKER: Final = ("RAFTKV_RUN_ID", "RAFTKV_RANK", "RAFTKV_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables of a worker of ``raftkvctl run exec``."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of this process among all.

    Attributes:
        coordinator: address of process 0's service.
        count: number of processes.
        id: number of this one.
        local_id: number of the process on its machine; None: the only one there.
    """

    coordinator: str
    count: int
    id: int
    local_id: int | None


class RaftKVCluster(ClusterEnv):
    """The cluster environment, which JAX detects and uses automatically."""

    name: str = "raftkv"
    _place: Place | None = None

    @classmethod
    def is_env_present(cls) -> bool:
        """Return whether the environment names a run."""
        return "RAFTKV_JOB" in os.environ or all(name in os.environ for name in WORKER)

    @classmethod
    def get_coordinator_address(cls, timeout_secs: int | None, override_coordinator_port: str | None) -> str:
        """Return the address of process 0's service; JAX calls this first, so this joins the run.

        Arguments:
            timeout_secs: seconds to wait for the processes; None: 300.
            override_coordinator_port: port to use instead of a free one.

        Raises:
            ConfigError: a variable is not valid.
            JoinTimeout: too few processes came.
            RunClosed, RunConflict: the run is closed, or belongs to another job.
            StatusError: the cluster cannot be reached, or refused.
        """
        if "RAFTKV_JOB" in os.environ:
            cls._place = join(os.environ, float(timeout_secs or 300), override_coordinator_port)
        else:
            cls._place = _of_worker(os.environ)
        return cls._place.coordinator

    @classmethod
    def get_process_count(cls) -> int:
        """Return the number of processes of the run."""
        return cls._known().count

    @classmethod
    def get_process_id(cls) -> int:
        """Return the number of this process."""
        return cls._known().id

    @classmethod
    def get_local_process_id(cls) -> int | None:
        """Return the number of this process on its machine if it shares the machine; JAX then gives it one device."""
        return cls._known().local_id

    @classmethod
    def _known(cls) -> Place:
        if cls._place is None:
            cls.get_coordinator_address(None, os.environ.get("JAX_COORDINATOR_PORT"))
        if cls._place is None:
            raise ConfigError("RAFTKV_JOB is not set")
        return cls._place


# A named run takes precedence over JAX's own environments, also on Slurm and Kubernetes, so it is asked first.
ClusterEnv._cluster_types.remove(RaftKVCluster)
ClusterEnv._cluster_types.insert(0, RaftKVCluster)


def join(environment: Mapping[str, str], timeout_s: float, port: str | None = None) -> Place:
    """Join the run named by the environment; this process stays in it until it exits.

    Arguments:
        environment: the variables that the module lists.
        timeout_s: seconds to wait for the other processes.
        port: port of the service, if this is process 0; None: a free one.

    Raises:
        ConfigError, JoinTimeout, RunClosed, RunConflict, StatusError: as of ``RaftKVCluster.get_coordinator_address``.
    """
    endpoints = environment.get("RAFTKV_ENDPOINTS", "127.0.0.1:2379")
    config = run_config(environment, guess_address(parse_endpoints(endpoints)), timeout_s)
    kv = connect(endpoints, **{"user": ""} | client_settings(environment))
    try:
        participant = Participant.open(kv, config)
        world = participant.next_world()
        if world.rank == 0:
            participant.publish(join_address(config.address, port or free_port()))
        coordinator = participant.published(timeout_s)
    except BaseException:
        kv.close()
        raise
    atexit.register(_leave, kv, participant, world)
    shared = world.local_size > 1
    return Place(coordinator, world.world_size, world.rank, world.local_rank if shared else None)


def run_config(environment: Mapping[str, str], address: str, timeout_s: float) -> RunConfig:
    """Return the settings of the run named by an environment.

    Arguments:
        environment: the variables that the module lists.
        address: address of this process, for the others.
        timeout_s: seconds to wait for the processes.

    Raises:
        ConfigError: a variable is not valid.
    """
    text = environment.get("RAFTKV_NNODES", DEFAULT_NODES)
    first, _, last = text.partition(":")
    last_call = environment.get("RAFTKV_LAST_CALL", "5")
    try:
        limits = int(first), int(last or first)
        last_call_s = float(last_call)
    except ValueError:
        raise ConfigError(
            f"RAFTKV_NNODES is N or MIN:MAX (set to {text!r}), RAFTKV_LAST_CALL seconds (set to {last_call!r})"
        ) from None
    return RunConfig(
        run_id=environment["RAFTKV_JOB"],
        min_nodes=limits[0],
        max_nodes=limits[1],
        last_call_timeout_s=last_call_s,
        connect_timeout_s=min(timeout_s, CONNECT_TIMEOUT_S),
        join_timeout_s=timeout_s,
        address=environment.get("RAFTKV_ADDRESS", address),
    )


def _of_worker(environment: Mapping[str, str]) -> Place:
    coordinator = join_address(environment["MASTER_ADDR"], environment["MASTER_PORT"])
    try:
        count, rank = int(environment["RAFTKV_WORLD_SIZE"]), int(environment["RAFTKV_RANK"])
        shared = int(environment.get("LOCAL_WORLD_SIZE", "1")) > 1
        return Place(coordinator, count, rank, int(environment["LOCAL_RANK"]) if shared else None)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"the environment is not that of a worker of raftkvctl run exec: {error}") from None


def _leave(kv: Client, participant: Participant, world: World) -> None:
    """Leave the run when the process exits, because the run has ended or this process has failed."""
    failure = getattr(sys, "last_value", None)
    try:
        if failure is None:
            participant.finish()
        else:
            node, cause = participant.node, f"{type(failure).__name__}: {failure}"
            participant.report(
                Fault(
                    world.generation, node.id, node.host, world.rank, EXIT, exit_code=1, message=cause, time=time.time()
                )
            )
        participant.leave()
    except RaftKVError:
        pass  # the lease ends by itself
    finally:
        kv.close()
