"""What a write may rely on: a lease that it is attached to, a lock or term that must still be held.

Both are checked twice: here, before the call, against this client's own clock; and by the cluster, within the write.
So a process that slept through its lease writes nothing, whatever it believes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from raftkv.client.errors import LeaseLost
from raftkv.pb import rpc_pb2


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
