"""The model of `Store`: the keys of `jepsen.checkers.model` as bytes, with the additions of a store.

The harness, the simulator and these tests share this model of etcd's semantics. Its text is Latin-1 here, so that every
byte is a character with the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from jepsen.checkers.model import Model as Keys
from jepsen.ops import Delete, KeyValue, Put
from raftkv.storage.key_value import encode


@dataclass(frozen=True)
class Change:
    main: int
    key: bytes
    value: bytes | None
    """`None` for a deletion."""


@dataclass
class Model:
    keys: Keys = field(default_factory=Keys)
    revision: int = 1
    compacted: int = -1
    applied: int = 0
    values: dict[bytes, bytes] = field(default_factory=dict)

    def copy(self) -> Model:
        return replace(self, keys=self.keys.copy(), values=dict(self.values))

    def write(self, operations: list[tuple[bytes, bytes | None, int]]) -> list[Change]:
        """One transaction of puts, and deletions of single keys; what it changed."""
        before = len(self.keys.log)
        for key, value, lease in operations:
            request = Delete(_text(key)) if value is None else Put(_text(key), _text(value), lease=lease)
            self.keys.apply(request, self.revision + 1)
        self.revision += len(self.keys.log) > before
        return self.changes(before)

    def changes(self, first: int = 0) -> list[Change]:
        """Every change ever made, in order."""
        log = self.keys.log[first:]
        return [Change(main, _bytes(key), None if kv is None else _bytes(kv.value)) for main, key, kv, _ in log]

    def range(self, key: bytes, end: bytes, revision: int) -> list[bytes]:
        """Serialized KeyValues of an interval as of a revision."""
        return [_encoded(kv) for kv in self.keys.read(_text(key), _text(end), revision)]

    def state(self) -> list[bytes]:
        """Serialized KeyValues of all keys."""
        return self.range(b"\x00", b"\x00", self.revision)

    def leases(self) -> dict[bytes, int]:
        """The attached keys of the present."""
        return {_bytes(key): kv.lease for key, kv in self.keys.current.items() if kv.lease}


def _text(data: bytes) -> str:
    return data.decode("latin-1")


def _bytes(text: str) -> bytes:
    return text.encode("latin-1")


def _encoded(kv: KeyValue) -> bytes:
    return encode(_bytes(kv.key), kv.create, kv.mod, kv.version, _bytes(kv.value), kv.lease)
