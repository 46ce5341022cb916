"""``member`` and ``endpoint``, with the words and exit codes of etcdctl, and ``member replace``."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from raftkv import cluster_id
from raftkv.cli import pflag
from raftkv.cli.command import Invocation
from raftkv.cli.ctl.kv import is_serializable
from raftkv.cli.ctl.session import REFUSED_PATIENCE_S, Session, failed, open_session, remark
from raftkv.cli.printer import EndpointAnswer, EndpointHealth
from raftkv.cli.program import BAD_ARGUMENTS, ERROR, CommandError, refused
from raftkv.client import Client, Method
from raftkv.client.errors import EndpointsFailed
from raftkv.client.rpc import methods
from raftkv.errors import (
    PERMISSION_DENIED,
    ConfigError,
    StatusError,
    printable,
)
from raftkv.pb import admin_pb2, rpc_pb2

if TYPE_CHECKING:
    from google.protobuf.message import Message

M = TypeVar("M", bound="Message")


def member_list(invocation: Invocation) -> None:
    """Print the members of the cluster."""
    request = rpc_pb2.MemberListRequest(linearizable=not is_serializable(invocation))
    open_session(invocation).show("member_list", methods.MEMBER_LIST, request)


def member_add(invocation: Invocation) -> None:
    """Add a member, and print the settings to start it with."""
    if not invocation.arguments:
        raise CommandError("member name not provided", BAD_ARGUMENTS)
    if len(invocation.arguments) > 1:
        raise CommandError("too many arguments", BAD_ARGUMENTS)
    urls = _peer_urls(invocation)
    request = rpc_pb2.MemberAddRequest(peerURLs=urls, isLearner=invocation["learner"])
    session = open_session(invocation)
    answer = session.call(methods.MEMBER_ADD, request)
    session.printer.show("member_add", answer, invocation.arguments[0], invocation["peer-urls"])


def member_remove(invocation: Invocation) -> None:
    """Remove a member."""
    member_id = _member_id(invocation)
    _change(invocation, methods.MEMBER_REMOVE, rpc_pb2.MemberRemoveRequest(ID=member_id), "removed from")


def member_update(invocation: Invocation) -> None:
    """Change a member's peer URLs."""
    member_id = _member_id(invocation)
    request = rpc_pb2.MemberUpdateRequest(ID=member_id, peerURLs=_peer_urls(invocation))
    _change(invocation, methods.MEMBER_UPDATE, request, "updated in")


def member_promote(invocation: Invocation) -> None:
    """Promote a learner to a voter."""
    member_id = _member_id(invocation)
    _change(invocation, methods.MEMBER_PROMOTE, rpc_pb2.MemberPromoteRequest(ID=member_id), "promoted in")


def member_replace(invocation: Invocation) -> None:
    """Replace a voter with a learner."""
    if len(invocation.arguments) != 2:
        raise CommandError(
            "member replace needs two IDs: the voter that goes and the learner that comes", BAD_ARGUMENTS
        )
    old_id, new_id = map(_parsed_id, invocation.arguments)
    request = admin_pb2.MemberReplaceRequest(old_id=old_id, new_id=new_id)
    session = open_session(invocation)
    answer = session.call(methods.MEMBER_REPLACE, request)
    _print_done(session, old_id, f"replaced by {new_id:16x} in", answer)


def with_urls(members: Iterable[rpc_pb2.Member], urls: Iterable[str]) -> rpc_pb2.Member | None:
    """Return the member with exactly these peer URLs, in any spelling, or None."""
    wanted = set(map(cluster_id.comparable, urls))
    return next((member for member in members if set(map(cluster_id.comparable, member.peerURLs)) == wanted), None)


def _change(invocation: Invocation, method: Method[Any], request: Any, done: str) -> None:
    session = open_session(invocation)
    _print_done(session, request.ID, done, session.call(method, request))


def _print_done(session: Session, member_id: int, done: str, answer: Any) -> None:
    session.printer.show("done", answer, f"Member {member_id:16x} {done} cluster {answer.header.cluster_id:16x}")


def _member_id(invocation: Invocation) -> int:
    return _parsed_id(invocation.argument("member ID is not provided"))


def _parsed_id(text: str) -> int:
    with refused(ValueError, BAD_ARGUMENTS, "bad member ID arg ({}), expecting ID in Hex"):
        return pflag.parse_int(text, base=16, signed=False)


def _peer_urls(invocation: Invocation) -> list[str]:
    text = invocation["peer-urls"]
    if not text:
        raise CommandError("member peer urls not provided", BAD_ARGUMENTS)
    with refused(ConfigError):
        cluster_id.parse_urls(text)
    return list(text.split(","))


# -- endpoint -------------------------------------------------------------------------------------------------------
#
# Commands that query each endpoint separately: an endpoint that does not answer is reported on standard error, the
# others are printed, and the exit code is 1.

_ALARM_NAMES = {rpc_pb2.NOSPACE: "NOSPACE", rpc_pb2.CORRUPT: "CORRUPT"}


def endpoint_status(invocation: Invocation) -> None:
    """Print the status of every endpoint."""
    session = open_session(invocation, refused_patience_s=REFUSED_PATIENCE_S)
    failure = "Failed to get the status of endpoint {}"
    answers, errors = ask_each(session, invocation, methods.STATUS, rpc_pb2.StatusRequest(), failure)
    session.printer.show("endpoint_status", answers)
    if errors:
        raise CommandError("", ERROR)


def endpoint_hashkv(invocation: Invocation) -> None:
    """Print the history hash of every endpoint."""
    session = open_session(invocation, refused_patience_s=REFUSED_PATIENCE_S)
    request = rpc_pb2.HashKVRequest(revision=invocation["rev"])
    failure = "Failed to get the hash of endpoint {}"
    answers, errors = ask_each(session, invocation, methods.HASH_KV, request, failure)
    session.printer.show("endpoint_hashkv", answers)
    if errors:
        raise CommandError(errors[-1], ERROR)


def endpoint_health(invocation: Invocation) -> None:
    """Print for every endpoint whether it can commit, and its active alarms."""
    session = open_session(invocation, refused_patience_s=REFUSED_PATIENCE_S)
    endpoints = endpoints_of(session, invocation)
    details: list[str] = []

    async def check_all() -> list[EndpointHealth]:
        return list(await asyncio.gather(*(_check_health(session, endpoint, details) for endpoint in endpoints)))

    answers = asyncio.run(check_all())
    session.printer.show("endpoint_health", answers)
    if any(answer.error for answer in answers):
        raise CommandError("unhealthy cluster", ERROR, sorted(details))


def endpoints_of(session: Session, invocation: Invocation) -> list[str]:
    """Return the endpoints of the command, or with ``--cluster`` those on the cluster's member list.

    Without a quorum, the list is that of one member, and a note says so.

    Raises:
        CommandError: the member list could not be read.
    """
    if not invocation["cluster"]:
        return session.endpoints
    try:
        members = session.call(methods.MEMBER_LIST, rpc_pb2.MemberListRequest(linearizable=True))
    except CommandError as error:
        try:
            members = session.call(methods.MEMBER_LIST, rpc_pb2.MemberListRequest(linearizable=False))
        except CommandError:
            text = f"failed to fetch endpoints from etcd cluster member list: {error}"
            raise CommandError(text, ERROR, error.details) from None
        remark(f"no quorum confirms the list of members ({error}): it is that of one member")
    return [url for member in members.members for url in member.clientURLs]


def ask_each(
    session: Session,
    invocation: Invocation,
    method: Method[Any],
    request: Any,
    failure: str,
    *,
    in_turn: Callable[[str], None] | None = None,
) -> tuple[list[EndpointAnswer], list[str]]:
    """Call all endpoints concurrently, and return the outcomes in order; report failures on standard error.

    Arguments:
        session, invocation: session and command line.
        method, request: method and request message.
        failure: text of a failure, with ``{}`` for the endpoint.
        in_turn: called with each answering endpoint, and makes the calls sequential; unreachable endpoints are still
            detected concurrently. None: all calls are concurrent.

    Returns:
        The answers, and the errors.
    """
    found: list[EndpointAnswer] = []
    errors: list[str] = []
    endpoints = endpoints_of(session, invocation)

    async def ask(client: Client) -> None:
        # Any endpoint can give the token; otherwise all calls would wait for a dead one.
        await client.fetch_token(session.timeout_s)
        probe, question = (methods.STATUS, rpc_pb2.StatusRequest()) if in_turn else (method, request)
        answers = await asyncio.gather(
            *(outcome(client, endpoint, probe, question, session.timeout_s) for endpoint in endpoints)
        )
        for endpoint, answer in zip(endpoints, answers, strict=True):
            if in_turn and not isinstance(answer, EndpointsFailed):
                answer = await outcome(client, endpoint, method, request, session.timeout_s)
            if isinstance(answer, StatusError | ConfigError):
                errors.append(str(answer))
                print(f"{failure.format(endpoint)} ({printable(str(answer))})", file=sys.stderr)
                for line in details_of(answer):
                    remark(line)
            else:
                found.append(EndpointAnswer(endpoint, answer))
                if in_turn:
                    in_turn(endpoint)

    session.run(ask)
    return found, errors


async def outcome(
    client: Client, endpoint: str, method: Method[M], request: Any, timeout_s: float
) -> M | StatusError | ConfigError:
    """Call one endpoint; return its answer, or the error.

    Arguments:
        client, endpoint, method, request, timeout_s: as for ``Client.call_at``.
    """
    try:
        return await client.call_at(endpoint, method, request, timeout_s=timeout_s)
    except (StatusError, ConfigError) as error:
        return error


async def find_leader(
    client: Client, endpoints: Sequence[str], timeout_s: float
) -> tuple[str, rpc_pb2.StatusResponse] | None:
    """Ask all endpoints concurrently until one answers that it is leader; return it and its answer, or None.

    Arguments:
        client: client to use.
        endpoints: endpoints of the members.
        timeout_s: time limit of each answer.

    Raises:
        StatusError, ConfigError: no leader was found, and an endpoint that may be the leader does not answer.
    """
    await client.fetch_token(timeout_s)

    async def ask(endpoint: str) -> tuple[str, rpc_pb2.StatusResponse | StatusError | ConfigError]:
        return endpoint, await outcome(client, endpoint, methods.STATUS, rpc_pb2.StatusRequest(), timeout_s)

    tasks = [asyncio.create_task(ask(endpoint)) for endpoint in endpoints]
    failure: StatusError | ConfigError | None = None
    try:
        for task in asyncio.as_completed(tasks):
            endpoint, answer = await task
            if not isinstance(answer, rpc_pb2.StatusResponse):
                failure = failure or answer
            elif answer.header.member_id == answer.leader:
                return endpoint, answer
    finally:
        for task in tasks:
            task.cancel()
    if failure is not None:
        raise failure
    return None


def details_of(error: StatusError | ConfigError) -> Sequence[str]:
    """Return the reasons why an endpoint did not answer, one per line; empty for an invalid endpoint."""
    return failed(error).details if isinstance(error, StatusError) else ()


async def _check_health(session: Session, endpoint: str, details: list[str]) -> EndpointHealth:
    """Check one endpoint; a member is healthy if it answers a linearizable read and has no alarm.

    A refused permission counts as an answer. The reasons of a failure are added to ``details``.
    """
    start_ns = time.monotonic_ns()
    try:
        async with Client([endpoint], session.options) as client:
            await _read_health_key(client, session.timeout_s)
            took = pflag.format_duration(time.monotonic_ns() - start_ns)
            return EndpointHealth(endpoint, *await _check_alarms(client, session.timeout_s, took))
    except (StatusError, ConfigError) as error:
        took = pflag.format_duration(time.monotonic_ns() - start_ns)
        details += details_of(error)
        return EndpointHealth(endpoint, False, took, str(error))


async def _read_health_key(client: Client, timeout_s: float) -> None:
    try:
        await client.call(methods.RANGE, rpc_pb2.RangeRequest(key=b"health"), timeout_s=timeout_s)
    except StatusError as error:
        if error.code != PERMISSION_DENIED:
            raise


async def _check_alarms(client: Client, timeout_s: float, took: str) -> tuple[bool, str, str]:
    try:
        answer = await client.call(methods.ALARM, rpc_pb2.AlarmRequest(), timeout_s=timeout_s)
    except StatusError:
        return False, took, "Unable to fetch the alarm list"
    if not answer.alarms:
        return True, took, ""
    names = "".join(_ALARM_NAMES.get(alarm.alarm, "UNKNOWN") + " " for alarm in answer.alarms)
    return False, took, f"Active Alarm(s): {names}"
