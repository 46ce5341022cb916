"""The downgrade job of the cluster, agreed through the log: which version it is to go back to.

Owns one record of the cluster bucket, under etcd's name and in etcd's form, so that a snapshot file shows it to etcd's
tools. There is one job or none: an entry that would begin a second one, or cancel what is not there, is refused, on
every member alike. (etcd looks at that on the member that was asked, so two that are asked at once both succeed.)

    {"target-version":"3.5.0","enabled":true}

Leaves out which versions may be asked for (``server/maintenance/downgrade``), and going back: raftkv has one storage
version, so a job is recorded, shown and cancelled.
"""

from __future__ import annotations

import json
from typing import Final

from raftkv import errors
from raftkv.apply.alarms import MetaStore
from raftkv.pb import rpc_pb2
from raftkv.storage import schema

_KEY: Final = b"downgrade"


class Downgrade:
    """The job, if there is one.

    Arguments:
        store: where it is kept.

    Attributes:
        info: as ``Status`` shows it.
    """

    def __init__(self, store: MetaStore) -> None:
        self._store = store
        self.info = rpc_pb2.DowngradeInfo()
        self.reload()

    def reload(self) -> None:
        """Read the job back from the store: at start, and after a snapshot replaced it."""
        self.info = rpc_pb2.DowngradeInfo()
        data = dict(self._store.meta_items(schema.CLUSTER)).get(_KEY)
        if data is not None:
            with schema.reading(schema.CLUSTER):
                record = json.loads(data)
                self.info = rpc_pb2.DowngradeInfo(enabled=record["enabled"], targetVersion=record["target-version"])

    def execute(self, wanted: rpc_pb2.DowngradeInfo) -> None:
        """Begin a job, or cancel it if ``wanted`` is not enabled.

        Raises:
            DowngradeInProcessError: there is one already.
            NoInflightDowngradeError: there is none.
        """
        if wanted.enabled and self.info.enabled:
            raise errors.DowngradeInProcessError
        if not wanted.enabled and not self.info.enabled:
            raise errors.NoInflightDowngradeError
        target = wanted.targetVersion if wanted.enabled else ""
        self.info = rpc_pb2.DowngradeInfo(enabled=wanted.enabled, targetVersion=target)
        record = {"target-version": target, "enabled": wanted.enabled}
        self._store.meta_put(schema.CLUSTER, _KEY, json.dumps(record, separators=(",", ":")).encode())
