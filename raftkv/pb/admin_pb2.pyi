from raftkv.pb import rpc_pb2 as _rpc_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MemberReplaceRequest(_message.Message):
    __slots__ = ("old_id", "new_id")
    OLD_ID_FIELD_NUMBER: _ClassVar[int]
    NEW_ID_FIELD_NUMBER: _ClassVar[int]
    old_id: int
    new_id: int
    def __init__(self, old_id: _Optional[int] = ..., new_id: _Optional[int] = ...) -> None: ...

class MemberReplaceResponse(_message.Message):
    __slots__ = ("header", "members")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    header: _rpc_pb2.ResponseHeader
    members: _containers.RepeatedCompositeFieldContainer[_rpc_pb2.Member]
    def __init__(self, header: _Optional[_Union[_rpc_pb2.ResponseHeader, _Mapping]] = ..., members: _Optional[_Iterable[_Union[_rpc_pb2.Member, _Mapping]]] = ...) -> None: ...

class PrefixQuota(_message.Message):
    __slots__ = ("prefix", "bytes_max", "keys_max", "bytes_used", "keys_used", "bytes_history", "is_counting")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    KEYS_MAX_FIELD_NUMBER: _ClassVar[int]
    BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    KEYS_USED_FIELD_NUMBER: _ClassVar[int]
    BYTES_HISTORY_FIELD_NUMBER: _ClassVar[int]
    IS_COUNTING_FIELD_NUMBER: _ClassVar[int]
    prefix: bytes
    bytes_max: int
    keys_max: int
    bytes_used: int
    keys_used: int
    bytes_history: int
    is_counting: bool
    def __init__(self, prefix: _Optional[bytes] = ..., bytes_max: _Optional[int] = ..., keys_max: _Optional[int] = ..., bytes_used: _Optional[int] = ..., keys_used: _Optional[int] = ..., bytes_history: _Optional[int] = ..., is_counting: _Optional[bool] = ...) -> None: ...

class QuotaSetRequest(_message.Message):
    __slots__ = ("prefix", "bytes_max", "keys_max")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    KEYS_MAX_FIELD_NUMBER: _ClassVar[int]
    prefix: bytes
    bytes_max: int
    keys_max: int
    def __init__(self, prefix: _Optional[bytes] = ..., bytes_max: _Optional[int] = ..., keys_max: _Optional[int] = ...) -> None: ...

class QuotaSetResponse(_message.Message):
    __slots__ = ("header", "quota")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    header: _rpc_pb2.ResponseHeader
    quota: PrefixQuota
    def __init__(self, header: _Optional[_Union[_rpc_pb2.ResponseHeader, _Mapping]] = ..., quota: _Optional[_Union[PrefixQuota, _Mapping]] = ...) -> None: ...

class QuotaRemoveRequest(_message.Message):
    __slots__ = ("prefix",)
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    prefix: bytes
    def __init__(self, prefix: _Optional[bytes] = ...) -> None: ...

class QuotaRemoveResponse(_message.Message):
    __slots__ = ("header",)
    HEADER_FIELD_NUMBER: _ClassVar[int]
    header: _rpc_pb2.ResponseHeader
    def __init__(self, header: _Optional[_Union[_rpc_pb2.ResponseHeader, _Mapping]] = ...) -> None: ...

class QuotaListRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class QuotaListResponse(_message.Message):
    __slots__ = ("header", "quotas")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    QUOTAS_FIELD_NUMBER: _ClassVar[int]
    header: _rpc_pb2.ResponseHeader
    quotas: _containers.RepeatedCompositeFieldContainer[PrefixQuota]
    def __init__(self, header: _Optional[_Union[_rpc_pb2.ResponseHeader, _Mapping]] = ..., quotas: _Optional[_Iterable[_Union[PrefixQuota, _Mapping]]] = ...) -> None: ...

class Limit(_message.Message):
    __slots__ = ("kind", "name", "requests_per_s", "requests_burst", "bytes_per_s", "bytes_burst", "watches_max", "weight")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_S_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_BURST_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_BURST_FIELD_NUMBER: _ClassVar[int]
    WATCHES_MAX_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: bytes
    requests_per_s: int
    requests_burst: int
    bytes_per_s: int
    bytes_burst: int
    watches_max: int
    weight: int
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[bytes] = ..., requests_per_s: _Optional[int] = ..., requests_burst: _Optional[int] = ..., bytes_per_s: _Optional[int] = ..., bytes_burst: _Optional[int] = ..., watches_max: _Optional[int] = ..., weight: _Optional[int] = ...) -> None: ...

class LimitSetRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: Limit
    def __init__(self, limit: _Optional[_Union[Limit, _Mapping]] = ...) -> None: ...

class LimitSetResponse(_message.Message):
    __slots__ = ("header",)
    HEADER_FIELD_NUMBER: _ClassVar[int]
    header: _rpc_pb2.ResponseHeader
    def __init__(self, header: _Optional[_Union[_rpc_pb2.ResponseHeader, _Mapping]] = ...) -> None: ...

class LimitListRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LimitListResponse(_message.Message):
    __slots__ = ("header", "limits")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    header: _rpc_pb2.ResponseHeader
    limits: _containers.RepeatedCompositeFieldContainer[Limit]
    def __init__(self, header: _Optional[_Union[_rpc_pb2.ResponseHeader, _Mapping]] = ..., limits: _Optional[_Iterable[_Union[Limit, _Mapping]]] = ...) -> None: ...
