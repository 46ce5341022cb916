"""Answers in the five output formats of etcdctl: simple, fields, json, table, protobuf.

Owns what a format does *not* have (exit code 4, as etcdctl); the formats are in ``output.simple``, ``output.fields``,
``output.json_format`` and here; ``make_printer`` chooses one, and imports it then. Bytes matter: keys and values are
printed as they are stored, so everything is written to the binary side of standard output.

The layout is that of etcdctl 3.5. The columns that 3.6 added to ``endpoint status`` and ``endpoint hashkv`` (storage
version, size in use, quota, hash revision, ...) are shown when a member sends them, which members of 3.6 do.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raftkv.cli.program import BAD_FEATURE, CommandError

if TYPE_CHECKING:
    from raftkv.pb import rpc_pb2


@dataclass(frozen=True)
class EndpointHealth:
    """What ``endpoint health`` found at one endpoint; ``took`` is a Go duration, ``error`` empty if healthy."""

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
    """One format. A method that a format does not override refuses: ``NAME not supported as output format``."""

    name = ""

    def __init__(self, *, hexadecimal: bool = False, value_only: bool = False) -> None:
        self.hexadecimal = hexadecimal
        self.value_only = value_only

    def put(self, response: rpc_pb2.PutResponse) -> None:
        """Print the answer to Put."""
        self.message(response)

    def get(self, response: rpc_pb2.RangeResponse) -> None:
        """Print the answer to Range."""
        self.message(response)

    def delete(self, response: rpc_pb2.DeleteRangeResponse) -> None:
        """Print the answer to DeleteRange."""
        self.message(response)

    def txn(self, response: rpc_pb2.TxnResponse) -> None:
        """Print the answer to Txn."""
        self.message(response)

    def operation(self, response: rpc_pb2.ResponseOp) -> None:
        """Print the answer to one operation of a transaction."""
        kind = response.WhichOneof("response")
        if kind == "response_put":
            self.put(response.response_put)
        elif kind == "response_range":
            self.get(response.response_range)
        elif kind == "response_delete_range":
            self.delete(response.response_delete_range)

    def alarms(self, response: rpc_pb2.AlarmResponse) -> None:
        """Print alarms."""
        self.message(response)

    def member_list(self, response: rpc_pb2.MemberListResponse) -> None:
        """Print the members."""
        self.message(response)

    def member_add(self, name: str, urls: str, response: rpc_pb2.MemberAddResponse) -> None:
        """Print a member that was added: ``name`` and ``urls`` are those of the command."""
        self.message(response)

    def member_changed(self, member_id: int, done: str, response: Any) -> None:
        """Print that something was done to a member: ``done`` is removed from, updated in or promoted in."""
        self.message(response)

    def move_leader(self, leader: int, target: int, response: rpc_pb2.MoveLeaderResponse) -> None:
        """Print that leadership has moved."""
        self.message(response)

    def downgrade(self, action: str, response: rpc_pb2.DowngradeResponse) -> None:
        """Print what became of a downgrade request: ``action`` is validate, enable or cancel."""
        self.message(response)

    def endpoint_health(self, answers: Sequence[EndpointHealth]) -> None:
        """Print the health of endpoints."""
        self.refuse()

    def endpoint_status(self, answers: Sequence[EndpointAnswer]) -> None:
        """Print the status of endpoints."""
        self.refuse()

    def endpoint_hashkv(self, answers: Sequence[EndpointAnswer]) -> None:
        """Print the history hashes of endpoints."""
        self.refuse()

    def watch(self, answer: rpc_pb2.WatchResponse) -> None:
        """Print what a watch got; without a header if the member refused it before it was made."""
        self.refuse()

    def lease_grant(self, response: rpc_pb2.LeaseGrantResponse) -> None:
        """Print a new lease."""
        self.refuse()

    def lease_revoke(self, lease_id: int, response: rpc_pb2.LeaseRevokeResponse) -> None:
        """Print that a lease is gone."""
        self.message(response)

    def lease_keep_alive(self, response: rpc_pb2.LeaseKeepAliveResponse) -> None:
        """Print a renewal."""
        self.refuse()

    def lease_time_to_live(self, response: rpc_pb2.LeaseTimeToLiveResponse, *, with_keys: bool) -> None:
        """Print what is left of a lease."""
        self.refuse()

    def lease_list(self, response: rpc_pb2.LeaseLeasesResponse) -> None:
        """Print the leases."""
        self.refuse()

    def auth_status(self, response: rpc_pb2.AuthStatusResponse) -> None:
        """Print whether users are asked for."""
        self.message(response)

    def user_changed(self, done: str, response: Any) -> None:
        """Print that a user or a role was changed: ``done`` says how."""
        self.message(response)

    def user_get(self, name: str, response: rpc_pb2.AuthUserGetResponse) -> None:
        """Print the roles of a user."""
        self.message(response)

    def user_list(self, response: rpc_pb2.AuthUserListResponse) -> None:
        """Print the names of users."""
        self.message(response)

    def role_get(self, role: str, response: rpc_pb2.AuthRoleGetResponse) -> None:
        """Print what a role may do."""
        self.message(response)

    def role_list(self, response: rpc_pb2.AuthRoleListResponse) -> None:
        """Print the names of roles."""
        self.message(response)

    def message(self, response: Any) -> None:
        """Print an answer as the message it is."""
        self.refuse()

    def refuse(self) -> None:
        """End the command: this format cannot show the answer."""
        raise CommandError(f"{self.name} not supported as output format", BAD_FEATURE)


class ProtobufPrinter(Printer):
    """The bytes of the answer, without a line end.

    Of leases etcdctl prints the header alone, and it has no bytes at all for a revoked one: scripts may rely on either.
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

    def lease_grant(self, response: rpc_pb2.LeaseGrantResponse) -> None:
        self.message(response.header)

    def lease_revoke(self, lease_id: int, response: rpc_pb2.LeaseRevokeResponse) -> None:
        header = response.header
        shown = f"cluster_id:{header.cluster_id} member_id:{header.member_id} revision:{header.revision}"
        text = f"marshal unsupported for type clientv3.LeaseRevokeResponse ({{{shown} raft_term:{header.raft_term} "
        raise CommandError(text + " {} [] 0})", BAD_FEATURE)

    def lease_keep_alive(self, response: rpc_pb2.LeaseKeepAliveResponse) -> None:
        self.message(response.header)

    def lease_time_to_live(self, response: rpc_pb2.LeaseTimeToLiveResponse, *, with_keys: bool) -> None:
        self.message(response.header)

    def lease_list(self, response: rpc_pb2.LeaseLeasesResponse) -> None:
        self.message(response.header)


class TablePrinter(Printer):
    """Frames, for the answers that are tables."""

    name = "table"

    def member_list(self, response: rpc_pb2.MemberListResponse) -> None:
        self._table(*member_rows(response))

    def endpoint_health(self, answers: Sequence[EndpointHealth]) -> None:
        self._table(*health_rows(answers))

    def endpoint_status(self, answers: Sequence[EndpointAnswer]) -> None:
        self._table(*status_rows(answers))

    def endpoint_hashkv(self, answers: Sequence[EndpointAnswer]) -> None:
        self._table(*hashkv_rows(answers))

    def _table(self, header: list[str], rows: list[list[str]]) -> None:
        from raftkv.cli.output import table

        write_line(table.render(header, rows))


def write(data: bytes) -> None:
    """Write bytes to standard output, after the text that was printed before."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def write_line(text: str) -> None:
    """Write a line to standard output; text with surrogate escapes becomes the bytes that it stands for."""
    write(text.encode("utf-8", "surrogateescape") + b"\n")


def lower(value: bool) -> str:
    """Return a boolean as etcd prints it."""
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
    """Return the role of a member by its status: leader, follower, learner or candidate."""
    if status.isLearner:
        return "learner"
    if not status.leader:
        return "candidate"
    return "leader" if status.leader == status.header.member_id else "follower"


def member_rows(response: rpc_pb2.MemberListResponse) -> tuple[list[str], list[list[str]]]:
    """Header and rows of ``member list``."""
    header = ["ID", "Status", "Name", "Peer Addrs", "Client Addrs", "Is Learner"]
    return header, [
        [
            f"{member.ID:x}",
            "started" if member.name else "unstarted",
            member.name,
            ",".join(member.peerURLs),
            ",".join(member.clientURLs),
            lower(member.isLearner),
        ]
        for member in response.members
    ]


def health_rows(answers: Sequence[EndpointHealth]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of ``endpoint health``."""
    header = ["endpoint", "health", "took", "error"]
    return header, [[answer.endpoint, lower(answer.healthy), answer.took, answer.error] for answer in answers]


def sends_3_6(answers: Sequence[EndpointAnswer]) -> bool:
    """Tell if a member sent what members of 3.6 send and members of 3.5 do not."""
    return any(answer.response.storageVersion or answer.response.dbSizeQuota for answer in answers)


def status_rows(answers: Sequence[EndpointAnswer]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of ``endpoint status``."""
    new = sends_3_6(answers)
    header = ["endpoint", "ID", "version"]
    header += ["storage version", "db size", "in use", "percentage not in use", "quota"] if new else ["db size"]
    header += ["is leader", "is learner", "raft term", "raft index", "raft applied index", "errors"]
    header += ["downgrade target version", "downgrade enabled"] if new else []
    return header, [_status_row(answer, new) for answer in answers]


def _status_row(answer: EndpointAnswer, new: bool) -> list[str]:
    status = answer.response
    unused = 100 - status.dbSizeInUse * 100 // status.dbSize if status.dbSize else 0
    size = human_size(status.dbSize)
    sizes = [human_size(status.dbSizeInUse), f"{unused}%", human_size(status.dbSizeQuota)]
    return [
        answer.endpoint,
        f"{status.header.member_id:x}",
        status.version,
        *([status.storageVersion, size, *sizes] if new else [size]),
        lower(status.leader == status.header.member_id),
        lower(status.isLearner),
        str(status.raftTerm),
        str(status.raftIndex),
        str(status.raftAppliedIndex),
        ", ".join(status.errors),
        *([status.downgradeInfo.targetVersion, lower(status.downgradeInfo.enabled)] if new else []),
    ]


def hashkv_rows(answers: Sequence[EndpointAnswer]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of ``endpoint hashkv``."""
    new = any(answer.response.hash_revision for answer in answers)
    header = ["endpoint", "hash", *(["hash_revision"] if new else [])]
    return header, [
        [
            answer.endpoint,
            str(answer.response.hash),
            *([str(answer.response.hash_revision)] if new else []),
        ]
        for answer in answers
    ]


def make_printer(name: str, *, hexadecimal: bool = False, value_only: bool = False) -> Printer:
    """Return the printer for ``--write-out NAME``.

    Arguments:
        name: of the format.
        hexadecimal: keys and values in hexadecimal.
        value_only: values without their keys.

    Raises:
        CommandError: there is no such format.
    """
    kinds: dict[str, type[Printer]] = {"protobuf": ProtobufPrinter, "table": TablePrinter}
    if name == "simple":
        from raftkv.cli.output.simple import SimplePrinter

        kinds[name] = SimplePrinter
    elif name == "fields":
        from raftkv.cli.output.simple import FieldsPrinter

        kinds[name] = FieldsPrinter
    elif name == "json":
        from raftkv.cli.output.simple import JSONPrinter

        kinds[name] = JSONPrinter
    if name not in kinds:
        raise CommandError("unsupported output format", BAD_FEATURE)
    return kinds[name](hexadecimal=hexadecimal, value_only=value_only)
