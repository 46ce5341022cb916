"""Opening and closing the durable state of a stopped member; a fatal error is raised."""

from __future__ import annotations

from raftkv.config import ServerConfig
from raftkv.replica.node.bootstrap import Durable, open_durable
from raftkv.storage.backend.lmdb import InlineWriter


def opened(config: ServerConfig) -> Durable:
    def fatal(error: BaseException) -> None:
        raise error

    return open_durable(config, InlineWriter(), fatal)


def close(durable: Durable) -> None:
    durable.mark.close()
    durable.store.close()
    durable.wal.close()
    durable.backend.close()
