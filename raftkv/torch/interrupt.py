"""Waking a thread that is blocked in torch: in a gloo collective, or in a call to a TCPStore.

Neither can be cancelled: ``ProcessGroupGloo.abort`` does nothing in torch 2.13, and a peer that is *frozen* keeps its
connections open, so a collective with it lasts until the timeout of the group. What does work, within milliseconds, is
to shut down the sockets that the blocked call waits on, from another thread: gloo then fails every collective as if the
peer had closed the connection, which it is prepared for. The peers at the other ends see the same, so an end of a group
spreads by itself.

    cut_gloo(ignore=frozenset())       # every connection of every gloo group
    cut_connections("10.0.0.5", 4711)  # this process' clients of a TCPStore

Which sockets are gloo's is read from ``/proc/self``: a gloo device polls, with one epoll instance, one pipe, one
listening socket and the connections of its groups, and nothing else. Python's event loops have a socket pair in place
of the pipe, libuv (the TCPStore's server) an eventfd beside it. Elsewhere than on Linux nothing is found, and a
collective with a frozen peer lasts until its timeout.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
from torch._C._distributed_c10d import Work
from torch.distributed import distributed_c10d
from torch.optim import Optimizer

_OWN: Final = Path("/proc/self")
_EPOLL: Final = "anon_inode:[eventpoll]"


def gloo_devices() -> frozenset[int]:
    """Descriptors of the epoll instances of all gloo devices of this process."""
    return frozenset(descriptor for descriptor, _ in _devices())


def cut_gloo(ignore: frozenset[int] = frozenset()) -> int:
    """Shut down every connection between gloo devices; returns how many there were.

    Arguments:
        ignore: devices of other code, as ``gloo_devices`` has told them.
    """
    connections = [target for device, targets in _devices() if device not in ignore for target in targets]
    return sum(_shut_down(descriptor) for descriptor in connections)


def cut_connections(address: str, port: int) -> int:
    """Shut down every connection of this process *to* an address (in numbers); returns how many there were.

    Arguments:
        address: of the peer, in numbers.
        port: of the peer.
    """
    cut = 0
    for descriptor in _descriptors():
        with _borrowed(descriptor) as connection:
            if connection is not None and _peer(connection) == (_plain(address), port):
                cut += _shut_down(descriptor)
    return cut


def _devices() -> Iterator[tuple[int, list[int]]]:
    """Find each gloo device's epoll descriptor and those of its connections."""
    for descriptor in _descriptors():
        targets = _polled(descriptor)
        sockets = {target: _listens(target) for target in targets if not _is_pipe(target)}
        if len(targets) - len(sockets) != 1 or None in sockets.values():
            continue
        if sum(listens is True for listens in sockets.values()) == 1:
            yield descriptor, [target for target, listens in sockets.items() if not listens]


def _descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir(_OWN / "fd")]
    except OSError:
        return []


def _polled(descriptor: int) -> list[int]:
    """Return what an epoll instance polls; nothing, if it is none."""
    try:
        if os.readlink(_OWN / "fd" / str(descriptor)) != _EPOLL:
            return []
        lines = (_OWN / "fdinfo" / str(descriptor)).read_text().splitlines()
    except OSError:
        return []
    return [int(line.split()[1]) for line in lines if line.startswith("tfd:")]


def _is_pipe(descriptor: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:
        return False


def _listens(descriptor: int) -> bool | None:
    """Tell whether a descriptor is a listening TCP socket; None: it is no TCP socket."""
    with _borrowed(descriptor) as found:
        if found is None:
            return None
        try:
            return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        except OSError:
            return None


def _shut_down(descriptor: int) -> bool:
    with _borrowed(descriptor) as connection:
        if connection is None:
            return False
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False  # it is closed, or was never connected
        return True


def _peer(connection: socket.socket) -> tuple[str, int] | None:
    try:
        name = connection.getpeername()
    except OSError:
        return None
    return _plain(name[0]), name[1]


def _plain(address: str | int) -> str:
    """Return an address, an IPv4 one in the words of IPv6 as what it is."""
    return str(address).removeprefix("::ffff:")


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket | None]:
    """Make a socket object for a descriptor that is not ours, on a copy of it; None: it is no TCP socket."""
    copy: socket.socket | None = None
    try:
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            copy = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        copy = None
    try:
        yield copy if copy is not None and copy.family in (socket.AF_INET, socket.AF_INET6) else None
    finally:
        if copy is not None:
            copy.close()


# ---- waits that end when the group is over, also where gloo itself would wait for ever
#
# gloo (torch 2.13) loses a send that was queued just as its connection closed: neither the peer's death nor a cut
# wakes ``UnboundBuffer::waitSend``, and the caller waits until the group's timeout, about once in ten breaks of a
# group of two. So a wait for a ``Work`` on the CPU is cut into slices, and given up with ``WorkLost`` when ``is_over``
# has been true for ``GIVE_UP_S``. The destructor of such a group would join the thread that gloo has lost: ``leak``
# keeps both until the process ends. Left out: waits inside C++ (DistributedDataParallel's reducer), and NCCL.

SLICE: Final = timedelta(milliseconds=50)
GIVE_UP_S: Final = 0.1
"""What gloo has for failing a collective by itself, which takes it a millisecond or two."""

_work: Final[Any] = Work
"""Its methods can be replaced, though its stubs deny that."""
_wait: Final[Callable[..., bool]] = _work.wait
_present: list[Waits] = []


class WorkLost(RuntimeError):
    """A collective of a group that is over, and that gloo does not end."""


class Waits:
    """Ends the waits of a group once the group is over; see the module. One exists at a time.

    Arguments:
        is_over: asked on the waiting thread.

    Attributes:
        lost: a work was given up since ``leak``.
    """

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self.is_over = is_over
        self.lost = False
        _present.append(self)
        _work.wait = _wait_in_slices

    def leak(self, groups: Iterable[Any]) -> None:
        """If a work was lost, keep its groups for ever: their destructors must not run, at the process' end neither."""
        if self.lost:
            for group in groups:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self.lost = False

    def close(self) -> None:
        """Let waits be what they were."""
        if self in _present:
            _present.remove(self)
        if not _present:
            _work.wait = _wait


def _wait_in_slices(work: Any, timeout: timedelta = timedelta(0)) -> bool:
    """``Work.wait``; a timeout of 0 is none, as there."""
    if timeout or not _present:
        return _wait(work, timeout)
    waits = _present[-1]
    over_since = 0.0
    while not work.is_completed():
        if not waits.is_over():
            over_since = 0.0
        elif not over_since:
            over_since = time.monotonic()
        elif time.monotonic() - over_since > GIVE_UP_S:
            waits.lost = True
            raise WorkLost("gloo/transport: a collective of a generation that is over was lost")
        try:
            return _wait(work, SLICE)
        except RuntimeError:
            if work.is_completed():
                break  # it has failed, just now
    return _wait(work, timeout)


# ---- NCCL: collectives run on the device, and an abort ends them without an error
#
# A call returns when its kernel is queued. When a peer is lost, only an abort of communicators ends the kernels, and
# then they end as if they had succeeded, with the bytes that had come: ``optimizer.step()`` would apply gradients that
# never were. So ``settle`` first waits for the device, and then looks whether there was an abort. A hook of torch's
# calls it before every ``Optimizer.step``, so that a loop written for gloo is right on NCCL too.
#
# Torch's watchdog of a group would end the process at the first error, and sleep for a minute before; ``ENVIRONMENT``
# turns both off, unless the user's says otherwise. Communicators in the making cannot be aborted: a rank that freezes
# then holds up all others. ``init_process_group`` with a device makes them within a fraction of a second, while every
# rank is known to be there; without one the first collective does. A process stuck there can only be ended. Left out:
# several devices in one process.

ENVIRONMENT: Final = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",  # the watchdog sleeps four times as long, dump or no dump
}
STUCK_S: Final = 10.0
"""For so long after the end of a generation its communicators may still be in the making."""


class Aborted(RuntimeError):
    """Collectives of a generation may have been cut off: what they have written is not to be used."""


class Communicators:
    """The communicators of NCCL of the present groups; see the module.

    Arguments:
        settle_step: called before each step of an optimizer of this process, until ``close``.
        device: of this rank; None: the current one, at each call.
        wait: for all that is queued on a device; another in tests.
    """

    def __init__(
        self,
        settle_step: Callable[[], object],
        device: torch.device | None = None,
        wait: Callable[[torch.device | None], object] = torch.cuda.synchronize,
    ) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self.device = device
        self._wait = wait
        self._aborted = 0
        self._is_connecting = False
        self._unhook = _before_steps(settle_step)

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """Tell that communicators are in the making while the block lasts."""
        self._is_connecting = True
        try:
            yield
        finally:
            self._is_connecting = False

    def are_stuck(self, over_for_s: float) -> bool:
        """Tell whether they are still in the making, so long after the generation was over."""
        return self._is_connecting and over_for_s > STUCK_S

    def abort(self, generation: int) -> None:
        """Abort those that there are now, on a thread of its own; what is settled in the generation then raises."""
        self._aborted = generation  # before any kernel ends because of it
        groups = list(distributed_c10d._world.pg_map)  # these, and none that is made later
        threading.Thread(target=_abort, args=(groups,), name="raftkv-abort", daemon=True).start()

    def settle(self, generation: int) -> None:
        """Wait until the device has done what is queued.

        Raises:
            Aborted: the communicators of the generation were aborted, maybe before that.
        """
        self._wait(self.device)
        if self._aborted == generation:
            raise Aborted(f"generation {generation} ended while its collectives were on the device")

    def close(self) -> None:
        """Let optimizers step as they like. Harmless when repeated."""
        self._unhook()


def _before_steps(settle: Callable[[], object]) -> Callable[[], object]:
    """Have something called before each step of any optimizer; returns what ends that."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        settle()

    handle: Final = register_optimizer_step_pre_hook(before)
    return handle.remove


def _abort(given: list[Any]) -> None:
    """Abort the communicators of groups, together: one alone might wait for another."""
    groups = [group for group in given if _has_nccl(group)]
    if not groups:
        return
    first = groups[0]._get_backend(torch.device("cuda"))
    first._group_start()
    for group in groups:
        group._get_backend(torch.device("cuda")).abort()
    first._group_end()


def _has_nccl(group: Any) -> bool:
    try:
        return "nccl" in str(group._get_backend(torch.device("cuda")).name()).lower()
    except RuntimeError:
        return False
