"""Handshakes under way on a server: few of their steps are done in one turn, and the unfinished ones are bounded.

A step of a handshake costs up to some milliseconds of the processor, whoever asks for it, and an unfinished one costs
memory. So steps are done in the order in which their bytes came, ``STEPS_A_TURN`` at a time, and beyond
``unfinished_handshakes`` the oldest goes: honest ones take milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from raftkv.loop.limiter import Paced
from raftkv.rpc.tls import RefusedPeerError

STEPS_A_TURN: Final = 8
"""A signature with an RSA key of 4096 bits takes 4 ms, all else far less."""


class Handshake(Protocol):
    """A connection that has not finished its handshake."""

    def give_up(self, error: Exception) -> None:
        """End it.

        Arguments:
            error: why.
        """


class Handshakes:
    """Those of one server.

    Arguments:
        unfinished_max: connections that may be between accept and the end of their handshake.
    """

    def __init__(self, unfinished_max: int) -> None:
        self._max = unfinished_max
        self._unfinished: dict[Handshake, None] = {}
        self._steps = Paced(STEPS_A_TURN)

    def __len__(self) -> int:
        return len(self._unfinished)

    def add(self, handshake: Handshake) -> None:
        """Count a new connection; the oldest goes if there are too many."""
        self._unfinished[handshake] = None
        if len(self._unfinished) > self._max:
            oldest = next(iter(self._unfinished))
            del self._unfinished[oldest]
            oldest.give_up(RefusedPeerError(f"more than {self._max} handshakes are unfinished, and this is the oldest"))

    def take_turn(self, step: Callable[[], None]) -> None:
        """Do a step of a handshake when it is its turn.

        Arguments:
            step: does nothing if its handshake is over by then.
        """
        self._steps.add(step)

    def done(self, handshake: Handshake) -> bool:
        """Forget it: it is finished, or has failed; False if it was forgotten already."""
        return self._unfinished.pop(handshake, self) is None
