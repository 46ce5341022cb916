"""The default format: what a person wants to see, one thing a line."""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from raftkv.cli.goflags.pflag import quote
from raftkv.cli.output import printer
from raftkv.cli.output.printer import EndpointAnswer, EndpointHealth, Printer, lower, write, write_line
from raftkv.client.scope import prefix_end
from raftkv.pb import auth_pb2
from raftkv.pb.enums import alarm_name

if TYPE_CHECKING:
    from typing import Any

    from raftkv.pb import kv_pb2, rpc_pb2


class SimplePrinter(Printer):
    """Keys and values as they are (or in hexadecimal), rows separated by commas."""

    name = "simple"

    def put(self, response: rpc_pb2.PutResponse) -> None:
        write_line("OK")
        if response.HasField("prev_kv"):
            self._pairs([response.prev_kv])

    def get(self, response: rpc_pb2.RangeResponse) -> None:
        self._pairs(response.kvs)

    def delete(self, response: rpc_pb2.DeleteRangeResponse) -> None:
        write_line(str(response.deleted))
        self._pairs(response.prev_kvs)

    def txn(self, response: rpc_pb2.TxnResponse) -> None:
        write_line("SUCCESS" if response.succeeded else "FAILURE")
        for operation in response.responses:
            write_line("")
            self.operation(operation)

    def alarms(self, response: rpc_pb2.AlarmResponse) -> None:
        for alarm in response.alarms:
            # The space at the end is etcd's.
            member = f"memberID:{alarm.memberID} " if alarm.memberID else ""
            kind = f"alarm:{alarm_name(alarm.alarm)} " if alarm.alarm else ""
            write_line(member + kind)

    def move_leader(self, leader: int, target: int, response: rpc_pb2.MoveLeaderResponse) -> None:
        write_line(f"Leadership transferred from {leader:x} to {target:x}")

    def downgrade(self, action: str, response: rpc_pb2.DowngradeResponse) -> None:
        write_line(f"Downgrade {action} success, cluster version {response.version}")

    def member_add(self, name: str, urls: str, response: rpc_pb2.MemberAddResponse) -> None:
        added = response.member.ID
        write_line(f"Member {added:16x} added to cluster {response.header.cluster_id:16x}")
        cluster = ",".join(
            f"{name if added == member.ID else member.name}={url}"
            for member in response.members
            for url in member.peerURLs
        )
        write_line(f"\nETCD_NAME={quote(name)}")
        write_line(f"ETCD_INITIAL_CLUSTER={quote(cluster)}")
        write_line(f"ETCD_INITIAL_ADVERTISE_PEER_URLS={quote(urls)}")
        write_line('ETCD_INITIAL_CLUSTER_STATE="existing"')

    def member_changed(self, member_id: int, done: str, response: Any) -> None:
        write_line(f"Member {member_id:16x} {done} cluster {response.header.cluster_id:16x}")

    def member_list(self, response: rpc_pb2.MemberListResponse) -> None:
        self._rows(printer.member_rows(response)[1])

    def endpoint_health(self, answers: Sequence[EndpointHealth]) -> None:
        for answer in answers:
            if answer.error:
                text = f"{answer.endpoint} is unhealthy: failed to commit proposal: {answer.error}"
                print(text, file=sys.stderr)
            else:
                text = f"{answer.endpoint} is healthy: successfully committed proposal: took = {answer.took}"
                write_line(text)

    def endpoint_status(self, answers: Sequence[EndpointAnswer]) -> None:
        self._rows(printer.status_rows(answers)[1])

    def endpoint_hashkv(self, answers: Sequence[EndpointAnswer]) -> None:
        self._rows(printer.hashkv_rows(answers)[1])

    def watch(self, answer: rpc_pb2.WatchResponse) -> None:
        lines = []
        for event in answer.events:
            lines.append(b"DELETE" if event.type else b"PUT")
            pairs = [event.prev_kv, event.kv] if event.HasField("prev_kv") else [event.kv]
            lines += self._pair_lines(pairs)
        write(b"".join(line + b"\n" for line in lines))

    def lease_grant(self, response: rpc_pb2.LeaseGrantResponse) -> None:
        write_line(f"lease {response.ID:016x} granted with TTL({response.TTL}s)")

    def lease_revoke(self, lease_id: int, response: rpc_pb2.LeaseRevokeResponse) -> None:
        write_line(f"lease {lease_id:016x} revoked")

    def lease_keep_alive(self, response: rpc_pb2.LeaseKeepAliveResponse) -> None:
        write_line(f"lease {response.ID:016x} keepalived with TTL({response.TTL})")

    def lease_time_to_live(self, response: rpc_pb2.LeaseTimeToLiveResponse, *, with_keys: bool) -> None:
        if response.TTL == -1 and response.grantedTTL == 0:
            write_line(f"lease {response.ID:016x} already expired")
            return
        text = f"lease {response.ID:016x} granted with TTL({response.grantedTTL}s), remaining({response.TTL}s)"
        keys = b", attached keys([" + b" ".join(response.keys) + b"])" if with_keys else b""
        write(text.encode() + keys + b"\n")

    def lease_list(self, response: rpc_pb2.LeaseLeasesResponse) -> None:
        write_line(f"found {len(response.leases)} leases")
        for lease in response.leases:
            write_line(f"{lease.ID:016x}")

    def auth_status(self, response: rpc_pb2.AuthStatusResponse) -> None:
        write_line(f"Authentication Status: {lower(response.enabled)}")
        write_line(f"AuthRevision: {response.authRevision}")

    def user_changed(self, done: str, response: Any) -> None:
        write_line(done)

    def user_get(self, name: str, response: rpc_pb2.AuthUserGetResponse) -> None:
        write_line(f"User: {name}")
        write_line(" ".join(("Roles:", *response.roles)))

    def user_list(self, response: rpc_pb2.AuthUserListResponse) -> None:
        for name in response.users:
            write_line(name)

    def role_get(self, role: str, response: rpc_pb2.AuthRoleGetResponse) -> None:
        write_line(f"Role {role}")
        for title, mode in (("KV Read:", "READ"), ("KV Write:", "WRITE")):
            write_line(title)
            for one in response.perm:
                if mode in auth_pb2.Permission.Type.Name(one.permType):
                    write(b"\t" + _interval(one) + b"\n")

    def role_list(self, response: rpc_pb2.AuthRoleListResponse) -> None:
        for role in response.roles:
            write_line(role)

    def _rows(self, rows: list[list[str]]) -> None:
        for row in rows:
            write_line(", ".join(row))

    def _pairs(self, pairs: Iterable[kv_pb2.KeyValue]) -> None:
        write(b"".join(line + b"\n" for line in self._pair_lines(pairs)))

    def _pair_lines(self, pairs: Iterable[kv_pb2.KeyValue]) -> list[bytes]:
        lines = []
        for pair in pairs:
            if not self.value_only:
                lines.append(self._shown(pair.key))
            lines.append(self._shown(pair.value))
        return lines

    def _shown(self, data: bytes) -> bytes:
        return "".join(f"\\x{byte:02x}" for byte in data).encode() if self.hexadecimal else data


def _interval(permission: auth_pb2.Permission) -> bytes:
    key, end = permission.key, permission.range_end
    if not end:
        return key
    if end == b"\0":
        return b"[" + key + b", <open ended>"
    shown = b"[" + key + b", " + end + b")"
    return shown + b" (prefix " + key + b")" if key and prefix_end(key) == end else shown


# -- fields ---------------------------------------------------------------------------------------------------------
#
# The format for eyes and ``grep``: one field a line, names as etcdctl spells them.


class FieldsPrinter(Printer):
    """``"Name" : value`` lines; strings and bytes in Go's quotes."""

    name = "fields"

    def put(self, response: rpc_pb2.PutResponse) -> None:
        _header(response.header)
        if response.HasField("prev_kv"):
            _pair("Prev", response.prev_kv)

    def get(self, response: rpc_pb2.RangeResponse) -> None:
        _header(response.header)
        for pair in response.kvs:
            _pair("", pair)
        _field("More", lower(response.more))
        _field("Count", response.count)

    def delete(self, response: rpc_pb2.DeleteRangeResponse) -> None:
        _header(response.header)
        _field("Deleted", response.deleted)
        for pair in response.prev_kvs:
            _pair("Prev", pair)

    def txn(self, response: rpc_pb2.TxnResponse) -> None:
        _header(response.header)
        _field("Succeeded", lower(response.succeeded))
        for operation in response.responses:
            self.operation(operation)

    def alarms(self, response: rpc_pb2.AlarmResponse) -> None:
        _header(response.header)
        for alarm in response.alarms:
            _field("MemberID", alarm.memberID)
            _field("AlarmType", alarm_name(alarm.alarm))
            write_line("")

    def member_list(self, response: rpc_pb2.MemberListResponse) -> None:
        _header(response.header)
        for member in response.members:
            _field("ID", member.ID)
            _field("Name", quote(member.name))
            for url in member.peerURLs:
                _field("PeerURL", quote(url))
            for url in member.clientURLs:
                _field("ClientURL", quote(url))
            _field("IsLearner", lower(member.isLearner))
            write_line("")

    def endpoint_health(self, answers: Sequence[EndpointHealth]) -> None:
        for answer in answers:
            _field("Endpoint", quote(answer.endpoint))
            _field("Health", lower(answer.healthy))
            _field("Took", answer.took)
            _field("Error", answer.error)
            write_line("")

    def endpoint_status(self, answers: Sequence[EndpointAnswer]) -> None:
        new = printer.sends_3_6(answers)
        for answer in answers:
            _status(answer, new)

    def endpoint_hashkv(self, answers: Sequence[EndpointAnswer]) -> None:
        for answer in answers:
            _header(answer.response.header)
            _field("Endpoint", quote(answer.endpoint))
            _field("Hash", answer.response.hash)
            if answer.response.hash_revision:
                _field("HashRevision", answer.response.hash_revision)
            write_line("")

    def watch(self, answer: rpc_pb2.WatchResponse) -> None:
        _header(answer.header)
        for event in answer.events:
            _field("Type", "DELETE" if event.type else "PUT")
            if event.HasField("prev_kv"):
                _pair("Prev", event.prev_kv)
            _pair("", event.kv)

    def lease_grant(self, response: rpc_pb2.LeaseGrantResponse) -> None:
        _lease(response)

    def lease_revoke(self, lease_id: int, response: rpc_pb2.LeaseRevokeResponse) -> None:
        _header(response.header)

    def lease_keep_alive(self, response: rpc_pb2.LeaseKeepAliveResponse) -> None:
        _lease(response)

    def lease_time_to_live(self, response: rpc_pb2.LeaseTimeToLiveResponse, *, with_keys: bool) -> None:
        _lease(response)
        _field("GrantedTTL", response.grantedTTL)
        for key in response.keys:
            _field("Key", quote(key))

    def lease_list(self, response: rpc_pb2.LeaseLeasesResponse) -> None:
        _header(response.header)
        for lease in response.leases:
            _field("ID", lease.ID)

    def user_changed(self, done: str, response: Any) -> None:
        _header(response.header)

    def role_get(self, role: str, response: rpc_pb2.AuthRoleGetResponse) -> None:
        _header(response.header)
        for permission in response.perm:
            _field("PermType", f" {auth_pb2.Permission.Type.Name(permission.permType)}")
            _field("Key", quote(permission.key))
            _field("RangeEnd", quote(permission.range_end))

    def role_list(self, response: rpc_pb2.AuthRoleListResponse) -> None:
        _header(response.header)
        write_line(" ".join(('"Roles" :', *map(quote, response.roles))))


def _lease(response: Any) -> None:
    _header(response.header)
    _field("ID", response.ID)
    _field("TTL", response.TTL)


def _field(name: str, value: object) -> None:
    write_line(f'"{name}" : {value}')


def _header(header: rpc_pb2.ResponseHeader) -> None:
    _field("ClusterID", header.cluster_id)
    _field("MemberID", header.member_id)
    _field("Revision", header.revision)
    _field("RaftTerm", header.raft_term)


def _pair(prefix: str, pair: kv_pb2.KeyValue) -> None:
    _field(prefix + "Key", quote(pair.key))
    _field(prefix + "CreateRevision", pair.create_revision)
    _field(prefix + "ModRevision", pair.mod_revision)
    _field(prefix + "Version", pair.version)
    _field(prefix + "Value", quote(pair.value))
    _field(prefix + "Lease", pair.lease)


def _status(answer: EndpointAnswer, new: bool) -> None:
    status = answer.response
    _header(status.header)
    _field("Version", quote(status.version))
    if new:
        _field("StorageVersion", quote(status.storageVersion))
    _field("DBSize", status.dbSize)
    if new:
        _field("DBSizeInUse", status.dbSizeInUse)
        _field("DBSizeQuota", status.dbSizeQuota)
    _field("Leader", status.leader)
    _field("IsLearner", lower(status.isLearner))
    _field("RaftIndex", status.raftIndex)
    _field("RaftTerm", status.raftTerm)
    _field("RaftAppliedIndex", status.raftAppliedIndex)
    _field("Errors", f"[{' '.join(status.errors)}]")
    _field("Endpoint", quote(answer.endpoint))
    if new:
        _field("DowngradeTargetVersion", quote(status.downgradeInfo.targetVersion))
        _field("DowngradeEnabled", lower(status.downgradeInfo.enabled))
    write_line("")


# -- json_format ----------------------------------------------------------------------------------------------------
#
# The format for programs: what Go's ``encoding/json`` makes of etcd's messages.
#
# Owns three habits that scripts meet: numbers are numbers, even identifiers beyond 2^53; bytes are base64; fields
# with
# the zero value are left out. An operation of a transaction sits under an extra ``"Response"``, as Go shows a oneof.

# Go escapes the first five so that the text may stand in a web page, and has no short form for the last two.
_GO_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_GO_ESCAPES |= {"\\b": "\\u0008", "\\f": "\\u000c"}
_TOKEN = re.compile(r"\\.|[<>&\u2028\u2029]")
_TYPE_BYTES, _TYPE_MESSAGE = 12, 11


class JSONPrinter(Printer):
    """One line of JSON."""

    name = "json"

    def message(self, response: Any) -> None:
        write_line(encode(plain(response)))

    def member_list(self, response: rpc_pb2.MemberListResponse) -> None:
        if self.hexadecimal:
            write_line(encode(_hexadecimal_members(response)))
        else:
            self.message(response)

    def endpoint_health(self, answers: Sequence[EndpointHealth]) -> None:
        rows = []
        for answer in answers:
            row = {"endpoint": answer.endpoint, "health": answer.healthy, "took": answer.took}
            rows.append({**row, "error": answer.error} if answer.error else row)
        write_line(encode(rows))

    def endpoint_status(self, answers: Sequence[EndpointAnswer]) -> None:
        write_line(encode([{"Endpoint": a.endpoint, "Status": plain(a.response)} for a in answers]))

    def endpoint_hashkv(self, answers: Sequence[EndpointAnswer]) -> None:
        write_line(encode([{"Endpoint": a.endpoint, "HashKV": plain(a.response)} for a in answers]))

    def watch(self, answer: rpc_pb2.WatchResponse) -> None:
        made = answer.HasField("header")
        shown = {
            "Header": plain(answer.header) if made else {},
            "Events": [plain(event) for event in answer.events] if made else None,
            "CompactRevision": answer.compact_revision,
            "Canceled": answer.canceled,
            "Created": False,
        }
        write_line(encode(shown))

    # Go's structs of leases have the header's fields beside their own, and their own even if they are zero.

    def lease_grant(self, response: rpc_pb2.LeaseGrantResponse) -> None:
        row = {"ID": response.ID, "TTL": response.TTL, "Error": response.error}
        write_line(encode({**plain(response.header), **row}))

    def lease_keep_alive(self, response: rpc_pb2.LeaseKeepAliveResponse) -> None:
        write_line(encode({**plain(response.header), "ID": response.ID, "TTL": response.TTL}))

    def lease_time_to_live(self, response: rpc_pb2.LeaseTimeToLiveResponse, *, with_keys: bool) -> None:
        row: dict[str, Any] = {"id": response.ID, "ttl": response.TTL, "granted-ttl": response.grantedTTL}
        row["keys"] = [base64.b64encode(key).decode() for key in response.keys] or None
        write_line(encode({**plain(response.header), **row}))

    def lease_list(self, response: rpc_pb2.LeaseLeasesResponse) -> None:
        write_line(encode({**plain(response.header), "leases": [{"id": lease.ID} for lease in response.leases]}))


def encode(value: Any) -> str:
    """Compact JSON with Go's escapes."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return _TOKEN.sub(lambda token: _GO_ESCAPES.get(token[0], token[0]), text)


def plain(message: Any) -> dict[str, Any]:
    """Return a message as Go's struct of it: declared order, zero values left out."""
    out: dict[str, Any] = {}
    present = {field.name for field, _ in message.ListFields()}
    for field in message.DESCRIPTOR.fields:
        if field.name not in present:
            continue
        value = getattr(message, field.name)
        # Both kinds of repeated container have an ``extend``; no single value and no message of etcd's has.
        repeated = hasattr(value, "extend")
        shown: Any = [_scalar(field.type, item) for item in value] if repeated else _scalar(field.type, value)
        if field.containing_oneof is not None:
            out[field.containing_oneof.name.title()] = {field.name: shown}
        else:
            out[field.name] = shown
    return out


def _scalar(kind: int, value: Any) -> Any:
    if kind == _TYPE_MESSAGE:
        return plain(value)
    if kind == _TYPE_BYTES:
        return base64.b64encode(value).decode()
    return value


def _hexadecimal_members(response: rpc_pb2.MemberListResponse) -> dict[str, Any]:
    """Identifiers as hexadecimal text. Spelling and order are those of etcdctl 3.5, where this form is made by hand."""
    header = response.header
    members = [
        {"ID": f"{m.ID:x}", "name": m.name, "peerURLs": list(m.peerURLs), "clientURLS": list(m.clientURLs)}
        for m in response.members
    ]
    return {
        "header": {
            "cluster_id": f"{header.cluster_id:x}",
            "member_id": f"{header.member_id:x}",
            "raft_term": header.raft_term,
        },
        "members": members,
    }
