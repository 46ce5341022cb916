"""Runs the arbiter: one node of the run sees all others, and writes what ``arbiter`` decides.

Owns the reflectors of ``node/`` and ``fault/``, and the writes that advance a run. Each write has the conditions that
``round``, ``state`` and ``arbiter`` are as this node has seen them, and that lost members have not come back meanwhile:

    break:  state = broken, and a fault for each lost member
    finish: state = closed
    begin:  round = the next generation, state = running and its changes; keys left by the generation before the last
            are deleted

A member that does not come back for a long time is evicted by one more write: its key is deleted, and a fault says why.

The ``arbiter`` key ends with its holder's lease; a key that is not under the lease of the node that it names is not
valid, and is taken over. A holder that was frozen or replaced can no longer decide. A decision whose answer was lost is
either seen by the watch or made again; the conditions keep it from happening twice. A decision that the store refuses
(a record that is too large, a user without permission) is repeated at increasing intervals, and waiting nodes learn
why.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Final
from zlib import crc32

from raftkv.client.control import RETRY_MAX_S, RETRY_MIN_S, Control, Reflector, below
from raftkv.client.operations import Compare, Delete, GetRange, Operation, Put, lease_of, mod_revision, version
from raftkv.client.records import RecordError, read
from raftkv.client.rpc.retry import Backoff, is_transient
from raftkv.client.values import DELETE, Event, KeyValue
from raftkv.errors import LeaseNotFoundError, StatusError
from raftkv.training.config import RunConfig
from raftkv.training.records import (
    BROKEN,
    CLOSED,
    HEARTBEAT_LOST,
    LEFT,
    RUNNING,
    SUCCEEDED,
    Fault,
    GenerationRecord,
    Member,
    Node,
    RunKeys,
)  # fmt: skip
from raftkv.training.rendezvous.arbiter import (
    SCALE_UP,
    Arbiter,
    Begin,
    Break,
    Decision,
    Evict,
    Finish,
    Present,
    View,
    new_state,
)
from raftkv.training.rendezvous.registration import Registration
from raftkv.training.rendezvous.world import RecordCache, new_head
from raftkv.training.scheduling.admission import ClusterKeys
from raftkv.training.scheduling.denylist import Denylist, Reported, pardon, root_cause
from raftkv.training.scheduling.ledger import ClusterAdmission

# -- eligibility ----------------------------------------------------------------------------------------------------
#
# What the arbiter checks before it advances a run: which hosts are excluded, and which slots of the cluster it may use.
#
# It connects ``ArbiterDriver``, which sees the nodes of the run, with two things that runs of a cluster share: the
# ``denylist`` and the cluster's ledger (``scheduling.ledger``).
#
# - Before a generation begins, the host that caused the end of the previous one gets its strike. So the third fault
#   of a host already excludes it from the next generation.
# - A run with ``cluster`` begins a generation, or ends one for new nodes, only with nodes whose slots it was granted.
#   While it waits, ``State.waits_for`` says why.
# - A running run writes its claim into the ledger again if an operator has deleted it.
# - A run that lost too many nodes to continue gives its slots back while it waits for more.
#
# The ledger and the denylist are asked again only after a change.

LOOK_AT_DAMAGE_S: Final = 1.0

_NEVER_ASKED: Final = ("",)


class Eligibility:
    """Which hosts a run may use, and how many of their slots.

    Arguments:
        control: the store.
        config: configuration of this node.
        is_arbiter: the condition under which this node decides.
        look: called, on the loop, when more nodes may be admitted.
    """

    def __init__(self, control: Control, config: RunConfig, is_arbiter: Compare, look: Callable[[], None]) -> None:
        self._run_id = config.run_id
        self._cluster = config.cluster
        self._is_arbiter = is_arbiter
        self._denylist = Denylist(control, config, look)
        self._admission: ClusterAdmission | None = None
        self._asked: tuple[str, ...] = _NEVER_ASKED
        self._granted: frozenset[str] = frozenset()
        self._counted = 0
        self._damage = ""
        if config.cluster:
            again, weight = self._ask_again, config.weight
            self._admission = ClusterAdmission(control, config.cluster, weight=weight, on_change=again)
        self._look = look

    def close(self) -> None:
        """Stop; the run keeps its granted slots."""
        self._denylist.close()
        if self._admission is not None:
            self._admission.close()

    @property
    def waits_for(self) -> str:
        """What the run waits for besides nodes; empty: nothing."""
        reason = self._damage or (self._admission.reason if self._admission is not None else "")
        return f"slots of cluster {self._cluster}: {reason}" if reason else ""

    # -- hosts that are left out

    async def refresh(self) -> None:
        """Read the denied hosts.

        Raises:
            StatusError: the store did not answer.
        """
        await self._denylist.refresh()

    def denied(self, view: View) -> frozenset[str]:
        """Return the hosts that are excluded from the next generation; ignores ``view.denied``."""
        if not self._denylist.denied:
            return frozenset()
        members = [present.node for member in view.round.members if (present := view.nodes.get(member.id))]
        inside = {node.id for node in members}
        others = [one.node for one in sorted(view.nodes.values(), key=lambda one: one.since)]
        hosts = [node.host for node in [*members, *(node for node in others if node.id not in inside)]]
        return pardon(hosts, self._denylist.denied, view.state.min_nodes)

    def left_out(self, view: View) -> dict[str, str]:
        """Return, for every host with a node that cannot take part, the reason."""
        if not view.denied:
            return {}
        there = {present.node.host for present in view.nodes.values()}
        return {host: self._denylist.why(host) for host in sorted(view.denied & there)}

    async def count_root_cause(self, generation: int, faults: Sequence[Reported]) -> bool:
        """Count the root cause of the end of a generation against its host, once; True: the host is now denied.

        Arguments:
            generation: generation that ended.
            faults: all faults reported in it.

        Raises:
            StatusError: the store did not answer; ask again.
        """
        if generation <= self._counted:
            return False
        cause = root_cause(faults)
        denied = cause is not None and await self._denylist.strike(cause)
        self._counted = generation
        return denied

    # -- slots

    async def admit(self, view: View, decision: Decision | None, arbiter: Arbiter, now: float) -> Decision | None:
        """Reduce a decision to the nodes for which the run has slots; None: the run waits.

        Arguments:
            view: what the decision was made on; its ``admitted`` is set.
            decision: decision of ``arbiter.decide``.
            arbiter: decides which admitted nodes are in the generation.
            now: as for ``decide``.

        Raises:
            StatusError: the store did not answer; ask again.
        """
        if self._admission is None or view.state.phase == CLOSED:
            return decision
        self._damage = ""
        try:
            return await self._admit(view, decision, arbiter, now)
        except RecordError as error:
            ledger = ClusterKeys(self._cluster).ledger
            self._damage = f"the ledger cannot be read ({error}); delete {ledger}, and every run claims its slots anew"
            arbiter.look_again_at = now + LOOK_AT_DAMAGE_S
            return None

    async def _admit(self, view: View, decision: Decision | None, arbiter: Arbiter, now: float) -> Decision | None:
        if isinstance(decision, Begin):
            view.admitted = await self._ask(view, [*view.survivors(), *view.newcomers()])
            return arbiter.begin(view)
        running = [present.node for member in view.round.members if (present := view.nodes.get(member.id))]
        if isinstance(decision, Break) and decision.cause == SCALE_UP:
            view.admitted = await self._ask(view, [*running, *view.newcomers()])
            return arbiter.decide(view, now)
        if decision is None and view.state.phase == RUNNING and self._asked == _NEVER_ASKED and not view.lost():
            await self._ask(view, running)  # the run continues in any case; this informs the other runs
        if decision is None and view.state.phase != RUNNING and arbiter.is_short and view.generation:
            await self._give_back(view)
        return decision

    async def _ask(self, view: View, candidates: Sequence[Node]) -> frozenset[str]:
        ids = tuple(node.id for node in candidates)
        if self._admission is not None and ids != self._asked:
            limits = view.state.min_nodes, view.state.max_nodes
            self._asked = ids  # before the call, so that a change during it asks again
            try:
                granted = await self._admission.request(self._run_id, candidates, *limits, [self._is_arbiter])
            except BaseException:
                self._asked = _NEVER_ASKED
                raise
            self._granted = frozenset(granted)
        return self._granted

    async def _give_back(self, view: View) -> None:
        if self._granted or self._asked == _NEVER_ASKED:
            await self._ask(view, [*view.survivors(), *view.newcomers()])

    def _ask_again(self) -> None:
        self._asked = _NEVER_ASKED
        self._look()


_log = logging.getLogger(__name__)

RETRY_S: Final = 0.05
AFTER_ERROR_S: Final = 1.0
REPORT_PROGRESS_S: Final = 1.0
NODES_TOLD_PER_S: Final = 1000
"""Maximum rate at which nodes receive reports of progress: each report goes to all nodes, and is only for people."""
PAUSE_PER_NODE_S: Final = 4e-6
"""Pause after each look at the nodes. A look takes about 1 us per node, and thousands of nodes that come back cause
hundreds of looks."""
FAULTS_MAX: Final = 64
"""Maximum lost members recorded by one decision; a txn has at most 128 operations."""
EVICTED_MAX: Final = 60
"""Maximum members evicted by one decision, with one fault each."""
_ANYTHING: Final = "it"
FAULT_GENERATIONS: Final = 16
"""Generations whose faults are kept for ``raftkvctl run show``; older faults are in the history of the store."""


class ArbiterDriver:
    """Carries out an arbiter's decisions; created when this node becomes the arbiter, closed when it stops being it.

    Arguments:
        control: the store.
        config: configuration of this node; all nodes of a run have the same limits.
        cache: the node's view of ``round`` and ``state``.
        revision: mod_revision of the ``arbiter`` key under which this node decides.
        postponed_until: see ``Arbiter``.

    Attributes:
        revision: as given.
    """

    def __init__(
        self, control: Control, config: RunConfig, cache: RecordCache, revision: int, postponed_until: float
    ) -> None:
        self._control = control
        self._keys = RunKeys(config.run_id)
        self._cache = cache
        self.revision = revision
        # Waiting nodes give up after the join timeout, so members that delay them must be evicted well before.
        self._return_timeout_s = min(config.return_timeout_s, config.join_timeout_s / 2)
        self._arbiter = Arbiter(
            config.last_call_timeout_s, config.expected_nodes, config.rank_policy, self._return_timeout_s
        )
        self._arbiter.postponed_until = postponed_until
        self._nodes: dict[str, Present] = {}
        self._faults: dict[bytes, tuple[int, Fault]] = {}
        self._is_loaded = False
        self._last_progress: tuple[float, object] = (-math.inf, None)
        self._finished = (0, frozenset[int]())
        self._refusal = ""
        self._asked = _ANYTHING
        self._backoff = Backoff(RETRY_S, AFTER_ERROR_S, jitter=0.0)
        self._wake = asyncio.Event()
        self._eligibility = Eligibility(control, config, mod_revision(self._keys.arbiter) == revision, self.look)
        self._all_faults = f"{self._keys.base}fault/"
        self._reflectors = (
            Reflector(control, below(self._keys.nodes), self._on_nodes),
            Reflector(control, below(self._all_faults), self._on_faults),
        )
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._task = self._loop.create_task(self._run())

    def close(self) -> None:
        """Stop deciding."""
        self._task.cancel()
        self._eligibility.close()
        for reflector in self._reflectors:
            reflector.close()
        if self._timer is not None:
            self._timer.cancel()

    def look(self) -> None:
        """Decide again after a change."""
        self._wake.set()

    def postpone_expiry(self, until: float) -> None:
        """Treat no member as lost before ``until``, because the store was unreachable."""
        self._arbiter.postponed_until = max(self._arbiter.postponed_until, until)
        self.look()

    # -- what is there

    async def _load(self) -> None:
        """Read all nodes and faults at one revision; from then on the reflectors keep them current."""
        reads = [GetRange(self._keys.nodes, prefix=True), GetRange(self._all_faults, prefix=True)]
        result = await self._control.txn((), reads)
        for reflector, page in zip(self._reflectors, result.results, strict=True):
            reflector.load(page, result.revision)
        self._is_loaded = True

    def _on_nodes(self, changes: Sequence[Event]) -> None:
        for event in changes:
            if event.type == DELETE or not event.kv.lease:  # without one it is no node's, and would stay for ever
                self._nodes.pop(self._name(event.key), None)
            else:
                self._put_node(event.kv)
        self.look()

    def _name(self, key: bytes) -> str:
        return key.decode(errors="surrogateescape").removeprefix(self._keys.nodes)

    def _on_faults(self, changes: Sequence[Event]) -> None:
        for event in changes:
            if event.type == DELETE:
                self._faults.pop(event.key, None)
            else:
                self._put_fault(event.kv)
        self.look()

    def _put_node(self, item: KeyValue) -> None:
        try:
            node = read(Node, item)
        except RecordError:
            return  # not written by a node, so it cannot be in a generation
        self._nodes[self._name(item.key)] = Present(node, item.create_revision, item.mod_revision)

    def _put_fault(self, item: KeyValue) -> None:
        try:
            self._faults[item.key] = (item.mod_revision, read(Fault, item))
        except RecordError:
            return

    def _view(self) -> View | None:
        state = self._cache.state
        if state is None or not all(reflector.is_following for reflector in self._reflectors):
            return None
        current = self._cache.round or GenerationRecord(0)
        faults = [reported.fault for reported in self._reported(current.generation)]
        nodes = {
            node_id: present
            for node_id, present in self._nodes.items()
            if (present.node.min_nodes, present.node.max_nodes) == (state.min_nodes, state.max_nodes)
        }
        view = View(current, state, nodes, faults)
        if self._finished[0] == current.generation:
            view.finished = self._finished[1]
        view.denied = self._eligibility.denied(view)
        return view

    def _reported(self, generation: int) -> list[Reported]:
        mine = [Reported(fault, rev) for rev, fault in self._faults.values() if fault.generation == generation]
        return sorted(mine, key=lambda reported: reported.revision)

    def _reported_of(self, current: GenerationRecord) -> list[Reported]:
        """Return the faults of members on their own hosts, so that a record cannot blame a machine of another run."""
        hosts = {member.id: member.host for member in current.members}
        return [each for each in self._reported(current.generation) if hosts.get(each.fault.node) == each.fault.host]

    # -- deciding

    async def _run(self) -> None:
        while True:
            try:
                if not self._is_loaded:
                    await self._load()
                await self._eligibility.refresh()
                await self._step()
            except StatusError as error:
                # Usually the store is unreachable or electing; decisions wait, and nothing is lost.
                await asyncio.sleep(RETRY_S if is_transient(error) else await self._refused(error))
                continue
            except Exception:
                _log.exception("raftkv: the arbiter of run %s failed; retrying", self._keys.run_id)
                await asyncio.sleep(AFTER_ERROR_S)
                continue
            self._backoff.reset()
            await asyncio.sleep(len(self._nodes) * PAUSE_PER_NODE_S)
            await self._wake.wait()
            self._wake.clear()

    async def _refused(self, error: StatusError) -> float:
        """Report what the store refuses, also to waiting nodes; return the time to wait before the next attempt."""
        if not self._refusal.endswith(f": {error}"):
            self._refusal = f"the store to take {self._asked}: {error}"
            _log.warning("raftkv: run %s cannot proceed, retrying: %s", self._keys.run_id, error)
        view = self._view()
        if view is not None:
            with contextlib.suppress(StatusError):
                await self._report_progress(view)
        return self._backoff.next_s()

    async def _step(self) -> None:
        """Decide until there is nothing to decide."""
        while (view := self._view()) is not None:
            seen = self._as_seen()  # taken with the view, so that a change during the decision makes its write fail
            seen += self._still_gone(view.lost())
            decision = await self._decide(view)
            if decision is None:
                self._refusal, self._asked = "", _ANYTHING
                await self._report_progress(view)
                self._look_later()
                return
            if not await self._carry_out(view, decision, seen):
                return

    async def _decide(self, view: View) -> Decision | None:
        now = self._loop.time()
        decision = self._arbiter.decide(view, now)
        if isinstance(decision, Break) and (view.lost() or decision.cause == SCALE_UP):
            # A lost member may have finished. This is read only here, so that no node has to watch it.
            view.finished = await self._read_finished(view)
            decision = self._arbiter.decide(view, now)
        if isinstance(decision, Begin) and await self._eligibility.count_root_cause(
            view.generation, self._reported_of(view.round)
        ):
            view.denied = self._eligibility.denied(view)
            decision = self._arbiter.decide(view, now)
        admitted = await self._eligibility.admit(view, decision, self._arbiter, now)
        if admitted is None:
            view.admitted = None
        return admitted

    async def _read_finished(self, view: View) -> frozenset[int]:
        prefix = self._keys.exits(view.generation)
        found = (await self._control.txn((), [GetRange(prefix, prefix=True, keys_only=True)])).results[0]
        places = self._keys.exited(view.generation, len(view.round.members), found)
        self._finished = (view.generation, places)
        return places

    def _look_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._arbiter.look_again_at is not None:
            self._timer = self._loop.call_at(self._arbiter.look_again_at, self.look)

    async def _carry_out(self, view: View, decision: Decision, seen: list[Compare]) -> bool:
        """Write a decision; False: a condition failed, and the watches will deliver the change that caused it."""
        self._asked = _ANYTHING
        if isinstance(decision, Evict):
            return await self._evict(view, decision, seen)
        if isinstance(decision, Finish):
            closed = new_state(view, phase=CLOSED, reason=SUCCEEDED, time=time.time())
            operations: list[Operation] = [Put(self._keys.state, closed.encode())]
        elif isinstance(decision, Break):
            operations = self._break(view, decision)
        else:
            operations = self._begin(view, decision)
        result = await self._control.txn(seen, operations)
        if result.succeeded:
            self._last_progress = (self._loop.time(), None)  # all nodes see this write; progress is reported only later
            await self._cache.reached(result.revision)
        return result.succeeded

    async def _evict(self, view: View, decision: Evict, seen: list[Compare]) -> bool:
        now, conditions, operations = time.time(), list(seen), list[Operation]()
        message = f"it did not come back within {self._return_timeout_s:g} s, and was evicted"
        for present in decision.nodes[:EVICTED_MAX]:
            node, key = present.node, self._keys.node(present.node.id)
            fault = Fault(view.generation, node.id, node.host, cause=LEFT, message=message, time=now)
            conditions.append(mod_revision(key) == present.written)  # the member has not come back meanwhile
            operations += [Delete(key), Put(self._keys.faults(view.generation) + fault.key, fault.encode())]
        result = await self._control.txn(conditions, operations)
        if result.succeeded:
            for present in decision.nodes[:EVICTED_MAX]:
                _log.warning("raftkv: run %s: node %s left: %s", self._keys.run_id, present.node.id, message)
            await self._reflectors[0].reached(result.revision)
        return result.succeeded

    def _as_seen(self) -> list[Compare]:
        return [
            mod_revision(self._keys.round) == self._cache.round_revision,
            mod_revision(self._keys.state) == self._cache.state_revision,
            mod_revision(self._keys.arbiter) == self.revision,
        ]

    def _still_gone(self, lost: Sequence[Member]) -> list[Compare]:
        """Return the conditions that no lost member has registered again; the watch of nodes may be behind."""
        if len(lost) <= FAULTS_MAX:
            return [lease_of(self._keys.node(member.id)) == 0 for member in lost]
        # For many members the condition is that no node at all has registered; if one has, decide again.
        newest = max((item.mod_revision for item in self._reflectors[0].items.values()), default=0)
        return [mod_revision(self._keys.nodes, prefix=True) < newest + 1]

    def _break(self, view: View, decision: Break) -> list[Operation]:
        now = _now()
        state = new_state(
            view, phase=BROKEN, cause=decision.cause, node=decision.node, reason=decision.reason, time=now
        )
        operations: list[Operation] = [Put(self._keys.state, state.encode())]
        known = {fault.key for fault in view.faults}
        for member in decision.lost[:FAULTS_MAX]:
            if member.id not in known:
                fault = Fault(view.generation, member.id, member.host, cause=HEARTBEAT_LOST, time=now)
                operations.append(Put(self._keys.faults(view.generation) + fault.key, fault.encode()))
        return operations

    def _begin(self, view: View, decision: Begin) -> list[Operation]:
        now = _now()
        generation, members = decision.generation, decision.members
        left_out = self._eligibility.left_out(view)
        state = new_state(view, generation=generation, phase=RUNNING, left_out=left_out, time=now)
        record, head = GenerationRecord(generation, members, now).encode(), new_head(self._cache.roster, members, state)
        nodes = "1 node" if len(members) == 1 else f"{len(members)} nodes"
        self._asked = f"generation {generation} of {nodes}, a record of {len(record)} bytes"
        operations: list[Operation] = [
            Put(self._keys.round, record),
            Put(self._keys.state, head.encode()),
        ]
        # After a restore, nodes have seen later generations than the last in the store, so no node is in that one any
        # more.
        past = [view.generation - 1, *([view.generation] if generation > view.generation + 1 else [])]
        for old in (number for number in past if number > 0):
            operations += [
                Delete(self._keys.store(old), prefix=True),
                Delete(self._keys.sync(old), prefix=True),
                Delete(self._keys.boot(old)),
            ]
        if generation > FAULT_GENERATIONS:
            operations.append(Delete(self._keys.faults(generation - FAULT_GENERATIONS), prefix=True))
        return operations

    async def _report_progress(self, view: View) -> None:
        """Write how many nodes are present and what they wait for; less often if many nodes would receive it."""
        kept = view.state
        if kept.phase == CLOSED:
            return
        at, told = self._last_progress
        now = self._loop.time()
        later = at + max(REPORT_PROGRESS_S, len(view.nodes) / NODES_TOLD_PER_S)
        if now < later:
            self._arbiter.look_again_at = min(self._arbiter.look_again_at or later, later)
            return
        is_running = kept.phase == RUNNING
        joined = kept.joined if is_running else len(view.survivors()) + len(view.newcomers())
        news = {
            "joined": joined,
            "waits_for": "" if is_running else self._refusal or self._eligibility.waits_for,
            "left_out": self._eligibility.left_out(view),
        }
        if news == told or all(getattr(kept, name) == value for name, value in news.items()):
            return
        state = new_state(view, cause=kept.cause, node=kept.node, reason=kept.reason, time=kept.time, **news)
        result = await self._control.txn(self._as_seen(), [Put(self._keys.state, state.encode())])
        self._last_progress = (now, news if result.succeeded else None)


def _now() -> float:
    """Return the time for a record that all nodes receive, so without the digits below a millisecond."""
    return round(time.time(), 3)


# -- arbiter_election -----------------------------------------------------------------------------------------------
#
# The election of the arbiter, as one node sees it: the node that holds the ``arbiter`` key under its lease decides.
#
# Owns the node's view of that key, and the ``ArbiterDriver`` while this node holds the key. When the key is deleted
# with the lease of its holder, members try to take it in rank order, a few milliseconds apart, then other nodes in an
# order by their ids, so that thousands of nodes do not ask at once; the first one gets it. An example, in which the
# arbiter a is killed:
#
#     a (rank 0)  holds arbiter ----X killed
#     store                         | lease of a ends: arbiter and node/a are deleted
#     b (rank 1)                    | sees it, waits 5 ms ----> put arbiter if absent: succeeds ---> decides
#     c (rank 2)                    | sees it, waits 10 ms, sees arbiter = b: stands back
#     b, as arbiter                                               lists node/, fault/: a is lost ---> state = broken
#     b, c                                                        stop their workers, write want = 2
#     b, as arbiter                                               round = 2 (b, c), state = running
#
# Only the node that holds the key under its current lease is the arbiter. A key without a lease is taken over at once.
# A key under any other lease might have been written by a client that is not a node and keeps the lease alive for ever.
# So one to two TTLs after the key was written, each node checks once whether the key of the named node is under the
# same lease.

DELAY_S: Final = 0.005
PLACES_IN_TURN: Final = 50
"""Places that wait ``DELAY_S`` for each place before them; later places wait less for each, as all of these may be
gone, for example with one rack."""
LATER_DELAY_S: Final = 0.0001
NAME_BYTES_MAX: Final = 4096
"""Maximum length of a node's name."""
POSTPONE_TTLS: Final = 2.0
POSTPONE_EXTRA_S: Final = 1.0


class ArbiterElection:
    """One node's candidacy for the arbiter.

    Arguments:
        control, config, cache, registration: parts of the node.
    """

    def __init__(self, control: Control, config: RunConfig, cache: RecordCache, registration: Registration) -> None:
        self._control = control
        self._config = config
        self._cache = cache
        self._registration = registration
        self._keys = RunKeys(config.run_id)
        self._holder: KeyValue | None = None
        self._believed = 0
        """Mod revision of the key whose holder is known to be a node of the run."""
        self._driver: ArbiterDriver | None = None
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._taking: asyncio.Task[None] | None = None
        self._postponed_until = -math.inf
        self._closed = False

    @property
    def is_arbiter(self) -> bool:
        """Whether this node decides."""
        return self._driver is not None

    def on_arbiter(self, item: KeyValue | None) -> None:
        """Take the current ``arbiter`` key; None: it was deleted."""
        if item is not None and not item.lease:
            item = None  # not written by a node; it would stay for ever
        before, self._holder = self._holder, item
        if self._closed:
            return
        if item is None or not self._is_mine(item):
            self._resign()
        elif self._driver is None or self._driver.revision != item.mod_revision:
            self._resign()
            self._driver = self._drive(item.mod_revision)
        if item is None:
            if before is not None:
                self._forget()
            if self._timer is None and (self._taking is None or self._taking.done()):
                self._timer = self._loop.call_later(self._delay_s(), self._stand)
        elif before is None or before.mod_revision != item.mod_revision:
            self._forget()
            self._believed = item.mod_revision
            if not self._is_mine(item):
                self._timer = self._loop.call_later(self._doubt_after_s(), self._doubt)

    def lost_lease(self) -> None:
        """Stop deciding: if this node held the ``arbiter`` key, it was deleted with the lease."""
        self._resign()

    def look(self) -> None:
        """Let the arbiter decide again: the run's record has changed."""
        if self._driver is not None:
            self._driver.look()

    def postpone_expiry(self) -> None:
        """Give other nodes time to register again, because the store was unreachable."""
        grant = self._registration.grant
        ttl_s = grant.ttl_s if grant is not None else self._config.lease_ttl_s
        self._postponed_until = self._loop.time() + POSTPONE_TTLS * ttl_s + POSTPONE_EXTRA_S
        if self._driver is not None:
            self._driver.postpone_expiry(self._postponed_until)

    def close(self) -> None:
        """Stop taking part in elections."""
        self._closed = True
        self._resign()
        self._forget()
        if self._taking is not None:
            self._taking.cancel()

    def _is_mine(self, item: KeyValue) -> bool:
        grant = self._registration.grant
        return grant is not None and item.lease == grant.id

    def _drive(self, revision: int) -> ArbiterDriver:
        return ArbiterDriver(self._control, self._config, self._cache, revision, self._postponed_until)

    def _resign(self) -> None:
        if self._driver is not None:
            self._driver.close()
            self._driver = None

    def _forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _delay_s(self) -> float:
        places, state = self._cache.roster.places, self._cache.state
        place: float | None = places.get(self._registration.node.id)
        if place is None:
            others = state.joined - len(places) if state is not None else 0
            place = len(places) + self._share() * max(others, 0)
        return min(place, PLACES_IN_TURN) * DELAY_S + max(place - PLACES_IN_TURN, 0.0) * LATER_DELAY_S

    def _doubt_after_s(self) -> float:
        """Return when this node checks the holder; in a large run, nodes check at different times."""
        return self._config.lease_ttl_s * (1.0 + self._share())

    def _share(self) -> float:
        """Return a number from 0 to 1 that is different on each node."""
        return crc32(self._registration.node.id.encode(errors="replace")) / 2**32

    def _doubt(self) -> None:
        self._believed = 0
        self._stand()

    def _stand(self) -> None:
        self._timer = None
        if self._taking is None or self._taking.done():
            self._taking = self._loop.create_task(self._campaign())

    def _vacancy(self) -> list[Compare] | None:
        """Return the conditions under which the key may be taken; None: a node of the run holds it."""
        holder, keys = self._holder, self._keys
        if holder is None:
            return [lease_of(keys.arbiter) == 0]
        if holder.mod_revision == self._believed:
            return None
        name = keys.nodes.encode() + holder.value[:NAME_BYTES_MAX]
        return [mod_revision(keys.arbiter) == holder.mod_revision, lease_of(name) != holder.lease]

    async def _campaign(self) -> None:
        keys, registration = self._keys, self._registration
        own_id = registration.node.id
        wait_s = RETRY_MIN_S
        while (vacancy := self._vacancy()) is not None:
            holder = self._holder
            await registration.registered.wait()
            grant = registration.grant
            try:
                if holder is not None and not (await self._control.txn(vacancy, ())).succeeded:
                    self._believed = holder.mod_revision
                    continue
                if grant is not None:
                    put = [Put(keys.arbiter, own_id, lease=grant.id)]
                    if (await self._control.txn([*vacancy, version(keys.node(own_id)) > 0], put)).succeeded:
                        return  # the watch delivers the key, and this node begins to decide
            except LeaseNotFoundError:
                if grant is not None:
                    registration.lose(grant.id)
            except StatusError:
                pass  # the store is unreachable; another node may have taken the key meanwhile
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, RETRY_MAX_S)
