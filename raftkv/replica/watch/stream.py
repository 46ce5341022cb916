"""One client's watch stream: its watchers by id, its requests, and its unsent events.

Messages of a turn are collected and sent together. The queue of the connection decides whether live events may be added
(``has_room``): above ``QUEUED_MAX_BYTES`` the watchers with events fall behind and are served from history once the
client has read. So a client that does not read only delays its own watchers and costs this member no memory for events.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Protocol

from sortedcontainers import SortedList

from raftkv import errors
from raftkv.histograms import DISK_S, Buckets
from raftkv.pb import rpc_pb2
from raftkv.replica.node.admission import parse_or_raise
from raftkv.replica.watch import messages
from raftkv.replica.watch.index import WATCHER_BYTES, Watcher
from raftkv.rpc.framing import PREFIX
from raftkv.rpc.shares import Identity, queue_of

if TYPE_CHECKING:
    from raftkv.replica.watch.hub import WatchHub

QUEUED_MAX_BYTES: Final = 256 * 1024
"""Bytes of one stream that may wait for the client before its watchers fall behind."""

QUEUED_LOW_BYTES: Final = 64 * 1024
"""Bytes below which watchers that fell behind are served again."""

CONNECTION_QUEUED_MAX_BYTES: Final = 16 * 1024 * 1024
"""Bytes of all streams of a connection that may wait before watchers fall behind."""

BURST_MAX_BYTES: Final = 4 * 1024 * 1024
"""Bytes that one change may add to one stream at once: above it, its watchers are served one by one."""

NOTIFICATIONS_PER_STEP: Final = 1000
RECHECKS_PER_STEP: Final = 100

STREAM_WATCHERS_MAX_BYTES: Final = 256 * 1024 * 1024
"""Memory limit of the watchers of one stream: about 240,000 on keys of 30 bytes (see ``WATCHER_BYTES``)."""

FILTERS_MAX: Final = 100
"""Maximum number of filters of a watch; there are two kinds. Searching two million filters takes half a second."""

COMPACTED_MAX: Final = 1000
"""Watchers of a stream ended by compactions whose cancellation is still answered."""

INTERRUPTED: Final = "raftkv: the watch was interrupted: watch again"

_pack: Final = PREFIX.pack
_log = logging.getLogger(__name__)


Refusal = Callable[[bytes, bytes], str]
"""Returns why an interval of keys may not be watched, in etcd's words; empty if it may."""


def _allow(_key: bytes, _range_end: bytes) -> str:
    return ""


class Call(Protocol):
    """The part of a server's streaming call that a watch stream uses."""

    @property
    def send_buffer_size(self) -> int:
        """Return the bytes of this stream that wait to be sent."""

    @property
    def connection_send_buffer_size(self) -> int:
        """Return the bytes of the whole connection that wait to be sent."""

    @property
    def crowded(self) -> bool:
        """True while the connection or the member has so much queued that nothing more should be added."""

    def send_frames_nowait(self, frames: bytes, count: int) -> None:
        """Queue ``count`` messages that already have their prefixes."""

    def on_room(self, callback: Callable[[], None] | None) -> None:
        """Call back each time queued bytes have left; None to stop."""


class SendTimes:
    """Durations of sending responses: the responses of a turn are measured together.

    Attributes:
        responses, events, control, progress: seconds per response with events, per event, per other response, and per
            search for watchers that need a progress notification.
    """

    def __init__(self) -> None:
        self.responses, self.events, self.control, self.progress = (Buckets(DISK_S) for _ in range(4))

    def sent(self, taken_s: float, responses: int, events: int, control: int) -> None:
        """Record the responses of one stream in a turn; each counts with the average.

        Arguments:
            taken_s: seconds for all of them.
            responses, events: number of responses with events, and of their events.
            control: number of other responses.
        """
        mean_s = taken_s / (responses + control)
        if control:
            self.control.observe(mean_s, control)
        if responses:
            self.responses.observe(mean_s, responses)
            self.events.observe(mean_s * responses / max(1, events), responses)


class WatchStream:
    """The watchers of one client, its requests, and its responses.

    Arguments:
        hub: serves the watchers.
        call: the RPC.
        fragment_bytes: size above which a response is split, for watchers that allow it.
        fail: ends the RPC with an error.
        refusal: returns why the client may not watch an interval.
        identity: identity in whose share its watchers count.
        on_sent: called with the number of bytes sent; ``None``: not counted.
    """

    def __init__(
        self,
        hub: WatchHub,
        call: Call,
        fragment_bytes: int,
        fail: Callable[[errors.StatusError], None],
        refusal: Refusal = _allow,
        *,
        identity: Identity,
        on_sent: Callable[[int], None] | None = None,
    ) -> None:
        self._on_sent = on_sent
        self.fail = fail
        self.identity = identity
        self.queue = queue_of(identity)
        self.watchers: dict[int, Watcher] = {}
        self.watcher_bytes = 0
        self._hub = hub
        self._call = call
        self._refusal_of = refusal
        self._fragment_bytes = fragment_bytes
        self._next_id = 0
        self._out: list[bytes] = []
        self._bodies = 0
        """Elements of ``_out`` that belong to the message begun before them."""
        self._events = self._control = 0
        """Number of events in ``_out``, and number of responses without events."""
        self._queued_bytes = 0
        self._parked: dict[Watcher, None] = {}
        self._compacted: dict[int, None] = {}
        """Ids of watchers that a compaction ended, limited to the newest."""
        self._ahead: Any = SortedList()
        """Revision and id of the watchers that started in the future when they were created."""
        self.unsynced_count = 0
        """Number of watchers that are behind; maintained by the hub."""
        self.is_closed = False
        self.checked_at = -1
        """``check_number`` at which the rights of all watchers were checked; -1: checked elsewhere."""
        self.refusal_to_go_on = refusal

    @property
    def client(self) -> tuple[str, str]:
        """Address of the client, and its user, as far as known; for display."""
        call: Any = self._call
        user = getattr(getattr(call, "caller", None), "user", b"")
        return getattr(getattr(call, "peer", None), "address", ""), user.decode("utf-8", "replace")

    @property
    def unread_bytes(self) -> int:
        """Bytes that wait for the client to read them."""
        return self._call.send_buffer_size

    # -- requests ----------------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Handle one message of the client, which may arrive after the call has ended.

        Raises:
            RpcError: the bytes are not a WatchRequest.
        """
        request = parse_or_raise(rpc_pb2.WatchRequest, data)
        kind = None if self.is_closed else request.WhichOneof("request_union")
        if kind == "create_request":
            self._create(request.create_request)
        elif kind == "cancel_request":
            self._cancel(request.cancel_request.watch_id)
        elif kind == "progress_request":
            self._report_progress()
        # Anything else is from a newer client, and ignored as in etcd.

    def _create(self, request: rpc_pb2.WatchCreateRequest) -> None:
        key, range_end = request.key or b"\0", request.range_end
        header = self._hub.header()
        # As etcd from 3.6.6 on; earlier versions watch all remaining history, or end the watch.
        if request.start_revision < 0:
            self.send(messages.refused(header, errors.CompactedError.text))
            return
        if len(request.filters) > FILTERS_MAX:
            self.send(messages.refused(header, f"raftkv: a watch may have {FILTERS_MAX} filters"))
            return
        if reason := self._refusal_of(key, range_end):
            self.send(messages.refused(header, reason))
            return
        if range_end not in (b"", b"\0") and range_end <= key:
            self.send(messages.refused(header, "mvcc: watcher range is empty"))
            return
        watch_id = request.watch_id
        if watch_id == 0:
            watch_id = self._free_id()
        elif watch_id in self.watchers:
            self.send(messages.refused(header, "mvcc: duplicate watch ID provided on the WatchStream"))
            return
        refusal = self._refusal(WATCHER_BYTES + len(key) + len(range_end))
        if refusal:
            self.send(messages.refused(header, refusal))
            return
        self._compacted.pop(watch_id, None)
        self.send(messages.created(header, watch_id))
        watcher = self.watchers[watch_id] = Watcher(
            self,
            watch_id,
            key,
            range_end,
            request.start_revision,
            no_put=rpc_pb2.WatchCreateRequest.NOPUT in request.filters,
            no_delete=rpc_pb2.WatchCreateRequest.NODELETE in request.filters,
            prev_kv=request.prev_kv,
            fragment=request.fragment,
            progress_notify=request.progress_notify,
            keys_only=request.keys_only,
            value_bytes_max=max(0, request.max_value_bytes),
        )
        self.watcher_bytes += watcher.size_bytes
        if request.start_revision > self._hub.revision:
            self._ahead.add((watcher.start_revision, watch_id))
        self._hub.add(watcher)

    def _refusal(self, size_bytes: int) -> str:
        """Return why there is no room for one more watcher; empty if there is."""
        if self.watcher_bytes + size_bytes > STREAM_WATCHERS_MAX_BYTES:
            return f"raftkv: the watchers of one stream may take {STREAM_WATCHERS_MAX_BYTES} bytes: watch ranges"
        return self._hub.refusal(self.identity, size_bytes)

    def _has_watchers_ahead(self) -> bool:
        """Return whether any watcher starts in the future; fast, however many there are or were."""
        return bool(self._ahead) and self._ahead[-1][0] > self._hub.revision

    def _free_id(self) -> int:
        while self._next_id in self.watchers or self._next_id in self._compacted:
            self._next_id += 1
        self._next_id += 1
        return self._next_id - 1

    def _cancel(self, watch_id: int) -> None:
        watcher = self.watchers.get(watch_id)
        if watcher is not None:
            header = self._hub.header()
            self.forget(watcher)
            self.send(messages.canceled(header, watch_id))
        elif self._compacted.pop(watch_id, self) is None:
            self.send(messages.canceled(self._hub.header(), watch_id))

    def end_compacted(self, watcher: Watcher, end: bytes) -> None:
        """End a watcher whose history is compacted. As in etcd, its client may still cancel it, and gets a response."""
        self.forget(watcher)
        self.send(end)
        if len(self._compacted) >= COMPACTED_MAX:
            del self._compacted[next(iter(self._compacted))]
        self._compacted[watcher.watch_id] = None

    def cancel_newest(self, reason: str) -> None:
        """End the newest watcher with a reason, because others need its room."""
        watcher = next(reversed(self.watchers.values()))
        self.forget(watcher)
        self.send(messages.canceled(self._hub.header(), watcher.watch_id, reason))

    def _report_progress(self) -> None:
        """Report the revision up to which everything was sent, if that holds for every watcher; else do nothing."""
        header = self._hub.header()
        if not self.unsynced_count and not self._has_watchers_ahead():
            self.send(header + messages.id_field(-1))

    def notify_progress(self) -> Iterator[None]:
        """Send progress to watchers that requested it and had no event since the last time; with pauses."""
        due = [watcher for watcher in self.watchers.values() if watcher.progress_notify]
        for number, watcher in enumerate(due, 1):
            is_here = self.watchers.get(watcher.watch_id) is watcher
            if is_here and watcher.is_quiet and self._hub.has_reached(watcher):
                self.send(self._hub.header() + watcher.id_field)
            watcher.is_quiet = True
            if number % NOTIFICATIONS_PER_STEP == 0:
                yield

    def recheck(self, refusal: Refusal) -> Iterator[None]:
        """End the watchers without rights, with pauses; until this ends, each is checked when it is served."""
        check_number = self._hub.check_number
        ended: list[tuple[int, str]] = []
        for number, watcher in enumerate(list(self.watchers.values()), 1):
            if self.watchers.get(watcher.watch_id) is watcher:
                reason = refusal(watcher.key, watcher.range_end)
                if reason:
                    self.forget(watcher)
                    ended.append((watcher.watch_id, reason))
            if number % RECHECKS_PER_STEP == 0:
                self._say_ended(ended)
                yield
        self._say_ended(ended)
        self.checked_at = check_number

    @property
    def is_checked(self) -> bool:
        """Whether all watchers were checked with the current rights."""
        return self.checked_at < 0 or self.checked_at == self._hub.check_number

    def may_go_on(self, watcher: Watcher) -> bool:
        """Return whether a watcher may be sent events, although not all are checked yet; end it if it may not."""
        reason = "" if self.is_checked else self.refusal_to_go_on(watcher.key, watcher.range_end)
        if reason:
            self.forget(watcher)
            self._say_ended([(watcher.watch_id, reason)])
        return not reason

    def _say_ended(self, ended: list[tuple[int, str]]) -> None:
        if ended and not self.is_closed:
            header = self._hub.header()
            for watch_id, reason in ended:
                self.send(messages.canceled(header, watch_id, reason))
        ended.clear()

    def forget(self, watcher: Watcher) -> None:
        """End a watcher without a response."""
        self._hub.remove(watcher)
        del self.watchers[watcher.watch_id]
        self.watcher_bytes -= watcher.size_bytes
        if self._ahead:
            self._ahead.discard((watcher.start_revision, watcher.watch_id))
        self._parked.pop(watcher, None)

    def close(self) -> None:
        """End all watchers, because the client has left."""
        self.is_closed = True
        self._call.on_room(None)
        self._hub.leave(self)
        self._parked.clear()
        self._ahead.clear()
        self._out.clear()
        self._bodies = self._events = self._control = 0

    # -- answers -----------------------------------------------------------------------------------------------------

    def send(self, message: bytes) -> None:
        """Queue one response after all earlier ones; it is sent at the end of the turn."""
        self._touch()
        self._out.append(_pack(0, len(message)) + message)
        self._control += 1
        self._queued_bytes += len(message)

    def send_events(self, watcher: Watcher, header: bytes, events: list[bytes]) -> None:
        """Queue the events of one watcher as one response, or as fragments if the watcher allows it.

        Arguments:
            watcher: a watcher of this stream.
            header: response header.
            events: elements of field ``events``.
        """
        if self.is_to_be_split(watcher, header, len(events), sum(map(len, events))):
            self.send_fragments(watcher, list(self.fragments(watcher, header, events)), len(events))
        else:
            self.send_joined(watcher, header, b"".join(events), len(events))

    def send_joined(self, watcher: Watcher, header: bytes, events: bytes, count: int) -> None:
        """Queue joined events as one response of a watcher.

        Arguments:
            watcher: a watcher of this stream.
            header: response header.
            events: elements of field ``events``, joined.
            count: number of events.
        """
        watcher.is_quiet = False
        self._count(count)
        self._touch()
        size_bytes = len(header) + len(watcher.id_field) + len(events)
        # As separate parts, so that events shared by many watchers are copied only once, when they are sent.
        self._out.append(_pack(0, size_bytes) + header + watcher.id_field)
        self._out.append(events)
        self._bodies += 1
        self._queued_bytes += size_bytes

    def is_to_be_split(self, watcher: Watcher, header: bytes, count: int, size_bytes: int) -> bool:
        """Return whether a watcher allows fragments, and the events are too large for one response.

        Arguments:
            watcher: a watcher of this stream.
            header: response header.
            count, size_bytes: number and size of the events.
        """
        size_bytes += len(header) + len(watcher.id_field)
        return watcher.fragment and count > 1 and size_bytes >= self._fragment_bytes

    def fragments(self, watcher: Watcher, header: bytes, events: list[bytes]) -> Iterator[bytes]:
        """Iterate over the fragments of a response, because building all at once may take long."""
        return messages.fragments(header + watcher.id_field, events, self._fragment_bytes)

    def send_fragments(self, watcher: Watcher, fragments: list[bytes], count: int) -> None:
        """Queue all fragments of a response.

        Arguments:
            watcher: a watcher of this stream.
            fragments: messages.
            count: number of their events.
        """
        watcher.is_quiet = False
        self._count(count)
        self._touch()
        for message in fragments:
            self._out.append(_pack(0, len(message)))
            self._out.append(message)
            self._bodies += 1
            self._queued_bytes += len(message)

    def fan_out(self, header: bytes, id_fields: dict[int, bytes], event: bytes, count: int) -> bool:
        """Queue some events for many watchers; return False if there is no room and nothing was queued.

        Arguments:
            header: response header.
            id_fields: encoded field ``watch_id`` of each watcher, by watch id.
            event: elements of field ``events``.
            count: number of events.
        """
        if self.is_closed:
            return True
        size_bytes = len(header) + len(event)
        if self.checked_at >= 0 and self.checked_at != self._hub.check_number:
            return False
        if not self.has_room or (size_bytes * len(id_fields) > BURST_MAX_BYTES and len(id_fields) > 1):
            return False
        self._touch()
        starts: dict[int, bytes] = {}
        out = self._out
        for id_field in id_fields.values():
            start = starts.get(len(id_field))
            if start is None:
                start = starts[len(id_field)] = _pack(0, size_bytes + len(id_field)) + header
            out.append(start + id_field + event)
        self._count(count * len(id_fields))
        self._queued_bytes += size_bytes * len(id_fields)
        return True

    def _count(self, events: int) -> None:
        self._events += events
        self._hub.events_total += events

    @property
    def has_room(self) -> bool:
        """Whether live events may be queued."""
        if not self._out:
            self._queued_bytes = self._call.send_buffer_size
            if self._call.crowded or self._call.connection_send_buffer_size > CONNECTION_QUEUED_MAX_BYTES:
                return False
        return self._queued_bytes < QUEUED_MAX_BYTES

    def _touch(self) -> None:
        if not self._out:
            self._hub.cork.touch(self)

    def flush(self) -> None:
        """Send the messages of the turn. If that fails the stream ends: no watcher may miss an event without notice."""
        out, self._out = self._out, []
        bodies, self._bodies = self._bodies, 0
        events, self._events = self._events, 0
        control, self._control = self._control, 0
        try:
            if out:
                count, began_s = len(out) - bodies, perf_counter()
                frames = b"".join(out)
                self._call.send_frames_nowait(frames, count)
                self._hub.send_times.sent(perf_counter() - began_s, count - control, events, control)
                if self._on_sent is not None:
                    self._on_sent(len(frames))
        except Exception:
            _log.exception("sending watch events failed: closing the watch stream")
            self.fail(errors.StoppedError(INTERRUPTED))

    # -- falling behind ----------------------------------------------------------------------------------------------

    @property
    def parked_revision(self) -> int:
        """The next revision of a watcher that waits for the client, approximately the one farthest behind."""
        return min((watcher.next_revision for watcher in islice(self._parked, 100)), default=1 << 63)

    def park(self, watcher: Watcher) -> None:
        """Set a watcher that is behind aside, until the client has read."""
        if not self._parked:
            self._call.on_room(self._drained)
        self._parked[watcher] = None

    def _drained(self) -> None:
        if self._call.send_buffer_size <= QUEUED_LOW_BYTES:
            self._call.on_room(None)
            parked, self._parked = list(self._parked), {}
            self._hub.resume(parked)
