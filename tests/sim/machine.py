"""The replicated state machine of the simulation: a tiny key-value store with etcd's revision rule.

Owns the form of an operation in an entry and what applying it does. Deterministic: ``apply`` is a function of the
state and the entry alone. The running ``digest`` covers every entry applied, in order, so two members agree at an
index exactly when they applied the same bytes in the same order, each once.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from dataclasses import dataclass, field

from raftkv.raft.types import ConfState, Entry

_OPERATION = struct.Struct(">IBBQQ")


class Kind(enum.IntEnum):
    """What a client asks for."""

    PUT = 0
    COMPARE_AND_SET = 1
    DELETE = 2
    READ = 3


@dataclass(frozen=True, slots=True)
class Operation:
    """A write as it stands in the log. ``expected`` is the modification revision a compare-and-set wants."""

    id: int
    kind: Kind
    key: int
    value: int = 0
    expected: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer to an operation: header revision, whether the compare held, and the key's state after it."""

    revision: int
    succeeded: bool = True
    value: int | None = None
    mod_revision: int = 0


def encode(operation: Operation, padding_bytes: int = 0) -> bytes:
    """An operation as entry data, padded to look like a bigger value."""
    head = _OPERATION.pack(operation.id, operation.kind, operation.key, operation.value, operation.expected)
    return head + b"." * padding_bytes


def decode(data: bytes) -> Operation:
    """The operation in entry data."""
    id_, kind, key, value, expected = _OPERATION.unpack_from(data)
    return Operation(id_, Kind(kind), key, value, expected)


@dataclass(frozen=True, slots=True)
class StateImage:
    """A consistent copy of the state: what a snapshot carries and what the backend commits in one transaction."""

    applied_index: int
    applied_term: int
    conf_state: ConfState
    revision: int
    digest: bytes
    values: tuple[tuple[int, int, int], ...]


EMPTY_DIGEST = bytes(8)


@dataclass(slots=True)
class StateMachine:
    """The state of one member. Keys map to ``(value, mod_revision)``."""

    applied_index: int = 0
    applied_term: int = 0
    conf_state: ConfState = field(default_factory=ConfState)
    revision: int = 1
    digest: bytes = EMPTY_DIGEST
    values: dict[int, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def from_image(cls, image: StateImage) -> StateMachine:
        """The state an image holds."""
        values = {key: (value, mod_revision) for key, value, mod_revision in image.values}
        return cls(image.applied_index, image.applied_term, image.conf_state, image.revision, image.digest, values)

    def image(self) -> StateImage:
        """A copy of the whole state, applied index and all."""
        values = tuple((key, *self.values[key]) for key in sorted(self.values))
        return StateImage(self.applied_index, self.applied_term, self.conf_state, self.revision, self.digest, values)

    def apply(self, entry: Entry) -> Outcome | None:
        """Apply one NORMAL entry; None for the empty entry of a new leader."""
        self._advance(entry)
        if not entry.data:
            return None
        return self._execute(decode(entry.data))

    def apply_conf_change(self, entry: Entry, conf_state: ConfState) -> None:
        """Note a membership change that Raft has carried out."""
        self._advance(entry)
        self.conf_state = conf_state

    def read(self, key: int) -> Outcome:
        """The key as of now."""
        value, mod_revision = self.values.get(key, (None, 0))
        return Outcome(self.revision, True, value, mod_revision)

    def _advance(self, entry: Entry) -> None:
        self.applied_index, self.applied_term = entry.index, entry.term
        text = self.digest + entry.data + entry.index.to_bytes(8, "big") + entry.term.to_bytes(8, "big")
        self.digest = hashlib.blake2b(text, digest_size=8).digest()

    def _execute(self, operation: Operation) -> Outcome:
        key = operation.key
        _, mod_revision = self.values.get(key, (None, 0))
        if operation.kind is Kind.COMPARE_AND_SET and mod_revision != operation.expected:
            current = self.read(key)
            return Outcome(current.revision, False, current.value, current.mod_revision)
        if operation.kind is Kind.DELETE:
            if key in self.values:
                self.revision += 1
                del self.values[key]
            return Outcome(self.revision)
        self.revision += 1
        self.values[key] = (operation.value, self.revision)
        return Outcome(self.revision, True, operation.value, self.revision)
