"""The Huffman code of HPACK (RFC 7541 section 5.2 and appendix B).

The code is canonical: it follows from the lengths of its codes, given here for all octets and the end of the string.
Decoding takes an octet a step in a table of the states that they lead through, which is made as it is used: what
clients send needs some hundred entries, and all 65,536 take 10 MB. Encoding is left out: what this end sends is short
or goes into the dynamic table, and plain octets cost no work.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

LENGTHS: Final = bytes.fromhex(
    "0d171c1c1c1c1c1c1c181e1c1c1e1c1c1c1c1c1c1c1c1e1c1c1c1c1c1c1c1c1c060a0a0c0d06080b0a0a080b080606060505050606060606"
    "060607080f060c0a0d06070707070707070707070707070707070707070707070807080d130d0e060f050605060506060605070706060605"
    "06070605050607070707070f0b0e0d1c14161414161616171617171717171817181816171817171717151617161717181615141616171715"
    "1716161815161717151516151716171714161616171616171a1a1413161716191a1a1a1b1b1a181913151a1b1b1a1b1815151a1a1c1b1b1b"
    "14181415161515171616191918181a171a1b1a1a1b1b1b1b1b1c1b1b1b1b1b1a1e"
)
"""Bits of the code of each octet, and of the end of a string (256)."""

END: Final = 256
LITTLE_PADDING_BITS: Final = 7
"""What fills the last octet is shorter than an octet."""


class HuffmanError(ValueError):
    """The octets are no string in this code."""


def codes() -> list[tuple[int, int]]:
    """Return the code of each symbol, and its length in bits."""
    found: list[tuple[int, int]] = [(0, 0)] * len(LENGTHS)
    code = before = 0
    for symbol in sorted(range(len(LENGTHS)), key=lambda one: (LENGTHS[one], one)):
        length = LENGTHS[symbol]
        code <<= length - before
        found[symbol] = (code, length)
        code, before = code + 1, length
    return found


@lru_cache(maxsize=1)
def _tree() -> tuple[list[list[int]], frozenset[int]]:
    """Return the code as a tree, of which nodes are states; and the states in which a string may end.

    There less than an octet of ones has come since the last symbol.
    """
    tree: list[list[int]] = [[-1, -1]]  # children: of an inner node its number, of a leaf -2 - symbol
    for symbol, (code, length) in enumerate(codes()):
        node = 0
        for bit in range(length - 1, 0, -1):
            side = code >> bit & 1
            if tree[node][side] < 0:
                tree.append([-1, -1])
                tree[node][side] = len(tree) - 1
            node = tree[node][side]
        tree[node][code & 1] = -2 - symbol
    accepting, node = [0], 0
    for _ in range(LITTLE_PADDING_BITS):
        node = tree[node][1]
        accepting.append(node)
    return tree, frozenset(accepting)


_steps: Final[dict[int, tuple[int, bytes]]] = {}
"""By state and octet: the next state, and what the octet completes."""


def _step(key: int) -> tuple[int, bytes]:
    """Follow the eight bits of an octet from a state, and remember where they lead."""
    tree, _ = _tree()
    state, octet, out = key >> 8, key & 0xFF, b""
    for bit in range(7, -1, -1):
        state = tree[state][octet >> bit & 1]
        if state == -2 - END:  # section 5.2
            raise HuffmanError("the end of a string within a string")
        if state < 0:
            out, state = out + bytes((-2 - state,)), 0
    _steps[key] = state, out
    return state, out


def decode(data: bytes) -> bytes:
    """Return the string that octets stand for.

    Raises:
        HuffmanError: they hold the end of a string, or are padded with more than 7 bits or with other bits than ones.
    """
    known = _steps.get
    state = 0
    out: list[bytes] = []
    for octet in data:
        key = state << 8 | octet
        step = known(key) or _step(key)
        state = step[0]
        out.append(step[1])
    if state and state not in _tree()[1]:
        raise HuffmanError("padding that is no beginning of the end of a string")
    return b"".join(out)
