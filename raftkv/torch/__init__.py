"""raftkv for PyTorch: plug-ins for ``torchrun`` and ``torch.distributed``. Only this part of raftkv needs torch.

::

    torchrun --rdzv-backend=raftkv --rdzv-endpoint=h1:2379,h2:2379,h3:2379 --rdzv-id=job --nnodes=2:4 train.py

Importing this package does not import torch; the first use of a name does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from raftkv.errors import ConfigError

if TYPE_CHECKING:
    from raftkv.torch.data import ElasticSampler as ElasticSampler
    from raftkv.torch.recovery import ElasticGroup as ElasticGroup
    from raftkv.torch.rendezvous import RaftKVRendezvousHandler as RaftKVRendezvousHandler
    from raftkv.torch.rendezvous import create_handler as create_handler
    from raftkv.torch.store import Store as Store

_PLACES: Final = {
    "ElasticGroup": "recovery",
    "ElasticSampler": "data",
    "RaftKVRendezvousHandler": "rendezvous",
    "Store": "store",
    "create_handler": "rendezvous",
}

__all__ = ["ElasticGroup", "ElasticSampler", "RaftKVRendezvousHandler", "Store", "create_handler"]


def __getattr__(name: str) -> Any:
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"raftkv.torch.{place}")
    except ModuleNotFoundError as error:
        if error.name == "torch":
            raise ConfigError(f"raftkv.torch.{name} needs PyTorch 2.6 or newer: pip install torch numpy") from None
        raise
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
