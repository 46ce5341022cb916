"""The format for eyes and ``grep``: one field a line, names as etcdctl spells them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from raftkv.cli.goflags.values import quote
from raftkv.cli.output import printer
from raftkv.cli.output.printer import EndpointAnswer, EndpointHealth, Printer, lower, write_line
from raftkv.pb import auth_pb2
from raftkv.pb.enums import alarm_name

if TYPE_CHECKING:
    from typing import Any

    from raftkv.pb import kv_pb2, rpc_pb2


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
