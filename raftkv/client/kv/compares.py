"""Conditions of a txn, written as comparisons.

::

    version("a") == 0                    # the key does not exist
    value("a") != b"x"                   # it exists and has another value
    mod_revision("a") < 100
    create_revision("jobs/", prefix=True) > 7      # all keys of the interval
    lease_of("a") == lease.id

A key that does not exist has version, revisions and lease 0; a condition on its *value* never holds, not even ``!=``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, Protocol, runtime_checkable

from raftkv.client.errors import LeaseLost
from raftkv.client.keys import Space, Text, to_bytes
from raftkv.pb import rpc_pb2

Target = Literal["version", "create_revision", "mod_revision", "value", "lease"]

_TARGETS: Final = {
    "version": rpc_pb2.Compare.VERSION,
    "create_revision": rpc_pb2.Compare.CREATE,
    "mod_revision": rpc_pb2.Compare.MOD,
    "value": rpc_pb2.Compare.VALUE,
    "lease": rpc_pb2.Compare.LEASE,
}
_RELATIONS: Final = {
    "==": rpc_pb2.Compare.EQUAL,
    "!=": rpc_pb2.Compare.NOT_EQUAL,
    ">": rpc_pb2.Compare.GREATER,
    "<": rpc_pb2.Compare.LESS,
}


@dataclass(frozen=True, slots=True)
class Compare:
    """A condition: a property of a key (or of all keys of an interval), a relation, a constant."""

    target: Target
    key: Text
    end: Text | None
    prefix: bool
    relation: str
    constant: Text | int

    def to_message(self, space: Space) -> rpc_pb2.Compare:
        """Return the request message."""
        key, end = space.interval(self.key, self.end, prefix=self.prefix)
        message = rpc_pb2.Compare(
            result=_RELATIONS[self.relation], target=_TARGETS[self.target], key=key, range_end=end
        )
        # Set explicitly, zero too: the field says which of the union it is.
        constant = self.constant if isinstance(self.constant, int) else to_bytes(self.constant)
        setattr(message, self.target, constant)
        return message

    def __bool__(self) -> bool:
        # ``when(version("a") == 0 and ...)`` would silently drop the first condition.
        raise TypeError("a condition is known only to the cluster: pass several to when(), without and/or/not")


class Property:
    """A property of a key, to be compared.

    Arguments:
        target: which.
        key, end, prefix: of what key, or of which interval; see ``Space.interval``.
    """

    __slots__ = ("_end", "_key", "_prefix", "_target")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, target: Target, key: Text, end: Text | None = None, prefix: bool = False) -> None:
        self._target: Target = target
        self._key = key
        self._end = end
        self._prefix = prefix

    def __eq__(self, constant: object) -> Compare:  # type: ignore[override]
        return self._compare("==", constant)

    def __ne__(self, constant: object) -> Compare:  # type: ignore[override]
        return self._compare("!=", constant)

    def __gt__(self, constant: Text | int) -> Compare:
        return self._compare(">", constant)

    def __lt__(self, constant: Text | int) -> Compare:
        return self._compare("<", constant)

    def _compare(self, relation: str, constant: object) -> Compare:
        wanted = (str, bytes) if self._target == "value" else (int,)
        if not isinstance(constant, wanted):
            names = " or ".join(kind.__name__ for kind in wanted)
            raise TypeError(f"{self._target} is compared with {names}, not {type(constant).__name__}")
        return Compare(self._target, self._key, self._end, self._prefix, relation, constant)


def version(key: Text, end: Text | None = None, *, prefix: bool = False) -> Property:
    """Compare the number of writes since the key was created; 0: it does not exist.

    Arguments:
        key: which; the first of an interval.
        end, prefix: as for ``range``: the condition must hold for all keys there.
    """
    return Property("version", key, end, prefix)


def value(key: Text, end: Text | None = None, *, prefix: bool = False) -> Property:
    """Compare the value; no condition on it holds for a key that does not exist.

    Arguments:
        key: which; the first of an interval.
        end, prefix: as for ``range``: the condition must hold for all keys there.
    """
    return Property("value", key, end, prefix)


def create_revision(key: Text, end: Text | None = None, *, prefix: bool = False) -> Property:
    """Compare the revision of the write that created the key; 0: it does not exist.

    Arguments:
        key: which; the first of an interval.
        end, prefix: as for ``range``: the condition must hold for all keys there.
    """
    return Property("create_revision", key, end, prefix)


def mod_revision(key: Text, end: Text | None = None, *, prefix: bool = False) -> Property:
    """Compare the revision of the last write; 0: it does not exist.

    Arguments:
        key: which; the first of an interval.
        end, prefix: as for ``range``: the condition must hold for all keys there.
    """
    return Property("mod_revision", key, end, prefix)


def lease_of(key: Text, end: Text | None = None, *, prefix: bool = False) -> Property:
    """Compare the id of the lease that the key ends with; 0: none.

    Arguments:
        key: which; the first of an interval.
        end, prefix: as for ``range``: the condition must hold for all keys there.
    """
    return Property("lease", key, end, prefix)


# -- guards ---------------------------------------------------------------------------------------------------------
#
# What a write may rely on: a lease that it is attached to, a lock or term that must still be held.
#
# Both are checked twice: here, before the call, against this client's own clock; and by the cluster, within the
# write. So a process that slept through its lease writes nothing.


@runtime_checkable
class LeaseGuard(Protocol):
    """A lease that knows if it can be relied on."""

    @property
    def id(self) -> int:
        """Its id in the cluster."""
        ...

    def check(self) -> None:
        """Raise ``LeaseLost`` if it cannot be relied on."""
        ...

    def lose(self, reason: str) -> None:
        """Note that the cluster does not know it any more."""
        ...


class Fence(Protocol):
    """A lock or a term: a key whose create revision is the holder's fencing token."""

    @property
    def guard_key(self) -> bytes:
        """The key, as the store knows it."""
        ...

    @property
    def fence(self) -> int:
        """Its create revision."""
        ...

    def check(self) -> None:
        """Raise ``LeaseLost`` or ``FenceLost`` if it cannot be relied on."""
        ...

    def broken(self) -> Exception:
        """Make the error of a write that the cluster refused because the key has changed hands."""
        ...


@runtime_checkable
class Conditions(Protocol):
    """Anything else that ends and must not be outlived, as a generation of a training run: conditions on the store."""

    def compares(self) -> list[rpc_pb2.Compare]:
        """Return conditions that must all hold; keys as the store knows them."""
        ...

    def broken(self) -> Exception:
        """Make the error of a write that the cluster refused because a condition does not hold."""
        ...


FenceLike = Fence | Conditions
"""What ``fence=`` takes."""

LeaseLike = int | LeaseGuard
"""An id, or a lease of this library, which is then checked."""


def lease_id(lease: LeaseLike | None) -> int:
    """Return the id of a lease that can be relied on; 0 of none.

    Raises:
        LeaseLost: it cannot.
        TypeError: it is neither.
    """
    if lease is None:
        return 0
    if isinstance(lease, int):
        return lease
    if not hasattr(lease, "check"):
        raise TypeError(f"lease= takes a lease of this client, or its id, not {lease!r}")
    lease.check()
    return lease.id


def lost_lease(leases: Iterable[LeaseLike | None]) -> LeaseLost | None:
    """Return the error after the cluster did not find a lease; None if only ids were given, so that it can be any."""
    guards = [lease for lease in leases if lease is not None and not isinstance(lease, int)]
    if len(guards) != 1:
        return None
    reason = "the cluster does not know it any more"
    guards[0].lose(reason)
    return LeaseLost(guards[0].id, reason)


def fence_compares(fence: FenceLike) -> list[rpc_pb2.Compare]:
    """Return the conditions that hold only while the lock or term is held, or the generation lasts.

    Raises:
        LeaseLost: this client knows already that it is not.
        TypeError: it is no fence.
    """
    if isinstance(fence, Conditions):
        return fence.compares()
    if not hasattr(fence, "guard_key"):
        raise TypeError(f"fence= takes a lock, a term or the fence of a run, not {fence!r}")
    fence.check()
    held = rpc_pb2.Compare(
        result=rpc_pb2.Compare.EQUAL,
        target=rpc_pb2.Compare.CREATE,
        key=fence.guard_key,
        create_revision=fence.fence,
    )
    return [held]
