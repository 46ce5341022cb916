"""Who uses a member: what each identity takes of the loop's time, in calls and in bytes.

    uses.charge(identity, seconds, calls, size_bytes)    # as it is taken
    uses.waited(identity, seconds)                       # a proposal has waited so long before the log
    for name, figures in uses.figures(): ...             # the identities that used most, and the rest as OTHER

Identities are those of ``shares``, and those of one queue count as one. ``NAMED_MAX`` have figures of their own, which
only grow: one that used more in the last minute takes the place of one that used less, and begins with nothing. All
others together are ``OTHER``, to which a figure that was named never moves. So names that are made up by the million
cost no memory, and rates are true at all times.

What is charged: input of connections with all that handlers do at once, requests of the gateway, long reads, applying
and answering writes. Left out: events, and work that no client asked for; so the parts of all are less than the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import nlargest
from time import monotonic
from typing import Final
from zlib import crc32

from raftkv.rpc.shares import Identity, name_of, queue_of

NAMED_MAX: Final = 20
KEPT_MAX: Final = 1_024
"""Identities whose use since the last look is kept apart, to find those that use most."""
MINUTE_S: Final = 60.0
OTHER: Final = "other"
LABEL_MAX: Final = 120


class Use:
    """What one identity has used.

    Attributes:
        seconds: of the loop.
        minute_s: of these, in this minute.
        calls, size_bytes: requests, and bytes in both directions.
        share: part of the loop's time in the last whole minute.
    """

    __slots__ = ("_waits_s", "calls", "minute_s", "seconds", "share", "size_bytes")

    def __init__(self) -> None:
        self.calls = self.size_bytes = 0
        self.seconds = self.minute_s = self.share = 0.0
        self._waits_s = (0.0, 0.0)

    @property
    def wait_s(self) -> float:
        """The longest wait of a proposal in this minute and the last."""
        return max(self._waits_s)

    def waited(self, seconds: float) -> None:
        """Note a wait."""
        self._waits_s = (max(self._waits_s[0], seconds), self._waits_s[1])

    def add(self, other: Use) -> None:
        """Count what another has used, too."""
        self.calls += other.calls
        self.size_bytes += other.size_bytes
        self.seconds += other.seconds
        self.minute_s += other.minute_s
        self.waited(other.wait_s)

    def end_minute(self, length_s: float) -> None:
        """Begin the next minute."""
        self.share, self.minute_s = self.minute_s / length_s, 0.0
        self._waits_s = (0.0, self._waits_s[0])


class Uses:
    """The use of one member.

    Arguments:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._named: dict[Identity, Use] = {}
        self._others: dict[Identity, Use] = {}
        self._other = Use()
        self._use_of: dict[Identity, Use] = {}
        """By identity, of which several may share a queue."""
        self._began_s = clock()

    def charge(self, identity: Identity, seconds: float, calls: int = 0, size_bytes: int = 0) -> None:
        """Count what an identity takes.

        Arguments:
            identity: as of ``shares``.
            seconds, calls, size_bytes: as of ``Use``.
        """
        use = self._use_of.get(identity)
        if use is None:
            use = self._find(identity)
        use.seconds += seconds
        use.minute_s += seconds
        use.calls += calls
        use.size_bytes += size_bytes

    def waited(self, identity: Identity, seconds: float) -> None:
        """Note how long a proposal of an identity waited before the log."""
        (self._use_of.get(identity) or self._find(identity)).waited(seconds)

    def _find(self, identity: Identity) -> Use:
        queue = queue_of(identity)
        use = self._named.get(queue) or self._others.get(queue)
        if use is None:
            if len(self._others) >= KEPT_MAX:
                self._forget_others()
            use = Use()
            (self._named if len(self._named) < NAMED_MAX else self._others)[queue] = use
        if len(self._use_of) >= KEPT_MAX:
            self._use_of.clear()
        self._use_of[identity] = use
        return use

    def _forget_others(self) -> None:
        for use in self._others.values():
            self._other.add(use)
        self._others.clear()
        self._use_of.clear()

    def roll(self) -> None:
        """End the minute, if it is over. Called now and then."""
        length_s = self._clock() - self._began_s
        if length_s < MINUTE_S:
            return
        self._began_s += length_s
        most = nlargest(NAMED_MAX, [*self._named.items(), *self._others.items()], key=lambda item: item[1].minute_s)
        shares = {queue: use.minute_s / length_s for queue, use in most}
        stay = {queue: use for queue, use in self._named.items() if queue in shares}
        self._forget_others()
        self._named = stay | {queue: Use() for queue in shares if queue not in stay}
        self._use_of.clear()
        for use in (*self._named.values(), self._other):
            use.end_minute(length_s)
        for queue, share in shares.items():
            self._named[queue].share = share

    def figures(self) -> Iterator[tuple[Identity, Use]]:
        """Yield those with figures of their own, and what all others used."""
        self.roll()
        yield from self._named.items()
        rest = Use()
        for use in (self._other, *self._others.values()):
            rest.add(use)
        yield OTHER, rest


def label_of(identity: Identity) -> str:
    """Return an identity as the label of a figure: printable, and of bounded length.

    >>> label_of(b"alice"), len(label_of(b"a" * 1000))
    ('user alice', 129)
    """
    name = "".join(one if one.isprintable() else f"\\x{ord(one):02x}" for one in name_of(identity))
    return name if len(name) <= LABEL_MAX else f"{name[:LABEL_MAX]}~{crc32(name.encode()):08x}"
