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
from raftkv.training.config import Option, RunConfig, guess_address, parse_options
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
_WORDS: Final = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)
_PORT_MAX: Final = 65_535

_OPTIONS: Final[dict[str, Option]] = {
    **{name: (name, str, "a text") for name in CONNECTION},
    "tls": ("tls", lambda text: _WORDS[text.lower()] or None, "true or false"),
    STORE_PORT: (STORE_PORT, lambda text: range(_PORT_MAX + 1).index(int(text)), "a port"),
    EXIT_BARRIER: (EXIT_BARRIER, lambda text: limit(float(text), EXIT_BARRIER), "seconds"),
    PREFORK: (PREFORK, lambda text: tuple(text.replace("+", " ").split()), "names of modules"),
}
"""Keys of ``--rdzv-conf`` besides the run's, and those that torch adds."""


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
    for name in _ON_COMMAND_LINE:
        if name in params.config:
            raise ConfigError(
                f"--rdzv-conf: every user of the machine can read a {name} there, and torchrun logs it: give "
                f"{name}_file, or RAFTKV_{name.upper()}_FILE in the environment"
            )
    try:
        fields = parse_options(params.config, _OPTIONS)
    except ConfigError as error:
        raise ConfigError(f"--rdzv-conf: {error}") from None
    connection: dict[str, Any] = {name: fields.pop(name) for name in CONNECTION if name in fields}
    for name in _ON_COMMAND_LINE:
        if file := connection.pop(f"{name}_file", ""):
            connection[name] = Secret(Path(file))
    port, exit_barrier, prefork = fields.pop(STORE_PORT, 0), fields.pop(EXIT_BARRIER, None), fields.pop(PREFORK, ())
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
