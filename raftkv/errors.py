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

OK: Final = 0
CANCELED: Final = 1
UNKNOWN: Final = 2
INVALID_ARGUMENT: Final = 3
DEADLINE_EXCEEDED: Final = 4
NOT_FOUND: Final = 5
ALREADY_EXISTS: Final = 6
PERMISSION_DENIED: Final = 7
RESOURCE_EXHAUSTED: Final = 8
FAILED_PRECONDITION: Final = 9
ABORTED: Final = 10
OUT_OF_RANGE: Final = 11
UNIMPLEMENTED: Final = 12
INTERNAL: Final = 13
UNAVAILABLE: Final = 14
DATA_LOSS: Final = 15
UNAUTHENTICATED: Final = 16

RETRY_AFTER: Final = b"retry-after-ms"
"""Trailer of a refusal: after so many milliseconds the same request would be taken."""
LIMIT_NAME: Final = b"raftkv-limit"
"""Trailer of a refusal: the limit, in words."""

CODE_NAMES: Final[dict[int, str]] = {
    OK: "OK",
    CANCELED: "Canceled",
    UNKNOWN: "Unknown",
    INVALID_ARGUMENT: "InvalidArgument",
    DEADLINE_EXCEEDED: "DeadlineExceeded",
    NOT_FOUND: "NotFound",
    ALREADY_EXISTS: "AlreadyExists",
    PERMISSION_DENIED: "PermissionDenied",
    RESOURCE_EXHAUSTED: "ResourceExhausted",
    FAILED_PRECONDITION: "FailedPrecondition",
    ABORTED: "Aborted",
    OUT_OF_RANGE: "OutOfRange",
    UNIMPLEMENTED: "Unimplemented",
    INTERNAL: "Internal",
    UNAVAILABLE: "Unavailable",
    DATA_LOSS: "DataLoss",
    UNAUTHENTICATED: "Unauthenticated",
}
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


class _InvalidArgument(StatusError):
    code = INVALID_ARGUMENT


class InvalidStalenessError(_InvalidArgument):
    """A bound of how old a read may be that is none; etcd has no such bounds."""

    text = "raftkv: metadata raftkv-max-staleness-ms must be a whole number of milliseconds, 0 or more"


class EmptyKeyError(_InvalidArgument):
    """A request without a key."""

    text = "etcdserver: key is not provided"


class KeyNotFoundError(_InvalidArgument):
    """``ignore_value`` or ``ignore_lease`` on a key that does not exist; also an operation of a txn left empty."""

    text = "etcdserver: key not found"


class ValueProvidedError(_InvalidArgument):
    """``ignore_value`` together with a value."""

    text = "etcdserver: value is provided"


class LeaseProvidedError(_InvalidArgument):
    """``ignore_lease`` together with a lease."""

    text = "etcdserver: lease is provided"


class TooManyOperationsError(_InvalidArgument):
    """A txn with more operations in a list than ``max-txn-ops``."""

    text = "etcdserver: too many operations in txn request"


class DuplicateKeyError(_InvalidArgument):
    """One branch of a txn writes a key twice."""

    text = "etcdserver: duplicate key given in txn request"


class InvalidClientAPIVersionError(_InvalidArgument):
    """Metadata ``client-api-version`` is not text."""

    text = "etcdserver: invalid client api version"


class InvalidSortOptionError(_InvalidArgument):
    """A sort order or target outside its enum."""

    text = "etcdserver: invalid sort option"


class InvalidAlarmError(_InvalidArgument):
    """An alarm or an action on alarms outside its enum. etcd panics on it, on every member and for good."""

    text = "raftkv: unknown alarm or action"


class TooManyChangesError(_InvalidArgument):
    """One request changes more keys than a revision can hold."""

    text = "raftkv: the request makes too many changes for one revision"


class TooManyComparedError(_InvalidArgument):
    """The compares of one txn look at more keys than every member can look at while others wait."""

    text = "raftkv: the compares of the txn look at too many keys"


class MalformedEntryError(_InvalidArgument):
    """The body of a log entry is no request of its kind: refused alike by all, without effect."""

    text = "raftkv: the request in the log cannot be decoded"


class BadMemberURLsError(_InvalidArgument):
    """Peer URLs that are missing or malformed."""

    text = "etcdserver: given member URLs are invalid"


class RequestTooLargeError(_InvalidArgument):
    """A write larger than ``max-request-bytes``."""

    text = "etcdserver: request is too large"


class _OutOfRange(StatusError):
    code = OUT_OF_RANGE


class CompactedError(_OutOfRange):
    """A revision below the compact revision; ``revision`` is the compact revision where it is known."""

    text = "etcdserver: mvcc: required revision has been compacted"

    def __init__(self, revision: int = 0) -> None:
        super().__init__()
        self.revision = revision


class FutureRevisionError(_OutOfRange):
    """A revision that does not exist yet."""

    text = "etcdserver: mvcc: required revision is a future revision"


class LeaseTTLTooLargeError(_OutOfRange):
    """A TTL above 9,000,000,000 s."""

    text = "etcdserver: too large lease TTL"


class NoSpaceError(StatusError):
    """The quota is used up and the NOSPACE alarm is on."""

    code = RESOURCE_EXHAUSTED
    text = "etcdserver: mvcc: database space exceeded"


class UnwrittenError(StatusError):
    """The request reads the database itself, which has no room for the writes before it."""

    code = RESOURCE_EXHAUSTED
    text = "raftkv: the disk has no room for what was written before: free some space, and ask again"


class QuotaExceededError(NoSpaceError):
    """A prefix has a quota, and would take more. The text begins as etcd's of a full database, and names the prefix."""

    text = ""


class TooManyQuotasError(StatusError):
    """Too many prefixes have a quota already."""

    code = RESOURCE_EXHAUSTED
    text = "raftkv: too many quotas of prefixes"


class InvalidQuotaError(_InvalidArgument):
    """A quota that makes no sense."""

    text = "raftkv: a quota has a prefix of at most 256 bytes, and limits of 0 (none) or more"


class QuotaNotFoundError(StatusError):
    """A quota to be removed that is not there."""

    code = NOT_FOUND
    text = "raftkv: no quota of this prefix"


class InvalidLimitError(_InvalidArgument):
    """A limit that makes no sense."""

    text = "raftkv: a limit is of a user, certificate, address, role, prefix, or each, with a name of 1 to 256 bytes"


class LimitNotFoundError(StatusError):
    """A limit to be removed that is not there."""

    code = NOT_FOUND
    text = "raftkv: no limit of this name"


class TooManyLimitsError(StatusError):
    """Too many limits are set already."""

    code = RESOURCE_EXHAUSTED
    text = "raftkv: too many limits"


class ResponseTooLargeError(StatusError):
    """The events of one revision for one watcher are more than a connection may have waiting."""

    code = RESOURCE_EXHAUSTED
    text = "raftkv: the events of one revision are too large for a response: watch smaller ranges or without prev_kv"


class TooManyRequestsError(StatusError):
    """Apply lags too far behind commit; UNKNOWN on the wire, as etcd sends it."""

    text = "etcdserver: too many requests"


class ShareError(TooManyRequestsError):
    """The caller holds its share of a budget for all (``rpc/shares``); the text names the limit."""

    code = RESOURCE_EXHAUSTED


class LimitedError(TooManyRequestsError):
    """The caller asks faster than an operator allows; exactly etcd's text, so that its clients know the error.

    Arguments:
        limit: the limit, in words.
        again_ms: when a request would be taken.
    """

    code = RESOURCE_EXHAUSTED

    def __init__(self, limit: str, again_ms: int) -> None:
        super().__init__()
        self.trailers = ((RETRY_AFTER, b"%d" % again_ms), (LIMIT_NAME, limit.encode("unicode_escape")))


class LeaseNotFoundError(StatusError):
    """A lease that does not exist."""

    code = NOT_FOUND
    text = "etcdserver: requested lease not found"


class MemberNotFoundError(StatusError):
    """A member id that the cluster does not know."""

    code = NOT_FOUND
    text = "etcdserver: member not found"


class _FailedPrecondition(StatusError):
    code = FAILED_PRECONDITION


class LeaseExistsError(_FailedPrecondition):
    """A lease id in use."""

    text = "etcdserver: lease already exists"


class MemberExistsError(_FailedPrecondition):
    """A member id in use."""

    text = "etcdserver: member ID already exist"


class PeerURLExistsError(_FailedPrecondition):
    """A peer URL in use."""

    text = "etcdserver: Peer URLs already exists"


class NotEnoughStartedMembersError(StatusError):
    """A membership change that would lose the quorum; UNKNOWN on the wire, as etcd sends it."""

    text = "etcdserver: re-configuration failed due to not enough started members"


class MemberNotLearnerError(_FailedPrecondition):
    """Promotion of a member that votes already."""

    text = "etcdserver: can only promote a learner member"


class LearnerNotReadyError(_FailedPrecondition):
    """Promotion of a learner that lags."""

    text = "etcdserver: can only promote a learner member which is in sync with leader"


class TooManyLearnersError(_FailedPrecondition):
    """More learners than ``max-learners``."""

    text = "etcdserver: too many learner members in cluster"


class ConfChangeRefusedError(_FailedPrecondition):
    """A change of members that does not follow on the present configuration of Raft."""

    text = "raftkv: the members cannot be changed like this now"


class NotCapableError(_FailedPrecondition):
    """Something that not all members are known to understand yet: one runs an older version."""

    text = "etcdserver: not capable"


class ClusterIDMismatchError(_FailedPrecondition):
    """A peer of another cluster."""

    text = "etcdserver: cluster ID mismatch"


class AuthNotEnabledError(_FailedPrecondition):
    """Authentication asked of a cluster without it."""

    text = "etcdserver: authentication is not enabled"


class NotLeaderError(_FailedPrecondition):
    """Only the leader can do this."""

    text = "etcdserver: not leader"


class NotSupportedForLearnerError(_FailedPrecondition):
    """A learner serves only serializable reads and Status."""

    text = "etcdserver: rpc not supported for learner"


class BadLeaderTransfereeError(_FailedPrecondition):
    """The target of a leader transfer does not vote."""

    text = "etcdserver: bad leader transferee"


class LeaderTransferTimeoutError(StatusError):
    """Leadership was not taken over in time; it may be yet. UNKNOWN on the wire, as etcd sends it."""

    text = "etcdserver: request timed out, leader transfer took too long"
    definite = False


class WrongDowngradeVersionFormatError(_InvalidArgument):
    """A version that is no ``MAJOR.MINOR``."""

    text = "etcdserver: wrong downgrade target version format"


class InvalidDowngradeTargetVersionError(_InvalidArgument):
    """A version that is not the minor version before the cluster's."""

    text = "etcdserver: invalid downgrade target version"


class DowngradeInProcessError(_FailedPrecondition):
    """The cluster has a downgrade job already."""

    text = "etcdserver: cluster has a downgrade job in progress"


class NoInflightDowngradeError(_FailedPrecondition):
    """There is no downgrade job to cancel."""

    text = "etcdserver: no inflight downgrade job"


class UserEmptyError(_InvalidArgument):
    """A request without a user, where users are asked for; also a user without a name."""

    text = "etcdserver: user name is empty"


class RoleEmptyError(_InvalidArgument):
    """A role without a name."""

    text = "etcdserver: role name is empty"


class AuthFailedError(_InvalidArgument):
    """A user that does not exist, or a wrong password: the answer does not tell which."""

    text = "etcdserver: authentication failed, invalid user ID or password"


class PermissionNotGivenError(_InvalidArgument):
    """A grant without a permission."""

    text = "etcdserver: permission not given"


class InvalidAuthManagementError(_InvalidArgument):
    """A change that would leave no user who may change users, or an interval that holds no key."""

    text = "etcdserver: invalid auth management"


class AuthOldRevisionError(_InvalidArgument):
    """Users or roles changed between the check of a request and its execution: to be tried again."""

    text = "etcdserver: revision of auth store is old"


class NoPasswordUserError(StatusError):
    """A password for a user that has none. UNKNOWN on the wire, as etcd sends it."""

    text = "auth: authentication failed, password was given for no password user"


class UserNameTooLongError(_InvalidArgument):
    """A name that does not fit into an entry of the log."""

    text = "raftkv: a user's name may have 65535 bytes"


class InvalidPasswordError(_InvalidArgument):
    """A password, or the hash of one, that cannot be set; says why."""

    text = "raftkv: the password cannot be used"


class PasswordTooLongError(StatusError):
    """More than bcrypt looks at. UNKNOWN on the wire, as etcd sends it."""

    text = "bcrypt: password length exceeds 72 bytes"


class TokenNotSignedError(StatusError):
    """This member can verify tokens, but has no key to sign one. UNKNOWN on the wire, as etcd sends it."""

    text = "auth: token signing attempted with verify-only key"


class RootUserNotExistError(_FailedPrecondition):
    """Users cannot be asked for before there is one who may do everything."""

    text = "etcdserver: root user does not exist"


class RootRoleNotExistError(_FailedPrecondition):
    """The user root has not the role root."""

    text = "etcdserver: root user does not have root role"


class UserAlreadyExistError(_FailedPrecondition):
    """A user name in use."""

    text = "etcdserver: user name already exists"


class UserNotFoundError(_FailedPrecondition):
    """No such user."""

    text = "etcdserver: user name not found"


class RoleAlreadyExistError(_FailedPrecondition):
    """A role name in use."""

    text = "etcdserver: role name already exists"


class RoleNotFoundError(_FailedPrecondition):
    """No such role."""

    text = "etcdserver: role name not found"


class RoleNotGrantedError(_FailedPrecondition):
    """The user has not the role."""

    text = "etcdserver: role is not granted to the user"


class PermissionNotGrantedError(_FailedPrecondition):
    """The role has no permission for just this interval."""

    text = "etcdserver: permission is not granted to the role"


class AuthLimitError(StatusError):
    """More users, roles or permissions than there may be; says which."""

    code = RESOURCE_EXHAUSTED
    text = "raftkv: too many users, roles or permissions"


class InvalidAuthTokenError(StatusError):
    """An unknown or expired token."""

    code = UNAUTHENTICATED
    text = "etcdserver: invalid auth token"


class PermissionDeniedError(StatusError):
    """The user may not do this."""

    code = PERMISSION_DENIED
    text = "etcdserver: permission denied"


class _Unavailable(StatusError):
    code = UNAVAILABLE


class NoLeaderError(_Unavailable):
    """The member knows no leader."""

    text = "etcdserver: no leader"


class LeaderChangedError(_Unavailable):
    """The leader changed while the request waited."""

    text = "etcdserver: leader changed"
    definite = False


class StoppedError(_Unavailable):
    """The member is stopping."""

    text = "etcdserver: server stopped"
    definite = False


class RequestTimeoutError(_Unavailable):
    """The request was not committed in time; it may still be."""

    text = "etcdserver: request timed out"
    definite = False


class LeaderFailTimeoutError(_Unavailable):
    """As ``RequestTimeoutError``, and the leader was lost meanwhile."""

    text = "etcdserver: request timed out, possibly due to previous leader failure"
    definite = False


class ConnectionLostTimeoutError(_Unavailable):
    """As ``RequestTimeoutError``, and the connection to the leader was lost meanwhile."""

    text = "etcdserver: request timed out, possibly due to connection lost"
    definite = False


class WaitAppliedTimeoutError(_Unavailable):
    """A linearizable read waited too long for the log to be applied."""

    text = "etcdserver: request timed out, waiting for the applied index took too long"


class SnapshotGivenUpError(_Unavailable):
    """A snapshot that could not be sent to its end; the text says why. What was received is of no use."""

    text = "raftkv: the snapshot was given up"


class DamagedError(_Unavailable):
    """A read met a record that is not what was written; another member has it whole."""

    text = "raftkv: this member's database is damaged, and what was asked for cannot be read here: ask another member"


class UnhealthyError(_Unavailable):
    """Too few members are connected for a membership change."""

    text = "etcdserver: unhealthy cluster"


class CorruptClusterError(StatusError):
    """The CORRUPT alarm is on."""

    code = DATA_LOSS
    text = "etcdserver: corrupt cluster"


class ContextDeadlineExceededError(StatusError):
    """The deadline of the request passed while it waited; the text has no prefix, as in etcd."""

    code = DEADLINE_EXCEEDED
    text = "context deadline exceeded"
    definite = False


class SessionExpiredError(StatusError):
    """The caller's key in the queue of a lock is gone: its lease ended while it waited."""

    text = "mutex: session is expired"


class ElectionNotLeaderError(StatusError):
    """The leader key of an election is not the caller's, or not any more."""

    text = "election: not leader"


class ElectionNoLeaderError(StatusError):
    """The election has no leader."""

    text = "election: no leader"


class MissingLeaderKeyError(StatusError):
    """A request about a leadership that does not say which."""

    text = '"leader" field must be provided'


class UnimplementedError(StatusError):
    """A request that this service does not offer; the text says what."""

    code = UNIMPLEMENTED


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
