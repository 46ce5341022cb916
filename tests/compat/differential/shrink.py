"""Make a failing history small: fewer requests, then simpler ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

Step = TypeVar("Step", bound=Any)
Fails = Callable[[list[Step]], bool]
SIMPLIFIED_MAX = 20  # a history longer than this was not understood; simpler requests would not help


def shrink(history: Sequence[Step], fails: Fails[Step], time_max_s: float = 60.0) -> list[Step]:
    """Return a shorter history that still fails; stop after about `time_max_s`."""
    budget = _Budget(fails, time_max_s)
    return _simplify(_drop_blocks(list(history), budget), budget)


class _Budget:
    """Once the time is used up nothing "fails" any more, so that shrinking ends where it is."""

    def __init__(self, fails: Fails[Any], time_max_s: float) -> None:
        self._fails = fails
        self._deadline = time.monotonic() + time_max_s

    def fails(self, requests: list[Any]) -> bool:
        return time.monotonic() < self._deadline and self._fails(requests)


def _drop_blocks(requests: list[Step], budget: _Budget) -> list[Step]:
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


def _simplify(requests: list[Step], budget: _Budget) -> list[Step]:
    if len(requests) > SIMPLIFIED_MAX:
        return requests
    for index in reversed(range(len(requests))):
        requests = _simplify_one(requests, index, budget)
    return requests


def _simplify_one(requests: list[Step], index: int, budget: _Budget) -> list[Step]:
    progress = True
    while progress:
        progress = False
        for simpler in simpler_forms(requests[index].request):
            changed = [*requests[:index], replace(requests[index], request=simpler), *requests[index + 1 :]]
            if budget.fails(changed):
                requests = changed
                progress = True
                break
    return requests


def simpler_forms(message: Any) -> Iterator[Any]:
    """Yield copies of `message`, each with one field or one element less, at any depth; none of None."""
    if message is None:
        return
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
