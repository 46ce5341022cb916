"""The page on deployment, typed as it stands on four machines of namespaces, each with a systemd of its own."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.machines import Machines
from tests.procs import PATIENCE_S, wait_for
from tests.test_documentation import EXPORT, ON_MACHINES, ROOT, blocks, clone

__all__ = ["clone"]
(PAGE,) = ON_MACHINES
HOSTS = [f"10.0.0.{number}" for number in (1, 2, 3, 4)]
DOWNLOADS = "downloads"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

pytestmark = pytest.mark.long


@pytest.fixture
def machines() -> Iterator[Machines]:
    # Not below /tmp, where the machines have a file system in memory of their own.
    place = ROOT / ".pytest_cache" / "machines"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    with Machines(place, HOSTS) as machines:
        yield machines
    shutil.rmtree(place)


def test_the_page_makes_a_cluster_that_is_used_grows_is_upgraded_and_shrinks(clone: Path, machines: Machines) -> None:
    environment = {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8"}
    for block in filter(lambda block: block.is_played, blocks(PAGE)):
        for command in block.commands:
            if exported := EXPORT.fullmatch(command):
                environment[exported[1]] = exported[2]
                continue
            done = machines.at_desk(command, clone, environment, outside=block.note == DOWNLOADS)
            journals = "".join(f"--- {host}\n{machines.journal(host)}" for host in HOSTS if done.returncode)
            assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}\n{journals}"
    check_left(machines, clone)
    check_hang(machines, clone)


def ask(machines: Machines, folder: Path, command: str) -> str:
    done = machines.at_desk(command, folder, {"PATH": PATH})
    return done.stdout.strip()


def check_left(machines: Machines, clone: Path) -> None:
    """The host that joined left with status 0, and was not started again; the killed member was."""
    shown = ask(machines, clone, "ssh root@10.0.0.4 systemctl show raftkv -p ExecMainStatus,Result,NRestarts").split()
    assert set(shown) == {"ExecMainStatus=0", "Result=success", "NRestarts=0"}
    assert "Main process exited, code=killed, status=9/KILL" in machines.journal("10.0.0.2")


QUICK = "[Service]\\nWatchdogSec=1s\\n"


def check_hang(machines: Machines, clone: Path) -> None:
    """A member that hangs is ended by the watchdog, leaves its stacks in the journal, and comes back."""
    host, folder = "ssh root@10.0.0.3", "/etc/systemd/system/raftkv.service.d"
    quick = f'mkdir -p {folder}; printf "{QUICK}" > {folder}/quick.conf; systemctl daemon-reload'
    ask(machines, clone, f"{host} '{quick}; systemctl restart raftkv'")
    before = ask(machines, clone, f"{host} systemctl show raftkv -p MainPID --value")
    assert ask(machines, clone, f"{host} systemctl show raftkv -p StatusText --value").endswith(":2379")
    ask(machines, clone, f"{host} kill -{int(signal.SIGSTOP)} {before}")

    def is_back() -> bool:
        words = ask(machines, clone, f"{host} systemctl show raftkv -p MainPID,ActiveState --value").split()
        return before not in words and "active" in words

    wait_for(is_back, "the watchdog", PATIENCE_S)
    journal = machines.journal("10.0.0.3")
    assert "Watchdog timeout" in journal
    assert "Fatal Python error: Aborted" in journal
