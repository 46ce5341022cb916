"""``raftkvctl run``: training runs on the command line.

Commands observe runs (list, show, queue, timeline, watch, metrics), delete them, manage access to them, or take part in
a run with any command as its workers (exec). ``run_view`` collects the output of ``show`` (with the reason for every
waiting node), and formats runs as tables and as JSON.

The data comes from ``raftkv.training.history`` and ``raftkv.training.scheduling.ledger``; workers are managed by
``raftkv.training.process``.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar
from urllib.parse import quote

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from raftkv.checkpoint import keys as checkpoint_keys
from raftkv.cli import run_view
from raftkv.cli.command import Invocation
from raftkv.cli.ctl.session import Session, open_library, open_session, remark, use_library
from raftkv.cli.program import BAD_ARGUMENTS, ERROR, CommandError, on_signals, refused
from raftkv.cli.run_view import read_facts
from raftkv.cli.table import count, tell
from raftkv.client.admin import Permission, interval
from raftkv.client.control import ClientControl
from raftkv.client.credentials import announce_settings
from raftkv.client.library import Client
from raftkv.client.local import free_port
from raftkv.client.operations import Compare, Delete, lease_of
from raftkv.client.records import RecordError, number_in
from raftkv.dataset import keys as dataset_keys
from raftkv.errors import (
    ConfigError,
    PermissionDeniedError,
    PermissionNotGrantedError,
    RoleAlreadyExistError,
    RoleNotFoundError,
    RoleNotGrantedError,
)
from raftkv.integrations.horovod import ROOT as HOROVOD_ROOT
from raftkv.integrations.torchft.rules import ROOT as TORCHFT_ROOT
from raftkv.rpc.server.http import HttpRequest, HttpResponse, refuse_host, text_response
from raftkv.rpc.server.server import Server
from raftkv.training.config import RunConfig, guess_address, parse_options
from raftkv.training.errors import UnknownRun
from raftkv.training.history import RunHistory, follow, list_runs, read_history, read_progress
from raftkv.training.metrics import Exporter
from raftkv.training.process.environment import parse_styles
from raftkv.training.process.output import Console, Destinations, Output, make_directory, parse_ranks, parse_streams
from raftkv.training.process.prefork import count_options
from raftkv.training.process.supervisor import PORTS_FIELD, Settings, Supervisor, WorkerStartError
from raftkv.training.records import (
    CLUSTER_ROOT,
    GATHERING,
    RUNNING,
    STORE_ROOT,
    RunKeys,
    check_cluster,
    check_run_id,
)
from raftkv.training.records import ROOT as RUN_ROOT
from raftkv.training.rendezvous.participant import Participant, Progress, waiting
from raftkv.training.scheduling.ledger import ClusterAdmission, ClusterView, describe_cluster, list_clusters
from raftkv.training.tcpstore.gateway import ROOT as TCPSTORE_ROOT
from raftkv.urls import join_address, parse_endpoints, split_address


def list_all(invocation: Invocation) -> None:
    """Print every run."""
    session, as_json = open_library(invocation)
    runs = use_library(session, list_runs)
    tell(as_json, [run_view.summary_to_plain(one) for one in runs], run_view.runs_table(runs))


def show(invocation: Invocation) -> None:
    """Print the current state of one run."""
    (run_id,) = invocation.given()
    session, as_json = open_library(invocation)
    facts = use_library(session, lambda kv: read_facts(kv, run_id))
    tell(as_json, facts.to_plain(), lambda: run_view.show(facts))


def queue(invocation: Invocation) -> None:
    """Print the runs that hold slots of a shared cluster, and the runs that wait for slots."""
    session, as_json = open_library(invocation)

    async def read(kv: Client) -> tuple[list[ClusterView], list[str]]:
        views, damaged = list[ClusterView](), list[str]()
        for name in invocation.arguments or await list_clusters(kv):
            try:
                views.append(await describe_cluster(kv, name))
            except RecordError as error:  # every run of that cluster may write it
                damaged.append(f"cluster {name!r}: {error}")
        return views, damaged

    views, damaged = use_library(session, read)
    if views or not damaged:
        tell(as_json, [view.to_plain() for view in views], lambda: run_view.queues(views))
    if damaged:
        raise CommandError(f"{'; '.join(damaged)}; delete its ledger, and every run claims its slots anew", ERROR)


def timeline(invocation: Invocation) -> None:
    """Print the events of one run."""
    (run_id,) = invocation.given()
    session, as_json = open_library(invocation)

    async def read(kv: Client) -> RunHistory:
        return await read_progress(kv, await read_history(kv, run_id))

    history = use_library(session, read)
    tell(as_json, history.to_plain(), lambda: run_view.timeline(history))


def watch(invocation: Invocation) -> None:
    """Print the events of one run as they happen."""
    (run_id,) = invocation.given()
    session, as_json = open_library(invocation)

    async def print_changes(kv: Client) -> None:
        narrator = run_view.Narrator()
        async for change, fold in follow(kv, run_id):
            for line in narrator.lines(change, fold):
                tell(as_json, line, partial(run_view.emit, line))

    async def until_interrupted(kv: Client) -> None:
        printing = asyncio.ensure_future(print_changes(kv))
        with on_signals(printing.cancel), suppress(asyncio.CancelledError):
            await printing

    use_library(session, until_interrupted)


# -- deleting -------------------------------------------------------------------------------------------------------
#
# ``run delete``: deletes the records of one run.

PARTS: Final = ("boot/", "deny/", "fault/", "node/", "round/", "store/", "strike/", "sync/")
"""Parts of a run besides ``arbiter``, ``round`` and ``state``. They are deleted one by one, because other runs may have
the same prefix (``jobs/a`` below ``jobs``)."""
_HOROVOD_GENERATION: Final = re.compile(r"(\d{12}/)(?:key|done)/")


def delete(invocation: Invocation) -> None:
    """Delete all records of one run."""
    (run_id,) = invocation.given()
    session, as_json = open_library(invocation)

    async def alive(kv: Client) -> int:
        keys = RunKeys(check_run_id(run_id))
        record = await kv.get_many([key for key, _ in keys.record.parts])
        if not any(record) and not await kv.count(keys.nodes, prefix=True):
            raise UnknownRun(run_id)
        return await _count_nodes(kv, run_id)

    async def forget(kv: Client) -> int:
        # Each arriving node ensures that there is an arbiter. So if there is none, no node has arrived since ``alive``.
        deleted = await _delete(kv, run_id, [] if invocation["force"] else [lease_of(RunKeys(run_id).arbiter) == 0])
        if deleted is None:
            raise CommandError(_in_use(run_id, await _count_nodes(kv, run_id)), ERROR)
        return deleted

    nodes = use_library(session, alive)
    if nodes and not invocation["force"]:
        raise CommandError(_in_use(run_id, nodes), ERROR)
    present = f", in which {nodes} nodes are alive," if nodes else ""
    if not _is_confirmed(invocation, f"Delete run {run_id!r}{present} with its generations and faults?"):
        raise CommandError(f"run {run_id!r} was not deleted", ERROR)
    deleted = use_library(session, forget)
    told = f"run {run_id!r} is deleted: {count(deleted, 'key')}"
    tell(as_json, {"run": run_id, "deleted": deleted}, told)


async def _count_nodes(kv: Client, run_id: str) -> int:
    """Count the present nodes; a key without a lease is no node's."""
    return sum([item.lease != 0 async for item in kv.scan(RunKeys(run_id).nodes, prefix=True)])


def _in_use(run_id: str, nodes: int) -> str:
    are = "1 node is" if nodes == 1 else f"{nodes} nodes are"
    return f"{are} alive in run {run_id!r}: end them first, or give --force"


def _is_confirmed(invocation: Invocation, question: str) -> bool:
    if invocation["yes"]:
        return True
    if not sys.stdin.isatty():
        raise CommandError("there is no terminal to confirm it on: give --yes", BAD_ARGUMENTS)
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


# ---- the keys


async def _delete(kv: Client, run_id: str, conditions: Sequence[Compare]) -> int | None:
    """Delete the keys of a run, and return their number; None: a condition does not hold.

    Slots that a dead run still holds go to others: no run that may see that it is dead may wait for them.
    """
    keys = RunKeys(run_id)
    deleted: int = await _delete_horovod(kv, run_id, conditions)  # first: once the run is gone, the next may begin
    operations = [Delete(keys.base + part, prefix=True) for part in PARTS]
    operations += [Delete(key) for key in (keys.arbiter, keys.round, keys.state)]
    done = await kv.txn().when(*conditions).then(*operations).commit()
    if not done.succeeded:
        return None
    if cluster := run_view.find_cluster(run_id, await run_view.read_ledgers(kv)):
        with suppress(PermissionDeniedError):
            await ClusterAdmission(ClientControl(kv), cluster).release(run_id, guards=[keys.deserted])
    deleted += sum(result.deleted for result in done.results)
    return deleted


async def _delete_horovod(kv: Client, run_id: str, conditions: Sequence[Compare]) -> int:
    """Delete the keys of Horovod workers, because the next run with this id reuses the same generations."""
    root, deleted = f"{HOROVOD_ROOT}{run_id}/", 0
    generations = set()
    with suppress(PermissionDeniedError):  # a user of runs may lack permission for Horovod's keys
        async for item in kv.scan(root, prefix=True, keys_only=True):
            if found := _HOROVOD_GENERATION.match(item.key.decode(errors="replace"), len(root)):
                generations.add(found[1])
        for generation in generations:
            done = await kv.txn().when(*conditions).then(Delete(f"{root}{generation}", prefix=True)).commit()
            deleted += sum(result.deleted for result in done.results)
    return deleted


# -- access ---------------------------------------------------------------------------------------------------------
#
# ``run grant`` and ``run revoke``: which users may take part in which training runs.
#
#     raftkvctl run grant alice 'bert-*' --cluster gpu --dataset imagenet
#         role run:bert-*             reads and writes the keys of these runs and their checkpoints, and no others
#         role cluster:gpu            reads and writes the ledger of the slots that runs share
#         role dataset-read:imagenet  reads the manifests of a dataset
#
# Defines the permissions that a run needs (``needs``). The roles are ordinary ones: ``raftkvctl role get`` shows them.
# Each command may be repeated; a role with too many or too few permissions is corrected.
#
# Roles do not isolate shared resources. A user with the role of a cluster may change its ledger for other teams' runs,
# and so delay or stop them, but cannot read or change their keys or checkpoints.

RUN, RUN_READ, CLUSTER, CLUSTER_READ, DATASET_READ = "run", "run-read", "cluster", "cluster-read", "dataset-read"


@dataclass(frozen=True)
class Pattern:
    """One name, or all names with a prefix: ``bert-7``, ``bert-*``.

    Attributes:
        text: text as given.
        stem: text without the star.
        is_prefix: whether the text had a star.
    """

    text: str
    stem: str
    is_prefix: bool

    @classmethod
    def of_runs(cls, text: str) -> Pattern:
        """Parse the runs of a command line.

        Raises:
            ConfigError: not a valid run name.
        """
        pattern = cls(text, text.removesuffix("*"), text.endswith("*"))
        if "*" in pattern.stem:
            raise ConfigError(f"{text!r}: a star stands at the end alone, for all runs that begin so")
        check_run_id(f"{pattern.stem}x" if pattern.is_prefix else pattern.stem)
        return pattern

    def below(self, root: str) -> tuple[bytes, bytes]:
        """Return the key range of these names, and of all names below them, below a root."""
        return interval(f"{root}{self.stem}{'' if self.is_prefix else '/'}", prefix=True)

    def quoted_below(self, root: str) -> list[tuple[bytes, bytes]]:
        """Return the same as ``below`` where names are quoted, as in the registry of checkpoints: the slash too."""
        ends = ("",) if self.is_prefix else ("/", quote("/", safe=""))
        return [interval(f"{root}{quote(self.stem, safe='')}{end}", prefix=True) for end in ends]


def needs(runs: Pattern, *, read_only: bool = False) -> list[Permission]:
    """Return the permissions that a user of these runs needs on the whole store.

    Arguments:
        runs: the runs.
        read_only: whether the user only observes the runs.
    """
    kind = "read" if read_only else "readwrite"
    intervals = [
        runs.below(RUN_ROOT),
        *runs.quoted_below(f"{checkpoint_keys.ROOT}run/"),
        *runs.quoted_below(checkpoint_keys.LATEST),
        *(runs.below(root) for root in (HOROVOD_ROOT, STORE_ROOT, TCPSTORE_ROOT, TORCHFT_ROOT)),
    ]
    return [Permission(kind, *one) for one in intervals]


def roles_of(
    runs: Pattern, clusters: Sequence[str], datasets: Sequence[str], *, read: bool
) -> dict[str, list[Permission]]:
    """Return the roles of a grant, and the permissions of each.

    Arguments:
        runs: the runs.
        clusters, datasets: shared resources that the runs use.
        read: whether the user only observes the runs.

    Raises:
        ConfigError: an invalid name.
    """
    roles = {f"{RUN_READ if read else RUN}:{runs.text}": needs(runs, read_only=read)}
    for cluster in clusters:
        shared = interval(f"{CLUSTER_ROOT}{check_cluster(cluster)}/", prefix=True)
        name = f"{CLUSTER_READ if read else CLUSTER}:{cluster}"
        roles[name] = [Permission("read" if read else "readwrite", *shared)]
    for name in datasets:
        base = dataset_keys.DatasetKeys(dataset_keys.check_name("dataset", name)).base
        roles[f"{DATASET_READ}:{name}"] = [Permission("read", *interval(base, prefix=True))]
    return roles


async def put_right(kv: Client, role: str, wanted: Sequence[Permission]) -> None:
    """Create a role with exactly these permissions, or correct an existing one.

    Arguments:
        kv: client of a user who may change roles.
        role: name of the role.
        wanted: its permissions.
    """
    try:
        have = await kv.roles.get(role)
    except RoleNotFoundError:
        have = []
        try:
            await kv.roles.add(role)
        except RoleAlreadyExistError:
            have = await kv.roles.get(role)
    for one in have:
        if (one.key, one.range_end) not in {(other.key, other.range_end) for other in wanted}:
            with suppress(PermissionNotGrantedError):  # another command has revoked it
                await kv.roles.revoke(role, one.key, one.range_end)
    for one in wanted:
        if one not in have:
            await kv.roles.grant(role, one.kind, one.key, one.range_end)


def grant(invocation: Invocation) -> None:
    """Grant a user access to runs."""
    user, roles = _wanted(invocation)
    session, as_json = open_library(invocation)

    async def change(kv: Client) -> None:
        await kv.users.get(user)  # fail before anything is created
        for role, permissions in roles.items():
            await put_right(kv, role, permissions)
            await kv.users.grant_role(user, role)

    use_library(session, change)
    tell(as_json, {"user": user, "roles": list(roles)}, f"user {user} has {', '.join(roles)}")


def revoke(invocation: Invocation) -> None:
    """Revoke a user's access to runs; a role without users is deleted."""
    user, roles = _wanted(invocation)
    session, as_json = open_library(invocation)

    async def change(kv: Client) -> None:
        for role in roles:
            with suppress(RoleNotGrantedError):
                await kv.users.revoke_role(user, role)
        left = {role for name in await kv.users.list() for role in await kv.users.get(name)}
        for role in roles:
            if role not in left:
                with suppress(RoleNotFoundError):
                    await kv.roles.delete(role)

    use_library(session, change)
    tell(as_json, {"user": user, "roles": list(roles)}, f"user {user} no longer has {', '.join(roles)}")


def _wanted(invocation: Invocation) -> tuple[str, dict[str, list[Permission]]]:
    user, text = invocation.given()
    with refused(ConfigError, BAD_ARGUMENTS):
        runs = Pattern.of_runs(text)
        return user, roles_of(runs, invocation["cluster"], invocation["dataset"], read=invocation["read"])


# -- metrics --------------------------------------------------------------------------------------------------------
#
# ``run metrics``: serves metrics of training runs and checkpoints to Prometheus, until it is stopped.
#
# Handles the address and the HTTP answers; the metric families are in ``raftkv.training.metrics``. It watches with the
# client's credentials, so its user needs permission to read runs and checkpoints.

_METRICS: Final = (("content-type", CONTENT_TYPE_LATEST),)


def serve(invocation: Invocation) -> None:
    """Serve until SIGINT or SIGTERM arrives."""
    host, port = _address(invocation["listen"])
    interval_s = invocation["interval"]
    if interval_s <= 0:
        raise CommandError("--interval must be above 0", BAD_ARGUMENTS)
    session = open_session(invocation)
    session.options = replace(session.options, explain=True)

    async def until_interrupted(kv: Client) -> None:
        stop = asyncio.Event()
        async with Exporter(kv, interval_s) as exporter:
            server = Server(http_handler=lambda request: answer(exporter, request))
            try:
                bound = await server.listen(host, port)
            except OSError as error:
                why = error.strerror or error
                raise CommandError(f"cannot listen on {invocation['listen']}: {why}") from None
            remark(f"metrics of runs and checkpoints: http://{join_address(*bound[0])}/metrics")
            try:
                with on_signals(stop.set):
                    await stop.wait()
            finally:
                await server.close()

    use_library(session, until_interrupted)


async def answer(exporter: Exporter, request: HttpRequest) -> HttpResponse:
    """Answer one request.

    Arguments:
        exporter: exporter of the metrics.
        request: request of Prometheus, or of a probe.
    """
    if (refusal := refuse_host(request)) is not None:
        return refusal
    if request.path not in ("/metrics", "/health"):
        return text_response(404, "404 page not found")
    if request.method != "GET":
        return text_response(405, "Method Not Allowed")
    if request.path == "/health":
        return text_response(200, "ok")
    return HttpResponse(200, generate_latest(exporter.registry), _METRICS)


def _address(text: str) -> tuple[str, int]:
    try:
        return split_address(text)
    except ValueError:
        raise CommandError(f"--listen {text}: want HOST:PORT, as 127.0.0.1:9379", BAD_ARGUMENTS) from None


# -- exec -----------------------------------------------------------------------------------------------------------
#
# ``run exec``: take part in a run as a node, with any command as its workers.
#
# Handles the command line and the signals; ``raftkv.training.process.supervisor`` does the work.

Value = TypeVar("Value")

PASSED_ON: Final = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals forwarded to the workers; they end nothing here, unless ``--signals-to-handle`` names them."""
_UNUSABLE: Final = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD)
KEEPALIVE_TIME_S: Final = 10.0


def execute(invocation: Invocation) -> None:
    """Join the run, run the workers, and exit with their exit code."""
    command = tuple(invocation.arguments)
    if not command:
        text = "run exec needs a command, as in: run exec --job j --nnodes 2:4 -- python train.py"
        raise CommandError(text, BAD_ARGUMENTS)
    session = open_session(invocation)
    session.options = replace(session.options, explain=True, keepalive_time_s=KEEPALIVE_TIME_S)
    console = Console()
    try:
        config, settings = _read(invocation, session, command, console)
        code = use_library(session, lambda kv: _take_part(kv, config, settings))
    finally:
        console.close()
    if code:
        raise CommandError("", code)


def _read(
    invocation: Invocation, session: Session, command: tuple[str, ...], console: Console
) -> tuple[RunConfig, Settings]:
    with refused(ConfigError, BAD_ARGUMENTS):
        config = _config(invocation, session)
        settings = _settings(invocation, session, command, console)
        return config, replace(settings, output=Output(console, _destinations(invocation, config, settings)))


def parse_nodes(text: str) -> tuple[int, int]:
    """Parse the minimum and the maximum of ``--nnodes``.

    >>> parse_nodes("2:4"), parse_nodes("3")
    ((2, 4), (3, 3))

    Raises:
        ConfigError: the text is neither one number nor two.
    """
    words = text.split(":")
    least, most = number_in(words[0]), number_in(words[-1])
    if least is None or most is None or len(words) > 2:
        raise ConfigError(f"--nnodes is a number or MIN:MAX, not {text!r}")
    return least, most


def parse_signals(text: str) -> tuple[signal.Signals, ...]:
    """Parse the signals of ``--signals-to-handle``.

    >>> [one.name for one in parse_signals("SIGTERM, SIGUSR1")]
    ['SIGTERM', 'SIGUSR1']

    Raises:
        ConfigError: a signal does not exist or cannot be handled.
    """
    named = {one.name: one for one in signal.Signals if one not in _UNUSABLE}
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in named:
            raise ConfigError(f"--signals-to-handle is a list of signals, as in SIGTERM,SIGUSR1, without {name!r}")
    return tuple(named[name] for name in names)


def _config(invocation: Invocation, session: Session) -> RunConfig:
    if not invocation["job"]:
        raise ConfigError("--job is missing: the id of the run, the same on all of its nodes")
    pairs = (pair.partition("=") for pair in invocation["conf"])
    fields: dict[str, Any] = parse_options({name.strip(): value.strip() for name, _, value in pairs})
    fields["slots"] = invocation["nproc-per-node"]
    if invocation["node-name"]:
        fields["host"] = invocation["node-name"]
    fewest, most = parse_nodes(invocation["nnodes"])
    address = invocation["local-addr"] or guess_address(parse_endpoints(session.endpoints))
    return RunConfig(run_id=invocation["job"], min_nodes=fewest, max_nodes=most, address=address, **fields).checked()


def _destinations(invocation: Invocation, config: RunConfig, settings: Settings) -> Destinations:
    chosen = {name: _parsed(invocation, name, parse_streams) for name in ("redirects", "tee")}
    base, asked = invocation["log-dir"], {invocation[name] for name in chosen} != {""}
    directory = None
    if base or asked:
        try:
            directory = make_directory(base, config.run_id)
        except OSError as error:
            raise ConfigError(f"--log-dir: {error.filename}: {(error.strerror or str(error)).lower()}") from None
        settings.tell(f"logs are in {directory}")
    if base and not asked:
        chosen["tee"] = parse_streams("3")
    shown = _parsed(invocation, "local-ranks-filter", parse_ranks)
    return Destinations(directory, **chosen, shown=shown, prefixed=not invocation["no-prefix"])


def _parsed(invocation: Invocation, name: str, parse: Callable[[str], Value]) -> Value:
    try:
        return parse(invocation[name] or ("0" if parse is parse_streams else ""))
    except ConfigError as error:
        raise ConfigError(f"--{name} {error}") from None


def _settings(invocation: Invocation, session: Session, command: tuple[str, ...], console: Console) -> Settings:
    # Into a pipe, Python would print in blocks of some KiB, and logs would be minutes late.
    inherited = {"PYTHONUNBUFFERED": "1", **os.environ}
    announce_settings(session.connection, inherited)
    return Settings(
        command=command,
        max_restarts=invocation["max-restarts"],
        stop_grace_s=invocation["stop-grace"],
        stop_signals=parse_signals(invocation["signals-to-handle"]),
        styles=parse_styles(invocation["env-style"]),
        endpoints=tuple(session.endpoints),
        inherited=inherited,
        prefork=_prefork(invocation["prefork"], command),
        tell=lambda text: None if invocation["quiet"] else console.tell(text),
    )


def _prefork(modules: Sequence[str], command: tuple[str, ...]) -> tuple[str, ...]:
    if modules:
        try:
            count_options(command)
        except ValueError as error:
            raise ConfigError(f"--prefork: {error}") from None
    return tuple(modules)


async def _take_part(kv: Client, config: RunConfig, settings: Settings) -> int:
    ports = ",".join(str(free_port()) for _ in range(config.slots)) if "tf" in settings.styles else ""
    data = {PORTS_FIELD: ports} if ports else {}
    participant = await Participant.open(
        kv, config, data=data, on_progress=lambda one: _tell_progress(settings, one), on_trouble=waiting(settings.tell)
    )
    supervisor = Supervisor(kv, participant, settings)
    loop = asyncio.get_running_loop()
    handled = dict.fromkeys(PASSED_ON, supervisor.pass_on)
    handled |= dict.fromkeys(settings.stop_signals, supervisor.stop)
    for number, handle in handled.items():
        loop.add_signal_handler(number, handle, number)
    try:
        return await supervisor.run()
    except WorkerStartError as error:
        raise CommandError(str(error), error.code) from None
    finally:
        for number in handled:
            loop.remove_signal_handler(number)


def _tell_progress(settings: Settings, progress: Progress) -> None:
    if progress.damage:
        settings.tell(f"waiting: {progress.damage}")
        return
    if progress.phase == RUNNING:
        settings.tell(f"generation {progress.generation} runs without this node: waiting for a place")
        return
    because = f" after: {progress.reason}" if progress.reason and progress.phase != GATHERING else ""
    limits = f"{progress.min_nodes}:{progress.max_nodes}"
    settings.tell(f"gathering{because}: {progress.joined} ready, {limits} wanted")
