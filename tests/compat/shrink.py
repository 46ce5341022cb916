"""Make a failing history small: fewer requests, then a simpler last request.

    small = shrink(requests, fails=lambda requests: ..., replays_max=200)

Delta debugging by halves: drop ever smaller blocks, keep what still fails. `fails` must replay the given
requests from an equal start on both stores and tell whether they still part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

History = list[Any]
Fails = Callable[[History], bool]


def shrink(requests: Sequence[Any], fails: Fails, replays_max: int = 200) -> History:
    """Return a shorter history that still fails, after at most `replays_max` replays."""
    budget = _Budget(fails, replays_max)
    return _simplify_last(_drop_blocks(list(requests), budget), budget)


class _Budget:
    """Counts replays; once they are used up, nothing "fails" any more, so that shrinking ends where it is."""

    def __init__(self, fails: Fails, replays_max: int) -> None:
        self._fails = fails
        self.replays_left = replays_max

    def fails(self, requests: History) -> bool:
        if self.replays_left == 0:
            return False
        self.replays_left -= 1
        return self._fails(requests)


def _drop_blocks(requests: History, budget: _Budget) -> History:
    size = len(requests) // 2
    while size >= 1:
        start = 0
        while start < len(requests) - 1:  # the last request is the one that shows the difference
            end = min(start + size, len(requests) - 1)
            shorter = requests[:start] + requests[end:]
            if budget.fails(shorter):
                requests = shorter
            else:
                start = end
        size //= 2
    return requests


def _simplify_last(requests: History, budget: _Budget) -> History:
    progress = True
    while progress:
        progress = False
        for simpler in simpler_forms(requests[-1]):
            if budget.fails([*requests[:-1], simpler]):
                requests = [*requests[:-1], simpler]
                progress = True
                break
    return requests


def simpler_forms(message: Any) -> Iterator[Any]:
    """Yield copies of `message`, each with one field or one element less, at any depth."""
    for descriptor, value in message.ListFields():
        if hasattr(value, "append"):
            for index in range(len(value)):
                copy = _copy(message)
                del getattr(copy, descriptor.name)[index]
                yield copy
                if descriptor.message_type is not None:
                    for part in simpler_forms(value[index]):
                        copy = _copy(message)
                        getattr(copy, descriptor.name)[index].CopyFrom(part)
                        yield copy
        else:
            copy = _copy(message)
            copy.ClearField(descriptor.name)
            yield copy
            if descriptor.message_type is not None:
                for part in simpler_forms(value):
                    copy = _copy(message)
                    getattr(copy, descriptor.name).CopyFrom(part)
                    yield copy


def _copy(message: Any) -> Any:
    copy = type(message)()
    copy.CopyFrom(message)
    return copy
