"""``snapshot save``: the state of one member in a file, as etcdctl saves it; and etcdctl's ``status`` and ``restore``.

These two are raftkvutl's own, with what etcdctl prints. 3.4 and 3.5 have them and scripts call them so; 3.6 moved them
to etcdutl. etcdctl 3.5 says of each that it is deprecated. Here nothing is to be taken away, so nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from raftkv.cli.ctl.session import failed, open_session, unanswered
from raftkv.cli.goflags.command import Invocation
from raftkv.cli.output.table import progress_bar
from raftkv.cli.program import ERROR, INTERRUPTED, CommandError
from raftkv.cli.utl import files as utl
from raftkv.client import Client
from raftkv.client.reasons import plain_failures
from raftkv.client.rpc import methods
from raftkv.client.snapshot import SavedSnapshot, save
from raftkv.errors import ContextDeadlineExceededError, RaftKVError, StatusError, StorageError
from raftkv.pb import rpc_pb2


def snapshot_save(invocation: Invocation) -> None:
    """Save the state of the endpoint's member to a file."""
    path = invocation.argument("snapshot save expects one argument")
    session = open_session(invocation)
    if len(session.endpoints) != 1:
        many = " ".join(session.endpoints)
        raise CommandError(f"snapshot must be requested to one selected node, not multiple [{many}]", INTERRUPTED)
    # Without the flag there is no limit: how long it takes depends on how much there is.
    timeout_s = session.timeout_s if "command-timeout" in invocation.changed else None

    async def fetch(client: Client) -> SavedSnapshot:
        with progress_bar("", ("Download", "TransferSpeed", "TimeRemaining")) as update:
            async with await client.stream(methods.SNAPSHOT, timeout_s=timeout_s) as stream:
                await stream.send(rpc_pb2.SnapshotRequest())
                stream.half_close()
                try:
                    return await save(stream, path, lambda received, total: update(completed=received, total=total))
                except StatusError as error:
                    raise _failed(error, session.endpoints[0]) from None
                except StorageError as error:
                    raise CommandError(str(error), INTERRUPTED) from None

    saved = session.run(fetch)
    print(f"Snapshot saved at {path}")
    if saved.version:
        print(f"Server version {saved.version}")


def _failed(error: StatusError, endpoint: str) -> CommandError:
    """Make the error of a stream that has failed: where there was no connection, etcdctl's line and before it why."""
    if "desc = connection error: " not in str(error):
        return failed(error, INTERRUPTED)
    reasons = unanswered(plain_failures({endpoint: str(error)}))
    return CommandError(ContextDeadlineExceededError.text, INTERRUPTED, reasons)


def status(invocation: Invocation) -> None:
    """Print hash, revision, keys and size of a snapshot file."""
    with _files_refused():
        utl.status(invocation, with_version=False)


def restore_directory(invocation: Invocation) -> None:
    """Make the data directory of a member out of a snapshot file."""
    with _files_refused():
        utl.restore_directory(invocation)


@contextmanager
def _files_refused() -> Iterator[None]:
    try:
        yield
    except RaftKVError as error:  # an error text about a file is written for users
        raise CommandError(str(error), ERROR) from None
