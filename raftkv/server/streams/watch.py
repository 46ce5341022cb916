"""The Watch RPC: one stream of requests in, one of responses out, with any number of watchers.

Owns timing: when the hub works for watchers that are behind (never more than half of the loop's time), and when
progress notifications are due. A client that half-closes keeps its watchers, as in etcd. The stream ends when the
client cancels it, when the connection is lost, or when the client requires a leader and there is none.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from time import perf_counter
from typing import Final

from raftkv import errors
from raftkv.loop.limiter import Limiter
from raftkv.pb.services import SERVICES
from raftkv.replica.node.admission import Admission, refusals
from raftkv.replica.node.leadership import LeaderGuard
from raftkv.replica.watch.hub import WatchHub
from raftkv.replica.watch.stream import Refusal, WatchStream
from raftkv.rpc.server.server import Server
from raftkv.rpc.server.stream import StreamCall
from raftkv.rpc.shares import identity_of
from raftkv.rpc.status import RpcError
from raftkv.server.auth.guard import LiveCalls

_PATH: Final = SERVICES["etcdserverpb.Watch"]["Watch"].path
REQUESTS_PER_PASS: Final = 200
"""Requests that all watch streams together may make in one pass of the loop; further ones wait, unread."""
BYTES_AS_A_REQUEST: Final = 8 * 1024
"""A request counts as one more for each 8 KiB: parsing 2 MB of numbers takes 10 ms."""
PROGRESS_JITTER: Final = 0.1
PROGRESS_DEFAULT_S: Final = 600.0
PROGRESS_MIN_S: Final = 0.1


OnRefused = Callable[[StreamCall, bytes, bytes, str], None]
"""Takes the call, the key and end of the range, and the reason of the refusal."""


class WatchService:
    """Handler of etcdserverpb.Watch.

    Arguments:
        hub: watch hub of the member.
        admission: checks the metadata of the call.
        guard: ends streams that require a leader.
        live: checks whether clients may begin and continue to watch; None: callers are not authenticated.
        fragment_bytes: size above which responses are split for watchers that allow it.
        progress_interval_s: time between progress notifications.
        on_refused: called for ranges that a client may not watch; its stream continues.
    """

    def __init__(
        self,
        hub: WatchHub,
        admission: Admission,
        guard: LeaderGuard,
        live: LiveCalls | None = None,
        *,
        fragment_bytes: int,
        progress_interval_s: float,
        on_refused: OnRefused | None = None,
    ) -> None:
        self._on_refused = on_refused
        self._hub = hub
        self._admission = admission
        self._guard = guard
        self._live = live
        if live is not None:
            live.on_changed.append(hub.rights_changed)
        self._fragment_bytes = fragment_bytes
        # As in etcd: zero means the default, and no client needs more than ten a second.
        self._progress_interval_s = max(progress_interval_s or PROGRESS_DEFAULT_S, PROGRESS_MIN_S)
        self._loop = asyncio.get_running_loop()
        self._requests = Limiter(REQUESTS_PER_PASS)
        """Streams with a request for a later pass: there may be 60,000."""

    def register(self, server: Server) -> None:
        """Register the handler."""
        server.stream(_PATH, self.watch)

    async def watch(self, call: StreamCall) -> None:
        """Serve one client until it leaves."""
        with refusals():
            self._admission.check_metadata(call)
        end = self._guard.until_leader_lost(call)
        stream = self._stream(call, end)
        tasks = [
            self._loop.create_task(self._receive(call, stream, end)),
            self._loop.create_task(self._notify_progress(stream)),
        ]
        try:
            await end
        finally:
            for task in tasks:
                task.cancel()
            stream.close()

    def _refusal(self, call: StreamCall, refusal: Refusal) -> Refusal:
        on_refused = self._on_refused
        if on_refused is None:
            return refusal

        def noted(key: bytes, range_end: bytes) -> str:
            reason = refusal(key, range_end)
            if reason:
                on_refused(call, key, range_end, reason)
            return reason

        return noted

    def _limited(self, call: StreamCall, refusal: Refusal) -> Refusal:
        """Apply the operator's limits too."""

        def limited(key: bytes, range_end: bytes) -> str:
            reason, throttle = refusal(key, range_end), self._admission.throttle
            return reason or ("" if throttle is None else throttle.watch_refusal(call, key))

        return limited

    def _stream(self, call: StreamCall, end: asyncio.Future[None]) -> WatchStream:
        def fail(error: errors.StatusError) -> None:
            _fail(end, error)

        identity = identity_of(call)

        def charge(size_bytes: int) -> None:
            if (throttle := self._admission.throttle) is not None:
                throttle.charge_events(identity, size_bytes)

        if self._live is None:
            return WatchStream(self._hub, call, self._fragment_bytes, fail, identity=identity, on_sent=charge)
        live = self._live.of(call)
        refusal = self._limited(call, self._refusal(call, live.read_refusal))
        stream = WatchStream(self._hub, call, self._fragment_bytes, fail, refusal, identity=identity, on_sent=charge)
        stream.checked_at, stream.refusal_to_go_on = self._hub.check_number, live.refusal_to_go_on
        live.recheck = stream.recheck
        return stream

    async def _receive(self, call: StreamCall, stream: WatchStream, end: asyncio.Future[None]) -> None:
        """Take the client's requests, a limited number per pass of the loop: one pass may receive many."""
        try:
            while (data := await call.receive()) is not None:
                await self._requests.enter(1 + len(data) // BYTES_AS_A_REQUEST, stream.queue)
                stream.receive(data)
        except RpcError as error:
            if not end.done():
                end.set_exception(error)

    async def _notify_progress(self, stream: WatchStream) -> None:
        while True:
            await asyncio.sleep(self._progress_interval_s * random.uniform(1.0, 1.0 + PROGRESS_JITTER))
            began_s = perf_counter()
            for _ in stream.notify_progress():
                await asyncio.sleep(0)
            self._hub.send_times.progress.observe(perf_counter() - began_s)


def _fail(end: asyncio.Future[None], error: errors.StatusError) -> None:
    if not end.done():
        end.set_exception(RpcError(error.code, str(error), trailers=error.trailers))
