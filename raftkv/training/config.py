"""The configuration of a node: names, limits and times of a run.

>>> parse_options({"lease_ttl": "2", "timeout": 900})
{'lease_ttl_s': 2}

Defines the option names that users write (``--rdzv-conf=lease_ttl=2,last_call_timeout=10``) and their valid values.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from raftkv.client.arguments import limit, text, whole
from raftkv.errors import ConfigError
from raftkv.training.records import SLOTS_MAX, check_cluster, check_run_id
from raftkv.urls import Endpoint

APPEND: Final = "append"
FILL: Final = "fill"
TOPOLOGY: Final = "topology"
RANK_POLICIES: Final = (APPEND, FILL, TOPOLOGY)

CONNECT_TIMEOUT_S: Final = 60.0
"""Equals ``read_timeout`` of torch's own rendezvous: nodes and the store may start side by side."""

IGNORED: Final = frozenset((
    "timeout", "rank", "is_host", "store_type", "read_timeout", "close_timeout", "heartbeat_timeout",
    "keep_alive_interval", "keep_alive_max_attempt", "protocol", "cacert", "ssl_cert", "ssl_cert_key",
))  # fmt: skip
"""Names that torch injects, or that its other backends use: accepted and ignored."""

_NODES_MAX: Final = 16_384
_WHOLE: Final = (
    "min_nodes", "max_nodes", "expected_nodes", "weight", "slots", "host_slots", "fault_limit", "fault_window_s",
    "fault_cooldown_s", "memory_bytes",
)  # fmt: skip
_SECONDS: Final = (
    "lease_ttl_s", "disconnect_grace_s", "last_call_timeout_s", "connect_timeout_s", "join_timeout_s",
    "return_timeout_s",
)  # fmt: skip
_TEXTS: Final = ("cluster", "rank_policy", "host", "address", "topology")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The names, limits and times with which a node takes part in a run.

    Attributes:
        run_id: id of the job.
        min_nodes, max_nodes: no generation begins with fewer, none has more.
        lease_ttl_s: time of silence after which a node is lost; the cluster may raise it (etcd to 2).
        disconnect_grace_s: time after which a node with a broken connection is lost; 0: only the TTL counts.
        last_call_timeout_s: how long the first generation waits for more nodes once the minimum is present.
        connect_timeout_s: how long a starting node tries to reach the store, which may be starting too.
        join_timeout_s: how long a node waits for a generation.
        return_timeout_s: time after the end of a generation until a member that keeps its lease but does not come back
            (for example because its workers do not end) is evicted, if enough others are present; at most half of
            ``join_timeout_s``, so that the others do not give up first; 0: never.
        expected_nodes: the first generation begins at once when this number of nodes is present; 0: unknown.
        rank_policy: ranks of new nodes: ``append``: after the survivors; ``fill``: in the places of lost nodes;
            ``topology``: all nodes are sorted by place each time.
        cluster: cluster whose slots the run shares; empty: it does not share its machines.
        weight: share of the slots, relative to other runs.
        fault_limit: number of faults within ``fault_window_s`` after which a host is excluded for ``fault_cooldown_s``;
            0: never.
        host, address, slots, topology: properties of this node; see ``records.Node``.
        host_slots: slots that its host has for all runs of the cluster; 0: not given.
        memory_bytes: memory of this node for copies of checkpoints (``checkpoint.copies``); 0: none.
    """

    run_id: str
    min_nodes: int = 1
    max_nodes: int = 1
    lease_ttl_s: int = 1
    disconnect_grace_s: float = 0.1
    last_call_timeout_s: float = 5.0
    connect_timeout_s: float = CONNECT_TIMEOUT_S
    join_timeout_s: float = 600.0
    return_timeout_s: float = 300.0
    expected_nodes: int = 0
    rank_policy: str = APPEND
    cluster: str = ""
    weight: int = 1
    fault_limit: int = 3
    fault_window_s: int = 600
    fault_cooldown_s: int = 300
    host: str = ""
    address: str = ""
    slots: int = 1
    topology: str = ""
    host_slots: int = 0
    memory_bytes: int = 0

    def checked(self) -> RunConfig:
        """Return the configuration with the host's name filled in.

        Raises:
            ConfigError: the configuration is not valid.
            TypeError, ValueError: a value has the wrong type or is not finite; stored, it would affect all nodes.
        """
        check_run_id(self.run_id)
        for name in _WHOLE:
            whole(getattr(self, name), _user_name(name))
        for name in _SECONDS:
            limit(getattr(self, name), _user_name(name))
        for name in _TEXTS:
            text(getattr(self, name), _user_name(name))
        if self.cluster:
            check_cluster(self.cluster)
        if not 1 <= self.min_nodes <= self.max_nodes <= _NODES_MAX:
            raise ConfigError(
                f"{self.min_nodes}:{self.max_nodes} is not a number of nodes: "
                f"give 1 <= minimum <= maximum <= {_NODES_MAX}"
            )
        if self.expected_nodes > self.max_nodes:
            raise ConfigError(f"expected_nodes is {self.expected_nodes}, but at most {self.max_nodes} may take part")
        for name in ("lease_ttl_s", "slots", "weight", "fault_window_s", "fault_cooldown_s"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{_user_name(name)} must be at least 1, not {getattr(self, name)}")
        for name in ("slots", "host_slots", "weight"):  # other runs read them too, and refuse what no host has
            if getattr(self, name) > SLOTS_MAX:
                raise ConfigError(f"{_user_name(name)} must be at most {SLOTS_MAX}, not {getattr(self, name)}")
        for name in (
            "disconnect_grace_s", "last_call_timeout_s", "return_timeout_s", "expected_nodes", "fault_limit",
            "host_slots", "memory_bytes",
        ):  # fmt: skip
            if getattr(self, name) < 0:
                raise ConfigError(f"{_user_name(name)} must not be negative: {getattr(self, name):g}")
        for name in ("connect_timeout_s", "join_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{_user_name(name)} must be positive, not {getattr(self, name):g}")
        if self.rank_policy not in RANK_POLICIES:
            raise ConfigError(f"rank_policy is one of {', '.join(RANK_POLICIES)}, not {self.rank_policy!r}")
        host = self.host or socket.gethostname()
        if "/" in host or not host.isprintable():
            raise ConfigError(f"node_name {host!r} cannot be used: no slashes, printable characters only")
        return replace(self, host=host, address=self.address or host)


def _seconds(written: str) -> float:
    value = float(written)
    if not 0 <= value < 1e9:
        raise ValueError
    return value


def _size(written: str) -> int:
    """Parse a size such as ``8GiB`` into bytes. Raises ValueError."""
    found = re.fullmatch(r"([0-9]{1,15})(?:([KMGT])iB)?", written)
    if found is None:
        raise ValueError
    return int(found[1]) << 10 * " KMGT".index(found[2] or " ")


Option = tuple[str, Callable[[str], Any], str]
"""A field, the parser of its text, and what the text is."""

_OPTIONS: Final[dict[str, Option]] = {
    "lease_ttl": ("lease_ttl_s", int, "whole seconds"),
    "disconnect_grace": ("disconnect_grace_s", _seconds, "seconds"),
    "last_call_timeout": ("last_call_timeout_s", _seconds, "seconds"),
    "connect_timeout": ("connect_timeout_s", _seconds, "seconds"),
    "join_timeout": ("join_timeout_s", _seconds, "seconds"),
    "return_timeout": ("return_timeout_s", _seconds, "seconds"),
    "expected_nodes": ("expected_nodes", int, "a number"),
    "rank_policy": ("rank_policy", str, "a name"),
    "cluster": ("cluster", str, "a name"),
    "weight": ("weight", int, "a number"),
    "fault_limit": ("fault_limit", int, "a number"),
    "fault_window": ("fault_window_s", int, "whole seconds"),
    "fault_cooldown": ("fault_cooldown_s", int, "whole seconds"),
    "node_name": ("host", str, "a name"),
    "slots": ("slots", int, "a number"),
    "topology": ("topology", str, "a path"),
    "host_slots": ("host_slots", int, "a number"),
    "checkpoint_memory": ("memory_bytes", _size, "bytes, as 8GiB"),
}
OPTION_NAMES: Final = tuple(sorted(_OPTIONS))
"""Names of options that users may give."""


def _user_name(field_name: str) -> str:
    return next((name for name, option in _OPTIONS.items() if option[0] == field_name), field_name)


def parse_options(options: Mapping[str, Any], more: Mapping[str, Option] | None = None) -> dict[str, Any]:
    """Convert option names that users write to fields of ``RunConfig``.

    Arguments:
        options: name to value, strings or numbers; names of torch's other backends are dropped.
        more: further options that the user may give.

    Raises:
        ConfigError: a name is unknown, or a value has the wrong form.
    """
    fields: dict[str, Any] = {}
    known = {**_OPTIONS, **(more or {})}
    for name, value in options.items():
        if name in known:
            field_name, convert, kind = known[name]
            try:
                fields[field_name] = convert(str(value))
            except (KeyError, ValueError):
                raise ConfigError(f"{name}={value}: {kind} expected") from None
        elif name not in IGNORED:
            raise ConfigError(f"unknown option {name!r}; known are {', '.join(sorted(known))}")
    return fields


# -- address --------------------------------------------------------------------------------------------------------
# A guess at this machine's address as other nodes see it: the source address of its packets to the cluster.
#
# If the cluster is on this machine, that address is of no use. Then the guess is the address of the machine's name, or
# loopback, with which at least a job on one machine works.

LOOPBACK: Final = "127.0.0.1"


def guess_address(endpoints: Iterable[Endpoint]) -> str:
    """Guess this machine's numeric address. May query DNS, so do not call it on an event loop; connects to nothing."""
    address = next(filter(None, map(_source_towards, endpoints)), LOOPBACK)
    if not is_loopback(address):
        return address
    try:
        named = str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return address
    return address if is_loopback(named) else named


def is_loopback(address: str) -> bool:
    """Return whether an address is loopback, so that no other machine can reach it."""
    return address.startswith("127.") or address == "::1"


def _source_towards(endpoint: Endpoint) -> str:
    """Return the source address of packets to an endpoint; empty: no route."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError:
        return ""
