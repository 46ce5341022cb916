"""The checkers of histories. Each is a function from a history to a list of ``Violation``; none depends on another's
interpretation.

They define the guarantees, and how a violation shows in what clients saw:

    replay   replays the run in revision order on a model of the store (``model``)                   sound and complete
    linear   each key separately, by search for an order, based only on values and times
    append   list-append transactions, by cycles of dependency (``cycles``)
    watch    streams against the replayed store               lease    ends of leases against the clients' clocks
    lock     holders and leaders against the replayed store   sets     the added elements against the last read
    members  members against each other, and each against its own earlier state
    logs     log lines that a member must never write

    history (operations, streams, faults, the store read back)
          |                |                  |
        replay ---------> watch, lock, lease  linear, append, sets, members, logs
          |                |                  |
          +----------------+------------------+--> Verdict (``jepsen.checker``): violations by checker

Invariants: a checker that cannot decide reports this; where a time is known only as an interval, the checker uses the
bound that favours the server; a violation names its rule and the operations concerned; for every rule, a test in
``tests/jepsen`` breaks it by hand and expects the report.

Example::

    from jepsen.checkers import linear
    for violation in linear.check(history.load(path)): print(violation)

Not here: the meaning of a workload (``jepsen.workloads``), and which checkers check a history (``jepsen.checker``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Violation:
    """One violated guarantee: the rule, the observation, and the ids of the operations concerned."""

    rule: str
    text: str
    operations: tuple[int, ...] = ()

    def __str__(self) -> str:
        ids = f" (operations {', '.join(map(str, self.operations))})" if self.operations else ""
        return f"{self.rule}: {self.text}{ids}"
