"""Refuses requests before anything else is done: no leader, learner, too large, too far behind, no space.

Reads the metadata of calls (``hasleader``, the staleness bound of a read), and checks the size limit of writes and the
quota. Applying is deterministic and cannot look at this member's disk. So space is checked here, where a write enters
the cluster, and once a second for the writes that entered at other members. The first member without space raises the
NOSPACE alarm through the log; then all members refuse.
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
from raftkv.replica.snapshots.files import DISK_RESERVE_BYTES, free_disk_bytes
from raftkv.rpc.server.calls import ServerCall, UnaryCall
from raftkv.rpc.status import Headers, RpcError

_log = logging.getLogger(__name__)

STALENESS_METADATA: Final = b"raftkv-max-staleness-ms"
"""Metadata of a read that may be served from a state that is certainly not older than this many milliseconds."""

_STALENESS_DIGITS_MAX: Final = 15
_METADATA: Final = frozenset((b"hasleader", b"client-api-version", STALENESS_METADATA))

_RESCUE: Final = (
    "its data is lost when it stops; if the other members are no quorum, save it first (raftkvctl snapshot save); then "
    "replace this member"
)

BARE_HEADERS_MAX: Final = 256
"""Number of remembered header blocks without metadata of ours: a connection uses one object for a header block that
repeats, so most calls bring a block that was checked already."""

REQUEST_OVERHEAD_BYTES: Final = 18
"""Bytes that etcd's framing of a proposal adds to a request and counts in the size limit."""

PUT_OVERHEAD_BYTES: Final = 256
"""Bytes that the quota charges for a write in addition to its own (etcd: kvOverhead)."""

CLIENT_VERSIONS_MAX: Final = 64
CLIENT_VERSION_BYTES_MAX: Final = 32
"""Longest client version that is counted separately; longer ones, and too many different ones, count as unknown."""


class Admission:
    """The admission checks, with this member's state.

    Arguments:
        node: knows the leader and the role.
        applier: knows the alarms.
        max_request_bytes: etcd's max-request-bytes.
        quota_bytes: quota of the database; ``None``: none.
        size_bytes: returns the current size of the database.
        data_dir: directory of the database, whose free disk space is checked.
        log_dir: directory of the log; both directories must exist.
        raise_no_space: starts the proposal of the alarm, with a reason.
        make_room: deletes files that can be made again; returns whether there were any.
        free_bytes: returns the free disk space of a directory.

    Attributes:
        throttle: limits the rate of requests; ``None``: no limits.
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
        log_dir: str,
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
        self._log_dir = log_dir
        self._raise_no_space = raise_no_space
        self._make_room = make_room
        self._free_bytes = free_bytes
        self.disk_free_bytes = 0
        """Free disk space, as of the last check."""
        self._trouble = ""
        self.client_versions: dict[tuple[bool, bytes], int] = {}
        """Number of calls by client version in their metadata: whether they are unary, and the version."""
        self.is_learner = False
        self.throttle: Throttle | None = None
        self._bare_headers: dict[int, Headers] = {}
        self._watched_bytes = size_bytes()
        self.watch_disk()

    def conf_changed(self) -> None:
        """Update whether this member votes; a member in no configuration yet is treated as a learner."""
        conf_state, member_id = self._node.conf_state, self._node.settings.member_id
        self.is_learner = member_id not in conf_state.voters and member_id not in conf_state.voters_outgoing

    def watch_disk(self) -> None:
        """Check the free disk space; called about once a second, because it costs a system call."""
        trouble = ""
        try:
            self.disk_free_bytes = self._free_bytes(self._data_dir)
            self._free_bytes(self._log_dir)
        except FileNotFoundError as error:
            trouble = f"{error.filename} was deleted under this member: {_RESCUE}"
        except OSError as error:
            trouble = f"cannot read the free space of the disk: {errors.explain(error)}"
        if trouble and trouble != self._trouble:
            _log.error(trouble)
        self._trouble = trouble

    def watch_quota(self) -> None:
        """Raise the alarm if writes that entered at other members have filled this one's quota; theirs may be larger.

        Only growth since the last check raises the alarm: an operator may disarm it first and free space afterwards.
        """
        size_bytes, last_bytes = self._size_bytes(), self._watched_bytes
        self._watched_bytes = size_bytes
        if size_bytes > last_bytes and self._is_over_quota(size_bytes) and not self._applier.alarms.no_space:
            self._raise_no_space(self._over_quota())

    def check_metadata(self, call: ServerCall) -> float | None:
        """Refuse a caller that requires a leader when there is none, or whose version is not text.

        Returns:
            The staleness bound of a read, in seconds; ``None``: the call states none.
        """
        headers = call.headers
        # As long as the object is kept here, no other object has its id.
        if id(headers) in self._bare_headers:
            return None
        staleness_s_max, is_bare = None, True
        for name, value in headers:
            # The RPC layer has hashed the names already, and most are not ours.
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
            call: call whose metadata are checked.
            serializable: whether any state is sufficient.
        """
        self.check_metadata(call)
        if self.is_learner and not serializable:
            raise errors.NotSupportedForLearnerError
        if self.throttle is not None:
            self.throttle.admit(call)

    def check_bounded_read(self, call: ServerCall, serializable: bool, request: Any = None) -> float | None:
        """Refuse a read that this member cannot serve; the caller may state a staleness bound.

        Arguments:
            call, serializable: as in ``check_read``. With a bound, learners serve too.
            request: request whose keys may have a prefix with a rate limit; ``None``: no keys.

        Returns:
            The staleness bound, in seconds; ``None``: the call states none.
        """
        staleness_s_max = self.check_metadata(call)
        if self.is_learner and not serializable and staleness_s_max is None:
            raise errors.NotSupportedForLearnerError
        if self.throttle is not None:
            self.throttle.admit(call, 0, request)
        return staleness_s_max

    def check_write(self, call: ServerCall, kind: int, data: bytes, request: Any) -> None:
        """Refuse a write that this member cannot accept.

        Arguments:
            call: call whose metadata are checked.
            kind, data: the request.
            request: the parsed request.
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
        """Refuse a request that is too large. Raises RequestTooLargeError."""
        if size_bytes + REQUEST_OVERHEAD_BYTES > self._max_request_bytes:
            raise errors.RequestTooLargeError

    def _may_lack_space(self, cost_bytes: int) -> bool:
        """Check the known state, so that a write with enough space needs no further checks."""
        return (
            self._applier.alarms.no_space
            or self.disk_free_bytes - cost_bytes < DISK_RESERVE_BYTES
            or (self._quota_bytes is not None and self._size_bytes() + cost_bytes >= self._quota_bytes)
        )

    def _check_space(self, cost_bytes: int) -> None:
        if self._applier.alarms.no_space:
            if self._applier.alarms.corrupt:  # with both alarms, applying reports this more serious one
                raise errors.CorruptClusterError
            raise errors.NoSpaceError
        if self._is_over_quota(self._size_bytes() + cost_bytes):
            self._refuse(self._over_quota())
        if self._is_disk_full(cost_bytes):
            self._refuse(f"the disk of {self._data_dir} has {self.disk_free_bytes >> 20} MiB left")

    def _is_over_quota(self, size_bytes: int) -> bool:
        return self._quota_bytes is not None and size_bytes >= self._quota_bytes

    def _over_quota(self) -> str:
        return f"the database has reached its quota of {self._quota_bytes} bytes (--quota-backend-bytes)"

    def _refuse(self, reason: str) -> NoReturn:
        self._raise_no_space(reason)
        raise errors.NoSpaceError

    def finds_no_room(self) -> bool:
        """Check now whether the free disk space is below the reserve."""
        self.watch_disk()
        return self._is_below_reserve(0)

    def _is_disk_full(self, cost_bytes: int) -> bool:
        if self.disk_free_bytes - cost_bytes >= DISK_RESERVE_BYTES:
            return False
        # Space may have become free since the last check.
        self.watch_disk()
        return self._is_below_reserve(cost_bytes)

    def _is_below_reserve(self, cost_bytes: int) -> bool:
        left_bytes = self.disk_free_bytes - cost_bytes
        if left_bytes >= DISK_RESERVE_BYTES:
            return False
        # A database copy for one lagging member is no reason to stop all writes. Freeing its space may take a moment,
        # so half of the reserve covers that.
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
    """Return the parsed request, for handlers that refuse by raising.

    Arguments:
        message: message type.
        data: its bytes; ``None`` if the client has ended a stream without a message.

    Raises:
        RpcError: the bytes are not such a message.
    """
    if data is None:
        raise RpcError(errors.INTERNAL, "a request is missing")
    try:
        return message.FromString(data)
    except DecodeError as error:
        raise RpcError(errors.INTERNAL, f"grpc: error unmarshalling request: {error}") from None


@contextmanager
def refusals(node: AwaitableNode | None = None) -> Iterator[None]:
    """Within the block, convert a refusal of this member into the end of the call, with its own code and text.

    Arguments:
        node: notified of damage that a read found, which is refused too; ``None``: nothing is read.

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
