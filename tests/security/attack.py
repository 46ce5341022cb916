"""What an attack is: a known hole, what is done, and whether it did harm.

    Attack("CVE-2018-1099", "a page reads a member's answers under its own name", rebind, etcd=FALLS)

The same attack goes against raftkv, which must resist, and against etcd 3.5.1, where ``etcd`` says what happens. An
attack that an etcd falls for is known to work, so its failure on raftkv means something. Where etcd 3.5.1 is mended
already, or has no such part, the row says so and is played on raftkv alone.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

from tests.compat.wire import Answer, Wire
from tests.procs import Cluster

FALLS = "falls"
RESISTS = "resists"
PATIENCE_S = 90.0


@dataclass
class Stage:
    """A running cluster under attack.

    Attributes:
        cluster: its members.
        wire: an honest client's connections.
        tokens: of users by name, where there are users.
        tls_endpoint: of the first member's client port with TLS.
    """

    cluster: Cluster
    wire: Wire
    tokens: dict[str, str]
    tls_endpoint: str = ""

    @property
    def endpoint(self) -> str:
        """The URL of the first member's client port."""
        return self.cluster.endpoints[0]

    @property
    def peer_endpoint(self) -> str:
        """The URL of the first member's peer port."""
        return f"127.0.0.1:{self.cluster.members[0].peer_port}"

    def call(self, method: str, request: object, user: str = "") -> Answer:
        """Call as a user, or without one."""
        metadata = (("token", self.tokens[user]),) if user else ()
        return self.wire.call(method, request, metadata=metadata)


@dataclass(frozen=True)
class Attack:
    """One row of the table.

    Attributes:
        id: of the hole.
        what: is done.
        run: does it; True if it did harm.
        etcd: what etcd 3.5.1 does, ``FALLS`` or ``RESISTS``; otherwise why it is not asked.
        slow: raftkv needs seconds to resist, because it waits for a timeout.
    """

    id: str
    what: str
    run: Callable[[Stage], bool]
    etcd: str
    slow: bool = False


def connect(endpoint: str) -> socket.socket:
    """A plain connection."""
    host, _, port = endpoint.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def say(endpoint: str, data: bytes, silence_s: float = 0.5) -> bytes:
    """Send bytes; return all that is answered until the other end closes, or is silent for a time."""
    heard = b""
    with connect(endpoint) as sock:
        sock.settimeout(silence_s)
        try:
            sock.sendall(data)
            while piece := sock.recv(65_536):
                heard += piece
        except (TimeoutError, ConnectionError):
            pass
    return heard
