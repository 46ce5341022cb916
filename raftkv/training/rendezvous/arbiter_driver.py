"""The arbiter at work: one node of the run sees all the others, and writes what ``arbiter`` decides.

Owns the reflectors of ``node/`` and ``fault/``, and the two writes that move a run on. All have the condition that
``round``, ``state`` and ``arbiter`` are as this node has seen them:

    break:  state = broken, and a fault for each lost member
    finish: state = closed
    begin:  round = the next generation, state = running; what the generation before the last has left is deleted

A member that does not come back for long is put out by a third write: its key is deleted, and a fault says why.

The ``arbiter`` key ends with its holder's lease: a holder that was frozen, or that another node has replaced, decides
nothing any more. A decision whose answer was lost is either seen by the
watch or made again; the conditions keep it from happening twice. One that the store refuses, as a record that is too
large or a user who may not, is made again ever more slowly, and those who wait learn why.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Sequence
from typing import Final

from raftkv.client.control.control import Control
from raftkv.client.control.records import RecordError, read
from raftkv.client.control.reflector import Reflector, below
from raftkv.client.kv.operations import Compare, Delete, GetRange, Operation, Put, mod_revision
from raftkv.client.rpc.retry import Backoff, is_transient
from raftkv.client.values import DELETE, Event, KeyValue
from raftkv.errors import StatusError
from raftkv.training.config import RunConfig
from raftkv.training.keys import RunKeys
from raftkv.training.records import (
    BROKEN,
    CLOSED,
    HEARTBEAT_LOST,
    LEFT,
    RUNNING,
    SUCCEEDED,
    Fault,
    GenerationRecord,
    Node,
)  # fmt: skip
from raftkv.training.rendezvous.arbiter import (
    SCALE_UP,
    Arbiter,
    Begin,
    Break,
    Decision,
    Finish,
    Present,
    PutOut,
    View,
    new_state,
)
from raftkv.training.rendezvous.eligibility import Eligibility
from raftkv.training.rendezvous.record_cache import RecordCache
from raftkv.training.scheduling.denylist import Reported

_log = logging.getLogger(__name__)

RETRY_S: Final = 0.05
AFTER_ERROR_S: Final = 1.0
REPORT_PROGRESS_S: Final = 1.0
FAULTS_MAX: Final = 64
"""Lost members that are recorded one by one in a single decision; a txn has 128 operations at most."""
PUT_OUT_MAX: Final = 60
"""Members that are put out by a single decision, with a fault each."""
_ANYTHING: Final = "it"
FAULT_GENERATIONS: Final = 16
"""Generations whose faults are kept for ``raftkvctl run show``; older ones are in the history of the store."""


class ArbiterDriver:
    """Carries out an arbiter's decisions; made when this node becomes the arbiter, closed when it no longer is.

    Arguments:
        control: the store.
        config: of this node; the limits are the run's.
        cache: the node's view of ``round`` and ``state``.
        revision: mod_revision of the ``arbiter`` key under which this node decides.
        forgive_until: see ``Arbiter``.

    Attributes:
        revision: as given.
    """

    def __init__(
        self, control: Control, config: RunConfig, cache: RecordCache, revision: int, forgive_until: float
    ) -> None:
        self._control = control
        self._keys = RunKeys(config.run_id)
        self._cache = cache
        self.revision = revision
        # Those who wait give up after the time to join: whoever holds them up must be out well before.
        self._return_timeout_s = min(config.return_timeout_s, config.join_timeout_s / 2)
        self._arbiter = Arbiter(
            config.last_call_timeout_s, config.expected_nodes, config.rank_policy, self._return_timeout_s
        )
        self._arbiter.forgive_until = forgive_until
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
        """Decide nothing more."""
        self._task.cancel()
        self._eligibility.close()
        for reflector in self._reflectors:
            reflector.close()
        if self._timer is not None:
            self._timer.cancel()

    def look(self) -> None:
        """Decide again: something has changed."""
        self._wake.set()

    def forgive(self, until: float) -> None:
        """Take no member for lost before ``until``: the store was out of reach."""
        self._arbiter.forgive_until = max(self._arbiter.forgive_until, until)
        self.look()

    # -- what is there

    async def _load(self) -> None:
        """Read all nodes and faults as of one revision; from there on the reflectors keep them current."""
        reads = [GetRange(self._keys.nodes, prefix=True), GetRange(self._all_faults, prefix=True)]
        result = await self._control.txn((), reads)
        for reflector, page in zip(self._reflectors, result.results, strict=True):
            reflector.load(page, result.revision)
        self._is_loaded = True

    def _on_nodes(self, changes: Sequence[Event]) -> None:
        for event in changes:
            if event.type == DELETE:
                self._nodes.pop(_name(event.key), None)
            else:
                self._put_node(event.kv)
        self.look()

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
            return  # not written by a node: it can be in no generation
        self._nodes[_name(item.key)] = Present(node, item.create_revision, item.mod_revision)

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

    # -- deciding

    async def _run(self) -> None:
        while True:
            try:
                if not self._is_loaded:
                    await self._load()
                await self._eligibility.refresh()
                await self._step()
            except StatusError as error:
                # Mostly out of reach, or electing: nothing is decided meanwhile, and nothing is lost.
                await asyncio.sleep(RETRY_S if is_transient(error) else await self._refused(error))
                continue
            except Exception:
                _log.exception("raftkv: the arbiter of run %s failed; it looks again", self._keys.run_id)
                await asyncio.sleep(AFTER_ERROR_S)
                continue
            self._backoff.reset()
            await self._wake.wait()
            self._wake.clear()

    async def _refused(self, error: StatusError) -> float:
        """Say what the store refuses, to those who wait too; returns how long to wait before it is asked again."""
        if not self._refusal.endswith(f": {error}"):
            self._refusal = f"the store to take {self._asked}: {error}"
            _log.warning("raftkv: run %s cannot go on, it is tried again: %s", self._keys.run_id, error)
        view = self._view()
        if view is not None:
            with contextlib.suppress(StatusError):
                await self._report_progress(view)
        return self._backoff.next_s()

    async def _step(self) -> None:
        """Decide until there is nothing to decide."""
        while (view := self._view()) is not None:
            seen = self._as_seen()  # with the view: what changes while it is decided speaks against the decision
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
            # A member that is gone may have finished: that is read here, so that nobody has to watch it.
            view.finished = await self._read_finished(view)
            decision = self._arbiter.decide(view, now)
        if isinstance(decision, Begin) and await self._eligibility.count_root_cause(
            view.generation, self._reported(view.generation)
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
        names = [_name(item.key) for item in found]
        places = frozenset(int(name) for name in names if name.isdecimal() and int(name) < len(view.round.members))
        self._finished = (view.generation, places)
        return places

    def _look_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._arbiter.look_again_at is not None:
            self._timer = self._loop.call_at(self._arbiter.look_again_at, self.look)

    async def _carry_out(self, view: View, decision: Decision, seen: list[Compare]) -> bool:
        """Write a decision; False: it did not happen, and what speaks against it is on its way through the watches."""
        self._asked = _ANYTHING
        if isinstance(decision, PutOut):
            return await self._put_out(view, decision, seen)
        if isinstance(decision, Finish):
            closed = new_state(view, phase=CLOSED, reason=SUCCEEDED, time=time.time())
            operations: list[Operation] = [Put(self._keys.state, closed.encode())]
        elif isinstance(decision, Break):
            operations = self._break(view, decision)
        else:
            operations = self._begin(view, decision)
        result = await self._control.txn(seen, operations)
        if result.succeeded:
            await self._cache.reached(result.revision)
        return result.succeeded

    async def _put_out(self, view: View, decision: PutOut, seen: list[Compare]) -> bool:
        now, conditions, operations = time.time(), list(seen), list[Operation]()
        message = f"it did not come back within {self._return_timeout_s:g} s, and was put out"
        for present in decision.nodes[:PUT_OUT_MAX]:
            node, key = present.node, self._keys.node(present.node.id)
            fault = Fault(view.generation, node.id, node.host, cause=LEFT, message=message, time=now)
            conditions.append(mod_revision(key) == present.written)  # it has not come back just now
            operations += [Delete(key), Put(self._keys.faults(view.generation) + fault.key, fault.encode())]
        result = await self._control.txn(conditions, operations)
        if result.succeeded:
            for present in decision.nodes[:PUT_OUT_MAX]:
                _log.warning("raftkv: run %s: node %s left: %s", self._keys.run_id, present.node.id, message)
            await self._reflectors[0].reached(result.revision)
        return result.succeeded

    def _as_seen(self) -> list[Compare]:
        return [
            mod_revision(self._keys.round) == self._cache.round_revision,
            mod_revision(self._keys.state) == self._cache.state_revision,
            mod_revision(self._keys.arbiter) == self.revision,
        ]

    def _break(self, view: View, decision: Break) -> list[Operation]:
        now = time.time()
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
        now = time.time()
        generation = decision.generation
        joined, left_out = len(decision.members), self._eligibility.left_out(view)
        state = new_state(view, generation=generation, phase=RUNNING, joined=joined, left_out=left_out, time=now)
        record = GenerationRecord(generation, decision.members, now).encode()
        nodes = "1 node" if joined == 1 else f"{joined} nodes"
        self._asked = f"generation {generation} of {nodes}, a record of {len(record)} bytes"
        operations: list[Operation] = [
            Put(self._keys.round, record),
            Put(self._keys.state, state.encode()),
        ]
        # After a restore nodes have seen later generations than the last on record: nobody is in that one any more.
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
        """Write how many are there, and what keeps them, for those who wait; not more often than people can read."""
        kept = view.state
        if kept.phase == CLOSED:
            return
        is_running = kept.phase == RUNNING
        joined = kept.joined if is_running else len(view.survivors()) + len(view.newcomers())
        news = {
            "joined": joined,
            "waits_for": "" if is_running else self._refusal or self._eligibility.waits_for,
            "left_out": self._eligibility.left_out(view),
        }
        at, told = self._last_progress
        now = self._loop.time()
        if news == told or all(getattr(kept, name) == value for name, value in news.items()):
            return
        if now < at + REPORT_PROGRESS_S:
            later = at + REPORT_PROGRESS_S
            self._arbiter.look_again_at = min(self._arbiter.look_again_at or later, later)
            return
        state = new_state(view, cause=kept.cause, node=kept.node, reason=kept.reason, time=kept.time, **news)
        result = await self._control.txn(self._as_seen(), [Put(self._keys.state, state.encode())])
        self._last_progress = (now, news if result.succeeded else None)


def _name(key: bytes) -> str:
    return key.decode(errors="backslashreplace").rsplit("/", 1)[1]
