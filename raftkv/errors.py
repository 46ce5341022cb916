"""Every error that raftkv raises on purpose, as one tree.

    RaftKVError
    +-- InvariantError           a broken promise inside the member: it stops, nothing catches this
    |   +-- CorruptionError      stored bytes are not what was written: names the place
    |   +-- UnknownEntryError    the log holds an entry of a later version: names the version to install
    +-- MemberRemovedError       this member has left its cluster for good: it stops
    +-- ConfigError              a setting that cannot be used: one line says which and why
    +-- StorageError             the disk or its files cannot be used: one line says which and why
    |   +-- SpaceError           no room left for the write
    |   |   +-- MapFullError     the map of the database is used up: the owner grows it, no disk need be full
    +-- StatusError              an answer to a client: gRPC code, exact text, and if it is definite
        +-- one class for every row of etcd's error table, below

Clients of etcd match the code and the whole text, so both are API: they are written here and nowhere else. Codes are
what etcd puts on the wire, which for two rows differs from what its documentation says (``TooManyRequestsError`` and
``NotEnoughStartedMembersError`` arrive as UNKNOWN).

``definite`` answers the one question a caller of a replicated store has after a failure: did the request certainly
*not* happen? Refusals are definite; time-outs and lost leaders are not, because the entry may still commit.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

(OK, CANCELED, UNKNOWN, INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND, ALREADY_EXISTS, PERMISSION_DENIED) = range(8)
(RESOURCE_EXHAUSTED, FAILED_PRECONDITION, ABORTED, OUT_OF_RANGE, UNIMPLEMENTED, INTERNAL) = range(8, 14)
(UNAVAILABLE, DATA_LOSS, UNAUTHENTICATED) = range(14, 17)
"""Codes of gRPC."""

RETRY_AFTER: Final = b"retry-after-ms"
"""Trailer of a refusal: after so many milliseconds the same request would be taken."""
LIMIT_NAME: Final = b"raftkv-limit"
"""Trailer of a refusal: the limit, in words."""

_CODE_NAMES: Final = (
    "OK Canceled Unknown InvalidArgument DeadlineExceeded NotFound AlreadyExists PermissionDenied ResourceExhausted "
    "FailedPrecondition Aborted OutOfRange Unimplemented Internal Unavailable DataLoss Unauthenticated"
)
CODE_NAMES: Final[dict[int, str]] = dict(enumerate(_CODE_NAMES.split()))
"""Code to the name that Go prints, which command lines show."""


class RaftKVError(Exception):
    """The root of the tree. Errors go from process to process (pickle) with their text and attributes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.args), self.__dict__


def _rebuilt(kind: type[RaftKVError], arguments: tuple[Any, ...]) -> RaftKVError:
    """Make an error again without its constructor, which may want other arguments than the text that it has made."""
    error = kind.__new__(kind, *arguments)
    error.args = arguments
    return error


class InvariantError(RaftKVError):
    """A promise of the code is broken. The member stops rather than diverge; nothing may catch this and go on."""


class CorruptionError(InvariantError):
    """Stored bytes are not what was written. The text names the file or record, and the offset."""


class UnknownEntryError(InvariantError):
    """The log holds an entry that a later version wrote. The text is one line for the user: what to install."""


class ConfigError(RaftKVError):
    """A setting cannot be used; the text is one line for the user."""


class MemberRemovedError(RaftKVError):
    """This member was removed from its cluster: its id never comes back, and its data is of no more use.

    Attributes:
        has_served: whether this process has served clients before.
    """

    text: ClassVar[str] = "the member has been permanently removed from the cluster"
    """etcd's words; the others refuse its connections with them."""

    def __init__(self, text: str, *, has_served: bool = False) -> None:
        super().__init__(text)
        self.has_served = has_served


class StorageError(RaftKVError):
    """The disk or its files cannot be used; the text is one line for the user."""


class SpaceError(StorageError):
    """There is no room for the write, on the disk or in the map of the database."""


class MapFullError(SpaceError):
    """The map of the database is used up, though the disk may have room: grow it, and try the write again."""


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
        """Take class attributes from the head of a class: ``class NoLeaderError(_Unavailable, text="…")``."""
        super().__init_subclass__()
        for name, value in (("code", code), ("text", text), ("definite", definite)):
            if value is not None:
                setattr(cls, name, value)


class _InvalidArgument(StatusError, code=INVALID_ARGUMENT):
    """Errors with this code."""


class InvalidStalenessError(
    _InvalidArgument, text="raftkv: metadata raftkv-max-staleness-ms must be a whole number of milliseconds, 0 or more"
):
    """A bound of how old a read may be that is none; etcd has no such bounds."""


class EmptyKeyError(_InvalidArgument, text="etcdserver: key is not provided"):
    """A request without a key."""


class KeyNotFoundError(_InvalidArgument, text="etcdserver: key not found"):
    """``ignore_value`` or ``ignore_lease`` on a key that does not exist; also an operation of a txn left empty."""


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
    """An alarm or an action on alarms outside its enum. etcd panics on it, on every member and for good."""


class TooManyChangesError(_InvalidArgument, text="raftkv: the request makes too many changes for one revision"):
    """One request changes more keys than a revision can hold."""


class TooManyComparedError(_InvalidArgument, text="raftkv: the compares of the txn look at too many keys"):
    """The compares of one txn look at more keys than every member can look at while others wait."""


class MalformedEntryError(_InvalidArgument, text="raftkv: the request in the log cannot be decoded"):
    """The body of a log entry is no request of its kind: refused alike by all, without effect."""


class BadMemberURLsError(_InvalidArgument, text="etcdserver: given member URLs are invalid"):
    """Peer URLs that are missing or malformed."""


class RequestTooLargeError(_InvalidArgument, text="etcdserver: request is too large"):
    """A write larger than ``max-request-bytes``."""


class _OutOfRange(StatusError, code=OUT_OF_RANGE):
    """Errors with this code."""


class CompactedError(_OutOfRange, text="etcdserver: mvcc: required revision has been compacted"):
    """A revision below the compact revision; ``revision`` is the compact revision where it is known."""

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
    """A prefix has a quota, and would take more. The text begins as etcd's of a full database, and names the prefix."""


class TooManyQuotasError(StatusError, code=RESOURCE_EXHAUSTED, text="raftkv: too many quotas of prefixes"):
    """Too many prefixes have a quota already."""


class InvalidQuotaError(
    _InvalidArgument, text="raftkv: a quota has a prefix of at most 256 bytes, and limits of 0 (none) or more"
):
    """A quota that makes no sense."""


class QuotaNotFoundError(StatusError, code=NOT_FOUND, text="raftkv: no quota of this prefix"):
    """A quota to be removed that is not there."""


class InvalidLimitError(
    _InvalidArgument,
    text="raftkv: a limit is of a user, certificate, address, role, prefix, or each, with a name of 1 to 256 bytes",
):
    """A limit that makes no sense."""


class LimitNotFoundError(StatusError, code=NOT_FOUND, text="raftkv: no limit of this name"):
    """A limit to be removed that is not there."""


class TooManyLimitsError(StatusError, code=RESOURCE_EXHAUSTED, text="raftkv: too many limits"):
    """Too many limits are set already."""


class ResponseTooLargeError(
    StatusError,
    code=RESOURCE_EXHAUSTED,
    text="raftkv: the events of one revision are too large for a response: watch smaller ranges or without prev_kv",
):
    """The events of one revision for one watcher are more than a connection may have waiting."""


class TooManyRequestsError(StatusError, text="etcdserver: too many requests"):
    """Apply lags too far behind commit; UNKNOWN on the wire, as etcd sends it."""


class ShareError(TooManyRequestsError, code=RESOURCE_EXHAUSTED):
    """The caller holds its share of a budget for all (``rpc/shares``); the text names the limit."""


class LimitedError(TooManyRequestsError, code=RESOURCE_EXHAUSTED):
    """The caller asks faster than an operator allows; exactly etcd's text, so that its clients know the error.

    Arguments:
        limit: the limit, in words.
        again_ms: when a request would be taken.
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
    """Promotion of a member that votes already."""


class LearnerNotReadyError(
    _FailedPrecondition, text="etcdserver: can only promote a learner member which is in sync with leader"
):
    """Promotion of a learner that lags."""


class TooManyLearnersError(_FailedPrecondition, text="etcdserver: too many learner members in cluster"):
    """More learners than ``max-learners``."""


class ConfChangeRefusedError(_FailedPrecondition, text="raftkv: the members cannot be changed like this now"):
    """A change of members that does not follow on the present configuration of Raft."""


class NotCapableError(_FailedPrecondition, text="etcdserver: not capable"):
    """Something that not all members are known to understand yet: one runs an older version."""


class ClusterIDMismatchError(_FailedPrecondition, text="etcdserver: cluster ID mismatch"):
    """A peer of another cluster."""


class AuthNotEnabledError(_FailedPrecondition, text="etcdserver: authentication is not enabled"):
    """Authentication asked of a cluster without it."""


class NotLeaderError(_FailedPrecondition, text="etcdserver: not leader"):
    """Only the leader can do this."""


class NotSupportedForLearnerError(_FailedPrecondition, text="etcdserver: rpc not supported for learner"):
    """A learner serves only serializable reads and Status."""


class BadLeaderTransfereeError(_FailedPrecondition, text="etcdserver: bad leader transferee"):
    """The target of a leader transfer does not vote."""


class LeaderTransferTimeoutError(
    StatusError, text="etcdserver: request timed out, leader transfer took too long", definite=False
):
    """Leadership was not taken over in time; it may be yet. UNKNOWN on the wire, as etcd sends it."""


class WrongDowngradeVersionFormatError(_InvalidArgument, text="etcdserver: wrong downgrade target version format"):
    """A version that is no ``MAJOR.MINOR``."""


class InvalidDowngradeTargetVersionError(_InvalidArgument, text="etcdserver: invalid downgrade target version"):
    """A version that is not the minor version before the cluster's."""


class DowngradeInProcessError(_FailedPrecondition, text="etcdserver: cluster has a downgrade job in progress"):
    """The cluster has a downgrade job already."""


class NoInflightDowngradeError(_FailedPrecondition, text="etcdserver: no inflight downgrade job"):
    """There is no downgrade job to cancel."""


class UserEmptyError(_InvalidArgument, text="etcdserver: user name is empty"):
    """A request without a user, where users are asked for; also a user without a name."""


class RoleEmptyError(_InvalidArgument, text="etcdserver: role name is empty"):
    """A role without a name."""


class AuthFailedError(_InvalidArgument, text="etcdserver: authentication failed, invalid user ID or password"):
    """A user that does not exist, or a wrong password: the answer does not tell which."""


class PermissionNotGivenError(_InvalidArgument, text="etcdserver: permission not given"):
    """A grant without a permission."""


class InvalidAuthManagementError(_InvalidArgument, text="etcdserver: invalid auth management"):
    """A change that would leave no user who may change users, or an interval that holds no key."""


class AuthOldRevisionError(_InvalidArgument, text="etcdserver: revision of auth store is old"):
    """Users or roles changed between the check of a request and its execution: to be tried again."""


class NoPasswordUserError(StatusError, text="auth: authentication failed, password was given for no password user"):
    """A password for a user that has none. UNKNOWN on the wire, as etcd sends it."""


class UserNameTooLongError(_InvalidArgument, text="raftkv: a user's name may have 65535 bytes"):
    """A name that does not fit into an entry of the log."""


class InvalidPasswordError(_InvalidArgument, text="raftkv: the password cannot be used"):
    """A password, or the hash of one, that cannot be set; says why."""


class PasswordTooLongError(StatusError, text="bcrypt: password length exceeds 72 bytes"):
    """More than bcrypt looks at. UNKNOWN on the wire, as etcd sends it."""


class TokenNotSignedError(StatusError, text="auth: token signing attempted with verify-only key"):
    """This member can verify tokens, but has no key to sign one. UNKNOWN on the wire, as etcd sends it."""


class RootUserNotExistError(_FailedPrecondition, text="etcdserver: root user does not exist"):
    """Users cannot be asked for before there is one who may do everything."""


class RootRoleNotExistError(_FailedPrecondition, text="etcdserver: root user does not have root role"):
    """The user root has not the role root."""


class UserAlreadyExistError(_FailedPrecondition, text="etcdserver: user name already exists"):
    """A user name in use."""


class UserNotFoundError(_FailedPrecondition, text="etcdserver: user name not found"):
    """No such user."""


class RoleAlreadyExistError(_FailedPrecondition, text="etcdserver: role name already exists"):
    """A role name in use."""


class RoleNotFoundError(_FailedPrecondition, text="etcdserver: role name not found"):
    """No such role."""


class RoleNotGrantedError(_FailedPrecondition, text="etcdserver: role is not granted to the user"):
    """The user has not the role."""


class PermissionNotGrantedError(_FailedPrecondition, text="etcdserver: permission is not granted to the role"):
    """The role has no permission for just this interval."""


class AuthLimitError(StatusError, code=RESOURCE_EXHAUSTED, text="raftkv: too many users, roles or permissions"):
    """More users, roles or permissions than there may be; says which."""


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
    """The request was not committed in time; it may still be."""


class LeaderFailTimeoutError(
    _Unavailable, text="etcdserver: request timed out, possibly due to previous leader failure", definite=False
):
    """As ``RequestTimeoutError``, and the leader was lost meanwhile."""


class ConnectionLostTimeoutError(
    _Unavailable, text="etcdserver: request timed out, possibly due to connection lost", definite=False
):
    """As ``RequestTimeoutError``, and the connection to the leader was lost meanwhile."""


class WaitAppliedTimeoutError(
    _Unavailable, text="etcdserver: request timed out, waiting for the applied index took too long"
):
    """A linearizable read waited too long for the log to be applied."""


class SnapshotGivenUpError(_Unavailable, text="raftkv: the snapshot was given up"):
    """A snapshot that could not be sent to its end; the text says why. What was received is of no use."""


class DamagedError(
    _Unavailable,
    text="raftkv: this member's database is damaged, and what was asked for cannot be read here: ask another member",
):
    """A read met a record that is not what was written; another member has it whole."""


class UnhealthyError(_Unavailable, text="etcdserver: unhealthy cluster"):
    """Too few members are connected for a membership change."""


class CorruptClusterError(StatusError, code=DATA_LOSS, text="etcdserver: corrupt cluster"):
    """The CORRUPT alarm is on."""


class ContextDeadlineExceededError(
    StatusError, code=DEADLINE_EXCEEDED, text="context deadline exceeded", definite=False
):
    """The deadline of the request passed while it waited; the text has no prefix, as in etcd."""


class SessionExpiredError(StatusError, text="mutex: session is expired"):
    """The caller's key in the queue of a lock is gone: its lease ended while it waited."""


class ElectionNotLeaderError(StatusError, text="election: not leader"):
    """The leader key of an election is not the caller's, or not any more."""


class ElectionNoLeaderError(StatusError, text="election: no leader"):
    """The election has no leader."""


class MissingLeaderKeyError(StatusError, text='"leader" field must be provided'):
    """A request about a leadership that does not say which."""


class UnimplementedError(StatusError, code=UNIMPLEMENTED):
    """A request that this service does not offer; the text says what."""


def explain(error: BaseException) -> str:
    """Return why something failed in one line that is never empty.

    Errors of raftkv say it themselves. Of the system's errors the file is named; of all others the type, and the place
    in raftkv: ``str`` of a ``MemoryError``, ``TimeoutError``, ``CancelledError`` or ``AssertionError`` is empty, and
    that of a ``KeyError`` is the key alone.

    Arguments:
        error: of a group the first counts.
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
    """Where in raftkv it was raised; empty if that is unknown."""
    place, traceback = "", error.__traceback__
    while traceback is not None:
        module = traceback.tb_frame.f_globals.get("__name__", "")
        if module.partition(".")[0] == "raftkv":
            place = f", in {module} line {traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place
