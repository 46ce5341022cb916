"""The entry point ``torchrun.handlers: raftkv``, by which ``torchrun`` finds raftkv.

torch loads this module during its own import, in every process that uses ``torch.distributed.elastic``. So this module
imports nothing of torch and nothing else of raftkv before a handler is requested.
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
