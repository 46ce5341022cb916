"""The environment of a worker: its place in the generation, under the names of each framework. Pure.

::

    for local_rank in range(world.member.slots):
        variables = make_environment(world, local_rank, Meeting("10.0.0.5", 29511), endpoints=["10.0.0.1:2379"])

Defines the names and their meaning, by style:

- always: ``RAFTKV_RUN_ID``, ``RAFTKV_EPOCH``, ``RAFTKV_ENDPOINTS``, ``RAFTKV_RANK``, ``RAFTKV_WORLD_SIZE``,
  ``RAFTKV_NODE_ID``, ``RAFTKV_RESTARTS``;
- ``torch``: ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and the other variables that torchrun sets, so
  that ``init_method="env://"`` works; local ranks count the workers of one *node*, as in torchrun;
- ``pet``: ``PET_NNODES``, ``PET_NODE_RANK``, ..., for a command that is itself a launcher, as Kubeflow sets them;
- ``tf``: ``TF_CONFIG`` as the TensorFlow operator writes it, every worker in the cluster's ``worker`` list;
- ``horovod``: ``HOROVOD_RANK``, ...; local ranks count the workers of one *host*, cross ranks the hosts.

Not here: choosing ports (``supervisor``), and the inherited environment.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from raftkv.errors import ConfigError
from raftkv.urls import join_address, split_address

if TYPE_CHECKING:
    from raftkv.training.rendezvous.world import World

STYLES: Final = ("torch", "pet", "tf", "horovod")
TF_PORT: Final = 2222
"""Port of the first worker of a node that gives none; the default of the TensorFlow operator."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Address at which the workers of a generation meet: an address of rank 0's node, and a free port there."""

    address: str
    port: int

    def __str__(self) -> str:
        return join_address(self.address, self.port)

    @classmethod
    def parse(cls, text: str) -> Meeting:
        """Parse the text of ``str``.

        Raises:
            ConfigError: the text has another form.
        """
        try:
            address, port = split_address(text)
        except ValueError:
            address, port = "", 0
        if not address:
            raise ConfigError(f"not an address and a port: {text!r}")
        return cls(address, port)


@dataclass(frozen=True, slots=True)
class Extras:
    """Values of an environment besides the world.

    Attributes:
        endpoints: endpoints of the cluster, ``host:port``.
        ports: ports for TensorFlow's servers by node id, one per worker; other nodes get ``TF_PORT`` and the next ones.
        restarts, max_restarts: number of restarts of this node's workers after faults, and its limit.
    """

    endpoints: Sequence[str] = ()
    ports: Mapping[str, Sequence[int]] = field(default_factory=dict)
    restarts: int = 0
    max_restarts: int = 0


def parse_styles(names: Iterable[str]) -> tuple[str, ...]:
    """Parse names of styles and return them in the order of ``STYLES``; none given: all.

    Raises:
        ConfigError: a style is unknown.
    """
    wanted = {name.strip() for name in names if name.strip()}
    unknown = sorted(wanted - {*STYLES, "all", "none"})
    if unknown:
        raise ConfigError(f"unknown environment style {unknown[0]!r}; there are {', '.join(STYLES)}, all, none")
    if not wanted or "all" in wanted:
        return STYLES
    return tuple(style for style in STYLES if style in wanted)


def make_environment(
    world: World, local_rank: int, meeting: Meeting, extras: Extras | None = None, styles: Sequence[str] = STYLES
) -> dict[str, str]:
    """Make the variables of one worker.

    Arguments:
        world: the generation, as its node sees it.
        local_rank: number of the worker on its node, from 0.
        meeting: address of the generation's store.
        extras: the cluster's endpoints, TensorFlow's ports, counts of restarts.
        styles: frameworks whose variable names to set; see above.

    Raises:
        ConfigError: the node has no such worker, or a style is unknown.
    """
    place = _Place(world, local_rank, meeting, extras or Extras())
    variables = _common(place)
    for style in parse_styles(styles) if styles else ():
        variables |= _MAKERS[style](place)
    return variables


class _Place:
    """A worker's place, with values that several styles need."""

    def __init__(self, world: World, local_rank: int, meeting: Meeting, extras: Extras) -> None:
        self.world, self.meeting, self.extras = world, meeting, extras
        self.members = world.members
        self.member = world.member
        if not 0 <= local_rank < self.member.slots:
            raise ConfigError(f"node {self.member.id} has {self.member.slots} workers, there is no number {local_rank}")
        self.local_rank = local_rank
        self.rank = world.rank + local_rank
        self.world_size = world.world_size


def _texts(**values: object) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


def _common(place: _Place) -> dict[str, str]:
    return _texts(
        RAFTKV_RUN_ID=place.world.run_id,
        RAFTKV_EPOCH=place.world.generation,
        RAFTKV_ENDPOINTS=",".join(place.extras.endpoints),
        RAFTKV_RANK=place.rank,
        RAFTKV_WORLD_SIZE=place.world_size,
        RAFTKV_NODE_ID=place.member.id,
        RAFTKV_RESTARTS=place.extras.restarts,
    )


def _torch(place: _Place) -> dict[str, str]:
    nodes, index, slots = len(place.members), place.world.index, place.member.slots
    return _texts(
        RANK=place.rank,
        WORLD_SIZE=place.world_size,
        LOCAL_RANK=place.local_rank,
        LOCAL_WORLD_SIZE=slots,
        GROUP_RANK=index,
        GROUP_WORLD_SIZE=nodes,
        NODE_RANK=index,
        ROLE_NAME="default",
        ROLE_RANK=place.rank,
        ROLE_WORLD_SIZE=place.world_size,
        MASTER_ADDR=place.meeting.address,
        MASTER_PORT=place.meeting.port,
        TORCHELASTIC_RUN_ID=place.world.run_id,
        TORCHELASTIC_RESTART_COUNT=place.extras.restarts,
        TORCHELASTIC_MAX_RESTARTS=place.extras.max_restarts,
        # No agent holds a store: rank 0 opens it on MASTER_PORT, also inside an outer torchrun.
        TORCHELASTIC_USE_AGENT_STORE=False,
    )


def _pet(place: _Place) -> dict[str, str]:
    return _texts(
        PET_NNODES=len(place.members),
        PET_NODE_RANK=place.world.index,
        PET_NPROC_PER_NODE=place.member.slots,
        PET_MASTER_ADDR=place.meeting.address,
        PET_MASTER_PORT=place.meeting.port,
    )


def _tf(place: _Place) -> dict[str, str]:
    workers = []
    for member in place.members:
        ports = place.extras.ports.get(member.id, ())
        for slot in range(member.slots):
            port = ports[slot] if slot < len(ports) else TF_PORT + slot
            workers.append(join_address(member.address or member.host, port))
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": place.rank}, "environment": "cloud"}
    return {"TF_CONFIG": json.dumps(config, separators=(",", ":"))}


def _horovod(place: _Place) -> dict[str, str]:
    mine = place.world.placements[place.rank]
    variables = _texts(
        HOROVOD_RANK=mine.rank,
        HOROVOD_SIZE=place.world_size,
        HOROVOD_LOCAL_RANK=mine.local_rank,
        HOROVOD_LOCAL_SIZE=mine.local_size,
        HOROVOD_CROSS_RANK=mine.cross_rank,
        HOROVOD_CROSS_SIZE=mine.cross_size,
        HOROVOD_HOSTNAME=place.member.host,
        HOROVOD_CONTROLLER="gloo",
        HOROVOD_CPU_OPERATIONS="gloo",
    )
    if place.extras.endpoints:
        member = Meeting.parse(place.extras.endpoints[0])
        variables |= _texts(HOROVOD_GLOO_RENDEZVOUS_ADDR=member.address, HOROVOD_GLOO_RENDEZVOUS_PORT=member.port)
    return variables


_MAKERS: Final[dict[str, Callable[[_Place], dict[str, str]]]] = {
    "torch": _torch,
    "pet": _pet,
    "tf": _tf,
    "horovod": _horovod,
}
