"""``run grant``, ``run revoke`` and ``run access``: which user may take part in which training runs.

    raftkvctl run grant alice 'bert-*' --cluster gpu --dataset imagenet
        role run:bert-*             reads and writes the keys of these runs and their checkpoints, and no others
        role cluster:gpu            reads and writes the ledger of the slots that runs share
        role dataset-read:imagenet  reads the manifests of a dataset

Owns what a run needs (``needs``). The roles are ordinary ones: ``raftkvctl role get`` shows them. Each command may be
repeated; a role that has more or less than it should is put right.

Roles do not separate what runs share. A user with the role of a cluster may change what its ledger says of other teams'
runs, and so delay or stop them, but cannot read or change their keys or checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from raftkv.checkpoint import keys as checkpoint_keys
from raftkv.cli.goflags.command import Invocation
from raftkv.cli.library import open_library, use_library
from raftkv.cli.output.table import Rows, out
from raftkv.cli.program import BAD_ARGUMENTS, CommandError
from raftkv.client.admin import Permission, interval
from raftkv.client.library import Client
from raftkv.dataset import keys as dataset_keys
from raftkv.errors import (
    ConfigError,
    PermissionNotGrantedError,
    RoleAlreadyExistError,
    RoleNotFoundError,
    RoleNotGrantedError,
)
from raftkv.integrations.horovod import ROOT as HOROVOD_ROOT
from raftkv.integrations.torchft.rules import ROOT as TORCHFT_ROOT
from raftkv.training.keys import CLUSTER_ROOT, STORE_ROOT, check_cluster, check_run_id
from raftkv.training.keys import ROOT as RUN_ROOT
from raftkv.training.tcpstore.gateway import ROOT as TCPSTORE_ROOT

RUN, RUN_READ, CLUSTER, CLUSTER_READ, DATASET_READ = "run", "run-read", "cluster", "cluster-read", "dataset-read"
_ROOT_ROLE: Final = "root"


@dataclass(frozen=True)
class Pattern:
    """One name, or all that begin alike: ``bert-7``, ``bert-*``.

    Attributes:
        text: as it was given.
        stem: without the star.
        is_prefix: whether it had one.
    """

    text: str
    stem: str
    is_prefix: bool

    @classmethod
    def of_runs(cls, text: str) -> Pattern:
        """Read the runs of a command line.

        Raises:
            ConfigError: no run can have such a name.
        """
        pattern = cls(text, text.removesuffix("*"), text.endswith("*"))
        if "*" in pattern.stem:
            raise ConfigError(f"{text!r}: a star stands at the end alone, for all runs that begin so")
        check_run_id(f"{pattern.stem}x" if pattern.is_prefix else pattern.stem)
        return pattern

    def below(self, root: str, *, quoted: bool = False) -> tuple[bytes, bytes]:
        """Return the interval of what lies below the names under a root.

        Arguments:
            root: before the names.
            quoted: as the registry of checkpoints writes them.
        """
        stem = quote(self.stem, safe="") if quoted else self.stem
        return interval(f"{root}{stem}{'' if self.is_prefix else '/'}", prefix=True)


def needs(runs: Pattern, *, read_only: bool = False) -> list[Permission]:
    """Return what a user of these runs needs, of the store as a whole.

    Arguments:
        runs: which.
        read_only: to look, not to take part.
    """
    kind = "read" if read_only else "readwrite"
    intervals = [
        runs.below(RUN_ROOT),
        runs.below(f"{checkpoint_keys.ROOT}run/", quoted=True),
        runs.below(checkpoint_keys.LATEST, quoted=True),
        *(runs.below(root) for root in (HOROVOD_ROOT, STORE_ROOT, TCPSTORE_ROOT, TORCHFT_ROOT)),
    ]
    return [Permission(kind, *one) for one in intervals]


def roles_of(
    runs: Pattern, clusters: Sequence[str], datasets: Sequence[str], *, read: bool
) -> dict[str, list[Permission]]:
    """Return the roles of a grant, and what each may do.

    Arguments:
        runs: which.
        clusters, datasets: what they share with others.
        read: to look, not to take part.

    Raises:
        ConfigError: a name cannot be one.
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
    """Make a role that has exactly these permissions; an existing one is changed.

    Arguments:
        kv: client of a user who may change roles.
        role: its name.
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
            await _ignore_missing(kv, role, one)
    for one in wanted:
        if one not in have:
            await kv.roles.grant(role, one.kind, one.key, one.range_end)


async def _ignore_missing(kv: Client, role: str, permission: Permission) -> None:
    try:
        await kv.roles.revoke(role, permission.key, permission.range_end)
    except PermissionNotGrantedError:
        return  # another command has revoked it


def grant(invocation: Invocation) -> None:
    """Let a user take part in runs."""
    user, roles = _wanted(invocation, "grant")
    session, as_json = open_library(invocation)

    async def change(kv: Client) -> None:
        await kv.users.get(user)  # before anything is made
        for role, permissions in roles.items():
            await put_right(kv, role, permissions)
            await kv.users.grant_role(user, role)

    use_library(session, change)
    _tell(as_json, user, roles, "has")


def revoke(invocation: Invocation) -> None:
    """Take runs from a user; a role without users is deleted."""
    user, roles = _wanted(invocation, "revoke")
    session, as_json = open_library(invocation)

    async def change(kv: Client) -> None:
        for role in roles:
            try:
                await kv.users.revoke_role(user, role)
            except RoleNotGrantedError:
                continue
        left = {role for name in await kv.users.list() for role in await kv.users.get(name)}
        for role in roles:
            if role not in left:
                await _delete(kv, role)

    use_library(session, change)
    _tell(as_json, user, roles, "no longer has")


async def _delete(kv: Client, role: str) -> None:
    try:
        await kv.roles.delete(role)
    except RoleNotFoundError:
        return


def access(invocation: Invocation) -> None:
    """Print who may take part in which runs; with RUN who may read or change that run, by any role."""
    if len(invocation.arguments) > 1:
        raise CommandError("run access takes the id of one run, or none", BAD_ARGUMENTS)
    session, as_json = open_library(invocation)
    run = invocation.arguments[0] if invocation.arguments else ""
    rows = use_library(session, lambda kv: _rows(kv, run))
    if as_json:
        print(json.dumps([dict(zip(("user", "role", "rights"), row, strict=True)) for row in rows]))
    else:
        out(Rows(("user", "role", "rights"), rows))


async def _rows(kv: Client, run: str) -> list[tuple[str, str, str]]:
    rights: dict[str, str] = {}
    try:
        keys = needs(Pattern.of_runs(run)) if run else []
    except ConfigError as error:
        raise CommandError(str(error), BAD_ARGUMENTS) from None
    for role in await kv.roles.list():
        permissions = await kv.roles.get(role)
        if not run and role.partition(":")[0] in (RUN, RUN_READ, CLUSTER, CLUSTER_READ, DATASET_READ):
            rights[role] = permissions[0].kind if permissions else "nothing"
        elif touching := {one.kind for one in permissions if any(_touches(one, other) for other in keys)}:
            rights[role] = "readwrite" if len(touching) > 1 else touching.pop()
    if run:
        rights[_ROOT_ROLE] = "everything"
    return [
        (user, role, rights[role])
        for user in await kv.users.list()
        for role in sorted(await kv.users.get(user))
        if role in rights
    ]


def _touches(permission: Permission, keys: Permission) -> bool:
    end = permission.range_end or permission.key + b"\0"
    return permission.key < keys.range_end and (permission.is_open_ended or end > keys.key)


def _wanted(invocation: Invocation, word: str) -> tuple[str, dict[str, list[Permission]]]:
    if len(invocation.arguments) != 2:
        raise CommandError(f"run {word} needs a user and runs, as in: run {word} alice 'bert-*'", BAD_ARGUMENTS)
    user, text = invocation.arguments
    try:
        runs = Pattern.of_runs(text)
        return user, roles_of(runs, invocation["cluster"], invocation["dataset"], read=invocation["read"])
    except ConfigError as error:
        raise CommandError(str(error), BAD_ARGUMENTS) from None


def _tell(as_json: bool, user: str, roles: Iterable[str], verb: str) -> None:
    if as_json:
        print(json.dumps({"user": user, "roles": list(roles)}))
    else:
        print(f"user {user} {verb} {', '.join(roles)}")
