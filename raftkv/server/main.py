"""The server process: settings in, exit code out.

THE SUPERVISOR: notifications to the program that started a member, such as systemd with a unit of ``Type=notify``.

Owns the datagrams of ``sd_notify(3)``: ``READY=1`` once clients are served, ``STOPPING=1`` when the member begins to
stop, and ``WATCHDOG=1`` while the event loop turns. A loop that hangs sends nothing, so systemd kills and restarts the
process. Without ``NOTIFY_SOCKET`` in the environment nothing is sent.

    supervisor = Supervisor.of(os.environ)     # removes the variables: child processes must not speak for a member
    supervisor.feed_watchdog(loop)
    supervisor.ready("serves clients on http://10.0.0.1:2379")

A message that cannot be sent is logged and never an error: a member can serve without its supervisor. If the socket has
no room, as when a machine starts all its services, the message is sent again.

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
    ForkedError,
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
"""How often the watchdog is fed within its timeout; systemd advises at least twice."""

RETRY_S: Final = 0.1
"""Pause before a message is sent again when the socket was full. systemd kills a member that it thinks is starting."""


class Supervisor:
    """The supervisor of this process, if it wants notifications.

    Arguments:
        address: address of its socket: a path, or ``@`` and an abstract name; empty: there is no supervisor.
        watchdog_s: silence after which the supervisor takes this process for hung; 0: no watchdog.
    """

    def __init__(self, address: str = "", watchdog_s: float = 0.0) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_s = watchdog_s if address else 0.0
        self._socket = None if not address else socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        if self._socket is not None:
            self._socket.setblocking(False)

    @classmethod
    def of(cls, environment: MutableMapping[str, str]) -> Supervisor:
        """Read the settings from the environment, and remove them there."""
        address, interval, pid = (
            environment.pop(name, "") for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
        )
        if address and address[0] not in "/@":
            _log.warning(
                "NOTIFY_SOCKET=%s is not a local socket: the supervisor is not notified when this member serves",
                address,
            )
            address = ""
        is_watched = interval.isascii() and interval.isdigit() and pid in ("", str(os.getpid()))
        return cls(address, int(interval) / 1e6 if is_watched else 0.0)

    def ready(self, status: str) -> None:
        """Tell the supervisor that clients are served. ``systemctl status`` shows ``status``, which is one line."""
        self._insist(f"READY=1\nSTATUS={status}")

    def stopping(self, status: str) -> None:
        """Tell the supervisor that the process will end by itself."""
        self._tell(f"STOPPING=1\nSTATUS={status}")

    def feed_watchdog(self, loop: asyncio.AbstractEventLoop) -> None:
        """Notify the watchdog regularly, as long as the loop turns.

        A process that the watchdog kills (SIGABRT) leaves the stacks of its threads in its log: they show what hung.
        """
        if self.watchdog_s <= 0:
            return
        if not faulthandler.is_enabled():
            faulthandler.enable()
        self._tell("WATCHDOG=1")
        loop.call_later(self.watchdog_s / FEEDS_AN_INTERVAL, self.feed_watchdog, loop)

    def _insist(self, text: str) -> None:
        """Send a message, again and again until the socket has room."""
        if not self._tell(text):
            asyncio.get_running_loop().call_later(RETRY_S, self._insist, text)

    def _tell(self, text: str) -> bool:
        """Send a message; False: the socket has no room now."""
        if self._socket is None:
            return True
        try:
            self._socket.sendto(text.encode(), self._address)
        except BlockingIOError:
            return False
        except OSError as error:
            _log.warning("cannot notify the supervisor at %r: %s", self._address, error.strerror)
        return True

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


NEEDS_UPGRADE_STATUS: Final = 3
"""Exit status of a member whose log has entries that only a later version knows. Its data is unchanged."""

_AFTER_DAMAGE: Final = (
    "remove this member and add it again (raftkv join) without the data in {}, "
    "or restore a backup into another directory"
)
"""Advice in the last line of a member with damaged data, which cannot be repaired in place."""

SWITCH_INTERVAL_S: Final = 0.000_5
"""How long the loop may hold the interpreter when the log or database thread waits for it (Python's default: 5 ms)."""


def run(config: ServerConfig, extend_http: ExtendHttp | None = None, removed_status: int = 0) -> int:
    """Serve until a signal or a failure.

    Arguments:
        config: settings of the member.
        extend_http: as in ``Member``.
        removed_status: exit code if the member was removed from its cluster before it served clients.

    Returns:
        The exit code: 0 if the member was removed from its cluster, as in etcd; 1 after a failure;
        ``NEEDS_UPGRADE_STATUS`` if the log is of a later version. After a signal the process ends by that signal;
        process 1 of a container returns 0.
    """
    logs.configure(config)
    try:
        ended = serve(config, extend_http, removed_status=removed_status)
    finally:
        logs.close()
    if not isinstance(ended, signal.Signals):
        return ended
    if os.getpid() == 1:
        return 0  # a signal does not end the first process of a container, unless the process handles it
    # A signal ended this member; the signal's default action gives the exit status that callers expect.
    signal.signal(ended, signal.SIG_DFL)
    os.kill(os.getpid(), ended)
    return 1


def serve(
    config: ServerConfig,
    extend_http: ExtendHttp | None = None,
    on_ready: OnReady | None = None,
    removed_status: int = 0,
) -> int | signal.Signals:
    """Serve as ``run``. Returns the exit code, or the signal that ended the member."""
    if not faulthandler.is_enabled():
        # A damaged page of the database may crash the process inside LMDB: then the log at least shows where.
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
        return _complain(f"{error}; {_AFTER_DAMAGE.format(config.data_dir)}")
    except SpaceError as error:
        return _complain(f"{error}; {_advice(error, config.data_dir)}")
    except (ConfigError, StorageError) as error:
        return _complain(str(error))
    except MemberRemovedError as error:
        return _complain(str(error), 0 if error.has_served else removed_status)
    except OSError:
        raise  # there is no member yet: the command line explains these errors
    except Exception as error:
        failure = error
        if not _is_of_the_machine(error):
            _log.critical("this member is stopping: %s", explain(error), exc_info=error)
    if isinstance(failure, UnknownEntryError):
        return _complain(str(failure), NEEDS_UPGRADE_STATUS)
    return (
        received if failure is None else _complain(f"stopped: {explain(failure)}; {_advice(failure, config.data_dir)}")
    )


def _is_of_the_machine(error: BaseException) -> bool:
    """Return whether an error comes from memory or the system, so that its place in raftkv is of no interest."""
    return isinstance(error, OSError | MemoryError | StorageError)


def _advice(failure: BaseException, data_dir: str) -> str:
    """Return what to do about the error that stopped a member."""
    if isinstance(failure, CorruptionError):
        return _AFTER_DAMAGE.format(data_dir)
    if isinstance(failure, ForkedError):
        return (
            f"keep the data in {data_dir}: started with another --listen-peer-urls, this member serves it to "
            "serializable reads; write what the others lack to them, then replace this member"
        )
    if isinstance(failure, SpaceError):
        return "free disk space, then start the member again"
    if isinstance(failure, MemoryError):
        return "give it more memory, then start the member again"
    if isinstance(failure, OSError | StorageError):
        return "check this disk and the system log, then start the member again"
    return "start the member again; if it stops again, report this line with the log before it"


async def _serve(
    config: ServerConfig, selector: TurnSelector, extend_http: ExtendHttp | None, on_ready: OnReady | None
) -> tuple[signal.Signals, BaseException | None]:
    if is_new(config):
        # Before any data is created: a restart with corrected flags would meet data with the ids of the wrong flags.
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
            _log.info(
                "running without compiled modules: with them, a busy member needs half the CPU time (docs: install.md)"
            )
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
    """Open the files that flags name and that the member itself opens only once its data exists.

    Raises:
        ConfigError, StorageError: a file cannot be used.
    """
    if (tokens := parse_options(config.auth_token)) is not None:
        JWTTokens(tokens, time)
    if config.audit_log:
        ensure_private_directory(config.data_dir)  # the log may be inside
        open_destination(config.audit_log, config.audit_log_max_size_bytes, config.audit_log_keep).close()


def _complain(text: str, status: int = 1) -> int:
    print(f"raftkv: {text}", file=sys.stderr)
    return status
