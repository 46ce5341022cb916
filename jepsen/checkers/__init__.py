"""The checkers of histories. Each is a function from a history to a list of ``Violation``; none trusts another's
reading.

Owns what is promised, and how a breach shows in what clients saw:

    replay   the run again, in the order of its revisions, with a model of the store (``model``)     sound and complete
    linear   each key on its own, by search for an order, believing values and times only
    append   list-append transactions, by cycles of dependency (``cycles``)
    watch    streams against the replayed store               lease    ends of leases against the clients' clocks
    lock     holders and leaders against the replayed store   sets     what was added against the last read
    members  members against each other, and each against what it showed before
    logs     what members wrote against what they never have a reason to write

    history (operations, streams, faults, the store read back)
          |                |                  |
        replay ---------> watch, lock, lease  linear, append, sets, members, logs
          |                |                  |
          +----------------+------------------+--> Verdict (``jepsen.checker``): violations by checker

Laws: a checker that cannot decide reports that; where a time is known only as an interval, the checker takes the end of
it that acquits the server; a violation names its rule and the operations concerned; every rule is broken by hand in
``tests/jepsen`` and reported there.

Example::

    from jepsen.checkers import linear
    for violation in linear.check(history.load(path)): print(violation)

Left out: what a workload means (``jepsen.workloads``), and which checkers look at a history (``jepsen.checker``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken promise: the rule, what was seen, and the ids of the operations concerned."""

    rule: str
    text: str
    operations: tuple[int, ...] = ()

    def __str__(self) -> str:
        ids = f" (operations {', '.join(map(str, self.operations))})" if self.operations else ""
        return f"{self.rule}: {self.text}{ids}"
