"""Wraps every handler of the client ports: finds the caller, asks the table, then calls the handler.

    guard = Guard(auth, rights, callers, live, node, slices, txn_operations_max=128)
    server = Server(..., around=(guard.around,))

    request -> parsed -> valid in itself? -> who calls? -> may they? -> handler, with ``call.caller``
                                  a token whose entry is not applied here yet: wait for it, AHEAD_MAX_S at most

Where users are not asked for, a handler is called after one test of an attribute. Calls that last are noted in ``live``
all the same: users may be asked for before they end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, Final

from raftkv import errors
from raftkv.apply.auth.rights import Left, Rights
from raftkv.apply.auth.store import AuthStore
from raftkv.apply.request import Caller
from raftkv.loop.scheduler import Slices, Work
from raftkv.pb.services import Method
from raftkv.replica.node.admission import parse_or_raise, refusals
from raftkv.replica.node.node import Node
from raftkv.rpc.server.calls import Observer, ServerCall, UnaryCall
from raftkv.rpc.server.router import Kind
from raftkv.rpc.server.stream import ListenedCall, StreamCall
from raftkv.rpc.shares import Identity, Shares, identity_of, queue_of_call
from raftkv.server.auth.callers import Callers, Credential, TokenAheadError
from raftkv.server.auth.live import LiveCalls
from raftkv.server.auth.table import OPEN, Row, row_of
from raftkv.server.services.responder import fail, parse

AHEAD_MAX_S: Final = 2.0
"""How long a call waits for the entry that makes its token known, on a member that is behind."""

AHEAD_CALLS_MAX: Final = 100
"""Calls that wait so, each of which is looked at in each turn. When there are more, the one that has waited longest of
the greediest identity is refused: a token that is real is known after a moment."""

BYTES_AT_ONCE: Final = 8 * 1024
"""Longer requests are checked in slices, where a row knows how to."""


class Guard:
    """Lets calls in, or refuses them.

    Arguments:
        auth, rights: users, and what they may do.
        callers: finds out who calls.
        live: the calls that last.
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

    def around(self, path: str, kind: Kind, handler: Callable[..., Any]) -> Callable[..., Any]:
        """Return the handler that is called in place of another.

        Arguments:
            path, kind, handler: as the server registers it.

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
        """Let a call in, or refuse it; a token that is not known here yet is waited for, and asked about once more.

        Arguments:
            row: says how refusals are worded.
            call: to be answered.
            check: finds the caller, and asks the row.
            let_in: given what the caller has shown.
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
        """Do what is left of a check in slices, then go on.

        Arguments:
            left: None: nothing is.
            row: says how refusals are worded; None: as they are.
            call: to be answered.
            go_on: what the check was for.
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
        """Find the caller, and ask the row: what is left to check. Raises the StatusError that refuses the call."""
        if row.valid is not None:
            row.valid(request, self._txn_operations_max)
        return self._check_caller(row, request, call)

    def _check_caller(self, row: Row, request: Any, call: ServerCall) -> tuple[Credential | None, Left]:
        """Find the caller of a valid request, and ask the row, as ``_check``."""
        try:
            credential = self._callers.credential(call.headers, call.peer)
            caller = self._note(call, credential)
            return credential, row.ask(self._rights, request, caller)
        except TokenAheadError:
            raise
        except errors.StatusError as error:
            raise _as_refused(row, error) from None

    def _lasting(self, method: Method, row: Row, handler: Callable[..., Any]) -> Callable[..., Any]:
        """A unary call that may wait for long."""

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
        call.on_cancel(lambda: _cancel(task))

    async def _admit_later(self, ahead: TokenAheadError, call: UnaryCall, again: Callable[[], None]) -> None:
        try:
            await self._caught_up(ahead, call)
        except errors.StatusError as error:
            fail(call, error)
            return
        try:
            again()
        except Exception as error:  # the task that called the handler first has ended: nothing else would answer
            call.fail_for(error)

    async def _caught_up(self, ahead: TokenAheadError, call: ServerCall) -> None:
        """Wait until the entry of a token is applied. Raises InvalidAuthTokenError: not in time, or many wait."""
        identity = identity_of(call)
        if not self._shares.make_room(identity, 1, self._refuse_oldest):
            self._refuse_oldest(identity)
        patience = asyncio.timeout(AHEAD_MAX_S)
        try:
            async with patience:
                self._ahead[patience] = identity
                self._shares.take(identity, 1)
                await self._node.wait_until(lambda: self._node.applied >= ahead.index)
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
        """A stream of answers to one request."""

        async def guarded(call: StreamCall) -> None:
            data = await call.receive()
            if data is None:
                await handler(call)
                return
            request = parse_or_raise(method.request, data)
            credential = None
            with refusals():
                if self._auth.is_enabled:
                    credential, _ = await self._check_stream(row, request, call)  # it is about no lease
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
        """A stream of requests, each of which its service has checked."""

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
        """The same, of a stream without a task."""

        live = self._live

        def guarded(call: ListenedCall) -> None:
            live.open(call)
            call.observer = partial(_closed, live, call, call.observer)
            if self._auth.is_enabled and (ahead := self._find_caller(call)) is not None:
                self._wait_to_listen(ahead, call, handler)
            else:
                handler(call)

        return guarded

    def _find_caller(self, call: ServerCall) -> TokenAheadError | None:
        """Note who opens a stream, for the audit log; return why its token is not known yet, if that is so.

        What is wrong with a token, the answer to the first message says.
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
        """Note who calls, and in whose share falls what waits for the connection."""
        if credential is None:
            return None
        if credential.user in self._auth.users:  # names that are made up share what their connection has
            call.identify(credential.user)
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


def _closed(live: LiveCalls, call: ServerCall, observer: Observer | None, code: int, answer: bytes) -> None:
    """A stream without a task has ended: tell who observed it before."""
    live.close(call)
    if observer is not None:
        observer(code, answer)


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
