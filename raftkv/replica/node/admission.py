"""What a member refuses before anything else happens: no leader, learner, too large, too far behind, no space.

Owns the reading of the metadata of calls (``hasleader``, the staleness bound of a read), the size limit of writes, and
the quota. Applying is deterministic and cannot look at this member's disk; so space is checked here, where a write
enters the cluster, and once a second for what other members took. The first member that finds none raises the NOSPACE
alarm through the log, which then refuses on all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NoReturn

from google.protobuf.message import DecodeError

from raftkv import errors
from raftkv.apply.alarms import can_grow
from raftkv.apply.applier import Applier
from raftkv.replica.node.node import Node
from raftkv.replica.node.throttle import Throttle
from raftkv.replica.node.waits import AwaitableNode
from raftkv.replica.snapshots.files import free_disk_bytes
from raftkv.rpc.server.calls import ServerCall, UnaryCall
from raftkv.rpc.status import Headers, RpcError

_log = logging.getLogger(__name__)

STALENESS_METADATA: Final = b"raftkv-max-staleness-ms"
"""Metadata of a read that may be served from a state that is certainly not older than so many milliseconds."""

_STALENESS_DIGITS_MAX: Final = 15
_METADATA: Final = frozenset((b"hasleader", b"client-api-version", STALENESS_METADATA))

BARE_HEADERS_MAX: Final = 256
"""Headers of calls that are remembered because they have none of our metadata: the engine of a connection makes one
object of a block of headers that comes again, so that most calls bring one that was looked at already."""

REQUEST_OVERHEAD_BYTES: Final = 18
"""What etcd's own framing of a proposal adds to the request that its size limit counts."""

PUT_OVERHEAD_BYTES: Final = 256
"""What the quota charges for a write beside its bytes (etcd: kvOverhead)."""

CLIENT_VERSIONS_MAX: Final = 64
CLIENT_VERSION_BYTES_MAX: Final = 32
"""Versions of clients that are counted apart; more, or longer ones, count as unknown."""

DISK_RESERVE_BYTES: Final = 80 * 1024 * 1024
"""Free disk below which writes are refused: room for the log, a database commit, and deletes that free space."""


class Admission:
    """The checks, against this member's state.

    Arguments:
        node: for the leader and the role.
        applier: for the alarms.
        max_request_bytes: etcd's max-request-bytes.
        quota_bytes: None for no quota.
        size_bytes: the database's present size.
        data_dir: whose free disk is watched.
        raise_no_space: starts the proposal of the alarm, for a reason.
        make_room: gives up what takes room and can come again; whether there was any.
        free_bytes: free disk of a directory.

    Attributes:
        throttle: limits how fast requests come; None: nothing does.
    """

    def __init__(
        self,
        node: Node,
        applier: Applier,
        *,
        max_request_bytes: int,
        quota_bytes: int | None,
        size_bytes: Callable[[], int],
        data_dir: str,
        raise_no_space: Callable[[str], None],
        make_room: Callable[[], bool],
        free_bytes: Callable[[str | Path], int] = free_disk_bytes,
    ) -> None:
        self._node = node
        self._applier = applier
        self._max_request_bytes = max_request_bytes
        self._quota_bytes = quota_bytes
        self._size_bytes = size_bytes
        self._data_dir = data_dir
        self._raise_no_space = raise_no_space
        self._make_room = make_room
        self._free_bytes = free_bytes
        self._disk_free_bytes = 0
        self.client_versions: dict[tuple[bool, bytes], int] = {}
        """Calls whose metadata name a version of the client: whether it is unary, and the version."""
        self.is_learner = False
        self.throttle: Throttle | None = None
        self._bare_headers: dict[int, Headers] = {}
        self._watched_bytes = size_bytes()
        self.watch_disk()

    def conf_changed(self) -> None:
        """Note whether this member votes; one that is in no configuration yet is treated as a learner."""
        conf_state, member_id = self._node.conf_state, self._node.settings.member_id
        self.is_learner = member_id not in conf_state.voters and member_id not in conf_state.voters_outgoing

    @property
    def disk_free_bytes(self) -> int:
        """Free disk, as of the last look."""
        return self._disk_free_bytes

    def watch_disk(self) -> None:
        """Look at the free disk; called about once a second, since asking costs a system call."""
        try:
            self._disk_free_bytes = self._free_bytes(self._data_dir)
        except OSError as error:
            _log.warning("cannot see how much room the disk has: %s", errors.explain(error))

    def watch_quota(self) -> None:
        """Raise the alarm if writes that other members took have brought this one to its quota; theirs may be larger.

        Only growth since the last look raises it: who disarms the alarm first, and then makes room, has it off.
        """
        size_bytes, last_bytes = self._size_bytes(), self._watched_bytes
        self._watched_bytes = size_bytes
        if size_bytes > last_bytes and self._is_over_quota(size_bytes) and not self._applier.alarms.no_space:
            self._raise_no_space(self._over_quota())

    def check_metadata(self, call: ServerCall) -> float | None:
        """Refuse a caller that insists on a leader when there is none, or whose version is no text.

        Returns:
            The staleness bound of a read, in seconds; None: the caller states none.
        """
        headers = call.headers
        # An object that is kept here is the only one with its id.
        if id(headers) in self._bare_headers:
            return None
        staleness_s_max, is_bare = None, True
        for name, value in headers:
            # The RPC layer has hashed the names already, and few are ours.
            if name in _METADATA:
                is_bare = False
                if name == b"hasleader":
                    if value == b"true" and self._node.is_leaderless:
                        raise errors.NoLeaderError
                elif name == STALENESS_METADATA:
                    staleness_s_max = _staleness_s(value)
                else:
                    self._note_version(call, value)
        if is_bare:
            if len(self._bare_headers) >= BARE_HEADERS_MAX:
                self._bare_headers.clear()
            self._bare_headers[id(headers)] = headers
        return staleness_s_max

    def _note_version(self, call: ServerCall, value: bytes) -> None:
        key = (isinstance(call, UnaryCall), value)
        count = self.client_versions.get(key)
        if count is None:
            if not _is_text(value):
                raise errors.InvalidClientAPIVersionError
            if len(self.client_versions) >= CLIENT_VERSIONS_MAX or len(value) > CLIENT_VERSION_BYTES_MAX:
                return
            count = 0
        self.client_versions[key] = count + 1

    def check_read(self, call: ServerCall, serializable: bool) -> None:
        """Refuse a read that this member cannot serve.

        Arguments:
            call: whose metadata are checked.
            serializable: whether any state will do.
        """
        self.check_metadata(call)
        if self.is_learner and not serializable:
            raise errors.NotSupportedForLearnerError
        if self.throttle is not None:
            self.throttle.admit(call)

    def check_bounded_read(self, call: ServerCall, serializable: bool, request: Any = None) -> float | None:
        """Refuse a read that this member cannot serve, where the caller may state a bound.

        Arguments:
            call, serializable: as for ``check_read``. With a bound, learners serve too.
            request: whose keys may be below a prefix that has a limit; None: it has none.

        Returns:
            The staleness bound, in seconds; None: the caller states none.
        """
        staleness_s_max = self.check_metadata(call)
        if self.is_learner and not serializable and staleness_s_max is None:
            raise errors.NotSupportedForLearnerError
        if self.throttle is not None:
            self.throttle.admit(call, 0, request)
        return staleness_s_max

    def check_write(self, call: ServerCall, kind: int, data: bytes, request: Any) -> None:
        """Refuse a write that this member cannot take.

        Arguments:
            call: whose metadata are checked.
            kind, data: the request.
            request: the same parsed.
        """
        self.check_metadata(call)
        if self.is_learner:
            raise errors.NotSupportedForLearnerError
        self.check_size(len(data))
        if self.throttle is not None:
            self.throttle.admit(call, len(data), request)
        if self._node.backlog.is_long:
            raise errors.TooManyRequestsError
        cost_bytes = len(data) + PUT_OVERHEAD_BYTES
        if self._may_lack_space(cost_bytes) and can_grow(kind, request):
            self._check_space(cost_bytes)

    def check_size(self, size_bytes: int) -> None:
        """Refuse a request of so many bytes if that is too many. Raises RequestTooLargeError."""
        if size_bytes + REQUEST_OVERHEAD_BYTES > self._max_request_bytes:
            raise errors.RequestTooLargeError

    def _may_lack_space(self, cost_bytes: int) -> bool:
        """Look at what is known, so that a write for which there is room is asked for nothing more."""
        return (
            self._applier.alarms.no_space
            or self._disk_free_bytes - cost_bytes < DISK_RESERVE_BYTES
            or (self._quota_bytes is not None and self._size_bytes() + cost_bytes >= self._quota_bytes)
        )

    def _check_space(self, cost_bytes: int) -> None:
        if self._applier.alarms.no_space:
            if self._applier.alarms.corrupt:  # of both alarms applying tells this one, which is the graver
                raise errors.CorruptClusterError
            raise errors.NoSpaceError
        if self._is_over_quota(self._size_bytes() + cost_bytes):
            self._refuse(self._over_quota())
        if self._is_disk_full(cost_bytes):
            self._refuse(f"the disk of {self._data_dir} has {self._disk_free_bytes >> 20} MiB left")

    def _is_over_quota(self, size_bytes: int) -> bool:
        return self._quota_bytes is not None and size_bytes >= self._quota_bytes

    def _over_quota(self) -> str:
        return f"the database has reached its quota of {self._quota_bytes} bytes (--quota-backend-bytes)"

    def _refuse(self, reason: str) -> NoReturn:
        self._raise_no_space(reason)
        raise errors.NoSpaceError

    def finds_no_room(self) -> bool:
        """Return whether the disk is at its reserve, looked at now."""
        self.watch_disk()
        return self._is_below_reserve(0)

    def _is_disk_full(self, cost_bytes: int) -> bool:
        if self._disk_free_bytes - cost_bytes >= DISK_RESERVE_BYTES:
            return False
        # Room may have been made since the last look.
        self.watch_disk()
        return self._is_below_reserve(cost_bytes)

    def _is_below_reserve(self, cost_bytes: int) -> bool:
        left_bytes = self._disk_free_bytes - cost_bytes
        if left_bytes >= DISK_RESERVE_BYTES:
            return False
        # A copy of a database for one member that lags is no reason to stop the writes of all. It may take a moment
        # until its room is free, so a part of the reserve is for that.
        return not (self._make_room() and left_bytes >= DISK_RESERVE_BYTES // 2)


def _staleness_s(value: bytes) -> float:
    if not value.isdigit() or len(value) > _STALENESS_DIGITS_MAX:
        raise errors.InvalidStalenessError
    return int(value) / 1000.0


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def parse_or_raise(message: type[Any], data: bytes | None) -> Any:
    """Return the request, for handlers that refuse by raising.

    Arguments:
        message: its type.
        data: its bytes; None, if the client has ended a stream without one.

    Raises:
        RpcError: the bytes are none.
    """
    if data is None:
        raise RpcError(errors.INTERNAL, "a request is missing")
    try:
        return message.FromString(data)
    except DecodeError as error:
        raise RpcError(errors.INTERNAL, f"grpc: error unmarshalling request: {error}") from None


@contextmanager
def refusals(node: AwaitableNode | None = None) -> Iterator[None]:
    """Within the block, a refusal of this member ends the call with its own code and text.

    Arguments:
        node: hears of damage that a read met, which is refused too; None: nothing is read.

    Raises:
        RpcError: in place of every StatusError.
    """
    try:
        yield
    except errors.CorruptionError as error:
        if node is None:
            raise
        node.damaged(error)
        raise RpcError(errors.DamagedError.code, errors.DamagedError.text) from None
    except errors.StatusError as error:
        raise RpcError(error.code, str(error), trailers=error.trailers) from None
