"""Settings of an agent: makes a client and a ``RunConfig`` from torchrun's flags and ``--rdzv-conf``.

Defines the option names of this adapter (``CONNECTION``, ``STORE_PORT``); those of the run are in ``training.config``.
It also guesses two values that torch does not pass: this node's address for other nodes, and its number of workers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from raftkv.client.arguments import limit
from raftkv.client.credentials import Secret, announce_settings
from raftkv.client.sync.library import Client, connect
from raftkv.errors import ConfigError
from raftkv.training.config import OPTION_NAMES, RunConfig, guess_address, parse_options
from raftkv.urls import Endpoint, parse_endpoints, require_ports

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters

CONNECTION: Final = ("user", "password_file", "token_file", "ca_file", "cert_file", "key_file", "tls")
_ON_COMMAND_LINE: Final = ("password", "token")
STORE_PORT: Final = "store_port"
EXIT_BARRIER: Final = "exit_barrier_timeout"
PREFORK: Final = "prefork"
UNNAMED: Final = "none"
"""Job id that torchrun uses without --rdzv-id."""
NAMES: Final = tuple(sorted((*OPTION_NAMES, *CONNECTION, STORE_PORT, EXIT_BARRIER, PREFORK)))
"""Valid keys of ``--rdzv-conf``, besides those that torch adds."""
_TRUE: Final = ("1", "true", "yes", "on")
_FALSE: Final = ("0", "false", "no", "off")
_PORT_MAX: Final = 65_535


@dataclass(frozen=True, slots=True)
class Settings:
    """The checked settings of one agent.

    Attributes:
        endpoints: members of the cluster.
        connection: arguments of ``raftkv.connect``.
        run: the run, and this node.
        store_port: port of a generation's store, if this node hosts it; 0: any free port.
        exit_barrier_timeout_s: how long an agent whose workers succeeded waits for the others; None: torch's default.
        prefork: modules to import in spare workers in advance.
    """

    endpoints: tuple[Endpoint, ...]
    connection: Mapping[str, Any]
    run: RunConfig
    store_port: int
    exit_barrier_timeout_s: float | None = None
    prefork: tuple[str, ...] = ()

    @property
    def worker_environment(self) -> dict[str, str]:
        """Connection settings, besides endpoints, for workers that use ``raftkv.training.join()``."""
        given: dict[str, str] = {}
        announce_settings(self.connection, given)
        return given

    def connect(self) -> Client:
        """Make a client, without connecting.

        Raises:
            ConfigError: the certificates cannot be used.
        """
        return connect([endpoint.text for endpoint in self.endpoints], **self.connection)


def read(params: RendezvousParameters) -> Settings:
    """Read the settings of an agent.

    Raises:
        ConfigError: a setting is missing, unknown or not valid; the text names it and the valid values.
    """
    if not params.endpoint.strip():
        raise ConfigError("no endpoint: give --rdzv-endpoint=HOST:2379, or several separated by commas")
    _check_name(params.run_id)
    endpoints = tuple(parse_endpoints(params.endpoint))
    require_ports(endpoints)
    options = dict(params.config)
    connection: dict[str, Any] = {name: options.pop(name) for name in CONNECTION if name in options}
    for name in _ON_COMMAND_LINE:
        if name in options:
            raise ConfigError(
                f"--rdzv-conf: every user of the machine can read a {name} there, and torchrun logs it: give "
                f"{name}_file, or RAFTKV_{name.upper()}_FILE in the environment"
            )
        if file := connection.pop(f"{name}_file", ""):
            connection[name] = Secret(Path(str(file)))
    if "tls" in connection:
        connection["tls"] = _flag("tls", connection["tls"]) or None
    port = _port(options.pop(STORE_PORT, 0))
    exit_barrier = _seconds(EXIT_BARRIER, options.pop(EXIT_BARRIER, None))
    prefork = tuple(str(options.pop(PREFORK, "")).replace("+", " ").split())
    try:
        fields = parse_options(options)
    except ConfigError as error:
        raise ConfigError(f"--rdzv-conf: {_with_own_names(str(error))}") from None
    fields.setdefault("slots", _slots_of_launch())
    run = RunConfig(
        run_id=params.run_id,
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        address=params.local_addr or guess_address(endpoints),
        **fields,
    )
    return Settings(endpoints, connection, run.checked(), port, exit_barrier, prefork)


def _check_name(run_id: str) -> None:
    if run_id == UNNAMED:
        raise ConfigError(
            f"--rdzv-id is missing: name the job, as in --rdzv-id=job7 (torchrun's default, {UNNAMED!r}, would be one "
            "run for all jobs that are not named)"
        )
    if "/" in run_id:
        raise ConfigError(f"--rdzv-id={run_id}: torchrun makes a directory of that name, so it cannot have a slash")


def _with_own_names(text: str) -> str:
    """Return the list of valid names, including those of this adapter."""
    return text.replace(", ".join(OPTION_NAMES), ", ".join(NAMES))


def _flag(name: str, value: object) -> bool:
    text = str(value).lower()
    if text not in _TRUE + _FALSE:
        raise ConfigError(f"--rdzv-conf: {name}={value}: true or false expected")
    return text in _TRUE


def _port(value: object) -> int:
    text = str(value)
    if not text.isdecimal() or int(text) > _PORT_MAX:
        raise ConfigError(f"--rdzv-conf: {STORE_PORT}={value}: a port expected, or 0 for any")
    return int(text)


def _seconds(name: str, value: object) -> float | None:
    if value is None:
        return None
    try:
        return limit(float(str(value)), name)
    except ValueError:
        raise ConfigError(f"--rdzv-conf: {name}={value}: seconds expected") from None


def _slots_of_launch() -> int:
    """Return the number of workers of this agent: torch does not pass it to handlers, but its launcher is on the stack.

    The number is only shown to users; torch assigns the ranks of workers.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        slots = getattr(frame.f_locals.get("config"), "nproc_per_node", None)
        if isinstance(slots, int) and slots > 0:
            return slots
    return 1
