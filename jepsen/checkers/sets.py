"""The set checker: of unique keys added, the last read must show every acknowledged one and no impossible one.

Weaker than replay but simpler: it shares no code with it and ignores revisions.
"""

from __future__ import annotations

from jepsen.checkers import Violation
from jepsen.history import History
from jepsen.ops import Put, Range, RangeResult


def check(history: History, prefix: str) -> list[Violation]:
    """Compare the elements of a set with the last whole read of it.

    Arguments:
        history: history to check.
        prefix: prefix of the elements' keys.
    """
    final = _final_read(history, prefix)
    if final is None:
        return [Violation("no final read", f"no client read all of {prefix} at the end")]
    fate = {op.request.key: (op, op.request.value) for op in history.operations if isinstance(op.request, Put)}
    found = []
    for key, (operation, value) in fate.items():
        if operation.kind == "ok" and key not in final:
            found.append(Violation("lost element", f"{key} was acknowledged and is gone", (operation.id,)))
        if operation.kind == "fail" and key in final:
            found.append(Violation("refused but done", f"{key} was refused for certain", (operation.id,)))
        if key in final and final[key] != value:
            found.append(Violation("wrong value", f"{key} holds {final[key]}", (operation.id,)))
    found += [Violation("phantom element", f"{key}, which no client added") for key in final if key not in fate]
    return found


def _final_read(history: History, prefix: str) -> dict[str, str] | None:
    """Return the last answered read of the range, if it was called after every add had ended."""
    ended = max((op.returned for op in history.operations if isinstance(op.request, Put)), default=0)
    for operation in reversed(history.operations):
        request, result = operation.request, operation.result
        whole = isinstance(request, Range) and request.key == prefix and request.end and not request.serializable
        if whole and isinstance(result, RangeResult) and operation.call >= ended:
            return {kv.key: kv.value for kv in result.kvs}
    return None
