"""A ``store_factory`` for nvidia-resiliency-ext's in-process restart, with the store in raftkv.

::

    from raftkv.torch.nvrx import NvrxStore

    @inprocess.Wrapper(
        store_factory=NvrxStore,
        store_kwargs={"endpoints": "h1:2379,h2:2379,h3:2379", "prefix": "jobs/j1/attempt-0"},
    )
    def train(): ...

The wrapper's default store is in rank 0: when that rank dies, the job ends. With this store, any rank may die.

Use a new prefix for every start of the job, for example with the scheduler's job id and restart count, so that it finds
no keys of an earlier start. The wrapper also opens a store in a monitor process beside each rank. That process
changes its working directory, so paths of certificates must be absolute.

nvidia-resiliency-ext is not installed with raftkv; importing this module without it raises ``ConfigError``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raftkv.errors import ConfigError
from raftkv.torch.store import Store

if TYPE_CHECKING:
    _Mixin: Any = object
else:
    try:
        from nvidia_resiliency_ext.inprocess.store import StoreMixin as _Mixin
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"raftkv.torch.nvrx needs nvidia-resiliency-ext ({error.name} is missing): "
            "pip install nvidia-resiliency-ext==0.4.1"
        ) from None


class NvrxStore(_Mixin, Store):  # type: ignore[misc, unused-ignore]
    """``Store`` with the methods of the wrapper's mixin; arguments as for ``Store``.

    The mixin is the first base, because its ``barrier`` differs from torch's.
    """
