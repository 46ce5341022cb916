"""The server process: settings in, exit code out.

THE SUPERVISOR: what a member tells the program that started it, as systemd's units of ``Type=notify`` hear it.

Owns the datagrams of ``sd_notify(3)``: ``READY=1`` once clients are served, ``STOPPING=1`` when it begins to stop, and
``WATCHDOG=1`` while the event loop turns: a loop that hangs says nothing, so systemd ends the process and starts it
anew. Without ``NOTIFY_SOCKET`` in the environment nothing is sent and nothing is done.

    supervisor = Supervisor.of(os.environ)     # takes the variables out: child processes are not to speak for a member
    supervisor.feed_watchdog(loop)
    supervisor.ready("serves clients on http://10.0.0.1:2379")

A message that cannot be sent is a line in the log and never an error: a member serves without its supervisor too. One
for which there is no room in the socket, as when a machine starts all that it has, is sent again.

Leaves out: sockets of other machines (``vsock:``), reloading (a member has nothing to reload), file descriptors kept
over restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import MutableMapping
from time import time
from typing import Final

from raftkv.config import ServerConfig
from raftkv.errors import (
    ConfigError,
    CorruptionError,
    MemberRemovedError,
    SpaceError,
    StorageError,
    UnknownEntryError,
    explain,
)
from raftkv.loop.cycle_free import collect_in_small_passes, look_at_young_objects
from raftkv.loop.turns import LoopTurns, MemberLoop, TurnSelector
from raftkv.native import is_compiled
from raftkv.replica.node.bootstrap import is_new
from raftkv.server import descriptors
from raftkv.server.audit.trail import open_destination
from raftkv.server.auth.jwt_tokens import JWTTokens, parse_options
from raftkv.server.joining import check_survivor, origin_of
from raftkv.server.listening import addresses, check_free
from raftkv.server.logs import outputs as logs
from raftkv.server.member import ExtendHttp, Member, OnReady
from raftkv.server.tls.ports import Ports
from raftkv.storage.datadir import ensure_private_directory

_log = logging.getLogger(__name__)

FEEDS_AN_INTERVAL: Final = 3
"""How often the watchdog is fed in the time after which it ends the process; systemd advises two times at least."""

RETRY_S: Final = 0.1
"""Rest before a message is sent again that systemd had no room for: it would end a member that it thinks to start."""


class Supervisor:
    """The program that started this process, if it wants to hear from it.

    Arguments:
        address: of its socket: a path, or ``@`` and a name outside the file system; empty: no supervisor listens.
        watchdog_s: silence after which it takes this process for hung; 0: it does not watch.
    """

    def __init__(self, address: str = "", watchdog_s: float = 0.0) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_s = watchdog_s if address else 0.0
        self._socket = None if not address else socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        if self._socket is not None:
            self._socket.setblocking(False)

    @classmethod
    def of(cls, environment: MutableMapping[str, str]) -> Supervisor:
        """Read whom to tell from the environment, and take it out there."""
        address, interval, pid = (
            environment.pop(name, "") for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
        )
        if address and address[0] not in "/@":
            _log.warning(
                "NOTIFY_SOCKET=%s is no socket of this machine: no supervisor learns that this member serves", address
            )
            address = ""
        is_watched = interval.isascii() and interval.isdigit() and pid in ("", str(os.getpid()))
        return cls(address, int(interval) / 1e6 if is_watched else 0.0)

    def ready(self, status: str) -> None:
        """Tell that clients are served; ``status`` is what ``systemctl status`` shows, in one line."""
        self._insist(f"READY=1\nSTATUS={status}")

    def stopping(self, status: str) -> None:
        """Tell that the process will end by itself."""
        self._tell(f"STOPPING=1\nSTATUS={status}")

    def feed_watchdog(self, loop: asyncio.AbstractEventLoop) -> None:
        """Say now and then that the loop turns, as long as it does.

        A process that the watchdog ends (SIGABRT) leaves the stacks of its threads in its log: they say what hung.
        """
        if self.watchdog_s <= 0:
            return
        if not faulthandler.is_enabled():
            faulthandler.enable()
        self._tell("WATCHDOG=1")
        loop.call_later(self.watchdog_s / FEEDS_AN_INTERVAL, self.feed_watchdog, loop)

    def _insist(self, text: str) -> None:
        """Tell what must be heard."""
        if not self._tell(text):
            asyncio.get_running_loop().call_later(RETRY_S, self._insist, text)

    def _tell(self, text: str) -> bool:
        """Tell; False: there is no room for it now."""
        if self._socket is None:
            return True
        try:
            self._socket.sendto(text.encode(), self._address)
        except BlockingIOError:
            return False
        except OSError as error:
            _log.warning("cannot tell %r what this member does: %s", self._address, error.strerror)
        return True

    def close(self) -> None:
        """Give the socket back."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


NEEDS_UPGRADE_STATUS: Final = 3
"""Exit status of a member whose log holds what only a later version knows. Its data is as it was."""

_AFTER_DAMAGE: Final = "remove this member and add it anew (raftkv join), or restore a backup"
"""Advice in the last line of a member whose data is damaged: it cannot be repaired in place."""

SWITCH_INTERVAL_S: Final = 0.000_5
"""How long the loop may keep the interpreter when the log or database thread wants it (Python's default: 5 ms)."""


def run(
    config: ServerConfig,
    extend_http: ExtendHttp | None = None,
    on_ready: OnReady | None = None,
    removed_status: int = 0,
) -> int:
    """Serve until a signal or a failure.

    Arguments:
        config: settings of the member.
        extend_http: see ``Member``.
        on_ready: see ``Member.run``.
        removed_status: exit code where the member was removed from its cluster before it served.

    Returns:
        The exit code: 0 if the member was removed from its cluster, as etcd's (a signal ends the process as that
        signal would, and process 1 of a container with 0), 1 for a failure, ``NEEDS_UPGRADE_STATUS`` if the log is of a
        later version.
    """
    logs.configure(config)
    try:
        ended = serve(config, extend_http, on_ready, removed_status)
    finally:
        logs.close()
    if not isinstance(ended, signal.Signals):
        return ended
    if os.getpid() == 1:
        return 0  # no signal ends the first process of a container, unless it handles it
    # A signal ended this member; its default action gives the exit status that callers expect then.
    signal.signal(ended, signal.SIG_DFL)
    os.kill(os.getpid(), ended)
    return 1


def serve(
    config: ServerConfig,
    extend_http: ExtendHttp | None = None,
    on_ready: OnReady | None = None,
    removed_status: int = 0,
) -> int | signal.Signals:
    """Serve as ``run``; return the exit code, or the signal that ended the member."""
    if not faulthandler.is_enabled():
        # A damaged page of the database may crash the process inside LMDB: then the log at least says where.
        faulthandler.enable()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    collect_in_small_passes()
    os.umask(0o077)
    try:
        descriptors.raise_limit()
        descriptors.import_early()
        if config.tracing.enabled:
            from raftkv.server.tracing.assembly import check_installed

            check_installed()
        selector = TurnSelector(LoopTurns())
        with asyncio.Runner(loop_factory=lambda: MemberLoop(selector)) as runner:
            received, failure = runner.run(_serve(config, selector, extend_http, on_ready))
    except CorruptionError as error:
        return _complain(f"{error}; {_AFTER_DAMAGE}")
    except (ConfigError, StorageError) as error:
        return _complain(str(error))
    except MemberRemovedError as error:
        return _complain(str(error), 0 if error.has_served else removed_status)
    except OSError:
        raise  # before there is a member: the command line has words for these
    except Exception as error:
        failure = error
        if not _is_of_the_machine(error):
            _log.critical("the member stops: %s", explain(error), exc_info=error)
    if isinstance(failure, UnknownEntryError):
        return _complain(str(failure), NEEDS_UPGRADE_STATUS)
    return received if failure is None else _complain(f"stopped: {explain(failure)}; {_advice(failure)}")


def _is_of_the_machine(error: BaseException) -> bool:
    """Whether an error is one of memory or of the system: where in raftkv it was met says nothing."""
    return isinstance(error, OSError | MemoryError | StorageError)


def _advice(failure: BaseException) -> str:
    """Return what to do about the error that stopped a member."""
    if isinstance(failure, CorruptionError):
        return _AFTER_DAMAGE
    if isinstance(failure, SpaceError):
        return "make room, and start the member again"
    if isinstance(failure, MemoryError):
        return "give it more memory, and start the member again"
    if isinstance(failure, OSError | StorageError):
        return "look at this disk and the log of the system, and start the member again"
    return "start the member again; if it stops again, report this line with the log before it"


async def _serve(
    config: ServerConfig, selector: TurnSelector, extend_http: ExtendHttp | None, on_ready: OnReady | None
) -> tuple[signal.Signals, BaseException | None]:
    if is_new(config):
        # Before any data is made: a start with corrected flags would meet data with the ids of the wrong ones.
        clients = (*addresses(config.listen_client_urls), *addresses(config.listen_client_http_urls))
        check_free((*config.listen_peer_urls, *clients, *config.listen_metrics_urls))
        _check_files(config)
    if config.client_tls.self_signed or config.peer_tls.self_signed:
        from raftkv.server.tls.issue import with_self_signed

        config = with_self_signed(config)
    dialing, origin = Ports.of(config).peer.dialing, None
    if is_new(config):
        origin = await origin_of(config, dialing)
    elif config.force_new_cluster:
        await check_survivor(config, dialing)
    member = Member(config, selector.turns, extend_http, origin)
    gc.freeze()
    selector.disregard()
    received = signal.SIGTERM
    loop = asyncio.get_running_loop()
    descriptors.log_lack_in_a_line(loop)
    supervisor = Supervisor.of(os.environ)

    def on_signal(number: signal.Signals) -> None:
        nonlocal received
        received = number
        _log.info("stopping on %s", number.name)
        supervisor.stopping(f"stopping on {number.name}")
        member.stop()

    has_served = False

    async def serves(member: Member) -> None:
        nonlocal has_served
        has_served = True
        if not is_compiled():
            _log.info("the hot path is interpreted: compiled, a busy member takes half the processor time (install.md)")
        supervisor.ready(f"member {config.name} serves clients on {','.join(config.listen_client_urls)}")
        if on_ready is not None:
            await on_ready(member)

    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, on_signal, number)
    supervisor.feed_watchdog(loop)
    with contextlib.closing(supervisor), look_at_young_objects(loop, member.puts):
        await member.run(serves)
    if member.is_removed:
        raise MemberRemovedError(member.removed_text, has_served=has_served)
    return received, member.failure


def _check_files(config: ServerConfig) -> None:
    """Open what the flags name and the member opens only when it has its data.

    Raises:
        ConfigError, StorageError: it cannot be used.
    """
    if (tokens := parse_options(config.auth_token)) is not None:
        JWTTokens(tokens, time)
    if config.audit_log:
        ensure_private_directory(config.data_dir)  # where it may lie
        open_destination(config.audit_log, config.audit_log_max_size_bytes, config.audit_log_keep).close()


def _complain(text: str, status: int = 1) -> int:
    print(f"raftkv: {text}", file=sys.stderr)
    return status
