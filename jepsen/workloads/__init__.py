"""The workloads: the requests of clients, and checks beyond the common checkers. One workload per file.

A workload is a class with ``step`` (sends the next request of a client), ``finish`` (last reads) and ``checkers``; its
optional ``companions`` are tasks beside the load, such as watchers.

    register, set, append, txn, mixed    keys          checked by replay and search; append and set have a checker each
    watch                                streams       watchers on every member, compared with the replayed store
    lease                                leases        granted, renewed, revoked, abandoned; ends by the clients' clocks
    lock, election                       recipes       holders, leaders, and updates lost without a fence
    roster                               members       concurrent changes by several operators, compared with lists

Invariants: a value is written once in a run (``Client.fresh_value``), because the checkers identify requests by it; a
txn that deletes also puts; no key's history grows long (``Rotation``), because the time of the search grows steeply
with it.

Example::

    workload = WORKLOADS["register"]()
    await workload.step(client)
    verdict = check_history(history, workload.checkers)

Not here: the clients' rate and the end of the run (``jepsen.runner``).
"""

from __future__ import annotations

from collections.abc import Callable

from jepsen.workloads.append import Append
from jepsen.workloads.base import Workload
from jepsen.workloads.election import Election
from jepsen.workloads.lease import Lease
from jepsen.workloads.lock import LockedLists
from jepsen.workloads.mixed import Mixed
from jepsen.workloads.register import Register
from jepsen.workloads.roster import Roster
from jepsen.workloads.set import Set
from jepsen.workloads.txn import Transactions
from jepsen.workloads.watch import Watch

WORKLOADS: dict[str, Callable[[], Workload]] = {
    "register": Register, "set": Set, "append": Append, "txn": Transactions, "mixed": Mixed, "watch": Watch,
    "lease": Lease, "lock": LockedLists, "election": Election, "roster": Roster,
}  # fmt: skip
