"""The OpenAPI document: complete, with valid references, and matching the JSON of the gateway."""

from __future__ import annotations

import json
from typing import Any

import pytest

from raftkv.pb import rpc_pb2
from raftkv.pb.bindings import BINDINGS
from raftkv.server.gateway.encoder import encode
from raftkv.server.gateway.openapi import document

DOCUMENT = json.loads(document())
PYTHON = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}


def schema_of(reference: dict[str, Any]) -> dict[str, Any]:
    schema = reference
    if "$ref" in reference:
        schema = DOCUMENT["components"]["schemas"][reference["$ref"].removeprefix("#/components/schemas/")]
    return schema


def check(value: Any, reference: dict[str, Any]) -> None:
    """Fail unless a value is what a schema says."""
    schema = schema_of(reference)
    assert isinstance(value, PYTHON[schema["type"]])
    if schema["type"] == "object":
        assert value.keys() <= schema["properties"].keys()
        for name, part in value.items():
            check(part, schema["properties"][name])
    elif schema["type"] == "array":
        for part in value:
            check(part, schema["items"])
    assert value in schema.get("enum", [value])


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if "$ref" in node else set()
        return own.union(*map(references, node.values()))
    return set().union(*map(references, node)) if isinstance(node, list) else set()


def test_every_path_has_one_operation_and_every_reference_a_schema() -> None:
    assert DOCUMENT["paths"].keys() == BINDINGS.keys()
    operations = [path["post"]["operationId"] for path in DOCUMENT["paths"].values()]
    assert len(set(operations)) == 51
    known = {f"#/components/schemas/{name}" for name in DOCUMENT["components"]["schemas"]}
    assert references(DOCUMENT) == known
    assert len(document()) < 100_000


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/v3/kv/range", rpc_pb2.RangeResponse(header={"revision": 2**60}, kvs=[{"key": b"a", "lease": 7}], more=True)),
        ("/v3/maintenance/alarm", rpc_pb2.AlarmResponse(alarms=[{"memberID": 3, "alarm": "CORRUPT"}])),
        ("/v3/maintenance/hash", rpc_pb2.HashResponse(hash=2**32 - 1)),
        ("/v3/auth/role/get", rpc_pb2.AuthRoleGetResponse(perm=[{"permType": "READWRITE", "key": b"k"}])),
        ("/v3/kv/txn", rpc_pb2.TxnResponse(responses=[{"response_txn": {"succeeded": True}}])),
    ],
)
def test_answers_match_openapi_document(path: str, answer: Any) -> None:
    content = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]
    check(json.loads(encode(answer)), content["application/json"]["schema"])
