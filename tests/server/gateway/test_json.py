"""JSON of the gateway: decoding, encoding, and error texts as in Go."""

from __future__ import annotations

from typing import Any

import pytest

from raftkv.pb import rpc_pb2
from raftkv.server.gateway import decoder
from raftkv.server.gateway.decoder import JsonError, Reader
from raftkv.server.gateway.encoder import encode, encode_string


def read(body: bytes, message_type: Any = rpc_pb2.RangeRequest) -> Any:
    """What a body becomes."""
    steps = Reader(body).next(message_type)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return done.value


ACCEPTED = [
    (b'{"key":"Zm9v"}', {"key": b"foo"}),
    (b' {"key" : "Zm9v" , "limit":"7"} trailing', {"key": b"foo", "limit": 7}),
    (b'{"range_end":"YQ=="}', {"range_end": b"a"}),
    (b'{"rangeEnd":"YQ=="}', {"range_end": b"a"}),
    (b'{"rangeEnd":"Yg==","range_end":"YQ=="}', {"range_end": b"b"}),
    (b'{"Key":"Zm9v","unknown":[{"a":[1,{}]}],"":0}', {}),
    (b'{"key":null,"limit":null,"sort_order":null}', {}),
    (b'{"limit":1,"limit":"2"}', {"limit": 2}),
    (b'{"limit":-0}', {"limit": 0}),
    (b'{"limit":"null"}', {"limit": 0}),
    (b'{"limit":" 5 "}', {"limit": 5}),
    (b'{"sort_order":"DESCEND","sort_target":3}', {"sort_order": 2, "sort_target": 3}),
    (b'{"sort_order":99}', {"sort_order": 99}),
    (b'{"key":[102,111]}', {"key": b"fo"}),
    (b'{"key":"Zm9\\nv"}', {"key": b"foo"}),
    (b'{"k\\u0065y":"Zm9v"}', {"key": b"foo"}),
    (b'{"keys_only":true,"serializable":false}', {"keys_only": True}),
    # What etcd reads from 3.6 on: both alphabets, with and without padding; whole numbers however they are written.
    (b'{"key":"Zm8","range_end":"Zm9vZg"}', {"key": b"fo", "range_end": b"foof"}),
    (b'{"key":"_-8=","range_end":"_-8"}', {"key": b"\xff\xef", "range_end": b"\xff\xef"}),
    (b'{"key":"Z-9v"}', {"key": b"g\xefo"}),
    (b'{"limit":1.0,"revision":"2.0"}', {"limit": 1, "revision": 2}),
    (b'{"limit":1.2e1,"revision":9.223372036854775807E18}', {"limit": 12, "revision": 2**63 - 1}),
    (b"null", {}),
    (b"{}", {}),
]

REFUSED = [
    (b"{", "unexpected EOF"),
    (b'{"key":"Zm9v"', "unexpected EOF"),
    (b'"a', "unexpected EOF"),
    (b"[]", "json: cannot unmarshal array into Go value of type map[string]json.RawMessage"),
    (b"12", "json: cannot unmarshal number into Go value of type map[string]json.RawMessage"),
    (b"01", "json: cannot unmarshal number into Go value of type map[string]json.RawMessage"),
    (b"tru", "unexpected EOF"),
    (b"trux", "invalid character 'x' in literal true (expecting 'e')"),
    (b"{key:1}", "invalid character 'k' looking for beginning of object key string"),
    (b'{"key"1}', "invalid character '1' after object key"),
    (b'{"key":1 2}', "invalid character '2' after object key:value pair or array element"),
    (b'{"key":[1 2]}', "invalid character '2' after object key:value pair or array element"),
    (b'{"key":[1,]}', "invalid character ']' looking for beginning of value"),
    (b'{"limit":NaN}', "invalid character 'N' looking for beginning of value"),
    (b'{"limit":-x}', "invalid character '-' looking for beginning of value"),
    (b'{"limit":1.x}', "invalid character '.' after object key:value pair or array element"),
    (b'{"limit":01}', "invalid character '1' after object key:value pair or array element"),
    (b'{"key":"a\nb"}', "invalid character '\\n' in string literal"),
    (b'{"key":"\\x"}', "invalid character 'x' in string escape code"),
    (b'{"key":"\\u00g0"}', "invalid character 'u' in \\u hexadecimal character escape"),
    (b"\xef\xbb\xbf{}", "invalid character '\u00ef' looking for beginning of value"),
    (b"'", "invalid character '\\'' looking for beginning of value"),
    (b'{"key":"Zm9vZ"}', "illegal base64 data at input byte 4"),
    (b'{"key":"Zg="}', "illegal base64 data at input byte 0"),
    (b'{"key":"Z-9v/w=="}', "illegal base64 data at input byte 1"),
    (b'{"key":"Z*9v"}', "illegal base64 data at input byte 1"),
    (b'{"key":"Zg==Zg=="}', "illegal base64 data at input byte 4"),
    (b'{"key":7}', "json: cannot unmarshal number into Go value of type []uint8"),
    (b'{"key":["a"]}', "json: cannot unmarshal string into Go value of type uint8"),
    (b'{"key":[256]}', "json: cannot unmarshal number 256 into Go value of type uint8"),
    (b'{"limit":1.5}', "json: cannot unmarshal number 1.5 into Go value of type int64"),
    (b'{"limit":1e-1}', "json: cannot unmarshal number 1e-1 into Go value of type int64"),
    (b'{"limit":1e19}', "json: cannot unmarshal number 1e19 into Go value of type int64"),
    (
        b'{"limit":1e999999999999999999999}',
        "json: cannot unmarshal number 1e999999999999999999999 into Go value of type int64",
    ),
    (b'{"limit":"x"}', "invalid character 'x' looking for beginning of value"),
    (b'{"limit":""}', "unexpected end of JSON input"),
    (b'{"limit":"1 2"}', "invalid character '2' after top-level value"),
    (b'{"limit":9223372036854775808}', None),
    (b'{"limit":{}}', "json: cannot unmarshal object into Go value of type int64"),
    (b'{"keys_only":"true"}', "json: cannot unmarshal string into Go value of type bool"),
    (b'{"sort_order":"UP"}', 'unknown value "\\"UP\\"" for enum etcdserverpb.RangeRequest.SortOrder'),
    (b'{"sort_order":true}', "json: cannot unmarshal bool into Go value of type protoreflect.EnumNumber"),
    # Of several faults the one of the field that is declared first counts.
    (b'{"limit":"x","key":7}', "json: cannot unmarshal number into Go value of type []uint8"),
    (b'{"limit":"' + b" " * 5000 + b'1"}', "json: cannot unmarshal string into Go value of type int64"),
    (b"[" * 10_000, "values are nested too deep"),
]


@pytest.mark.parametrize(("body", "fields"), ACCEPTED)
def test_accepted(body: bytes, fields: dict[str, Any]) -> None:
    assert read(body) == rpc_pb2.RangeRequest(**fields)


@pytest.mark.parametrize(("body", "text"), REFUSED)
def test_refused_with_gos_text(body: bytes, text: str | None) -> None:
    with pytest.raises(JsonError) as caught:
        read(body)
    expected = text or "json: cannot unmarshal number 9223372036854775808 into Go value of type int64"
    assert str(caught.value) == expected


def test_numbers_without_a_sign_have_none() -> None:
    assert read(b'{"ID":0}', rpc_pb2.MemberRemoveRequest).ID == 0
    with pytest.raises(JsonError, match="cannot unmarshal number -0 into Go value of type uint64"):
        read(b'{"ID":-0}', rpc_pb2.MemberRemoveRequest)


def test_null_in_a_list_is_the_empty_value() -> None:
    assert read(b'{"peerURLs":[null,"a"]}', rpc_pb2.MemberAddRequest).peerURLs == ["", "a"]


@pytest.mark.parametrize("body", [b"", b" \n\t "])
def test_empty_body_is_not_a_value(body: bytes) -> None:
    assert read(body) is None


def test_the_field_of_a_choice_that_is_declared_last_counts() -> None:
    body = b'{"requestPut":{"key":"Zm9v"},"request_range":{"key":"Zm9v"}}'
    assert read(body, rpc_pb2.RequestOp).WhichOneof("request") == "request_put"


def test_lists_are_read_in_steps() -> None:
    body = b'{"compare":[' + b",".join([b"{}"] * 20_000) + b"]}"
    assert sum(1 for _ in Reader(body).next(rpc_pb2.TxnRequest)) > 100


@pytest.mark.parametrize("part", [b"{},", b"[],", b"1,", b'{"a":1},'])
def test_bodies_of_too_many_parts_are_refused_before_they_are_parsed(part: bytes) -> None:
    body = b'{"x":[' + part * (decoder.PARTS_MAX + 1) + b'1],"compare":['
    with pytest.raises(JsonError, match="more than 50000 members and elements"):
        read(body, rpc_pb2.TxnRequest)


@pytest.mark.parametrize("text", [b"\\ud800", b"\xff", b"a\xff", b"\xe2\x82"])
def test_long_invalid_texts_are_decoded_quickly(text: bytes) -> None:
    name = read(b'{"name":"' + text * 100_000 + b'"}', rpc_pb2.AuthUserAddRequest).name
    assert set(name) <= {"\ufffd", "a"}


def test_strings_that_are_no_characters_are_replaced() -> None:
    body = b'{"name":"a\\ud800b\xffc\\ud83d\\ude00"}'
    assert read(body, rpc_pb2.AuthUserAddRequest).name == "a\ufffdb\ufffdc\U0001f600"


def test_messages_nested_too_deep_are_refused() -> None:
    body = b'{"success":[{"requestTxn":' * 200 + b"{}" + b"}]}" * 200
    with pytest.raises(JsonError, match="nested"):
        read(body, rpc_pb2.TxnRequest)


def test_json_output() -> None:
    kv = {"key": b"a", "create_revision": 2**62, "version": 1}
    response = rpc_pb2.RangeResponse(header={"cluster_id": 2**64 - 1}, kvs=[kv, {}], more=True)
    assert encode(response) == (
        '{"header":{"cluster_id":"18446744073709551615"},'
        '"kvs":[{"key":"YQ==","create_revision":"4611686018427387904","version":"1"},{}],"more":true}'
    )
    alarms = [{"memberID": 1, "alarm": "NOSPACE"}, {"alarm": 77}]
    assert encode(rpc_pb2.AlarmResponse(alarms=alarms)) == (
        '{"alarms":[{"memberID":"1","alarm":"NOSPACE"},{"alarm":77}]}'
    )
    assert encode(rpc_pb2.HashResponse(hash=7)) == '{"hash":7}'


def test_fields_are_written_in_the_order_of_their_declaration() -> None:
    """``ListFields`` goes by number; so must the declarations, for Go goes by these."""
    for file in (rpc_pb2.DESCRIPTOR,):
        for message in file.message_types_by_name.values():
            numbers = [field.number for field in message.fields]
            assert numbers == sorted(numbers), message.full_name


def test_strings_are_escaped_as_in_go() -> None:
    assert encode_string('<a>&\b\f\n\\b\u2028\x7f\u00e4"') == (
        '"\\u003ca\\u003e\\u0026\\u0008\\u000c\\n\\\\b\\u2028\x7f\u00e4\\""'
    )
