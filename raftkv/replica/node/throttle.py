"""Enforces rate limits (``apply/limits``) on requests that arrive at this member, and counts the use of each identity.

    throttle.admit(call, len(data), request)     # charges the request, or raises LimitedError with the time to retry
    throttle.charge(call, len(answer))

A request counts for the limit of its identity (or else for ``each``), of every role of its user, and of every prefix
with which its first key, or a key of one of its operations, begins. A limit has two buckets, for requests and for
bytes. A request is accepted while all of its buckets are below their burst, and a refused one costs nothing. Bytes of
requests and responses are charged when they are known, so a large response may be followed by a longer pause, but no
request is too large for a limit.

Each member counts separately: a client that spreads its calls over all members has the limit at each of them. Calls of
operators, and logins (``_EXEMPT``), are not limited, so that a limit can always be changed; calls of the same services
that any user may make (``_OF_USERS``) are. Keep-alives are not limited: a lease that ends early does more harm than a
flood of keep-alives, which has its own share (``server/streams/keep_alives``). Events are charged to the identity that
watches, when they are sent.

Cost: without limits one test of an attribute (``Admission.throttle``), and no use is counted.

Not here: limits on waiting requests (``rpc/shares``), and the order in which they are served (``loop/fair``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import ceil
from typing import Any, Final, TypeVar

from raftkv import errors
from raftkv.apply import wire
from raftkv.apply.auth.store import AuthStore
from raftkv.apply.limits import EACH, PREFIX, ROLE, WEIGHT_OF_OTHERS, Limits, Subject, limits_requests
from raftkv.pb import admin_pb2, rpc_pb2
from raftkv.rpc.server.calls import Observer, ServerCall
from raftkv.rpc.shares import Identity, name_of, queue_of, queue_of_call

T = TypeVar("T")

IDENTITIES_MAX: Final = 1_024
"""Number of identities whose use is kept, and that have a bucket of ``each``; the one idle for longest is dropped."""

ROUNDING_S: Final = 1e-6

_EXEMPT: Final = frozenset(("raftkvpb.Admin", "etcdserverpb.Auth", "etcdserverpb.Maintenance", "grpc.health.v1.Health"))
_OF_USERS: Final = frozenset(
    (
        "/etcdserverpb.Maintenance/Alarm",
        *("/etcdserverpb.Auth/AuthStatus", "/etcdserverpb.Auth/UserGet", "/etcdserverpb.Auth/RoleGet"),
    )
)
"""Each call costs a round of reads or, to list alarms, an entry of the log."""

FEW_KEYS: Final = 8
"""Number of keys up to which each key is cut to the length of every prefix; with more, each prefix is searched for."""

_KEEP_ALIVE: Final = "/etcdserverpb.Lease/LeaseKeepAlive"


class Bucket:
    """A limit as a bucket: a burst, and then its rate (the generic cell rate algorithm, in seconds).

    Arguments:
        limit: the limit.
    """

    __slots__ = (
        "_byte_s",
        "_bytes_ahead_s",
        "_bytes_until",
        "_request_s",
        "_requests_ahead_s",
        "_requests_until",
        "limit",
    )

    def __init__(self, limit: admin_pb2.Limit) -> None:
        self.limit = limit
        self._request_s = 1.0 / limit.requests_per_s if limit.requests_per_s else 0.0
        self._byte_s = 1.0 / limit.bytes_per_s if limit.bytes_per_s else 0.0
        self._requests_ahead_s = ((limit.requests_burst or limit.requests_per_s) - 1) * self._request_s
        self._bytes_ahead_s = (limit.bytes_burst or limit.bytes_per_s) * self._byte_s
        self._requests_until = self._bytes_until = 0.0
        """Time until which the accepted requests use up the rate."""

    def wait_s(self, now: float) -> float:
        """Return the time until a request may come; 0 or less: now."""
        wait_s = self._requests_until - now - self._requests_ahead_s if self._request_s else 0.0
        return max(wait_s, self._bytes_until - now - self._bytes_ahead_s) if self._byte_s else wait_s

    def take(self, now: float, requests: int, size_bytes: int) -> None:
        """Count accepted requests."""
        if self._request_s:
            self._requests_until = max(self._requests_until, now) + requests * self._request_s
        if self._byte_s:
            self._bytes_until = max(self._bytes_until, now) + size_bytes * self._byte_s

    def name(self) -> str:
        """Return a description of the limit."""
        limit = self.limit
        rates = ((limit.requests_per_s, "requests/s"), (limit.bytes_per_s, "bytes/s"))
        text = " and ".join(f"{rate} {unit}" for rate, unit in rates if rate)
        return f"{limit.kind} {limit.name.decode('utf-8', 'backslashreplace')}".rstrip() + f": {text}"


class Throttle:
    """Enforces the limits of a cluster on one member.

    Arguments:
        limits: limits of the cluster.
        auth: knows the roles of users.
        clock: returns the loop time.
        watch_counts: open watches by queue (``shares.queue_of``).
        attach: called with this object while there are limits of requests, otherwise with ``None``.
        weights: weights of queues, which are kept up to date here.
    """

    def __init__(
        self,
        limits: Limits,
        auth: AuthStore,
        clock: Callable[[], float],
        watch_counts: Mapping[Identity, int],
        attach: Callable[[Throttle | None], None],
        weights: dict[Identity, float],
    ) -> None:
        self._limits = limits
        self._auth = auth
        self._clock = clock
        self._watch_counts = watch_counts
        self._watches_of_role: dict[str, int] = {}
        """Open watches by role, counted when a limit first needs them; forgotten when users change."""
        self._users_at = -1
        self._attach = attach
        self._weights = weights
        self._buckets: dict[Subject, Bucket] = {}
        self._each: OrderedDict[Identity, Bucket] = OrderedDict()
        self._prefixes: dict[bytes, Bucket] = {}
        self._prefix_lengths: tuple[int, ...] = ()
        self._has_roles = False
        limits.on_change.append(self._reload)
        self._reload()

    def _reload(self) -> None:
        """Apply changed limits; the use of unchanged limits still counts."""
        self._weights.clear()
        for subject, limit in self._limits.by_subject.items():
            if limit.weight:
                self._weights[queue_of_subject(subject)] = limit.weight / WEIGHT_OF_OTHERS
        found = {subject: limit for subject, limit in self._limits.by_subject.items() if limits_requests(limit)}
        last = self._buckets
        each = last.get((EACH, b""))
        self._buckets = {
            subject: last[subject] if subject in last and last[subject].limit == limit else Bucket(limit)
            for subject, limit in found.items()
        }
        if self._buckets.get((EACH, b"")) is not each:
            self._each.clear()
        self._prefixes = {name: bucket for (kind, name), bucket in self._buckets.items() if kind == PREFIX}
        self._prefix_lengths = tuple(sorted(set(map(len, self._prefixes))))
        self._has_roles = any(kind == ROLE for kind, _ in found)
        self._attach(self if found else None)

    # -- requests ----------------------------------------------------------------------------------------------------

    def admit(self, call: ServerCall, size_bytes: int = 0, request: Any = None) -> None:
        """Admit a request, and count it. A call counts once, however often it is admitted, except for new prefixes.

        Arguments:
            call: call whose identity counts.
            size_bytes: size of the request, of which nothing was counted yet.
            request: request whose keys count; ``None``: no keys.

        Raises:
            LimitedError: the request came too early.
        """
        path = call.route.path
        if path == _KEEP_ALIVE or (path[1:].partition("/")[0] in _EXEMPT and path not in _OF_USERS):
            return
        if isinstance(call.observer, _Answer):
            call.observer.admit(self._of_keys(request), size_bytes)
            return
        call.observer = _Answer(self, call, self._take(call, size_bytes, request), call.observer)

    def _take(self, call: ServerCall, size_bytes: int, request: Any) -> list[Bucket]:
        buckets = [*self._of(queue_of_call(call)), *self._of_keys(request)]
        self.take(buckets, size_bytes)
        return buckets

    def take(self, buckets: list[Bucket], size_bytes: int) -> None:
        """Count a request in all buckets, or in none of them. Raises LimitedError."""
        now = self._clock()
        for bucket in buckets:
            wait_s = bucket.wait_s(now)
            if wait_s > ROUNDING_S:
                raise errors.LimitedError(bucket.name(), ceil((wait_s - ROUNDING_S / 2) * 1000))
        for bucket in buckets:
            bucket.take(now, 1, size_bytes)

    def note_pieces(self, call: ServerCall, size_bytes: int) -> None:
        """Record the size of a response of which observers see only the beginning."""
        if isinstance(call.observer, _Answer):
            call.observer.size_bytes = size_bytes

    def charge(self, buckets: list[Bucket], size_bytes: int) -> None:
        """Count bytes of an admitted call, such as its response."""
        now = self._clock()
        for bucket in buckets:
            bucket.take(now, 0, size_bytes)

    def watch_refusal(self, call: ServerCall, key: bytes) -> str:
        """Return why a client may not open one more watch now; empty if it may."""
        queue = queue_of_call(call)
        for bucket in self._of(queue):
            most = bucket.limit.watches_max
            if most and self._watches(bucket.limit, queue) >= most:
                return f"{errors.LimitedError.text} (raftkv: {name_of(queue)} may have {most} watches of this member)"
        try:
            self._take(call, len(key), wire.PlainGet(key, False))
        except errors.LimitedError as error:
            (_, again_ms), (_, limit) = error.trailers
            return f"{error} (raftkv: {limit.decode()}; {errors.RETRY_AFTER.decode()}: {again_ms.decode()})"
        return ""

    def charge_events(self, identity: Identity, size_bytes: int) -> None:
        """Count the bytes of events sent to an identity."""
        self.charge(list(self._of(queue_of(identity))), size_bytes)

    def _watches(self, limit: admin_pb2.Limit, queue: Identity) -> int:
        if limit.kind != ROLE:
            return self._watch_counts.get(queue, 0)
        if self._users_at != self._auth.revision:
            self._users_at = self._auth.revision
            self._watches_of_role.clear()
        role = limit.name.decode("utf-8", "replace")
        count = self._watches_of_role.get(role)
        if count is None:
            count = sum(more for other, more in self._watch_counts.items() if role in self._roles_of(other))
            self._watches_of_role[role] = count
        return count

    def _roles_of(self, queue: Identity) -> Sequence[str]:
        user = self._auth.users.get(queue) if isinstance(queue, bytes) else None
        return () if user is None else user.roles

    def watches_changed(self, queue: Identity, more: int) -> None:
        """Record that an identity has more, or fewer, watches: ten thousand users may share a role."""
        if self._watches_of_role:
            for role in self._roles_of(queue):
                if role in self._watches_of_role:
                    self._watches_of_role[role] += more

    # -- who -----------------------------------------------------------------------------------------------------------

    def _of(self, queue: Identity) -> Iterator[Bucket]:
        """Yield the buckets of an identity, and of its roles."""
        own = self._buckets.get(subject_of(queue))
        if own is not None:
            yield own
        elif (EACH, b"") in self._buckets:
            yield _recent(self._each, queue, lambda: Bucket(self._buckets[EACH, b""].limit))
        if self._has_roles:
            for role in self._roles_of(queue):
                if (bucket := self._buckets.get((ROLE, role.encode()))) is not None:
                    yield bucket

    def _of_keys(self, request: Any) -> list[Bucket]:
        """Return the buckets of the prefixes of a request's keys, each once."""
        if not self._prefixes or request is None:
            return []
        keys = _keys_of(request)
        if len(keys) <= FEW_KEYS:
            lengths = self._prefix_lengths
            names = {key[:length] for key in keys for length in lengths if length <= len(key)}
            return [bucket for name in sorted(names) if (bucket := self._prefixes.get(name)) is not None]
        # A txn may have 16,000 keys, and prefixes 256 different lengths.
        ordered = sorted(keys)
        return [bucket for name, bucket in self._prefixes.items() if _is_begun(ordered, name)]


class _Answer:
    """Charges the response of one call when it is made, and calls the earlier observer of the call."""

    __slots__ = ("_before", "_buckets", "_call", "_throttle", "size_bytes")

    def __init__(self, throttle: Throttle, call: ServerCall, buckets: list[Bucket], before: Observer | None) -> None:
        self._call = call  # the call drops its reference to this when it ends
        self._throttle = throttle
        self._buckets = buckets
        self._before = before
        self.size_bytes = 0

    def admit(self, buckets: list[Bucket], size_bytes: int) -> None:
        """Count further bytes of the call, and the call in further buckets. Raises LimitedError."""
        new = [bucket for bucket in buckets if bucket not in self._buckets]
        self._throttle.take(new, size_bytes)
        self._throttle.charge(self._buckets, size_bytes)
        self._buckets += new

    def __call__(self, code: int, answer: bytes) -> None:
        self._throttle.charge(self._buckets, max(self.size_bytes, self._call.sent_bytes, len(answer)))
        if self._before is not None:
            self._before(code, answer)


def subject_of(queue: Identity) -> Subject:
    """Return the subject whose limit applies to an identity.

    >>> subject_of(b"alice"), subject_of("address 10.0.0.0/24")
    (('user', b'alice'), ('address', b'10.0.0.0/24'))
    """
    if isinstance(queue, bytes):
        return "user", queue
    kind, _, name = queue.partition(" ")
    return kind, name.encode()


def queue_of_subject(subject: Subject) -> Identity:
    """Return the queue of a user, certificate or network: the inverse of ``subject_of``."""
    kind, name = subject
    return name if kind == "user" else f"{kind} {name.decode('utf-8', 'replace')}"


def _recent(table: OrderedDict[Identity, T], queue: Identity, make: Callable[[], T]) -> T:
    """Return the entry of an identity, made if there is none; drop the one idle for longest if there are too many."""
    found = table[queue] = table.pop(queue, None) or make()
    if len(table) > IDENTITIES_MAX:
        table.popitem(last=False)
    return found


def _is_begun(ordered: list[bytes], prefix: bytes) -> bool:
    at = bisect_left(ordered, prefix)
    return at < len(ordered) and ordered[at].startswith(prefix)


def _keys_of(request: Any) -> Collection[bytes]:
    """Return the keys of a request; of a txn, those of all compares and operations: 10 ms for the largest txn."""
    if isinstance(request, wire.PlainTxn):
        return {each[0] for part in (request.compares, request.success, request.failure) for each in part}
    if not isinstance(request, rpc_pb2.TxnRequest):
        key = getattr(request, "key", None)
        return (key,) if isinstance(key, bytes) else ()
    keys: set[bytes] = set()
    txns = [request]
    while txns:
        txn = txns.pop()
        keys.update([compare.key for compare in txn.compare])
        for branch in (txn.success, txn.failure):
            for operation in branch:
                kind = operation.WhichOneof("request")
                if kind == "request_txn":
                    txns.append(operation.request_txn)
                elif kind is not None:
                    keys.add(getattr(operation, kind).key)
    return keys
