"""The ledger of positions for programs without an event loop.

::

    ledger = Ledger(registry, "train")
    ledger.open(claim, used, range_size=1000)
    while (taken := ledger.take(claim, rank)) is not None: ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raftkv.checkpoint.positions import ledger as aio
from raftkv.client.sync.blocking import Blocking, blocking

if TYPE_CHECKING:
    from raftkv.checkpoint.sync import Registry


class Ledger(Blocking[aio.Ledger]):
    """The ranges of one dataset of one run; see ``positions.ledger``.

    Arguments:
        registry: of the run's checkpoints.
        name: of the dataset.

    Raises:
        ConfigError: the name cannot be used.
    """

    def __init__(self, registry: Registry, name: str = "train") -> None:
        loop, inner = registry.target()
        super().__init__(registry, loop, aio.Ledger(inner.control, inner.run_id, name))

    open = blocking(aio.Ledger.open)
    take = blocking(aio.Ledger.take)
    mark = blocking(aio.Ledger.mark)
    give_back = blocking(aio.Ledger.give_back)
    used = blocking(aio.Ledger.used)
    is_over = blocking(aio.Ledger.is_over)
    next_epoch = blocking(aio.Ledger.next_epoch)
