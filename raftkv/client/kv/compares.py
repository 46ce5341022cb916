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

from dataclasses import dataclass
from typing import Final, Literal

from raftkv.client.space import Space, Text, to_bytes
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
