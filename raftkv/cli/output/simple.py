"""The default format: what a person wants to see, one thing a line."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from raftkv.cli.goflags.values import quote
from raftkv.cli.output import printer
from raftkv.cli.output.printer import EndpointAnswer, EndpointHealth, Printer, lower, write, write_line
from raftkv.client.scope import prefix_end
from raftkv.pb import auth_pb2
from raftkv.pb.enums import alarm_name

if TYPE_CHECKING:
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
