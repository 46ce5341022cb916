"""Training runs: membership, ranks, and the history of faults; on raftkv or on etcd.

::

    import raftkv.training

    with raftkv.training.join("job", endpoints="h1:2379,h2:2379", min_nodes=2, max_nodes=4) as run:
        run.rank, run.world_size, run.generation
        run.barrier("start")

User code starts with ``join`` (package ``api``); ``raftkv.training.aio`` is the same for asyncio. Developers should
read ``rendezvous`` first (the part of one node, and the rules of the arbiter), then ``records`` (the layout of the
keys).

    rendezvous   membership and ranks of each generation                scheduling  how runs share machines
    api          what user code sees                                    process     workers as processes
    tcpstore     torch's store protocol, as a daemon                    metrics     runs for Prometheus
    history      what happened in a run, by generation

    config, records, errors: options, keys and values, on ``client.control``. ``callbacks`` is a separate module
    because four packages use it, ``aio`` because it is a public path.

``raftkv.integrations`` holds the services for Horovod and torchft.

The package is an ordinary client of the store, so it runs on raftkv and on etcd. It does not import torch;
``raftkv.torch`` adapts it to torch. Each name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raftkv.lazy import attach

if TYPE_CHECKING:
    from raftkv.training import aio as aio
    from raftkv.training.api.run import Run as Run
    from raftkv.training.api.run import join as join
    from raftkv.training.errors import BarrierTimeout as BarrierTimeout
    from raftkv.training.errors import ClusterAway as ClusterAway
    from raftkv.training.errors import GenerationOver as GenerationOver
    from raftkv.training.errors import JoinTimeout as JoinTimeout
    from raftkv.training.errors import PostedLost as PostedLost
    from raftkv.training.errors import RunClosed as RunClosed
    from raftkv.training.errors import RunConflict as RunConflict
    from raftkv.training.errors import StateLost as StateLost
    from raftkv.training.errors import TrainingError as TrainingError
    from raftkv.training.errors import UnknownRun as UnknownRun

_load, __dir__, __all__ = attach(
    __name__,
    {
        "api.run": "Run join",
        "errors": (
            "BarrierTimeout ClusterAway GenerationOver JoinTimeout PostedLost RunClosed RunConflict StateLost "
            "TrainingError UnknownRun"
        ),
    },
    ["aio"],
)


def __getattr__(name: str) -> Any:
    if name == "EpochOver":
        errors = import_module("raftkv.training.errors")
        errors.warn_deprecated(name, "GenerationOver")
        return errors.GenerationOver
    return _load(name)
