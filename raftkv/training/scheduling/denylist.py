"""Hosts that keep breaking a run are left out for a while.

::

    denylist = Denylist.of(control, config)
    await denylist.refresh()
    cause = root_cause(reported)                               # when all of a broken generation have reported
    if cause is not None:
        await denylist.strike(cause)                           # the third within the window denies the host
    left_out = pardon(hosts_of_candidates, denylist.denied, min_nodes)
    denylist.why("host-7")                                     # for the nodes that are left out

Of all that is reported of a generation only one thing is its cause: when a worker dies, its peers fail in their
collectives a moment later, and they are not to blame. ``root_cause`` finds it, and only its host gets a strike.

Strikes and denials are keys with leases of ``fault_window_s`` and ``fault_cooldown_s`` without keep-alives: the
members of the cluster time them, and no two machines' clocks are ever compared. Their place:

    /raftkv/train/<run id>/deny/<host>            the host is left out while the key is there
    /raftkv/train/<run id>/strike/<host>/<id>     one fault, counted once however often it is reported

Runs that share a cluster share them, below ``/raftkv/train-cluster/<cluster>/``: a host that broke one run's generation
is known to all. A strike that is still there when a denial ends counts on: such a host is on probation.

A denial yields when the run could not run at all: if fewer than ``min_nodes`` nodes are left otherwise, denied hosts
are let in until there are as many, and no more. Waiting for the end of the cooldown would cost more than another fault,
and a node that comes later takes the denied one's place at the next generation.
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
from raftkv.training.callbacks import Callbacks
from raftkv.training.config import RunConfig
from raftkv.training.records import Fault, RunKeys, TrainingRecord, check_cluster
from raftkv.training.scheduling.admission import ClusterKeys

_STOPPED: Final = frozenset(("SIGTERM", "SIGINT", "SIGHUP"))
"""Signals with which an agent or a person asks a worker to stop."""

_STOPPED_CODES: Final = frozenset((128 + 15, 128 + 2, 128 + 1))
"""The same, told by a shell."""

_ABORTED: Final = "SIGABRT"
"""NCCL's watchdog ends workers so whose peer is gone: as weak a hint as an exit code."""

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
    """Find what began the end of a generation.

    Out of memory goes before a signal, a signal before the loss of a node, that before an exit code, and an exit code
    before one whose message speaks of a failed collective; among equals the first that was reported. Workers that were
    asked to stop, and nodes that left, are no cause.

    Arguments:
        faults: all that was reported of the generation.
    """
    told = [(_weakness(each.fault), each.revision, each.fault) for each in faults]
    causes = [each for each in told if each[0] < _NEVER]
    return min(causes, key=lambda each: each[:2])[2] if causes else None


def blames_host(fault: Fault) -> bool:
    """Tell whether a cause says something of the host: a failed collective alone says that a peer is gone."""
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
    """Decide who stays denied, if the run is to have its minimum.

    Arguments:
        hosts: of all nodes that could take part, one each, in the order of preference.
        denied: hosts.
        min_nodes: if fewer nodes are left, denied hosts are let in, the preferred first, until there are as many.
    """
    nodes = Counter(hosts)
    left = sum(count for host, count in nodes.items() if host not in denied)
    still = set(denied)
    if sum(nodes.values()) < min_nodes:
        return frozenset(still)  # it cannot run anyway
    for host, count in nodes.items():
        if left < min_nodes and host in still:
            still.discard(host)
            left += count
    return frozenset(still)


# ---- strikes and denials


@dataclass(frozen=True, slots=True)
class Denial(TrainingRecord):
    """Why a host is left out.

    Attributes:
        host: its name.
        run: whose fault was the last.
        reason: for people.
        cooldown_s: how long, from when it was written.
        time: the writer's clock, for people.
    """

    NAME: ClassVar[str] = "denial"
    host: str
    run: str = ""
    reason: str = ""
    cooldown_s: int = 0
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class FaultLimits:
    """When a host is left out: ``limit`` faults within ``window_s``, for ``cooldown_s``. A limit of 0: never."""

    limit: int
    window_s: int
    cooldown_s: int


@dataclass(frozen=True, slots=True)
class DenyKeys:
    """Where strikes and denials are kept: below a run, or below the cluster that runs share."""

    base: str

    @classmethod
    def of(cls, run_id: str, cluster: str) -> DenyKeys:
        """Make those of a run.

        Arguments:
            run_id: of the run.
            cluster: that it shares with others; empty: none.
        """
        return cls(ClusterKeys(check_cluster(cluster)).base if cluster else RunKeys(run_id).base)

    @property
    def denials(self) -> str:
        """Prefix of the hosts that are left out."""
        return f"{self.base}deny/"

    def strikes(self, host: str) -> str:
        """Prefix of a host's faults."""
        return f"{self.base}strike/{host}/"

    def strike(self, run_id: str, fault: Fault) -> str:
        """Return the key of one fault: the same for every reporter and every repetition.

        Arguments:
            run_id: in which it happened.
            fault: the root cause.
        """
        name = f"{run_id}\n{fault.generation}\n{fault.key}"
        return f"{self.strikes(fault.host)}{hashlib.sha256(name.encode()).hexdigest()[:16]}"


class Denylist:
    """The hosts that are left out, kept current by a watch; one for each arbiter.

    Arguments:
        control: the store.
        run_id: of the run.
        keys: where.
        limits: when.
    """

    def __init__(self, control: Control, run_id: str, keys: DenyKeys, limits: FaultLimits) -> None:
        self._control = control
        self._run_id = run_id
        self._keys = keys
        self._limits = limits
        self._denials: dict[str, str] = {}
        self._reflector = Reflector(control, below(keys.denials), self._on_denials)
        self._is_started = False
        self._callbacks: Callbacks[[]] = Callbacks()

    @classmethod
    def of(cls, control: Control, config: RunConfig) -> Denylist:
        """Make the denylist that a run is configured for.

        Arguments:
            control: the store.
            config: of a node of the run.
        """
        limits = FaultLimits(config.fault_limit, config.fault_window_s, config.fault_cooldown_s)
        return cls(control, config.run_id, DenyKeys.of(config.run_id, config.cluster), limits)

    @property
    def denied(self) -> frozenset[str]:
        """Hosts that are left out, as of the last refresh and all changes since."""
        return frozenset(self._denials)

    def why(self, host: str) -> str:
        """Explain why a host is left out, in one line; empty: it is not."""
        return self._denials.get(host, "")

    async def refresh(self) -> None:
        """Wait until what is denied is known and kept current. Call it before a decision."""
        if self._limits.limit == 0:
            return
        if not self._is_started:
            self._is_started = True
            self._reflector.start()
        await self._reflector.ready()

    async def strike(self, fault: Fault) -> bool:
        """Count a root cause against its host, once; True: the host is left out from now on.

        Arguments:
            fault: one that says nothing of its host, as a worker that was asked to stop, is not counted.

        Raises:
            StatusError: the store did not answer; repeat it.
        """
        if self._limits.limit == 0 or not blames_host(fault):
            return False
        key, strikes = self._keys.strike(self._run_id, fault), self._keys.strikes(fault.host)
        denial = f"{self._keys.denials}{fault.host}"
        while True:
            answer = await self._control.txn((), (GetRange(strikes, prefix=True, keys_only=True), Get(denial)))
            known, denied = answer.results
            if denied is not None or any(item.key == key.encode() for item in known):
                return False
            # Strikes that end meanwhile do not count: the condition sees only those that come.
            unchanged = mod_revision(strikes, prefix=True) < answer.revision + 1
            guards: list[Compare] = [unchanged, version(denial) == 0]
            is_last: bool = known.count + 1 >= self._limits.limit
            puts: list[Operation] = [Put(key, fault.encode(), await self._control.grant_fixed(self._limits.window_s))]
            if is_last:
                lease = await self._control.grant_fixed(self._limits.cooldown_s)
                puts.append(Put(denial, self._denial(fault, known.count + 1).encode(), lease))
            if (await self._control.txn(guards, puts)).succeeded:
                if is_last:
                    self._denials[fault.host] = self._denial(fault, known.count + 1).reason
                return is_last

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have a function called, on the loop, when ``denied`` has changed; returns how to end that."""
        return self._callbacks.add(callback)

    def close(self) -> None:
        """Watch no more."""
        self._reflector.close()

    def _denial(self, fault: Fault, count: int) -> Denial:
        limits = self._limits
        faults = f"{count} faults within {limits.window_s} s" if count > 1 else "a fault"
        reason = f"host {fault.host} is left out for {limits.cooldown_s} s after {faults}, the last: {fault}"
        return Denial(fault.host, self._run_id, reason, limits.cooldown_s, time.time())

    def _read(self, key: bytes, value: bytes) -> tuple[str, str]:
        host = key.decode(errors="replace").removeprefix(self._keys.denials)
        return host, read_denial(host, value).reason

    def _on_denials(self, changes: Sequence[Event]) -> None:
        for event in changes:
            host, reason = self._read(event.key, event.value)
            if event.type == PUT:
                self._denials[host] = reason
            else:
                self._denials.pop(host, None)
        self._callbacks.call()


def read_denial(host: str, value: bytes) -> Denial:
    """Decode the record of a denied host; a key with another value, as an operator writes it, denies as well.

    Arguments:
        host: its name.
        value: of its key.
    """
    try:
        return Denial.decode(value)
    except RecordError:
        text = value.decode(errors="replace")
        return Denial(host, reason=f"host {host} is left out{': ' if text else ''}{text}")
