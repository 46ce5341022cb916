"""What became of the databases that went to or came from each member, for the metrics.

with transfers.of(peer_id) as transfer:
    ...                                  # raises: a failure
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from raftkv.histograms import Buckets, doubling

_TRANSFER_S: Final = doubling(0.1, 10)


PEERS_MAX: Final = 128
"""Ids that are counted: anybody may claim one on a peer port without TLS."""


class Transfers:
    """Counts of one direction, by member.

    Attributes:
        under_way: transfers now.
        succeeded, failed: those that ended.
        durations: of those that succeeded, in seconds.
    """

    def __init__(self) -> None:
        self.under_way: dict[int, int] = {}
        self.succeeded: dict[int, int] = {}
        self.failed: dict[int, int] = {}
        self.durations: dict[int, Buckets] = {}

    @contextmanager
    def of(self, peer_id: int) -> Iterator[None]:
        """Count what is done inside as one transfer; any exception is a failure.

        Arguments:
            peer_id: of the other end.
        """
        if peer_id not in self.under_way:
            self._make_room()
        self.under_way[peer_id] = self.under_way.get(peer_id, 0) + 1
        self.succeeded.setdefault(peer_id, 0)
        self.failed.setdefault(peer_id, 0)
        began_s = time.perf_counter()
        try:
            yield
        except BaseException:
            self.failed[peer_id] += 1
            raise
        else:
            self.succeeded[peer_id] += 1
            self.durations.setdefault(peer_id, Buckets(_TRANSFER_S)).observe(time.perf_counter() - began_s)
        finally:
            self.under_way[peer_id] -= 1

    def _make_room(self) -> None:
        """Forget the first of too many that has nothing under way."""
        if len(self.under_way) >= PEERS_MAX:
            idle = [peer_id for peer_id, count in self.under_way.items() if not count]
            for counts in (self.under_way, self.succeeded, self.failed, self.durations):
                for peer_id in idle[:1]:
                    counts.pop(peer_id, None)
