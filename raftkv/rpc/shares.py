"""Budgets that all clients share: each identity has a share of each, so that none can use up a budget; and their use.

An *identity* is the user of a call, else the name in the client's certificate, else the client's address (for IPv6 its
/64, since one host has all of that). While authentication is on, a name in a certificate counts only if it is a user's:
otherwise a client that can obtain certificates would have a share for each. A proxy can name its clients
(``server/auth/guard``). A password being checked has no identity yet: see the row "logins".

    shares = Shares(limit=64)
    if shares.make_room(identity, 1, give_way):     # the greediest gave way if that was needed; False: refuse
        shares.take(identity, 1)
    shares.give_back(identity, 1)                   # exactly the amount taken

There are two rules, depending on whether a resource can be taken back:

    taken back       one identity may hold all of it. When it is full, the identity that holds most gives way to one
                     that would hold less (``make_room``), so all get an equal share
    not taken back   one identity alone may hold ``limit``. Another seventh of ``limit`` is for the others: each may
                     hold seven times what is left in all (``has_room``), so something is left for a newcomer, and
                     as holders return their parts, all that ask come to hold the same

Every budget of a member, and how it is shared:

    connections      count              taken back: when none is idle, the newest of the address
                                        with most                                              ``rpc/server/accept``
    handshakes       unfinished         taken back: the oldest of the address with most         ``rpc/server/accept``
    answers          bytes not read     taken back: a connection of the greediest is ended     ``rpc/server/budget``
    answers made     bytes so far       taken back: an answer of the greediest fails     ``server/services/responder``
    requests         bytes unfinished   taken back: likewise                                   ``rpc/server/budget``
    watchers         bytes              taken back: its newest watchers are cancelled          ``replica/watch/hub``
    dashboard        open pages         taken back: its oldest page ends                       ``server/ui/service``
    tokens ahead     calls that wait    taken back: its oldest is refused, also for its own newer one: an honest
                                        caller waits for a moment                              ``server/auth/guard``
    logins           passwords          taken back, by address and, within one, by name (all unknown names count as
                                        one): its newest is refused; each in turn is served    ``server/auth/passwords``
    tokens           count              taken back: an old one of the user with most     ``server/auth/simple_tokens``
    proposals        bytes, and calls   not taken back: they may be in the log already ``replica/node/proposals``
    keep-alives      that wait          not taken back: as proposals                   ``server/streams/keep_alives``
    graces           leases by stream   not taken back: their leases end with their TTL        ``replica/lease/graces``
    leases           count              not taken back: keys hang on them                      ``replica/lease/lessor``

Not shared, since only root or members ask for them: waiting membership changes, snapshot streams, messages between
members. Not shared either, and full for all clients when one fills them: audit lines and log lines.
Limits of one connection or stream are not budgets: see ``rpc/limits``. The loop's time is shared among the same
identities (``loop/fair``), except that all unknown clients of an IPv4 /24 wait in one queue. Of entries that take long
to apply, one of a member is in the log at a time, and they take turns (``replica/node/proposals``). Leases that expire
together end in turns of their owners (``replica/lease/times``).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import nlargest
from time import monotonic
from typing import Any, Final
from zlib import crc32

from raftkv.loop.fair import MEMBER
from raftkv.loop.fair import Identity as Identity
from raftkv.rpc.tls import common_name_of

Identify = Callable[[str, Mapping[str, Any] | None], Identity]
"""Returns the identity of a connection, as ``identity_of_peer``."""

GREED: Final = 7
"""Factor of ``Shares.has_room``: one identity may hold this many times what is left for the others."""

_IPV6_NETWORK_BITS: Final = 64
_IPV4_NETWORK: Final = re.compile(r"address (\d+\.\d+\.\d+)\.\d+")


def identity_of_peer(address: str, certificate: Mapping[str, Any] | None = None) -> str:
    """Return the identity of a connection, regardless of the users of its calls.

    Arguments:
        address: ``host:port``, or ``unix:``.
        certificate: certificate as decoded by ``ssl``; None: none was shown.

    >>> identity_of_peer("10.0.0.7:51000"), identity_of_peer("[2001:db8::17]:443")
    ('address 10.0.0.7', 'address 2001:db8::/64')
    """
    name = common_name_of(certificate)
    if name:
        return f"certificate {name}"
    host = address.rpartition(":")[0].strip("[]") or address
    if ":" in host:
        try:
            found = ipaddress.IPv6Address(host.partition("%")[0])
        except ValueError:
            return f"address {host}"
        mapped = found.ipv4_mapped
        host = str(mapped or ipaddress.IPv6Network((int(found), _IPV6_NETWORK_BITS), strict=False))
    return f"address {host}"


def identity_of(call: Any) -> Identity:
    """Return the identity of a call: its user, else the identity of its connection; empty: unknown."""
    found: Identity = getattr(call, "identity", "")
    return found


def queue_of(identity: Identity) -> Identity:
    """Return the queue in which an identity waits for its turn (``loop/fair``).

    The addresses of one IPv4 /24 share a queue: a client can get many of them cheaply.

    >>> queue_of(b"alice"), queue_of("address 10.0.0.7"), queue_of("address 2001:db8::/64")
    (b'alice', 'address 10.0.0.0/24', 'address 2001:db8::/64')
    """
    found = _IPV4_NETWORK.fullmatch(identity) if isinstance(identity, str) else None
    return f"address {found[1]}.0/24" if found else identity


def queue_of_call(call: Any) -> Identity:
    """Return the queue in which a call waits: that of its user, else of its connection."""
    return queue_of(identity_of(call))


def name_of(identity: Identity) -> str:
    """Return the human-readable name of an identity.

    >>> name_of(b"alice"), name_of("address 10.0.0.7")
    ('user alice', 'address 10.0.0.7')
    """
    if not identity:
        return "this client"
    if isinstance(identity, str):
        return identity
    return f"user {identity.decode('utf-8', 'backslashreplace')}"


def refusal(identity: Identity, limit: str) -> str:
    """Return the text of a refusal, which names the limit.

    Arguments:
        identity: refused identity.
        limit: total for all clients, such as "1024 watchers of this member".
    """
    return f"raftkv: {name_of(identity)} has its share of the {limit}: each user, certificate or address has one"


def greedier(held: Mapping[Identity, int], identity: Identity, amount: int) -> Identity | None:
    """Return the identity that holds most, if that is more than ``identity`` would hold then, or None.

    Arguments:
        held: amount by identity.
        identity, amount: requesting identity, and the requested amount.
    """
    greediest: Identity | None = None
    most = held.get(identity, 0) + amount
    for other, size in held.items():
        if size > most and other != identity:
            greediest, most = other, size
    return greediest


def totals(parts: Iterable[tuple[Identity, int]]) -> dict[Identity, int]:
    """Return the total of each identity, for a resource whose shares are not counted as they change.

    Arguments:
        parts: pairs of an identity and an amount.
    """
    held: dict[Identity, int] = {}
    for identity, size in parts:
        held[identity] = held.get(identity, 0) + size
    return held


class Shares:
    """The share of each identity in one budget.

    Finding the greediest takes time for each identity that holds something; it is done only while the budget is full.

    Arguments:
        limit: if the resource can be taken back: total for all identities; else: most that one identity may hold.

    Attributes:
        held: amount by identity; identities with nothing are absent.
        used: total of all identities.
    """

    __slots__ = ("held", "limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held: dict[Identity, int] = {}
        self.used = 0

    def take(self, identity: Identity, amount: int) -> None:
        """Add an amount to the share of an identity."""
        self.held[identity] = self.held.get(identity, 0) + amount
        self.used += amount

    def give_back(self, identity: Identity, amount: int) -> None:
        """Subtract an amount from the share of an identity."""
        left = self.held[identity] - amount
        self.used -= amount
        if left:
            self.held[identity] = left
        else:
            del self.held[identity]

    def make_room(self, identity: Identity, amount: int, give_way: Callable[[Identity], bool]) -> bool:
        """Make room in a budget that can be taken back; False: refuse the identity, which has its share.

        Arguments:
            identity, amount: requesting identity, and the requested amount.
            give_way: makes an identity give something back; False: it has nothing to give back.
        """
        while self.used + amount > self.limit:
            greediest = greedier(self.held, identity, amount)
            if greediest is None or not give_way(greediest):
                return False
        return True

    def has_room(self, identity: Identity, amount: int, others: int = 0) -> bool:
        """Return whether an identity may take more of a budget that cannot be taken back.

        Arguments:
            identity, amount: requesting identity, and the requested amount.
            others: amount in use that is not counted here.
        """
        left = self.limit - self.used - others - amount
        return self.held.get(identity, 0) + amount <= GREED * left + self.limit


# -- uses -----------------------------------------------------------------------------------------------------------
#
# The use of a member: loop time, calls and bytes of each identity.
#
#     uses.charge(identity, seconds, calls, size_bytes)    # at each use
#     uses.waited(identity, seconds)                       # how long a proposal waited before the log
#     for name, figures in uses.figures(): ...             # the identities with most use, and the rest as OTHER
#
# All identities of one queue count as one. ``NAMED_MAX`` identities have figures of their own. Figures only grow: an
# identity that used more in the last minute replaces one that used less, and starts at zero. All others together are
# ``OTHER``; the figures of a named identity never move there. So a million invented names cost no memory, and rates are
# correct at all times.
#
# Charged are: input of connections with the immediate work of handlers, requests of the gateway, long reads, applying
# and answering writes. Left out: events, and the member's own work. So the sum of all parts is less than the whole.

NAMED_MAX: Final = 20
KEPT_MAX: Final = 1_024
"""Identities whose use since the last ``roll`` is kept apart, to find those with most use."""
MINUTE_S: Final = 60.0
COMPANY: Final = 256
"""Charges of one identity in a row after which it has the member for itself: a flood makes as many in 0.1 s."""
OTHER: Final = "other"
LABEL_MAX: Final = 120


class Use:
    """The use of one identity.

    Attributes:
        seconds: time of the loop.
        minute_s: part of ``seconds`` in the current minute.
        calls, size_bytes: requests, and bytes in both directions.
        share: fraction of the loop's time in the last whole minute.
    """

    __slots__ = ("_waits_s", "calls", "minute_s", "seconds", "share", "size_bytes")

    def __init__(self) -> None:
        self.calls = self.size_bytes = 0
        self.seconds = self.minute_s = self.share = 0.0
        self._waits_s = (0.0, 0.0)

    @property
    def wait_s(self) -> float:
        """The longest wait of a proposal in this minute and the previous one."""
        return max(self._waits_s)

    def waited(self, seconds: float) -> None:
        """Note the wait of a proposal."""
        self._waits_s = (max(self._waits_s[0], seconds), self._waits_s[1])

    def add(self, other: Use) -> None:
        """Add the use of another identity."""
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
        clock: returns seconds.

    Attributes:
        company: charges left during which several identities count as present; 0: one has the member for itself.
        weights: by queue, of those that an operator gave one (``apply/limits``); as in ``loop/fair``.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.company = 0
        self.weights: dict[Identity, float] = {}
        self._clock = clock
        self._last: Use | None = None
        self._named: dict[Identity, Use] = {}
        self._others: dict[Identity, Use] = {}
        self._other = Use()
        self._use_of: dict[Identity, Use] = {}
        """By identity; several identities may share a queue, and so a ``Use``."""
        self._began_s = clock()

    def charge(self, identity: Identity, seconds: float, calls: int = 0, size_bytes: int = 0) -> None:
        """Add to the use of an identity.

        Arguments:
            identity: as in ``Shares``.
            seconds, calls, size_bytes: as in ``Use``.
        """
        use = self._use_of.get(identity)
        if use is None:
            use = self._find(identity)
        use.seconds += seconds
        use.minute_s += seconds
        use.calls += calls
        use.size_bytes += size_bytes
        if use is self._last:
            if self.company:
                self.company -= 1
        elif identity != MEMBER:
            if self._last is not None:
                self.company = COMPANY
            self._last = use

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
        """End the minute, if it has passed. Call it from time to time."""
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
        """Yield the named identities and their use, and the use of all others as ``OTHER``."""
        self.roll()
        yield from self._named.items()
        rest = Use()
        for use in (self._other, *self._others.values()):
            rest.add(use)
        yield OTHER, rest


def label_of(identity: Identity) -> str:
    """Return an identity as a metric label: printable, and of bounded length.

    >>> label_of(b"alice"), len(label_of(b"a" * 1000))
    ('user alice', 129)
    """
    name = "".join(one if one.isprintable() else f"\\x{ord(one):02x}" for one in name_of(identity))
    return name if len(name) <= LABEL_MAX else f"{name[:LABEL_MAX]}~{crc32(name.encode()):08x}"
