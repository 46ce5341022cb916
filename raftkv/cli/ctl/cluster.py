"""``endpoint health|status|hashkv``.

Owns the commands that look at each endpoint on its own: one that does not answer is named on standard error, the
others are printed, and the exit code is 1.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

from raftkv.cli.ctl.session import Session, failed, open_session
from raftkv.cli.goflags import values as govalues
from raftkv.cli.goflags.command import Invocation
from raftkv.cli.output.printer import EndpointAnswer, EndpointHealth
from raftkv.cli.program import ERROR, CommandError
from raftkv.client import Client, Method
from raftkv.client.rpc import methods
from raftkv.errors import PERMISSION_DENIED, ConfigError, StatusError
from raftkv.pb import rpc_pb2

_ALARM_NAMES = {rpc_pb2.NOSPACE: "NOSPACE", rpc_pb2.CORRUPT: "CORRUPT"}


def endpoint_status(invocation: Invocation) -> None:
    """Print the status of every endpoint."""
    session = open_session(invocation)
    answers, errors = _ask_each(session, invocation, methods.STATUS, rpc_pb2.StatusRequest(), "status")
    session.printer.endpoint_status(answers)
    if errors:
        raise CommandError("", ERROR)


def endpoint_hashkv(invocation: Invocation) -> None:
    """Print the history hash of every endpoint."""
    session = open_session(invocation)
    revision = invocation["rev"]
    answers, errors = _ask_each(session, invocation, methods.HASH_KV, rpc_pb2.HashKVRequest(revision=revision), "hash")
    session.printer.endpoint_hashkv(answers)
    if errors:
        raise CommandError(errors[-1], ERROR)


def endpoint_health(invocation: Invocation) -> None:
    """Tell for every endpoint whether it can commit, and which alarms are on."""
    session = open_session(invocation)
    endpoints = endpoints_of(session, invocation)
    details: list[str] = []

    async def check_all() -> list[EndpointHealth]:
        return list(await asyncio.gather(*(_check_health(session, endpoint, details) for endpoint in endpoints)))

    answers = asyncio.run(check_all())
    session.printer.endpoint_health(answers)
    if any(answer.error for answer in answers):
        raise CommandError("unhealthy cluster", ERROR, sorted(details))


def endpoints_of(session: Session, invocation: Invocation) -> list[str]:
    """Return the endpoints of the command, or with ``--cluster`` those that the cluster lists.

    Raises:
        CommandError: the cluster does not say who its members are.
    """
    if not invocation["cluster"]:
        return session.endpoints
    try:
        members = session.call(methods.MEMBER_LIST, rpc_pb2.MemberListRequest(linearizable=True))
    except CommandError as error:
        text = f"failed to fetch endpoints from etcd cluster member list: {error}"
        raise CommandError(text, ERROR, error.details) from None
    return [url for member in members.members for url in member.clientURLs]


def _ask_each(
    session: Session,
    invocation: Invocation,
    method: Method[Any],
    request: Any,
    what: str,
) -> tuple[list[EndpointAnswer], list[str]]:
    """Call each endpoint, in order; name failures on standard error."""
    answers: list[EndpointAnswer] = []
    errors: list[str] = []
    endpoints = endpoints_of(session, invocation)

    async def ask(client: Client) -> None:
        for endpoint in endpoints:
            try:
                response = await client.call_at(endpoint, method, request, timeout_s=session.timeout_s)
            except (StatusError, ConfigError) as error:
                errors.append(str(error))
                print(f"Failed to get the {what} of endpoint {endpoint} ({error})", file=sys.stderr)
                for line in details_of(error):
                    print(f"raftkvctl: {line}", file=sys.stderr)
            else:
                answers.append(EndpointAnswer(endpoint, response))

    session.run(ask)
    return answers, errors


def details_of(error: StatusError | ConfigError) -> Sequence[str]:
    """Return the reasons why an endpoint did not answer, a line each; none for one that is no endpoint."""
    return failed(error).details if isinstance(error, StatusError) else ()


async def _check_health(session: Session, endpoint: str, details: list[str]) -> EndpointHealth:
    """Check one endpoint: healthy is a member that answers a linearizable read and has no alarm.

    A refused permission is an answer, too. Reasons of a failure are added to ``details``.
    """
    start_ns = time.monotonic_ns()
    try:
        async with Client([endpoint], session.options) as client:
            await _read_health_key(client, session.timeout_s)
            took = govalues.format_duration(time.monotonic_ns() - start_ns)
            return EndpointHealth(endpoint, *await _check_alarms(client, session.timeout_s, took))
    except (StatusError, ConfigError) as error:
        took = govalues.format_duration(time.monotonic_ns() - start_ns)
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
