"""``raftkv torchft-lighthouse``: torchft's lighthouse, with its state in a raftkv cluster.

Owns its flags. Those that torchft's own lighthouse has are taken with its spelling too (``--min_replicas``,
``--bind``) and mean the same.

    raftkv torchft-lighthouse --listen 127.0.0.1:29510 --endpoints h1:2379,h2:2379,h3:2379 --min-replicas 2
    raftkv torchft-lighthouse --listen one=0.0.0.0:29510,two=0.0.0.0:29511
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from raftkv.cli import daemon
from raftkv.cli.pflag import BOOL, INT, LIST, Flag
from raftkv.cli.program import ERROR, SUCCESS, CommandError
from raftkv.errors import ConfigError, RaftKVError
from raftkv.urls import join_address

if TYPE_CHECKING:
    from raftkv.integrations.torchft.lighthouse import Lighthouse, LighthouseConfig

FLAGS = (
    Flag("listen", LIST, usage="[JOB=]HOST:PORT that torchft's managers connect to, one for each job"),
    daemon.ENDPOINTS,
    Flag("job", default="default", usage="job of a --listen that names none"),
    Flag("min-replicas", INT, 1, usage="no quorum has fewer replicas"),
    Flag("join-timeout-ms", INT, 60_000, usage="a quorum waits so long for live replicas that do not ask for one"),
    Flag("heartbeat-timeout-ms", INT, 5_000, usage="a silent replica is gone after so long"),
    Flag("quorum-tick-ms", INT, 100, usage="taken for torchft's sake; nothing is polled here"),
    Flag("disconnect-grace-ms", INT, 50, usage="a replica whose connection closed is gone after so long"),
    Flag("lease-ttl", INT, 2, usage="seconds after which others take over from a daemon that is frozen or cut off"),
    Flag("lease-grace-ms", INT, 100, usage="and from one that died"),
    *daemon.CREDENTIALS,
    Flag("verbose", BOOL, usage="log what every decision waits for"),
)
DEFAULT_LISTEN = "127.0.0.1:29510"
_THEIRS = {"bind": "listen"}


def main(words: Sequence[str]) -> int:
    """Serve until a signal comes.

    Arguments:
        words: the command line after ``torchft-lighthouse``.

    Returns:
        0.

    Raises:
        CommandError: it cannot be started.
    """
    usage = "Usage:\n  raftkv torchft-lighthouse [flags]\n\nFlags:"
    parsed = daemon.parse(FLAGS, [_spelled(word) for word in words], "torchft-lighthouse", usage)
    if parsed is None:
        return SUCCESS
    logging.basicConfig(format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("raftkv").setLevel(logging.DEBUG if parsed.values["verbose"] else logging.INFO)
    try:
        return asyncio.run(_serve(parsed.values))
    except (RaftKVError, ValueError) as error:
        raise CommandError(" ".join(str(error).split()), ERROR) from None


def _spelled(word: str) -> str:
    """Return a flag of torchft's in our spelling."""
    if not word.startswith("--"):
        return word
    name, equals, value = word[2:].partition("=")
    name = name.replace("_", "-")
    return f"--{_THEIRS.get(name, name)}{equals}{value}"


async def _serve(values: dict[str, Any]) -> int:
    from raftkv.integrations.torchft.lighthouse import Lighthouse

    async with daemon.connected(values) as (kv, stop):
        lighthouse = Lighthouse(kv, _config(values))
        lines = [await _listen(lighthouse, text, values["job"]) for text in values["listen"] or (DEFAULT_LISTEN,)]
        serving = asyncio.ensure_future(lighthouse.run())
        if await daemon.wait_cluster(kv, stop, "torchft-lighthouse"):
            # The lines say that managers can come, and where: a program that starts the daemon with port 0 reads them.
            print("\n".join(lines), flush=True)
        if (ended := await daemon.before_stop(stop, serving)) is not None:
            ended.result()
    return SUCCESS


async def _listen(lighthouse: Lighthouse, text: str, default_job: str) -> str:
    """Open a listener; the line that tells of it."""
    job, equals, address = text.rpartition("=")
    name = job if equals else default_job
    host, port = daemon.listen_address(address)
    try:
        addresses = await lighthouse.listen(host, port, name)
    except OSError as error:
        raise ConfigError(f"--listen {text}: {error.strerror or error}") from None
    return f"raftkv: torchft lighthouse of job {name} on http://{join_address(*addresses[0])}"


def _config(values: dict[str, Any]) -> LighthouseConfig:
    from raftkv.integrations.torchft.job import Timing
    from raftkv.integrations.torchft.lighthouse import LighthouseConfig
    from raftkv.integrations.torchft.rules import Rules

    return LighthouseConfig(
        rules=Rules(values["min-replicas"], values["join-timeout-ms"] / 1000),
        timing=Timing(values["heartbeat-timeout-ms"] / 1000, values["disconnect-grace-ms"] / 1000),
        lease_ttl_s=values["lease-ttl"],
        lease_grace_s=values["lease-grace-ms"] / 1000,
    )
