"""The tree of all errors that raftkv raises on purpose.

    RaftKVError
    +-- InvariantError           a violated invariant: the member stops; never caught
    |   +-- CorruptionError      stored bytes are not what was written: names the file or record
    |   +-- UnknownEntryError    the log holds an entry of a later version: names the version to install
    +-- MemberRemovedError       this member was removed from its cluster for good: it stops
    +-- ConfigError              an unusable setting: one line says which and why
    +-- StorageError             the disk or its files cannot be used: one line says which and why
    |   +-- SpaceError           no room left for the write
    |   |   +-- MapFullError     the database's memory map is full: its owner grows it; the disk need not be full
    +-- StatusError              an error for a client: gRPC code, exact text, and whether it is definite
        +-- one class for every row of etcd's error table, below

etcd clients match the code and the whole text, so both are part of the API; this module is their only source. The
codes are those that etcd sends. For two rows they differ from etcd's documentation (``TooManyRequestsError`` and
``NotEnoughStartedMembersError`` arrive as UNKNOWN).

``definite`` is True if the failed request certainly had *no* effect. Refusals are definite; timeouts and lost leaders
are not, because the entry may still commit.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

(OK, CANCELED, UNKNOWN, INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND, ALREADY_EXISTS, PERMISSION_DENIED) = range(8)
(RESOURCE_EXHAUSTED, FAILED_PRECONDITION, ABORTED, OUT_OF_RANGE, UNIMPLEMENTED, INTERNAL) = range(8, 14)
(UNAVAILABLE, DATA_LOSS, UNAUTHENTICATED) = range(14, 17)
"""gRPC status codes."""

RETRY_AFTER: Final = b"retry-after-ms"
"""Trailer of a refusal: the milliseconds after which the same request would be accepted."""
LIMIT_NAME: Final = b"raftkv-limit"
"""Trailer of a refusal: a description of the limit."""

_CODE_NAMES: Final = (
    "OK Canceled Unknown InvalidArgument DeadlineExceeded NotFound AlreadyExists PermissionDenied ResourceExhausted "
    "FailedPrecondition Aborted OutOfRange Unimplemented Internal Unavailable DataLoss Unauthenticated"
)
CODE_NAMES: Final[dict[int, str]] = dict(enumerate(_CODE_NAMES.split()))
"""Code to the name that Go prints, which command lines show."""


class RaftKVError(Exception):
    """The root of the tree. Errors can be pickled with their text and attributes, to pass between processes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.args), self.__dict__


def _rebuilt(kind: type[RaftKVError], arguments: tuple[Any, ...]) -> RaftKVError:
    """Recreate a pickled error without its constructor, whose arguments may differ from the error's text."""
    error = kind.__new__(kind, *arguments)
    error.args = arguments
    return error


class InvariantError(RaftKVError):
    """A violated invariant of the code. The member stops rather than diverge; never catch this and continue."""


class CorruptionError(InvariantError):
    """Stored bytes are not what was written. The text names the file or record, and the offset."""


class ForkedError(InvariantError):
    """The other members lost writes that they had acknowledged, and this member may still have them."""


class UnknownEntryError(InvariantError):
    """The log holds an entry that a later version wrote. The text tells the user in one line what to install."""


class ConfigError(RaftKVError):
    """An unusable setting; the text is one line for the user."""


class MemberRemovedError(RaftKVError):
    """This member was removed from its cluster: its id is never used again, and its data has become useless.

    Attributes:
        has_served: whether this process has served clients before.
    """

    text: ClassVar[str] = "the member has been permanently removed from the cluster"
    """etcd's text; the other members refuse this member's connections with it."""

    def __init__(self, text: str, *, has_served: bool = False) -> None:
        super().__init__(text)
        self.has_served = has_served


class StorageError(RaftKVError):
    """The disk or its files cannot be used; the text is one line for the user."""


class SpaceError(StorageError):
    """There is no room for the write, on the disk or in the map of the database."""


class MapFullError(SpaceError):
    """The database's memory map is full, though the disk may have room: grow the map, then retry the write."""


class StatusError(RaftKVError):
    """An answer to a client other than success.

    Class attributes: ``code`` (gRPC), ``text`` (exact), ``definite`` (the request certainly had no effect),
    ``trailers`` (further metadata of the answer).
    """

    code: ClassVar[int] = UNKNOWN
    text: ClassVar[str] = ""
    definite: ClassVar[bool] = True
    trailers: tuple[tuple[bytes, bytes], ...] = ()

    def __init__(self, text: str | None = None) -> None:
        super().__init__(self.text if text is None else text)

    def __init_subclass__(cls, code: int | None = None, text: str | None = None, definite: bool | None = None) -> None:
        """Set class attributes from the arguments of the class: ``class NoLeaderError(_Unavailable, text="…")``."""
        super().__init_subclass__()
        for name, value in (("code", code), ("text", text), ("definite", definite)):
            if value is not None:
                setattr(cls, name, value)


class _InvalidArgument(StatusError, code=INVALID_ARGUMENT):
    """Errors with this code."""


class InvalidStalenessError(
    _InvalidArgument, text="raftkv: metadata raftkv-max-staleness-ms must be a whole number of milliseconds, 0 or more"
):
    """The limit on a read's staleness is not a whole number of milliseconds. etcd has no such limit."""


class EmptyKeyError(_InvalidArgument, text="etcdserver: key is not provided"):
    """A request without a key."""


class KeyNotFoundError(_InvalidArgument, text="etcdserver: key not found"):
    """``ignore_value`` or ``ignore_lease`` on a key that does not exist; also an empty operation in a txn."""


class ValueProvidedError(_InvalidArgument, text="etcdserver: value is provided"):
    """``ignore_value`` together with a value."""


class LeaseProvidedError(_InvalidArgument, text="etcdserver: lease is provided"):
    """``ignore_lease`` together with a lease."""


class TooManyOperationsError(_InvalidArgument, text="etcdserver: too many operations in txn request"):
    """A txn with more operations in a list than ``max-txn-ops``."""


class DuplicateKeyError(_InvalidArgument, text="etcdserver: duplicate key given in txn request"):
    """One branch of a txn writes a key twice."""


class InvalidClientAPIVersionError(_InvalidArgument, text="etcdserver: invalid client api version"):
    """Metadata ``client-api-version`` is not text."""


class InvalidSortOptionError(_InvalidArgument, text="etcdserver: invalid sort option"):
    """A sort order or target outside its enum."""


class InvalidAlarmError(_InvalidArgument, text="raftkv: unknown alarm or action"):
    """An alarm type or action outside its enum. etcd panics on it, on every member and permanently."""


class TooManyChangesError(_InvalidArgument, text="raftkv: the request makes too many changes for one revision"):
    """One request changes more keys than a revision can hold."""


class TooManyComparedError(_InvalidArgument, text="raftkv: the compares of the txn look at too many keys"):
    """The compares of one txn examine more keys than a member may examine without delaying other requests."""


class MalformedEntryError(_InvalidArgument, text="raftkv: the request in the log cannot be decoded"):
    """The body of a log entry cannot be decoded. All members refuse the entry alike, without effect."""


class BadMemberURLsError(_InvalidArgument, text="etcdserver: given member URLs are invalid"):
    """Peer URLs that are missing or malformed."""


class RequestTooLargeError(_InvalidArgument, text="etcdserver: request is too large"):
    """A write larger than ``max-request-bytes``."""


class _OutOfRange(StatusError, code=OUT_OF_RANGE):
    """Errors with this code."""


class CompactedError(_OutOfRange, text="etcdserver: mvcc: required revision has been compacted"):
    """A revision below the compact revision; ``revision`` is the compact revision if known."""

    def __init__(self, revision: int = 0) -> None:
        super().__init__()
        self.revision = revision


class FutureRevisionError(_OutOfRange, text="etcdserver: mvcc: required revision is a future revision"):
    """A revision that does not exist yet."""


class LeaseTTLTooLargeError(_OutOfRange, text="etcdserver: too large lease TTL"):
    """A TTL above 9,000,000,000 s."""


class NoSpaceError(StatusError, code=RESOURCE_EXHAUSTED, text="etcdserver: mvcc: database space exceeded"):
    """The quota is used up and the NOSPACE alarm is on."""


class UnwrittenError(
    StatusError,
    code=RESOURCE_EXHAUSTED,
    text="raftkv: the disk has no room for what was written before: free some space, and ask again",
):
    """The request reads the database itself, which has no room for the writes before it."""


class QuotaExceededError(NoSpaceError, text=""):
    """The write would exceed the quota of a prefix. The text is etcd's for a full database, then names the prefix."""


class TooManyQuotasError(StatusError, code=RESOURCE_EXHAUSTED, text="raftkv: too many quotas of prefixes"):
    """Too many prefixes have a quota already."""


class InvalidQuotaError(
    _InvalidArgument, text="raftkv: a quota has a prefix of at most 256 bytes, and limits of 0 (none) or more"
):
    """An invalid quota."""


class QuotaNotFoundError(StatusError, code=NOT_FOUND, text="raftkv: no quota of this prefix"):
    """The quota to remove does not exist."""


class InvalidLimitError(
    _InvalidArgument,
    text="raftkv: a limit is of a user, certificate, address, role, prefix, or each, with a name of 1 to 256 bytes",
):
    """An invalid limit."""


class LimitNotFoundError(StatusError, code=NOT_FOUND, text="raftkv: no limit of this name"):
    """The limit to remove does not exist."""


class TooManyLimitsError(StatusError, code=RESOURCE_EXHAUSTED, text="raftkv: too many limits"):
    """Too many limits are set already."""


class ResponseTooLargeError(
    StatusError,
    code=RESOURCE_EXHAUSTED,
    text="raftkv: the events of one revision are too large for a response: watch smaller ranges or without prev_kv",
):
    """The events of one revision for one watcher exceed the connection's limit on unsent bytes."""


class TooManyRequestsError(StatusError, text="etcdserver: too many requests"):
    """Apply lags too far behind commit; UNKNOWN on the wire, as etcd sends it."""


class ShareError(TooManyRequestsError, code=RESOURCE_EXHAUSTED):
    """The caller has used up its share of a common budget (``rpc/shares``); the text names the limit."""


class LimitedError(TooManyRequestsError, code=RESOURCE_EXHAUSTED):
    """The caller exceeds a rate set by an operator. The text is exactly etcd's, so that its clients know the error.

    Arguments:
        limit: description of the limit.
        again_ms: milliseconds after which a request would be accepted.
    """

    def __init__(self, limit: str, again_ms: int) -> None:
        super().__init__()
        self.trailers = ((RETRY_AFTER, b"%d" % again_ms), (LIMIT_NAME, limit.encode("unicode_escape")))


class LeaseNotFoundError(StatusError, code=NOT_FOUND, text="etcdserver: requested lease not found"):
    """A lease that does not exist."""


class MemberNotFoundError(StatusError, code=NOT_FOUND, text="etcdserver: member not found"):
    """A member id that the cluster does not know."""


class _FailedPrecondition(StatusError, code=FAILED_PRECONDITION):
    """Errors with this code."""


class LeaseExistsError(_FailedPrecondition, text="etcdserver: lease already exists"):
    """A lease id in use."""


class MemberExistsError(_FailedPrecondition, text="etcdserver: member ID already exist"):
    """A member id in use."""


class PeerURLExistsError(_FailedPrecondition, text="etcdserver: Peer URLs already exists"):
    """A peer URL in use."""


class NotEnoughStartedMembersError(
    StatusError, text="etcdserver: re-configuration failed due to not enough started members"
):
    """A membership change that would lose the quorum; UNKNOWN on the wire, as etcd sends it."""


class MemberNotLearnerError(_FailedPrecondition, text="etcdserver: can only promote a learner member"):
    """Promotion of a member that is already a voter."""


class LearnerNotReadyError(
    _FailedPrecondition, text="etcdserver: can only promote a learner member which is in sync with leader"
):
    """Promotion of a learner that lags."""


class TooManyLearnersError(_FailedPrecondition, text="etcdserver: too many learner members in cluster"):
    """More learners than ``max-learners``."""


class ConfChangeRefusedError(_FailedPrecondition, text="raftkv: the members cannot be changed like this now"):
    """A change of members that Raft's present configuration does not allow."""


class NotCapableError(_FailedPrecondition, text="etcdserver: not capable"):
    """A feature that at least one member, of an older version, is not known to understand."""


class ClusterIDMismatchError(_FailedPrecondition, text="etcdserver: cluster ID mismatch"):
    """A peer of another cluster."""


class AuthNotEnabledError(_FailedPrecondition, text="etcdserver: authentication is not enabled"):
    """Authentication requested from a cluster that has it disabled."""


class NotLeaderError(_FailedPrecondition, text="etcdserver: not leader"):
    """Only the leader can do this."""


class NotSupportedForLearnerError(_FailedPrecondition, text="etcdserver: rpc not supported for learner"):
    """A learner serves only serializable reads and Status."""


class BadLeaderTransfereeError(_FailedPrecondition, text="etcdserver: bad leader transferee"):
    """The target of a leader transfer is not a voter."""


class LeaderTransferTimeoutError(
    StatusError, text="etcdserver: request timed out, leader transfer took too long", definite=False
):
    """The new leader did not take over in time; it may still do so. UNKNOWN on the wire, as etcd sends it."""


class WrongDowngradeVersionFormatError(_InvalidArgument, text="etcdserver: wrong downgrade target version format"):
    """A version that is not of the form ``MAJOR.MINOR``."""


class InvalidDowngradeTargetVersionError(_InvalidArgument, text="etcdserver: invalid downgrade target version"):
    """A version that is not the minor version before the cluster's."""


class DowngradeInProcessError(_FailedPrecondition, text="etcdserver: cluster has a downgrade job in progress"):
    """The cluster has a downgrade job already."""


class NoInflightDowngradeError(_FailedPrecondition, text="etcdserver: no inflight downgrade job"):
    """There is no downgrade job to cancel."""


class UserEmptyError(_InvalidArgument, text="etcdserver: user name is empty"):
    """A request without a user while authentication is enabled; also a user without a name."""


class RoleEmptyError(_InvalidArgument, text="etcdserver: role name is empty"):
    """A role without a name."""


class AuthFailedError(_InvalidArgument, text="etcdserver: authentication failed, invalid user ID or password"):
    """The user does not exist, or the password is wrong: the error does not tell which."""


class PermissionNotGivenError(_InvalidArgument, text="etcdserver: permission not given"):
    """A grant without a permission."""


class InvalidAuthManagementError(_InvalidArgument, text="etcdserver: invalid auth management"):
    """A change that would leave no user with the right to manage users, or a key range that is empty."""


class AuthOldRevisionError(_InvalidArgument, text="etcdserver: revision of auth store is old"):
    """Users or roles changed between the check of a request and its execution; retry the request."""


class NoPasswordUserError(StatusError, text="auth: authentication failed, password was given for no password user"):
    """A password for a user that has none. UNKNOWN on the wire, as etcd sends it."""


class UserNameTooLongError(_InvalidArgument, text="raftkv: a user's name may have 65535 bytes"):
    """A user name too long for a log entry."""


class InvalidPasswordError(_InvalidArgument, text="raftkv: the password cannot be used"):
    """A password, or a password hash, that cannot be set; the text says why."""


class PasswordTooLongError(StatusError, text="bcrypt: password length exceeds 72 bytes"):
    """A password longer than the 72 bytes that bcrypt uses. UNKNOWN on the wire, as etcd sends it."""


class TokenNotSignedError(StatusError, text="auth: token signing attempted with verify-only key"):
    """This member can verify tokens, but has no key to sign one. UNKNOWN on the wire, as etcd sends it."""


class RootUserNotExistError(_FailedPrecondition, text="etcdserver: root user does not exist"):
    """Authentication cannot be enabled before the user root exists."""


class RootRoleNotExistError(_FailedPrecondition, text="etcdserver: root user does not have root role"):
    """The user root does not have the role root."""


class UserAlreadyExistError(_FailedPrecondition, text="etcdserver: user name already exists"):
    """The user name is taken."""


class UserNotFoundError(_FailedPrecondition, text="etcdserver: user name not found"):
    """The user does not exist."""


class RoleAlreadyExistError(_FailedPrecondition, text="etcdserver: role name already exists"):
    """The role name is taken."""


class RoleNotFoundError(_FailedPrecondition, text="etcdserver: role name not found"):
    """The role does not exist."""


class RoleNotGrantedError(_FailedPrecondition, text="etcdserver: role is not granted to the user"):
    """The user does not have the role."""


class PermissionNotGrantedError(_FailedPrecondition, text="etcdserver: permission is not granted to the role"):
    """The role has no permission for exactly this key range."""


class AuthLimitError(StatusError, code=RESOURCE_EXHAUSTED, text="raftkv: too many users, roles or permissions"):
    """Too many users, roles or permissions; the text says which."""


class InvalidAuthTokenError(StatusError, code=UNAUTHENTICATED, text="etcdserver: invalid auth token"):
    """An unknown or expired token."""


class PermissionDeniedError(StatusError, code=PERMISSION_DENIED, text="etcdserver: permission denied"):
    """The user may not do this."""


class _Unavailable(StatusError, code=UNAVAILABLE):
    """Errors with this code."""


class NoLeaderError(_Unavailable, text="etcdserver: no leader"):
    """The member knows no leader."""


class LeaderChangedError(_Unavailable, text="etcdserver: leader changed", definite=False):
    """The leader changed while the request waited."""


class StoppedError(_Unavailable, text="etcdserver: server stopped", definite=False):
    """The member is stopping."""


class RequestTimeoutError(_Unavailable, text="etcdserver: request timed out", definite=False):
    """The request was not committed in time; it may still commit."""


class LeaderFailTimeoutError(
    _Unavailable, text="etcdserver: request timed out, possibly due to previous leader failure", definite=False
):
    """The request timed out, and the leader was lost in the meantime."""


class ConnectionLostTimeoutError(
    _Unavailable, text="etcdserver: request timed out, possibly due to connection lost", definite=False
):
    """The request timed out, and the connection to the leader was lost in the meantime."""


class WaitAppliedTimeoutError(
    _Unavailable, text="etcdserver: request timed out, waiting for the applied index took too long"
):
    """A linearizable read waited too long for the log to be applied."""


class SnapshotGivenUpError(_Unavailable, text="raftkv: the snapshot was given up"):
    """A snapshot transfer that was aborted; the text says why. The received part is useless."""


class DamagedError(
    _Unavailable,
    text="raftkv: this member's database is damaged, and what was asked for cannot be read here: ask another member",
):
    """A read met a damaged record; another member has an intact copy."""


class UnhealthyError(_Unavailable, text="etcdserver: unhealthy cluster"):
    """Too few members are connected for a membership change."""


class CorruptClusterError(StatusError, code=DATA_LOSS, text="etcdserver: corrupt cluster"):
    """The CORRUPT alarm is on."""


class ContextDeadlineExceededError(
    StatusError, code=DEADLINE_EXCEEDED, text="context deadline exceeded", definite=False
):
    """The deadline of the request passed while it waited; the text has no prefix, as in etcd."""


class SessionExpiredError(StatusError, text="mutex: session is expired"):
    """The caller's key in the queue of a lock is gone, because its lease expired while it waited."""


class ElectionNotLeaderError(StatusError, text="election: not leader"):
    """The leader key of an election does not, or no longer, belong to the caller."""


class ElectionNoLeaderError(StatusError, text="election: no leader"):
    """The election has no leader."""


class MissingLeaderKeyError(StatusError, text='"leader" field must be provided'):
    """A request about an election term that does not say which."""


class UnimplementedError(StatusError, code=UNIMPLEMENTED):
    """A request that this service does not support; the text says which."""


def printable(text: str) -> str:
    """Escape a text from another program: one line, without control sequences for the terminal.

    >>> printable("caf\\u00e9 \\x1b[2J")
    'caf\u00e9 \\\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def explain(error: BaseException) -> str:
    """Return the cause of an error as one line that is never empty.

    Errors of raftkv return their text. Errors of the operating system name the file. All others name the type and the
    place in raftkv, because ``str`` of a ``MemoryError``, ``TimeoutError``, ``CancelledError`` or ``AssertionError`` is
    empty, and ``str`` of a ``KeyError`` is only the key.

    Arguments:
        error: exception; of an exception group, the first one is explained.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error).split())
    if isinstance(error, RaftKVError) and text:
        return text
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror + _place(error)
    if isinstance(error, MemoryError):
        return f"out of memory (MemoryError{_place(error)})"
    kind = type(error).__name__
    return (f"{kind}: {text}" if text else kind) + _place(error)


def _place(error: BaseException) -> str:
    """Return the innermost place in raftkv where the error passed; empty if unknown."""
    place, traceback = "", error.__traceback__
    while traceback is not None:
        module = traceback.tb_frame.f_globals.get("__name__", "")
        if module.partition(".")[0] == "raftkv":
            place = f", in {module} line {traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place
