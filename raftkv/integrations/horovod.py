"""Horovod's HTTP rendezvous, served by members on their client port: ``GET``, ``PUT``, ``DELETE /<scope>/<key>``.

Needs only the member; Horovod is installed where its workers run (tested with 0.28.1). Its workers know one address,
which may be that of any member. The member itself does not know about runs: the command line passes it
``extension(run)``, which answers Horovod's requests, forwards all others, and accesses keys through the member's
``LocalStore``.

Used by workers with ``HOROVOD_GLOO_RENDEZVOUS_ADDR`` and ``_PORT`` in their environment; served if ``--horovod-run``
names a run:

    PUT /global/rank_0                       -> 200
    GET /global/1                            -> 200 and the value, which may be empty; 404: absent, ask again
    DELETE /global/0                         -> 200: rank 0 has finished with the scope
    GET /rank_and_size/host-a:0              -> rank,size,local_rank,local_size,cross_rank,cross_size, once the run's
                                                generation has begun; all -1: the run has no such slot

Horovod accepts 200 and 404 as answers and retries a few times after any other status; its HTTP client reads header
names only in their usual spelling (``rpc/server/http1``). Requests do not name a job, so one run is served at a time.
Browsers are refused, because a web page must not write through the port of a member.

If authentication is enabled, the caller is the user of the token in ``Authorization`` or of the certificate, and must
have permission to read and write all keys of the run's scopes. 401: no user is given; 403: the user lacks permission.
Horovod's client sends neither token nor certificate, so a proxy beside the workers must add the header.

Invariants: a worker of an earlier generation can neither read nor change keys of the current one; reads are
linearizable; no request makes a member read more than ``SCOPE_KEYS_MAX`` keys or ``SLOTS_MAX`` slots.

Access to plain HTTP in general is checked in ``http.access``. A worker that asks for its rank before the loss of
another is known gets its place in the old generation; it cannot meet all others there, and asks again after Horovod's
timeout. Workers that are restarted for each generation (``raftkvctl run exec``) never ask.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar, Final, Protocol

from raftkv import errors
from raftkv.client.records import RecordError
from raftkv.client.scope import prefix_end
from raftkv.pb import kv_pb2, rpc_pb2
from raftkv.rpc.server.http import HttpHandler, HttpRequest, HttpResponse, text_response
from raftkv.rpc.shares import Identity, queue_of_call
from raftkv.training.records import CLOSED, RUNNING, GenerationRecord, RunKeys, State
from raftkv.training.rendezvous.world import find_slot, world_size

# -- scopes ---------------------------------------------------------------------------------------------------------
#
# Horovod's rendezvous scopes as keys of the cluster: any member answers, and none of them is missed.
#
# ::
#
#     /raftkv/horovod/<run>/<generation>/key/<scope>/<key>       what workers put
#     /raftkv/horovod/<run>/<generation>/done/<scope>/<rank>     ranks that have finished with a scope
#
# The generation is that of the training run with the same id, 0 while there is none: keys of workers of an earlier
# world are invisible to the next one, and deleted at its first put. Every write carries the revision of the ``round``
# record, so that it fails if the generation has just ended; every read is confirmed with a quorum.
#
# A scope of workers (``global``, ``local_<host>``, ``cross_<n>``, each with or without a suffix for a set of processes)
# ends when all its ranks have finished with it. Its ranks are those that have put a key: a worker puts its address
# before it reads the others', and finishes after it has found all. All other scopes are plain tables.
#
# Not here: HTTP, and the meaning of values, which are bytes, also those that Horovod pickles.

ROOT: Final = "/raftkv/horovod/"

SCOPE_KEYS_MAX: Final = 8192
"""Maximum keys of a scope of workers (a few per rank), which are read in one turn when a rank has finished."""

SLOTS_MAX: Final = 1_000_000
"""Maximum slots of a generation; more are damage, and would block the member's loop."""

Slot = tuple[int, int, int, int, int, int]
"""Rank, size, local rank, local size, cross rank, cross size, in Horovod's order."""

NO_SLOT: Final[Slot] = (-1, -1, -1, -1, -1, -1)

_WORKERS: Final = re.compile(r"global(_.*)?|local_.+|cross_\d+(_.*)?")
_RANK: Final = re.compile(r"(?:rank_)?(\d+)")
Interval = tuple[bytes, bytes]
"""First key and end."""


class LocalStore(Protocol):
    """Access of an extension to a member's keys; ``server.recipes.local_client.Recipe`` implements it."""

    @property
    def store(self) -> Any:
        """The applied state; ``revision`` is its last."""
        ...

    def let_in(self, call: Any, *, reads: Sequence[Interval], writes: Sequence[Interval]) -> None:
        """Identify the caller, and refuse callers without permission to read and write intervals of keys.

        Arguments:
            call: call with the headers and certificate of the caller.
            reads, writes: the intervals.

        Raises:
            StatusError: as etcd's.
        """
        ...

    async def confirm(self, queue: Identity) -> None:
        """Wait until the applied state includes everything committed before the call.

        Arguments:
            queue: of the caller (``rpc/shares``).
        """
        ...

    def find(self, request: rpc_pb2.RangeRequest) -> list[kv_pb2.KeyValue]:
        """Read the applied state."""
        ...

    async def txn(self, call: Any, request: rpc_pb2.TxnRequest) -> tuple[int, rpc_pb2.TxnResponse]:
        """Execute a txn; return the revision and the response.

        Arguments:
            call: call to act for.
            request: request to execute.
        """
        ...

    async def changed(self, *keys: bytes) -> None:
        """Wait until one of these keys may have changed in the applied state."""
        ...


class Scopes:
    """The scopes of one run.

    Arguments:
        store: reads and writes keys on this member.
        run_id: training run whose generations and ranks are used.
    """

    def __init__(self, store: LocalStore, run_id: str) -> None:
        self._store = store
        self._root = f"{ROOT}{run_id}/"
        keys = RunKeys(run_id)
        self._round_key, self._state_key = keys.round.encode(), keys.state.encode()
        self._below = self._root.encode(), prefix_end(self._root.encode())

    async def _confirm(self, call: Any, *, writes: bool) -> None:
        """Catch up with the cluster, and check the caller's current permissions on all keys of the run."""
        await self._store.confirm(queue_of_call(call))
        reads = [self._below, (self._round_key, b""), (self._state_key, b"")]
        self._store.let_in(call, reads=reads, writes=[self._below] if writes else [])

    async def get(self, call: Any, scope: str, key: str) -> bytes | None:
        """Read the value of a key; None: absent (a value may be empty).

        Arguments:
            call: on whose behalf.
            scope: name of a table.
            key: in it.

        Raises:
            StatusError: there is no quorum, or the caller lacks permission.
            RecordError: the record of the run is not readable.
        """
        await self._confirm(call, writes=False)
        found = self._find(self._place(scope, key, self._round()[1]))
        return found.value if found is not None else None

    async def put(self, call: Any, scope: str, key: str, value: bytes) -> None:
        """Set a key. A rank that puts a key has not finished. Raises as ``get``.

        Arguments:
            call: on whose behalf.
            scope: name of a table.
            key: in it.
            value: any bytes.
        """
        while True:
            await self._confirm(call, writes=True)
            revision, current = self._round()
            writes = [_put(self._place(scope, key, current), value)]
            rank = _rank(scope, key)
            if rank is not None:
                writes.append(_delete(self._done(scope, rank, current)))
            # From the first generation on: before it, as `<run>/0`, may lie the keys of runs below.
            past = self._base(None).encode(), self._base(current).encode()
            if self._list(*past, limit=1):
                writes.append(_delete(*past))
            if await self._write(call, revision, writes):
                return

    async def finish(self, call: Any, scope: str, key: str) -> None:
        """Mark a rank as finished with a scope, and clear it after the last rank; in other scopes delete the key.

        Raises as ``get``.

        Arguments:
            call: call to act for.
            scope: name of a table.
            key: in it: of a scope of workers, the rank.
        """
        rank = _rank(scope, key)
        while True:
            await self._confirm(call, writes=True)
            revision, current = self._round()
            if rank is None:
                writes = [_delete(self._place(scope, key, current))]
            else:
                writes = [_put(self._done(scope, rank, current), b"")]
            if await self._write(call, revision, writes):
                break
        if rank is not None:
            await self._clear_if_over(call, scope, current)

    async def slot(self, call: Any, host: str, local_rank: int) -> Slot:
        """Return the place of a worker in the current generation; waits while there is none. Raises as ``get``.

        Arguments:
            call: call to act for.
            host: name of the worker's machine.
            local_rank: rank of the worker on the node.
        """
        while True:
            await self._confirm(call, writes=False)
            found = self._find(self._state_key)
            _, current = self._round()
            if found is not None:
                state = State.decode(found.value)
                if state.phase == CLOSED:
                    return NO_SLOT
                if state.phase == RUNNING and current is not None and current.generation == state.generation:
                    place = find_slot(current.members, host, local_rank)
                    return NO_SLOT if place is None else (place.rank, world_size(current.members), *place[2:])
            await self._store.changed(self._round_key, self._state_key)

    # -- keys --------------------------------------------------------------------------------------------------------

    def _base(self, current: GenerationRecord | None) -> str:
        return f"{self._root}{current.generation if current is not None else 0:012d}/"

    def _place(self, scope: str, key: str, current: GenerationRecord | None) -> bytes:
        return f"{self._base(current)}key/{scope}/{key}".encode()

    def _done(self, scope: str, rank: str, current: GenerationRecord | None) -> bytes:
        return f"{self._base(current)}done/{scope}/{rank}".encode()

    def _round(self) -> tuple[int, GenerationRecord | None]:
        """Read the run's record: its mod revision (0: absent) and content."""
        found = self._find(self._round_key)
        if found is None:
            return 0, None
        current = GenerationRecord.decode(found.value)
        if world_size(current.members) > SLOTS_MAX:
            raise RecordError(GenerationRecord.NAME, f"it has more than {SLOTS_MAX} slots")
        return found.mod_revision, current

    # -- reading and writing -----------------------------------------------------------------------------------------

    def _find(self, key: bytes) -> kv_pb2.KeyValue | None:
        return next(iter(self._store.find(rpc_pb2.RangeRequest(key=key))), None)

    def _list(self, start: bytes, end: bytes, limit: int = 0) -> list[bytes]:
        request = rpc_pb2.RangeRequest(key=start, range_end=end, limit=limit, keys_only=True)
        return [found.key for found in self._store.find(request)]

    async def _write(self, call: Any, round_revision: int, writes: Sequence[rpc_pb2.RequestOp]) -> bool:
        """Write, unless another generation has begun."""
        fence = rpc_pb2.Compare(
            key=self._round_key, target=rpc_pb2.Compare.MOD, result=rpc_pb2.Compare.EQUAL, mod_revision=round_revision
        )
        return await self._txn(call, [fence], writes)

    async def _txn(self, call: Any, compares: Sequence[rpc_pb2.Compare], writes: Sequence[rpc_pb2.RequestOp]) -> bool:
        _, response = await self._store.txn(call, rpc_pb2.TxnRequest(compare=compares, success=writes))
        return response.succeeded

    async def _clear_if_over(self, call: Any, scope: str, current: GenerationRecord | None) -> None:
        """Delete a scope with which all its ranks have finished, unless workers have begun to use it again.

        One with more keys than ranks can have is left to the next generation: looking at all of them would hold the
        member.
        """
        keys = self._place(scope, "", current)
        done = self._done(scope, "", current)
        cleared = False
        while not cleared:
            revision = self._store.store.revision
            there = self._list(keys, prefix_end(keys), limit=SCOPE_KEYS_MAX + 1)
            ended = self._list(done, prefix_end(done), limit=SCOPE_KEYS_MAX + 1)
            ranks = {_rank(scope, _name_below(keys, key)) for key in there} - {None}
            if max(len(there), len(ended)) > SCOPE_KEYS_MAX or not ranks <= {_name_below(done, key) for key in ended}:
                return
            unchanged = [_unchanged(keys, revision), _unchanged(done, revision)]
            cleared = await self._txn(
                call, unchanged, [_delete(keys, prefix_end(keys)), _delete(done, prefix_end(done))]
            )


def _rank(scope: str, key: str) -> str | None:
    """Return the rank of a key in a scope of workers."""
    match = _RANK.fullmatch(key) if _WORKERS.fullmatch(scope) else None
    return match[1] if match is not None else None


def _name_below(prefix: bytes, key: bytes) -> str:
    """Return the name of a key; those that are not a worker's may have any bytes."""
    return key.removeprefix(prefix).decode(errors="replace")


def _put(key: bytes, value: bytes) -> rpc_pb2.RequestOp:
    return rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=key, value=value))


def _delete(key: bytes, end: bytes = b"") -> rpc_pb2.RequestOp:
    return rpc_pb2.RequestOp(request_delete_range=rpc_pb2.DeleteRangeRequest(key=key, range_end=end))


def _unchanged(prefix: bytes, revision: int) -> rpc_pb2.Compare:
    """Return the condition that nothing below a prefix was written after a revision."""
    return rpc_pb2.Compare(
        key=prefix,
        range_end=prefix_end(prefix),
        target=rpc_pb2.Compare.MOD,
        result=rpc_pb2.Compare.LESS,
        mod_revision=revision + 1,
    )


_log = logging.getLogger(__name__)

NAME_BYTES_MAX: Final = 512
"""Maximum length of a scope's name and of a key: a host name and a rank."""

VALUE_BYTES_MAX: Final = 1024 * 1024
"""Maximum size of a worker's value: its addresses for all others, about 150 bytes each."""

RESERVED: Final = frozenset(
    {"debug", "health", "livez", "metrics", "readyz", "ui", "v2", "v3", "v3alpha", "v3beta", "version"}
)
"""First parts of paths that are not Horovod's."""

RANK_AND_SIZE: Final = "rank_and_size"

_PATH: Final = re.compile(r"/([!-.0-~]+)/([!-.0-~]+)")
_SLOT: Final = re.compile(r"(.+):(\d{1,9})")
_IDENTITY: Final = frozenset((b"token", b"authorization", b"grpcgateway-accept"))
_OCTETS: Final = (("content-type", "application/octet-stream"),)


@dataclass(slots=True)
class HttpCall:
    """The caller of a request: given by the headers (``Authorization``), else by the certificate, as for gRPC.

    Attributes:
        headers: request headers that identify the caller.
        peer: has the certificate.
        identity: in whose share it falls (``rpc/shares``).
        caller: caller as the member identified it.
        observer: called with the answer, to count its bytes.
    """

    route: ClassVar = SimpleNamespace(path="/horovod")
    """All calls, for rate limits."""
    deadline: ClassVar[None] = None
    sent_bytes: ClassVar[int] = 0
    headers: tuple[tuple[bytes, bytes], ...]
    peer: HttpRequest
    identity: Identity
    caller: Any = None
    observer: Callable[[int, bytes], None] | None = None

    @classmethod
    def of(cls, request: HttpRequest) -> HttpCall:
        """Make it from a request."""
        pairs = ((name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in request.headers)
        return cls(tuple(pair for pair in pairs if pair[0] in _IDENTITY), request, request.identity)


class HorovodService:
    """Answers Horovod's requests, and forwards all others.

    Arguments:
        scopes: scopes of the run.
        otherwise: answers what is not Horovod's.
    """

    def __init__(self, scopes: Scopes, otherwise: HttpHandler) -> None:
        self._scopes = scopes
        self._otherwise = otherwise

    async def handle(self, request: HttpRequest) -> HttpResponse:
        """Answer one request."""
        match = _PATH.fullmatch(request.path)
        if match is None or match[1] in RESERVED:
            return await self._otherwise(request)
        if request.header("origin"):
            return text_response(403, "pages in browsers may not use the rendezvous")
        scope, key = match[1], match[2]
        if len(scope) > NAME_BYTES_MAX or len(key) > NAME_BYTES_MAX:
            return text_response(414, f"a scope or a key has more than {NAME_BYTES_MAX} bytes")
        call = HttpCall.of(request)
        response = await self._answer_or_refuse(call, request, scope, key)
        if call.observer is not None and isinstance(response.body, bytes):
            call.observer(response.status, response.body)
        return response if call.caller is None else replace(response, user=call.caller.user)

    async def _answer_or_refuse(self, call: HttpCall, request: HttpRequest, scope: str, key: str) -> HttpResponse:
        try:
            return await self._answer(call, request, scope, key)
        except errors.StatusError as error:
            return text_response(_status_of(error), f"/{scope}/{key}: {error}")
        except RecordError as error:
            _log.error("horovod: a record of the run cannot be read: %s", error)
            return text_response(500, f"/{scope}/{key}: a record of the run is damaged: {error}")

    async def _answer(self, call: HttpCall, request: HttpRequest, scope: str, key: str) -> HttpResponse:
        match request.method:
            case "GET" if scope == RANK_AND_SIZE:
                return await self._slot(call, key)
            case "GET":
                value = await self._scopes.get(call, scope, key)
                return HttpResponse(404 if value is None else 200, value or b"", _OCTETS)
            case "PUT" if len(request.body) > VALUE_BYTES_MAX:
                return text_response(413, f"a value has more than {VALUE_BYTES_MAX} bytes")
            case "PUT":
                await self._scopes.put(call, scope, key, request.body)
            case "DELETE":
                await self._scopes.finish(call, scope, key)
            case _:
                return HttpResponse(405, b"Method Not Allowed\n", (("allow", "GET, PUT, DELETE"),))
        return HttpResponse(200, b"", _OCTETS)

    async def _slot(self, call: HttpCall, key: str) -> HttpResponse:
        match = _SLOT.fullmatch(key)
        if match is None:
            return text_response(400, f"{key} is not <host>:<local rank>")
        slot = await self._scopes.slot(call, match[1], int(match[2]))
        return HttpResponse(200, ",".join(map(str, slot)).encode(), _OCTETS)


def extension(run_id: str) -> Callable[[LocalStore, HttpHandler], HttpHandler]:
    """Make the extension of a member's HTTP handler that serves Horovod's workers of a run."""
    return lambda store, otherwise: HorovodService(Scopes(store, run_id), otherwise).handle


def _status_of(error: errors.StatusError) -> int:
    if isinstance(error, errors.RequestTooLargeError):
        return 413
    if isinstance(error, errors.UserEmptyError | errors.InvalidAuthTokenError | errors.AuthOldRevisionError):
        return 401
    if isinstance(error, errors.PermissionDeniedError):
        return 403
    return 507 if isinstance(error, errors.NoSpaceError) else 503
