"""Calls that last: watches, keep-alives, long answers, waits for locks. They end when right, user or token does.

    live = calls.add(call, credential, check)     # check(caller) raises what ends the call
    calls.open(call)                              # a stream of requests: its service has each of them checked
    live = calls.of(call)                         #     made when it is first asked for
    live.check_lease(id), live.read_refusal(key, end)  #     who sends one may change from one to the next
    live.recheck = stream.recheck                 #     looks through what is under way on it
    calls.close(call)

    auth.on_change -> changed() -> after the turn's entries: all calls are looked at, in slices

Before the events of a turn are delivered, the first slice has looked. Where there are so many calls that it takes
several, watchers that are not looked at yet are asked for as they are served (``on_changed``): what comes after a
change of rights reaches only those who still may have it. Long reads that wait for their slices, however many, do not
come before. A token that says when it ends has a timer, and its calls are looked at likewise: tokens end at full
seconds, those of thousands of calls together. Calls are noted while users are not asked for too: once they are,
anonymous calls end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from raftkv import errors
from raftkv.apply.auth.rights import Left, Rights
from raftkv.apply.auth.store import AuthStore
from raftkv.apply.request import Caller
from raftkv.loop.scheduler import Slices, Work
from raftkv.rpc.server.calls import ServerCall
from raftkv.rpc.status import RpcError
from raftkv.server.auth.callers import Callers, Credential

_log = logging.getLogger(__name__)

CheckCaller = Callable[[Caller | None], Iterator[None]]
"""Raises what ends a call; pauses now and then."""

Refusal = Callable[[bytes, bytes], str]
"""Why an interval of keys may not be read, as a watch says it; empty: it may."""

Recheck = Callable[[Refusal], Iterator[None]]
"""Looks through what is under way on a stream, ends what may not go on, and pauses now and then."""

TIMER_MAX_S: Final = 3600.0
"""Longest time that a timer is set for: clocks of the wall may be set."""


class LiveCall:
    """One call that lasts; made by ``LiveCalls``."""

    __slots__ = ("__weakref__", "_calls", "_check", "_credential", "_let_in_at", "_timer", "call", "recheck")

    def __init__(
        self, calls: LiveCalls, call: ServerCall, credential: Credential | None, check: CheckCaller | None
    ) -> None:
        self.call = call
        self.recheck: Recheck | None = None
        self._let_in_at = 0
        """The revision by which what goes on was let in: a user who was added later is another one."""
        self._calls = calls
        self._check = check
        self._credential: Credential | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._take(credential)

    def _take(self, credential: Credential | None) -> None:
        """Go by what the caller has shown; None: nothing."""
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
        """Return who asks for something now, as an entry would name them; None: no user.

        Raises:
            InvalidAuthTokenError: the token has ended.
        """
        credential = self._shown()
        return None if credential is None else credential.caller(self._calls.auth.revision)

    def _present(self) -> Caller | None:
        """Return the same, by the present users and roles: a signed token that is older may not ask, but goes on."""
        credential, auth = self._shown(), self._calls.auth
        if credential is None:
            return None
        user = auth.users.get(credential.user)
        if user is not None and self._let_in_at < user.since:
            raise errors.PermissionDeniedError
        return Caller(credential.user, auth.revision)

    def check_lease(self, lease_id: int) -> Left:
        """Refuse to keep a lease alive, unless the client may write all its keys: as ``Rights.check_lease``."""
        caller = self.call.caller = self.caller()  # for the grace that the client may ask for
        return self._calls.rights.check_lease(caller, lease_id, write=True)

    def read_refusal(self, key: bytes, range_end: bytes) -> str:
        """Return why the client may not begin to watch an interval, in etcd's words; empty: it may."""
        return self._refusal(self.caller, key, range_end)

    def refusal_to_go_on(self, key: bytes, range_end: bytes) -> str:
        """Why the client may not go on to watch an interval, by the users of now: they may change amid a look."""
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
        """The token may have ended; if not, its timer was for as long as timers may be."""
        self._timer = None
        credential = self._credential
        if credential is not None and not credential.is_over:
            self._set_timer(credential)
        else:
            self._calls.look_at(self)

    def steps(self) -> Iterator[None]:
        """End what may not go on, with pauses."""
        is_enabled, revision = self._calls.auth.is_enabled, self._calls.auth.revision
        if self.call.done or (self.recheck is None and not is_enabled):
            return
        if self.recheck is not None:
            yield from self.recheck(self.refusal_to_go_on)
            if is_enabled:
                self._let_in_at = revision  # what it is asked from now on is the next user's
            return
        caller: Caller | None = None
        try:
            caller = self._present()
            if self._check is None:
                self._calls.rights.check_user(caller)  # a stream of requests at least has to be a user's
            else:
                yield from self._check(caller)
        except errors.StatusError as error:
            if caller is not None and caller.auth_revision != self._calls.auth.revision:
                return  # users have changed meanwhile, so all calls are looked at once more
            self.end()
            self.call.abort(RpcError(error.code, str(error)))

    def end_with_call(self) -> None:
        """Have the end of the call end this."""
        observer = self.call.observer

        def ended(code: int, answer: bytes) -> None:
            self.end()
            if observer is not None:
                observer(code, answer)

        self.call.observer = ended

    def end(self) -> None:
        """The call is over, or about to be."""
        self._calls.discard(self)
        self._take(None)
        # A check of a stream holds it, and the stream holds this: without a collector they would stay.
        self.recheck = None


class LiveCalls:
    """All calls of a member that last.

    Arguments:
        auth, rights: users, and what they may do.
        callers: finds out who calls.
        slices: does long work.
    """

    def __init__(self, auth: AuthStore, rights: Rights, callers: Callers, slices: Slices) -> None:
        self.auth = auth
        self.rights = rights
        self.callers = callers
        self._slices = slices
        self._loop = asyncio.get_running_loop()
        self._calls: dict[ServerCall, LiveCall | None] = {}
        """The live call of each: None for a stream of requests until it is needed. Most are short."""
        self._due: deque[ServerCall] = deque()
        """Calls to be looked at."""
        self._is_changed = False
        self._is_looking = False
        self.on_changed: list[Callable[[], None]] = []
        """Called when rights may have changed, before any call is looked at."""

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: ServerCall, credential: Credential | None, check: CheckCaller) -> LiveCall:
        """Note a call that was let in.

        Arguments:
            call: is aborted when it may not go on.
            credential: what the caller has shown; None: nothing, since users are not asked for.
            check: raises the StatusError that refuses a caller.
        """
        live = self._calls[call] = LiveCall(self, call, credential, check)
        live.end_with_call()
        return live

    def open(self, call: ServerCall) -> None:
        """Note a stream of requests, whose service has each of them checked."""
        self._calls[call] = None

    def of(self, call: ServerCall) -> LiveCall:
        """Return what is known of a call that has been noted and has not ended."""
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
        """Call back at a moment of the wall's clock, or an hour from now: it is then looked at again."""
        return self._loop.call_later(min(max(moment_s - time.time(), 0.0) + 0.001, TIMER_MAX_S), callback)

    # -- changes -----------------------------------------------------------------------------------------------------

    def changed(self) -> None:
        """Users or rights may have changed."""
        self._is_changed = True
        if self.auth.is_enabled:
            for callback in self.on_changed:
                callback()

    def applied(self) -> None:
        """The entries of a turn are applied: look through all calls, if anything has changed."""
        if self._is_changed:
            self._begin(at_once=True)

    def look_at(self, live: LiveCall) -> None:
        """Look at one call: its token has ended."""
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
        """End a call that cannot be looked at, and leave the others to be looked at all the same."""
        live = self.of(call)
        try:
            yield from live.steps()
        except Exception as error:
            _log.error("a call of a user could not be looked at", exc_info=error)
            live.end()
            call.abort(RpcError(errors.INTERNAL, "internal error"))

    def _failed(self, error: Exception) -> None:
        self._is_looking = False
        _log.error("looking through the calls of users failed", exc_info=error)


def _reason(error: errors.StatusError) -> str:
    """Return an error as etcd's watches give it as a reason."""
    return f"rpc error: code = {errors.CODE_NAMES[error.code]} desc = {error}"
