"""Answers in the five output formats of etcdctl: simple, fields, json, table, protobuf.

Also defines what a format does *not* support (exit code 4, as in etcdctl); ``make_printer`` selects a format. Keys and
values are printed byte for byte as stored, so everything is written to the binary side of standard output.

The layout is that of etcdctl 3.5. The columns that 3.6 added to ``endpoint status`` and ``endpoint hashkv`` (storage
version, size in use, quota, hash revision, ...) are shown when a member sends them, as members of version 3.6 do.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from raftkv.cli.pflag import quote
from raftkv.cli.program import BAD_FEATURE, CommandError
from raftkv.client.scope import prefix_end
from raftkv.errors import printable
from raftkv.pb import auth_pb2
from raftkv.pb.enums import alarm_name

if TYPE_CHECKING:
    from raftkv.pb import kv_pb2, rpc_pb2


@dataclass(frozen=True)
class EndpointHealth:
    """The result of ``endpoint health`` for one endpoint; ``took`` is a Go duration, ``error`` is empty if healthy."""

    endpoint: str
    healthy: bool
    took: str
    error: str = ""


@dataclass(frozen=True)
class EndpointAnswer:
    """One endpoint's answer to Status or HashKV."""

    endpoint: str
    response: Any


class Printer:
    """One output format.

    An answer is printed by the method with the name of its command; without such a method, it is printed as a message.
    A format that cannot print messages then fails: ``NAME not supported as output format``.
    """

    name = ""

    def __init__(self, *, hexadecimal: bool = False, value_only: bool = False) -> None:
        self.hexadecimal = hexadecimal
        self.value_only = value_only

    def show(self, command: str, response: Any, *facts: Any) -> None:
        """Print an answer.

        Arguments:
            command: name such as ``put`` or ``member_list``; ``done`` and ``changed`` are for answers that are only a
                text.
            response: the message, or the results of the endpoints.
            facts: facts that are not in the message.
        """
        own = getattr(self, command, None)
        if own is None:
            self.message(response)
        else:
            own(response, *facts)

    def operation(self, response: rpc_pb2.ResponseOp) -> None:
        """Print the answer to one operation of a transaction."""
        commands = {"response_put": "put", "response_range": "get", "response_delete_range": "delete"}
        if kind := response.WhichOneof("response"):
            self.show(commands[kind], getattr(response, kind))

    def message(self, response: Any) -> None:
        """Print an answer in the form of its message."""
        self.refuse()

    def refuse(self, *_: Any) -> None:
        """Raise an error: this format cannot show the answer."""
        raise CommandError(f"{self.name} not supported as output format", BAD_FEATURE)


class ProtobufPrinter(Printer):
    """The bytes of the answer, without a newline.

    For leases, etcdctl prints only the header, and for a revoked lease nothing; scripts may depend on either.
    """

    name = "protobuf"

    def message(self, response: Any) -> None:
        write(response.SerializeToString())

    def watch(self, answer: rpc_pb2.WatchResponse) -> None:
        from raftkv.pb import rpc_pb2

        response = rpc_pb2.WatchResponse(events=answer.events, compact_revision=answer.compact_revision)
        response.header.CopyFrom(answer.header)
        response.canceled = answer.canceled
        self.message(response)

    def lease_revoke(self, response: rpc_pb2.LeaseRevokeResponse, lease_id: int) -> None:
        header = response.header
        shown = f"cluster_id:{header.cluster_id} member_id:{header.member_id} revision:{header.revision}"
        text = f"marshal unsupported for type clientv3.LeaseRevokeResponse ({{{shown} raft_term:{header.raft_term} "
        raise CommandError(text + " {} [] 0})", BAD_FEATURE)

    def _header(self, response: Any, *_: Any) -> None:
        self.message(response.header)

    lease_grant = lease_keep_alive = lease_time_to_live = lease_list = _header
    endpoint_health = endpoint_status = endpoint_hashkv = Printer.refuse


class RowsPrinter(Printer):
    """A format with rows, for answers that are tables."""

    def member_list(self, response: rpc_pb2.MemberListResponse) -> None:
        rows = []
        for one in response.members:
            names = [f"{one.ID:x}", "started" if one.name else "unstarted", one.name]
            rows.append([*names, ",".join(one.peerURLs), ",".join(one.clientURLs), lower(one.isLearner)])
        self.rows(["ID", "Status", "Name", "Peer Addrs", "Client Addrs", "Is Learner"], rows)

    def endpoint_status(self, answers: Sequence[EndpointAnswer]) -> None:
        new = sends_3_6(answers)
        columns = [column for column in _STATUS_COLUMNS if new or not column[2]]
        rows = [[cell(one, one.response) for _, cell, _ in columns] for one in answers]
        self.rows([title for title, _, _ in columns], rows)

    def endpoint_hashkv(self, answers: Sequence[EndpointAnswer]) -> None:
        columns = 3 if any(answer.response.hash_revision for answer in answers) else 2
        rows = [[one.endpoint, str(one.response.hash), str(one.response.hash_revision)] for one in answers]
        self.rows(["endpoint", "hash", "hash_revision"][:columns], [row[:columns] for row in rows])

    def rows(self, header: list[str], rows: list[list[str]]) -> None:
        """Print a table."""
        raise NotImplementedError


class TablePrinter(RowsPrinter):
    """Tables with frames."""

    name = "table"

    def endpoint_health(self, answers: Sequence[EndpointHealth]) -> None:
        rows = [[each.endpoint, lower(each.healthy), each.took, printable(each.error)] for each in answers]
        self.rows(["endpoint", "health", "took", "error"], rows)

    def rows(self, header: list[str], rows: list[list[str]]) -> None:
        from raftkv.cli import table

        write_line(table.render(header, rows))


def write(data: bytes) -> None:
    """Write bytes to standard output, after all text printed before."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def write_line(text: str) -> None:
    """Write a line to standard output; surrogate escapes are written as the bytes that they represent."""
    write(text.encode("utf-8", "surrogateescape") + b"\n")


def lower(value: bool) -> str:
    """Return a boolean as etcd prints it, in lower case."""
    return "true" if value else "false"


def human_size(size_bytes: int) -> str:
    """Return a size in decimal units: ``20 kB``, ``1.5 MB``."""
    if size_bytes < 10:
        return f"{size_bytes} B"
    units = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
    exponent = (len(str(size_bytes)) - 1) // 3
    tenths = int(size_bytes / 1000**exponent * 10 + 0.5)
    value = f"{tenths / 10:.1f}" if tenths < 100 else f"{tenths / 10:.0f}"
    return f"{value} {units[exponent]}"


def role_of(status: rpc_pb2.StatusResponse) -> str:
    """Return the role of a member from its status: leader, follower, learner or candidate."""
    if status.isLearner:
        return "learner"
    if not status.leader:
        return "candidate"
    return "leader" if status.leader == status.header.member_id else "follower"


def sends_3_6(answers: Sequence[EndpointAnswer]) -> bool:
    """Return whether a member sent fields that members of 3.6 send and members of 3.5 do not."""
    return any(answer.response.storageVersion or answer.response.dbSizeQuota for answer in answers)


def _unused(status: rpc_pb2.StatusResponse) -> str:
    return f"{100 - status.dbSizeInUse * 100 // status.dbSize if status.dbSize else 0}%"


_STATUS_COLUMNS: Final[tuple[tuple[str, Callable[[EndpointAnswer, rpc_pb2.StatusResponse], str], bool], ...]] = (
    ("endpoint", lambda answer, status: answer.endpoint, False),
    ("ID", lambda answer, status: f"{status.header.member_id:x}", False),
    ("version", lambda answer, status: status.version, False),
    ("storage version", lambda answer, status: status.storageVersion, True),
    ("db size", lambda answer, status: human_size(status.dbSize), False),
    ("in use", lambda answer, status: human_size(status.dbSizeInUse), True),
    ("percentage not in use", lambda answer, status: _unused(status), True),
    ("quota", lambda answer, status: human_size(status.dbSizeQuota), True),
    ("is leader", lambda answer, status: lower(status.leader == status.header.member_id), False),
    ("is learner", lambda answer, status: lower(status.isLearner), False),
    ("raft term", lambda answer, status: str(status.raftTerm), False),
    ("raft index", lambda answer, status: str(status.raftIndex), False),
    ("raft applied index", lambda answer, status: str(status.raftAppliedIndex), False),
    ("errors", lambda answer, status: ", ".join(status.errors), False),
    ("downgrade target version", lambda answer, status: status.downgradeInfo.targetVersion, True),
    ("downgrade enabled", lambda answer, status: lower(status.downgradeInfo.enabled), True),
)
"""Each column with its cell, and whether only members of 3.6 send the field."""


class SimplePrinter(RowsPrinter):
    """Keys and values without encoding (or in hexadecimal); rows separated by commas."""

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

    def done(self, response: Any, text: str) -> None:
        write_line(text)

    changed = done

    def member_add(self, response: rpc_pb2.MemberAddResponse, name: str, urls: str) -> None:
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

    def endpoint_health(self, answers: Sequence[EndpointHealth]) -> None:
        for answer in answers:
            if answer.error:
                text = f"{answer.endpoint} is unhealthy: failed to commit proposal: {printable(answer.error)}"
                print(text, file=sys.stderr)
            else:
                text = f"{answer.endpoint} is healthy: successfully committed proposal: took = {answer.took}"
                write_line(text)

    def watch(self, answer: rpc_pb2.WatchResponse) -> None:
        lines = []
        for event in answer.events:
            lines.append(b"DELETE" if event.type else b"PUT")
            pairs = [event.prev_kv, event.kv] if event.HasField("prev_kv") else [event.kv]
            lines += self._pair_lines(pairs)
        write(b"".join(line + b"\n" for line in lines))

    def lease_grant(self, response: rpc_pb2.LeaseGrantResponse) -> None:
        write_line(f"lease {response.ID:016x} granted with TTL({response.TTL}s)")

    def lease_revoke(self, response: rpc_pb2.LeaseRevokeResponse, lease_id: int) -> None:
        write_line(f"lease {lease_id:016x} revoked")

    def lease_keep_alive(self, response: rpc_pb2.LeaseKeepAliveResponse) -> None:
        write_line(f"lease {response.ID:016x} keepalived with TTL({response.TTL})")

    def lease_time_to_live(self, response: rpc_pb2.LeaseTimeToLiveResponse, with_keys: bool) -> None:
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

    def user_get(self, response: rpc_pb2.AuthUserGetResponse, name: str) -> None:
        write_line(f"User: {name}")
        write_line(" ".join(("Roles:", *response.roles)))

    def user_list(self, response: rpc_pb2.AuthUserListResponse) -> None:
        for name in response.users:
            write_line(name)

    def role_get(self, response: rpc_pb2.AuthRoleGetResponse, role: str) -> None:
        write_line(f"Role {role}")
        for title, mode in (("KV Read:", "READ"), ("KV Write:", "WRITE")):
            write_line(title)
            for one in response.perm:
                if mode in auth_pb2.Permission.Type.Name(one.permType):
                    write(b"\t" + _interval(one) + b"\n")

    def role_list(self, response: rpc_pb2.AuthRoleListResponse) -> None:
        for role in response.roles:
            write_line(role)

    def rows(self, header: list[str], rows: list[list[str]]) -> None:
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
# The format for people and ``grep``: one field per line, with etcdctl's names.


class FieldsPrinter(Printer):
    """``"Name" : value`` lines; strings and bytes in Go's quotes."""

    name = "fields"

    def put(self, response: rpc_pb2.PutResponse) -> None:
        _header(response)
        if response.HasField("prev_kv"):
            _pair("Prev", response.prev_kv)

    def get(self, response: rpc_pb2.RangeResponse) -> None:
        _header(response)
        for pair in response.kvs:
            _pair("", pair)
        _fields(More=response.more, Count=response.count)

    def delete(self, response: rpc_pb2.DeleteRangeResponse) -> None:
        _header(response, Deleted=response.deleted)
        for pair in response.prev_kvs:
            _pair("Prev", pair)

    def txn(self, response: rpc_pb2.TxnResponse) -> None:
        _header(response, Succeeded=response.succeeded)
        for operation in response.responses:
            self.operation(operation)

    def alarms(self, response: rpc_pb2.AlarmResponse) -> None:
        _header(response)
        for alarm in response.alarms:
            _fields(MemberID=alarm.memberID, AlarmType=alarm_name(alarm.alarm))
            write_line("")

    def member_list(self, response: rpc_pb2.MemberListResponse) -> None:
        _header(response)
        for member in response.members:
            _fields(ID=member.ID, Name=quote(member.name))
            for url in member.peerURLs:
                _fields(PeerURL=quote(url))
            for url in member.clientURLs:
                _fields(ClientURL=quote(url))
            _fields(IsLearner=member.isLearner)
            write_line("")

    def endpoint_health(self, answers: Sequence[EndpointHealth]) -> None:
        for answer in answers:
            found = {"Health": answer.healthy, "Took": answer.took, "Error": answer.error}
            _fields(Endpoint=quote(answer.endpoint), **found)
            write_line("")

    def endpoint_status(self, answers: Sequence[EndpointAnswer]) -> None:
        new = sends_3_6(answers)
        for answer in answers:
            _status(answer, new)

    def endpoint_hashkv(self, answers: Sequence[EndpointAnswer]) -> None:
        for answer in answers:
            found = answer.response
            _header(found, Endpoint=quote(answer.endpoint), Hash=found.hash)
            if found.hash_revision:
                _fields(HashRevision=found.hash_revision)
            write_line("")

    def watch(self, answer: rpc_pb2.WatchResponse) -> None:
        _header(answer)
        for event in answer.events:
            _fields(Type="DELETE" if event.type else "PUT")
            if event.HasField("prev_kv"):
                _pair("Prev", event.prev_kv)
            _pair("", event.kv)

    def lease_grant(self, response: Any) -> None:
        _header(response, ID=response.ID, TTL=response.TTL)

    lease_keep_alive = lease_grant

    def lease_time_to_live(self, response: rpc_pb2.LeaseTimeToLiveResponse, with_keys: bool) -> None:
        _header(response, ID=response.ID, TTL=response.TTL, GrantedTTL=response.grantedTTL)
        for key in response.keys:
            _fields(Key=key)

    def lease_list(self, response: rpc_pb2.LeaseLeasesResponse) -> None:
        _header(response)
        for lease in response.leases:
            _fields(ID=lease.ID)

    def changed(self, response: Any, _: Any) -> None:
        _header(response)

    lease_revoke = changed

    def role_get(self, response: rpc_pb2.AuthRoleGetResponse, role: str) -> None:
        _header(response)
        for one in response.perm:
            kind = auth_pb2.Permission.Type.Name(one.permType)
            _fields(PermType=f" {kind}", Key=one.key, RangeEnd=one.range_end)

    def role_list(self, response: rpc_pb2.AuthRoleListResponse) -> None:
        _header(response)
        write_line(" ".join(('"Roles" :', *map(quote, response.roles))))


def _fields(**values: object) -> None:
    """Print a line for each value; bytes in quotes, text unquoted."""
    for name, value in values.items():
        shown = quote(value) if isinstance(value, bytes) else lower(value) if isinstance(value, bool) else value
        write_line(f'"{name}" : {shown}')


def _header(response: Any, **values: object) -> None:
    """Print the header of an answer, and further values."""
    one = response.header
    _fields(ClusterID=one.cluster_id, MemberID=one.member_id, Revision=one.revision, RaftTerm=one.raft_term, **values)


def _pair(prefix: str, pair: kv_pb2.KeyValue) -> None:
    found = {"Key": pair.key, "CreateRevision": pair.create_revision, "ModRevision": pair.mod_revision}
    found |= {"Version": pair.version, "Value": pair.value, "Lease": pair.lease}
    _fields(**{prefix + name: value for name, value in found.items()})


def _status(answer: EndpointAnswer, new: bool) -> None:
    status = answer.response
    storage = {"StorageVersion": quote(status.storageVersion)} if new else {}
    sizes = {"DBSizeInUse": status.dbSizeInUse, "DBSizeQuota": status.dbSizeQuota} if new else {}
    _header(status, Version=quote(status.version), **storage, DBSize=status.dbSize, **sizes)
    term = {} if new else {"RaftTerm": status.raftTerm}  # 3.6.15, 3.7.2 and later: only in the header
    _fields(Leader=status.leader, IsLearner=status.isLearner, RaftIndex=status.raftIndex, **term)
    errors = f"[{' '.join(status.errors)}]"
    _fields(RaftAppliedIndex=status.raftAppliedIndex, Errors=errors, Endpoint=quote(answer.endpoint))
    if new:
        goal = status.downgradeInfo
        _fields(DowngradeTargetVersion=quote(goal.targetVersion), DowngradeEnabled=goal.enabled)
    write_line("")


# -- json_format ----------------------------------------------------------------------------------------------------
#
# The format for programs: etcd's messages as Go's ``encoding/json`` encodes them.
#
# Three properties that scripts depend on: numbers are numbers, even identifiers beyond 2^53; bytes are base64; fields
# with the zero value are left out. An operation of a transaction is nested in an extra ``"Response"``, which is Go's
# form of a oneof.

# Go escapes these so that the text can be embedded in a web page; the last two also have no short form.
_GO_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_GO_ESCAPES |= {"\\b": "\\u0008", "\\f": "\\u000c"}
_TOKEN = re.compile(r"\\.|[<>&\u2028\u2029]")
_TYPE_BYTES, _TYPE_MESSAGE = 12, 11
_IDS: Final = {"cluster_id", "member_id", "ID"}
"""Fields that ``--hex`` shows in hexadecimal after a change of members, as in etcdctl 3.7."""


class JSONPrinter(Printer):
    """One line of JSON."""

    name = "json"

    def message(self, response: Any) -> None:
        shown = plain(response)
        if self.hexadecimal and "members" in shown:
            for record in (shown["header"], shown.get("member", {}), *shown["members"]):
                record.update({name: f"{record[name]:x}" for name in _IDS.intersection(record)})
        write_line(encode(shown))

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

    # Go's structs for leases contain the header's fields beside their own, which are printed even if they are zero.

    def lease_grant(self, response: rpc_pb2.LeaseGrantResponse) -> None:
        row = {"ID": response.ID, "TTL": response.TTL, "Error": response.error}
        write_line(encode({**plain(response.header), **row}))

    def lease_keep_alive(self, response: rpc_pb2.LeaseKeepAliveResponse) -> None:
        write_line(encode({**plain(response.header), "ID": response.ID, "TTL": response.TTL}))

    def lease_time_to_live(self, response: rpc_pb2.LeaseTimeToLiveResponse, with_keys: bool) -> None:
        row: dict[str, Any] = {"id": response.ID, "ttl": response.TTL, "granted-ttl": response.grantedTTL}
        row["keys"] = [base64.b64encode(key).decode() for key in response.keys] or None
        write_line(encode({**plain(response.header), **row}))

    def lease_list(self, response: rpc_pb2.LeaseLeasesResponse) -> None:
        write_line(encode({**plain(response.header), "leases": [{"id": lease.ID} for lease in response.leases]}))


def encode(value: Any) -> str:
    """Return compact JSON with Go's escapes."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return _TOKEN.sub(lambda token: _GO_ESCAPES.get(token[0], token[0]), text)


def plain(message: Any) -> dict[str, Any]:
    """Return a message in the form of its Go struct: fields in declared order, without zero values."""
    out: dict[str, Any] = {}
    present = {field.name for field, _ in message.ListFields()}
    for field in message.DESCRIPTOR.fields:
        if field.name not in present:
            continue
        value = getattr(message, field.name)
        # Both kinds of repeated container have ``extend``; scalar values and etcd's messages do not.
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
    """Return identifiers in hexadecimal, in the spelling and order of etcdctl 3.5, which builds this form by hand."""
    head = response.header
    members = [
        {"ID": f"{m.ID:x}", "name": m.name, "peerURLs": list(m.peerURLs), "clientURLS": list(m.clientURLs)}
        for m in response.members
    ]
    ids = {"cluster_id": f"{head.cluster_id:x}", "member_id": f"{head.member_id:x}"}
    return {"header": {**ids, "raft_term": head.raft_term}, "members": members}


_KINDS = {kind.name: kind for kind in (SimplePrinter, FieldsPrinter, JSONPrinter, ProtobufPrinter, TablePrinter)}


def make_printer(name: str, *, hexadecimal: bool = False, value_only: bool = False) -> Printer:
    """Return the printer for ``--write-out NAME``.

    Arguments:
        name: name of the format.
        hexadecimal: whether to print keys and values in hexadecimal.
        value_only: whether to print values without their keys.

    Raises:
        CommandError: the format does not exist.
    """
    if name not in _KINDS:
        raise CommandError("unsupported output format", BAD_FEATURE)
    return _KINDS[name](hexadecimal=hexadecimal, value_only=value_only)
