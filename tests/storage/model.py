"""The dumb model of a store: the list of all changes ever made; every answer is a walk through it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from raftkv.storage.key_value import encode


@dataclass(frozen=True)
class Change:
    main: int
    sub: int
    key: bytes
    value: bytes | None
    """``None`` for a deletion."""
    lease: int = 0


@dataclass
class Model:
    """What a store must answer."""

    changes: list[Change] = field(default_factory=list)
    revision: int = 1
    compacted: int = -1
    applied: int = 0
    values: dict[bytes, bytes] = field(default_factory=dict)

    def copy(self) -> Model:
        return replace(self, changes=list(self.changes), values=dict(self.values))

    def write(self, operations: list[tuple[bytes, bytes | None, int]]) -> None:
        """One transaction: puts, and deletions of single keys."""
        sub = 0
        for key, value, lease in operations:
            if value is None and self.state_in_txn(key, sub) is None:
                continue
            self.changes.append(Change(self.revision + 1, sub, key, value, lease))
            sub += 1
        if sub:
            self.revision += 1

    def state_in_txn(self, key: bytes, sub: int) -> bytes | None:
        return self.state(self.revision + 1 if sub else self.revision).get(key)

    def state(self, revision: int) -> dict[bytes, bytes]:
        """Serialized KeyValues as of a revision, by key."""
        state: dict[bytes, tuple[int, int, Change]] = {}
        for change in self.changes:
            if change.main > revision:
                break
            if change.value is None:
                state.pop(change.key, None)
            else:
                created, version, _ = state.get(change.key, (change.main, 0, None))
                state[change.key] = created, version + 1, change
        return {
            key: encode(key, created, change.main, version, change.value or b"", change.lease)
            for key, (created, version, change) in sorted(state.items())
        }

    def range(self, key: bytes, end: bytes, revision: int) -> list[bytes]:
        return [data for name, data in self.state(revision).items() if in_interval(name, key, end)]

    def leases(self) -> dict[bytes, int]:
        """The attached keys of the present."""
        newest = {change.key: change for change in self.changes}
        return {key: change.lease for key, change in newest.items() if change.value is not None and change.lease}


def in_interval(name: bytes, key: bytes, end: bytes) -> bool:
    if not end:
        return name == key
    return name >= key and (end == b"\x00" or name < end)
