"""How commands that are not etcdctl's reach the cluster: the client library, and a line for each of its failures.

::

    session, as_json = open_library(invocation)
    runs = use_library(session, list_runs)

Owns which output formats such commands have: tables for people, and JSON by ``--json`` or ``-w json``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from raftkv.cli.ctl.session import Session, open_session
from raftkv.cli.goflags.command import Invocation
from raftkv.cli.program import BAD_ARGUMENTS, BAD_FEATURE, ERROR, CommandError
from raftkv.client import Client as Core
from raftkv.client.errors import HistoryReplaced
from raftkv.client.library import Client, open_scope
from raftkv.errors import CompactedError, ConfigError, RaftKVError, StatusError

T = TypeVar("T")


def open_library(invocation: Invocation) -> tuple[Session, bool]:
    """Return the session of a command, and whether JSON is wanted.

    Raises:
        CommandError: a setting cannot be used, or the output format is one of etcdctl's.
    """
    wanted = invocation["write-out"]
    if wanted not in ("simple", "table", "json"):
        raise CommandError(f"{wanted} not supported as output format", BAD_FEATURE)
    session = open_session(invocation)
    session.options = replace(session.options, explain=True)
    return session, invocation["json"] or wanted == "json"


def use_library(session: Session, use: Callable[[Client], Awaitable[T]]) -> T:
    """Use the library's client; each failure becomes one line.

    Arguments:
        session: of the command.
        use: what to do with the client.

    Raises:
        CommandError: it failed.
    """

    async def with_library(core: Core) -> T:
        try:
            async with open_scope(core, session.timeout_s) as scope:
                return await use(Client(scope))
        except ConfigError as error:
            raise CommandError(str(error), BAD_ARGUMENTS) from None
        except HistoryReplaced as error:
            raise CommandError(f"what was shown is {error}; start again", ERROR) from None
        except CompactedError:
            raise CommandError("the history was compacted while it was read; try again", ERROR) from None
        except StatusError:
            raise
        except RaftKVError as error:
            raise CommandError(str(error), ERROR) from None

    return session.run(with_library)
