"""The workloads: what clients ask, and what is checked beyond the common checkers. One workload a file.

Owns the requests of a run. A workload is a class with ``step`` (the next request of a client), ``finish`` (last reads)
and ``checkers``; ``companions``, if it has any, are tasks beside the load, such as watchers.

    register, set, append, txn, mixed    keys          checked by replay and search; append by cycles, set by its own
    watch                                streams       of watchers on every member, compared with the replayed store
    lease                                leases        granted, renewed, revoked, forsaken; ends by the clients' clocks
    lock, election                       recipes       who held, who led, and what was lost without a fence
    roster                               members       changed by several at once; compared with the lists read since

Laws: a value is written once in a run (``Client.fresh_value``), because the checkers find requests by it; a txn that
deletes also puts; no key's history grows long (``Rotation``), because search takes time that grows steeply with it.

Example::

    workload = WORKLOADS["register"]()
    await workload.step(client)
    verdict = check_history(history, workload.checkers)

Left out: how fast clients ask and when they stop (``jepsen.runner``).
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
    "register": Register,
    "set": Set,
    "append": Append,
    "txn": Transactions,
    "mixed": Mixed,
    "watch": Watch,
    "lease": Lease,
    "lock": LockedLists,
    "election": Election,
    "roster": Roster,
}
