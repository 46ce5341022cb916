"""What a row is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from bench.hostile.attacker import Attacker

Act = Callable[[Attacker], Awaitable[None]]


async def nothing(attacker: Attacker) -> None:
    """No preparation."""


@dataclass(frozen=True)
class Row:
    """One hostile thing to do.

    Attributes:
        name: for ``--row``.
        what: it does, for people, at full scale.
        attack: one round of it.
        prepare: what must be there before; not measured.
        repeats: whether rounds follow each other until the time is over; False: once.
        programs: that can do it.
        restarts: measure the restart of a member afterwards.
        users: it needs a cluster that asks for users; attacker and honest client are root then.
    """

    name: str
    what: str
    attack: Act
    prepare: Act = nothing
    repeats: bool = True
    programs: tuple[str, ...] = ("etcd", "raftkv")
    restarts: bool = False
    users: bool = False
