"""The OpenAPI document of the gateway, generated from the descriptors: ``GET /v3/openapi.json``.

Names and types are those of the JSON (64-bit integers are strings, bytes are base64). A streamed answer is one line of
JSON per message; the document calls it ``application/x-ndjson``, although etcd's content type for it is plain JSON.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from raftkv import __version__
from raftkv.pb.bindings import BINDINGS
from raftkv.pb.services import Method

PATH: Final = "/v3/openapi.json"
_ERROR: Final = "error"

_KINDS: Final[dict[int, dict[str, str]]] = {
    FieldDescriptor.TYPE_BYTES: {"type": "string", "format": "byte"},
    FieldDescriptor.TYPE_STRING: {"type": "string"},
    FieldDescriptor.TYPE_BOOL: {"type": "boolean"},
    FieldDescriptor.TYPE_INT32: {"type": "integer", "format": "int32"},
    FieldDescriptor.TYPE_UINT32: {"type": "integer", "format": "int64"},
    FieldDescriptor.TYPE_INT64: {"type": "string", "format": "int64"},
    FieldDescriptor.TYPE_UINT64: {"type": "string", "format": "uint64"},
}


@cache
def document() -> bytes:
    """Return the document, as JSON."""
    schemas: dict[str, Any] = {_ERROR: _error_schema()}
    paths = {path: {"post": _operation(path, method, schemas)} for path, method in sorted(BINDINGS.items())}
    whole = {
        "openapi": "3.0.3",
        "info": {
            "title": "raftkv",
            "version": __version__,
            "description": "etcd's v3 API in JSON. Keys and values are base64, 64-bit integers are strings.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "token": {"type": "apiKey", "in": "header", "name": "Authorization", "description": "token of a login"}
            },
        },
        "security": [{}, {"token": []}],
    }
    return json.dumps(whole, separators=(",", ":")).encode()


def _operation(path: str, method: Method, schemas: dict[str, Any]) -> dict[str, Any]:
    service, _, name = method.path[1:].partition("/")
    tag = service.rpartition(".")[2]
    answer: dict[str, Any] = _reference(method.response.DESCRIPTOR, schemas)
    content_type = "application/json"
    if method.server_streaming:
        content_type = "application/x-ndjson"
        answer = {"type": "object", "properties": {"result": answer, "error": {"type": "object"}}}
    alias = "" if not path.startswith("/v3/kv/lease/") else "_Alias"
    return {
        "operationId": f"{tag}_{name}{alias}",
        "tags": [tag],
        "requestBody": {
            "required": True,
            "description": "one object, or several in a row" if method.client_streaming else "one object",
            "content": {"application/json": {"schema": _reference(method.request.DESCRIPTOR, schemas)}},
        },
        "responses": {
            "200": {"description": "the answer", "content": {content_type: {"schema": answer}}},
            "default": {
                "description": "why not",
                "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{_ERROR}"}}},
            },
        },
    }


def _error_schema() -> dict[str, Any]:
    text = {"type": "string"}
    return {"type": "object", "properties": {"error": text, "code": {"type": "integer"}, "message": text}}


def _reference(message: Descriptor, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return a reference to the schema of a message; the schema is added, with all that it refers to."""
    if message.full_name not in schemas:
        properties: dict[str, Any] = {}
        schemas[message.full_name] = {"type": "object", "properties": properties}
        properties |= {field.name: _field(field, schemas) for field in message.fields}
    return {"$ref": f"#/components/schemas/{message.full_name}"}


def _field(field: FieldDescriptor, schemas: dict[str, Any]) -> dict[str, Any]:
    part: Any = field.message_type
    enum: Any = field.enum_type
    if part is not None:
        schema = _reference(part, schemas)
    elif enum is not None:
        schema = {"type": "string", "enum": [value.name for value in enum.values]}
    else:
        schema = dict(_KINDS[field.type])
    return {"type": "array", "items": schema} if field.is_repeated else schema
