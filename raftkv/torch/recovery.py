"""In-process recovery: survivors keep their processes, and rebuild the process group in the next generation.

::

    run = raftkv.training.join("job", min_nodes=2, max_nodes=8, disconnect_grace_s=0.03)
    with run, raftkv.torch.ElasticGroup(run, sync=share_weights) as group:
        for step in group.steps(1000):
            with step:                              # repeated if a rank was lost meanwhile
                loss = train(batches[step.number])  # any torch.distributed calls, DDP too
                optimizer.step()                    # after the last collective of the step

    def share_weights(group):                       # after every (re)build, on all ranks
        for parameter in model.parameters():
            torch.distributed.broadcast(parameter.data, group.source)

    ElasticGroup(run, sync=share_weights, load=load, save=save, save_every=100)    # run: join(..., checkpoints=URI)

    def load(group, last):                  # before sync, after a restart of the whole job; only on the source
        model.load_state_dict(torch.load(io.BytesIO(last.read("model.pt")), weights_only=True))
    def save(group, saving):                # after every 100 steps, on all ranks; committed together or not at all
        if group.rank == 0:
            torch.save(model.state_dict(), saving.path("model.pt"))

Guarantees:

1. A failed step is repeated by all ranks. After each rebuild the ranks agree on the furthest step that any of them has
   completed; ``group.source`` is the lowest rank that has completed it, and ``sync`` distributes its state. So a step
   must change the state only after its last collective.
2. The end of a generation interrupts collectives: a rank that is blocked with a frozen peer is woken (``interrupt``)
   when raftkv has detected the loss of the peer; if gloo does not wake it, the wait is abandoned (``Waits``). NCCL's
   communicators are aborted (``Communicators``), and their results on the device are not used.
3. One group per generation: the old group is destroyed before this rank declares that it is ready for the next one.

``group.last_recovery`` has the times of the parts. Between the death of a rank and the next collective: the peers'
connections break (gloo: at once); the dead rank's lease ends (``disconnect_grace_s``); raftkv makes two or three
commits; gloo builds its mesh. Nothing polls. Each process serves a TCPStore from the beginning, and ranks exchange the
addresses of their stores when they agree on the step. So survivors know the address of the next rank 0 when the
generation begins; only new ranks read it from raftkv.

NCCL: an aborted collective ends as if it had succeeded. So each step waits for the device at its end, and before
``optimizer.step()``; code that changes state in another way must call ``group.settle()`` first.

Not here: the content of a checkpoint; restarted workers (see ``torchrun --rdzv-backend=raftkv``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Final

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d

from raftkv.client.records import RecordError
from raftkv.errors import ConfigError
from raftkv.torch.interrupt import STUCK_S, Aborted, Communicators, Waits, cut_connections, cut_gloo, gloo_devices
from raftkv.training.errors import GenerationOver, StateLost, TrainingError
from raftkv.urls import join_address, split_address

if TYPE_CHECKING:
    import torch

    from raftkv.training.api.checkpoint import Resumed
    from raftkv.training.api.run import Run, Saving

# ---- the state of a rank, and the choice of the state with which a new group continues
#
# During a sync, which distributes the source's state, the state of the receivers is incomplete. If the group breaks
# then, they have no state, and the next group continues with that of the source. If the source is lost as well, only a
# checkpoint is left.

NO_STEP: Final = -1
"""Step reported by a rank whose state was partly overwritten."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """The report of a rank to the others.

    Attributes:
        step: the next step to do with its state; ``NO_STEP``: its state is incomplete.
        has_state: whether its state has been in a group; False: it is the initial state of the program.
    """

    step: int
    has_state: bool


@dataclass(frozen=True, slots=True)
class Agreed:
    """The state with which a group continues.

    Attributes:
        step: the next step to do; ``NO_STEP``: no rank has complete state.
        source: lowest rank with the state of this step.
        is_new: whether no rank has state from an earlier group, so that a checkpoint may be further.
    """

    step: int
    source: int
    is_new: bool


def agree(ranks: Sequence[RankReport]) -> Agreed:
    """Return the furthest step among the reports, and the lowest rank that has it."""
    step = max(told.step for told in ranks)
    source = next(number for number, told in enumerate(ranks) if told.step == step)
    return Agreed(step, source, not any(told.has_state for told in ranks))


class Progress:
    """The state of this rank.

    Arguments:
        first_step: step with which the initial state of the program begins.
    """

    def __init__(self, first_step: int) -> None:
        self.told = RankReport(first_step, has_state=False)
        """Report for the other ranks."""

    def keep(self, step: int) -> None:
        """Record that the state is complete and belongs to a step."""
        self.told = RankReport(step, has_state=True)

    def receive(self, step: int, *, is_overwritten: bool) -> None:
        """Record that the source's state will overwrite this rank's, until ``keep``.

        Arguments:
            step: step with which the group continues.
            is_overwritten: whether an interrupted sync may leave incomplete state. False: a state of the same step
                stays valid, because each byte is replaced by the same one.
        """
        if is_overwritten or step != self.told.step:
            self.told = RankReport(NO_STEP, has_state=False)


# ---- when a group loads a checkpoint, and when it saves one
#
# A group has state as soon as one of its ranks has: it uses the state of the furthest rank and does not read the
# registry, so a recovery does not wait for it. If all ranks are new, the whole job was restarted and continues from the
# latest checkpoint. Open attempts of earlier generations are committed or aborted then, or before the first save.

Load = Callable[["ElasticGroup", "Resumed"], object]
Save = Callable[["ElasticGroup", "Saving"], object]


class States:
    """Loads and saves for one group; see the module, and ``ElasticGroup`` for the arguments."""

    def __init__(self, run: Run, load: Load | None, save: Save | None, save_every: int) -> None:
        if (save is None) != (save_every == 0):
            raise ConfigError("give both save= and save_every=, or neither")
        if save_every < 0:
            raise ConfigError(f"save_every={save_every} is not a positive number of steps")
        if (load or save) and not run.checkpoints.uri:
            raise ConfigError(
                "no directory for checkpoints; name one for the run: raftkv.training.join(..., checkpoints=URI)"
            )
        self._run = run
        self._load = load
        self._save = save
        self._every = save_every
        self._decided_in = 0

    @property
    def loads(self) -> bool:
        """Whether a starting job continues from a checkpoint."""
        return self._load is not None

    def load(self, group: ElasticGroup, *, is_shared: bool) -> int:
        """Load the latest checkpoint if it is further than the group; return the step with which to continue.

        Arguments:
            group: process group, all ranks of which call this.
            is_shared: whether only ``group.source`` loads, and distributes the state.

        Raises:
            CheckpointError: it cannot be loaded.
            GenerationOver: the generation ends.
        """
        with self._run.resume() as last:
            self._decided_in = group.generation
            if last is None or last.step <= group.step:
                return group.step
            if self._load is not None and (not is_shared or group.rank == group.source):
                self._load(group, last)
            return last.step

    def save_if_due(self, group: ElasticGroup) -> None:
        """Save the state after ``group.step`` steps, if a save is due.

        Raises:
            CheckpointError: it could not be saved.
            GenerationOver: the generation ended; the next one commits or aborts the save.
        """
        if self._save is None or group.step % self._every:
            return
        if self._decided_in != group.generation:
            with self._run.resume():
                self._decided_in = group.generation
        with self._run.checkpoint(group.step) as saving:
            self._save(group, saving)


KNOWN_STORES: Final = 8
"""Number of first ranks whose store addresses all ranks know; any of them can be the next rank 0."""
CONNECT_TIMEOUT_S: Final = 2.0
"""Time limit of one attempt to reach rank 0's store; between attempts, the end of the generation is checked."""
RECOVERIES_MAX: Final = 8
"""Maximum recoveries in a row without a completed step, after which the failure is raised."""
_CUT_AGAIN_S: Final = 0.05
_CUT_AGAIN_MAX_S: Final = 1.0
_DONE: Final = "raftkv: steps done"


@dataclass(frozen=True, slots=True)
class Recovery:
    """The times of one recovery, in seconds.

    Attributes:
        generation: generation that began.
        torn_down_s: time to end the old group.
        rejoined_s: time until the new generation began, mostly waiting for the end of the lost rank's lease.
        built_s: time to reach rank 0's store, build the group, and agree on the step.
        synced_s: time in ``sync``.
        total_s: total, from when this process detected the failure.
    """

    generation: int
    torn_down_s: float
    rejoined_s: float
    built_s: float
    synced_s: float
    total_s: float

    @property
    def epoch(self) -> int:
        """Alias of ``generation``."""
        return self.generation


class Step:
    """One step of training; made by ``ElasticGroup.steps``. Put the whole step into ``with step:``.

    Attributes:
        number: step number, from 0.
    """

    def __init__(self, group: ElasticGroup, number: int) -> None:
        self.number = number
        self.failure: BaseException | None = None
        self._group = group

    def __enter__(self) -> int:
        self._group.is_settled = False
        return self.number

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            # After a settle the state was changed, so the step is complete even if the generation has ended.
            self.failure = None if self._group.is_settled else self._group.find_abort()
            return False
        if not self._group.is_recoverable(error):
            return False
        self.failure = error
        return True


class ElasticGroup:
    """A process group that survives the death of other ranks: torch's default group, rebuilt in every generation.

    Arguments:
        run: this process' membership in the run (``raftkv.training.join``).
        backend: backend as for ``init_process_group``: ``gloo``, ``nccl``, ``cpu:gloo,cuda:nccl``.
        sync: called with the group on all ranks after every build, including the first; it must distribute the state of
            ``group.source``. It may use collectives; if the generation ends in it, it is called again in the next one.
        step: first step, for example from a checkpoint of this process; the furthest of all ranks counts.
        timeout_s: timeout of collectives.
        device: device of this rank, for NCCL, which then connects at once, while all ranks are alive. Without it the
            first collective connects, and a rank that freezes before that delays all others until it thaws.
        load: called with the group and the latest checkpoint of the run (``run.resume``), before ``sync``, if no rank
            has state from an earlier group and the checkpoint is further than ``step``; the group continues with its
            step. With ``sync`` it is called only on ``group.source``, else on all ranks. It must not use collectives.
        save: called on all ranks, with the group and the result of ``run.checkpoint``, after every ``save_every``
            steps; the checkpoint's step is the next one to do. If the generation ends in it, the next generation
            commits or aborts the save, and continues.
        save_every: number of steps between saves.

    Attributes:
        step: next step to do.
        source: lowest rank with the state of ``step``.
        is_settled: whether ``settle`` has found the collectives of the current step complete.
        last_recovery: times of the last recovery; None: none so far.

    Raises:
        ConfigError: there is already a process group, this process is a worker of an agent, or the run has no place for
            checkpoints.
        CheckpointError: the latest checkpoint cannot be loaded.
        StateLost: the rank with the state was lost while distributing it, and there is no checkpoint to load.
        RunClosed, JoinTimeout: no further generation begins.
    """

    def __init__(
        self,
        run: Run,
        backend: str = "gloo",
        *,
        sync: Callable[[ElasticGroup], object] | None = None,
        step: int = 0,
        timeout_s: float = 600.0,
        device: torch.device | None = None,
        load: Load | None = None,
        save: Save | None = None,
        save_every: int = 0,
    ) -> None:
        if dist.is_initialized():
            raise ConfigError("there is a process group already; let ElasticGroup make it, or destroy it first")
        if run.is_worker:
            raise ConfigError(
                "this process is a worker, which its agent starts anew in every generation; "
                "to keep it, make it a node of its own: raftkv.training.join(RUN_ID)"
            )
        self.run = run
        self.step = step
        self.source = 0
        self._states = States(run, load, save, save_every)
        self._progress = Progress(step)
        self.is_settled = False
        self.last_recovery: Recovery | None = None
        self._backend = backend
        self._sync = sync
        self._timeout = timedelta(seconds=timeout_s)
        self._foreign = gloo_devices()
        self._excepthook = sys.excepthook
        self._stores: dict[str, str] = {}
        self._store: Store | None = None
        self._meeting: tuple[str, int] | None = None
        self._in_use = 0
        self._in_a_row = 0
        self._communicators: Communicators | None = None
        if "nccl" in backend:
            self._communicators = Communicators(self.settle, device)
        self._waits = Waits(lambda: self._in_use != 0 and run.changed) if backend == "gloo" else None
        self._server = TCPStore("localhost", 0, None, True, wait_for_workers=False)
        self._unwatch = run.on_change_nowait(self._on_change)
        try:
            self._build()
        except BaseException:
            self._end_watching()
            raise

    # ---- what user code sees

    @property
    def rank(self) -> int:
        """This rank, in the current generation."""
        return self.run.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of the current generation."""
        return self.run.world_size

    @property
    def generation(self) -> int:
        """Number of the current generation."""
        return self.run.generation

    @property
    def epoch(self) -> int:
        """Alias of ``generation``."""
        return self.generation

    def steps(self, stop: int) -> Iterator[Step]:
        """Yield the steps up to ``stop``, repeating each until all ranks have done it; see the module.

        Raises:
            RunClosed, JoinTimeout: no further generation begins.
        """
        while True:
            try:
                if self.step < stop:
                    if self.run.changed:
                        raise GenerationOver(self.run.run_id, self.run.generation)
                    step = Step(self, self.step)
                    yield step
                    if step.failure is not None:
                        raise step.failure
                    self.step += 1
                    self._progress.keep(self.step)
                    self._in_a_row = 0
                    self._states.save_if_due(self)
                else:
                    self.run.barrier(_DONE)  # so that no rank is left alone in the last step
                    return
            except (TrainingError, RuntimeError, OSError) as error:
                if not self.is_recoverable(error):
                    raise
                self.recover(error)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Raise ``GenerationOver`` in place of an error of torch that was caused by the end of the generation.

        For custom loops: afterwards call ``recover``, and repeat the incomplete work.
        """
        try:
            yield
        except (RuntimeError, OSError) as error:
            if not self.is_recoverable(error):
                raise
            raise GenerationOver(self.run.run_id, self.run.generation, str(error).partition("\n")[0]) from error

    def is_recoverable(self, error: BaseException) -> bool:
        """Return whether an error was caused by the end of the generation or by a broken connection of the group."""
        if isinstance(error, GenerationOver):
            return True
        if not isinstance(error, RuntimeError | OSError) or isinstance(error, TrainingError):
            return False
        return self.run.changed or isinstance(error, dist.DistError | Aborted) or "gloo/transport" in str(error)

    def settle(self) -> None:
        """Wait until the collectives on the device are done, and raise if they may be incomplete.

        For steps on NCCL that change state without an optimizer of torch: call this after the last collective, before
        the first change. Does nothing on gloo, whose collectives raise by themselves.

        Raises:
            Aborted: the generation has ended meanwhile; ``with step`` and ``guard`` handle it.
        """
        if self._communicators is not None:
            self._communicators.settle(self.generation)
        self.is_settled = True

    def find_abort(self) -> Aborted | None:
        """Wait for the device; return the error that ``settle`` raises."""
        try:
            self.settle()
        except Aborted as aborted:
            return aborted
        return None

    def recover(self, error: BaseException | None = None) -> None:
        """Destroy the group, rejoin the run, and build the group of the next generation.

        Arguments:
            error: cause; raised again if several recoveries in a row do not help.

        Raises:
            RunClosed, JoinTimeout: no further generation begins.
        """
        self._in_a_row += 1
        if self._in_a_row > RECOVERIES_MAX and error is not None:
            raise error
        began = time.monotonic()
        self._tear_down()
        torn_down = time.monotonic()
        self.run.rejoin()
        rejoined = time.monotonic()
        built, synced = self._build()
        self.last_recovery = Recovery(
            self.generation, torn_down - began, rejoined - torn_down, built - rejoined, synced - built, synced - began
        )

    def close(self) -> None:
        """End the group. The run continues. Idempotent."""
        self._end_watching()
        self._in_use = 0
        self._destroy()

    def _end_watching(self) -> None:
        self._unwatch()
        if self._communicators is not None:
            self._communicators.close()
        if self._waits is not None:
            self._waits.close()

    def __enter__(self) -> ElasticGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- building

    def _build(self) -> tuple[float, float]:
        """Build and sync the group; if the generation ends meanwhile, in the next one. Return the times of both."""
        while True:
            try:
                self._in_use = self.generation
                is_new = self._open()
                built = time.monotonic()
                self._share(is_new)
                return built, time.monotonic()
            except (TrainingError, RuntimeError, OSError) as error:
                if not self.is_recoverable(error):
                    raise
                self._in_a_row += 1
                if self._in_a_row > RECOVERIES_MAX:
                    raise
            self._tear_down()
            self.run.rejoin()

    def _share(self, is_new: bool) -> None:
        """Distribute the state with which the group continues to all ranks."""
        if is_new and self._states.loads:
            self.step = self._states.load(self, is_shared=self._sync is not None)
        if self.step == NO_STEP:
            raise StateLost(self.run.run_id)
        if self._sync is not None:
            if self.rank != self.source:
                self._progress.receive(self.step, is_overwritten=self._communicators is not None)
            self._sync(self)
            self.settle()
        self._progress.keep(self.step)

    def _open(self) -> bool:
        """Build the group of this generation; return whether no rank has state."""
        rank, size, member = self.rank, self.world_size, self.run.world.member
        own = join_address(member.address or member.host, self._server.port)
        self._meeting = resolve_address(own if rank == 0 else self._find_store())
        if rank == 0:
            self.run.publish_nowait(own)  # for new ranks; no survivor waits for it
        self._store = PrefixStore(f"raftkv/{self.run.run_id}/{self.generation}", self._connect())
        told = self._progress.told
        self._store.set(f"rank/{rank}", json.dumps([member.id, own, told.step, told.has_state]))
        self._check()
        is_new = self._agree(self._store, rank, size)  # after this, all ranks have arrived
        self._init(self._store, rank, size)
        return is_new

    def _init(self, store: Store, rank: int, size: int) -> None:
        communicators = self._communicators
        device = None if communicators is None else communicators.device
        connects = contextlib.nullcontext() if communicators is None or device is None else communicators.connecting()
        with connects:
            dist.init_process_group(
                self._backend, store=store, rank=rank, world_size=size, timeout=self._timeout, device_id=device
            )

    def _find_store(self) -> str:
        """Return the address of rank 0's store, published in an earlier generation or in this one."""
        return self._stores.get(self.run.members[0].id) or self.run.published()

    def _connect(self) -> TCPStore:
        host, port = self._meeting or ("", 0)
        while True:
            self._check()
            try:
                store = TCPStore(host, port, None, False, timedelta(seconds=CONNECT_TIMEOUT_S), False)
            except dist.DistError:
                continue  # rank 0 is not reachable (any more); if it is lost, the generation ends
            store.set_timeout(self._timeout)
            return store

    def _agree(self, store: Store, rank: int, size: int) -> bool:
        """Agree on the step and the source with which to continue; rank 0 reads all reports and decides.

        Returns whether no rank has state.
        """
        if rank == 0:
            told = [json.loads(text) for text in store.multi_get([f"rank/{number}" for number in range(size)])]
            agreed = agree([RankReport(step, has_state) for _, _, step, has_state in told])
            stores = {member: address for member, address, *_ in told[:KNOWN_STORES]}
            store.set("agreed", json.dumps({**asdict(agreed), "stores": stores}))
        else:
            heard = json.loads(store.get("agreed"))
            stores = heard.pop("stores")
            agreed = Agreed(**heard)
        self.step, self.source, self._stores = agreed.step, agreed.source, stores
        return agreed.is_new

    def _check(self) -> None:
        if self.run.changed:
            raise GenerationOver(self.run.run_id, self.run.generation)

    # ---- tearing down

    def _tear_down(self) -> None:
        self._in_use = 0
        self._interrupt()
        self._destroy()

    def _destroy(self) -> None:
        self._store = None
        if not dist.is_initialized():
            return
        if self._waits is not None:
            self._waits.leak(distributed_c10d._world.pg_map)
        if self._communicators is not None:
            distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()
        sys.excepthook = self._excepthook  # torch wraps it with every group, and never undoes that

    def _on_change(self) -> None:
        """Handle the end of the generation, on the client's loop: wake blocked threads until they have left the
        group."""
        generation, wait_s = self.generation, _CUT_AGAIN_S
        loop = asyncio.get_running_loop()
        over_at = loop.time()
        if self._communicators is not None and self._in_use == generation:
            self._communicators.abort(generation)

        def cut() -> None:
            nonlocal wait_s
            if self._in_use != generation:
                return
            if self._communicators is not None and self._communicators.are_stuck(loop.time() - over_at):
                self._end_process()
            self._interrupt()
            # A connection that is being made now is found the next time.
            loop.call_later(wait_s, cut)
            wait_s = min(2 * wait_s, _CUT_AGAIN_MAX_S)

        cut()

    def _end_process(self) -> None:
        """End this process if its thread cannot be woken; its node is then lost, and the others continue without it."""
        print(
            f"raftkv: run {self.run.run_id!r}: NCCL was still connecting {STUCK_S:g} s after the end of generation "
            f"{self.generation}, as when a rank freezes meanwhile; this process ends, so that it can be started anew",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    def _interrupt(self) -> None:
        cut_gloo(self._foreign)
        if self._meeting is not None:
            cut_connections(*self._meeting)


def resolve_address(address: str) -> tuple[str, int]:
    """Resolve a published address to a numeric one, which a thread that must not use DNS compares with connections.

    Raises:
        RecordError: the value is not an address and a port.
    """
    try:
        host, port = split_address(address)
        if not host:
            raise ValueError(address)
    except ValueError:
        raise RecordError("boot", f"{address!r} is not an address and a port") from None
    return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]), port
