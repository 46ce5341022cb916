"""The one lease of a lighthouse daemon: with it goes all that says that the daemon is there.

It outlives an outage of the whole store, and ends within ``grace_s`` of the daemon's death. When the store says that it
is gone, another one is granted; ``number`` tells the users that what they attached to the old one is gone with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from raftkv.client.lease.lease import Lease
from raftkv.client.library import Client
from raftkv.client.rpc.retry import Backoff
from raftkv.errors import RaftKVError

RETRY_MAX_S = 0.25
_log = logging.getLogger(__name__)


class DaemonLease:
    """The lease by which the keys of this daemon live.

    Attributes:
        lease: the present one; None: there is none now.
        number: grows with every lease.
    """

    def __init__(self, kv: Client, ttl_s: float, grace_s: float) -> None:
        self.lease: Lease | None = None
        self.number = 0
        self._kv = kv
        self._ttl_s = ttl_s
        self._grace_s = grace_s
        self._listeners: list[Callable[[], None]] = []

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call back, on the loop, whenever a lease was granted or lost."""
        self._listeners.append(callback)

    @property
    def cluster(self) -> str:
        """Return the id of the cluster that has granted it, as a text; empty: there is none now, or it did not say."""
        number = 0 if self.lease is None else self.lease.cluster_id
        return f"{number:x}" if number else ""

    async def run(self) -> None:
        """Hold a lease until cancelled."""
        backoff = Backoff(max_s=RETRY_MAX_S)
        told = ""
        while True:
            lease = self._kv.lease(self._ttl_s, disconnect_grace_s=self._grace_s, patient=True, interrupt=False)
            try:
                await lease.grant()
            except RaftKVError as error:
                if str(error) != told:
                    told = str(error)
                    _log.warning("no lease: %s", told)
                await backoff.wait()
                continue
            backoff.reset()
            told = ""
            self._set(lease)
            await lease.lost.wait()
            _log.warning("the lease is lost; registering again")
            self._set(None)

    async def end(self) -> None:
        """Give it back, so that others need not wait for its end."""
        lease, self.lease = self.lease, None
        if lease is not None:
            try:
                await lease.revoke(timeout_s=1.0)
            except RaftKVError as error:
                _log.debug("the lease was not revoked: %s", error)

    def _set(self, lease: Lease | None) -> None:
        self.lease = lease
        self.number += lease is not None
        for callback in self._listeners:
            callback()
