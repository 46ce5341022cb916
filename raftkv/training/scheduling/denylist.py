"""Denylist: hosts that keep causing faults are excluded for a while.

::

    denylist = Denylist(control, config)
    await denylist.refresh()
    cause = root_cause(reported)                               # when all members of a generation have reported
    if cause is not None:
        await denylist.strike(cause)                           # the third within the window denies the host
    left_out = pardon(hosts_of_candidates, denylist.denied, min_nodes)
    denylist.why("host-7")                                     # message for the excluded nodes

Of all faults reported in a generation only one is the cause: when a worker dies, its peers fail in their collectives a
moment later. ``root_cause`` finds the cause, and only its host gets a strike.

Strikes and denials are keys with leases of ``fault_window_s`` and ``fault_cooldown_s`` without keep-alives, so the
members of the cluster time them and clocks of different machines are never compared. The keys:

    /raftkv/train/<run id>/deny/<host>            the host is denied while the key exists
    /raftkv/train/<run id>/strike/<host>/<id>     one fault, counted once even if it is reported several times

Runs of a cluster share these keys, below ``/raftkv/train-cluster/<cluster>/``, so a host that caused a fault in one run
is known to all. A strike that still exists when a denial ends still counts, so such a host is on probation.

A denial yields if the run could not run otherwise: if fewer than ``min_nodes`` nodes are left, denied hosts are
admitted until there are enough, and no more. Waiting for the end of the cooldown would cost more than another fault,
and a node that joins later replaces the denied one at the next generation.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from raftkv.client.control import Control, Reflector, below
from raftkv.client.operations import Compare, Get, GetRange, Operation, Put, mod_revision, version
from raftkv.client.records import RecordError
from raftkv.client.values import PUT, Event
from raftkv.training import records
from raftkv.training.config import RunConfig
from raftkv.training.records import Fault, RunKeys, TrainingRecord, check_cluster
from raftkv.training.scheduling.admission import ClusterKeys

_STOPPED: Final = frozenset(("SIGTERM", "SIGINT", "SIGHUP"))
"""Signals with which an agent or a user asks a worker to stop."""

_STOPPED_CODES: Final = frozenset((128 + 15, 128 + 2, 128 + 1))
"""Exit codes of a shell for these signals."""

_ABORTED: Final = "SIGABRT"
"""NCCL's watchdog aborts workers whose peer is gone, so this is as weak a hint as an exit code."""

_LOST: Final = frozenset((records.HEARTBEAT_LOST, records.DISCONNECTED, records.PARTITION))

_PEER_WORDS: Final = (
    "connection closed by peer", "connection reset by peer", "connection refused", "broken pipe", "socket closed",
    "ncclremoteerror", "ncclsystemerror", "nccl communicator was aborted", "watchdog caught collective",
    "gloo", "distbackenderror", "distnetworkerror", "timed out waiting",
)  # fmt: skip
"""Words in the messages of workers whose collective failed because a peer is gone."""

_NEVER: Final = 9


# ---- whose fault it was


@dataclass(frozen=True, slots=True)
class Reported:
    """A fault, and the revision at which it was reported."""

    fault: Fault
    revision: int


def root_cause(faults: Iterable[Reported]) -> Fault | None:
    """Return the fault that caused the end of a generation; None: there is no such fault.

    The order is: out of memory, a signal, the loss of a node, an exit code, an exit code with a message about a failed
    collective; among equals the first reported fault. Workers that were asked to stop, and nodes that left, are not a
    cause.

    Arguments:
        faults: all faults reported in the generation.
    """
    told = [(_weakness(each.fault), each.revision, each.fault) for each in faults]
    causes = [each for each in told if each[0] < _NEVER]
    return min(causes, key=lambda each: each[:2])[2] if causes else None


def blames_host(fault: Fault) -> bool:
    """Return whether a cause speaks against the host; a failed collective only says that a peer is gone."""
    return bool(fault.host) and _weakness(fault) < _NEVER and not _speaks_of_a_peer(fault)


def _weakness(fault: Fault) -> int:
    """Return how weak a hint a fault is."""
    if fault.cause == records.OUT_OF_MEMORY:
        return 0
    if fault.cause == records.SIGNAL and fault.signal not in _STOPPED:
        return 3 + _speaks_of_a_peer(fault) if fault.signal == _ABORTED else 1
    if fault.cause in _LOST:
        return 2
    if fault.cause == records.EXIT and fault.exit_code not in _STOPPED_CODES:
        return 3 + _speaks_of_a_peer(fault)
    return _NEVER


def _speaks_of_a_peer(fault: Fault) -> bool:
    weak = fault.cause == records.EXIT or fault.signal == _ABORTED
    return weak and any(word in fault.message.lower() for word in _PEER_WORDS)


# ---- who takes part nevertheless


def pardon(hosts: Iterable[str], denied: Collection[str], min_nodes: int) -> frozenset[str]:
    """Return the hosts that stay denied so that the run still has its minimum.

    Arguments:
        hosts: host of each candidate node, in the order of preference.
        denied: denied hosts.
        min_nodes: if fewer nodes are left, denied hosts are admitted, preferred ones first, until there are enough.
    """
    nodes = Counter(hosts)
    left = sum(count for host, count in nodes.items() if host not in denied)
    still = set(denied)
    if sum(nodes.values()) < min_nodes:
        return frozenset(still)  # the run cannot run anyway
    for host, count in nodes.items():
        if left < min_nodes and host in still:
            still.discard(host)
            left += count
    return frozenset(still)


# ---- strikes and denials


@dataclass(frozen=True, slots=True)
class Denial(TrainingRecord):
    """Why a host is denied.

    Attributes:
        host: host name.
        run: run with the last fault.
        reason: human-readable reason.
        cooldown_s: duration, from when it was written.
        time: the writer's clock, for people.
    """

    NAME: ClassVar[str] = "denial"
    host: str
    run: str = ""
    reason: str = ""
    cooldown_s: int = 0
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class DenyKeys:
    """The keys of strikes and denials: below a run, or below the cluster that runs share."""

    base: str

    @classmethod
    def of(cls, run_id: str, cluster: str) -> DenyKeys:
        """Return the keys for a run.

        Arguments:
            run_id: run id.
            cluster: cluster whose slots it shares; empty: none.
        """
        return cls(ClusterKeys(check_cluster(cluster)).base if cluster else RunKeys(run_id).base)

    @property
    def denials(self) -> str:
        """Prefix of the denied hosts."""
        return f"{self.base}deny/"

    def strikes(self, host: str) -> str:
        """Prefix of a host's faults."""
        return f"{self.base}strike/{host}/"

    def strike(self, run_id: str, fault: Fault) -> str:
        """Return the key of one fault: the same for every reporter and every repetition.

        Arguments:
            run_id: run in which it happened.
            fault: the root cause.
        """
        name = f"{run_id}\n{fault.generation}\n{fault.key}"
        return f"{self.strikes(fault.host)}{hashlib.sha256(name.encode()).hexdigest()[:16]}"


class Denylist:
    """The denied hosts, kept current by a watch; one for each arbiter.

    Arguments:
        control: the store.
        config: configuration of a node of the run.
        on_change: called, on the loop, when ``denied`` has changed.
    """

    def __init__(self, control: Control, config: RunConfig, on_change: Callable[[], None] = lambda: None) -> None:
        self._control = control
        self._config = config
        self._keys = DenyKeys.of(config.run_id, config.cluster)
        self._denials: dict[str, str] = {}
        self._reflector = Reflector(control, below(self._keys.denials), self._on_denials)
        self._is_started = False
        self._on_change = on_change

    @property
    def denied(self) -> frozenset[str]:
        """Denied hosts, as of the last refresh and all changes since."""
        return frozenset(self._denials)

    def why(self, host: str) -> str:
        """Return why a host is denied, in one line; empty: it is not."""
        return self._denials.get(host, "")

    async def refresh(self) -> None:
        """Wait until the denied hosts are known and followed. Call this before a decision."""
        if self._config.fault_limit == 0:
            return
        if not self._is_started:
            self._is_started = True
            self._reflector.start()
        await self._reflector.ready()

    async def strike(self, fault: Fault) -> bool:
        """Count a root cause against its host, once; True: the host is denied from now on.

        Arguments:
            fault: root cause; not counted if it does not speak against its host, like a worker that was asked to stop.

        Raises:
            StatusError: the store did not answer; repeat it.
        """
        if self._config.fault_limit == 0 or not blames_host(fault):
            return False
        key, strikes = self._keys.strike(self._config.run_id, fault), self._keys.strikes(fault.host)
        denial = f"{self._keys.denials}{fault.host}"
        while True:
            answer = await self._control.txn((), (GetRange(strikes, prefix=True), Get(denial)))
            found, denied = answer.results
            known = [item for item in found if item.lease]  # one without a lease would count for ever
            if denied is not None or any(item.key == key.encode() for item in known):
                return False
            # Strikes that end meanwhile still count: the condition only detects new strikes.
            unchanged = mod_revision(strikes, prefix=True) < answer.revision + 1
            guards: list[Compare] = [unchanged, version(denial) == 0]
            is_last, window_s = len(known) + 1 >= self._config.fault_limit, self._config.fault_window_s
            puts: list[Operation] = [Put(key, fault.encode(), await self._control.grant_fixed(window_s))]
            told = self._denial(fault, len(known) + 1)
            if is_last:
                puts.append(Put(denial, told.encode(), await self._control.grant_fixed(told.cooldown_s)))
            if (await self._control.txn(guards, puts)).succeeded:
                if is_last:
                    self._denials[fault.host] = told.reason
                return is_last

    def close(self) -> None:
        """Stop watching."""
        self._reflector.close()

    def _denial(self, fault: Fault, count: int) -> Denial:
        cooldown_s = self._config.fault_cooldown_s
        faults = f"{count} faults within {self._config.fault_window_s} s" if count > 1 else "a fault"
        reason = f"host {fault.host} is left out for {cooldown_s} s after {faults}, the last: {fault}"
        return Denial(fault.host, self._config.run_id, reason, cooldown_s, time.time())

    def _on_denials(self, changes: Sequence[Event]) -> None:
        for event in changes:
            host = event.key.decode(errors="replace").removeprefix(self._keys.denials)
            if event.type == PUT:
                self._denials[host] = read_denial(host, event.value).reason
            else:
                self._denials.pop(host, None)
        self._on_change()


def read_denial(host: str, value: bytes) -> Denial:
    """Decode the record of a denied host; a key with another value, as an operator writes it, denies as well.

    Arguments:
        host: host name.
        value: value of the key.
    """
    try:
        return Denial.decode(value)
    except RecordError:
        text = value.decode(errors="replace")
        return Denial(host, reason=f"host {host} is left out{': ' if text else ''}{text}")
