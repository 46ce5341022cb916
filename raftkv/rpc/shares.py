"""Budgets that all clients share: each identity has a share, so that none takes what belongs to all; and its use.

An *identity* is the user of a call, else the name in the client's certificate, else the client's address (of IPv6 its
/64: one host has all of that). While users are on, a name that no user has counts for nothing: whoever can have
certificates made would have a share for each. Passwords that are checked show no identity yet: see the row "logins".

    shares = Shares(limit=64)
    if shares.make_room(identity, 1, give_way):     # the greediest gave way if that was needed; False: refuse
        shares.take(identity, 1)
    shares.give_back(identity, 1)                   # exactly what was taken

Two rules, by whether a thing can be taken back:

    taken back       one identity may hold all of it. When it is full, what the greediest holds gives way to an identity
                     that would hold less (``make_room``), so all get an equal share
    not taken back   one identity alone may hold ``limit``. A seventh of that comes on top, and is for the others:
                     each may hold seven times what is then left (``has_room``), so something is left for a newcomer,
                     and as things end, all that ask come to hold the same

Every budget of a member, and how it is shared:

    connections      count              taken back: when none is idle, the newest of the address
                                        with most                                              ``rpc/server/accept``
    handshakes       unfinished         taken back: the oldest of the address with most         ``rpc/server/accept``
    answers          bytes not read     taken back: a connection of the greediest is ended     ``rpc/server/budget``
    requests         bytes unfinished   taken back: likewise                                   ``rpc/server/budget``
    watchers         bytes              taken back: its newest watchers are cancelled          ``replica/watch/hub``
    dashboard        open pages         taken back: its oldest page ends                       ``server/ui/service``
    tokens ahead     calls that wait    taken back: its oldest is refused, for its own newer one too: who is honest
                                        waits for a moment                                     ``server/auth/guard``
    logins           passwords          taken back, by address and, within one, by name (all names that no user has are
                                        one): its newest is refused; each in turn is served    ``server/auth/passwords``
    tokens           count              taken back: an old one of the user who has most  ``server/auth/simple_tokens``
    proposals        bytes, and calls   not taken back: they may be in the log already ``replica/node/proposals``
    keep-alives      that wait          not taken back: as proposals                   ``server/streams/keep_alives``
    leases           count              not taken back: keys hang on them                      ``replica/lease/lessor``

Not shared, since only root or members ask for it: changes of members that wait, snapshot streams, messages between
members. Not shared either, and full for all when one fills it: audit lines and log lines.
Limits of one connection or stream are no budgets of all: ``rpc/limits``. The loop's time is shared among the same
identities (``loop/fair``), except that all unknown clients of an IPv4 /24 wait in one queue.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import nlargest
from time import monotonic
from typing import Any, Final
from zlib import crc32

from raftkv.loop.fair import Identity as Identity
from raftkv.rpc.tls import common_name_of

Identify = Callable[[str, Mapping[str, Any] | None], Identity]
"""Returns the identity of a connection, as ``identity_of_peer``."""

GREED: Final = 7
"""How many times what is left for others one identity may hold, of what cannot be taken back."""

_IPV6_NETWORK_BITS: Final = 64
_IPV4_NETWORK: Final = re.compile(r"address (\d+\.\d+\.\d+)\.\d+")


def identity_of_peer(address: str, certificate: Mapping[str, Any] | None = None) -> str:
    """Return the identity of a connection, apart from the users of its calls.

    Arguments:
        address: ``host:port``, or ``unix:``.
        certificate: as ``ssl`` decodes it; None: none was shown.

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
    """Return the identity of a call: its user, else that of its connection, as far as they are known."""
    found: Identity = getattr(call, "identity", "")
    return found


def queue_of(identity: Identity) -> Identity:
    """Return the queue in which work of an identity waits for its turn (``loop/fair``).

    The addresses of one /24 share a queue: they cost a client little.

    >>> queue_of(b"alice"), queue_of("address 10.0.0.7"), queue_of("address 2001:db8::/64")
    (b'alice', 'address 10.0.0.0/24', 'address 2001:db8::/64')
    """
    found = _IPV4_NETWORK.fullmatch(identity) if isinstance(identity, str) else None
    return f"address {found[1]}.0/24" if found else identity


def queue_of_call(call: Any) -> Identity:
    """Return the queue in which work of a call waits: of its user, else of its connection."""
    return queue_of(identity_of(call))


def name_of(identity: Identity) -> str:
    """Return an identity for people.

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
        identity: that is refused.
        limit: what all may have together, as "1024 watchers of this member".
    """
    return f"raftkv: {name_of(identity)} has its share of the {limit}: each user, certificate or address has one"


def greedier(held: Mapping[Identity, int], identity: Identity, amount: int) -> Identity | None:
    """Return the identity that holds most, if that is more than another would hold with so much more; None: none does.

    Arguments:
        held: by identity.
        identity, amount: which asks, and for how much.
    """
    greediest: Identity | None = None
    most = held.get(identity, 0) + amount
    for other, size in held.items():
        if size > most and other != identity:
            greediest, most = other, size
    return greediest


def totals(parts: Iterable[tuple[Identity, int]]) -> dict[Identity, int]:
    """Return what each identity holds in all, where that is not counted as it changes.

    Arguments:
        parts: an identity, and how much of what it holds.
    """
    held: dict[Identity, int] = {}
    for identity, size in parts:
        held[identity] = held.get(identity, 0) + size
    return held


class Shares:
    """The share of each identity in one budget.

    To find the greediest takes a moment for each identity that holds something, and is done while the budget is full.

    Arguments:
        limit: of what can be taken back: what all may hold; of other things: what one may hold.

    Attributes:
        held: by identity, if it holds any.
        used: what all hold.
    """

    __slots__ = ("held", "limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held: dict[Identity, int] = {}
        self.used = 0

    def take(self, identity: Identity, amount: int) -> None:
        """Count what an identity holds from now on."""
        self.held[identity] = self.held.get(identity, 0) + amount
        self.used += amount

    def give_back(self, identity: Identity, amount: int) -> None:
        """Count it no more."""
        left = self.held[identity] - amount
        self.used -= amount
        if left:
            self.held[identity] = left
        else:
            del self.held[identity]

    def make_room(self, identity: Identity, amount: int, give_way: Callable[[Identity], bool]) -> bool:
        """Make room for what can be taken back; False: refuse the identity, which has its share.

        Arguments:
            identity, amount: which asks, and for how much.
            give_way: has an identity give back something; False: it has nothing that can be.
        """
        while self.used + amount > self.limit:
            greediest = greedier(self.held, identity, amount)
            if greediest is None or not give_way(greediest):
                return False
        return True

    def has_room(self, identity: Identity, amount: int, others: int = 0) -> bool:
        """Return whether an identity may hold so much more of what cannot be taken back.

        Arguments:
            identity, amount: which asks, and for how much.
            others: what is held besides, and not counted here.
        """
        left = self.limit - self.used - others - amount
        return self.held.get(identity, 0) + amount <= GREED * left + self.limit


# -- uses -----------------------------------------------------------------------------------------------------------
#
# Who uses a member: what each identity takes of the loop's time, in calls and in bytes.
#
#     uses.charge(identity, seconds, calls, size_bytes)    # as it is taken
#     uses.waited(identity, seconds)                       # a proposal has waited so long before the log
#     for name, figures in uses.figures(): ...             # the identities that used most, and the rest as OTHER
#
# Those of one queue count as one. ``NAMED_MAX`` have figures of their own, which
# only grow: one that used more in the last minute takes the place of one that used less, and begins with nothing. All
# others together are ``OTHER``, to which a figure that was named never moves. So names that are made up by the million
# cost no memory, and rates are true at all times.
#
# What is charged: input of connections with all that handlers do at once, requests of the gateway, long reads, applying
# and answering writes. Left out: events, and work that no client asked for; so all parts are less than the whole.

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
            identity: as of ``Shares``.
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
