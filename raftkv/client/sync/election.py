"""Elections for programs without an event loop.

::

    with kv.campaign("leader", b"me") as term:      # waits until it leads
        while work_is_left():
            kv.put("progress", step(), fence=term)  # raises TermLost or LeaseLost when it does not lead any more

A block is not interrupted when its lease is lost; see ``sync.lock``.
"""

from __future__ import annotations

from typing import Self

from raftkv.client.lock import election as aio_election
from raftkv.client.sync.blocking import blocking
from raftkv.client.sync.lock import Holder


class Term(Holder[aio_election.Term]):
    """One candidacy, and the term that it leads to; made by ``Client.campaign``."""

    @property
    def leads(self) -> bool:
        """Whether it leads, as far as this client knows."""
        return self._ask(lambda term: term.leads)

    def campaign(self, timeout_s: float | None = None) -> Term:
        """Wait until it leads, without a ``with`` block; end it by ``resign()``.

        Arguments:
            timeout_s: None: as long as it takes.

        Raises:
            LockNotFree: others led all that time.
            LeaseLost: the lease ended while waiting.
            StatusError: the cluster refused, or could not be reached to begin with.
        """
        self._enter(lambda: self._inner.campaign(timeout_s), self._inner.resign)
        return self

    proclaim = blocking(aio_election.Term.proclaim)
    resign = blocking(aio_election.Term.resign)

    def __enter__(self) -> Self:
        self.campaign()
        return self
