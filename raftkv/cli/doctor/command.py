"""The words of ``raftkv doctor``: what is looked at, how it is printed, the exit code.

Exit codes: 0 nothing is broken (there may be warnings), 1 something is, 2 a flag that cannot be read.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from raftkv.cli.daemons import daemon
from raftkv.cli.doctor import certificates, cluster, disk, judgement, machine
from raftkv.cli.doctor.judgement import Finding, Level, failure, ok, skipped, warning
from raftkv.cli.goflags.pflag import BOOL, Flag
from raftkv.cli.output.table import Rows, out, progress_bar
from raftkv.cli.program import BAD_FLAGS, ERROR, SUCCESS, CommandError
from raftkv.config import ServerConfig, TLSFiles
from raftkv.errors import RaftKVError

BACKUP_AGE_S: Final = 2 * 86_400.0
"""A warning tells of a last backup older than this."""

CLOCK_S: Final = 300.0
"""A warning tells of a last backup from further in the future than this: it would hide that backups have stopped."""

CLUSTER_TIME_S: Final = 20.0
"""Longest time for all questions to a cluster."""

FLAGS: Final = (
    Flag("config-file", usage="the member's own settings: directories, certificates, timing, addresses"),
    Flag("data-dir", usage="data directory of a member, stopped or not"),
    Flag("wal-dir", usage="directory of its log, if on its own disk"),
    Flag("endpoints", usage="members of a running cluster, comma-separated"),
    *daemon.CREDENTIALS,
    Flag("backup", usage="URL that raftkv backup writes to: when was the last one"),
    Flag("json", BOOL, usage="print JSON"),
)
_USAGE = """Usage:
  raftkv doctor [flags]    look at this machine, a data directory and a cluster, and say what to do

Without flags it looks at this machine, and at the cluster on 127.0.0.1:2379 if there is one.

Examples:
  raftkv doctor --config-file /etc/raftkv/raftkv.yml
  raftkv doctor --data-dir /var/lib/raftkv
  raftkv doctor --endpoints 10.0.0.1:2379,10.0.0.2:2379,10.0.0.3:2379 --backup s3://bucket/raftkv

Flags:"""
_STYLES: Final = {Level.OK: "green", Level.SKIPPED: "dim", Level.WARNING: "yellow", Level.FAILURE: "bold red"}
DEFAULT_ENDPOINT: Final = "127.0.0.1:2379"


def main(words: Sequence[str]) -> int:
    """Run ``raftkv doctor``.

    Arguments:
        words: the command line after ``doctor``.

    Returns:
        The exit code.

    Raises:
        CommandError: a flag cannot be used; one line.
    """
    parsed = daemon.parse(FLAGS, words, "doctor", _USAGE)
    if parsed is None:
        return SUCCESS
    values = parsed.values
    config = _config_of(values)
    found = list(_examine(_parts(values, config), hidden=values["json"]))
    if values["json"]:
        _print_json(found)
    else:
        _print_table(found)
    return ERROR if any(finding.level is Level.FAILURE for finding in found) else SUCCESS


def _config_of(values: dict[str, Any]) -> ServerConfig | None:
    """Return the settings of the member, if its file is given; only the file counts, as for a member."""
    if not values["config-file"]:
        return None
    from raftkv.cli.server.options import read_options

    try:
        return read_options([f"--config-file={values['config-file']}"], {}).config
    except CommandError as error:
        raise CommandError(str(error), BAD_FLAGS) from None


Part = tuple[str, Callable[[], list[Finding]]]


def _parts(values: dict[str, Any], config: ServerConfig | None) -> Iterator[Part]:
    """What is looked at, in this order."""
    yield "machine", machine.check_machine
    data_dir = values["data-dir"] or (config.data_dir if config else "")
    if data_dir:
        wal_dir = values["wal-dir"] or (config.wal_dir if config else "")
        yield "disk", lambda: disk.check_disk(data_dir, wal_dir)
    if config is not None:
        yield "certificates", lambda: certificates.check_certificates(config)
    files = TLSFiles(values["cert"], values["key"], trusted_ca_file=values["cacert"])
    if any(files.paths):
        yield "certificates", lambda: certificates.check_files("certificates of this client", files)
    if values["backup"]:
        yield "backup", lambda: [_check_backup(values["backup"])]
    endpoints = values["endpoints"] or (",".join(config.advertise_client_urls) if config else "")
    is_asked = bool(values["endpoints"])
    if endpoints or not data_dir:
        yield "cluster", lambda: _check_cluster(values, endpoints or DEFAULT_ENDPOINT, config, is_asked)


def _examine(parts: Iterator[Part], *, hidden: bool) -> Iterator[Finding]:
    every = list(parts)
    with progress_bar("looking", (), len(every), hidden=hidden) as update:
        for name, look in every:
            update(description=f"looking at the {name}", advance=1)
            try:
                yield from look()
            except OSError as error:
                yield skipped(name, f"{error.filename or ''} {error.strerror or error}".strip())


def _check_backup(url: str) -> Finding:
    from raftkv.cli.backup.place import Place

    subject, advice = "backup", "raftkv backup URL --every 1h, and look at its log"
    try:
        backups = Place(url).backups()
    except (RaftKVError, CommandError) as error:
        return failure(subject, " ".join(str(error).split()), advice)
    if not backups:
        return failure(subject, f"there is none in {url}", advice)
    age_s = time.time() - backups[-1].taken_s
    if age_s < -CLOCK_S:
        figure = f"the last of {len(backups)} was taken {-age_s / 3600:.1f} h from now"
        return warning(subject, figure, "set the clocks of this machine and of the one that takes the backups")
    figure = f"the last of {len(backups)} is {age_s / 3600:.1f} h old"
    return warning(subject, figure, advice) if age_s > BACKUP_AGE_S else ok(subject, figure)


def _check_cluster(
    values: dict[str, Any], endpoints: str, config: ServerConfig | None, is_asked: bool
) -> list[Finding]:
    """Ask a cluster. A member that does not run is a failure only if ``--endpoints`` was given."""
    from raftkv.client.library import connect

    async def ask() -> judgement.Picture:
        async with connect(endpoints.split(","), **daemon.connection(values)) as kv:
            async with asyncio.timeout(CLUSTER_TIME_S):
                return await cluster.ask(kv)

    try:
        picture = asyncio.run(ask())
    except TimeoutError:
        return [failure("cluster", f"no answer within {CLUSTER_TIME_S:g} s", "name members that run with --endpoints")]
    except RaftKVError as error:
        raise CommandError(" ".join(str(error).split()), BAD_FLAGS) from None
    if not is_asked and all(answer.status is None for answer in picture.answers):
        return [skipped("cluster", f"no member at {endpoints}: --endpoints names others")]
    return list(judgement.judge(picture, config))


def _print_json(found: list[Finding]) -> None:
    worst = max((finding.level for finding in found), default=Level.OK)
    lines = [
        {"subject": one.subject, "level": one.level.word, "figure": one.figure, "advice": one.advice} for one in found
    ]
    print(json.dumps({"level": (Level.OK if worst is Level.SKIPPED else worst).word, "findings": lines}, indent=1))


def _print_table(found: list[Finding]) -> None:
    rows = [(one.level.word, one.subject, one.figure, one.advice) for one in found]
    out(Rows(("", "subject", "found", "what to do"), rows, [_STYLES[one.level] for one in found]))
    counts = {level: sum(one.level is level for one in found) for level in (Level.WARNING, Level.FAILURE)}
    print(os.linesep.join(["", f"{counts[Level.FAILURE]} failures, {counts[Level.WARNING]} warnings"]))
