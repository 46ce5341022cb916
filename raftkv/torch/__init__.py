"""raftkv for PyTorch: plug-ins for ``torchrun`` and ``torch.distributed``. Only this part of raftkv needs torch.

::

    torchrun --rdzv-backend=raftkv --rdzv-endpoint=h1:2379,h2:2379,h3:2379 --rdzv-id=job --nnodes=2:4 train.py

Importing this package does not import torch; the first use of a name does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raftkv.errors import ConfigError
from raftkv.lazy import attach

if TYPE_CHECKING:
    from raftkv.torch.data import ElasticSampler as ElasticSampler
    from raftkv.torch.recovery import ElasticGroup as ElasticGroup
    from raftkv.torch.rendezvous import RaftKVRendezvousHandler as RaftKVRendezvousHandler
    from raftkv.torch.rendezvous import create_handler as create_handler
    from raftkv.torch.store import Store as Store

_load, __dir__, __all__ = attach(
    __name__,
    {
        "data": "ElasticSampler",
        "recovery": "ElasticGroup",
        "rendezvous": "RaftKVRendezvousHandler create_handler",
        "store": "Store",
    },
)


def __getattr__(name: str) -> Any:
    try:
        return _load(name)
    except ModuleNotFoundError as error:
        if error.name == "torch":
            raise ConfigError(f"raftkv.torch.{name} needs PyTorch 2.6 or newer: pip install torch numpy") from None
        raise
