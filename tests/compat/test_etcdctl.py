"""Two etcdctl that other people wrote, run on three members of etcd 3.5.1 and of raftkv: the same outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from tests.compat.ctl import Outcome, Target, Tool
from tests.long import long_except
from tests.procs import ETCD_FAST, RAFTKV, Cluster

TOOLS = {"debian-3.4": Tool.debian, "distro-3.5.1": Tool.distro}
CAS_FAILS = 'value("a") = "nothing"\n\nput a won\n\nget a\nput b lost\n\n'
CAS_WORKS = 'version("a") > "0"\nvalue("b") = "lost"\n\nput a won\nget b\ndel c\n\nget a\n\n'
NO_COMPARES = "\nput d 1\nget d\n\n\n"
BAD_COMPARE = 'size("a") = "1"\n\n\n\n'
DUPLICATE = "\nput a 1\nput a 2\n\n\n"


@dataclass(frozen=True)
class Command:
    """One command line and what goes to its standard input."""

    words: tuple[str, ...]
    standard_input: str = ""


def command(line: str, standard_input: str = "") -> Command:
    """Split at blanks; `''` stands for an empty argument."""
    return Command(tuple("" if word == "''" else word for word in line.split()), standard_input)


WRITES = [
    command("put a 1"), command("put a 2 --prev-kv"), command("put b two"), command("put c", "from standard input"),
    command("put d/1 x ALL"), command("put d/2 y ALL"), command("put a --ignore-value --prev-kv"),
    command("put missing --ignore-value"), command("put a 1 --ignore-value"), command("put a 1 --lease=7b"),
    command("put '' x"), command("put"),
]  # fmt: skip
READS = [
    command("get a"),
    command("get a c"),
    command("get missing"),
    command("get d/ --prefix"),
    command("get '' --prefix ALL"),
    command("get b --from-key"),
    command("get '' --from-key --limit=2"),
    command("get '' --prefix --order=DESCEND"),
    command("get '' --prefix --sort-by=MODIFY --order=DESCEND --limit=3"),
    command("get '' --prefix --sort-by=CREATE"),
    command("get '' --prefix --keys-only"),
    command("get '' --prefix --count-only"),
    command("get a --print-value-only"),
    command("get a --consistency=s"),
    command("get a --consistency=x"),
    command("get a --rev=2"),
    command("get a --rev=100000"),
    command("get a --hex"),
    command("get ''"),
    command("get z a"),
]
TXNS = [
    command("txn", CAS_FAILS),
    command("txn ALL", CAS_WORKS),
    command("txn -i", CAS_WORKS),
    command("txn", NO_COMPARES),
    command("txn", BAD_COMPARE),
    command("txn", DUPLICATE),
]
DELETIONS = [
    command("del c"),
    command("del missing"),
    command("del d/ --prefix --prev-kv"),
    command("del ''"),
    command("put d/1 again"),
]
COMPACTIONS = [
    command("compaction 4"), command("compaction 4"), command("compaction 5 --physical"),
    command("compaction 100000"), command("compaction x"), command("get a --rev=2"), command("get a --rev=5"),
]  # fmt: skip
CLUSTER = [
    command("member list"),
    command("member list ALL"),
    command("endpoint status"),
    command("endpoint status ALL"),
    command("endpoint health"),
    command("endpoint health ALL"),
    command("endpoint hashkv"),
    command("endpoint hashkv ALL"),
    command("alarm list"),
    command("member add"),
    command("member add x"),
    command("member add x --peer-urls=nonsense"),
    command("member remove 1234"),
    command("member remove zz"),
    command("member update 1234 --peer-urls=http://127.0.0.1:1"),
    command("member update 1234"),
    command("member promote 1234"),
]
LEASES = [
    command("lease grant 5000"), command("lease grant 5000 ALL"), command("lease grant x"),
    command("lease grant 9999999999999"), command("lease list"), command("lease timetolive 7b"),
    command("lease timetolive 7b --keys"), command("lease keep-alive --once 7b"), command("lease keep-alive 7b"),
    command("lease revoke 7b"), command("put a 1 --lease=7b"),
]  # fmt: skip
# A command that fails ends a watch after the first changes, without a signal that would have to wait for them.
WATCHES = [
    command("put w/1 one"),
    command("put w/2 two"),
    command("del w/1"),
    command("watch w/2 --rev=2 -- false"),
    command("watch w/ --prefix --rev=2 -- false"),
    command("watch w/ --prefix --rev=2 --prev-kv ALL -- false"),
    command("watch w/2 --rev=2 -- no-such-program"),
    command("watch w/2 w/1"),
    command("watch"),
    command("watch w/ x --prefix"),
    command("watch -i", "nonsense\n"),
]
LOCKS = [
    command("lock l echo held"), command("lock l ALL echo held"), command("lock l false"),
    command("lock l no-such-program"), command("lock l env -i ETCD_LOCK_KEY=l/0 env"), command("lock"),
    command("elect l"), command("get l --prefix"),
]  # fmt: skip
# Locks come last: their keys hold ids of leases, and then the hashes of the two histories differ.
SCRIPTS = {
    "simple": [*WRITES, *READS, *TXNS, *DELETIONS, *LEASES, *WATCHES, *COMPACTIONS, *CLUSTER, *LOCKS],
    "json": [*WRITES, *READS, *TXNS, *DELETIONS, *LEASES, *WATCHES, *CLUSTER, *LOCKS],
}
"""By format of the output: `json` shows every field of an answer, so `fields` and `table` could show no more."""


@pytest.fixture
def targets() -> Iterator[tuple[Target, Target]]:
    """Three members of each program, new."""
    with Cluster(ETCD_FAST, size=3) as etcd, Cluster(RAFTKV, size=3) as raftkv:
        yield Target.of(etcd), Target.of(raftkv)


def differences(
    tool: Tool, targets: Sequence[Target], commands: Sequence[Command], output_format: str
) -> Iterator[str]:
    """Run every command on both targets and yield a text for each one whose outcomes differ."""

    def play(target: Target, step: Command) -> Outcome:
        return tool.run(target, [*step.words, "-w", output_format], step.standard_input)

    with ThreadPoolExecutor(len(targets)) as pool:
        for step in commands:
            expected, got = pool.map(lambda target, step=step: play(target, step), targets)
            if expected != got:
                heading = f"etcdctl -w {output_format} {' '.join(step.words)}"
                yield f"{heading}\n=== etcd: {expected.describe()}\n=== raftkv: {got.describe()}"


@pytest.mark.parametrize(
    ("name", "output_format"),
    long_except([("debian-3.4", "json"), ("distro-3.5.1", "simple")], {("debian-3.4", "json")}),
)
def test_outputs_are_the_same(targets: tuple[Target, Target], name: str, output_format: str) -> None:
    found = list(differences(TOOLS[name](), targets, SCRIPTS[output_format], output_format))
    assert found == [], "\n\n".join(found)
