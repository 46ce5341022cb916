from raftkv.pb import rpc_pb2 as _rpc_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LeaseRenewRequest(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class LeaseRenewResponse(_message.Message):
    __slots__ = ("ttls",)
    TTLS_FIELD_NUMBER: _ClassVar[int]
    ttls: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ttls: _Optional[_Iterable[int]] = ...) -> None: ...

class LeaseShortenRequest(_message.Message):
    __slots__ = ("ids", "graces_ms", "ages_us")
    IDS_FIELD_NUMBER: _ClassVar[int]
    GRACES_MS_FIELD_NUMBER: _ClassVar[int]
    AGES_US_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    graces_ms: _containers.RepeatedScalarFieldContainer[int]
    ages_us: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., graces_ms: _Optional[_Iterable[int]] = ..., ages_us: _Optional[_Iterable[int]] = ...) -> None: ...

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
    __slots__ = ("type", "to_id", "from_id", "term", "log_term", "index", "runs", "commit", "reject", "reject_hint", "snapshot", "context")
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
    def __init__(self, type: _Optional[int] = ..., to_id: _Optional[int] = ..., from_id: _Optional[int] = ..., term: _Optional[int] = ..., log_term: _Optional[int] = ..., index: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[EntryRun, _Mapping]]] = ..., commit: _Optional[int] = ..., reject: _Optional[bool] = ..., reject_hint: _Optional[int] = ..., snapshot: _Optional[_Union[SnapshotMeta, _Mapping]] = ..., context: _Optional[bytes] = ...) -> None: ...

class MessageBatch(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ...) -> None: ...

class SnapshotChunk(_message.Message):
    __slots__ = ("message", "size_bytes", "data", "sha256")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    message: Message
    size_bytes: int
    data: bytes
    sha256: bytes
    def __init__(self, message: _Optional[_Union[Message, _Mapping]] = ..., size_bytes: _Optional[int] = ..., data: _Optional[bytes] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class MemberRecord(_message.Message):
    __slots__ = ("member", "update")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    member: _rpc_pb2.Member
    update: bool
    def __init__(self, member: _Optional[_Union[_rpc_pb2.Member, _Mapping]] = ..., update: _Optional[bool] = ...) -> None: ...

class WALMetadata(_message.Message):
    __slots__ = ("cluster_id", "member_id")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    cluster_id: int
    member_id: int
    def __init__(self, cluster_id: _Optional[int] = ..., member_id: _Optional[int] = ...) -> None: ...
