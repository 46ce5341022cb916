"""What a ``Run`` sits on: a node of its own, or a place in the run of the agent that started this process.

``Membership`` is the first kind. ``WorkerSeat`` is the second: under ``raftkvctl run exec`` or torchrun the node is the
agent's, and a worker only takes part in the epoch that it was started for. It holds no lease; its fence is that of its
node: once the node is lost, or the next epoch has begun, it writes nothing any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from raftkv.client.kv.operations import Put
from raftkv.client.rpc.retry import until_answered
from raftkv.errors import ConfigError
from raftkv.training.control import ClientControl
from raftkv.training.errors import EpochOver, RunClosed
from raftkv.training.keys import RunKeys, check_run_id
from raftkv.training.records import BROKEN, CLOSED, Fault, State
from raftkv.training.rendezvous.ranks import first_ranks
from raftkv.training.rendezvous.record_cache import RecordCache
from raftkv.training.rendezvous.world import World

if TYPE_CHECKING:
    from raftkv.client.library import Client


class Seat(Protocol):
    """What ``Run`` needs of a ``Membership``; its words are said there."""

    world: World | None

    @property
    def nodes_waiting(self) -> int: ...  # noqa: D102

    @property
    def closed(self) -> bool: ...  # noqa: D102

    @property
    def phase(self) -> State | None: ...  # noqa: D102

    async def next_world(self, timeout_s: float | None = None) -> World: ...  # noqa: D102

    async def report(self, fault: Fault) -> None: ...  # noqa: D102

    async def publish(self, value: str) -> None: ...  # noqa: D102

    async def published(self, timeout_s: float | None = None) -> str: ...  # noqa: D102

    async def close(self, reason: str = "finished") -> None: ...  # noqa: D102

    async def leave(self) -> None: ...  # noqa: D102

    def on_change(self, callback: Callable[[Any], None]) -> Callable[[], None]: ...  # noqa: D102


class WorkerPlace(NamedTuple):
    """Where the environment says that this process is."""

    run_id: str
    epoch: int
    rank: int
    endpoints: str


def worker_place(environment: Mapping[str, str]) -> WorkerPlace | None:
    """This process' place in a surrounding run; None: there is none.

    Raises:
        ConfigError: the environment holds half of it, or no numbers.
    """
    if not environment.get("RAFTKV_RUN_ID"):
        return None
    try:
        epoch = int(environment["RAFTKV_EPOCH"])
        rank = int(environment.get("RAFTKV_RANK") or environment["RANK"])
    except KeyError as error:
        raise ConfigError(f"RAFTKV_RUN_ID is in the environment, but {error.args[0]} is not") from None
    except ValueError:
        raise ConfigError("RAFTKV_EPOCH and RAFTKV_RANK in the environment must be whole numbers") from None
    return WorkerPlace(environment["RAFTKV_RUN_ID"], epoch, rank, environment.get("RAFTKV_ENDPOINTS", ""))


def announce(run_id: str, epoch: int, endpoints: str, environment: MutableMapping[str, str]) -> None:
    """Tell the workers that an agent starts from now on which epoch is theirs; their ranks they know by ``RANK``.

    Arguments:
        run_id, epoch: of the agent's world.
        endpoints: of the cluster, separated by commas.
        environment: which workers inherit: ``os.environ`` of an agent whose launcher makes it up itself, as torchrun.
    """
    environment.update(RAFTKV_RUN_ID=run_id, RAFTKV_EPOCH=str(epoch), RAFTKV_ENDPOINTS=endpoints)
    environment.pop("RAFTKV_RANK", None)  # of an agent that is itself a worker


def client_settings(environment: Mapping[str, str]) -> dict[str, Any]:
    """How to connect, as the environment says: user and password, certificates."""
    user, _, password = environment.get("RAFTKV_USER", "").partition(":")
    settings = {
        "user": user,
        "password": password,
        "ca_file": environment.get("RAFTKV_CACERT", ""),
        "cert_file": environment.get("RAFTKV_CERT", ""),
        "key_file": environment.get("RAFTKV_KEY", ""),
    }
    return {name: value for name, value in settings.items() if value}


class WorkerSeat:
    """The seat of a worker; made by ``take``."""

    def __init__(self, kv: Client, place: WorkerPlace) -> None:
        self.world: World | None = None
        self._kv = kv
        self._place = place
        self._keys = RunKeys(check_run_id(place.run_id))
        self._cache = RecordCache(ClientControl(kv), place.run_id, self._changed)
        self._callbacks: dict[int, Callable[[Any], None]] = {}
        self._numbers = 0

    @classmethod
    async def take(cls, kv: Client, place: WorkerPlace) -> WorkerSeat:
        """Find the epoch that this worker was started for.

        Raises:
            EpochOver: another has begun.
            ConfigError: the epoch has no such rank.
            StatusError: the cluster refused.
        """
        seat = cls(kv, place)
        record = await until_answered(lambda: kv.range(*seat._keys.record), kv.scope.timeout_s)
        seat._cache.load(record, record.revision)
        try:
            seat.world = seat._find_world()
        except BaseException:
            seat._cache.close()
            raise
        return seat

    @property
    def nodes_waiting(self) -> int:
        """See ``Membership``."""
        state, current = self._cache.state, self._cache.round
        if self.world is None or state is None or state.phase == CLOSED:
            return 0
        if current is not None and current.epoch > self.world.epoch:
            return 1
        return max(1, state.joined) if state.phase == BROKEN else 0

    @property
    def closed(self) -> bool:
        """See ``Membership``."""
        return self._cache.state is not None and self._cache.state.phase == CLOSED

    @property
    def phase(self) -> State | None:
        """See ``Membership``."""
        return self._cache.state

    async def next_world(self, timeout_s: float | None = None) -> World:
        """There is none for this process: its node's agent ends it, and starts another in the next epoch."""
        if self.closed:
            raise RunClosed(self._place.run_id, self.phase.reason if self.phase else "")
        raise EpochOver(
            self._place.run_id, self._place.epoch, "end this worker; its node's agent starts one in the next epoch"
        )

    async def report(self, fault: Fault) -> None:
        """See ``Membership``."""
        if self.world is not None:
            key = self._keys.faults(self.world.epoch) + fault.key
            await until_answered(
                lambda: self._kv.txn(fence=self._world().fence).then(Put(key, fault.encode())).commit()
            )

    async def publish(self, value: str) -> None:
        """See ``Membership``; here the agent's key stays as it is, and workers have one of their own."""
        world = self._world()
        await until_answered(lambda: self._kv.put(f"{self._keys.sync(world.epoch)}boot", value, fence=world.fence))

    async def published(self, timeout_s: float | None = None) -> str:
        """Not for workers: their agent has told them by the environment."""
        raise ConfigError("a worker meets the others where its environment says: MASTER_ADDR and MASTER_PORT")

    async def close(self, reason: str = "finished") -> None:
        """Nothing: the run is the agent's to close."""

    async def leave(self) -> None:
        """Watch no more. The node stays: it is the agent's."""
        self._cache.close()

    def on_change(self, callback: Callable[[Any], None]) -> Callable[[], None]:
        """See ``Membership``."""
        self._numbers += 1
        number = self._numbers
        self._callbacks[number] = callback
        return lambda: self._callbacks.pop(number, None) and None

    def _world(self) -> World:
        if self.world is None:
            raise EpochOver(self._place.run_id, self._place.epoch)
        return self.world

    def _find_world(self) -> World:
        place, current = self._place, self._cache.round
        if current is None or current.epoch != place.epoch:
            raise EpochOver(place.run_id, place.epoch, f"epoch {current.epoch if current else 0} is the present one")
        for index, first in enumerate(first_ranks(current.members)):
            if first <= place.rank < first + current.members[index].slots:
                return World(place.run_id, place.epoch, current.members, index, self._cache.round_revision)
        raise ConfigError(f"epoch {place.epoch} of run {place.run_id!r} has no rank {place.rank}")

    def _changed(self) -> None:
        for callback in list(self._callbacks.values()):
            callback(self)
