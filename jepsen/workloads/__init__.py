"""The workloads: what clients ask, and what is checked beyond the common checkers. One workload a file."""

from __future__ import annotations

from collections.abc import Callable

from jepsen.workloads.append import Append
from jepsen.workloads.base import Workload
from jepsen.workloads.election import Election
from jepsen.workloads.lease import Lease
from jepsen.workloads.lock import LockedLists
from jepsen.workloads.mixed import Mixed
from jepsen.workloads.register import Register
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
}
