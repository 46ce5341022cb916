"""What the arbiter asks before it moves a run on: which hosts are left out, and which slots of the cluster it may use.

Stands between ``arbiter_driver``, which sees the nodes of the run, and two things that are not the run's alone: the
``denylist`` (shared by the runs of a cluster) and the cluster's ledger (``scheduling.ledger``).

- Before a generation begins, the root cause of the one before gets its strike: so the third fault of a host keeps it
  out of the very next generation.
- A run with ``cluster`` begins a generation, or breaks one for newcomers, only with nodes whose slots it was granted.
  While it waits ``State.waits_for`` says why.
- A run that goes on sees to it that its claim is in the ledger: somebody may have deleted that.
- A run that lost so many nodes that it cannot go on gives its slots back while it waits for more.

Nothing here is asked again before something has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from raftkv.client.control.control import Control
from raftkv.client.control.records import RecordError
from raftkv.training.config import RunConfig
from raftkv.training.records import CLOSED, RUNNING, Node
from raftkv.training.rendezvous.arbiter import SCALE_UP, Arbiter, Begin, Break, Decision, View
from raftkv.training.scheduling.denylist import Denylist, Reported, pardon, root_cause
from raftkv.training.scheduling.ledger import ClusterAdmission
from raftkv.training.scheduling.record import ClusterKeys

if TYPE_CHECKING:
    from raftkv.client.kv.operations import Compare

LOOK_AT_DAMAGE_S: Final = 1.0

_NEVER_ASKED: Final = ("",)


class Eligibility:
    """Knows which hosts a run may use, and how many slots of them.

    Arguments:
        control: the store.
        config: of this node.
        is_arbiter: the condition under which this node decides.
        look: called, on the loop, when something may be admitted that was not.
    """

    def __init__(self, control: Control, config: RunConfig, is_arbiter: Compare, look: Callable[[], None]) -> None:
        self._run_id = config.run_id
        self._cluster = config.cluster
        self._is_arbiter = is_arbiter
        self._denylist = Denylist.of(control, config)
        self._unsubscribe = [self._denylist.on_change(look)]
        self._admission: ClusterAdmission | None = None
        self._asked: tuple[str, ...] = _NEVER_ASKED
        self._granted: frozenset[str] = frozenset()
        self._counted = 0
        self._damage = ""
        if config.cluster:
            self._admission = ClusterAdmission(control, config.cluster, weight=config.weight)
            self._unsubscribe.append(self._admission.on_change(self._ask_again))
        self._look = look

    def close(self) -> None:
        """Ask nothing more; what the run was granted stays with it."""
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        self._denylist.close()
        if self._admission is not None:
            self._admission.close()

    @property
    def waits_for(self) -> str:
        """What the run waits for beside its nodes; empty: nothing."""
        reason = self._damage or (self._admission.reason if self._admission is not None else "")
        return f"slots of cluster {self._cluster}: {reason}" if reason else ""

    # -- hosts that are left out

    async def refresh(self) -> None:
        """Know what is denied.

        Raises:
            StatusError: the store did not answer.
        """
        await self._denylist.refresh()

    def denied(self, view: View) -> frozenset[str]:
        """Return the hosts that stay out of the next generation, whatever ``view.denied`` holds."""
        if not self._denylist.denied:
            return frozenset()
        members = [present.node for member in view.round.members if (present := view.nodes.get(member.id))]
        inside = {node.id for node in members}
        others = [one.node for one in sorted(view.nodes.values(), key=lambda one: one.since)]
        hosts = [node.host for node in [*members, *(node for node in others if node.id not in inside)]]
        return pardon(hosts, self._denylist.denied, view.state.min_nodes)

    def left_out(self, view: View) -> dict[str, str]:
        """Explain, for every host with a node that cannot take part, why."""
        there = {present.node.host for present in view.nodes.values()}
        return {host: self._denylist.why(host) for host in sorted(view.denied & there)}

    async def count_root_cause(self, generation: int, faults: Sequence[Reported]) -> bool:
        """Count the root cause of a broken generation against its host, once; True: that host is denied now.

        Arguments:
            generation: that broke.
            faults: all that were reported in it.

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
        """Reduce a decision to what the run has slots for; None: it waits.

        Arguments:
            view: what the decision was made on; its ``admitted`` is set.
            decision: of ``arbiter.decide``.
            arbiter: to say who is in the generation, of those that are admitted.
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
            await self._ask(view, running)  # it runs on in any case: this is for others to know
        if decision is None and view.state.phase != RUNNING and arbiter.is_short and view.generation:
            await self._give_back(view)
        return decision

    async def _ask(self, view: View, candidates: Sequence[Node]) -> frozenset[str]:
        ids = tuple(node.id for node in candidates)
        if self._admission is not None and ids != self._asked:
            limits = view.state.min_nodes, view.state.max_nodes
            self._asked = ids  # before the call: what changes during it asks again
            try:
                grant = await self._admission.request(self._run_id, candidates, *limits, [self._is_arbiter])
            except BaseException:
                self._asked = _NEVER_ASKED
                raise
            self._granted = frozenset(grant.node_ids if grant is not None else ())
        return self._granted

    async def _give_back(self, view: View) -> None:
        if self._granted or self._asked == _NEVER_ASKED:
            await self._ask(view, [*view.survivors(), *view.newcomers()])

    def _ask_again(self) -> None:
        self._asked = _NEVER_ASKED
        self._look()
