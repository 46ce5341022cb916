"""Flags and help shared by the commands of ``raftkv``, and the commands that serve until a signal.

>>> parsed = parse((Flag("listen", default="127.0.0.1:1"),), ["--listen", "127.0.0.1:2"], "gateway", "Usage: ...")
>>> parsed and parsed.values["listen"]
'127.0.0.1:2'
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from raftkv.cli import pflag
from raftkv.cli.pflag import BOOL, INT, LIST, Flag, Parsed
from raftkv.cli.program import BAD_FLAGS, ERROR, SUCCESS, CommandError, on_signals, refused
from raftkv.errors import ConfigError, RaftKVError, StatusError, printable
from raftkv.loop.outcomes import done_before
from raftkv.server.logs.outputs import stderr_handler
from raftkv.urls import join_address, split_address

if TYPE_CHECKING:
    from raftkv.client.library import Client
    from raftkv.integrations.torchft.lighthouse import Lighthouse, LighthouseConfig
    from raftkv.training.tcpstore.gateway import GatewayConfig

T = TypeVar("T")

ENDPOINTS: Final = Flag("endpoints", default="127.0.0.1:2379", usage="members of the raftkv cluster, comma-separated")
CREDENTIALS: Final = (
    Flag("user", usage="NAME, with the password in RAFTKV_PASSWORD_FILE, or NAME:PASSWORD"),
    Flag("cacert", usage="CA file of the cluster; turns on TLS"),
    Flag("cert", usage="client certificate"),
    Flag("key", usage="its key"),
)

ATTEMPT_S: Final = 2.0
PROBE_KEY: Final = "raftkv/probe"
"""A key without a value; any answer to a read of it shows that the cluster serves."""


def parse(
    flags: Sequence[Flag], words: Sequence[str], command: str, usage: str, *, takes_rest: bool = False
) -> Parsed | None:
    """Parse the flags of a command without arguments; for ``--help``, print the help and return None.

    Arguments:
        flags: known flags.
        words: words after the command's name.
        command: name of the command.
        usage: help text above the flags.
        takes_rest: whether words may follow ``--``, for commands that pass them on.

    Raises:
        CommandError: a word is not a known flag, or a value is invalid.
    """
    found = parse_command({"": flags}, words, usage)
    if found is not None and found[1].arguments and not (takes_rest and "--" in words):
        raise CommandError(f"'{found[1].arguments[0]}' is not a valid flag of raftkv {command}", BAD_FLAGS)
    return found and found[1]


def parse_command(
    commands: Mapping[str, Sequence[Flag]], words: Sequence[str], usage: str
) -> tuple[str, Parsed] | None:
    """Parse the words of a command with subcommands; for ``--help``, print the help and return None.

    Arguments:
        commands: flags of each subcommand; the empty string is the command without a subcommand.
        words: words after the command's name.
        usage: help text above the flags.

    Raises:
        CommandError: a flag is unknown or has an invalid value.
    """
    command = words[0] if words and words[0] in commands else ""
    flags = [replace(flag, ours=True) for flag in commands[command]]
    try:
        with refused(pflag.FlagError, BAD_FLAGS):
            return command, pflag.parse(flags, words[1:] if command else words)
    except pflag.HelpRequested:
        print(usage)
    for name, its_flags in commands.items():
        print(f"\nFlags{f' of {name}' if name else ''}:")
        width = max(len(flag.name) for flag in its_flags)
        for flag in its_flags:
            print(
                f"  --{flag.name:<{width}} {flag.usage}" + (f" ({default})" if (default := flag.shown_default) else "")
            )
    return None


async def before_stop(stop: asyncio.Event, work: Awaitable[T]) -> asyncio.Future[T] | None:
    """Run an awaitable until it ends or a signal arrives.

    Arguments:
        stop: event that a signal sets.
        work: awaitable to run.

    Returns:
        The finished future; None: the signal came first, and the work was cancelled.
    """
    stopping = asyncio.ensure_future(stop.wait())
    try:
        return await done_before(work, stopping)
    finally:
        stopping.cancel()


@contextlib.asynccontextmanager
async def connected(values: dict[str, Any], **options: Any) -> AsyncIterator[tuple[Client, asyncio.Event]]:
    """Yield a client of the cluster, and an event that SIGINT and SIGTERM set.

    Arguments:
        values: values of the flags, including ``ENDPOINTS`` and ``CREDENTIALS``.
        options: further options of ``connect``.
    """
    from raftkv.client.library import connect
    from raftkv.server.descriptors import raise_limit

    raise_limit()
    stop = asyncio.Event()
    with on_signals(stop.set):
        async with connect(values["endpoints"].split(","), **connection(values), **options) as kv:
            yield kv, stop


def connection(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options of ``connect`` for the flags ``CREDENTIALS``."""
    from raftkv.client.credentials import user_settings

    files = {"ca_file": values["cacert"], "cert_file": values["cert"], "key_file": values["key"]}
    return {**user_settings(values["user"]), **files}


def listen_address(text: str) -> tuple[str, int]:
    """Return the host and the port of ``--listen``.

    Raises:
        ConfigError: the text is not HOST:PORT.
    """
    try:
        return split_address(text)
    except ValueError:
        raise ConfigError(f"--listen must be HOST:PORT (set to {text!r})") from None


async def wait_cluster(kv: Client, stop: asyncio.Event, command: str) -> bool:
    """Wait until the cluster answers, reporting once on standard error why it does not; False: a signal came first.

    Arguments:
        kv: client of the cluster.
        stop: event that a signal sets.
        command: name of the command, for the report.
    """
    from raftkv.client.errors import EndpointsFailed

    told = False
    while not stop.is_set():
        asked = await before_stop(stop, kv.get(PROBE_KEY, timeout_s=ATTEMPT_S))
        if asked is None:
            break
        error = asked.exception()
        if isinstance(error, EndpointsFailed):
            if not told:
                why = printable(str(error))
                print(f"raftkv {command}: waiting for the cluster: {why}", file=sys.stderr, flush=True)
            told = True
        elif error is None or isinstance(error, StatusError):
            return True  # a refusal is an answer too
        else:
            raise error
    return False


# -- torchft's lighthouse --------------------------------------------------------------------------------------------
#
# ``raftkv torchft-lighthouse``: torchft's lighthouse, with its state in a raftkv cluster.

LIGHTHOUSE_FLAGS = (
    Flag("listen", LIST, usage="[JOB=]HOST:PORT to listen on for torchft's managers, one for each job"),
    ENDPOINTS,
    Flag("job", default="default", usage="job of a --listen without JOB="),
    Flag("min-replicas", INT, 1, usage="smallest number of replicas in a quorum"),
    Flag(
        "join-timeout-ms", INT, 60_000, usage="longest wait of a quorum for live replicas that have not asked for one"
    ),
    Flag("heartbeat-timeout-ms", INT, 5_000, usage="silence after which a replica is lost"),
    Flag("quorum-tick-ms", INT, 100, usage="accepted for torchft, and ignored: nothing is polled"),
    Flag("disconnect-grace-ms", INT, 50, usage="time after a closed connection after which a replica is lost"),
    Flag("lease-ttl", INT, 2, usage="seconds after which others take over from a frozen or unreachable daemon"),
    Flag("lease-grace-ms", INT, 100, usage="milliseconds after which others take over from a daemon that died"),
    *CREDENTIALS,
    Flag("verbose", BOOL, usage="log what each quorum waits for"),
)
LIGHTHOUSE_ADDRESS = "127.0.0.1:29510"
_LIGHTHOUSE_USAGE = f"""Usage:
  raftkv torchft-lighthouse [flags]

Serve torchft's lighthouse from raftkv. Without --listen it listens on {LIGHTHOUSE_ADDRESS}. The spelling of torchft's
own lighthouse is accepted (--min_replicas, --bind).

Example:
  raftkv torchft-lighthouse --listen one=0.0.0.0:29510,two=0.0.0.0:29511 --min-replicas 2"""
_THEIR_FLAGS = {"bind": "listen"}


def lighthouse(words: Sequence[str]) -> int:
    """Serve until a signal arrives.

    Arguments:
        words: the command line after ``torchft-lighthouse``.

    Returns:
        0.

    Raises:
        CommandError: the lighthouse cannot be started.
    """
    parsed = parse(LIGHTHOUSE_FLAGS, [_spelled(word) for word in words], "torchft-lighthouse", _LIGHTHOUSE_USAGE)
    if parsed is None:
        return SUCCESS
    logging.basicConfig(handlers=[stderr_handler("%(asctime)s %(message)s")])
    logging.getLogger("raftkv").setLevel(logging.DEBUG if parsed.values["verbose"] else logging.INFO)
    try:
        return asyncio.run(_serve_lighthouse(parsed.values))
    except (RaftKVError, ValueError) as error:
        raise CommandError(" ".join(str(error).split()), ERROR) from None


def _spelled(word: str) -> str:
    """Return a flag of torchft's in raftkv's spelling."""
    if not word.startswith("--"):
        return word
    name, equals, value = word[2:].partition("=")
    name = name.replace("_", "-")
    return f"--{_THEIR_FLAGS.get(name, name)}{equals}{value}"


async def _serve_lighthouse(values: dict[str, Any]) -> int:
    from raftkv.integrations.torchft.lighthouse import Lighthouse

    async with connected(values) as (kv, stop):
        made = Lighthouse(kv, _lighthouse_config(values))
        lines = [await _open_listener(made, text, values["job"]) for text in values["listen"] or (LIGHTHOUSE_ADDRESS,)]
        serving = asyncio.ensure_future(made.run())
        if await wait_cluster(kv, stop, "torchft-lighthouse"):
            # These lines tell a parent process that managers can connect, and at which address if the port was 0.
            print("\n".join(lines), flush=True)
        if (ended := await before_stop(stop, serving)) is not None:
            ended.result()
    return SUCCESS


async def _open_listener(lighthouse: Lighthouse, text: str, default_job: str) -> str:
    """Open a listener; return the line that announces it."""
    job, equals, address = text.rpartition("=")
    name = job if equals else default_job
    host, port = listen_address(address)
    try:
        addresses = await lighthouse.listen(host, port, name)
    except OSError as error:
        raise ConfigError(f"--listen {text}: {error.strerror or error}") from None
    _warn_if_open("torchft's protocol", f"take part in job {name}", *addresses[0])
    return f"raftkv: torchft lighthouse of job {name} on http://{join_address(*addresses[0])}"


def _lighthouse_config(values: dict[str, Any]) -> LighthouseConfig:
    from raftkv.integrations.torchft.job import Timing
    from raftkv.integrations.torchft.lighthouse import LighthouseConfig
    from raftkv.integrations.torchft.rules import Rules

    return LighthouseConfig(
        rules=Rules(values["min-replicas"], values["join-timeout-ms"] / 1000),
        timing=Timing(values["heartbeat-timeout-ms"] / 1000, values["disconnect-grace-ms"] / 1000),
        lease_ttl_s=values["lease-ttl"],
        lease_grace_s=values["lease-grace-ms"] / 1000,
    )


# -- gateway of TCPStore ---------------------------------------------------------------------------------------------
#
# ``raftkv tcpstore-gateway``: torch's TCPStore protocol, replicated in a raftkv cluster.
#
#     raftkv tcpstore-gateway --listen 127.0.0.1:29400 --endpoints h1:2379,h2:2379,h3:2379
#     raftkv tcpstore-gateway --run job1            # its keys are those of the run, and end with it

GATEWAY_FLAGS = (
    Flag(
        "listen", default="127.0.0.1:29400", usage="HOST:PORT to listen on for TCPStore clients; port 0: any free port"
    ),
    ENDPOINTS,
    Flag("name", default="default", usage="name of the store; gateways with the same name serve the same store"),
    Flag("run", usage="keep the store under the keys of this run instead of --name"),
    Flag("prefix", usage="keep the store under this prefix instead of --name"),
    Flag("linger", INT, 60, usage="seconds that the keys are kept after the last gateway was killed"),
    Flag("fresh", BOOL, usage="empty the store at start, even if another gateway serves it"),
    *CREDENTIALS,
)

GATEWAY_USAGE = """\
Usage:
  raftkv tcpstore-gateway [flags]

Serve torch's TCPStore from raftkv: stock torchrun (c10d) and other programs that use TCPStore then survive the
loss of any node. Run one gateway on each node, and point its clients at it:

  torchrun --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:29400 --rdzv-conf=is_host=0 ..."""


def gateway(words: Sequence[str]) -> int:
    """Serve until a signal arrives.

    Arguments:
        words: the command line after ``tcpstore-gateway``.

    Returns:
        0.

    Raises:
        CommandError, RaftKVError: the gateway cannot be started.
    """
    parsed = parse(GATEWAY_FLAGS, words, "tcpstore-gateway", GATEWAY_USAGE)
    if parsed is None:
        return SUCCESS
    handler = stderr_handler("%(asctime)s raftkv tcpstore-gateway: %(message)s")
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    return asyncio.run(_serve_gateway(parsed.values, gateway_config(parsed.values, parsed.changed)))


def gateway_config(values: dict[str, Any], given: set[str]) -> GatewayConfig:
    """Return the configuration given by the flags.

    Arguments:
        values: values of all flags.
        given: names of the flags on the command line.

    Raises:
        ConfigError: flags conflict, or a value is invalid.
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
    host, port = listen_address(values["listen"])
    return GatewayConfig(host=host, port=port, prefix=prefix, linger_s=values["linger"], fresh=values["fresh"])


async def _serve_gateway(values: dict[str, Any], config: GatewayConfig) -> int:
    from raftkv.training.tcpstore.gateway import Gateway
    from raftkv.training.tcpstore.store import ATTEMPT_TIMEOUT_S

    async with connected(values, timeout_s=ATTEMPT_TIMEOUT_S) as (kv, stop):
        made = Gateway(kv, config)
        if await _gateway_started(made, config, stop):
            _announce_gateway(made, config)
            await stop.wait()
        await made.close()
    return SUCCESS


async def _gateway_started(gateway: Any, config: GatewayConfig, stop: asyncio.Event) -> bool:
    """Start the gateway; return False if a signal came first, for example while raftkv does not answer."""
    started = await before_stop(stop, gateway.start())
    try:
        if started is not None:
            started.result()
    except OSError as error:
        if isinstance(error, StatusError):  # the cluster did not answer
            raise
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error.strerror or error}") from None
    return started is not None


def _announce_gateway(gateway: Any, config: GatewayConfig) -> None:
    host, port = gateway.address
    # This line tells a parent process that clients can connect, and at which port if it was 0.
    print(f"raftkv: TCPStore gateway on {join_address(host, port)}, keys below {config.prefix}", flush=True)
    _warn_if_open("TCPStore", "read and write the store", host, port)


def _warn_if_open(protocol: str, right: str, host: str, port: int) -> None:
    """Warn of a listener without authentication that other machines reach."""
    if not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        logging.warning(
            "%s has no authentication: every program that reaches %s:%d can %s", protocol, host, port, right
        )
