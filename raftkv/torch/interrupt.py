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
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_OWN: Final = Path("/proc/self")
_EPOLL: Final = "anon_inode:[eventpoll]"


def gloo_devices() -> frozenset[int]:
    """Descriptors of the epoll instances of all gloo devices of this process."""
    return frozenset(descriptor for descriptor, _ in _devices())


def cut_gloo(ignore: frozenset[int] = frozenset()) -> int:
    """Shut down every connection between gloo devices; returns how many there were.

    Arguments:
        ignore: devices that are somebody else's, as ``gloo_devices`` has told them.
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
