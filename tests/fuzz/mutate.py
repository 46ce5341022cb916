"""Inputs made from valid ones: cut, joined, flipped, lengthened, with numbers at the edges of their types.

Half of the changes know nothing of the format. The others keep length-delimited fields of protobuf whole, write absurd
lengths where a length may be, and insert tokens of the target, so that more than the first check of a parser is met.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from random import Random

SIZE_MAX = 64 * 1024
"""Inputs are not made longer than this."""

NUMBERS = (
    0, 1, 2, 3, 5, 7, 16, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1,
)  # fmt: skip
COMMON = (
    b"", b"\0", b"\xff", b"\0" * 8, b"\xff" * 8, b"a", b"\r\n", b"\n", b" ", b'"', b"{", b"[", b"]" * 40, b"=", b",",
)  # fmt: skip
COMMON += (
    b"-1",
    b"0x",
    b"1e999",
    b"NaN",
    b"\xc3\x28",
    b"\xed\xa0\x80",
    b"../",
    b"%00",
    b"%zz",
    b"[" * 200,
    b'{"a":' * 50,
)


def varint(number: int) -> bytes:
    """A number as protobuf writes it."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*out, number))


class Mutator:
    """Makes inputs from a corpus, which grows with what was worth keeping."""

    def __init__(self, rng: Random, samples: Sequence[bytes], tokens: Sequence[bytes]) -> None:
        self._rng = rng
        self._corpus = list(samples) or [b""]
        self._tokens = (*COMMON, *tokens, *tokens, *tokens)
        self._changes: tuple[Callable[[bytes], bytes], ...] = (
            self._flip, self._byte, self._cut, self._repeat, self._insert, self._token, self._number, self._number,
            self._splice, self._length, self._field, self._ascii_number,
        )  # fmt: skip

    def keep(self, data: bytes) -> None:
        """Make further inputs from this one too."""
        self._corpus.append(data)

    def make(self) -> bytes:
        """An input."""
        data = self._rng.choice(self._corpus)
        for _ in range(self._rng.choice((1, 1, 1, 2, 2, 3, 5, 12))):
            data = self._rng.choice(self._changes)(data)
        return data[:SIZE_MAX]

    def _at(self, data: bytes) -> int:
        return self._rng.randrange(len(data) + 1)

    def _flip(self, data: bytes) -> bytes:
        changed = bytearray(data or b"\0")
        changed[self._rng.randrange(len(changed))] ^= 1 << self._rng.randrange(8)
        return bytes(changed)

    def _byte(self, data: bytes) -> bytes:
        changed = bytearray(data or b"\0")
        changed[self._rng.randrange(len(changed))] = self._rng.choice(
            (0, 1, 0x7F, 0x80, 0xFF, self._rng.randrange(256))
        )
        return bytes(changed)

    def _cut(self, data: bytes) -> bytes:
        start, end = sorted((self._at(data), self._at(data)))
        return data[:start] + data[end:] if self._rng.random() < 0.7 else data[:start]

    def _repeat(self, data: bytes) -> bytes:
        start, end = sorted((self._at(data), self._at(data)))
        times = self._rng.choice((1, 1, 2, 30, 1000))
        return data[:end] + data[start:end] * min(times, SIZE_MAX // max(1, end - start)) + data[end:]

    def _insert(self, data: bytes) -> bytes:
        at = self._at(data)
        return data[:at] + self._rng.randbytes(self._rng.choice((1, 2, 8, 40))) + data[at:]

    def _token(self, data: bytes) -> bytes:
        at, token = self._at(data), self._rng.choice(self._tokens)
        over = self._rng.choice((0, len(token)))
        return data[:at] + token + data[at + over :]

    def _number(self, data: bytes) -> bytes:
        number, at = self._rng.choice(NUMBERS), self._at(data)
        kind = self._rng.choice(["<B", ">H", "<H", ">I", "<I", ">Q", "<Q", "v"])
        piece = varint(number) if kind == "v" else struct.pack(kind, number % (1 << 8 * struct.calcsize(kind)))
        return data[:at] + piece + data[at + len(piece) :]

    def _ascii_number(self, data: bytes) -> bytes:
        digits = [at for at, byte in enumerate(data) if 0x30 <= byte <= 0x39]
        if not digits:
            return data
        at = self._rng.choice(digits)
        number = self._rng.choice((*NUMBERS, -1, -(2**63), 10**40))
        return data[:at] + str(number).encode() + data[at + 1 :]

    def _splice(self, data: bytes) -> bytes:
        other = self._rng.choice(self._corpus)
        return data[: self._at(data)] + other[self._at(other) :]

    def _length(self, data: bytes) -> bytes:
        """Another number where a small one stands: most lengths and tags are below 0x80."""
        small = [at for at, byte in enumerate(data[:4096]) if byte < 0x80]
        if not small:
            return data
        at = self._rng.choice(small)
        return data[:at] + varint(self._rng.choice(NUMBERS)) + data[at + 1 :]

    def _field(self, data: bytes) -> bytes:
        """Take a length-delimited field of protobuf, and put it elsewhere or wrap it in another."""
        fields = [at for at in range(len(data) - 1) if data[at] & 7 == 2 and at + 2 + data[at + 1] <= len(data)]
        if not fields:
            return data
        at = self._rng.choice(fields)
        field = data[at : at + 2 + data[at + 1]]
        if self._rng.random() < 0.4:
            for _ in range(self._rng.choice((1, 3, 60, 120))):
                field = bytes((data[at],)) + varint(len(field)) + field
        to = self._rng.choice((at, len(data), self._rng.choice(fields)))
        return data[:to] + field + data[to:]
