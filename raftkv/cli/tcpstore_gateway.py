"""``raftkv tcpstore-gateway``: torch's TCPStore protocol, replicated in a raftkv cluster.

Owns its flags, its readiness line on standard output, and its end by a signal.

    raftkv tcpstore-gateway --listen 127.0.0.1:29400 --endpoints h1:2379,h2:2379,h3:2379
    raftkv tcpstore-gateway --run job1            # its keys are those of the run, and end with it
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from raftkv.cli import daemon
from raftkv.cli.pflag import BOOL, INT, Flag
from raftkv.cli.program import SUCCESS
from raftkv.client.errors import EndpointsFailed
from raftkv.errors import ConfigError

if TYPE_CHECKING:
    from raftkv.training.tcpstore.gateway import GatewayConfig

FLAGS = (
    Flag("listen", default="127.0.0.1:29400", usage="HOST:PORT for clients of TCPStore; port 0: any that is free"),
    daemon.ENDPOINTS,
    Flag("name", default="default", usage="the store; gateways of one name, on any node, serve one store"),
    Flag("run", usage="keep the store with the keys of this run, instead of below a name"),
    Flag("prefix", usage="keep the store below these keys, instead"),
    Flag("linger", INT, 60, usage="seconds that the keys outlive the last gateway of the store, if it was killed"),
    Flag("fresh", BOOL, usage="begin with an empty store, also if another gateway serves it"),
    *daemon.CREDENTIALS,
)

USAGE = """\
Usage:
  raftkv tcpstore-gateway [flags]

Serves torch's TCPStore from raftkv: stock torchrun (c10d) and other programs that know only TCPStore then outlive the
loss of any node. Run one on each node, and point its clients at it:

  torchrun --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:29400 --rdzv-conf=is_host=0 ...

Flags:"""


def main(words: Sequence[str]) -> int:
    """Serve until a signal comes.

    Arguments:
        words: the command line after ``tcpstore-gateway``.

    Returns:
        0.

    Raises:
        CommandError, RaftKVError: it cannot be started.
    """
    parsed = daemon.parse(FLAGS, words, "tcpstore-gateway", USAGE)
    if parsed is None:
        return SUCCESS
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s raftkv tcpstore-gateway: %(message)s", stream=sys.stderr
    )
    return asyncio.run(_serve(parsed.values, make_config(parsed.values, parsed.changed)))


def make_config(values: dict[str, Any], given: set[str]) -> GatewayConfig:
    """Return what the flags ask for.

    Arguments:
        values: of all flags.
        given: names of those on the command line.

    Raises:
        ConfigError: they do not go together, or one makes no sense.
    """
    from raftkv.training.records import RunKeys, check_run_id
    from raftkv.training.tcpstore.gateway import ROOT, GatewayConfig

    places = sorted(given & {"name", "run", "prefix"})
    if len(places) > 1:
        raise ConfigError(f"give one of --name, --run and --prefix, not {' and '.join('--' + name for name in places)}")
    prefix = f"{ROOT}{check_run_id(values['name'])}/"
    if values["run"]:
        prefix = f"{RunKeys(check_run_id(values['run'])).base}store/gateway/"
    elif values["prefix"]:
        prefix = values["prefix"]
    host, port = daemon.listen_address(values["listen"])
    return GatewayConfig(host=host, port=port, prefix=prefix, linger_s=values["linger"], fresh=values["fresh"])


async def _serve(values: dict[str, Any], config: GatewayConfig) -> int:
    from raftkv.training.tcpstore.gateway import Gateway
    from raftkv.training.tcpstore.store import ATTEMPT_TIMEOUT_S

    async with daemon.connected(values, timeout_s=ATTEMPT_TIMEOUT_S) as (kv, stop):
        gateway = Gateway(kv, config)
        if await _started(gateway, config, stop):
            _announce(gateway, config)
            await stop.wait()
        await gateway.close()
    return SUCCESS


async def _started(gateway: Any, config: GatewayConfig, stop: asyncio.Event) -> bool:
    """Start; False: a signal came first, as it may while raftkv does not answer."""
    started = await daemon.before_stop(stop, gateway.start())
    try:
        if started is not None:
            started.result()
    except EndpointsFailed:
        raise
    except OSError as error:
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error.strerror or error}") from None
    return started is not None


def _announce(gateway: Any, config: GatewayConfig) -> None:
    host, port = gateway.address
    # The line says that clients can come: a program that starts a gateway with port 0 reads it.
    print(f"raftkv: TCPStore gateway on {host}:{port}, keys below {config.prefix}", flush=True)
    if not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        logging.warning(
            "TCPStore knows no passwords: all programs that reach %s:%d can read and write the store", host, port
        )
