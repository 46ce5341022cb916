"""A guess at this machine's address as other nodes see it: the one from which it speaks to the cluster.

If the cluster is on this machine that says nothing; then it is what the machine's name stands for, or its loopback,
with which at least a job on one machine works.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Final

from raftkv.urls import Endpoint

LOOPBACK: Final = "127.0.0.1"


def guess_address(endpoints: Iterable[Endpoint]) -> str:
    """Guess this machine's address, in numbers. May ask DNS, so it is not for an event loop; sends no packet."""
    address = next(filter(None, map(_source_towards, endpoints)), LOOPBACK)
    if not is_loopback(address):
        return address
    try:
        named = str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return address
    return address if is_loopback(named) else named


def is_loopback(address: str) -> bool:
    """Tell whether no other machine can reach an address."""
    return address.startswith("127.") or address == "::1"


def _source_towards(endpoint: Endpoint) -> str:
    """Find the source address of packets to an endpoint; empty: there is no way."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError:
        return ""
