"""The setup of a raftkvctl command: settings from flags and ``ETCDCTL_*``, a client, a printer.

Follows etcdctl's rule for the environment: a variable counts if its flag is missing; if both are given, the command is
refused; an unknown variable only causes a note.

    session = open_session(invocation)
    session.show("get", methods.RANGE, request)
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from raftkv.cli import pflag
from raftkv.cli.command import Invocation
from raftkv.cli.pflag import quote
from raftkv.cli.printer import Printer, make_printer
from raftkv.cli.program import BAD_ARGUMENTS, BAD_CONNECTION, BAD_FEATURE, ERROR, CommandError, refused
from raftkv.client import Client, ClientOptions, Method
from raftkv.client.credentials import NO_SECRET, Secret, client_settings, file_settings, password_of
from raftkv.client.errors import (
    AuthenticationFailed,
    ConnectionLost,
    EndpointsFailed,
    MessageTooLarge,
    ReceivedTooLarge,
    WrongPort,
)
from raftkv.client.rpc.transport import tls_context
from raftkv.errors import (
    CODE_NAMES,
    CompactedError,
    ConfigError,
    ContextDeadlineExceededError,
    RaftKVError,
    StatusError,
    printable,
)

if TYPE_CHECKING:
    import ssl

    from google.protobuf.message import Message

    from raftkv.client import library


LOOKUP_TIMEOUT_S: Final = 5.0
"""Time limit of each of the two lookups of SRV records."""
_NO_DNSPYTHON: Final = "--discovery-srv needs the package dnspython: pip install 'raftkv[dns]'"


def discover(domain: str, service_name: str, *, insecure: bool, remark: Callable[[str], None]) -> list[str]:
    """Return the endpoints in the SRV records of a domain, like etcdctl's ``--discovery-srv``.

        _etcd-client-ssl._tcp.DOMAIN   ->  https://host:port
        _etcd-client._tcp.DOMAIN       ->  http://host:port, unless --insecure-discovery=false

    Records of one of the two services are enough. Each command looks them up again.

    Arguments:
        domain: domain of the records.
        service_name: suffix of both services' names, from ``--discovery-srv-name``; empty: none.
        insecure: whether to accept endpoints without TLS.
        remark: called for each refused endpoint.

    Raises:
        CommandError: neither service has records, or the lookup failed.
    """
    try:
        from dns.exception import DNSException
        from dns.resolver import NoAnswer, resolve
    except ImportError:
        raise CommandError(_NO_DNSPYTHON, ERROR) from None
    found: list[str] = []
    failures: list[str] = []
    for kind, scheme in (("etcd-client-ssl", "https"), ("etcd-client", "http")):
        service = f"{kind}-{service_name}" if service_name else kind
        name = f"_{service}._tcp.{domain}"
        try:
            answer = resolve(name, "SRV", lifetime=LOOKUP_TIMEOUT_S)
        except NoAnswer:
            failures.append(f"{name} has no SRV records")
        except (DNSException, OSError) as error:
            failures.append(f"lookup {name}: {str(error).rstrip('.')}")
        else:
            records = sorted(answer, key=lambda record: (record.priority, -record.weight))
            hosts = ((record.target.to_text(omit_final_dot=True), record.port) for record in records)
            found += [f"{scheme}://{host}:{port}" for host, port in hosts]
    if len(failures) == 2:
        raise CommandError(f"dns lookup errors: {failures[0]} and {failures[1]}", ERROR)
    if insecure:
        return found
    for endpoint in found:
        if endpoint.startswith("http://"):
            remark(f"ignoring discovered insecure endpoint {quote(endpoint)}")
    return [endpoint for endpoint in found if endpoint.startswith("https://")]


T = TypeVar("T")
M = TypeVar("M", bound="Message")

REFUSED_PATIENCE_S: Final = 0.5
"""Time for which commands that query each endpoint wait for one that refuses connections."""

ENVIRONMENT_PREFIX = "ETCDCTL_"
_FILE_FLAGS = {"cert_file": "cert", "key_file": "key", "ca_file": "cacert"}
_MAY_BE_SECRET = re.compile("PASS|TOKEN|SECRET|USER")
_SECRETS = ("password", "auth-jwt-token")


class Session:
    """A command's settings, printer and connection to the cluster."""

    def __init__(
        self, invocation: Invocation, connection: Mapping[str, Any], options: ClientOptions, printer: Printer
    ) -> None:
        self.endpoints: list[str] = list(invocation["endpoints"])
        self.connection = connection
        self.options = options
        self.printer = printer
        self.timeout_s: float = invocation["command-timeout"]

    def call(self, method: Method[M], request: Any, *, metadata: tuple[tuple[str, str], ...] = ()) -> M:
        """Call any endpoint.

        Arguments:
            method: method to call.
            request: request message.
            metadata: further metadata.

        Raises:
            CommandError: the call failed; the text is etcdctl's.
        """
        return self.run(lambda client: client.call(method, request, timeout_s=self.timeout_s, metadata=metadata))

    def show(self, command: str, method: Method[Any], request: Any, *facts: Any) -> None:
        """Call any endpoint and print the answer; ``command`` and ``facts`` are as for ``Printer.show``."""
        self.printer.show(command, self.call(method, request), *facts)

    def run(self, use: Callable[[Client], Awaitable[T]]) -> T:
        """Call a function with a client, which is closed afterwards.

        Arguments:
            use: function to call.

        Raises:
            CommandError: the cluster could not be used.
        """
        try:
            return asyncio.run(self._with_client(use))
        except AuthenticationFailed as error:
            raise failed(error.cause, BAD_CONNECTION) from None
        except StatusError as error:
            raise failed(error) from None
        except ConfigError as error:
            raise CommandError(str(error), BAD_CONNECTION) from None

    async def _with_client(self, use: Callable[[Client], Awaitable[T]]) -> T:
        async with Client(self.endpoints, self.options) as client:
            return await use(client)


def failed(error: StatusError, code: int = ERROR) -> CommandError:
    """Return the error for a failed call: etcdctl's line, then the endpoints that did not answer and the reasons.

    Arguments:
        error: error of the call.
        code: exit code of the program.
    """
    # A self-explanatory error already names the endpoints in its line.
    text = str(error)
    explained = text != ContextDeadlineExceededError.text
    details = unanswered(error.failures if isinstance(error, EndpointsFailed) and not explained else {})
    if isinstance(error, ConnectionLost):
        text, details = "rpc error: code = Unavailable desc = error reading from server: EOF", [text]
    elif isinstance(
        error, MessageTooLarge | ReceivedTooLarge | WrongPort
    ):  # not in etcd's table: etcdctl prints the frame
        text = f"rpc error: code = {CODE_NAMES[error.code]} desc = {text}"
    return CommandError(text, code, details)


def unanswered(failures: Mapping[str, str]) -> list[str]:
    """Return a line for each endpoint that did not answer."""
    return [f"no answer from {endpoint}: {reason}" for endpoint, reason in failures.items()]


def open_session(
    invocation: Invocation, *, value_only: bool = False, refused_patience_s: float | None = None
) -> Session:
    """Read all settings of a command, and choose its printer.

    Arguments:
        invocation: the command line.
        value_only: whether the simple format prints values without their keys.
        refused_patience_s: value of ``ClientOptions``, unless ``--command-timeout`` is given; None: the dial timeout.

    Raises:
        CommandError: settings conflict or cannot be used, or a word has no meaning for the command.
    """
    invocation.refuse_surplus()
    apply_environment(invocation)
    if invocation["debug"]:
        _print_settings(invocation)
    if invocation["discovery-srv"]:
        domain, name, insecure = (invocation[f] for f in ("discovery-srv", "discovery-srv-name", "insecure-discovery"))
        found = discover(domain, name, insecure=insecure, remark=remark)
        # If no endpoint with TLS was found, etcdctl uses --endpoints, whose default is another cluster.
        if not found and "endpoints" not in invocation.changed:
            raise CommandError("no endpoint with TLS was discovered", ERROR)
        invocation.values["endpoints"] = tuple(found) or invocation["endpoints"]
    connection = connection_settings(invocation, os.environ)
    options = client_options(invocation, connection)
    if "command-timeout" not in invocation.changed:
        patience_s = options.dial_timeout_s if refused_patience_s is None else refused_patience_s
        options = replace(options, refused_patience_s=patience_s)
    printer = make_printer(invocation["write-out"], hexadecimal=invocation["hex"], value_only=value_only)
    return Session(invocation, connection, options, printer)


def apply_environment(invocation: Invocation) -> None:
    """Apply ``ETCDCTL_*`` variables to settings that the command line does not contain.

    Raises:
        CommandError: a setting is given both ways.
    """
    names = {flag.variable: flag for flag in invocation.flags.values() if flag.variable}
    for key, text in sorted(os.environ.items()):
        if not key.startswith(ENVIRONMENT_PREFIX):
            continue
        flag = names.get(key)
        if flag is None:
            remark(f"unrecognized environment variable {key}={'***' if _MAY_BE_SECRET.search(key) else text}")
        elif flag.name in invocation.changed:
            raise CommandError(
                f"conflicting environment variable {key} is shadowed by corresponding command-line flag "
                "(either unset environment variable or disable flag)",
                ERROR,
            )
        elif text:
            _set_from_environment(invocation, flag, key, text)


def _set_from_environment(invocation: Invocation, flag: pflag.Flag, key: str, text: str) -> None:
    parsed = pflag.Parsed(invocation.values, invocation.changed)
    try:
        pflag.assign(parsed, flag, text)
    except ValueError as error:
        # etcdctl silently uses the default, and scripts may depend on it; this line is for people.
        remark(f"invalid value {pflag.quote(text)} for {key} is ignored: {error}")


def remark(text: str) -> None:
    """Print a note on standard error, without ending the command or acting on the terminal."""
    print(f"raftkvctl: {printable(text)}", file=sys.stderr, flush=True)


def _print_settings(invocation: Invocation) -> None:
    for flag in sorted(invocation.flags.values(), key=lambda flag: flag.variable):
        shown = flag.written(invocation[flag.name])
        if flag.name == "user":
            name, separator, _ = shown.partition(":")
            shown = f"{name}:***" if separator else shown
        elif flag.name in _SECRETS and shown:
            shown = "***"
        if flag.variable:
            print(f"{flag.variable}={shown}", file=sys.stderr)


def client_options(invocation: Invocation, connection: Mapping[str, Any]) -> ClientOptions:
    """Return the connection settings of the global flags.

    Arguments:
        invocation: the command line.
        connection: identity of the client; see ``connection_settings``.

    Raises:
        CommandError: certificates cannot be used.
    """
    for name in ("cert", "key", "cacert"):
        if name in invocation.changed and not invocation[name]:
            raise CommandError(f"empty string is passed to --{name} option", BAD_ARGUMENTS)
    return ClientOptions(
        tls=_tls_context(invocation, connection),
        # The certificate must name the domain, because forged SRV records could name any host.
        server_name="" if invocation["insecure-discovery"] else invocation["discovery-srv"],
        user=connection.get("user", ""),
        password=connection.get("password", NO_SECRET),
        token=connection.get("token", NO_SECRET),
        # As in etcdctl, 0 and less mean the library's default.
        dial_timeout_s=invocation["dial-timeout"] if invocation["dial-timeout"] > 0 else ClientOptions.dial_timeout_s,
        keepalive_time_s=invocation["keepalive-time"],
        keepalive_timeout_s=invocation["keepalive-timeout"],
        max_request_bytes=invocation["max-request-bytes"] or ClientOptions.max_request_bytes,
        max_response_bytes=invocation["max-recv-bytes"] or ClientOptions.max_response_bytes,
    )


def connection_settings(invocation: Invocation, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return user, secrets and files as arguments of ``connect``, from the flags or from ``RAFTKV_USER`` and the like.

    Arguments:
        invocation: the command line.
        environment: environment, for settings missing on the command line.

    Raises:
        CommandError: the settings conflict.
    """
    user, password = invocation["user"], Secret(invocation["password"])
    token = Secret(invocation["auth-jwt-token"])
    files = {name: invocation[flag] for name, flag in _FILE_FLAGS.items() if invocation[flag]}
    if user and token:
        raise CommandError("--auth-jwt-token and --user exclude each other: give one", BAD_ARGUMENTS)
    with refused(ConfigError, BAD_ARGUMENTS):
        if user and not password:
            user, separator, inline = user.partition(":")
            known = Secret(inline) if separator else password_of(user, environment)
            password = known if known or separator else Secret(ask_password("Password: "))
        if user and not password:
            user = ""  # as in etcdctl: there is no login without a password
        given = {"user": user, "password": password, "token": token} if user or token else {}
        found = file_settings(environment) if given or invocation["user"] else client_settings(environment)
    if files:
        found = {name: value for name, value in found.items() if name not in _FILE_FLAGS}
    return found | files | given


def ask_password(prompt: str) -> str:
    """Prompt on the terminal without echo; without a terminal, read a line of standard input.

    Arguments:
        prompt: text of the prompt.

    Returns:
        The password; empty at the end of the input (Ctrl-D).
    """
    import getpass

    if not sys.stdin.isatty():
        print(prompt, end="", flush=True)
        line = sys.stdin.readline()
        print(flush=True)
        return line.rstrip("\n")
    try:
        return getpass.getpass(prompt)
    except EOFError:
        print(file=sys.stderr)
        return ""


def _tls_context(invocation: Invocation, connection: Mapping[str, Any]) -> ssl.SSLContext | None:
    cert, key, authorities = (connection.get(name, "") for name in _FILE_FLAGS)
    verify = not invocation["insecure-skip-tls-verify"]
    # This flag does not add TLS to an endpoint without a scheme; for an https endpoint it disables the verification.
    unverified = not verify and any(endpoint.startswith("https://") for endpoint in invocation["endpoints"])
    if not (cert or key or authorities or unverified) and invocation["insecure-transport"]:
        return None
    if bool(cert) != bool(key):
        raise CommandError(f"KeyFile and CertFile must both be present[key: {key}, cert: {cert}]", BAD_ARGUMENTS)
    with refused(OSError, BAD_ARGUMENTS, "cannot use the certificates: {}"):
        return tls_context(authorities, cert, key, verify=verify)


# Commands that etcdctl does not have use the client library. They print tables for people, and JSON with ``--json`` or
# ``-w json``.


def open_library(invocation: Invocation) -> tuple[Session, bool]:
    """Return the session of a command, and whether to print JSON.

    Raises:
        CommandError: a setting cannot be used, or the output format is one that only etcdctl's commands have.
    """
    wanted = invocation["write-out"]
    if wanted not in ("simple", "table", "json"):
        raise CommandError(f"{wanted} not supported as output format", BAD_FEATURE)
    session = open_session(invocation)
    session.options = replace(session.options, explain=True)
    return session, invocation["json"] or wanted == "json"


def use_library(session: Session, use: Callable[[library.Client], Awaitable[T]]) -> T:
    """Call a function with the library's client; report each failure as one line.

    Arguments:
        session: session of the command.
        use: function to call.

    Raises:
        CommandError: the function failed.
    """
    from raftkv.client import library
    from raftkv.client.errors import HistoryReplaced

    async def with_library(core: Client) -> T:
        try:
            async with library.open_scope(core, session.timeout_s) as scope:
                return await use(library.Client(scope))
        except HistoryReplaced as error:
            raise CommandError(f"the display stopped: {error}; start it again", ERROR) from None
        except CompactedError:
            raise CommandError("the history was compacted while it was read; try again", ERROR) from None
        except StatusError:
            raise
        except RaftKVError as error:
            raise CommandError(str(error), BAD_ARGUMENTS if isinstance(error, ConfigError) else ERROR) from None

    return session.run(with_library)
