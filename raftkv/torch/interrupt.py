"""Wakes a thread that is blocked in torch: in a gloo collective, or in a call to a TCPStore.

Neither can be cancelled: ``ProcessGroupGloo.abort`` does nothing in torch 2.13, and a *frozen* peer keeps its
connections open, so a collective with it lasts until the timeout of the group. But another thread can shut down the
sockets on which the blocked call waits. Within milliseconds gloo then fails every collective as if the peer had closed
the connection. The peers at the other ends see the same, so all ranks learn of the end of the group.

    cut_gloo(ignore=frozenset())       # every connection of every gloo group
    cut_connections("10.0.0.5", 4711)  # this process' clients of a TCPStore

gloo's sockets are found in ``/proc/self``: a gloo device polls, with one epoll instance, exactly one pipe, one
listening socket and the connections of its groups. Python's event loops have a socket pair instead of the pipe, libuv
(the TCPStore's server) has an additional eventfd. On other systems than Linux nothing is found, and a collective with a
frozen peer lasts until its timeout.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
from torch._C._distributed_c10d import Work
from torch.distributed import distributed_c10d

_OWN: Final = Path("/proc/self")
_EPOLL: Final = "anon_inode:[eventpoll]"


def gloo_devices() -> frozenset[int]:
    """Return the descriptors of the epoll instances of all gloo devices of this process."""
    return frozenset(descriptor for descriptor, _ in _devices())


def cut_gloo(ignore: frozenset[int] = frozenset()) -> int:
    """Shut down every connection between gloo devices; return their number.

    Arguments:
        ignore: devices of other code, from ``gloo_devices``.
    """
    connections = [target for device, targets in _devices() if device not in ignore for target in targets]
    return sum(_shut_down(descriptor) for descriptor in connections)


def cut_connections(address: str, port: int) -> int:
    """Shut down every connection of this process *to* a numeric address; return their number.

    Arguments:
        address: numeric address of the peer.
        port: port of the peer.
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
    """Return the descriptors that an epoll instance polls; empty if it is not an epoll instance."""
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
    """Return whether a descriptor is a listening TCP socket; None: not a TCP socket."""
    with _borrowed(descriptor) as found, suppress(OSError):
        if found is not None:
            return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return None


def _shut_down(descriptor: int) -> bool:
    with _borrowed(descriptor) as connection, suppress(OSError):  # it is closed, or was never connected
        if connection is not None:
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False


def _peer(connection: socket.socket) -> tuple[str, int] | None:
    try:
        name = connection.getpeername()
    except OSError:
        return None
    return _plain(name[0]), name[1]


def _plain(address: str | int) -> str:
    """Return an address, with IPv4-mapped IPv6 addresses converted to IPv4."""
    return str(address).removeprefix("::ffff:")


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket | None]:
    """Make a socket object on a copy of a descriptor that is not ours; None: not a TCP socket."""
    copy: socket.socket | None = None
    with suppress(OSError):
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            copy = socket.socket(fileno=os.dup(descriptor))
    try:
        yield copy if copy is not None and copy.family in (socket.AF_INET, socket.AF_INET6) else None
    finally:
        if copy is not None:
            copy.close()


# ---- waits that end after the end of the group, also where gloo itself would wait for ever
#
# gloo (torch 2.13) loses a send that was queued just as its connection closed: neither the peer's death nor a cut
# wakes ``UnboundBuffer::waitSend``, and the caller waits until the group's timeout, about once in ten ends of a
# group of two. So a wait for a ``Work`` on the CPU is split into slices, and abandoned with ``WorkLost`` when
# ``is_over`` has been true for ``GIVE_UP_S``. The destructor of such a group would join the lost thread of gloo, so
# ``leak`` keeps both until the process ends. Not covered: waits inside C++ (DistributedDataParallel's reducer), NCCL.

SLICE: Final = timedelta(milliseconds=50)
GIVE_UP_S: Final = 0.1
"""Time for gloo to fail a collective by itself, which usually takes a millisecond or two."""

_work: Final[Any] = Work
"""torch's class, whose methods can be replaced although its stubs do not allow it."""
_wait: Final[Callable[..., bool]] = _work.wait
_present: list[Waits] = []


class WorkLost(RuntimeError):
    """A collective of an ended group that gloo does not end."""


class Waits:
    """Ends the waits of a group after the end of the group; see the module. Only one exists at a time.

    Arguments:
        is_over: asked on the waiting thread.

    Attributes:
        lost: whether a work was abandoned since ``leak``.
    """

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self.is_over = is_over
        self.lost = False
        _present.append(self)
        _work.wait = _wait_in_slices

    def leak(self, groups: Iterable[Any]) -> None:
        """If a work was abandoned, keep its groups for ever, because their destructors must never run, not even at
        exit."""
        if self.lost:
            for group in groups:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self.lost = False

    def close(self) -> None:
        """Restore the original wait methods."""
        if self in _present:
            _present.remove(self)
        if not _present:
            _work.wait = _wait


def _wait_in_slices(work: Any, timeout: timedelta = timedelta(0)) -> bool:
    """Replacement of ``Work.wait``; a timeout of 0 means no timeout, as there."""
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
# then they end as if they had succeeded, with the bytes received so far: ``optimizer.step()`` would apply wrong
# gradients. So ``settle`` first waits for the device, and then checks whether there was an abort. A hook of torch
# calls it before every ``Optimizer.step``, so that a loop written for gloo is correct on NCCL too.
#
# Torch's watchdog of a group would end the process at the first error, after sleeping for a minute; ``ENVIRONMENT``
# disables both, unless the user has set the variables. Communicators under construction cannot be aborted: a rank that
# freezes then delays all others. ``init_process_group`` with a device makes them within a fraction of a second, while
# every rank is known to be alive; without a device the first collective makes them. A process that is stuck there can
# only be ended. Not supported: several devices in one process.

ENVIRONMENT: Final = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",  # the watchdog sleeps four times as long, dump or no dump
}
STUCK_S: Final = 10.0
"""How long after the end of a generation its communicators may still be under construction."""


class Aborted(RuntimeError):
    """Collectives of a generation may have been interrupted, so their results must not be used."""


class Communicators:
    """The NCCL communicators of the current groups; see the module.

    Arguments:
        settle_step: called before each step of an optimizer of this process, until ``close``.
        device: device of this rank; None: the current one, at each call.
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
        """Mark communicators as under construction within the block."""
        self._is_connecting = True
        try:
            yield
        finally:
            self._is_connecting = False

    def are_stuck(self, over_for_s: float) -> bool:
        """Return whether communicators are still under construction too long after the end of the generation."""
        return self._is_connecting and over_for_s > STUCK_S

    def abort(self, generation: int) -> None:
        """Abort the existing communicators, on a separate thread; ``settle`` then raises in this generation."""
        self._aborted = generation  # before any kernel ends because of it
        groups = list(distributed_c10d._world.pg_map)  # these, and none that is made later
        threading.Thread(target=_abort, args=(groups,), name="raftkv-abort", daemon=True).start()

    def settle(self, generation: int) -> None:
        """Wait until the device has done all queued work.

        Raises:
            Aborted: the communicators of the generation were aborted, maybe before that.
        """
        self._wait(self.device)
        if self._aborted == generation:
            raise Aborted(f"generation {generation} ended while its collectives were on the device")

    def close(self) -> None:
        """Remove the hook from optimizers. Idempotent."""
        self._unhook()


def _before_steps(settle: Callable[[], object]) -> Callable[[], object]:
    """Call a function before each step of any optimizer; return a function that stops this."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def before(*_: Any) -> None:
        settle()

    return register_optimizer_step_pre_hook(before).remove


def _abort(given: list[Any]) -> None:
    """Abort the communicators of groups together, because one alone might wait for another."""
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
