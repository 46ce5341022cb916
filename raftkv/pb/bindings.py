"""The HTTP paths of RPCs, as ``option (google.api.http)`` in ``proto/`` names them.

>>> BINDINGS["/v3/kv/put"].path, len(BINDINGS)
('/etcdserverpb.KV/Put', 51)

All of them are POSTs whose body is the whole request. Imported only by who serves or describes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from google.protobuf import message_factory

from raftkv.pb._pool import POOL
from raftkv.pb.services import SERVICES, Method

_FILES: Final = ("rpc", "lock", "election")


def _bindings() -> Iterator[tuple[str, Method]]:
    # Options are read with the classes of the private pool: only these know the extension.
    options: Any = message_factory.GetMessageClass(POOL.FindMessageTypeByName("google.protobuf.MethodOptions"))
    http: Any = POOL.FindExtensionByName("google.api.http")
    for file in _FILES:
        for service in POOL.FindFileByName(f"raftkv/pb/{file}.proto").services_by_name.values():
            for method in service.methods:
                rule = options.FromString(method.GetOptions().SerializeToString()).Extensions[http]
                for one in (rule, *rule.additional_bindings):
                    if one.post:
                        yield one.post, SERVICES[service.full_name][method.name]


BINDINGS: Final[dict[str, Method]] = dict(_bindings())
"""Path of HTTP to its method."""
