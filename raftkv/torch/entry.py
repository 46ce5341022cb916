"""How ``torchrun`` finds raftkv: the entry point ``torchrun.handlers: raftkv``.

torch loads this module while it is itself half imported, in every process that uses ``torch.distributed.elastic``.
So nothing of torch is imported here, and nothing else of raftkv: the work is done when a handler is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return what makes a handler; torch calls this once, at its import."""
    return create


def create(params: RendezvousParameters) -> RendezvousHandler:
    """Create a handler for one agent; see ``raftkv.torch.rendezvous.create_handler``.

    Raises:
        ConfigError: this torch is too old.
    """
    from raftkv.errors import ConfigError

    try:
        from raftkv.torch.rendezvous import create_handler
    except ImportError as error:
        if (error.name or "").split(".")[0] != "torch":
            raise
        raise ConfigError(f"--rdzv-backend=raftkv needs PyTorch 2.6 or newer ({error})") from None

    return create_handler(params)
