from raftkv.pb import admin_pb2 as _admin_pb2
from raftkv.pb import rpc_pb2 as _rpc_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FiguresResponse(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: bytes
    def __init__(self, json: _Optional[bytes] = ...) -> None: ...

class MembersResponse(_message.Message):
    __slots__ = ("cluster_id", "members")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    cluster_id: int
    members: _containers.RepeatedCompositeFieldContainer[_rpc_pb2.Member]
    def __init__(self, cluster_id: _Optional[int] = ..., members: _Optional[_Iterable[_Union[_rpc_pb2.Member, _Mapping]]] = ...) -> None: ...

class SnapshotOffsetRequest(_message.Message):
    __slots__ = ("index", "term", "size_bytes", "sha256")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    index: int
    term: int
    size_bytes: int
    sha256: bytes
    def __init__(self, index: _Optional[int] = ..., term: _Optional[int] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class SnapshotOffsetResponse(_message.Message):
    __slots__ = ("offset_bytes",)
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    offset_bytes: int
    def __init__(self, offset_bytes: _Optional[int] = ...) -> None: ...

class LeaseRenewRequest(_message.Message):
    __slots__ = ("ids", "auth_revision", "asks_users")
    IDS_FIELD_NUMBER: _ClassVar[int]
    AUTH_REVISION_FIELD_NUMBER: _ClassVar[int]
    ASKS_USERS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    auth_revision: int
    asks_users: bool
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., auth_revision: _Optional[int] = ..., asks_users: _Optional[bool] = ...) -> None: ...

class LeaseRenewResponse(_message.Message):
    __slots__ = ("ttls",)
    TTLS_FIELD_NUMBER: _ClassVar[int]
    ttls: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ttls: _Optional[_Iterable[int]] = ...) -> None: ...

class LeaseShortenRequest(_message.Message):
    __slots__ = ("ids", "graces_ms", "ages_us", "users", "auth_revisions")
    IDS_FIELD_NUMBER: _ClassVar[int]
    GRACES_MS_FIELD_NUMBER: _ClassVar[int]
    AGES_US_FIELD_NUMBER: _ClassVar[int]
    USERS_FIELD_NUMBER: _ClassVar[int]
    AUTH_REVISIONS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    graces_ms: _containers.RepeatedScalarFieldContainer[int]
    ages_us: _containers.RepeatedScalarFieldContainer[int]
    users: _containers.RepeatedScalarFieldContainer[bytes]
    auth_revisions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., graces_ms: _Optional[_Iterable[int]] = ..., ages_us: _Optional[_Iterable[int]] = ..., users: _Optional[_Iterable[bytes]] = ..., auth_revisions: _Optional[_Iterable[int]] = ...) -> None: ...

class LeaseDecision(_message.Message):
    __slots__ = ("term", "ids")
    TERM_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    term: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, term: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EntryRun(_message.Message):
    __slots__ = ("term", "first_index", "type", "datas")
    TERM_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    DATAS_FIELD_NUMBER: _ClassVar[int]
    term: int
    first_index: int
    type: int
    datas: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, term: _Optional[int] = ..., first_index: _Optional[int] = ..., type: _Optional[int] = ..., datas: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ConfState(_message.Message):
    __slots__ = ("voters", "learners", "voters_outgoing", "learners_next", "auto_leave")
    VOTERS_FIELD_NUMBER: _ClassVar[int]
    LEARNERS_FIELD_NUMBER: _ClassVar[int]
    VOTERS_OUTGOING_FIELD_NUMBER: _ClassVar[int]
    LEARNERS_NEXT_FIELD_NUMBER: _ClassVar[int]
    AUTO_LEAVE_FIELD_NUMBER: _ClassVar[int]
    voters: _containers.RepeatedScalarFieldContainer[int]
    learners: _containers.RepeatedScalarFieldContainer[int]
    voters_outgoing: _containers.RepeatedScalarFieldContainer[int]
    learners_next: _containers.RepeatedScalarFieldContainer[int]
    auto_leave: bool
    def __init__(self, voters: _Optional[_Iterable[int]] = ..., learners: _Optional[_Iterable[int]] = ..., voters_outgoing: _Optional[_Iterable[int]] = ..., learners_next: _Optional[_Iterable[int]] = ..., auto_leave: _Optional[bool] = ...) -> None: ...

class SnapshotMeta(_message.Message):
    __slots__ = ("index", "term", "conf_state")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    CONF_STATE_FIELD_NUMBER: _ClassVar[int]
    index: int
    term: int
    conf_state: ConfState
    def __init__(self, index: _Optional[int] = ..., term: _Optional[int] = ..., conf_state: _Optional[_Union[ConfState, _Mapping]] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("type", "to_id", "from_id", "term", "log_term", "index", "runs", "commit", "reject", "reject_hint", "snapshot", "context", "quiet")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    TO_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    LOG_TERM_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    REJECT_FIELD_NUMBER: _ClassVar[int]
    REJECT_HINT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    QUIET_FIELD_NUMBER: _ClassVar[int]
    type: int
    to_id: int
    from_id: int
    term: int
    log_term: int
    index: int
    runs: _containers.RepeatedCompositeFieldContainer[EntryRun]
    commit: int
    reject: bool
    reject_hint: int
    snapshot: SnapshotMeta
    context: bytes
    quiet: bool
    def __init__(self, type: _Optional[int] = ..., to_id: _Optional[int] = ..., from_id: _Optional[int] = ..., term: _Optional[int] = ..., log_term: _Optional[int] = ..., index: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[EntryRun, _Mapping]]] = ..., commit: _Optional[int] = ..., reject: _Optional[bool] = ..., reject_hint: _Optional[int] = ..., snapshot: _Optional[_Union[SnapshotMeta, _Mapping]] = ..., context: _Optional[bytes] = ..., quiet: _Optional[bool] = ...) -> None: ...

class MessageBatch(_message.Message):
    __slots__ = ("messages", "traces")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TRACES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    traces: _containers.RepeatedCompositeFieldContainer[TraceContext]
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., traces: _Optional[_Iterable[_Union[TraceContext, _Mapping]]] = ...) -> None: ...

class TraceContext(_message.Message):
    __slots__ = ("subject", "trace_id", "span_id", "state")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    SPAN_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    subject: bytes
    trace_id: bytes
    span_id: bytes
    state: str
    def __init__(self, subject: _Optional[bytes] = ..., trace_id: _Optional[bytes] = ..., span_id: _Optional[bytes] = ..., state: _Optional[str] = ...) -> None: ...

class SnapshotChunk(_message.Message):
    __slots__ = ("message", "size_bytes", "data", "sha256", "offset_bytes")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    message: Message
    size_bytes: int
    data: bytes
    sha256: bytes
    offset_bytes: int
    def __init__(self, message: _Optional[_Union[Message, _Mapping]] = ..., size_bytes: _Optional[int] = ..., data: _Optional[bytes] = ..., sha256: _Optional[bytes] = ..., offset_bytes: _Optional[int] = ...) -> None: ...

class MemberRecord(_message.Message):
    __slots__ = ("member", "update", "version")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    member: _rpc_pb2.Member
    update: bool
    version: str
    def __init__(self, member: _Optional[_Union[_rpc_pb2.Member, _Mapping]] = ..., update: _Optional[bool] = ..., version: _Optional[str] = ...) -> None: ...

class MembershipChange(_message.Message):
    __slots__ = ("request_id", "changes", "learners_max", "caller")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    LEARNERS_MAX_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    changes: _containers.RepeatedCompositeFieldContainer[MemberChange]
    learners_max: int
    caller: Caller
    def __init__(self, request_id: _Optional[int] = ..., changes: _Optional[_Iterable[_Union[MemberChange, _Mapping]]] = ..., learners_max: _Optional[int] = ..., caller: _Optional[_Union[Caller, _Mapping]] = ...) -> None: ...

class Caller(_message.Message):
    __slots__ = ("user", "auth_revision")
    USER_FIELD_NUMBER: _ClassVar[int]
    AUTH_REVISION_FIELD_NUMBER: _ClassVar[int]
    user: bytes
    auth_revision: int
    def __init__(self, user: _Optional[bytes] = ..., auth_revision: _Optional[int] = ...) -> None: ...

class AuthChange(_message.Message):
    __slots__ = ("enable", "disable", "user_add", "user_delete", "user_change_password", "user_grant_role", "user_revoke_role", "role_add", "role_delete", "role_grant_permission", "role_revoke_permission", "token_grant")
    ENABLE_FIELD_NUMBER: _ClassVar[int]
    DISABLE_FIELD_NUMBER: _ClassVar[int]
    USER_ADD_FIELD_NUMBER: _ClassVar[int]
    USER_DELETE_FIELD_NUMBER: _ClassVar[int]
    USER_CHANGE_PASSWORD_FIELD_NUMBER: _ClassVar[int]
    USER_GRANT_ROLE_FIELD_NUMBER: _ClassVar[int]
    USER_REVOKE_ROLE_FIELD_NUMBER: _ClassVar[int]
    ROLE_ADD_FIELD_NUMBER: _ClassVar[int]
    ROLE_DELETE_FIELD_NUMBER: _ClassVar[int]
    ROLE_GRANT_PERMISSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_REVOKE_PERMISSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_GRANT_FIELD_NUMBER: _ClassVar[int]
    enable: _rpc_pb2.AuthEnableRequest
    disable: _rpc_pb2.AuthDisableRequest
    user_add: _rpc_pb2.AuthUserAddRequest
    user_delete: _rpc_pb2.AuthUserDeleteRequest
    user_change_password: _rpc_pb2.AuthUserChangePasswordRequest
    user_grant_role: _rpc_pb2.AuthUserGrantRoleRequest
    user_revoke_role: _rpc_pb2.AuthUserRevokeRoleRequest
    role_add: _rpc_pb2.AuthRoleAddRequest
    role_delete: _rpc_pb2.AuthRoleDeleteRequest
    role_grant_permission: _rpc_pb2.AuthRoleGrantPermissionRequest
    role_revoke_permission: _rpc_pb2.AuthRoleRevokePermissionRequest
    token_grant: TokenGrant
    def __init__(self, enable: _Optional[_Union[_rpc_pb2.AuthEnableRequest, _Mapping]] = ..., disable: _Optional[_Union[_rpc_pb2.AuthDisableRequest, _Mapping]] = ..., user_add: _Optional[_Union[_rpc_pb2.AuthUserAddRequest, _Mapping]] = ..., user_delete: _Optional[_Union[_rpc_pb2.AuthUserDeleteRequest, _Mapping]] = ..., user_change_password: _Optional[_Union[_rpc_pb2.AuthUserChangePasswordRequest, _Mapping]] = ..., user_grant_role: _Optional[_Union[_rpc_pb2.AuthUserGrantRoleRequest, _Mapping]] = ..., user_revoke_role: _Optional[_Union[_rpc_pb2.AuthUserRevokeRoleRequest, _Mapping]] = ..., role_add: _Optional[_Union[_rpc_pb2.AuthRoleAddRequest, _Mapping]] = ..., role_delete: _Optional[_Union[_rpc_pb2.AuthRoleDeleteRequest, _Mapping]] = ..., role_grant_permission: _Optional[_Union[_rpc_pb2.AuthRoleGrantPermissionRequest, _Mapping]] = ..., role_revoke_permission: _Optional[_Union[_rpc_pb2.AuthRoleRevokePermissionRequest, _Mapping]] = ..., token_grant: _Optional[_Union[TokenGrant, _Mapping]] = ...) -> None: ...

class TokenGrant(_message.Message):
    __slots__ = ("user", "token_sha256", "auth_revision")
    USER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SHA256_FIELD_NUMBER: _ClassVar[int]
    AUTH_REVISION_FIELD_NUMBER: _ClassVar[int]
    user: bytes
    token_sha256: bytes
    auth_revision: int
    def __init__(self, user: _Optional[bytes] = ..., token_sha256: _Optional[bytes] = ..., auth_revision: _Optional[int] = ...) -> None: ...

class MemberChange(_message.Message):
    __slots__ = ("kind", "member")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ADD: _ClassVar[MemberChange.Kind]
        REMOVE: _ClassVar[MemberChange.Kind]
        UPDATE: _ClassVar[MemberChange.Kind]
        PROMOTE: _ClassVar[MemberChange.Kind]
    ADD: MemberChange.Kind
    REMOVE: MemberChange.Kind
    UPDATE: MemberChange.Kind
    PROMOTE: MemberChange.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    kind: MemberChange.Kind
    member: _rpc_pb2.Member
    def __init__(self, kind: _Optional[_Union[MemberChange.Kind, str]] = ..., member: _Optional[_Union[_rpc_pb2.Member, _Mapping]] = ...) -> None: ...

class WALMetadata(_message.Message):
    __slots__ = ("cluster_id", "member_id")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    cluster_id: int
    member_id: int
    def __init__(self, cluster_id: _Optional[int] = ..., member_id: _Optional[int] = ...) -> None: ...
