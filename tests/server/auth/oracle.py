"""An independent model of access rights, written from etcd's reference: key sets by example.

Intervals in these tests begin and end at few keys. So a set of keys is known by which of ``KEYS`` it has: those keys,
the keys just beside them, and ``FOREVER``, which stands for all keys beyond the last.
"""

from __future__ import annotations

from dataclasses import dataclass

FOREVER = b"the keys beyond the last"
_ENDS = (b"\0", b"a", b"l", b"m", b"m/", b"m0", b"m1", b"m2", b"m4", b"m5", b"n", b"z", b"z/", b"z0", b"\xff\xff")
KEYS = frozenset(end + more for end in _ENDS for more in (b"", b"\0", b"\xff\xff\xff")) | {FOREVER}

Interval = tuple[bytes, bytes]


def keys_of(interval: Interval) -> frozenset[bytes]:
    """The keys of an interval as on the wire."""
    key, end = interval
    if not end:
        return frozenset({key})
    if end == b"\0":
        # All from the key on; "\0" itself is the first of all keys that matter.
        return frozenset(one for one in KEYS if one is FOREVER or one >= key)
    return frozenset(one for one in KEYS if one is not FOREVER and key <= one < end)


@dataclass(frozen=True)
class Role:
    """Rights of a role: readable and writable intervals."""

    reads: tuple[Interval, ...] = ()
    writes: tuple[Interval, ...] = ()
    is_root: bool = False

    def may(self, kind: str, interval: Interval) -> bool:
        """Whether every key of an interval may be read (``R``), or written (``W``)."""
        granted = self.reads if kind == "R" else self.writes
        return all(any(_has(one, key) for one in granted) for key in keys_of(interval))


def _has(interval: Interval, key: bytes) -> bool:
    begin, end = interval
    if key is FOREVER:
        return end == b"\0"
    return key == begin if not end else begin <= key and (end == b"\0" or key < end)


PART, ALL = (b"m", b"n"), (b"\0", b"\0")
ROLES = {
    "nothing": Role(),
    "reads-part": Role(reads=(PART,)),
    "writes-part": Role(writes=(PART,)),
    # In two pieces that meet: the union counts.
    "both-part": Role(reads=((b"m", b"m2"), (b"m2", b"n")), writes=((b"m", b"m4"), (b"m1", b"n"))),
    "reads-one": Role(reads=((b"m1", b""),)),
    "reads-from": Role(reads=((b"m", b"\0"),)),
    "reads-all": Role(reads=(ALL,)),
    "writes-all": Role(writes=(ALL,)),
    "both-all": Role(reads=(ALL,), writes=(ALL,)),
    "root": Role(is_root=True),
}

USER, ROOT = ("user", (b"", b"")), ("root", (b"", b""))
Need = tuple[str, Interval]
"""``R`` or ``W`` and an interval; or USER, or ROOT."""


def is_allowed(role: Role, needs: tuple[Need, ...]) -> bool:
    """Whether a user with a role, who has shown who he is, may do what needs all this."""
    return role.is_root or all(
        kind == "user" or (kind != "root" and role.may(kind, interval)) for kind, interval in needs
    )
