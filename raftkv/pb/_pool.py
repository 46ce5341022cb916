"""The private descriptor pool, and the filling of the ``*_pb2`` modules from it."""

from __future__ import annotations

import os
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal import enum_type_wrapper

_FILE: Final = os.path.join(os.path.dirname(__file__), "descriptors.bin")
"""Found by a path: ``importlib.resources`` imports what unpacks archives, a tenth of the start of a command."""


def _load_pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    files = descriptor_pb2.FileDescriptorSet()
    with open(_FILE, "rb") as file:
        files.ParseFromString(file.read())
    for described in files.file:  # protoc writes dependencies first
        pool.AddSerializedFile(described.SerializeToString())
    return pool


POOL = _load_pool()


def export(name: str, namespace: dict[str, Any]) -> None:
    """Put the messages and enums of ``raftkv/pb/<name>.proto`` into a module's namespace.

    Arguments:
        name: file name without folder and ending, such as ``rpc``.
        namespace: the module's ``globals()``.
    """
    file = POOL.FindFileByName(f"raftkv/pb/{name}.proto")
    namespace["DESCRIPTOR"] = file
    for message in file.message_types_by_name.values():
        namespace[message.name] = message_factory.GetMessageClass(message)
    for enum in file.enum_types_by_name.values():
        namespace[enum.name] = enum_type_wrapper.EnumTypeWrapper(enum)
        namespace.update({value.name: value.number for value in enum.values})
