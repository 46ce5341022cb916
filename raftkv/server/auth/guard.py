"""Wraps every handler of the client ports: finds the caller, checks the table, then calls the handler.

    guard = Guard(auth, rights, callers, live, node, slices, txn_operations_max=128)
    server = Server(..., around=(guard.around,))

    request -> parsed -> valid in itself? -> who calls? -> may they? -> handler, with ``call.caller``
                                  a token whose entry is not applied here yet: wait for it, AHEAD_MAX_S at most

While authentication is off, a handler is called after one test of an attribute. Long calls are registered in
``LiveCalls`` all the same, since authentication may be enabled before they end.

LONG CALLS: watches, keep-alives, long answers, waits for locks. They end when their right, user or token ends.

    live = calls.add(call, credential, check)     # check(caller) raises the error that ends the call
    calls.open(call)                              # a stream of requests: its service checks each of them
    live = calls.of(call)                         #     created at first use
    live.check_lease(id), live.read_refusal(key, end)  #     the caller may change between two requests
    live.recheck = stream.recheck                 #     checks everything in progress on the stream
    calls.close(call)

    auth.on_change -> changed() -> after the turn's entries: all calls are checked, in slices

The first slice of checks runs before the events of a turn are delivered. If there are too many calls for one slice,
watchers that are not checked yet are checked when they are served (``on_changed``), so events after a change of rights
reach only watchers that may still have them. Long reads that wait for their slices do not come first, however many they
are. A token with an expiry time has a timer, and its calls are checked the same way: tokens expire at full seconds, and
thousands of calls may have tokens of the same second. Calls are also registered while authentication is off: when it is
enabled, anonymous calls end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import partial
from typing import Any, Final

from raftkv import errors
from raftkv.apply.auth.rights import Left, Rights
from raftkv.apply.auth.store import AuthStore
from raftkv.apply.wire import Caller
from raftkv.loop.scheduler import Slices, Work
from raftkv.pb.services import Method
from raftkv.replica.node.admission import parse_or_raise, refusals
from raftkv.replica.node.node import Node
from raftkv.rpc.server.calls import ServerCall, UnaryCall
from raftkv.rpc.server.router import Kind
from raftkv.rpc.server.stream import ListenedCall, StreamCall
from raftkv.rpc.shares import Identity, Shares, identity_of, identity_of_peer, queue_of_call
from raftkv.rpc.status import Headers, RpcError
from raftkv.rpc.tls import common_name_of
from raftkv.server.auth.callers import Callers, Credential, TokenAheadError
from raftkv.server.auth.table import OPEN, Row, row_of
from raftkv.server.services.responder import fail, parse

_log = logging.getLogger(__name__)

CheckCaller = Callable[[Caller | None], Iterator[None]]
"""Raises the error that ends a call; yields to pause."""

Refusal = Callable[[bytes, bytes], str]
"""Returns why a range of keys may not be read, as the reason of a watch; empty: it may."""

Recheck = Callable[[Refusal], Iterator[None]]
"""Checks everything in progress on a stream, ends what may not continue, and yields to pause."""

TIMER_MAX_S: Final = 3600.0
"""Longest time of a timer: the wall clock may be adjusted."""


class LiveCall:
    """One long call; created by ``LiveCalls``."""

    __slots__ = ("__weakref__", "_calls", "_check", "_credential", "_let_in_at", "_timer", "call", "recheck")

    def __init__(
        self, calls: LiveCalls, call: ServerCall, credential: Credential | None, check: CheckCaller | None
    ) -> None:
        self.call = call
        self.recheck: Recheck | None = None
        self._let_in_at = 0
        """Revision at which the current work was admitted: a user of the same name added later is a different one."""
        self._calls = calls
        self._check = check
        self._credential: Credential | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._take(credential)

    def _take(self, credential: Credential | None) -> None:
        """Use a credential from now on; None: none."""
        if self._credential is not None:
            self._credential.release()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._credential = credential
        if credential is not None:
            credential.hold()
            self._set_timer(credential)
            # For the audit log and the dashboard.
            caller = self.call.caller = credential.caller(self._calls.auth.revision)
            self._let_in_at = self._let_in_at or caller.auth_revision

    def _set_timer(self, credential: Credential) -> None:
        if credential.expires_at is not None:
            self._timer = self._calls.at(credential.expires_at, self._timed)

    def _shown(self) -> Credential | None:
        credential = self._credential
        if credential is None or credential.is_over:
            credential = self._calls.callers.credential(self.call.headers, self.call.peer)
            self._take(credential)
        return credential

    def caller(self) -> Caller | None:
        """Return the current caller, as an entry would name it; None: no user.

        Raises:
            InvalidAuthTokenError: the token has ended.
        """
        credential = self._shown()
        return None if credential is None else credential.caller(self._calls.auth.revision)

    def _present(self) -> Caller | None:
        """Return the caller under the current users and roles: an old signed token may continue work, not begin it."""
        credential, auth = self._shown(), self._calls.auth
        if credential is None:
            return None
        user = auth.users.get(credential.user)
        if user is not None and self._let_in_at < user.since:
            raise errors.PermissionDeniedError
        return Caller(credential.user, auth.revision)

    def check_lease(self, lease_id: int) -> Left:
        """Check that the client may write all keys of a lease, to keep it alive; as ``Rights.check_lease``."""
        caller = self.call.caller = self.caller()  # for a grace that the client may request
        return self._calls.rights.check_lease(caller, lease_id, write=True)

    def read_refusal(self, key: bytes, range_end: bytes) -> str:
        """Return why the client may not begin to watch a range, in etcd's words; empty: it may."""
        return self._refusal(self.caller, key, range_end)

    def refusal_to_go_on(self, key: bytes, range_end: bytes) -> str:
        """Return why the client may not continue to watch a range, under the current users; empty: it may."""
        return self._refusal(self._present, key, range_end)

    def _refusal(self, caller: Callable[[], Caller | None], key: bytes, range_end: bytes) -> str:
        if not self._calls.auth.is_enabled:
            return ""
        try:
            self._calls.rights.check_read(caller(), key, range_end)
        except errors.StatusError as error:
            return _reason(error)
        return ""

    def _timed(self) -> None:
        """Check the call if its token has ended; otherwise set the timer again, which had its longest time."""
        self._timer = None
        credential = self._credential
        if credential is not None and not credential.is_over:
            self._set_timer(credential)
        else:
            self._calls.look_at(self)

    def steps(self) -> Iterator[None]:
        """End everything that may not continue, with pauses."""
        is_enabled, revision = self._calls.auth.is_enabled, self._calls.auth.revision
        if self.call.done or (self.recheck is None and not is_enabled):
            return
        if self.recheck is not None:
            yield from self.recheck(self.refusal_to_go_on)
            if is_enabled:
                self._let_in_at = revision  # later requests on it may be another user's
            return
        caller: Caller | None = None
        try:
            caller = self._present()
            if self._check is None:
                self._calls.rights.check_user(caller)  # a stream of requests must belong to a user
            else:
                yield from self._check(caller)
        except errors.StatusError as error:
            if caller is not None and caller.auth_revision != self._calls.auth.revision:
                return  # users have changed meanwhile, so all calls are checked again
            self.end()
            self.call.abort(RpcError(error.code, str(error)))

    def end(self) -> None:
        """Forget the call: it has ended, or is about to."""
        self._calls.discard(self)
        self._take(None)
        # The check of a stream refers to the stream, which refers to this: without a collector they would stay.
        self.recheck = None


class LiveCalls:
    """All long calls of a member.

    Arguments:
        auth, rights: users, and their rights.
        callers: determines the callers of calls.
        slices: runs long work.
    """

    def __init__(self, auth: AuthStore, rights: Rights, callers: Callers, slices: Slices) -> None:
        self.auth = auth
        self.rights = rights
        self.callers = callers
        self._slices = slices
        self._loop = asyncio.get_running_loop()
        self._calls: dict[ServerCall, LiveCall | None] = {}
        """The live call of each; None for a stream of requests until it is needed. Most are short."""
        self._due: deque[ServerCall] = deque()
        """Calls to check."""
        self._is_changed = False
        self._is_looking = False
        self.on_changed: list[Callable[[], None]] = []
        """Called when rights may have changed, before any call is checked."""

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: ServerCall, credential: Credential | None, check: CheckCaller) -> LiveCall:
        """Register an admitted call.

        Arguments:
            call: aborted when it may not continue.
            credential: credential of the caller; None: none, since authentication is off.
            check: raises the StatusError that refuses a caller.
        """
        live = self._calls[call] = LiveCall(self, call, credential, check)
        call.add_observer(lambda code, answer: live.end())
        return live

    def open(self, call: ServerCall) -> None:
        """Register a stream of requests, each of which its service checks."""
        self._calls[call] = None

    def of(self, call: ServerCall) -> LiveCall:
        """Return the live call of a registered call that has not ended."""
        live = self._calls[call]
        if live is None:
            live = self._calls[call] = LiveCall(self, call, None, None)
        return live

    def close(self, call: ServerCall) -> None:
        """Forget a stream of requests."""
        live = self._calls.pop(call, None)
        if live is not None:
            live.end()

    def discard(self, live: LiveCall) -> None:
        """Forget a call."""
        self._calls.pop(live.call, None)

    def at(self, moment_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Call back at a wall clock time, at the latest after an hour: the time is then checked again."""
        return self._loop.call_later(min(max(moment_s - time.time(), 0.0) + 0.001, TIMER_MAX_S), callback)

    # -- changes -----------------------------------------------------------------------------------------------------

    def changed(self) -> None:
        """Note that users or rights may have changed."""
        self._is_changed = True
        if self.auth.is_enabled:
            for callback in self.on_changed:
                callback()

    def applied(self) -> None:
        """Check all calls if anything has changed: the entries of a turn are applied."""
        if self._is_changed:
            self._begin(at_once=True)

    def look_at(self, live: LiveCall) -> None:
        """Check one call: its token has ended."""
        self._due.append(live.call)
        self._begin(at_once=False)

    def _begin(self, *, at_once: bool) -> None:
        if not self._is_looking:
            self._is_looking = True
            self._slices.run_ahead(self._look, self._failed, at_once=at_once)

    def _look(self) -> Work[None]:
        while self._is_changed or self._due:
            if not self._due:
                self._is_changed = False
                self._due.extend(self._calls)
            while self._due:
                call = self._due.popleft()
                if call in self._calls:
                    yield from self._look_at(call)
                    yield
        self._is_looking = False

    def _look_at(self, call: ServerCall) -> Iterator[None]:
        """Check one call. If the check fails unexpectedly, end that call, and continue with the others."""
        live = self.of(call)
        try:
            yield from live.steps()
        except Exception as error:
            _log.error("the permissions of an open call could not be checked", exc_info=error)
            live.end()
            call.abort(RpcError(errors.INTERNAL, "internal error"))

    def _failed(self, error: Exception) -> None:
        self._is_looking = False
        _log.error("checking the permissions of open calls failed", exc_info=error)


def _client_named(headers: Headers) -> bytes:
    """Return ``/NAME`` for the client that a proxy names; empty: it names none, or one that is too long."""
    for name, value in headers:
        if name == CLIENT_METADATA and 0 < len(value) <= CLIENT_BYTES_MAX:
            return b"/" + value
    return b""


def _reason(error: errors.StatusError) -> str:
    """Return the text of an error as etcd's watches give it as a reason."""
    return f"rpc error: code = {errors.CODE_NAMES[error.code]} desc = {error}"


AHEAD_MAX_S: Final = 2.0
"""How long a call on a member that is behind waits for the entry that makes its token known. If a restored backup is
older than the token, none does."""

AHEAD_CALLS_MAX: Final = 100
"""Calls that wait for such entries; each is checked in each turn. When there are more, the oldest call of the greediest
identity is refused: a genuine token is known after a moment."""

CLIENT_METADATA: Final = b"raftkv-client"
"""Names the client for which a proxy calls. It counts if the user of the proxy has the role root; others could take a
share of all budgets for each name that they invent."""

CLIENT_BYTES_MAX: Final = 128

BYTES_AT_ONCE: Final = 8 * 1024
"""Longer requests are checked in slices, if their row supports it."""


class Guard:
    """Admits calls, or refuses them.

    Arguments:
        auth, rights: users, and their rights.
        callers: determines the callers of calls.
        live: the long calls.
        node: applies entries.
        slices: checks long requests.
        txn_operations_max: etcd's max-txn-ops.
    """

    def __init__(
        self,
        auth: AuthStore,
        rights: Rights,
        callers: Callers,
        live: LiveCalls,
        node: Node,
        slices: Slices,
        *,
        txn_operations_max: int,
    ) -> None:
        self._auth = auth
        self._rights = rights
        self._callers = callers
        self._live = live
        self._node = node
        self._slices = slices
        self._txn_operations_max = txn_operations_max
        self._waiting: set[asyncio.Task[None]] = set()
        self._ahead: dict[asyncio.Timeout, Identity] = {}
        self._shares = Shares(AHEAD_CALLS_MAX)

    def identify(self, address: str, certificate: Mapping[str, Any] | None) -> Identity:
        """Return the identity of a connection. With authentication on, a name that is not a user's is ignored.

        Arguments:
            address, certificate: as in ``identity_of_peer``.
        """
        if not self._auth.is_enabled:
            return identity_of_peer(address, certificate)
        name = common_name_of(certificate).encode()
        return name if name in self._auth.users else identity_of_peer(address)

    def around(self, path: str, kind: Kind, handler: Callable[..., Any]) -> Callable[..., Any]:
        """Return the wrapper of a handler.

        Arguments:
            path, kind, handler: as registered by the server.

        Raises:
            ConfigError: the table has no row for the method.
        """
        method, row = row_of(path)
        if row is OPEN:
            return handler
        if kind is Kind.LISTENED:
            return self._listened(handler)
        if kind is Kind.STREAM:
            return self._by_message(handler) if row.by_message else self._stream(method, row, handler)
        return self._lasting(method, row, handler) if row.lasts else self._unary(method, row, handler)

    # -- one request, one answer -------------------------------------------------------------------------------------

    def _unary(self, method: Method, row: Row, handler: Callable[..., Any]) -> Callable[..., Any]:
        auth = self._auth

        def guarded(call: UnaryCall, data: bytes) -> None:
            if auth.is_enabled:
                self._admit(method, row, handler, call, data)
            else:
                handler(call, data)

        return guarded

    def _admit(self, method: Method, row: Row, handler: Callable[..., Any], call: UnaryCall, data: bytes) -> None:
        request = parse(call, method.request, data)
        if request is None:
            return
        in_pieces = row.valid_in_pieces

        def let_in(_credential: Credential | None) -> None:
            handler(call, data)

        if in_pieces is None or len(data) <= BYTES_AT_ONCE:
            self._ask_row(row, call, partial(self._check, row, request, call), let_in)
            return

        def check() -> Work[None]:
            yield from in_pieces(request, self._txn_operations_max)
            yield

        ask = partial(self._ask_row, row, call, partial(self._check_caller, row, request, call), let_in)
        self._when_checked(check(), None, call, ask)

    def _ask_row(
        self,
        row: Row,
        call: UnaryCall,
        check: Callable[[], tuple[Credential | None, Left]],
        let_in: Callable[[Credential | None], None],
    ) -> None:
        """Admit a call, or refuse it. If its token is not known here yet, wait for it, and check once more.

        Arguments:
            row: determines the wording of refusals.
            call: call to answer.
            check: finds the caller, and checks the row.
            let_in: called with the credential of the caller.
        """
        try:
            credential, left = check()
        except TokenAheadError as ahead:
            again = partial(self._ask_row, row, call, check, let_in)
            self._spawn(self._admit_later(ahead, call, again), call)
        except errors.StatusError as error:
            fail(call, error)
        else:
            self._when_checked(left, row, call, partial(let_in, credential))

    def _when_checked(self, left: Left, row: Row | None, call: UnaryCall, go_on: Callable[[], None]) -> None:
        """Do the rest of a check in slices, then continue.

        Arguments:
            left: rest of the check, or None.
            row: determines the wording of refusals; None: they are sent as they are.
            call: call to answer.
            go_on: called after the check.
        """
        if left is None:
            go_on()
            return

        def work() -> Work[None]:
            yield from left
            if not call.done:
                go_on()

        def failed(error: Exception) -> None:
            if isinstance(error, errors.StatusError):
                fail(call, error if row is None else _as_refused(row, error))
            else:
                call.fail_for(error)

        job = self._slices.run(work, failed, 0, queue_of_call(call))
        if not job.is_over:
            call.on_cancel(job.cancel)

    def _check(self, row: Row, request: Any, call: ServerCall) -> tuple[Credential | None, Left]:
        """Validate a request, find its caller, and check the row. Returns the rest of the check; raises StatusError."""
        if row.valid is not None:
            row.valid(request, self._txn_operations_max)
        return self._check_caller(row, request, call)

    def _check_caller(self, row: Row, request: Any, call: ServerCall) -> tuple[Credential | None, Left]:
        """Find the caller of a valid request, and check the row, as ``_check`` does."""
        try:
            credential = self._callers.credential(call.headers, call.peer)
            caller = self._note(call, credential)
            return credential, row.ask(self._rights, request, caller)
        except TokenAheadError:
            raise
        except errors.StatusError as error:
            raise _as_refused(row, error) from None

    def _lasting(self, method: Method, row: Row, handler: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the handler of a unary method that may wait for long."""

        def guarded(call: UnaryCall, data: bytes) -> None:
            request = parse(call, method.request, data)
            if request is None:
                return

            def check() -> tuple[Credential | None, Left]:
                return self._check(row, request, call) if self._auth.is_enabled else (None, None)

            def let_in(credential: Credential | None) -> None:
                self._live.add(call, credential, lambda caller: _ask(row, self._rights, request, caller))
                handler(call, data)

            self._ask_row(row, call, check, let_in)

        return guarded

    def _spawn(self, waiting: Coroutine[Any, Any, None], call: ServerCall) -> None:
        task = asyncio.get_running_loop().create_task(waiting)
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)
        call.on_cancel(task.cancel)

    async def _admit_later(self, ahead: TokenAheadError, call: UnaryCall, again: Callable[[], None]) -> None:
        try:
            await self._caught_up(ahead, call)
        except errors.StatusError as error:
            fail(call, error)
            return
        try:
            again()
        except Exception as error:  # no other task would answer the call
            call.fail_for(error)

    async def _caught_up(self, ahead: TokenAheadError, call: ServerCall) -> None:
        """Wait until a token can be known here. Raises InvalidAuthTokenError if that takes too long."""
        identity = identity_of(call)
        if not self._shares.make_room(identity, 1, self._refuse_oldest):
            self._refuse_oldest(identity)
        patience = asyncio.timeout(AHEAD_MAX_S)
        try:
            async with patience:
                self._ahead[patience] = identity
                self._shares.take(identity, 1)
                await self._node.wait_until(ahead.is_known)
        except TimeoutError:
            raise errors.InvalidAuthTokenError from None
        finally:
            self._leave(patience)

    def _refuse_oldest(self, identity: Identity) -> bool:
        oldest = next((one for one, whose in self._ahead.items() if whose == identity), None)
        if oldest is None:
            return False
        self._leave(oldest)
        oldest.reschedule(asyncio.get_running_loop().time())
        return True

    def _leave(self, patience: asyncio.Timeout) -> None:
        identity = self._ahead.pop(patience, None)
        if identity is not None:
            self._shares.give_back(identity, 1)

    # -- streams -----------------------------------------------------------------------------------------------------

    def _stream(self, method: Method, row: Row, handler: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the handler of a stream of answers to one request."""

        async def guarded(call: StreamCall) -> None:
            data = await call.receive()
            if data is None:
                await handler(call)
                return
            request = parse_or_raise(method.request, data)
            credential = None
            with refusals():
                if self._auth.is_enabled:
                    credential, _ = await self._check_stream(row, request, call)  # no rest: no lease is named
            call.put_back(data)
            live = self._live.add(call, credential, lambda caller: _ask(row, self._rights, request, caller))
            try:
                await handler(call)
            finally:
                live.end()

        return guarded

    async def _check_stream(self, row: Row, request: Any, call: StreamCall) -> tuple[Credential | None, Left]:
        try:
            return self._check(row, request, call)
        except TokenAheadError as ahead:
            await self._caught_up(ahead, call)
            return self._check(row, request, call)

    def _by_message(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the handler of a stream of requests, each of which its service checks."""

        async def guarded(call: StreamCall) -> None:
            self._live.open(call)
            try:
                if self._auth.is_enabled:
                    await self._wait_for_token(call)
                await handler(call)
            finally:
                self._live.close(call)

        return guarded

    def _listened(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the handler of such a stream without a task."""

        live = self._live

        def guarded(call: ListenedCall) -> None:
            live.open(call)
            call.add_observer(lambda code, answer: live.close(call))
            if self._auth.is_enabled and (ahead := self._find_caller(call)) is not None:
                self._wait_to_listen(ahead, call, handler)
            else:
                handler(call)

        return guarded

    def _find_caller(self, call: ServerCall) -> TokenAheadError | None:
        """Note the user who opens a stream, for the audit log. Returns the error of a token that is not known yet.

        Any other fault of a token is reported in the answer to the first message.
        """
        try:
            credential = self._callers.credential(call.headers, call.peer)
        except TokenAheadError as ahead:
            return ahead
        except errors.StatusError:
            return None
        self._note(call, credential)
        return None

    def _note(self, call: ServerCall, credential: Credential | None) -> Caller | None:
        """Note the caller, and use its share for what waits for the connection."""
        if credential is None:
            return None
        user = self._auth.users.get(credential.user)
        if user is None:
            call.identify(self.identify(call.peer.address, call.peer.certificate))
        else:
            call.identify(credential.user + _client_named(call.headers) if user.is_root else credential.user)
        caller = call.caller = credential.caller(self._auth.revision)
        return caller

    async def _wait_for_token(self, call: StreamCall) -> None:
        ahead = self._find_caller(call)
        if ahead is not None:
            with contextlib.suppress(errors.StatusError):
                await self._caught_up(ahead, call)
            self._find_caller(call)

    def _wait_to_listen(self, ahead: TokenAheadError, call: ListenedCall, handler: Callable[..., Any]) -> None:
        async def wait() -> None:
            try:
                with contextlib.suppress(errors.StatusError):
                    await self._caught_up(ahead, call)
                self._find_caller(call)
            except Exception as error:
                call.fail_for(error)
            else:
                call.begin(handler)

        self._spawn(wait(), call)


def _ask(row: Row, rights: Rights, request: Any, caller: Caller | None) -> Iterator[None]:
    try:
        yield from row.ask(rights, request, caller) or ()
    except errors.StatusError as error:
        raise _as_refused(row, error) from None


def _as_refused(row: Row, error: errors.StatusError) -> errors.StatusError:
    return errors.StatusError(str(error)) if row.is_recipe else error
