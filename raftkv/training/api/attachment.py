"""The attachment of a ``Run``: a separate node, or a worker of the agent that started this process.

A ``Participant`` is a separate node. A ``WorkerAttachment`` is a worker: under ``raftkvctl run exec`` or torchrun the
agent is the node, and a worker takes part only in the generation for which it was started. It holds no lease and uses
the fence of its node: once the node is lost, or the next generation has begun, its writes are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple

from raftkv.client.control import ClientControl, Sparse, check_whole
from raftkv.client.lease import Callbacks
from raftkv.client.operations import Put
from raftkv.client.rpc.retry import until_answered
from raftkv.errors import ConfigError
from raftkv.training.config import CONNECT_TIMEOUT_S
from raftkv.training.errors import GenerationOver, RunClosed
from raftkv.training.records import Fault, RunKeys, check_run_id
from raftkv.training.rendezvous.participant import Participant, explain_outage
from raftkv.training.rendezvous.world import RecordCache, RecordView, World, first_ranks

if TYPE_CHECKING:
    from raftkv.client.library import Client


class WorkerPlace(NamedTuple):
    """Place of this process in a run, from the environment."""

    run_id: str
    generation: int
    rank: int
    endpoints: str


def worker_place(environment: Mapping[str, str]) -> WorkerPlace | None:
    """Read this process' place in a surrounding run, or None.

    Raises:
        ConfigError: the variables are incomplete, or are not numbers.
    """
    if not environment.get("RAFTKV_RUN_ID"):
        return None
    try:
        generation = int(environment["RAFTKV_EPOCH"])
        rank = int(environment.get("RAFTKV_RANK") or environment["RANK"])
    except KeyError as error:
        raise ConfigError(f"RAFTKV_RUN_ID is in the environment, but {error.args[0]} is not") from None
    except ValueError:
        raise ConfigError("RAFTKV_EPOCH and RAFTKV_RANK in the environment must be whole numbers") from None
    return WorkerPlace(environment["RAFTKV_RUN_ID"], generation, rank, environment.get("RAFTKV_ENDPOINTS", ""))


def announce(run_id: str, generation: int, endpoints: str, environment: MutableMapping[str, str]) -> None:
    """Set the variables that tell workers started from now on their generation; they know their ranks by ``RANK``.

    Arguments:
        run_id, generation: run and generation of the agent's world.
        endpoints: endpoints of the cluster, separated by commas.
        environment: environment that workers inherit: ``os.environ`` of an agent if its launcher sets it, as torchrun
            does.
    """
    environment.update(RAFTKV_RUN_ID=run_id, RAFTKV_EPOCH=str(generation), RAFTKV_ENDPOINTS=endpoints)
    environment.pop("RAFTKV_RANK", None)  # set if the agent is itself a worker


class WorkerAttachment(RecordView):
    """The attachment of a worker; made by ``take``."""

    def __init__(self, kv: Client, place: WorkerPlace) -> None:
        self.world: World | None = None
        self._kv = kv
        self._place = place
        self._keys = RunKeys(check_run_id(place.run_id))
        self._cache = RecordCache(ClientControl(kv), place.run_id, lambda: self._callbacks.call(self))
        self._callbacks: Callbacks[WorkerAttachment] = Callbacks()

    @classmethod
    async def take(
        cls, kv: Client, place: WorkerPlace, connect_timeout_s: float = CONNECT_TIMEOUT_S
    ) -> WorkerAttachment:
        """Find the generation for which this worker was started.

        Arguments:
            kv: a client, not a view of one.
            place: this worker's place, from the environment.
            connect_timeout_s: time to wait for the cluster.

        Raises:
            ClusterAway: the cluster did not answer.
            GenerationOver: another generation has begun.
            ConfigError: the generation has no such rank, or the client is a view.
            StatusError: the cluster refused.
        """
        attachment = cls(check_whole(kv), place)
        with explain_outage(kv, place.run_id, connect_timeout_s):
            reads = attachment._keys.record.reads()
            record = await until_answered(lambda: kv.txn().then(*reads).commit(), connect_timeout_s)
        attachment._cache.load(Sparse.items(record.results), record.revision)
        try:
            attachment.world = attachment._find_world()
        except BaseException:
            attachment._cache.close()
            raise
        return attachment

    def _seen(self) -> tuple[RecordCache, World | None]:
        return self._cache, self.world

    async def next_world(self, timeout_s: float | None = None) -> World:
        """Raise: the agent ends this process, and starts a new worker in the next generation."""
        if self.closed:
            raise RunClosed(self._place.run_id, self.phase.reason if self.phase else "")
        raise GenerationOver(
            self._place.run_id,
            self._place.generation,
            "end this worker; its node's agent starts one in the next generation",
        )

    async def report(self, fault: Fault) -> None:
        """Implement ``Participant.report``."""
        if self.world is not None:
            key = self._keys.faults(self.world.generation) + fault.key
            await until_answered(
                lambda: self._kv.txn(fence=self._world().fence).then(Put(key, fault.encode())).commit()
            )

    async def publish(self, value: str) -> None:
        """Implement ``Participant.publish``; workers use a separate key, and the agent's key is unchanged."""
        world = self._world()
        await until_answered(lambda: self._kv.put(f"{self._keys.sync(world.generation)}boot", value, fence=world.fence))

    async def published(self, timeout_s: float | None = None) -> str:
        """Raise: workers get the address from their environment."""
        raise ConfigError("a worker meets the others where its environment says: MASTER_ADDR and MASTER_PORT")

    async def close(self, reason: str = "finished") -> None:
        """Do nothing: the agent closes the run."""

    async def leave(self, *, is_away: bool = False) -> None:
        """Stop watching. The node stays, because it is the agent's.

        Arguments:
            is_away: as for ``Participant.leave``.
        """
        self._cache.close()

    def on_change(self, callback: Callable[[Any], None]) -> Callable[[], None]:
        """Implement ``Participant.on_change``."""
        return self._callbacks.add(callback)

    def _world(self) -> World:
        if self.world is None:
            raise GenerationOver(self._place.run_id, self._place.generation)
        return self.world

    def _find_world(self) -> World:
        place, current = self._place, self._cache.round
        if current is None or current.generation != place.generation:
            raise GenerationOver(
                place.run_id, place.generation, f"generation {current.generation if current else 0} is the present one"
            )
        for index, first in enumerate(first_ranks(current.members)):
            if first <= place.rank < first + current.members[index].slots:
                return World(place.run_id, place.generation, current.members, index, self._cache.round_revision)
        raise ConfigError(f"generation {place.generation} of run {place.run_id!r} has no rank {place.rank}")


Attachment = Participant | WorkerAttachment
"""Both kinds of attachment of a ``Run``."""
