"""``torchrun --rdzv-backend=raftkv``: the rendezvous of torch's elastic agents in a raftkv (or etcd) cluster.

::

    torchrun --rdzv-backend=raftkv --rdzv-endpoint=h1:2379,h2:2379,h3:2379 --rdzv-id=job --nnodes=2:4 train.py

Translates between an agent of torch and a ``Participant``; the rules are in ``raftkv.training``:

    agent                                   participant
    next_rendezvous()                       next_world(), then the generation's store: host and publish, or connect
    num_nodes_waiting(), every 0.1 s        nodes_waiting, read from memory
    a worker dies                           report(fault), at once, by ``training.process.faults``
    the last barrier begins                 finish(): the last agent whose workers succeeded closes the run
    shutdown()                              close(), if this agent failed for good; leave()
    the process ends by a signal            leave()

Guarantees:

1. A healthy worker never ends because the cluster is unreachable: the agent's polls are answered from memory, and calls
   wait for the cluster. Only the first connection fails, with a one-line error, after ``connect_timeout``.
2. Each generation has a new store on the node of rank 0, so no key of an earlier generation is found.
3. An agent that is ended by a signal does not close the run; neither does one that has finished while others train, and
   the others continue when it leaves.
4. Under ``torchrun`` every failure is one line on stderr; from Python it is one of torch's exceptions.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Final, NoReturn

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from raftkv.client.control import until_answered
from raftkv.client.records import RecordError
from raftkv.client.sync.library import Client
from raftkv.client.sync.loop import Closed
from raftkv.errors import ConfigError, RaftKVError, StatusError
from raftkv.torch import settings
from raftkv.torch.agent_store import AgentStore, GenerationEnded, StoreUnreachable, connect_store, host_store
from raftkv.torch.prefork import Prefork
from raftkv.training.api.attachment import announce
from raftkv.training.config import RunConfig
from raftkv.training.errors import ClusterAway, GenerationOver, JoinTimeout, RunClosed, RunConflict
from raftkv.training.process.faults import End, Worker, WorkerWatch, signal_name
from raftkv.training.records import RunKeys
from raftkv.training.rendezvous.participant import Progress, explain_outage, waiting
from raftkv.training.rendezvous.sync_participant import Participant
from raftkv.training.rendezvous.world import World

BACKEND: Final = "raftkv"
FAILED: Final = "failed: "
"""Prefix of the close reason of a failed run, after which no node continues."""
FIRST_CONTACT_S: Final = 4.0
_PUBLISH_TIMEOUT_S: Final = 60.0
_GOODBYE_S: Final = 1.0
"""How long the host of the store waits for other agents that are about to end."""
_GOODBYE_KEY: Final = "raftkv/goodbye"
_LOOKS_OFTEN: Final = 50
_INTERRUPTED: Final = 130
_PROGRESS_EVERY_S: Final = 1.0


class _OneLine(SystemExit):
    """An error that, if uncaught, ends Python with its text on stderr instead of a traceback."""


def failure(kind: type[Exception], text: str, *, status: int | None = None) -> Exception:
    """Make an error of torch's class; under ``torchrun`` it is printed as one line.

    Arguments:
        kind: exception class that programs catch.
        text: the line.
        status: exit status of the process, without a message; None: print the text and exit with 1.
    """
    if not _is_torchrun():
        return kind(text)
    error: Any = type(kind.__name__, (kind, _OneLine), {"__module__": kind.__module__})(text)
    error.code = f"raftkv: {text}" if status is None else status
    made: Exception = error
    return made


def _is_torchrun() -> bool:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    name = getattr(spec, "name", "") or sys.argv[0].replace("\\", "/").rpartition("/")[2]
    launched = name in ("torchrun", "torchrun.exe", "torch.distributed.run", "torch.distributed.launch")
    return launched and threading.current_thread() is threading.main_thread()


def create_handler(params: RendezvousParameters) -> RaftKVRendezvousHandler:
    """Create a handler for one agent; the entry point for torch.

    Raises:
        ConfigError: the settings are not valid.
        RendezvousConnectionError: no member of the cluster answers.
    """
    try:
        given = settings.read(params)
        kv = given.connect()
    except ConfigError as error:
        raise failure(ConfigError, str(error)) from None
    try:
        _first_contact(kv, given.run)
    except RaftKVError as error:
        kv.close()
        raise failure(
            RendezvousConnectionError,
            str(error) if isinstance(error, ClusterAway) else f"--rdzv-endpoint={params.endpoint}: {error}",
        ) from None
    return RaftKVRendezvousHandler(kv, given)


def _first_contact(kv: Client, run: RunConfig) -> None:
    """Wait for the cluster, and report the wait. Raises StatusError if it refused or did not answer in time."""
    loop, client = kv.target()
    key = RunKeys(run.run_id).state
    with explain_outage(client, run.run_id, run.connect_timeout_s):
        get = until_answered(
            lambda: client.get(key, serializable=True, timeout_s=FIRST_CONTACT_S), run.connect_timeout_s, waiting(_say)
        )
        loop.run(get)


class RaftKVRendezvousHandler(RendezvousHandler):
    """The rendezvous of one torchrun agent; made by ``create_handler``.

    Arguments:
        kv: client, which the handler closes.
        given: the settings.
    """

    def __init__(self, kv: Client, given: settings.Settings) -> None:
        self._kv = kv
        self._given = given
        self._participant: Participant | None = None
        self._world: World | None = None
        self._server: TCPStore | None = None
        self._store: TCPStore | None = None
        self._agent_store: AgentStore | None = None
        self._watch = WorkerWatch(self._worker_ended, run_id=given.run.run_id)
        self._looks = 0
        self._doubtful: End | None = None
        self._has_fault = False
        self._has_left = False
        self._pid = os.getpid()
        self._progress_at = 0.0
        self._prefork = Prefork(given.prefork, self._watch.add) if given.prefork else None
        atexit.register(self._leave)

    # ---- what torch asks

    def get_backend(self) -> str:
        """Return ``raftkv``."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Return True: workers use the store that the agent of rank 0 hosts."""
        return True

    def get_run_id(self) -> str:
        """Return the id of the job."""
        return self._given.run.run_id

    def num_nodes_waiting(self) -> int:
        """Return 0 while the generation lasts; called at every poll of the agent, without I/O."""
        self._look_for_workers()
        participant = self._participant
        if participant is None:
            return 0
        if self._agent_store is not None and self._agent_store.has_made_up:
            return 1
        if participant.closed:
            return 1 if self._closed_reason(participant).startswith(FAILED) else 0
        return participant.nodes_waiting

    def is_closed(self) -> bool:
        """Return whether the run is closed."""
        return self._participant is not None and self._participant.closed

    def set_closed(self) -> None:
        """Close the run for all nodes."""
        with _torch_errors():
            self._open().close("closed by an agent")

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next generation with this node, and for its store.

        Raises:
            RendezvousClosedError: the run is closed.
            RendezvousTimeoutError: too few nodes came.
            RendezvousConnectionError: the cluster, or the store of rank 0, cannot be used.
            RendezvousStateError: another job uses this run id, or something else wrote its keys.
        """
        self._tell_what_torch_saw()
        self._drop_store()
        try:
            with _torch_errors():
                return self._next_whole_world()
        except RendezvousClosedError as error:
            if self._world is None and FAILED not in str(error):
                _end_as_spare(str(error))
            raise
        except KeyboardInterrupt:
            if _is_torchrun():
                raise SystemExit(_INTERRUPTED) from None  # a traceback of the wait does not help users
            raise

    def shutdown(self) -> bool:
        """Close the run if this agent failed permanently or is the last to finish, and leave the run."""
        participant = self._participant
        if participant is not None and not self._has_left:
            self._tell_what_torch_saw()
            reason = self._failure()
            if reason:
                with contextlib.suppress(RaftKVError):
                    participant.close(FAILED + reason)
            elif sys.exc_info()[1] is None:
                self._finish()
            self._say_goodbye()
        self._leave()
        return True

    # ---- a generation begins

    def _open(self) -> Participant:
        if self._participant is None:
            self._participant = Participant.open(self._kv, self._given.run, on_progress=self._show_progress)
        return self._participant

    def _next_whole_world(self) -> RendezvousInfo:
        participant = self._open()
        while True:
            world = self._next_world(participant)
            try:
                return self._start(participant, world)
            except (GenerationOver, GenerationEnded):
                self._drop_store()

    def _next_world(self, participant: Participant) -> World:
        world = participant.next_world()
        self._show_generation(participant, world)
        self._world = world
        self._looks = 0
        self._doubtful = None
        self._has_fault = False
        return world

    def _start(self, participant: Participant, world: World) -> RendezvousInfo:
        if world.node_rank == 0:
            self._server = self._store = host_store(self._given.store_port)
            place = RendezvousStoreInfo(self._given.run.address, self._server.port)
            participant.publish(f"{place.master_addr} {place.master_port}")
        else:
            place = self._published(participant)
            self._store = connect_store(place.master_addr, place.master_port, self._is_over)
        self._agent_store = AgentStore(
            self._store, self._is_over, world.node_count, self._finish, self._given.exit_barrier_timeout_s
        )
        self._announce(world)
        return RendezvousInfo(self._agent_store, world.node_rank, world.node_count, place)

    def _published(self, participant: Participant) -> RendezvousStoreInfo:
        try:
            text = participant.published(_PUBLISH_TIMEOUT_S)
        except TimeoutError:
            raise StoreUnreachable(
                f"the node of rank 0 did not start its store within {_PUBLISH_TIMEOUT_S:g} s: see its log"
            ) from None
        host, _, port = text.rpartition(" ")
        if not (host and port.isdecimal() and len(port) <= 5 and int(port) < 1 << 16):
            raise RecordError("boot", f"{text!r} is not an address and a port")
        return RendezvousStoreInfo(host, int(port))

    def _announce(self, world: World) -> None:
        """Set the workers' variables for generation and cluster; torch copies the agent's environment."""
        announce(world.run_id, world.generation, ",".join(item.text for item in self._given.endpoints), os.environ)
        for name, value in self._given.worker_environment.items():
            os.environ.setdefault(name, value)

    def _is_over(self) -> bool:
        participant = self._participant
        return participant is None or self._has_left or participant.closed or participant.nodes_waiting > 0

    def _drop_store(self) -> None:
        if self._agent_store is not None:
            self._agent_store.drop()  # torch's agent still holds it, and the next store may need its port
        self._agent_store = None
        self._store = self._server = None

    # ---- workers

    def _look_for_workers(self) -> None:
        """Search for the workers repeatedly, because the number that torch starts is unknown."""
        self._looks += 1
        if self._looks < _LOOKS_OFTEN or self._looks % _LOOKS_OFTEN == 0:
            self._watch.look()

    def _worker_ended(self, end: End) -> None:
        """Handle the end of a worker, on the watch's thread.

        Once a generation has ended, or a worker has failed, torch itself ends the other workers. An end that may be a
        consequence of this is reported only when torch returns for the next generation, within 0.1 s: if the generation
        still lasts then, that end was the cause.
        """
        world, participant = self._world, self._participant
        if not end.is_fault or participant is None or world is None or self._has_fault or self._is_over():
            return
        if end.is_cause:
            self._report(participant, world, end)
        else:
            self._doubtful = self._doubtful or end

    def _report(self, participant: Participant, world: World, end: End) -> None:
        self._has_fault = True
        with contextlib.suppress(RaftKVError):
            participant.report(end.fault(world.generation, participant.node.id, participant.node.host))

    def _tell_what_torch_saw(self) -> None:
        """Report the failure that torch saw if it returns while the generation lasts: see ``_worker_ended``.

        Only torch knows of a worker that ended before the first search.
        """
        world, participant = self._world, self._participant
        if world is None or participant is None or self._has_fault or self._is_over():
            return
        end = self._doubtful or failure_of_agent()
        if end is not None:
            self._report(participant, world, end)

    # ---- the end

    def _failure(self) -> str:
        """Return why torch shuts down, if its workers have failed permanently; empty: they have not."""
        error = sys.exc_info()[1]
        if isinstance(error, Exception) and not isinstance(error, ChildFailedError | RendezvousError):
            what = str(error).partition("\n")[0]
            return f"the agent on {self._given.run.host} failed: {type(error).__name__}: {what}"
        if not isinstance(error, ChildFailedError):
            return ""
        rank, first = error.get_first_failure()
        how = f"was killed by {first.signal_name()}" if first.exitcode < 0 else f"exited with {first.exitcode}"
        return f"rank {rank} on {self._given.run.host} {how}, and its agent has no restarts left"

    def _finish(self) -> None:
        """Record that all workers of this node succeeded."""
        with contextlib.suppress(RaftKVError):
            if self._participant is not None:
                self._participant.finish()

    def _say_goodbye(self) -> None:
        """Keep the store open on its host, because torch's last barrier may not have reached the others yet."""
        store, world = self._agent_store, self._world
        if store is None or world is None:
            return
        with contextlib.suppress(Exception):  # not needed any more, and must not change how the agent ends
            count = store.add(_GOODBYE_KEY, 1)
            deadline = time.monotonic() + _GOODBYE_S
            pause = threading.Event()
            while self._server is not None and count < world.node_count and time.monotonic() < deadline:
                pause.wait(0.01)
                count = store.add(_GOODBYE_KEY, 0)

    def _leave(self) -> None:
        """Leave the run. Idempotent; also called at every exit of the process.

        A forked child leaves nothing, and must never free torch's server: its destructor joins a thread that only the
        parent has, which ends the child by SIGABRT once another thread has taken that thread's stack.
        """
        if self._has_left:
            return
        if os.getpid() != self._pid:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._server))
            return
        self._has_left = True
        atexit.unregister(self._leave)
        self._watch.stop()
        if self._prefork is not None:
            self._prefork.close()
        with contextlib.suppress(RaftKVError):
            if self._participant is not None:
                self._participant.leave()
        self._kv.close()
        self._drop_store()

    # ---- what people see

    @staticmethod
    def _closed_reason(participant: Participant) -> str:
        phase = participant.phase
        return phase.reason if phase is not None else ""

    def _show_progress(self, progress: Progress) -> None:
        """Print progress while nodes gather, on the client's thread."""
        if progress.damage:
            _say(f"run {self.get_run_id()!r} waits: {progress.damage}")
            return
        now = time.monotonic()
        if now - self._progress_at < _PROGRESS_EVERY_S and progress.joined < progress.min_nodes:
            return
        self._progress_at = now
        missing = f" of at least {progress.min_nodes}" if progress.joined < progress.min_nodes else ""
        because = f" ({progress.reason})" if progress.reason else ""
        _say(f"run {self.get_run_id()!r} waits: {progress.joined}{missing} nodes are there{because}")

    def _show_generation(self, participant: Participant, world: World) -> None:
        _say(
            f"run {self.get_run_id()!r}: generation {world.generation}, {world.node_count} nodes, "
            f"this is node {world.node_rank}"
        )


def failure_of_agent() -> End | None:
    """Return the failed worker that made torch's agent restart or give up; None: no worker failed.

    torch does not pass it to its handlers: it is in the error that ends the agent, or in a local variable of the agent.
    """
    error = sys.exc_info()[1]
    failures: dict[int, ProcessFailure] = error.failures if isinstance(error, ChildFailedError) else {}
    frame = sys._getframe().f_back
    while frame is not None and not failures:
        failures = getattr(frame.f_locals.get("run_result"), "failures", None) or {}
        frame = frame.f_back
    if not failures:
        return None
    rank, first = min(failures.items(), key=lambda item: item[1].timestamp)
    worker = Worker(first.pid, rank, first.local_rank, first.error_file)
    if first.exitcode < 0:
        return End(worker, -1, signal_name(-first.exitcode))
    return End(worker, first.exitcode)


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed
        print(f"raftkv: {text}", file=sys.stderr, flush=True)


def _end_as_spare(text: str) -> NoReturn:
    """Exit with status 0 on a spare node of a successful run, which was never needed."""
    _say(f"{text}; this node was not needed")
    raise failure(RendezvousClosedError, text, status=0) from None


@contextlib.contextmanager
def _torch_errors() -> Iterator[None]:
    """Raise torch's errors in place of raftkv's."""
    try:
        yield
    except (RunClosed, JoinTimeout, RunConflict, RecordError, StoreUnreachable, StatusError, Closed) as error:
        raise failure(_kind(error), str(error)) from None
    except ConfigError as error:
        raise failure(ConfigError, str(error)) from None


def _kind(error: Exception) -> type[RendezvousError]:
    for ours, theirs in _KINDS:
        if isinstance(error, ours):
            return theirs
    return RendezvousConnectionError


_KINDS: Final[tuple[tuple[type[Exception], type[RendezvousError]], ...]] = (
    (RunClosed, RendezvousClosedError),
    (JoinTimeout, RendezvousTimeoutError),
    (RunConflict, RendezvousStateError),
    (RecordError, RendezvousStateError),
)
